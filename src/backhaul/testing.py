"""What tests of backhaul, and of anything built on it, need again and again.

Covers: the claim that training is unchanged (``assert_same_training``), a tier that shows what was done to it and fails on demand
(``RecordingTier``), and the contract of a tier as a check that anyone can run on a tier of their own (``check_tier``, from
tiers/checking.py).
Does not cover: speed, or memory of a device.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backhaul.tiers.base import Slot, Tier, TierFull, Transfer
from backhaul.tiers.checking import check_tier as check_tier

GARBAGE = 0xA5  # what memory holds that nobody may read

Fault = BaseException | Callable[[int], BaseException | None]


@dataclass(frozen=True)
class SameTraining:
    """What the managed run and the untouched one have in common, and what the managed one took."""

    steps: list[dict[str, Any]]  # step by step: "output", "gradient of <fqn>", "buffer <fqn>"
    stats: Any  # `handle.stats` after the last step, where the handle has any


def assert_same_training(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module], Any],
    manage: Callable[[nn.Module], AbstractContextManager[Any]],
    *,
    steps: int = 2,
    lr: float = 1e-3,
    seed: int = 0,
) -> SameTraining:
    """Train an untouched model and a managed one from the same seed, and assert that no bit differs.

    Two models are built, and each is trained by plain SGD, so that a stale parameter shows; the second one under the handle. After each
    step all that training is made of is compared by bit pattern (NaN equals the same NaN, 0.0 differs from -0.0): what the step returned,
    the gradient of every parameter or its absence, and every buffer.

    Args:
        build: makes the model; every call must give the same one from the same seed.
        step: runs forward and backward, as for ``backhaul.profile``, and returns what else must be the same: the loss, several losses in
            a list, a dict with the gradient of an input, nothing.
        manage: puts a model under backhaul and returns the handle: ``lambda model: bh.offload(model, min_bytes=0)``.
        steps: how many; two at least, since the first step is the one that backhaul learns from.
        lr: of the SGD.
        seed: of both models and of both trainings.

    Raises ``AssertionError`` naming the step and the tensor, ``ValueError`` where ``build`` makes a different model each time.

    >>> from contextlib import nullcontext
    >>> def step(model):
    ...     loss = model(torch.ones(2, 4)).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> same = assert_same_training(lambda: nn.Linear(4, 4), step, lambda model: nullcontext())
    >>> sorted(same.steps[-1])
    ['gradient of bias', 'gradient of weight', 'output']
    """
    torch.manual_seed(seed)
    expected_model = build()
    torch.manual_seed(seed)
    model = build()
    for name, tensor in expected_model.state_dict().items():
        if isinstance(tensor, Tensor) and not same_bits(tensor, model.state_dict()[name]):
            raise ValueError(f"build() made two models that differ in {name!r}; it must make the same one from the same seed")

    expected = list(_train(expected_model, step, steps=steps, lr=lr, seed=seed))
    with manage(model) as handle:
        for index, state in enumerate(_train(model, step, steps=steps, lr=lr, seed=seed)):
            _assert_same_state(state, expected[index], step=index)
        return SameTraining(expected, getattr(handle, "stats", None))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have the same dtype, shape, device and bits."""
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _train(model: nn.Module, step: Callable[[nn.Module], Any], *, steps: int, lr: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield all that training is made of after each step, by name."""
    torch.manual_seed(seed)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        state = dict(_leaves("output", step(model)))
        state |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
        state |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        yield {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=lr)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}[{key!r}]", item)
    else:
        yield name, value


def _assert_same_state(state: dict[str, Any], expected: dict[str, Any], *, step: int) -> None:
    assert state.keys() == expected.keys(), f"step {step}: only one of the two models has {sorted(state.keys() ^ expected.keys())}"
    for name, value in expected.items():
        if not (isinstance(value, Tensor) and isinstance(state[name], Tensor)):
            assert value is state[name] or value == state[name], f"step {step}: {name} is {state[name]}, on the untouched model {value}"
        elif not same_bits(state[name], value):
            raise AssertionError(f"step {step}: {name} is not what the untouched model gives:\n{state[name]}\nexpected:\n{value}")


@dataclass(frozen=True)
class TierRecord:
    """One thing that was done to a ``RecordingTier``."""

    event: Literal["store", "load", "free"]
    slot: int  # slots are numbered in the order in which they were stored
    num_bytes: int


class RecordingTier(Tier):
    """A tier in host memory that notes what is done to it, shows misuse as wrong values, and fails on demand.

    Args:
        capacity: most bytes to hold; default: no limit.
        fail_store: raised by ``store`` itself, which then takes nothing. An exception is raised every time; a function is given the number
            of the call, from 0, and returns an exception or ``None``: ``fail_store={3: TierFull("no room")}.get`` fails the fourth store.
        fail_write: the same for the copy that ``store`` started; raised by ``slot.stored.wait()`` and by every load of that slot.
        fail_load: the same for the copy that ``load`` started; raised by ``wait``.
        deferred: copies happen when they are waited for and not before. An engine that overwrites a source, or reads a target, without
            waiting gets wrong values. ``load`` is ordered after ``store``, so it makes the store's copy first.

    Bytes of a freed slot are overwritten, so a read of them shows. With ``deferred`` a target holds garbage until the load is waited for.

    >>> tier = RecordingTier()
    >>> slot = tier.store(torch.zeros(8, dtype=torch.uint8))
    >>> tier.free(slot)
    >>> [record.event for record in tier.records], tier.bytes_of("store"), tier.used_bytes, tier.peak_bytes
    (['store', 'free'], 8, 0, 8)
    """

    name = "recording"

    def __init__(
        self,
        *,
        capacity: int | None = None,
        fail_store: Fault | None = None,
        fail_write: Fault | None = None,
        fail_load: Fault | None = None,
        deferred: bool = False,
    ) -> None:
        self._records: list[TierRecord] = []
        self._freed: deque[_RecordingSlot] = deque()
        self._capacity = capacity
        self._deferred = deferred
        self._faults = {"store": fail_store, "write": fail_write, "load": fail_load}
        self._calls = {event: itertools.count() for event in self._faults}
        self._used_bytes = 0
        self._peak_bytes = 0
        self._num_slots = 0
        self._lock = threading.RLock()

    def store(self, source: Tensor) -> Slot:
        with self._lock:
            self._take_back_freed()
            error = self._next_error("store")
            if error is not None:
                raise error
            if self._capacity is not None and self._used_bytes + source.nbytes > self._capacity:
                raise TierFull(
                    f"recording tier: {source.nbytes} bytes asked for, {self._capacity - self._used_bytes} of {self._capacity} left"
                )
            slot = _RecordingSlot(self._num_slots, source.nbytes)
            self._num_slots += 1
            self._used_bytes += source.nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            self._records.append(TierRecord("store", slot.number, slot.num_bytes))
            slot.stored = self._start(slot, slot.data, source, self._next_error("write"))
            return slot

    def load(self, slot: Slot, target: Tensor) -> Transfer:
        assert isinstance(slot, _RecordingSlot) and isinstance(slot.stored, _RecordedCopy)
        with self._lock:
            self._take_back_freed()
            slot.stored.perform()
            self._records.append(TierRecord("load", slot.number, slot.num_bytes))
            if self._deferred:
                target.fill_(GARBAGE)
            return self._start(slot, target, slot.data, self._next_error("load") or slot.stored.error)

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, _RecordingSlot)
        self._freed.append(slot)

    @property
    def records(self) -> list[TierRecord]:
        """What was done so far, in order."""
        self._take_back_freed()
        return self._records

    @property
    def used_bytes(self) -> int:
        self._take_back_freed()
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def capacity_bytes(self) -> int | None:
        return self._capacity

    def bytes_of(self, event: Literal["store", "load", "free"]) -> int:
        """Return the bytes of all stores, loads or frees so far."""
        return sum(record.num_bytes for record in self.records if record.event == event)

    def _take_back_freed(self) -> None:
        with self._lock:
            while self._freed:
                slot = self._freed.popleft()
                if not slot.freed:
                    slot.freed = True
                    self._used_bytes -= slot.num_bytes
                    self._records.append(TierRecord("free", slot.number, slot.num_bytes))
                    slot.spoil_if_unused()

    def _next_error(self, event: str) -> BaseException | None:
        number, fault = next(self._calls[event]), self._faults[event]
        return fault if fault is None or isinstance(fault, BaseException) else fault(number)

    def _start(self, slot: "_RecordingSlot", target: Tensor, source: Tensor, error: BaseException | None) -> "_RecordedCopy":
        slot.num_copies += 1
        copy = _RecordedCopy(self, slot, target, source, error)
        if not self._deferred:
            copy.perform()
        return copy


class _RecordingSlot(Slot):
    __slots__ = ("data", "freed", "num_copies", "number")

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.data = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        self.num_copies = 0
        self.freed = False

    def spoil_if_unused(self) -> None:
        if self.freed and self.num_copies == 0:
            self.data.fill_(GARBAGE)


class _RecordedCopy(Transfer):
    """A copy, made at once or at the first ``wait``. Only one that is still to be made holds its two ends."""

    def __init__(self, tier: RecordingTier, slot: _RecordingSlot, target: Tensor, source: Tensor, error: BaseException | None) -> None:
        self.error = error
        self._lock = tier._lock
        self._parts: tuple[_RecordingSlot, Tensor, Tensor] | None = (slot, target, source)

    def perform(self) -> None:
        with self._lock:
            if self._parts is None:
                return
            (slot, target, source), self._parts = self._parts, None
            if self.error is None:
                target.copy_(source)
            slot.num_copies -= 1
            slot.spoil_if_unused()

    def wait(self) -> None:
        self.perform()
        if self.error is not None:
            raise self.error.with_traceback(None)

    def done(self) -> bool:
        return self._parts is None
