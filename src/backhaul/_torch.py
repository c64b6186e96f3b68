"""Every private torch symbol in use, each with why, and what public thing would replace it.

Covers: torch>=2.11. Nothing else in the project touches a name of torch that begins with an underscore.
Does not cover: decisions; these are one-line answers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_traceable

Hook = Callable[[Any], Any]


def top_saved_tensors_hooks() -> tuple[Hook, Hook] | None:
    """Return the innermost pair of saved-tensor hooks of this thread.

    Why: only the innermost pair applies, and where it belongs to a checkpoint ours must stay away. Public replacement: none yet; a public
    getter beside ``torch.autograd.graph.saved_tensors_hooks`` would do.
    """
    pair: tuple[Hook, Hook] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


# The very functions, not wrappers of ours: called from a `finally` block they run before an interrupt can be delivered (scopes.py).
# Why: a managed module's hooks must be left whatever happens, and `Handle.paused` takes them off and puts them back, since `torch.func`
# refuses to run while any is active. Public replacement: `torch.autograd.graph.saved_tensors_hooks`, once leaving it cannot be interrupted,
# and a public pause.
push_saved_tensors_hooks: Callable[[Hook, Hook], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def saved_tensors_hooks_refused() -> str | None:
    """Return why hooks cannot be pushed just now, if they cannot. Why: to say so in words of ours. Public replacement: none."""
    message: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return message


def inside_checkpoint() -> bool:
    """Say whether the innermost pair belongs to a non-reentrant checkpoint, in its forward or in its recomputation.

    Why: hooks entered inside would switch the recomputation off (rule 9). Public replacement:
    ``checkpoint(respect_saved_tensors_hooks=...)``, torch 2.14.
    """
    pair = top_saved_tensors_hooks()
    return pair is not None and getattr(pair[0], "__module__", None) == "torch.utils.checkpoint"


def inside_backward() -> bool:
    """Say whether this thread is running a backward pass. Why: a forward entered there is a recomputation. Public replacement: none."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_functional_transform() -> bool:
    """Say whether a ``torch.func`` transform is running. Why: to name it in an error. Public replacement: none."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functional_tensor(tensor: Tensor) -> bool:
    """Say whether the tensor is a ``torch.func`` wrapper, which has no storage. Public replacement: none."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Say whether the tensor has ``__tensor_flatten__`` and so can be taken apart.

    Public replacement: a documented location of the same function.
    """
    return bool(_is_traceable(tensor))


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of.

    Why: ``nn.Linear`` saves ``weight.t()``. Public replacement: none for ``Tensor._base``.
    """
    return tensor._base


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor, or anything that shares its version counter, has been written in place.

    Public replacement: none for ``_version``.
    """
    return tensor._version


def neg_view(tensor: Tensor) -> Tensor:
    """Return the lazily negated view. Why: ``z.conj().imag`` is one. Public replacement: none."""
    return torch._neg_view(tensor)


def share_version_counter(tensor: Tensor, other: Tensor) -> bool:
    """Say whether a write to one tensor is counted for the other.

    Why: outputs of ``unsafe_chunk``, and ``x.data``, share a storage with tensors that have counters of their own. ``other`` is
    written to, as far as its counter goes, and set back. Public replacement: none.
    """
    before = tensor._version
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(other):
        torch.autograd.graph.increment_version(other)
        return tensor._version != before


def forward_ad_is_active() -> bool:
    """Say whether a forward-mode level is open: tensors may have tangents then, which follow them everywhere. Public replacement: none."""
    return torch.autograd.forward_ad._current_level >= 0


def next_node_number() -> int:
    """Return the number of this thread's next autograd node. Why: to tell what was made in a forward pass. Public replacement: none."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number(node: torch.autograd.graph.Node) -> int:
    """Return the number of an autograd node among those of its thread. Public replacement: none for ``Node._sequence_nr``."""
    return int(node._sequence_nr())


@functools.cache
def keep_out_of_traces(package: str) -> None:
    """Have Dynamo run a package's frames as they are, and compile what they call as frames of its own.

    Why: a managed module that is compiled afterwards is traced through the wrapper. ``torch.compiler.disable(recursive=False)`` covers one
    function, not what it calls; without ``recursive`` it covers the module's own code too. Public replacement: a public skip list.
    """
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``module.compile()`` made the module's call. Public replacement: none."""
    call: Callable[..., Any] | None = module.__dict__.get("_compiled_call_impl")
    return call


def original_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` wraps. Public replacement: none."""
    inner: nn.Module | None = getattr(module, "_orig_mod", None)
    return inner


def settle_collective(tensor: Tensor) -> Tensor:
    """Return a functional collective's result, waited for. Public replacement: a public base class of ``AsyncCollectiveTensor``."""
    wait = getattr(tensor, "trigger_wait", None)
    return wait() if wait is not None else tensor


def empty_host_cache() -> None:
    """Give cached pinned memory back to the system. Public replacement: ``torch.accelerator.empty_host_cache``, where torch has it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    empty()
