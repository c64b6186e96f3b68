"""What arguments and tensors consist of.

Covers: values nested in lists, dicts and what libraries have registered with torch; the plain tensors inside a wrapper subclass.
Does not cover: giving their values back (saved.py).
"""

import weakref
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.kinds import take_apart, why_it_stays
from backhaul.remade import Made
from backhaul.saved import Layout


class Part(NamedTuple):
    """A plain tensor, of those that a saved tensor or an output consists of, and what makes its storage, if that is made again."""

    layout: Layout | None  # of what has a storage
    made: "weakref.ref[Made] | None"
    print: int | None = None  # with ``verify``
    inside: str = ""  # the innermost module known to have been running
    node: str | None = None  # the kind of node that made it: a run that does something else mostly shows in that


def is_cache(value: Any) -> bool:
    """Say whether the value is one of those that a module extends each time it runs, as ``DynamicCache``."""
    return type(value).__name__.endswith("Cache")


_LEAVES = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))


def flatten(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all that some values consist of, and how each nests; ``None`` for one that does not."""
    leaves: list[Any] = []
    nesting: list[Any] = []
    for value in values:
        if type(value) in _LEAVES:
            leaves.append(value)
            nesting.append(None)
        else:
            inside, structure = _torch.flatten_tree(value, is_leaf=is_cache)
            leaves += inside
            nesting.append((len(inside), structure))
    return leaves, nesting


def unflatten(leaves: list[Any], nesting: list[Any]) -> list[Any]:
    """Nest ``leaves`` as ``flatten`` found them."""
    if not any(nesting):
        return leaves
    remaining = iter(leaves)
    return [
        next(remaining) if nested is None else _torch.unflatten_tree(list(islice(remaining, nested[0])), nested[1]) for nested in nesting
    ]


def plain_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that a wrapper subclass is made of, and any other tensor itself."""
    if type(tensor) is not Tensor:
        tensor = _torch.settle_collective(tensor)
        if _torch.is_wrapper_subclass(tensor):
            return [plain for part in take_apart(tensor)[0].values() for plain in plain_parts(part)]
    return (tensor,)


def layout_of(tensor: Tensor) -> Layout | None:
    """Return how a tensor looks at its storage; ``None`` if it has none of the plain kind."""
    return None if why_it_stays(tensor) else Layout.of(tensor)


def node_of(tensor: Tensor) -> Any:
    """Return the node that made a tensor; ``None`` for a view that nobody may use any more, since its base has been written."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Say whether no node made a tensor. A view that nobody may use any more was made by one that cannot be asked for."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def kind_of_maker(tensor: Tensor) -> str:
    """Return the kind of node that made a tensor."""
    return type(node_of(tensor)).__name__


def storages_of(tensor: Tensor) -> Iterable[UntypedStorage]:
    """Return the storages that a tensor lies in."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        return (tensor.untyped_storage(),)
    return [plain.untyped_storage() for plain in plain_parts(tensor) if not why_it_stays(plain)]
