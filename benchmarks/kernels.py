"""Where the device's time goes: kernels by name beside those of the first variant, and what it idles for.

    python -m benchmarks.kernels W1 --microbatches 8 --variants plain,backhaul:28GB,plan:1000GB

Covers: one step of each variant under torch's profiler ([Note: Gaps]).
Does not cover: step times and memory (run.py), copies over time (timeline.py). Needs CUDA.

[Note: Gaps]
A gap is a stretch without a kernel. Where the host has read from the device within it, by a small copy as ``.item()`` makes, it is that
read's, and it counts apart whether a chunk of a large copy to the host was under way, for which the small one had to wait. A gap that
begins soon after a read is the host's, which has nothing queued at such a moment. So is any other.
"""

import argparse
import bisect
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL_BYTES, LARGE_BYTES = 1 << 16, 1 << 20
SOON_US = 400.0  # after a read
TINY_US = 20.0


@dataclass
class Usage:
    """One step's kernels and gaps; times in ms."""

    kernel_ms: Counter[str] = field(default_factory=Counter)
    num_kernels: Counter[str] = field(default_factory=Counter)
    gap_ms: Counter[str] = field(default_factory=Counter)
    num_gaps: Counter[str] = field(default_factory=Counter)
    busy_ms: float = 0.0
    span_ms: float = 0.0


def usage(events: Sequence[dict[str, Any]]) -> Usage:
    """Add up the events of a Chrome trace, whose times are in microseconds ([Note: Gaps])."""
    found = Usage()
    kernels = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == "kernel")
    to_host = [event for event in events if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]]
    copies = sorted((event["ts"], event["ts"] + event["dur"], event["args"].get("bytes", 0)) for event in to_host)
    reads = [(start, end) for start, end, num_bytes in copies if num_bytes < SMALL_BYTES]
    chunks = [(start, end) for start, end, num_bytes in copies if num_bytes >= LARGE_BYTES]
    if not kernels:
        return found
    until = kernels[0][0]
    for start, end, name in kernels:
        if start > until:
            kind = _whose(until, start, reads, chunks)
            found.gap_ms[kind] += (start - until) / 1e3
            found.num_gaps[kind] += 1
        found.busy_ms += max(0.0, end - max(start, until)) / 1e3
        until = max(until, end)
        name = shorten(name)
        found.kernel_ms[name] += (end - start) / 1e3
        found.num_kernels[name] += 1
    found.span_ms = (until - kernels[0][0]) / 1e3
    return found


def _whose(begin: float, end: float, reads: Sequence[tuple[float, float]], chunks: Sequence[tuple[float, float]]) -> str:
    inside = [start for start, _ in reads[bisect.bisect_left(reads, (begin, 0.0)) : bisect.bisect_left(reads, (end, 0.0))]]
    if inside:
        in_the_way = any(stop > begin and start < inside[-1] for start, stop in chunks)
        return "a read behind a chunk" if in_the_way else "a read"
    if end - begin < TINY_US:
        return "launches"
    before = bisect.bisect_left(reads, (begin, 0.0)) - 1
    return "the host, soon after a read" if before >= 0 and begin - reads[before][1] < SOON_US else "the host"


def shorten(name: str) -> str:
    """Leave out of a kernel's name what all have."""
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name[:90]


def compare(now: Usage, base: Usage, *, most: int = 15) -> str:
    """Return the kernels whose time differs most, a line each."""
    names = sorted({*now.kernel_ms, *base.kernel_ms}, key=lambda name: -abs(now.kernel_ms[name] - base.kernel_ms[name]))
    return "\n".join(
        f"  {now.kernel_ms[name] - base.kernel_ms[name]:+8.2f} ms {now.num_kernels[name] - base.num_kernels[name]:+6d}  "
        f"({base.kernel_ms[name]:.2f} ms in {base.num_kernels[name]})  {name}"
        for name in names[:most]
    )


def watch(workload: Any, variant: Any, *, warmup: int) -> Usage:
    """Run some steps, and then one under the profiler."""
    import torch

    from benchmarks.measure import synchronize, zero_grads
    from benchmarks.workloads.base import run_step

    for _ in range(warmup):
        zero_grads(workload)
        run_step(workload, variant)
    zero_grads(workload)
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_step(workload, variant)
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return usage(json.loads(path.read_text())["traceEvents"])


def run_variant(name: str, options: argparse.Namespace) -> Usage:
    """Make the model and the variant, look at them, and clear both away."""
    import torch

    from benchmarks import measure, variants

    measure.clean_up()
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = {"size": "full", "tokens": options.tokens, "microbatches": options.microbatches}
    with variants.attached(name, options.workload, device=device, **sizes) as (workload, variant):
        return watch(workload, variant, warmup=options.warmup)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Say where the device's time goes.")
    parser.add_argument("workload")
    parser.add_argument("--variants", default="plain,backhaul")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--warmup", type=int, default=8)
    options = parser.parse_args(arguments)
    from benchmarks.run import prepare

    prepare(argparse.Namespace(deterministic=False))
    import torch

    if not torch.cuda.is_available():
        parser.error("it reads CUDA's own account of kernels, and there is no such device")
    base: Usage | None = None
    for name in options.variants.split(","):
        found = run_variant(name, options)
        gaps = ", ".join(f"{ms:.1f} for {kind} ({found.num_gaps[kind]})" for kind, ms in found.gap_ms.most_common())
        print(f"{name}: {found.span_ms:.1f} ms, of which kernels {found.busy_ms:.1f}; idle: {gaps}", flush=True)
        if base is None:
            base = found
        else:
            print(compare(found, base), flush=True)


if __name__ == "__main__":
    main()
