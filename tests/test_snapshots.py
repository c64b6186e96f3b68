"""What a recomputed module was called with and has changed: seen, whatever it is, and nothing is seen where nothing has changed."""

import functools
import io
import itertools
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.snapshots import Snapshot, is_iterator, may_change
from backhaul.testing import RecordingTier
from tests.conftest import same


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1.0


class Counts:
    """Can be called."""

    def __init__(self) -> None:
        self.calls = [0.0]

    def __call__(self) -> float:
        self.calls[0] += 1
        return self.calls[0]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.number = 1.0


def closure() -> Callable[[], float]:
    number, calls = 0.0, [0.0]

    def count() -> float:
        nonlocal number
        number += 1
        calls[0] += 1
        return number

    return count


def attribute(owner: Any) -> float:
    owner.number += 1
    return float(owner.number)


def deep(owner: Any) -> float:
    owner.inner["a"][0].append(1.0)
    return float(len(owner.inner["a"][0]))


def in_place(owner: Any) -> float:
    return float(owner.tensor.add_(1).sum())


def buffer(owner: Any) -> float:
    return float(owner.inner.num_batches_tracked.add_(1))


def first(owner: Any) -> float:
    owner[0] += 1
    return float(owner[0])


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], float], str]] = {
    "an attribute": (lambda: SimpleNamespace(number=1.0), attribute, "number"),
    "a slot": (Slots, attribute, "number"),
    "a list in a dict in an object": (lambda: SimpleNamespace(inner={"a": [[]]}), deep, "inner['a'][0][0]"),
    "a tensor in an object": (lambda: SimpleNamespace(tensor=torch.ones(2)), in_place, "tensor"),
    "an attribute of a module": (Keeps, attribute, "number"),
    "a buffer of a module": (Keeps, buffer, "inner._buffers['num_batches_tracked']"),
    "an array": (lambda: np.zeros((3, 2))[::2, 0], first, "content"),
    "a bytearray": (lambda: bytearray(2), first, "content"),
    "a set": (set, lambda owner: owner.add(len(owner)) or float(len(owner)), "content"),
    "Python's random numbers": (lambda: random.Random(0), lambda owner: owner.random(), "content"),
    "NumPy's": (lambda: np.random.default_rng(0), lambda owner: float(owner.random()), "content"),
    "what NumPy's come from": (lambda: np.random.PCG64(0), lambda owner: float(owner.random_raw() % 7), "content"),
    "NumPy's old ones": (lambda: np.random.RandomState(0), lambda owner: float(owner.rand()), "content"),
    "something to call": (Counts, lambda owner: owner(), "calls[0]"),
    "a closure": (closure, lambda owner: owner(), "calls[0]"),
    "a partial": (lambda: functools.partial(first, [1.0]), lambda owner: owner(), "args[0][0]"),
}


class Uses(nn.Module):
    """A model whose part does something with an argument."""

    def __init__(self, use: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lead, self.part = nn.Linear(8, 8), Part(use)

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        return self.part(self.lead(x), argument)


class Part(nn.Module):
    def __init__(self, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        return (x * self.use(argument)).exp()


@pytest.mark.parametrize("what", CHANGED)
def test_a_module_that_changes_what_it_was_called_with_is_refused(what: str) -> None:
    make, use, name = CHANGED[what]
    model = Uses(use)
    with (
        bh.apply(model, {"part": "recompute"}, tier=RecordingTier(), min_bytes=0),
        pytest.raises(ValueError, match="would do so twice") as caught,
    ):
        model(torch.ones(4, 8), make())
    assert f"it writes to {name!r} of an argument" in str(caught.value)


@pytest.mark.parametrize("make", [lambda: iter([1.0]), lambda: (each for each in [1.0]), lambda: zip([1.0]), itertools.count])
def test_a_module_that_takes_an_iterator_is_refused(make: Callable[[], Any]) -> None:
    model = Uses(lambda argument: 1.0)
    with bh.apply(model, {"part": "recompute"}, min_bytes=0), pytest.raises(ValueError, match="it takes an iterator"):
        model(torch.ones(4, 8), make())


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_module_only_reads_is_let_be(what: str) -> None:
    make, _, _ = CHANGED[what]
    argument, x = make(), torch.ones(4, 8)

    def step(model: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(model(x, argument).sum(), list(model.parameters())))

    model = Uses(lambda argument: 2.0)
    expected = step(model)
    with bh.apply(model, {"part": "recompute"}, tier=RecordingTier(), min_bytes=0) as handle:
        assert same(step(model), expected)
        assert handle.stats.recomputed_bytes > 0


def test_what_has_been_changed_between_forward_and_backward_is_an_error() -> None:
    model, argument = Uses(lambda argument: argument.inner[0]), SimpleNamespace(inner=[1.0])
    with bh.apply(model, {"part": "recompute"}, tier=RecordingTier(), min_bytes=0):
        loss = model(torch.ones(4, 8), argument).sum()
        argument.inner[0] = 2.0
        with pytest.raises(RuntimeError, match=r"'inner\[0\]' of an argument, a SimpleNamespace, has been changed since its forward"):
            loss.backward()


def test_equal_values_in_the_place_of_others_are_no_change() -> None:
    value = SimpleNamespace(numbers=[1.0, float("nan")], names={"a": (1, "b")}, loop=None, queue=deque([1]))
    value.loop = value
    snapshot = Snapshot(value)
    value.numbers, value.names = list(value.numbers), {"a": (1, "b")}
    assert snapshot.changed(value) == ""
    value.names["a"] = (1, "c")
    assert snapshot.changed(value) == "names['a'][1]"


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", b"a", torch.float32, torch.device("cpu"), int, torch.ones(1), [].append, math])
def test_plain_values_and_tensors_are_not_looked_at(value: Any) -> None:
    assert not may_change(value)


def test_what_changes_all_the_time_and_means_nothing_is_not_looked_at() -> None:
    model, logger = nn.BatchNorm1d(2), logging.getLogger("something")
    snapshot = Snapshot(argument := SimpleNamespace(model=model, logger=logger, library=logging, number=SimpleNamespace(number=1)))
    model(torch.rand(4, 2))
    logger.isEnabledFor(17)
    assert snapshot.changed(argument) == ""
    attribute(argument.number)
    assert snapshot.changed(argument) == "number.number"


class Lazy(Mapping[str, Tensor]):
    """Makes its values as it is asked for them."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.ones(1)

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


class Answers:
    """Is an error to look at."""

    __slots__ = ("number",)

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError


class Unnamed:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
    module.register_full_backward_hook(lambda *_: None)
    bh.offload(module)


ODD: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a mapping that makes its values": (Lazy, len),
    "an error to look at": (Answers, id),
    "a key without a name": (lambda: SimpleNamespace(table={Unnamed(): 1}), id),
    "random numbers without a state": (random.SystemRandom, lambda each: each.random()),
    "a path": (lambda: Path("a") / "b", str),
    "a logger": (lambda: logging.getLogger("something else"), lambda each: each.isEnabledFor(13)),
    "a lock": (threading.Lock, lambda each: each.acquire()),
    "a module that somebody hooks": (lambda: nn.Linear(2, 2), hooked),
    "a parameter that is replaced": (lambda: nn.Linear(2, 2), lambda each: setattr(each, "weight", nn.Parameter(torch.ones(2, 2)))),
}


@pytest.mark.parametrize("what", ODD)
def test_nothing_is_said_of_what_cannot_be_looked_at_or_means_nothing(what: str) -> None:
    make, use = ODD[what]
    value = make()
    snapshot = Snapshot(value)
    use(value)
    assert snapshot.changed(value) == ""


def test_no_key_hides_another() -> None:
    table = {object(): [1], 0: [2]}
    for each in table.values():
        snapshot = Snapshot(table)
        each.append(3)
        assert snapshot.changed(table) != ""


def test_a_file_is_no_iterator() -> None:
    assert not is_iterator(io.StringIO("a"))
