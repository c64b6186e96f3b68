"""The property: whatever a program does, managing it changes no gradient by a bit (``random_programs.py`` says what a program is)."""

import pytest
import torch
from torch import Tensor

from backhaul.testing import RecordingTier
from tests import random_graphs
from tests.random_graphs import Count, check, check_many
from tests.random_programs import MAKE, WRITE, Program, perform

NUM_GRAPHS = 2000


@pytest.mark.slow
def test_two_thousand_random_programs_train_the_same_to_the_last_bit():
    count = check_many(NUM_GRAPHS, derandomize=True)
    assert count.num_programs >= NUM_GRAPHS
    assert count.num_moving > NUM_GRAPHS // 2  # most move bytes
    assert NUM_GRAPHS // 20 < count.num_refused < NUM_GRAPHS // 2  # and most run, but not all


WRITTEN = Program(blocks=((("clone", 3, 0, 0), ("square", 0, 0, 0), ("unseen_mul_", 1, 0, 0)),), num_outputs=2, budget=1 << 30)
PLAIN = Program(blocks=((("sin", 2, 0, 0), ("mul", 0, 3, 0)), (("expand", 0, 0, 1), ("exp", 0, 0, 0))), num_outputs=2)


class WrongByABit(RecordingTier):
    """Flips a bit of what it gives back."""

    def load(self, slot, target):
        transfer = super().load(slot, target)
        transfer.wait()
        target[0] ^= 1
        return transfer


def test_a_wrong_bit_is_found(monkeypatch):
    monkeypatch.setattr(random_graphs, "tier_of", lambda program: WrongByABit())
    with pytest.raises(AssertionError, match="plain autograd gives"):
        check(PLAIN, Count())


def test_a_stale_value_is_found(monkeypatch):
    """An engine that takes no versions hands out what was written after saving."""
    check(WRITTEN, Count())
    monkeypatch.setattr("backhaul._torch.version_of", lambda tensor: 0)
    with pytest.raises(AssertionError, match="with the forward's values"):
        check(WRITTEN, Count())


def test_a_graph_that_stays_is_found(monkeypatch):
    """An engine that keeps what autograd holds keeps the memory."""
    kept: list[object] = []
    offload = random_graphs.bh.offload

    def keeping(*args: object, **options: object) -> object:
        handle = offload(*args, **options)
        pack = handle._engine.pack

        def keep(tensor: Tensor) -> object:
            kept.append(pack(tensor))
            return kept[-1]

        handle._engine.pack = keep
        return handle

    monkeypatch.setattr(random_graphs.bh, "offload", keeping)
    with pytest.raises(AssertionError):
        check(PLAIN, Count())
    assert kept


def test_a_program_prints_as_something_to_read():
    text = str(PLAIN)
    assert "    sin(v[2], v[0], 0)" in text
    assert "block 1:" in text
    assert eval(repr(PLAIN)) == PLAIN


def test_every_instruction_can_be_carried_out():
    """An instruction that always fails would cover nothing."""
    for name in (*MAKE, *WRITE):
        outcomes = []
        for source in (torch.randn(2, 3), torch.randn(6, dtype=torch.complex64), torch.ones(3) > 0):
            values = [source.clone(), source.clone()]
            outcomes.append(perform(values, (name, 0, 1, 1)))
        assert "ok" in outcomes, (name, outcomes)
