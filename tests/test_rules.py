"""The tests of the nine rules of docs/rules.md can fail: each rule is taken out of the code, and a check of it no longer holds.

The checks are small ones of the kind that the file of each concern has many of. On a device the edges of rules 5 and 8 are taken out
again, in tests/gpu.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backhaul import _torch, engine, scopes
from backhaul.engine import Engine
from backhaul.flow import Flow
from backhaul.moving import Mover
from backhaul.registry import Registry
from backhaul.saved import Blob, Saved, View
from backhaul.scopes import Storages
from backhaul.testing import RecordingTier
from backhaul.tiers import lanes
from backhaul.tiers.base import TierFull
from backhaul.timing import Waits
from tests.conftest import Code, everything, same
from tests.simulated_device import SimulatedDevice, SimulatedStream

Patch = pytest.MonkeyPatch


def assert_holds_only_with_the_rule(monkeypatch: Patch, check: Callable[[], None], remove_rule: Callable[[Patch], None]) -> None:
    check()
    with monkeypatch.context() as patches:
        remove_rule(patches)
        with pytest.raises(AssertionError):
            check()
    gc.collect()
    check()


def mlp(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())])


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


# 1. Autograd owns the memory


def check_a_dropped_graph_is_gone() -> None:
    model, tier = mlp(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        model(X)
        assert handle.stats.resident_bytes == tier.used_bytes == 0


def hold_promises(patches: Patch) -> None:
    held: list[object] = []
    pack = Engine.pack

    def hoarding(self: Engine, tensor: Tensor) -> object:
        held.append(pack(self, tensor))
        return held[-1]

    patches.setattr(Engine, "pack", hoarding)


def test_rule_1_autograd_owns_the_memory(monkeypatch):
    assert_holds_only_with_the_rule(monkeypatch, check_a_dropped_graph_is_gone, hold_promises)


# 2. Identity is the storage


def check_a_storage_is_copied_once() -> None:
    module, tier = Code(lambda x: ((y := x * 2).exp() * y.sin() * y.cos()).sum()), RecordingTier(deferred=True)
    with everything(module, tier):
        module(X.clone().requires_grad_())
        # y, exp, sin, exp * sin, cos
        assert tier.bytes_of("store") <= 5 * X.nbytes


def check_tensors_of_the_same_size_are_told_apart() -> None:
    module, x = Code(lambda x: x.exp().sin().exp().cos()), X.clone().requires_grad_()
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module):
        try:
            got = torch.autograd.grad(module(x).sum(), x)
        except RuntimeError as error:
            raise AssertionError from error
    assert same(got, expected)


def know_no_storage_again(patches: Patch) -> None:
    patches.setattr(Registry, "find", lambda self, storage: None)


def know_storages_by_size(patches: Patch) -> None:
    blobs: dict[int, Any] = {}
    pack = Engine.pack

    def noting(self: Engine, tensor: Tensor) -> object:
        promise = pack(self, tensor)
        if isinstance(promise, Saved):
            blobs[tensor.untyped_storage().nbytes()] = weakref.ref(promise.blob)
        return promise

    patches.setattr(Engine, "pack", noting)
    patches.setattr(Registry, "find", lambda self, storage: blobs.get(storage.nbytes(), lambda: None)())
    patches.setattr(Blob, "takes", lambda self, view: True)


def test_rule_2_a_storage_is_copied_once(monkeypatch):
    assert_holds_only_with_the_rule(monkeypatch, check_a_storage_is_copied_once, know_no_storage_again)


def test_rule_2_size_and_dtype_are_no_identity(monkeypatch):
    assert_holds_only_with_the_rule(monkeypatch, check_tensors_of_the_same_size_are_told_apart, know_storages_by_size)


# 3. Only what frees memory is copied


def check_no_parameter_moves() -> None:
    model, tier = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False)), RecordingTier()
    with everything(model, tier):
        model(X.clone().requires_grad_()).sum().backward()
    assert all(record.num_bytes != 16 * 64 * 4 for record in tier.records)


def check_a_futile_copy_is_not_repeated() -> None:
    module, tier, x = Code(lambda x: x.sin().exp()), RecordingTier(deferred=True), X.clone().requires_grad_()
    kept = x * 1
    with everything(module, tier) as handle:
        for _ in range(5):
            module(kept).sum().backward(retain_graph=True)
        assert 0 < handle.stats.futile_bytes <= 2 * x.nbytes


def know_no_parameter(patches: Patch) -> None:
    patches.setattr(Storages, "__contains__", lambda self, storage: False)
    patches.setattr(_torch, "view_base", lambda tensor: None)


def test_rule_3_no_parameter_or_alias_of_one_moves(monkeypatch):
    assert_holds_only_with_the_rule(monkeypatch, check_no_parameter_moves, know_no_parameter)


def test_rule_3_a_futile_copy_is_not_repeated(monkeypatch):
    def repeat(patches: Patch) -> None:
        patches.setattr(engine, "MOST_FUTILE", 1 << 30)

    assert_holds_only_with_the_rule(monkeypatch, check_a_futile_copy_is_not_repeated, repeat)


# 4. Nothing is silently stale


def check_a_write_after_saving_is_told() -> None:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.zero_()
        return z

    module, told = Code(run), False
    with everything(module, activation_budget=None):
        z = module(X.clone().requires_grad_())
        try:
            z.sum().backward()
        except RuntimeError as error:
            told = "modified by an inplace operation" in str(error)
    assert told


def test_rule_4_nothing_is_silently_stale(monkeypatch):
    def compare_no_versions(patches: Patch) -> None:
        patches.setattr(View, "changed", property(lambda self: False))

    assert_holds_only_with_the_rule(monkeypatch, check_a_write_after_saving_is_told, compare_no_versions)


# 5. Every copy has an event edge at both ends


def check_gradients_are_right_however_late_copies_are() -> None:
    model, tier = mlp(), RecordingTier(deferred=True)
    expected = gradients(model, X)
    with everything(model, tier):
        assert all(same(gradients(model, X), expected) for _ in range(3))
    assert tier.bytes_of("load") > 0


def test_rule_5_what_follows_a_copy_waits_for_it(monkeypatch):
    def wait_for_nothing(patches: Patch) -> None:
        patches.setattr(Waits, "measure", lambda self, copy, wait: None)

    assert_holds_only_with_the_rule(monkeypatch, check_gradients_are_right_however_late_copies_are, wait_for_nothing)


# 6. Order is learned, never assumed


def check_the_second_step_knows_the_first() -> None:
    model, tier = mlp(6), RecordingTier(deferred=True)
    with everything(model, tier, activation_budget=None) as handle:
        found = []
        for _ in range(2):
            before = handle.stats.num_offloads
            gradients(model, X)
            found.append(handle.stats.num_offloads - before)
        assert found[1] < found[0]  # the tail of forward stays


def check_a_changed_order_still_gives_the_right_values() -> None:
    model, inputs = mlp(), [X, X + 1, X - 1]
    expected = [gradients(model, x) for x in inputs]
    with everything(model) as handle:
        for order in ((0, 1, 2), (0, 1, 2), (2, 0, 1), (1, 2, 0)):
            losses = [model(x).square().sum() for x in inputs]
            for index in order:
                assert same(torch.autograd.grad(losses[index], list(model.parameters())), expected[index])
        assert handle.stats.offloaded_bytes > 0


def test_rule_6_order_is_learned(monkeypatch):
    def learn_nothing(patches: Patch) -> None:
        learn = Flow._learn

        def forgetful(self: Flow) -> None:
            learn(self)
            self._known.clear()

        patches.setattr(Flow, "_learn", forgetful)

    assert_holds_only_with_the_rule(monkeypatch, check_the_second_step_knows_the_first, learn_nothing)


def test_rule_6_order_is_never_assumed(monkeypatch):
    def hand_out_in_the_old_order(patches: Patch) -> None:
        order: list[Saved] = []
        pack = Engine.pack

        def noting(self: Engine, tensor: Tensor) -> object:
            promise = pack(self, tensor)
            if isinstance(promise, Saved):
                order.append(promise)
            return promise

        def assuming(self: Engine, promise: Any) -> Tensor:
            if isinstance(promise, Saved) and order:
                promise = order.pop()  # the last saved is the first needed, as with one frame at a time
            return promise.restore(self._bring)

        patches.setattr(Engine, "pack", noting)
        patches.setattr(Engine, "unpack", assuming)

    assert_holds_only_with_the_rule(monkeypatch, check_a_changed_order_still_gives_the_right_values, hand_out_in_the_old_order)


# 7. Flow is bounded by bytes


def check_the_budget_holds() -> None:
    model, budget = mlp(8), 2048
    with everything(model, activation_budget=budget) as handle:
        for _ in range(4):
            gradients(model, X)
        assert handle.stats.peak_resident_bytes <= budget + 2 * X.nbytes


def check_a_second_release_needs_no_copy() -> None:
    model, tier = mlp(), RecordingTier(deferred=True)
    with everything(model, tier):
        loss = model(X).square().sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        assert tier.bytes_of("load") > tier.bytes_of("store")
        assert all(record.event != "free" for record in tier.records)


def check_a_full_tier_never_exceeds_its_capacity() -> None:
    model, tier = mlp(), RecordingTier(deferred=True, capacity=1100)
    expected, survived = gradients(model, X), False
    with everything(model, tier), pytest.warns(UserWarning, match="is full"), contextlib.suppress(TierFull):
        survived = same(gradients(model, X), expected)
    assert survived
    assert tier.peak_bytes <= 1100


def test_rule_7_the_budget_holds(monkeypatch):
    def enforce_nothing(patches: Patch) -> None:
        patches.setattr(Flow, "_enforce", lambda self, needed, **options: None)

    assert_holds_only_with_the_rule(monkeypatch, check_the_budget_holds, enforce_nothing)


def test_rule_7_a_reloaded_blob_keeps_its_copy(monkeypatch):
    def give_the_copy_up(patches: Patch) -> None:
        reload = Mover._reload

        def forgetful(self: Mover, station: Any, blob: Any) -> None:
            reload(self, station, blob)
            if blob.incoming is not None:
                blob.incoming.wait()
                blob.tier.free(blob.slot)
                blob.slot, blob.stored = None, False

        patches.setattr(Mover, "_reload", forgetful)

    assert_holds_only_with_the_rule(monkeypatch, check_a_second_release_needs_no_copy, give_the_copy_up)


def test_rule_7_a_full_tier_keeps_the_tensor_on_the_device(monkeypatch):
    def pass_the_error_on(patches: Patch) -> None:
        failed = Mover._tier_failed

        def raising(self: Mover, station: Any, blob: Any, error: Exception) -> None:
            failed(self, station, blob, error)
            raise error

        patches.setattr(Mover, "_tier_failed", raising)

    assert_holds_only_with_the_rule(monkeypatch, check_a_full_tier_never_exceeds_its_capacity, pass_the_error_on)


# 8. The user's own small copies are never blocked


def check_the_copy_engine_looks_up_after_every_chunk() -> None:
    with pytest.MonkeyPatch.context() as patches:
        device = SimulatedDevice(patches)
        queued: list[SimulatedStream] = []
        copy = device.copy

        def watched(stream: SimulatedStream, target: Tensor, source: Tensor, start: int, stop: int) -> None:
            queued.append(stream)
            copy(stream, target, source, start, stop)

        patches.setattr(device, "copy", watched)
        for _ in range(3):
            device.lanes.d2h.copy(torch.empty(1000, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8))
        device.run()
    assert len(queued) > 30
    assert all(before is not after for before, after in pairwise(queued))


def test_rule_8_the_user_s_own_small_copies_are_never_blocked(monkeypatch):
    def queue_all_on_one_stream(patches: Patch) -> None:
        patches.setattr(lanes.Lane, "_next_stream", lambda self: self._streams[0])

    assert_holds_only_with_the_rule(monkeypatch, check_the_copy_engine_looks_up_after_every_chunk, queue_all_on_one_stream)


# 9. Off means off, and never in someone's way


def check_eval_runs_untouched() -> None:
    model = mlp().eval()
    with everything(model) as handle:
        model(X).sum().backward()
        assert handle.stats.saved_bytes == 0


def check_an_interrupt_leaves_no_pair_behind() -> None:
    def run(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    module = Code(run)
    try:
        with everything(module):
            with pytest.raises(KeyboardInterrupt):
                module(X)
            assert _torch.top_saved_tensors_hooks() is None
    finally:
        while _torch.top_saved_tensors_hooks() is not None:
            _torch.pop_saved_tensors_hooks()


def check_a_checkpoint_goes_on_recomputing() -> None:
    runs: list[int] = []
    inner = Code(lambda x: (runs.append(1), x.sin().exp())[1])
    with everything(inner):
        checkpoint(inner, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert len(runs) == 2


def test_rule_9_eval_runs_untouched(monkeypatch):
    def look_at_no_mode(patches: Patch) -> None:
        enter = Engine.enter

        def always(self: Engine, module: nn.Module, fqn: str, *, is_root: bool, **more: Any) -> Any:
            module.training = True
            return enter(self, module, fqn, is_root=is_root)

        patches.setattr(Engine, "enter", always)

    assert_holds_only_with_the_rule(monkeypatch, check_eval_runs_untouched, look_at_no_mode)


def test_rule_9_an_interrupt_leaves_no_pair_behind(monkeypatch):
    def leave_hooks_only_on_success(patches: Patch) -> None:
        def run(watcher: Any, scope: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            watcher.here.scope = scope
            _torch.push_saved_tensors_hooks(watcher.pack, watcher.unpack)
            result = forward(*args, **kwargs)
            _torch.pop_saved_tensors_hooks()
            watcher.here.scope = None
            return result

        patches.setattr(scopes, "run", run)

    assert_holds_only_with_the_rule(monkeypatch, check_an_interrupt_leaves_no_pair_behind, leave_hooks_only_on_success)


def test_rule_9_a_checkpoint_goes_on_recomputing(monkeypatch):
    def never_look_for_a_checkpoint(patches: Patch) -> None:
        patches.setattr(_torch, "inside_checkpoint", lambda: False)

    assert_holds_only_with_the_rule(monkeypatch, check_a_checkpoint_goes_on_recomputing, never_look_for_a_checkpoint)
