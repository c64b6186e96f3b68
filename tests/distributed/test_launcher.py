"""What goes wrong on a rank is shown, holds nobody up, and does not touch the next test."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import TIMEOUT_S, World


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank cannot go on")
    dist.barrier()


def add_up() -> float:
    total = torch.ones(()) + dist.get_rank()
    dist.all_reduce(total)
    return total.item()


def test_the_error_of_a_rank_is_shown_and_the_next_function_runs(world: World):
    assert world.run(add_up) == [3.0, 3.0]
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)ValueError: this rank cannot go on"):
        world.run(fail_on_one_rank)
    assert time.monotonic() - began < TIMEOUT_S
    assert world.run(add_up) == [3.0, 3.0]
