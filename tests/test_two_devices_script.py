"""What ``benchmarks.two_devices`` runs on two GPUs finds equal values over gloo in small, and what fails costs nothing but itself."""

import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.two_devices import __main__ as script
from benchmarks.two_devices import links, pipeline, ranks, sharded, tensor
from tests.distributed.launcher import World

OPTIONS = ["--size", "tiny", "--device", "cpu", "--pairs", "1"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks, so that the parts need not each start their own."""
    both = World(2)
    yield both
    both.close()


def in_small(part: ranks.Run, given: str | None, place: Path) -> dict[str, Any]:
    """Run a part on this rank of the tests' own, and return what it has found."""
    options = script.parse([*OPTIONS, "--out", str(place / "unused"), "--ways", "apply+offload:0.5"])
    found = place / f"{dist.get_rank()}.json"
    warnings.filterwarnings("ignore", message=".*should not be instantiated")  # the compiler does it when it meets a Function
    part(ranks.Rank(dist.get_rank(), torch.device("cpu"), full=False), ranks.Findings(found, judges_aims=False), given, options)
    return json.loads(found.read_text())


def musts(found: dict[str, Any]) -> dict[str, bool]:
    return {claim["text"]: claim["holds"] for claim in found["claims"] if claim["must"]}


def test_sharded_blocks_with_experts_train_the_same_and_move_their_inputs_alone(world, tmp_path):
    for found in world.run(in_small, sharded.run, None, tmp_path):
        held = musts(found)
        assert "budget None: layer inputs move and nothing else" in held
        assert len(held) == 9
        assert all(held.values())
        for stats in found["facts"]["budget 0"]["stats"]:
            assert stats["kept_by_reason"].keys() <= {"small", "not worth moving"}


@pytest.mark.parametrize("schedule", pipeline.CHUNKS)
def test_pipelines_give_the_same_gradients_each_rank_in_its_own_way(world, tmp_path, schedule):
    for found in world.run(in_small, pipeline.run, schedule, tmp_path):
        assert list(musts(found).values()) == [True] * 4
        first, last = found["facts"]["apply+offload 50%"]["stats"]
        assert sum(each["offloaded_bytes"] for each in first) > 0
        assert sum(each["recomputed_bytes"] for each in first) > 0
        assert sum(each["recomputed_bytes"] for each in last) == 0


def test_tensor_parallel_blocks_train_the_same(world, tmp_path):
    for found in world.run(in_small, tensor.run, None, tmp_path):
        assert musts(found) == {"losses of 4 steps equal, bit for bit": True, "activations move": True}


def fails_on_the_second(rank: ranks.Rank, findings: ranks.Findings, *_: object) -> None:
    """Find something, then fail on one rank while the other waits for it."""
    findings.must("found before", True)
    rank.meet()
    if rank.index == 1:
        raise ArithmeticError("on purpose")
    rank.meet()


def hangs(*_: object) -> None:
    """Never come back."""
    time.sleep(600)


def test_what_fails_or_hangs_is_told_and_the_next_run_goes_on(tmp_path, monkeypatch, capsys):
    for name in ranks.DEFAULTS:
        monkeypatch.setenv(name, os.environ.get(name, ranks.DEFAULTS[name]))
    runs = {"stuck": {"stuck": (hangs, None)}, "broken": {"broken": (fails_on_the_second, None)}, "links": script.RUNS["links"]}
    monkeypatch.setattr(script, "RUNS", runs)
    limits = {"stuck": "1"}
    out = tmp_path / "out.json"
    found = {}
    for part in runs:
        code = script.main([*OPTIONS, "--part", part, "--out", str(out), "--limit", limits.get(part, "100")])
        assert code == (0 if part == "links" else 1)
        found |= json.loads(out.read_text())["runs"]
    assert found["stuck"]["failure"] == "gave no answer within 1 s"
    assert "ArithmeticError: on purpose" in found["broken"]["failure"]
    assert musts(found["broken"]) == {"found before": True}
    rates = found["links"]["facts"]["gbps"]
    assert len(rates) == 6
    assert all(rate > 0 for row in rates.values() for each in row.values() for rate in each)
    assert "failed: ArithmeticError: on purpose" in capsys.readouterr().out


def test_a_missed_aim_fails_nothing_and_a_difference_does() -> None:
    aim = {"text": "fast", "must": False, "holds": False, "figure": ""}
    must = {"text": "same", "must": True, "holds": True, "figure": ""}
    assert script.is_good({"failure": "", "claims": [aim, must]})
    assert not script.is_good({"failure": "", "claims": [aim, {**must, "holds": False}]})
    assert not script.is_good({"failure": "a rank failed", "claims": [must]})


def test_rows_go_forth_and_their_gradients_come_back_in_a_fixed_order() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2], [1, 0]])
    order = chosen.flatten().argsort(stable=True)
    forth, back = order // 2, order.argsort().view(-1, 2)
    assert sharded.Rows.apply(x, forth, back).equal(x.index_select(0, forth))
    assert torch.autograd.gradcheck(lambda x: sharded.Rows.apply(x, forth, back), [x])


def test_pages_lie_on_nodes_that_there_are() -> None:
    memory = torch.ones(8 << 20, dtype=torch.uint8)
    found = links.nodes_of_pages(memory.data_ptr(), memory.nbytes)
    nodes = {int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert found is None or set(found) <= nodes
