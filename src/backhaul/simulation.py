"""Steps played against a clock instead of a device.

Covers: driving flow.py with a list of saves and needs and the compute time between them, and what that costs ([Note: Clock]).
Does not cover: where such a list comes from (profiling), or choosing a plan (planning.py).

[Note: Clock]
Compute is one queue and each direction of the link another. A copy starts when its turn comes and compute has reached the point of its
decision; compute waits where a release finds its copy unfinished, and where a need finds its reload unfinished. Nothing else costs time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backhaul.flow import Flow, Key, Link
from backhaul.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Save:
    """A blob is saved, after some compute."""

    frame: int
    key: Key
    num_bytes: int
    compute_ms: float = 0.0
    movable: bool = True


@dataclass(frozen=True, kw_only=True)
class Need:
    """A blob is needed; compute with it follows. After its last need it is dropped when the next event comes."""

    frame: int
    key: Key
    compute_ms: float = 0.0


Event = Save | Need


@dataclass(frozen=True, kw_only=True)
class Playback:
    """What it cost to play some events."""

    compute_ms: float
    stall_ms: float
    out_bytes: int
    in_bytes: int
    peak_resident_bytes: int  # after the decisions of each event
    timeline: Sequence[tuple[float, int]]  # (ms, resident bytes) by event

    @property
    def stall_fraction(self) -> float:
        """Time that compute waited for copies, as a fraction of its own time."""
        return self.stall_ms / self.compute_ms if self.compute_ms else 0.0


def simulate(flow: Flow, events: Iterable[Event], *, link: Link | None = None, timed: bool = True) -> Playback:
    """Play one or more steps and return what they cost; with ``timed``, flow is told the times of each as it ends, as an engine would.

    Args:
        flow: carries what it has learned from one call to the next.
        events: in the order in which the host issues them. ``compute_ms`` of a save passes before it, that of a need after it.
        link: the rates of the simulated link; by default what flow believes them to be.
        timed: whether the device's times are measured.
    """
    events = list(events)
    wire = Wire(link or flow.link)
    last = {(event.frame, event.key): position for position, event in enumerate(events)}
    num_left: dict[int, int] = {}  # by frame: blobs that are alive or to come
    for event in events:
        if isinstance(event, Save):
            num_left[event.frame] = num_left.get(event.frame, 0) + 1
    tokens: dict[tuple[int, Key], int] = {}
    sizes: list[int] = []
    opened: set[int] = set()
    ended: list[Event] = []
    times: list[float] = []
    waited: list[float] = []
    timeline: list[tuple[float, int]] = []

    def drop_ended() -> None:
        for event in ended:
            flow.dropped(tokens[event.frame, event.key])
            num_left[event.frame] -= 1
            if not num_left[event.frame]:
                flow.close_frame(event.frame)
                opened.remove(event.frame)
        ended.clear()
        if not opened and times:
            if timed:
                flow.times(times, waited)
            times.clear()
            waited.clear()

    for position, event in enumerate(events):
        if isinstance(event, Save):
            wire.advance(wire.now + event.compute_ms)
        drop_ended()
        if event.frame not in opened:
            opened.add(event.frame)
            flow.open_frame(event.frame)
        name = (event.frame, event.key)
        begin, num_events = wire.now, flow.num_events
        if isinstance(event, Save):
            tokens[name] = len(sizes)
            sizes.append(event.num_bytes)
            decisions = flow.saved(tokens[name], frame=event.frame, key=event.key, num_bytes=event.num_bytes, movable=event.movable)
        else:
            decisions = flow.needed(tokens[name])
        if flow.num_events > num_events:
            times.append(begin)
            waited.append(0.0)
        for decision in decisions:
            wire.play(decision, sizes[decision.blob])
        timeline.append((wire.now, flow.resident_bytes))
        if isinstance(event, Need):
            wire.wait_in(tokens[name])
        if waited:
            waited[-1] += wire.now - begin
        if flow.is_through:
            flow.refine()
        if isinstance(event, Need):
            wire.advance(wire.now + event.compute_ms)
        if last[name] == position:
            ended.append(event)
    drop_ended()
    compute_ms = sum(event.compute_ms for event in events)
    return Playback(
        compute_ms=compute_ms,
        stall_ms=wire.now - compute_ms,
        out_bytes=wire.bytes_out,
        in_bytes=wire.bytes_in,
        peak_resident_bytes=max((num_bytes for _, num_bytes in timeline), default=0),
        timeline=timeline,
    )
