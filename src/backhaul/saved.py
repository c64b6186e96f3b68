"""What autograd holds instead of a saved tensor, and the storage behind it.

Covers: the promises that ``pack`` returns and how each gives its value back; identity, views and versions of a storage.
Does not cover: when bytes move (flow.py), or who starts the copies (engine.py).

[Note: Ownership]
Autograd holds a promise, a ``Saved`` holds its ``Blob``, a ``Blob`` holds the device memory (through its views' aliases, or the buffer it
was reloaded into), its slot in a tier, and its frame. Nobody else holds any of them for longer than a call: the engine has weak references,
a lane holds both ends of a copy until it has ended. So whatever autograd drops is gone at once. ``__del__`` runs on any thread and at any
moment, so it only appends to ``grave``, and hands the slot to ``Tier.free``, which does no more.

[Note: Versions]
A detached alias shares the version counter of the tensor it was made from. With hooks active autograd no longer compares versions; the
promises do, and raise the error that autograd would have raised. On release an alias gives up the storage and keeps the counter (assigning
``.data`` replaces the one and not the other), so that a storage found alive later can still be told from one that was written meanwhile.

[Note: Late views]
A storage is copied as it was when the copy began. A tensor that is saved later shares that copy only if it shares the version counter that
says that nothing was written in between. Outputs of ``unsafe_chunk``, and ``x.data``, have counters of their own: such a tensor is another
blob, and the storage is copied again.

An alias is never handed out where it may be released: whoever got it would see it emptied.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.scopes import Frame, Key
from backhaul.tiers.base import Slot, Tier, Transfer


class Layout(NamedTuple):
    """How a tensor looks at its storage. ``stride`` and ``offset`` count elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        look = (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg())
        return tuple.__new__(cls, look)

    def view(self, storage: UntypedStorage) -> Tensor:
        """Return a tensor that looks at ``storage`` in this way."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return _torch.neg_view(tensor) if self.is_neg else tensor


@functools.lru_cache(maxsize=64)
def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of nothing, the same one each time: to make it costs as much as the rest of a promise."""
    return torch.empty(0, dtype=dtype, device=device)


def flat(storage: UntypedStorage) -> Tensor:
    """Return all bytes of ``storage`` as a 1-D uint8 tensor."""
    return Layout(torch.uint8, torch.Size((storage.nbytes(),)), (1,), 0, False, False).view(storage)


def modified_in_place(tensor: Tensor, expected: int, size: Sequence[int] | None = None) -> RuntimeError:
    """Return the error that autograd raises for a saved tensor that was written in place; ``size`` where ``tensor`` is bare by now."""
    found = _torch.version_of(tensor)
    kind = tensor.type() if type(tensor) is Tensor else type(tensor).__name__
    shape = list(tensor.shape if size is None else size)
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {shape}] is at version {found}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


class View:
    """One saved tensor of a blob: an alias that shares its version counter, and how it looks at the storage."""

    __slots__ = ("alias", "layout", "spoiled", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = _torch.version_of(tensor)
        self.layout = Layout.of(tensor)
        self.spoiled = False  # written in place before the copy in the tier was known to be good

    @property
    def changed(self) -> bool:
        """Whether the tensor was written in place since it was saved, or since its storage was replaced."""
        return self.spoiled or _torch.version_of(self.alias) != self.version

    def let_go(self) -> None:
        """Give up the storage, keep the version counter."""
        bare = empty(self.alias.dtype, self.alias.device)
        self.alias.data = bare.conj() if self.layout.is_conj else bare

    def take_back(self, storage: UntypedStorage) -> None:
        """Look at the storage that was given up."""
        self.alias.data = self.layout.view(storage)

    def move_to(self, root: Tensor) -> None:
        """Look at another storage with the same bytes, all of whose aliases share ``root``'s version counter."""
        self.alias = root.detach()
        self.alias.data = self.layout.view(root.untyped_storage())
        self.version = _torch.version_of(root)


class Dead(NamedTuple):
    """Says that a blob is gone."""

    num: int
    storage: UntypedStorage | None  # kept only where more than one stream may still read it


class Blob:
    """One storage that at least one saved tensor needs, wherever its bytes are."""

    __slots__ = (
        "__weakref__", "frame", "grave", "guard", "home", "incoming", "key", "num", "num_bytes", "num_savers", "outlives",
        "reason", "released", "slot", "stored", "stream", "tier", "views",
    )  # fmt: skip

    def __init__(self, num: int, storage: UntypedStorage, frame: Frame, key: Key, tier: Tier, grave: "deque[Dead | int]") -> None:
        self.num = num  # with the next three, what __del__ needs, which runs also where an interrupt cuts this short
        self.slot: Slot | None = None  # a copy in a tier, made or under way
        self.outlives = False  # more than one compute stream may read the storage when we die
        self.grave = grave
        self.guard: AbstractContextManager[Any] = nullcontext()  # held while the blob is brought and handed out
        self.frame = frame
        self.key = key
        self.tier = tier
        self.num_bytes = storage.nbytes()
        self.home = weakref.ref(storage)  # what the views look at now, or looked at last
        self.views: list[View] = []
        self.num_savers = 0  # operations that have saved a view of it, the same or others
        self.reason = ""  # why it stays on the device, if it does
        self.stream: torch.Stream | None = None  # the compute stream at pack
        self.stored = False  # the copy is known to be good
        self.released = False  # the device copy is gone
        self.incoming: Transfer | None = None  # the copy that fills the storage

    @property
    def changed(self) -> bool:
        """Whether the storage was written in place since any of its tensors was saved."""
        return any(view.changed for view in self.views)

    def takes(self, view: View) -> bool:
        """Say whether another tensor of the storage can share this blob's copy ([Note: Late views])."""
        return self.slot is None or any(_torch.share_version_counter(known.alias, view.alias) for known in self.views)

    def add(self, view: View) -> View:
        """Return the view that there is of a tensor saved before, or else this one, which counts from now on."""
        self.num_savers += 1
        for known in self.views:
            same = known.layout == view.layout and known.version == view.version
            if same and not known.spoiled and _torch.share_version_counter(known.alias, view.alias):
                return known
        self.views.append(view)
        return view

    @property
    def survivor(self) -> UntypedStorage | None:
        """The storage that was given up, if somebody else has kept it alive and nobody has written to it."""
        storage = self.home()
        return storage if storage is not None and not self.changed else None

    def source(self) -> Tensor:
        """Return all bytes as they lie on the device."""
        storage = self.home()
        assert storage is not None
        return flat(storage)

    def release(self) -> None:
        """Drop the device copy. Copies that still touch it must be ordered before whatever gets the memory next."""
        for view in self.views:
            # Writes seen by now may have met the copy under way. Later ones do not matter: the packed value wins.
            view.spoiled = view.spoiled or (view.changed and not self.stored)
            view.let_go()
        self.stored = self.released = True
        self.incoming = None

    def take_back(self, storage: UntypedStorage) -> None:
        """Take the storage that was given up as the device copy."""
        for view in self.views:
            view.take_back(storage)
        self.released = False

    def move_to(self, storage: UntypedStorage, incoming: Transfer) -> None:
        """Take a new storage, which ``incoming`` fills, as the device copy."""
        root = flat(storage)
        for view in self.views:
            view.move_to(root)
        self.home = weakref.ref(storage)
        self.incoming = incoming
        self.released = False

    def __del__(self) -> None:
        if not hasattr(self, "grave"):  # an interrupt came before anything was
            return
        if self.slot is not None:
            self.tier.free(self.slot)
        self.grave.append(Dead(self.num, self.home() if self.outlives and not self.released else None))


Bring = Callable[[Blob], None]


class Promise(Protocol):
    """Stands for one saved tensor and gives it back, any number of times."""

    def restore(self, bring: Bring) -> Tensor:
        """Return the saved tensor, detached: same values, size, stride, offset, dtype, device. ``bring`` gets a blob onto the device."""
        ...


class Saved:
    """The promise for a tensor whose blob may move."""

    __slots__ = ("blob", "view")

    def __init__(self, blob: Blob, view: View) -> None:
        self.blob = blob
        self.view = view

    def restore(self, bring: Bring) -> Tensor:
        """Bring the blob and return the view of it."""
        view, blob = self.view, self.blob
        with blob.guard:
            bring(blob)
            if view.changed and blob.stored and not view.spoiled:  # the tier has it as it was saved
                blob.release()
                bring(blob)
            if view.changed:
                raise modified_in_place(view.alias, view.version, view.layout.size)
            return view.alias.detach()  # a fresh one ([Note: Versions])


class Kept:
    """The promise for a tensor that stays where it is. It keeps its frame open, if its bytes count there."""

    __slots__ = ("alias", "frame", "version")

    def __init__(self, tensor: Tensor, frame: Frame | None = None) -> None:
        # A parameter itself, as autograd would: it has no graph to make a cycle with, and whoever swaps its data wants the old data gone.
        self.alias = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        self.version = _torch.version_of(tensor)
        self.frame = frame

    def restore(self, bring: Bring) -> Tensor:
        if _torch.version_of(self.alias) != self.version:
            raise modified_in_place(self.alias, self.version)
        return self.alias


class Recast:
    """The promise for autocast's copy of a parameter: the cast is made again."""

    __slots__ = ("layout", "source", "version")

    def __init__(self, parameter: Tensor, layout: Layout) -> None:
        self.source = parameter.detach()
        self.version = _torch.version_of(parameter)
        self.layout = layout

    def restore(self, bring: Bring) -> Tensor:
        if _torch.version_of(self.source) != self.version:
            raise RuntimeError(
                f"{modified_in_place(self.source, self.version)} What was saved is a cast of this parameter, which is made again from the "
                "parameter; do not write to it between forward and backward, or run this part within handle.paused()."
            )
        return self.layout.view(self.source.to(self.layout.dtype).untyped_storage())


class Parts:
    """The promise for a wrapper subclass (``DTensor``, jagged tensors, ...): its inner tensors' promises and how to put them together.

    The wrapper has a version counter of its own, which a detached shell of it shares.
    """

    __slots__ = ("context", "kind", "outer", "parts", "plain", "shell", "size", "stride", "version")

    def __init__(self, tensor: Tensor, parts: dict[str, Promise], plain: dict[str, Any], context: Any) -> None:
        self.kind: Any = type(tensor)
        self.parts = parts
        self.plain = plain  # what else it flattens to: a DTensor's mesh, the offsets that identify a jagged size
        self.context = context
        self.size, self.stride = tensor.size(), tensor.stride()
        self.shell = _empty_shell(tensor.detach())
        self.outer = weakref.ref(tensor) if self.shell is None else None
        self.version = _torch.version_of(tensor)

    def restore(self, bring: Bring) -> Tensor:
        """Restore the inner tensors and build the wrapper around them."""
        watched = self.shell if self.outer is None else self.outer()
        if watched is not None and _torch.version_of(watched) != self.version:
            raise modified_in_place(watched, self.version)
        inner = {**self.plain, **{name: promise.restore(bring) for name, promise in self.parts.items()}}
        tensor: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return tensor


def _empty_shell(wrapper: Any) -> Any:
    """Let a detached wrapper go of the tensors inside it, and return it; ``None`` where it does not let them go."""
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):
            try:
                setattr(wrapper, name, torch.empty(0, dtype=inner.dtype, device=inner.device))
            except AttributeError:  # a read-only property
                return None
    return wrapper
