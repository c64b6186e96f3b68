"""Random programs under random plans: whatever their blocks do, no action on any of them changes a gradient by a bit.

What is refused is refused with a reason, and nothing is left. Programs are those of random_graphs.py, without what is known to differ
(docs/failures.md): writes that autograd is not told of, where plain code is made again from what it keeps.
"""

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import backhaul as bh
from tests import random_graphs
from tests.random_graphs import NUM_STEPS, Leave, Outcome, assert_acceptable, assert_nothing_left, instructions, tier_of, train
from tests.random_programs import NAMES, Instruction, Program, perform

UNSEEN = ("unseen_mul_", "unseen_part_", "alias_add_")
LEFT_OUT = (
    "mul_by_", "add_", "copy_part_",  # fail, and are caught, before they have saved anything or after, as their operand is a leaf or not
)  # fmt: skip
REASONS = ("what it was called with cannot be had again", "has been written since its forward")  # said in backward


class Block(nn.Module):
    """Runs instructions on a list of its own, and returns it."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        super().__init__()
        self.instructions = instructions

    def forward(self, values: list[Tensor], log: list[str]) -> list[Tensor]:
        """Run them."""
        values = list(values)
        for instruction in self.instructions:
            log.append(perform(values, instruction))
        return values


class Model(random_graphs.Model):
    """Hands what one block returns to the next."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.blocks = nn.ModuleList(Block(block) for block in program.blocks)

    def forward(self, leaves: list[Tensor], log: list[str], values: list[Tensor]) -> list[Tensor]:
        """Run the blocks."""
        weight = self.weight.view_as(self.weight)
        given = [*leaves, weight.transpose(0, -1), self.weight.to(torch.bfloat16), self.buffer, weight, *(leaf * 1 for leaf in leaves)]
        for block in self.blocks:
            given = block(given, log)
        values += given
        return [value for value in values if value.requires_grad and value.numel()][-self.num_outputs :]


def refused(outcomes: list[Outcome]) -> bool:
    """Say whether a unit has said in backward that it cannot run again."""
    return any(isinstance(each, RuntimeError) and any(reason in str(each) for reason in REASONS) for each in outcomes)


def check(program: Program, plan: dict[str, Any], count: Counter[str]) -> None:
    """Assert that the plan changes nothing but memory."""
    oldest = torch.ones((), requires_grad=True) * 2
    expected = list(train(program, Model(program)))
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor.clone()):
        forward = list(train(program, Model(program)))
    model, tier = Model(program), tier_of(program)
    leave = Leave(to_fail=any(kind == "load" for kind, _ in program.faults), to_refuse=True)
    handle = bh.apply(model, plan, activation_budget=program.budget, tier=tier, min_bytes=program.min_bytes)
    steps = train(program, model)
    for step in range(NUM_STEPS):
        try:
            log, results = next(steps)
        except ValueError as error:
            if not ("is below the" in str(error) or 'cannot be under "recompute": it writes to' in str(error)):
                raise
            count["refused"] += 1
            break
        assert log == expected[step][0]
        for managed, plain, right in zip(results, expected[step][1], forward[step][1], strict=True):
            if not refused(managed):
                assert_acceptable(managed, plain, right, leave, where=f"step {step}")
                count["compared"] += 1
        managed = plain = right = results = None
    steps.close()
    stats = handle.stats
    handle.remove()
    del model, steps
    assert_nothing_left(handle, tier, oldest)
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes
    assert min([0, *stats.kept_by_reason.values()]) == 0
    count["made again"] += bool(stats.recomputed_bytes)
    count["moved"] += bool(stats.offloaded_bytes)


@pytest.mark.parametrize(("words", "names"), [(("recompute",), UNSEEN), (("recompute", "offload", "save"), ()), (("offload",), ())])
def test_any_action_on_any_block_of_a_random_program_changes_no_bit(words: tuple[str, ...], names: tuple[str, ...]) -> None:
    chosen = [name for name in NAMES if name not in (*LEFT_OUT, *UNSEEN) or name in names]
    blocks = st.lists(instructions(chosen, min_size=1, max_size=12), min_size=1, max_size=3).map(tuple)
    count: Counter[str] = Counter()

    @settings(max_examples=250, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(random_graphs.programs, blocks, st.integers(0, 1 << 20))
    def every(program: Program, blocks: tuple[tuple[Instruction, ...], ...], seed: int) -> None:
        program = Program(**{**vars(program), "blocks": blocks})
        draw = random.Random(seed)
        plan = {**{f"blocks.{number}": draw.choice(words) for number in range(len(blocks))}, "*": draw.choice(["offload", "save"])}
        note(f"{plan}\n{program}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about casts; that nothing moves
            check(program, plan, count)

    every()
    assert count["compared"] > 400
    assert count["made again"] > 40
    assert count["refused"] < 150
