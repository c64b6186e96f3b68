"""What is known of a step before it is played: times, uses, and the moments at which the host is busy.

Covers: a learned step by item and by event.
Does not cover: playing it against the link (scheduling.py).
"""

import math
from collections.abc import Sequence

from backhaul.steps import Step

BUSY_MS = 1.0  # of compute after a read of the host, in which it has better things to do than to issue copies: the device waits for it


class Table:
    """A step by item and by event: what every play of it needs to know."""

    def __init__(self, step: Step, gaps: Sequence[float], reads: Sequence[int]) -> None:
        self.step = step
        self.gaps = gaps
        self.reads = reads
        self.saves, self.needs = step.index()
        self.at = [0.0]  # by event: ms since the step began, were there no stalls
        for gap in gaps:
            self.at.append(self.at[-1] + gap)
        num_events = len(step.events)
        self.since: list[float] = []  # by event: when the host read last
        self.free_at = [0.0] * num_events  # by event: when the next one comes at which the host is not busy after a read
        self._find_free_moments()
        self.drops: dict[int, list[int]] = {}
        for item, event in enumerate(step.drops):
            self.drops.setdefault(min(event, num_events), []).append(item)
        self.alive = []  # by event: bytes that would be resident if nothing moved
        movable = 0
        for position, event in enumerate(step.events):
            movable -= sum(step.sizes[item] for item in self.drops.get(position, ()))
            movable += step.sizes[event] if event >= 0 else 0
            self.alive.append(movable + step.fixed[position])
        peaks = zip(self.alive, (*self.alive[1:], 0), range(num_events), strict=True)
        self.peaks = [position for alive, after, position in peaks if alive >= after]
        frames: dict[int, list[tuple[float, int]]] = {}
        for item, (ordinal, _) in enumerate(step.names):
            end = self.needs[item][0] if self.needs[item] else num_events
            frames.setdefault(ordinal, []).append((self.at[self.saves[item]] - self.at[end], item))
        self.is_one_pass = len(frames) == 1
        # In one pass, the first event after all has been saved; before it the loss needs memory of which nothing is known here.
        self.turn = 1 + max(self.saves, default=-1) if self.is_one_pass else 0
        self.depth = [math.inf] * len(step.names)  # by item: the share of its frame's bytes that live longer
        for items in frames.values():
            total = sum(step.sizes[item] for _, item in items)
            longer = 0
            for _, item in sorted(items):
                self.depth[item] = longer / (total or 1)
                longer += step.sizes[item]

    def _find_free_moments(self) -> None:
        since, reads = -math.inf, set(self.reads)
        for position, at in enumerate(self.at[:-1]):
            since = at if position in reads else since
            self.since.append(since)
        free_at = self.at[-1]
        for position in range(len(self.since) - 1, -1, -1):
            self.free_at[position] = free_at
            if not self.is_busy(position):
                free_at = self.at[position]

    def is_busy(self, position: int) -> bool:
        """Say whether the host has just read from the device, which has nothing to do until the host goes on."""
        return self.at[position] - self.since[position] < BUSY_MS
