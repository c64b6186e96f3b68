"""The record of a step, and its pace.

Covers: which blobs were saved and needed in which order, and the compute time in between.
Does not cover: expecting a step again (course.py), or finding a better schedule for it (scheduling.py).
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

Key = Hashable  # names a blob from step to step, within its frame: (fqn, call, pack)

MOST_READS = 0.2  # of the events of a step that can be reads of the host
JITTER = 1.03  # what the compute of a step may take more than the sum of its typical gaps


@dataclass
class Step:
    """One step as it happened: the order of its events, and what is known of their times.

    An *item* is a movable blob by its place in the order of saving, so that it means the same in every step. An event is the item that was
    saved, or ``~item`` for one that was needed.
    """

    events: list[int] = field(default_factory=list)
    names: list[tuple[int, Key]] = field(default_factory=list)  # by item: ordinal of the frame in the step, key in the frame
    sizes: list[int] = field(default_factory=list)  # by item: bytes
    drops: list[int] = field(default_factory=list)  # by item: the event before which it was dropped
    fixed: list[int] = field(default_factory=list)  # by event: resident bytes that cannot move

    def index(self) -> tuple[list[int], list[list[int]]]:
        """Return by item the event that saved it, and the events that needed it."""
        saves: list[int] = []
        needs: list[list[int]] = [[] for _ in self.names]
        for position, event in enumerate(self.events):
            if event >= 0:
                saves.append(position)
            else:
                needs[~event].append(position)
        return saves, needs


class Pace:
    """The compute time between the events of a step, from the times of steps that waited for copies as well."""

    def __init__(self) -> None:
        self.gaps: list[float] = []  # by event: ms of compute until the next; empty while nothing was measured
        self.reads: list[int] = []  # events just before which the host read from the device
        self.host_is_ahead = True  # so that the device need not wait while it issues copies
        self._seen: deque[list[float]] = deque(maxlen=4)  # the same of the latest steps
        self._idle: deque[frozenset[int]] = deque(maxlen=3)  # the latest steps: events at which the device had done all before
        self._num_seen = 0

    def only(self, positions: Sequence[int]) -> "Pace":
        """Return the pace of these events; what passed between the others passes between them."""

        def sums(gaps: Sequence[float]) -> list[float]:
            ends = (*positions[1:], len(gaps))
            return [sum(gaps[begin:end]) for begin, end in zip(positions, ends, strict=True)]

        index = {position: place for place, position in enumerate(positions)}
        found = Pace()
        found.gaps = sums(self.gaps) if self.gaps else []
        found.reads = [index[position] for position in self.reads if position in index]
        found._seen.extend(map(sums, self._seen))
        found._idle.extend(frozenset(index[each] for each in idle if each in index) for idle in self._idle)
        found._num_seen = self._num_seen
        found.host_is_ahead = self.host_is_ahead
        return found

    def measure(self, ms: Sequence[float], waited: Sequence[float], idle: Iterable[int] = ()) -> None:
        """Take the times at which the device reached each event, what it then waited for our copies, and the events that found it idle."""
        self._num_seen += 1
        if self._num_seen == 2:  # the first step loads kernels, tries them and grows memory: it is like no other
            self._seen.clear()
            self._idle.clear()
        self._idle.append(frozenset(idle))
        # More of them, and the host is too slow to keep the device busy: there is no moment to keep clear.
        always = sorted(frozenset.intersection(*self._idle))
        self.host_is_ahead = len(always) <= MOST_READS * len(ms)
        self.reads = always if self.host_is_ahead else []
        ends = (*ms[1:], ms[-1])
        self._seen.append([max(0.0, end - begin - stall) for begin, end, stall in zip(ms, ends, waited, strict=True)])
        middle = (len(self._seen) - 1) // 2
        typical = [sorted(each)[middle] for each in zip(*self._seen, strict=True)]
        # Where gaps jitter, what is typical of each is too little in sum.
        scale = min(JITTER, min(map(sum, self._seen)) / (sum(typical) or 1.0))
        self.gaps = [gap * max(1.0, scale) for gap in typical]
