"""Files that cannot be left behind.

Covers: how a file without a name is made, filled, emptied and closed ([Note: Nameless files]).
Does not cover: which blob goes where, or who reads and writes (disk.py).

[Note: Nameless files]
Whatever ends the process, an exception, SIGTERM or SIGKILL, must leave no file behind. So no file ever has a name: the system creates it
without one (``O_TMPFILE``), or it is unlinked as soon as it exists. Only an open descriptor leads to it, the kernel reclaims the space when
that is closed, nobody else can open it, and nothing needs to be swept.
* Descriptors are scarce (often 1024), blobs are many. So blobs are appended to a few large files, *segments*. A blob that is freed leaves a
  hole, whose space goes back to the file system; a segment whose last blob is freed is closed. Offsets are never used twice, so there is no
  free list and no fragmentation.
* As many segments are filled at once as there are threads, since writers of one file take turns.
* A forked child (a data loader's worker) inherits the descriptors, and could keep the space or punch holes in its parent's files. So a
  segment is emptied before it is closed, and in any process but the one that made the tier ``free`` and ``close`` do nothing.
"""

import ctypes
import os
import sys
import tempfile
import weakref
from pathlib import Path

BLOCK_BYTES = 4096  # blobs start on file system blocks, so a freed blob gives back every block it used


class Segment:
    """A nameless file that blobs are appended to."""

    def __init__(self, directory: Path) -> None:
        with tempfile.TemporaryFile(dir=directory) as file:  # readable and writable by its owner alone
            self.fd = os.dup(file.fileno())
        self.end = 0
        self.num_slots = 0
        self._close = weakref.finalize(self, os.close, self.fd)

    def append(self, num_bytes: int) -> int:
        offset = self.end
        self.end += _round_up_to_blocks(num_bytes)
        self.num_slots += 1
        return offset

    def punch(self, offset: int, num_bytes: int) -> None:
        """Give the blocks of one blob back. Where the system cannot, they come back with the whole segment."""
        if sys.platform == "linux":
            keep_size, punch_hole = 0x01, 0x02  # linux/falloc.h
            length = _round_up_to_blocks(num_bytes)
            ctypes.CDLL(None).fallocate(self.fd, keep_size | punch_hole, ctypes.c_int64(offset), ctypes.c_int64(length))

    def close(self) -> None:
        os.ftruncate(self.fd, 0)  # a forked child may hold the file open
        self._close()


def _round_up_to_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
