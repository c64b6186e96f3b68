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
from backhaul.tiers.streams import Event, streams_of


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
        self.streams = streams_of(device)

    def stamp(self) -> Event:
        event = self.streams.new_event()
        event.record(self.streams.current())
        return event

    def reached(self, stamp: Event) -> bool:
        return stamp.query()

    def between_ms(self, begin: Event, end: Event) -> float:
        return begin.elapsed_time(end)


def clock_of(device: torch.device) -> Clock:
    """Return the clock that fits ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Timeline:
    """The stamps of the step at hand, and those of the one before until they have been told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_watched = True  # whether the step at hand is stamped
        self.stamps: list[Any] = []
        self.idle: list[int] = []  # marks before which the work had come to the mark before
        self._ended: tuple[list[Any], list[int]] = ([], [])

    def mark(self) -> None:
        stamps = self.stamps
        if stamps and self.clock.reached(stamps[-1]):
            self.idle.append(len(stamps))
        stamps.append(self.clock.stamp())

    def end_step(self, *, learned: bool) -> None:
        """Keep the stamps to be told, if the step is one to learn from."""
        self._ended = (self.stamps, self.idle) if learned else ([], [])
        self.stamps, self.idle = [], []

    def finished(self) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return, once, the milliseconds from the first mark of the last step to each of its marks, if all have been reached.

        With them come the marks at which the device was idle: it had done all that it had been given before.
        """
        stamps, idle = self._ended
        if not stamps or not self.clock.reached(stamps[-1]):
            return None
        self._ended = ([], [])
        return [self.clock.between_ms(stamps[0], stamp) for stamp in stamps], idle


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
