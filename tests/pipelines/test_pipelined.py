"""The benchmark that drives W1 and W1v through ``torch.distributed.pipelining``: the same work in the same order."""

import json

import pytest
import torch

from benchmarks import run
from benchmarks.pipelined import Pipelined
from benchmarks.workloads import build

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["W1", "W1v"])
def test_the_first_rank_of_a_schedule_works_in_the_order_of_the_workload_itself(name):
    workload = build(name, size="tiny", device=CPU)
    driven = Pipelined(workload)
    assert driven.slots == workload.slots
    driven.close()


def test_a_split_backward_has_both_halves_of_every_microbatch_in_order():
    driven = Pipelined(build("W1v", size="tiny", device=CPU), "InterleavedZeroBubble")
    slots = list(map(str, driven.slots))
    driven.close()
    for microbatch in range(8):
        for chunk in ("", ".1"):
            forward, inputs, weights = (slots.index(f"{kind}{microbatch}{chunk}") for kind in "FIW")
            assert forward < inputs < weights
    assert len(slots) == 8 * 2 * 3


@pytest.mark.parametrize(("name", "schedule"), [("W1", []), ("W1v", ["InterleavedZeroBubble"]), ("W1v", ["ZBVZeroBubble"])])
def test_the_table_has_the_same_gradients_as_without_a_pipeline(name, schedule, tmp_path, capsys):
    options = ["--size", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1", "--tokens", "32"]
    found = tmp_path / "found.json"
    run.main([name, *options, "--pipelined", *schedule, "--variants", "plain,backhaul:300KB", "--json", str(found)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    outcome = json.loads(found.read_text())
    assert outcome["driven by"].startswith("torch.distributed.pipelining, ")
    _, managed = outcome["rows"]
    assert managed["to_plain"]["equal"]
    assert managed["stats"]["offloaded_bytes"] > 0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "schedule", "message"), [("W1", "ZBVZeroBubble", "several chunks"), ("W1v", "GPipe", "one chunk"), ("W3", "", "only W1")]
)
def test_what_is_no_stage_of_that_schedule_is_refused(name, schedule, message):
    with pytest.raises(ValueError, match=message):
        Pipelined(build(name, size="tiny", device=CPU), schedule)
