"""Two ranks of a pipeline of W1's layers, and the first stage's activations brought down to what the last one's may be.

Covers: 1F1B with two layers a rank, interleaved 1F1B with two chunks of one layer, as ``torch.distributed.pipelining`` runs them over NCCL
or gloo; with and without backhaul.
Does not cover: the same from one rank's sight, with noise for neighbours (benchmarks/pipelined.py).

Every rank may have the same peak: a share of what the first one has without backhaul. Its budget is that, less what a step needs beside
saved tensors, which a step under an endless budget tells. Offloading alone cannot halve what a stage of two ranks has: its two microbatches
would have to leave and come back within the time of one. So the first rank also makes again what is cheap.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import backhaul as bh
from benchmarks.run import determinism
from benchmarks.two_devices.ranks import NUM_RANKS, Findings, Rank, first_difference, in_turn, sizes_of
from benchmarks.workloads import dsv3
from benchmarks.workloads.base import Group, initialise, seeded_normal

CHUNKS = {"1F1B": 1, "Interleaved1F1B": 2}  # of a rank
LAYERS = 2  # of a rank
VOCABULARY = 4096
DTYPE = torch.bfloat16
ENDLESS = 1 << 50
PLAN = {"*norm": "recompute", "*": "offload"}


def stage_module(sizes: dsv3.Sizes, index: int, num_layers: int) -> nn.Module:
    """Make the layers of a stage, the first one with an embedding."""
    chunk = dsv3.Chunk(num_layers, lambda: dsv3.Layer(sizes, dsv3.TopKRouter, Group, DTYPE))
    module = nn.Sequential(nn.Embedding(VOCABULARY, sizes.hidden, dtype=DTYPE), chunk) if index == 0 else nn.Sequential(chunk)
    initialise(module, seed=index)
    return module


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss of which the target is the gradient."""
    return (output * target).sum(dtype=torch.float32)


class Pipeline:
    """This rank's stages, and steps that are all the same."""

    def __init__(self, rank: Rank, name: str, sizes: dsv3.Sizes) -> None:
        self.rank, chunks = rank, CHUNKS[name]
        indices = range(rank.index, NUM_RANKS * chunks, NUM_RANKS)
        with rank.device:
            self.modules = [stage_module(sizes, index, LAYERS // chunks) for index in indices]
        ids = torch.empty(sizes.tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(sizes.tokens, sizes.hidden, dtype=DTYPE, device="meta", requires_grad=True)
        stages = [
            PipelineStage(module, index, NUM_RANKS * chunks, rank.device, ids if index == 0 else hidden, hidden)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        kind: Callable[..., Any] = Schedule1F1B if chunks == 1 else ScheduleInterleaved1F1B
        self.schedule = kind(stages[0] if chunks == 1 else stages, sizes.microbatches, loss_fn=loss, scale_grads=False)
        rows = sizes.microbatches * sizes.tokens
        self.given: tuple[Tensor, ...] = ()
        self.wanted: dict[str, Any] = {}
        if stages[0].is_first:
            generator = torch.Generator(rank.device).manual_seed(0)
            self.given = (torch.randint(VOCABULARY, (rows,), generator=generator, device=rank.device),)
        if stages[-1].is_last:
            self.wanted = {"target": seeded_normal(rows, sizes.hidden, seed=1, device=rank.device, dtype=DTYPE)}
        self.parameters = [parameter for module in self.modules for parameter in module.parameters()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> list[Tensor]:
        """Run all microbatches forward and back. Return the losses, where this rank has them."""
        for parameter in self.parameters:
            parameter.grad.zero_()
        losses: list[Tensor] = []
        self.schedule.step(*self.given, return_outputs=False, **(self.wanted | {"losses": losses} if self.wanted else {}))
        return [loss.detach() for loss in losses]

    def exact_step(self) -> list[float]:
        """Run a step with deterministic kernels."""
        with determinism(True):
            losses = self.step()
            self.rank.synchronize()
        return [loss.item() for loss in losses]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters]

    def manage(self, way: str, budgets: list[int]) -> list[bh.Handle]:
        """Put all stages under one handle, or where a plan is applied, each under its own."""
        options = {"tier": bh.PinnedHost(), "min_bytes": None if self.rank.full else 0}
        if way == "offload":
            return [bh.offload(self.modules, activation_budget=budgets[0], **options)]
        stages = zip(self.modules, budgets, strict=True)
        return [bh.apply(module, PLAN, activation_budget=budget, **options) for module, budget in stages]

    def endless(self, way: str) -> "Endless":
        """Run two steps in which nothing has to leave; the first one copies all the same, since nothing is known yet."""
        handles = self.manage(way, [ENDLESS] * len(self.modules))
        steps = [self.rank.measure(self.step) for _ in range(2)]
        saved = [handle.stats.peak_resident_bytes for handle in handles]
        end(handles)
        return Endless(saved, steps[1].peak_bytes or sum(saved))


@dataclass(frozen=True)
class Endless:
    """What this rank has at peak under an endless budget."""

    saved_bytes: list[int]  # of each handle
    peak_bytes: int

    def budgets(self, target: int) -> list[int]:
        """Divide what saved tensors may have, if ``target`` is for all activations, among the handles."""
        saved = sum(self.saved_bytes)
        budget = max(0, target - (self.peak_bytes - saved))
        return [int(budget * each / saved) for each in self.saved_bytes]


def run(rank: Rank, findings: Findings, given: str | None, options: argparse.Namespace) -> None:
    assert given is not None
    sizes = replace(
        dsv3.Sizes() if rank.full else dsv3.TINY,
        num_layers=LAYERS,
        microbatches=16 if rank.full else 4,
        stages=NUM_RANKS,
        chunks=CHUNKS[given],
    )
    findings.note(model="DeepSeek-V3 layers, PP2", schedule=given, dtype=str(DTYPE), **asdict(sizes))
    pipeline = Pipeline(rank, given, sizes)
    losses = pipeline.exact_step()
    expected = [gradient.clone() for gradient in pipeline.gradients()]
    again = pipeline.exact_step()
    same = again == losses and all(map(torch.equal, pipeline.gradients(), expected))
    findings.must("plain run equals itself", rank.all(same))
    steps = [rank.measure(pipeline.step) for _ in range(3)]
    endless = pipeline.endless("offload")
    saved = rank.gather(sum(endless.saved_bytes))
    peaks = rank.peaks(steps[1:])
    findings.tell("plain: step, activations at peak, saved", f"{min(rank.slowest_ms(steps)):.1f} ms, {sizes_of(peaks)}, {sizes_of(saved)}")
    plain = Plain(losses, expected, peaks, saved)
    for each in options.ways.split(","):
        way, _, share = each.partition(":")
        compare(rank, findings, pipeline, way, float(share), options.pairs, plain)


@dataclass(frozen=True)
class Plain:
    """The pipeline without backhaul."""

    losses: list[float]
    gradients: list[Tensor]
    peaks: list[int] | None  # of each rank
    saved: list[int]


def compare(rank: Rank, findings: Findings, pipeline: Pipeline, way: str, share: float, pairs: int, plain: Plain) -> None:
    """Run the pipeline with backhaul, and say what is the same, what stayed and what it cost. ``apply+offload``: each rank its own way."""
    name = f"{way} {share:.0%}"
    way = way.split("+")[rank.index % (1 + way.count("+"))]
    budgets = pipeline.endless(way).budgets(int(share * (plain.peaks or plain.saved)[0]))
    handles = pipeline.manage(way, [sum(budgets)] if way == "offload" else budgets)

    def exact() -> tuple[list[float], bool]:
        losses = pipeline.exact_step()
        return losses, all(map(torch.equal, pipeline.gradients(), plain.gradients))

    try:
        first = exact()
        for _ in range(8 if rank.full else 2):  # the order becomes known, plans are made
            pipeline.step()
        before = sum(handle.stats.offloaded_bytes for handle in handles)
        timed = in_turn(rank, handles, pipeline.step, pairs)
        moved = sum(handle.stats.offloaded_bytes for handle in handles) - before
        last = exact()
        stats, reports = [handle.stats for handle in handles], [str(handle.report()) for handle in handles]
    finally:
        end(handles)

    figure = first_difference(last[0], plain.losses) if plain.losses else ""
    findings.must(f"{name}: losses equal, bit for bit", rank.all(first[0] == last[0] == plain.losses), rank.gather(figure)[-1])
    findings.must(f"{name}: gradients equal in the first step", rank.all(first[1]))
    findings.must(f"{name}: gradients equal in the last step", rank.all(last[1]))
    findings.tell(f"{name}: offloaded a step; budgets", f"{sizes_of(rank.gather(moved // pairs))}; {sizes_of(rank.gather(sum(budgets)))}")
    resident = rank.gather(sum(each.peak_resident_bytes for each in stats))[0] / plain.saved[0]
    findings.aim(f"{name}: first rank's saved bytes at most {share:.0%}", resident <= 1.02 * share, f"{resident:.1%}")
    if timed.peak_bytes is not None and plain.peaks is not None:
        lower = timed.peak_bytes[0] / plain.peaks[0]
        findings.aim(f"{name}: first rank's activations at most {share:.0%}", lower <= 1.02 * share, f"{lower:.1%}")
        findings.aim(f"{name}: peaks equal within 5 %", max(timed.peak_bytes) <= 1.05 * min(timed.peak_bytes), sizes_of(timed.peak_bytes))
    findings.aim(f"{name}: step at most +3 %", timed.ratio <= 1.03, timed.figure)
    findings.note(**{name: {"steps": asdict(timed), "stats": rank.gather(list(map(asdict, stats))), "reports": rank.gather(reports)}})


def end(handles: list[bh.Handle]) -> None:
    """Remove handles and give their host memory back to the arena."""
    for handle in handles:
        handle.remove()
