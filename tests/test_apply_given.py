"""Norms that are written out: their input is held instead of its cast to twice the width, once it is known that nobody writes to it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from tests.conftest import Code, same
from tests.planned import apply

ROWS, WIDTH = 8, 64
HALF, FULL = ROWS * WIDTH * 2, ROWS * WIDTH * 4  # bytes of the input, and of its cast


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def block(*, after: Any = lambda x: x) -> nn.Module:
    """Return a model in which a norm reads what nobody saves; ``after`` may write to that."""

    def forward(x: Tensor) -> Tensor:
        first, norm, last = model.parts
        residual = first(x).cumsum(0)  # saved by nobody
        normed = last(norm(residual))
        return after(residual) + normed

    model = Code(forward, nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).float().square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def held_bytes(handle: bh.Handle) -> int:
    stats = handle.stats
    return stats.saved_bytes - stats.recomputed_bytes


def held_in_steps(model: nn.Module, num: int) -> list[int]:
    """Claim that training is that of the plain model; return the bytes held in each step."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    expected = step(model, x)
    held = []
    with apply(model, {"*": "offload"}) as handle:
        for _ in range(num):
            before = held_bytes(handle)
            assert same(step(model, x), expected)
            held.append(held_bytes(handle) - before)
    return held


def test_the_input_is_held_instead_of_its_cast_from_the_second_step_on():
    first, *later = held_in_steps(block(), 4)
    assert later == [first - FULL + HALF] * 3


def test_an_input_that_is_written_to_later_is_never_held():
    first, *later = held_in_steps(block(after=lambda x: x.add_(1)), 4)
    assert later == [first] * 3


def test_an_input_that_is_written_to_for_the_first_time_after_it_has_been_held_is_an_error_and_no_other_value():
    writes: list[bool] = []
    model, x = block(after=lambda x: x.add_(1) if writes else x), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    with apply(model, {"*": "offload"}, activation_budget=1 << 30):
        for _ in range(3):
            step(model, x)
        writes.append(True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model, x)


def test_microbatches_in_flight_are_waited_for():
    model = block()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    expected = step(model, x)
    with apply(model, {"*": "offload"}) as handle:
        losses = [model(x).float().square().sum() for _ in range(3)]
        for loss in losses:
            assert same([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], expected)
        before = held_bytes(handle)
        assert same(step(model, x), expected)
        assert held_bytes(handle) - before == before // 3 - FULL + HALF
