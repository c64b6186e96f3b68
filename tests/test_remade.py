"""A made value is there for each promise once, and no longer; an output is known by its storage as long as that stays as it was."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from backhaul.claims import Claim, Claims, once_more
from backhaul.remade import Made, Outputs, Remade
from backhaul.saved import Blob, Kept, Saved, View


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
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4\]\] is at version 1; expected version 0"
    ):
        promise.restore(nothing)


def test_one_more_promise_for_a_tensor_has_the_value_for_itself() -> None:
    maker, x = Counting(), torch.full((4,), 7.0)
    made = Made(maker, x.untyped_storage())
    first = Remade(made, x)
    second = first.again()
    del x
    assert first.restore(nothing).equal(second.restore(nothing))
    assert maker.num_runs == 1
    assert made.storage is None
    del first
    assert second.restore(nothing).equal(torch.full((4,), 7.0))
    assert maker.num_runs == 2


def promised(x: Tensor) -> list[Saved | Remade]:
    blob = cast(Blob, SimpleNamespace(home=weakref.ref(x.untyped_storage())))
    return [Saved(blob, View(x)), Remade(Made(Counting(), x.untyped_storage()), x)]


def test_a_promise_serves_once_more_for_the_same_tensor() -> None:
    x = torch.full((4,), 7.0)
    saved, remade = promised(x)
    assert once_more(saved, x) is saved
    assert once_more(Claim(Claims(), saved, None), x) is saved
    other = once_more(Claim(Claims(), remade, None), x)
    assert isinstance(other, Remade) and other is not remade and other.made is remade.made
    assert once_more(Kept(x), x) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x.t_(),
        lambda x: setattr(x, "data", x.data.clone()),
        lambda x: setattr(x, "data", x.data.view(4)),
        lambda x: setattr(x, "data", x.data.view(torch.int32)),
    ],
)
def test_a_promise_does_not_serve_for_a_tensor_that_has_changed_since(change: Callable[[Tensor], object]) -> None:
    x = torch.full((2, 2), 7.0)
    original, promises = x.untyped_storage(), promised(x)  # the storage is there for as long as this runs
    change(x)
    assert [once_more(promise, x) for promise in promises] == [None, None]
    assert original.nbytes() == 16


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
