"""A module that changes attributes of its own would do so twice, and is refused; one that fills a cache is not."""

import pytest
import torch
from torch import Tensor, nn

from tests.models import leaf
from tests.recomputing_harness import Harness
from tests.test_recomputing import Code, step


class Stateful(nn.Module):
    """Changes what it has in one of the ways that models do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.count = 1
        self.scale = torch.ones(())
        self.losses: list[Tensor] = []
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Change it, and use it."""
        if self.way == "count":
            self.count += 1
        elif self.way == "scale":
            self.scale = self.scale * 1.1
        elif self.way == "losses":
            self.losses.append(x.detach().mean())
        elif self.cache is None:
            self.cache = torch.full((), 2.0)
            self.num_filled = 1
        return (x * self.scale * self.count * (1.0 if self.cache is None else self.cache)).exp().sin()


def around(part: nn.Module) -> nn.Module:
    return Code(lambda self, x: self.part(x), part)


@pytest.mark.parametrize("way", ["count", "scale", "losses"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_that_changes_an_attribute_is_refused(way, nested):
    part: nn.Module = Stateful(way)
    model = around(nn.Sequential(part) if nested else part)
    name = f"0.{way}" if nested else way
    with pytest.raises(ValueError, match=f"'part' cannot be under \"recompute\": it changes '{name}', an attribute of its own"):
        step(Harness(model, ("part",)), model, leaf(3))


def test_a_module_that_fills_a_cache_is_not():
    model = around(Stateful("cache"))
    harness = Harness(model, ("part",))
    for _ in range(3):
        step(harness, model, leaf(3))
    assert harness.num_runs["part"] == 3
