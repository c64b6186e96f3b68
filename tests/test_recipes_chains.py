"""Recipes that start from what others make: gated MLPs, norms, rotary embeddings, dispatched tokens, whole models, random programs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DeepseekV3Config, GemmaConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.conftest import same
from tests.models import leaf
from tests.recipe_hooks import Hooks, Use, assert_remade, gradients


def test_a_gated_mlp_keeps_neither_the_product_nor_the_activation() -> None:
    gate, up, down = leaf(8, 16), leaf(8, 16), leaf(16, 8)
    for x in (leaf(4, 8), leaf(4, 8).bfloat16()):
        weights = [each.to(x.dtype).detach().requires_grad_() for each in (gate, up, down)]
        hooks = assert_remade(lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down, x.detach().requires_grad_(), *weights, num=2)
        assert [shape for _, shape in hooks.kept].count((4, 16)) == 2  # x @ gate, x @ up


def test_an_activation_is_made_once_for_the_product_and_for_its_own_gradient() -> None:
    calls = []
    silu = F.silu
    g, u, down = leaf(4, 16), leaf(4, 16), leaf(16, 4)
    hooks = Hooks()
    with hooks:
        result = (silu(g * 1.0) * u) @ down
    for recipe in hooks.recipes:
        for part in recipe.parts:
            if getattr(part, "function", None) is silu:
                index = recipe.parts.index(part)
                recipe.parts[index] = part._replace(function=lambda x: calls.append(1) or silu(x))
    result.sum().backward()
    assert len(calls) == 1


def test_the_norm_of_transformers_keeps_its_input_and_a_number_for_each_row() -> None:
    norm = LlamaRMSNorm(64)
    x, down = torch.randn(8, 64).bfloat16().requires_grad_(), torch.randn(64, 2, dtype=torch.bfloat16, requires_grad=True)
    norm.to(torch.bfloat16)
    hooks = assert_remade(lambda x, down, weight: norm(x) @ down, x, down, norm.weight, num=3)  # the cast, the product, the result
    assert {shape for _, shape in hooks.kept if 64 in shape} <= {(8, 64), (64, 2)}


def test_rotary_embeddings_written_out_cost_more_than_they_are_worth_and_can_be_made_from_what_goes_into_them() -> None:
    angles = torch.randn(1, 6, 8)
    cos, sin = angles.cos(), angles.sin()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (Use.apply(each, []) for each in (q, k))
        q, k, v = (each.view(1, 6, 2, 8).transpose(1, 2) for each in (q @ torch.eye(16), k @ torch.eye(16), v))
        q, k = (F.layer_norm(each, (8,)) for each in (q, k))  # saved, as its input is
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v)

    assert_remade(attention, *(leaf(1, 6, 16) for _ in range(3)), num=0)
    hooks = assert_remade(attention, *(leaf(1, 6, 16) for _ in range(3)), num=2, cheap_only=False)
    assert [len(recipe.parts) for recipe in hooks.recipes] == [13, 13]


def test_dispatched_tokens_are_gathered_again_from_the_output_of_a_norm() -> None:
    norm, tokens = nn.LayerNorm(16), torch.tensor([0, 3, 3, 1, 2, 0, 0, 1])

    def experts(x: Tensor, router: Tensor, expert: Tensor, *rest: Tensor) -> Tensor:
        normed = norm(x)
        scores = normed @ router  # saves the norm's output
        return normed.view(-1, 16).index_select(0, tokens) @ expert + scores.sum()

    hooks = assert_remade(experts, leaf(4, 16), leaf(16, 3), leaf(16, 16), norm.weight, norm.bias, num=2)
    assert len(hooks.recipes[1].parts) == 4  # the norm's output, a view of it, the indices, the gathering


def test_what_a_recipe_needs_twice_it_makes_once() -> None:
    def function(x: Tensor) -> Tensor:
        negative = -(x @ x).relu()
        return torch.cat([negative, negative, negative.t()]) @ x

    (recipe,) = assert_remade(function, leaf(8, 8)).recipes
    assert len(recipe.parts) == 4  # what relu keeps, minus that, transposed, all three


def test_an_operand_may_come_from_an_op_that_wrote_in_place() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        product = (x * 2.0).mul_(y)  # rounded to bfloat16
        return -product.add_(x, alpha=1) @ x

    assert_remade(function, leaf(8, 8).bfloat16().detach().requires_grad_(), leaf(8, 8), num=2)


def test_heads_that_share_keys_are_repeated_again() -> None:
    def attention(q: Tensor, k: Tensor) -> Tensor:
        k = Use.apply(k, [])
        beside = Use.apply(k, [])
        k = k[:, :, None].expand(1, 2, 3, 5, 8).reshape(1, 6, 5, 8)
        return (q @ k.mT).flatten()[0] + beside.sum()

    assert_remade(attention, leaf(1, 6, 5, 8), leaf(1, 2, 5, 8), num=1)


CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(num_key_value_heads=2, head_dim=8),
    "gemma": GemmaConfig(num_key_value_heads=2, head_dim=8),
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=8),
    "qwen3 moe": Qwen3MoeConfig(num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "deepseek v3": DeepseekV3Config(
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, num_key_value_heads=4,
    ),
}  # fmt: skip


def model_and_step(name: str, *, autocast: bool = False, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[[], Tensor]]:
    config = CONFIGS[name]
    config.update({
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    })  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    tokens = torch.arange(2 * 12).view(2, 12) % 60

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return model, forward


@pytest.mark.parametrize("variant", [{}, {"autocast": True}, {"dtype": torch.bfloat16}], ids=["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_train_to_the_same_bits(name: str, variant: Any) -> None:
    model, forward = model_and_step(name, **variant)
    expected = torch.autograd.grad(forward(), list(model.parameters()), allow_unused=True)
    hooks = Hooks()
    with hooks:
        loss = forward()
    hooks.assert_all_exact()
    num_freed = sum(storage() is None for storage in hooks.remade)
    assert same(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), expected)
    assert num_freed >= 10


WIDTH = 14  # whole vectors, and something left over
BACKWARDS = torch.arange(WIDTH).flip(0)
OPS: list[Callable[..., Tensor]] = [
    lambda x, y: x * y,
    lambda x, y: x * 0.7,
    lambda x, y: x + y,
    lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: x - y,
    lambda x, y: x / (y.detach().abs() + 1),
    lambda x, y: -x,
    lambda x, y: F.silu(x),
    lambda x, y: F.gelu(x),
    lambda x, y: x.square(),
    lambda x, y: x.sigmoid(),
    lambda x, y: x.relu(),
    lambda x, y: x.softmax(-1),
    lambda x, y: F.layer_norm(x, (WIDTH,)),
    lambda x, y: F.rms_norm(x, (WIDTH,)),
    lambda x, y: torch.cat([x[:2], y[2:]]),
    lambda x, y: torch.stack([x, y], 1)[:, 1],
    lambda x, y: x.index_select(0, BACKWARDS),
    lambda x, y: x[BACKWARDS // 2],
    lambda x, y: x.gather(1, BACKWARDS.expand(WIDTH, WIDTH)),
    lambda x, y: torch.where(y > 0, x, y),
    lambda x, y: x.t(),
    lambda x, y: x.reshape(2, -1).view(WIDTH, WIDTH),
    lambda x, y: x.t().contiguous(),
    lambda x, y: x.clone(memory_format=torch.preserve_format),
    lambda x, y: x[1:2].expand(WIDTH, WIDTH),
    lambda x, y: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x, y: x.bfloat16(),
    lambda x, y: x.float(),
    lambda x, y: x.double(),
    lambda x, y: x @ torch.eye(WIDTH, dtype=x.dtype),
    lambda x, y: Use.apply(x, []),
    lambda x, y: (x * 1.5).mul_(y.detach().to(x.dtype)),
    lambda x, y: (x - y).add_(1),
    lambda x, y: F.silu(x + y, inplace=True),
    lambda x, y: x.mean(-1, keepdim=True) * y,
]


@settings(max_examples=150, deadline=None)
@given(program=st.lists(st.tuples(*(st.integers(0, 1000) for _ in range(3))), min_size=2, max_size=14), cheap_only=st.booleans())
def test_random_programs_train_to_the_same_bits(program: list[tuple[int, int, int]], cheap_only: bool) -> None:
    def function(*inputs: Tensor) -> Tensor:
        values = list(inputs)
        for op, first, second in program:
            values.append(OPS[op % len(OPS)](values[-1 - first % len(values)], values[-1 - second % len(values)]))
        return torch.stack([value.double() for value in values[-3:]])

    inputs = [leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH)]
    assert same(gradients(function, inputs, Hooks(cheap_only=cheap_only)), gradients(function, inputs))
