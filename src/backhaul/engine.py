"""Pack and unpack: what happens to each saved tensor of a managed module.

Covers: frames, which promise a tensor gets, what is counted. One engine belongs to one handle.
Does not cover: when anything moves (flow.py), carrying that out (moving.py), what autograd is given to hold (saved.py, remade.py), where
the hooks are entered (scopes.py).

[Note: Locking]
One reentrant lock an engine. Finalizers do not take it (registry.py).

[Note: Interrupts]
A KeyboardInterrupt may come between any two steps here and in flow.py, and leave their counts at odds. Then the engine is shaken: tensors
are kept, what has left is brought back when it is needed, flow.py is not asked. Once nothing of that step is alive the counts begin anew.
"""

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch, kinds
from backhaul.claims import depth_of, norm_eps
from backhaul.kinds import cast_parameter, is_filled_later, is_parameter, parameter_versions, size_in_memory, take_apart, why_it_stays
from backhaul.moving import Mover, Warner
from backhaul.operands import OwnClaims, Shapes, same_as
from backhaul.recipes import recipe_for
from backhaul.recomputing import run_unit
from backhaul.registry import Record, Registry, Steady
from backhaul.remade import MOST_DEPTH, Made, Outputs, Remade
from backhaul.reporting import Tally
from backhaul.saved import Blob, Kept, Layout, Parts, Promise, Recast, Saved, View
from backhaul.scopes import OFFLOAD, Duty, Frame, Here, Scope, Storages, groups_of, hooks_owner, plain_tensors
from backhaul.stations import Station
from backhaul.tiers.base import Tier

SLICE = 16  # a tensor that covers less than 1/SLICE of its storage does not make the storage move
MOST_FUTILE = 2  # steps in which copying a key freed nothing, after which it is left alone
MOST_FRUITLESS = 3  # looks at a module's parameters, after which it is taken for one whose weights are never gathered


class Engine:
    """The saved-tensor hooks of one handle."""

    has_plan, verifies = False, False  # tensors may be made again; what recipes make is compared with what was there
    moves = True  # anything is to leave the device

    def __init__(self, modules: Sequence[nn.Module], *, tier: Tier, activation_budget: int | None, min_bytes: int) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.tier = tier
        self.is_ours = type(tier).__module__.startswith("backhaul.")
        self.activation_budget = activation_budget
        self.min_bytes = min_bytes
        self.tally = Tally()
        self.lock = threading.RLock()
        self.here = Here()
        self.stations: dict[torch.device, Station] = {}
        self.registry = Registry(self._blob_is_gone, self._frame_is_over)
        self.owned = Storages()
        self.default = OFFLOAD  # what is asked for where no module says otherwise
        self.nums = itertools.count()
        self.closed = False
        self._steady = Steady()
        self.warner = Warner()
        self.mover = Mover(self.registry, self.tally, self._steady, self.warner)
        self.claims = OwnClaims(self.is_unwritten, self.here, self.promise)
        self._shapes = Shapes(self.mover)
        self._fruitless: Counter[str] = Counter()  # by module: looks at its parameters that have shown none but known ones
        self._casts_seen = False
        self._versions: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}  # of parameters, when the newest frame began
        self._accelerated: bool | None = None

    # Entering and leaving

    def enter(self, module: nn.Module, fqn: str, *, is_root: bool, duty: Duty = OFFLOAD) -> Scope | None:
        """Return the scope of a module that is about to run: of a new frame, or of the one it runs in."""
        here = self.here
        if here.paused or not torch.is_grad_enabled():
            return None
        if _torch.inside_backward():
            obstacle = "it runs inside a checkpoint, whose recomputation goes on undisturbed; manage what is around it"
        elif here.scope is not None:
            outer = here.scope
            return Scope(outer.frame, fqn, module, duty if duty.site is None else outer.duty, duty.site)
        elif not is_root or module.training:
            return self.begin_frame(fqn, module, duty) if is_root else None
        else:
            obstacle = "it is in eval mode"
        if is_root and here.scope is None:
            self._turn_away(obstacle)
        return None

    def begin_frame(self, fqn: str, module: nn.Module | None, duty: Duty | None = None) -> Scope | None:
        """Open a frame, and a step with it where none is open. Return ``None`` where the hooks have to stay away."""
        duty = self.default if duty is None else duty
        name = fqn or "the managed module"
        if _torch.inside_checkpoint():
            self._turn_away("it runs inside a checkpointed region, where hooks would switch recomputation off; manage what is around it")
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name!r} is being captured into a CUDA graph, whose replay would read tensors that have moved. "
                "Capture within handle.paused(), or remove the handle first"
            )
        other = hooks_owner()
        if module is not None and isinstance(other, Engine) and any(module in set(root.modules()) for root in other._alive()):
            raise ValueError(f"{name!r} is part of a module that another handle manages already; leave one of them out")
        if isinstance(other, Engine) and (unit := other.here.unit) is not None:
            raise ValueError(
                f"{name!r} is managed by a handle of its own, and called inside {unit.site.fqn!r}, which another handle runs again; "
                "manage it in that handle's plan, or remove its handle"
            )
        refused = _torch.saved_tensors_hooks_refused()
        if refused is not None:
            where = "a torch.func transform, which allows no saved-tensor hooks" if _torch.inside_functional_transform() else refused
            raise RuntimeError(f"{name!r} was called inside {where}; run it within handle.paused()")
        if _torch.inside_functional_transform() or _torch.is_being_traced():
            self._turn_away("it runs inside a torch.func transform or is being traced, where tensors have no bytes of their own")
            return None
        with self.lock, self._steady:
            self.tidy_up()
            if not self.registry.frames:
                for station in self.stations.values():
                    station.measure(self.tier, only_if_new=True)  # the device may be waiting for this step to begin
                self.owned.refresh(self._alive())
                for station in self.stations.values():
                    station.check_budget(self.tally.reasons())
            if self._casts_seen or self.has_plan or not self._versions:
                self._versions = parameter_versions(self._alive())
            frame = Frame(next(self.nums), self.registry.grave)
            step_begins = not self.registry.frames
            self.registry.open(frame)
            for station in self.stations.values():
                if step_begins:
                    station.timeline.is_watched = station.flow.wants_times
                station.flow.open_frame(frame.num)
            self.here.outputs = Outputs() if self.has_plan else None
            return Scope(frame, fqn, module, duty if duty.site is None else self.default, duty.site)

    def run(self, scope: Scope, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` in its scope: as a unit, if it is one."""
        if scope.site is not None:
            return run_unit(scope.site, self, forward, args, kwargs)
        if not scope.duty.recipes:
            return forward(*args, **kwargs)
        scope.settles, scope.given = True, [each for each in (*args, *kwargs.values()) if type(each) is Tensor]
        result = forward(*args, **kwargs)
        scope.given = []
        with self.lock, self._steady:
            self._shapes.settle(scope, result)
        return result

    def passed(self) -> None:
        self.tally.num_passes += 1
        self._say_what_is_wrong()

    def _turn_away(self, obstacle: str) -> None:
        """Note that a managed module runs where it cannot be managed."""
        self.tally.num_turned_away += 1
        self.tally.obstacle = obstacle
        self._say_what_is_wrong()

    def _say_what_is_wrong(self) -> None:
        if self.moves:
            self.warner.say_if_nothing_moves(self.tally, self.min_bytes)
            self.warner.say_if_no_step_ends(self.tally, self.stations.values())

    # The hooks

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Promise], Callable[[Promise], Tensor]]:
        """The pair that autograd calls.

        A tier of the user's own is code that Dynamo would look into, where it runs what it does not compile.
        """
        if self.is_ours:
            return self.pack, self.unpack
        return _torch.untraced(self.pack), _torch.untraced(self.unpack)

    def pack(self, tensor: Tensor) -> Promise:
        """Return the promise that autograd holds instead of ``tensor``."""
        with self.lock, self._steady:
            self._begin()
            unit = self.here.unit
            caller = sys._getframe(1 if self.is_ours else 2)
            if is_filled_later(tensor, caller):
                if unit is not None:
                    raise unit.site.refuse("rrelu writes its noise after it has been saved", 'leave it under "save" or "offload"')
                return self._keep_whole(tensor, "written after it was saved")
            if unit is None:
                promise = self._promise(tensor)
                return self.claims.claim(tensor, promise, norm_eps(caller)) if self.has_plan else promise
            num_bytes = unit.num_inside
            remade = unit.pack(tensor)
            if unit.num_inside > num_bytes:
                self.tally.recomputes(self._where()[1].fqn, unit.num_inside - num_bytes)
            return self._promise(tensor) if remade is None else remade

    def unpack(self, promise: Promise) -> Tensor:
        """Give the tensor of a promise back. What is made again is made without our lock: it is the user's code that runs."""
        tensor = promise.restore(self._bring)
        if self.has_plan and depth_of(promise) and any(len(station.streams) > 1 for station in self.stations.values()):
            self._hold(tensor)
        return tensor

    def _hold(self, tensor: Tensor) -> None:
        """Have what was made again stay until all streams have read it (stations.py, [Note: Whose memory])."""
        for plain in plain_tensors(tensor):
            if (station := self.stations.get(plain.device)) is not None:
                with self.lock:
                    station.hold(plain.untyped_storage())

    def _bring(self, blob: Blob) -> None:
        with self.lock, self._steady:
            self._begin()
            self.mover.bring(blob)
            if not self._steady.shaken:
                for station in self.stations.values():
                    if station.flow.is_through:
                        station.plan(self.tier)

    # What units ask (recomputing.py, Keeper)

    def promise(self, tensor: Tensor) -> Promise:
        """Return the promise for what a unit starts from."""
        with self.lock, self._steady:
            self._begin()
            return self.claims.claim(tensor, self._promise(tensor, chained=True))

    def owns(self, tensor: Tensor) -> bool:
        if is_parameter(tensor):
            return True
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or _torch.is_functional_tensor(tensor):
            return False
        return self._is_owned(tensor.untyped_storage(), self._where()[1])

    def keep_owned(self, tensor: Tensor) -> Promise | None:
        return self._keep_parameter(tensor, self._where()[0]) if self.owns(tensor) else None

    def home_of(self, parameter: Tensor) -> "weakref.ref[UntypedStorage] | None":
        return self._versions[id(parameter)][0] if self.is_unwritten(parameter) else None

    def can_be_made(self, output: Tensor, made: Made) -> None:
        """Remember for the rest of the forward pass what a unit has returned."""
        outputs = self.here.outputs
        if outputs is not None:
            outputs.note(output, made)
            if made.chains and self._where()[1].duty.recipes:
                outputs.keep(self.claims.claim(output, Remade(made, output)))

    def recomputed(self, fqn: str, num_bytes: int) -> None:
        self.tally.made_bytes += num_bytes

    # Which promise

    def _promise(self, tensor: Tensor, *, chained: bool = False) -> Promise:
        if self.closed or self._steady.shaken:
            return Kept(tensor)
        if is_parameter(tensor):
            return self._keep_parameter(tensor, self._where()[0])
        if type(tensor) is not Tensor:
            tensor = _torch.settle_collective(tensor)
            if _torch.is_wrapper_subclass(tensor):
                inner, other, context = take_apart(tensor)
                return Parts(tensor, {name: self._promise(part) for name, part in inner.items()}, other, context)
        reason = why_it_stays(tensor)
        return self._keep_whole(tensor, reason) if reason else self._promise_dense(tensor, chained=chained)

    def _promise_dense(self, tensor: Tensor, *, chained: bool = False) -> Promise:
        """Return the promise for the bytes of one storage; ``chained`` if a unit starts from it."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        frame, scope = self._where()
        duty = scope.duty
        if storage in self.owned:
            return self._keep_parameter(tensor, frame)
        if storage in frame.left_alone:
            return Kept(tensor, frame)
        if tensor.is_cpu and self._on_accelerator():
            return self._keep_whole(tensor, "on the host")
        blob = self.registry.find(storage)
        if blob is not None and not blob.changed:
            view = View(tensor)
            if blob.takes(view):
                return self._another_view(blob, view, storage, frame, scope)
        station = self._station(tensor.device)
        if num_bytes < self.min_bytes or not num_bytes:
            return self._keep_small(tensor, storage, station, frame, scope)
        if self._is_owned(storage, scope):
            return self._keep_parameter(tensor, frame)
        if (recast := self._recast(tensor, storage, frame)) is not None:
            return recast
        if self.has_plan and not duty.keep and (made := self._made(tensor, storage, scope, chained=chained)) is not None:
            assert self.here.outputs is not None
            if self.here.outputs.is_first(made):
                self.tally.recomputes(scope.fqn, num_bytes)
            return Remade(made, tensor)
        key = scope.next_key()
        if self.mover.futile[key] >= MOST_FUTILE:
            return self._keep_futile(tensor, storage, frame, scope)
        blob = Blob(next(self.nums), storage, frame, key, duty.tier or self.tier, self.registry.grave)
        blob.guard = self.lock
        blob.reason = self._why_it_stays(tensor, blob, scope)
        blob.stream = station.current_stream()
        view = View(tensor)
        blob.add(view)
        self.registry.add(blob, storage, station)
        self.tally.saved(key.fqn, num_bytes, blob.reason)
        self._offer(station, blob)
        return Saved(blob, view)

    def _why_it_stays(self, tensor: Tensor, blob: Blob, scope: Scope) -> str:
        if scope.duty.keep:
            return "save"
        if tensor.numel() * tensor.element_size() * SLICE < blob.num_bytes:
            return "slice"
        return self._shapes.hope(blob, scope) if scope.settles else ""

    def _made(self, tensor: Tensor, storage: UntypedStorage, scope: Scope, *, chained: bool) -> Made | None:
        """Return what makes the storage again, where a unit has returned it or plain code has made it cheaply."""
        outputs = self.here.outputs
        if outputs is None:
            return None
        made = outputs.find(tensor)
        if made is not None:
            return made if not chained or (made.chains and made.depth < MOST_DEPTH) else None
        recipe = recipe_for(tensor, self.claims) if scope.duty.recipes else None
        if recipe is None:
            return None
        depth = 1 + max(map(depth_of, recipe.parts))
        if depth > MOST_DEPTH:
            return None
        made = Made(recipe, storage)
        made.depth = depth
        made.check = same_as(storage, scope.fqn) if self.verifies else None
        outputs.note(tensor, made)
        return made

    def _offer(self, station: Station, blob: Blob) -> None:
        self.mover.offer(station, blob)

    def _another_view(self, blob: Blob, view: View, storage: UntypedStorage, frame: Frame, scope: Scope) -> Promise:
        station = self.registry.records[blob.num].station
        if blob.frame is not frame and blob.num not in frame.seen:
            frame.seen.add(blob.num)
            self.tally.saved(scope.fqn, blob.num_bytes, "shared with an earlier pass")
        view = blob.add(view)
        alias = view.alias
        if scope.duty.keep:
            self.mover.stay(station, blob, storage, "save")
        elif blob.reason == "slice" and alias.numel() * alias.element_size() * SLICE >= blob.num_bytes:
            self.mover.offer_again(station, blob)
        elif blob.released:  # somebody has kept it alive and saves it again: the tier has it already
            view.let_go()
        return Saved(blob, view)

    def _where(self) -> tuple[Frame, Scope]:
        """Return this thread's frame and scope. A thread that autograd gave the hooks of another has none; it joins the newest frame."""
        scope = self.here.scope
        if scope is not None:
            return scope.frame, scope
        frame = self.registry.newest_frame()
        scope = self.begin_frame("backward", None) if frame is None else Scope(frame, "backward", None, self.default)
        assert scope is not None  # the hooks are active
        self.here.outputs = None  # there is no forward pass here at whose end it would go
        return scope.frame, scope

    def _is_owned(self, storage: UntypedStorage, scope: Scope) -> bool:
        """Say whether the storage is a parameter's or a buffer's."""
        return storage in self.owned or ((scope.module is not None or bool(scope.groups)) and self._gathered(scope, storage))

    def is_unwritten(self, parameter: Tensor) -> bool:
        """Say whether a parameter is as it was when the newest frame began, and will be there in all of backward."""
        known, version = self._versions.get(id(parameter), (None, -1))
        return known is not None and known() is parameter.untyped_storage() and version == _torch.version_of(parameter)

    def _gathered(self, scope: Scope, storage: UntypedStorage) -> bool:
        """Say whether the storage is one that the running module's parameters have just now, as FSDP gathered them.

        Once a scope is enough for what is there already; a group that is gathered later shows by one of its parameters.
        """
        if scope.module is not None:
            module, scope.module = scope.module, None
            if self._fruitless[scope.fqn] < MOST_FRUITLESS:
                scope.groups = list(groups_of(module))
                news = self.owned.add(itertools.chain(module.parameters(), module.buffers()))
                self._fruitless[scope.fqn] += -sys.maxsize if news or scope.groups else 1
        for group in scope.groups:
            if any(plain.untyped_storage() not in self.owned for plain in plain_tensors(group.sample)):
                self.owned.add(group.module.parameters())
        return storage in self.owned

    def _recast(self, tensor: Tensor, storage: UntypedStorage, frame: Frame) -> Recast | None:
        """Return the promise to cast a parameter again, where it is certain to give the same."""
        if frame.thread != threading.get_ident():
            return None
        parameter = cast_parameter(tensor, storage, since=frame.began_at)
        if parameter is None:
            return None
        self._casts_seen = True
        if not self.is_unwritten(parameter):
            return None
        self.tally.keeps_parameter(storage.nbytes(), "cast of a parameter")
        return Recast(parameter, Layout.of(tensor))

    def _keep_parameter(self, tensor: Tensor, frame: Frame) -> Promise:
        for plain in (tensor,) if type(tensor) is Tensor and tensor.layout is torch.strided else plain_tensors(tensor):
            storage = plain.untyped_storage()
            if id(storage) not in frame.seen:  # it outlives the forward that uses it, so its id is its own that long
                frame.seen.add(id(storage))
                self.tally.keeps_parameter(storage.nbytes(), "parameter")
        return Kept(tensor)

    def _keep_small(self, tensor: Tensor, storage: UntypedStorage, station: Station, frame: Frame, scope: Scope) -> Promise:
        """Keep what is not worth a copy. There are many of these; all that they cost is a promise and an entry in their frame."""
        num_bytes = storage.nbytes()
        frame.left_alone.note(storage)
        self.tally.saved(scope.fqn, num_bytes, "small" if num_bytes else "empty")
        station.flow.saved_small(frame.num, num_bytes)
        return Kept(tensor, frame)

    def _keep_futile(self, tensor: Tensor, storage: UntypedStorage, frame: Frame, scope: Scope) -> Promise:
        frame.left_alone.note(storage)
        self.tally.saved(scope.fqn, storage.nbytes(), "futile to move")
        return Kept(tensor, frame)

    def _keep_whole(self, tensor: Tensor, reason: str) -> Promise:
        self.tally.saved(self._where()[1].fqn, size_in_memory(tensor), reason)
        return Kept(tensor)

    def _alive(self) -> list[nn.Module]:
        return [module for reference in self.modules if (module := reference()) is not None]

    def _on_accelerator(self) -> bool:
        """Say whether the managed modules live on an accelerator, so that tensors on the host are none of ours."""
        if self._accelerated is None:
            self._accelerated = kinds.any_on_accelerator(self._alive())
        return self._accelerated

    def _station(self, device: torch.device) -> Station:
        station = self.stations.get(device)
        if station is None:
            station = self.stations[device] = Station(device, self.activation_budget)
            for num in self.registry.frames:
                station.flow.open_frame(num)
        return station

    # Tidying up

    def tidy_up(self) -> None:
        """Learn what is gone, whatever happened; begin the counts anew once nothing of a shaken step is alive."""
        registry = self.registry
        with self._steady:
            registry.sweep()
            for station in self.stations.values():
                station.let_go()
        if self._steady.shaken and not registry.records and not registry.frames:
            for station in self.stations.values():
                station.start_anew()
            self._steady.shaken = False

    def _begin(self) -> None:
        """Do what is to be done first whenever autograd calls."""
        if self.registry.grave:
            self.registry.drain()
        for station in self.stations.values():
            if station.dropped or station.limbo:
                station.let_go()

    def _blob_is_gone(self, record: Record, storage: UntypedStorage | None) -> None:
        if record.slot is not None:
            assert record.tier is not None
            record.tier.free(record.slot)
        if storage is not None:
            record.station.dropped.append(storage)
        if not self._steady.shaken:
            record.station.flow.dropped(record.num)

    def _frame_is_over(self, num: int) -> None:
        if self._steady.shaken:
            return
        step_ends = not self.registry.frames
        for station in self.stations.values():
            if step_ends and not station.flow.is_refined:
                station.measure(self.tier, only_if_new=False)
            num_steps = station.flow.num_steps
            station.flow.close_frame(num)
            if step_ends:
                station.timeline.end_step(learned=station.flow.num_steps > num_steps)
