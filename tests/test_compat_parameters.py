"""What the parameters of other libraries' contexts mean here, what stays out of a context, and compiled code in one."""

import contextlib
import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backhaul.compat import contexts, prime_rl, torchtune, trl
from backhaul.compat.contexts import HEADS, output_head
from backhaul.testing import check_tier, same_bits
from backhaul.tiers.pageable import PageableHost
from tests.conftest import same
from tests.contexts import ALL, EXPECTED, ROW_BYTES, anew_each_time, moved, recording_tiers, train
from tests.models import X, build

EXAMPLE = Path(__file__).parent.parent / "examples" / "prime_rl_style.py"
CONFIG = SimpleNamespace(pin_memory=True, max_inflight_activations=1)


@pytest.fixture(autouse=True)
def tiers(monkeypatch):
    return recording_tiers(monkeypatch)


# Parameters


@pytest.mark.parametrize(("smallest", "moves"), [(ROW_BYTES, True), (ROW_BYTES + 1, False)])
def test_min_offload_size_is_in_bytes(smallest, moves, tiers):
    model = build()
    context = trl.OffloadActivations(min_offload_size=smallest, max_fwd_stash_size=1)
    train(model, lambda: context, 1)
    assert bool(moved(tiers)) is moves


@pytest.mark.parametrize("stash", [1, 2, 4])
def test_as_many_tensors_as_max_fwd_stash_size_says_may_be_on_the_device(stash, tiers):
    model = nn.Sequential(*[nn.Tanh() for _ in range(12)])  # each saves its output
    x = torch.randn(64, requires_grad=True)
    context = trl.OffloadActivations(min_offload_size=0, max_fwd_stash_size=stash)
    for _ in range(3):
        with context:
            loss = model(x).sum()
        loss.backward()
        del loss
    assert context.handle.stats.peak_resident_bytes == (stash + 1) * x.nbytes  # and what the node at work needs


def test_without_streams_each_tensor_leaves_at_once(tiers):
    model = nn.Sequential(*[nn.Tanh() for _ in range(12)])
    context = trl.OffloadActivations(use_streams=False, min_offload_size=0, max_fwd_stash_size=0)
    x = torch.randn(64, requires_grad=True)
    for _ in range(3):
        with context:
            loss = model(x).sum()
        loss.backward()
    assert context.handle.stats.peak_resident_bytes <= 2 * x.nbytes
    assert context.handle.stats.offloaded_bytes >= 3 * 11 * x.nbytes


def test_a_large_tensor_at_the_end_does_not_widen_the_room_by_more_than_itself(tiers):
    model = nn.Sequential(*[nn.Tanh() for _ in range(12)])
    x = torch.randn(64, requires_grad=True)
    large = torch.randn(64 * 100, requires_grad=True)
    context = trl.OffloadActivations(min_offload_size=0, max_fwd_stash_size=3)
    for _ in range(3):
        with context:
            loss = model(x).sum() + large.tanh().sum()
        loss.backward()
        del loss
    assert context.handle.stats.peak_resident_bytes <= large.nbytes + 3 * x.nbytes + large.nbytes


def test_no_stash_at_all_is_refused_where_it_matters():
    with pytest.raises(ValueError, match="max_fwd_stash_size=0"):
        trl.OffloadActivations(max_fwd_stash_size=0)
    trl.OffloadActivations(use_streams=False, max_fwd_stash_size=0)


def test_torchtune_s_old_default_means_streams():
    with pytest.raises(ValueError, match="max_fwd_stash_size=0"):
        torchtune.OffloadActivations(use_streams=None, max_fwd_stash_size=0)


def test_without_pinned_memory_all_goes_to_pageable_memory(tiers):
    model = build()
    context = trl.OffloadActivations(use_pin_memory=False, **ALL)
    assert same(train(model, lambda: context), EXPECTED)
    stats = context.handle.stats
    assert stats.pageable_bytes == stats.offloaded_bytes > 0
    assert stats.host_bytes == 0 < stats.peak_host_bytes
    assert not tiers


def test_pageable_memory_keeps_the_contract_of_a_tier():
    check_tier(PageableHost)


def test_no_config_means_no_offloading(tiers):
    model = build()
    for context in (prime_rl.maybe_activation_offloading(None, model), torchtune.get_act_offloading_ctx_manager(model, False)):
        train(model, lambda context=context: context, 1)
    assert not tiers


def test_a_config_of_prime_rl_is_understood_with_and_without_a_model(tiers):
    for model in (build(), None):
        context = prime_rl.maybe_activation_offloading(CONFIG, model)
        assert context._engine.settings == contexts.Settings(pinned=True, min_bytes=1024, num_in_flight=1)
    pageable = SimpleNamespace(pin_memory=False, max_inflight_activations=7)
    assert prime_rl.maybe_activation_offloading(pageable)._engine.settings == contexts.Settings(
        pinned=False, min_bytes=1024, num_in_flight=7
    )


def test_signatures_are_those_of_trl():
    theirs = pytest.importorskip("trl.models.activation_offloading")
    for name in ("OffloadActivations", "NoOpManager", "get_act_offloading_ctx_manager"):
        ours, original = (inspect.signature(getattr(module, name)).parameters.values() for module in (trl, theirs))
        assert [(each.name, each.default, each.kind) for each in ours] == [(each.name, each.default, each.kind) for each in original]


# What stays out


def test_the_output_head_stays_and_the_report_says_so(tiers):
    model = build()
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    assert same(train(model, lambda: context), EXPECTED)
    report = context.handle.report()
    assert report.stats.kept_by_reason["output head"] == 4 * ROW_BYTES
    (head,) = (row for row in report.modules if row.fqn == "head")
    assert head.offloaded_bytes == 0


def test_all_layers_of_an_output_head_stay(tiers):
    model = build()
    model.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    train(model, lambda: context, 1)
    rows = {row.fqn: row for row in context.handle.report().modules}
    assert rows["head.1"].saved_bytes == ROW_BYTES
    assert all(row.offloaded_bytes == 0 for fqn, row in rows.items() if fqn.startswith("head"))
    assert rows["blocks.1"].offloaded_bytes > 0


class Wrapped(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Tied:
    """What torchtune has for a head that shares the embedding's weight."""

    def __init__(self):
        self.linear = nn.Linear(2, 2)


class Says(Wrapped):
    def get_output_embeddings(self):
        return self.anything


HEAD = nn.Linear(2, 2)
TIED = Tied()


@pytest.mark.parametrize(
    ("model", "head"),
    [
        *((Wrapped(**{name: HEAD}), HEAD) for name in HEADS if "." not in name),
        (Wrapped(decoder=Wrapped(output=HEAD)), HEAD),
        (Wrapped(decoder=Wrapped(lm_head=HEAD)), HEAD),
        (Wrapped(module=Wrapped(lm_head=HEAD)), HEAD),
        (Wrapped(output=TIED), TIED.linear),
        (Says(anything=HEAD), HEAD),
        (Wrapped(output=3, head=HEAD), HEAD),
        (Wrapped(body=HEAD), None),
    ],
)
def test_an_output_head_is_found(model, head):
    assert output_head(model) is head


def test_a_model_without_a_head_is_warned_of_once_it_matters(tiers):
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="no output head was found in Sequential"):
        trl.get_act_offloading_ctx_manager(model)
    trl.get_act_offloading_ctx_manager(model, warn_if_no_head=False)


def test_modules_of_liger_stay(tiers):
    model = build()
    model.liger_tail = nn.Sequential(nn.ModuleList([nn.Tanh()])[0])
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    with context:
        model.liger_tail(model(X)).sum().backward()
    assert {row.fqn: row.offloaded_bytes for row in context.handle.report().modules}["liger_tail.0"] == 0


def test_no_op_manager_keeps_what_is_saved_inside(tiers):
    x = torch.randn(64, requires_grad=True)
    with trl.OffloadActivations(**ALL):
        with trl.NoOpManager():
            y = x.exp()
        num_bytes = moved(tiers)
        z = y.sin().cos()
    assert num_bytes == 0 < moved(tiers)
    assert same_bits(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(x.exp().sin().cos().sum(), x)[0])


def test_no_op_manager_notices_writes_in_place_and_leaks_nothing():
    x = torch.randn(64, requires_grad=True)
    with trl.NoOpManager():
        y = (x * 1).exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Compiled code


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at its inputs
@pytest.mark.parametrize("checkpointed", [False, True], ids=["compile(block)", "checkpoint(compile(block))"])
def test_compiled_blocks_are_traced_once_and_keep_their_weights(checkpointed, tiers):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([torch.compile(Block(), backend="aot_eager", fullgraph=True) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return x

    torch._dynamo.reset()
    expected = train(Stack(), contextlib.nullcontext, 3)
    model = Stack()
    context = anew_each_time(model)
    got = train(model, context, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got += train(model, context, 2)
    assert same(got, expected)
    assert moved(tiers) > 0
    assert {record.num_bytes for tier in tiers for record in tier.records}.isdisjoint({16 * 48 * 4})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_example_moves_the_input_of_each_compiled_block_and_no_weights(capsys):
    names = runpy.run_path(str(EXAMPLE))
    names["main"]()
    report = capsys.readouterr().out
    num_bytes = names["NUM_TOKENS"] * names["HIDDEN"] * 4 * 2 * 4  # two microbatches in each of four steps
    for index in range(names["NUM_LAYERS"]):
        assert report_row(report, f"layers.{index}") == ["layers." + str(index), *2 * [f"{num_bytes / 2**20:.1f}", "MiB"], "0", "B"]


def report_row(report: str, fqn: str) -> list[str]:
    (row,) = (line.split() for line in report.splitlines() if line.startswith(f"{fqn} "))
    return row


def test_a_model_compiled_as_a_whole_is_one_scope_and_its_head_cannot_be_told_apart(tiers):
    torch._dynamo.reset()
    expected = train(torch.compile(build(), backend="aot_eager"), contextlib.nullcontext, 2)
    model = torch.compile(build(), backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="not into a compiled model"):
        context = trl.get_act_offloading_ctx_manager(model, **ALL)
    assert same(train(model, lambda: context, 2), expected)
    assert moved(tiers) > 0
