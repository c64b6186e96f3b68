"""Run one workload under several variants, and print what each costs.

    python -m benchmarks.run W1 --variants plain,checkpoint,selective,backhaul:12GiB,megatron,trl,save_on_cpu
    python -m benchmarks.run W2 --tokens 32768 --variants plain,backhaul:0,trl --json results.json --picture results.png

Covers: the command line, the order of things, the table and the JSON.
Does not cover: workloads, variants or what is measured; see the modules of these names.

The variants run one after the other in one process, each on a model made afresh from the same seed, with all caches emptied in between.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.measure import Comparison, Row
    from benchmarks.timeline import Timeline


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Run one workload under several variants.")
    parser.add_argument("workload", help="W1, W1s, W1v, W2, W2c, W2f, W3 or W4")
    parser.add_argument(
        "--variants",
        default="plain,backhaul",
        help="with commas between: plain, checkpoint, selective, memory_budget:0.5, save_on_cpu, trl, megatron; and of this library "
        "backhaul, plan, lean and tight, each with a budget (backhaul:12GiB) or without",
    )
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny runs on a CPU in seconds")
    parser.add_argument("--device", help="the accelerator, or else the CPU, if not given")
    parser.add_argument("--tokens", type=int, help="tokens a microbatch")
    parser.add_argument("--microbatches", type=int, help="microbatches a step (W1, W1s, W1v)")
    parser.add_argument(
        "--pipelined", nargs="?", const="", metavar="SCHEDULE", help="as torch.distributed.pipelining drives it (W1, W1s, W1v)"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--settle", type=int, default=5, help="more warm-up steps for this library, which plans by the steps before")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels, so that plain equals itself")
    parser.add_argument("--profile", action="store_true", help="watch one more step of each variant; list where compute waited")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="watch one more step of each variant; draw memory and lanes over time")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> None:
    """Set what torch and its libraries read when they start."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels for a while, without their filling of fresh memory, which is a debugging aid and costs time."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1] and not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@dataclasses.dataclass
class Outcome:
    """Everything that one run of the program found."""

    rows: list["Row"] = dataclasses.field(default_factory=list)
    timelines: list["Timeline"] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the results should say about the circumstances
    plain: list["Tensor"] | None = None  # the plain run's gradients, on the host

    @property
    def plain_ms(self) -> float | None:
        """The plain step's time."""
        return next((row.step_ms for row in self.rows if row.variant == "plain"), None)


def run_variant(name: str, options: argparse.Namespace, outcome: Outcome) -> "Row":
    """Make the model, attach the variant, measure it, and clear both away. Raise what goes wrong."""
    import psutil
    import torch

    from benchmarks import measure, timeline, variants
    from benchmarks.pipelined import Pipelined

    measure.clean_up()
    resident = psutil.Process().memory_info().rss
    device = torch.device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    sizes = {"size": options.size, "tokens": options.tokens, "microbatches": options.microbatches}
    driven = None if options.pipelined is None else partial(Pipelined, schedule=options.pipelined)
    with variants.attached(name, options.workload, device=device, driven=driven, **sizes) as (workload, variant):
        outcome.facts |= workload.facts | {"device": describe(device), name: variants.package_version(variant)}
        counts = {"steps": options.steps, "warmup": options.warmup + (options.settle if variant.settles else 0)}
        row = measure.measure(workload, variant, name, plain=outcome.plain, resident_before=resident, **counts)
        if name == "plain":
            outcome.plain = measure.host_copies(workload)
        if options.profile or options.picture:
            outcome.timelines.append(timeline.watch(workload, variant, name))
    return row


def run(options: argparse.Namespace) -> Outcome:
    """Run every variant. One that cannot run, or fails, is a row too: the others still run."""
    import torch

    from benchmarks import measure, variants

    outcome = Outcome()
    for name in options.variants.split(","):
        try:
            row = run_variant(name, options, outcome)
        except variants.DoesNotApplyError as error:
            row = measure.Row(variant=name, note=str(error))
        except torch.OutOfMemoryError:
            row = measure.Row(variant=name, note="out of device memory")
        except Exception as error:
            traceback.print_exc()
            row = measure.Row(variant=name, note=f"failed: {error}".splitlines()[0][:100])
        outcome.rows.append(row)
        print(format_row(row, outcome.plain_ms), flush=True)
        if options.json:
            options.json.write_text(json.dumps(as_json(outcome, options), indent=1, default=str) + "\n")
    return outcome


def describe(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type


COLUMNS = (
    "variant",
    "step ms",
    "vs plain",
    "tokens/s",
    "waited",
    "activations",
    "allocated",
    "reserved",
    "pinned",
    "resident",
    "grads vs plain",
    "vs itself",
)
WIDTHS = (18, 10, 9, 10, 8, 12, 10, 10, 9, 9, 15, 15)


def line(cells: Sequence[str]) -> str:
    return " ".join([cells[0].ljust(WIDTHS[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], WIDTHS[1:], strict=True))])


def format_row(row: "Row", plain_ms: float | None) -> str:
    """Format one row; sizes are in GB (1e9 bytes)."""
    if row.note:
        return f"{row.variant.ljust(WIDTHS[0])} {row.note}"

    def size(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e9:.2f}"

    def compared(value: "Comparison | None") -> str:
        return "-" if value is None else "bit-equal" if value.equal else f"differ {value.worst:.1e}"

    against = "-" if plain_ms is None else f"{row.step_ms / plain_ms - 1:+.1%}"
    tokens = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
    waited = "-" if row.waited_ms is None else f"{row.waited_ms:.1f}"
    sizes = (row.activation_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes, row.pinned_bytes, row.resident_bytes)
    return line(
        [row.variant, f"{row.step_ms:.1f}", against, tokens, waited, *map(size, sizes), compared(row.to_plain), compared(row.to_itself)]
    )


def as_json(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        "workload": options.workload,
        "command": "python -m benchmarks.run " + " ".join(options.command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deterministic": options.deterministic,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        **outcome.facts,
        "rows": [dataclasses.asdict(row) for row in outcome.rows],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.command = list(sys.argv[1:] if arguments is None else arguments)
    prepare(options)
    from benchmarks.timeline import summarise

    print(line(COLUMNS), flush=True)
    with determinism(options.deterministic):
        outcome = run(options)
    if options.profile:
        print(*(summarise(watched) for watched in outcome.timelines), sep="\n")
        print(*(f"{row.variant} says:\n{row.explained}" for row in outcome.rows if row.explained), sep="\n")
    if options.picture and outcome.timelines:
        from benchmarks.picture import draw

        draw(outcome.timelines, options.picture, title=f"{options.workload} on {outcome.facts['device']}")


if __name__ == "__main__":
    main()
