"""Models that are compiled, and what is claimed of each: nothing changes, nothing is compiled twice, exactly the expected bytes move."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backhaul.testing import RecordingTier
from tests.conftest import same

WIDTH, ROWS, DEPTH = 16, 8, 3
INPUT_BYTES = ROWS * WIDTH * 4
NOTHING = nullcontext()
WARNINGS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # inductor is imported
]


def start_afresh() -> None:
    """Forget everything that was compiled, and the counts."""
    torch.compiler.reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

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
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Compile = Callable[[nn.Module], nn.Module]


def wrapping(backend: str, **options: Any) -> Compile:
    return lambda module: torch.compile(module, backend=backend, fullgraph=True, **options)


def in_place(backend: str, **options: Any) -> Compile:
    def compile(module: nn.Module) -> nn.Module:
        module.compile(backend=backend, fullgraph=True, **options)
        return module

    return compile


class Adapted(nn.Module):
    """A frozen base and two small matrices beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def step(model: nn.Module, rows: int = ROWS, around: AbstractContextManager[Any] = NOTHING) -> list[Tensor]:
    """Return the loss and all gradients of a step."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    with around:
        y = model(x)
    loss = y.square().sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients]


def untouched(make: Callable[[], nn.Module]) -> tuple[list[Tensor], int, int]:
    """Return what a step gives without backhaul, how many graphs it compiles, and the bytes that it saves, parameters and buffers aside."""
    model = made(make)
    sizes: dict[Any, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    expected = step(model, around=saved_tensors_hooks(pack, lambda tensor: tensor))
    for owned in (*model.parameters(), *model.buffers()):
        sizes.pop(owned.untyped_storage(), None)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    assert not counters["graph_break"]
    start_afresh()
    return expected, num_graphs, sum(sizes.values())


def moved_in_three_steps(model: nn.Module, tier: RecordingTier, expected: list[Tensor]) -> int:
    """Train a managed model, see that nothing changes and nothing is compiled again; return the bytes of the first step."""
    assert same(step(model), expected)
    first = tier.bytes_of("store")
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            assert same(step(model), expected)
    assert tier.used_bytes == 0
    return first
