"""What else compiled models do: lengths that change, graphs that break, evaluation, autocast, compiled backward passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from backhaul.testing import RecordingTier
from tests.compiled import (
    DEPTH,
    INPUT_BYTES,
    ROWS,
    WARNINGS,
    WIDTH,
    Block,
    Stack,
    made,
    moved_in_three_steps,
    start_afresh,
    step,
    untouched,
)
from tests.conftest import everything, same

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    start_afresh()


def compiled_blocks(block: Callable[[], nn.Module] = Block, **options: Any) -> nn.Module:
    return Stack([torch.compile(block(), backend="aot_eager", fullgraph=True, **options) for _ in range(DEPTH)])


def test_evaluation_between_steps_stays_untouched():
    model, tier = made(compiled_blocks), RecordingTier(deferred=True)
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
    make = partial(compiled_blocks, dynamic=True)
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


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_the_data_knows_are_no_tensors():
    class Picks(Block):
        def forward(self, x: Tensor) -> Tensor:
            picked = (x.sum(-1) > 0).nonzero().squeeze(-1)
            return super().forward(x).index_add(0, picked, x[picked] * 2)

    make = partial(compiled_blocks, Picks)
    expected, _, saved_bytes = untouched(make)
    model, tier = made(make), RecordingTier(deferred=True)
    with everything(model, tier):
        assert moved_in_three_steps(model, tier, expected) == saved_bytes


class Selective(nn.Module):
    """Keeps the products and recomputes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def test_what_a_selective_checkpoint_keeps_inside_a_compiled_block_moves():
    expected, _, saved_bytes = untouched(partial(compiled_blocks, Selective))
    assert DEPTH * INPUT_BYTES < saved_bytes < DEPTH * 9 * INPUT_BYTES  # more than the inputs, less than all
    model, tier = made(partial(compiled_blocks, Selective)), RecordingTier(deferred=True)
    with everything(model, tier):
        assert moved_in_three_steps(model, tier, expected) == saved_bytes


class Autocast(nn.Module):
    """Blocks whose products are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = compiled_blocks()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.stack(x).float()


def test_casts_of_weights_that_a_compiled_graph_saves_are_activations():
    """The graph makes them and nobody else has them, so that to move them frees memory; the weights themselves stay."""
    expected, _, _ = untouched(Autocast)
    model, tier = made(Autocast), RecordingTier(deferred=True)
    cast_bytes = WIDTH * 4 * WIDTH * 2
    with everything(model, tier) as handle:
        moved_in_three_steps(model, tier, expected)
        assert handle.stats.futile_bytes == 0
    sizes = {record.num_bytes for record in tier.records}
    assert cast_bytes in sizes
    assert 2 * cast_bytes not in sizes


def test_a_compiled_graph_is_kept_for_a_second_backward():
    def twice(model: nn.Module) -> list[Tensor]:
        loss = model(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = twice(made(compiled_blocks))
    model = made(compiled_blocks)
    with everything(model):
        assert same(twice(model), expected)


def test_a_backward_pass_that_is_compiled_itself_gives_the_same():
    def run(model: nn.Module) -> list[Tensor]:
        loss = model(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)).square().sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients

    expected = run(made(compiled_blocks))
    model, tier = made(compiled_blocks), RecordingTier(deferred=True)
    with everything(model, tier):
        for _ in range(2):
            assert same(run(model), expected)
    assert tier.bytes_of("load") > 0


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
