"""Recipes: how to make a saved tensor again from what its autograd node keeps.

Covers: finding a recipe while a tensor is packed, and following it.
Does not cover: which ops can be run again (recipe_ops.py), where operands come from (claims.py), how long what was made lives (remade.py).

Plain code inside a forward, ``act(gate) * up``, has no module to run again. But ``tensor.grad_fn`` names the node that made a tensor, and
the node already keeps what its backward needs, which often is what its forward needs: a product its factors, SiLU its input. An operand
that it does not keep may be kept elsewhere, or be made from what the node before it keeps. It is certain or there is no recipe.

[Note: No cycles]
A recipe holds promises and functions, and neither the node nor any tensor with a graph. The node may have run and been freed when the
recipe is needed; and the promise for what the node made may be held by that very node's users, so that holding it would be a cycle which
no garbage collector sees. Promises are older than the recipe that holds them, so they do not lead back to it either.

[Note: Hidden writes]
What is saved, or taken from a promise, has a version, and one that was ever written in place has no recipe; nor has the outcome of an op
that wrote in place. Two kinds of writes stay unseen, and then a recipe makes the value as it was before: those that autograd is not told
of (``y.data.round_()``), and those under ``no_grad`` to a value that was never saved (``y = a * b; y.clamp_(); z = y + c``).
"""

import functools
import math
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul._torch import set_grad_enabled
from backhaul.claims import Eps
from backhaul.kinds import whole_of
from backhaul.recipe_ops import OPS, Function, Op, Output
from backhaul.remade import Made
from backhaul.saved import Bring, Layout, Promise

MOST_STEPS = 32
DEEPEST = 12
DEAREST = 4  # elements to touch for each element freed: some 140 GB/s on an H200 (docs/log.md), where a link in use is mostly free
MUCH_LESS = 2  # times that what is held for a recipe fits into what the recipe frees: a cast to twice the width

_LEAF = "torch::autograd::AccumulateGrad"


class Sources(Protocol):
    """Where operands come from. Each method gives a promise that the recipe may hold, or ``None``."""

    def of_kept(self, kept: Any) -> Promise | None:
        """Return the promise for a tensor that a node keeps, given what some pack hook returned for it."""
        ...

    def of_output(self, node: Node, output_nr: int) -> Promise | None:
        """Return the promise for something that a node produced, if it is promised elsewhere and has never been written in place."""
        ...

    def of_leaf(self, leaf: Tensor, user: Node) -> Promise | None:
        """Return the promise for a leaf, if it is certain to be as it was when ``user`` ran."""
        ...

    def given(self, node: Node, output_nr: int, *, at_most: int) -> Tensor | None:
        """Return something that a node produced and nobody has saved, if it is at hand, takes that many bytes, and nobody writes to it."""
        ...

    def hold(self, tensor: Tensor) -> Promise | None:
        """Return a promise for what was ``given``."""
        ...

    def eps_of(self, kept: Any) -> Eps | None:
        """Return the ``eps`` of the norm that keeps a tensor."""
        ...


class Step(NamedTuple):
    """One op of a recipe."""

    function: Function
    operands: tuple[int, ...]  # which parts of the recipe
    dtype: torch.dtype  # what comes out; an op that wrote into its operand has rounded to that


class Recipe:
    """Makes one storage again. ``cheap``: touches little memory for what it frees."""

    __slots__ = ("cheap", "device", "layout", "parts")

    def __init__(self, parts: "list[Promise | Step | None]", tensor: Tensor, *, cheap: bool) -> None:
        self.parts = parts  # in order, the result last; None is an operand that is absent
        self.device = tensor.device
        self.layout = Layout.of(tensor)
        self.cheap = cheap

    def make(self, wanted: Made, bring: Bring) -> None:
        """Follow the recipe. Keeps the contract of ``remade.Maker``."""
        was_enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            device_type = self.device.type
            if torch.is_autocast_enabled(device_type):
                # Ops take their operands as they are: what autocast cast was saved cast, or is a cast of its own.
                with torch.autocast(device_type, enabled=False):
                    self._follow(wanted, bring)
            else:
                self._follow(wanted, bring)
        finally:
            set_grad_enabled(was_enabled)

    def _follow(self, wanted: Made, bring: Bring) -> None:
        parts = self.parts
        last_use = {operand: index for index, part in enumerate(parts) if isinstance(part, Step) for operand in part.operands}
        values: list[Any] = []
        given: list[weakref.ref[UntypedStorage]] = []
        for index, part in enumerate(parts):
            if isinstance(part, Step):
                value = part.function(*[values[operand] for operand in part.operands])
                values.append(value if value.dtype is part.dtype else value.to(part.dtype))
                for operand in part.operands:
                    if last_use[operand] == index:
                        values[operand] = None
            elif part is None:
                values.append(None)
            else:
                value = part.restore(bring)
                values.append(value)
                given.append(weakref.ref(value.untyped_storage()))
        wanted.fill(self._storage(values[-1], given, wanted.num_bytes))

    def _storage(self, value: Tensor, given: "list[weakref.ref[UntypedStorage]]", num_bytes: int) -> UntypedStorage:
        """Return a storage of its own in which ``value`` lies as the original did."""
        storage = value.untyped_storage()
        if Layout.of(value) == self.layout and storage.nbytes() == num_bytes and not any(each() is storage for each in given):
            return storage
        target = torch.empty(num_bytes, dtype=torch.uint8, device=value.device).untyped_storage()
        self.layout.view(target).copy_(value)
        return target


def recipe_for(tensor: Tensor, sources: Sources, *, cheap_only: bool = True) -> Recipe | None:
    """Return the recipe for the whole storage of a tensor that is being packed, where there is one that is certain to give the same bits.

    The tensor is a plain strided one that has been saved by nobody else. Its storage is made as the tensor that it is a view of, if it is.
    """
    whole = whole_of(tensor)
    node = None if whole is None else whole.grad_fn
    if whole is None or node is None or node.name() not in OPS:
        return None
    shape, dtype = whole.shape, whole.dtype
    num_bytes = whole.nbytes
    if (
        _torch.version_of(whole)
        or not shape
        or dtype.is_complex
        or type(whole) is not Tensor
        or num_bytes != whole.untyped_storage().nbytes()
    ):
        return None
    cheap = DEAREST * whole.numel()
    writer = _Writer(sources, whole, num_bytes, most_touched=cheap if cheap_only else math.inf)
    if writer.write(Output(node, whole.output_nr, shape, dtype), 0) is None or not writer.hold_what_is_given():
        return None
    return Recipe(writer.parts, whole, cheap=writer.num_touched <= cheap)


class _Writer:
    """Writes the parts of one recipe. Methods return the number of a part, or ``None`` where there is no recipe."""

    __slots__ = (
        "device", "given", "known", "most_given", "most_touched", "num_steps", "num_touched", "on_cpu", "parts", "sources",
    )  # fmt: skip

    def __init__(self, sources: Sources, whole: Tensor, num_bytes: int, *, most_touched: float) -> None:
        self.sources = sources
        self.device = whole.device
        self.on_cpu = whole.is_cpu
        self.most_given = num_bytes // MUCH_LESS  # bytes of an operand that nobody holds as yet
        self.most_touched = most_touched  # elements, as the next one
        self.num_touched = 0
        self.num_steps = 0
        self.given: dict[int, Tensor] = {}  # by the number of their part, what is to be held for this recipe
        self.parts: list[Promise | Step | None] = []
        self.known: dict[tuple[Node, int], int] = {}  # what is needed twice is restored or made once

    def write(self, out: Output, depth: int) -> int | None:
        """Write what makes ``out``, unless that is written."""
        node = out.node
        key = node, out.nr
        number = self.known.get(key)
        if number is not None:
            return number
        op = OPS[node.name()]
        self.num_steps += 1
        if not op.is_view:
            self.num_touched += math.prod(out.shape)
        if self.num_steps > MOST_STEPS or self.num_touched > self.most_touched or (op.is_norm and out.nr):
            return None
        operands = self._operands(node, op, depth)  # all of them before going deeper: what fails mostly fails at once
        if operands is None:
            return None
        if self.on_cpu and op.rounds(node) and (depth or any(isinstance(each, Output) for each in operands)):
            return None  # recipe_ops.py, [Note: Same bits]
        numbers: list[int] = []
        for operand in operands:
            number = self.write(operand, depth + 1) if isinstance(operand, Output) else operand
            if number is None:
                return None
            numbers.append(number)
        function = op.function(node, out)
        if op.is_norm:
            eps = self.sources.eps_of(_torch.kept_by(node, "input"))
            if eps is None:
                return None
            function = functools.partial(function, eps=eps[0])
        number = self.known[key] = self._add(Step(function, tuple(numbers), out.dtype))
        return number

    def _operands(self, node: Node, op: Op, depth: int) -> "list[int | Output] | None":
        """Return the number of each operand that is at hand, and which have to be made."""
        operands: list[int | Output] = []
        edges, keeps = node.next_functions, op.keeps
        if not keeps:
            for before, output_nr in edges:
                if self._is_nowhere(before, output_nr):
                    return None
        for place, (before, output_nr) in enumerate(edges):
            kept = _torch.kept_by(node, keeps[place]) if keeps else None
            if kept is None and before is None and op.is_norm:
                operands.append(self._add(None))
                continue
            operand = self._operand(node, kept, before, output_nr, depth)
            if operand is None:
                return None
            operands.append(operand)
        for name in op.extras:
            kept = _torch.kept_by(node, name)
            in_list = isinstance(kept, tuple)
            for each in kept if in_list else (kept,):
                promise = self.sources.of_kept(each)
                if promise is None and not (in_list and each is None):
                    return None
                operands.append(self._add(promise))
        return operands

    def _is_nowhere(self, before: Node | None, output_nr: int) -> bool:
        """Say, at little cost, whether what a node produced can be neither had nor made. Most searches end here."""
        if before is None:
            return True
        name = before.name()
        if name in OPS or name == _LEAF or (before, output_nr) in self.known:
            return False
        return self.sources.of_output(before, output_nr) is None and self._given(before, output_nr) is None

    def _given(self, before: Node, output_nr: int) -> Tensor | None:
        """Return an operand that nobody holds as yet, if to hold it takes much less than the recipe frees."""
        return self.sources.given(before, output_nr, at_most=self.most_given)

    def hold_what_is_given(self) -> bool:
        """Have a promise for all that would have gone without this recipe. Say whether there are such promises."""
        for number, tensor in self.given.items():
            promise = self.sources.hold(tensor)
            if promise is None:
                return False
            self.parts[number] = promise
        return True

    def _operand(self, node: Node, kept: Any, before: Node | None, output_nr: int, depth: int) -> "int | Output | None":
        if before is None:
            promise = self.sources.of_kept(kept)
            return None if promise is None else self._add(promise)
        key = before, output_nr
        number = self.known.get(key)
        if number is not None:
            return number
        promise = None if kept is None else self.sources.of_kept(kept)
        if promise is None:
            out = _torch.output_of(before, output_nr)
            if out.device != self.device:
                return None
            promise = self.sources.of_output(before, output_nr)
        if promise is None:
            name = before.name()
            if name == _LEAF:
                promise = self.sources.of_leaf(before.variable, node)  # type: ignore[attr-defined]
                if promise is None:
                    return None
            elif (tensor := self._given(before, output_nr)) is not None:
                self.given[len(self.parts)] = tensor
            else:
                shape, dtype = out.shape, out.dtype
                if name not in OPS or depth == DEEPEST or not shape or dtype.is_complex:
                    return None
                return Output(before, output_nr, shape, dtype)
        number = self.known[key] = self._add(promise)
        return number

    def _add(self, part: "Promise | Step | None") -> int:
        self.parts.append(part)
        return len(self.parts) - 1
