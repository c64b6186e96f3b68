"""The collector is patient while a graph waits for its backward, and as it was before and after."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from backhaul import garbage
from tests.conftest import everything


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    gc.collect()
    garbage.alive.clear()  # of tests that interrupt finalizers
    before = gc.get_threshold()
    gc.set_threshold(700, 9, 11)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def forward() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    everything(model)
    return model(torch.ones(4, 8)).sum()


def test_it_has_patience_from_forward_to_backward(thresholds):
    loss = forward()
    assert gc.get_threshold() == (garbage.PATIENT, 9, 11)
    loss.backward()
    assert gc.get_threshold() == thresholds


def test_it_goes_back_when_the_last_of_several_graphs_is_dropped(thresholds):
    first, second = forward(), forward()
    del first
    assert gc.get_threshold()[0] == garbage.PATIENT
    del second
    assert gc.get_threshold() == thresholds


def test_an_exception_in_forward_leaves_it_as_it_was(thresholds):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4))
    with everything(model), pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(4, 8))
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("mine", [(0, 10, 10), (500_000, 10, 10)])
def test_who_wants_no_collections_or_fewer_keeps_their_threshold(mine):
    gc.set_threshold(*mine)
    loss = forward()
    assert gc.get_threshold() == mine
    loss.backward()
    assert gc.get_threshold() == mine


def test_what_somebody_sets_meanwhile_stays():
    loss = forward()
    gc.set_threshold(12345)
    loss.backward()
    assert gc.get_threshold()[0] == 12345
    forward().backward()
    assert gc.get_threshold()[0] == 12345


def test_cycles_are_still_found_while_a_graph_is_kept():
    loss = forward()
    dropped: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            dropped.append(1)

    for _ in range(2 * garbage.PATIENT):
        Cycle()
        if dropped:
            break
    assert dropped
    assert loss.requires_grad
