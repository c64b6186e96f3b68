"""Modules that ``torch.jit`` has compiled: part of the scope around them, and nothing by themselves."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.scopes import wrapper_of
from backhaul.testing import RecordingTier
from tests.conftest import same
from tests.planned import ROWS, WIDTH, X

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(ROWS, WIDTH))


def build(compile_it: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = compile_it(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))


def step(model: nn.Module) -> list[Tensor]:
    result = model(X)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("plan", [None, {"*": "offload"}, {"2": "recompute", "*": "offload"}, {"2": "recompute"}], ids=str)
@pytest.mark.parametrize("compile_it", [traced, torch.jit.script], ids=["trace", "script"])
def test_a_model_with_a_scripted_part_trains_the_same(compile_it, plan):
    plain, model = build(compile_it), build(compile_it)
    for _ in range(3):  # it is optimized in the first runs, and rounds in another way afterwards
        step(plain), step(model)
    manage = bh.offload if plan is None else lambda model, **options: bh.apply(model, plan, **options)
    with manage(model, tier=RecordingTier(deferred=True), activation_budget=0, min_bytes=0) as handle:
        for _ in range(3):
            assert same(step(model), step(plain))
        assert handle.stats.offloaded_bytes + handle.stats.recomputed_bytes > 0
    assert not any(wrapper_of(module) for module in model.modules())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"1": "recompute"}, "rule '1' names '1', which torch.jit has compiled; make a rule for what is around it"),
        ({"1.2": "offload"}, "rule '1.2' names '1.2', which torch.jit has compiled"),
        ({"": "recompute"}, "'the model' cannot be under \"recompute\": torch.jit has compiled '1' inside"),
    ],
)
def test_what_is_scripted_has_no_rule_and_does_not_run_again(plan, message):
    model = build(torch.jit.script)
    with pytest.raises(ValueError, match=re.escape(message)):
        bh.apply(model, plan)
    assert wrapper_of(model) is None


def test_a_scripted_model_is_refused():
    for manage in (bh.offload, lambda model: bh.apply(model, {"*": "offload"})):
        with pytest.raises(ValueError, match=r"'the model' has been compiled by torch\.jit; manage what is around it"):
            manage(build(torch.jit.script)[1])
