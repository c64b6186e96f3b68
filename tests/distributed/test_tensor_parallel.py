"""Tensor and sequence parallel: activations that are DTensors move as their local tensors and come back where they were placed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.distributed.launcher import World
from tests.distributed.models import HIDDEN, HIDDEN_BYTES, INPUT_BYTES, ROWS, WIDTH, Checkpointed, Stack
from tests.distributed.training import Moved, moved

STATISTICS = [ROWS * 4, ROWS * 4]  # a norm's mean and scale for each row


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "local activations": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "DTensor activations": lambda: {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=True),
    },
    "sequence": lambda: {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
}


def step(plan: str) -> Callable[[nn.Module], list[Tensor]]:
    """Run the blocks on what every rank has, or on this rank's share of the rows."""

    def run(model: nn.Module) -> list[Tensor]:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
        if plan == "sequence":
            x = distribute_tensor(x, mesh(), [Shard(0)])
        x.requires_grad_()
        y = x * 1
        for layer in model.layers:
            y = layer(y)
        loss = y.square().sum()
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        loss.backward()
        return [loss.detach(), x.grad]

    return run


def train_parallel(plan: str, how: str, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        for index, layer in enumerate(model.layers):
            parallelize_module(layer, mesh(), PLANS[plan]())
            if how == "compiled":
                layer.compile(backend="aot_eager", fullgraph=True)
            elif how == "checkpointed":
                model.layers[index] = Checkpointed(layer)
        return model

    return moved(lambda: Stack(Block, depth=2), change, step(plan), managed_first=managed_first, part=lambda model: model.layers)


@pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])
@pytest.mark.parametrize("plan", PLANS)
def test_parallel_blocks_train_the_same_and_exactly_this_rank_s_activations_move(world: World, plan, managed_first):
    whole = [INPUT_BYTES, *STATISTICS, INPUT_BYTES, HIDDEN_BYTES // 2, HIDDEN_BYTES // 2]
    shared = [INPUT_BYTES // 2, ROWS * 2, ROWS * 2, INPUT_BYTES, HIDDEN_BYTES // 2, HIDDEN_BYTES // 2]
    for answer in world.run(train_parallel, plan, "eager", managed_first):
        assert answer.weights == []
        assert answer.first == sorted(2 * (shared if plan == "sequence" else whole))


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
@pytest.mark.parametrize("plan", PLANS)
def test_compiled_and_recomputed_parallel_blocks_move_no_weight(world: World, plan, how):
    for answer in world.run(train_parallel, plan, how, False):
        assert answer.weights == []
        if how == "checkpointed":
            assert answer.first == [INPUT_BYTES // (2 if plan == "sequence" else 1)] * 2
        else:
            assert sum(answer.first) > 0


def train_parallel_by_plan(plan: str, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        parallelize_module(model.layers[0], mesh(), PLANS[plan]())
        return model

    rules = {"up": "recompute", "norm": "recompute", "*": "offload"}
    return moved(
        lambda: Stack(Block, depth=1), change, step(plan), managed_first=managed_first, part=lambda model: model.layers[0], plan=rules
    )


@pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_recomputes_parts_of_parallel_blocks(world: World, plan, managed_first):
    for answer in world.run(train_parallel_by_plan, plan, managed_first):
        assert answer.weights == []
        assert answer.recomputed_bytes >= 3 * HIDDEN_BYTES // 2  # this rank's share of what the first product returns


def train_with_loss_parallel() -> Moved:
    targets = torch.arange(ROWS) % WIDTH

    def change(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh(), {"0": ColwiseParallel(use_local_output=False)})

    def run(model: nn.Module) -> Tensor:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(x).tanh(), targets)
            loss.backward()
        return loss.full_tensor().detach()

    return moved(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()), change, run)


def test_a_parallel_loss_is_the_same(world: World):
    for answer in world.run(train_with_loss_parallel):
        assert answer.weights == []
        assert ROWS * WIDTH * 4 // 2 in answer.first


class Unfinished(nn.Module):
    """Saves the result of a collective that nobody has waited for."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.redistribute(placements=[Replicate()], async_op=True)
        assert isinstance(whole.detach()._local_tensor, AsyncCollectiveTensor)
        return (whole * whole.detach()).sum()


def come_back_unfinished() -> tuple[list[int], bool, list[str]]:
    local = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    x = DTensor.from_local(local, mesh(), [Shard(0)]).requires_grad_()
    module = Unfinished()
    module(x).full_tensor().backward()
    expected, x.grad = x.grad, None
    tier = RecordingTier(deferred=True)
    with bh.offload(module, tier=tier, activation_budget=0, min_bytes=0) as handle:
        module(x).full_tensor().backward()
        reasons = sorted(handle.stats.kept_by_reason)
    return [record.num_bytes for record in tier.records if record.event == "store"], x.grad.to_local().equal(expected.to_local()), reasons


def test_a_collective_that_is_under_way_is_waited_for(world: World):
    for sizes, same, reasons in world.run(come_back_unfinished):
        assert same
        assert sizes == [2 * INPUT_BYTES]
        assert reasons == []
