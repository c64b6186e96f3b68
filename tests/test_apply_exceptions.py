"""Rule 9 and C31 under a plan: whatever is raised, in a unit, in its second run or around them, leaves nothing behind."""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import _torch
from backhaul.testing import RecordingTier
from tests.conftest import same
from tests.interrupts import FINALIZERS, interrupted_at, ours
from tests.planned import ROWS, WIDTH, X, apply, step


class BrokenError(Exception):
    pass


class Raises(nn.Module):
    """Raises what it is given, in the call that is counted down to, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.countdown = 0
        self.kind: type[BaseException] | None = None
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        self.countdown -= 1
        kind = self.kind
        if kind is not None and self.countdown == 0 and not self.in_backward:
            raise kind("at its turn")
        y = x * 1.5
        if kind is not None and self.in_backward and y.requires_grad and not _torch.inside_backward():

            def hook(gradient: Tensor) -> None:
                raise kind("at its turn")  # a new one: what the graph holds must not hold, through its traceback, the graph

            y.register_hook(hook)
        return y


class Routed(nn.Module):
    """Chooses by top-k, and drops some; the router's output is kept by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.raises = Raises()

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        values, indices = self.gate(x).topk(4)
        y = self.raises(self.drop(self.up(x).exp()))
        return y.scatter_add(1, indices, values).sin()


class Model(nn.Module):
    """A norm, a unit that chooses, plain code with recipes, and something that raises outside the units."""

    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.routed = Routed()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.raises = Raises()

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        x = self.routed(self.norm(self.lead(x)))
        y = self.up(x)
        return self.raises(nn.functional.silu(y) * x).cos()


PLAN = {"norm": "recompute", "routed": bh.Recompute(keep_outputs=("*.gate",)), "*": "offload"}


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def seeded(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    return step(model)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    gc.collect()
    gc.freeze()  # the collector would look through all of torch, hundreds of times
    return seeded(build())


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def assert_clean(handle: bh.Handle, model: Model, tier: RecordingTier, expected: list[Tensor], *, steps: int = 2) -> None:
    """Nothing of an aborted step is left, and the next one is right."""
    torch.ones(1, requires_grad=True).sum().backward()  # what a failed backward leaves in torch's own queue goes with the next one
    gc.collect()
    engine = handle._engine
    here = engine.here
    assert _torch.top_saved_tensors_hooks() is None
    assert torch._C._len_torch_function_stack() == 0
    assert hooks_of(model) == 0
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert (here.scope, here.unit, here.paused) == (None, None, 0)
    assert handle.stats.resident_bytes == tier.used_bytes == 0
    assert (len(engine.registry.frames), len(engine.registry.records), len(engine.registry.table)) == (0, 0, 0)
    for _ in range(steps):
        assert same(seeded(model), expected)
    assert (here.scope, here.unit, here.outputs) == (None, None, None)
    assert handle.stats.resident_bytes == tier.used_bytes == 0


@contextmanager
def managed(num_steps_before: int, **options: Any) -> Iterator[tuple[Model, RecordingTier, bh.Handle]]:
    model, tier = build(), options.pop("tier", None) or RecordingTier(deferred=True)
    with apply(model, PLAN, tier, **options) as handle:
        for _ in range(num_steps_before):
            seeded(model)
        yield model, tier, handle


ERRORS = pytest.mark.parametrize("kind", [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError])
WHEN = pytest.mark.parametrize("num_steps_before", [0, 3], ids=["at first", "once learned"])


@WHEN
@ERRORS
@pytest.mark.parametrize("where", ["outside", "in a unit", "in its second run", "in backward outside", "in backward in a unit"])
@pytest.mark.parametrize("verify", [False, True])
def test_c31_what_is_raised_keeps_its_type_and_leaves_nothing(where, kind, num_steps_before, verify, expected):
    with managed(num_steps_before, verify_recompute=verify) as (model, tier, handle):
        raises = model.raises if "outside" in where else model.routed.raises
        raises.kind, raises.countdown, raises.in_backward = kind, 2 if "second" in where else 1, "in backward" in where
        with pytest.raises(kind, match="at its turn") as caught:
            seeded(model)
        assert type(caught.value) is kind
        raises.kind = None
        del caught
        assert_clean(handle, model, tier, expected)


def test_random_numbers_go_on_as_if_nothing_had_failed(expected):
    """The second run sets the generator back, and forward again however it ends."""
    with managed(1) as (model, _, _):
        torch.manual_seed(1)
        loss = model(X).square().sum()
        state = torch.get_rng_state()
        model.routed.raises.kind, model.routed.raises.countdown = BrokenError, 1
        with pytest.raises(BrokenError):
            loss.backward()
        assert torch.get_rng_state().equal(state)


def test_a_second_run_that_failed_can_be_tried_again(expected):
    with managed(1) as (model, tier, handle):
        torch.manual_seed(1)
        result = model(X)
        model.routed.raises.kind, model.routed.raises.countdown = BrokenError, 1
        with pytest.raises(BrokenError):
            result.square().sum().backward(retain_graph=True)
        model.routed.raises.kind = None
        got = torch.autograd.grad(result.square().sum(), list(model.parameters()))
        assert same([result.detach().clone(), *got], expected)
        del result, got
        assert_clean(handle, model, tier, expected)


@pytest.mark.parametrize("point", ["store", "write", "load"])
@pytest.mark.parametrize("kind", [BrokenError, KeyboardInterrupt])
def test_c31_every_copy_may_fail_once(point, kind, expected):
    num_failures = 0
    for number in range(10):
        armed = [kind("in a copy")]

        def fault(call: int, number: int = number, armed: list[BaseException] = armed) -> BaseException | None:
            return armed.pop() if call >= number and armed else None

        tier = RecordingTier(deferred=True, **{f"fail_{point}": fault})
        with managed(0, tier=tier) as (model, _, handle):
            for _ in range(3):
                with contextlib.suppress(kind):
                    assert same(seeded(model), expected)
            num_failures += not armed
            assert_clean(handle, model, tier, expected)
    assert num_failures == 10


# Refusals


class Writes(nn.Module):
    """Draws random numbers and writes to something that is not its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("load", torch.zeros(ROWS))
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        if self.what == "a buffer":
            self.load.add_(1.0)
        elif self.what == "an input":
            x.mul_(2.0)
        return nn.functional.dropout(self.up(x), 0.5)


class Cached(nn.Module):
    """Takes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        """Run it."""
        return self.up(x)


class ListCache(list[Tensor]):
    pass


class Refused(nn.Module):
    """Calls a module that cannot be run twice."""

    def __init__(self, part: nn.Module, *more: Any) -> None:
        super().__init__()
        self.lead = nn.Linear(WIDTH, WIDTH)
        self.part = part
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.part(self.lead(x).cumsum(0), *self.more).cos()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a module that works in place": (
        lambda: Refused(nn.ELU(inplace=True)),
        r"'part' cannot be under \"recompute\": it writes to an input in place",
    ),
    "a norm that keeps averages": (lambda: Refused(nn.BatchNorm1d(WIDTH)), "it writes to '(running_mean|num_batches_tracked)' in its"),
    "a module that counts": (lambda: Refused(Writes("a buffer")), "it writes to 'load' in its forward"),
    "a module that writes an input": (lambda: Refused(Writes("an input")), "it writes to an input in place"),
    "a module that takes a cache": (lambda: Refused(Cached(), ListCache()), "it takes a cache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_cannot_run_twice_is_refused_and_without_its_rule_all_is_well(name):
    make, message = REFUSED[name]
    model, tier = make(), RecordingTier(deferred=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    expected = step(model)
    model.load_state_dict(state)
    with apply(model, {"part": "recompute", "*": "offload"}, tier) as handle:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                model(X)
            assert torch.get_rng_state().equal(before)
            assert _torch.top_saved_tensors_hooks() is None
        gc.collect()
        engine = handle._engine
        assert (engine.here.scope, engine.here.unit, engine.here.outputs) == (None, None, None)
        assert handle.stats.resident_bytes == tier.used_bytes == len(engine.registry.frames) == 0
    model.load_state_dict(state)
    with apply(model, {"*": "offload"}, tier):
        torch.manual_seed(1)
        assert same(step(model), expected)


# Interrupts at any point


def counts(frame: FrameType, within: str = "") -> bool:
    """Say whether a frame is backhaul's or called by it; ``within`` a file of that name, if one is given. The tier is spared."""
    callers = [frame, *(caller for caller in (frame.f_back, frame.f_back and frame.f_back.f_back) if caller is not None)]
    paths = {os.path.basename(caller.f_code.co_filename) for caller in callers}
    names = {caller.f_code.co_name for caller in callers}
    if frame.f_code.co_filename == __file__ or not any(map(ours, callers)) or names & {*FINALIZERS, "forget"} or "testing.py" in paths:
        return False
    return not within or within in paths


def put_back(model: nn.Module) -> None:
    """Leave nothing behind for the next try."""
    while _torch.top_saved_tensors_hooks() is not None:
        _torch.pop_saved_tensors_hooks()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    torch.set_grad_enabled(True)


def interrupt(part: str, num_steps_before: int, number: int, expected: list[Tensor], within: str = "") -> tuple[int, bool]:
    """Interrupt a step at one place and claim that nothing is left; return how many places there are, and whether that one was one."""
    with managed(num_steps_before) as (model, tier, handle):
        handle.stats  # noqa: B018 - drains
        torch.manual_seed(1)
        hit = False
        loss = None if part == "forward" else model(X).square().sum()
        with interrupted_at(number, functools.partial(counts, within=within)) as count:
            try:
                if loss is None:
                    model(X)
                else:
                    loss.backward()
            except KeyboardInterrupt:
                hit = True
        del loss
        if hit:
            try:
                assert_clean(handle, model, tier, expected, steps=1)
            except BaseException as error:
                put_back(model)
                raise AssertionError(f"after an interrupt at place {number} of {part}") from error
        return count[0], hit


NUM_PLACES = int(os.environ.get("BACKHAUL_INTERRUPTS", "16"))  # of thousands; by hand, all of them


@pytest.mark.skipif(sys.version_info < (3, 11), reason="other places")
@pytest.mark.parametrize(
    ("num_steps_before", "part", "within"),
    [
        (0, "forward", ""),
        (3, "forward", ""),
        (0, "backward", ""),
        (3, "backward", ""),
        (0, "forward", "watching.py"),
        (0, "forward", "overrides.py"),
        (0, "backward", "watching.py"),
        (0, "backward", "contextlib.py"),
    ],
)
def test_c31_an_interrupt_at_any_point_leaves_nothing(num_steps_before, part, within, expected):
    total, _ = interrupt(part, num_steps_before, -1, expected, within)
    failures = []
    for number in range(1, total + 1, total // NUM_PLACES + 1):
        try:
            _, hit = interrupt(part, num_steps_before, number, expected, within)
            assert hit, f"place {number} swallowed the interrupt"
        except AssertionError as error:
            failures.append(f"{error}: {error.__cause__!r}"[:120])
    assert not failures, "\n".join([f"{len(failures)} places", *failures[:10]])
