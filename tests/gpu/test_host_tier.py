"""Page-locked memory on a real device: made fast, once, near the device; and what happens when there is no more."""

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backhaul.tiers import host, numa, slabs
from backhaul.tiers.host import release_host_memory
from backhaul.tiers.pools import pool_stream
from tests.conftest import in_threads
from tests.gpu.tracked_host import TrackedHost

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: it registers memory with it")]

GIB = 2**30
NUM_IN_FLIGHT = 30
MIB = 2**20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackedHost]:
    monkeypatch.setattr(host, "_warned", False)
    tier = TrackedHost(capacity="8GiB")
    tier.empty()
    yield tier
    tier.empty()


def pattern(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_memory_is_locked_at_12_gib_a_second_or_more(tier, device):
    tier.free(tier.store(pattern(1, device)))  # start CUDA and the threads
    rates = []
    for _ in range(3):
        release_host_memory()
        began = time.perf_counter()
        slot = tier.reserve(4 * GIB, device)
        rates.append(4 / (time.perf_counter() - began))
        assert slot.host.is_pinned()
        tier.free(slot)
    print(f"locked at {max(rates):.1f} GiB/s")
    assert max(rates) >= 12


def test_c08_locked_memory_is_exact_and_goes_back(tier, device):
    before = tier.locked_bytes
    slots = [tier.store(pattern(129 * MIB, device)) for _ in range(15)]
    assert tier.locked_bytes - before <= 1.02 * tier.used_bytes + GIB
    for slot in slots:
        tier.free(slot)
    assert release_host_memory() == 2 * GIB
    assert tier.locked_bytes == before


def test_a_tensor_across_two_slabs_comes_back_whole(tier, device):
    sizes = [700 * MIB + 3, 600 * MIB + 5, 2500 * MIB + 1]
    tensors = [pattern(size, device) for size in sizes]
    stored = [tier.store(tensor) for tensor in tensors]
    for slot, tensor in zip(stored, tensors, strict=True):
        target = torch.zeros_like(tensor)
        tier.load(slot, target).wait()
        assert target.equal(tensor)
        tier.free(slot)


def test_c12_changing_sizes_lock_nothing_after_a_while(tier, device, monkeypatch):
    registered = []
    real = slabs.register

    def count(address: int, num_bytes: int, on: torch.device) -> None:
        registered.append(num_bytes)
        real(address, num_bytes, on)

    monkeypatch.setattr(slabs, "register", count)
    rng = random.Random(0)
    source = pattern(128 * MIB, device)
    before = num_mappings()
    for step in range(200):
        in_flight = []
        for _ in range(NUM_IN_FLIGHT + 10):
            in_flight.append(tier.store(source[: rng.randrange(8 * MIB, 128 * MIB)]))
            if len(in_flight) > NUM_IN_FLIGHT:
                slot = in_flight.pop(0)
                tier.load(slot, source[: slot.num_bytes]).wait()
                tier.free(slot)
        for slot in in_flight:
            tier.free(slot)
        if step == 99:
            warm = len(registered)
    torch.cuda.synchronize()
    assert registered
    assert len(registered) == warm
    assert sum(registered) <= 1.02 * tier.peak_bytes + GIB
    assert num_mappings() - before <= 50 + len(registered)


def test_a_refused_registration_leaves_no_error_behind(tier, device):
    address = tier.reserve(MIB, device).host.data_ptr()
    with pytest.raises(slabs.PinningError, match="cudaHostRegister"):
        slabs.register(address, 1 << 46, device)
    doubled = torch.ones(8, device=device) * 2  # the next launch
    torch.cuda.synchronize()
    assert doubled.sum().item() == 16


def test_without_locked_memory_copies_are_still_right(tier, device, monkeypatch):
    def refuse(address: int, num_bytes: int, on: torch.device) -> None:
        raise slabs.PinningError("CUDA error: out of memory")

    tensor = pattern(100 * MIB, device)
    with monkeypatch.context() as patches:
        patches.setattr(slabs, "register", refuse)
        with pytest.warns(RuntimeWarning, match="pinned") as caught:
            slots = [tier.store(tensor) for _ in range(2)]
    assert len(caught) == 1
    assert tier.pageable_bytes == 200 * MIB
    assert tier.locked_bytes == 0
    for slot in slots:
        target = torch.empty_like(tensor)
        tier.load(slot, target).wait()
        assert target.equal(tensor)
        tier.free(slot)
    release_host_memory()
    assert tier.store(tensor).host.is_pinned()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_slots_are_aligned_and_dtypes_survive(dtype, tier, device):
    for count in (1, 3, 5, 7, 1001):
        raw = pattern(count * dtype.itemsize, device)
        slot = tier.store(raw)
        assert slot.host.data_ptr() % 256 == 0
        target = torch.empty(count, dtype=dtype, device=device)
        tier.load(slot, target.view(torch.uint8)).wait()
        assert target.view(torch.uint8).equal(raw)


def test_c28_pages_lie_next_to_the_device(tier, device):
    node = numa.node_of(device)
    maps = Path("/proc/self/numa_maps")
    if node is None or not maps.exists():
        pytest.skip("one memory node, or a system that does not tell")
    slot = tier.reserve(GIB, device)
    address = slot.host.data_ptr()
    starts = [(int(line.split()[0], 16), line) for line in maps.read_text().splitlines()]
    line = max((start, line) for start, line in starts if start <= address)[1]
    pages = {int(number): int(count) for number, count in re.findall(r"\bN(\d+)=(\d+)", line)}
    assert pages[node] > 0.9 * sum(pages.values())


def test_threads_share_the_lanes(tier, device):
    wrong = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for step in range(30):
                value = (seed * 30 + step) % 251
                source = torch.full((40 * MIB,), value, dtype=torch.uint8, device=device)
                slot = tier.store(source)
                slot.stored.wait()
                target = torch.empty_like(source)
                tier.load(slot, target).wait()
                tier.free(slot)
                if not bool((target == value).all()):
                    wrong.append((seed, step))

    in_threads(*[lambda seed=seed: work(seed) for seed in range(3)])
    assert not wrong
    assert tier.used_bytes == 0


def test_the_pool_of_a_tensor_is_known_and_looking_it_up_is_cheap(device):
    side = torch.cuda.Stream(device)
    ours = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    with torch.cuda.stream(side):
        theirs = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert pool_stream(ours) == torch.cuda.current_stream(device).cuda_stream
    assert pool_stream(theirs) == side.cuda_stream
    assert pool_stream(theirs[1000:]) == side.cuda_stream
    began = time.perf_counter()
    for _ in range(20_000):
        pool_stream(ours)
    each_us = (time.perf_counter() - began) / 20_000 * 1e6
    print(f"{each_us:.2f} us a look-up")
    assert each_us < 4
    del ours, theirs
    torch.cuda.empty_cache()
    time.sleep(0.002)
    with torch.cuda.stream(side):
        moved = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert pool_stream(moved) == side.cuda_stream
