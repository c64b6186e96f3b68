"""Decisions about blobs, and the link that carries them out as two queues with a clock.

Covers: what flow can decide, the rates of a link, and how long copies take on it, alone and beside each other.
Does not cover: which decision to take (flow.py, scheduling.py), or real copies (engine.py).
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class CopyOut(NamedTuple):
    """Start copying the blob to the tier; the device tensor stays."""

    blob: int


class Release(NamedTuple):
    """Drop the device tensor; compute waits first for a copy of the blob that is still under way."""

    blob: int


class Reload(NamedTuple):
    """Start copying the blob back; whoever uses it waits for that copy."""

    blob: int


Decision: TypeAlias = CopyOut | Release | Reload


@dataclass(frozen=True, kw_only=True)
class Link:
    """Rates between a device and a tier in GB/s (1e9 bytes): each way alone, and both ways together."""

    d2h_gbps: float
    h2d_gbps: float
    both_gbps: float

    def is_like(self, other: "Link", *, share: float) -> bool:
        """Say whether no rate of the other link differs by more than this share."""
        pairs = ((self.d2h_gbps, other.d2h_gbps), (self.h2d_gbps, other.h2d_gbps), (self.both_gbps, other.both_gbps))
        return all(abs(one - two) <= share * one for one, two in pairs)

    def slower(self, factor: float) -> "Link":
        """Return the link at this part of its rates."""
        return Link(d2h_gbps=self.d2h_gbps * factor, h2d_gbps=self.h2d_gbps * factor, both_gbps=self.both_gbps * factor)


class Wire:
    """Both directions of a link as two queues with a clock: a copy has the whole lane, two lanes share what the link can do together."""

    def __init__(self, link: Link) -> None:
        self.now = 0.0  # ms
        self.bytes_out = 0
        self.bytes_in = 0
        shared = min(1.0, link.both_gbps / (link.d2h_gbps + link.h2d_gbps))
        self._alone = (link.d2h_gbps * 1e6, link.h2d_gbps * 1e6)  # bytes per ms
        self._both = (self._alone[0] * shared, self._alone[1] * shared)
        self.out_ms = 1 / self._both[0]  # ms per byte beside traffic the other way
        self.in_ms = 1 / self._both[1]
        self._out = _Lane()
        self._in = _Lane()

    def copy_out(self, item: int, num_bytes: int) -> None:
        """Queue a copy to the tier."""
        self.bytes_out += num_bytes
        self._out.append(item, num_bytes)

    def copy_in(self, item: int, num_bytes: int) -> None:
        """Queue a copy from the tier; it starts after the item's copy to the tier."""
        self.bytes_in += num_bytes
        self._in.append(item, num_bytes)

    def play(self, decision: Decision, num_bytes: int) -> float:
        """Carry out a decision; return the time at which compute goes on."""
        item = decision.blob
        if isinstance(decision, CopyOut):
            self.copy_out(item, num_bytes)
        elif isinstance(decision, Reload):
            self.copy_in(item, num_bytes)
        else:
            self.wait_in(item)
            self.wait_out(item)
        return self.now

    def leaving(self, item: int) -> bool:
        """Say whether the item's copy to the tier is still under way."""
        return item in self._out.items

    def coming(self, item: int) -> bool:
        """Say whether the item's copy from the tier is still under way."""
        return item in self._in.items

    def queue_out(self) -> list[int]:
        """Return the items on their way to the tier, first come first."""
        return [item for item, _ in self._out.queue]

    def backlog_out(self) -> float:
        """Return the ms that the queue to the tier will still take."""
        return self._out.left * self.out_ms

    def backlog_in(self) -> float:
        """Return the ms that the queue from the tier will still take."""
        return self._in.left * self.in_ms

    def eta_in(self, item: int) -> float:
        """Return the ms until the item's copy from the tier ends."""
        behind = 0
        for each, num_bytes in reversed(self._in.queue):
            if each == item:
                break
            behind += num_bytes
        return (self._in.left - behind) * self.in_ms

    def wait_out(self, item: int) -> float:
        """Let time pass until the item's copy to the tier has ended."""
        while item in self._out.items:
            self._pass(math.inf)
        return self.now

    def wait_in(self, item: int) -> float:
        """Let time pass until the item's copy from the tier has ended."""
        while item in self._in.items:
            self._pass(math.inf)
        return self.now

    def advance(self, until: float) -> float:
        """Let time pass until then."""
        while self.now < until:
            if self._out.queue or self._in.queue:
                self._pass(until)
            else:
                self.now = until
        return self.now

    def _pass(self, until: float) -> None:
        """Let time pass until then, or until one of the copies at the head ends if that is sooner."""
        goes = bool(self._out.queue)
        comes = bool(self._in.queue) and self._in.queue[0][0] not in self._out.items
        out_rate, in_rate = self._both if goes and comes else self._alone
        span = until - self.now
        if goes:
            span = min(span, self._out.head_left / out_rate)
        if comes:
            span = min(span, self._in.head_left / in_rate)
        self.now += span
        if goes:
            self._out.move(span * out_rate)
        if comes:
            self._in.move(span * in_rate)


class _Lane:
    """One direction: copies in order, and how far the first of them has got."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, int]] = deque()  # (item, bytes)
        self.items: dict[int, int] = {}  # how often each is in the queue
        self.left = 0.0  # bytes of the whole queue that have not moved
        self.head_left = 0.0  # and of the copy at its head

    def append(self, item: int, num_bytes: int) -> None:
        if not self.queue:
            self.head_left = num_bytes
            self.left = 0.0
        self.queue.append((item, num_bytes))
        self.items[item] = self.items.get(item, 0) + 1
        self.left += num_bytes

    def move(self, num_bytes: float) -> None:
        self.left -= num_bytes
        self.head_left -= num_bytes
        if self.head_left < 1:  # of a byte: rounding
            item, _ = self.queue.popleft()
            self.items[item] -= 1
            if not self.items[item]:
                del self.items[item]
            self.head_left = self.queue[0][1] if self.queue else 0.0
            if not self.queue:
                self.left = 0.0
