"""Page-locked host memory as a tier.

Covers: one arena of page-locked slabs for each device of the process ([Note: Host arena]), pageable memory where locking is refused.
Does not cover: which bytes are free (arena.py), how copies run (lanes.py), what slabs are made of (slabs.py), what is offloaded (flow.py).

[Note: Host arena]
Page-locking is slow, so it is done by the slab and kept: 1 GiB of huge pages, touched in parallel, placed next to the device, registered
once. Blocks are cut from slabs and given back to them by all ``PinnedHost`` tiers of the process, which share the arena of a device.
``release_host_memory`` is how slabs go back to the system.

A freed block is taken again at once. Who writes to it next comes after the copies that still touch it (arena.py, [Note: Stream-ordered
reuse]): a store because its lane waits, and the host itself, which may write to a slot that it has reserved, by waiting here.

Where locking is refused the bytes go to pageable memory. A copy to or from it occupies the host in any case, so it is made at once on the
current stream, and needs no lane and no event. Tensors that live in host memory are copied at once, too.
"""

import collections
import os
import threading
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from backhaul.sizes import format_bytes, parse_bytes
from backhaul.tiers.arena import Arena, Block, Marks, aligned
from backhaul.tiers.base import Slot, Tier, TierFull, Transfer
from backhaul.tiers.lanes import Lanes, LaneTransfer, has_streams, lanes_of
from backhaul.tiers.limits import host_memory_budget
from backhaul.tiers.slabs import HUGE_PAGE_BYTES, SLAB_BYTES, PlainPages, SlabMaker, locked_slabs


class Ended(Transfer):
    """A copy that was made at once."""

    def wait(self) -> None:
        """Return: there is nothing to wait for."""

    def order(self) -> None:
        """Return: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def done(self) -> bool:
        """Say yes."""
        return True


HostTransfer = LaneTransfer | Ended


class HostSlot(Slot):
    """Bytes in host memory. ``host`` shows them as a CPU tensor; once ``stored`` has ended they may be read."""

    __slots__ = ("_block", "_marks", "_region", "_tier", "host")

    stored: HostTransfer

    def __init__(self, tier: "PinnedHost", region: "_Region", block: Block, num_bytes: int) -> None:
        super().__init__(num_bytes, Ended())
        self.host = region.view(block.start, num_bytes)
        self._tier = tier
        self._region = region
        self._block: Block | None = block  # None once the bytes are back in the arena
        self._marks = block.marks  # the last copies that touched the bytes

    def mark(self, marks: Marks) -> None:
        """Note that copies up to these, or some of them, touch the bytes."""
        with _lock:
            self._marks = self._marks.merged(marks)


class PinnedHost(Tier):
    """Page-locked host memory, shared with all other tiers of this kind in the process ([Note: Host arena]).

    ``capacity`` is the most that this tier may hold, as bytes or as text ("200GiB"). Without one it takes what the host and the container
    can spare, which is asked whenever the arena grows. Where pages cannot be locked the tier still works, slower, and warns once.

    >>> tier = PinnedHost(capacity="64MiB")
    >>> slot = tier.store(torch.arange(5, dtype=torch.uint8))
    >>> back = torch.empty(5, dtype=torch.uint8)
    >>> tier.load(slot, back).wait()
    >>> back.tolist(), tier.used_bytes
    ([0, 1, 2, 3, 4], 5)
    >>> tier.free(slot)
    >>> tier.used_bytes
    0
    """

    name = "host"

    def __init__(self, capacity: int | str | None = None) -> None:
        self._capacity = None if capacity is None else parse_bytes(capacity, what="capacity")
        self._room: int | None = None  # what the host could spare when it was last asked, over and above what the arenas held
        self._pid = os.getpid()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._pageable_bytes = 0
        _open_tiers.add(self)

    def store(self, source: Tensor) -> HostSlot:
        """Start copying ``source`` into host memory."""
        slot = self._take(_memory_of(source.device), source.numel())
        lanes = slot._region.lanes
        try:
            if lanes is None:
                slot.host.copy_(source)
            else:
                last_load = lanes.h2d.transfer(slot._marks.h2d)
                try:
                    slot.stored = lanes.d2h.copy(slot.host, source, last_use=last_load)
                finally:
                    slot.mark(Marks(d2h=lanes.d2h.last_number))
        except BaseException:
            self.free(slot)
            raise
        if slot._region.is_fallback:
            with _lock:
                self._pageable_bytes += slot.num_bytes
        return slot

    def load(self, slot: Slot, target: Tensor) -> HostTransfer:
        """Start copying the slot's bytes into ``target``, which is on the device they came from."""
        assert isinstance(slot, HostSlot)
        self._check_process()
        lanes = slot._region.lanes
        if lanes is None:
            target.copy_(slot.host)
            return Ended()
        try:
            return lanes.h2d.copy(target, slot.host, store=slot.stored if isinstance(slot.stored, LaneTransfer) else None)
        finally:
            slot.mark(Marks(h2d=lanes.h2d.last_number))

    def reserve(self, num_bytes: int, device: torch.device) -> HostSlot:
        """Return an empty slot for bytes that the host will write itself, to be loaded onto ``device``.

        Waits, on the host, for copies that still touch the memory: stream order does not bind the host.
        """
        slot = self._take(_memory_of(torch.empty(0, device=device).device), num_bytes)  # "cuda" means one with an index
        slot._region.synchronize(slot._marks)
        return slot

    def free(self, slot: Slot) -> None:
        """Give the bytes back. Never blocks: they return to the arena when it is next used."""
        assert isinstance(slot, HostSlot)
        _freed.append(slot)

    @property
    def used_bytes(self) -> int:
        """Bytes held by slots that have not been freed."""
        with _lock:
            _take_back_freed()
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ``used_bytes`` has been."""
        return self._peak_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most that this tier may hold; without an explicit capacity, by what the host could spare when it was last asked."""
        if self._capacity is not None:
            return self._capacity
        if self._room is None:
            self._ask_host()
        assert self._room is not None
        return self._room + sum(memory.held_bytes for memory in list(_memories.values()))

    @property
    def pageable_bytes(self) -> int:
        """Bytes stored so far in host memory that could not be page-locked."""
        return self._pageable_bytes

    @property
    def rates_gbps(self) -> tuple[float, float] | None:
        """How fast each lane has been of late by itself, out of the device and into it; of the first device that has used both."""
        return next((found for memory in list(_memories.values()) if (found := memory.rates_gbps) is not None), None)

    @property
    def duplex_gbps(self) -> float | None:
        """How fast the two lanes of a device have mostly been, added up; of the first device that has used both."""
        return next((found for memory in list(_memories.values()) if (found := memory.duplex_gbps) is not None), None)

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of all arenas of the process, in use or free."""
        return sum(memory.locked_bytes for memory in list(_memories.values()))

    def close(self) -> None:
        """Give memory that is free back to the system, unless another tier of this kind is open and will want it."""
        _open_tiers.discard(self)
        if not _open_tiers:
            release_host_memory()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"host tier: it belongs to process {self._pid}, and this is a fork of it, without its memory; "
                "remove the handle in the child, or manage the model anew"
            )

    def _take(self, memory: "_Memory", num_bytes: int) -> HostSlot:
        self._check_process()
        with _lock:
            _take_back_freed()
            if self._capacity is not None and self._used_bytes + num_bytes > self._capacity:
                raise TierFull(
                    f"the host tier holds {format_bytes(self._used_bytes)} of its capacity of {format_bytes(self._capacity)}; "
                    f"{format_bytes(num_bytes)} more do not fit"
                )
            self._used_bytes += num_bytes  # before the lock is let go, so that two threads cannot both have the last of the capacity
        try:
            region, block = memory.take(num_bytes, self._room_to_grow)
        except BaseException:
            with _lock:
                self._used_bytes -= num_bytes
            raise
        with _lock:
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return HostSlot(self, region, block, num_bytes)

    def _room_to_grow(self, num_bytes: int) -> int:
        """Return by how much the arena may grow, where ``num_bytes`` of it are wanted now."""
        if self._capacity is not None:
            return self._capacity - self._used_bytes + num_bytes
        return self._ask_host()

    def _ask_host(self) -> int:
        self._room = host_memory_budget().num_bytes
        return self._room


def release_host_memory() -> int:
    """Give slabs that are wholly free back to the system, and return how many bytes those were.

    Waits for copies that still touch them. Also forgets that page-locking was refused: the next slab tries again.
    """
    with _lock:
        _take_back_freed()
    return sum(memory.release() for memory in list(_memories.values()))


class _Memory:
    """The host memory of one device: a region of locked slabs, and one of pageable slabs once locking has been refused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked = _Region(locked_slabs(device), lanes_of(device) if has_streams(device) else None)
        self._regions = [self._locked]
        self._refused = False
        self._growing = threading.Lock()  # held while slabs are made; whoever finds room does not come here

    def take(self, num_bytes: int, room_to_grow: Callable[[int], int]) -> "tuple[_Region, Block]":
        """Take a block; grow by as much as ``room_to_grow`` allows, or raise ``TierFull``."""
        found = self._find(num_bytes)
        if found is None:
            with self._growing:
                while (found := self._find(num_bytes)) is None:
                    self._grow(num_bytes, room_to_grow(num_bytes))
        return found

    def release(self) -> int:
        """Give slabs that are wholly free back to the system."""
        with self._growing:
            self._refused = False
            return sum(region.release() for region in self._regions)

    @property
    def rates_gbps(self) -> tuple[float, float] | None:
        lanes = self._locked.lanes
        return None if lanes is None else lanes.rates_gbps

    @property
    def duplex_gbps(self) -> float | None:
        lanes = self._locked.lanes
        return None if lanes is None else lanes.duplex_gbps

    @property
    def held_bytes(self) -> int:
        return sum(region.arena.held_bytes for region in self._regions)

    @property
    def locked_bytes(self) -> int:
        return self._locked.arena.held_bytes if self._device.type != "cpu" else 0

    def _find(self, num_bytes: int) -> "tuple[_Region, Block] | None":
        with _lock:
            for region in self._regions:
                block = region.arena.take(num_bytes)
                if block is not None:
                    return region, block
        return None

    def _grow(self, num_bytes: int, room: int) -> None:
        if not self._refused:
            try:
                self._locked.grow(num_bytes, room)
                return
            except RuntimeError as error:
                self._refused = True  # until memory is released: a try costs as much as a success
                _warn_pageable(error)
        if len(self._regions) == 1:
            self._regions.append(_Region(PlainPages(), None, is_fallback=True))
        self._regions[1].grow(num_bytes, room)


class _Region:
    """An arena and its slabs. ``lanes`` is ``None`` where copies are made at once."""

    def __init__(self, pages: SlabMaker, lanes: Lanes | None, *, is_fallback: bool = False) -> None:
        self.arena = Arena()  # guarded by _lock
        self.lanes = lanes
        self.is_fallback = is_fallback
        self.view = pages.view
        self._pages = pages
        self._slabs: dict[int, int] = {}  # start -> num_bytes; guarded by the owner's _growing

    def grow(self, num_bytes: int, room: int) -> None:
        """Make a slab, so that ``num_bytes`` can be taken; raise ``TierFull`` where that needs more than ``room``."""
        start, missing = self._next_place(num_bytes)
        if missing > room:
            raise TierFull(
                f"{format_bytes(num_bytes)} of host memory were asked for, and this process may take only {format_bytes(room)} more"
            )
        size = max(aligned(missing, HUGE_PAGE_BYTES), min(aligned(missing, SLAB_BYTES), room // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES))
        self._pages.make(start, size)
        self._slabs[start] = size
        with _lock:
            self.arena.add(start, size)

    def release(self) -> int:
        """Give slabs that are wholly free back to the system."""
        released = 0
        for start, size in list(self._slabs.items()):
            with _lock:
                marks = self.arena.remove(start, size)
            if marks is not None:
                self.synchronize(marks)
                del self._slabs[start]
                self._pages.unmake(start, size)
                released += size
        return released

    def synchronize(self, marks: Marks) -> None:
        """Block the host until those copies have ended."""
        if self.lanes is not None:
            for transfer in (self.lanes.d2h.transfer(marks.d2h), self.lanes.h2d.transfer(marks.h2d)):
                if transfer is not None:
                    transfer.synchronize()

    def _next_place(self, num_bytes: int) -> tuple[int, int]:
        """Return the lowest address for a slab after which ``num_bytes`` fit, and how long it has to be at least."""
        gap = self._pages.gap
        taken = {place for start, size in self._slabs.items() for place in range(start, start + size + gap, SLAB_BYTES)}
        start = 0
        while True:
            with _lock:  # free memory in front of the slab counts; others may be taking or giving it meanwhile
                missing = max(1, num_bytes - self.arena.free_before(start))
            if taken.isdisjoint(range(start, start + missing + gap, SLAB_BYTES)):
                return start, missing
            start += SLAB_BYTES


def _warn_pageable(error: RuntimeError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"host memory could not be pinned ({error}). Offloaded tensors now go to pageable memory: results are the same, but copies are "
            "slow and stop the host. Let the process lock more memory (WSL: memory= in .wslconfig; containers: the memory limit and "
            "--ulimit memlock=-1), offload less, or use tier='disk'.",
            RuntimeWarning,
            stacklevel=2,
        )


def _memory_of(device: torch.device) -> _Memory:
    with _lock:
        memory = _memories.get(device)
        if memory is None:
            memory = _memories[device] = _Memory(device)
        return memory


def _take_back_freed() -> None:
    """Return freed blocks to their arenas. The caller holds the lock."""
    while _freed:
        slot = _freed.popleft()
        if slot._block is not None:
            slot._region.arena.give(slot._block._replace(marks=slot._marks))
            slot._block = None
            slot._tier._used_bytes -= slot.num_bytes


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _memories.clear()  # a forked child does not inherit the pages (slabs.py, [Note: One range])
    _freed.clear()


# The process's one set of arenas ([Note: Host arena]).
_lock = threading.Lock()  # guards arenas and accounts; never held while slabs are made or copies waited for
_memories: dict[torch.device, _Memory] = {}
_freed: collections.deque[HostSlot] = collections.deque()  # appended to without a lock, by any thread
_open_tiers: "weakref.WeakSet[PinnedHost]" = weakref.WeakSet()
_warned = False
os.register_at_fork(after_in_child=_forget_in_child)
