"""Which ops an autograd node can be run again as.

Covers: the table, by the names of the nodes: what a node keeps of its operands, and the function that it stands for.
Does not cover: where operands come from (recipes.py).

[Note: Same bits]
An op that is run again with the same operands gives the same bits: it is the very function that the node stands for and not the composite
around it, which may choose another kernel where no gradient is required. Kernels choose by shape, dtype, stride and alignment. Promises
restore the first three and the offset in the storage, and allocators align storages alike. So an operand that was saved is as it was.

One that is itself made again has the values, but perhaps other strides: nothing tells whether ``clone`` was asked for a memory format, or
whether an op wrote into its operand. Where an element's bits do not depend on where it lies that does not matter: the op moves elements,
or rounds each as IEEE 754 says, or takes rows, or runs on a device, where every element goes through the same code. On a CPU functions
like ``exp`` have one version for whole vectors and another for what is left over, and ``a + alpha * b`` is rounded once here and twice
there. Such ops (``rounds``) are run again on a CPU only where all their operands were saved and they surely did not write in place.

[Note: What is not here]
Ops that keep their own result (``exp``, ``softmax``, ``relu``): at pack the node is the one that saves, and it has nothing else. Ops that a
node does not describe: ``masked_fill`` and ``x + 1`` lose the number, ``as_strided`` the storage. Matrix products, collectives, anything
random, custom Functions. Complex numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from backhaul import _torch
from backhaul._torch import constant_of

Function = Callable[..., Tensor]


class Output(NamedTuple):
    """One of the tensors that a node produced."""

    node: Node
    nr: int
    shape: Any
    dtype: torch.dtype


def never(_: Node) -> bool:
    """Say no."""
    return False


def always(_: Node) -> bool:
    """Say yes."""
    return True


class Op(NamedTuple):
    """What a node stands for. The function gets the operands, one for each edge of the node, and after them the ``extras``."""

    function: Callable[[Node, Output], Function]
    keeps: tuple[str, ...] = ()  # the names under which the node may keep its operands; none: it keeps no operand
    extras: tuple[str, ...] = ()  # tensors without a gradient that it keeps: indices, a condition
    is_view: bool = False  # touches no memory
    is_norm: bool = False  # needs an eps that the node does not keep; weight and bias may be absent
    rounds: Callable[[Node], bool] = never  # [Note: Same bits]


def _is(function: Function) -> Callable[[Node, Output], Function]:
    return lambda node, out: function


def _same_elements(x: Tensor) -> Tensor:
    return x


def _reshape(node: Node, out: Output) -> Function:
    shape = tuple(out.shape)
    return lambda x: x.reshape(shape)


def _cast(node: Node, out: Output) -> Function:
    dtype = out.dtype
    return lambda x: x.to(dtype)


def _add(node: Node, out: Output) -> Function:
    alpha = constant_of(node, "alpha")
    return lambda x, y: torch.add(x, y, alpha=alpha)


def _sub(node: Node, out: Output) -> Function:
    alpha = constant_of(node, "alpha")
    return lambda x, y: torch.sub(x, y, alpha=alpha)


def _has_alpha(node: Node) -> bool:
    return bool(constant_of(node, "alpha") != 1)


def _pow(node: Node, out: Output) -> Function:
    exponent = constant_of(node, "exponent")
    return lambda x: torch.pow(x, exponent)


def _gelu(node: Node, out: Output) -> Function:
    approximate = constant_of(node, "approximate")
    return lambda x: F.gelu(x, approximate=approximate)


def _glu(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim")
    return lambda x: F.glu(x, dim)


def _layer_norm(node: Node, out: Output) -> Function:
    shape = constant_of(node, "normalized_shape")
    return lambda x, weight, bias, eps: torch.native_layer_norm(x, shape, weight, bias, eps)[0]


def _rms_norm(node: Node, out: Output) -> Function:
    shape = constant_of(node, "normalized_shape")
    return lambda x, weight, eps: _torch.fused_rms_norm(x, shape, weight, eps)


def _cat(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim")
    return lambda *parts: torch.cat(parts, dim)


def _stack(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim")
    return lambda *parts: torch.stack(parts, dim)


def _index_select(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim")
    return lambda x, index: torch.index_select(x, dim, index)


def _index(node: Node, out: Output) -> Function:
    return lambda x, *indices: torch.ops.aten.index.Tensor(x, indices)  # x[...] would take a 0-dim index for a number


def _gather(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim")
    return lambda x, index: torch.gather(x, dim, index)


def _embedding(weight: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def _where(x: Tensor, y: Tensor, condition: Tensor) -> Tensor:
    return torch.where(condition, x, y)


def _transpose(node: Node, out: Output) -> Function:
    dim0, dim1 = constant_of(node, "dim0"), constant_of(node, "dim1")
    return lambda x: x.transpose(dim0, dim1)


def _permute(node: Node, out: Output) -> Function:
    dims = constant_of(node, "dims")
    return lambda x: x.permute(dims)


def _expand(node: Node, out: Output) -> Function:
    shape = tuple(out.shape)
    return lambda x: x.expand(shape)


def _slice(node: Node, out: Output) -> Function:
    dim = constant_of(node, "dim") % len(out.shape)
    cut = slice(constant_of(node, "start"), constant_of(node, "end"), constant_of(node, "step"))
    return lambda x: x[(slice(None),) * dim + (cut,)]


def _select(node: Node, out: Output) -> Function:
    dim, index = constant_of(node, "dim"), constant_of(node, "index")
    return lambda x: x.select(dim, index)


def _split(node: Node, out: Output) -> Function:
    nr, size, dim = out.nr, constant_of(node, "split_size"), constant_of(node, "dim")
    return lambda x: x.split(size, dim)[nr]


def _split_with_sizes(node: Node, out: Output) -> Function:
    nr, sizes, dim = out.nr, constant_of(node, "split_sizes"), constant_of(node, "dim")
    return lambda x: x.split(sizes, dim)[nr]


def _unbind(node: Node, out: Output) -> Function:
    nr, dim = out.nr, constant_of(node, "dim")
    return lambda x: x.unbind(dim)[nr]


OPS: dict[str, Op] = {
    "MulBackward0": Op(_is(torch.mul), keeps=("self", "other")),
    "DivBackward0": Op(_is(torch.div), keeps=("self", "other")),
    "AddBackward0": Op(_add, rounds=_has_alpha),
    "SubBackward0": Op(_sub, rounds=_has_alpha),
    "NegBackward0": Op(_is(torch.neg)),
    "PowBackward0": Op(_pow, keeps=("self",), rounds=always),
    "SiluBackward0": Op(_is(F.silu), keeps=("self",), rounds=always),
    "GeluBackward0": Op(_gelu, keeps=("self",), rounds=always),
    "GluBackward0": Op(_glu, keeps=("self",), rounds=always),
    "NativeLayerNormBackward0": Op(_layer_norm, keeps=("input", "weight", "bias"), is_norm=True),
    "FusedRmsNormBackward0": Op(_rms_norm, keeps=("input", "weight"), is_norm=True),
    "ToCopyBackward0": Op(_cast),
    "CloneBackward0": Op(_is(_same_elements)),
    "CatBackward0": Op(_cat),
    "StackBackward0": Op(_stack),
    "IndexSelectBackward0": Op(_index_select, extras=("index",)),
    "IndexBackward0": Op(_index, extras=("indices",)),
    "GatherBackward0": Op(_gather, extras=("index",)),  # what it keeps of its operand is soon no more than a shape (claims.py)
    "EmbeddingBackward0": Op(_is(_embedding), extras=("indices",)),
    "WhereBackward0": Op(_is(_where), extras=("condition",)),
    **dict.fromkeys(
        (
            "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0",
            "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
        ),
        Op(_reshape, is_view=True),
    ),
    "TBackward0": Op(_is(torch.t), is_view=True),
    "TransposeBackward0": Op(_transpose, is_view=True),
    "PermuteBackward0": Op(_permute, is_view=True),
    "ExpandBackward0": Op(_expand, is_view=True),
    "SliceBackward0": Op(_slice, is_view=True),
    "SelectBackward0": Op(_select, is_view=True),
    "SplitBackward0": Op(_split, is_view=True),
    "UnsafeSplitBackward0": Op(_split, is_view=True),
    "SplitWithSizesBackward0": Op(_split_with_sizes, is_view=True),
    "UnbindBackward0": Op(_unbind, is_view=True),
}  # fmt: skip
