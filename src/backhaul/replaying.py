"""What a forward pass depends on besides its arguments and its module.

Covers: random number generators, autocast, the settings by which torch chooses kernels, default dtype and device; as they were, and how to
have them so again.
Does not cover: choices that a forward pass makes from floating-point values (choices.py).
"""

import ctypes
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from backhaul import _torch
from backhaul.interrupts import Around

_RECORD, _RECORD_NOT = (partial(_torch.set_grad_enabled, enabled) for enabled in (True, False))  # gradients


class Generator(Protocol):
    """What ``torch.Generator`` can do."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor) -> Any: ...


class _DeviceGenerator:
    """The generator of a device whose module in torch names no generators, as ``torch.mps``."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.where = () if device.type == "mps" else (device,)

    def get_state(self) -> Tensor:
        state: Tensor = self.module.get_rng_state(*self.where)
        return state

    def set_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state, *self.where)


def default_generator(device: torch.device) -> Generator:
    """Return what random operations on ``device`` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return generators[index] if index < len(generators) else _DeviceGenerator(device)


class Surroundings:
    """The state around one forward pass: make it when the pass begins, ``settle`` it when the pass has ended.

    A generator's state is kept only where the pass has moved it.

    Args:
        devices: devices other than the CPU that the pass may use.
        generators: further generators that it was given.
    """

    __slots__ = ("autocast", "caches", "device", "generators", "settings")

    def __init__(self, devices: Collection[torch.device], generators: Iterable[Generator] = ()) -> None:
        found = [torch.default_generator, *generators, *map(default_generator, devices)]
        self.generators: list[tuple[Generator, Tensor]] = [(generator, generator.get_state()) for generator in found]
        self.autocast = [("cpu", _autocast_dtype("cpu"))]
        if devices:
            self.autocast += [(kind, _autocast_dtype(kind)) for kind in {device.type for device in devices}]
        self.caches = torch.is_autocast_cache_enabled()
        self.settings = _torch.kernel_settings()
        self.device = _torch.default_device()

    def settle(self) -> None:
        """Forget the generators that have not moved."""
        self.generators = [(generator, state) for generator, state in self.generators if _bytes(state) != _bytes(generator.get_state())]

    def put_generators_back(self) -> None:
        """Set the generators to where they were when the pass began."""
        for generator, state in self.generators:
            generator.set_state(state)

    def put_around(self, around: Around) -> None:
        """Have everything around a call as it was when the pass began, gradients recorded; afterwards as it is now."""
        around.add(_RECORD, _RECORD if torch.is_grad_enabled() else _RECORD_NOT)
        for kind, dtype in self.autocast:
            if dtype is not None or torch.is_autocast_enabled(kind):
                self._put_autocast_around(around, kind, dtype)
        settings = _torch.kernel_settings()
        if settings != self.settings:
            around.steps += _torch.kernel_setters(self.settings, settings)
            around.undoing += reversed(_torch.kernel_setters(settings, self.settings))
        if _torch.default_device() != self.device:
            around.add(partial(_torch.push_function_mode, _torch.device_mode(self.device)), _torch.pop_function_mode)
        for generator, state in self.generators:
            around.add(partial(generator.set_state, state), partial(generator.set_state, generator.get_state()))

    def _put_autocast_around(self, around: Around, kind: str, dtype: torch.dtype | None) -> None:
        """Do what ``torch.autocast`` does, except that the cache of casts is emptied also where another one is active around it."""
        around.add(torch.clear_autocast_cache, torch.clear_autocast_cache)
        around.add(torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
        on, was_on = dtype is not None, torch.is_autocast_enabled(kind)
        around.add(partial(torch.set_autocast_enabled, kind, on), partial(torch.set_autocast_enabled, kind, was_on))
        if dtype is not None:
            before = torch.get_autocast_dtype(kind)
            around.add(partial(torch.set_autocast_dtype, kind, dtype), partial(torch.set_autocast_dtype, kind, before))
        caches = torch.is_autocast_cache_enabled()
        around.add(partial(torch.set_autocast_cache_enabled, self.caches), partial(torch.set_autocast_cache_enabled, caches))


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """Return what autocast casts to on devices of this kind; ``None`` where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _bytes(state: Tensor) -> bytes:
    """Return a generator's state. ``Tensor.equal`` would take three times as long, and ``Tensor.numpy`` needs NumPy."""
    return ctypes.string_at(state.data_ptr(), state.numel())
