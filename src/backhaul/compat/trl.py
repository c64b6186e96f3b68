"""The activation offloading of TRL, by its signatures: change ``trl.models.activation_offloading`` to ``backhaul.compat.trl``.

Covers: what each parameter means here. Does not cover: how it is done (contexts.py).

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
>>> context = get_act_offloading_ctx_manager(model, max_fwd_stash_size=1, warn_if_no_head=False)
>>> for _ in range(2):
...     with context:
...         loss = model(torch.ones(32, 64)).sum()
...     loss.backward()
>>> context.handle.stats.offloaded_bytes
40960
"""

from torch import nn

from backhaul.compat.contexts import NoOpManager as NoOpManager
from backhaul.compat.contexts import OffloadingContext, Settings


class OffloadActivations(OffloadingContext):
    """Offload what autograd saves inside the context to host memory.

    Backward may run inside the context or after it, and the same object may be entered as often as you like. ``handle`` has the report.

    Args:
        use_pin_memory: use page-locked memory. Without it copies occupy the host, and are never beside compute.
        use_streams: let tensors be copied while compute goes on. Without it compute waits for each of them to have left.
        min_offload_size: smaller storages stay; in bytes.
        max_fwd_stash_size: how many tensors may be on their way out at once, in the sense that the device has room for so many, the largest
            that follow each other. The same room is used for tensors on their way back.

    Raises ``ValueError`` for a ``max_fwd_stash_size`` below 1, where it matters.
    """

    def __init__(
        self, use_pin_memory: bool = True, use_streams: bool = True, min_offload_size: int = 1024, max_fwd_stash_size: int = 5
    ) -> None:
        if use_streams and max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size={max_fwd_stash_size}; one tensor at least is on the device while it leaves")
        in_flight = max_fwd_stash_size if use_streams else 0
        super().__init__(Settings(pinned=use_pin_memory, min_bytes=min_offload_size, num_in_flight=in_flight))


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """Return a context for ``model``, which it knows then. What the output head and Liger's modules save stays on the device."""
    context = OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    context.update_model_params(model)
    context.leave_out_head(model, warn=warn_if_no_head)
    for name, module in model.named_modules():
        if "liger" in name.lower():
            context.leave_out(module)
    return context
