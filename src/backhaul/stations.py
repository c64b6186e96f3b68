"""What an engine knows of each device.

Covers: the device's flow and clock, the compute streams seen there, and when memory may be dropped ([Note: Whose memory]).
Does not cover: what is decided (flow.py), or what is copied (engine.py).

[Note: Whose memory]
Memory goes back to the pool of the stream it was allocated on, and that stream may use it again at once. With one compute stream it is
enough that this stream waits for the copy before the memory is dropped: what reads it was issued there, or will be before anybody gets it.
Where another pool owns the memory, or more compute streams than one have been seen, waiting on the current stream binds nobody else. Then
it is held until nobody else has it, so that every kernel that reads it has been launched (an operation saves its inputs before it launches
the kernel that reads them, and a local variable may read on much later), and then until all compute streams have passed that point.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.flow import Flow, Link
from backhaul.sizes import format_bytes
from backhaul.tiers.base import Tier, Transfer
from backhaul.tiers.pools import in_current_pool
from backhaul.tiers.streams import current_stream
from backhaul.timing import Timeline, Waits, clock_of

RATE_CHANGE = 0.03  # a smaller change of the tier's speed is no reason to plan again
DUPLEX = 0.91  # of both directions' rates is left, at best, where both are in use: 100.5 of 55.2 + 55.5 GB/s on an H200, PCIe 5 x16


class Station:
    """One device of a handle."""

    def __init__(self, device: torch.device, activation_budget: int | None) -> None:
        self.device = device
        self.activation_budget = activation_budget
        self.clock = clock_of(device)
        self.streams: dict[int, torch.Stream] = {}  # compute streams seen, by id
        self.dropped: list[UntypedStorage] = []  # held until nobody else has it, and then
        self.limbo: deque[tuple[list[Any], list[UntypedStorage]]] = deque()  # until the streams have passed these points
        self.flow = Flow(activation_budget=activation_budget)
        self.timeline = Timeline(self.clock)
        self.waits = Waits(self.clock, self.timeline)
        self._earlier_peak = 0
        self._budget_is_met = False

    @property
    def peak_resident_bytes(self) -> int:
        """The most saved bytes that were on the device."""
        return max(self._earlier_peak, self.flow.peak_resident_bytes)

    def check_budget(self, kept: str) -> None:
        """Refuse a budget that cannot be met, once, when the first step has shown what has to stay: a later step may just be longer."""
        budget, fixed = self.activation_budget, self.flow.peak_immovable_bytes
        if budget and fixed > budget and not self._budget_is_met:
            raise ValueError(
                f"activation_budget={format_bytes(budget)} is below the {format_bytes(fixed)} of saved tensors on {self.device} that "
                f"cannot be moved ({kept}); give that at least, lower min_bytes, or use 0 to move all that can move"
            )
        self._budget_is_met = True

    def measure(self, tier: Tier, *, only_if_new: bool) -> None:
        """Tell flow.py how fast the tier is, and when the device reached each event of the last step, as far as that is known."""
        if only_if_new and self.flow.predicted_stall_ms is not None:
            return
        rates, duplex = tier.rates_gbps, tier.duplex_gbps
        if rates is not None:
            together = DUPLEX * sum(rates)
            link = Link(d2h_gbps=rates[0], h2d_gbps=rates[1], both_gbps=together if duplex is None else min(together, duplex))
            if not self.flow.link.is_like(link, share=RATE_CHANGE):
                self.flow.link = link
        times = self.timeline.finished()
        if times is not None:
            self.flow.times(*times)

    def plan(self, tier: Tier) -> None:
        """Have the next step planned, now that this one is through and the device still at work on it."""
        self.measure(tier, only_if_new=False)
        self.flow.refine()

    def start_anew(self) -> None:
        """Forget what was learned. Nothing that was counted may be alive."""
        self._earlier_peak = self.peak_resident_bytes
        num_steps = self.flow.num_steps
        self.flow = Flow(activation_budget=self.activation_budget)
        self.flow.num_steps = num_steps
        self.timeline.end_step(learned=False)

    def current_stream(self) -> torch.Stream | None:
        """Return the current stream, and remember it as one that computes; ``None`` on a device without streams."""
        stream = current_stream(self.device)
        return None if stream is None else self.streams.setdefault(stream.stream_id, stream)

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Return a context in which ``stream``, one that has been seen here, is the current one."""
        return nullcontext() if stream is None or stream is self.current_stream() else stream

    def wait_to_drop(self, copy: Transfer, source: Tensor) -> None:
        """Order what follows after ``copy``, so that ``source`` may be dropped ([Note: Whose memory])."""
        self.current_stream()
        if len(self.streams) <= 1 and (self.device.type == "cpu" or in_current_pool(source)):
            self.waits.measure(copy, copy.wait)
        else:
            self.waits.measure(copy, copy.order)
            self.dropped.append(source.untyped_storage())

    def let_go(self) -> None:
        """Let go of dropped memory that nobody can be reading any more. Call before anything else is done."""
        if self.dropped:
            unread = [storage for storage in self.dropped if _torch.num_owners(storage) == 1]
            if unread:
                self.limbo.append(([stream.record_event() for stream in self.streams.values()], unread))
                self.dropped = [storage for storage in self.dropped if all(storage is not other for other in unread)]
        while self.limbo and all(event.query() for event in self.limbo[0][0]):
            self.limbo.popleft()

    def hold(self, storage: UntypedStorage) -> None:
        """Keep the storage until nobody can be reading it any more."""
        if not self.holds(storage):
            self.dropped.append(storage)

    def holds(self, storage: UntypedStorage) -> bool:
        """Say whether the storage is alive because it is held here."""
        return any(storage is other for held in (self.dropped, *(each for _, each in self.limbo)) for other in held)

    def mark(self) -> None:
        """Stamp the event that flow.py has just recorded, if it has."""
        if self.timeline.is_watched and self.flow.num_events > self.timeline.num_marks:
            self.timeline.mark()
