"""torch.compile in every nesting: hooks stay out of traces, break no graph, cause no recompilation, and weights stay."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from backhaul.engine import Engine
from backhaul.testing import RecordingTier
from tests.conftest import everything, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # inductor is imported
]

WIDTH, ROWS, DEPTH = 16, 8, 3
INPUT_BYTES = ROWS * WIDTH * 4
NOTHING = nullcontext()


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpointed(nn.Module):
    """Recomputes what it is made of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Compile = Callable[[nn.Module], nn.Module]


def wrapping(backend: str, **options: Any) -> Compile:
    return lambda module: torch.compile(module, backend=backend, fullgraph=True, **options)


def in_place(backend: str, **options: Any) -> Compile:
    def compile(module: nn.Module) -> nn.Module:
        module.compile(backend=backend, fullgraph=True, **options)
        return module

    return compile


NESTINGS: dict[str, Callable[[Compile], nn.Module]] = {
    "compile(block)": lambda compile: Stack([compile(Block()) for _ in range(DEPTH)]),
    "checkpoint(compile(block))": lambda compile: Stack([Checkpointed(compile(Block())) for _ in range(DEPTH)]),
    "compile(checkpoint(block))": lambda compile: Stack([compile(Checkpointed(Block())) for _ in range(DEPTH)]),
    "compile(model)": lambda compile: compile(Stack([Block() for _ in range(DEPTH)])),
}
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
NESTED = pytest.mark.parametrize("nesting", NESTINGS)
COMPILED = pytest.mark.parametrize("compiled", [wrapping, in_place], ids=["torch.compile(module)", "module.compile()"])


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def step(model: nn.Module, rows: int = ROWS, around: AbstractContextManager[Any] = NOTHING) -> list[Tensor]:
    """Return the loss and all gradients of a step."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    with around:
        y = model(x)
    loss = y.square().sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients]


def untouched(make: Callable[[], nn.Module]) -> tuple[list[Tensor], int, int]:
    """Return what a step gives without backhaul, how many graphs it compiles, and the bytes that it saves, parameters and buffers aside."""
    model = made(make)
    sizes: dict[Any, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    expected = step(model, around=saved_tensors_hooks(pack, lambda tensor: tensor))
    for owned in (*model.parameters(), *model.buffers()):
        sizes.pop(owned.untyped_storage(), None)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    assert not counters["graph_break"]
    torch.compiler.reset()
    counters.clear()
    return expected, num_graphs, sum(sizes.values())


def moved_in_three_steps(model: nn.Module, tier: RecordingTier, expected: list[Tensor]) -> int:
    """Train a managed model, see that nothing changes and nothing is compiled again; return the bytes of the first step."""
    assert same(step(model), expected)
    first = tier.bytes_of("store")
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            assert same(step(model), expected)
    assert tier.used_bytes == 0
    return first


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
    assert {kind for _, kind in packed} <= {Tensor, nn.Parameter}
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


class Adapted(nn.Module):
    """A frozen base and two small matrices beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


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


# The order of compiling and managing


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


# What else a compiled model does


def test_evaluation_between_steps_stays_untouched():
    model, tier = made(lambda: NESTINGS["compile(block)"](in_place("aot_eager"))), RecordingTier(deferred=True)
    with everything(model, tier):
        expected = step(model)
        for _ in range(2):
            before = tier.bytes_of("store")
            model.eval()
            with torch.no_grad():
                model(torch.randn(ROWS, WIDTH))
            assert tier.bytes_of("store") == before
            model.train()
            assert same(step(model), expected)


def test_lengths_that_change_are_one_dynamic_graph():
    def make() -> nn.Module:
        return Stack([torch.compile(Block(), backend="aot_eager", fullgraph=True, dynamic=True) for _ in range(DEPTH)])

    plain = made(make)
    expected = {rows: step(plain, rows) for rows in (8, 12, 6)}
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier):
        step(model)
        with torch.compiler.set_stance("fail_on_recompile"):
            for rows in (8, 12, 6, 12):
                assert same(step(model, rows), expected[rows])
    assert tier.bytes_of("load") > 0


def test_a_graph_that_breaks_by_itself_trains_the_same():
    class Breaks(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x.sin() * x

    def make() -> nn.Module:
        return Stack([torch.compile(Breaks(), backend="aot_eager") for _ in range(DEPTH)])

    expected = step(made(make))
    num_graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier):
        moved_in_three_steps(model, tier, expected)
    assert counters["stats"]["unique_graphs"] == num_graphs


class OwnTier(RecordingTier):
    """A tier that is no part of backhaul."""

    def __init__(self) -> None:
        super().__init__()
        self.traced: list[bool] = []

    def store(self, source: Tensor) -> Any:
        self.traced.append(torch.compiler.is_compiling())
        return super().store(source)


def test_a_tier_of_the_users_own_is_not_traced():
    class Loops(nn.Module):
        """Is run eagerly, since the graph breaks within a loop; what it calls may be compiled."""

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = (x * 2).sin()
                torch._dynamo.graph_break()
            return x

    model, tier = Stack([Block(), Loops()]), OwnTier()
    with everything(model, tier):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            step(compiled)
    assert tier.traced
    assert not any(tier.traced)
