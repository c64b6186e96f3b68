"""Where several streams compute, what was made again is held until all have read it, and nothing else is."""

import torch
from torch import nn

import backhaul as bh
from tests.test_stations import FakeStream


def test_only_what_is_made_again_is_held_and_each_storage_once():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
    with bh.apply(model, {"0": "recompute", "*": "offload"}, tier="host", activation_budget="1GB", min_bytes=0) as handle:
        model(torch.randn(4, 16, requires_grad=True)).sum().backward()
        (station,) = handle._engine.stations.values()
        station.streams = {0: FakeStream(), 1: FakeStream()}  # type: ignore[dict-item]
        held = []
        for _ in range(3):
            model(torch.randn(4, 16, requires_grad=True)).sum().backward()
            held.append([storage.nbytes() for storage in station.dropped])
        weights = {weight.untyped_storage() for weight in model.parameters()}
        assert not any(station.holds(storage) for storage in weights)
        assert len(station.dropped) <= 4  # what the last backward made
        station.streams = {}
    assert any(held)
