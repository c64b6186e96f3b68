"""Every private torch symbol in use, each with why, and what public thing would replace it.

Covers: torch>=2.11. Nothing else in the project touches a name of torch that begins with an underscore.
Does not cover: decisions; these are one-line answers.
"""

import functools
import importlib
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor as _FakeTensor
from torch.overrides import TorchFunctionMode
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

# Likewise what `TorchFunctionMode` and `torch.enable_grad` do as contexts (interrupts.py). Public replacement: those, once leaving them
# cannot be interrupted.
push_function_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], TorchFunctionMode] = torch._C._pop_torch_function_stack
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


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


def is_being_traced() -> bool:
    """Say whether operations are recorded or run on fake tensors. Public replacement: none that covers all three."""
    key = torch._C._TorchDispatchModeKey
    is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
    return is_tracing() or any(torch._C._get_dispatch_mode(each) is not None for each in (key.PROXY, key.FAKE))


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
    before, others = tensor._version, (other,)
    versions = (other._version,)
    try:
        torch._C._increment_version(others)
        return tensor._version != before
    finally:
        torch._C._autograd._unsafe_set_version_counter(others, versions)


def forward_ad_is_active() -> bool:
    """Say whether a forward-mode level is open: tensors may have tangents then, which follow them everywhere. Public replacement: none."""
    return torch.autograd.forward_ad._current_level >= 0


def num_owners(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects have the storage, the latter counted as one. Public replacement: none."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def current_cuda_device() -> int:
    """Return the index of the current device, where CUDA is in use. Why: ``torch.cuda.current_device()``, the public way, takes 1 us."""
    return int(torch._C._cuda_getDevice())


def current_cuda_stream(device_index: int) -> int:
    """Return the handle of this thread's current stream. Why: ``torch.cuda.current_stream().cuda_stream``, the public way, takes 4 us."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


def next_node_number() -> int:
    """Return the number of this thread's next autograd node. Why: to tell what was made in a forward pass. Public replacement: none."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number(node: torch.autograd.graph.Node) -> int:
    """Return the number of an autograd node among those of its thread. Public replacement: none for ``Node._sequence_nr``."""
    return int(node._sequence_nr())


@functools.cache
def keep_out_of_traces(package: str, *, but: str) -> None:
    """Have Dynamo run the frames of a package's modules as they are, and compile what they call as frames of its own.

    Why: a managed module that is compiled afterwards is traced through the wrapper. ``torch.compiler.disable(recursive=False)`` covers one
    function, not what it calls; without ``recursive`` it covers the module's own code too. ``trace_rules.add``, once a module, would
    compile a long pattern each time. Public replacement: a public skip list.
    """
    from torch._dynamo.trace_rules import FORCE_SKIP_FILES

    folders = importlib.import_module(package).__path__
    files = {path.as_posix() for folder in folders for path in Path(folder).rglob("*.py")}
    FORCE_SKIP_FILES.update(files - {Path(inspect.getfile(importlib.import_module(but))).as_posix()})


def skip_as_outermost(function: Callable[..., Any]) -> None:
    """Have Dynamo run a function as it is where it is called from plain code, and trace it where it is called from traced code.

    Why: a wrapper that steps aside while a larger module is compiled must not be compiled itself. Public replacement: none.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


# What Dynamo compiles this thread's frames with; ``None`` where it is not at work. Why: a module that is compiled and runs again has to be
# compiled again (compiling.py). Public replacement: none.
compiler_at_work: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def call_compiled(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with ``compiler`` at work. Why, and public replacement: as for ``compiler_at_work``."""
    before = compiler_at_work()
    try:
        _set_compiler(compiler)
        return function(*args, **kwargs)
    finally:
        _set_compiler(before)


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Say whether ``torch.compile`` has made the function. Public replacement: none."""
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(function, "_torchdynamo_disable")


def is_never_outermost(function: Callable[..., Any]) -> bool:
    """Say whether Dynamo compiles a function only as part of one that calls it, as those that come with torch. Public replacement: none."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(function))


def inside_optimized_module() -> bool:
    """Say whether what ``torch.compile(module)`` returned is running. Why: it has those that come with torch compiled. Public: none."""
    from torch._dynamo import eval_frame

    inside: Callable[[], bool] = getattr(eval_frame, "_is_in_optimized_module", lambda: True)  # older torch does not say
    return inside()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters. Why: it is asked for each forward. Public: ``parameters(recurse=False)``, slower."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own parts. Public replacement: ``named_children``, which leaves out second names."""
    return module._modules


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method that Dynamo runs as it is, with all that it calls; it tells whose it is, as the method does.

    Public replacement: ``torch.compiler.disable``, which does all but the latter.
    """
    function: Any = torch.compiler.disable(method)
    function.__self__ = method.__self__  # type: ignore[attr-defined]
    return function  # type: ignore[no-any-return]


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


def flatten_tree(value: Any, *, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Return what a nested structure holds, and how it nests.

    Why: modules take and return lists, dicts, named tuples, and what libraries have registered (``ModelOutput``). Public replacement:
    ``torch.utils.pytree``, once it is documented.
    """
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value, is_leaf=is_leaf)
    return leaves, structure


def unflatten_tree(leaves: list[Any], structure: Any) -> Any:
    """Nest ``leaves`` again. Public replacement: as for ``flatten_tree``."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def is_fake(tensor: Tensor) -> bool:
    """Say whether the tensor stands for one in a compiler's trace. Why: what a trace saves is not saved again. Public replacement: none."""
    return isinstance(tensor, _FakeTensor)


def _setting(getter: str, setter: str = "") -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return what reads a setting and what writes it; nothing where this torch has no such setting."""
    read, write = getattr(torch._C, f"_get_{getter}", None), getattr(torch._C, f"_set_{setter or getter}", None)
    return [] if read is None or write is None else [(read, write)]


# Those of this process by which torch chooses among kernels that differ in rounding, or makes tensors.
_SETTINGS = [
    (torch.get_default_dtype, torch._C._set_default_dtype),
    *_setting("deterministic_fill_uninitialized_memory"),
    *(pair for name in ("enabled", "deterministic", "benchmark") for pair in _setting(f"cudnn_{name}")),
    *(pair for name in ("enabled", "deterministic") for pair in _setting(f"mkldnn_{name}")),
    *(pair for name in ("flash", "mem_efficient", "math", "cudnn", "fa3") for pair in _setting(f"{name}_sdp_enabled", f"sdp_use_{name}")),
    *_setting("sdp_priority_order"),
    *_setting("math_sdp_allow_fp16_bf16_reduction"),
    *_setting("cublas_allow_fp16_accumulation"),
    *_setting("blas_preferred_backend"),
]
_REDUCTIONS = [pair for name in ("fp16", "bf16") for pair in _setting(f"cublas_allow_{name}_reduced_precision_reduction")]  # pairs of flags
_PRECISIONS = [(backend, what) for what in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")]


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings of this process by which torch chooses among kernels that differ in rounding, or makes tensors.

    Why: a module that is run again must meet the same. Public replacement: the properties of ``torch.backends``, at ten times the cost.
    Precision has an old name and new ones. Where both have been used torch refuses to read the old one; then it is ``None``.
    """
    c = torch._C
    precisions = (c._get_fp32_precision_getter("generic", "all"), *itertools.starmap(c._get_fp32_precision_getter, _PRECISIONS))
    return (
        (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
        (*[read() for read, _ in _SETTINGS], *[read() for read, _ in _REDUCTIONS]),
        (_or_none(c._get_float32_matmul_precision), _or_none(c._get_cudnn_allow_tf32), precisions),
    )


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def kernel_setters(settings: tuple[Any, ...], present: tuple[Any, ...]) -> list[Callable[[], object]]:
    """Return functions of C that turn the settings ``present`` into others.

    Public replacement: as for ``kernel_settings``.
    """
    c, partial = torch._C, functools.partial
    (deterministic, values, precision), (deterministic_now, values_now, precision_now) = settings, present
    calls: list[Callable[[], object]] = []
    if deterministic != deterministic_now:
        calls.append(partial(c._set_deterministic_algorithms, deterministic[0], warn_only=deterministic[1]))
    for (_, write), value, now in zip((*_SETTINGS, *_REDUCTIONS), values, values_now, strict=True):
        if value != now:
            calls.append(partial(write, *value) if type(value) is tuple else partial(write, value))
    if precision != precision_now:
        matmul, convolutions, (everything, *each) = precision
        calls.append(partial(c._set_fp32_precision_setter, "generic", "all", everything))
        # The old names first: they write the new ones, too, though not always as they were.
        calls += [partial(c._set_float32_matmul_precision, matmul)] if matmul is not None else []
        calls += [partial(c._set_cudnn_allow_tf32, convolutions)] if convolutions is not None else []
        calls += [partial(c._set_fp32_precision_setter, *names, value) for names, value in zip(_PRECISIONS, each, strict=True)]
    return calls


def default_device() -> torch.device | None:
    """Return where this thread makes tensors that name no device, if somebody has said so.

    Why: a backward pass may run on a thread of its own, for which nobody has. Public replacement: ``torch.get_default_device``, which does
    not tell whether.
    """
    if not torch._C._len_torch_function_stack():
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else None


def device_mode(device: torch.device | None) -> Any:
    """Return the mode under which tensors are made on ``device``; ``None`` stands for the CPU. Why, and public: as ``default_device``."""
    from torch.utils._device import DeviceContext

    return DeviceContext(torch.device("cpu") if device is None else device)


def kept_by(node: torch.autograd.graph.Node, name: str) -> Any:
    """Return what the pack hook returned for a tensor, or for each of a list, that a node keeps; ``None`` where it keeps none (any more).

    A Python number is kept as a 0-dim tensor that hooks never see, and comes as that tensor; so does anything that was saved without hooks.
    Why: a recipe starts from the promises that its node holds. Public replacement: none for ``_raw_saved_*``.
    """
    try:
        kept = getattr(node, _raw_saved(name))
    except RuntimeError:  # a list, of a node that has run and let go
        return None
    return tuple([each.data for each in kept]) if type(kept) is tuple else kept.data


@functools.cache
def _raw_saved(name: str) -> str:
    """Return the name of an attribute: the same string each time, by which Python finds the attribute without searching the type."""
    return "_raw_saved_" + name


def constant_of(node: torch.autograd.graph.Node, name: str) -> Any:
    """Return a number, a string or a tuple of numbers that a node keeps. Public replacement: none for ``_saved_*``.

    torch gives signed integers as if they were unsigned.
    """
    value = getattr(node, "_saved_" + name)
    if isinstance(value, tuple):
        return tuple(_signed(each) for each in value)
    return _signed(value)


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def output_of(node: torch.autograd.graph.Node, output_nr: int) -> Any:
    """Return ``shape``, ``dtype`` and ``device`` of what a node produced. Public replacement: none for ``Node._input_metadata``."""
    return node._input_metadata[output_nr]


def fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Tensor:
    """Run the kernel behind ``rms_norm``, which decides by what requires a gradient whether to use it. Public replacement: none."""
    result: Tensor = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
    return result


def forward_hooks_of(module: nn.Module) -> tuple["OrderedDict[Any, Any]", "OrderedDict[Any, Any]"]:
    """Return the tables of a module's forward pre-hooks and forward hooks.

    Why: for hooks that are there while one call lasts and are gone after it whatever interrupts, which those of ``register_forward_hook``
    need not be. Public replacement: none.
    """
    return module._forward_pre_hooks, module._forward_hooks  # type: ignore[return-value]


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return a module's own parameters, and then its buffers: their names, and whether each is a buffer.

    Why: they are looked at in every forward of a recomputed module, and ``named_parameters`` takes microseconds for each. Public
    replacement: none.
    """
    tables = ((module._parameters, False), (module._buffers, True))
    return [(name, tensor, is_buffer) for table, is_buffer in tables for name, tensor in table.items() if tensor is not None]


def versions_of(modules: Iterable[nn.Module | None]) -> list[tuple[int, int]]:
    """Return which parameters and buffers modules have of their own, by their ids, and their versions, ordered as above.

    Why, and public replacement: as for ``named_tensors``.
    """
    return [
        (id(tensor), tensor._version)
        for module in modules
        if module is not None
        for table in (module._parameters, module._buffers)
        for tensor in table.values()
        if tensor is not None
    ]
