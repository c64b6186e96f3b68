"""A context that offloads what is saved inside it: what the drop-ins share.

Covers: settings in the words of those libraries, the engine of a context ([Note: Contexts]), the output head that stays out of it.
Does not cover: anybody's signatures (trl.py, torchtune.py, prime_rl.py).

[Note: Contexts]
``bh.offload`` manages a module wherever it is called; these contexts manage code, wherever it comes from, as long as they are entered. Each
entry is a frame (``Handle.region``). No model need be known: what is a parameter shows on the tensor. With a model more is told apart:
weights that FSDP2 has gathered, inner tensors of parameters, casts that autocast has made, names for the report.

The order of a step is learned by an engine, and prime-rl makes a context anew for each microbatch. So an engine that has been given a
model stays with it, reached through the wrappers that say which module is running; they do nothing outside a context. A later context with
the same settings finds the engine there.
"""

import warnings
import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from backhaul.api import Handle
from backhaul.compiling import is_compiled
from backhaul.engine import Engine
from backhaul.naming import blocks_of, named_modules
from backhaul.saved import Blob, Kept
from backhaul.scopes import Scope, Wrapper, wrapper_of
from backhaul.stations import Station
from backhaul.tiers.host import PinnedHost
from backhaul.tiers.pageable import PageableHost

HEADS = ("output", "lm_head", "decoder.output", "decoder.lm_head", "final_layer_norm", "ln_f", "head")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the libraries let their users say."""

    pinned: bool
    min_bytes: int
    num_in_flight: int  # saved tensors that may be on the device while they leave; 0: compute waits for each


class ContextEngine(Engine):
    """The saved-tensor hooks of a context, which may get to know a model later.

    The libraries bound what stays on the device by a number of tensors: those saved last. The budget is the most bytes that so many of them
    have had, and what cannot move.
    """

    def __init__(self, settings: Settings) -> None:
        tier = PinnedHost() if settings.pinned else PageableHost()
        super().__init__([], tier=tier, activation_budget=0, min_bytes=settings.min_bytes)
        self.settings = settings
        self.wrappers: list[Wrapper] = []
        self.left_out: set[str] = set()  # modules whose saved tensors stay
        self._latest: deque[int] = deque(maxlen=settings.num_in_flight)
        self._window_bytes = 0

    def learn_model(self, model: nn.Module) -> None:
        """Tell the model's parameters from its activations, and its modules by name."""
        self.modules = [weakref.ref(model)]
        self._name(model, "")
        if not is_compiled(model):
            for name, block in dict.fromkeys(blocks_of(model)):
                self._name(block, name)

    def leave_out(self, module: nn.Module) -> None:
        """Keep what a part of the model saves on the device."""
        (model,) = self._alive()
        fqn = next((name for name, part in named_modules(model) if part is module), "output head")
        if fqn not in {wrapper.fqn for wrapper in self.wrappers}:
            self._name(module, fqn)
        self.left_out |= {wrapper.fqn for wrapper in self.wrappers if wrapper.fqn == fqn or wrapper.fqn.startswith(f"{fqn}.")}

    def _name(self, module: nn.Module, name: str) -> None:
        self.wrappers.append(Wrapper(self, module, name, is_root=False))

    def _on_accelerator(self) -> bool:
        return torch.accelerator.is_available()

    def _why_it_stays(self, tensor: Tensor, blob: Blob, scope: Scope) -> str:
        return "output head" if scope.fqn in self.left_out else super()._why_it_stays(tensor, blob, scope)

    def _offer(self, station: Station, blob: Blob) -> None:
        if not blob.reason:
            self._latest.append(blob.num_bytes)
            self._window_bytes = max(self._window_bytes, sum(self._latest))
        station.flow.activation_budget = station.flow.peak_immovable_bytes + self._window_bytes
        super()._offer(station, blob)


class OffloadingContext:
    """Offload what is saved inside, as often as it is entered. ``handle`` tells what happened, and ends it."""

    def __init__(self, settings: Settings, model: nn.Module | None = None) -> None:
        known = None if model is None else _engine_of(model, settings)
        self._engine = ContextEngine(settings) if known is None else known
        if model is not None and known is None:
            self._engine.learn_model(model)
        self._entered: list[AbstractContextManager[None]] = []

    @property
    def handle(self) -> Handle:
        """The handle: ``stats``, ``report()``, ``paused()``, and ``remove()``, after which the context does nothing."""
        return Handle(self._engine, self._engine.wrappers, owns_tier=True)

    def update_model_params(self, model: nn.Module) -> None:
        """Let the context know the model that runs in it ([Note: Contexts]). Call it again only if there is another model."""
        known = _engine_of(model, self._engine.settings)
        if known is None:
            known = ContextEngine(self._engine.settings) if self._engine.modules else self._engine
            known.learn_model(model)
        self._engine = known

    def leave_out_head(self, model: nn.Module, *, warn: bool = True) -> None:
        """Keep what the output head saves on the device: it would come back at once. Inside a compiled model it cannot be told apart."""
        head = None if is_compiled(model) else output_head(model)
        if head is not None:
            self._engine.leave_out(head)
        elif warn:
            warnings.warn(
                f"no output head was found in {type(model).__name__} (looked for {', '.join(HEADS)}, and not into a compiled model), so "
                "what it saves leaves and comes back at once; use one of these names, or pass warn_if_no_head=False",
                stacklevel=3,
            )

    def leave_out(self, module: nn.Module) -> None:
        """Keep what a part of the model saves on the device."""
        self._engine.leave_out(module)

    def __enter__(self) -> "OffloadingContext":
        self._entered.append(self.handle.region())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(*exception)  # type: ignore[arg-type]


class NoOpManager(saved_tensors_hooks):
    """Keep what is saved inside as plain autograd does, whatever other hooks are active around it."""

    def __init__(self) -> None:
        super().__init__(Kept, lambda kept: kept.restore(_no_blob))


def _no_blob(blob: Blob) -> None:
    raise AssertionError("what is kept has no blob")


def _engine_of(model: nn.Module, settings: Settings) -> ContextEngine | None:
    """Return the engine that an earlier context with these settings has left with the model."""
    wrapper = wrapper_of(model)
    engine = None if wrapper is None else wrapper.watcher
    return engine if isinstance(engine, ContextEngine) and engine.settings == settings else None


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the output head: the one that the model names itself, else the first attribute with one of these names."""
    inner = getattr(model, "module", model)
    ask = getattr(inner, "get_output_embeddings", None)
    named = ask() if ask is not None else None
    for head in (named, *(_attribute(inner, name) for name in HEADS)):
        if isinstance(head, nn.Module):
            return head
        if isinstance(linear := getattr(head, "linear", None), nn.Module):  # weights tied to the embedding, as torchtune does it
            return linear
    return None


def _attribute(module: nn.Module, path: str) -> Any:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None
