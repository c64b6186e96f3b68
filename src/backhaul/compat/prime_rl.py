"""The activation offloading of prime-rl, by its signatures: change ``prime_rl.utils.act_offloading`` to ``backhaul.compat.prime_rl``.

Covers: what each parameter means here. Does not cover: how it is done (contexts.py).

Give the model. A context is made for each microbatch there, and it is the model by which a later one finds what an earlier one has
learned. Most weights stay either way; that the inner tensors of sharded ones are weights only the model tells.

>>> import torch
>>> from types import SimpleNamespace
>>> config = SimpleNamespace(pin_memory=True, max_inflight_activations=1)
>>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
>>> for _ in range(2):
...     with maybe_activation_offloading(config, model) as offloading:
...         loss = model(torch.ones(32, 64)).sum()
...     loss.backward()
>>> offloading.handle.stats.offloaded_bytes
40960
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from backhaul.compat.contexts import OffloadingContext, Settings


class ActivationOffloadingConfig(Protocol):
    """What is read of ``config.model.ac_offloading``."""

    @property
    def pin_memory(self) -> bool:
        """Use page-locked memory."""
        ...

    @property
    def max_inflight_activations(self) -> int:
        """How many tensors may be on their way out at once."""
        ...


class OffloadActivations(OffloadingContext):
    """Offload what autograd saves inside the context to host memory, beside compute.

    Args:
        model: what runs inside; may be left out.
        use_pin_memory: use page-locked memory. Without it copies occupy the host, and are never beside compute.
        max_fwd_stash_size: how many tensors may be on their way out at once, in the sense that the device has room for so many, the largest
            that follow each other. The same room is used for tensors on their way back.
        min_offload_size: smaller storages stay; in bytes.
    """

    def __init__(
        self, model: nn.Module | None = None, use_pin_memory: bool = True, max_fwd_stash_size: int = 5, min_offload_size: int = 1024
    ) -> None:
        super().__init__(Settings(pinned=use_pin_memory, min_bytes=min_offload_size, num_in_flight=max_fwd_stash_size), model)


def maybe_activation_offloading(config: ActivationOffloadingConfig | None, model: nn.Module | None = None) -> AbstractContextManager[Any]:
    """Return a context with the settings of ``config``, or one that does nothing where there is none."""
    if config is None:
        return nullcontext()
    return OffloadActivations(model, use_pin_memory=config.pin_memory, max_fwd_stash_size=config.max_inflight_activations)
