"""FSDP2: gathered weights stay, whatever is nested in what, and every rank trains as without backhaul."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import init_device_mesh

from tests.distributed.launcher import World
from tests.distributed.models import (
    DEPTH,
    HIDDEN_BYTES,
    INPUT_BYTES,
    OF_A_BLOCK,
    Block,
    Checkpointed,
    Stack,
    accumulate,
    rows,
    step,
)
from tests.distributed.training import Moved, moved

FULL = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OF_A_STACK = sorted(DEPTH * OF_A_BLOCK + [INPUT_BYTES])


def shard(model: nn.Module, *, reshard: bool = True, precision: MixedPrecisionPolicy = FULL, to_host: bool = False) -> nn.Module:
    """Shard each block and what remains."""
    offload = CPUOffloadPolicy(pin_memory=False) if to_host else OffloadPolicy()
    options = {"mesh": init_device_mesh("cpu", (2,)), "reshard_after_forward": reshard, "mp_policy": precision, "offload_policy": offload}
    for layer in model.layers:
        if isinstance(layer, Checkpointed) and isinstance(layer.inner, FSDPModule):
            continue
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def changed(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model.layers = nn.ModuleList([change(layer) for layer in model.layers])
    return model


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager", fullgraph=True)
    return module


def shard_one(layer: nn.Module) -> nn.Module:
    return fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))


def assert_no_weight_moves(answers: list[Moved]) -> None:
    assert [answer.weights for answer in answers] == [[], []]
    assert all(answer.kept["parameter"] > 0 for answer in answers)


# What is sharded, and how


def train_sharded(reshard: bool, precision: MixedPrecisionPolicy, to_host: bool, managed_first: bool) -> Moved:
    return moved(Stack, partial(shard, reshard=reshard, precision=precision, to_host=to_host), step, managed_first=managed_first)


@pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])
@pytest.mark.parametrize("precision", [FULL, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_c13_gathered_weights_stay_and_exactly_the_activations_move(world: World, reshard, precision, managed_first):
    answers = world.run(train_sharded, reshard, precision, False, managed_first)
    assert_no_weight_moves(answers)
    half = 2 if precision is HALF else 1
    assert [answer.first for answer in answers] == [[size // half for size in OF_A_STACK]] * 2
    assert all(set(answer.fqns) == {"layers.0", "layers.1", "layers.2", ""} for answer in answers)


def test_weights_that_live_on_the_host_stay_there(world: World):
    answers = world.run(train_sharded, True, FULL, True, False)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [OF_A_STACK] * 2


def frozen_stack() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        layer.up.requires_grad_(False)
    return model


def train_frozen() -> Moved:
    return moved(frozen_stack, shard, step)


def test_c02_frozen_parts_stay_as_well(world: World):
    answers = world.run(train_frozen)
    assert_no_weight_moves(answers)
    # The first block has no gradient to send on, so its frozen half saves nothing and its second half what it multiplies.
    assert [answer.first for answer in answers] == [sorted([HIDDEN_BYTES] + (DEPTH - 1) * [HIDDEN_BYTES, HIDDEN_BYTES] + [INPUT_BYTES])] * 2


def train_groups(together: bool) -> Moved:
    """Shard the two halves of every block, as one group or as two."""

    def change(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            for group in [[layer.up, layer.down]] if together else [[layer.up], [layer.down]]:
                fully_shard(group, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return moved(Stack, change, step)


@pytest.mark.parametrize("together", [True, False], ids=["one group", "two groups"])
def test_groups_inside_blocks_stay(world: World, together):
    answers = world.run(train_groups, together)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [OF_A_STACK] * 2


# Beside recomputation and compilation, in every nesting

NESTINGS: dict[str, list[Callable[[nn.Module], nn.Module]]] = {
    "fully_shard(checkpoint(block))": [Checkpointed],
    "checkpoint(fully_shard(block))": [shard_one, Checkpointed],
    "fully_shard(compile(block))": [in_place],
    "compile(fully_shard(block))": [shard_one, in_place],
    "fully_shard(checkpoint(compile(block)))": [in_place, Checkpointed],
    "fully_shard(compile(checkpoint(block)))": [Checkpointed, in_place],
    "checkpoint(fully_shard(compile(block)))": [in_place, shard_one, Checkpointed],
    "fully_shard(checkpoint_wrapper(block))": [checkpoint_wrapper],
}


def train_nested(nesting: str, reshard: bool, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        for apply in NESTINGS[nesting]:
            model = changed(model, apply)
        sharded_already = shard_one in NESTINGS[nesting]
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,))) if sharded_already else shard(model, reshard=reshard)

    return moved(Stack, change, step, managed_first=managed_first)


@pytest.mark.parametrize(("reshard", "managed_first"), [(True, False), (False, True)], ids=["reshard-managed last", "keep-managed first"])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_c24_in_every_nesting_no_weight_moves(world: World, nesting, reshard, managed_first):
    answers = world.run(train_nested, nesting, reshard, managed_first)
    assert_no_weight_moves(answers)
    expected = [INPUT_BYTES] * (DEPTH + 1) if "checkpoint" in nesting else OF_A_STACK
    assert [answer.first for answer in answers] == [expected] * 2


def train_compiled_whole(managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        shard(model).compile(backend="aot_eager")
        return model

    return moved(Stack, change, step, managed_first=managed_first)


@pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])
def test_a_sharded_model_compiled_whole_moves_no_weight(world: World, managed_first):
    answers = world.run(train_compiled_whole, managed_first)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [OF_A_STACK] * 2


class Halves(nn.Module):
    """Blocks that stand in no list, so that the model is one scope."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def train_halves(compiled: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        for half in (model.encoder, model.decoder):
            shard_one(in_place(half) if compiled else half)
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    return moved(Halves, change, step)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_groups_gathered_one_after_the_other_in_one_scope_stay(world: World, compiled):
    answers = world.run(train_halves, compiled)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [sorted(2 * OF_A_BLOCK)] * 2


def train_compiled_half() -> Moved:
    return moved(Stack, lambda model: shard(changed(model, in_place), precision=HALF), step)


def test_weights_gathered_in_half_precision_stay_as_inputs_of_compiled_blocks(world: World):
    answers = world.run(train_compiled_half)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [[size // 2 for size in OF_A_STACK]] * 2


def train_fsdp1(own_parameters: bool, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=own_parameters, device_id=torch.device("cpu"))

    warnings.simplefilter("ignore")  # the launcher restores them
    return moved(Stack, change, step, managed_first=managed_first)


@pytest.mark.parametrize(("own_parameters", "managed_first"), [(True, False), (False, True)], ids=["use_orig_params", "flat parameters"])
def test_fsdp1_moves_exactly_the_activations_too(world: World, own_parameters, managed_first):
    answers = world.run(train_fsdp1, own_parameters, managed_first)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [OF_A_STACK] * 2


# Beside plans

FIRST = pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])

INSIDE, WHOLE = {"layers.*.up": "recompute", "*": "offload"}, {"layers.*": "recompute", "*": "offload"}


def train_by_plan(plan: dict[str, str], reshard: bool, precision: MixedPrecisionPolicy, managed_first: bool) -> Moved:
    return moved(Stack, partial(shard, reshard=reshard, precision=precision), step, plan=plan, managed_first=managed_first)


def train_compiled_by_plan(managed_first: bool) -> Moved:
    return moved(Stack, lambda model: shard(changed(model, in_place)), step, plan=WHOLE, managed_first=managed_first)


@FIRST
@pytest.mark.parametrize("precision", [FULL, HALF], ids=["float32", "bfloat16"])
def test_a_plan_recomputes_parts_of_blocks(world: World, precision, managed_first):
    answers = world.run(train_by_plan, INSIDE, True, precision, managed_first)
    assert_no_weight_moves(answers)
    half = 2 if precision is HALF else 1
    assert [answer.first for answer in answers] == [[INPUT_BYTES // half] * (DEPTH + 1)] * 2  # of the blocks and the head
    assert all(answer.recomputed_bytes >= 3 * DEPTH * HIDDEN_BYTES // half for answer in answers)


@FIRST
@pytest.mark.parametrize("reshard", [True, False])
def test_a_plan_recomputes_whole_blocks(world: World, reshard, managed_first):
    answers = world.run(train_by_plan, WHOLE, reshard, FULL, managed_first)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [[INPUT_BYTES] * DEPTH] * 2  # the head's input is made again with its block


@FIRST
def test_a_plan_recomputes_blocks_that_are_compiled_and_sharded_before_or_after(world: World, managed_first):
    answers = world.run(train_compiled_by_plan, managed_first)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [[INPUT_BYTES] * DEPTH] * 2
    assert all(answer.recomputed_bytes > 0 for answer in answers)


# How it is driven


def train_accumulating(kind: str, plan: dict[str, str] | None) -> Moved:
    def run(model: nn.Module) -> list[Tensor]:
        if kind == "two passes":
            return accumulate(model)
        if kind == "gathered ahead":
            for layer in model.layers:
                layer.unshard()
            return [step(model)]
        losses = []
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            losses.append(model(rows(last)).square().sum())
            losses[-1].backward()
        return [loss.detach() for loss in losses]

    return moved(Stack, shard, run, plan=plan)


@pytest.mark.parametrize("plan", [None, WHOLE, INSIDE], ids=["offload", "blocks", "parts of blocks"])
@pytest.mark.parametrize("kind", ["two passes", "without sync", "gathered ahead"])
def test_weights_that_are_gathered_earlier_or_stay_longer_stay(world: World, kind, plan):
    answers = world.run(train_accumulating, kind, plan)
    assert_no_weight_moves(answers)
    assert all((answer.recomputed_bytes > 0) == (plan is not None) for answer in answers)
    if kind == "two passes" and plan is None:
        assert [answer.first for answer in answers] == [sorted(2 * OF_A_STACK)] * 2


class Around(nn.Module):
    """Wraps a block, as many do."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.block(x)


def compiled_around(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


def train_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Moved:
    return moved(Stack, lambda model: shard(changed(model, wrap)), step, plan=WHOLE, managed_first=True)


@pytest.mark.parametrize("wrap", [Around, compiled_around])
def test_a_plan_recomputes_blocks_that_are_wrapped_and_sharded_afterwards(world: World, wrap):
    answers = world.run(train_wrapped, wrap)
    assert_no_weight_moves(answers)
    assert all(answer.recomputed_bytes > 0 for answer in answers)


def train_prefetching() -> Moved:
    def change(model: nn.Module) -> nn.Module:
        shard(model)
        for layer, following in zip(model.layers, [*model.layers[1:], None], strict=True):
            if following is not None:
                layer.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([layer])
        return model

    return moved(Stack, change, step)


def test_weights_gathered_ahead_stay(world: World):
    answers = world.run(train_prefetching)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [OF_A_STACK] * 2


def train_blocks_apart() -> Moved:
    return moved(Stack, shard, step, part=lambda model: model.layers)


def test_blocks_managed_each_by_itself_move_no_weight(world: World):
    answers = world.run(train_blocks_apart)
    assert_no_weight_moves(answers)
    assert [answer.first for answer in answers] == [sorted(DEPTH * OF_A_BLOCK)] * 2
