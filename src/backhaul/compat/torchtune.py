"""The activation offloading of torchtune, by its signatures: import these names from here instead of ``torchtune.training``.

Covers: what differs from TRL's. Does not cover: what the parameters mean (trl.py).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from backhaul.compat import trl
from backhaul.compat.contexts import NoOpManager as NoOpManager


class OffloadActivations(trl.OffloadActivations):
    """TRL's, with the last two parameters in torchtune's order. ``None`` means to use streams, as it did in older versions."""

    def __init__(
        self, use_pin_memory: bool = True, use_streams: bool | None = True, max_fwd_stash_size: int = 5, min_offload_size: int = 1024
    ) -> None:
        super().__init__(use_pin_memory, use_streams is not False, min_offload_size, max_fwd_stash_size)


def get_act_offloading_ctx_manager(
    model: nn.Module, enable_activation_offloading: bool, use_streams: bool | None = True
) -> AbstractContextManager[Any]:
    """Return a context for ``model``, which it knows then, or one that does nothing. What the output head saves stays on the device."""
    if not enable_activation_offloading:
        return nullcontext()
    return trl.get_act_offloading_ctx_manager(model, use_streams=use_streams is not False)
