"""Address ranges that host memory is made of.

Covers: reserving addresses, touching pages fast, giving pages back ([Note: One range]).
Does not cover: page-locking, and who uses which bytes (host.py, arena.py).

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

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20
_NUM_THREADS = 8
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on


class AddressRange:
    """A range of host addresses, ``bytes`` as a tensor, whose memory comes and goes by slabs ([Note: One range])."""

    contiguous = True

    def __init__(self, num_bytes: int, *, alignment: int) -> None:
        self._map = mmap.mmap(-1, num_bytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without it
                self._map.madvise(advice)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)  # keeps the mapping alive
        self._skipped = -everything.data_ptr() % alignment
        self.num_bytes = num_bytes
        self.bytes = everything[self._skipped : self._skipped + num_bytes]
        self.address = self.bytes.data_ptr()

    def view(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes of the range, without a copy."""
        return self.bytes[start : start + num_bytes]

    def touch(self, start: int, num_bytes: int) -> None:
        """Have the system back a slab with pages."""
        share = -(-num_bytes // (_NUM_THREADS * HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for offset in range(0, num_bytes, share):
                pool.submit(ctypes.memset, self.address + start + offset, 0, min(share, num_bytes - offset))

    def discard(self, start: int, num_bytes: int) -> None:
        """Give the pages of a slab back to the system; the addresses stay reserved."""
        self._map.madvise(mmap.MADV_DONTNEED, self._skipped + start, num_bytes)


def physical_bytes() -> int:
    """Return the memory of the whole machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
