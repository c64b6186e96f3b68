"""When the device reached a point, told without waiting for it.

Covers: stamps of a compute stream or of the host, and their differences once they are known; time that compute spent waiting.
Does not cover: what the times are used for (flow.py, reporting.py).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from backhaul.tiers.base import Transfer
from backhaul.tiers.streams import Event, streams_of

MOST_WAITS = 1 << 20  # of a step that never ends


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


@dataclass
class Marks:
    """The stamps of one step."""

    stamps: list[Any] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)  # marks before which the work had come to the mark before
    waits: list[tuple[int, Any, Any]] = field(default_factory=list)  # (the mark before, begin, end)


class Timeline:
    """The stamps of the step at hand, and those of the one before until they have been told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_watched = True  # whether the step at hand is stamped
        self._marks, self._ended = Marks(), Marks()

    @property
    def num_marks(self) -> int:
        """Marks of the step at hand."""
        return len(self._marks.stamps)

    def mark(self) -> None:
        """Stamp this point."""
        marks = self._marks
        if marks.stamps and self.clock.reached(marks.stamps[-1]):
            marks.idle.append(len(marks.stamps))
        marks.stamps.append(self.clock.stamp())

    def waited(self, begin: Any, end: Any) -> None:
        """Note two stamps between which compute waited, both after the latest mark."""
        if self._marks.stamps and len(self._marks.waits) < MOST_WAITS:
            self._marks.waits.append((self.num_marks - 1, begin, end))

    def end_step(self, *, learned: bool) -> None:
        """Keep the stamps to be told, if the step is one to learn from."""
        self._ended = self._marks if learned else Marks()
        self._marks = Marks()

    def finished(self) -> tuple[Sequence[float], Sequence[float], Sequence[int]] | None:
        """Return, once, the milliseconds from the first mark of the last step to each of its marks, if all have been reached.

        With them come, for each mark, the milliseconds after it that compute waited, and the marks at which the device was idle: it had
        done all that it had been given before.
        """
        marks, between_ms = self._ended, self.clock.between_ms
        if not marks.stamps or not self.clock.reached(marks.stamps[-1]) or not all(self.clock.reached(end) for _, _, end in marks.waits):
            return None
        self._ended = Marks()
        waited = [0.0] * len(marks.stamps)
        for place, begin, end in marks.waits:
            waited[place] += between_ms(begin, end)
        return [between_ms(marks.stamps[0], stamp) for stamp in marks.stamps], waited, marks.idle


class Waits:
    """The time that compute waited for copies."""

    def __init__(self, clock: Clock, timeline: Timeline) -> None:
        self.clock = clock
        self.timeline = timeline
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
            end = self.clock.stamp()
            self._open.append((begin, end))
            self.timeline.waited(begin, end)
            self._add_up()

    @property
    def total_ms(self) -> float:
        self._add_up()
        return self._total_ms

    def _add_up(self) -> None:
        while self._open and self.clock.reached(self._open[0][1]):
            self._total_ms += self.clock.between_ms(*self._open.popleft())
