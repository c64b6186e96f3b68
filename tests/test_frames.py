"""Rule 6: the order of frames and needs is learned from one step and expected in the next; a wrong guess costs time, never values."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.testing import RecordingTier, assert_same_training
from tests.conftest import Code, everything, same

WIDTH = 16
Event = tuple[str, int, int]  # "forward" or "backward", chunk, microbatch


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def stack(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(depth)])


def managed(model: nn.Module, **options: object) -> bh.Handle:
    return everything(model, RecordingTier(deferred=True), **options)


BUDGETS = pytest.mark.parametrize("budget", [0, "4KB", None], ids=["all moves", "some moves", "no budget"])


# Loops by hand: a pipeline of chunks, each a managed module of its own with inputs that are cut off, as a pipeline stage has them


def one_forward_one_backward(num_microbatches: int, num_warmup: int = 3) -> list[Event]:
    events: list[Event] = [("forward", 0, index) for index in range(num_warmup)]
    for index in range(num_microbatches - num_warmup):
        events += [("forward", 0, index + num_warmup), ("backward", 0, index)]
    return events + [("backward", 0, index) for index in range(num_microbatches - num_warmup, num_microbatches)]


def interleaved() -> list[Event]:
    order = ["f00", "f01", "f10", "f11", "f02", "b10", "f03", "b11", "f12", "b00", "f13", "b01", "b12", "b13", "b02", "b03"]
    return [("forward" if word[0] == "f" else "backward", int(word[1]), int(word[2])) for word in order]


def run_pipeline(chunks: Sequence[nn.Module], events: Sequence[Event], size: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    gradients: dict[tuple[int, int], Tensor] = {}
    found: list[Tensor] = []
    for kind, chunk, index in events:
        if kind == "forward":
            x = outputs.pop((chunk - 1, index)) if chunk else torch.randn(size, WIDTH)
            x = x.detach().requires_grad_()
            y = chunks[chunk](x)
            alive[chunk, index] = (x, y)
            outputs[chunk, index] = y.detach()
        else:
            x, y = alive.pop((chunk, index))
            y.backward(gradients.pop((chunk, index), torch.ones_like(y)))
            assert x.grad is not None
            gradients[chunk - 1, index] = x.grad
            found.append(x.grad.clone())
    for chunk in chunks:
        found += [parameter.grad.clone() for parameter in chunk.parameters() if parameter.grad is not None]
        chunk.zero_grad()
    return found


@BUDGETS
def test_one_forward_one_backward_gives_the_same(budget):
    model, events = stack(), one_forward_one_backward(7)
    expected = run_pipeline([model], events)
    with managed(model, activation_budget=budget) as handle:
        for _ in range(4):
            assert same(run_pipeline([model], events), expected)
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.resident_bytes == handle._engine.tier.used_bytes == 0


@BUDGETS
def test_an_interleaved_schedule_of_two_chunks_under_one_handle_gives_the_same(budget):
    chunks, events = nn.ModuleList([stack(2), stack(2)]), interleaved()
    expected = run_pipeline(chunks, events)
    with managed(chunks, activation_budget=budget) as handle:
        for _ in range(4):
            assert same(run_pipeline(chunks, events), expected)
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.resident_bytes == handle._engine.tier.used_bytes == 0


@BUDGETS
def test_a_changed_order_is_learned_again(budget):
    model = stack()
    num = 6
    orders = [
        one_forward_one_backward(num),
        [("forward", 0, index) for index in range(num)] + [("backward", 0, index) for index in range(num)],
        [("forward", 0, index) for index in range(num)] + [("backward", 0, index) for index in reversed(range(num))],
        [(kind, 0, index) for index in range(num) for kind in ("forward", "backward")],
    ]
    expected = [run_pipeline([model], events) for events in orders]
    with managed(model, activation_budget=budget) as handle:
        for which in (0, 0, 1, 1, 1, 2, 3, 0, 3, 3, 2, 2):
            assert same(run_pipeline([model], orders[which]), expected[which])
            assert handle.stats.resident_bytes == handle._engine.tier.used_bytes == 0


@BUDGETS
def test_a_changed_number_of_microbatches_is_learned_again(budget):
    model = stack()
    expected = {num: run_pipeline([model], one_forward_one_backward(num)) for num in (3, 5, 9)}
    with managed(model, activation_budget=budget) as handle:
        for num in (5, 5, 9, 3, 3, 9, 5):
            assert same(run_pipeline([model], one_forward_one_backward(num)), expected[num])
            assert handle.stats.resident_bytes == handle._engine.tier.used_bytes == 0


@BUDGETS
def test_changed_shapes_are_learned_again(budget):
    model, events = stack(), one_forward_one_backward(5)
    expected = {size: run_pipeline([model], events, size) for size in (1, 8, 33)}
    with managed(model, activation_budget=budget) as handle:
        for size in (8, 8, 33, 33, 1, 8, 33, 1):
            assert same(run_pipeline([model], events, size), expected[size])
            assert handle.stats.resident_bytes == handle._engine.tier.used_bytes == 0


@BUDGETS
def test_a_model_that_takes_another_path_each_time_gives_the_same(budget):
    blocks = stack(4)

    def step(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(3):
            loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return losses

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = stack(4)

        def forward(self, x: Tensor) -> Tensor:
            for number in torch.randint(0, 4, (5,)).tolist():  # some not at all, some twice
                x = self.blocks[number](x)
            return x

    assert len(blocks) == 4
    result = assert_same_training(Skips, step, lambda model: managed(model, activation_budget=budget), steps=6)
    assert result.stats.offloaded_bytes > 0
    assert result.stats.resident_bytes == 0


@BUDGETS
def test_gradient_accumulation_over_microbatches_trains_the_same(budget):
    def step(model: nn.Module) -> list[Tensor]:
        losses = []
        for size in (8, 8, 5):
            loss = model(torch.randn(size, WIDTH)).square().mean() / 3
            loss.backward()
            losses.append(loss.detach())
        return losses

    result = assert_same_training(stack, step, lambda model: managed(model, activation_budget=budget), steps=4)
    assert result.stats.offloaded_bytes > 0
    assert result.stats.resident_bytes == 0


@BUDGETS
def test_several_forwards_before_one_backward_train_the_same(budget):
    def step(model: nn.Module) -> Tensor:
        loss = sum(model(torch.randn(8, WIDTH)).square().mean() for _ in range(3))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    result = assert_same_training(stack, step, lambda model: managed(model, activation_budget=budget), steps=4)
    assert result.stats.offloaded_bytes > 0
    assert result.stats.resident_bytes == 0


def test_a_module_that_runs_twice_in_one_frame_keeps_its_calls_apart():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.layers[0](x).tanh())

    def step(model: nn.Module) -> Tensor:
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        return loss

    assert assert_same_training(Shared, step, managed, steps=4).stats.offloaded_bytes > 0


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_backward_inside_and_outside_a_region_gives_the_same(inside):
    model = stack()
    handle: bh.Handle | None = None

    def step(model: nn.Module) -> Tensor:
        x = torch.randn(8, WIDTH)
        if handle is None or not inside:
            loss = model(x).square().mean()
            loss.backward()
            return loss
        with handle.region():
            loss = model(x).square().mean()
            loss.backward()
        return loss

    def manage(model: nn.Module) -> bh.Handle:
        nonlocal handle
        handle = managed(model)
        return handle

    assert len(model) == 3
    assert assert_same_training(stack, step, manage, steps=4).stats.offloaded_bytes > 0


def test_a_region_counts_the_loss_beside_the_model_as_a_frame_of_its_own():
    model, x = stack(), torch.randn(8, WIDTH)

    def loss_of(y: Tensor) -> Tensor:
        return y.exp().sin().cos().mean()

    expected = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    with managed(model) as handle:
        for _ in range(3):
            y = model(x)
            before = handle.stats.num_offloads
            with handle.region():
                loss = loss_of(y)
            assert handle.stats.num_offloads > before
            assert same(torch.autograd.grad(loss, list(model.parameters())), expected)
            del loss, y
            assert handle.stats.resident_bytes == 0


@BUDGETS
def test_eval_no_grad_and_inference_in_between_run_untouched_and_disturb_nothing(budget):
    model, x = stack(), torch.randn(8, WIDTH)

    def step() -> list[Tensor]:
        y = model(x)
        return list(torch.autograd.grad(y.square().mean(), list(model.parameters())))

    expected, value = step(), model(x)
    with managed(model, activation_budget=budget) as handle:
        for _ in range(4):
            loss = model(x).square().mean()
            before = handle.stats.saved_bytes
            with torch.no_grad():
                assert model(x).equal(value)
            with torch.inference_mode():
                assert model(x).equal(value)
            model.eval()
            evaluated = model(x)
            assert evaluated.requires_grad
            assert evaluated.equal(value)
            evaluated.sum().backward()
            model.zero_grad()
            model.train()
            assert handle.stats.saved_bytes == before
            assert same(torch.autograd.grad(loss, list(model.parameters())), expected)
            assert same(step(), expected)


def test_no_grad_inside_a_managed_forward_saves_nothing_there():
    block = Block()

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = block(x) > 0
        return block(x) * mask

    x = torch.randn(8, WIDTH)
    module = Code(run, block)
    expected = torch.autograd.grad(module(x).sum(), list(block.parameters()))
    with managed(module):
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), list(block.parameters())), expected)


# What has been learned


def train(model: nn.Module, x: Tensor, handle: bh.Handle, steps: int) -> list[int]:
    """Return the demand reloads of each step."""
    found, before = [], handle.stats.num_demand_reloads
    for _ in range(steps):
        model(x).square().mean().backward()
        found.append(handle.stats.num_demand_reloads - before)
        before += found[-1]
    return found


def saved_bytes_of(model: nn.Module, x: Tensor) -> int:
    with managed(model) as handle:
        model(x).square().mean().backward()
        return handle.stats.saved_bytes


def test_in_a_steady_order_nothing_is_reloaded_on_demand_from_the_third_step_on():
    model, x = stack(8), torch.randn(64, WIDTH)
    with managed(model, activation_budget=saved_bytes_of(model, x) // 2) as handle:
        demand = train(model, x, handle, 7)
        assert handle.stats.reloaded_bytes > 0
        assert demand[2:] == [0] * 5


def test_with_a_budget_of_nothing_every_reload_is_for_the_node_that_runs():
    model, x = stack(8), torch.randn(64, WIDTH)
    with managed(model, activation_budget=0) as handle:
        train(model, x, handle, 5)
        largest = 64 * 2 * WIDTH * 4
        fixed = handle._engine.stations[torch.device("cpu")].flow.peak_immovable_bytes
        assert handle.stats.peak_resident_bytes <= fixed + 2 * largest


def test_once_learned_the_tail_of_forward_is_not_moved():
    model, x = stack(8), torch.randn(64, WIDTH)
    tier = RecordingTier(deferred=True)
    with everything(model, tier, activation_budget=None) as handle:
        train(model, x, handle, 1)
        first = handle.stats
        assert first.offloaded_bytes == first.saved_bytes
        train(model, x, handle, 1)
        rows = {row.fqn: (row.saved_bytes, row.offloaded_bytes) for row in handle.report().modules}
        saved, offloaded = rows["7"]
        assert offloaded < saved
        assert handle.stats.offloaded_bytes < 2 * first.offloaded_bytes


def test_a_steady_order_is_followed_through_a_pipeline_too():
    model, events = stack(4), one_forward_one_backward(8)
    with managed(model, activation_budget="24KiB") as handle:
        found = []
        for _ in range(6):
            before = handle.stats
            run_pipeline([model], events)
            found.append((handle.stats.num_demand_reloads - before.num_demand_reloads, handle.stats.num_offloads - before.num_offloads))
        assert found[0][1] > 0
        assert max(demand for demand, _ in found[2:]) <= found[0][1] // 4


def test_a_model_that_is_called_within_another_managed_frame_belongs_to_that_frame():
    inner = stack(2)
    outer = Code(lambda x: inner(x).tanh(), inner)
    with managed(outer) as handle:
        outer(torch.randn(8, WIDTH)).sum().backward()
        assert handle._engine.nums is not None
        names = {row.fqn for row in handle.report().modules}
    assert names == {"", "parts.0"}


def count_frames(handle: bh.Handle, run: Callable[[], object]) -> int:
    result = run()
    handle.stats  # noqa: B018 - drains
    number = len(handle._engine.registry.frames)
    del result
    return number


def test_each_forward_is_a_frame_and_a_frame_ends_with_its_graph():
    model = stack()
    with managed(model) as handle:
        assert count_frames(handle, lambda: [model(torch.randn(8, WIDTH)) for _ in range(5)]) == 5
        assert count_frames(handle, lambda: None) == 0
        assert count_frames(handle, lambda: model(torch.randn(8, WIDTH)).sum().backward()) == 0


def test_a_step_that_never_ends_is_told():
    """A branch that nobody goes back through lives until the next pass has replaced it, so something is always alive."""
    model = Code(lambda x: (x.exp().sum(), x.exp().sum()))
    x = torch.randn(64, requires_grad=True)
    with everything(model), pytest.warns(UserWarning, match="the order of a step cannot be learned"):
        for _ in range(256):
            outputs = model(x)
            outputs[0].backward()
