"""Five transformers models in their own classes, as small as configurations allow, trained plain and under plans.

Covers: building in many settings, adapters on frozen weights, the claim that a plan changes no bit and leaves nothing behind.
Does not cover: which plans (test_apply_models.py, test_apply_random.py).
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import backhaul as bh
from backhaul.testing import RecordingTier, same_bits

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": None,
    "use_cache": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # one dense layer

# What their configurations need beyond SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8, "num_experts": 4},
    "DeepseekV3": {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, **GROUPS},
    "Mixtral": {**EXPERTS, "num_local_experts": 4, "output_router_logits": True},
    "GptOss": {**EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
}
NUM_STEPS = 3


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained."""

    model: str
    attention: str = "eager"
    dropout: float = 0.0
    autocast: bool = False
    bf16: bool = False  # weights and all
    adapters: bool = False  # on weights that are all frozen, the embedding included
    checkpointing: str = ""  # "reentrant" or "non-reentrant"
    experts: str = ""  # how transformers runs them
    layers: int = 2

    def __str__(self) -> str:
        chosen = (
            f"{name}={value}"
            for name, value in vars(self).items()
            if value and (name, value) not in (("attention", "eager"), ("layers", 2))
        )
        return " ".join(chosen).removeprefix("model=")

    def is_possible(self) -> bool:
        """Say whether transformers and torch can do this."""
        without_gradient = self.adapters and self.checkpointing == "reentrant"  # its regions would return none
        return not (without_gradient or (self.model == "GptOss" and self.attention == "sdpa") or (self.model == "Llama" and self.experts))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank path beside it, as PEFT has it."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run both paths."""
        return self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))


def build(setting: Setting) -> nn.Module:
    """Make the model, in training mode; the same each time."""
    config = getattr(transformers, f"{setting.model}Config")(
        **{**SIZES, **MODELS[setting.model], "num_hidden_layers": setting.layers},
        attention_dropout=setting.dropout,
        attn_implementation=setting.attention,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{setting.model}ForCausalLM")(config).train()
    if setting.bf16:
        model.to(torch.bfloat16)
    if setting.experts:
        model.set_experts_implementation(setting.experts)
    if setting.adapters:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name != "lm_head":
                    setattr(module, name, Adapted(child, setting.dropout).to(child.weight.dtype))
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": setting.checkpointing == "reentrant"})
    return model


def tokens(index: int = 0) -> Tensor:
    """Make a batch."""
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, setting: Setting, index: int = 0) -> Tensor:
    """Run the model forward on a batch."""
    ids = tokens(index)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def backward(model: nn.Module, setting: Setting, number: int) -> list[Tensor]:
    """Run forward and backward."""
    loss = loss_of(model, setting, number)
    loss.backward()
    return [loss]


def two_alive(model: nn.Module, setting: Setting, number: int) -> list[Tensor]:
    """Run two forward passes before the first backward, whose order alternates."""
    losses = [loss_of(model, setting, number), loss_of(model, setting, number + 10)]
    for loss in losses[:: -1 if number % 2 else 1]:
        loss.backward()
    return losses


def retained(model: nn.Module, setting: Setting, number: int) -> list[Tensor]:
    """Run backward twice through one graph."""
    loss = loss_of(model, setting, number)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def split(model: nn.Module, setting: Setting, number: int) -> list[Tensor]:
    """Run backward for the input first, then for the weights, as zero-bubble pipelines do."""
    embedded = model.get_input_embeddings()(tokens(number)).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        loss = model(inputs_embeds=embedded, labels=tokens(number)).loss
    of_input = torch.autograd.grad(loss, [embedded], retain_graph=True)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_weights = torch.autograd.grad(loss, weights, allow_unused=True)
    return [loss, *of_input, *(each for each in of_weights if each is not None)]


Step = Callable[[nn.Module, Setting, int], list[Tensor]]


class Trained:
    """A model in one setting, with what plain training makes of it."""

    def __init__(self, setting: Setting, step: Step, model: nn.Module | None = None) -> None:
        self.setting, self.step = setting, step
        self.model = build(setting) if model is None else model
        self.first = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.expected = list(self.steps())
        self.traces = traces(self.model)  # transformers has left its own in the first forward

    def steps(self) -> Iterator[dict[str, Tensor]]:
        """Train from the beginning. Yield, after each step, all that training is made of."""
        model = self.model
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(self.first[name])
        for number in range(NUM_STEPS):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(number)
            state = {f"output {index}": value.detach() for index, value in enumerate(self.step(model, self.setting, number))}
            state["random numbers"] = torch.get_rng_state()
            state |= {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
            state |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
            yield state
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
        model.zero_grad(set_to_none=True)

    def under(self, plan: Any, **options: Any) -> Any:
        """Train under a plan; assert that no bit differs, that counts add up, and that nothing is left behind. Return the stats."""
        tier = options.setdefault("tier", RecordingTier(deferred=True))
        options = {"activation_budget": 0, "min_bytes": 0, **options}
        with bh.apply(self.model, plan, **options) as handle:
            for number, state in enumerate(self.steps()):
                expected = self.expected[number]
                assert state.keys() == expected.keys(), f"step {number}: only one has {sorted(state.keys() ^ expected.keys())}"
                wrong = [name for name, tensor in expected.items() if not same_bits(state[name], tensor)]
                assert not wrong, f"step {number}: other than plain: {wrong}"
                stats = handle.stats
                assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes
                assert min(stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes, *stats.kept_by_reason.values()) >= 0
                assert stats.resident_bytes == stats.host_bytes == 0
        assert stats.reloaded_bytes >= 0
        if isinstance(tier, RecordingTier):
            assert tier.used_bytes == 0
        assert traces(self.model) == self.traces
        return stats


@functools.cache
def trained(setting: Setting, step: Step = backward) -> Trained:
    """Return the model in a setting; one that was trained plain before."""
    return Trained(setting, step)


def traces(model: nn.Module) -> list[tuple[str, list[str], list[int]]]:
    """Return what management could leave on the modules: attributes and hooks."""
    return [
        (name, sorted(module.__dict__), [len(hooks) for hooks in module.__dict__.values() if isinstance(hooks, dict)])
        for name, module in model.named_modules()
    ]


def kinds(model: nn.Module) -> dict[str, str]:
    """Return a glob for each kind of module that runs: those whose names differ in a number alone are one kind."""
    names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    return {re.sub(r"\b\d+\b", "N", name): re.sub(r"\b\d+\b", "*", name) for name in names}
