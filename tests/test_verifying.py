"""``verify_recompute`` sees no difference where there is none."""

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.conftest import same


class Force(nn.Module):
    """Differentiates in its forward, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.lead, self.energy = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(self.lead(x).tanh() * x).sum(), x, create_graph=True)
        return force * force


class Recurrent(nn.Module):
    """Saves the workspace of a kernel, of which not all bytes are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, bidirectional=True, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(2, 3, 8))[0].sin()


@pytest.mark.parametrize("kind", [Force, Recurrent])
@pytest.mark.parametrize("verify", [False, True])
def test_a_module_that_does_the_same_is_not_said_to_differ(kind: type[nn.Module], verify: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), kind()), torch.randn(6, 8)

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(x).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)]

    expected = step()
    with bh.apply(model, {"1": "recompute"}, tier=RecordingTier(deferred=True), min_bytes=0, verify_recompute=verify) as handle:
        for _ in range(3):
            assert same(step(), expected)
        assert handle.stats.recomputed_bytes > 0
