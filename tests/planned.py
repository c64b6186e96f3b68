"""A small model whose storages fall under several rules at once, and the plan-managed run that tests compare with the plain one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import _torch
from backhaul.testing import RecordingTier

WIDTH = 16
ROWS = 8
NUM_BYTES = ROWS * WIDTH * 4  # of an activation


class Layer(nn.Module):
    """A norm that q, k and v read, a product, an activation, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.GELU()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.norm(x)
        return x + self.down(self.act(self.q(h) * self.k(h)) + self.v(h))


class Net(nn.Module):
    """Layers in a ModuleList and a head. At module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).tanh()


def build() -> Net:
    """Make a ``Net`` that is the same each time."""
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, NUM_BYTES // 4).reshape(ROWS, WIDTH)
MIXED = {"*.norm": "recompute", "*.act": "recompute", "*.v": "save", "*": "offload"}
PLANS: dict[str, Any] = {
    "offload": {"*": "offload"},
    "mixed": MIXED,
    "layers": {"layers.*": "recompute", "*": "offload"},
    "the model": bh.Plan({}, default="recompute"),
}
ALL_PLANS = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def leaf() -> Tensor:
    """Return an input that wants a gradient."""
    return X.clone().requires_grad_()


def apply(model: nn.Module, plan: Any, tier: "bh.Tier | str | None" = None, **options: Any) -> bh.Handle:
    """Apply a plan so that all that can move does, through a tier that copies as late as it may and poisons what it has freed."""
    chosen = {"activation_budget": 0, "min_bytes": 0, **options}
    return bh.apply(model, plan, tier=tier or RecordingTier(deferred=True), **chosen)


def step(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the result and the gradients of parameters and inputs; those that nothing depends on are zeros."""
    inputs = inputs or (X,)
    result = model(*inputs)
    wanted = [*model.parameters(), *(each for each in inputs if each.requires_grad)]
    return [result.detach().clone(), *torch.autograd.grad(result.square().sum(), wanted, materialize_grads=True)]


def assert_nothing_left(handle: bh.Handle, tier: RecordingTier) -> None:
    """Claim that no byte, frame, scope or hook is left of what has run."""
    engine = handle._engine
    assert handle.stats.resident_bytes == tier.used_bytes == 0
    assert not engine.registry.frames
    assert (engine.here.scope, engine.here.unit, engine.here.outputs) == (None, None, None)
    assert _torch.top_saved_tensors_hooks() is None
