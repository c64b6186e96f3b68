"""Pack and unpack: what happens to each saved tensor of a managed module.

Covers: which tensors may move, carrying out what flow.py decides, what is counted. One engine belongs to one handle.
Does not cover: when anything moves (flow.py), how (tiers/), what autograd is given to hold (saved.py), where the hooks are entered
(scopes.py).

[Note: Locking]
One reentrant lock an engine. Finalizers do not take it: they append to ``grave``, which the next pack or unpack drains.

[Note: Interrupts]
A KeyboardInterrupt may come between any two steps here and in flow.py, and leave their counts at odds. Then the engine is shaken: tensors
are kept, what has left is brought back when it is needed, flow.py is not asked. Once nothing of that step is alive the counts begin anew.
"""

import contextlib
import itertools
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.flow import CopyOut, Decision, Link, Release
from backhaul.reporting import Tally
from backhaul.saved import Blob, Dead, Kept, Layout, Parts, Promise, Recast, Saved, View
from backhaul.scopes import Frame, Here, Scope, Storages, plain_tensors
from backhaul.sizes import format_bytes
from backhaul.stations import Station
from backhaul.tiers.base import Slot, Tier, TierFull

SLICE = 16  # a tensor that covers less than 1/SLICE of its storage does not make the storage move
DUPLEX = 0.91  # of the sum of both directions' rates is left when they run at once: 100.5 of 55.2 + 55.5 GB/s on an H200, PCIe 5 x16
NOTHING = contextlib.nullcontext()


@dataclass
class Record:
    """What is known of a blob, which it outlives by a moment."""

    blob: "weakref.ref[Blob]"
    station: Station
    frame: int
    addresses: list[int]  # where the table has it
    fixed_bytes: int = 0  # counted as resident bytes that cannot move
    slot: Slot | None = None


@dataclass
class OpenFrame:
    """A frame that is not over."""

    frame: "weakref.ref[Frame]"
    blobs: set[int] = field(default_factory=set)  # those alive; a garbage collection may end them after their frame


class Engine:
    """The saved-tensor hooks of one handle."""

    def __init__(self, modules: Sequence[nn.Module], *, tier: Tier, activation_budget: int | None, min_bytes: int) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.tier = tier
        self.activation_budget = activation_budget
        self.min_bytes = min_bytes
        self.tally = Tally()
        self.lock = threading.RLock()
        self.here = Here()
        self.grave: deque[Any] = deque()
        self.stations: dict[torch.device, Station] = {}
        self.table: dict[int, weakref.ref[Blob]] = {}  # by id of the storage; a blob knows whether it is really its own
        self.records: dict[int, Record] = {}  # by number of the blob
        self.frames: dict[int, OpenFrame] = {}
        self.owned = Storages()
        self.futile: Counter[Any] = Counter()
        self.nums = itertools.count()
        self.closed = False
        self.shaken = False  # interrupted in the middle ([Note: Interrupts])
        self._warned: set[str] = set()
        self._accelerated: bool | None = None

    def __del__(self) -> None:
        # The hooks that autograd holds keep us alive as long as anything is saved. What is left here are slots whose blobs died last.
        for record in self.records.values():
            if record.slot is not None:
                self.tier.free(record.slot)

    # Entering and leaving

    def enter(self, module: nn.Module, fqn: str, *, is_root: bool) -> Scope | None:
        """Return the scope of a module that is about to run: of a new frame, or of the one it runs in."""
        here = self.here
        if here.paused or not torch.is_grad_enabled() or _torch.inside_backward():
            return None
        if here.scope is not None:
            return Scope(here.scope.frame, fqn, module)
        return self.begin_frame(fqn, module) if is_root and module.training else None

    def begin_frame(self, fqn: str, module: nn.Module | None) -> Scope | None:
        """Open a frame, and a step with it where none is open. Return ``None`` where the hooks have to stay away."""
        name = fqn or "the managed module"
        if _torch.inside_checkpoint():
            self.passed("it runs inside a checkpointed region, where hooks would switch recomputation off; manage what is around it")
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name!r} is being captured into a CUDA graph, whose replay would read tensors that have moved. "
                "Capture within handle.paused(), or remove the handle first"
            )
        refused = _torch.saved_tensors_hooks_refused()
        if refused is not None:
            where = "a torch.func transform, which allows no saved-tensor hooks" if _torch.inside_functional_transform() else refused
            raise RuntimeError(f"{name!r} was called inside {where}; run it within handle.paused()")
        with self.lock, self._steady():
            self.drain()
            if not self.frames:
                self.owned.refresh(module for module in (reference() for reference in self.modules) if module is not None)
                self._check_budget()
            self._measure()
            frame = Frame(next(self.nums), self.grave)
            self.frames[frame.num] = OpenFrame(weakref.ref(frame))
            for station in self.stations.values():
                station.flow.open_frame(frame.num)
            return Scope(frame, fqn, module)

    @contextlib.contextmanager
    def _steady(self) -> Iterator[None]:
        """Do without flow.py from now on where this is interrupted in the middle ([Note: Interrupts])."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.shaken = True
            raise

    def passed(self, obstacle: str = "") -> None:
        """Note that a managed module's forward has ended; warn once when three have moved nothing."""
        tally = self.tally
        tally.num_passes += 1
        if tally.num_passes >= 3 and not tally.offloaded_bytes:
            reason = obstacle or tally.why_nothing(self.min_bytes)
            self.warn_once("nothing", f"backhaul offloaded 0 of {format_bytes(tally.saved_bytes)} in three passes: {reason}")

    def warn_once(self, topic: str, message: str) -> None:
        """Warn, unless this handle has warned of the same topic before."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=2)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Make a frame of code outside the managed modules."""
        here = self.here
        inactive = self.closed or here.paused or here.scope is not None or not torch.is_grad_enabled() or _torch.inside_backward()
        scope = None if inactive else self.begin_frame("region", None)
        if scope is None:
            yield
            return
        try:
            here.scope = scope
            _torch.push_saved_tensors_hooks(self.pack, self.unpack)
            yield
        finally:
            here.scope = None
            _torch.pop_saved_tensors_hooks()
        self.passed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take our hooks off this thread for a while, if they are the innermost, and run managed modules untouched."""
        innermost = _torch.top_saved_tensors_hooks()
        ours = innermost if innermost is not None and getattr(innermost[0], "__self__", None) is self else None
        self.here.paused += 1
        if ours is not None:
            _torch.pop_saved_tensors_hooks()
        try:
            yield
        finally:
            if ours is not None:
                _torch.push_saved_tensors_hooks(*ours)
            self.here.paused -= 1

    # The hooks

    def pack(self, tensor: Tensor) -> Promise:
        """Return the promise that autograd holds instead of ``tensor``."""
        with self.lock:
            try:
                self.drain()
                return self._promise(tensor)
            except Exception:
                raise
            except BaseException:
                self.shaken = True
                raise

    def unpack(self, promise: Promise) -> Tensor:
        """Give the tensor of a promise back."""
        if type(promise) is Kept:
            return promise.restore(self._bring)
        with self.lock:
            try:
                self.drain()
                return promise.restore(self._bring)
            except Exception:
                raise
            except BaseException:
                self.shaken = True
                raise

    # Pack

    def _promise(self, tensor: Tensor) -> Promise:
        if self.closed or self.shaken:
            return Kept(tensor)
        kind = type(tensor)
        if isinstance(tensor, nn.Parameter) or isinstance(_torch.view_base(tensor), nn.Parameter):
            return self._keep_parameter(tensor, self._where()[0])
        if kind is not Tensor:
            tensor = _torch.settle_collective(tensor)
            if _torch.is_wrapper_subclass(tensor):
                return self._take_apart(tensor)
            if type(tensor) is not Tensor:
                return self._keep_whole(tensor, f"subclass {kind.__name__}")
        if tensor.layout is not torch.strided:
            return self._keep_whole(tensor, str(tensor.layout).removeprefix("torch."))
        if tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
            return self._keep_whole(tensor, "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "meta")
        if _torch.is_functional_tensor(tensor):
            return self._keep_whole(tensor, "torch.func")
        return self._promise_dense(tensor)

    def _promise_dense(self, tensor: Tensor) -> Promise:
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        frame, scope = self._where()
        if storage in self.owned:
            return self._keep_parameter(tensor, frame)
        if tensor.device.type == "cpu" and self._on_accelerator():
            return self._keep_whole(tensor, "on the host")
        blob = self._lookup(storage)
        if blob is not None and not blob.changed:
            return self._another_view(blob, tensor, storage, frame, scope)
        reason = "empty" if not num_bytes else "small" if num_bytes < self.min_bytes else ""
        if not reason and scope.module is not None and self._gathered(scope, storage):
            return self._keep_parameter(tensor, frame)
        if not reason and (recast := self._recast(tensor, storage)) is not None:
            return recast
        if not reason and tensor.numel() * tensor.element_size() * SLICE < num_bytes:
            reason = "slice"
        station = self._station(tensor.device)
        blob = Blob(next(self.nums), storage, frame, scope.next_key(), self.tier, self.grave)
        blob.reason = reason
        reference = weakref.ref(blob)
        self.table[id(storage)] = reference
        self.records[blob.num] = Record(reference, station, frame.num, [id(storage)])
        self.frames[frame.num].blobs.add(blob.num)
        self.tally.saved(blob.key.fqn, num_bytes, reason)
        if reason in ("small", "empty"):
            self._fix(blob)
            station.flow.saved(blob.num, frame=frame.num, key=blob.key, num_bytes=num_bytes, movable=False)
            return Kept(tensor, blob)
        view = View(tensor)
        blob.views.append(view)
        blob.stream = station.current_stream()
        if reason:
            self._fix(blob)
            station.flow.saved(blob.num, frame=frame.num, key=blob.key, num_bytes=num_bytes, movable=False)
        else:
            self._offer(station, blob, frame)
        return Saved(blob, view)

    def _fix(self, blob: Blob) -> None:
        """Count a blob as one that cannot move."""
        record = self.records[blob.num]
        record.fixed_bytes = blob.num_bytes
        record.station.fix(blob.num_bytes)

    def _offer(self, station: Station, blob: Blob, frame: Frame) -> None:
        decisions = station.flow.saved(blob.num, frame=frame.num, key=blob.key, num_bytes=blob.num_bytes, movable=True)
        station.mark()
        self._carry_out(station, decisions)

    def _another_view(self, blob: Blob, tensor: Tensor, storage: UntypedStorage, frame: Frame, scope: Scope) -> Promise:
        if blob.frame is not frame and blob.num not in frame.seen:
            frame.seen.add(blob.num)
            self.tally.saved(scope.fqn, blob.num_bytes, "shared with an earlier pass")
        if blob.reason in ("small", "empty"):
            return Kept(tensor, blob)
        record = self.records[blob.num]
        station = record.station
        view = View(tensor)
        blob.views.append(view)
        if blob.released:  # somebody has kept it alive and saves it again: the tier has it already
            view.let_go()
        if blob.reason == "slice" and tensor.numel() * tensor.element_size() * SLICE >= blob.num_bytes:
            self.tally.keeps_instead(blob.num_bytes, "", instead_of=blob.reason)
            blob.reason = ""
            record.fixed_bytes = 0
            station.fix(-blob.num_bytes)
            station.flow.dropped(blob.num)
            self._offer(station, blob, blob.frame)
        return Saved(blob, view)

    def _lookup(self, storage: UntypedStorage) -> Blob | None:
        reference = self.table.get(id(storage))
        blob = reference() if reference is not None else None
        return blob if blob is not None and blob.home() is storage else None

    def _where(self) -> tuple[Frame, Scope]:
        """Return this thread's frame and scope. A thread that autograd gave the hooks of another has none; it joins the newest frame."""
        scope = self.here.scope
        if scope is not None:
            return scope.frame, scope
        for opened in reversed(self.frames.values()):
            if (frame := opened.frame()) is not None:
                return frame, Scope(frame, "backward", None)
        scope = self.begin_frame("backward", None)
        assert scope is not None  # the hooks are active
        return scope.frame, scope

    def _gathered(self, scope: Scope, storage: UntypedStorage) -> bool:
        """Say whether the storage is one that the running module's parameters have just now, as FSDP gathered them."""
        module, scope.module = scope.module, None  # once a scope is enough
        assert module is not None
        self.owned.add(itertools.chain(module.parameters(), module.buffers()))
        return storage in self.owned

    def _recast(self, tensor: Tensor, storage: UntypedStorage) -> Recast | None:
        """Return the promise for a copy that autocast (or the user) made of a parameter in another dtype, if ``tensor`` is one."""
        whole = _torch.view_base(tensor)
        whole = tensor if whole is None else whole
        made_by = whole.grad_fn
        if made_by is None or made_by.name() != "ToCopyBackward0" or _torch.version_of(whole):  # nor written since
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
        self.tally.keeps_parameter(storage.nbytes(), "cast of a parameter")
        return Recast(parameter, Layout.of(tensor))

    def _keep_parameter(self, tensor: Tensor, frame: Frame) -> Promise:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if id(storage) not in frame.seen:  # it outlives the forward that uses it, so its id is its own that long
                frame.seen.add(id(storage))
                self.tally.keeps_parameter(storage.nbytes(), "parameter")
        return Kept(tensor)

    def _keep_whole(self, tensor: Tensor, reason: str) -> Promise:
        _, scope = self._where()
        self.tally.saved(scope.fqn, sum(part.numel() * part.element_size() for part in _dense_parts(tensor)), reason)
        return Kept(tensor)

    def _take_apart(self, tensor: Tensor) -> Promise:
        bare = tensor.detach()
        names, context = bare.__tensor_flatten__()  # type: ignore[attr-defined]
        # A jagged size is known by the very object that holds the offsets, so that object must come back.
        jagged = any(not isinstance(length, int) for length in tensor.size())
        promises: dict[str, Promise] = {}
        plain: dict[str, Any] = {}
        for name in names:
            part = getattr(bare, name)
            if isinstance(part, Tensor) and not (jagged and not part.is_floating_point() and not part.is_complex()):
                promises[name] = self._promise(part)
            else:
                plain[name] = getattr(tensor, name)
        return Parts(tensor, promises, plain, context)

    def _on_accelerator(self) -> bool:
        """Say whether the managed modules live on an accelerator, so that tensors on the host are none of ours."""
        if self._accelerated is None:
            tensors = (
                t for reference in self.modules if (module := reference()) is not None for t in (*module.parameters(), *module.buffers())
            )
            self._accelerated = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
        return self._accelerated

    def _station(self, device: torch.device) -> Station:
        station = self.stations.get(device)
        if station is None:
            station = self.stations[device] = Station(device, self.activation_budget)
            for num in self.frames:
                station.flow.open_frame(num)
        return station

    # Unpack

    def _bring(self, blob: Blob) -> None:
        """Have the blob on the device and order the current stream after its arrival."""
        if blob.reason:
            return
        station = self.records[blob.num].station
        was_released = blob.released
        if not self.shaken:
            decisions = station.flow.needed(blob.num)
            station.mark()
            self._carry_out(station, decisions)
        if blob.released:
            self._reload(station, blob)
        if was_released and blob.incoming is not None:
            self.tally.num_demand_reloads += 1
        if blob.incoming is not None:
            try:
                station.waits.measure(blob.incoming.wait)
            except BaseException:
                blob.release()  # what it was to hold is not there; the next need asks the tier again
                raise
            station.current_stream()
            blob.outlives = len(station.streams) > 1
            if not blob.outlives:
                blob.incoming = None

    # Carrying out decisions

    def _carry_out(self, station: Station, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            record = self.records.get(decision.blob)
            blob = record.blob() if record is not None else None
            if blob is None or blob.reason:
                continue
            if isinstance(decision, CopyOut):
                self._copy_out(station, blob)
            elif isinstance(decision, Release):
                self._release(station, blob)
            else:
                self._reload(station, blob)

    def _copy_out(self, station: Station, blob: Blob) -> None:
        if blob.slot is not None or blob.released:
            return
        if blob.changed:
            self._keep(station, blob, "written in place")
            return
        try:
            with _on(blob.stream):
                blob.slot = self.records[blob.num].slot = self.tier.store(blob.source())
        except (TierFull, OSError) as error:
            self._tier_failed(station, blob, error)
            return
        self.tally.offloads(blob.key.fqn, blob.num_bytes)

    def _release(self, station: Station, blob: Blob) -> None:
        if blob.released:
            return
        self._copy_out(station, blob)
        slot = blob.slot
        if slot is None:
            return
        if blob.incoming is not None:  # it has come back and nobody has used it; who needs it next meets the error, if there is one
            with contextlib.suppress(OSError):
                station.wait_to_drop(blob.incoming, blob.source())
            blob.release()
            return
        try:
            station.wait_to_drop(slot.stored, blob.source())
        except BaseException as error:  # the copy failed: whatever it was, the tensor is still here and the slot is of no use
            blob.slot = self.records[blob.num].slot = None
            self.tier.free(slot)
            _ = self.tier.used_bytes  # takes the slot back now: it holds the error, whose traceback may hold the graph
            self.tally.takes_back(blob.key.fqn, blob.num_bytes)
            if not isinstance(error, OSError):
                self._keep(station, blob, "tier failed")
                raise
            self._tier_failed(station, blob, error)
            return
        blob.release()

    def _reload(self, station: Station, blob: Blob) -> None:
        if not blob.released:
            return
        survivor = blob.survivor
        if survivor is not None:
            blob.take_back(survivor)
            self._was_futile(station, blob)
            return
        assert blob.slot is not None
        with _on(blob.stream):
            target = torch.empty(blob.num_bytes, dtype=torch.uint8, device=station.device)
            incoming = self.tier.load(blob.slot, target)
        storage = target.untyped_storage()
        blob.move_to(storage, incoming)
        record = self.records[blob.num]
        record.addresses.append(id(storage))
        self.table[id(storage)] = record.blob
        self.tally.reloaded_bytes += blob.num_bytes

    def _was_futile(self, station: Station, blob: Blob) -> None:
        """The storage is still alive: copying it freed nothing."""
        station.flow.readopted(blob.num)
        self.tally.futile_bytes += blob.num_bytes
        self.futile[blob.key] += 1
        if self.futile[blob.key] == 2:
            station.flow.leave(blob.key)

    def _keep(self, station: Station, blob: Blob, reason: str) -> None:
        blob.reason = reason
        self._fix(blob)
        station.flow.keep(blob.num)
        self.tally.keeps_instead(blob.num_bytes, reason)

    def _tier_failed(self, station: Station, blob: Blob, error: Exception) -> None:
        full = isinstance(error, TierFull)
        self._keep(station, blob, "tier full" if full else "tier failed")
        self.warn_once(
            "tier",
            f"the {self.tier.name} tier {'is full' if full else 'failed'} ({error}); tensors that it cannot take stay on the device. "
            f"First seen for {format_bytes(blob.num_bytes)} saved in {blob.key.fqn!r}",
        )

    # Tidying up

    def drain(self) -> None:
        """Tidy up after blobs and frames that died since the last call."""
        grave = self.grave
        while grave:
            item = grave[0]  # taken out afterwards: burying twice does no harm, an interrupt before it would
            if isinstance(item, Dead):
                self._bury(item)
            else:
                self._end_frame(item)
            grave.popleft()
        if self.shaken:
            self._sweep()
            if not self.records and not self.frames:
                for station in self.stations.values():
                    station.start_anew()
                self.shaken = False

    def _sweep(self) -> None:
        """Tidy up after what is gone without a word: an interrupt may cut a finalizer short."""
        for num, record in list(self.records.items()):
            if record.blob() is None:
                self._bury(Dead(num, None))
        for num in list(self.frames):
            self._end_frame(num)

    def _bury(self, dead: Dead) -> None:
        record = self.records.pop(dead.num, None)
        if record is None:
            return
        for address in record.addresses:
            if self.table.get(address) is record.blob:
                del self.table[address]
        if record.slot is not None:
            self.tier.free(record.slot)
        if dead.storage is not None:
            record.station.hold(dead.storage)
        if not self.shaken:
            record.station.fix(-record.fixed_bytes)
            record.station.flow.dropped(dead.num)
        opened = self.frames.get(record.frame)
        if opened is not None:
            opened.blobs.discard(dead.num)
            self._end_frame(record.frame)

    def _end_frame(self, num: int) -> None:
        """Close a frame if nothing of it is alive."""
        opened = self.frames.get(num)
        if opened is None or opened.blobs or opened.frame() is not None:
            return
        del self.frames[num]
        if self.shaken:
            return
        if not self.frames:
            self._measure()
        for station in self.stations.values():
            num_steps = station.flow.num_steps
            station.flow.close_frame(num)
            if not self.frames:
                station.timeline.end_step(learned=station.flow.num_steps > num_steps)

    def _measure(self) -> None:
        """Tell flow.py how fast the tier is, and when the device reached each event of the last step, as far as that is known."""
        rates = self.tier.rates_gbps
        for station in self.stations.values():
            if rates is not None:
                station.flow.link = Link(d2h_gbps=rates[0], h2d_gbps=rates[1], both_gbps=DUPLEX * sum(rates))
            times = station.timeline.finished()
            if times is not None:
                station.flow.times(times)

    def _check_budget(self) -> None:
        """Refuse a budget that cannot be met, once a step has shown what has to stay."""
        budget = self.activation_budget
        for station in self.stations.values():
            fixed = station.peak_fixed_bytes
            if budget and fixed > budget:
                kept = self.tally.reasons()
                raise ValueError(
                    f"activation_budget={format_bytes(budget)} is below the {format_bytes(fixed)} of saved tensors on {station.device} "
                    f"that cannot be moved ({kept}); give that at least, lower min_bytes, or use 0 to move all that can move"
                )


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return what a tensor consists of in memory."""
    if tensor.layout is torch.sparse_coo:
        bare = tensor.detach()
        return bare._indices(), bare._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values().detach()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values().detach()
    return (tensor,)


def _on(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return NOTHING if stream is None else stream
