"""What is put around a second run, and around a first run that is looked at: all of it, in order, and gone again whatever interrupts."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode

import backhaul as bh
from backhaul import _torch
from backhaul.engine import Engine
from backhaul.interrupts import Around
from backhaul.replaying import Surroundings
from backhaul.testing import RecordingTier
from backhaul.watching import Watching
from tests.conftest import Code, same
from tests.recomputing_harness import Harness


class Mode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Gated(nn.Module):
    """A product of two projections; ``gate`` can be kept by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return (self.gate(x).sigmoid() * self.up(x)).exp()


class Model(nn.Module):
    """A ``Gated`` amid other things."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lead = nn.Linear(16, 16)
        self.part = wrap(Gated())

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.part(self.lead(x).cos()).sin()


X = torch.linspace(-1, 1, 64).view(4, 16)


def step(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    result = call(X)
    return [result.detach().clone(), *torch.autograd.grad(result.float().square().sum(), list(model.parameters()))]


def state() -> tuple[Any, ...]:
    """All that may be put around a run in this thread."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        nesting,
        _torch.kernel_settings(),
        _torch.top_saved_tensors_hooks(),
        torch._C._len_torch_function_stack(),
        torch.get_rng_state().tolist(),
    )


@contextmanager
def other_surroundings() -> Iterator[Surroundings]:
    """Give the state around a pass that differs in everything from what is here now."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(1)
        found = Surroundings(())
        torch.rand(1)
        found.settle()
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_flash_sdp(True)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        yield found


def test_what_is_undone_last_was_done_first_and_an_error_passes_through() -> None:
    seen: list[str] = []
    around = Around()
    for name in "ab":
        around.add(partial(seen.append, name), partial(seen.append, name.upper()))
    around.add(partial(seen.append, "c"))
    with pytest.raises(ZeroDivisionError):
        around.call(lambda: seen.append("call") or 1 / 0, (), {})
    assert seen == ["a", "b", "c", "call", "B", "A"]


def test_a_second_run_has_the_surroundings_of_the_first_and_leaves_those_there_are() -> None:
    with other_surroundings() as surroundings:
        around, before = Around(), state()
        surroundings.put_around(around)
        inside = around.call(state, (), {})
        assert state() == before
    assert inside[:5] == (True, True, torch.bfloat16, False, before[4] + 1)
    assert inside[5] == surroundings.settings != before[5]
    assert inside[8] == surroundings.generators[0][1].tolist() != before[8]


def by_attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


BACKENDS = torch.backends
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64, torch.float32),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium", "highest"),
    "matmul precision, high": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high", "medium"),
    "tf32 in cudnn": (*by_attribute(BACKENDS.cudnn, "allow_tf32"), False, True),
    "cudnn": (*by_attribute(BACKENDS.cudnn, "enabled"), False, True),
    "oneDNN": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False, True),
    "oneDNN, deterministic": (*by_attribute(BACKENDS.mkldnn, "deterministic"), True, False),
    "reduced precision": (*by_attribute(BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction"), False, True),
    "flash attention": (BACKENDS.cuda.flash_sdp_enabled, BACKENDS.cuda.enable_flash_sdp, False, True),
    "order of attentions": (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [2, 1, 0, 3, 4], [1, 2, 0, 3, 4]),
    "fresh memory": (*by_attribute(torch.utils.deterministic, "fill_uninitialized_memory"), False, True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_second_run_has_the_settings_of_the_first(name: str) -> None:
    read, write, then, now = SETTINGS[name]
    was = read()
    try:
        write(then)
        surroundings = Surroundings(())
        write(now)
        around = Around()
        surroundings.put_around(around)
        assert around.call(read, (), {}) == then
        assert read() == now
    finally:
        write(was)


class Draws(nn.Module):
    """Makes tensors and does not say of what type, or where."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        """Draw a number for each column."""
        self.devices.append(torch.empty(1).device.type)
        return (x * torch.rand(16, device=x.device).to(x)).exp()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(default_dtype(torch.float64), nullcontext()), (torch.device("meta"), nullcontext()), (torch.device("meta"), torch.device("meta"))],
    ids=["dtype", "device", "device all along"],
)
def test_what_a_second_run_makes_is_as_in_the_first(forward: Any, backward: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Draws())
    with forward:
        torch.manual_seed(1)
        result = model(X)
        expected = torch.autograd.grad(result.sum(), list(model.parameters()))
        with bh.apply(model, {"1": "recompute"}, min_bytes=0) as handle:
            torch.manual_seed(1)
            loss = model(X).sum()
    with backward:
        assert same(torch.autograd.grad(loss, list(model.parameters())), expected)
    assert handle.stats.recomputed_bytes > 0
    assert model[1].devices == 3 * model[1].devices[:1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="other places")
def test_c31_an_interrupt_anywhere_in_what_is_around_a_call_leaves_none_of_it() -> None:
    """Interrupted as each function begins and as each call returns, torch's own included."""
    model = Model()
    with other_surroundings() as surroundings:
        before = state()

        def run(number: int) -> int:
            count = 0

            def profile(frame: FrameType, event: str, argument: Any) -> None:
                nonlocal count
                if event in ("call", "c_return"):
                    count += 1
                    if count == number:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            around = Around()
            surroundings.put_around(around)
            around.add(partial(_torch.push_saved_tensors_hooks, id, id), _torch.pop_saved_tensors_hooks)
            Watching({model.lead: "lead", model.part: "part"}, lambda name: None, lambda name, output: None).put_around(around)
            around.add(partial(_torch.push_function_mode, Mode()), _torch.pop_function_mode)
            try:
                sys.setprofile(profile)
                around.call(model.lead.extra_repr, (), {})
            finally:
                sys.setprofile(None)
            return count

        for number in range(1, run(-1)):
            with pytest.raises(KeyboardInterrupt):
                run(number)
            assert state() == before
            assert not any(hooks for module in model.modules() for hooks in _torch.forward_hooks_of(module))


@pytest.mark.parametrize("outer", [None, torch.float16])
def test_backward_may_run_under_another_autocast_or_none(outer: torch.dtype | None) -> None:
    model = Model()

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            result = call(X)
        with torch.autocast("cpu", outer, enabled=outer is not None):
            before = state()
            gradients = torch.autograd.grad(result.float().square().sum(), list(model.parameters()))
            assert state() == before
        return [result.detach().clone(), *gradients]

    harness = Harness(model, ("part",))
    got = run(harness)
    assert harness.num_runs == {"part": 1}
    harness.remove()
    assert same(got, run(model))


def test_what_hooks_of_the_user_make_of_a_kept_output_they_make_again() -> None:
    """Ours come first: what is put in place is what the module itself returned."""
    model = Model()
    model.part.gate.register_forward_hook(lambda module, args, output: output.mul_(2.0))
    expected = step(model, model)
    harness = Harness(model, ("part",), keep_outputs=("gate",))
    with pytest.raises(ValueError, match="keep_outputs keeps what 'gate' returns, and that is written in place"):
        harness(X)
    harness.remove()
    model.part.gate._forward_hooks.clear()
    model.part.gate.register_forward_hook(lambda module, args, output: output * 2.0)
    harness = Harness(model, ("part",), keep_outputs=("gate",), verify=True)
    assert same(step(harness, model), expected)
    assert harness.num_runs == {"part": 1}


@pytest.mark.parametrize("glob", ["gate", "part.gate", "*gate", "g?te"])
@pytest.mark.parametrize("wrap", [lambda module: module, checkpoint_wrapper], ids=["bare", "wrapped"])
def test_an_output_to_keep_may_be_named_from_the_unit_or_from_the_root(glob: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, tier = Model(), RecordingTier(deferred=True)
    expected = step(model, model)
    model = Model(wrap)
    with bh.apply(model, {"part": bh.Recompute(keep_outputs=(glob,)), "*": "offload"}, tier=tier, min_bytes=0) as handle:
        assert same(step(model, model), expected)
        gc.collect()
        assert handle.stats.recomputed_bytes
    with pytest.raises(ValueError, match=r"keep_outputs has 'gat', which matches no module inside 'part' \(closest: '\*\.gate'"):
        bh.apply(model, {"part": bh.Recompute(keep_outputs=("gat",))}, tier=tier)


def test_what_a_module_is_called_with_is_looked_at_once_however_often_it_saves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    promise_dense = Engine._promise_dense

    def noting(self: Engine, tensor: Tensor, **options: Any) -> Any:
        looked_at.append(id(tensor.untyped_storage()))
        return promise_dense(self, tensor, **options)

    monkeypatch.setattr(Engine, "_promise_dense", noting)
    model, x = nn.Sequential(Gated()), torch.randn(4, 16, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for plan, times in (({"*": "offload"}, 2), ({"0": "recompute", "*": "offload"}, 1)):
        looked_at.clear()
        with bh.apply(model, plan, activation_budget=0, min_bytes=0, tier=RecordingTier()):
            output = model(x)
        assert looked_at.count(id(x.untyped_storage())) == times
        assert same(torch.autograd.grad(output.sum(), [x, *model.parameters()]), expected)


def test_a_module_may_return_a_view_that_nobody_may_use_any_more() -> None:
    def stale(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        half, _ = y.chunk(2)
        y.mul_(x)
        return y.sin(), half

    model, x = nn.Sequential(Code(stale)), torch.randn(4, 16, requires_grad=True)
    expected = torch.autograd.grad(model(x)[0].cos().sum(), x)
    harness = Harness(model, ("0",))
    assert same(torch.autograd.grad(harness(x)[0].cos().sum(), x), expected)
    assert harness.num_runs["0"] == 1
