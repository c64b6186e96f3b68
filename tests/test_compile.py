"""torch.compile in every nesting: hooks stay out of traces, break no graph, cause no recompilation, and weights stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from backhaul.engine import Engine
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
    Compile,
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
from tests.planned import apply

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    start_afresh()


NESTINGS: dict[str, Callable[[Compile], nn.Module]] = {
    "compile(block)": lambda compile: Stack([compile(Block()) for _ in range(DEPTH)]),
    "checkpoint(compile(block))": lambda compile: Stack([Checkpointed(compile(Block())) for _ in range(DEPTH)]),
    "compile(checkpoint(block))": lambda compile: Stack([compile(Checkpointed(Block())) for _ in range(DEPTH)]),
    "compile(model)": lambda compile: compile(Stack([Block() for _ in range(DEPTH)])),
}
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
NESTED = pytest.mark.parametrize("nesting", NESTINGS)
COMPILED = pytest.mark.parametrize("compiled", [wrapping, in_place], ids=["torch.compile(module)", "module.compile()"])


@BACKENDS
@NESTED
@COMPILED
def test_c04_in_every_nesting_exactly_what_is_no_parameter_moves(nesting, backend, compiled):
    def make() -> nn.Module:
        return NESTINGS[nesting](compiled(backend))

    expected, num_graphs, saved_bytes = untouched(make)
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        assert moved_in_three_steps(model, tier, expected) == saved_bytes
        assert handle.stats.kept_by_reason["parameter"] > 0
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]
    assert same(step(model), expected)


@COMPILED
def test_a_block_that_is_there_twice_is_one_graph_under_a_plan(compiled):
    def make() -> nn.Module:
        block = compiled("aot_eager")(Block())
        return Stack([block, compiled("aot_eager")(Block()), block])

    expected, num_graphs, _ = untouched(make)
    model = made(make)
    with apply(model, {"*": "offload"}) as handle:
        for _ in range(3):
            assert same(step(model), expected)
        assert handle.stats.offloaded_bytes > 0
    assert counters["stats"]["unique_graphs"] == num_graphs


@NESTED
def test_hooks_see_no_trace_and_nothing_is_unpacked_before_backward(nesting, monkeypatch):
    packed: list[tuple[bool, type]] = []
    unpacked: list[bool] = []
    pack, unpack = Engine.pack, Engine.unpack

    def seen_pack(self: Engine, tensor: Tensor) -> Any:
        packed.append((torch.compiler.is_compiling(), type(tensor)))
        return pack(self, tensor)

    def seen_unpack(self: Engine, promise: Any) -> Tensor:
        unpacked.append(torch.compiler.is_compiling())
        return unpack(self, promise)

    monkeypatch.setattr(Engine, "pack", seen_pack)
    monkeypatch.setattr(Engine, "unpack", seen_unpack)
    model = made(lambda: NESTINGS[nesting](in_place("aot_eager")))
    with everything(model):
        for _ in range(2):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            assert not unpacked
            loss.backward()
            assert unpacked
            assert not any(unpacked)
            unpacked.clear()
    assert {Tensor} <= {kind for _, kind in packed} <= {Tensor, nn.Parameter}
    assert not any(tracing for tracing, _ in packed)


@NESTED
def test_of_checkpointed_blocks_the_inputs_move_and_nothing_else(nesting):
    model, tier = made(lambda: NESTINGS[nesting](in_place("aot_eager"))), RecordingTier(deferred=True)
    with everything(model, tier):
        step(model)
    sizes = [record.num_bytes for record in tier.records if record.event == "store"]
    if "checkpoint" in nesting:
        assert sizes == [INPUT_BYTES] * (DEPTH + 1)  # and the head's
    else:
        assert sum(sizes) == DEPTH * 9 * INPUT_BYTES + INPUT_BYTES  # the input, and four times as much before and after the GELU


# Weights that a compiled graph takes as inputs


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x).sin()))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("table", torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.table + self.table.sin()) * self.table


def adapted_block() -> nn.Module:
    block = Block()
    block.up, block.down = Adapted(block.up), Adapted(block.down)
    return block


def frozen_block() -> nn.Module:
    block = Block()
    block.up.requires_grad_(False)
    return block


WEIGHTS = {"plain": Block, "tied": Tied, "frozen": frozen_block, "adapters": adapted_block, "buffer": Buffered}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("whole", [True, False], ids=["compile(model)", "compile(block)"])
def test_c13_weights_that_a_compiled_graph_takes_as_inputs_stay(kind, whole):
    compile = wrapping("aot_eager")

    def make() -> nn.Module:
        blocks = [WEIGHTS[kind]() for _ in range(2)]
        return compile(Stack(blocks)) if whole else Stack([compile(block) for block in blocks])

    expected, _, saved_bytes = untouched(make)
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier):
        assert moved_in_three_steps(model, tier, expected) == saved_bytes
