"""Every thread may train, under one handle or several, and run backward elsewhere; a tier may be shared."""

import threading

import pytest
import torch
from torch import Tensor, nn

from backhaul.testing import RecordingTier
from tests.conftest import everything, in_threads, same

STEPS = 15


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for x in xs:
        found += torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    return found


@pytest.mark.parametrize("budget", [0, None, "1KiB"])
def test_threads_that_train_different_models_under_one_handle_do_not_meet(budget):
    models = [build(seed) for seed in range(3)]
    expected = [train(model, inputs(seed)) for seed, model in enumerate(models)]
    got: list[list[Tensor]] = [[], [], []]
    tier = RecordingTier(deferred=True)

    def work(seed: int) -> None:
        got[seed] = train(models[seed], inputs(seed))

    with everything(models, tier, activation_budget=budget) as handle:
        in_threads(*[lambda seed=seed: work(seed) for seed in range(3)])
        assert all(same(found, wanted) for found, wanted in zip(got, expected, strict=True))
        assert tier.bytes_of("store") > 0
        assert handle.stats.resident_bytes == tier.used_bytes == 0
        assert not handle._engine.registry.frames


@pytest.mark.parametrize("shared", [True, False], ids=["one tier", "a tier each"])
def test_threads_with_a_handle_each_do_not_meet(shared):
    models = [build(seed) for seed in range(3)]
    expected = [train(model, inputs(seed)) for seed, model in enumerate(models)]
    tiers = [RecordingTier(deferred=True)] * 3 if shared else [RecordingTier(deferred=True) for _ in range(3)]
    handles = [everything(model, tier) for model, tier in zip(models, tiers, strict=True)]
    got: list[list[Tensor]] = [[], [], []]

    def work(seed: int) -> None:
        got[seed] = train(models[seed], inputs(seed))

    in_threads(*[lambda seed=seed: work(seed) for seed in range(3)])
    assert all(same(found, wanted) for found, wanted in zip(got, expected, strict=True))
    for handle, tier in zip(handles, tiers, strict=True):
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.resident_bytes == tier.used_bytes == 0
        handle.remove()


def test_threads_that_run_one_model_at_once_get_their_own_frames():
    model = build(0)
    expected = [train(model, inputs(seed)) for seed in range(3)]
    got: list[list[Tensor]] = [[], [], []]
    tier = RecordingTier(deferred=True)

    def work(seed: int) -> None:
        got[seed] = train(model, inputs(seed))

    with everything(model, tier) as handle:
        in_threads(*[lambda seed=seed: work(seed) for seed in range(3)])
        assert all(same(found, wanted) for found, wanted in zip(got, expected, strict=True))
        assert handle.stats.resident_bytes == tier.used_bytes == 0


@pytest.mark.parametrize("budget", [0, None])
def test_forward_in_one_thread_and_backward_in_another(budget):
    model, xs = build(0), inputs(0)
    expected = train(model, xs)
    tier = RecordingTier(deferred=True)
    got: list[Tensor] = []

    def backward(loss: Tensor) -> None:
        got.extend(torch.autograd.grad(loss, list(model.parameters())))

    with everything(model, tier, activation_budget=budget) as handle:
        for x in xs:
            loss = model(x).square().sum()
            in_threads(lambda loss=loss: backward(loss))
            del loss
        assert same(got, expected)
        assert tier.bytes_of("store") > 0
        assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_a_producer_of_forwards_and_a_consumer_of_backwards_run_at_once():
    model, xs = build(0), inputs(0)
    expected = train(model, xs)
    tier = RecordingTier(deferred=True)
    losses: list[Tensor] = []
    ready, got = threading.Semaphore(0), []

    def produce() -> None:
        for x in xs:
            losses.append(model(x).square().sum())
            ready.release()

    def consume() -> None:
        for _ in xs:
            assert ready.acquire(timeout=30)
            got.extend(torch.autograd.grad(losses.pop(0), list(model.parameters())))

    with everything(model, tier) as handle:
        in_threads(produce, consume)
        assert same(got, expected)
        assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_a_pause_is_of_one_thread_only():
    model, x = build(0), inputs(0)[0]
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:

        def work() -> None:
            model(x).sum().backward()

        with handle.paused():
            model(x).sum().backward()
            assert tier.bytes_of("store") == 0
            in_threads(work)
        assert tier.bytes_of("store") > 0


def test_a_region_is_of_one_thread_only():
    tier = RecordingTier(deferred=True)
    model = build(0)
    with everything(model, tier) as handle, handle.region():

        def work() -> None:
            torch.ones(64, requires_grad=True).exp().sin()

        in_threads(work)
        assert handle.stats.saved_bytes == 0


def test_stats_and_removal_may_come_from_another_thread_while_training_goes_on():
    model, xs = build(0), inputs(0)
    expected = train(model, xs)
    tier = RecordingTier(deferred=True)
    handle = everything(model, tier)
    got: list[Tensor] = []

    def work() -> None:
        got.extend(train(model, xs))

    def watch() -> None:
        for _ in range(200):
            stats = handle.stats
            assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes
            str(handle.report())
        handle.remove()

    in_threads(work, watch)
    assert same(got, expected)
    assert handle.stats.resident_bytes == tier.used_bytes == 0
