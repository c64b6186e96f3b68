"""The memory that slabs are made of.

Covers: reserved addresses, pages touched fast and next to the device, page-locking ([Note: One range]).
Does not cover: who uses which bytes (arena.py), or how large slabs are (host.py).

[Note: One range]
All slabs of an arena lie in one reserved address range, end to end, so that a block may lie across them and nothing is lost at their ends.
Reserved addresses cost nothing until they are touched. Touching is what takes the time: huge pages and eight threads fill 20 GiB/s, one
thread with small pages 2.2. A fork does not inherit the range: a child that only loads data would otherwise copy page tables for all of it,
and a page that parent and child share is copied at the parent's next write, away from where the device was told it lies.
"""

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from backhaul._torch import empty_host_cache
from backhaul.sizes import format_bytes
from backhaul.tiers.arena import aligned
from backhaul.tiers.base import TierFull
from backhaul.tiers.lanes import CHUNK_BYTES
from backhaul.tiers.numa import node_of, prefer_node

SLAB_BYTES = 2**30  # slabs begin at multiples of it; itself a multiple of CHUNK_BYTES, so no chunk of a copy lies across two registrations
HUGE_PAGE_BYTES = 2 * 2**20
_NUM_THREADS = 8
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class PinningError(RuntimeError):
    """The system does not lock any more pages."""


class SlabMaker(Protocol):
    """Where slabs come from. ``make`` raises ``RuntimeError`` where pages cannot be locked, and has then changed nothing."""

    gap: int  # addresses to leave out after each slab, where a block must not lie across two

    def make(self, start: int, num_bytes: int) -> None:
        """Make a slab at these addresses."""

    def unmake(self, start: int, num_bytes: int) -> None:
        """Give a slab back."""

    def view(self, start: int, num_bytes: int) -> Tensor:
        """Return the bytes, without a copy."""
        ...


class PlainPages:
    """Slabs of pages that come with the first touch ([Note: One range])."""

    gap = 0

    def __init__(self) -> None:
        self._num_bytes = aligned(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), SLAB_BYTES)  # twice: slabs leave holes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, self._num_bytes + CHUNK_BYTES, flags=flags)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without it
                self._map.madvise(advice)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)  # keeps the mapping alive
        self._skipped = -everything.data_ptr() % CHUNK_BYTES
        self._bytes = everything[self._skipped : self._skipped + self._num_bytes]
        self.address = self._bytes.data_ptr()

    def make(self, start: int, num_bytes: int) -> None:
        """Check that there are addresses."""
        if start + num_bytes > self._num_bytes:
            raise TierFull(f"no addresses are left for {format_bytes(num_bytes)} of host memory")

    def unmake(self, start: int, num_bytes: int) -> None:
        """Give the pages back to the system; the addresses stay reserved."""
        self._map.madvise(mmap.MADV_DONTNEED, self._skipped + start, num_bytes)

    def view(self, start: int, num_bytes: int) -> Tensor:
        """Return the bytes, without a copy."""
        return self._bytes[start : start + num_bytes]

    def touch(self, start: int, num_bytes: int) -> None:
        """Have the system back a slab with pages now."""
        share = aligned(-(-num_bytes // _NUM_THREADS), HUGE_PAGE_BYTES)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for offset in range(0, num_bytes, share):
                pool.submit(ctypes.memset, self.address + start + offset, 0, min(share, num_bytes - offset))


class RegisteredPages(PlainPages):
    """Slabs of pages that CUDA or HIP has registered. For a CPU they are left as they are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def make(self, start: int, num_bytes: int) -> None:
        """Place, touch and lock the pages."""
        super().make(start, num_bytes)
        address = self.address + start
        if self._device.type != "cpu":
            node = node_of(self._device)
            if node is not None:
                prefer_node(address, num_bytes, node)  # before the first touch: locked pages do not move
            self.touch(start, num_bytes)
        try:
            register(address, num_bytes, self._device)
        except RuntimeError:
            super().unmake(start, num_bytes)
            raise

    def unmake(self, start: int, num_bytes: int) -> None:
        """Unlock the pages and give them back."""
        unregister(self.address + start, self._device)
        super().unmake(start, num_bytes)


class TorchPinned:
    """Slabs from torch's own allocator, for accelerators that have no call to register memory. Slower to make, and rounded up."""

    gap = SLAB_BYTES

    def __init__(self) -> None:
        self._slabs: dict[int, Tensor] = {}

    def make(self, start: int, num_bytes: int) -> None:
        """Allocate."""
        self._slabs[start] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def unmake(self, start: int, num_bytes: int) -> None:
        """Give the slab back."""
        del self._slabs[start]
        empty_host_cache()

    def view(self, start: int, num_bytes: int) -> Tensor:
        """Return the bytes, without a copy."""
        first = max(slab for slab in list(self._slabs) if slab <= start)
        return self._slabs[first][start - first : start - first + num_bytes]


def locked_slabs(device: torch.device) -> SlabMaker:
    """Return the way to page-locked slabs for a device."""
    return RegisteredPages(device) if device.type in ("cpu", "cuda") else TorchPinned()


def register(address: int, num_bytes: int, device: torch.device) -> None:
    """Page-lock memory for a device, or raise ``PinningError`` and leave no error behind in the runtime. Tests make it fail."""
    if device.type == "cpu":
        return
    with torch.accelerator.device_index(device.index):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(address, num_bytes, _PORTABLE)
        if status != cudart.cudaError.success:
            _consume_error(device)
            raise PinningError(f"cudaHostRegister of {format_bytes(num_bytes)}: {cudart.cudaGetErrorString(status)}")


def unregister(address: int, device: torch.device) -> None:
    """Unlock memory that was registered from this address on."""
    if device.type == "cpu":
        return
    with torch.accelerator.device_index(device.index):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostUnregister(address)
        if status != cudart.cudaError.success:
            _consume_error(device)
            raise RuntimeError(f"cudaHostUnregister: {cudart.cudaGetErrorString(status)}")


def _consume_error(device: torch.device) -> None:
    """Take the error of a failed call out of the runtime.

    It stays there, for each thread, until somebody asks, and the next to ask is the check after the next kernel launch, which would raise
    "out of memory" for no fault of its own. torch does not bind ``cudaGetLastError``, but it asks after every launch of its own. A real
    fault of the device is not lost: the runtime reports that one on every call.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
