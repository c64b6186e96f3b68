"""A pipeline over several ranks with the activations of each stage offloaded under a budget: one line a stage is new.

Run it with ``torchrun --nproc-per-node 2 examples/pipeline.py``, on GPUs over NCCL or on a CPU over gloo, where activations go to disk. An
argument names the schedule: ``Interleaved1F1B`` (the default), ``LoopedBFS``, ``InterleavedZeroBubble``, ``ZBVZeroBubble``, ``DualPipeV``.
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

HIDDEN, ROWS, MICROBATCHES, STAGES_A_RANK = 128, 512, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` (batch, hidden) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(name: str = "Interleaved1F1B") -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Which stages this rank has: every so many, or for a V-shaped schedule one from the front and its mirror image from the back.
    total = ranks * STAGES_A_RANK
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    indices = [rank, total - 1 - rank] if v_shaped else list(range(rank, total, ranks))
    modules = []
    for index in indices:
        torch.manual_seed(index)
        modules.append(nn.Sequential(*[Block() for _ in range(2)]).to(device))

    handles = [bh.offload(module, activation_budget="6MB") for module in modules]  # the new line; each stage has a budget of its own

    stages = [PipelineStage(module, index, total, device) for module, index in zip(modules, indices, strict=True)]
    schedule = get_schedule_class(name)(stages, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    torch.manual_seed(0)
    inputs, targets = (torch.randn(MICROBATCHES * ROWS, HIDDEN, device=device) for _ in range(2))

    for step in range(5):
        losses: list[torch.Tensor] = []
        first, last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))
        schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)

    for index, handle in zip(indices, handles, strict=True):
        stats = handle.stats
        moved, peak = stats.offloaded_bytes / stats.saved_bytes, stats.peak_resident_bytes / 1e6
        print(f"stage {index}: {moved:.0%} of what was saved has been away, at most {peak:.1f} MB stayed", flush=True)
        handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
