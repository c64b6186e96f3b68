"""A module that is recomputed gives the same gradients, runs again once a frame, and keeps only what it started from."""

import gc
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import same
from tests.models import leaf
from tests.recomputing_harness import Harness


class Attention(nn.Module):
    """Causal self-attention with dropout."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.dropout = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width), dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within each sequence."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 32, bias=False),
            nn.Linear(width, 32, bias=False),
            nn.Linear(32, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(width), nn.LayerNorm(width), GatedMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class Double(torch.autograd.Function):
    """Saves an input, a result and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, num_reads: int) -> Tensor:
        y = (x * factor).exp()
        ctx.save_for_backward(x, y)
        ctx.factor, ctx.num_reads = factor, num_reads
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        for _ in range(ctx.num_reads):
            x, y = ctx.saved_tensors
        return g * y * ctx.factor + 0 * x, None, None


class Custom(nn.Module):
    """A custom Function between two layers."""

    def __init__(self, num_reads: int = 1) -> None:
        super().__init__()
        self.first, self.last, self.num_reads = nn.Linear(16, 16), nn.Linear(16, 16), num_reads

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.last(Double.apply(self.first(x).tanh(), 0.5, self.num_reads))


UNITS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16),
    "layer norm": lambda: nn.LayerNorm(16),
    "rms norm": lambda: nn.RMSNorm(16),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "dropout": lambda: nn.Dropout(0.4),
    "softmax": lambda: nn.Softmax(-1),
    "gated mlp": GatedMlp,
    "attention": Attention,
    "multi-head attention": lambda: Code(
        lambda self, x: self.part(x, x, x)[0], nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
    ),
    "block": Block,
    "two blocks": lambda: nn.Sequential(Block(), Block()),
    "custom function": Custom,
    "saved tensors read twice": lambda: Custom(num_reads=2),
    "lstm": lambda: Code(lambda self, x: self.part(x)[0], nn.LSTM(16, 16, batch_first=True)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "inner in-place": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)),
    "identity": nn.Identity,
    "view": lambda: nn.Unflatten(-1, (4, 4)),
    "checkpoint inside": lambda: Code(lambda self, x: self.last(checkpoint(self.part, x, use_reentrant=False)), Block(), nn.Linear(16, 16)),
    "convolution": lambda: Code(lambda self, x: self.part(x.transpose(1, 2)).transpose(1, 2), nn.Conv1d(16, 16, 3, padding=1)),
}


class Code(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], part: nn.Module | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.part, self.last = function, part, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.function(self, *args, **kwargs)


class Around(nn.Module):
    """A unit with layers before and after it."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.before, self.unit, self.after = nn.Linear(16, 16), unit, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.after(self.unit(self.before(x)).flatten(2)).tanh()


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Run forward and backward with the same random numbers each time; return loss, gradients and the next random number."""
    torch.manual_seed(1)
    loss = run(x).float().square().sum()
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *(gradient.clone() for gradient in gradients if gradient is not None), torch.rand(3)]


@pytest.mark.parametrize("name", UNITS)
def test_gradients_and_random_numbers_are_those_of_the_untouched_model(name: str) -> None:
    model, x = Around(UNITS[name]()), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",))
    for _ in range(2):
        assert same(step(harness, model, x), expected)
    assert harness.num_runs["unit"] == (0 if name in ("identity", "view", "convolution") else 2)  # these save what they are given


@pytest.mark.parametrize("name", [name for name in UNITS if name not in ("lstm", "rms norm")])  # they warn under autocast
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_what_it_was_though_backward_runs_outside(name: str, cache: bool) -> None:
    model, x = Around(UNITS[name]()), leaf(2, 5, 16)
    harness = Harness(model, ("unit",))

    def under_autocast(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                model.after(x)  # the cache is warm
                return run(x)

        return call

    managed = step(under_autocast(harness), model, x)
    harness.remove()
    assert same(managed, step(under_autocast(model), model, x))


def test_autocast_off_inside_an_autocast_context_stays_off() -> None:
    def forward(self: Code, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.part(x.float())

    model, x = Around(Code(forward, GatedMlp())), leaf(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, model, x)
        harness = Harness(model, ("unit", "unit.part"))
        assert same(step(harness, model, x), expected)
        harness.remove()
        harness = Harness(model, ("unit.part",))
        assert same(step(harness, model, x), expected)


def test_only_the_input_is_kept() -> None:
    model, x = Around(Block()), leaf(2, 5, 16)
    harness = Harness(model, ("unit",))
    harness(x).sum().backward()
    assert harness.kept == [(10, 16), *[(2, 5, 16)] * 3]  # before's input, the unit's for itself and for its norm, and tanh's output
    assert harness.num_runs["unit"] == 1


def test_what_was_saved_inside_and_returned_is_freed_and_what_was_made_again_too() -> None:
    seen: list[weakref.ref[Any]] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(weakref.ref(output.untyped_storage()))

    model = Around(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()))
    for module in model.unit:
        module.register_forward_hook(watch)
    loss = Harness(model, ("unit",))(leaf(2, 5, 16)).sum()
    gc.collect()
    assert len(seen) == 4
    assert all(storage() is None for storage in seen)
    loss.backward()
    assert len(seen) == 8
    assert all(storage() is None for storage in seen)  # though `loss` and its graph are alive


def test_a_run_that_ends_early_leaves_no_cycle() -> None:
    seen: list[weakref.ref[Any]] = []
    model = Code(lambda self, x: x + self.part(x), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    model.part[0].register_forward_hook(lambda _, args, output: seen.append(weakref.ref(output.untyped_storage())))
    model.part[1].register_forward_hook(lambda _, args, output: seen.append(weakref.ref(output.untyped_storage())))
    gc.disable()
    try:
        Harness(model, ("part",))(leaf(3, 16)).sum().backward()
        assert len(seen) == 3  # it ended in tanh
        assert all(storage() is None for storage in seen)
    finally:
        gc.enable()


def test_a_value_made_again_lives_until_its_last_user_has_had_it() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    harness = Harness(model, ("1",))
    y = harness(leaf(3, 16)).sum()
    y.backward(retain_graph=True)
    assert harness.num_runs["1"] == 1
    gelu = y.grad_fn.next_functions[0][0].next_functions[1][0]
    assert gelu.name() == "GeluBackward0"
    y.backward(retain_graph=True)
    assert harness.num_runs["1"] == 2  # it was not kept between them


def test_two_needs_of_different_tensors_cause_one_run() -> None:
    model = Around(nn.Sequential(Block(), Block()))
    harness = Harness(model, ("unit",))
    x = leaf(2, 5, 16)
    for frame in (1, 2):
        harness(x).sum().backward()
        assert harness.num_runs["unit"] == frame


def test_an_output_that_somebody_keeps_alive_is_no_reason_not_to_run() -> None:
    """On another rank it may be gone, and what the module sends and receives has to be so on all of them."""
    model, kept = nn.Sequential(nn.Linear(16, 16), Code(lambda self, x: x.cumsum(0)), nn.Linear(16, 16)), []
    model[1].register_forward_hook(lambda _, args, output: kept.append(output))
    harness = Harness(model, ("1",))
    harness(leaf(3, 16)).sum().backward()
    assert harness.num_runs["1"] == 1


def test_retain_graph_runs_it_once_more_with_the_same_result() -> None:
    model, x = Around(Block()), leaf(2, 5, 16)
    harness = Harness(model, ("unit",))
    loss = harness(x).square().sum()
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    assert harness.num_runs["unit"] == 1
    assert same(torch.autograd.grad(loss, [x, *model.parameters()]), first)
    assert harness.num_runs["unit"] == 2


def test_split_backward() -> None:
    model, x = Around(Block()), leaf(2, 5, 16)
    torch.manual_seed(1)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), [x, *parameters])
    harness = Harness(model, ("unit",))
    torch.manual_seed(1)
    loss = harness(x).square().sum()
    got = torch.autograd.grad(loss, [x], retain_graph=True)
    assert same([*got, *torch.autograd.grad(loss, parameters)], expected)
    assert harness.num_runs["unit"] <= 2


def test_double_backward() -> None:
    model, x = Around(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))), leaf(2, 5, 16)

    def penalty(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [*model.parameters()], allow_unused=True))

    expected = penalty(model)
    assert same(penalty(Harness(model, ("unit",))), expected)


def test_a_backward_inside_the_forward() -> None:
    def forces(self: Code, x: Tensor) -> Tensor:
        energy = self.part(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(force)

    model, x = Around(Code(forces, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 16))), leaf(2, 5, 16)
    expected = step(model, model, x)
    assert same(step(Harness(model, ("unit",)), model, x), expected)


def test_it_stops_as_soon_as_it_has_what_is_wanted() -> None:
    calls: list[str] = []
    model = Code(lambda self, x: x + self.part(x), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    model.part[2].register_forward_pre_hook(lambda *_: calls.append("began"))
    model.part[2].register_forward_hook(lambda *_: calls.append("ended"))
    Harness(model, ("part",))(leaf(3, 16)).sum().backward()
    assert calls == ["began", "ended"]  # nobody has saved its output


def test_a_forward_that_catches_exceptions_is_stopped_all_the_same() -> None:
    def stubborn(self: Code, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                x = self.part(x)
            except Exception:
                raise AssertionError("the module has met our exception") from None
        return x

    model = Code(lambda self, x: x + self.part(x), Code(stubborn, nn.Sequential(nn.Linear(16, 16), nn.Tanh())))
    x = leaf(3, 16)
    expected = step(model, model, x)
    assert same(step(Harness(model, ("part",)), model, x), expected)


def test_frozen_inputs_still_train_what_is_inside() -> None:
    model = Around(nn.Sequential(Block(), Block()))
    model.before.requires_grad_(False)
    model.unit[0].requires_grad_(False)
    for module in (model.unit[0].mlp, model.unit[1]):
        module.requires_grad_(True)
    x = torch.randn(2, 5, 16)

    def adapters(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(run(x).square().sum(), [p for p in model.parameters() if p.requires_grad]))

    expected = adapters(model)
    assert same(adapters(Harness(model, ("unit",))), expected)
    assert same(adapters(Harness(model, ("unit.0", "unit.1"))), expected)


def test_a_unit_without_gradients_inside_whose_output_is_saved() -> None:
    model = Around(nn.LayerNorm(16)).requires_grad_(False)
    model.after.requires_grad_(True)
    x = torch.randn(2, 5, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.after.parameters()))
    harness = Harness(model, ("unit",))
    assert same(torch.autograd.grad(harness(x).sum(), list(model.after.parameters())), expected)
    assert harness.num_runs["unit"] == 1


def test_one_module_called_several_times_in_a_frame() -> None:
    block = Block()
    model, x = Around(Code(lambda self, x: self.part(self.part(x).tanh()) + self.part(x), block)), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit.part",))
    assert same(step(harness, model, x), expected)
    assert harness.num_runs["unit.part"] == 3


def test_a_chain_of_cheap_units_is_made_from_its_beginning() -> None:
    model, x = Around(nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.LayerNorm(16), GatedMlp())), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit.0", "unit.1", "unit.2", "unit.3"))
    assert same(step(harness, model, x), expected)
    assert harness.kept == [(10, 16), (2, 5, 16), (2, 5, 16), (2, 5, 16)]  # x, what the chain starts from, tanh's output twice
    assert all(harness.num_runs[f"unit.{i}"] == 1 for i in range(4))


def test_a_row_of_blocks_keeps_the_input_of_each() -> None:
    model, x = Around(nn.Sequential(*(Block() for _ in range(4)))), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, [f"unit.{i}" for i in range(4)])
    assert same(step(harness, model, x), expected)
    assert all(harness.num_runs[f"unit.{i}"] == 1 for i in range(4))
    assert len(harness.kept) == 7  # x, four inputs of blocks, tanh's output twice; the last block's output is made again


def test_units_inside_a_unit_are_plain() -> None:
    model, x = Around(Block()), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit", "unit.norm", "unit.mlp"))
    assert same(step(harness, model, x), expected)
    assert harness.num_runs == {"unit": 1}


def test_a_unit_inside_a_checkpointed_region_is_left_alone() -> None:
    model, x = Around(Code(lambda self, x: checkpoint(self.part, x, use_reentrant=False), Block())), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit.part",))
    assert same(step(harness, model, x), expected)
    assert not harness.num_runs


Pair = namedtuple("Pair", "left right")


def test_arguments_and_results_of_any_structure() -> None:
    def forward(self: Code, x: Tensor, pair: Pair, *, scales: dict[str, list[Any]], flag: bool, none: None = None) -> dict[str, Any]:
        assert flag
        assert none is None
        assert pair.left is x  # one tensor passed twice stays one
        scales["b"].append("seen")  # what it is given is its own the second time, too
        assert len(scales["b"]) == 2
        y = self.part(pair.left * scales["a"][0] + pair.right)
        return {"y": (y, [y.tanh()]), "count": 3, "nothing": None, "same": x}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit, self.last = Code(forward, nn.Linear(16, 16)), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = x.tanh()
            out = self.unit(x, Pair(x, x.exp()), scales={"a": [torch.arange(16.0)], "b": [1]}, flag=True)
            assert out["count"] == 3
            assert out["same"] is x
            (y, [z]) = out["y"]
            return self.last(y) + self.last(z) + self.last(out["same"])

    model, x = Model(), leaf(3, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",))
    assert same(step(harness, model, x), expected)
    assert harness.num_runs["unit"] == 1


def test_views_of_one_output_are_made_together() -> None:
    def forward(self: Code, x: Tensor) -> Tensor:
        left, right = self.part(x)
        return (left * right).exp()

    model, x = Code(forward, Code(lambda self, x: self.part(x).chunk(2, -1), nn.Linear(16, 32))), leaf(3, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("part",))
    assert same(step(harness, model, x), expected)
    assert harness.num_runs["part"] == 1
    assert harness.num_bytes == 3 * 32 * 4


def test_an_output_written_in_place_is_saved_as_it_is_then() -> None:
    model = Code(lambda self, x: self.last(self.part(x).mul_(2)), nn.Linear(16, 16), nn.Linear(16, 16))
    x = leaf(3, 16)
    expected = step(model, model, x)
    assert same(step(Harness(model, ("part",)), model, x), expected)


def test_two_threads_need_one_unit() -> None:
    model, x = Around(Block()), leaf(2, 5, 16)
    torch.manual_seed(1)
    y = model(x)
    expected = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.autograd.grad(y.square().sum(), x)[0]]
    harness = Harness(model, ("unit",))
    torch.manual_seed(1)
    y = harness(x)
    losses, got = [y.sum(), y.square().sum()], [None, None]

    def backward(i: int) -> None:
        got[i] = torch.autograd.grad(losses[i], x, retain_graph=True)[0]

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(got, expected)


def test_a_dropped_graph_takes_everything_with_it() -> None:
    model = Around(Block())
    harness = Harness(model, ("unit",))
    x = torch.randn(2, 5, 16)
    loss = harness(x.requires_grad_() * 1).sum()
    unit = weakref.ref(_unit_of(loss))
    gc.disable()
    try:
        del loss
        assert unit() is None
    finally:
        gc.enable()


def _unit_of(loss: Tensor) -> Any:
    """Return the unit that some promise in the graph of ``loss`` owns."""
    from backhaul.recomputing import Unit

    return next(each for each in gc.get_objects() if isinstance(each, Unit))
