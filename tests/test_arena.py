"""The arena hands out memory that overlaps nothing, loses none of it, and wastes little."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.tiers.arena import Arena, Block, Marks, aligned
from backhaul.tiers.base import ALIGNMENT

SLAB = 1 << 16
MIB = 2**20
sizes = st.integers(1, SLAB)
steps = st.lists(st.one_of(st.tuples(st.just("take"), sizes), st.tuples(st.just("give"), st.integers(0, 1 << 30))), max_size=60)


class Grown:
    """An arena that grows by slabs on demand, as its owner does it."""

    def __init__(self, gap: int) -> None:
        self.arena = Arena()
        self.gap = gap
        self.slabs: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        return self.slabs[-1][0] + self.slabs[-1][1] if self.slabs else 0

    def take(self, num_bytes: int, slab_bytes: int = SLAB) -> Block:
        block = self.arena.take(num_bytes)
        if block is None:
            start = self.end + self.gap * bool(self.slabs)
            size = aligned(num_bytes - self.arena.free_before(start), slab_bytes)
            self.arena.add(start, size)
            self.slabs.append((start, size))
            block = self.arena.take(num_bytes)
        assert block is not None
        return block


@given(steps, st.sampled_from([0, ALIGNMENT]))
@settings(max_examples=200, deadline=None)
def test_blocks_never_overlap_and_every_byte_comes_back(steps, gap):
    grown = Grown(gap)
    taken: list[Block] = []
    for what, number in steps:
        if what == "take":
            block = grown.take(number)
            assert block.start % ALIGNMENT == 0
            assert number <= block.num_bytes < number + ALIGNMENT
            assert any(start <= block.start and block.end <= start + size for start, size in grown.slabs) or gap == 0
            taken.append(block)
        elif taken:
            grown.arena.give(taken.pop(number % len(taken)))
        assert all(a.end <= b.start for a, b in pairwise(sorted(taken)))
        assert grown.arena.free_bytes + sum(block.num_bytes for block in taken) == grown.arena.held_bytes
    for block in taken:
        grown.arena.give(block)
    # Whole again: each slab can be taken as one block.
    assert all(grown.arena.remove(start, size) is not None for start, size in grown.slabs)
    assert grown.arena.held_bytes == grown.arena.free_bytes == 0
    assert grown.arena.take(1) is None


@given(st.permutations(range(6)), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=6, max_size=6))
def test_merged_blocks_keep_the_last_copy_of_each_direction(order, numbers):
    arena = Arena()
    arena.add(0, 6 * ALIGNMENT)
    blocks = [arena.take(ALIGNMENT) for _ in range(6)]
    for index in order:
        arena.give(blocks[index]._replace(marks=Marks(*numbers[index])))
    assert arena.take(6 * ALIGNMENT).marks == (max(d2h for d2h, _ in numbers), max(h2d for _, h2d in numbers))


def test_a_block_keeps_the_marks_of_the_memory_it_is_cut_from():
    arena = Arena()
    arena.add(0, 4096)
    arena.give(arena.take(4096)._replace(marks=Marks(3, 5)))
    assert arena.take(256).marks == arena.take(512).marks == Marks(3, 5)


def test_the_smallest_block_that_fits_is_taken():
    arena = Arena()
    for start, size in ((0, 4096), (8192, 1024), (16384, 2048)):
        arena.add(start, size)
    assert [arena.take(1000).start, arena.take(2000).start, arena.take(4000).start] == [8192, 16384, 0]


def test_a_slab_in_use_is_not_removed():
    arena = Arena()
    arena.add(0, 4096)
    block = arena.take(256)
    assert arena.remove(0, 4096) is None
    arena.give(block)
    assert arena.remove(0, 4096) == Marks()


def test_c08_alignment_is_all_the_waste():
    grown = Grown(gap=0)
    wanted = [129 * MIB, 281 * MIB, 448 * MIB + 1, 3, 56 * MIB - 1]
    given_out = sum(grown.take(num_bytes, 1024 * MIB).num_bytes for num_bytes in wanted)
    assert given_out - sum(wanted) < len(wanted) * ALIGNMENT


def test_changing_sizes_need_little_more_than_their_peak_and_stop_growing():
    """200 steps of 1F1B with four microbatches in flight, as workload W1 saves them, token counts per expert at random."""
    rng = random.Random(0)
    grown, slab = Grown(gap=0), 1024 * MIB
    live = peak = 0
    held_after: list[int] = []
    for _ in range(200):
        in_flight: list[list[tuple[Block, int]]] = []
        for _ in range(8):
            tokens = [rng.uniform(0.7, 1.3) for _ in range(3)]
            microbatch = []
            for mib in (448 * tokens[0], 448 * tokens[1], 256 * tokens[2], 256, 192, 192, 128, 128, *[56] * 7, *[8] * 6):
                num_bytes = int(mib * MIB)
                microbatch.append((grown.take(num_bytes, slab), num_bytes))
                live += num_bytes
                peak = max(peak, live)
            in_flight.append(microbatch)
            if len(in_flight) == 4:
                for block, num_bytes in reversed(in_flight.pop(0)):
                    grown.arena.give(block)
                    live -= num_bytes
        for block, num_bytes in (pair for microbatch in in_flight for pair in microbatch):
            grown.arena.give(block)
            live -= num_bytes
        held_after.append(grown.arena.held_bytes)
    assert held_after[-1] <= 1.02 * peak + slab
    assert held_after[99] == held_after[-1]
