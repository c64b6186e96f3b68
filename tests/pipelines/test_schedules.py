"""Rules 6 and 7 under every schedule of ``torch.distributed.pipelining``: two ranks over gloo, each stage a managed module of its own."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.distributed.launcher import World
from tests.pipelines import ranks
from tests.pipelines.ranks import BATCH, MOST_OF_A_NODE, SCHEDULES, SPLIT, Stage

Train = Callable[[str, float | None], list[Stage]]


def stages(world: World, *given: object, **options: object) -> list[Stage]:
    """Train a pipeline, and return all stages of all ranks in their order."""
    return sorted((stage for rank in world.run(*given, **options) for stage in rank), key=lambda stage: stage.index)


@pytest.fixture(scope="module")
def train(world: World) -> Train:
    """Train under a schedule where each stage may keep a share of what it wants; once, whoever asks."""
    return cache(lambda name, share: stages(world, ranks.compare, name, share))


@pytest.mark.parametrize("share", [0.0, 0.5, None], ids=["all moves", "half stays", "no budget"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_the_same_and_leaves_nothing_behind(train, name, share):
    for stage in train(name, share):
        assert stage.last.offloaded_bytes > 0


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["all moves", "half stays"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_stays_within_its_own_budget(train, name, share):
    for stage in train(name, share):
        node = BATCH if stage.index == 0 and share == 0 else MOST_OF_A_NODE  # its first norm reads a slice of the whole batch
        assert stage.last.peak_resident_bytes <= stage.budget + node
    first = train(name, share)[0]
    assert first.last.peak_resident_bytes < 0.65 * first.wants


@pytest.mark.parametrize("share", [0.5, None], ids=["half stays", "no budget"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_that_repeats_is_followed(train, name, share):
    for stage in train(name, share):
        reloads = stage.by_step("num_demand_reloads")
        if share is None:  # no more moves than hides, which may be nothing; on a busy machine that is not the same in each step
            assert reloads[-1] <= 3, reloads
            continue
        assert stage.by_step("reloaded_bytes")[-1] > 0
        assert reloads[-1] <= 1, reloads  # the first step shows the order, the next two what is futile to move: what the pipeline holds


@pytest.mark.parametrize("name", SPLIT)
def test_what_waits_for_its_weight_half_leaves_again_without_another_copy(train, name):
    split = [stage for stage in train(name, 0.0) if stage.index > 0]  # the first stage has no input half
    for stage in split:
        assert stage.by_step("reloaded_bytes")[-1] > stage.by_step("offloaded_bytes")[-1]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_a_changed_number_of_microbatches_is_learned_again(world, name):
    for stage in stages(world, ranks.compare, name, 0.5, ranks.changing_number, 7):
        assert stage.last.peak_resident_bytes <= max(stage.budget + MOST_OF_A_NODE, BATCH)


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
def test_gradients_accumulate_over_steps_of_a_schedule(world, name):
    assert all(stage.last.offloaded_bytes > 0 for stage in stages(world, ranks.compare, name, 0.5, ranks.accumulating))


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_evaluation_between_steps_moves_nothing_and_changes_nothing(world, name):
    assert all(stage.last.offloaded_bytes > 0 for stage in stages(world, ranks.compare, name, 0.5, ranks.evaluating))


def test_a_reference_model_of_the_same_modules_moves_nothing_and_changes_nothing(world, train):
    beside = stages(world, ranks.compare, "ZBVZeroBubble", 0.0, ranks.beside_a_reference)
    for stage, alone in zip(beside, train("ZBVZeroBubble", 0.0), strict=True):
        assert stage.last.saved_bytes == alone.last.saved_bytes


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_one_handle_may_manage_all_stages_of_a_rank(world, name):
    for stats in world.run(ranks.compare_under_one_handle, name):
        assert stats.offloaded_bytes > 0
        assert stats.peak_resident_bytes <= 60_000 + MOST_OF_A_NODE


def test_a_forward_and_a_backward_in_two_threads_at_once_train_the_same(world):
    for stage in stages(world, ranks.compare, "DualPipeV", 0.5, ranks.in_two_threads):
        assert stage.last.offloaded_bytes > 0


OTHER_STAGES = [ranks.make_checkpointed, ranks.make_sharded, ranks.make_compiled, ranks.make_compiled_whole]


@pytest.mark.parametrize("make", OTHER_STAGES)
def test_stages_of_checkpointed_or_compiled_blocks_or_sharded_weights_train_the_same(world, make):
    for stage in stages(world, ranks.compare, "Interleaved1F1B", 0.5, ranks.plain_step, 4, make):
        assert stage.last.offloaded_bytes > 0


PLANS = [{"1": "recompute", "0.*": "offload"}, {"*.norm": "recompute", "*.up": "recompute", "*": "offload"}]


@pytest.mark.parametrize("plan", PLANS, ids=["blocks", "parts of blocks"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_recomputes_in_every_schedule(world, name, plan):
    for stage in stages(world, ranks.compare, name, 0.0, ranks.plain_step, 4, ranks.make_stage, plan):
        assert stage.last.offloaded_bytes > 0
        assert stage.last.recomputed_bytes > 0
