"""Modules whose forward runs again in the backward pass.

Covers: what such a module holds meanwhile, what its first run notes for the second, and which modules cannot be run twice.
Does not cover: the second run (rerunning.py), how long a made value lives (remade.py), the state around a forward pass (replaying.py),
choices (choices.py), or which modules are run again (plans.py).

[Note: Units]
One run of a module under the action ``recompute`` is a unit. Autograd gets a ``Remade`` for every tensor saved inside, and later for
those saved outside that lie in what the module returned. They own the unit, and the unit owns promises for its inputs, never the inputs.
When one of the values is needed, the module's ``forward`` runs again on detached inputs, with hooks that count what is saved: the k-th
tensor saved the second time has the bytes of the k-th saved the first time. Nothing of that second graph is used. The run ends early when
all that anybody still wants has been collected, so that a projection at the end of a block is not paid for twice.

[Note: Chains]
What a unit or a recipe starts from may be another unit's output, made again in turn: a norm before an MLP. That is only done where the
other one is a module without others inside, and holds little more inside than it returns. Else a row of blocks, each starting from the one
before, would all have to be unrolled at once, with everything inside them, to make the input of the last.

[Note: Twice the same]
``forward`` has to do the same the second time. What it depends on is put back (replaying.py), what it chooses is recorded (choices.py).
What can be seen to differ is refused in the first run, or an error in the second: inputs, parameters or buffers that have been written,
other tensors saved. ``verify`` compares the values themselves. What a module reads from elsewhere, such as a tensor that it has as a mere
attribute, is its own affair.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul._torch import pop_function_mode, push_function_mode
from backhaul.choices import Recording
from backhaul.claims import depth_of
from backhaul.globs import matches
from backhaul.interrupts import Around
from backhaul.kinds import take_apart, why_it_stays
from backhaul.parts import Part, State, flatten, has_state, is_cache, layout_of, plain_parts, storages_of, unflatten
from backhaul.remade import Made, Remade
from backhaul.replaying import Surroundings
from backhaul.rerunning import Rerun
from backhaul.saved import Bring, Layout, Parts, Promise
from backhaul.scopes import clean_fqn
from backhaul.watching import Watching, fingerprint

MOST_INSIDE = 4  # times what a norm written in plain code returns is about what it saves inside


class Place(Protocol):
    """Where a thread is: in which unit, if in any."""

    unit: "Unit | None"


class Keeper(Protocol):
    """What a unit asks of its engine. Its ``pack`` is the innermost hook where units are made, and asks ``here.unit`` first."""

    @property
    def here(self) -> Place: ...

    def promise(self, tensor: Tensor) -> Promise:
        """Return what to hold instead of a tensor that the unit starts from."""
        ...

    def owns(self, tensor: Tensor) -> bool:
        """Say whether the tensor is a parameter or a buffer, or made of one in a way that costs nothing to hold."""
        ...

    def home_of(self, parameter: Tensor) -> "weakref.ref[UntypedStorage] | None":
        """Return the storage of a parameter that is to have it until backward; ``None`` where sharding may give it another."""
        ...

    def can_be_made(self, output: Tensor, made: Made) -> None:
        """Take note that the storage of what a unit returned can be made again, if an operation saves it as it is now."""
        ...

    def recomputed(self, fqn: str, num_bytes: int) -> None:
        """Count what a unit has made."""
        ...


class Site:
    """A module under ``recompute``: what is asked for there, and what running it has taught.

    Args:
        fqn: its name.
        module: the module; not owned.
        keep_outputs: globs over the names of modules inside, from here or from the root, whose outputs are saved and put in place of what
            they return the second time.
        verify: compare the values of what is saved the second time.
        around: the modules that contain it, outermost first.
    """

    def __init__(
        self, fqn: str, module: nn.Module, *, keep_outputs: Sequence[str] = (), verify: bool = False, around: Sequence[nn.Module] = ()
    ) -> None:
        self.fqn = fqn
        self.module = weakref.ref(module)
        self.around = [weakref.ref(outer) for outer in (*around, module)]
        self.verify = verify
        inside: dict[str, nn.Module] = {}
        for name, part in module.named_modules():
            inside.setdefault(clean_fqn(name), part)  # of a wrapper and what it wraps, the wrapper
        del inside[""]
        self.kept = {name for glob in keep_outputs for name in self._matching(glob, list(inside))}
        self.watched: MutableMapping[nn.Module, str] = weakref.WeakKeyDictionary()
        self.watched.update((part, name) for name, part in inside.items() if verify or name in self.kept)
        self.parts = [(name, weakref.ref(part)) for name, part in module.named_modules()]
        compiled = any(_torch.compiled_call(part) or _torch.original_module(part) for part in module.modules())
        # Whether it makes choices, which is known once it has run. A mode would have compiled code compiled again.
        self.chooses: bool | None = False if compiled else None
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.accelerators = () if accelerator is None else (accelerator,)

    def _matching(self, glob: str, names: list[str]) -> list[str]:
        found = [name for name in names if matches(glob, name) or matches(glob, f"{self.fqn}.{name}")]
        if not found:
            raise ValueError(
                f"keep_outputs names {glob!r}, which matches no module inside {self.fqn!r} ({', '.join(names) or 'it has none'})"
            )
        return found

    def gather(self) -> None:
        """Have FSDP2 gather its parameters, as before a forward: the second run comes before the backward that it would gather for."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None:
            modules = (module for reference in reversed(self.around) if (module := reference()) is not None)
            owner = next((module for module in modules if isinstance(module, fsdp.FSDPModule)), None)
            if owner is not None:
                owner.unshard()

    def parameters(self) -> Iterator[Tensor]:
        """Yield its parameters, as they are just now."""
        for _, reference in self.parts:
            if (part := reference()) is not None:
                yield from (parameter for parameter in _torch.own_parameters(part).values() if parameter is not None)

    def versions(self) -> list[tuple[int, int]]:
        """Return which parameters and buffers there are, by their ids, and their versions."""
        return _torch.versions_of([part() for _, part in self.parts])

    def written(self, since: list[tuple[int, int]]) -> str:
        """Return the name of a parameter or a buffer that has been written in place, or of a buffer that has been replaced.

        A parameter that is another one now has not been written: sharding gathers it for a while.
        """
        now = self.versions()
        if now == since:
            return ""
        known = [
            (f"{where}.{name}" if where else name, is_buffer)
            for where, reference in self.parts
            if (part := reference()) is not None
            for name, _, is_buffer in _torch.named_tensors(part)
        ]
        for (name, is_buffer), then, this in zip(known, since, now, strict=False):
            if then != this and (then[0] == this[0] or is_buffer):
                return name
        return ""

    def refuse(self, what: str, instead: str) -> ValueError:
        """Return the error for a module that cannot be run twice."""
        return ValueError(f'{self.fqn!r} cannot be under "recompute": {what}; {instead}')


class Input(NamedTuple):
    """A tensor that a unit starts from."""

    promise: Promise
    requires_grad: bool
    is_leaf: bool


def run_unit(site: Site, keeper: Keeper, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run ``forward``, which is the site's module's, as a unit; as it is where a unit cannot begin, as inside a checkpointed region."""
    here = keeper.here
    innermost = _torch.top_saved_tensors_hooks()
    if here.unit is not None or innermost is None or getattr(innermost[0], "__self__", None) is not keeper:
        return forward(*args, **kwargs)
    unit = Unit(site, keeper, forward, args, kwargs)
    try:
        here.unit = unit
        output = unit.run(args, kwargs)
    finally:
        here.unit = None
    for tensor, made in unit.finish(output):
        keeper.can_be_made(tensor, made)
    return output


class Unit:
    """One run of a module, which makes again what was saved in it and what it returned ([Note: Units])."""

    __slots__ = (
        "__weakref__",
        "forward",
        "homes",
        "inside",
        "keeper",
        "leaves",
        "live",
        "lock",
        "mades",
        "names",
        "needs_graph",
        "nesting",
        "num_inside",
        "outputs",
        "packs",
        "recording",
        "site",
        "storages",
        "surroundings",
        "training",
        "variables",
        "versions",
    )  # fmt: skip

    def __init__(self, site: Site, keeper: Keeper, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.site = site
        self.keeper = keeper
        self.forward = forward
        self.lock = threading.RLock()
        self.names = tuple(kwargs)
        leaves, self.nesting = flatten((*args, *kwargs.values()))
        self.live: list[tuple[Tensor, int]] | None = []  # inputs and their versions, until the forward has ended
        self.storages: dict[int, UntypedStorage] = {}  # theirs, as long
        self.mades: dict[int, tuple[weakref.ref[Made], int]] = {}  # by storage, with the version saved; as long
        known: dict[int, Input] = {}
        self.leaves = [self._hold(leaf, known) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.packs: list[tuple[Part, ...]] = []
        self.outputs: list[Part] = []
        self.num_inside = 0  # bytes saved inside and made again
        self.inside = Inside(self) if site.watched else None
        self.needs_graph = False  # its own forward runs a backward
        self.training = self._is_training()
        self.versions = site.versions()
        self.homes = [keeper.home_of(parameter) for parameter in site.parameters()]
        self.recording = None if site.chooses is False else Recording(keeper.promise)
        generators: list[torch.Generator] = []
        if any(self.nesting):
            if any(is_cache(leaf) for leaf in leaves):
                raise site.refuse("it takes a cache, which a second run would extend once more", "call the model with use_cache=False")
            generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.surroundings = Surroundings(self._accelerators(), generators)
        self.variables = [(leaf, State(leaf)) for leaf in leaves if has_state(leaf)]

    def _hold(self, tensor: Tensor, known: dict[int, Input]) -> Input:
        held = known.get(id(tensor))  # what is passed twice is one tensor the second time, too
        if held is None:
            assert self.live is not None
            self.live.append((tensor, _torch.version_of(tensor)))
            for storage in storages_of(tensor):
                self.storages[id(storage)] = storage
            held = known[id(tensor)] = Input(self.keeper.promise(tensor), tensor.requires_grad, tensor.is_leaf)
        return held

    def _accelerators(self) -> Collection[torch.device]:
        """Return the devices other than the CPU that it may use: where its inputs are, else the current one."""
        assert self.live is not None
        return {tensor.device for tensor, _ in self.live if tensor.device.type not in ("cpu", "meta")} or self.site.accelerators

    def _homes(self) -> "Iterator[tuple[Tensor, weakref.ref[UntypedStorage] | None]]":
        return zip(self.site.parameters(), self.homes, strict=False)

    def _is_training(self) -> bool:
        module = self.site.module()
        return module is not None and module.training

    # The first run

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the forward for the first time."""
        if self.recording is None and self.inside is None:
            return self.forward(*args, **kwargs)
        around = Around()
        if self.inside is not None:
            self.inside.watching().put_around(around)
        if self.recording is not None:
            around.add(partial(push_function_mode, self.recording), pop_function_mode)
        return around.call(self.forward, args, kwargs)

    def is_given(self, tensor: Tensor) -> bool:
        """Say whether the tensor lies in an input or a parameter."""
        return self.keeper.owns(tensor) or any(id(storage) in self.storages for storage in storages_of(tensor))

    def pack(self, tensor: Tensor) -> Promise | None:
        """Return the promise for a tensor saved in the forward, or ``None`` where it is to be kept as it would be elsewhere."""
        if type(tensor) is not Tensor and _torch.is_fake(tensor):
            return None
        parts: list[Part] = []
        promise = self._remade(tensor, parts)
        self.packs.append(tuple(parts))
        return promise

    def _remade(self, tensor: Tensor, parts: list[Part]) -> Promise | None:
        """Return the promise for a tensor or for one inside it, and add the plain ones to ``parts``."""
        if self.keeper.owns(tensor):
            return None
        if type(tensor) is not Tensor:
            tensor = _torch.settle_collective(tensor)
            if _torch.is_wrapper_subclass(tensor):
                inner, other, context = take_apart(tensor)
                promises = {name: self._remade(part, parts) or self.keeper.promise(part) for name, part in inner.items()}
                return Parts(tensor, promises, other, context)
        if why_it_stays(tensor):
            parts.append(self._part(tensor, None, None))
            return None
        made = self._made(tensor)
        if made is None:
            parts.append(self._part(tensor, None, Layout.of(tensor)))
            return None
        remade = Remade(made, tensor)
        parts.append(self._part(tensor, made, remade.view.layout))
        return remade

    def _made(self, tensor: Tensor) -> Made | None:
        """Return what makes the storage of a plain tensor as it is now; ``None`` where it is given, or has no bytes to make."""
        storage = tensor.untyped_storage()
        num = id(storage)
        if num in self.storages or not storage.nbytes():
            return None
        version = _torch.version_of(tensor)
        reference, saved = self.mades.get(num, (None, -1))
        made = reference() if reference is not None else None
        if made is None or made.home() is not storage or saved != version:
            made = Made(self, storage, self.lock)
            self.mades[num] = weakref.ref(made), version
            self.num_inside += made.num_bytes
        return made

    def _part(self, tensor: Tensor, made: Made | None, layout: Layout | None) -> Part:
        if made is None:
            reference = node = None
        else:
            reference, node = weakref.ref(made), type(tensor.grad_fn).__name__
        if not self.site.verify:
            return Part(layout, reference, node=node)
        stack = self.inside.stack if self.inside is not None else ()
        return Part(layout, reference, fingerprint(tensor), stack[-1] if stack else "", node)

    def finish(self, output: Any) -> list[tuple[Tensor, Made]]:
        """End the first run. Return the tensors in what the module returned whose storages can be made again, and what makes them.

        Raises:
            ValueError: it cannot be run twice.
        """
        self.surroundings.settle()
        try:
            self._check()
        except ValueError:
            self.surroundings.put_generators_back()
            self.leaves, self.variables, self.live = [], [], None  # it will not run again, and what it was called with may hold its output
            raise
        num_inside = self.num_inside
        found: list[tuple[Tensor, Made]] = []
        for leaf in (output,) if type(output) is Tensor else flatten((output,))[0]:
            for tensor in plain_parts(leaf) if isinstance(leaf, Tensor) else ():
                layout = layout_of(tensor)
                made = None if layout is None or self.keeper.owns(tensor) else self._made(tensor)
                self.outputs.append(self._part(tensor, made, layout))
                if made is not None:
                    found.append((tensor, made))
        returned = {id(made): made for _, made in found}.values()
        chains = num_inside <= MOST_INSIDE * sum([made.num_bytes for made in returned]) and len(self.site.parts) == 1
        depth = 1 + max((depth_of(leaf.promise) for leaf in self.leaves if isinstance(leaf, Input)), default=0)
        for made in returned:
            made.chains, made.depth = chains, depth
        if self.recording is not None:
            self.site.chooses = bool(self.site.chooses or self.recording.chosen)
            self.recording = self.recording if self.recording.chosen else None
        self.live = None
        self.storages, self.mades = {}, {}
        return found

    def _check(self) -> None:
        site, live = self.site, self.live
        assert live is not None
        instead = "put it under another rule, or only those modules inside it that do not"
        if [tensor for tensor, version in live if _torch.version_of(tensor) != version]:
            raise site.refuse("it writes to an input in place", f"have it not do so (inplace=False), {instead}")
        if name := site.written(self.versions):
            raise site.refuse(f"it writes to {name!r} in its forward, and would do so twice", instead)
        for leaf, state in self.variables:
            if name := state.changed(leaf):
                raise site.refuse(f"it writes to {name!r} of an argument, a {type(leaf).__name__}, and would do so twice", instead)
        for name in () if self.inside is None else self.inside.written():
            raise site.refuse(f"keep_outputs keeps what {name!r} returns, and that is written in place", "leave it out of keep_outputs")

    # Running again

    def make(self, wanted: Made, bring: Bring) -> None:
        """Run the forward again and fill all that is wanted."""
        if self.live is not None:
            self.needs_graph = True
        elif name := self.site.written(self.versions):
            raise self.differs(f"its {name!r} has been written since its forward; step after the backward pass")
        elif any(home is not None and parameter.untyped_storage() is not home() for parameter, home in self._homes()):
            raise self.differs("a parameter of it got other data since its forward; assign data after the backward pass")
        elif self._is_training() != self.training:
            raise self.differs("it was switched between train() and eval() since its forward; switch after the backward pass")
        for leaf, state in self.variables:
            if name := state.changed(leaf):
                raise self.differs(f"{name!r} of an argument, a {type(leaf).__name__}, has been changed since its forward")
        self.site.gather()
        Rerun(self).run(bring)

    def arguments(self, bring: Bring) -> tuple[list[Any], dict[str, Any]]:
        """Return what the forward was called with, detached."""
        again: dict[int, Tensor] = {}
        for held in self.leaves:
            if isinstance(held, Input) and id(held) not in again:
                try:
                    tensor = held.promise.restore(bring).detach().requires_grad_(held.requires_grad)
                except RuntimeError as error:
                    if type(error) is not RuntimeError:  # out of memory is
                        raise
                    raise self.differs(f"what it was called with cannot be had again: {error}") from error
                with torch.enable_grad():  # autocast would keep a cast of a leaf for as long as it is on
                    again[id(held)] = tensor if held.is_leaf else tensor.view_as(tensor)
        values = unflatten([again[id(held)] if isinstance(held, Input) else held for held in self.leaves], self.nesting)
        num_args = len(values) - len(self.names)
        return values[:num_args], dict(zip(self.names, values[num_args:], strict=True))

    def differs(self, what: str, inside: str = "") -> RuntimeError:
        """Return the error for a second run that cannot do what the first did."""
        where = f"{self.site.fqn}.{inside}" if inside else self.site.fqn
        return RuntimeError(f"{where!r} is recomputed, but {what}")


class Inside:
    """What is known of the modules inside a unit that are watched."""

    def __init__(self, unit: Unit) -> None:
        self.unit = weakref.ref(unit)
        self.site = unit.site
        self.stack: list[str] = []  # those that are running
        self.kept: dict[str, list[list[Promise | None]]] = {}  # what they returned, by name and call
        self.live: list[tuple[str, Tensor, int]] = []  # the same with their versions, until the forward has ended

    def watching(self) -> Watching:
        """Return what notes what they do."""
        return Watching(self.site.watched, self.stack.append, self._leave)

    def _leave(self, name: str, output: Any) -> None:
        self.stack.pop()
        unit = self.unit()
        assert unit is not None
        if name in self.site.kept:
            tensors = [leaf for leaf in flatten((output,))[0] if isinstance(leaf, Tensor)]
            promises = [None if unit.is_given(tensor) else unit.keeper.promise(tensor) for tensor in tensors]
            self.kept.setdefault(name, []).append(promises)
            self.live += [(name, tensor, _torch.version_of(tensor)) for tensor in tensors]

    def written(self) -> list[str]:
        """Return the names of those whose outputs have been written to since, and let go of these."""
        live, self.live = self.live, []
        return [name for name, tensor, version in live if _torch.version_of(tensor) != version]
