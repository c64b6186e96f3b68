"""The examples for several ranks run as a user would run them, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    stages = re.findall(r"stage (\d): (\d+)% of what was saved has been away, at most (.*) MB stayed", output)
    assert sorted(int(stage) for stage, _, _ in stages) == [0, 1, 2, 3]
    for stage, moved, stayed in stages:
        assert int(moved) > 30 or stage == "3"  # the last stage's backwards follow at once
        assert float(stayed) < 8.2  # 6 MB, and what one node needs, of the first stage the whole batch


def test_fully_sharded_training_moves_activations_and_no_weights():
    output = torchrun("fsdp2.py")
    assert len(losses(output)) == 5
    assert losses(output) == sorted(losses(output), reverse=True)
    saved, offloaded = (float(re.search(rf"^{word} +(\S+) MiB", output, re.M).group(1)) for word in ("saved", "offloaded"))
    assert 0.8 * saved < offloaded < saved
    assert re.search(r"^  parameter +40.0 MiB", output, re.M)  # five steps of four blocks, both matrices of 1 MiB
