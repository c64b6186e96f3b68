"""Tensor and sequence parallel over two ranks: activations that are ``DTensor``s, offloaded.

Covers: gated MLPs of GLM-4.5-Air's first layer, their weights and their activations in shares; the same training with and without backhaul.
Does not cover: other ways to share them (tests/distributed/test_tensor_parallel.py).
"""

import argparse
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

import backhaul as bh
from benchmarks.run import determinism
from benchmarks.two_devices.ranks import NUM_RANKS, Findings, Rank, first_difference, in_turn, local, sign_step, sizes_of
from benchmarks.workloads import glm
from benchmarks.workloads.base import initialise, seeded_normal

LAYERS = 4
DTYPE = torch.bfloat16


class Block(nn.Module):
    def __init__(self, sizes: glm.Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=DTYPE)
        self.mlp = glm.GatedMLP(sizes.hidden, sizes.dense, DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def plan() -> dict[str, object]:
    """Rows in shares between the products, columns in shares within."""
    return {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "mlp": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=False),
        "mlp.gate": ColwiseParallel(use_local_output=False),
        "mlp.up": ColwiseParallel(use_local_output=False),
        "mlp.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }


def run(rank: Rank, findings: Findings, given: str | None, options: argparse.Namespace) -> None:
    sizes = glm.Sizes() if rank.full else glm.TINY
    findings.note(
        model="GLM-4.5-Air's dense MLP, TP2 and SP2", layers=LAYERS, dtype=str(DTYPE), **asdict(replace(sizes, num_layers=LAYERS))
    )
    num_steps = 20 if rank.full else 4
    mesh = init_device_mesh(rank.device.type, (NUM_RANKS,), mesh_dim_names=("tp",))
    with rank.device:
        model = nn.Sequential(*[Block(sizes) for _ in range(LAYERS)])
    initialise(model, seed=0)
    for block in model:
        parallelize_module(block, mesh, plan())
    start = [local(parameter.detach()).clone() for parameter in model.parameters()]

    def step(number: int) -> Tensor:
        x, target = (
            distribute_tensor(seeded_normal(sizes.tokens, sizes.hidden, seed=seed, device=rank.device, dtype=DTYPE), mesh, [Shard(0)])
            for seed in (2 * number, 2 * number + 1)
        )
        loss = F.mse_loss(model(x).float(), target.float(), reduction="sum").full_tensor()
        loss.backward()
        sign_step(model.parameters(), lr=1e-3)
        return loss.detach()

    def train() -> tuple[list[float], list[int] | None]:
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), start, strict=True):
                local(parameter).copy_(before)
        steps = [rank.measure(partial(step, number)) for number in range(num_steps)]
        return [each.result.item() for each in steps], rank.peaks(steps[num_steps // 2 :])

    with determinism(True):
        train()
        expected, plain_peaks = train()
        with bh.offload(model, tier=bh.PinnedHost(), activation_budget=0, min_bytes=None if rank.full else 0) as handle:
            got, peaks = train()
            stats = handle.stats
            timed = in_turn(rank, [handle], partial(step, 0), options.pairs)
    findings.must(f"losses of {num_steps} steps equal, bit for bit", rank.all(got == expected), first_difference(got, expected))
    findings.must(
        "activations move", rank.all(stats.offloaded_bytes > 0), f"{sizes_of(rank.gather(stats.offloaded_bytes // num_steps))} a step"
    )
    findings.tell("budget 0: step", timed.figure)
    findings.tell("budget 0: activations at peak", f"{sizes_of(peaks)} of {sizes_of(plain_peaks)}")
    findings.note(steps=asdict(timed), stats=rank.gather(asdict(stats)))
