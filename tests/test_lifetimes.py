"""Rule 1: autograd owns the memory. Whatever it drops is gone at once, and whatever it reads again is still there."""

import gc
import os
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.conftest import Code, everything, same
from tests.models import gradients, leaf, mlp

KIB = 1 << 10


@pytest.fixture
def _no_gc() -> Iterator[None]:
    """Reference counting alone must do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def resident_bytes(handle: bh.Handle) -> int:
    return handle.stats.resident_bytes


class Mark:
    """Something that dies with the graph."""


def mark(y: Tensor) -> weakref.ref[Mark]:
    sign = Mark()
    assert y.grad_fn is not None
    y.grad_fn.metadata["mark"] = sign
    return weakref.ref(sign)


class ReadsSavedTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        again_x, again_y = ctx.saved_tensors
        assert x.equal(again_x)
        assert y.equal(again_y)
        return gradient * again_y


class SpoilsWhatItReads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        result = gradient * y
        y.zero_()
        return result


# Dropped graphs


@pytest.mark.parametrize("options", [{}, {"activation_budget": None}, {"min_bytes": 1 << 40}], ids=["moved", "no budget", "kept"])
@pytest.mark.parametrize("operation", ["exp", "sigmoid", "tanh", "softmax", "relu", "linear"])
@pytest.mark.usefixtures("_no_gc")
def test_c34_a_graph_that_is_dropped_without_backward_dies_by_reference_counting(operation, options):
    functions = {"softmax": lambda x: x.softmax(-1), "linear": nn.Linear(16, 16)}
    module = Code(functions.get(operation) or getattr(torch, operation))
    tier = RecordingTier(deferred=True)
    with everything(module, tier, **options) as handle:
        y = module(leaf(64, 16) * 1)
        gone = mark(y)
        del y
        assert gone() is None
        assert resident_bytes(handle) == tier.used_bytes == 0


@pytest.mark.usefixtures("_no_gc")
def test_c34_a_graph_of_many_layers_dies_at_once_too():
    tier = RecordingTier(deferred=True)
    model = mlp()
    with everything(model, tier) as handle:
        gone = []
        for _ in range(4):
            y = model(leaf(8, 16))
            gone.append(mark(y))
            assert tier.used_bytes > 0
        del y
        assert [reference() for reference in gone] == [None] * 4
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_c34_two_hundred_forwards_without_backward_leave_memory_flat():
    model = mlp(64, 1)
    tier = RecordingTier()
    with everything(model, tier):
        process = psutil.Process(os.getpid())
        for step in range(200):
            model(leaf(256, 64))
            if step == 20:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 5 << 20
    assert tier.used_bytes == 0


def test_a_graph_in_a_cycle_of_the_users_goes_with_the_cycle():
    tier = RecordingTier(deferred=True)
    model = mlp()
    with everything(model, tier) as handle:
        for _ in range(3):
            trainer = Mark()
            trainer.me, trainer.loss = trainer, model(leaf(8, 16)).sum()
            trainer.loss.backward(retain_graph=True)
            trainer.node, trainer.promise = trainer.loss.grad_fn, trainer.loss.grad_fn.next_functions[0][0]._raw_saved_result
        del trainer
        gc.collect()
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_a_cycle_that_holds_promises_themselves_goes_too():
    # The collector calls the finalizers of all that is in a cycle before it takes anything apart: a frame's may come before its blobs'.
    tier = RecordingTier(deferred=True)
    model = Code(lambda x: x.exp().sin())
    x = leaf(64)
    with everything(model, tier) as handle:
        for _ in range(3):
            y = model(x)
            y.backward(torch.ones(64), retain_graph=True)
            promise = y.grad_fn._raw_saved_self.data
            circle = [promise, promise.blob, promise.blob.frame]
            circle.append(circle)
            del y, promise, circle
            gc.collect()
        expected = torch.autograd.grad(x.exp().sin().sum(), x)
        assert same(torch.autograd.grad(model(x).sum(), x), expected)
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_an_unused_branch_is_freed_with_the_rest():
    used, unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def run(x):
        unused(x.sin()).exp()
        return used(x.cos()).tanh()

    tier, x = RecordingTier(deferred=True), leaf(8, 16)
    module = Code(run, used, unused)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module, tier) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
            assert resident_bytes(handle) == tier.used_bytes == 0


def test_an_output_that_never_gets_a_backward_keeps_its_bytes_and_no_more():
    tier, x = RecordingTier(deferred=True), leaf(1024)
    module = Code(lambda x: (x.exp().sin(), x.cos().sin()))  # type: ignore[arg-type]
    with everything(module, tier) as handle:
        first, second = module(x)
        both = tier.used_bytes
        first.sum().backward()
        del first
        assert handle.stats.resident_bytes == 0
        assert 0 < tier.used_bytes < both
        expected = torch.autograd.grad(x.cos().sin().sum(), x)
        assert same(torch.autograd.grad(second.sum(), x), expected)


# Read again


@pytest.mark.parametrize("options", [{}, {"activation_budget": None}, {"min_bytes": 1 << 40}], ids=["moved", "no budget", "kept"])
def test_c32_a_retained_graph_can_run_any_number_of_times(options):
    model, x = mlp(), leaf(8, 16)
    expected = gradients(model, x)
    tier = RecordingTier(deferred=True)
    with everything(model, tier, **options) as handle:
        loss = model(x).square().sum()
        inputs = [*model.parameters(), x]
        for _ in range(3):
            assert same(torch.autograd.grad(loss, inputs, retain_graph=True), expected)
        assert same(torch.autograd.grad(loss, inputs), expected)
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_c32_a_released_blob_is_copied_out_once_however_often_it_comes_back():
    model, x = mlp(), leaf(8, 16)
    tier = RecordingTier(deferred=True)
    with everything(model, tier):
        loss = model(x).square().sum()
        num_stores = sum(record.event == "store" for record in tier.records)
        for _ in range(3):
            loss.backward(retain_graph=True)
        assert sum(record.event == "store" for record in tier.records) == num_stores
        assert sum(record.event == "load" for record in tier.records) > num_stores


@pytest.mark.parametrize("where", ["inside", "outside", "none"])
def test_c32_double_backward_gives_the_same(where):
    def penalty(module: nn.Module, x: Tensor) -> list[Tensor]:
        y = module(x).pow(3).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()], allow_unused=True))

    model, x = nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16), nn.Sigmoid()), leaf(8, 16)
    expected = penalty(model, x)
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(3):
            if where == "inside":
                with handle.region():
                    got = penalty(model, x)
            elif where == "outside":
                got = penalty(model, x)
            else:
                module = Code(lambda x: torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)[0])
                with everything(nn.ModuleList([module]), tier):
                    got = list(torch.autograd.grad(module(x).square().sum(), [x, *model.parameters()], allow_unused=True))
            assert same(got, expected)
            assert tier.bytes_of("load") > 0
            del got
            assert resident_bytes(handle) == 0
        assert tier.used_bytes == 0


def test_c32_a_function_may_read_its_saved_tensors_twice():
    x = leaf(512)
    expected = torch.autograd.grad(x.exp().sum(), x)
    module = Code(ReadsSavedTwice.apply)
    for options in ({}, {"min_bytes": 1 << 40}):
        tier = RecordingTier(deferred=True)
        with everything(module, tier, **options):
            assert same(torch.autograd.grad(module(x * 1).sum(), x), expected)
            y = module(x)
            assert y.grad_fn.saved_tensors[1].equal(x.exp())
            assert y.grad_fn.saved_tensors[1].equal(x.exp())
            del y
            gc.collect()
        assert tier.used_bytes == 0


def test_c32_a_backward_that_writes_into_what_it_read_is_told_as_plain_autograd_tells_it_or_gets_the_packed_value():
    def twice(function):
        x = leaf(64)
        y = function(x)
        first = torch.autograd.grad(y, x, retain_graph=True)
        return first, torch.autograd.grad(y, x)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(SpoilsWhatItReads.apply)
    module = Code(SpoilsWhatItReads.apply)
    with everything(module, min_bytes=1 << 40), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(module)
    with everything(module):
        first, second = twice(module)
    assert same(first, second)


def test_several_losses_of_one_forward_share_what_was_saved():
    model, x = mlp(), leaf(8, 16)

    def losses():
        y = model(x)
        first, second = y.square().mean(), y.exp().mean()
        first.backward(retain_graph=True)
        second.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    expected = losses()
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(3):
            assert same(losses(), expected)
            assert resident_bytes(handle) == tier.used_bytes == 0


def test_part_of_a_graph_can_be_differentiated_before_the_rest():
    model, x = mlp(), leaf(8, 16)
    last = list(model[-2].parameters())
    expected = [*torch.autograd.grad(model(x).sum(), last), *torch.autograd.grad(model(x).sum(), x)]
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        loss = model(x).sum()
        late = torch.autograd.grad(loss, last, retain_graph=True)
        early = torch.autograd.grad(loss, x)
        assert same([*late, *early], expected)
        del loss
        assert resident_bytes(handle) == tier.used_bytes == 0


# Frames alive at once, and step after step


def test_frames_alive_at_once_keep_their_values_apart():
    model = mlp()
    inputs = [leaf(8, 16) for _ in range(6)]
    expected = [gradients(model, x) for x in inputs]
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        losses = [model(x).square().sum() for x in inputs]
        for index in (3, 0, 5, 1, 2, 4):
            assert same(torch.autograd.grad(losses[index], [*model.parameters(), inputs[index]]), expected[index])
        losses.clear()
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_c09_with_backward_inside_and_outside_the_context_everything_is_back_at_its_baseline():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tier = RecordingTier(deferred=True)
    handle = everything(model, tier)
    for step in range(20):
        with handle.region():
            loss = model(leaf(8, 16)).sum()
            if step % 2:
                loss.backward()
        if not step % 2:
            loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert resident_bytes(handle) == tier.used_bytes == 0
    engine = handle._engine
    assert not engine.registry.frames
    assert not engine.registry.records
    assert not engine.registry.table
    stores = {record.slot for record in tier.records if record.event == "store"}
    assert stores == {record.slot for record in tier.records if record.event == "free"}


def test_c09_two_hundred_steps_leave_memory_and_tables_flat():
    model = mlp(64, 1)
    tier = RecordingTier()
    with everything(model, tier) as handle:
        process = psutil.Process(os.getpid())
        for step in range(200):
            model(leaf(256, 64)).sum().backward()
            model.zero_grad()
            if step == 20:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 5 << 20
        assert resident_bytes(handle) == tier.used_bytes == 0
        assert len(handle._engine.registry.records) == len(handle._engine.registry.frames) == len(handle._engine.registry.table) == 0


def test_c09_backward_after_the_handle_has_been_removed_still_works():
    model, x = mlp(), leaf(8, 16)
    expected = gradients(model, x)
    tier = RecordingTier(deferred=True)
    with everything(model, tier):
        loss = model(x).square().sum()
    assert tier.used_bytes > 0
    assert same(torch.autograd.grad(loss, [*model.parameters(), x]), expected)


@pytest.mark.usefixtures("_no_gc")
def test_bytes_of_graphs_that_outlive_a_removed_handle_go_back_to_the_tier():
    model, x = mlp(), leaf(8, 16)
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        first, second = model(x).square().sum(), model(x).sum()
    first.backward()
    del first
    second.backward()
    del second
    assert handle.stats.resident_bytes == 0
    assert tier.used_bytes == 0


@pytest.mark.usefixtures("_no_gc")
def test_bytes_go_back_to_the_tier_even_when_nobody_asks_a_removed_handle():
    model, x = mlp(), leaf(8, 16)
    tier = RecordingTier(deferred=True)
    with everything(model, tier):
        loss = model(x).square().sum()
    loss.backward()
    del loss, model
    assert tier.used_bytes == 0


@pytest.mark.usefixtures("_no_gc")
def test_a_model_dies_when_its_last_user_lets_go_although_it_is_managed():
    model = mlp()
    gone = [weakref.ref(module) for module in model.modules()]
    handle = everything(model)
    model(leaf(8, 16)).sum().backward()
    del model
    assert [reference() for reference in gone] == [None] * len(gone)
    assert resident_bytes(handle) == 0
    handle.remove()


def test_a_handle_that_nobody_keeps_goes_on_and_dies_with_its_model():
    model = mlp()
    tier = RecordingTier(deferred=True)
    engine = weakref.ref(everything(model, tier)._engine)
    for _ in range(2):
        model(leaf(8, 16)).sum().backward()
    assert tier.bytes_of("load") > 0
    assert engine() is not None
    del model
    gc.collect()
    assert engine() is None
    assert tier.used_bytes == 0


# Identity


def test_c29_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one():
    tier, x = RecordingTier(deferred=True), leaf(4096, 4)

    def run(x):
        total = 0.0
        for index in range(20):
            y = (x * float(index + 1)).exp()  # frees and reuses the address
            total = total + y.sum().detach()
            del y
        return total

    module = Code(run)
    with everything(module, tier) as handle:
        module(x)
        stats = handle.stats
        assert stats.num_offloads == 20
        assert stats.saved_bytes == 20 * x.nbytes
    assert tier.used_bytes == 0


def test_c29_gradients_are_right_although_addresses_and_ids_come_again():
    def run(x):
        total = x.sum() * 0
        for index in range(20):
            total = total + (x * float(index + 1) / 20).exp().sin().sum()
        return total

    module, x = Code(run), leaf(1024)
    expected = torch.autograd.grad(run(x), x)
    for options in ({}, {"activation_budget": None}):
        with everything(module, **options):
            for _ in range(3):
                assert same(torch.autograd.grad(module(x), x), expected)
