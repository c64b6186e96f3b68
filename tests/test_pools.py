"""Whose pool memory came from is known without asking the allocator each time, and is never out of date."""

from backhaul.tiers.pools import PoolMap


class FakeAllocator:
    def __init__(self) -> None:
        self.segments = [(4096, 100, 7), (0, 4096, 0), (10000, 500, 9)]
        self.released = 0
        self.now = 0.0
        self.num_snapshots = 0

    def snapshot(self) -> list[dict[str, int]]:
        self.num_snapshots += 1
        return [{"address": address, "total_size": size, "stream": stream, "device": 0} for address, size, stream in self.segments]

    def map(self) -> PoolMap:
        return PoolMap(self.snapshot, lambda: self.released, clock=lambda: self.now)


def test_addresses_are_found_in_their_segments():
    pools = FakeAllocator().map()
    assert [pools.stream_at(address) for address in (0, 4095, 4096, 4195, 10000, 10499)] == [0, 0, 7, 7, 9, 9]


def test_the_allocator_is_asked_again_only_for_what_is_new():
    allocator = FakeAllocator()
    pools = allocator.map()
    for _ in range(100):
        pools.stream_at(4100)
        allocator.now += 1.0
    assert allocator.num_snapshots == 1
    allocator.segments.append((20000, 100, 11))
    assert pools.stream_at(20050) == 11
    assert allocator.num_snapshots == 2


def test_memory_that_is_not_the_allocators_is_asked_for_once():
    allocator = FakeAllocator()
    pools = allocator.map()
    assert [pools.stream_at(5000), pools.stream_at(5000), pools.stream_at(99999)] == [None, None, None]
    assert allocator.num_snapshots == 3


def test_an_address_that_changed_hands_is_seen():
    allocator = FakeAllocator()
    pools = allocator.map()
    assert pools.stream_at(10000) == 9
    allocator.segments[2] = (10000, 500, 13)
    allocator.released += 500
    allocator.now += 0.002
    assert pools.stream_at(10000) == 13
