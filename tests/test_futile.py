"""Rule 3: a copy whose original is still alive when it is needed has freed nothing. It is noticed, counted, and not made again."""

import pytest
import torch
from torch import Tensor, nn

from backhaul.testing import RecordingTier
from tests.conftest import Code, everything, same


class Cache(nn.Module):
    """Keeps its activation past the forward, as a model that returns its hidden states does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        self.kept.append(h)
        return (h * h).sin()  # saves h, which stays, and h * h, which does not


@pytest.fixture
def x() -> Tensor:
    return torch.randn(256, requires_grad=True)


def step(module: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    if isinstance(module, Cache):
        module.kept.clear()
    return gradient


def test_the_original_is_handed_back_and_nothing_is_read(x):
    tier = RecordingTier(deferred=True)
    module = Cache()
    expected = step(Cache(), x)
    with everything(module, tier) as handle:
        assert same([step(module, x)], [expected])
        assert handle.stats.futile_bytes == x.nbytes
        assert handle.stats.offloaded_bytes == 2 * x.nbytes
        assert handle.stats.reloaded_bytes == tier.bytes_of("load") == x.nbytes


def test_after_two_steps_it_is_left_alone(x):
    tier = RecordingTier(deferred=True)
    module = Cache()
    expected = step(Cache(), x)
    with everything(module, tier) as handle:
        stored = []
        for _ in range(5):
            before = tier.bytes_of("store")
            assert same([step(module, x)], [expected])
            stored.append((tier.bytes_of("store") - before) // x.nbytes)
        assert stored == [2, 2, 1, 1, 1]
        assert handle.stats.futile_bytes == 2 * x.nbytes
        assert str(handle.report()).count("futile")


def test_what_is_left_alone_is_still_checked_for_writes(x):
    module = Cache()
    with everything(module) as _:
        for _ in range(4):
            output = module(x)
            with torch.no_grad():
                module.kept.pop().zero_()
            try:
                (got,) = torch.autograd.grad(output.sum(), x)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                h = 2 * x.detach()
                assert torch.allclose(got, (h * h).cos() * 2 * h * 2)
            with torch.no_grad():
                step(module, x) if torch.is_grad_enabled() else None


def test_a_write_after_release_gives_the_packed_value_and_is_not_futile(x):
    tier = RecordingTier(deferred=True)
    module = Cache()
    expected = step(Cache(), x)
    with everything(module, tier) as handle:
        output = module(x)
        assert tier.bytes_of("store") == 2 * x.nbytes
        with torch.no_grad():
            module.kept[0].zero_()
        assert same(torch.autograd.grad(output.sum(), x), [expected])
        assert handle.stats.futile_bytes == 0


def test_a_futile_copy_found_in_one_step_alone_goes_on(x):
    """Once is chance: a debugger, a metric."""
    tier = RecordingTier(deferred=True)
    module = Cache()
    with everything(module, tier) as handle:
        step(module, x)
        for _ in range(3):
            output = module(x)
            module.kept.clear()  # now it does free memory
            torch.autograd.grad(output.sum(), x)
        assert tier.bytes_of("store") == 8 * x.nbytes
        assert handle.stats.futile_bytes == x.nbytes


def test_two_passes_of_one_step_are_one_step(x):
    """Gradient accumulation: the same key in three microbatches of one step is futile three times, and left alone after the second step at the latest."""
    module = Cache()
    tier = RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        for _ in range(2):
            sum(module(x).sum() for _ in range(3)).backward()
            module.kept.clear()
        seen = handle.stats.futile_bytes
        before = tier.bytes_of("store")
        sum(module(x).sum() for _ in range(3)).backward()
        assert handle.stats.futile_bytes == seen
        assert tier.bytes_of("store") - before == 3 * x.nbytes


def test_the_input_of_the_model_is_found_futile():
    """A batch that the caller holds: the first layer saves it, and it never goes away."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    batch = torch.randn(32, 64)
    with everything(model) as handle:
        for _ in range(4):
            model(batch).sum().backward()
        assert handle.stats.futile_bytes == 2 * batch.nbytes


def test_original_kept_by_a_view_alone_is_futile(x):
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        h = x * 2
        kept[:] = [h.detach()[:1]]
        return h * h

    module = Code(function)
    with everything(module) as handle:
        step(module, x)
        assert handle.stats.futile_bytes == x.nbytes


def test_a_futile_blob_counts_as_resident_again(x):
    module = Cache()
    with everything(module) as handle:
        output = module(x)
        assert handle.stats.resident_bytes == 0
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        kept = handle.stats.resident_bytes
        assert kept <= 2 * x.nbytes
        del output
        module.kept.clear()
        assert handle.stats.resident_bytes == 0
