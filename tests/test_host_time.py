"""Where the host's time goes, on a tiny model."""

import re

from benchmarks import host


def test_each_variant_has_its_times_and_its_functions(capsys):
    host.main(["W4", "--size", "tiny", "--device", "cpu", "--variants", "plain,lean", "--warmup", "2", "--steps", "2", "--most", "200"])
    plain, lean = capsys.readouterr().out.split("\nlean")
    first = re.match(r"plain +forward +([0-9.]+) ms +backward +([0-9.]+) ms\n", plain)
    assert first is not None
    assert all(float(ms) > 0 for ms in first.groups())
    assert re.match(r" +forward +[0-9.]+ ms +backward +[0-9.]+ ms +[+-][0-9.]+ +[+-][0-9.]+\n", lean)
    own = [line for line in lean.splitlines() if "backhaul/engine.py pack" in line]
    assert len(own) == 1
    assert int(own[0].split(" in ")[1].split()[0]) > 50  # calls, one for each saved tensor
    assert "backhaul/engine.py" not in plain
