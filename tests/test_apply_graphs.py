"""A plan and what is done with graphs: many frames, dropped and retained ones, writes in between, modes and transforms."""

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.conftest import Code, same
from tests.planned import ALL_PLANS, NUM_BYTES, PLANS, WIDTH, X, apply, assert_nothing_left, build, leaf, step

# Graphs and frames


@ALL_PLANS
def test_c34_a_dropped_graph_is_gone_at_once_without_garbage_collection(plan):
    model, tier = build(), RecordingTier(deferred=True)
    with apply(model, plan, tier) as handle:
        for run in (lambda: model(X), lambda: model(leaf()), lambda: [model(X), model(X)], lambda: step(model)):
            gc.collect()
            gc.disable()
            try:
                run()
                assert_nothing_left(handle, tier)
            finally:
                gc.enable()


@ALL_PLANS
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_many_frames_alive_in_any_order(plan, order):
    model, tier = build(), RecordingTier(deferred=True)
    parameters, inputs = list(model.parameters()), [X * scale for scale in (1.0, 0.5, -2.0, 0.25)]

    def run() -> list[Tensor]:
        losses: list[Any] = [model(x).square().sum() for x in inputs]
        found: list[Tensor] = []
        for index in order:
            found += torch.autograd.grad(losses[index], parameters)
            losses[index] = None
        return found

    expected = run()
    with apply(model, plan, tier) as handle:
        for _ in range(3):
            assert same(run(), expected)
            assert_nothing_left(handle, tier)


@ALL_PLANS
def test_a_graph_that_is_retained_runs_as_often_as_one_likes(plan):
    model, tier = build(), RecordingTier(deferred=True)
    expected = step(model)[1:]
    with apply(model, plan, tier) as handle:
        loss = model(X).square().sum()
        for _ in range(3):
            assert same(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), expected)
        assert same(torch.autograd.grad(loss, list(model.parameters())), expected)
        del loss
        assert_nothing_left(handle, tier)


@ALL_PLANS
def test_backward_in_two_parts(plan):
    """First gradients of inputs, then of parameters, as zero-bubble schedules do."""
    model, tier, x = build(), RecordingTier(deferred=True), leaf()
    expected = step(model, x)[1:]
    with apply(model, plan, tier) as handle:
        loss = model(x).square().sum()
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        of_weights = torch.autograd.grad(loss, list(model.parameters()))
        assert same([*of_weights, of_input], expected)
        del loss
        assert_nothing_left(handle, tier)


@ALL_PLANS
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a region"])
def test_gradients_have_gradients(plan, inside):
    model, tier, x = build(), RecordingTier(deferred=True), leaf()

    def run() -> list[Tensor]:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()], materialize_grads=True))

    expected = run()
    with apply(model, plan, tier) as handle:
        for _ in range(2):
            with handle.region() if inside else contextlib.nullcontext():
                assert same(run(), expected)
            assert_nothing_left(handle, tier)


@pytest.mark.parametrize("plan", [{"*": "offload"}, {"*": "recompute"}])
def test_a_forward_that_runs_a_backward_of_its_own(plan):
    def penalized(x: Tensor) -> Tensor:
        y = x * x
        rows = y[torch.tensor([1, 0, 3])]
        z = nn.functional.silu(torch.cat([rows, y]))
        (gradient,) = torch.autograd.grad(z.sum(), x)  # frees the graph behind z, y and rows
        return (rows.detach().sin().sum() + gradient * x).sin() + (rows + 1).detach().sum()

    def reuses(x: Tensor) -> Tensor:
        rows = (x * 2.0)[torch.tensor([1, 0, 3])]
        torch.autograd.grad(rows.sum(), x)
        return rows.sin().detach().sum() + x.cos()  # saves what a node made that has let go of its operands

    for function in (penalized, reuses):
        model, tier = nn.Sequential(nn.Linear(WIDTH, WIDTH), Code(function)), RecordingTier(deferred=True)
        expected = step(model, leaf())
        with apply(model, plan, tier) as handle:
            for _ in range(2):
                assert same(step(model, leaf()), expected)
            assert_nothing_left(handle, tier)


# Weights and operands that are written in between


@ALL_PLANS
def test_an_optimizer_that_steps_before_backward_raises_what_autograd_raises_or_names_the_unit(plan):
    model, tier = build(), RecordingTier(deferred=True)
    with apply(model, plan, tier) as handle:
        for _ in range(2):
            loss = model(X).square().sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been written since its forward"):
                loss.backward()
            del loss
        gc.collect()
        expected = step(model)
        assert same(step(model), expected)
        assert_nothing_left(handle, tier)


OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "gate": lambda a, b: nn.functional.silu(a) * b,
    "norm": lambda a, b: nn.functional.layer_norm(a, (WIDTH,)) * b,
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("budget", ["1MiB", None])
def test_an_operand_that_is_written_after_use_raises_as_it_does_without_a_handle(name, budget):
    def run(x: Tensor) -> Tensor:
        a, b = x.cumsum(0), x.cumsum(1)
        y = OPERANDS[name](a, b).sin()
        with torch.no_grad():
            a.add_(1.0)
        return y

    model = Code(run)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, leaf())
    with apply(model, {"*": "offload"}, activation_budget=budget), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, leaf())


@pytest.mark.parametrize("budget", [0, "1MiB", None])
def test_a_value_that_is_written_after_a_unit_has_read_it_raises_or_is_as_it_was(budget):
    def run(x: Tensor) -> Tensor:
        a = x.cumsum(0)
        y = model.parts[0](a)
        with torch.no_grad():
            a.add_(1.0)
        return y.sin()

    model = Code(run, Code(torch.sin))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, leaf())
    x, steady = leaf(), leaf()
    expected = torch.autograd.grad(steady.cumsum(0).sin().sin().square().sum(), steady)
    with apply(model, {"parts.0": "recompute", "*": "offload"}, activation_budget=budget):
        loss = model(x).square().sum()
        try:
            found = torch.autograd.grad(loss, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert same(found, expected)  # the tier had it already


@pytest.mark.parametrize(
    "plan",
    [
        {"*": "offload"},
        {"0": "recompute", "*": "offload"},
    ],
)
def test_a_parameter_that_gets_other_data_before_backward_is_never_used_in_silence(plan):
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    with apply(model, plan):
        loss = model(leaf()).square().sum()
        model[0].weight.data = model[0].weight.data * 2.0  # moves no version
        with pytest.raises(RuntimeError, match="data"):
            torch.autograd.grad(loss, model[1].weight)


def test_a_module_that_remembers_what_it_has_computed_is_told_that_it_does_something_else_the_second_time():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))
            self.made: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.made is None:
                self.made = self.weight.exp().expand_as(x).clone()  # as large as what is saved next
            return (x * self.made).sin()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembers())
    with apply(model, {"1": "recompute", "*": "offload"}), pytest.raises(RuntimeError, match="'1' is recomputed, but saved tensor"):
        step(model, leaf())


def test_a_thread_that_autograd_gave_the_hooks_to_keeps_nothing():
    seen: list[object] = []
    with apply(nn.Linear(WIDTH, WIDTH), bh.Plan({}, default="offload")) as handle:

        def work() -> None:
            with torch.autograd.graph.saved_tensors_hooks(*handle._engine.hooks):
                leaf().cumsum(0).sin()
            seen.append(handle._engine.here.outputs)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None]


# Modes and transforms


@ALL_PLANS
def test_without_gradients_or_in_eval_mode_the_model_runs_untouched(plan):
    model, tier = build(), RecordingTier(deferred=True)
    expected = model(X)
    with apply(model, plan, tier) as handle:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert model(X).equal(expected)
        assert handle.stats.saved_bytes == 0
        model.eval()
        model(X).sum().backward()
        assert handle.stats.saved_bytes == 0
        model.train()
        model.layers[0].eval()
        assert same(step(model)[:1], [expected.detach()])
        assert handle.stats.saved_bytes > 0
        assert_nothing_left(handle, tier)


@pytest.mark.parametrize("plan", [{"1": "recompute"}, {"1": "recompute", "*": "offload"}, {"*": "offload"}, {"*": "recompute"}])
@pytest.mark.parametrize("inside", ["no_grad", "inference_mode", "vmap", "forward AD", "autocast", "paused", "paused torch.func"])
def test_what_a_module_does_inside_is_done_again(inside, plan):
    handles: list[bh.Handle] = []

    def run(x: Tensor) -> Tensor:
        y = x.exp()
        pause = handles[0].paused() if handles and "paused" in inside else contextlib.nullcontext()
        if inside in ("no_grad", "inference_mode"):
            with torch.no_grad() if inside == "no_grad" else torch.inference_mode():
                factor = y.sin()
            return (y * factor.clone()).cos()
        if inside == "vmap":
            return torch.vmap(lambda row: (row.exp() * row).sin())(y).cos()
        if inside == "forward AD":
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual((forward_ad.make_dual(y, torch.ones_like(y)) * 2.0).sin()).tangent
            return (tangent * x).cos()
        if inside == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rows = (y @ y.mT).float()
            return rows.sin() @ y
        with pause:
            y = y.sin().cos() if inside == "paused" else y * torch.func.grad(lambda each: each.sin().sum())(y.detach())
        return y.cos().sin()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forward AD loads its decompositions
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Code(run), nn.Linear(WIDTH, WIDTH))
        expected = step(model, leaf())
        tier = RecordingTier(deferred=True)
        with apply(model, plan, tier) as handle:
            handles.append(handle)
            for _ in range(2):
                assert same(step(model, leaf()), expected)
            assert_nothing_left(handle, tier)
            handles.clear()


def test_under_forward_ad_nothing_moves_and_all_is_right():
    model, tangent = build(), X.flip(0)

    def run() -> list[Tensor]:
        with forward_ad.dual_level():
            primal, along = forward_ad.unpack_dual(model(forward_ad.make_dual(X, tangent)))
            found = torch.autograd.grad(primal.sum() + along.square().sum(), list(model.parameters()), materialize_grads=True)
        return [primal.detach(), along.detach(), *found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run()
        for plan in PLANS.values():
            with apply(model, plan):
                assert same(run(), expected)


@ALL_PLANS
def test_c35_a_transform_needs_a_pause_and_then_is_right(plan):
    model = build()
    state = dict(model.named_parameters())

    def loss(parameters: Any) -> Tensor:
        return torch.func.functional_call(model, parameters, (X,)).square().sum()

    expected = torch.func.grad(loss)(state)
    with apply(model, plan) as handle:
        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            torch.func.grad(loss)(state)
        with handle.paused():
            got = torch.func.grad(loss)(state)
        assert same(list(got.values()), list(expected.values()))


def test_a_module_of_another_handle_inside_a_unit_is_refused_by_both_names():
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Code(lambda x: inner(x.exp()).sin()))  # not a submodule
    expected = step(model, leaf())
    with apply(model, {"1": "recompute"}), apply(inner, {"*": "offload"}) as handle:
        with pytest.raises(ValueError, match="'1', which another handle runs again"):
            step(model, leaf())
        handle.remove()
        assert same(step(model, leaf()), expected)


def test_a_region_goes_by_the_default_and_inside_a_unit_changes_nothing():
    model, tier = build(), RecordingTier(deferred=True)
    with apply(model, bh.Plan({"layers": "recompute"}, default="offload"), tier) as handle:
        x = leaf()
        with handle.region():
            loss = x.cumsum(0).sin().sum()
        assert tier.used_bytes == handle.stats.offloaded_bytes == NUM_BYTES
        assert same(torch.autograd.grad(loss, x), torch.autograd.grad(x.cumsum(0).sin().sum(), x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["vmap", "make_fx", "trace"])
def test_where_tensors_have_no_bytes_of_their_own_the_model_runs_untouched(way):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(3, 4, 8)
    run = {
        "vmap": lambda: torch.func.vmap(model)(x),
        "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x),
        "trace": lambda: torch.jit.trace(model, x)(x),
    }[way]
    expected = model(x)
    with bh.apply(model, {"1": "recompute", "*": "offload"}, tier="host", activation_budget=0, min_bytes=0) as handle:
        assert torch.equal(run(), expected)
        assert handle.stats.saved_bytes == 0
        model(x).sum().backward()
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.host_bytes == 0


def test_verify_sees_what_plain_code_wrote_without_telling_autograd():
    def forward(x):
        y = model.parts[0](x) * x
        with torch.no_grad():
            y.clamp_(max=0.1)
        return model.parts[0](y * 1.5)

    model = Code(forward, nn.Linear(WIDTH, WIDTH))
    message = 'is under "offload", and what its plain code makes again has other values'
    with bh.apply(model, {"*": "offload"}, min_bytes=0, verify_recompute=True), pytest.raises(RuntimeError, match=message):
        model(leaf()).sum().backward()
