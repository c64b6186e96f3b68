"""FSDP2 with experts spread over the ranks: W2's blocks, compiled and checkpointed, and their inputs offloaded.

Covers: six layers of GLM-4.5-Air, weights gathered by ``fully_shard``, experts as ``DTensor``s, tokens that travel by all-to-all; the same
training with and without backhaul.
Does not cover: blocks without communication (workloads/glm.py).

Nothing here adds in an order that may change: each token gathers what its experts made of it, and gradients go back the same way. With
deterministic kernels the plain run then equals itself.
"""

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import backhaul as bh
from benchmarks.run import determinism
from benchmarks.two_devices.ranks import (
    NUM_RANKS,
    Findings,
    Rank,
    first_difference,
    gb,
    global_norm,
    in_turn,
    local,
    sign_step,
    sizes_of,
)
from benchmarks.workloads import glm
from benchmarks.workloads.base import initialise, seeded_normal

VOCABULARY = 8192
DTYPE = torch.bfloat16


class Rows(torch.autograd.Function):
    """``x[forth]``; row ``i`` of ``x`` has become the rows ``back[i]`` and no others, so its gradient is their sum in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back.flatten()).view(*back.shape, -1).sum(1), None, None


class Exchange(torch.autograd.Function):
    """All-to-all: rows ``there[i]`` go to rank ``i``, ``here[i]`` come from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: list[int], here: list[int]) -> Tensor:
        ctx.splits = here, there
        received = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(received, x.contiguous(), here, there)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(grad, *ctx.splits), None, None


class SpreadExperts(glm.MixtureOfExperts):
    """Every copy of a token goes to the rank of its expert and back. The host waits for the counts, as dropless routers make it."""

    def forward(self, x: Tensor) -> Tensor:
        s = self.sizes
        weight, chosen = self.router(x).float().sigmoid().topk(s.top_k, dim=-1)
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        experts, order = chosen.flatten().sort(stable=True)
        place = order.argsort()
        ends = torch.searchsorted(experts, torch.arange(s.num_experts, device=x.device), right=True)
        copies = Rows.apply(x, order // s.top_k, place.view(-1, s.top_k))
        routed = self.exchanged(copies, ends - F.pad(ends[:-1], (1, 0)))
        mixed = Rows.apply(routed, place, order[:, None]).view(-1, s.top_k, s.hidden) * weight[..., None]
        return self.shared(x) + mixed.sum(1)

    @torch.compiler.disable  # as many rows as the router says: shapes that change from step to step
    def exchanged(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts, wherever they are, make of copies that are sorted by expert."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)  # from each rank, for each expert here
        there, here = torch.stack([counts, received]).view(2, NUM_RANKS, -1).sum(-1).tolist()
        tokens = Exchange.apply(copies, there, here)
        num_here = len(received) // NUM_RANKS
        experts = torch.arange(num_here, device=tokens.device).repeat(NUM_RANKS).repeat_interleave(received, output_size=sum(here))
        order = experts.sort(stable=True).indices
        place = order.argsort()
        ends = received.view(NUM_RANKS, -1).sum(0).cumsum(0).to(torch.int32)
        gate, up, down = (local(weight) for weight in (self.gate, self.up, self.down))
        tokens = Rows.apply(tokens, order, place[:, None])
        hidden = F.silu(torch._grouped_mm(tokens, gate, offs=ends)) * torch._grouped_mm(tokens, up, offs=ends)
        made = torch._grouped_mm(hidden, down, offs=ends)
        return Exchange.apply(Rows.apply(made, place, order[:, None]), here, there)


class Model(nn.Module):
    """Embedded tokens through all blocks."""

    def __init__(self, sizes: glm.Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden, dtype=DTYPE)
        experts = [SpreadExperts(sizes, DTYPE) for _ in range(sizes.num_layers - 1)]
        mlps = (glm.GatedMLP(sizes.hidden, sizes.dense, DTYPE), *experts)
        self.blocks = nn.ModuleList([glm.Block(sizes, mlp, DTYPE) for mlp in mlps])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """The sharded model, and steps that depend on their number alone."""

    def __init__(self, rank: Rank, sizes: glm.Sizes) -> None:
        self.rank, self.sizes, self.num_steps = rank, sizes, 20 if rank.full else 4
        with rank.device:
            self.model = Model(sizes)
        initialise(self.model, seed=0)  # the same on every rank, of which each keeps a share
        mesh = init_device_mesh(rank.device.type, (NUM_RANKS,), mesh_dim_names=("ranks",))
        compile = partial(torch.compile, backend="inductor" if rank.on_gpu else "aot_eager")
        self.spread: list[nn.Parameter] = []
        for index, block in enumerate(self.model.blocks):
            if isinstance(block.mlp, SpreadExperts):
                block.mlp.shard(mesh)
                self.spread += [block.mlp.gate, block.mlp.up, block.mlp.down]
            self.model.blocks[index] = fully_shard(glm.checkpoint_compile(block, compile), mesh=mesh, ignored_params=set(self.spread))
        fully_shard(self.model, mesh=mesh)
        self.start = self.weights()

    def weights(self) -> list[Tensor]:
        return [local(parameter.detach()).clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def restart(self) -> None:
        """Put the weights back to where they began."""
        for parameter, start in zip(self.model.parameters(), self.start, strict=True):
            local(parameter).copy_(start)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Train on this rank's tokens of a step. Return the loss and the norm of the gradient."""
        s, device, seed = self.sizes, self.rank.device, NUM_RANKS * number + self.rank.index
        ids = torch.randint(VOCABULARY, (s.tokens,), generator=torch.Generator(device).manual_seed(seed), device=device)
        target = seeded_normal(s.tokens, s.hidden, seed=seed, device=device, dtype=DTYPE)
        loss = F.mse_loss(self.model(ids).float(), target.float())
        loss.backward()
        for parameter in self.spread:  # the others are averaged by FSDP
            local(parameter.grad).div_(NUM_RANKS)
        norm = global_norm(parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        sign_step(self.model.parameters(), lr=1e-3)
        return loss.detach(), norm

    def train(self) -> "Trained":
        """Train from the start, and keep what must not differ."""
        self.restart()
        steps = [self.rank.measure(partial(self.step, number)) for number in range(self.num_steps)]
        losses, norms = ([step.result[which].item() for step in steps] for which in range(2))
        return Trained(losses, norms, self.weights(), self.rank.peaks(steps[self.num_steps // 2 :]))


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: list[Tensor]
    peak_bytes: list[int] | None  # of each rank

    def same_weights(self, other: "Trained") -> bool:
        return all(map(torch.equal, self.weights, other.weights))


def run(rank: Rank, findings: Findings, given: str | None, options: argparse.Namespace) -> None:
    sizes = replace(glm.Sizes(), num_layers=6, num_experts=32) if rank.full else glm.TINY
    if options.tokens:
        sizes = replace(sizes, tokens=options.tokens)
    findings.note(model="GLM-4.5-Air, FSDP2 and EP over two ranks", blocks="checkpoint_compile", dtype=str(DTYPE), **asdict(sizes))
    with determinism(True):
        training = Training(rank, sizes)
        plain = training.train()
        findings.tell("plain: loss first and last, peak", f"{plain.losses[0]:.5f} {plain.losses[-1]:.5f}, {sizes_of(plain.peak_bytes)}")
        again = training.train()  # everything is compiled now, and allocators have what they need
        itself = again.losses == plain.losses and again.norms == plain.norms and again.same_weights(plain)
        findings.must("plain run equals itself", rank.all(itself), first_difference(again.losses, plain.losses))
        for budget in (0, None):
            compare(rank, findings, training, again, budget, options.pairs)


def compare(rank: Rank, findings: Findings, training: Training, plain: Trained, budget: int | None, pairs: int) -> None:
    """Train with backhaul, and say what is the same, what moved and what it cost."""
    name = f"budget {budget}"
    s = training.sizes
    input_bytes = s.tokens * s.hidden * DTYPE.itemsize
    small_bytes = s.tokens * torch.int64.itemsize  # the ids, kept by the embedding
    resident = psutil.Process().memory_info().rss
    tier = bh.PinnedHost()
    with bh.offload(training.model, tier=tier, activation_budget=budget, min_bytes=None if rank.full else small_bytes + 1) as handle:
        training.restart()
        first = rank.measure(partial(training.step, 0))
        del first
        stored_first = handle.stats.offloaded_bytes
        got = training.train()
        stats = handle.stats
        grown = psutil.Process().memory_info().rss - resident
        timed = in_turn(rank, [handle], partial(training.step, 0), pairs)
        locked, report = tier.locked_bytes, str(handle.report())
    tier.close()

    for what, mine, others in (("losses", got.losses, plain.losses), ("gradient norms", got.norms, plain.norms)):
        findings.must(f"{name}: {what} equal, bit for bit", rank.all(mine == others), first_difference(mine, others))
    findings.must(f"{name}: weights after {training.num_steps} steps equal, bit for bit", rank.all(got.same_weights(plain)))
    frames = training.num_steps + 1
    only_inputs = (
        stored_first == s.num_layers * input_bytes
        and stats.saved_bytes == frames * (s.num_layers * input_bytes + small_bytes)
        and stats.offloaded_bytes == stats.num_offloads * input_bytes
    )
    figure = f"first step {stored_first} of {s.num_layers} x {input_bytes}; in {frames} steps {stats.num_offloads} inputs"
    findings.must(f"{name}: layer inputs move and nothing else", rank.all(only_inputs), figure)
    findings.aim(f"{name}: step at most +1.5 %", timed.ratio <= 1.015, timed.figure)
    hosts = rank.gather((stats.peak_host_bytes, locked, grown))
    counted = all(host <= s.num_layers * input_bytes and host <= pinned and abs(rss - pinned) <= 2**28 for host, pinned, rss in hosts)
    findings.aim(f"{name}: host bytes as counted, locked, RSS grown", counted, "; ".join(map(sizes_of, hosts)))
    if got.peak_bytes is not None and plain.peak_bytes is not None:
        lower = [before - after for before, after in zip(plain.peak_bytes, got.peak_bytes, strict=True)]
        figure = f"{sizes_of(lower)} of {gb(s.num_layers * input_bytes)} inputs; plain {sizes_of(plain.peak_bytes)}"
        findings.aim(f"{name}: peak lower by half the inputs or more", min(lower) >= 0.5 * s.num_layers * input_bytes, figure)
    findings.note(**{name: {"steps": asdict(timed), "stats": rank.gather(asdict(stats)), "hosts": hosts, "report": report}})
