"""The workloads by name: ``build("W1", size="tiny", device=...)``."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.workloads import dsv3, glm, qwen
from benchmarks.workloads.base import Group, GroupFactory, Workload

NAMES = ("W1", "W1s", "W1v", "W2", "W2c", "W2f", "W3", "W4")


def build(
    name: str,
    *,
    size: str,
    device: torch.device,
    group: GroupFactory = Group,
    tokens: int | None = None,
    microbatches: int | None = None,
) -> Workload:
    """Make a workload.

    ``tokens`` and ``microbatches`` take the place of the numbers in the sizes; ``group`` marks groups of saved tensors (W1, W1s, W1v).

    W1 is the DeepSeek-V3 stage, W1s the same without a host synchronisation, W1v interleaved; W2 is GLM-4.5-Air with compiled checkpoints,
    W2c with checkpoints of compiled blocks, W2f is W2 under FSDP2; W3 is Qwen3-8B and W4 Qwen3-30B-A3B. On a CPU, blocks of W2 and W2f are
    nested as W2c's, and none is lowered to kernels.
    """
    tiny = size == "tiny"
    on_cpu = device.type == "cpu"
    make: Any
    sizes: Any
    match name:
        case "W1" | "W1s" | "W1v":
            make = partial(dsv3.DeepSeekStage, group=group, router=dsv3.EvenRouter if name == "W1s" else dsv3.TopKRouter)
            sizes = replace(dsv3.TINY if tiny else dsv3.Sizes(), chunks=2 if name == "W1v" else 1)
        case "W2" | "W2c" | "W2f":
            nest = glm.checkpoint_compile if name == "W2c" or on_cpu else glm.compile_checkpoint
            distribute = glm.shard_everything if name == "W2f" else glm.spread_experts
            make = partial(glm.GLMTrunk, nest=nest, distribute=distribute, backend="aot_eager" if on_cpu else "inductor")
            sizes = glm.TINY if tiny else glm.Sizes()
        case "W3":
            make, sizes = qwen.QwenTraining, qwen.TINY_DENSE if tiny else qwen.DENSE
        case "W4":
            make, sizes = qwen.QwenTraining, qwen.TINY_MOE if tiny else qwen.MOE
        case _:
            raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")
    changes = {key: value for key, value in {"tokens": tokens, "microbatches": microbatches}.items() if value is not None}
    if microbatches is not None and not name.startswith("W1"):
        raise ValueError(f"{name} has one microbatch a step; only W1, W1s and W1v take another number")
    return make(replace(sizes, **changes), device=device)
