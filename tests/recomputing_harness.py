"""An engine that keeps what is not recomputed, so that recomputation is tested alone."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from backhaul import _torch
from backhaul.compiling import look_into_no_trace
from backhaul.kinds import is_parameter
from backhaul.recomputing import Unit, run_unit
from backhaul.remade import Made, Outputs, Remade
from backhaul.saved import Kept, Promise
from backhaul.sites import Site


class Here(threading.local):
    """Where a thread is."""

    unit: Unit | None = None
    outputs: Outputs | None = None


class Harness:
    """Manages ``model``, with the modules that ``chosen`` names as units."""

    def __init__(self, model: nn.Module, chosen: Sequence[str] | Callable[[str], bool] = ("",), **options: Any) -> None:
        self.model = model
        self.here = Here()
        self.num_runs: Counter[str] = Counter()  # second runs
        self.num_bytes = 0  # made again
        self.kept: list[tuple[int, ...]] = []  # shapes of what is kept on the device
        self.sites: dict[str, Site] = {}
        self.undo: list[Callable[[], None]] = []
        is_chosen = chosen if callable(chosen) else lambda name: name in chosen
        for name, module in model.named_modules():
            if is_chosen(name):
                self.sites[name] = Site(name or "root", module, **options)
                look_into_no_trace(self.sites[name])
                self._wrap(module, self.sites[name])

    def _wrap(self, module: nn.Module, site: Site) -> None:
        forward = module.forward
        module.__dict__["forward"] = lambda *args, **kwargs: (
            forward(*args, **kwargs) if _torch.inside_backward() else run_unit(site, self, forward, args, kwargs)
        )
        self.undo.append(lambda: module.__dict__.pop("forward"))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the hooks active, as a managed module's forward has."""
        self.here.outputs = Outputs()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.here.outputs = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.active():
            return self.model(*args, **kwargs)

    def remove(self) -> None:
        """Leave the model as it was."""
        for undo in self.undo:
            undo()

    def pack(self, tensor: Tensor) -> Promise:
        """Return the promise for a saved tensor."""
        unit = self.here.unit
        if unit is not None and (promise := unit.pack(tensor)) is not None:
            return promise
        made = self.here.outputs.find(tensor) if self.here.outputs is not None and type(tensor) is Tensor else None
        if made is not None:
            return Remade(made, tensor)
        return self._keep(tensor)

    def unpack(self, promise: Promise) -> Tensor:
        """Give it back."""
        return promise.restore(lambda blob: None)

    def promise(self, tensor: Tensor) -> Promise:
        """Return the promise for what a unit starts from."""
        made = self.here.outputs.find(tensor) if self.here.outputs is not None and type(tensor) is Tensor else None
        return Remade(made, tensor) if made is not None and made.chains else self._keep(tensor)

    def _keep(self, tensor: Tensor) -> Promise:
        if not self.owns(tensor):
            self.kept.append(tuple(tensor.shape))
        return Kept(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Say whether it is a parameter or a buffer."""
        mine = (*self.model.parameters(), *self.model.buffers())
        return is_parameter(tensor) or (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and any(tensor.untyped_storage() is each.untyped_storage() for each in mine)
        )

    def keep_owned(self, tensor: Tensor) -> Promise | None:
        """Keep it if it is one."""
        return Kept(tensor) if self.owns(tensor) else None

    def home_of(self, parameter: Tensor) -> "weakref.ref[UntypedStorage] | None":
        """Return its storage."""
        return weakref.ref(parameter.untyped_storage()) if type(parameter.data) is Tensor else None

    def can_be_made(self, output: Tensor, made: Made) -> None:
        """Note it until the forward has ended."""
        if self.here.outputs is not None:
            self.here.outputs.note(output, made)

    def recomputed(self, fqn: str, num_bytes: int) -> None:
        """Count it."""
        self.num_runs[fqn] += 1
        self.num_bytes += num_bytes
