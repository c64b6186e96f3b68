"""Compiling and managing in either order: what is managed first and compiled afterwards, and what is refused."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.compiled import (
    DEPTH,
    INPUT_BYTES,
    ROWS,
    WARNINGS,
    WIDTH,
    Adapted,
    Block,
    Checkpointed,
    Stack,
    in_place,
    made,
    moved_in_three_steps,
    start_afresh,
    step,
    untouched,
    wrapping,
)
from tests.conftest import everything, same
from tests.planned import apply, assert_nothing_left

COMPILED = pytest.mark.parametrize("compiled", [wrapping, in_place], ids=["torch.compile(module)", "module.compile()"])

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    start_afresh()


@dataclass(frozen=True)
class Managed:
    """A model that was managed first and changed afterwards, and what the same model gives unmanaged."""

    model: nn.Module
    handle: bh.Handle
    tier: RecordingTier
    expected: list[Tensor]
    num_graphs: int
    saved_bytes: int


def managed_then(change: Callable[[nn.Module], nn.Module]) -> Managed:
    def plain() -> nn.Module:
        return Stack([Block() for _ in range(DEPTH)])

    expected, num_graphs, saved_bytes = untouched(lambda: change(plain()))
    model, tier = made(plain), RecordingTier(deferred=True)
    handle = everything(model, tier)
    return Managed(change(model), handle, tier, expected, num_graphs, saved_bytes)


@COMPILED
def test_blocks_compiled_after_they_are_managed_keep_their_names(compiled):
    def change(model: nn.Module) -> nn.Module:
        model.layers = nn.ModuleList([compiled("aot_eager")(layer) for layer in model.layers])
        return model

    managed = managed_then(change)
    with managed.handle as handle:
        assert moved_in_three_steps(managed.model, managed.tier, managed.expected) == managed.saved_bytes
        assert {row.fqn for row in handle.report().modules} == {"layers.0", "layers.1", "layers.2", ""}
    assert counters["stats"]["unique_graphs"] == managed.num_graphs
    assert not counters["graph_break"]
    assert same(step(managed.model), managed.expected)


@COMPILED
def test_a_model_compiled_whole_after_it_is_managed_is_one_graph(compiled):
    managed = managed_then(compiled("aot_eager"))
    with managed.handle:
        assert moved_in_three_steps(managed.model, managed.tier, managed.expected) == managed.saved_bytes
    assert counters["stats"]["unique_graphs"] == managed.num_graphs
    assert not counters["graph_break"]
    assert same(step(managed.model), managed.expected)


def test_a_managed_part_of_what_is_compiled_with_fullgraph_is_refused_with_the_right_order():
    model = Stack([Block()])
    with everything(model.layers[0]):
        model.compile(backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="backhaul manages this module; compile it first"):
            model(torch.randn(ROWS, WIDTH))


def test_a_managed_part_of_what_is_compiled_runs_between_two_graphs():
    def make() -> nn.Module:
        return Stack([Block()])

    expected, _, _ = untouched(lambda: wrapping("aot_eager")(make()))
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model.layers[0], tier):
        compiled = torch.compile(model, backend="aot_eager")
        assert moved_in_three_steps(compiled, tier, expected) == 9 * INPUT_BYTES


def test_adapters_put_in_after_a_model_is_managed_are_part_of_it():
    def change(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
            layer.compile(backend="aot_eager", fullgraph=True)
        return model

    managed = managed_then(change)
    with managed.handle:
        assert moved_in_three_steps(managed.model, managed.tier, managed.expected) == managed.saved_bytes


def test_no_name_says_what_wraps_a_module():
    class Around(nn.Module):
        """As PEFT wraps a model."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = nn.Module()
            self.base_model.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.base_model.model(x)

    model = Around(Stack([torch.compile(Checkpointed(Block()), backend="aot_eager"), Block()]))
    with everything(model) as handle:
        step(model)
        assert {row.fqn for row in handle.report().modules} == {"", "layers.0", "layers.1"}


@COMPILED
def test_removing_a_handle_recompiles_nothing(compiled):
    model = made(lambda: Stack([compiled("aot_eager")(Block()) for _ in range(DEPTH)]))
    expected = step(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        with everything(model):
            assert same(step(model), expected)
        assert same(step(model), expected)


# Modules that come with torch, whose forward Dynamo compiles in a wrapped module alone


@pytest.mark.parametrize("of_each", [False, True], ids=["whole", "each block"])
@COMPILED
def test_modules_of_torch_are_compiled_into_the_graphs_that_they_are_without_us(compiled, of_each):
    def compile(module: nn.Module) -> nn.Module:
        if compiled is wrapping:
            return torch.compile(module, backend="aot_eager", fullgraph=True)
        module.compile(backend="aot_eager")  # torch compiles none of them then
        return module

    def change(model: nn.Sequential) -> nn.Module:
        if not of_each:
            return compile(model)
        for index, part in enumerate(model):
            model[index] = compile(part)
        return model

    def make() -> nn.Sequential:
        return nn.Sequential(*[part for _ in range(10) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())])  # more than a graph has versions

    expected = step(change(made(make)))
    num_graphs = counters["stats"]["unique_graphs"]
    start_afresh()
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier):
        assert moved_in_three_steps(change(model), tier, expected) > 0
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


# Plans


def by_forward(backend: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def compile(module: nn.Module) -> nn.Module:
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=True, **options)
        return module

    return compile


WAYS = pytest.mark.parametrize(
    "compiled", [wrapping, in_place, by_forward], ids=["torch.compile(module)", "module.compile()", "module.forward = torch.compile"]
)


class Seen(NamedTuple):
    stored_bytes: int
    recomputed_bytes: int
    num_graphs: int


def under(plan: Any, change: Callable[[nn.Module], nn.Module], *, apply_first: bool, **options: Any) -> Seen:
    """Train under a plan and compiled, in one order; see that no bit differs, nothing is compiled again, and nothing is left."""

    def plain() -> nn.Module:
        return Stack([Block() for _ in range(DEPTH)])

    expected = step(change(made(plain)))
    num_graphs = counters["stats"]["unique_graphs"]
    start_afresh()
    model, tier = made(plain), RecordingTier(deferred=True)
    if not apply_first:
        model = change(model)
    with apply(model, plan, tier, **options) as handle:
        if apply_first:
            model = change(model)
        for again in (False, True, True):
            with torch.compiler.set_stance("fail_on_recompile") if again else nullcontext():
                assert same(step(model), expected)
        assert counters["stats"]["unique_graphs"] == num_graphs
        assert not counters["graph_break"]
        assert_nothing_left(handle, tier)
        seen = Seen(tier.bytes_of("store"), handle.stats.recomputed_bytes, num_graphs)
    assert same(step(model), expected)
    start_afresh()
    return seen


def of_blocks(compile: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        model.layers = nn.ModuleList([compile(layer) for layer in model.layers])
        return model

    return change


BLOCKS_RECOMPUTED = {"layers.*": "recompute", "*": "offload"}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [BLOCKS_RECOMPUTED, {"layers.1": "recompute", "*": "offload"}, {"layers.1": "save", "*": "offload"}])
@WAYS
def test_a_plan_for_blocks_may_come_before_or_after_they_are_compiled(compiled, plan, backend):
    before, after = (under(plan, of_blocks(compiled(backend)), apply_first=first) for first in (True, False))
    assert before == after
    assert before.stored_bytes > 0
    assert (before.recomputed_bytes > 0) == ("recompute" in plan.values())


@pytest.mark.parametrize("plan", [{"*": "recompute"}, bh.Plan({}, default="recompute"), {"*": "offload"}], ids=str)
@COMPILED
def test_a_plan_for_the_whole_may_come_before_or_after_it_is_compiled(compiled, plan):
    before, after = (under(plan, compiled("aot_eager"), apply_first=first) for first in (True, False))
    assert before == after
    assert before.recomputed_bytes + before.stored_bytes > 0
    assert before.num_graphs == 1


def test_recomputed_values_of_a_block_that_was_compiled_afterwards_can_be_verified():
    for first in (True, False):
        assert under(BLOCKS_RECOMPUTED, of_blocks(in_place("aot_eager")), apply_first=first, verify_recompute=True).recomputed_bytes > 0


@pytest.mark.parametrize("verify", [False, True])
def test_a_part_of_a_unit_may_be_compiled_before_or_after(verify):
    def change(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.up = torch.compile(layer.up, backend="aot_eager")
        return model

    before, after = (under(BLOCKS_RECOMPUTED, change, apply_first=first, verify_recompute=verify) for first in (True, False))
    assert before == after
    assert before.recomputed_bytes > 0


INSIDE = {"layers.*.up": "recompute", "*": "offload"}


@pytest.mark.parametrize("plan", [INSIDE, {"layers.1.down": "save", "*": "offload"}])
@pytest.mark.parametrize("fullgraph", [False, True])
@WAYS
def test_a_rule_inside_of_what_is_compiled_is_refused_in_either_order(compiled, fullgraph, plan):
    change = of_blocks(lambda block: torch.compile(block, backend="aot_eager", fullgraph=fullgraph))
    with pytest.raises(ValueError, match=r"reaches 'layers.[01].(up|down)', inside 'layers.[01]', which is compiled"):
        apply(change(made(lambda: Stack([Block(), Block()]))), plan)
    assert_refused_in_the_first_forward(change, plan, fullgraph=fullgraph)


@pytest.mark.parametrize("plan", [INSIDE, BLOCKS_RECOMPUTED])
@pytest.mark.parametrize("fullgraph", [False, True])
@COMPILED
def test_rules_inside_a_model_that_is_compiled_whole_afterwards_are_refused(compiled, fullgraph, plan):
    def change(model: nn.Module) -> nn.Module:
        if compiled is wrapping:
            return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        model.compile(backend="aot_eager", fullgraph=fullgraph)
        return model

    assert_refused_in_the_first_forward(change, plan, fullgraph=fullgraph)


@COMPILED
def test_rules_for_compiled_blocks_are_refused_where_the_whole_is_compiled_afterwards(compiled):
    def change(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")

    model = of_blocks(compiled("aot_eager"))(made(lambda: Stack([Block(), Block()])))
    expected, tier = step(model), RecordingTier(deferred=True)
    with apply(model, BLOCKS_RECOMPUTED, tier) as handle:
        whole = change(model)
        with pytest.raises(ValueError, match=r"'layers.0' has a rule of its own.*compile first"):
            whole(torch.randn(ROWS, WIDTH))
        assert_nothing_left(handle, tier)
        assert same(step(model), expected)
        assert handle.stats.recomputed_bytes > 0


class Nested(nn.Module):
    """A part that is neither a block nor the whole, or a part that is a block, with blocks inside."""

    def __init__(self, of_blocks: bool) -> None:
        super().__init__()
        part = Stack([Block(), Block()])
        self.parts = nn.ModuleList([part]) if of_blocks else part
        self.name = "parts.0" if of_blocks else "parts"

    @property
    def part(self) -> nn.Module:
        return self.get_submodule(self.name)

    def forward(self, x: Tensor) -> Tensor:
        return (self.parts[0] if isinstance(self.parts, nn.ModuleList) else self.parts)(x)


@pytest.mark.parametrize("of_blocks", [False, True], ids=["part", "block"])
@pytest.mark.parametrize("rule", ["recompute", "save"])
@WAYS
def test_rules_for_compiled_blocks_are_refused_where_a_part_is_compiled_afterwards(compiled, rule, of_blocks):
    def plain() -> Nested:
        model = made(lambda: Nested(of_blocks))
        model.part.layers[1] = compiled("aot_eager")(model.part.layers[1])
        return model

    def change(model: Nested) -> nn.Module:
        part = compiled("aot_eager")(model.part)
        if of_blocks:
            model.parts[0] = part
        else:
            model.parts = part
        return model

    expected = step(change(plain()))
    start_afresh()
    model, tier = plain(), RecordingTier(deferred=True)
    handle = apply(model, {"*.layers.1": rule, "*": "offload"}, tier)
    for _ in range(2):
        step(model)
    change(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'parts(.0)?.layers.1' has a rule of its own.*compile first"):
            model(torch.randn(ROWS, WIDTH))
        assert_nothing_left(handle, tier)
    handle.remove()
    assert same(step(model), expected)
    with pytest.raises(ValueError, match="which is compiled and so is one scope"):
        apply(model, {"*.layers.1": rule, "*": "offload"})


def test_a_rule_inside_a_function_that_is_compiled_afterwards_is_refused():
    def change(model: nn.Module) -> nn.Module:
        model.layers[0].forward = torch.compile(lambda x: Block.forward(model.layers[0], x).sin(), backend="aot_eager")
        return model

    assert_refused_in_the_first_forward(change, INSIDE, fullgraph=False)


def assert_refused_in_the_first_forward(change: Callable[[nn.Module], nn.Module], plan: Any, *, fullgraph: bool) -> None:
    """Claim that the right order is named each time, that nothing is left, and that the model is as usable as before."""
    start_afresh()
    expected = step(change(made(lambda: Stack([Block(), Block()]))))
    start_afresh()
    plain, tier = made(lambda: Stack([Block(), Block()])), RecordingTier(deferred=True)
    handle = apply(plain, plan, tier)
    model = change(plain)
    for _ in range(2):
        with pytest.raises(Exception if fullgraph else ValueError, match=r"'layers.[01](.up|.down)?' has a rule of its own.*compile first"):
            model(torch.randn(ROWS, WIDTH))
        gc.collect()  # what Dynamo raised has the frames that it was raised in
        assert_nothing_left(handle, tier)
    handle.remove()
    assert same(step(model), expected)


@pytest.mark.parametrize("off", ["no_grad", "eval", "paused", "removed"])
def test_nothing_is_refused_where_the_plan_is_off(off):
    model = made(lambda: Stack([Block(), Block()]))
    handle = apply(model, INSIDE)
    whole = torch.compile(model, backend="aot_eager")
    if off == "removed":
        handle.remove()
    around = {"no_grad": torch.no_grad, "paused": handle.paused}.get(off, nullcontext)
    x = torch.randn(ROWS, WIDTH)
    with around():
        assert same([whole.train(off != "eval")(x)], [model(x)])
    if off != "removed":
        with pytest.raises(ValueError, match=r"'layers.0.up' has a rule of its own"):  # what was compiled meanwhile forgets no rule
            whole.train()(x)


@pytest.mark.parametrize("whole", [False, True], ids=["block", "model"])
def test_an_output_to_keep_inside_of_what_is_compiled_is_refused_in_either_order(whole):
    name, glob = ("the model", "layers.0.up") if whole else ("layers.0", "up")
    plan = {"*" if whole else "layers.*": bh.Recompute(keep_outputs=(glob,))}
    change = in_place("aot_eager") if whole else of_blocks(in_place("aot_eager"))
    message = f"keep_outputs of {name!r} names {glob!r}, which is compiled as part of something larger"
    with pytest.raises(ValueError, match=message):
        apply(change(made(lambda: Stack([Block()]))), plan)
    model, tier = made(lambda: Stack([Block()])), RecordingTier(deferred=True)
    with apply(model, plan, tier) as handle:
        change(model)
        with pytest.raises(ValueError, match=message):
            model(torch.randn(ROWS, WIDTH))
        assert_nothing_left(handle, tier)


def test_adapters_put_in_after_a_plan_is_applied_are_part_of_what_is_recomputed():
    def change(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
        return model

    def plain() -> nn.Module:
        return Stack([Block() for _ in range(DEPTH)])

    expected = step(change(made(plain)))
    for plan in (BLOCKS_RECOMPUTED, INSIDE, {"*": "recompute"}):
        for first in (True, False):
            model, tier = made(plain), RecordingTier(deferred=True)
            renamed = plan is INSIDE and not first
            model = model if first else change(model)
            with apply(model, {"layers.*.up.base_layer": "recompute", "*": "offload"} if renamed else plan, tier) as handle:
                model = change(model) if first else model
                for _ in range(3):
                    assert same(step(model), expected)
                assert handle.stats.recomputed_bytes > 0
                assert_nothing_left(handle, tier)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("plan", [None, {"layers.1": "recompute", "*": "offload"}], ids=["offload", "apply"])
def test_a_managed_model_is_exported_as_if_it_were_not(plan, grad, strict):
    model = made(lambda: Stack([Block(), Block()]))
    x = torch.randn(ROWS, WIDTH)
    with torch.set_grad_enabled(grad):
        expected = torch.export.export(model, (x,), strict=strict)
        with everything(model) if plan is None else apply(model, plan) as handle:
            exported = torch.export.export(model, (x,), strict=strict)
            assert exported.graph_module.code == expected.graph_module.code
            assert handle.stats.saved_bytes == 0
            assert same(exported.module()(x), expected.module()(x))
