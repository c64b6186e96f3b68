"""Page-locked host memory as a tier.

Covers: one arena of page-locked slabs for each device of the process ([Note: Host arena]), pageable memory where locking is refused, capacity.
Does not cover: which bytes are free (arena.py), how copies run (lanes.py), how pages are made (mapping.py), what is offloaded (flow.py).

[Note: Host arena]
Page-locking is slow and stops the device, so it is done by the slab and kept: 1 GiB of huge pages, touched in parallel, placed next to the
device, registered once. Blocks are cut from slabs and given back to them, by all ``PinnedHost`` tiers of the process, which share the arena of
a device. ``release_host_memory`` is how slabs go back to the system.

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
from typing import Protocol

import torch
from torch import Tensor

from backhaul.sizes import format_bytes, parse_bytes
from backhaul.tiers.arena import Arena, Block, Marks, aligned
from backhaul.tiers.base import Slot, Tier, TierFull, Transfer
from backhaul.tiers.lanes import CHUNK_BYTES, Lane, Lanes, LaneTransfer, has_streams, lanes_of
from backhaul.tiers.limits import host_memory_budget
from backhaul.tiers.mapping import HUGE_PAGE_BYTES, AddressRange, physical_bytes
from backhaul.tiers.numa import node_of, prefer_node

SLAB_BYTES = 2**30  # a multiple of CHUNK_BYTES: no chunk of a copy may lie across two registrations
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class PinningError(RuntimeError):
    """The system does not lock any more pages."""


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


class HostSlot(Slot):
    """Bytes in host memory. ``host`` shows them as a CPU tensor; once ``stored`` has ended they may be read, and nobody writes to them."""

    __slots__ = ("_block", "_last_load", "_region", "_tier", "host")

    stored: LaneTransfer | Ended

    def __init__(self, tier: "PinnedHost", region: "_Region", block: Block, num_bytes: int) -> None:
        super().__init__(num_bytes, Ended())
        self.host = region.view(block.start, num_bytes)
        self._tier = tier
        self._region = region
        self._block: Block | None = block  # None once the bytes are back in the arena
        self._last_load = 0


class PinnedHost(Tier):
    """Page-locked host memory, shared with all other tiers of this kind in the process ([Note: Host arena]).

    ``capacity`` is the most that this tier may hold, as bytes or as text ("200GiB"). Without one it takes what the host and the container can
    spare, which is asked for whenever the arena grows. Where pages cannot be locked the tier still works, slower, and warns once.

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
        self._used_bytes = 0
        self._peak_bytes = 0
        self._pageable_bytes = 0
        _open_tiers.add(self)

    def store(self, source: Tensor) -> HostSlot:
        """Start copying ``source`` into host memory."""
        memory = _memory_of(source.device)
        slot = self._take(memory, source.numel())
        block, region = slot._block, slot._region
        assert block is not None
        try:
            if region.lanes is None:
                slot.host.copy_(source)
            else:
                slot.stored = region.lanes.d2h.copy(slot.host, source, last_use=region.lanes.h2d.transfer(block.marks.h2d))
        except BaseException:
            self.free(slot)
            raise
        if region.is_fallback:
            with _lock:
                self._pageable_bytes += slot.num_bytes
        return slot

    def load(self, slot: Slot, target: Tensor) -> LaneTransfer | Ended:
        """Start copying the slot's bytes into ``target``, which is on the device they came from."""
        assert isinstance(slot, HostSlot)
        region = slot._region
        if region.lanes is None:
            target.copy_(slot.host)
            return Ended()
        store = slot.stored if isinstance(slot.stored, LaneTransfer) else None
        transfer = region.lanes.h2d.copy(target, slot.host, store=store)
        with _lock:
            slot._last_load = max(slot._last_load, transfer.number)
        return transfer

    def reserve(self, num_bytes: int, device: torch.device) -> HostSlot:
        """Return an empty slot for bytes that the host will write itself, to be loaded onto ``device``.

        Waits, on the host, for copies that still touch the memory: stream order does not bind the host.
        """
        slot = self._take(_memory_of(device), num_bytes)
        assert slot._block is not None
        slot._region.synchronize(slot._block.marks)
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
    def locked_bytes(self) -> int:
        """Page-locked bytes of all arenas of the process, in use or free."""
        return sum(memory.locked_bytes for memory in list(_memories.values()))

    def close(self) -> None:
        """Give memory that is free back to the system, unless another tier of this kind is open and will want it."""
        _open_tiers.discard(self)
        if not _open_tiers:
            release_host_memory()

    def _take(self, memory: "_Memory", num_bytes: int) -> HostSlot:
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
    """The host memory of one device: a locked region, and a pageable one for when locking is refused."""

    def __init__(self, device: torch.device) -> None:
        lanes = lanes_of(device) if has_streams(device) else None
        self._locked = _Region(_locked_pages(device), lanes, locked=device.type != "cpu")
        self._pageable = _Region(_Pages(), None, is_fallback=True)
        self._refused = False
        self._growing = threading.Lock()  # held while pages are made; whoever finds room does not come here

    def take(self, num_bytes: int, room_to_grow: Callable[[int], int]) -> "tuple[_Region, Block]":
        """Take a block; grow by as much as ``room_to_grow`` allows, or raise ``TierFull``."""
        found = self._find(num_bytes)
        if found is None:
            with self._growing:
                while (found := self._find(num_bytes)) is None:
                    self._grow(num_bytes, room_to_grow(num_bytes))
        return found

    def release(self) -> int:
        with self._growing:
            self._refused = False
            return self._locked.release() + self._pageable.release()

    @property
    def held_bytes(self) -> int:
        return self._locked.arena.held_bytes + self._pageable.arena.held_bytes

    @property
    def locked_bytes(self) -> int:
        return self._locked.arena.held_bytes if self._locked.locked else 0

    def _find(self, num_bytes: int) -> "tuple[_Region, Block] | None":
        with _lock:
            for region in (self._locked, self._pageable):
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
                self._refused = True  # until memory is released: trying costs as much as succeeding
                _warn_pageable(error)
        self._pageable.grow(num_bytes, room)


class _Region:
    """An arena and the slabs it is made of. ``lanes`` where copies to and from it run beside compute."""

    def __init__(self, pages: "_SlabMaker", lanes: Lanes | None, *, locked: bool = False, is_fallback: bool = False) -> None:
        self.arena = Arena()  # guarded by _lock
        self.lanes = lanes
        self.locked = locked
        self.is_fallback = is_fallback
        self._pages = pages
        self._slabs: dict[int, int] = {}  # start -> num_bytes; guarded by the owner's _growing
        self.view = pages.view

    def grow(self, num_bytes: int, room: int) -> None:
        """Make a slab, so that ``num_bytes`` can be taken; raise ``TierFull`` where that needs more than ``room``."""
        start, missing = self._next_place(num_bytes)
        size = max(missing, min(aligned(missing, SLAB_BYTES), room // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES))
        if num_bytes > room or missing - HUGE_PAGE_BYTES >= room:
            raise TierFull(f"{format_bytes(num_bytes)} of host memory were asked for and {format_bytes(room)} are left to this process")
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
        """Block the host until the copies have ended."""
        if self.lanes is not None:
            for lane, number in ((self.lanes.d2h, marks.d2h), (self.lanes.h2d, marks.h2d)):
                _synchronize(lane, number)

    def _next_place(self, num_bytes: int) -> tuple[int, int]:
        """Return the lowest address for a slab after which ``num_bytes`` fit, and how long it has to be."""
        taken = {place for start, size in self._slabs.items() for place in range(start, start + size + self._pages.gap, SLAB_BYTES)}
        start = 0
        while True:
            with _lock:
                missing = aligned(num_bytes - self.arena.free_before(start), HUGE_PAGE_BYTES)
            if not taken.intersection(range(start, start + missing + self._pages.gap, SLAB_BYTES)):
                return start, missing
            start += SLAB_BYTES


class _SlabMaker(Protocol):
    """Where slabs come from. ``make`` raises ``RuntimeError`` where pages cannot be locked, and has then changed nothing."""

    gap: int  # addresses to leave out after each slab, where a block must not lie across two

    def make(self, start: int, num_bytes: int) -> None: ...
    def unmake(self, start: int, num_bytes: int) -> None: ...
    def view(self, start: int, num_bytes: int) -> Tensor: ...


class _Pages:
    """Slabs of plain pages, which come with the first touch."""

    gap = 0

    def __init__(self) -> None:
        self._range: AddressRange | None = None  # reserved when first needed

    @property
    def range(self) -> AddressRange:
        if self._range is None:
            self._range = AddressRange(aligned(2 * physical_bytes(), SLAB_BYTES), alignment=CHUNK_BYTES)
        return self._range

    def make(self, start: int, num_bytes: int) -> None:
        if start + num_bytes > self.range.num_bytes:
            raise TierFull(f"no addresses are left for {format_bytes(num_bytes)} of host memory")

    def unmake(self, start: int, num_bytes: int) -> None:
        self.range.discard(start, num_bytes)

    def view(self, start: int, num_bytes: int) -> Tensor:
        return self.range.view(start, num_bytes)


class _RegisteredPages(_Pages):
    """Slabs of pages that CUDA or HIP has registered; for a CPU they are left as they are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def make(self, start: int, num_bytes: int) -> None:
        super().make(start, num_bytes)
        address = self.range.address + start
        if self._device.type != "cpu":
            node = node_of(self._device)
            if node is not None:
                prefer_node(address, num_bytes, node)  # before the first touch: locked pages do not move
            self.range.touch(start, num_bytes)
        try:
            _register(address, num_bytes, self._device)
        except RuntimeError:
            self.range.discard(start, num_bytes)
            raise

    def unmake(self, start: int, num_bytes: int) -> None:
        _unregister(self.range.address + start, self._device)
        super().unmake(start, num_bytes)


class _TorchPinned:
    """Slabs from torch's own allocator, for accelerators without a way to register memory. Slower to make, and rounded up."""

    gap = SLAB_BYTES

    def __init__(self) -> None:
        self._slabs: dict[int, Tensor] = {}

    def make(self, start: int, num_bytes: int) -> None:
        self._slabs[start] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def unmake(self, start: int, num_bytes: int) -> None:
        del self._slabs[start]
        torch.accelerator.empty_host_cache()

    def view(self, start: int, num_bytes: int) -> Tensor:
        first = max(slab for slab in self._slabs if slab <= start)
        return self._slabs[first][start - first : start - first + num_bytes]


def _locked_pages(device: torch.device) -> _SlabMaker:
    return _RegisteredPages(device) if device.type in ("cpu", "cuda") else _TorchPinned()


def _register(address: int, num_bytes: int, device: torch.device) -> None:
    """Page-lock memory for a device, or raise ``PinningError`` and leave no error behind in the runtime. Tests make it fail."""
    if device.type == "cpu":
        return
    with torch.accelerator.device_index(device.index):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(address, num_bytes, _PORTABLE)
        if status != cudart.cudaError.success:
            _consume_error(device)
            raise PinningError(f"cudaHostRegister of {format_bytes(num_bytes)}: {cudart.cudaGetErrorString(status)}")


def _unregister(address: int, device: torch.device) -> None:
    if device.type == "cpu":
        return
    with torch.accelerator.device_index(device.index):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostUnregister(address)
        assert status == cudart.cudaError.success, cudart.cudaGetErrorString(status)


def _consume_error(device: torch.device) -> None:
    """Take the error of a failed call out of the runtime.

    It stays there, for each thread, until somebody asks, and the next to ask is the check after the next kernel launch, which would raise "out
    of memory" for no fault of its own. torch does not bind ``cudaGetLastError``; but it asks after every launch of its own. A real fault of
    the device is not lost: the runtime reports that one on every call.
    """
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError:
        pass


def _warn_pageable(error: RuntimeError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"host memory could not be pinned ({error}). Offloaded tensors now go to pageable memory: results are the same, but copies are slow "
            "and stop the host. Give the process more lockable memory (on WSL, in .wslconfig; in a container, its memory limit and "
            "`--ulimit memlock=-1`), offload less, or use tier='disk'.",
            RuntimeWarning,
            stacklevel=2,
        )


def _synchronize(lane: Lane, number: int) -> None:
    transfer = lane.transfer(number)
    if transfer is not None:
        transfer.synchronize()


def _memory_of(device: torch.device) -> _Memory:
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
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
            stored = slot.stored.number if isinstance(slot.stored, LaneTransfer) else 0
            marks = slot._block.marks.merged(Marks(d2h=stored, h2d=slot._last_load))
            slot._region.arena.give(slot._block._replace(marks=marks))
            slot._block = None
            slot._tier._used_bytes -= slot.num_bytes


# The process's one set of arenas ([Note: Host arena]).
_lock = threading.Lock()  # guards arenas and accounts; never held while pages are made or copies waited for
_memories: dict[torch.device, _Memory] = {}
_freed: collections.deque[HostSlot] = collections.deque()  # appended to by any thread without a lock
_open_tiers: "weakref.WeakSet[PinnedHost]" = weakref.WeakSet()
_warned = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_memories.clear)  # a child does not inherit the pages (mapping.py, [Note: One range])
