"""Saved tensors that are made again instead of being kept.

Covers: the promise for such a tensor, how long a value lives once it has been made ([Note: Made values]), and which storages that a later
operation may save can be made again.
Does not cover: how a value is made: by running a module again (recomputing.py), or from what its autograd node keeps (recipes.py).

[Note: Made values]
Several saved tensors may need one storage: a norm's output is saved by each projection that reads it. Making it for each of them would pay
as often. So a value is kept from when it is first needed until each promise that still exists has had it; then it is dropped, and a second
backward makes it again. Where the storage is still alive because somebody else has kept it, be it the original or the one made last, that
is handed back and nothing is made.

As elsewhere (saved.py, [Note: Ownership]), promises own everything: a promise its ``Made``, that its maker, and the maker the promises of
what it starts from. A maker has weak references to what it made.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.saved import Bring, View, empty, modified_in_place
from backhaul.tiers.streams import current_stream


class Maker(Protocol):
    """Makes one or more storages again."""

    def make(self, wanted: "Made", bring: Bring) -> None:
        """Make the storage of ``wanted`` and ``fill`` it, and with it others that come from the same work and are still ``wanted``.

        ``bring`` gets operands that have been moved onto the device. Runs on the stream of the backward pass, with ``wanted.lock`` held.
        """
        ...


class Made:
    """One storage that is made again when it is needed.

    Args:
        maker: makes it.
        storage: the original.
        lock: held while it is made and handed out; those that one maker makes together share it.
    """

    __slots__ = (
        "__weakref__", "always", "chains", "check", "counter", "depth", "home", "lock", "maker", "num_bytes", "promises", "storage",
        "stream", "version",
    )  # fmt: skip

    def __init__(self, maker: Maker, storage: UntypedStorage, lock: "threading.RLock | None" = None) -> None:
        self.maker = maker
        self.always = False  # made once though the original is still alive (recomputing.py, [Note: Ranks])
        self.depth = 1  # of makers that have to work one after the other, from what is kept
        self.chains = True  # cheap enough in memory that another maker may start from it (recomputing.py, [Note: Chains])
        self.lock = threading.RLock() if lock is None else lock
        self.home: Callable[[], UntypedStorage | None] = weakref.ref(storage)  # the original, or what was made last
        self.num_bytes = storage.nbytes()
        self.check: Callable[[UntypedStorage], None] | None = None  # raises where what has been made has other bytes
        self.storage: UntypedStorage | None = None  # made, and kept until everybody has had it
        self.counter: Tensor | None = None  # shares the version counter of what is handed out, once something has been made,
        self.version = 0  # and what it stood at
        self.stream: torch.Stream | None = None  # on which it was made
        self.promises: list[weakref.ref[Remade]] = []

    @property
    def wanted(self) -> bool:
        """Whether a promise exists that has not had the value, and there is none at hand."""
        if self.at_hand is not None:
            return False
        for each in self.promises:
            promise = each()
            if promise is not None and not promise.had:
                return True
        return False

    @property
    def at_hand(self) -> UntypedStorage | None:
        """The value, if it need not be made."""
        return None if self.always and self.counter is None else self.home()

    def fill(self, storage: UntypedStorage) -> None:
        """Take a storage with the same bytes."""
        assert storage.nbytes() == self.num_bytes
        self.storage = storage
        self.home = weakref.ref(storage)
        self.counter = torch.empty(0, dtype=torch.uint8, device=storage.device)  # any tensor of our own: what is handed out shares it
        self.version = 0
        self.stream = current_stream(storage.device)

    @property
    def _was_written(self) -> bool:
        """Whether a backward has written into what it was handed."""
        return self.counter is not None and _torch.version_of(self.counter) != self.version

    def hand_to(self, promise: "Remade", bring: Bring) -> UntypedStorage:
        """Return the storage, and drop it here if nobody else waits for it."""
        with self.lock:
            storage = self.at_hand
            if self._was_written:
                self.home, self.storage, storage = _nowhere, None, None
            if storage is None:
                promise.had = False
                self.maker.make(self, bring)
                storage = self.storage
                assert storage is not None
                if self.check is not None:
                    self.check(storage)
            if self.stream is not None and (current := current_stream(storage.device)) != self.stream:
                assert current is not None
                current.wait_stream(self.stream)
            promise.had = True
            waiting = [other for each in self.promises if (other := each()) is not None]
            for other in waiting:
                if not other.had:
                    return storage
            self.storage = None
            for other in waiting:
                other.had = False
            return storage


class Remade:
    """The promise for a tensor whose storage is made again."""

    __slots__ = ("__weakref__", "had", "made", "view")

    def __init__(self, made: Made, tensor: Tensor) -> None:
        self.made = made
        self.view = View(tensor)
        self.view.let_go()
        self.had = False
        made.promises.append(weakref.ref(self))

    def again(self) -> "Remade":
        """Return another promise for the same tensor: each counts for itself whether its holder has had the value."""
        other = Remade.__new__(Remade)
        other.made, other.view, other.had = self.made, self.view, False
        self.made.promises.append(weakref.ref(other))
        return other

    def restore(self, bring: Bring) -> Tensor:
        """Return the saved tensor, made again unless its storage is still there."""
        view = self.view
        if view.changed:
            raise modified_in_place(view.alias, view.version, view.layout.size)
        storage = self.made.hand_to(self, bring)
        # Whoever writes into what it is handed is seen: by the counter of what was made, or of the original.
        tensor = (view.alias if self.made.counter is None else self.made.counter).detach()
        tensor.data = view.layout.view(storage)
        return tensor


MOST_DEPTH = 8  # of makers that start from what another one makes: all that they make is there at once


class Outputs:
    """Storages that can be made again should an operation save them, as long as they are alive and nobody writes to them.

    It owns what would make them, so it must not outlive the forward pass.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[UntypedStorage], Tensor, int, Made]] = {}
        self._kept: list[object] = []
        self._saved: set[int] = set()  # ids of what makes those that have been saved

    def is_first(self, made: Made) -> bool:
        """Say, once for each, that a storage is saved for the first time."""
        if id(made) in self._saved:
            return False
        self._saved.add(id(made))
        self._kept.append(made)  # so that its id stays its own
        return True

    def keep(self, claim: object) -> None:
        """Hold a claim as long as this lives."""
        self._kept.append(claim)

    def note(self, tensor: Tensor, made: Made) -> None:
        """Add the storage of a tensor as it is now."""
        storage = tensor.untyped_storage()
        num, table = id(storage), weakref.ref(self)

        def forget(_: object) -> None:
            if (outputs := table()) is not None:
                outputs._entries.pop(num, None)

        self._entries[num] = (weakref.ref(storage, forget), counter_of(tensor), _torch.version_of(tensor), made)

    def find(self, tensor: Tensor) -> Made | None:
        """Return what makes the storage of ``tensor`` as it is now, if there is such a thing."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            return None
        home, counter, version, made = entry
        same = home() is storage and version == _torch.version_of(tensor) and _torch.share_version_counter(tensor, counter)
        return made if same else None


def _nowhere() -> None:
    """Stand for a weak reference to a storage that is gone."""


def counter_of(tensor: Tensor) -> Tensor:
    """Return an alias that shares the version counter, without the storage."""
    alias = tensor.detach()
    alias.data = empty(alias.dtype, alias.device)
    return alias
