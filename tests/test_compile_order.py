"""Compiling and managing in either order: what is managed first and compiled afterwards, and what is refused."""

from collections.abc import Callable
from dataclasses import dataclass

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
