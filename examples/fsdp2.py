"""FSDP2 (``fully_shard``) with activations offloaded: one line is new. Sharded and gathered weights stay where they are.

Run it with ``torchrun --nproc-per-node 2 examples/fsdp2.py``, on GPUs over NCCL or on a CPU over gloo, where activations go to disk.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import backhaul as bh

HIDDEN, ROWS = 256, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` (batch, hidden) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same weights on every rank, of which each keeps a share
    model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)

    handle = bh.offload(model, activation_budget=0)  # the new line; budget 0 moves all that can move

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    inputs, targets = (torch.randn(ROWS, HIDDEN, device=device) for _ in range(2))
    for step in range(5):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(handle.report())
    handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
