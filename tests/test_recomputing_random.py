"""Any modules, nested in any way, any of them units: the same loss, gradients and random numbers as without."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import same
from tests.models import leaf
from tests.recomputing_harness import Harness
from tests.test_recomputing import Attention, Code, Custom, GatedMlp
from tests.test_recomputing_twice import Moe


class Residual(nn.Module):
    """Adds what it is given, in place or not."""

    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        y = self.inner(x)
        return x.clone().add_(y) if self.in_place else x + y


class Pairs(nn.Module):
    """Returns two, one of which is a view of what it was given; takes a keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, other: Tensor | None = None) -> dict[str, Tensor]:
        """Run it."""
        return {"y": self.inner(x if other is None else x * other), "view": x.transpose(0, 1)}


def paired(self: Code, x: Tensor) -> Tensor:
    """Use both results."""
    out = self.part(x, other=x.detach().tanh())
    return out["y"] * out["view"].transpose(0, 1).sigmoid()


LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(16, 16),
        lambda: nn.LayerNorm(16),
        lambda: nn.RMSNorm(16),
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Identity,
        lambda: nn.Dropout(0.3),
        lambda: nn.Linear(16, 16).requires_grad_(False),
        GatedMlp,
        Attention,
        Custom,
        Moe,
        lambda: Moe("sort"),
    ]
).map(lambda make: make())


def nested(inner: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    """Put modules inside others."""
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: nn.Sequential(*parts)),
        st.builds(Residual, inner, st.booleans()),
        inner.map(lambda part: Code(lambda self, x: self.part(self.part(x).tanh()), part)),
        inner.map(lambda part: Code(lambda self, x: checkpoint(self.part, x, use_reentrant=False), part)),
        inner.map(lambda part: Code(paired, Pairs(part))),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(), inner=st.recursive(LEAVES, nested, max_leaves=6), verify=st.booleans(), frozen=st.booleans(), frames=st.integers(1, 2)
)
def test_random_modules_and_units(data: st.DataObject, inner: nn.Module, verify: bool, frozen: bool, frames: int) -> None:
    model = Code(lambda self, x: self.last(self.part(x.tanh()).float()), inner, nn.Linear(16, 16))
    names = [name for name, _ in model.named_modules() if name]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    x = leaf(2, 3, 16)
    x.requires_grad_(not frozen)
    wanted = [*([] if frozen else [x]), *(p for p in model.parameters() if p.requires_grad)]

    def run(call: object) -> list[Tensor]:
        torch.manual_seed(1)
        outs = [call(x) for _ in range(frames)]  # several frames at once, as with microbatches
        grads: list[Tensor] = []
        for out in outs:
            grads += [g.clone() for g in torch.autograd.grad(out.square().sum(), wanted, allow_unused=True) if g is not None]
        return [*(out.detach() for out in outs), *grads, torch.rand(2)]

    expected = run(model)
    harness = Harness(model, sorted(chosen), verify=verify)
    assert same(run(harness), expected)
    assert same(run(harness), expected)
