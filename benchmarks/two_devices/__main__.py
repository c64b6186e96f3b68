"""Run on two devices of one host: links, shards with experts, tensor parallel, a pipeline.

    python -m benchmarks.two_devices --out two.json                             # two GPUs over NCCL
    python -m benchmarks.two_devices --part links,sharded --out two.json
    python -m benchmarks.two_devices --size tiny --out two.json                 # two processes over gloo, on a CPU too

Covers: the command line, starting and ending the ranks, the table and the JSON.
Does not cover: what the ranks do (the modules named like the parts), or what these have in common (ranks.py).

Every run starts two processes of its own, so that one that fails or hangs takes nothing of the others with it: what it had found by then
is in the table and the JSON, and the exit code is 1. It is 1, too, where values differ; a missed aim of time or memory is only reported.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.two_devices import links, pipeline, ranks, sharded, tensor

RUNS: dict[str, dict[str, tuple[ranks.Run, str | None]]] = {  # of each part, by name
    "links": {"links": (links.run, None)},
    "sharded": {"sharded": (sharded.run, None)},
    "tensor": {"tensor": (tensor.run, None)},
    "pipeline": {f"pipeline, {schedule}": (pipeline.run, schedule) for schedule in pipeline.CHUNKS},
}
GRACE_S = 5.0  # what a rank has left once the other one has failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_devices", description="Run on two devices of one host.")
    parser.add_argument("--part", default=",".join(RUNS), help="names with commas between; all of them if not given")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny runs on a CPU in seconds")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there are two of them, or else cpu, if not given")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--limit", type=float, default=240.0, metavar="S", help="seconds for one run, after which it is ended")
    parser.add_argument("--pairs", type=int, default=5, help="steps timed with backhaul, and as many without, in turn")
    parser.add_argument("--tokens", type=int, help="local tokens of the sharded run")
    parser.add_argument("--ways", default="offload:0.75,apply+offload:0.5", help="pipeline: how, and what share of the first rank's bytes")
    options = parser.parse_args(arguments)
    unknown = set(options.part.split(",")) - RUNS.keys()
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    options.device = options.device or ("cuda" if torch.cuda.device_count() >= ranks.NUM_RANKS else "cpu")
    return options


def run(function: ranks.Run, given: str | None, options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run a function on two ranks, and return what they found, also where they failed."""
    start = time.monotonic()
    failure = ""
    context = multiprocessing.start_processes(
        ranks.enter, args=(function, given, options, place), nprocs=ranks.NUM_RANKS, join=False, start_method="spawn"
    )
    try:
        while not context.join(timeout=1.0, grace_period=GRACE_S):
            if time.monotonic() - start > options.limit:
                raise TimeoutError(f"gave no answer within {options.limit:.0f} s")
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        failure = str(error).strip()
    finally:
        for process in context.processes:
            process.kill()
    found = {"facts": {}, "claims": []}
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((place / ranks.FOUND).read_text())
    return {"failure": failure, "seconds": round(time.monotonic() - start, 1), **found}


def print_run(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}  ({found['seconds']:.0f} s)")
    for claim in found["claims"]:
        holds = {None: "", True: "ok" if claim["must"] else "met", False: "NO" if claim["must"] else "missed"}[claim["holds"]]
        print(f"  {claim['text']:<58} {holds:<7} {claim['figure']}")
    if found["failure"]:
        print("  failed:", [line for line in found["failure"].splitlines() if line == line.lstrip() != ""][-1])
    sys.stdout.flush()


def is_good(found: dict[str, Any]) -> bool:
    return not found["failure"] and all(claim["holds"] for claim in found["claims"] if claim["must"])


def about(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Say where and how."""
    on_gpu = options.device == "cuda"
    topology = None
    if on_gpu:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True).stdout
    return {
        "command": "python -m benchmarks.two_devices " + " ".join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "devices": [torch.cuda.get_device_name(index) for index in range(ranks.NUM_RANKS)] if on_gpu else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "environment": {name: os.environ.get(name) for name in (*ranks.NO_MULTICAST, "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")},
        "topology": topology,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ranks.prepare()
    results = about(options, sys.argv[1:] if arguments is None else arguments) | {"runs": {}}
    for part in options.part.split(","):
        for name, (function, given) in RUNS[part].items():
            with tempfile.TemporaryDirectory(prefix="backhaul-two-") as place:
                found = run(function, given, options, Path(place))
            results["runs"][name] = found
            options.out.write_text(json.dumps(results, indent=1, default=str) + "\n")
            print_run(name, found)
    return 0 if all(is_good(found) for found in results["runs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
