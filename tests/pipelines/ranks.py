"""What the ranks of a pipeline do in the tests of this folder: train it with and without backhaul, and tell what they saw.

Covers: small stages, the schedules of ``torch.distributed.pipelining`` around them, steps that must not differ in a bit.
Does not cover: what has to be true of what was seen (test_schedules.py).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from tests.conftest import everything, same
from tests.planned import apply

HIDDEN, LENGTH, ROWS = 16, 8, 2  # ROWS sequences a microbatch
SINGLE = ("GPipe", "1F1B")  # one stage a rank; the others have two
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first stage and the last
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", *SPLIT)
MICROBATCHES = 6
BATCH = 4 * MICROBATCHES * ROWS * LENGTH * HIDDEN  # bytes
MOST_OF_A_NODE = 4 * ROWS * LENGTH * (3 * HIDDEN + HIDDEN + 2)  # attention: queries, keys and values, its output, a sum for each head


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)  # two heads
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def make_stage(index: int) -> nn.Module:
    """Make the same stage each time."""
    torch.manual_seed(index)
    return nn.Sequential(Block(), Block())


Make = Callable[[int], nn.Module]
Manage = Callable[[list[nn.Module]], list[bh.Handle]]


class Pipeline:
    """This rank's share of a pipeline, and its training by plain SGD."""

    def __init__(self, name: str, *, make: Make = make_stage) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        per_rank = 1 if name in SINGLE else 2
        total = per_rank * ranks
        self.name = name
        self.indices = [rank, total - 1 - rank] if name in V_SHAPED else list(range(rank, total, ranks))
        self.modules = [make(index) for index in self.indices]
        device = torch.device("cpu")
        self.stages = [PipelineStage(module, index, total, device) for module, index in zip(self.modules, self.indices, strict=True)]
        self.schedules: dict[int, Any] = {}

    def schedule(self, microbatches: int) -> Any:
        """Return the schedule for so many microbatches, made anew where the number has changed."""
        if microbatches not in self.schedules:
            stages = self.stages[0] if self.name in SINGLE else self.stages
            self.schedules = {microbatches: get_schedule_class(self.name)(stages, microbatches, loss_fn=F.mse_loss)}
        return self.schedules[microbatches]

    def call(self, function: Callable[..., Any], microbatches: int, seed: int) -> list[Tensor]:
        """Give a schedule's ``step`` or ``eval`` what this rank has to give. Return the losses, where this rank has them."""
        noise = torch.Generator().manual_seed(seed)
        inputs, targets = (torch.randn(microbatches * ROWS, LENGTH, HIDDEN, generator=noise) for _ in range(2))
        losses: list[Tensor] = []
        given = (inputs,) if any(stage.is_first for stage in self.stages) else ()
        wanted = {"target": targets, "losses": losses} if any(stage.is_last for stage in self.stages) else {}
        function(*given, **wanted)
        return [loss.detach() for loss in losses]

    def step(self, seed: int, microbatches: int, *, accumulate: int = 1) -> list[Tensor]:
        """Train one step. Return the losses and the gradients."""
        schedule = self.schedule(microbatches)
        losses = [loss for part in range(accumulate) for loss in self.call(schedule.step, microbatches, 10 * seed + part)]
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
        return [*losses, *(gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients)]


@dataclass
class Stage:
    """What one stage of the managed pipeline did."""

    index: int
    budget: int | None
    wants: int  # bytes at peak, if nothing had to leave
    stats: list[bh.Stats] = field(default_factory=list)  # after each step

    @property
    def last(self) -> bh.Stats:
        return self.stats[-1]

    def by_step(self, name: str) -> list[int]:
        """Return what a counter counted in each step."""
        totals = [0, *(getattr(stats, name) for stats in self.stats)]
        return [after - before for before, after in pairwise(totals)]


Step = Callable[[Pipeline, int], list[Tensor]]


def plain_step(pipeline: Pipeline, number: int) -> list[Tensor]:
    return pipeline.step(number, MICROBATCHES)


Plan = dict[str, str]


def manage_each(modules: Sequence[nn.Module], budgets: Sequence[int | None], plan: Plan | None = None) -> list[bh.Handle]:
    """Manage each stage apart, through tiers that copy as late as they may."""
    if plan is not None:
        return [apply(module, plan, activation_budget=budget) for module, budget in zip(modules, budgets, strict=True)]
    return [everything(module, activation_budget=budget) for module, budget in zip(modules, budgets, strict=True)]


def compare(
    name: str, share: float | None, step: Step = plain_step, steps: int = 5, make: Make = make_stage, plan: Plan | None = None
) -> list[Stage]:
    """Train a pipeline plainly and managed, and see that no loss and no gradient differs in a bit and nothing is left after a step.

    Each stage may keep ``share`` of what it wants at peak; ``None`` sets no budget.
    """
    roomy = Pipeline(name, make=make)
    handles = manage_each(roomy.modules, [1 << 40] * len(roomy.modules), plan)
    step(roomy, 0)
    wants = [handle.stats.peak_resident_bytes for handle in handles]

    plain, pipeline = Pipeline(name, make=make), Pipeline(name, make=make)
    budgets = [None if share is None else int(share * each) for each in wants]
    handles = manage_each(pipeline.modules, budgets, plan)
    seen = [Stage(*each) for each in zip(pipeline.indices, budgets, wants, strict=True)]
    for number in range(steps):
        assert same(step(pipeline, number), step(plain, number)), f"step {number} differs"
        for stage, handle in zip(seen, handles, strict=True):
            stats = handle.stats
            assert stats.resident_bytes == stats.host_bytes == 0, f"stage {stage.index} has left something behind after step {number}"
            stage.stats.append(stats)
    return seen


def compare_under_one_handle(name: str) -> bh.Stats:
    """The same with all stages of this rank under one handle and one budget."""
    plain, pipeline = Pipeline(name), Pipeline(name)
    with everything(pipeline.modules, activation_budget=60_000) as handle:
        for number in range(5):
            assert same(plain_step(pipeline, number), plain_step(plain, number)), f"step {number} differs"
            assert handle.stats.resident_bytes == handle.stats.host_bytes == 0
        return handle.stats


# Steps that are not like the one before


def changing_number(pipeline: Pipeline, number: int) -> list[Tensor]:
    return pipeline.step(number, (4, 4, 8, 8, 4, 6, 8)[number])


def accumulating(pipeline: Pipeline, number: int) -> list[Tensor]:
    return pipeline.step(number, 4, accumulate=1 + number % 2)


def evaluating(pipeline: Pipeline, number: int) -> list[Tensor]:
    """Evaluate on some microbatches after every step, by the schedule's own means."""
    found = pipeline.step(number, 4)
    with torch.no_grad():
        return found + pipeline.call(pipeline.schedule(4).eval, 4, 7)


def beside_a_reference(pipeline: Pipeline, number: int) -> list[Tensor]:
    """Run the stages themselves, as a reference model, before each step."""
    with torch.no_grad():
        references = [module(torch.ones(ROWS, LENGTH, HIDDEN)) for module in pipeline.modules]
    return references + plain_step(pipeline, number)


def in_two_threads(pipeline: Pipeline, number: int) -> list[Tensor]:
    """Where the schedule has a forward and a backward side by side, run them side by side."""
    pairs = []

    def overlap(action: Any, context: Any) -> None:
        pairs.append(action)
        side_by_side(action, context)

    pipeline.schedule(MICROBATCHES).register_custom_function(_ComputationType.OVERLAP_F_B, overlap)
    found = plain_step(pipeline, number)
    assert pairs
    return found


def side_by_side(action: Any, context: Any) -> None:
    """Run both actions of a pair at once."""
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    for_forward, for_backward = action.sub_actions

    def forward() -> None:
        index, microbatch = for_forward.stage_index, for_forward.microbatch_index
        for work in schedule.fwd_recv_ops.pop((index, microbatch), ()):
            work.wait()
        output = stages[index].forward_one_chunk(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
        schedule._maybe_compute_loss(stages[index], output, context.target_mbs, microbatch)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, microbatch)

    def backward() -> None:
        index, microbatch = for_backward.stage_index, for_backward.microbatch_index
        for work in schedule.bwd_recv_ops.pop((index, microbatch), ()):
            work.wait()
        stages[index].backward_one_chunk(microbatch, loss=schedule._maybe_get_loss(stages[index], microbatch))
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stages[index].get_local_bwd_output(microbatch), microbatch)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(backward)
        forward()
        running.result()


# Other stages


def make_checkpointed(index: int) -> nn.Module:
    """Make a stage whose second block is recomputed."""
    stage = make_stage(index)
    assert isinstance(stage, nn.Sequential)
    block = stage[1]
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return stage


def make_compiled(index: int) -> nn.Module:
    """Make a stage of compiled blocks."""
    stage = make_stage(index)
    for block in stage.children():
        block.compile(backend="aot_eager", fullgraph=True)
    return stage


def make_compiled_whole(index: int) -> nn.Module:
    """Make a stage that is one graph."""
    stage = make_stage(index)
    stage.compile(backend="aot_eager", fullgraph=True)
    return stage


def make_sharded(index: int) -> nn.Module:
    """Make a stage that FSDP gathers and reshards, on a mesh of this rank alone."""
    stage = make_stage(index)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stages", "shards"))["shards"]
    for block in stage.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(stage, mesh=mesh)
