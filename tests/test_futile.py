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
        return torch.cat([h * h, h]).sin().exp()  # saves h, which stays, and things of twice its size, which do not


@pytest.fixture
def x() -> Tensor:
    return torch.randn(256, requires_grad=True)


def times(tier: RecordingTier, event: str, like: Tensor) -> int:
    """Count what was done to things of this size."""
    return sum(record.event == event and record.num_bytes == like.nbytes for record in tier.records)


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
        assert times(tier, "store", x) == 1
        assert times(tier, "load", x) == 0


def test_after_two_steps_it_is_left_alone(x):
    tier = RecordingTier(deferred=True)
    module = Cache()
    expected = step(Cache(), x)
    with everything(module, tier) as handle:
        stored = []
        for _ in range(5):
            assert same([step(module, x)], [expected])
            stored.append(times(tier, "store", x))
        assert stored == [1, 2, 2, 2, 2]
        assert handle.stats.futile_bytes == 2 * x.nbytes
        assert "of it futile" in str(handle.report())


def test_what_is_left_alone_is_still_checked_for_writes(x):
    module = Cache()
    expected = step(Cache(), x)
    with everything(module):
        for _ in range(4):
            output = module(x)
            with torch.no_grad():
                module.kept.pop().zero_()
            try:
                (got,) = torch.autograd.grad(output.sum(), x)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                assert same([got], [expected])


def test_a_write_after_release_gives_the_packed_value_and_is_not_futile(x):
    tier = RecordingTier(deferred=True)
    module = Cache()
    expected = step(Cache(), x)
    with everything(module, tier) as handle:
        output = module(x)
        assert times(tier, "store", x) == 1
        with torch.no_grad():
            module.kept[0].zero_()
        assert same(torch.autograd.grad(output.sum(), x), [expected])
        assert times(tier, "load", x) == 1
        assert handle.stats.futile_bytes == output.nbytes  # exp saves its result, which we hold


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
        assert times(tier, "store", x) == 4
        assert handle.stats.futile_bytes == x.nbytes


def test_microbatches_of_one_step_are_one_step(x):
    """Gradient accumulation: a key is futile in each of three microbatches, and left alone after the second step at the latest."""
    module = Cache()
    tier = RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        for _ in range(4):
            sum(module(x).sum() for _ in range(3)).backward()
            module.kept.clear()
        assert 3 <= times(tier, "store", x) <= 6
        assert handle.stats.futile_bytes == times(tier, "store", x) * x.nbytes


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
