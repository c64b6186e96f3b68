"""Programs that one would not write, and that plain autograd runs: under a plan they give the same."""

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Code, same
from tests.planned import WIDTH, X, apply, leaf, step


@pytest.mark.parametrize("plan", [{"parts.1": "recompute"}, {"parts.1": "recompute", "*": "offload"}])
def test_a_unit_inside_vmap_runs_as_it_is(plan):
    model = Code(
        lambda x: torch.vmap(model.parts[1])(model.parts[0](x)).sin(),
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    )
    expected = step(model, leaf())
    with apply(model, plan):
        assert same(step(model, leaf()), expected)


@pytest.mark.parametrize("plan", [{"*.dropout1": "recompute"}, {"*.dropout1": "recompute", "*": "offload"}, {"*": "recompute"}])
def test_inputs_with_a_dimension_of_size_one_come_back_with_their_strides(plan):
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True))
    x = torch.randn(1, 8, WIDTH)

    def run():
        torch.manual_seed(0)
        return step(model, x)

    expected = run()
    with apply(model, plan):
        assert same(run(), expected)


def test_rrelu_in_a_unit_is_refused_as_other_modules_are():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU())
    with apply(model, {"1": "recompute"}), pytest.raises(ValueError, match="'1' cannot be under \"recompute\""):
        model(X)


def test_a_parameter_that_a_unit_is_given_and_returns():
    class Passes(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return x + weight, weight

    part, weight = Passes(), nn.Parameter(torch.rand(WIDTH))

    def forward(x: Tensor) -> Tensor:
        y, same_weight = part(x.cumsum(0), model.weight)
        return y.sin() * same_weight

    model = Code(forward, part)
    model.weight = weight
    expected = step(model, leaf())
    with apply(model, {"parts.0": "recompute", "*": "offload"}):
        assert same(step(model, leaf()), expected)


class WritesSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = gradient * x
        x.mul_(3)
        return result


@pytest.mark.parametrize("plan", [{"parts.0": "recompute", "*": "offload"}, {"*": "offload"}, {"*": "save"}])
def test_what_a_backward_writes_is_seen_by_the_next_that_reads_it(plan):
    model = Code(lambda x: model.parts[0](x.cumsum(0)), Code(lambda x: kept.append(x * 1.5) or WritesSaved.apply(kept[-1])))
    kept: list[Tensor] = []
    x = leaf()
    with apply(model, plan):
        result = model(x)
        first = torch.autograd.grad(result.sum(), x, retain_graph=True)
        try:
            second = torch.autograd.grad(result.sum(), x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert same(second, first)  # made again


@pytest.mark.parametrize("plan", [{"*": "offload"}, {"parts.0": "recompute", "*": "offload"}])
def test_a_stale_view_among_what_a_module_returns_harms_nobody(plan):
    def part(x: Tensor) -> list[Tensor]:
        y = x.cumsum(0)
        stale, _ = y.chunk(2)
        y.mul_(0.5)
        return [stale, x.cos()]

    model = Code(lambda x: model.parts[0](x.cumsum(0))[1], Code(part))
    expected = step(model, leaf())
    with apply(model, plan):
        assert same(step(model, leaf()), expected)


def test_a_stale_view_that_a_unit_is_given_and_does_not_use_harms_nobody():
    def forward(x: Tensor) -> Tensor:
        y = x.cumsum(0)
        stale, _ = y.chunk(2)
        y.mul_(0.5)
        return model.parts[0](stale, x.cos())

    class Second(nn.Module):
        def forward(self, _: Tensor, x: Tensor) -> Tensor:
            return x.sin().cos()

    model = Code(forward, Second())
    expected = step(model, leaf())
    with apply(model, {"parts.0": "recompute", "*": "offload"}):
        assert same(step(model, leaf()), expected)


@pytest.mark.parametrize("plan", [{"parts.0": "recompute"}, {"*": "recompute"}])
def test_a_forward_that_runs_a_backward_adds_to_gradients_once(plan):
    part = nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU())

    def forward(x: Tensor) -> Tensor:
        y = part(x.cumsum(0))
        (y * y).sum().backward(inputs=list(part.parameters()), retain_graph=True)
        return y.sin()

    model = Code(forward, part)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x := leaf()).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]

    expected = gradients()
    with apply(model, plan):
        for _ in range(2):
            assert same(gradients(), expected)


def values_of_csr(x: Tensor) -> Tensor:
    return x.to_sparse_csr().values().square()


def attention_of_jagged(x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, len(x)])).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(nested, nested, nested).transpose(1, 2).flatten(-2).values()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", [{"*": "save"}, {"*": "offload"}, {"parts.0": "recompute", "*": "offload"}])
@pytest.mark.parametrize("function", [values_of_csr, attention_of_jagged])
def test_a_view_of_something_without_strides_is_saved_as_any_tensor(function, plan):
    model = Code(lambda x: function(model.parts[0](x)), nn.Linear(WIDTH, WIDTH))
    expected = step(model, leaf())
    with apply(model, plan) as handle:
        assert same(step(model, leaf()), expected)
        assert handle.stats.saved_bytes > 0
