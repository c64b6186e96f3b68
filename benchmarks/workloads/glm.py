"""W2: one rank of GLM-4.5-Air, cut to 12 layers, under EP8 and CP8, every block compiled and checkpointed.

Covers: the embedding, grouped-query attention with partial rotary, sigmoid routing over this rank's experts, expert weights that are
``DTensor``s on a mesh of one, so that the compiled graph takes their local tensors as inputs, and FSDP2 on a mesh of one.
Does not cover: the head and the loss; communication. Attention is over the local tokens; the local experts get ``top_k`` copies of every
local token, as many as a balanced EP8 would send them.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads.base import Slot, Workload, initialise, seeded_normal


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Public sizes of GLM-4.5-Air, and this rank's share."""

    vocab: int = 151552
    hidden: int = 4096
    heads: int = 96
    kv_heads: int = 8
    head: int = 128
    dense: int = 10944  # the first layer's
    expert: int = 1408
    num_experts: int = 16
    top_k: int = 8
    num_layers: int = 12
    tokens: int = 8192


TINY = Sizes(vocab=256, hidden=64, heads=4, kv_heads=2, head=16, dense=96, expert=32, num_experts=4, top_k=2, num_layers=3, tokens=64)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.q = nn.Linear(s.hidden, s.heads * s.head, bias=False, dtype=dtype)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head, bias=False, dtype=dtype)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head, bias=False, dtype=dtype)
        self.out = nn.Linear(s.heads * s.head, s.hidden, bias=False, dtype=dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the first half of every head."""
        turned, rest = x.chunk(2, dim=-1)
        width = turned.shape[-1]
        speeds = 1e6 ** -(torch.arange(0, width, 2, device=x.device) / width)
        angles = torch.outer(torch.arange(x.shape[0], device=x.device), speeds)[:, None, :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = turned.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        s = self.sizes
        q = self.rotate(self.q(x).view(-1, s.heads, s.head))
        k = self.rotate(self.k(x).view(-1, s.kv_heads, s.head))
        v = self.v(x).view(-1, s.kv_heads, s.head)
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))  # (1, heads, tokens, head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(-1, s.heads * s.head))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.up = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.down = nn.Linear(width, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """Routed experts as three grouped matrix products, and one shared expert. Copies are counted by a search, so the host never waits."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.router = nn.Linear(s.hidden, s.num_experts, bias=False, dtype=dtype)
        self.gate = nn.Parameter(torch.empty(s.num_experts, s.hidden, s.expert, dtype=dtype))
        self.up = nn.Parameter(torch.empty(s.num_experts, s.hidden, s.expert, dtype=dtype))
        self.down = nn.Parameter(torch.empty(s.num_experts, s.expert, s.hidden, dtype=dtype))
        self.shared = GatedMLP(s.hidden, s.expert, dtype)

    def shard(self, mesh: DeviceMesh) -> None:
        """Make the expert weights ``DTensor``s, sharded over experts."""
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), mesh, [Shard(0)])))

    def forward(self, x: Tensor) -> Tensor:
        s = self.sizes
        weight, chosen = self.router(x).float().sigmoid().topk(s.top_k, dim=-1)
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(s.num_experts, device=x.device), right=True).to(torch.int32)
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        source = order // s.top_k
        tokens = x.index_select(0, source)
        hidden = F.silu(torch._grouped_mm(tokens, gate, offs=ends)) * torch._grouped_mm(tokens, up, offs=ends)
        routed = torch._grouped_mm(hidden * weight.view(-1, 1).index_select(0, order), down, offs=ends)
        return self.shared(x).index_add(0, source, routed)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, mlp: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=dtype)
        self.attn = Attention(sizes, dtype)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=dtype)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def compile_checkpoint(block: nn.Module, compile: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Compile the checkpoint with the block: saved-tensor hooks see the block's input and every weight."""
    return compile(Checkpointed(block))


def checkpoint_compile(block: nn.Module, compile: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Checkpoint the compiled block: saved-tensor hooks see the block's input alone."""
    return Checkpointed(compile(block))


class Trunk(nn.Module):
    """The embedding and the blocks. The first block's input comes from an operation, so it may leave as the others' may."""

    def __init__(self, embedding: nn.Embedding, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def spread_experts(trunk: Trunk, mesh: DeviceMesh) -> None:
    """Leave all weights whole but the experts'."""
    for module in trunk.modules():
        if isinstance(module, MixtureOfExperts):
            module.shard(mesh["ep"])


def shard_everything(trunk: Trunk, mesh: DeviceMesh) -> None:
    """Spread the experts, then give every compiled block, and what is left of the trunk, to FSDP2."""
    spread_experts(trunk, mesh)
    for block in trunk.blocks:
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(trunk, mesh=mesh["fsdp"])


class GLMTrunk(Workload):
    """Forward and backward of one microbatch of random tokens; the output's gradient is noise."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        device: torch.device,
        nest: Callable[[nn.Module, Callable[[nn.Module], nn.Module]], nn.Module] = compile_checkpoint,
        distribute: Callable[[Trunk, DeviceMesh], None] = spread_experts,
        backend: str = "inductor",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        with device:
            experts = [MixtureOfExperts(sizes, dtype) for _ in range(sizes.num_layers - 1)]
            blocks = [Block(sizes, mlp, dtype) for mlp in (GatedMLP(sizes.hidden, sizes.dense, dtype), *experts)]
            trunk = Trunk(nn.Embedding(sizes.vocab, sizes.hidden, dtype=dtype), blocks)
        initialise(trunk, seed=seed)
        # Rows of an embedding are looked up, not multiplied: its fan-in is one.
        nn.init.normal_(trunk.embedding.weight, generator=torch.Generator(device).manual_seed(seed))
        self.owns_group = not dist.is_initialized()
        if self.owns_group:
            backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
        torch.compiler.reset()
        trunk.blocks = nn.ModuleList(nest(block, partial(torch.compile, backend=backend)) for block in blocks)
        distribute(trunk, init_device_mesh(device.type, (1, 1), mesh_dim_names=("fsdp", "ep")))
        self.chunks = nn.ModuleList([trunk])
        self.blocks = []
        self.slots = (Slot(kind="forward", microbatch=0), Slot(kind="backward", microbatch=0))
        self.facts = {
            "model": "GLM-4.5-Air, one rank of EP8 CP8",
            "blocks": nest.__name__,
            "distributed": distribute.__name__,
            "dtype": str(dtype),
            **asdict(sizes),
        }
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.ids = torch.randint(sizes.vocab, (sizes.tokens,), generator=torch.Generator(device).manual_seed(seed), device=device)

    def forward(self, slot: Slot) -> Tensor:
        return self.chunks[slot.chunk](self.ids)

    def output_grad(self, slot: Slot) -> Tensor:
        return seeded_normal(self.sizes.tokens, self.sizes.hidden, seed=1, device=self.device, dtype=self.dtype)

    def close(self) -> None:
        if self.owns_group:
            dist.destroy_process_group()
        torch.compiler.reset()
