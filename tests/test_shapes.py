"""Saved tensors of which the backward needs the shape alone, under a plan: freed when the module returns, and not copied."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.conftest import same
from tests.planned import NUM_BYTES, ROWS, WIDTH, X, apply, step

ROW = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda y: torch.zeros(ROWS, WIDTH).index_add(0, ROW, y),
    "index_add_": lambda y: torch.zeros(ROWS, WIDTH).index_add_(0, ROW, y),
    "index_copy": lambda y: torch.zeros(ROWS, WIDTH).index_copy(0, ROW, y),
    "gather": lambda y: y.gather(0, ROW.view(-1, 1).expand(ROWS, WIDTH)),
    "scaled": lambda y: torch.zeros(ROWS, WIDTH).index_add(0, ROW, y, alpha=0.5),
}


class Block(nn.Module):
    """Combines what a projection returns; ``operation`` says how, and may be changed."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.operation = operation
        self.seen: list[weakref.ref[UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        y = self.up(x)
        self.seen.append(weakref.ref(y.untyped_storage()))
        return x + self.operation(y)


class Blocks(nn.Module):
    """Blocks in a ModuleList; ``between`` is called after each."""

    def __init__(self, *operations: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(operation) for operation in operations])
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        x = x.cumsum(0)  # so that nobody else keeps what the first block saves
        for block in self.blocks:
            x = block(x)
            self.between()
        return x


def num_stores(tier: RecordingTier) -> int:
    """How many activations have been stored: indices are smaller."""
    return sum(record.event == "store" and record.num_bytes == NUM_BYTES for record in tier.records)


def num_alive(model: Blocks) -> int:
    return sum(storage() is not None for block in model.blocks for storage in block.seen)


@pytest.mark.parametrize("op", OPS)
def test_the_values_are_freed_when_the_module_returns_and_copied_in_the_first_step_alone(op):
    model, tier = Blocks(OPS[op], OPS[op]), RecordingTier(deferred=True)
    expected = step(model)
    stored = []
    with apply(model, {"*": "offload"}, tier) as handle:
        for _ in range(4):
            alive: list[int] = []
            model.between = lambda alive=alive: alive.append(num_alive(model))
            before = num_stores(tier)
            assert same(step(model), expected)
            assert alive == [0, 0]
            stored.append(num_stores(tier) - before)
        stats = handle.stats
    assert stored[0] == 4  # what the projections start from, and the sources
    assert max(stored[1:]) <= 2
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes
    assert stats.recomputed_bytes == 3 * 2 * NUM_BYTES
    assert "maybe only its shape" not in stats.kept_by_reason


@pytest.mark.parametrize("budget", [0, 1024, None])
@pytest.mark.parametrize("op", OPS)
def test_a_hope_that_is_in_vain_costs_a_copy_later_and_no_value(op, budget):
    """The model changes: at the same place it saves a tensor whose values are needed."""

    def other(y: Tensor) -> Tensor:
        return y.cumsum(0).sin()

    model, tier = Blocks(OPS[op], OPS[op], OPS[op]), RecordingTier(deferred=True)
    with apply(model, {"*": "offload"}, tier, activation_budget=budget) as handle:
        for operation in (OPS[op], OPS[op], other, other, OPS[op], torch.sin, OPS[op], OPS[op]):
            for block in model.blocks:
                block.operation = operation
            with handle.paused():
                expected = step(model)
            before = tier.bytes_of("store")
            assert same(step(model), expected)
            stats = handle.stats
            assert stats.resident_bytes == tier.used_bytes == 0
            assert "maybe only its shape" not in stats.kept_by_reason
            if budget == 0 and operation is torch.sin:
                assert tier.bytes_of("store") - before >= 3 * NUM_BYTES


def test_a_hope_in_vain_is_moved_when_the_module_returns():
    model = Blocks(*[OPS["index_add"]] * 4)
    alive: list[int] = []
    with apply(model, {"*": "offload"}) as handle:
        for _ in range(2):
            step(model)
        for block in model.blocks:
            block.operation = torch.sin
        model.between = lambda: alive.append(num_alive(model))
        result = model(X)
        assert "maybe only its shape" not in handle.stats.kept_by_reason
        assert max(alive) <= 1
        del result


def test_another_reader_keeps_the_values():
    model, tier = Blocks(lambda y: OPS["index_add"](y) + y.sin()), RecordingTier(deferred=True)
    expected = step(model)
    with apply(model, {"*": "offload"}, tier) as handle:
        for _ in range(6):
            assert same(step(model), expected)
            assert handle.stats.resident_bytes == tier.used_bytes == 0
    assert "maybe only its shape" not in handle.stats.kept_by_reason


def test_several_frames_alive():
    model, tier = Blocks(OPS["index_add"], OPS["gather"]), RecordingTier(deferred=True)
    parameters = list(model.parameters())
    inputs = [X * scale for scale in (1.0, 0.5, -2.0)]

    def run() -> list[Tensor]:
        losses = [model(x).square().sum() for x in inputs]
        return [gradient for index in (1, 2, 0) for gradient in torch.autograd.grad(losses[index], parameters)]

    expected = run()
    with apply(model, {"*": "offload"}, tier) as handle:
        for _ in range(3):
            assert same(run(), expected)
            assert handle.stats.resident_bytes == tier.used_bytes == 0


@pytest.mark.parametrize("op", OPS)
def test_gradients_have_gradients(op):
    model, x = Blocks(OPS[op], torch.sin, OPS[op]), X.clone().requires_grad_()

    def run() -> list[Tensor]:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()], allow_unused=True))

    expected = run()
    with apply(model, {"*": "offload"}) as handle:
        for _ in range(2):
            assert same(run(), expected)
        with handle.region():
            assert same(run(), expected)


def test_a_source_that_a_unit_returns_is_let_go_of_too():
    model = Blocks(OPS["index_add"])
    model.blocks[0].up = nn.LayerNorm(WIDTH)
    expected, tier = step(model), RecordingTier(deferred=True)
    with apply(model, {"*.up": "recompute", "*": "offload"}, tier) as handle:
        for _ in range(3):
            result = model(X)
            assert num_alive(model) == 0
            del result
            assert same(step(model), expected)
        assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_a_source_under_a_rule_that_offloads_to_another_tier_leaves_that_alone_too():
    other, model = RecordingTier(deferred=True), Blocks(OPS["index_add"])
    expected, stored = step(model), []
    with apply(model, {"blocks.0": bh.Offload(tier=other)}):
        for _ in range(3):
            assert same(step(model), expected)
            stored.append(num_stores(other))
    assert stored[0] == 2
    assert stored[2] - stored[0] <= 2  # no source any more


def test_an_exception_before_the_module_returns_leaves_no_hope_behind():
    def broken(y: Tensor) -> Tensor:
        OPS["index_add"](y)
        raise ArithmeticError

    model, tier = Blocks(OPS["index_add"], OPS["index_add"]), RecordingTier(deferred=True)
    expected = step(model)
    with apply(model, {"*": "offload"}, tier) as handle:
        for _ in range(2):
            step(model)
        model.blocks[1].operation = broken
        with pytest.raises(ArithmeticError):
            step(model)
        model.blocks[1].operation = OPS["index_add"]
        gc.collect()
        assert handle.stats.resident_bytes == tier.used_bytes == 0
        for _ in range(2):
            assert same(step(model), expected)
        assert handle.stats.resident_bytes == tier.used_bytes == 0


class Two(nn.Module):
    """A projection whose output ``index_add`` and a module read."""

    def __init__(self, *, add_first: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.reader = nn.Hardswish()
        self.add_first = add_first

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        y = self.up(x.cumsum(0))
        if self.add_first:
            return OPS["index_add"](y) + self.reader(y)
        return self.reader(y) + OPS["index_add"](y)


@pytest.mark.parametrize("add_first", [True, False])
def test_a_rule_that_saves_the_storage_wins_over_the_hope(add_first):
    model, tier = Two(add_first=add_first), RecordingTier(deferred=True)
    expected = step(model)
    with apply(model, {"reader": "save", "*": "offload"}, tier) as handle:
        for _ in range(5):
            before = num_stores(tier)
            assert same(step(model), expected)
            assert num_stores(tier) - before <= 1 + add_first  # a copy that began before the rule was met is given back
            assert "maybe only its shape" not in handle.stats.kept_by_reason
        assert handle.stats.kept_by_reason["save"] == 5 * NUM_BYTES


@pytest.mark.parametrize("add_first", [True, False])
def test_what_a_unit_starts_from_is_moved_whatever_else_reads_its_shape(add_first):
    model, tier = Two(add_first=add_first), RecordingTier(deferred=True)
    expected = step(model)
    with apply(model, {"reader": "recompute", "*": "offload"}, tier) as handle:
        for _ in range(5):
            assert same(step(model), expected)
            assert "maybe only its shape" not in handle.stats.kept_by_reason
