"""Finalizers run on any thread and at any moment, also inside our own locks and those of a tier (rule 1)."""

import gc
import subprocess
import sys
import threading

import pytest
from torch import nn

import backhaul as bh
from backhaul.testing import RecordingTier
from tests.conftest import everything, same
from tests.models import gradients, leaf, mlp


def resident_bytes(handle: bh.Handle) -> int:
    return handle.stats.resident_bytes


class Mark:
    """Something that dies with the graph."""


class CollectsAlways(RecordingTier):
    """Runs the garbage collector within every call, so that finalizers run inside the engine's lock, and on the tier's."""

    def store(self, source):
        gc.collect(1)
        return super().store(source)

    def load(self, slot, target):
        gc.collect(1)
        return super().load(slot, target)

    def free(self, slot):
        gc.collect(1)
        super().free(slot)


def test_finalizers_may_run_inside_our_own_lock():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    tier = CollectsAlways(deferred=True)
    x = leaf(8, 16)
    expected = gradients(model, x)
    with everything(model, tier) as handle:
        for _ in range(3):
            cycle = Mark()  # garbage that holds a graph of ours
            cycle.me, cycle.loss = cycle, model(leaf(8, 16)).sum()
            del cycle
            assert same(gradients(model, x), expected)
        gc.collect()
        assert resident_bytes(handle) == tier.used_bytes == 0


def test_finalizers_may_run_on_another_thread_while_ours_holds_the_lock():
    model = mlp()
    tier = RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        losses = [model(leaf(8, 16)).sum()]
        with handle._engine.lock:
            thread = threading.Thread(target=losses.clear)
            thread.start()
            thread.join(timeout=10)
            assert not thread.is_alive()
        assert resident_bytes(handle) == tier.used_bytes == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_finalizers_may_run_inside_the_lock_of_a_tier(tier):
    code = f"""
import gc, torch, backhaul as bh
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh())
with bh.offload(model, tier={tier!r}, activation_budget=0, min_bytes=0) as handle:
    gc.set_threshold(1, 1, 1 << 30)  # nearly every allocation of a container may start a collection
    for _ in range(60):
        cycle = [model(torch.randn(8, 16))]
        cycle.append(cycle)
        del cycle
    gc.collect()
    stats = handle.stats
    assert stats.resident_bytes == stats.host_bytes == stats.disk_bytes == 0, stats
    assert stats.num_offloads > 100
"""
    # A process of its own: a deadlock would take the locks of this one with it.
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
