"""Where the host's time goes: how long it takes to issue a forward and a backward, and in which functions.

    python -m benchmarks.host W4 --variants plain,backhaul,lean:8.3GB
    python -m benchmarks.host W4 --size tiny --device cpu --variants plain,lean

Covers: time on the host without waiting for the device, variant by variant, and one more step under Python's profiler.
Does not cover: what the device does meanwhile (kernels.py). A host that has to wait for the device, as at a router's read, counts as busy.
On a CPU the host does the kernels' work, too. Calls cost more under the profiler than without it: compare its figures among each other. It
sees one thread, so not what hooks do in the backward pass of a device, which has a thread of its own.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Medians over the slots of some steps; ms."""

    variant: str
    forward_ms: float
    backward_ms: float
    profile: str  # functions by the time spent in them, as a table

    def line(self, base: "HostTime | None") -> str:
        """Return the times, beside those of another variant."""
        forward, backward = (0.0, 0.0) if base is None else (base.forward_ms, base.backward_ms)
        more = "" if base is None else f"   {self.forward_ms - forward:+9.2f} {self.backward_ms - backward:+9.2f}"
        return f"{self.variant:<20} forward {self.forward_ms:9.2f} ms   backward {self.backward_ms:9.2f} ms{more}"


def time_host(workload: Any, variant: Any, name: str, *, warmup: int, steps: int, most: int) -> HostTime:
    """Run a workload's steps and time each of its slots on the host, then profile one more step."""
    from benchmarks.measure import synchronize, zero_grads
    from benchmarks.workloads.base import run_step

    times: dict[str, list[float]] = {"forward": [], "backward": []}
    mark: list[tuple[str, float]] = []

    def note(slot: Any) -> None:
        now = time.perf_counter()
        if mark:
            kind, began = mark.pop()
            times[kind].append((now - began) * 1e3)
        if slot is not None:
            mark.append((slot.kind, now))

    def step(before: Callable[[Any], None]) -> None:
        zero_grads(workload)
        synchronize()
        run_step(workload, variant, before=before)

    for _ in range(warmup):
        step(lambda slot: None)
    for _ in range(steps):
        step(note)
        note(None)
    synchronize()
    profiler = cProfile.Profile()
    zero_grads(workload)
    synchronize()
    profiler.enable()
    try:
        run_step(workload, variant)
    finally:
        profiler.disable()
    synchronize()
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    table = table_of(profiler, most)
    return HostTime(variant=name, forward_ms=medians["forward"], backward_ms=medians["backward"], profile=table)


def table_of(profiler: cProfile.Profile, most: int) -> str:
    """Return the functions in which most time was spent, with their calls, and that time for each call."""
    entries: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # typeshed does not know it
    rows = sorted(entries.items(), key=lambda entry: -entry[1][2])[:most]
    lines = []
    for (path, _, function), (_, calls, own_s, all_s, _) in rows:
        place = "/".join(path.split("/")[-2:])
        times = f"{own_s * 1e3:8.2f} ms in {calls:6d} calls, {own_s / calls * 1e6:7.1f} us each; {all_s * 1e3:8.2f} with all they call"
        lines.append(f"  {times}  {place} {function}")
    return "\n".join(lines)


def run_variant(name: str, options: argparse.Namespace) -> HostTime:
    """Make the model and the variant, look at them, and clear both away."""
    import torch

    from benchmarks import measure, variants

    measure.clean_up()
    device = torch.device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    sizes = {"size": options.size, "tokens": options.tokens, "microbatches": options.microbatches}
    with variants.attached(name, options.workload, device=device, **sizes) as (workload, variant):
        return time_host(workload, variant, name, warmup=options.warmup, steps=options.steps, most=options.most)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="Say where the host's time goes.")
    parser.add_argument("workload")
    parser.add_argument("--variants", default="plain,backhaul")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--most", type=int, default=25, help="functions to list for each variant")
    options = parser.parse_args(arguments)
    from benchmarks.run import prepare

    prepare(argparse.Namespace(deterministic=False))
    base: HostTime | None = None
    for name in options.variants.split(","):
        found = run_variant(name, options)
        print(found.line(base), flush=True)
        print(found.profile, flush=True)
        base = base or found


if __name__ == "__main__":
    main()
