"""Memory, time and gradients of a workload's steps.

Covers: what one row of the table holds ([Note: What is counted]), and the comparison of gradients without a second copy on the device.
Does not cover: what happens within a step (timeline.py), or how rows are printed (run.py).

[Note: What is counted]
A step is every slot of the schedule; gradients are zeroed in place between steps, so they are there before a step as after it. Peaks are
those of the timed steps alone. Activations at peak are the peak less what was allocated just before the timed steps. Pinned bytes are the
blocks that torch's host allocator holds, with its rounding, and what a library has page-locked by itself. Resident bytes are what the
process has grown by since before the variant's model was made.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from backhaul._torch import empty_host_cache
from benchmarks.variants import Variant
from benchmarks.workloads.base import Workload, run_step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Gradients beside those of another run. ``worst`` is the largest difference, as a share of that parameter's largest gradient."""

    equal: bool
    worst: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. What could not be measured is ``None``; ``note`` says why there are no figures at all."""

    variant: str
    note: str = ""
    step_ms: float | None = None  # the median
    steps_ms: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    waited_ms: float | None = None  # for copies in a timed step, by the library's own account, on average
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    activation_bytes: int | None = None
    before_bytes: int | None = None
    pinned_bytes: int | None = None
    resident_bytes: int | None = None
    to_itself: Comparison | None = None  # the last step's gradients beside the step's before it
    to_plain: Comparison | None = None
    stats: Mapping[str, object] = field(default_factory=dict)
    explained: str = ""


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def zero_grads(workload: Workload) -> None:
    """Set every gradient to zero in place; make it where there is none."""
    for parameter in workload.chunks.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def local_grads(workload: Workload) -> list[Tensor]:
    grads = [parameter.grad for parameter in workload.chunks.parameters()]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def host_copies(workload: Workload) -> list[Tensor]:
    """Copy the gradients to pageable host memory."""
    return [grad.to("cpu", copy=True) for grad in local_grads(workload)]


def compare(workload: Workload, reference: Sequence[Tensor]) -> Comparison:
    """Compare the gradients with host copies, one parameter at a time."""
    worst, equal = 0.0, True
    for grad, other in zip(local_grads(workload), reference, strict=True):
        other = other.to(grad.device)
        if not torch.equal(grad, other):
            equal = False
            scale = other.abs().max().float().clamp(min=1e-30)
            worst = max(worst, ((grad - other).abs().max().float() / scale).item())
    return Comparison(equal=equal, worst=worst)


def clean_up() -> None:
    """Give all cached memory back, on the device and on the host."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        empty_host_cache()


def tokens_per_step(workload: Workload) -> int | None:
    """Return how many tokens one step trains on, of a workload that names its sizes."""
    tokens, microbatches = workload.facts.get("tokens"), workload.facts.get("microbatches", 1)
    return None if tokens is None else tokens * microbatches


def pinned_by_torch() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def measure(
    workload: Workload, variant: Variant, name: str, *, steps: int, warmup: int, plain: Sequence[Tensor] | None, resident_before: int
) -> Row:
    """Run ``warmup + steps`` steps of an attached variant; leave the last step's gradients where they are.

    ``plain`` are the plain run's gradients; ``resident_before`` is the process's size before anything of this variant was there.
    """
    on_device = torch.accelerator.is_available()
    previous: list[Tensor] = []
    for step in range(warmup):
        zero_grads(workload)
        run_step(workload, variant)
        if step == warmup - 1:
            previous = host_copies(workload)
    zero_grads(workload)
    gc.collect()
    synchronize()
    before = torch.accelerator.memory_allocated() if on_device else None
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
    times, waited = [], variant.waited_ms()
    for _ in range(steps):
        zero_grads(workload)
        synchronize()
        start = time.perf_counter()
        run_step(workload, variant)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak_allocated = torch.accelerator.max_memory_allocated() if on_device else None
    peak_reserved = torch.accelerator.max_memory_reserved() if on_device else None
    step_ms, tokens = statistics.median(times), tokens_per_step(workload)
    resident = psutil.Process().memory_info().rss - resident_before - sum(grad.nbytes for grad in previous)
    return Row(
        variant=name,
        step_ms=step_ms,
        steps_ms=tuple(times),
        tokens_per_s=None if tokens is None else tokens / step_ms * 1e3,
        waited_ms=None if waited is None else ((variant.waited_ms() or 0.0) - waited) / steps,
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        activation_bytes=None if peak_allocated is None or before is None else peak_allocated - before,
        before_bytes=before,
        pinned_bytes=pinned_by_torch() + variant.pinned_bytes() if on_device else None,
        resident_bytes=resident,
        to_itself=compare(workload, previous) if previous else None,
        to_plain=compare(workload, plain) if plain is not None else None,
        stats=variant.stats(),
        explained=variant.explain(),
    )
