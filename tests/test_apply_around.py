"""A plan beside everything else that is done to a model: threads, copies, other handles, compilers, checkpoints."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backhaul.testing import RecordingTier
from tests.conftest import Code, in_threads, same
from tests.planned import ALL_PLANS, MIXED, WIDTH, Net, X, apply, assert_nothing_left, build, leaf, step

# Threads


@ALL_PLANS
def test_threads_train_a_model_each(plan):
    models = [build() for _ in range(2)]
    expected = step(models[0])
    found: list[bool] = []

    def train(model: nn.Module) -> None:
        for _ in range(8):
            found.append(same(step(model), expected))

    tiers = [RecordingTier(deferred=True) for _ in models]
    handles = [apply(model, plan, tier) for model, tier in zip(models, tiers, strict=True)]
    in_threads(*[lambda model=model: train(model) for model in models])
    assert found == [True] * 16
    for handle, tier in zip(handles, tiers, strict=True):
        assert_nothing_left(handle, tier)
        handle.remove()


@ALL_PLANS
def test_two_threads_run_backward_on_one_graph(plan):
    model, tier = build(), RecordingTier(deferred=True)
    expected = step(model)[1:]
    found: list[bool] = []
    with apply(model, plan, tier) as handle:
        for _ in range(4):
            loss = model(X).square().sum()

            def backward(loss: Tensor = loss) -> None:
                found.append(same(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), expected))

            in_threads(backward, backward)
            del loss, backward
        assert found == [True] * 8
        assert_nothing_left(handle, tier)


# Copies, handles, compilers, checkpoints


@ALL_PLANS
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_c36_a_copy_is_a_plain_model_and_the_original_stays_managed(plan, way):
    model, tier = build(), RecordingTier(deferred=True)
    expected = step(model)
    with apply(model, plan, tier) as handle:
        alive = model(X)  # and its graph
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file) if way == "torch.save" else file.write(pickle.dumps(model))
            file.seek(0)
            twin = torch.load(file, weights_only=False) if way == "torch.save" else pickle.load(file)
        del alive
        assert isinstance(twin, Net)
        assert not [name for name, module in twin.named_modules() if {"forward", "__getstate__"} & set(module.__dict__)]
        before = handle.stats.saved_bytes
        assert same(step(twin), expected)
        assert handle.stats.saved_bytes == before
        with apply(twin, plan):
            assert same(step(twin), expected)
        assert same(step(model), expected)
        assert_nothing_left(handle, tier)


def test_handles_on_disjoint_parts_with_a_plan_each():
    model, tiers = build(), [RecordingTier(deferred=True) for _ in range(3)]
    expected = step(model)
    plans: list[Any] = [{"*": "recompute"}, {"norm": "recompute", "*": "offload"}, {"*": "offload"}]
    parts = (model.layers[0], model.layers[1], model.head)
    handles = [apply(part, plan, tier) for part, plan, tier in zip(parts, plans, tiers, strict=True)]
    for _ in range(3):
        assert same(step(model), expected)
    for handle, tier in zip(handles, tiers, strict=True):
        assert handle.stats.saved_bytes > 0
        assert_nothing_left(handle, tier)
    for handle in handles[1::-1]:
        handle.remove()
    assert same(step(model), expected)
    handles[2].remove()
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_a_compiled_block_goes_by_one_rule_and_none_reaches_inside(way):
    model = build()
    for index, layer in enumerate(model.layers):
        if way == "in place":
            layer.compile(backend="aot_eager")
        else:
            model.layers[index] = torch.compile(layer, backend="aot_eager")
    expected, tier = step(model), RecordingTier(deferred=True)
    for rule in ({"*.norm": "recompute"}, {"layers.1.act": "offload"}):
        with pytest.raises(ValueError, match=r"reaches 'layers\.[01]\.(norm|act)', inside 'layers\.[01]', which is compiled"):
            apply(model, rule)
    for plan in ({"layers.0": "recompute", "*": "offload"}, {"layers": "recompute"}, {"*": "offload"}, {"layers.0": "save"}):
        with apply(model, plan, tier) as handle:
            for _ in range(2):
                assert same(step(model), expected)
            assert_nothing_left(handle, tier)


class Checkpointed(nn.Module):
    """Runs a part in a checkpointed region."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.25), nn.LayerNorm(WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return checkpoint(self.part, x.exp().sin(), use_reentrant=self.use_reentrant).cos()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        {"1": "recompute", "*": "offload"},  # the region is inside the unit,
        {"1.part": "recompute", "*": "offload"},  # or around it
        {"1.part.1": "recompute", "0": "offload"},
        {"1.part.3": "recompute", "*": "offload"},
        {"*": "recompute"},
        {"*": "offload"},
    ],
)
def test_checkpointed_regions_inside_units_and_around_them(plan, use_reentrant):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(use_reentrant=use_reentrant), nn.Linear(WIDTH, WIDTH)), leaf()

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model(x).square().sum().backward()  # a reentrant checkpoint does without `grad`
        found = [each.grad for each in (x, *model.parameters())]
        for each in (x, *model.parameters()):
            each.grad = None
        return found  # type: ignore[return-value]

    expected, tier = run(), RecordingTier(deferred=True)
    with apply(model, plan, tier) as handle:
        for _ in range(3):
            assert same(run(), expected)
        assert_nothing_left(handle, tier)


def test_an_argument_that_takes_what_the_unit_made_is_refused_and_gone_with_its_graph():
    class State:
        made: Any = None

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, state: State) -> Tensor:
            state.made = self.up(x).exp()
            return state.made.sin()

    part = Stateful()
    model, tier = Code(lambda x: part(x.cumsum(0), State()).cos(), part), RecordingTier(deferred=True)
    with apply(model, {"parts.0": "recompute", "*": "offload"}, tier) as handle:
        with pytest.raises(ValueError, match="it writes to 'made' of an argument, a State"):
            step(model, leaf())
        gc.collect()
        assert_nothing_left(handle, tier)


# What is told


def test_the_report_shows_what_was_made_again_and_where():
    model, tier = build(), RecordingTier(deferred=True)
    with apply(model, MIXED, tier) as handle:
        step(model)
        report = handle.report()
    stats = report.stats
    text = str(report)
    rows = {row.fqn: row for row in report.modules}
    assert stats.recomputed_bytes > 0
    assert sum(row.recomputed_bytes for row in report.modules) == stats.recomputed_bytes
    assert sum(row.saved_bytes for row in report.modules) == stats.saved_bytes
    assert rows["layers.0.norm"].recomputed_bytes > 0
    assert any(line.split()[0] == "recomputed" and line.split()[1] != "0" for line in text.splitlines() if line)
    assert "layers.0.norm" in text
    assert report.to_dict()["stats"]["recomputed_bytes"] == stats.recomputed_bytes


def test_a_model_dies_with_its_last_user_while_managed():
    model = build()
    handle = apply(model, MIXED)
    step(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.remove()
