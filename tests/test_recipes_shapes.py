"""A tensor of which backward reads only the shape becomes a promise of that shape; nothing else does, and nobody else notices."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul.claims import Claim, ShapeOnly, shape_only
from tests.conftest import same
from tests.models import leaf
from tests.recipe_hooks import Hooks, Use

ROWS = torch.tensor([3, 0, 3, 1, 5, 2])

CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "index_add": (lambda x, y: x.index_add(0, ROWS, y), "source"),
    "index_add with alpha": (lambda x, y: x.index_add(0, ROWS, y, alpha=-0.7), "source"),
    "index_add of columns": (lambda x, y: x.index_add(-1, ROWS, y), "source"),
    "index_add in place": (lambda x, y: x.clone().index_add_(1, ROWS, y), "source"),
    "index_add of what is transposed": (lambda x, y: x.index_add(0, ROWS, y.t()), "source"),
    "index_add to what does not learn": (lambda x, y: torch.zeros_like(x).index_add(0, ROWS, y), "source"),
    "index_copy": (lambda x, y: x.index_copy(0, ROWS.unique(), y[:5]), "source"),
    "gather": (lambda x, y: y.gather(1, ROWS.expand(6, 6)[:, :3]), "self"),
}


def nodes_of(result: Tensor) -> list[torch.autograd.graph.Node]:
    assert result.grad_fn is not None
    return [result.grad_fn]


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_freed_and_every_order_of_derivatives_is_the_same(case: str) -> None:
    function, _ = CASES[case]

    def run(hooks: Hooks | None) -> list[Tensor]:
        torch.manual_seed(0)
        x, y = leaf(6, 6), leaf(6, 6)
        with hooks or torch.enable_grad():
            source = y @ y
            freed = weakref.ref(source.untyped_storage())
            result = function(x, source)
            if hooks is not None:
                (claim,) = shape_only(nodes_of(result))
                claim.settle_for_shape()
                assert shape_only(nodes_of(result)) == []
            del source
            assert (freed() is None) is (hooks is not None)
            loss = Use.apply(result, []).square().sum()
        with pytest.MonkeyPatch().context() as patch:
            num_restored = 0

            def restore(promise: ShapeOnly, bring: object, restore: Any = ShapeOnly.restore) -> Tensor:
                nonlocal num_restored
                num_restored += 1
                got: Tensor = restore(promise, bring)
                got.as_strided((), ()).fill_(float("nan"))
                return got

            patch.setattr(ShapeOnly, "restore", restore)
            first = torch.autograd.grad(loss, [x, y], retain_graph=True, allow_unused=True)  # split, and twice
            first += torch.autograd.grad(loss, [y], create_graph=True)
            second = torch.autograd.grad(first[-1].square().sum(), [x, y], create_graph=True, allow_unused=True)
            third = torch.autograd.grad(second[1].square().sum(), [y])
        assert (num_restored > 0) is (hooks is not None)
        return [result.detach(), *first, *second, *third]

    assert same(run(Hooks()), run(None))


def test_what_comes_back_has_the_shape_and_no_memory() -> None:
    hooks = Hooks()
    with hooks:
        result = torch.zeros(6, 2, dtype=torch.bfloat16).index_add(0, ROWS, leaf(6, 2).bfloat16() * 2)
    (claim,) = shape_only(nodes_of(result))
    claim.settle_for_shape()
    got = claim.restore(lambda blob: None)
    assert (got.shape, got.dtype, got.device, got.untyped_storage().nbytes()) == ((6, 2), torch.bfloat16, torch.device("cpu"), 2)


def test_another_saver_of_the_same_storage_keeps_its_values() -> None:
    hooks, y = Hooks(), leaf(6, 6)
    with hooks:
        source = y @ y
        beside = Use.apply(source, [])
        result = torch.zeros(6, 6).index_add(0, ROWS, source)
    (claim,) = shape_only([*nodes_of(result), *nodes_of(beside)])
    claim.settle_for_shape()
    got = torch.autograd.grad(beside.sum() + result.sum(), y)
    source = y @ y
    expected = torch.autograd.grad(Use.apply(source, []).sum() + torch.zeros(6, 6).index_add(0, ROWS, source).sum(), y)
    assert same(got, expected)


def test_a_recipe_that_starts_from_the_values_keeps_them() -> None:
    def run(hooks: Hooks | None) -> list[Tensor]:
        torch.manual_seed(0)
        y = leaf(6, 6)
        with hooks or torch.enable_grad():
            source = y @ y
            result = torch.zeros(6, 6).index_add(0, ROWS, source)
            negative = Use.apply(-source, [])
            for claim in shape_only(nodes_of(result)):
                claim.settle_for_shape()
            late = Use.apply(-source, [])  # nobody has the values any more
        if hooks is not None:
            assert len(hooks.recipes) == 1
            hooks.assert_all_exact()
        return list(torch.autograd.grad(negative.sum() + late.sum() + result.sum(), y))

    assert same(run(Hooks()), run(None))


def test_a_made_source_is_let_go_of_too() -> None:
    hooks, y = Hooks(), leaf(6, 6)
    with hooks:
        result = torch.zeros(6, 6).index_add(0, ROWS, y * y)
    assert len(hooks.recipes) == 1
    (claim,) = shape_only(nodes_of(result))
    claim.settle_for_shape()
    assert [made() for made in hooks.made.values()] == [None]
    (gradient,) = torch.autograd.grad(result.sum(), y)
    assert same([gradient], [2 * y.detach()])


def test_a_source_that_was_written_raises_what_autograd_raises() -> None:
    y = leaf(6, 6)
    with Hooks():
        source = y @ y
        result = torch.zeros(6, 6).index_add(0, ROWS, source)
        (claim,) = shape_only(nodes_of(result))
        claim.settle_for_shape()
        source.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        result.sum().backward()


def test_it_is_found_behind_a_residual_and_not_further_than_asked() -> None:
    y = leaf(6, 6)
    with Hooks():
        result = (y + torch.zeros(6, 6).index_add(0, ROWS, y @ y)) * 2
        later = result
        for _ in range(40):
            later = later + 1
    assert len(shape_only(nodes_of(result), limit=4)) == 1
    assert shape_only(nodes_of(later)) == []
    assert shape_only(nodes_of(result), limit=1) == []


def test_nothing_is_found_where_nothing_is_ours_or_the_graph_has_run() -> None:
    y = leaf(6, 6)
    plain = torch.zeros(6, 6).index_add(0, ROWS, y @ y)
    assert shape_only(nodes_of(plain)) == []
    with torch.autograd.graph.save_on_cpu():
        others = torch.zeros(6, 6).index_add(0, ROWS, y @ y)
    assert shape_only(nodes_of(others)) == []
    with Hooks():
        result = torch.zeros(6, 6).index_add(0, ROWS, y @ y)
    result.sum().backward()
    assert shape_only(nodes_of(result)) == []


def test_a_sparse_gather_keeps_its_values() -> None:
    with Hooks():
        result = (leaf(6, 6) * 1).gather(1, ROWS[:, None], sparse_grad=True)
    assert shape_only(nodes_of(result)) == []


def test_nothing_else_is_settled() -> None:
    hooks, y = Hooks(), leaf(6, 6)
    with hooks:
        result = (y * y + y.index_select(0, ROWS)) @ y + (y @ y).cumsum(0) + y.softmax(-1)
    assert shape_only(nodes_of(result), limit=1000) == []
    assert type(result.grad_fn.next_functions[1][0]._raw_saved_result.data) is Claim
