"""Meshes of two dimensions, on four ranks: shards that are replicated (HSDP), and shards of tensor-parallel weights."""

from collections.abc import Iterator

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.launcher import World
from tests.distributed.models import DEPTH, HIDDEN_BYTES, INPUT_BYTES, OF_A_BLOCK, Stack, step
from tests.distributed.training import Moved, moved

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world_of_four() -> Iterator[World]:
    ranks = World(4)
    yield ranks
    ranks.close()


def train_hybrid() -> Moved:
    def change(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return moved(Stack, change, step)


def train_half_gathered() -> Moved:
    """After forward, keep halves on pairs of ranks and not quarters on all four."""

    def change(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (4,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        return fully_shard(model, mesh=mesh)

    return moved(Stack, change, step)


def train_sharded_parallel(compiled: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if compiled:
                layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    return moved(Stack, change, step)


@pytest.mark.parametrize("train", [train_hybrid, train_half_gathered], ids=["hybrid", "resharded to pairs"])
def test_shards_on_four_ranks_move_exactly_the_activations(world_of_four: World, train):
    for answer in world_of_four.run(train):
        assert answer.weights == []
        assert answer.first == sorted(DEPTH * OF_A_BLOCK + [INPUT_BYTES])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_shards_of_tensor_parallel_weights_stay(world_of_four: World, compiled):
    for answer in world_of_four.run(train_sharded_parallel, compiled):
        assert answer.weights == []
        if not compiled:
            assert answer.first == sorted(DEPTH * [INPUT_BYTES, HIDDEN_BYTES // 2, HIDDEN_BYTES // 2] + [INPUT_BYTES])
