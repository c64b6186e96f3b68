"""What one user of a saved tensor holds, and which promise stands for what a node produced.

Covers: claims, which may be exchanged for less; tensors of which only the shape is needed; the promises that recipes may start from.
Does not cover: what is promised (saved.py, remade.py), or recipes (recipes.py).

[Note: Only the shape]
A few nodes keep a tensor of which their backward reads the shape alone: ``index_add`` expands a gradient like its source, and so it is in
every order of derivatives. Which node saves a tensor cannot be told while it is packed. Once the node is part of a graph, what it keeps is
looked up there; if that is a claim of ours, it is that node's alone, and is exchanged for the shape. Others hold claims of their own.

[Note: Never written]
A recipe takes an operand as it was when the op ran. What the node itself keeps was packed at that moment. A value found by way of
``next_functions`` was packed before or after, and may have been written in between, which would go unnoticed; so it counts only if its
version was 0 when it was packed and is so when the recipe is found. Writes that autograd is not told of (``x.data``, a custom kernel)
go unnoticed here as they do there.
"""

import copy
import weakref
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from backhaul import _torch
from backhaul.kinds import whole_of
from backhaul.remade import Remade
from backhaul.saved import Bring, Kept, Layout, Parts, Promise, Recast, Saved, View, modified_in_place

Eps = tuple[float | None]  # as it was passed; RMS norms have a default of their own for None

_SHAPE_ONLY = {"IndexAddBackward0": "source", "IndexCopyBackward0": "source", "GatherBackward0": "self"}


class ShapeOnly:
    """The promise for a tensor whose values nobody reads. It gives back one of that shape, without the memory."""

    __slots__ = ("view",)

    def __init__(self, view: View) -> None:
        self.view = copy.copy(view)
        self.view.alias = view.alias.detach()
        self.view.let_go()

    def restore(self, bring: Bring) -> Tensor:
        view = self.view
        if view.changed:
            raise modified_in_place(view.alias, view.version, view.layout.size)
        return torch.empty((), dtype=view.layout.dtype, device=view.alias.device).expand(view.layout.size)


class Base:
    """The promise for the tensor that a saved one is a view of."""

    __slots__ = ("layout", "promise")

    def __init__(self, promise: Promise, layout: Layout) -> None:
        self.promise = promise
        self.layout = layout

    def restore(self, bring: Bring) -> Tensor:
        return self.layout.view(self.promise.restore(bring).untyped_storage())


def depth_of(promise: object) -> int:
    """Return how many makers have to work one after the other for a promise; 0 where nothing is made again."""
    while type(promise) is Claim or type(promise) is Base:
        promise = promise.promise
    if type(promise) is Remade:
        return promise.made.depth
    return max(map(depth_of, promise.parts.values()), default=0) if type(promise) is Parts else 0


class Leaf:
    """The promise for a parameter that a recipe starts from, with the values that it had."""

    __slots__ = ("home", "parameter", "version")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.version = _torch.version_of(parameter)
        self.home = weakref.ref(parameter.untyped_storage())

    def restore(self, bring: Bring) -> Tensor:
        parameter = self.parameter
        if _torch.version_of(parameter) != self.version:
            raise modified_in_place(parameter, self.version)
        if parameter.untyped_storage() is not self.home():
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} got other data between forward and backward, and what is made again from "
                'it would get other values; assign its data after backward, or put the module that uses it under "save"'
            )
        return parameter.detach()


class Claim:
    """What autograd holds for one saved tensor of one node: a promise, which others may know of, too."""

    __slots__ = ("__weakref__", "claims", "eps", "promise")

    def __init__(self, claims: "Claims", promise: Promise, eps: Eps | None) -> None:
        self.claims = claims
        self.promise = promise
        self.eps = eps  # of the norm that saves it

    def restore(self, bring: Bring) -> Tensor:
        return self.promise.restore(bring)

    def settle_for_shape(self) -> None:
        """Hold no more than the shape."""
        promise = self.promise
        if isinstance(promise, (Saved, Remade)):
            self.promise = ShapeOnly(promise.view)
        elif isinstance(promise, Kept):
            self.promise = ShapeOnly(View(promise.alias))


def norm_eps(frame: FrameType) -> Eps | None:
    """Return the ``eps`` of the norm that saves a tensor just now, if it does; ``frame`` is that which the pack hook was called from.

    The node does not keep it.
    """
    code = frame.f_code
    return (frame.f_locals["eps"],) if code is _LAYER_NORM or code is _RMS_NORM else None


_LAYER_NORM, _RMS_NORM = F.layer_norm.__code__, F.rms_norm.__code__


def shape_only(nodes: Iterable[Node], *, limit: int = 32) -> list[Claim]:
    """Return the claims to tensors of which only the shape is needed, among ``limit`` nodes, those nearest to ``nodes``."""
    found: list[Claim] = []
    queue = deque(nodes)
    seen = set(queue)
    while queue and limit:
        node = queue.popleft()
        limit -= 1
        name = _SHAPE_ONLY.get(node.name())
        if name is not None and not (name == "self" and _torch.constant_of(node, "sparse_grad")):
            claim = _torch.kept_by(node, name)
            if type(claim) is Claim and type(claim.promise) is not ShapeOnly:
                found.append(claim)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return found


def once_more(promise: Promise, tensor: Tensor) -> Saved | Remade | None:
    """Return a promise for a tensor that has had ``promise`` before; ``None`` where it may be another one by now."""
    if type(promise) is Claim:
        promise = promise.promise
    if type(promise) is Saved:
        home = promise.blob.home()
    elif type(promise) is Remade:
        home = promise.made.home()
    else:
        return None
    view = promise.view
    if home is not tensor.untyped_storage() or view.version != _torch.version_of(tensor) or view.layout != Layout.of(tensor):
        return None
    return promise.again() if type(promise) is Remade else promise


class Claims:
    """The claims of one engine: what recipes may start from. Nodes remember, weakly, the claim to what they produced."""

    def claim(self, tensor: Tensor, promise: Promise, eps: Eps | None = None) -> Claim:
        """Return a claim to ``promise``, which stands for ``tensor``, as it is being packed."""
        claim = Claim(self, promise, eps)
        if not _torch.version_of(tensor):  # [Note: Never written]
            whole = whole_of(tensor)
            node = None if whole is None else whole.grad_fn
            if whole is not None and node is not None:
                notes: Any = node.metadata  # a property, whatever its annotation says
                notes[self, whole.output_nr] = (weakref.ref(claim), None if whole is tensor else Layout.of(whole))
        return claim

    def is_steady(self, kept: Tensor) -> bool:
        """Say whether a kept tensor is certain to be there in any part of backward. Weights that FSDP gathers are not."""
        return True

    def is_unwritten(self, leaf: Tensor, user: Node) -> bool:
        """Say whether a leaf is certain to be as it was when ``user`` ran."""
        return not isinstance(leaf, nn.Parameter) and not _torch.version_of(leaf)

    def of_kept(self, kept: Any) -> Promise | None:
        """Return the promise for a tensor that a node keeps, given what some pack hook returned for it."""
        if type(kept) is Claim:
            return self._for_recipe(kept.promise) if kept.claims is self else None
        if type(kept) is Tensor and not kept.ndim and not kept.requires_grad and not _torch.version_of(kept):
            return Kept(kept)  # a Python number
        return self._for_recipe(kept) if type(kept) is Kept or type(kept) is Recast else None

    def of_output(self, node: Node, output_nr: int) -> Promise | None:
        """Return the promise for something that a node produced, if that has been saved."""
        notes: Any = node.metadata
        reference, layout = notes.get((self, output_nr), (None, None))
        claim = reference() if reference is not None else None
        if claim is None or not _is_unchanged(claim.promise):
            return None
        promise = self._for_recipe(claim.promise)
        return promise if promise is None or layout is None else Base(promise, layout)

    def of_leaf(self, leaf: Tensor, user: Node) -> Promise | None:
        """Return the promise for a leaf of the graph that ``user`` has as an operand."""
        if type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided and self.is_steady(leaf) and self.is_unwritten(leaf, user):
            return Leaf(leaf) if type(leaf) is nn.Parameter else Kept(leaf)
        return None

    def given(self, node: Node, output_nr: int, *, at_most: int) -> Tensor | None:
        """Return what a node produced, if it can be had just now, takes that many bytes, and nobody writes to it."""
        return None

    def hold(self, tensor: Tensor) -> Promise | None:
        """Return a promise for what was ``given``."""
        return None

    def eps_of(self, kept: Any) -> Eps | None:
        """Return the ``eps`` of the norm that keeps a tensor."""
        return kept.eps if type(kept) is Claim else None

    def _for_recipe(self, promise: Promise) -> Promise | None:
        if type(promise) is Remade:
            return promise.again()
        if type(promise) is Kept:
            kept = promise.alias
            if type(kept) is nn.Parameter:
                return Leaf(kept) if self.is_steady(kept) else None
            return promise if type(kept) is Tensor and self.is_steady(kept) else None
        if type(promise) is Recast:
            return promise if self.is_steady(promise.source) else None
        return promise if type(promise) is Saved else None


def _is_unchanged(promise: Promise) -> bool:
    if type(promise) is Saved or type(promise) is Remade:
        return not promise.view.changed
    return type(promise) is Kept and _torch.version_of(promise.alias) == promise.version
