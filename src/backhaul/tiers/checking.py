"""The contract of a tier, as a check that anyone can run on a tier of their own.

Covers: every promise of [Note: Tier contract] (base.py) that can be seen from outside, each with an error that names it.
Does not cover: speed, or what a tier does when its medium fails, which only its own tests can bring about.
"""

import random
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from backhaul.tiers.base import ALIGNMENT, Slot, Tier, TierFull

_SIZES = (1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, (1 << 20) + 3)
_SMALL_CAPACITY = 256 << 20  # a tier that holds more is not filled
_PATIENCE_S = 5.0  # what takes longer waits for a lock


def check_tier(make_tier: Callable[[], Tier], *, device: torch.device | str = "cpu") -> None:
    """Check a tier against [Note: Tier contract]; raise ``AssertionError`` with the promise it breaks.

    Args:
        make_tier: makes a tier that holds 8 MiB at least; called once for each promise. A tier of at most 256 MiB is filled as well, to
            see what it does then.
        device: where the tensors are.

    >>> from backhaul.testing import RecordingTier
    >>> check_tier(RecordingTier)
    """
    for check in (
        _check_round_trips,
        _check_order,
        _check_many_slots,
        _check_accounting,
        _check_full,
        _check_source,
        _check_free_in_flight,
        _check_double_free,
        _check_free_takes_no_lock,
        _check_threads,
        _check_close,
    ):
        tier = make_tier()
        try:
            check(_Bench(tier, torch.device(device)))
        finally:
            tier.close()


@dataclass(frozen=True)
class _Bench:
    """A tier under check, and the device whose tensors go there."""

    tier: Tier
    device: torch.device

    def noise(self, num_bytes: int, *, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(self.device)

    def store(self, content: Tensor) -> Slot:
        """Store a copy that nobody else holds."""
        return self.tier.store(content.clone())

    def holds(self, slot: Slot, expected: Tensor) -> bool:
        target = torch.zeros_like(expected)
        self.tier.load(slot, target).wait()
        return torch.equal(target, expected)

    def keep_busy(self) -> None:
        """Give the current stream work for a while, so that what is not ordered after it comes too early."""
        if self.device.type != "cpu":
            matrix = torch.zeros(4096, 4096, device=self.device)
            for _ in range(50):
                matrix = matrix @ matrix


def _check_round_trips(bench: _Bench) -> None:
    for num_bytes in _SIZES:
        expected = bench.noise(num_bytes, seed=num_bytes)
        slot = bench.store(expected)
        assert slot.num_bytes == num_bytes, f"slot.num_bytes is {slot.num_bytes} for a source of {num_bytes} bytes"
        slot.stored.wait()
        slot.stored.wait()
        for attempt in ("first", "second"):
            assert bench.holds(slot, expected), f"the {attempt} load of {num_bytes} bytes does not give back what was stored"
        assert slot.stored.done(), "stored.done() is false after the copy has ended"
        bench.tier.free(slot)


def _check_many_slots(bench: _Bench) -> None:
    rng = random.Random(0)
    contents = [bench.noise(rng.choice(_SIZES[:-1]) * rng.randint(1, 40), seed=index) for index in range(100)]
    slots = [bench.store(content) for content in contents]
    for _ in range(2):
        order = rng.sample(range(100), k=100)
        targets = [torch.zeros_like(contents[index]) for index in order]
        transfers = [bench.tier.load(slots[index], target) for index, target in zip(order, targets, strict=True)]
        for index, target, transfer in reversed(list(zip(order, targets, transfers, strict=True))):
            transfer.wait()
            assert torch.equal(target, contents[index]), "slots that are in use together do not keep their bytes apart"
        for index in order[::2]:  # makes holes and fills them
            bench.tier.free(slots[index])
            slots[index] = bench.store(contents[index].bitwise_not_())
    for slot in slots:
        bench.tier.free(slot)


def _check_accounting(bench: _Bench) -> None:
    assert (bench.tier.used_bytes, bench.tier.peak_bytes) == (0, 0), "a new tier is not empty"
    slots: list[Slot] = []
    used_bytes = [0]
    for num_bytes in (*_SIZES, *[0] * len(_SIZES)):
        if num_bytes:
            slots.append(bench.store(bench.noise(num_bytes, seed=0)))
        else:
            bench.tier.free(slots.pop(0))
        used_bytes.append(bench.tier.used_bytes)
        exact = sum(slot.num_bytes for slot in slots)
        aligned = sum(-(-slot.num_bytes // ALIGNMENT) * ALIGNMENT for slot in slots)  # a tier may count what alignment costs
        assert exact <= used_bytes[-1] <= aligned, f"used_bytes is {used_bytes[-1]} while the slots in use hold {exact}"
    assert bench.tier.peak_bytes == max(used_bytes), f"peak_bytes is {bench.tier.peak_bytes} and used_bytes was {max(used_bytes)}"


def _check_full(bench: _Bench) -> None:
    tier, capacity = bench.tier, bench.tier.capacity_bytes
    if capacity is None or capacity > _SMALL_CAPACITY:
        return
    content = bench.noise(capacity // 3, seed=0)
    slots = [bench.store(content), bench.store(content)]
    before = (tier.used_bytes, tier.peak_bytes)
    try:
        tier.store(torch.zeros(capacity - tier.used_bytes + 1, dtype=torch.uint8, device=bench.device))
    except TierFull:
        pass
    else:
        raise AssertionError(f"store does not raise TierFull for one byte more than the capacity of {capacity}")
    assert (tier.used_bytes, tier.peak_bytes) == before, "a store that raised TierFull changed used_bytes or peak_bytes"
    assert all(bench.holds(slot, content) for slot in slots), "a store that raised TierFull changed the bytes of other slots"
    for index in range(2):
        tier.free(slots[index])
        try:
            slots[index] = bench.store(content)
        except TierFull as error:
            raise AssertionError("store raises TierFull though a slot that was freed leaves room") from error
        assert bench.holds(slots[index], content), "the room of a freed slot does not keep new bytes"
    for slot in slots:
        tier.free(slot)


def _check_order(bench: _Bench) -> None:
    source, content = bench.noise(_SIZES[-1], seed=0), bench.noise(_SIZES[-1], seed=1)
    bench.keep_busy()
    source.copy_(content)
    slot = bench.tier.store(source)
    assert bench.holds(slot, content), "a load that was called before stored.wait() does not come after the store"

    slot.stored.wait()
    source.zero_()
    assert bench.holds(slot, content), "a source that was overwritten after stored.wait() changed the stored bytes"

    target = torch.empty_like(source)
    bench.keep_busy()
    target.zero_()
    bench.tier.load(slot, target).wait()
    assert torch.equal(target, content), "a load does not come after what the current stream held when it was called"
    bench.tier.free(slot)


def _check_source(bench: _Bench) -> None:
    content = bench.noise(_SIZES[-1], seed=0)
    bench.keep_busy()
    slots = [bench.store(content) for _ in range(4)]
    others = [torch.zeros_like(content) for _ in slots]  # would get the memory of sources that were let go
    assert all(bench.holds(slot, content) for slot in slots), "the source of a copy under way is not kept alive"
    del others
    for slot in slots:
        bench.tier.free(slot)

    storage = weakref.ref(content.untyped_storage())
    slot = bench.tier.store(content)
    slot.stored.wait()
    del content
    assert storage() is None, "the source is still held after stored.wait()"
    bench.tier.free(slot)


def _check_free_in_flight(bench: _Bench) -> None:
    first, second = bench.noise(_SIZES[-1], seed=0), bench.noise(_SIZES[-1], seed=1)
    for _ in range(10):
        bench.keep_busy()
        slot, target = bench.store(first), torch.zeros_like(first)
        transfer = bench.tier.load(slot, target)
        bench.tier.free(slot)
        other = bench.store(second)  # wants the bytes that were just freed
        transfer.wait()
        assert torch.equal(target, first), "the bytes of a freed slot were used again while a load still read them"
        assert bench.holds(other, second), "a copy of a freed slot wrote into a new slot"
        bench.tier.free(other)
        bench.tier.free(bench.store(first))
    assert bench.tier.used_bytes == 0, f"used_bytes is {bench.tier.used_bytes} after every slot was freed"


def _check_double_free(bench: _Bench) -> None:
    contents = [bench.noise(ALIGNMENT, seed=seed) for seed in range(2)]
    freed = bench.store(contents[0])
    bench.tier.free(freed)
    bench.tier.free(freed)
    assert bench.tier.used_bytes == 0, f"used_bytes is {bench.tier.used_bytes} after a slot was freed twice"
    slots = [bench.store(content) for content in contents]
    bench.tier.free(freed)
    assert bench.tier.used_bytes == 2 * ALIGNMENT, f"used_bytes is {bench.tier.used_bytes} after a slot was freed twice and two were stored"
    for slot, content in zip(slots, contents, strict=True):
        assert bench.holds(slot, content), "after a slot was freed twice, two slots share their bytes"
        bench.tier.free(slot)


def _check_free_takes_no_lock(bench: _Bench) -> None:
    """Free a slot at every line that the tier runs, on another thread: it waits for any lock that the tier holds there, an RLock too."""
    content = bench.noise(ALIGNMENT, seed=0)
    spares = [bench.store(content) for _ in range(300)]
    requests: SimpleQueue[Slot | None] = SimpleQueue()  # of all that threads talk by, it alone takes no Python lock that a tier may hold
    answers: SimpleQueue[None] = SimpleQueue()
    waited_in: list[str] = []

    def free_on_request() -> None:
        for slot in iter(requests.get, None):
            bench.tier.free(slot)
            answers.put(None)

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if spares and not waited_in:
            requests.put(spares.pop())
            try:
                answers.get(timeout=_PATIENCE_S)
            except Empty:
                waited_in.append(f"{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename}")
        return trace

    thread = threading.Thread(target=free_on_request, daemon=True)
    thread.start()
    tracer = sys.gettrace()
    target = torch.zeros_like(content)
    sys.settrace(trace)
    try:
        slot = bench.tier.store(content)
        transfer = bench.tier.load(slot, target)
        _ = bench.tier.used_bytes
    finally:
        sys.settrace(tracer)
        requests.put(None)
    thread.join()
    assert not waited_in, f"free waits for a lock that is held in {waited_in[0]}"
    transfer.wait()
    assert torch.equal(target, content), "free, called while the tier was in store or load, changed the bytes of another slot"
    for spare in (*spares, slot):
        bench.tier.free(spare)
    assert bench.tier.used_bytes == 0, f"used_bytes is {bench.tier.used_bytes} after slots were freed while the tier was in store or load"


def _check_threads(bench: _Bench) -> None:
    def work(number: int) -> None:
        for index in range(20):
            content = bench.noise(_SIZES[index % 4] * 7, seed=100 * number + index)
            slot = bench.store(content)
            assert bench.holds(slot, content), "threads that use a tier together get each other's bytes"
            bench.tier.free(slot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert bench.tier.used_bytes == 0, f"used_bytes is {bench.tier.used_bytes} after all threads freed their slots"


def _check_close(bench: _Bench) -> None:
    content = bench.noise(_SIZES[-1], seed=0)
    slot = bench.store(content)
    bench.tier.close()
    assert bench.holds(slot, content), "a slot in use cannot be read after close()"
    bench.tier.free(slot)
    assert bench.tier.used_bytes == 0, f"used_bytes is {bench.tier.used_bytes} after close() and free()"
