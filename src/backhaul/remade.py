"""Saved tensors that are made again instead of being kept.

Covers: the promise for such a tensor, and how long a value lives once it has been made ([Note: Made values]).
Does not cover: how it is made: by running a module again (recomputing.py), or from what its autograd node keeps (recipes.py).

[Note: Made values]
Several saved tensors may need one storage: a norm's output is saved by each projection that reads it. Making it for each of them would pay
as often. So a value is kept from when it is first needed until each promise that still exists has had it; then it is dropped, and a second
backward makes it again. Somebody may also have kept the original storage alive; then that is handed back and nothing is made.

As elsewhere (saved.py, [Note: Ownership]), promises own everything: a promise its ``Made``, that its maker, and the maker the promises of
what it starts from.
"""

import weakref
from typing import Protocol

from torch import Tensor
from torch.storage import UntypedStorage

from backhaul.saved import Bring, View, modified_in_place


class Maker(Protocol):
    """Makes one or more storages again."""

    def make(self, wanted: "Made", bring: Bring) -> None:
        """Make the storage of ``wanted`` and ``fill`` it, and with it others that come from the same work and are still ``wanted``.

        ``bring`` gets operands that have been moved onto the device. Runs on the stream of the backward pass.
        """
        ...


class Made:
    """One storage that is made again when it is needed."""

    __slots__ = ("__weakref__", "home", "maker", "num_bytes", "promises", "storage")

    def __init__(self, maker: Maker, storage: UntypedStorage) -> None:
        self.maker = maker
        self.home = weakref.ref(storage)  # the original
        self.num_bytes = storage.nbytes()
        self.storage: UntypedStorage | None = None  # made, and kept until everybody has had it
        self.promises: list[weakref.ref[Remade]] = []

    @property
    def wanted(self) -> bool:
        """Whether a promise exists that has not had the value, and there is none at hand."""
        return self.storage is None and any((promise := each()) is not None and not promise.had for each in self.promises)

    def fill(self, storage: UntypedStorage) -> None:
        """Take a storage with the same bytes."""
        assert storage.nbytes() == self.num_bytes
        self.storage = storage

    def hand_to(self, promise: "Remade", bring: Bring) -> UntypedStorage:
        """Return the storage, and drop it here if nobody else waits for it."""
        storage = self.storage
        if storage is None:
            self.maker.make(self, bring)
            storage = self.storage
            assert storage is not None
        promise.had = True
        waiting = [other for each in self.promises if (other := each()) is not None]
        if all(other.had for other in waiting):
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

    def restore(self, bring: Bring) -> Tensor:
        """Return the saved tensor, made again unless the original is still there."""
        view, made = self.view, self.made
        if view.changed:
            raise modified_in_place(view.alias, view.version)
        original = made.home()
        return view.layout.view(original if original is not None else made.hand_to(self, bring))
