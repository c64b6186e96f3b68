"""C16: what cannot pay is not done. Small tensors stay, cost no memory in a tier, and are counted with their reason."""

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul.api import MIN_BYTES
from backhaul.testing import RecordingTier
from tests.conftest import everything, same


def chain(width: int, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())])


@pytest.mark.parametrize("budget", [None, 0])
def test_c16_by_default_a_tiny_model_moves_nothing(budget):
    model, tier, x = chain(64), RecordingTier(), torch.randn(2, 64)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with bh.offload(model, tier=tier, activation_budget=budget) as handle:
        for _ in range(2):
            assert same(torch.autograd.grad(model(x).sum(), list(model.parameters())), expected)
        stats = handle.stats
    assert stats.offloaded_bytes == stats.num_offloads == tier.peak_bytes == 0
    assert stats.kept_by_reason["small"] == stats.saved_bytes > 0


def test_c16_a_tiny_model_costs_no_memory_anywhere():
    model, x = chain(64), torch.randn(2, 64)
    for tier in ("host", "disk"):
        with bh.offload(model, tier=tier) as handle:
            for _ in range(2):
                model(x).sum().backward()
            stats = handle.stats
            assert (stats.peak_host_bytes, stats.peak_disk_bytes, stats.pageable_bytes) == (0, 0, 0)


def test_c16_among_small_tensors_only_the_large_ones_move():
    model, tier = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 4)), RecordingTier()
    x = torch.randn(128, 64)
    with bh.offload(model, tier=tier, activation_budget=0) as handle:
        model(x).sum().backward()
        stats = handle.stats
    assert {record.num_bytes for record in tier.records} == {128 * 4096 * 4}
    assert MIN_BYTES <= 128 * 4096 * 4
    assert stats.kept_by_reason["small"] == 3 * 128 * 64 * 4
    assert stats.saved_bytes == stats.offloaded_bytes + stats.kept_bytes


@pytest.mark.parametrize("size", [1023, 1024, 1025])
def test_min_bytes_is_the_smallest_that_moves(size):
    module, tier = chain(16, 1), RecordingTier()
    with everything(module, tier, min_bytes=size):
        module(torch.randn(16, 16)).sum().backward()  # storages of 1024 bytes
    assert (tier.peak_bytes > 0) == (size <= 1024)


def test_a_small_view_of_a_large_storage_is_judged_by_its_storage():
    class Slices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = x * 2
            return (big[:, :512] * big[:, 512:]).sum()

    module, tier, x = Slices(), RecordingTier(deferred=True), torch.randn(64, 1024, requires_grad=True)
    expected = torch.autograd.grad(module(x), x)
    with everything(module, tier, min_bytes=x.nbytes):
        for _ in range(2):
            assert same(torch.autograd.grad(module(x), x), expected)
    assert {record.num_bytes for record in tier.records} == {x.nbytes}
