"""What an engine adds to claims: parameters as operands of recipes, and tensors of which only the shape turns out to be needed.

Covers: ``OwnClaims`` ([Note: Given]), ``Shapes`` ([Note: Hopes]).
Does not cover: claims as such (claims.py).

[Note: Given]
A norm that is written out casts its input to twice the width and saves the cast. If nobody else saves the input, it can be held instead,
and the cast be made again, which halves what is kept. But a program may write to that input later on, as ``x += f(norm(x))`` does; plain
autograd allows it, since only the cast was saved. So an argument is watched first, and held from when a frame is over in which nobody has
written to it.

[Note: Hopes]
That a node needs no more of a tensor than its shape shows when the module that ran it returns (claims.py, [Note: Only the shape]). By then
a copy may be under way for nothing. So what has turned out that way once is not moved the next time, in the hope that it will again; where
it does not, it is offered to move after all.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.claims import Claim, Claims, shape_only
from backhaul.moving import Mover
from backhaul.parts import node_of
from backhaul.remade import counter_of
from backhaul.saved import Blob, Promise, Saved, flat
from backhaul.scopes import Frame, Here, Key, Scope
from backhaul.watching import fingerprint

TRIES = 3  # passes through a module in which nothing was found, after which it is left alone
HOPE = "maybe only its shape"


class OwnClaims(Claims):
    """Claims of an engine, which knows the parameters."""

    def __init__(self, is_unwritten: Callable[[Tensor], bool], here: Here, promise: Callable[[Tensor], Promise]) -> None:
        self._is_unwritten = is_unwritten
        self._here = here
        self._promise = promise
        self._watched: dict[Any, Watched] = {}  # by module, call and argument

    def is_steady(self, kept: Tensor) -> bool:
        """Say whether a kept tensor is certain to be there in any part of backward. Weights that FSDP gathers are not."""
        # As in `is_parameter`: a parameter is never a mere Tensor.
        return type(kept) is Tensor or not isinstance(kept, nn.Parameter) or self._is_unwritten(kept)

    def is_unwritten(self, leaf: Tensor, user: Node) -> bool:
        """Say whether a leaf is certain to be as it was when ``user`` ran."""
        return self._is_unwritten(leaf) if isinstance(leaf, nn.Parameter) else super().is_unwritten(leaf, user)

    def given(self, node: Node, output_nr: int, *, at_most: int) -> Tensor | None:
        """Return what a node produced, if the module at work has been called with it, and nobody writes to it ([Note: Given])."""
        scope = self._here.scope
        if scope is None:
            return None
        for place, tensor in enumerate(scope.given):
            if tensor.output_nr == output_nr and node_of(tensor) is node and not _torch.version_of(tensor):
                if tensor.untyped_storage().nbytes() > at_most:
                    return None
                key = scope.fqn, scope.call, place
                watched = self._watched.get(key)
                if watched is None or (watched.frame() is None and watched.was_written):
                    watched = self._watched[key] = Watched(tensor, scope.frame)
                return tensor if watched.frame() is None else None
        return None

    def hold(self, tensor: Tensor) -> Promise | None:
        """Return a promise for what was given. The rest of the forward pass knows of it, too."""
        claim = self._promise(tensor)
        if self._here.outputs is not None:
            self._here.outputs.keep(claim)
        return self.of_kept(claim)


class Watched:
    """An argument of a module that might be held instead of its cast: has it been written until its frame was over?"""

    __slots__ = ("counter", "frame")

    def __init__(self, tensor: Tensor, frame: Frame) -> None:
        self.counter = counter_of(tensor)
        self.frame = weakref.ref(frame)

    @property
    def was_written(self) -> bool:
        return _torch.version_of(self.counter) > 0


def same_as(storage: UntypedStorage, fqn: str) -> Callable[[UntypedStorage], None]:
    """Return a check that raises where a storage has not the bytes that this one has now."""
    print_of_original = fingerprint(flat(storage))

    def check(made: UntypedStorage) -> None:
        if fingerprint(flat(made)) != print_of_original:
            raise RuntimeError(
                f'{fqn or "the model"!r} is under "offload", and what its plain code makes again has other values than the first time; '
                'was it written in place under no_grad, or through .data? Put that code under "save"'
            )

    return check


class Shapes:
    """Finds tensors of which only the shape is needed ([Note: Hopes])."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._found: set[Key] = set()
        self._misses: Counter[str] = Counter()  # by module

    def hope(self, blob: Blob, scope: Scope) -> str:
        """Return the reason for a blob to stay for the time being, if there is hope that it need not even do that."""
        if blob.key not in self._found:
            return ""
        scope.hopes.append(weakref.ref(blob))
        return HOPE

    def settle(self, scope: Scope, result: Any) -> None:
        """Look at the graph of what a module has returned. Let go of what nobody reads; let move what was hoped for in vain."""
        if self._misses[scope.fqn] < TRIES:
            claims = shape_only({node for tensor in _tensors(result) if (node := node_of(tensor)) is not None})
            self._misses[scope.fqn] = 0 if claims else self._misses[scope.fqn] + 1
            for claim in claims:
                self._let_go(claim)
        for reference in scope.hopes:
            blob: Blob | None = reference()
            if blob is not None and blob.reason == HOPE:
                self._found.discard(blob.key)
                self._mover.offer_again(self._mover.registry.records[blob.num].station, blob)
        scope.hopes.clear()

    def _let_go(self, claim: Claim) -> None:
        if isinstance(claim.promise, Saved):
            blob = claim.promise.blob
            self._found.add(blob.key)
            if blob.num_savers == 1 and blob.slot is None:
                self._mover.tally.recomputes_instead(blob.key.fqn, blob.num_bytes, instead_of=blob.reason)
        claim.settle_for_shape()


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(value)
