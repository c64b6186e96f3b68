"""The contexts of other libraries, drawn by our engine: same values as plain autograd, whatever way they are used."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backhaul import _torch
from backhaul.compat import contexts, prime_rl, torchtune, trl
from backhaul.compat.contexts import ContextEngine
from backhaul.scopes import wrapper_of
from tests.conftest import same
from tests.contexts import (
    ALL,
    EXPECTED,
    ROW_BYTES,
    WAYS,
    WEIGHT_BYTES,
    anew_each_time,
    known_model,
    moved,
    recording_tiers,
    train,
    unknown_model,
    whole_manager,
)
from tests.models import X, build, step
from tests.test_handle import traces


@pytest.fixture(autouse=True)
def tiers(monkeypatch):
    return recording_tiers(monkeypatch)


# Values


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_bit_for_bit_and_bytes_move(way, backward_inside, tiers):
    model = build()
    assert same(train(model, way(model), backward_inside=backward_inside), EXPECTED)
    assert moved(tiers) > 3 * ROW_BYTES
    assert sum(tier.bytes_of("load") for tier in tiers) > 3 * ROW_BYTES


def test_torchtunes_manager_does_the_same(tiers):
    x = torch.randn(64, 16)
    expected = train(build(), contextlib.nullcontext, x=x)
    model = build()
    context = torchtune.get_act_offloading_ctx_manager(model, True, use_streams=False)
    assert same(train(model, lambda: context, x=x), expected)
    assert moved(tiers) > 4 * x.nbytes


def test_torchtune_has_the_stash_before_the_size():
    settings = torchtune.OffloadActivations(True, True, 3, 4096)._engine.settings
    assert settings == contexts.Settings(pinned=True, min_bytes=4096, num_in_flight=3)


def test_accumulated_gradients_are_the_same(tiers):
    def gradients(model, context):
        for scale in (1.0, 2.0, 3.0):
            with context():
                loss = (model(X) * scale).square().sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(build(), contextlib.nullcontext)
    for way in (known_model, anew_each_time):
        model = build()
        assert same(gradients(model, way(model)), expected)


def test_second_order_gradients_inside_the_context_are_the_same(tiers):
    def penalty(context):
        model = build()
        x = X.clone().requires_grad_()
        with context:
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            slope.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert same(penalty(trl.OffloadActivations(**ALL)), penalty(contextlib.nullcontext()))
    assert moved(tiers) > 0


def test_a_checkpoint_inside_keeps_recomputing_and_its_input_moves(tiers):
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(8, 16, requires_grad=True)
    context = trl.get_act_offloading_ctx_manager(block, **ALL, warn_if_no_head=False)

    def gradients(manager):
        with manager:
            loss = checkpoint(block, checkpoint(block, x * 2, use_reentrant=False), use_reentrant=False).sum()
        return torch.autograd.grad(loss, [x, *block.parameters()])

    assert same(gradients(context), gradients(contextlib.nullcontext()))
    assert context.handle.stats.saved_bytes == 2 * x.nbytes


# Life


@pytest.mark.parametrize("way", [unknown_model, known_model, anew_each_time])
def test_C09_twenty_steps_with_backward_inside_and_outside_leave_nothing(way, tiers):
    model = build()
    context = way(model)
    for index in range(20):
        with context() as entered:
            loss = model(X).square().sum()
            if index % 2:
                loss.backward()
        if not index % 2:
            loss.backward()
        del loss
        model.zero_grad()
        stats = entered.handle.stats
        assert [tier.used_bytes for tier in tiers] == [0] * len(tiers)
        assert stats.resident_bytes == 0
        assert not entered._engine.registry.records
        assert not entered._engine.registry.frames
    assert len(tiers) == 1


def test_a_graph_that_is_dropped_without_backward_takes_its_bytes_along(tiers):
    model = build()
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    for _ in range(3):
        with context:
            loss = model(X).square().sum()
        assert context.handle.stats.host_bytes + tiers[0].used_bytes > 0
        del loss
        assert context.handle.stats.resident_bytes == tiers[0].used_bytes == 0


def test_an_exception_inside_travels_on_and_the_next_step_is_right(tiers):
    model = build()
    context = whole_manager(model)
    with pytest.raises(KeyboardInterrupt), context():
        model(X)
        raise KeyboardInterrupt
    assert _torch.top_saved_tensors_hooks() is None
    assert same(train(model, context), EXPECTED)


def test_nothing_is_touched_outside_the_context_or_without_gradients(tiers):
    model = build()
    context = whole_manager(model)
    step(model)
    with torch.no_grad(), context():
        model(X)
    assert moved(tiers) == 0
    assert context().handle.stats.saved_bytes == 0


def test_a_context_in_a_context_changes_nothing_and_one_with_other_settings_takes_over(tiers):
    model = build()
    outer, same_settings = whole_manager(model)(), whole_manager(model)()
    other = trl.get_act_offloading_ctx_manager(model, min_offload_size=1 << 20)
    with outer, same_settings, other:
        loss = model(X).square().sum()
    assert moved(tiers) == 0
    with outer, same_settings:
        loss += model(X).square().sum()
    assert moved(tiers) > 0
    loss.backward()
    assert _torch.top_saved_tensors_hooks() is None


def test_a_handle_that_is_removed_leaves_the_model_as_it_was_and_the_context_does_nothing(tiers):
    model = build()
    before = traces(model)
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    assert traces(model) != before
    train(model, lambda: context, 1)
    context.handle.remove()
    assert traces(model) == before
    num_bytes = moved(tiers)
    train(model, lambda: context, 1)
    assert moved(tiers) == num_bytes


def test_a_copy_of_a_model_with_a_context_is_plain(tiers):
    model = build()
    trl.get_act_offloading_ctx_manager(model, **ALL)
    assert not any(wrapper_of(module) for module in copy.deepcopy(model).modules())
    assert list(model.state_dict()) == list(build().state_dict())


# What the engine knows


def test_contexts_made_anew_for_a_model_share_what_was_learned(tiers):
    model = build()
    train(model, anew_each_time(model), 3)
    engine = wrapper_of(model).watcher
    assert isinstance(engine, ContextEngine)
    engine.tidy_up()
    assert all(station.flow.num_steps == 3 for station in engine.stations.values())
    assert prime_rl.OffloadActivations(model, max_fwd_stash_size=1, min_offload_size=0)._engine is engine
    assert prime_rl.OffloadActivations(model)._engine is not engine


def test_another_model_gets_another_engine(tiers):
    first, second = build(), build()
    context = trl.OffloadActivations(**ALL)
    context.update_model_params(first)
    context.update_model_params(first)
    engine = context._engine
    context.update_model_params(second)
    assert context._engine is not engine
    assert wrapper_of(first).watcher is engine


def test_the_report_names_blocks_of_a_known_model(tiers):
    model = build()
    context = whole_manager(model)
    train(model, context, 1)
    assert {row.fqn for row in context().handle.report().modules} == {"blocks.0", "blocks.1", "blocks.2", "head", ""}


@pytest.mark.parametrize("way", WAYS)
def test_weights_and_their_transposes_stay(way, tiers):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    context = way(model) if way is not whole_manager else known_model(model)
    train(model, context, 2)
    assert all(record.num_bytes != WEIGHT_BYTES for tier in tiers for record in tier.records)


def test_a_cast_of_a_weight_stays_where_the_model_is_known(tiers):
    def gradients(model, manager):
        with manager, torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients(build(), contextlib.nullcontext())
    for way, num_bytes in ((unknown_model, 0), (known_model, 3 * WEIGHT_BYTES // 2)):
        model = build()
        context = way(model)()
        assert same(gradients(model, context), expected)
        assert context.handle.stats.kept_by_reason.get("cast of a parameter", 0) == num_bytes
