"""Saved-tensor hooks that turn whatever has a recipe into one, so that recipes are tested apart from the engine."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from backhaul.claims import Claims, norm_eps
from backhaul.kinds import is_parameter
from backhaul.recipes import Recipe, recipe_for
from backhaul.remade import Made, Remade
from backhaul.saved import Kept, Promise, flat
from backhaul.testing import same_bits
from tests.conftest import same


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """Holds what it can as a recipe and keeps the rest. A storage is made as often as the engine would make it."""

    def __init__(self, *, cheap_only: bool = True) -> None:
        super().__init__(self.pack, lambda promise: promise.restore(None))
        self.claims = Claims()
        self.cheap_only = cheap_only
        self.kept: list[tuple[weakref.ref[Any], tuple[int, ...]]] = []
        self.recipes: list[Recipe] = []
        self.originals: list[UntypedStorage] = []  # copies of what they are to make
        self.remade: list[weakref.ref[Any]] = []  # storages that a recipe stands for
        self.num_freed = 0  # of these, when forward had ended
        self.made: dict[int, weakref.ref[Made]] = {}

    def pack(self, tensor: Tensor) -> Promise:
        if is_parameter(tensor):
            return Kept(tensor)
        return self.claims.claim(tensor, self._promise(tensor), norm_eps(sys._getframe(1)))

    def _promise(self, tensor: Tensor) -> Promise:
        storage = tensor.untyped_storage()
        known = self.made.get(id(storage))
        made = known() if known is not None else None
        if made is None or made.home() is not storage:
            recipe = recipe_for(tensor, self.claims, cheap_only=self.cheap_only)
            if recipe is None:
                self.kept.append((weakref.ref(storage), tuple(tensor.shape)))
                return Kept(tensor)
            self.recipes.append(recipe)
            self.originals.append(storage.clone())
            self.remade.append(weakref.ref(storage))
            made = Made(recipe, storage)
            self.made[id(storage)] = weakref.ref(made)
        return Remade(made, tensor)

    def assert_all_exact(self) -> None:
        """Claim that each recipe makes the bytes that it stands for, also where nobody needs them."""
        for recipe, original in zip(self.recipes, self.originals, strict=True):
            made = Made(recipe, original)
            recipe.make(made, lambda blob: None)
            assert made.storage is not None and torch.equal(flat(made.storage), flat(original))


class Use(torch.autograd.Function):
    """Saves its operand, and has it as a factor of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.seen.append(x.detach())
        return gradient * x, None


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    storage = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.size(), x.stride())


def assert_comes_back(function: Callable[..., Tensor], *inputs: Tensor, recipe: bool = True) -> None:
    """Claim that what ``function`` makes is freed and made again with the same bits and strides, by a recipe (or is not)."""
    seen: list[Tensor] = []
    hooks = Hooks()
    with hooks:
        made = function(*inputs)
        original, num_before = copied(made), len(hooks.recipes)
        result = Use.apply(made, seen)
        assert len(hooks.recipes) == num_before + recipe
        freed = weakref.ref(made.untyped_storage())
        del made
    assert (freed() is None) is recipe
    result.sum().abs().backward()
    (got,) = seen
    assert same_bits(got, original) and got.stride() == original.stride() and got.storage_offset() == original.storage_offset()


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], hooks: Any = None) -> list[Tensor | None]:
    """Return the result of ``function`` and its gradients, by a loss that weighs every element differently."""
    leaves = [each for each in inputs if each.requires_grad]
    with hooks or contextlib.nullcontext():
        result = function(*inputs)
    if hooks is not None:
        hooks.num_freed = sum(storage() is None for storage in hooks.remade)
        hooks.assert_all_exact()
    weight = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float32).view(result.shape).to(result.dtype)
    return [result.detach().clone(), *torch.autograd.grad(result, leaves, weight, allow_unused=True)]


def assert_remade(function: Callable[..., Tensor], *inputs: Tensor, num: int | None = 1, **options: Any) -> Hooks:
    """Claim that the gradients are those of plain autograd and that ``num`` recipes were used, each of which freed its storage."""
    expected = gradients(function, inputs)
    hooks = Hooks(**options)
    assert same(gradients(function, inputs, hooks), expected)
    if num is not None:
        assert (len(hooks.recipes), hooks.num_freed) == (num, num)
    return hooks
