"""Which module is running, in which forward pass, and which storages belong to parameters.

Covers: scopes and frames ([Note: Scopes]), the wrapper around a module's ``forward``, names, the table of parameter storages.
Does not cover: what happens to a tensor saved there (engine.py).

[Note: Scopes]
A managed module's ``forward`` is replaced on the instance. A wrapper is left by ``try/finally`` whatever is raised, KeyboardInterrupt
included, which module hooks do not promise; hooks added to a compiled module would not run or would break its graph. A module compiled in
place runs through ``_compiled_call_impl``, so there that is replaced and the traced code stays as it was. Below the managed module, the
blocks (elements of a ModuleList or Sequential) get a wrapper that only says which one is running.

The wrapper reaches its module through a weak reference, so that it adds no cycle: a model dies when its last user lets go. Two more
functions on the instance, ``__getstate__`` and ``_replicate_for_data_parallel``, hide all of it from copies, pickles and replicas.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.storage import UntypedStorage

from backhaul import _torch, garbage
from backhaul._torch import compiler_at_work, pop_saved_tensors_hooks, push_saved_tensors_hooks
from backhaul.compiling import first_compiled, is_compiled_whole, look_into_no_trace
from backhaul.tiers.base import Tier
from backhaul.tracing import forward_of, unless_traced

if TYPE_CHECKING:
    from backhaul.recomputing import Unit
    from backhaul.remade import Outputs
    from backhaul.sites import Site

IN_A_TRACE = "backhaul manages this module; compile it first and manage the result, or compile without fullgraph"
ONE_SCOPE = (
    "has a rule of its own, but has been compiled as part of something larger, which is one scope; remove the handle, compile first, and "
    "apply a plan with one rule for the whole of it, or compile the modules inside one by one"
)


class Key(NamedTuple):
    """Names a blob from step to step, within its frame."""

    fqn: str
    call: int  # which call of that module in the frame
    pack: int  # which saved tensor in that call


@dataclass(frozen=True)
class Duty:
    """What is asked for where a module runs."""

    keep: bool = False  # what is saved stays on the device
    tier: Tier | None = None  # where it moves instead of the handle's own
    recipes: bool = False  # what plain code makes cheaply is made again
    site: "Site | None" = None  # the module is a unit: it runs again as a whole


OFFLOAD = Duty()
_tokens = itertools.count()  # of frames, in the process


class Frame:
    """One forward pass of a managed module. Lives as long as it runs, and then as long as anything saved in it."""

    __slots__ = ("__weakref__", "began_at", "calls", "grave", "left_alone", "num", "seen", "thread", "token")

    def __init__(self, num: int, grave: "deque[Any]") -> None:
        self.num = num
        self.grave = grave
        self.thread = threading.get_ident()
        self.began_at = _torch.next_node_number()  # of this thread
        self.calls: dict[str, int] = {}
        self.left_alone = Storages()  # too small to move, or futile to move
        self.token = next(_tokens)
        garbage.frame_begins(self.token)
        self.seen: set[int] = set()  # storages counted in this frame that are no blobs of it: parameters, blobs of earlier frames

    def __del__(self) -> None:
        if hasattr(self, "token"):  # no interrupt has come before anything was
            self.grave.append(self.num)
            garbage.alive.discard(self.token)
            if not garbage.alive and garbage.before and gc.get_threshold()[0] == garbage.PATIENT:
                gc.set_threshold(*garbage.before.pop())


class Group(NamedTuple):
    """Parameters that FSDP gathers together, and where one of them stands."""

    module: nn.Module
    owner: nn.Module
    name: str

    @property
    def sample(self) -> Tensor:
        """One parameter of the group, as it is just now."""
        parameter = _torch.own_parameters(self.owner)[self.name]
        assert parameter is not None
        return parameter


class Scope:
    """A module at work in a frame: hands out keys for what is saved in it."""

    __slots__ = ("call", "duty", "fqn", "frame", "given", "groups", "hopes", "module", "num_packs", "settles", "site")

    def __init__(self, frame: Frame, fqn: str, module: nn.Module | None, duty: Duty = OFFLOAD, site: "Site | None" = None) -> None:
        self.frame = frame
        self.fqn = fqn
        self.duty = duty  # for what is saved here; where the module is a unit, for what it starts from
        self.site = site
        self.settles = False  # somebody looks, once the module has returned, what is needed of what it saved
        self.given: list[Tensor] = []  # what the module has been called with, while it runs and recipes may start from it
        self.hopes: list[weakref.ref[Any]] = []  # blobs of which no more than the shape may be needed
        self.module = module  # until its parameters have been looked up
        self.groups: list[Group] = []  # of parameters inside that may be gathered apart
        self.call = frame.calls.get(fqn, 0)
        frame.calls[fqn] = self.call + 1
        self.num_packs = 0

    def next_key(self) -> Key:
        """Return the key of the next saved tensor."""
        self.num_packs += 1
        return Key(self.fqn, self.call, self.num_packs - 1)


class Here(threading.local):
    """Where this thread is: its scope, with its frame, its unit, and whether the handle is paused."""

    scope: Scope | None = None
    unit: "Unit | None" = None
    outputs: "Outputs | None" = None  # of units, in this forward pass
    paused: int = 0


class Watcher(Protocol):
    """What a wrapper asks of its engine."""

    @property
    def here(self) -> Here: ...
    @property
    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]: ...

    def enter(self, module: nn.Module, fqn: str, *, is_root: bool, duty: Duty) -> "Scope | None":
        """Return the scope of a module that is about to run, or ``None`` where it is to run untouched."""
        ...

    def begin_frame(self, fqn: str, module: nn.Module | None) -> "Scope | None":
        """Open a frame, where that is possible."""
        ...

    def run(self, scope: "Scope", forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` in its scope, which has been entered."""
        ...

    def passed(self) -> None:
        """Note that a frame's forward has ended well."""
        ...


class Wrapper:
    """The replacement of one module's call, and how to undo it."""

    def __init__(
        self, watcher: Watcher, module: nn.Module, fqn: str, *, is_root: bool, duty: Duty = OFFLOAD, has_rule: bool = False
    ) -> None:
        self.watcher: Watcher | None = watcher
        self.module = weakref.ref(module)
        self.fqn = fqn
        self.is_root = is_root
        self.duty = duty
        self.has_rule = has_rule  # another one than what is around it
        self.was_traced = False  # as part of something larger
        self.rule_inside = ""  # of a root: the name of a module inside that has a rule of its own,
        self.unseen: Mapping[str, str] = {}  # and those of modules around compiled ones that have, with one of theirs
        self.name = "forward" if _torch.compiled_call(module) is None else "_compiled_call_impl"
        self.previous: Callable[..., Any] | None = module.__dict__.get(self.name)
        module.__dict__[self.name] = self.call = self._make(module)
        self.hiding = {
            "__getstate__": functools.partial(_state_without_wrappers, self.module),
            "_replicate_for_data_parallel": functools.partial(_replica_without_wrappers, self.module),
        }
        module.__dict__.update(self.hiding)

    def _make(self, module: nn.Module) -> Callable[..., Any]:
        reference, kind, previous, fqn, is_root, duty = self.module, type(module), self.previous, self.fqn, self.is_root, self.duty
        site, comes_with_torch = duty.site, _torch.is_never_outermost(kind.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            module = reference()
            if module is None:
                raise RuntimeError(f"the module {kind.__name__} of this bound method is gone; while it is managed, keep the module itself")
            forward = previous if previous is not None else functools.partial(kind.forward, module)
            if args and args[0] is module:  # bound anew by somebody who took this for the class's own function, as accelerate does
                args = args[1:]
            watcher = self.watcher
            if (compiler := compiler_at_work()) is not None:
                if comes_with_torch and previous is None and not self.was_traced and _torch.inside_optimized_module():
                    forward = functools.partial(forward_of, module)
                return forward(*args, **kwargs) if watcher is None else self._run_compiled(watcher, compiler, module, forward, args, kwargs)
            scope = watcher.enter(module, fqn, is_root=is_root, duty=duty) if watcher is not None else None
            if watcher is None or scope is None:
                return forward(*args, **kwargs)
            if site is not None and site.chooses is None:
                self._check(functools.partial(look_into_no_trace, site), watcher)
            if self.unseen:
                self._check(functools.partial(self._refuse_compiled_around, module), watcher)
            return run(watcher, scope, forward, args, kwargs)

        _torch.keep_out_of_traces("backhaul", but="backhaul.tracing")
        if self.name == "forward":
            if is_root or self.has_rule:
                call = torch.compiler.disable(call, recursive=False, reason=IN_A_TRACE if is_root else f"{fqn!r} {ONE_SCOPE}")
            call = unless_traced(call, previous, reference, functools.partial(_stays, weakref.ref(self)))
        replaced = previous or kind.forward
        functools.update_wrapper(call, replaced, updated=() if _torch.is_compiled_function(replaced) else ("__dict__",))
        if previous is None:
            del call.__wrapped__  # type: ignore[attr-defined]  # it is not bound, and what reads signatures would follow it
            with contextlib.suppress(ValueError, TypeError):
                call.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        call.__backhaul__ = self  # type: ignore[attr-defined]
        return call

    def _run_compiled(self, watcher: Watcher, compiler: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward that is compiled from outside the wrapper, and nothing else compiled; or refuse it (compiling.py)."""
        compiled = functools.partial(_torch.call_compiled, compiler, forward)

        def call() -> Any:
            scope = watcher.enter(module, self.fqn, is_root=self.is_root, duty=self.duty)
            if scope is None:
                return compiled(*args, **kwargs)
            self._check(self._refuse_rules_inside, watcher)
            if self.duty.site is not None:
                self._check(functools.partial(is_compiled_whole, self.duty.site), watcher)
            return run(watcher, scope, compiled, args, kwargs)

        return _torch.call_compiled(None, call)

    def _refuse_rules_inside(self) -> None:
        """Refuse what is compiled with modules inside that have rules of their own: a compiled one among them Dynamo does not even see."""
        inside = self.fqn if self.has_rule and self.was_traced else self.rule_inside
        if inside:
            raise ValueError(f"{inside!r} {ONE_SCOPE}")

    def _refuse_compiled_around(self, module: nn.Module) -> None:
        """Refuse parts that were compiled after compiled modules inside of them had got rules of their own."""
        part = first_compiled(module, self.unseen)
        if part:
            raise ValueError(f"{self.unseen[part]!r} {ONE_SCOPE}")

    def _check(self, check: Callable[[], None], watcher: Watcher) -> None:
        """Make sure that the module can run. Where it is refused, its frame has ended."""
        try:
            check()
        except ValueError:
            if self.is_root:
                watcher.here.outputs = None
            raise

    def remove(self) -> None:
        """Put the module back as it was. Where somebody has wrapped it since, leave an inert wrapper inside theirs."""
        self.watcher = None
        module = self.module()
        if module is None:
            return
        for name, function in self.hiding.items():
            if module.__dict__.get(name) is function:
                del module.__dict__[name]
        if module.__dict__.get(self.name) is not self.call:
            return
        if self.previous is None:
            del module.__dict__[self.name]
        else:
            module.__dict__[self.name] = self.previous


def _stays(reference: "weakref.ref[Wrapper]") -> bool:
    """Note that a wrapper is being traced, and say whether it must not step aside."""
    wrapper = reference()
    if wrapper is None:
        return False
    if wrapper.is_root:
        return True
    wrapper.was_traced = True
    return wrapper.has_rule and wrapper.watcher is not None


def run(watcher: Watcher, scope: Scope, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``forward`` in ``scope``: with the hooks active where the scope opens a frame.

    Interrupts are delivered where Python functions begin and after calls. So nothing is called between ``try`` and the push, and nothing in
    ``finally`` before the pop: whatever interrupts, no pair of hooks and no scope is left behind.
    """
    here, outer = watcher.here, watcher.here.scope
    if outer is not None:
        try:
            here.scope = scope
            return watcher.run(scope, forward, args, kwargs)
        finally:
            here.scope = outer
    pack, unpack = watcher.hooks
    try:
        here.scope = scope
        push_saved_tensors_hooks(pack, unpack)
        result = watcher.run(scope, forward, args, kwargs)
    finally:
        here.scope = None
        pop_saved_tensors_hooks()
        here.outputs = None
    watcher.passed()
    return result


@contextlib.contextmanager
def region(watcher: Watcher) -> Iterator[None]:
    """Make a frame of code outside the managed modules."""
    here = watcher.here
    inactive = here.paused or here.scope is not None or not torch.is_grad_enabled() or _torch.inside_backward()
    scope = None if inactive else watcher.begin_frame("region", None)
    if scope is None:
        yield
        return
    pack, unpack = watcher.hooks
    try:
        here.scope = scope
        push_saved_tensors_hooks(pack, unpack)
        yield
    finally:
        here.scope = None
        pop_saved_tensors_hooks()
        here.outputs = None
    watcher.passed()


@contextlib.contextmanager
def paused(watcher: Watcher) -> Iterator[None]:
    """Take the watcher's hooks off this thread for a while, if they are the innermost, and run managed modules untouched."""
    owner = hooks_owner()
    mine = owner is watcher or getattr(owner, "keeper", None) is watcher  # a unit that runs again
    innermost = _torch.top_saved_tensors_hooks() if mine else None
    watcher.here.paused += 1
    if innermost is not None:
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        if innermost is not None:
            push_saved_tensors_hooks(*innermost)
        watcher.here.paused -= 1


def hooks_owner() -> Any:
    """Return the object whose method is the innermost pack hook of this thread."""
    innermost = _torch.top_saved_tensors_hooks()
    return None if innermost is None else getattr(innermost[0], "__self__", None)


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """Return the active wrapper of ``module``."""
    for name in ("forward", "_compiled_call_impl"):
        wrapper = getattr(module.__dict__.get(name), "__backhaul__", None)
        if isinstance(wrapper, Wrapper) and wrapper.watcher is not None:
            return wrapper
    return None


def _state_without_wrappers(reference: "weakref.ref[nn.Module]") -> Any:
    module = reference()
    assert module is not None
    own = getattr(type(module), "__getstate__", None)  # every class has one from Python 3.11 on
    state = own(module) if own is not None else module.__dict__
    if not isinstance(state, dict):
        return state
    return _without_wrappers(state)


def _replica_without_wrappers(reference: "weakref.ref[nn.Module]") -> nn.Module:
    module = reference()
    assert module is not None
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = _without_wrappers(replica.__dict__)
    return replica


def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes as they would be if it were not managed."""
    state = {name: value for name, value in state.items() if name not in ("__getstate__", "_replicate_for_data_parallel")}
    for name in ("forward", "_compiled_call_impl"):
        wrapper = getattr(state.get(name), "__backhaul__", None)
        if isinstance(wrapper, Wrapper):
            if wrapper.previous is None:
                del state[name]
            else:
                state[name] = wrapper.previous
    return state


class Storages:
    """A set of storages, by weak reference."""

    def __init__(self) -> None:
        self._owned: dict[int, weakref.ref[UntypedStorage]] = {}

    def __contains__(self, storage: UntypedStorage) -> bool:
        reference = self._owned.get(id(storage))
        return reference is not None and reference() is storage

    def note(self, storage: UntypedStorage) -> None:
        """Add a storage."""
        self._owned[id(storage)] = weakref.ref(storage)

    def add(self, tensors: Iterable[Tensor]) -> bool:
        """Add the storages of all that the tensors are made of; say whether there was one that was not known."""
        news = False
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                if storage not in self:
                    news = True
                    self.note(storage)
        return news

    def refresh(self, modules: Iterable[nn.Module]) -> None:
        """Look up every parameter and buffer anew: optimizers, ``.to`` and sharding replace storages."""
        self._owned = {}
        for module in modules:
            self.add(module.parameters())
            self.add(module.buffers())


def groups_of(module: nn.Module) -> Iterator[Group]:
    """Yield the groups of parameters that FSDP2 gathers apart, in and below ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
    if fsdp is None:
        return
    for inner in module.modules():
        if isinstance(inner, fsdp.FSDPModule):
            queue = [inner]
            while queue:
                owner = queue.pop()
                name = next((name for name, parameter in _torch.own_parameters(owner).items() if parameter is not None), None)
                if name is not None:
                    yield Group(inner, owner, name)
                    break
                queue += [child for child in owner.children() if not isinstance(child, fsdp.FSDPModule)]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage that ``tensor`` is made of."""
    if _torch.is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor names its mesh, too
                yield from plain_tensors(inner)
    elif tensor.layout == torch.strided and not is_lazy(tensor):
        yield tensor
