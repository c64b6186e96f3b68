"""Context parallel by hand: attention over all tokens, of which each rank has its share, by an exchange of heads or a gathering of keys.

``torch.distributed.tensor.experimental.context_parallel`` is not here: it replaces CUDA's attention kernels and has none for a CPU.
"""

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from tests.distributed.launcher import World
from tests.distributed.models import DEPTH, INPUT_BYTES, WIDTH, Checkpointed, Stack, step
from tests.distributed.training import Moved, moved

HEADS = 4

# Renamed after torch 2.11.
gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ByHeads(nn.Module):
    """Ulysses: swap a share of the tokens for a share of the heads, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.to_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.to_tokens(F.scaled_dot_product_attention(q, k, v)))

    def to_heads(self, x: Tensor) -> Tensor:
        heads = x.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1).contiguous()
        return (
            collectives.all_to_all_single_autograd(heads, None, None, dist.group.WORLD)
            .reshape(2, HEADS // 2, -1, WIDTH // HEADS)
            .transpose(0, 1)
            .flatten(1, 2)
        )

    def to_tokens(self, x: Tensor) -> Tensor:
        tokens = x.reshape(HEADS // 2, 2, -1, WIDTH // HEADS).transpose(0, 1).contiguous()
        heads = collectives.all_to_all_single_autograd(tokens.flatten(0, 1), None, None, dist.group.WORLD)
        return heads.transpose(0, 1).reshape(-1, WIDTH)


class ByKeys(ByHeads):
    """Gather the keys and values of all tokens; keep the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(x).split([WIDTH, 2 * WIDTH], dim=-1)
        k, v = gather(kv.contiguous(), 0, dist.group.WORLD).chunk(2, dim=-1)
        q, k, v = (part.reshape(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for part in (q, k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, WIDTH))


def train(kind: str, how: str) -> Moved:
    block = {"heads": ByHeads, "keys": ByKeys}[kind]

    def change(model: nn.Module) -> nn.Module:
        if how == "checkpoint":
            model.layers = nn.ModuleList([Checkpointed(layer) for layer in model.layers])
        elif how == "compile":
            for layer in model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        return model

    return moved(lambda: Stack(block), change, step, plan={"layers.*": "recompute", "*": "offload"} if how == "plan" else None)


@pytest.mark.parametrize("kind", ["heads", "keys"])
def test_a_plan_recomputes_blocks_that_attend_to_the_tokens_of_all_ranks(world: World, kind):
    for answer in world.run(train, kind, "plan"):
        assert answer.weights == []
        assert answer.first == [INPUT_BYTES] * DEPTH  # the head's input is made again with its block
        assert answer.recomputed_bytes > 3 * DEPTH * 5 * INPUT_BYTES


@pytest.mark.parametrize("how", ["eager", "checkpoint", "compile"])
@pytest.mark.parametrize("kind", ["heads", "keys"])
def test_attention_over_the_tokens_of_all_ranks_trains_the_same(world: World, kind, how):
    for answer in world.run(train, kind, how):
        assert answer.weights == []
        if how == "checkpoint":
            assert answer.first == [INPUT_BYTES] * (DEPTH + 1)
        else:
            assert sum(answer.first) > DEPTH * 5 * INPUT_BYTES
