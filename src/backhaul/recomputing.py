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

[Note: Ranks]
Where a module talks to other ranks in its forward, its second run does, too, so all ranks have to run it equally often and equally far.
When memory is let go may differ between them, as a collective holds what it sends until it is done. So that an original happens to be
alive still is no reason not to make it.

[Note: Twice the same]
``forward`` has to do the same the second time. What it depends on is put back (replaying.py), what it chooses is recorded (choices.py).
What can be seen to differ is refused in the first run, or an error in the second: inputs, parameters or buffers that have been written,
other tensors saved. ``verify`` compares the values themselves. What a module reads from elsewhere, such as a tensor that it has as a mere
attribute, is its own affair.
"""

import threading
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul._torch import pop_function_mode, push_function_mode, set_grad_enabled
from backhaul.choices import Recording
from backhaul.claims import depth_of, once_more
from backhaul.interrupts import Around
from backhaul.kinds import take_apart, why_it_stays
from backhaul.parts import Part, flatten, is_cache, is_leaf, kind_of_maker, layout_of, plain_parts, storages_of, unflatten
from backhaul.remade import Made, Remade
from backhaul.replaying import Surroundings
from backhaul.rerunning import Rerun
from backhaul.saved import Bring, Layout, Parts, Promise
from backhaul.sites import Site
from backhaul.snapshots import Snapshot, is_iterator, may_change
from backhaul.watching import Watching, fingerprint, is_workspace

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

    def keep_owned(self, tensor: Tensor) -> Promise | None:
        """Return the promise for a tensor that it ``owns``."""
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
    if _torch.inside_functional_transform():
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
        "known",
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
        "saved",
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
        self.known: dict[int, Input] = {}  # by the tensor, as long
        self.saved: dict[int, tuple[weakref.ref[Made], int]] = {}  # by storage, with the version saved; as long
        self.mades: list[weakref.ref[Made]] = []
        self.leaves = [self._hold(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.packs: list[tuple[Part, ...]] = []
        self.outputs: list[Part] = []
        self.num_inside = 0  # bytes saved inside and made again
        self.inside = Inside(self) if site.watched else None
        self.needs_graph = False  # its own forward runs a backward
        self.training = self._is_training()
        self.versions = site.versions()
        self.homes = [keeper.home_of(parameter) for parameter in site.parameters()] if self.versions else []
        self.recording = None if site.chooses is False else Recording(keeper.promise)
        generators: list[torch.Generator] = []
        self.variables: list[tuple[Any, Snapshot]] = []
        if any(self.nesting):
            if any(is_cache(leaf) for leaf in leaves):
                raise site.refuse("it takes a cache, which a second run would extend once more", "call the model with use_cache=False")
            if any(is_iterator(leaf) for leaf in leaves):
                raise site.refuse("it takes an iterator, which a second run would find at its end", "give it a list")
            generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
            self.variables = [(leaf, Snapshot(leaf)) for leaf in leaves if may_change(leaf)]
        self.surroundings = Surroundings(self._accelerators(), generators)

    def _hold(self, tensor: Tensor) -> Input:
        held = self.known.get(id(tensor))  # what is passed twice is one tensor the second time, too
        if held is None:
            assert self.live is not None
            self.live.append((tensor, _torch.version_of(tensor)))
            for storage in storages_of(tensor):
                self.storages[id(storage)] = storage
            held = self.known[id(tensor)] = Input(self.keeper.promise(tensor), tensor.requires_grad, is_leaf(tensor))
        return held

    def _accelerators(self) -> Collection[torch.device]:
        """Return the devices other than the CPU that it may use: where its inputs are, else the current one."""
        assert self.live is not None
        return {tensor.device for tensor, _ in self.live if not (tensor.is_cpu or tensor.is_meta)} or self.site.accelerators

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
        held = self.known.get(id(tensor))
        if held is not None and (again := once_more(held.promise, tensor)) is not None:
            self.packs.append((self._part(tensor, None, again.view.layout),))
            return again
        parts: list[Part] = []
        promise = self._remade(tensor, parts)
        self.packs.append(tuple(parts))
        return promise

    def _remade(self, tensor: Tensor, parts: list[Part]) -> Promise | None:
        """Return the promise for a tensor or for one inside it, and add the plain ones to ``parts``."""
        if (owned := self.keeper.keep_owned(tensor)) is not None:
            return owned
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
        remade = None if made is None else Remade(made, tensor)
        parts.append(self._part(tensor, made, Layout.of(tensor) if remade is None else remade.view.layout))
        return remade

    def _made(self, tensor: Tensor) -> Made | None:
        """Return what makes the storage of a plain tensor as it is now; ``None`` where it is given, or has no bytes to make."""
        storage = tensor.untyped_storage()
        num = id(storage)
        if num in self.storages or not storage.nbytes():
            return None
        version = _torch.version_of(tensor)
        reference, saved = self.saved.get(num, (None, -1))
        made = reference() if reference is not None else None
        if made is None or made.home() is not storage or saved != version:
            made = Made(self, storage, self.lock)
            made.always = True
            reference = weakref.ref(made)
            self.saved[num] = reference, version
            self.mades.append(reference)
            self.num_inside += made.num_bytes
        return made

    def _part(self, tensor: Tensor, made: Made | None, layout: Layout | None) -> Part:
        node = None if made is None else kind_of_maker(tensor)
        reference = None if made is None else weakref.ref(made)
        if not self.site.verify:
            return Part(layout, reference, None, "", node)
        stack = self.inside.stack if self.inside is not None else ()
        digest = None if is_workspace(tensor) else fingerprint(tensor)
        return Part(layout, reference, digest, stack[-1] if stack else "", node)

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
            # It will not run again, and what it was called with may hold its output.
            self.leaves, self.variables, self.known, self.live = [], [], {}, None
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
        if found:
            returned = {id(made): made for _, made in found}.values()
            chains = self.site.is_leaf and num_inside <= MOST_INSIDE * sum([made.num_bytes for made in returned])
            depth = 1 + max([depth_of(held.promise) for held in self.known.values()], default=0)
            for made in returned:
                made.chains, made.depth = chains, depth
        if self.recording is not None:
            self.site.chooses = bool(self.site.chooses or self.recording.chosen)
            self.recording = self.recording if self.recording.chosen else None
        self.live = None
        self.storages, self.known, self.saved = {}, {}, {}
        return found

    def _check(self) -> None:
        site, live = self.site, self.live
        assert live is not None
        instead = "put it under another rule, or only those modules inside it that do not"
        for tensor, version in live:
            if _torch.version_of(tensor) != version:
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
        self.site.gather()
        if self.live is not None:
            self.needs_graph = True
        else:
            self._check_again()
        for leaf, state in self.variables:
            if name := state.changed(leaf):
                raise self.differs(f"{name!r} of an argument, a {type(leaf).__name__}, has been changed since its forward")
        Rerun(self).run(bring)

    def _check_again(self) -> None:
        site = self.site
        if name := site.written(self.versions):
            raise self.differs(f"its {name!r} has been written since its forward; step after the backward pass")
        for parameter, home in zip(site.parameters() if self.homes else (), self.homes, strict=False):
            if home is not None and parameter.untyped_storage() is not home():
                raise self.differs("a parameter of it got other data since its forward; assign data after the backward pass")
        if self._is_training() != self.training:
            raise self.differs("it was switched between train() and eval() since its forward; switch after the backward pass")

    def arguments(self, bring: Bring) -> tuple[list[Any], dict[str, Any]]:
        """Return what the forward was called with, detached."""
        again: dict[int, Tensor] = {}
        for held in self.leaves:
            if type(held) is Input and id(held) not in again:
                again[id(held)] = self._argument(held, bring)
        values = unflatten([again[id(held)] if type(held) is Input else held for held in self.leaves], self.nesting)
        if not self.names:
            return values, {}
        num_args = len(values) - len(self.names)
        return values[:num_args], dict(zip(self.names, values[num_args:], strict=True))

    def _argument(self, held: Input, bring: Bring) -> Tensor:
        try:
            tensor = held.promise.restore(bring).detach().requires_grad_(held.requires_grad)
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # out of memory is
                raise
            raise self.differs(f"what it was called with cannot be had again: {error}") from error
        if held.is_leaf:
            return tensor
        was_enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(True)
            # No leaf: autocast would keep a cast of it for as long as it is on. And by its very strides, which `view_as` may change.
            return tensor[...]
        finally:
            set_grad_enabled(was_enabled)

    def differs(self, what: str, inside: str = "") -> RuntimeError:
        """Return the error for a second run that cannot do what the first did."""
        where = repr(f"{self.site.fqn}.{inside}".removeprefix(".")) if inside else self.site.name
        return RuntimeError(f"{where} is recomputed, but {what}")


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
