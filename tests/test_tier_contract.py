"""What tests are built on can be trusted.

check_tier passes tiers that keep the contract and names the promise that a broken one breaks; RecordingTier and
assert_same_training show faults.
"""

import itertools
import time
from collections import deque
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from backhaul.testing import GARBAGE, RecordingTier, TierRecord, assert_same_training, check_tier, same_bits
from backhaul.tiers import checking
from backhaul.tiers.base import TierFull, Transfer
from backhaul.tiers.disk import Disk

MAKERS = {
    "recording": RecordingTier,
    "recording, deferred": lambda: RecordingTier(deferred=True),
    "recording, small": lambda: RecordingTier(capacity=8 << 20),
    "recording, small, deferred": lambda: RecordingTier(capacity=8 << 20, deferred=True),
    "disk": Disk,
    "disk, small": lambda: Disk(capacity="8MiB"),
}


@pytest.mark.parametrize("make_tier", MAKERS.values(), ids=MAKERS)
def test_tier_keeps_the_contract(make_tier):
    check_tier(make_tier)


@pytest.mark.parametrize("make_tier", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    ("num_elements", "dtype"),
    [
        (3, torch.uint8),
        (5, torch.bfloat16),
        (7, torch.float32),
        (1, torch.bool),
        (9, torch.complex64),
        (11, torch.float8_e4m3fn),
        (2, torch.int64),
    ],
)
def test_C38_every_dtype_comes_back_bit_for_bit(make_tier, num_elements, dtype):
    # All bit patterns, NaN payloads among them; a bool is 0 or 1.
    num_bytes = num_elements * dtype.itemsize
    stored = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8).view(dtype)
    tier = make_tier()
    slots = [tier.store(stored.view(torch.uint8)) for _ in range(3)]
    for slot in slots:
        target = torch.zeros(num_bytes, dtype=torch.uint8)
        tier.load(slot, target).wait()
        assert same_bits(target.view(dtype), stored)
    tier.close()


# Broken tiers. Each breaks one promise.


class CutsOddSizes(RecordingTier):
    def load(self, slot, target):
        return super().load(_short(slot), target)


def _short(slot):
    if slot.num_bytes % 256 == 255:
        slot.data[-1] = 0
    return slot


class SharesSlots(RecordingTier):
    def store(self, source):
        slot = super().store(source)
        if source.numel() < 10_000:
            self.shared = getattr(self, "shared", torch.empty(10_000, dtype=torch.uint8))
            slot.data = self.shared[: source.numel()]
            slot.data.copy_(source)
        return slot


class CountsFreesTwice(RecordingTier):
    def free(self, slot):
        self._used_bytes -= slot.num_bytes if slot in self._freed else 0
        super().free(slot)


class CountsLateFreesAgain(RecordingTier):
    def free(self, slot):
        self._used_bytes -= slot.num_bytes if slot.freed else 0
        super().free(slot)


class CountsFreesAtTheNextStore(RecordingTier):
    used_bytes = property(lambda self: self._used_bytes)


class TakesBackWhenAskedAlone(RecordingTier):
    def store(self, source):
        freed, self._freed = self._freed, deque()
        try:
            return super().store(source)
        finally:
            self._freed = freed

    def load(self, slot, target):
        freed, self._freed = self._freed, deque()
        try:
            return super().load(slot, target)
        finally:
            self._freed = freed


class LocksToFree(RecordingTier):
    def free(self, slot):
        with self._lock:
            super().free(slot)


class ForgetsItsPeak(RecordingTier):
    peak_bytes = property(lambda self: self._used_bytes)


class CountsInPages(RecordingTier):
    used_bytes = property(lambda self: -(-self._used_bytes // 4096) * 4096)


class CountsWhatItRefused(RecordingTier):
    def store(self, source):
        try:
            return super().store(source)
        except TierFull:
            self._used_bytes += source.nbytes
            raise


class IgnoresItsCapacity(RecordingTier):
    capacity_bytes = property(lambda self: 8 << 20)


class Unordered(RecordingTier):
    """Reads a slot at once, whether it has been filled or not."""

    def load(self, slot, target):
        target.copy_(slot.data)
        return _Ended()


class _Ended(Transfer):
    def wait(self):
        pass

    def done(self):
        return True


class BorrowsTheSource(RecordingTier):
    def store(self, source):
        slot = super().store(source)
        slot.data = source
        return slot


class KeepsTheSource(RecordingTier):
    def store(self, source):
        slot = super().store(source)
        slot.stored.source = source
        return slot


class SpoilsTooSoon(RecordingTier):
    def free(self, slot):
        super().free(slot)
        slot.data.fill_(GARBAGE)


class MixesThreadsUp(RecordingTier):
    def load(self, slot, target):
        if slot.num_bytes < 10_000:
            self.current = slot
            time.sleep(0.0005)
            slot = self.current if self.current.num_bytes == slot.num_bytes else slot
        return super().load(slot, target)


class ForgetsOnClose(RecordingTier):
    closed = False

    def load(self, slot, target):
        if self.closed:
            slot.data.zero_()
        return super().load(slot, target)

    def close(self):
        self.closed = True


class NeverDone(RecordingTier):
    def store(self, source):
        slot = super().store(source)
        slot.stored.done = lambda: False
        return slot


@pytest.mark.parametrize(
    ("make_tier", "promise"),
    [
        (CutsOddSizes, "does not give back what was stored"),
        (SharesSlots, "do not keep their bytes apart"),
        (CountsFreesTwice, "freed twice"),
        (CountsLateFreesAgain, "freed twice"),
        (CountsFreesAtTheNextStore, "used_bytes is .* while the slots in use hold"),
        (lambda: TakesBackWhenAskedAlone(capacity=8 << 20), "though a slot that was freed leaves room"),
        (LocksToFree, "free waits for a lock that is held in (store|_start)"),
        (ForgetsItsPeak, "peak_bytes"),
        (CountsInPages, "used_bytes is 4096 while the slots in use hold 1"),
        (lambda: CountsWhatItRefused(capacity=8 << 20), "raised TierFull changed used_bytes"),
        (IgnoresItsCapacity, "one byte more than the capacity"),
        (lambda: Unordered(deferred=True), "called before stored.wait.. does not come after the store"),
        (BorrowsTheSource, "overwritten after stored.wait"),
        (KeepsTheSource, "still held after stored.wait"),
        (lambda: SpoilsTooSoon(deferred=True), "while a load still read them"),
        (MixesThreadsUp, "threads that use a tier together"),
        (ForgetsOnClose, "cannot be read after close"),
        (NeverDone, "done.. is false"),
    ],
)
def test_broken_promise_is_named(make_tier, promise, monkeypatch):
    monkeypatch.setattr(checking, "_PATIENCE_S", 0.5)
    with pytest.raises(AssertionError, match=promise):
        check_tier(make_tier)


# RecordingTier


def ones(num_bytes=16):
    return torch.ones(num_bytes, dtype=torch.uint8)


def load(tier, slot):
    target = torch.zeros(slot.num_bytes, dtype=torch.uint8)
    tier.load(slot, target).wait()
    return target


def test_records_say_what_was_done_in_order():
    tier = RecordingTier()
    a, b = tier.store(ones(3)), tier.store(ones(5))
    load(tier, b)
    tier.free(a)
    tier.free(a)
    assert tier.records == [TierRecord("store", 0, 3), TierRecord("store", 1, 5), TierRecord("load", 1, 5), TierRecord("free", 0, 3)]
    assert (tier.bytes_of("store"), tier.bytes_of("load"), tier.bytes_of("free"), tier.used_bytes, tier.peak_bytes) == (8, 5, 3, 5, 8)


def test_source_overwritten_without_a_wait_shows():
    for waits, expected in ((True, 1), (False, 7)):
        tier, source = RecordingTier(deferred=True), ones()
        slot = tier.store(source)
        if waits:
            slot.stored.wait()
        source.fill_(7)
        assert load(tier, slot).unique().tolist() == [expected]


def test_target_read_without_a_wait_shows():
    tier, target = RecordingTier(deferred=True), ones()
    transfer = tier.load(tier.store(ones()), target)
    assert target.unique().tolist() == [GARBAGE] and not transfer.done()
    transfer.wait()
    assert target.unique().tolist() == [1] and transfer.done()


def test_read_of_a_freed_slot_shows():
    tier = RecordingTier()
    slot = tier.store(ones())
    tier.free(slot)
    assert load(tier, slot).unique().tolist() == [GARBAGE]


@pytest.mark.parametrize("deferred", [False, True])
def test_C31_faults_come_where_they_were_asked_for(deferred):
    error = OSError(28, "No space left on device")
    tier = RecordingTier(fail_store={1: error}.get, deferred=deferred)
    tier.store(ones())
    with pytest.raises(OSError, match="No space"):
        tier.store(ones())
    assert tier.used_bytes == 16 and len(tier.records) == 1
    tier.store(ones())

    tier = RecordingTier(fail_write=error, deferred=deferred)
    slot = tier.store(ones())
    for wait in (slot.stored.wait, slot.stored.wait, tier.load(slot, ones()).wait):
        with pytest.raises(OSError, match="No space"):
            wait()
    tier.free(slot)
    assert tier.used_bytes == 0

    tier = RecordingTier(fail_load={0: error}.get, deferred=deferred)
    slot = tier.store(ones())
    transfer = tier.load(slot, ones())
    with pytest.raises(OSError, match="No space"):
        transfer.wait()
    assert load(tier, slot).equal(ones())


# assert_same_training


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(torch.dropout(self.norm(self.a(x)), 0.5, self.training))


def step(model):
    x = torch.randn(4, 8, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward()
    return {"loss": loss, "gradient": x.grad}


@contextmanager
def untouched(model):
    yield None


def test_same_training_is_the_same():
    same = assert_same_training(Net, step, untouched, steps=3)
    assert len(same.steps) == 3 and not same_bits(same.steps[0]["output['loss']"], same.steps[1]["output['loss']"])
    assert same.steps[0]["gradient of unused.bias"] is None
    assert {"buffer norm.running_mean", "gradient of a.weight", "output['gradient']"} <= same.steps[0].keys()


def test_stats_of_the_handle_are_handed_on():
    @contextmanager
    def manage(model):
        yield type("Handle", (), {"stats": "as they were"})

    assert assert_same_training(Net, step, manage).stats == "as they were"


@contextmanager
def hooked(parameter, hook):
    handle = parameter.register_hook(hook)
    yield None
    handle.remove()


def one_bit_off_in_the_second_step(model):
    calls = itertools.count()
    return hooked(model.a.weight, lambda gradient: gradient if next(calls) == 0 else gradient.nextafter(torch.tensor(torch.inf)))


def extra_forward(model):
    return hooked(model.b.bias, lambda gradient: (model.norm(torch.ones(2, 8)), gradient)[1])


def extra_random_number(model):
    return hooked(model.b.bias, lambda gradient: (torch.rand(1), gradient)[1])


@contextmanager
def frozen(model):
    model.a.bias.requires_grad_(False)
    yield None


@pytest.mark.parametrize(
    ("manage", "message"),
    [
        (one_bit_off_in_the_second_step, r"step 1: gradient of a\.weight is not"),
        (extra_forward, r"step 0: buffer norm\.running_mean is not"),
        (extra_random_number, r"step 1: output\['loss'\] is not"),
        (frozen, r"step 0: gradient of a\.bias is None"),
    ],
)
def test_difference_is_named(manage, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_training(Net, step, manage)


def test_build_that_makes_different_models_is_refused():
    scale = itertools.count(1)

    def build():
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, next(scale))
        return model

    with pytest.raises(ValueError, match=r"differ in 'weight'"):
        assert_same_training(build, lambda model: None, untouched)


def test_same_bits_looks_at_bits():
    nan, other_nan = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert same_bits(nan, nan.clone()) and not same_bits(nan, other_nan)
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert same_bits(torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j))
