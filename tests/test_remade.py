"""A made value is there for each promise once, and no longer; an output is known by its storage as long as that stays as it was."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from backhaul.remade import Made, Outputs, Remade
from backhaul.saved import Blob


class Counting:
    """Makes a storage of sevens."""

    def __init__(self) -> None:
        self.num_runs = 0

    def make(self, wanted: Made, bring: object) -> None:
        """Fill it."""
        self.num_runs += 1
        wanted.fill(torch.full((4,), 7.0).untyped_storage())


def nothing(blob: Blob) -> None:
    """Bring nothing."""


def test_a_value_is_made_once_for_all_promises_and_then_dropped() -> None:
    maker, x = Counting(), torch.full((4,), 7.0)
    made = Made(maker, x.untyped_storage())
    promises = [Remade(made, x), Remade(made, x[1:3]), Remade(made, x.view(2, 2).t())]
    del x
    values = [promise.restore(nothing) for promise in promises[:2]]
    assert made.storage is not None
    assert values[1].equal(torch.full((2,), 7.0))
    values.append(promises[2].restore(nothing))
    assert values[2].stride() == (1, 2)
    assert made.storage is None
    assert maker.num_runs == 1
    seen = weakref.ref(values[0].untyped_storage())
    del values
    assert seen() is None
    promises[0].restore(nothing)
    assert maker.num_runs == 2


def test_a_value_that_is_still_in_use_is_handed_out_again() -> None:
    maker, x = Counting(), torch.full((4,), 7.0)
    promise = Remade(Made(maker, x.untyped_storage()), x)
    assert promise.restore(nothing).data_ptr() == x.data_ptr()  # the original
    assert maker.num_runs == 0
    del x
    first = promise.restore(nothing)
    assert promise.restore(nothing).data_ptr() == first.data_ptr()
    assert maker.num_runs == 1


def test_promises_that_are_gone_are_not_waited_for() -> None:
    x = torch.full((4,), 7.0)
    made = Made(Counting(), x.untyped_storage())
    promise, unused = Remade(made, x), Remade(made, x)
    del x, unused
    promise.restore(nothing)
    assert made.storage is None


def test_a_write_after_the_tensor_was_saved_is_an_error() -> None:
    x = torch.full((4,), 7.0)
    promise = Remade(Made(Counting(), x.untyped_storage()), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        promise.restore(nothing)


def test_an_output_is_known_until_it_is_written() -> None:
    x, outputs = torch.ones(4), Outputs()
    made = Made(Counting(), x.untyped_storage())
    outputs.note(x, made)
    assert outputs.find(x) is made
    assert outputs.find(x.view(2, 2)) is made
    assert outputs.find(x.detach()) is made
    assert outputs.find(torch.ones(4)) is None
    assert outputs.find(x.data) is None  # may be written without x knowing
    x.add_(1)
    assert outputs.find(x) is None
    assert outputs.find(x.data) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.complex64, "conjugate", "negated"])
def test_an_output_of_any_kind(kind: object) -> None:
    x = torch.ones(4, dtype=kind if isinstance(kind, torch.dtype) else torch.complex64)
    if kind == "conjugate":
        x = x.conj()
    if kind == "negated":
        x = x.conj().imag
    outputs = Outputs()
    made = Made(Counting(), x.untyped_storage())
    outputs.note(x, made)
    assert outputs.find(x) is made


def test_outputs_own_what_makes_them_only_as_long_as_the_storage_lives() -> None:
    def note(outputs: Outputs, x: Tensor) -> "weakref.ref[Made]":
        made = Made(Counting(), x.untyped_storage())
        outputs.note(x, made)
        return weakref.ref(made)

    gc.disable()
    try:
        outputs, x, y = Outputs(), torch.ones(4), torch.ones(4)
        of_x, of_y = note(outputs, x), note(outputs, y)
        del x
        assert of_x() is None
        assert of_y() is not None
        del outputs
        assert of_y() is None  # no cycle
    finally:
        gc.enable()
