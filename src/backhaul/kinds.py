"""What kind of tensor autograd wants to save, as far as the tensor alone tells.

Covers: tensors that cannot move and why, wrapper subclasses, casts of parameters, sizes in memory.
Does not cover: what depends on the engine's state (engine.py).
"""

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.saved import Layout


def whole_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, itself if it is none; ``None`` where that has no strides: nested, or sparse."""
    base = _torch.view_base(tensor)
    if base is None:
        return tensor
    return base if base.layout is torch.strided and not base.is_nested else None


def is_parameter(tensor: Tensor) -> bool:
    """Say whether the tensor is a parameter, or a view of one such as ``weight.t()``."""
    base = _torch.view_base(tensor)
    # A parameter is never a mere Tensor; to ask its metaclass costs a microsecond.
    return (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or (
        type(base) is not Tensor and isinstance(base, nn.Parameter)
    )


def why_it_stays(tensor: Tensor) -> str:
    """Return why a tensor that is no wrapper cannot be moved as the bytes of one storage; "" where it can."""
    if type(tensor) is not Tensor:
        return f"subclass {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "meta"
    if _torch.is_functional_tensor(tensor):
        return "torch.func"
    return "forward-mode AD" if _torch.forward_ad_is_active() else ""


def is_filled_later(tensor: Tensor, frame: FrameType) -> bool:
    """Say whether the tensor is written after it is saved, and nobody is told; ``frame`` is that which the pack hook was called from.

    Of torch's operators only ``rrelu_with_noise`` does so: it saves its noise before it draws it.
    """
    return frame.f_code is _RRELU and tensor.grad_fn is None


_RRELU = F.rrelu.__code__


def any_on_accelerator(modules: Iterable[nn.Module]) -> bool:
    """Say whether a parameter or a buffer of the modules lies on an accelerator."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)


def size_in_memory(tensor: Tensor) -> int:
    """Return the bytes that a tensor of any layout consists of."""
    parts: tuple[Tensor, ...] = (tensor,)
    if tensor.layout is torch.sparse_coo:
        bare = tensor.detach()
        parts = (bare._indices(), bare._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return sum(part.numel() * part.element_size() for part in parts)


def take_apart(tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Return a wrapper's inner tensors, what else it flattens to, and its context.

    A jagged size is known by the very object that holds the offsets, so that object has to come back and counts as something else.
    """
    bare = tensor.detach()
    names, context = bare.__tensor_flatten__()  # type: ignore[attr-defined]
    jagged = any(not isinstance(length, int) for length in tensor.size())
    inner: dict[str, Tensor] = {}
    other: dict[str, Any] = {}
    for name in names:
        part, held = getattr(bare, name), getattr(tensor, name)
        if isinstance(held, Tensor) and type(held) is type(part) and not held.requires_grad:
            part = held  # the very one, by whose version counter writes are seen
        if isinstance(part, Tensor) and not (jagged and not part.is_floating_point() and not part.is_complex()):
            inner[name] = part
        else:
            other[name] = getattr(tensor, name)
    return inner, other, context


def cast_parameter(tensor: Tensor, storage: UntypedStorage, *, since: int) -> nn.Parameter | None:
    """Return the parameter of which ``tensor``, or what it is a view of, is a cast, made by autocast or the user.

    ``since`` is a number of this thread's (``_torch.next_node_number``): casts from before it do not count, for the parameter may have been
    written since. So it does in autocast's cache when an optimizer steps inside the autocast context.
    """
    whole = whole_of(tensor)
    made_by = None if whole is None else whole.grad_fn
    if whole is None or made_by is None:
        return None
    if made_by.name() != "ToCopyBackward0" or _torch.version_of(whole) or _torch.node_number(made_by) < since:
        return None
    parameter = getattr(made_by.next_functions[0][0], "variable", None)
    if (
        not isinstance(parameter, nn.Parameter)
        or type(parameter.data) is not Tensor
        or parameter.device != whole.device
        or Layout.of(whole) != Layout.of(parameter)._replace(dtype=whole.dtype, offset=0)
        or storage.nbytes() != whole.numel() * whole.element_size()
    ):
        return None
    return parameter


def parameter_versions(modules: Iterable[nn.Module]) -> "dict[int, tuple[weakref.ref[UntypedStorage], int]]":
    """Return the versions of all plain parameters, by their ids, with their storages to tell whether the id is still theirs.

    The storages, since a parameter that has weak references cannot be swapped (``torch.utils.swap_tensors``, as ``to`` may do).
    """
    return {
        id(parameter): (weakref.ref(parameter.untyped_storage()), _torch.version_of(parameter))
        for module in modules
        for parameter in module.parameters()
        if type(parameter.data) is Tensor and parameter.layout is torch.strided and not is_lazy(parameter)
    }
