"""What a forward pass depends on besides its arguments and its module.

Covers: random number generators, autocast, and the settings by which torch chooses kernels; as they were, and a context to have them so
again.
Does not cover: choices that a forward pass makes from floating-point values (choices.py).
"""

import contextlib
import ctypes
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from backhaul import _torch


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

    __slots__ = ("autocast", "caches", "generators", "settings")

    def __init__(self, devices: Collection[torch.device], generators: Iterable[Generator] = ()) -> None:
        found = [torch.default_generator, *generators, *map(default_generator, devices)]
        self.generators: list[tuple[Generator, Tensor]] = [(generator, generator.get_state()) for generator in found]
        kinds = ("cpu", *{device.type for device in devices}) if devices else ("cpu",)
        self.autocast = [(kind, _autocast_dtype(kind)) for kind in kinds]
        self.caches = torch.is_autocast_cache_enabled()
        self.settings = _torch.kernel_settings()

    def settle(self) -> None:
        """Forget the generators that have not moved."""
        self.generators = [(generator, state) for generator, state in self.generators if _bytes(state) != _bytes(generator.get_state())]

    def put_generators_back(self) -> None:
        """Set the generators to where they were when the pass began."""
        for generator, state in self.generators:
            generator.set_state(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Have everything as it was when the pass began, gradients recorded; afterwards as it was before."""
        settings = _torch.kernel_settings()
        states = [(generator, generator.get_state()) for generator, _ in self.generators]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self.autocast:
                if dtype is not None or torch.is_autocast_enabled(kind):
                    on = dtype is not None
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self.caches))
            try:
                _torch.set_kernel_settings(self.settings)
                self.put_generators_back()
                yield
            finally:
                for generator, state in states:
                    generator.set_state(state)
                _torch.set_kernel_settings(settings)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """Return what autocast casts to on devices of this kind; ``None`` where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _bytes(state: Tensor) -> bytes:
    """Return a generator's state. ``Tensor.equal`` would take three times as long, and ``Tensor.numpy`` needs NumPy."""
    return ctypes.string_at(state.data_ptr(), state.numel())
