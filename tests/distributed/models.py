"""Small models that are sharded."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, ROWS, DEPTH = 16, 80, 8, 3
INPUT_BYTES, HIDDEN_BYTES = ROWS * WIDTH * 4, ROWS * HIDDEN * 4
OF_A_BLOCK = [INPUT_BYTES, HIDDEN_BYTES, HIDDEN_BYTES]  # its input, and what goes into the GELU and comes out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpointed(nn.Module):
    """Recomputes what it is made of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Stack(nn.Module):
    """Blocks in a ModuleList, and a head."""

    def __init__(self, block: type[nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(index: int = 0) -> Tensor:
    """Return this rank's own input."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + index))


def step(model: nn.Module) -> Tensor:
    """Run forward and backward on this rank's own input, and return the loss."""
    loss: Tensor = model(rows()).float().square().sum()
    loss.backward()
    return loss.detach()


def accumulate(model: nn.Module) -> list[Tensor]:
    """Run two forward passes, then two backward passes."""
    losses = [model(rows(index)).float().square().sum() for index in range(2)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]
