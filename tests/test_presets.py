"""Presets match the modules of real models: names are taken from transformers, not from memory."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from backhaul import presets
from backhaul.globs import matches
from backhaul.plans import Plan

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 4},
    "Qwen3Moe": {"head_dim": 4, "num_experts": 4, **EXPERTS},
    "DeepseekV3": {**EXPERTS, **LATENT},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"head_dim": 4, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
NORMS_AND_ACTIVATIONS = next(iter(presets.norms_and_activations))


def modules_of(family: str, **options: object) -> dict[str, nn.Module]:
    config = getattr(transformers, f"{family}Config")(**{**TINY, **FAMILIES[family], **options})
    with torch.device("meta"):
        return dict(getattr(transformers, f"{family}Model")(config).named_modules(prefix="model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_and_activation_module_is_recomputed_and_no_other(family: str) -> None:
    modules = modules_of(family)
    resolved = Plan(presets.norms_and_activations).resolve(modules)
    kinds = ("Norm", "Activation", "SiLU", "GELU")
    assert set(resolved.units) == {name for name, module in modules.items() if any(kind in type(module).__name__ for kind in kinds)}


USUAL = """
norm norm1 ln_1 ln_f blocks.0.norm2 h.3.ln_2 x.q_norm x.attention.output.LayerNorm x.layernorm_before x.final_layer_norm
x.pre_feedforward_layernorm_2 act x.act_fn x.intermediate_act_fn x.activation_fn x.mlp.act x.activation x.act1 x.gelu
"""
OTHERS = """
batch_norm x.batch_norm x.bn1 x.normalizer x.norm_mlp x.action x.factor x.relu x.mlp x.in_proj xln
"""


@pytest.mark.parametrize("name", USUAL.split())
def test_usual_names_of_norms_and_activations_match(name: str) -> None:
    assert matches(NORMS_AND_ACTIVATIONS, name)


@pytest.mark.parametrize("name", ["", *OTHERS.split()])
def test_other_names_do_not_match(name: str) -> None:
    assert not matches(NORMS_AND_ACTIVATIONS, name)


MEGATRON = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"}


@pytest.mark.parametrize(("words", "family"), [(presets.qwen3_moe, "Qwen3Moe"), (presets.deepseek_v3, "DeepseekV3")])
class TestMegatronWords:
    def test_all_of_its_offload_modules_are_there(self, words: dict[str, str], family: str) -> None:
        assert set(words) >= MEGATRON

    @pytest.mark.parametrize("action", ["offload", "recompute"])
    def test_each_word_alone_makes_a_plan(self, words: dict[str, str], family: str, action: str) -> None:
        for glob in words.values():
            assert Plan({glob: action}).resolve(modules_of(family)).matched[glob]

    def test_in_their_order_all_of_them_make_a_plan(self, words: dict[str, str], family: str) -> None:
        Plan(dict.fromkeys(words.values(), "offload")).resolve(modules_of(family))

    def test_a_word_means_the_work_that_megatron_means(self, words: dict[str, str], family: str) -> None:
        resolved = Plan(dict.fromkeys(words.values(), "offload")).resolve(modules_of(family))
        layer = "model.layers.1"
        assert resolved.decided_by[f"{layer}.input_layernorm"] == words["attn_norm"]
        assert resolved.decided_by[f"{layer}.post_attention_layernorm"] == words["mlp_norm"]
        assert resolved.decided_by[f"{layer}.self_attn"] == words["core_attn"]
        assert resolved.decided_by[f"{layer}.self_attn.o_proj"] == words["attn_proj"]
        assert resolved.decided_by[f"{layer}.mlp.experts"] == words["expert_fc1"]
        assert resolved.decided_by[f"{layer}.mlp.experts.act_fn"] == words["moe_act"]

    def test_every_projection_into_attention_is_qkv_linear(self, words: dict[str, str], family: str) -> None:
        modules = modules_of(family)
        resolved = Plan({words["qkv_linear"]: "offload"}).resolve(modules)
        inside = {
            name for name, module in modules.items() if ".self_attn." in name and isinstance(module, nn.Linear) and "o_proj" not in name
        }
        assert inside <= set(resolved.matched[words["qkv_linear"]])


def test_without_a_low_rank_for_queries_deepseek_has_one_projection_and_the_words_still_match() -> None:
    resolved = Plan({presets.deepseek_v3["qkv_linear"]: "offload"}).resolve(modules_of("DeepseekV3", q_lora_rank=None))
    assert "model.layers.0.self_attn.q_proj" in resolved.matched[presets.deepseek_v3["qkv_linear"]]


def test_presets_merge_with_rules_of_ones_own() -> None:
    plan = Plan({"model.layers.1": "save", **presets.norms_and_activations, presets.qwen3_moe["expert_fc1"]: "offload"})
    resolved = plan.resolve(modules_of("Qwen3Moe"))
    words = {name: action.word for name, action in resolved.actions.items()}
    assert words["model.layers.0.mlp.experts"] == "offload"
    assert words["model.layers.0.mlp.experts.act_fn"] == "recompute"
    assert words["model.layers.1.mlp.experts"] == words["model.layers.1.input_layernorm"] == "save"


@pytest.mark.parametrize(("number", "family", "num_layers"), [(0, "Llama", 32), (1, "Llama", 32), (2, "DeepseekV3", 61)])
def test_the_plans_of_the_page_on_choosing_fit_the_models_that_it_talks_of(number: int, family: str, num_layers: int) -> None:
    page = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)(?=with |```)", page, re.DOTALL)[number]
    found: dict[str, Plan] = {}
    exec(code, {"bh": SimpleNamespace(Plan=Plan, presets=presets)}, found)
    resolved = found["plan"].resolve(modules_of(family, num_hidden_layers=num_layers), containers={"model.layers"})
    assert resolved.actions[f"model.layers.{num_layers - 1}.mlp"].word == "save"
    assert resolved.actions["model.layers.0.input_layernorm"].word == "recompute"
    assert resolved.actions["model.layers.0.mlp"].word == "offload"
