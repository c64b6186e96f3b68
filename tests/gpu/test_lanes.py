"""Copies run at the speed of the link and block nobody; and on a real device, too, each edge is needed."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from backhaul._torch import empty_host_cache
from backhaul.tiers import lanes
from backhaul.tiers.host import PinnedHost
from backhaul.tiers.lanes import Lane, Lanes, lanes_of
from backhaul.tiers.streams import CudaStream
from tests.gpu.tracked_host import TrackedHost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: it delays kernels and reads CUDA's clocks"),
]

GIB = 2**30
TWO_CHUNKS = 64 * 2**20  # from a fresh arena, so the two lie on the lane's two streams
SLEEP_CYCLES = 200_000_000  # about 0.1 s


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def both(device: torch.device) -> Lanes:
    return lanes_of(device)


@pytest.fixture
def tier() -> Iterator[TrackedHost]:
    tier = TrackedHost(capacity="5GiB")
    tier.empty()
    yield tier
    tier.empty()


def full(value: int, device: torch.device) -> torch.Tensor:
    return torch.full((TWO_CHUNKS,), value, dtype=torch.uint8, device=device)


def delay(monkeypatch: pytest.MonkeyPatch, lane: Lane) -> None:
    """Have each copy of a lane begin late, with its edges behind it."""

    def sleep(stream: CudaStream) -> None:
        if stream in lane._streams:
            with stream.owner:
                torch.cuda._sleep(SLEEP_CYCLES)

    monkeypatch.setattr(lanes, "_before_copy", sleep)


# Each scenario returns whether all bytes are right.


def store_what_is_still_being_made(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    source = full(1, device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    source.fill_(2)
    slot = tier.store(source)
    slot.stored.synchronize()
    return bool((slot.host == 2).all())


def load_into_memory_still_in_use(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    slot = tier.store(full(3, device))
    buffer, read = full(4, device), full(0, device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read.copy_(buffer)
    tier.load(slot, buffer).wait()
    torch.cuda.synchronize()
    return bool((read == 4).all() and (buffer == 3).all())


def release_before_the_last_chunk(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    source = full(5, device)
    torch.cuda.synchronize()
    delay(monkeypatch, both.d2h)  # the first chunk alone
    slot = tier.store(source)
    slot.stored.wait()
    source.fill_(6)
    torch.cuda.synchronize()
    return bool((slot.host == 5).all())


def load_what_is_still_being_stored(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    earlier = tier.store(full(7, device))
    tier.free(earlier)
    source, target = full(8, device), full(0, device)
    torch.cuda.synchronize()
    delay(monkeypatch, both.d2h)
    slot = tier.store(source)
    assert slot.host.data_ptr() == earlier.host.data_ptr()
    tier.load(slot, target).wait()
    torch.cuda.synchronize()
    return bool((target == 8).all())


def store_over_what_is_still_being_loaded(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    first, source, target = tier.store(full(9, device)), full(10, device), full(0, device)
    torch.cuda.synchronize()
    delay(monkeypatch, both.h2d)
    tier.load(first, target)
    tier.free(first)
    second = tier.store(source)
    assert second.host.data_ptr() == first.host.data_ptr()
    torch.cuda.synchronize()
    return bool((target == 9).all() and (second.host == 10).all())


def use_what_is_still_being_loaded(tier: PinnedHost, both: Lanes, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    slot, target = tier.store(full(11, device)), full(0, device)
    torch.cuda.synchronize()
    delay(monkeypatch, both.h2d)
    tier.load(slot, target).wait()
    used = target.clone()
    torch.cuda.synchronize()
    return bool((used == 11).all())


SCENARIOS = [
    (store_what_is_still_being_made, "_wait_producer"),
    (load_into_memory_still_in_use, "_wait_producer"),
    (release_before_the_last_chunk, "_wait_previous_chunk"),
    (load_what_is_still_being_stored, "_wait_store"),
    (store_over_what_is_still_being_loaded, "_wait_block"),
    (use_what_is_still_being_loaded, "_wait_copy"),
]


@pytest.mark.parametrize(("scenario", "edge"), SCENARIOS, ids=lambda value: getattr(value, "__name__", value))
def test_every_edge_is_needed(scenario: Callable[..., bool], edge: str, tier, both, device, monkeypatch):
    assert scenario(tier, both, device, monkeypatch)
    tier.empty()
    monkeypatch.setattr(lanes, "_before_copy", lambda stream: None)
    monkeypatch.setattr(lanes, edge, lambda stream, event: None)
    assert not scenario(tier, both, device, monkeypatch)


def test_dropping_a_tensor_in_mid_copy_is_safe(tier, both, device, monkeypatch):
    source = torch.randint(0, 256, (TWO_CHUNKS,), dtype=torch.uint8, device=device)
    expected = source.cpu()
    address = source.data_ptr()
    delay(monkeypatch, both.d2h)
    slot = tier.store(source)
    del source
    others = [torch.zeros(TWO_CHUNKS, dtype=torch.uint8, device=device) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert slot.host.equal(expected)
    allocated = torch.cuda.memory_allocated(device)
    both.d2h.prune()
    assert allocated - torch.cuda.memory_allocated(device) == TWO_CHUNKS


def test_the_host_never_waits(tier, both, device):
    source, target = full(1, device), full(0, device)
    tier.load(tier.store(source), target).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * SLEEP_CYCLES)
    began = time.perf_counter()
    for _ in range(5):
        slot = tier.store(source)
        slot.stored.wait()
        tier.load(slot, target).wait()
        tier.free(slot)
    took_ms = (time.perf_counter() - began) * 1e3
    assert not torch.cuda.current_stream().query()
    assert took_ms < 50
    torch.cuda.synchronize()


def test_steps_without_a_synchronisation_between_them_stay_right(tier, both, device, monkeypatch):
    delay(monkeypatch, both.h2d)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(6):
        source = full(step + 1, device)
        slot = tier.store(source)
        slot.stored.wait()
        del source
        target = torch.empty(TWO_CHUNKS, dtype=torch.uint8, device=device)
        tier.load(slot, target).wait()
        tier.free(slot)
        wrong += (target != step + 1).sum()
        del target
    assert wrong.item() == 0


# Rates. Best of five: the question is what the link can do.


def best_ms(*works: Callable[[], list[Callable[[], None]]]) -> list[float]:
    """Return the best time of each, taken in turn: the link's rate drifts. Works return what makes the current stream wait for them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(8):
        for work, found in zip(works, times, strict=True):
            torch.cuda.synchronize()
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            for wait in work():
                wait()
            ended.record()
            torch.cuda.synchronize()
            found.append(begun.elapsed_time(ended))
    return [min(found) for found in times]


@pytest.mark.parametrize("directions", [("d2h",), ("h2d",), ("d2h", "h2d")], ids="+".join)
def test_lanes_copy_at_the_rate_of_one_plain_large_copy(directions, tier, both, device):
    num_bytes = 2 * GIB
    on_device = {direction: torch.zeros(num_bytes, dtype=torch.uint8, device=device) for direction in directions}
    pinned = {direction: torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for direction in directions}
    slots = {direction: tier.reserve(num_bytes, device) for direction in directions}
    streams = {direction: torch.cuda.Stream() for direction in directions}

    def ends(direction: str, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (host, on_device[direction]) if direction == "d2h" else (on_device[direction], host)

    def plain() -> list[Callable[[], None]]:
        now = torch.cuda.current_stream().record_event()
        for direction in directions:
            streams[direction].wait_event(now)
            with torch.cuda.stream(streams[direction]):
                target, source = ends(direction, pinned[direction])
                target.copy_(source, non_blocking=True)
        return [partial(torch.cuda.current_stream().wait_stream, streams[direction]) for direction in directions]

    def on_lanes() -> list[Callable[[], None]]:
        return [getattr(both, direction).copy(*ends(direction, slots[direction].host)).order for direction in directions]

    plain_ms, lanes_ms = best_ms(plain, on_lanes)
    share = plain_ms / lanes_ms
    total_gb = len(directions) * num_bytes / 1e6
    print(f"{'+'.join(directions)}: plain {total_gb / plain_ms:.1f}, lanes {total_gb / lanes_ms:.1f} GB/s ({share:.1%})")
    assert share >= (0.98 if len(directions) == 1 else 0.95)
    for direction in directions:
        lane = getattr(both, direction)
        lane.prune()
        assert 0.5 < lane.rate_gbps / (num_bytes / 1e6 / lanes_ms) < 2.0
    for slot in slots.values():
        tier.free(slot)
    pinned.clear()
    empty_host_cache()


@pytest.mark.parametrize("directions", [("d2h",), ("h2d",), ("d2h", "h2d")], ids="+".join)
def test_small_copies_of_the_user_are_not_blocked(directions, tier, both, device):
    on_device = torch.zeros(GIB, dtype=torch.uint8, device=device)
    slots = [tier.reserve(GIB, device) for _ in range(len(directions) * 2)]
    flag = torch.ones((), device=device)
    flag.item()
    waited_ms: dict[str, list[float]] = {"item": [], "cuda": []}
    for _ in range(7):
        torch.cuda.synchronize()
        copies = []
        for index, direction in enumerate(directions * 2):  # 2 GiB each way
            host = slots[index].host
            target, source = (host, on_device) if direction == "d2h" else (on_device, host)
            copies.append(getattr(both, direction).copy(target, source))
        time.sleep(0.002)  # the queue is well under way
        began = time.perf_counter()
        flag.item()
        waited_ms["item"].append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        torch.ones(16).to(device)
        waited_ms["cuda"].append((time.perf_counter() - began) * 1e3)
        assert not any(copy.done() for copy in copies[-len(directions) :])
        torch.cuda.synchronize()
    print({what: [round(ms, 2) for ms in times] for what, times in waited_ms.items()})
    assert all(statistics.median(times) <= 1.0 for times in waited_ms.values())
    for slot in slots:
        tier.free(slot)
