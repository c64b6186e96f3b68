"""A pipeline over several ranks with the activations of each stage offloaded under a budget: one line is new.

Run it with ``torchrun --nproc-per-node 2 examples/pipeline.py``, on GPUs over NCCL or on a CPU over gloo, where activations go to disk. An
argument names the schedule: ``GPipe``, ``1F1B``, ``Interleaved1F1B`` (the default), ``LoopedBFS``, ``InterleavedZeroBubble``,
``ZBVZeroBubble``, ``DualPipeV``. With ``plain`` after it nothing is offloaded, and the losses are the same.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import backhaul as bh

HIDDEN, ROWS, MICROBATCHES = 128, 512, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` (batch, hidden) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(name: str, device: torch.device, *, offload: bool = True) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Train this rank's stages under a schedule; return the losses, where this rank has the last stage, and the stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Which stages this rank has: one, or two; for a V-shaped schedule one from the front and its mirror image from the back.
    alone, v_shaped = name in ("GPipe", "1F1B"), name in ("ZBVZeroBubble", "DualPipeV")
    total = ranks if alone else 2 * ranks
    indices = [rank, total - 1 - rank] if v_shaped else list(range(rank, total, ranks))
    modules = []
    for index in indices:
        torch.manual_seed(index)
        modules.append(nn.Sequential(*[Block() for _ in range(2)]).to(device))

    # The new line. Each stage has a budget of its own; the tensors of this small model are below what is worth a copy by default.
    handles = [bh.offload(module, activation_budget="6MB", min_bytes="64KiB") for module in modules if offload]

    stages = [PipelineStage(module, index, total, device) for module, index in zip(modules, indices, strict=True)]
    schedule = get_schedule_class(name)(stages[0] if alone else stages, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    torch.manual_seed(0)
    inputs, targets = (torch.randn(MICROBATCHES * ROWS, HIDDEN, device=device) for _ in range(2))

    means: list[torch.Tensor] = []
    for step in range(5):
        losses: list[torch.Tensor] = []
        first, last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))
        schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last:
            means.append(torch.stack(losses).detach().mean())
            print(f"step {step}: loss {means[-1].item():.4f}", flush=True)

    for index, handle in zip(indices, handles, strict=offload):
        stats = handle.stats
        moved, peak = stats.offloaded_bytes / stats.saved_bytes, stats.peak_resident_bytes / 1e6
        print(f"stage {index}: {moved:.0%} of what was saved has been away, at most {peak:.1f} MB stayed", flush=True)
        handle.remove()
    return means, modules


def main(name: str = "Interleaved1F1B", how: str = "offloaded") -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(name, device, offload=how != "plain")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
