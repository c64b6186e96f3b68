"""Choices made from floating-point values: recorded in one forward pass, made the same in another ([Note: Choices]).

Covers: top-k, sort and their kin.
Does not cover: comparisons, whose results are as large as what they compare; ``keep_outputs`` covers a module that decides by them.

[Note: Choices]
A module that is run again on inputs that differ in the last bit may send a token to another expert, and its gradients are then those of
another function. So the indices that such an operation returns are recorded and put in place of those that it returns the second time, with
the values found there. The operation itself runs again where it has a backward, since what it saves has to be made again; the results are
then overwritten where they lie. Everything that follows from indices (masks, counts, permutations) comes out the same by itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.storage import UntypedStorage

from backhaul.kinds import why_it_stays
from backhaul.saved import Bring, Layout, Promise, flat

_DIM_AT = {"topk": 2, "sort": 1, "kthvalue": 2, "max": 1, "min": 1, "median": 1, "nanmedian": 1, "mode": 1, "cummax": 1, "cummin": 1}
_WITH_VALUES = {getattr(owner, name) for name in _DIM_AT for owner in (torch, Tensor)}
# These run again: the one moves the generator, and sort, of which the other consists, saves something.
_ALONE = {torch.multinomial, Tensor.multinomial, torch.argsort, Tensor.argsort}
_INDICES_ONLY = {
    getattr(owner, name)
    for name in (
        "argmax",
        "argmin",
        "argwhere",
        "nonzero",
        "bincount",
        "unique",
        "unique_consecutive",
        "searchsorted",
        "bucketize",
    )
    for owner in (torch, Tensor)
    if hasattr(owner, name)
}
_INDICES_ONLY.add(torch.where)  # of one argument
_CHOICES = _WITH_VALUES | _ALONE | _INDICES_ONLY


class Recording(TorchFunctionMode):
    """While active, notes what is chosen.

    Args:
        promise: what to hold for a tensor of indices.
    """

    def __init__(self, promise: Callable[[Tensor], Promise]) -> None:
        super().__init__()
        self.promise = promise
        self.chosen: list[tuple[str, list[Promise]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        if func in _CHOICES and (indices := _indices(func, result)):
            self.chosen.append((func.__name__, [self.promise(each) for each in _copies(indices)]))
        return result


class Replaying(TorchFunctionMode):
    """While active, has everything chosen as it was recorded.

    Args:
        chosen: what ``Recording`` has noted.
        bring: gets what has been moved back onto the device.
        hold: a context in which results are not final yet.
        differs: makes the error for a pass that asks otherwise.
    """

    def __init__(
        self,
        chosen: list[tuple[str, list[Promise]]],
        bring: Bring,
        hold: Callable[[], AbstractContextManager[None]],
        differs: Callable[[str], RuntimeError],
    ) -> None:
        super().__init__()
        self.chosen = iter(chosen)
        self.bring = bring
        self.hold = hold
        self.differs = differs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func not in _CHOICES or (func is torch.where and len(args) + len(kwargs) > 1):
            return func(*args, **kwargs)
        if func in _INDICES_ONLY:
            recorded = self._next(func)
            return recorded[0] if len(recorded) == 1 and func is not torch.where else tuple(recorded)
        with self.hold():
            result = func(*args, **kwargs)
            indices = _indices(func, result)
            if indices:
                with torch.no_grad():
                    indices[0].copy_(self._next(func)[0])
                    if func in _WITH_VALUES:
                        _gather(func, args, kwargs, result)
        return result

    def _next(self, func: Any) -> list[Tensor]:
        name, promises = next(self.chosen, ("nothing", []))
        if name != func.__name__:
            raise self.differs(f"it chose by {name} and now chooses by {func.__name__}")
        return _copies([promise.restore(self.bring) for promise in promises])


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors with their storages: whoever gets indices may write to them, and what is saved later is to lie as it did."""
    storages: dict[int, UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        if why_it_stays(tensor):
            copies.append(tensor.clone())
            continue
        storage = tensor.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = flat(storage).clone().untyped_storage()
        copies.append(Layout.of(tensor).view(storages[id(storage)]))
    return copies


def _indices(func: Any, result: Any) -> list[Tensor]:
    """Return the tensors by which ``func`` tells what it has chosen; none where it was called as another function, as ``max`` can be."""
    if func in _WITH_VALUES:
        return [result[1]] if isinstance(result, tuple) else []
    if func is torch.where:
        return list(result) if isinstance(result, tuple) else []
    return [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]


def _gather(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Overwrite the values in ``result`` by those at the indices there."""
    source = (args[0] if args else kwargs["input"]).detach()
    at = _DIM_AT[func.__name__]
    dim = kwargs.get("dim", args[at] if len(args) > at else -1)
    values, indices = result[0].detach(), result[1]
    if source.dim() and indices.dim() < source.dim():
        values.copy_(source.gather(dim, indices.unsqueeze(dim)).squeeze(dim))
    elif source.dim():
        values.copy_(source.gather(dim, indices))
