"""It is certain or there is no recipe."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backhaul.claims import Claims
from backhaul.recipes import recipe_for
from backhaul.saved import Kept
from tests.models import leaf
from tests.recipe_hooks import Hooks, Use, assert_comes_back


def saved(x: Tensor, keep: list[Tensor]) -> Tensor:
    keep.append(Use.apply(x, []))
    return x


def cut(x: Tensor) -> Tensor:
    x[0] = 0
    return x


REFUSED: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "written in place by an op of the table": lambda x, keep: (x * x).add_(x),
    "written in place through a view": lambda x, keep: cut(x * x),
    "an activation in place": lambda x, keep: F.silu(x * x, inplace=True),
    "a matrix product": lambda x, keep: x @ x,
    "random": lambda x, keep: torch.native_dropout(x, 0.5, True)[0],
    "random before": lambda x, keep: torch.native_dropout(x, 0.5, True)[0] + saved(x, keep),
    "a custom Function": lambda x, keep: Use.apply(x, []),
    "keeps its own result": lambda x, keep: x.exp(),
    "a number that the node does not keep": lambda x, keep: saved(x, keep) + 1,
    "a filling that the node does not keep": lambda x, keep: saved(x, keep).masked_fill(x > 0, 3.0),
    "an operand without a gradient that nobody keeps": lambda x, keep: saved(x, keep) + torch.ones(8, 8),
    "an operand that nobody keeps": lambda x, keep: torch.cat([x @ x, saved(x, keep)]),
    "one number": lambda x, keep: x[0, 0] * x[0, 0],
    "a complex number": lambda x, keep: torch.complex(x, x) * torch.complex(x, x),
    "a complex number before": lambda x, keep: -(torch.complex(x, x) * torch.complex(x, x)).real,
    "a storage that is larger": lambda x, keep: x.mul(x).unsafe_chunk(2)[1],
    "as_strided": lambda x, keep: saved(x, keep).as_strided((4, 4), (1, 2)) * 2,
}


@pytest.mark.parametrize("case", REFUSED)
def test_no_recipe(case: str) -> None:
    keep: list[Tensor] = []
    assert_comes_back(lambda x: REFUSED[case](x, keep), leaf(8, 8), recipe=False)


ROUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x) * 2,
    "gelu": lambda x: -F.gelu(x),
    "a power": lambda x: (x**3).view(-1) / 2,
    "a sum with alpha": lambda x: torch.add(torch.cat([x, x]), torch.cat([x, x]), alpha=0.3),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_on_a_cpu_nothing_that_rounds_by_position_is_made_from_what_is_made(case: str) -> None:
    keep: list[Tensor] = []
    assert_comes_back(lambda x: ROUNDS[case](saved(x, keep)), leaf(8, 8), recipe=False)


def test_a_sum_with_alpha_of_copies_whose_strides_are_not_known() -> None:
    """Without the rule it would be made with other bits: the last elements of a row are rounded apart."""
    keep: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        x = saved(x, keep)
        return torch.add(x.clone(memory_format=torch.channels_last), x.clone(memory_format=torch.channels_last), alpha=0.3)

    assert_comes_back(function, torch.randn(2, 5, 7, 9).bfloat16().requires_grad_(), recipe=False)


def test_a_value_that_was_written_between_the_op_and_its_saver_is_no_operand() -> None:
    keep: list[Tensor] = []

    def written_after_it_was_saved(x: Tensor) -> Tensor:
        value = saved(x @ x, keep)
        with torch.no_grad():
            value.add_(1)
        return -value

    def written_before_it_was_saved(x: Tensor) -> Tensor:
        value = x @ x
        negative = -value
        with torch.no_grad():
            value.add_(1)
        saved(value, keep)
        return negative

    assert_comes_back(written_after_it_was_saved, leaf(8, 8), recipe=False)
    assert_comes_back(written_before_it_was_saved, leaf(8, 8), recipe=False)


def test_a_leaf_counts_only_if_it_was_never_written_and_is_no_parameter() -> None:
    fresh, written = leaf(8), leaf(8)
    with torch.no_grad():
        written.add_(1)
    assert_comes_back(lambda x: x.to(torch.bfloat16), fresh)
    assert_comes_back(lambda x: x.to(torch.bfloat16), written, recipe=False)
    assert_comes_back(lambda x: x.to(torch.bfloat16), nn.Parameter(fresh.detach()), recipe=False)


def test_an_engine_that_knows_its_parameters_may_say_so() -> None:
    class Knowing(Claims):
        def is_unwritten(self, leaf: Tensor, user: torch.autograd.graph.Node) -> bool:
            return isinstance(leaf, nn.Parameter)

        def is_steady(self, kept: Tensor) -> bool:
            return kept.shape != (3,)

    bias, gathered = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3))
    hooks = Hooks()
    hooks.claims = Knowing()
    with hooks:
        products = [bias.to(torch.bfloat16), bias * bias, gathered.to(torch.bfloat16), gathered * gathered]
        results = [Use.apply(each, []) for each in products]
    assert len(hooks.recipes) == 2
    del results


def test_what_was_saved_without_these_hooks_is_no_operand() -> None:
    for others in (Hooks(), torch.autograd.graph.save_on_cpu(), torch.enable_grad()):
        x = leaf(8, 8) @ leaf(8, 8)
        with others:
            product = x * x
        with Hooks() as _:
            hooks = Hooks()
            with hooks:
                result = Use.apply(product, [])
            assert not hooks.recipes
            del result


def test_what_is_no_plain_tensor_is_no_operand() -> None:
    class Other(Tensor):
        pass

    claims = Claims()
    for other in (
        Kept(leaf(4).as_subclass(Other)),
        claims.claim(leaf(4), Kept(leaf(4).as_subclass(Other))),
        None,
        leaf(4),
        torch.ones(4),
        leaf(1).detach()[0].requires_grad_(),
        torch.ones(()).add_(1),
        (leaf(4),),
    ):
        assert claims.of_kept(other) is None
    assert claims.of_kept(claims.claim(leaf(4), Kept(leaf(4)))) is not None
    assert Claims().of_kept(claims.claim(leaf(4), Kept(leaf(4)))) is None


def test_what_touches_much_more_than_it_frees_is_not_cheap() -> None:
    keep: list[Tensor] = []
    x = leaf(64, 8, 8)
    for cheap_only in (True, False):
        hooks = Hooks(cheap_only=cheap_only)
        with hooks:
            result = Use.apply(torch.cat([saved(x, keep), x]).index_select(0, torch.tensor([1])), [])
        assert [recipe.cheap for recipe in hooks.recipes] == ([] if cheap_only else [False])
        hooks.assert_all_exact()
        del result


def test_a_long_chain_and_a_broad_one_are_given_up() -> None:
    keep: list[Tensor] = []

    def chain(x: Tensor, length: int = 20) -> Tensor:
        x = saved(x, keep)
        for _ in range(length):
            x = x.t()
        return -x

    assert_comes_back(chain, leaf(8, 8), recipe=False)
    assert_comes_back(lambda x: chain(x, 8), leaf(8, 8))
    assert_comes_back(lambda x: torch.cat([-saved(x, keep) for _ in range(40)]), leaf(8, 8), recipe=False)
    assert_comes_back(lambda x: torch.cat([-saved(x, keep) for _ in range(10)]), leaf(8, 8))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_the_real_part_of_a_complex_number_has_no_recipe() -> None:
    assert_comes_back(lambda x: (torch.complex(x, x) * torch.complex(x, x)).to(torch.float32), leaf(8, 8), recipe=False)


@pytest.mark.gpu
def test_a_copy_from_another_device_has_no_recipe() -> None:
    with Hooks() as _:
        hooks = Hooks()
        with hooks:
            result = Use.apply(leaf(8, 8).to("cuda"), [])
        assert not hooks.recipes
        del result


def test_leaves_and_what_has_no_gradient_have_no_recipe() -> None:
    claims, x = Claims(), leaf(8, 8)
    assert recipe_for(x, claims) is None
    with torch.no_grad():
        assert recipe_for(x * x, claims) is None
