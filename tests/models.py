"""Small models that several test files train."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Blocks in a ModuleList, a buffer, and an argument that is no tensor. At module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        """Run it."""
        for block in self.blocks:
            x = block(x) + shift
        return self.head(x * self.scale).tanh()


def build() -> Net:
    """Make a ``Net`` that is the same each time."""
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def step(model: nn.Module) -> list[Tensor]:
    """Run a model forward and backward on ``X``."""
    return list(torch.autograd.grad(model(X).square().sum(), list(model.parameters())))


def mlp(width: int = 16, depth: int = 3) -> nn.Sequential:
    """Make a chain of linear layers and activation functions."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def leaf(*shape: int) -> Tensor:
    """Make a random input that wants a gradient."""
    return torch.randn(*shape, requires_grad=True)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a module forward and backward on ``x``."""
    return [gradient.clone() for gradient in torch.autograd.grad(module(x).square().sum(), [*module.parameters(), x])]
