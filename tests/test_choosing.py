"""The page on choosing by hand: its figures follow from its formulas, and its formulas from what real models save."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text(encoding="utf-8")
LLAMA, DEEPSEEK = {"H": 4096, "I": 14336, "n": 32, "m": 8, "d": 128}, {"H": 7168, "I": 2048, "n": 128}  # as the page says below its tables
TOKENS = 64


def rows_of(heading: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this heading."""
    table = re.search(rf"\| {re.escape(heading)} \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table[1].splitlines()]


def value(formula: str, sizes: dict[str, int]) -> int:
    """Work out a formula as people write it: ``2n (192 + 256) + 4H``."""
    text = re.sub(r"(\d+)([A-Za-z]+)\b", lambda match: "*".join((match[1], *match[2])), formula.replace(" x ", "*"))
    result: int = eval(re.sub(r"([\w)]) (?=[\d(])", r"\1*", text), {}, sizes)
    return result


def saved_bytes(model: nn.Module) -> Counter[str]:
    """Return the bytes for each token that each module saves first: of activations, each storage once."""
    running, found, storages = [""], Counter[str](), []
    given = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: running.append(name))
        module.register_forward_hook(lambda module, args, output: running.pop() and None)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            given.add(storage.data_ptr())
            storages.append(storage)  # alive, so that its address stays its own
            found[running[-1]] += storage.nbytes() if tensor.is_floating_point() else 0
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.randint(0, 64, (1, TOKENS)), use_cache=False)
    return Counter({name.removeprefix("layers.1."): size // TOKENS for name, size in found.items() if name.startswith("layers.1.")})


@pytest.mark.parametrize(("heading", "sizes"), [("module of a Llama-like layer", LLAMA), ("module of a DeepSeek-V3 MoE layer", DEEPSEEK)])
def test_the_bytes_of_each_row_follow_from_its_formula_and_add_up(heading: str, sizes: dict[str, int]) -> None:
    *rows, last = rows_of(heading)
    for _, _, formula, shown in rows:
        assert f"{value(formula, sizes):,}" == shown
    total = sum(value(formula, sizes) for _, _, formula, _ in rows)
    assert last[0] == "**a layer**" and last[-1] == f"**{total:,}**"


def test_a_llama_saves_what_the_page_says_module_by_module() -> None:
    sizes = {"H": 32, "I": 48, "n": 4, "m": 2, "d": 8}
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    expected = Counter[str]()
    for modules, _, formula, _ in rows_of("module of a Llama-like layer")[:-1]:
        expected[re.findall(r"`(\w+)`", modules)[-1 if "and" in modules else 0]] += value(formula, sizes)
    found = saved_bytes(transformers.LlamaModel(config).to(torch.bfloat16).train())
    assert {name.rpartition(".")[2]: size for name, size in found.items()} == expected


def test_a_deepseek_saves_what_the_page_says() -> None:
    hidden, inner, heads, queries, latent, rope, plain, v, top = 32, 16, 4, 16, 12, 4, 4, 8, 2
    config = transformers.DeepseekV3Config(
        hidden_size=hidden,
        intermediate_size=48,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=64,
        q_lora_rank=queries,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=plain,
        v_head_dim=v,
        n_routed_experts=4,
        num_experts_per_tok=top,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    found = saved_bytes(transformers.DeepseekV3Model(config).to(torch.bfloat16).train())
    assert (
        found["input_layernorm"] + found["self_attn.q_a_proj"]
        == 8 * hidden + 4
        == found["post_attention_layernorm"] + sum(found[name] for name in ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"))
    )
    low_rank = [size for name, size in found.items() if name.endswith(("q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj"))]
    assert sum(low_rank) == 8 * (queries + latent) + 8
    assert found["self_attn"] == 2 * heads * (2 * (plain + rope) + (plain + v)) + 4 * heads + 2 * heads * v
    assert found["mlp.shared_experts.act_fn"] + found["mlp.shared_experts"] + found["mlp.shared_experts.down_proj"] == 8 * inner
    assert found["mlp.experts.act_fn"] == top * 4 * inner
    small = 4 * top  # the weights of the routing, in fp32
    assert found["mlp.experts"] == top * 2 * hidden + top * 4 * inner + top * 2 * hidden + small
    assert found["mlp.gate"] > 4 * hidden
