"""The examples for several ranks run as a user would run them, and do what they say."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import same
from tests.distributed.launcher import World
from tests.pipelines.ranks import SCHEDULES, SINGLE

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(name: str, *arguments: str) -> str:
    """Run an example on two ranks and return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launcher, str(EXAMPLES / name), *arguments], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d: loss (.*)", output)]


def test_the_pipeline_trains_and_every_stage_keeps_little():
    output = torchrun("pipeline.py", "ZBVZeroBubble")
    assert len(losses(output)) == 5
    assert losses(output) == sorted(losses(output), reverse=True)
    stages = re.findall(r"stage (\d): (\d+)% of what was saved has been away, at most (\S+) MB stayed", output)
    assert sorted(int(stage) for stage, _, _ in stages) == [0, 1, 2, 3], output
    for stage, moved, stayed in stages:
        assert int(moved) > 30 or stage == "3"  # the last stage's backwards follow at once
        assert float(stayed) < 8.2  # 6 MB, and what one node needs, of the first stage the whole batch


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks."""
    ranks = World(2)
    yield ranks
    ranks.close()


def trained(name: str, offload: bool) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], str]:
    """Train the pipeline of the example in a rank of the tests' own; return the losses, the weights, and what it prints."""
    example = runpy.run_path(str(EXAMPLES / "pipeline.py"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found, modules = example["train"](name, torch.device("cpu"), offload=offload)
    return found, [[parameter.detach() for parameter in module.parameters()] for module in modules], printed.getvalue()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pipeline_gives_the_same_under_every_schedule_and_its_stages_keep_little(world, name):
    plain, managed = (world.run(trained, name, offload) for offload in (False, True))
    for (expected, weights, _), (found, weights_found, _) in zip(plain, managed, strict=True):
        assert same(found, expected)
        assert all(same(of_stage, wanted) for of_stage, wanted in zip(weights_found, weights, strict=True))
    assert sum(len(found) for found, _, _ in managed) == 5
    stages = re.findall(r"stage (\d): (\d+)% of what was saved has been away, at most (.*) MB", "".join(text for _, _, text in managed))
    assert len(stages) == (2 if name in SINGLE else 4)
    for stage, moved, stayed in stages:
        assert float(stayed) < (8.2 if stage == "0" else 7.4)  # 6 MB and what one node needs, of the first stage the whole batch
        assert int(moved) > 30 or int(stage) == len(stages) - 1  # the last stage's backwards mostly follow at once


def test_fully_sharded_training_moves_activations_and_no_weights():
    output = torchrun("fsdp2.py")
    assert len(losses(output)) == 5
    assert losses(output) == sorted(losses(output), reverse=True)
    saved, offloaded = (float(re.search(rf"^{word} +(\S+) MiB", output, re.M).group(1)) for word in ("saved", "offloaded"))
    assert 0.8 * saved < offloaded < saved
    assert re.search(r"^ *parameters? +40.0 MiB", output, re.M)  # five steps of four blocks, both matrices of 1 MiB
