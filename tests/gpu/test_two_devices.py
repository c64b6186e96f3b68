"""A model that lives on two devices of one process: each tensor goes and comes back by its own device's lanes."""

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from tests.conftest import in_threads, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

MIB = 2**20


class Split(nn.Module):
    """Two halves on two devices, with a way back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda:0")
        self.second = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        return (self.second((self.first(x) * x).to("cuda:1")).sin().to("cuda:0") * x).sum()


def gradients(model: nn.Module, device: str, seed: int) -> list[Tensor]:
    x = torch.randn(4096, 512, generator=torch.Generator(device).manual_seed(seed), device=device, requires_grad=True)
    return list(torch.autograd.grad(model(x), [x, *model.parameters()]))


@pytest.mark.parametrize("budget", [None, 0, "24MiB"])
def test_c36_a_split_model_gives_the_same_on_each_device(budget: int | str | None) -> None:
    model = Split()
    expected = [gradients(model, "cuda:0", seed) for seed in range(4)]
    with bh.offload(model, activation_budget=budget, min_bytes=0) as handle:
        for seed in range(4):
            got = gradients(model, "cuda:0", seed)
            assert same(got, expected[seed])
            assert [each.device for each in got] == [each.device for each in expected[seed]]
        stations = handle._engine.stations
        assert set(stations) == {torch.device("cuda:0"), torch.device("cuda:1")}
        if budget == "24MiB":
            assert all(station.peak_resident_bytes <= 24 * MIB + 2 * 8 * MIB for station in stations.values())
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.host_bytes == 0


def test_two_threads_train_on_two_devices_under_one_tier() -> None:
    tier = bh.PinnedHost()
    models = {device: nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)).to(device) for device in ("cuda:0", "cuda:1")}

    def run(device: str, seed: int) -> list[Tensor]:
        x = torch.randn(8192, 512, generator=torch.Generator(device).manual_seed(seed), device=device, requires_grad=True)
        return list(torch.autograd.grad(models[device](x).sum(), [x, *models[device].parameters()]))

    expected = {device: [run(device, seed) for seed in range(6)] for device in models}
    wrong: list[str] = []

    def train(device: str) -> None:
        torch.cuda.set_device(device)
        with bh.offload(models[device], tier=tier, activation_budget=0, min_bytes=0):
            for seed in range(6):
                if not same(run(device, seed), expected[device][seed]):
                    wrong.append(f"{device}, step {seed}")

    in_threads(*[lambda device=device: train(device) for device in models])
    assert not wrong
    assert tier.used_bytes == 0
