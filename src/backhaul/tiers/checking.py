"""The contract of a tier as a check that anyone can run on a tier of their own.

Covers: every promise of [Note: Tier contract] that can be seen from outside.
Does not cover: what happens when the medium fails, which only the tier's own tests can bring about.
"""

import gc
import random
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from backhaul.tiers.base import ALIGNMENT, Slot, Tier, TierFull

SIZES = (1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, (1 << 20) + 3)
SMALL_CAPACITY = 256 << 20  # a tier that holds more is not filled


def check_tier(make_tier: Callable[[], Tier], *, device: torch.device | str = "cpu") -> None:
    """Check a tier against [Note: Tier contract]; raise ``AssertionError`` with the promise it breaks.

    Args:
        make_tier: makes a tier; called once for each promise, so that one broken promise does not hide another. It must hold 8 MiB. Where its
            capacity is 256 MiB or less, it is filled to see what it does when it is full: check both kinds.
        device: where the tensors are.

    >>> from backhaul.testing import RecordingTier
    >>> check_tier(RecordingTier)
    """
    for check in (
        _check_round_trips,
        _check_many_slots,
        _check_accounting,
        _check_full,
        _check_order,
        _check_ends_stay_alive,
        _check_source_is_given_up,
        _check_free_in_flight,
        _check_double_free,
        _check_threads,
        _check_close,
    ):
        tier = make_tier()
        try:
            check(tier, torch.device(device))
        finally:
            tier.close()


def _promise(kept: bool, broken: str) -> None:
    if not kept:
        raise AssertionError(f"[Note: Tier contract] {broken}")


def _noise(num_bytes: int, device: torch.device, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(device)


def _load(tier: Tier, slot: Slot, device: torch.device) -> Tensor:
    target = torch.zeros(slot.num_bytes, dtype=torch.uint8, device=device)
    tier.load(slot, target).wait()
    return target


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _keep_busy(device: torch.device) -> None:
    """Give the current stream work for a while, so that what is not ordered after it comes too early."""
    if device.type != "cpu":
        matrix = torch.zeros(4096, 4096, device=device)
        for _ in range(50):
            matrix = matrix @ matrix


def _check_round_trips(tier: Tier, device: torch.device) -> None:
    for num_bytes in SIZES:
        expected = _noise(num_bytes, device, seed=num_bytes)
        slot = tier.store(expected.clone())
        _promise(slot.num_bytes == num_bytes, f"slot.num_bytes is {slot.num_bytes} for {num_bytes} bytes")
        for _ in range(2):
            slot.stored.wait()
        for attempt in ("first", "second"):
            same = torch.equal(_load(tier, slot, device), expected)
            _promise(same, f"the {attempt} load of {num_bytes} bytes does not give back what was stored")
        _finish(device)
        _promise(slot.stored.done(), "stored.done() is false after the copy has ended")
        tier.free(slot)


def _check_many_slots(tier: Tier, device: torch.device) -> None:
    order = random.Random(0)
    sizes = [order.choice(SIZES[:-1]) * order.randint(1, 40) for _ in range(100)]
    expected = [_noise(num_bytes, device, seed=index) for index, num_bytes in enumerate(sizes)]
    slots = [tier.store(tensor.clone()) for tensor in expected]
    indices = list(range(len(slots)))
    for _ in range(2):
        order.shuffle(indices)
        targets = {index: torch.zeros(sizes[index], dtype=torch.uint8, device=device) for index in indices}
        transfers = {index: tier.load(slots[index], targets[index]) for index in indices}
        order.shuffle(indices)
        for index in indices:
            transfers[index].wait()
            _promise(torch.equal(targets[index], expected[index]), "slots that are in use together do not keep their bytes apart")
        for index in indices[::2]:  # reuse the holes
            tier.free(slots[index])
            expected[index] = _noise(sizes[index], device, seed=1000 + index)
            slots[index] = tier.store(expected[index].clone())
    for slot in slots:
        tier.free(slot)


def _check_accounting(tier: Tier, device: torch.device) -> None:
    _promise(tier.used_bytes == 0 and tier.peak_bytes == 0, "a new tier is not empty")
    slots: list[Slot] = []
    highest = 0
    for num_bytes in SIZES:
        slots.append(tier.store(_noise(num_bytes, device, seed=0)))
        _promise_used(tier, slots)
        highest = max(highest, tier.used_bytes)
    while slots:
        tier.free(slots.pop(0))
        _promise_used(tier, slots)
    _promise(tier.peak_bytes == highest, f"peak_bytes is {tier.peak_bytes}, and used_bytes has been {highest}")


def _promise_used(tier: Tier, slots: list[Slot]) -> None:
    # A tier may count what alignment costs.
    exact = sum(slot.num_bytes for slot in slots)
    aligned = sum(-(-slot.num_bytes // ALIGNMENT) * ALIGNMENT for slot in slots)
    _promise(exact <= tier.used_bytes <= aligned, f"used_bytes is {tier.used_bytes}, and the slots in use hold {exact}")


def _check_full(tier: Tier, device: torch.device) -> None:
    capacity = tier.capacity_bytes
    if capacity is None or capacity > SMALL_CAPACITY:
        return
    expected = _noise(capacity // 3, device, seed=0)
    slots = [tier.store(expected.clone()) for _ in range(2)]
    used, peak = tier.used_bytes, tier.peak_bytes
    try:
        tier.store(torch.zeros(capacity - used + 1, dtype=torch.uint8, device=device))
    except TierFull:
        pass
    else:
        _promise(False, f"store takes {capacity + 1} bytes in all, and the capacity is {capacity}")
    _promise((tier.used_bytes, tier.peak_bytes) == (used, peak), "a store that raised TierFull changed used_bytes or peak_bytes")
    for slot in slots:
        _promise(torch.equal(_load(tier, slot, device), expected), "a store that raised TierFull changed the bytes of another slot")
    tier.free(slots.pop())
    slots.append(tier.store(expected.clone()))
    _promise(torch.equal(_load(tier, slots[-1], device), expected), "the room of a freed slot cannot be used again")
    for slot in slots:
        tier.free(slot)


def _check_order(tier: Tier, device: torch.device) -> None:
    num_bytes = SIZES[-1]
    source, expected = _noise(num_bytes, device, seed=0), _noise(num_bytes, device, seed=1)
    _keep_busy(device)
    source.copy_(expected)
    slot = tier.store(source)
    target = torch.zeros_like(source)
    transfer = tier.load(slot, target)
    transfer.wait()
    _promise(torch.equal(target, expected), "a load that was called before stored.wait() does not come after the store")

    slot.stored.wait()
    source.zero_()
    _promise(torch.equal(_load(tier, slot, device), expected), "a source that was overwritten after stored.wait() changed the stored bytes")

    _keep_busy(device)
    target.zero_()
    tier.load(slot, target).wait()
    _promise(torch.equal(target, expected), "a load does not come after what the current stream held when it was called")
    tier.free(slot)


def _check_ends_stay_alive(tier: Tier, device: torch.device) -> None:
    num_bytes = SIZES[-1]
    expected = [_noise(num_bytes, device, seed=index) for index in range(4)]
    _keep_busy(device)
    slots = [tier.store(tensor.clone()) for tensor in expected]  # nobody but the tier has these
    others = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in expected]
    for slot, tensor in zip(slots, expected, strict=True):
        _promise(torch.equal(_load(tier, slot, device), tensor), "the source of a copy under way was not kept alive")
        tier.free(slot)
    del others


def _check_source_is_given_up(tier: Tier, device: torch.device) -> None:
    source = _noise(SIZES[-1], device, seed=0)
    storage = weakref.ref(source.untyped_storage())
    slot = tier.store(source)
    slot.stored.wait()
    gc.disable()  # reference counting alone must do
    try:
        del source
        _promise(storage() is None, "the source is still held after stored.wait()")
    finally:
        gc.enable()
    tier.free(slot)


def _check_free_in_flight(tier: Tier, device: torch.device) -> None:
    num_bytes = SIZES[-1]
    first, second = _noise(num_bytes, device, seed=0), _noise(num_bytes, device, seed=1)
    for _ in range(10):
        _keep_busy(device)
        slot, target = tier.store(first.clone()), torch.zeros_like(first)
        transfer = tier.load(slot, target)
        tier.free(slot)
        other = tier.store(second.clone())  # wants the bytes that were just freed
        transfer.wait()
        _promise(torch.equal(target, first), "the bytes of a freed slot were used again while a load still read them")
        _promise(torch.equal(_load(tier, other, device), second), "a copy of a freed slot wrote into a new slot")
        tier.free(other)
        tier.free(tier.store(first.clone()))
    _promise(tier.used_bytes == 0, f"used_bytes is {tier.used_bytes} after every slot was freed")


def _check_double_free(tier: Tier, device: torch.device) -> None:
    slot = tier.store(_noise(ALIGNMENT, device, seed=0))
    tier.free(slot)
    tier.free(slot)
    _promise(tier.used_bytes == 0, f"used_bytes is {tier.used_bytes} after a slot was freed twice")
    expected = [_noise(ALIGNMENT, device, seed=index) for index in (1, 2)]
    slots = [tier.store(tensor.clone()) for tensor in expected]
    tier.free(slot)
    for other, tensor in zip(slots, expected, strict=True):
        _promise(torch.equal(_load(tier, other, device), tensor), "after a slot was freed twice, two slots share their bytes")
        tier.free(other)


def _check_threads(tier: Tier, device: torch.device) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(20):
                expected = _noise(SIZES[index % 4] * 7, device, seed=100 * number + index)
                slot = tier.store(expected.clone())
                _promise(torch.equal(_load(tier, slot, device), expected), "threads that use a tier together get each other's bytes")
                tier.free(slot)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    _promise(tier.used_bytes == 0, f"used_bytes is {tier.used_bytes} after all threads freed their slots")


def _check_close(tier: Tier, device: torch.device) -> None:
    expected = _noise(SIZES[-1], device, seed=0)
    slot = tier.store(expected.clone())
    tier.close()
    _promise(torch.equal(_load(tier, slot, device), expected), "a slot cannot be read after close()")
    tier.free(slot)
    _promise(tier.used_bytes == 0, f"used_bytes is {tier.used_bytes} after close() and free")
