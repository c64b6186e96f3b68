"""Rule 9 and C31: whatever is raised, wherever it is raised, keeps its type, leaves nothing behind, and the next step is clean."""

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import _torch
from backhaul.testing import RecordingTier
from backhaul.tiers.base import TierFull
from tests.conftest import Code, everything, same
from tests.interrupts import FINALIZERS, interrupted_at, ours


class BrokenError(Exception):
    pass


class Raises(nn.Module):
    """Raises what it is given, at its turn in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: BaseException | None = None
        self.in_backward: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward is not None:
            raise self.in_forward
        y = x * 1.5
        if self.in_backward is not None:
            kind, text = type(self.in_backward), str(self.in_backward)

            def hook(gradient: Tensor) -> None:
                raise kind(text)  # a new one: what the graph holds must not hold, through its traceback, the graph

            y.register_hook(hook)
        return y


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), Raises(), nn.Linear(16, 16), nn.Tanh())


X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def step(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(model(X).square().sum(), list(model.parameters())))


EXPECTED = step(build())


def assert_clean(handle: bh.Handle, model: nn.Module, tier: RecordingTier) -> None:
    """Nothing of an aborted step is left, and the next one is right."""
    gc.collect()
    assert _torch.top_saved_tensors_hooks() is None
    assert handle.stats.resident_bytes == tier.used_bytes == 0
    here, engine = handle._engine.here, handle._engine
    assert (here.scope, here.paused) == (None, 0)
    assert (len(engine.registry.frames), len(engine.registry.records), len(engine.registry.table)) == (0, 0, 0)
    for _ in range(2):
        assert same(step(model), EXPECTED)
    assert _torch.top_saved_tensors_hooks() is None
    assert handle.stats.resident_bytes == tier.used_bytes == 0


def once(number: int, kind: type[BaseException], *arguments: object) -> Callable[[int], BaseException | None]:
    """Make one call fail. The tier keeps no exception: its traceback would hold the graph, which holds the tier's slots."""
    return lambda call: kind(*arguments) if call == number else None


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Spare the collector what is there already; all of torch is much to look through, hundreds of times."""
    gc.collect()
    gc.freeze()


ERRORS = pytest.mark.parametrize("kind", [BrokenError, KeyboardInterrupt, SystemExit, GeneratorExit, torch.OutOfMemoryError])
WHEN = pytest.mark.parametrize("num_steps_before", [0, 3], ids=["at first", "once learned"])


@WHEN
@ERRORS
def test_c31_an_exception_in_forward_keeps_its_type_and_leaves_nothing(kind, num_steps_before):
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(num_steps_before):
            step(model)
        error = kind("in forward")
        model[2].in_forward = error
        with pytest.raises(kind) as caught:
            step(model)
        assert caught.value is error
        model[2].in_forward = None
        del caught, error
        assert_clean(handle, model, tier)


@WHEN
@ERRORS
def test_c31_an_exception_in_backward_keeps_its_type_and_leaves_nothing(kind, num_steps_before):
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(num_steps_before):
            step(model)
        model[2].in_backward = kind("in backward")
        with pytest.raises(kind, match="in backward"):
            step(model)
        model[2].in_backward = None
        assert_clean(handle, model, tier)


@WHEN
@ERRORS
@pytest.mark.parametrize("point", ["store", "write", "load"])
def test_c31_an_exception_of_a_copy_keeps_its_type_and_leaves_nothing(point, kind, num_steps_before):
    armed: list[str] = []
    tier = RecordingTier(deferred=True, **{f"fail_{point}": lambda number: kind(armed.pop()) if armed else None})
    model = build()
    with everything(model, tier) as handle:
        for _ in range(num_steps_before):
            step(model)
        armed.append("in a copy")
        with pytest.raises(kind, match="in a copy"):
            step(model)
        assert_clean(handle, model, tier)


@pytest.mark.parametrize("point", ["store", "write", "load"])
def test_c31_every_copy_may_fail_once(point):
    def fails_at(number: int) -> None:
        calls: list[int] = []
        fails = once(number, BrokenError)
        model, tier = build(), RecordingTier(deferred=True, **{f"fail_{point}": lambda call: calls.append(call) or fails(call)})
        with everything(model, tier) as handle:
            while number not in calls:
                with contextlib.suppress(BrokenError):
                    assert same(step(model), EXPECTED)
            assert_clean(handle, model, tier)

    for number in range(12):
        fails_at(number)


def test_c31_an_oserror_while_reloading_is_not_hidden_since_the_bytes_are_lost():
    model, tier = build(), RecordingTier(deferred=True, fail_load=once(0, OSError, "medium gone"))
    with everything(model, tier) as handle:
        with pytest.raises(OSError, match="medium gone"):
            step(model)
        assert_clean(handle, model, tier)


def test_a_reload_that_failed_can_be_tried_again():
    model, tier = build(), RecordingTier(deferred=True, fail_load=once(0, OSError, "busy"))
    with everything(model, tier) as handle:
        loss = model(X).square().sum()
        with pytest.raises(OSError, match="busy"):
            loss.backward(retain_graph=True)
        assert same(torch.autograd.grad(loss, list(model.parameters())), EXPECTED)
        del loss
        assert_clean(handle, model, tier)


def test_an_exception_in_a_region_leaves_the_region():
    tier, model = RecordingTier(deferred=True), build()
    with everything(model, tier) as handle:

        def run() -> None:
            with handle.region():
                torch.ones(64, requires_grad=True).exp().sin()
                raise BrokenError

        with pytest.raises(BrokenError):
            run()
        assert_clean(handle, model, tier)


def test_an_exception_while_paused_ends_the_pause():
    tier, model = RecordingTier(deferred=True), build()
    with everything(model, tier) as handle:
        with pytest.raises(BrokenError), handle.region(), handle.paused():
            raise BrokenError
        assert_clean(handle, model, tier)


def test_an_exception_out_of_the_handle_s_context_removes_the_handle():
    model, tier = build(), RecordingTier(deferred=True)
    model[2].in_forward = BrokenError()
    with pytest.raises(BrokenError), everything(model, tier):
        step(model)
    model[2].in_forward = None
    assert "forward" not in model.__dict__
    assert same(step(model), EXPECTED)
    assert tier.used_bytes == 0


@pytest.mark.parametrize("kind", [RuntimeError, BrokenError])
def test_the_traceback_of_an_exception_in_forward_still_shows_where(kind):
    model = build()
    with everything(model):
        model[2].in_forward = kind("here")
        with pytest.raises(kind) as caught:
            model(X)
    assert any((entry.name == "forward" and entry.path == __file__) or "test_exceptions" in str(entry.path) for entry in caught.traceback)


# Interrupts at any point


def counts(frame: FrameType) -> bool:
    mine = ours(frame) or (frame.f_code.co_qualname.startswith("saved_tensors_hooks") and ours(frame.f_back))
    return mine and frame.f_code.co_name not in FINALIZERS


def num_places(run: Callable[[], object]) -> int:
    with interrupted_at(-1, counts) as count:
        run()
    return count[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names yet")
@pytest.mark.parametrize("part", ["forward", "backward"])
@WHEN
def test_c31_an_interrupt_at_any_point_of_ours_leaves_nothing(part, num_steps_before):
    def managed() -> tuple[nn.Module, RecordingTier, bh.Handle]:
        model, tier = build(), RecordingTier(deferred=True)
        handle = everything(model, tier)
        for _ in range(num_steps_before):
            step(model)
        handle.stats  # noqa: B018 - drains
        return model, tier, handle

    def interrupt(number: int) -> tuple[int, bool]:
        model, tier, handle = managed()
        hit = False
        if part == "forward":
            with interrupted_at(number, counts) as count:
                try:
                    model(X)
                except KeyboardInterrupt:
                    hit = True
        else:
            loss = model(X).square().sum()
            with interrupted_at(number, counts) as count:
                try:
                    loss.backward()
                except KeyboardInterrupt:
                    hit = True
            del loss
        if hit:
            try:
                assert_clean(handle, model, tier)
            except BaseException as error:
                while _torch.top_saved_tensors_hooks() is not None:
                    _torch.pop_saved_tensors_hooks()
                raise AssertionError(f"after an interrupt at place {number} of {part}") from error
        handle.remove()
        return count[0], hit

    total, _ = interrupt(-1)
    assert total > 40
    failures = []
    for number in range(1, total + 1, total // 60 + 1):  # about sixty places; by hand, with 1, all of them
        try:
            _, hit = interrupt(number)
            assert hit, f"place {number} swallowed the interrupt"
        except AssertionError as error:
            failures.append(f"{error}: {error.__cause__!r}"[:300])
    assert not failures, "\n".join([f"{len(failures)} places", *failures[:10]])


# A tier that is full or fails


@pytest.mark.parametrize("budget", [0, None, "1KiB"])
def test_a_full_tier_keeps_the_rest_on_the_device_counts_it_and_warns_once(budget):
    model, tier = build(), RecordingTier(deferred=True, capacity=1100)
    with everything(model, tier, activation_budget=budget) as handle:
        with pytest.warns(UserWarning, match="recording tier is full") as caught:
            got = [step(model) for _ in range(3)]
        assert all(same(gradients, EXPECTED) for gradients in got)
        assert len(caught) == 1
        text = str(caught[0].message)
        assert "stay on the device" in text
        gc.collect()  # the tier's own frame is in the traceback of what it raised
        stats = handle.stats
        assert stats.kept_by_reason["tier full"] > 0
        assert stats.offloaded_bytes > 0
        assert tier.peak_bytes <= 1100
        assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes
        assert stats.resident_bytes == tier.used_bytes == 0


def test_a_tier_with_no_room_at_all_leaves_everything_on_the_device():
    model, tier = build(), RecordingTier(capacity=0)
    with everything(model, tier) as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            assert same(step(model), EXPECTED)
            gc.collect()  # the tier's own frame is in the traceback of what it raised
        stats = handle.stats
        assert stats.offloaded_bytes == stats.reloaded_bytes == stats.num_offloads == 0
        assert stats.kept_bytes == stats.saved_bytes == stats.kept_by_reason["tier full"]
        assert stats.resident_bytes == 0
        assert stats.peak_resident_bytes > 0
    texts = [str(warning.message) for warning in caught]
    assert sum("tier is full" in text for text in texts) == 1
    assert sum("offloaded 0 of" in text for text in texts) == 1


@pytest.mark.parametrize("point", ["store", "write"])
def test_a_tier_that_fails_to_take_bytes_leaves_them_on_the_device(point):
    model, tier = build(), RecordingTier(deferred=True, **{f"fail_{point}": lambda number: OSError(28, "No space left on device")})
    with everything(model, tier) as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            assert same(step(model), EXPECTED)
            gc.collect()  # the tier's own frame is in the traceback of what it raised
        stats = handle.stats
        assert stats.offloaded_bytes == stats.num_offloads == 0
        assert stats.kept_by_reason["tier failed"] == stats.saved_bytes
        assert stats.resident_bytes == tier.used_bytes == 0
    texts = [str(warning.message) for warning in caught]
    assert sum("tier failed" in text and "No space left" in text for text in texts) == 1


@pytest.mark.parametrize("point", ["store", "write"])
def test_a_tier_that_fails_now_and_then_is_used_where_it_works(point):
    def fault(number: int) -> BaseException | None:
        return OSError("now and then") if number % 3 == 1 else None

    model, tier = build(), RecordingTier(deferred=True, **{f"fail_{point}": fault})
    with everything(model, tier) as handle:
        with pytest.warns(UserWarning, match="now and then") as caught:
            got = [step(model) for _ in range(6)]
        assert all(same(gradients, EXPECTED) for gradients in got)
        assert len(caught) == 1
        gc.collect()  # the tier's own frame is in the traceback of what it raised
        stats = handle.stats
        assert stats.kept_by_reason["tier failed"] > 0
        assert stats.offloaded_bytes > 0
        assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes
        assert stats.resident_bytes == tier.used_bytes == 0


def test_a_warning_that_is_an_error_comes_through_and_leaves_nothing():
    model, tier = build(), RecordingTier(deferred=True, fail_store=once(0, TierFull, "no room"))
    with everything(model, tier) as handle:
        with pytest.raises(UserWarning, match="no room"):  # pytest's own filter makes it one
            step(model)
        assert_clean(handle, model, tier)


def test_out_of_memory_for_a_reload_is_passed_on_and_the_next_try_is_clean(monkeypatch):
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            raise torch.OutOfMemoryError("the device is full")

        loss = model(X).square().sum()
        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        monkeypatch.setattr(torch, "empty", real)
        del loss
        assert_clean(handle, model, tier)


def test_a_forward_that_catches_its_own_exception_goes_on():
    def run(x: Tensor) -> Tensor:
        try:
            x.exp().sin()
            raise BrokenError
        except BrokenError:
            return x.cos().sin()

    module, x, tier = Code(run), torch.randn(64, requires_grad=True), RecordingTier(deferred=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module, tier) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert handle.stats.resident_bytes == tier.used_bytes == 0
