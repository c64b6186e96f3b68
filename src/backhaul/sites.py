"""A module whose forward runs again: what is known of it from call to call.

Covers: what is asked for there, its parts and parameters, what is said where it cannot run twice.
Does not cover: one run of it (recomputing.py), or which modules these are (plans.py).
"""

import itertools
import sys
import weakref
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor, nn

from backhaul import _torch
from backhaul.globs import matches
from backhaul.naming import named_modules


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
        for name, part in named_modules(module):
            inside.setdefault(name, part)  # of a wrapper and what it wraps, the wrapper
        del inside[""]
        self.kept = {name for glob in keep_outputs for name in self._matching(glob, list(inside))}
        self.watched: MutableMapping[nn.Module, str] = weakref.WeakKeyDictionary()
        self.watched.update((part, name) for name, part in inside.items() if verify or name in self.kept)
        self.parts = [(name, weakref.ref(part)) for name, part in module.named_modules()]
        self.is_leaf = not inside
        self.chooses: bool | None = None  # whether it makes choices, which is known once it has run
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
            owner = next((module for module in reversed(self._around()) if isinstance(module, fsdp.FSDPModule)), None)
            if owner is not None:
                owner.unshard()

    def _around(self) -> list[nn.Module]:
        """Return what is around the module just now, and itself last: wrappers may have come since the plan was applied."""
        known = [module for reference in self.around if (module := reference()) is not None]
        if not all(inner in _torch.own_modules(outer).values() for outer, inner in itertools.pairwise(known)):
            known = _path_to(known[-1], known[0]) or known
            self.around = [weakref.ref(module) for module in known]
        return known

    def parameters(self) -> list[Tensor]:
        """Return its parameters, as they are just now."""
        return [
            parameter
            for _, reference in self.parts
            if (part := reference()) is not None
            for parameter in _torch.own_parameters(part).values()
            if parameter is not None
        ]

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
        return ValueError(f'{self.name} cannot be under "recompute": {what}; {instead}')

    @property
    def name(self) -> str:
        """What messages call it."""
        return repr(self.fqn) if self.fqn else "the model"


def _path_to(module: nn.Module, root: nn.Module) -> list[nn.Module]:
    """Return the modules from ``root`` down to ``module``, both included; an empty list where it is not inside."""
    seen: set[nn.Module] = set()

    def walk(outer: nn.Module) -> list[nn.Module]:
        seen.add(outer)
        if outer is module:
            return [outer]
        for inner in _torch.own_modules(outer).values():
            if inner is not None and inner not in seen and (path := walk(inner)):
                return [outer, *path]
        return []

    return walk(root)
