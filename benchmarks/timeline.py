"""One step watched closely: memory and copies over time, and where compute waited.

Covers: device times of every slot, allocated bytes, each large copy on either lane, and the gaps between kernels ([Note: Waits]).
Does not cover: whole-step figures (measure.py), or drawing (picture.py).

[Note: Waits]
Kernels and copies come from torch's profiler, so every variant is judged by the same clock and nobody by their own account. A wait is a
stretch of at least ``MIN_WAIT_MS`` in which no kernel ran. Where a large copy ended just before the next kernel began, the wait is that
copy's; otherwise it is the host's.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.measure import synchronize, zero_grads
from benchmarks.variants import Variant
from benchmarks.workloads.base import Slot, Workload, run_step

MIN_WAIT_MS = 0.1
LARGE_BYTES = 1 << 20  # smaller copies are the model's own
SLACK_MS = 0.05  # between the end of a copy and the kernel that waited for it


@dataclass(frozen=True, kw_only=True)
class SlotSpan:
    """When one slot of the schedule ran, and how much memory was allocated."""

    name: str
    kind: str
    start_ms: float
    end_ms: float
    allocated_bytes: int  # when the slot began
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One large copy over the link."""

    direction: Literal["d2h", "h2d"]
    start_ms: float
    end_ms: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A gap between kernels ([Note: Waits])."""

    start_ms: float
    end_ms: float
    slot: str
    copy: Copy | None  # None: the host's

    def __str__(self) -> str:
        whose = f"{self.copy.direction} of {self.copy.num_bytes / 2**20:.0f} MiB" if self.copy else "the host"
        return f"{self.slot:>6} at {self.start_ms:9.2f} ms: {self.end_ms - self.start_ms:7.2f} ms for {whose}"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One watched step of one variant."""

    variant: str
    slots: tuple[SlotSpan, ...]
    copies: tuple[Copy, ...]
    waits: tuple[Wait, ...]


class Watch:
    """The ``before`` of a watched step: notes when each slot began, on the device's own clock where it has one, and what was allocated."""

    def __init__(self) -> None:
        self.on_device = torch.accelerator.is_available()
        self.marks: list[Any] = []
        self.bytes: list[tuple[int, int]] = []

    def __call__(self, slot: Slot | None) -> None:
        """Note the start of ``slot``, or with ``None`` the end of the step."""
        if self.on_device:
            event = torch.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
            self.bytes.append((torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()))
            torch.accelerator.reset_peak_memory_stats()
        else:
            self.marks.append(time.perf_counter() * 1e3)
            self.bytes.append((0, 0))

    def spans(self, slots: Sequence[Slot]) -> tuple[SlotSpan, ...]:
        """Return what was noted; the device must have finished."""
        first = self.marks[0]
        times = [first.elapsed_time(mark) if self.on_device else mark - first for mark in self.marks]
        return tuple(
            SlotSpan(
                name=str(slot),
                kind=slot.kind,
                start_ms=times[index],
                end_ms=times[index + 1],
                allocated_bytes=self.bytes[index][0],
                peak_bytes=self.bytes[index + 1][1],
            )
            for index, slot in enumerate(slots)
        )


def watch(workload: Workload, variant: Variant, name: str) -> Timeline:
    """Run one more step under the profiler."""
    zero_grads(workload)
    synchronize()
    note = Watch()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if torch.cuda.is_available() else nullcontext()
    with profiler as profile:
        run_step(workload, variant, before=note)
        note(None)
        synchronize()
    spans = note.spans(workload.slots)
    events: list[dict[str, Any]] = []
    if profile is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
    kernels, copies = read_trace(events)
    return Timeline(variant=name, slots=spans, copies=copies, waits=find_waits(kernels, copies, spans))


def read_trace(events: Sequence[dict[str, Any]]) -> tuple[list[tuple[float, float]], tuple[Copy, ...]]:
    """Return when kernels ran and what was copied, in ms since the first kernel, from the events of a Chrome trace (microseconds)."""
    kernels = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel")
    if not kernels:
        return [], ()
    zero = kernels[0][0]
    copies = []
    for event in events:
        if event.get("cat") == "gpu_memcpy" and event["args"].get("bytes", 0) >= LARGE_BYTES:
            direction: Literal["d2h", "h2d"] | None = "d2h" if "DtoH" in event["name"] else "h2d" if "HtoD" in event["name"] else None
            if direction:
                start = (event["ts"] - zero) / 1e3
                copies.append(
                    Copy(direction=direction, start_ms=start, end_ms=start + event["dur"] / 1e3, num_bytes=event["args"]["bytes"])
                )
    copies.sort(key=lambda copy: copy.start_ms)
    return [((start - zero) / 1e3, (end - zero) / 1e3) for start, end in kernels], tuple(copies)


def find_waits(kernels: Sequence[tuple[float, float]], copies: Sequence[Copy], slots: Sequence[SlotSpan]) -> tuple[Wait, ...]:
    """Return the gaps between kernels, in order of time ([Note: Waits])."""
    waits = []
    busy_until = 0.0
    for start, end in kernels:
        if start - busy_until >= MIN_WAIT_MS:
            ended = [copy for copy in copies if max(busy_until, start - SLACK_MS) < copy.end_ms <= start + SLACK_MS]
            slot = next((span.name for span in reversed(slots) if span.start_ms <= start), "")
            last = max(ended, key=lambda copy: copy.end_ms, default=None)
            waits.append(Wait(start_ms=busy_until, end_ms=start, slot=slot, copy=last))
        busy_until = max(busy_until, end)
    return tuple(waits)


def summarise(timeline: Timeline, *, most: int = 20) -> str:
    """Say where compute waited: sums for each cause, then the longest waits."""
    causes = {"d2h": 0.0, "h2d": 0.0, "the host": 0.0}
    for wait in timeline.waits:
        causes[wait.copy.direction if wait.copy else "the host"] += wait.end_ms - wait.start_ms
    lines = [f"{timeline.variant}: compute waited " + ", ".join(f"{ms:.1f} ms for {cause}" for cause, ms in causes.items())]
    longest = sorted(timeline.waits, key=lambda wait: wait.start_ms - wait.end_ms)[:most]
    return "\n".join(lines + [f"  {wait}" for wait in longest])
