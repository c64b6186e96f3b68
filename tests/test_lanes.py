"""Copies on lanes keep every byte right, whatever order the device runs them in; and each edge is needed for that."""

import random
import weakref
from itertools import pairwise

import pytest
import torch

from backhaul.tiers import lanes
from backhaul.tiers.host import PinnedHost, release_host_memory
from tests.simulated_device import SimulatedDevice

CPU = torch.device("cpu")
NUM_SEEDS = 40


def train_and_count_wrong_bytes(monkeypatch: pytest.MonkeyPatch, seed: int) -> int:
    """Store, reuse, load and free without waiting on the host, as offloading does; return how often a consumer saw a wrong byte."""
    with monkeypatch.context() as patches:
        device = SimulatedDevice(patches, seed)
        rng = random.Random(seed)
        tier = PinnedHost(capacity=4096)
        wrong: list[int] = []
        for step in range(4):
            saved = []
            for index in range(3):
                value, size = 16 * step + index + 1, rng.choice([32, 128, 250])
                tensor = torch.zeros(size, dtype=torch.uint8)
                device.compute.do(lambda t=tensor, v=value: t.fill_(v))  # forward makes it
                slot = tier.store(tensor)
                slot.stored.wait()
                device.compute.do(lambda t=tensor: t.fill_(200))  # released: its memory has another use
                saved.append((slot, value, size))
            for slot, value, size in reversed(saved):
                target = torch.full((size,), 201, dtype=torch.uint8)
                # The buffer's memory is still in use by compute when it is handed out.
                device.compute.do(lambda t=target: wrong.append(int((t != 201).sum())))
                load = tier.load(slot, target)
                load.order()
                tier.free(slot)
                device.compute.do(lambda t=target, v=value: wrong.append(int((t != v).sum())))
                if rng.random() < 0.5:
                    unused = tier.store(torch.full((size,), value, dtype=torch.uint8))  # a branch that backward never needs
                    tier.load(unused, torch.zeros(size, dtype=torch.uint8))
                    tier.free(unused)
                    device.compute = device.new_stream()  # the next producer does not come after it
        device.run()
        assert tier.used_bytes == 0
        assert len(wrong) == 24
        return sum(wrong)


def test_no_order_of_execution_gives_a_wrong_byte(monkeypatch):
    assert all(train_and_count_wrong_bytes(monkeypatch, seed) == 0 for seed in range(NUM_SEEDS))


@pytest.mark.parametrize("edge", ["_wait_producer", "_wait_previous_chunk", "_wait_copy"])
def test_without_an_edge_some_order_gives_wrong_bytes(monkeypatch, edge):
    monkeypatch.setattr(lanes, edge, lambda stream, event: None)
    assert any(train_and_count_wrong_bytes(monkeypatch, seed) for seed in range(NUM_SEEDS))


def load_at_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> bool:
    with monkeypatch.context() as patches:
        device = SimulatedDevice(patches, seed)
        tier = PinnedHost(capacity=200)
        source, target = torch.full((200,), 1, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
        tier.load(tier.store(source), target)  # nobody has waited for the store
        device.run()
        return target.equal(source)


def test_a_load_comes_after_the_store_that_filled_its_slot(monkeypatch):
    assert all(load_at_once(monkeypatch, seed) for seed in range(NUM_SEEDS))
    monkeypatch.setattr(lanes, "_wait_store", lambda stream, event: None)
    assert not all(load_at_once(monkeypatch, seed) for seed in range(NUM_SEEDS))


def reuse_while_loading(monkeypatch: pytest.MonkeyPatch, seed: int) -> bool:
    with monkeypatch.context() as patches:
        device = SimulatedDevice(patches, seed)
        tier = PinnedHost(capacity=128)
        first = tier.store(torch.full((128,), 1, dtype=torch.uint8))
        device.run()
        target = torch.zeros(128, dtype=torch.uint8)
        tier.load(first, target)
        tier.free(first)
        second = tier.store(torch.full((128,), 2, dtype=torch.uint8))
        assert second.host.data_ptr() == first.host.data_ptr()
        device.run()
        return bool((target == 1).all())


def test_host_memory_is_reused_only_after_the_last_load_that_reads_it(monkeypatch):
    assert all(reuse_while_loading(monkeypatch, seed) for seed in range(NUM_SEEDS))
    monkeypatch.setattr(lanes, "_wait_block", lambda stream, event: None)
    assert not all(reuse_while_loading(monkeypatch, seed) for seed in range(NUM_SEEDS))


@pytest.mark.parametrize("last", ["store", "load"])
def test_memory_reserved_for_the_host_has_no_copy_in_flight(monkeypatch, last):
    device = SimulatedDevice(monkeypatch)
    tier = PinnedHost(capacity=256)
    slot = tier.store(torch.full((256,), 1, dtype=torch.uint8))
    copy = slot.stored
    if last == "load":
        copy = tier.load(slot, torch.zeros(256, dtype=torch.uint8))
    tier.free(slot)
    assert not copy.done()
    reserved = tier.reserve(256, CPU)
    assert copy.done()
    reserved.host.fill_(9)
    device.run()
    assert (reserved.host == 9).all()


def test_memory_goes_back_to_the_system_only_after_its_last_copy(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    tier = PinnedHost(capacity=256)
    slot = tier.store(torch.full((256,), 1, dtype=torch.uint8))
    tier.free(slot)
    assert release_host_memory() > 0
    assert slot.stored.done()
    device.run()


def test_a_lane_keeps_both_ends_until_the_copy_has_ended(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    source, target = torch.ones(128, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    ends = weakref.ref(source), weakref.ref(target)
    transfer = device.lanes.d2h.copy(target, source)
    transfer.order()
    del source, target
    device.lanes.d2h.prune()
    assert all(end() is not None for end in ends)
    device.run()
    device.lanes.d2h.prune()
    assert transfer.done()
    assert all(end() is None for end in ends)


def test_who_waits_for_a_copy_may_reuse_its_memory_at_once(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    monkeypatch.setattr(device, "copy", lambda stream, target, source, start, stop: None)
    source, target = torch.ones(128, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    ends = weakref.ref(source), weakref.ref(target)
    transfer = device.lanes.d2h.copy(target, source)
    del source, target
    transfer.wait()
    assert not transfer.done()
    assert all(end() is None for end in ends)


def test_each_chunk_takes_the_other_stream(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    used = []
    monkeypatch.setattr(device, "copy", lambda stream, target, source, start, stop: used.append((stream, stop - start)))
    target = torch.zeros(4096, dtype=torch.uint8)
    start = -target.data_ptr() % 64
    device.lanes.h2d.copy(target[start : start + 200], torch.zeros(200, dtype=torch.uint8))
    device.lanes.h2d.copy(target[start : start + 64], torch.zeros(64, dtype=torch.uint8))
    assert [size for _, size in used] == [64, 64, 64, 8, 64]
    assert len({stream for stream, _ in used}) == 2
    assert all(first is not second for (first, _), (second, _) in pairwise(used))


def test_chunks_are_of_32_mebibytes():
    host = torch.empty(100 * 2**20, dtype=torch.uint8)
    sizes = [stop - start for start, stop in lanes._chunks(host, host)]
    assert max(sizes) == 32 * 2**20
    assert sizes[1:-1] == [32 * 2**20] * len(sizes[1:-1])
    assert sum(sizes) == 100 * 2**20


def test_there_is_one_lane_a_direction_and_device_whoever_copies(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert lanes.lanes_of(first) is lanes.lanes_of(torch.device("cuda", 0))
    assert lanes.lanes_of(first).d2h is not lanes.lanes_of(first).h2d
    assert lanes.lanes_of(first).d2h is not lanes.lanes_of(second).d2h
    stored = [PinnedHost(capacity=4096).store(torch.ones(32, dtype=torch.uint8)) for _ in range(3)]
    assert [slot.stored.number for slot in stored] == [1, 2, 3]
    assert device.lanes.d2h.last_number == 3


def test_chunks_end_where_host_addresses_are_round(monkeypatch):
    monkeypatch.setattr(lanes, "CHUNK_BYTES", 64)
    host = torch.zeros(4096, dtype=torch.uint8)
    start = -host.data_ptr() % 64 + 40
    chunks = list(lanes._chunks(host[start : start + 100], torch.zeros(100, dtype=torch.uint8)))
    assert chunks == [(0, 24), (24, 88), (88, 100)]


def test_a_lane_outlives_a_copy_that_failed_midway(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    tier = PinnedHost(capacity=1024)
    good = torch.full((200,), 7, dtype=torch.uint8)
    copied = []

    copy = device.copy

    def fail_at_the_second(stream, target, source, start, stop):
        copied.append(start)
        if len(copied) == 2:
            raise RuntimeError("device says no")
        copy(stream, target, source, start, stop)

    with monkeypatch.context() as patches:
        patches.setattr(device, "copy", fail_at_the_second)
        with pytest.raises(RuntimeError, match="device says no"):
            tier.store(torch.full((200,), 6, dtype=torch.uint8))
    assert tier.used_bytes == 0
    device.lanes.d2h.prune()
    assert device.lanes.d2h.transfer(1) is not None  # the first chunk is still queued, and needs both ends
    slot = tier.store(good)
    target = torch.zeros(200, dtype=torch.uint8)
    tier.load(slot, target)
    device.run()
    assert target.equal(good)
    device.lanes.d2h.prune()
    assert device.lanes.d2h.transfer(1) is None


def test_the_rate_is_measured_from_large_copies(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    monkeypatch.setattr(lanes, "_LARGE_BYTES", 128)
    lane = device.lanes.d2h
    for size in (64, 200):
        lane.copy(torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
        device.run()
        lane.prune()
    assert lane.rate_gbps == 200 / 1e6  # in the one millisecond that everything takes here


def test_copies_beside_others_do_not_pass_for_the_rate(monkeypatch):
    device = SimulatedDevice(monkeypatch)
    monkeypatch.setattr(lanes, "_LARGE_BYTES", 128)
    lane = device.lanes.d2h
    assert lane.rate_gbps is None
    for num in range(100):
        size = 500 if num % 8 == 0 else 450  # seven in eight take as long for less
        lane.copy(torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
        device.run()
        lane.prune()
    assert lane.rate_gbps == 500 / 1e6
    for _ in range(lanes._LATEST):  # the link has become slower
        lane.copy(torch.zeros(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8))
        device.run()
        lane.prune()
    assert lane.rate_gbps == 200 / 1e6
