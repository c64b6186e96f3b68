"""Sub-allocation of host memory.

Covers: which bytes of a growing address range are free, and which copies touched them last ([Note: Stream-ordered reuse]).
Does not cover: where the memory comes from, or how copies are ordered (host.py, lanes.py). No torch, and no locks: the owner has one.

[Note: Stream-ordered reuse]
Memory is given back while copies may still touch it, and taken again at once. Nobody waits or polls in between: a free block carries the
number of the last copy of either direction that touched it, and whoever writes to it next orders itself after those two copies. The
numbers of a direction only grow and its copies run in that order, so blocks that merge keep the larger one.
"""

import bisect
from typing import NamedTuple

from backhaul.tiers.base import ALIGNMENT


class Marks(NamedTuple):
    """The numbers of the last copies that touched some memory, one for each direction; 0 is before any copy."""

    d2h: int = 0
    h2d: int = 0

    def merged(self, other: "Marks") -> "Marks":
        """Return what marks both."""
        return Marks(max(self.d2h, other.d2h), max(self.h2d, other.h2d))


class Block(NamedTuple):
    """A range of bytes, free or taken. ``num_bytes`` is a multiple of ``ALIGNMENT``."""

    start: int
    num_bytes: int
    marks: Marks = Marks()

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.num_bytes


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up.

    >>> aligned(1), aligned(512)
    (256, 512)
    """
    return -(-num_bytes // alignment) * alignment


class Arena:
    """The free blocks of an address range that grows and shrinks by slabs.

    Best fit, lowest address first, neighbours merged. Slabs that touch merge too, so a block may lie across them; whoever wants a seam that
    no block crosses leaves a gap in the addresses.

    >>> arena = Arena()
    >>> arena.add(0, 4096)
    >>> block = arena.take(1000)
    >>> block.num_bytes, arena.free_bytes
    (1024, 3072)
    >>> arena.give(block._replace(marks=Marks(d2h=7)))
    >>> arena.take(4096).marks
    Marks(d2h=7, h2d=0)
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (num_bytes, start), sorted
        self._by_start: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self.held_bytes = 0  # of all slabs
        self.free_bytes = 0

    def add(self, start: int, num_bytes: int) -> None:
        """Take in a slab, all of it free."""
        self.held_bytes += num_bytes
        self.give(Block(start, num_bytes))

    def remove(self, start: int, num_bytes: int) -> Marks | None:
        """Let go of a slab and return its marks; ``None``, and nothing is changed, where any of it is taken."""
        end = start + num_bytes
        for block in self._by_start.values():
            if block.start <= start and end <= block.end:
                self._pop(block)
                self._push(Block(block.start, start - block.start, block.marks))
                self._push(Block(end, block.end - end, block.marks))
                self.held_bytes -= num_bytes
                return block.marks
        return None

    def take(self, num_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough, cut to size; ``None`` where there is none."""
        wanted = aligned(num_bytes)
        place = bisect.bisect_left(self._by_size, (wanted, 0))
        if place == len(self._by_size):
            return None
        block = self._by_start[self._by_size[place][1]]
        self._pop(block)
        self._push(Block(block.start + wanted, block.num_bytes - wanted, block.marks))
        return Block(block.start, wanted, block.marks)

    def give(self, block: Block) -> None:
        """Give a block back. Its marks say which copies the next writer has to come after."""
        for neighbour in (self._by_end.get(block.start), self._by_start.get(block.end)):
            if neighbour is not None:
                self._pop(neighbour)
                start = min(block.start, neighbour.start)
                block = Block(start, block.num_bytes + neighbour.num_bytes, block.marks.merged(neighbour.marks))
        self._push(block)

    def free_before(self, end: int) -> int:
        """Return how many bytes are free right before an address."""
        block = self._by_end.get(end)
        return 0 if block is None else block.num_bytes

    def _push(self, block: Block) -> None:
        if block.num_bytes:
            bisect.insort(self._by_size, (block.num_bytes, block.start))
            self._by_start[block.start] = self._by_end[block.end] = block
            self.free_bytes += block.num_bytes

    def _pop(self, block: Block) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (block.num_bytes, block.start))]
        del self._by_start[block.start], self._by_end[block.end]
        self.free_bytes -= block.num_bytes
