"""W3 and W4: transformers' own Qwen3 models, unmodified, with a loss in chunks.

Covers: Qwen3-8B cut to 8 layers, Qwen3-30B-A3B cut to 12, random weights, one sequence.
Does not cover: the models themselves; they come from transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backhaul.presets import norms_and_activations
from benchmarks.workloads.base import Slot, Workload, initialise

LOSS_CHUNK = 2048  # tokens whose logits are on the device at once


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``config`` holds what the public configuration says, under transformers' own names."""

    family: str  # "Qwen3" or "Qwen3Moe"
    tokens: int
    config: Mapping[str, int | float | bool] = field(default_factory=dict)


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 8,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 12,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_hidden_layers": 2,
}

DENSE = Sizes(family="Qwen3", tokens=16384, config=QWEN3_8B)
MOE = Sizes(family="Qwen3Moe", tokens=8192, config=QWEN3_30B_A3B)
TINY_DENSE = Sizes(family="Qwen3", tokens=64, config=QWEN3_8B | SMALL)
TINY_MOE = Sizes(
    family="Qwen3Moe", tokens=64, config=QWEN3_30B_A3B | SMALL | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
)


class WithLoss(nn.Module):
    """A causal language model and its loss, the logits of ``LOSS_CHUNK`` tokens at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def chunk_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        chunks = zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True)
        losses = [checkpoint(self.chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / len(labels)


class QwenTraining(Workload):
    """Forward and backward of one sequence of random tokens."""

    def __init__(self, sizes: Sizes, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        import transformers

        config = getattr(transformers, f"{sizes.family}Config")(**sizes.config)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
        initialise(model, seed=seed)
        # Rows of an embedding are looked up, not multiplied: its fan-in is one.
        nn.init.normal_(model.get_input_embeddings().weight, generator=torch.Generator(device).manual_seed(seed))
        self.chunks = nn.ModuleList([WithLoss(model)])
        self.blocks = list(model.model.layers)
        self.plan = {**norms_and_activations, "*": "offload"}
        num_layers = config.num_hidden_layers
        # The link hides what the first layers save: the forward pass of all others comes in between.
        late = range(num_layers // 4, num_layers)
        part = "experts" if sizes.family == "Qwen3Moe" else "up_proj"
        self.tight = {**{f"*.layers.{layer}.mlp.{part}": "recompute" for layer in late}, "*": "offload"}
        self.slots = (Slot(kind="forward", microbatch=0), Slot(kind="backward", microbatch=0))
        self.facts = {
            "model": type(model).__name__,
            "transformers": transformers.__version__,
            "experts": getattr(config, "_experts_implementation", None),
            "dtype": str(dtype),
            "tokens": sizes.tokens,
            **sizes.config,
        }
        generator = torch.Generator(device).manual_seed(seed + 1)
        self.ids = torch.randint(config.vocab_size, (sizes.tokens + 1,), generator=generator, device=device)

    def forward(self, slot: Slot) -> Tensor:
        return self.chunks[slot.chunk](self.ids[None, :-1], self.ids[1:])

    def output_grad(self, slot: Slot) -> None:
        return None
