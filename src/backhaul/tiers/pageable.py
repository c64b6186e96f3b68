"""Ordinary host memory as a tier.

Covers: copies to and from memory that is not page-locked.
Does not cover: page-locked memory, which is faster and runs beside compute (host.py).

A copy to or from pageable memory occupies the host until it has ended. So it is made at once, on the current stream, and nothing is ever
on its way.
"""

import threading
from collections import deque

import torch
from torch import Tensor

from backhaul.tiers.base import Slot, Tier, TierFull
from backhaul.tiers.host import Ended
from backhaul.tiers.limits import host_memory_budget


class _PageableSlot(Slot):
    __slots__ = ("data",)

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, Ended())
        self.data: Tensor | None = None


class PageableHost(Tier):
    """Host memory that stays pageable: for machines where page-locked memory is wanted for something else. Slow, and never beside compute.

    It takes what the host and the container can spare.

    >>> tier = PageableHost()
    >>> slot = tier.store(torch.arange(5, dtype=torch.uint8))
    >>> back = torch.empty(5, dtype=torch.uint8)
    >>> tier.load(slot, back).wait()
    >>> back.tolist(), tier.used_bytes, tier.pageable_bytes
    ([0, 1, 2, 3, 4], 5, 5)
    """

    name = "host"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freed: deque[_PageableSlot] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._pageable_bytes = 0

    def store(self, source: Tensor) -> Slot:
        """Copy ``source`` into host memory."""
        self._take_back_freed()
        room = host_memory_budget().num_bytes
        if source.nbytes > room:
            raise TierFull(f"the host can spare {room} bytes of memory, and {source.nbytes} are wanted")
        slot = _PageableSlot(source.nbytes)
        slot.data = torch.empty(source.nbytes, dtype=torch.uint8).copy_(source)
        with self._lock:
            self._used_bytes += slot.num_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            self._pageable_bytes += slot.num_bytes
        return slot

    def load(self, slot: Slot, target: Tensor) -> Ended:
        """Copy the slot's bytes into ``target``."""
        assert isinstance(slot, _PageableSlot) and slot.data is not None
        target.copy_(slot.data)
        return Ended()

    def free(self, slot: Slot) -> None:
        """Give the bytes back when the tier is next used."""
        assert isinstance(slot, _PageableSlot)
        self._freed.append(slot)

    @property
    def used_bytes(self) -> int:
        """Bytes held by slots that have not been freed."""
        self._take_back_freed()
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ``used_bytes`` has been."""
        return self._peak_bytes

    @property
    def capacity_bytes(self) -> None:
        """Nothing but the host limits it."""
        return None

    @property
    def pageable_bytes(self) -> int:
        """Bytes stored so far: all of them."""
        return self._pageable_bytes

    def _take_back_freed(self) -> None:
        while True:
            try:
                slot = self._freed.popleft()
            except IndexError:
                return
            with self._lock:
                if slot.data is not None:
                    slot.data = None
                    self._used_bytes -= slot.num_bytes
