"""DistributedDataParallel: around a managed model or inside one, with and without what the compiler does to it."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.launcher import World
from tests.distributed.models import DEPTH, INPUT_BYTES, OF_A_BLOCK, Checkpointed, Stack, rows, step
from tests.distributed.training import Moved, moved

OF_A_STACK = sorted(DEPTH * OF_A_BLOCK + [INPUT_BYTES])
FIRST = pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])


class Idle(Stack):
    """Has a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)


OPTIONS: dict[str, tuple[type[Stack], dict[str, Any]]] = {
    "as it is": (Stack, {}),
    "static graph": (Stack, {"static_graph": True}),
    "unused parameters": (Idle, {"find_unused_parameters": True}),
    "gradients in buckets": (Stack, {"gradient_as_bucket_view": True}),
    "small buckets": (Stack, {"bucket_cap_mb": 0.001}),
}


def train_replicated(option: str, managed_first: bool) -> Moved:
    build, options = OPTIONS[option]
    return moved(build, lambda model: DistributedDataParallel(model, **options), step, managed_first=managed_first)


@FIRST
@pytest.mark.parametrize("option", OPTIONS)
def test_replicas_train_the_same_and_exactly_the_activations_move(world: World, option, managed_first):
    for answer in world.run(train_replicated, option, managed_first):
        assert answer.weights == []
        assert answer.first == OF_A_STACK
        assert set(answer.fqns) == {"layers.0", "layers.1", "layers.2", ""}  # no `module.` in front


def train_accumulating() -> Moved:
    def run(model: nn.Module) -> list[Tensor]:
        with model.no_sync():
            first = model(rows(0)).square().sum()
            first.backward()
        second = model(rows(1)).square().sum()
        second.backward()
        return [first.detach(), second.detach()]

    return moved(Stack, DistributedDataParallel, run)


def test_gradients_accumulated_without_sync_are_the_same(world: World):
    for answer in world.run(train_accumulating):
        assert answer.weights == []
        assert sum(answer.first) > 0


def checkpointed() -> nn.Module:
    model = Stack()
    model.layers = nn.ModuleList([Checkpointed(layer) for layer in model.layers])
    return model


def train_checkpointed() -> Moved:
    return moved(checkpointed, DistributedDataParallel, step)


def test_replicas_that_recompute_move_layer_inputs_alone(world: World):
    for answer in world.run(train_checkpointed):
        assert answer.weights == []
        assert answer.first == [INPUT_BYTES] * (DEPTH + 1)


def train_compiled(where: str, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        if where == "blocks":
            for layer in model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        elif where == "inside":
            model.compile(backend="aot_eager")
        model = DistributedDataParallel(model)
        if where == "outside":
            model.compile(backend="aot_eager")
        return model

    return moved(Stack, change, step, managed_first=managed_first)


@FIRST
@pytest.mark.parametrize("where", ["blocks", "inside", "outside"])
def test_compiled_replicas_train_the_same_and_no_weight_moves(world: World, where, managed_first):
    for answer in world.run(train_compiled, where, managed_first):
        assert answer.weights == []
        assert answer.first == OF_A_STACK


def train_by_plan(managed_first: bool, compiled: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        if compiled:
            for layer in model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        return DistributedDataParallel(model)

    return moved(Stack, change, step, managed_first=managed_first, plan={"layers.*": "recompute", "*": "offload"})


@FIRST
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_plan_recomputes_blocks_of_replicas(world: World, compiled, managed_first):
    for answer in world.run(train_by_plan, managed_first, compiled):
        assert answer.weights == []
        assert answer.first == [INPUT_BYTES] * DEPTH  # the head's input is made again with its block
        assert answer.recomputed_bytes > 0
