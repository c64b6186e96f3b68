"""A device of streams and events that runs queued work in any order that the edges allow.

Covers: what lanes.py needs of a device. A missing edge shows as wrong bytes in some order, without a GPU.
Does not cover: time.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from backhaul.tiers import host, lanes


class Recorded:
    """One recording of an event."""

    def __init__(self) -> None:
        self.passed = False


class SimulatedEvent:
    """An event; waiting for it means its latest recording."""

    def __init__(self, device: "SimulatedDevice", *, timed: bool = True) -> None:
        self._device = device
        self.timed = timed
        self.recorded: Recorded | None = None

    def record(self, stream: "SimulatedStream") -> None:
        recorded = self.recorded = Recorded()
        stream.queue.append((None, lambda: setattr(recorded, "passed", True)))

    def query(self) -> bool:
        return self.recorded is None or self.recorded.passed

    def synchronize(self) -> None:
        self._device.run(until=self.query)

    def elapsed_time(self, other: "SimulatedEvent") -> float:
        assert self.timed and other.timed
        return 1.0


class SimulatedStream:
    """A queue of pairs: what to wait for, and what to do."""

    def __init__(self, device: "SimulatedDevice") -> None:
        self._device = device
        self.queue: list[tuple[Recorded | None, Callable[[], object]]] = []

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append((None, work))

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.recorded is not None:
            self.queue.append((event.recorded, lambda: None))

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._device)
        event.record(self)
        return event


class SimulatedDevice:
    """Stands in for the accelerator in lanes.py and host.py, where it takes the place of the CPU's tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.streams: list[SimulatedStream] = []
        self.compute = self.new_stream()
        monkeypatch.setattr(lanes, "streams_of", lambda device: self)
        monkeypatch.setattr(lanes, "_lanes", {})
        monkeypatch.setattr(lanes, "CHUNK_BYTES", 64)
        monkeypatch.setattr(host, "has_streams", lambda device: True)
        monkeypatch.setattr(host, "_memories", {})

    def new_event(self, *, timed: bool = True) -> SimulatedEvent:
        return SimulatedEvent(self, timed=timed)

    def current(self) -> SimulatedStream:
        return self.compute

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, stream: SimulatedStream, target: Tensor, source: Tensor, start: int, stop: int) -> None:
        stream.do(lambda: target[start:stop].copy_(source[start:stop]))

    @property
    def lanes(self) -> lanes.Lanes:
        return lanes.lanes_of(torch.device("cpu"))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do queued work in some order, until there is none or until something holds."""
        while not until():
            ready = [stream for stream in self.streams if stream.queue and (stream.queue[0][0] is None or stream.queue[0][0].passed)]
            if not ready:
                assert not any(stream.queue for stream in self.streams), "deadlock"
                return
            self._rng.choice(ready).queue.pop(0)[1]()

    def new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(self)
        self.streams.append(stream)
        return stream
