"""The second run of a module's forward.

Covers: collecting what is wanted, in the order of the first run; ending early; telling that it does something else than the first.
Does not cover: what the first run notes (recomputing.py).
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backhaul import _torch
from backhaul._torch import pop_function_mode, pop_saved_tensors_hooks, push_function_mode, push_saved_tensors_hooks
from backhaul.choices import Replaying
from backhaul.interrupts import Around
from backhaul.parts import Part, flatten, kind_of_maker, layout_of, plain_parts
from backhaul.remade import Made
from backhaul.saved import Bring, Layout, flat
from backhaul.watching import Watching, fingerprint

if TYPE_CHECKING:
    from backhaul.recomputing import Unit


class _Enough(BaseException):
    """Ends a run early. Not an ``Exception``, which a module may catch."""


class Rerun:
    """One more run of a unit's forward."""

    def __init__(self, unit: "Unit") -> None:
        self.unit = unit
        self.keeper = unit.keeper
        self.waiting = {id(made): made for each in unit.mades if (made := each()) is not None and made.wanted}
        self.filled: list[Made] = []
        self.num_packs = 0
        self.num_held = 0  # how many operations or modules have returned something that will be overwritten
        self.unchecked: list[tuple[Tensor, Part, int | None]] = []  # with the number of the pack
        self.calls: dict[str, int] = {}
        self.thread = threading.get_ident()

    def run(self, bring: Bring) -> None:
        """Fill all that is wanted, or nothing."""
        unit, here = self.unit, self.unit.keeper.here
        args, kwargs = unit.arguments(bring)
        around = Around()
        unit.surroundings.put_around(around)
        around.add(partial(setattr, here, "unit", unit), partial(setattr, here, "unit", here.unit))
        around.add(partial(push_saved_tensors_hooks, self.pack, self.unpack), pop_saved_tensors_hooks)
        self._put_replaying_around(around, bring)
        if unit.needs_graph:  # the forward's own backward has added up what it had to the first time
            for parameter in unit.site.parameters():
                around.add(partial(setattr, parameter, "grad", None), partial(setattr, parameter, "grad", parameter.grad))
        try:
            self._end(around.call(unit.forward, args, kwargs))
        except _Enough:
            pass
        except BaseException:
            for made in self.filled:
                made.storage = None
            raise
        unit.keeper.recomputed(unit.site.fqn, sum(made.num_bytes for made in self.filled))

    def _put_replaying_around(self, around: Around, bring: Bring) -> None:
        """Have choices made as they were, and outputs that were kept in place of those returned now."""
        unit = self.unit
        if unit.inside is not None and unit.inside.kept:
            kept = {part: name for part, name in unit.site.watched.items() if name in unit.inside.kept}
            began, ended = self._begin_holding, self._put_back
            Watching(kept, lambda _: began(), lambda name, output: ended(name, output, bring)).put_around(around)
        if unit.recording is not None and unit.recording.chosen:
            replaying = Replaying(unit.recording.chosen, bring, self.hold, unit.differs)
            around.add(partial(push_function_mode, replaying), pop_function_mode)

    def pack(self, tensor: Tensor) -> Tensor | None:
        """Collect a tensor that is saved again. The graph of this run gets it only where the forward itself runs a backward."""
        unit = self.unit
        if self.thread == threading.get_ident() and (type(tensor) is Tensor or not _torch.is_fake(tensor)):
            num = self.num_packs
            if num == len(unit.packs):
                raise unit.differs(f"it saves more than the {num} tensors that it saved the first time")
            self.num_packs = num + 1
            if parts := unit.packs[num]:
                self._collect(plain_parts(tensor), parts, num)
            if not self.waiting:
                self._stop_if_done()
        return tensor.detach() if unit.needs_graph else None

    def unpack(self, value: Tensor | None) -> Tensor:
        """Give a tensor back to a backward that the forward runs."""
        if value is None:
            raise self.unit.differs("it runs a backward pass that it did not run the first time")
        return value

    def _collect(self, tensors: Sequence[Tensor], parts: Sequence[Part], pack: int | None) -> None:
        """Collect what is saved, by its number, or what is returned."""
        if len(tensors) != len(parts):
            raise self._differs(pack, f"consists of {len(tensors)} plain tensors the second time and of {len(parts)} the first")
        for tensor, part in zip(tensors, parts, strict=True):
            layout = layout_of(tensor)
            if layout != part.layout and (part.layout is not None or part.made is not None):
                raise self._differs(pack, f"is {_describe(layout)} the second time and {_describe(part.layout)} the first", part)
            if part.node is not None and (now := kind_of_maker(tensor)) != part.node:
                raise self._differs(pack, f"was made by {now} the second time and by {part.node} the first", part)
            if part.print is not None:
                self.unchecked.append((tensor.detach(), part, pack))
            made = part.made() if part.made is not None else None
            if made is not None and self.waiting.pop(id(made), None) is not None:
                storage = tensor.untyped_storage()
                if storage.nbytes() != made.num_bytes:
                    raise self._differs(pack, f"lies in {storage.nbytes()} bytes the second time and in {made.num_bytes} the first")
                made.fill(storage)
                self.filled.append(made)
        if self.unchecked:
            self._compare()

    def _compare(self) -> None:
        """Compare values with those of the first run, once they are final."""
        if self.num_held:
            return
        unchecked, self.unchecked = self.unchecked, []
        for tensor, part, pack in unchecked:
            if fingerprint(tensor) != part.print:
                raise self._differs(pack, f"({_describe(part.layout)}) has other values than the first time", part)

    def _differs(self, pack: int | None, what: str, part: Part | None = None) -> RuntimeError:
        name = "what it returns" if pack is None else f"saved tensor {pack}"
        return self.unit.differs(f"{name} {what}", "" if part is None else part.inside)

    def _stop_if_done(self) -> None:
        # In the forward itself, which runs a backward, no more has been saved so far.
        if not self.waiting and not self.num_held and (self.unit.live is not None or not self.unit.site.verify):
            raise _Enough

    def _end(self, output: Any) -> None:
        """Collect what was returned; nothing may be missing now."""
        unit = self.unit
        if self.num_packs != len(unit.packs):
            raise unit.differs(f"it saves {self.num_packs} tensors the second time and {len(unit.packs)} the first")
        leaves = flatten((output,))[0]
        self._collect([plain for leaf in leaves if isinstance(leaf, Tensor) for plain in plain_parts(leaf)], unit.outputs, None)
        assert not self.waiting

    # Results that will be overwritten

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Neither end nor compare before this context is left: what is saved in it will be overwritten."""
        self._begin_holding()
        yield
        self._end_holding()

    def _begin_holding(self) -> None:
        self.num_held += 1

    def _end_holding(self) -> None:
        self.num_held -= 1
        self._compare()
        self._stop_if_done()

    def _put_back(self, name: str, output: Any, bring: Bring) -> None:
        """Overwrite what a module inside has returned by what it returned the first time."""
        assert self.unit.inside is not None
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        calls = self.unit.inside.kept[name]
        tensors = [leaf for leaf in flatten((output,))[0] if isinstance(leaf, Tensor)]
        if call >= len(calls) or len(tensors) != len(calls[call]):
            raise self.unit.differs("it is called more often the second time, or returns more or less", name)
        with torch.no_grad():
            for tensor, promise in zip(tensors, calls[call], strict=True):
                if promise is not None:
                    for target, source in zip(plain_parts(tensor), plain_parts(promise.restore(bring)), strict=True):
                        self._overwrite(target, source, name)
        self._end_holding()

    def _overwrite(self, target: Tensor, source: Tensor, name: str) -> None:
        if layout_of(target) != layout_of(source):
            now, then = _describe(layout_of(target)), _describe(layout_of(source))
            raise self.unit.differs(f"it returns {now} the second time and {then} the first", name)
        flat(target.untyped_storage()).copy_(flat(source.untyped_storage()))


def _describe(layout: Layout | None) -> str:
    if layout is None:
        return "no plain tensor"
    return f"{str(layout.dtype).removeprefix('torch.')}{list(layout.size)} with stride {layout.stride} at {layout.offset}"
