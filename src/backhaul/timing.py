"""When the device reached a point, told without waiting for it.

Covers: stamps of a compute stream or of the host, and their differences once they are known; time that compute spent waiting.
Does not cover: what the times are used for (flow.py, reporting.py).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from backhaul.tiers.base import Transfer


class Clock(Protocol):
    """Stamps points in the order of the work."""

    def stamp(self) -> Any:
        """Return a stamp of the point that has just been issued."""
        ...

    def reached(self, stamp: Any) -> bool:
        """Say, without waiting, whether the work has come to ``stamp``."""
        ...

    def between_ms(self, begin: Any, end: Any) -> float:
        """Return the time from ``begin`` to ``end``, both reached."""
        ...


class HostClock:
    """The clock of a device that works as it is told: the host itself."""

    def stamp(self) -> float:
        return time.perf_counter() * 1e3

    def reached(self, stamp: float) -> bool:
        return True

    def between_ms(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """The clock of a device with streams: timed events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stamp(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def reached(self, stamp: torch.Event) -> bool:
        return stamp.query()

    def between_ms(self, begin: torch.Event, end: torch.Event) -> float:
        return float(begin.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    """Return the clock that fits ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Timeline:
    """The stamps of the step at hand, and those of the one before until they have been told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stamps: list[Any] = []
        self._ended: list[Any] = []

    def mark(self) -> None:
        self.stamps.append(self.clock.stamp())

    def end_step(self, *, learned: bool) -> None:
        """Keep the stamps to be told, if the step is one to learn from."""
        self._ended, self.stamps = self.stamps if learned else [], []

    def finished(self) -> Sequence[float] | None:
        """Return, once, the milliseconds from the first mark of the last step to each of its marks, if all have been reached."""
        stamps = self._ended
        if not stamps or not self.clock.reached(stamps[-1]):
            return None
        self._ended = []
        return [self.clock.between_ms(stamps[0], stamp) for stamp in stamps]


class Waits:
    """The time that compute waited for copies."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._open: deque[tuple[Any, Any]] = deque()
        self._total_ms = 0.0

    def measure(self, copy: Transfer, wait: Callable[[], None]) -> None:
        """Call ``wait``, one of the ways to wait for ``copy``, and note how long it kept what follows."""
        if copy.done():  # nothing to measure, which would take longer than to wait
            wait()
            return
        begin = self.clock.stamp()
        try:
            wait()
        finally:
            self._open.append((begin, self.clock.stamp()))

    @property
    def total_ms(self) -> float:
        while self._open and self.clock.reached(self._open[0][1]):
            self._total_ms += self.clock.between_ms(*self._open.popleft())
        return self._total_ms
