"""Every action on every module of five real models changes no bit of training, and each does what it says with the bytes.

Also with dropout, under autocast, with adapters on frozen weights, with checkpointing, and with several graphs alive.
"""

import functools
import weakref

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from backhaul.remade import Made
from tests.small_models import MODELS, Setting, Trained, backward, build, kinds, loss_of, retained, split, trained, two_alive

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # gradient_checkpointing_enable
    "ignore:backhaul offloaded 0:UserWarning",  # some plans save everything
)

EVERY_KIND = [pytest.param(model, glob, id=f"{model}-{glob}") for model in MODELS for glob in kinds(build(Setting(model))).values()]
# What these save is what they were called with, or nothing: they free memory together with others that save the same.
KEEP_NO_MORE_THAN_INPUTS = ("_proj", "_proj_with_mqa", "lm_head", "embed_tokens", "act_fn", "rotary_emb")

# Other combinations are drawn in test_apply_random.py.
SETTINGS = [
    *(Setting(model, dropout=0.2) for model in MODELS),
    *(Setting(model, autocast=True, attention="eager" if model == "GptOss" else "sdpa") for model in MODELS),
    *(Setting(model, adapters=True, dropout=0.2) for model in MODELS),
    Setting("Qwen3Moe", experts="batched_mm"),
]
PARTS = {**bh.presets.norms_and_activations, "*.self_attn": "recompute", "*.mlp": "recompute", "*": "offload"}

in_each_model = pytest.mark.parametrize("model", MODELS)
in_each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


@functools.cache
def all_offloaded(model):
    return trained(Setting(model)).under({"*": "offload"})


# Every action on every module


@pytest.mark.parametrize(("model", "glob"), EVERY_KIND)
def test_a_saved_module_keeps_what_it_saves(model, glob):
    stats = trained(Setting(model)).under({glob: "save", "*": "offload"})
    assert stats.recomputed_bytes <= all_offloaded(model).recomputed_bytes
    assert ("save" in stats.kept_by_reason) == (not glob.endswith("rotary_emb"))  # which saves nothing


@pytest.mark.parametrize(("model", "glob"), EVERY_KIND)
def test_an_offloaded_module_moves_what_only_it_saves(model, glob):
    stats = trained(Setting(model)).under({glob: "offload"})
    if not glob.endswith(KEEP_NO_MORE_THAN_INPUTS):
        assert stats.reloaded_bytes > 0
    assert stats.kept_bytes > 0 or glob == "model"


@pytest.mark.parametrize(("model", "glob"), EVERY_KIND)
def test_a_recomputed_module_makes_again_what_it_saves(model, glob):
    case = trained(Setting(model))
    stats = case.under({glob: "recompute"})
    assert stats.offloaded_bytes == 0
    if not glob.endswith(KEEP_NO_MORE_THAN_INPUTS):
        assert stats.recomputed_bytes > 0


@pytest.mark.parametrize(("model", "glob"), EVERY_KIND)
def test_a_recomputed_module_among_offloaded_ones(model, glob):
    stats = trained(Setting(model)).under({glob: "recompute", "*": "offload"})
    assert stats.kept_by_reason.get("save", 0) == 0
    assert stats.recomputed_bytes > 0


MEGATRON = [
    pytest.param(model, glob, id=f"{model}-{word}")
    for model, words in (("Qwen3Moe", bh.presets.qwen3_moe), ("DeepseekV3", bh.presets.deepseek_v3))
    for word, glob in words.items()
]


@pytest.mark.parametrize(("model", "glob"), MEGATRON)
def test_each_of_megatron_s_words_under_each_action(model, glob):
    case = trained(Setting(model))
    case.under({glob: "offload"})
    assert "save" in case.under({glob: "save", "*": "offload"}).kept_by_reason
    assert case.under({glob: "recompute", "*": "offload"}).recomputed_bytes >= all_offloaded(model).recomputed_bytes > 0


@pytest.mark.parametrize(("model", "words"), [("Qwen3Moe", bh.presets.qwen3_moe), ("DeepseekV3", bh.presets.deepseek_v3)])
def test_all_of_megatron_s_words_together(model, words):
    case = trained(Setting(model))
    for action, rest in (("offload", "save"), ("recompute", "offload"), ("save", "offload")):
        case.under({**dict.fromkeys(words.values(), action), "*": rest})


# Routing

WITH_EXPERTS = pytest.mark.parametrize("model", [model for model in MODELS if model != "Llama"])


@WITH_EXPERTS
@pytest.mark.parametrize("unit", ["*.layers.*", "*.mlp"])
def test_c17_a_token_goes_to_the_same_experts_though_the_router_would_decide_otherwise(model, unit):
    setting = Setting(model, experts="" if model == "GptOss" else "eager")
    net, seen, noise = build(setting), [], [0.0]
    for name, module in net.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_pre_hook(lambda module, args: (args[0] + noise[0] * args[0].flip(-1), *args[1:]))
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args, name=name: seen.append((name, args[1].clone())))
    noise[0] = 50.0
    with torch.no_grad():
        loss_of(net, setting)
    otherwise, noise[0] = dict(seen), 0.0
    seen.clear()
    with bh.apply(net, {unit: "recompute", "*": "offload"}, min_bytes=0, tier="host"):
        loss = loss_of(net, setting)
        first = dict(seen)
        seen.clear()
        noise[0] = 50.0
        loss.backward()
    assert not all(first[name].equal(otherwise[name]) for name in first)  # it would
    assert len(seen) == len(first) > 0
    assert all(first[name].equal(route) for name, route in seen)


@WITH_EXPERTS
def test_a_router_whose_outputs_are_kept_is_not_made_again(model):
    case = trained(Setting(model, dropout=0.2))
    for unit in ("*.layers.*", "*.mlp"):
        keeping = bh.Recompute(keep_outputs=("*.router" if model == "GptOss" else "*.gate",))
        without = case.under({unit: "recompute"})
        assert case.under({unit: keeping}, verify_recompute=True).kept_bytes > without.kept_bytes


@in_each_model
def test_verification_names_the_module_inside_whose_values_differ(model):
    setting = Setting(model)
    net, noise = build(setting), [0.0]
    net.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + noise[0], *args[1:]))
    with bh.apply(net, {"*.layers.*": "recompute"}, min_bytes=0, tier="host", verify_recompute=True):
        loss_of(net, setting).backward()
        loss, noise[0] = loss_of(net, setting), 1e-3
        with pytest.raises(RuntimeError, match=r"'model\.layers\.1\.mlp[.\w]*' is recomputed, but saved tensor \d+ .* has other values"):
            loss.backward()


# In every setting


@in_each_setting
@pytest.mark.parametrize("depth", range(5))
def test_all_modules_of_one_depth_under_each_action(setting, depth):
    case = trained(setting)
    globs = [glob for glob in kinds(case.model).values() if glob.count(".") == depth]
    if not globs:
        pytest.skip("no module lies that deep")
    for action, rest in (("save", "offload"), ("offload", "save"), ("recompute", "offload")):
        case.under({**dict.fromkeys(globs, action), "*": rest}, verify_recompute=action == "recompute")


@in_each_setting
def test_layers_and_the_whole_model_under_each_action(setting):
    case = trained(setting)
    saved = case.under({"*": "save"})
    assert saved.kept_bytes == saved.saved_bytes == saved.kept_by_reason["save"]
    offloaded = case.under({"*": "offload"})
    assert offloaded.kept_bytes < 0.1 * offloaded.saved_bytes
    for glob in ("*", "model", "*.layers.*"):
        recomputed = case.under({glob: "recompute"}, verify_recompute=True)
        assert recomputed.offloaded_bytes == 0 < recomputed.recomputed_bytes
    for glob in ("model", "*.layers.*", "*.layers.1"):
        case.under({glob: "recompute", "*": "offload"}, tier="host")
    parts = case.under(PARTS, verify_recompute=True)
    assert parts.recomputed_bytes > 0.5 * parts.saved_bytes


@in_each_setting
@pytest.mark.parametrize("step", [two_alive, retained, split], ids=lambda step: step.__name__)
def test_several_graphs_and_several_backward_passes(setting, step):
    case = trained(setting, step)
    for plan in ({"*": "offload"}, PARTS, {"*.layers.*": "recompute", "*": "offload"}):
        assert case.under(plan).recomputed_bytes > 0


# Checkpointing in the model


@in_each_model
@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("step", [backward, two_alive], ids=lambda step: step.__name__)
def test_checkpointed_layers_and_any_action(model, kind, step):
    case = trained(Setting(model, checkpointing=kind, dropout=0.2), step)
    stats = case.under({"*": "offload"})
    assert stats.offloaded_bytes >= 3 * 2 * 2 * 12 * 32 * 4  # what both layers start from, in each step
    case.under(PARTS)
    case.under({"*.layers.*": "recompute", "*": "offload"}, verify_recompute=True)
    case.under({"model": "recompute", "*": "offload"})


def test_checkpointed_layers_with_adapters_on_frozen_weights():
    case = trained(Setting("Llama", checkpointing="non-reentrant", adapters=True, dropout=0.2))
    assert case.under({"*": "offload"}).offloaded_bytes > 0
    case.under(PARTS)


def old_layers(model):
    """Have each layer checkpoint its ``__call__``, as transformers did before 5.24: what is managed is then inside the region."""

    class Old(type(model.model.layers[0])):
        def __call__(self, *args, **kwargs):
            return checkpoint(functools.partial(super().__call__, **kwargs), *args, use_reentrant=False)

    for layer in model.model.layers:
        layer.__class__ = Old
    return model


@in_each_model
def test_hooks_inside_a_checkpointed_region_do_not_switch_its_recomputation_off(model):
    setting = Setting(model, dropout=0.2)
    case = Trained(setting, backward, old_layers(build(setting)))
    plain = trained(setting).under({"*": "offload"})
    for plan in ({"*": "offload"}, {"*.layers.*": "offload"}, {"*.layers.*": "recompute"}, PARTS):
        stats = case.under(plan)
        assert stats.saved_bytes < 0.5 * plain.saved_bytes


# Budgets


def most_of_one_node(loss):
    """Return the most bytes of saved tensors that one node of a graph has."""
    nodes: list[Node] = [loss.grad_fn]
    seen, most = set(nodes), 0
    while nodes:
        node = nodes.pop()
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        tensors = [each for value in saved for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, torch.Tensor)]
        storages = {id(each.untyped_storage()): each.untyped_storage().nbytes() for each in tensors if not isinstance(each, nn.Parameter)}
        most = max(most, sum(storages.values()))
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        nodes += fresh
    return most


@in_each_model
@pytest.mark.parametrize("plan", [{"*": "offload"}, PARTS], ids=["offload", "parts"])
def test_resident_bytes_stay_within_the_budget_and_what_two_nodes_need(model, plan):
    # Two: what was saved last leaves when the next is saved.
    setting = Setting(model)
    case = trained(setting)
    one_node = most_of_one_node(loss_of(case.model, setting))
    for budget in (0, 20_000, 60_000):
        stats = case.under(plan, activation_budget=budget)
        assert 0 < stats.peak_resident_bytes <= budget + 2 * one_node


@pytest.mark.parametrize("model", ["Llama", "Qwen3Moe"])
def test_what_is_made_again_is_there_for_a_moment(model, monkeypatch):
    alive, most = {}, 0
    fill = Made.fill

    def fill_and_count(made, storage):
        nonlocal most
        fill(made, storage)
        alive[id(storage)] = storage.nbytes()
        weakref.finalize(storage, alive.pop, id(storage), None)
        most = max(most, sum(alive.values()))

    monkeypatch.setattr(Made, "fill", fill_and_count)
    stats = trained(Setting(model, layers=6)).under(PARTS)
    one_layer = stats.saved_bytes / 3 / 6
    assert 0 < most < one_layer
