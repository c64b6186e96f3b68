"""W1, W1s, W1v: one rank of DeepSeek-V3 under PP4 and EP16.

Covers: four MoE layers with multi-head latent attention (arXiv:2412.19437), 16 local experts, and the schedule of the first pipeline stage.
Does not cover: communication. The local experts get as many token copies as a balanced EP16 would send them: ``top_k`` of every token.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.base import Group, GroupFactory, Slot, Workload, initialise, one_f_one_b, seeded_normal


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Public sizes of DeepSeek-V3, and this rank's share."""

    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    head: int = 128  # of a query or key, without position
    rope_head: int = 64  # of a query or key, with position
    value_head: int = 128
    expert: int = 2048
    num_experts: int = 16
    top_k: int = 8
    num_layers: int = 4
    tokens: int = 4096
    microbatches: int = 20
    stages: int = 4
    chunks: int = 1


TINY = Sizes(
    hidden=64,
    heads=4,
    q_lora=24,
    kv_lora=16,
    head=16,
    rope_head=8,
    value_head=16,
    expert=32,
    num_experts=4,
    top_k=2,
    tokens=64,
    microbatches=8,
)


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up * weight`` as one node that saves its inputs only: gate and up side by side, and a (rows, 1) weight or None."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        gate, up = hidden.chunk(2, dim=-1)
        product = F.silu(gate).mul_(up)
        return product if weight is None else product.mul_(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gate, up = hidden.chunk(2, dim=-1)
        act = F.silu(gate)
        weight_grad = None
        if weight is not None:
            weight_grad = (act * up).mul_(grad).sum(dim=-1, keepdim=True)
            grad = grad * weight
        hidden_grad = torch.empty_like(hidden)
        gate_grad, up_grad = hidden_grad.chunk(2, dim=-1)
        torch.mul(grad, act, out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return hidden_grad, weight_grad


class Activation(nn.Module):
    """``SwiGLU`` as a module, so that a plan can name it."""

    def forward(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return SwiGLU.apply(hidden, weight)


class Rotary(nn.Module):
    """Turns what has position."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(sizes.tokens), 10_000.0 ** -(torch.arange(0, sizes.rope_head, 2) / sizes.rope_head))[:, None, :]
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * self.cos - right * self.sin, right * self.cos + left * self.sin], dim=-1)


def by_head(x: Tensor) -> Tensor:
    """Turn (tokens, heads, head) into (1, heads, tokens, head)."""
    return x[None].transpose(1, 2)


class Queries(nn.Module):
    """All heads' queries from their low-rank vectors."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.up = nn.Linear(s.q_lora, s.heads * (s.head + s.rope_head), bias=False, dtype=dtype)
        self.rotary = Rotary(s, dtype)

    def forward(self, latent: Tensor) -> Tensor:
        s = self.sizes
        plain, rope = self.up(latent).view(-1, s.heads, s.head + s.rope_head).split([s.head, s.rope_head], dim=-1)
        return by_head(torch.cat([plain, self.rotary(rope)], dim=-1))


class KeysValues(nn.Module):
    """All heads' keys and values from their low-rank vectors, and the part of the keys that has position, which all heads share."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.up = nn.Linear(s.kv_lora, s.heads * (s.head + s.value_head), bias=False, dtype=dtype)
        self.rotary = Rotary(s, dtype)

    def forward(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sizes
        plain, values = self.up(latent).view(-1, s.heads, s.head + s.value_head).split([s.head, s.value_head], dim=-1)
        keys = torch.cat([plain, self.rotary(rope[:, None, :]).expand(-1, s.heads, -1)], dim=-1)
        return by_head(keys), by_head(values)


class LatentAttention(nn.Module):
    """Queries, keys and values come from low-rank vectors."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.q_down = nn.Linear(s.hidden, s.q_lora, bias=False, dtype=dtype)
        self.q_norm = nn.RMSNorm(s.q_lora, eps=1e-6, dtype=dtype)
        self.queries = Queries(s, dtype)
        self.kv_down = nn.Linear(s.hidden, s.kv_lora + s.rope_head, bias=False, dtype=dtype)
        self.kv_norm = nn.RMSNorm(s.kv_lora, eps=1e-6, dtype=dtype)
        self.keys_values = KeysValues(s, dtype)
        self.out = nn.Linear(s.heads * s.value_head, s.hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        s = self.sizes
        queries = self.queries(self.q_norm(self.q_down(x)))
        latent, rope = self.kv_down(x).split([s.kv_lora, s.rope_head], dim=-1)
        keys, values = self.keys_values(self.kv_norm(latent), rope)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(-1, s.heads * s.value_head))


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where token copies go: sorted by expert."""

    tokens: Tensor  # (copies,) the token that each copy is of
    weight: Tensor  # (copies, 1)
    ends: Tensor  # (experts,) int32: where each expert's copies end


class TopKRouter(nn.Module):
    """Dropless top-k routing. The counts come from ``bincount``, for which the host waits, as dropless routers do."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate = nn.Linear(sizes.hidden, sizes.num_experts, bias=False, dtype=dtype)

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(self.sizes.top_k, dim=-1).indices

    def count(self, experts: Tensor) -> Tensor:
        return torch.bincount(experts, minlength=self.sizes.num_experts)

    def forward(self, x: Tensor) -> Dispatch:
        scores = self.gate(x).float().sigmoid()
        chosen = self.choose(scores)
        weight = scores.gather(1, chosen)
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        experts, order = chosen.flatten().sort(stable=True)
        ends = self.count(experts).cumsum(0).to(torch.int32)
        return Dispatch(tokens=order // self.sizes.top_k, weight=weight.view(-1, 1).index_select(0, order), ends=ends)


class EvenRouter(TopKRouter):
    """As many copies for every expert, whatever the scores: nothing to count, so the host never waits."""

    def choose(self, scores: Tensor) -> Tensor:
        s = self.sizes
        return torch.arange(len(scores) * s.top_k, device=scores.device).remainder(s.num_experts).view(-1, s.top_k)

    def count(self, experts: Tensor) -> Tensor:
        return torch.full((self.sizes.num_experts,), len(experts) // self.sizes.num_experts, device=experts.device)


class MixtureOfExperts(nn.Module):
    """Routed experts as two grouped matrix products, and one shared expert."""

    def __init__(self, sizes: Sizes, router: type[TopKRouter], group: GroupFactory, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.router = router(sizes, dtype)
        # (expert, in, out), so that the products save the Parameters themselves and no views of them.
        self.fc1 = nn.Parameter(torch.empty(sizes.num_experts, sizes.hidden, 2 * sizes.expert, dtype=dtype))
        self.fc2 = nn.Parameter(torch.empty(sizes.num_experts, sizes.expert, sizes.hidden, dtype=dtype))
        self.act = Activation()
        self.shared_act = Activation()
        self.shared_gate = nn.Linear(sizes.hidden, 2 * sizes.expert, bias=False, dtype=dtype)
        self.shared_down = nn.Linear(sizes.expert, sizes.hidden, bias=False, dtype=dtype)

    def routed(self, x: Tensor, to: Dispatch) -> Tensor:
        tokens = x.index_select(0, to.tokens)
        fc1 = self.group("expert_fc1", tokens)
        with fc1 as tokens:
            hidden = torch._grouped_mm(tokens, self.fc1, offs=to.ends)
        del tokens
        hidden = fc1.commit(hidden)
        act = self.group("moe_act", hidden)
        with act as hidden:
            product = self.act(hidden, to.weight)
        del hidden
        return act.commit(torch._grouped_mm(product, self.fc2, offs=to.ends))

    def forward(self, x: Tensor) -> Tensor:
        to = self.router(x)
        shared = self.shared_down(self.shared_act(self.shared_gate(x), None))
        return shared.index_add(0, to.tokens, self.routed(x, to))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, router: type[TopKRouter], group: GroupFactory, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.attn_norm = nn.RMSNorm(sizes.hidden, eps=1e-6, dtype=dtype)
        self.attn = LatentAttention(sizes, dtype)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=1e-6, dtype=dtype)
        self.moe = MixtureOfExperts(sizes, router, group, dtype)

    def residual(self, name: str, norm: nn.Module, body: nn.Module, x: Tensor) -> Tensor:
        group = self.group(name, x)
        with group as x:
            normed = norm(x)
        return group.commit(x + body(normed))

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual("attn_norm", self.attn_norm, self.attn, x)
        return self.residual("mlp_norm", self.mlp_norm, self.moe, x)


class Chunk(nn.Module):
    """Consecutive layers that one microbatch goes through in one go."""

    def __init__(self, num_layers: int, make: Callable[[], Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# What is cheap to make again for the bytes that it frees; the gather of dispatched tokens is found by itself.
PLAN = {
    "*.{attn_norm,mlp_norm,q_norm,kv_norm}": "recompute",
    "*.attn.{queries,keys_values}": "recompute",
    "*.moe.{act,shared_act}": "recompute",
    "*": "offload",
}
# What frees more for each millisecond than the others: the product that makes queries takes three times as long as that of keys and
# values for two fifths of the bytes, and SwiGLU written out in four kernels frees a quarter of what it would as one.
LEAN = {
    "*.{attn_norm,mlp_norm,q_norm,kv_norm}": "recompute",
    "*.attn.keys_values": "recompute",
    "*": "offload",
}


class DeepSeekStage(Workload):
    """The first pipeline stage. Inputs and the gradients of outputs are noise, made when a slot begins, as if just received."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        device: torch.device,
        router: type[TopKRouter] = TopKRouter,
        group: GroupFactory = Group,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        with device:
            self.chunks = nn.ModuleList(
                Chunk(sizes.num_layers // sizes.chunks, lambda: Layer(sizes, router, group, dtype)) for _ in range(sizes.chunks)
            )
        initialise(self.chunks, seed=seed)
        self.blocks = [layer for chunk in self.chunks for layer in chunk.layers]
        self.plan, self.lean = PLAN, LEAN
        self.slots = one_f_one_b(sizes.microbatches, stages=sizes.stages, chunks=sizes.chunks)
        self.facts = {"model": "DeepSeek-V3, one rank of PP4 EP16", "router": router.__name__, "dtype": str(dtype), **asdict(sizes)}
        self.sizes, self.device, self.dtype = sizes, device, dtype

    def noise(self, slot: Slot, offset: int) -> Tensor:
        seed = 2 * (slot.microbatch * self.sizes.chunks + slot.chunk) + offset
        return seeded_normal(self.sizes.tokens, self.sizes.hidden, seed=seed, device=self.device, dtype=self.dtype)

    def forward(self, slot: Slot) -> Tensor:
        return self.chunks[slot.chunk](self.noise(slot, 0).requires_grad_())

    def output_grad(self, slot: Slot) -> Tensor:
        return self.noise(slot, 1)
