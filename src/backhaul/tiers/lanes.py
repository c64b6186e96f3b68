"""Copy streams: one lane for each device and direction in the process.

Covers: how a copy is cut and queued ([Note: Alternating streams]), what it waits for ([Note: Copy edges]), who keeps its ends alive.
Does not cover: what is copied and when (flow.py, engine.py), or where host memory comes from (host.py).

[Note: Alternating streams]
A copy engine serves one stream until that stream's queue is empty, whatever the priorities: an ``.item()`` behind 2 GiB of queued copies
waited 38 ms on an H200. So a lane cuts copies into chunks of 32 MiB that alternate between two streams, and each chunk waits for the one
before. The engine then looks up after every chunk: 0.3 ms, at 54.8 of 55.2 GB/s. Smaller chunks, priorities and more streams without that
order do not help (docs/log.md). So all copies of a lane run in one total order, which ``LaneTransfer.number`` names.

[Note: Copy edges]
Nothing waits on the host. Each edge is one function below, and a test takes each of them away and sees wrong bytes.
* ``_wait_producer``: the first chunk waits for all that the caller's current stream holds. For a store that is the kernel which wrote the
  source; for a load, whatever still used the target's memory before it was handed out.
* ``_wait_previous_chunk``: every chunk waits for the one before, also across copies.
* ``_wait_block``: a store into reused host memory waits for the last load that read it (arena.py, [Note: Stream-ordered reuse]).
* ``_wait_store``: a load waits for the store that filled its slot.
* ``_wait_copy``: what follows ``wait`` or ``order`` on the current stream waits for the copy.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul.tiers.base import Transfer
from backhaul.tiers.streams import Event, Stream, Streams, streams_of

CHUNK_BYTES = 32 * 2**20
_LARGE_BYTES = 16 * 2**20  # smaller copies say little about the rate
_LATEST = 512  # large copies that the rate is told from,
_BESIDE = 0.9  # of which so many may have run beside traffic the other way, which takes a tenth of the rate


class LaneTransfer(Transfer):
    """A copy on a lane. Both ends stay alive until its event has passed, or until somebody has waited for it."""

    __slots__ = ("_begun", "_ended", "_ends", "_streams", "num_bytes", "number")

    def __init__(self, number: int, target: Tensor, source: Tensor, streams: Streams) -> None:
        self.number = number  # copies of a lane run in the order of their numbers
        self.num_bytes = 0  # queued
        self._ends: tuple[Tensor, Tensor] | None = (target, source)
        self._streams = streams
        self._begun = streams.new_event()
        self._ended = streams.new_event()

    def wait(self) -> None:
        """Make the current stream wait, and let go of both ends.

        Their memory may be used again at once by whatever is ordered after the current stream. Where it belongs to the pool of another
        stream, use ``order``.
        """
        self.order()
        self._ends = None

    def order(self) -> None:
        """Make the current stream wait, while the lane keeps both ends until the copy has ended."""
        _wait_copy(self._streams.current(), self._ended)

    def synchronize(self) -> None:
        """Block the host until the copy has ended."""
        self._ended.synchronize()

    def done(self) -> bool:
        """Say, without waiting, whether the copy has ended."""
        return self._ended.query()

    def elapsed_ms(self) -> float:
        """Return how long the copy took on the device, once it has ended; time spent waiting for its edges is not part of it."""
        return self._begun.elapsed_time(self._ended)


class Lane:
    """All copies of one direction on one device ([Note: Alternating streams])."""

    def __init__(self, device: torch.device) -> None:
        self._device = streams_of(device)
        self._lock = threading.Lock()  # held to queue work, never to wait for it
        self._streams = (self._device.new_stream(), self._device.new_stream())
        self._num_chunks = 0
        self._between = self._device.new_event(timed=False)  # chunks: who waits for an event waits for what was recorded last
        self._last_chunk: Event | None = None
        self._in_flight: dict[int, LaneTransfer] = {}  # by number, so in the order in which they end
        self.last_number = 0  # of the last copy that was queued
        self._rates: deque[float] = deque(maxlen=_LATEST)  # of large copies, in GB/s

    def copy(
        self, target: Tensor, source: Tensor, *, store: LaneTransfer | None = None, last_use: LaneTransfer | None = None
    ) -> LaneTransfer:
        """Queue a copy of contiguous bytes, one end on the device and one in page-locked host memory ([Note: Copy edges]).

        ``store`` is the copy that filled the source, ``last_use`` the last one that read the target. The lane stays usable after an error.
        """
        self.prune()
        produced = self._device.new_event(timed=False)
        produced.record(self._device.current())  # read before a copy stream becomes the current one
        with self._lock, self._device.copying():
            self.last_number += 1
            transfer = LaneTransfer(self.last_number, target, source, self._device)
            stream = self._next_stream()
            _wait_producer(stream, produced)
            if last_use is not None:
                _wait_block(stream, last_use._ended)
            if store is not None:
                _wait_store(stream, store._ended)
            _before_copy(stream)
            transfer._begun.record(stream)
            self._in_flight[transfer.number] = transfer
            try:
                for start, stop in _chunks(target, source):
                    if start:
                        self._between.record(stream)
                        self._last_chunk = self._between
                        stream = self._next_stream()
                    self._device.copy(stream, target, source, start, stop)
                    transfer.num_bytes = stop
            finally:
                # Also after an error: what has been queued so far still touches both ends, and later copies still come after it.
                transfer._ended.record(stream)
                self._last_chunk = transfer._ended
        return transfer

    def transfer(self, number: int) -> LaneTransfer | None:
        """Return the copy of that number; ``None`` where it is known to have ended."""
        with self._lock:  # so its event has been recorded
            return self._in_flight.get(number)

    def prune(self) -> None:
        """Let go of the copies that have ended."""
        with self._lock:
            ended = []
            for transfer in self._in_flight.values():
                if not transfer.done():
                    break
                ended.append(transfer)
            ends = [transfer._ends for transfer in ended]
            for transfer in ended:
                transfer._ends = None  # a slot may keep its transfer for long
                del self._in_flight[transfer.number]
                self._measure(transfer)
        del ends  # tensors die outside the lock

    def _next_stream(self) -> Stream:
        stream = self._streams[self._num_chunks % 2]
        self._num_chunks += 1
        if self._last_chunk is not None:
            _wait_previous_chunk(stream, self._last_chunk)
        return stream

    @property
    def rate_gbps(self) -> float | None:
        """How fast this direction is by itself, from the faster ones of the latest large copies; ``None`` before the first has ended."""
        return self._rate(_BESIDE)

    @property
    def usual_rate_gbps(self) -> float | None:
        """How fast it has mostly been, beside whatever else was on the link and in the host's memory."""
        return self._rate(0.5)

    def _rate(self, share: float) -> float | None:
        with self._lock:
            rates = sorted(self._rates)
        return rates[int(share * len(rates))] if rates else None

    def _measure(self, transfer: LaneTransfer) -> None:
        if transfer.num_bytes >= _LARGE_BYTES:
            self._rates.append(transfer.num_bytes / transfer.elapsed_ms() / 1e6)


@dataclass(frozen=True)
class Lanes:
    """The two lanes of a device."""

    d2h: Lane
    h2d: Lane

    @property
    def rates_gbps(self) -> tuple[float, float] | None:
        """How fast each is by itself; ``None`` before both have been used."""
        d2h, h2d = self.d2h.rate_gbps, self.h2d.rate_gbps
        return None if d2h is None or h2d is None else (d2h, h2d)

    @property
    def duplex_gbps(self) -> float | None:
        """How fast they have mostly been, added up; ``None`` before both have been used."""
        d2h, h2d = self.d2h.usual_rate_gbps, self.h2d.usual_rate_gbps
        return None if d2h is None or h2d is None else d2h + h2d


_lanes: dict[
    torch.device, Lanes
] = {}  # one of each in the process: a second one could not be ordered, and would steal the link from the first
_lanes_lock = threading.Lock()


def lanes_of(device: torch.device) -> Lanes:
    """Return the lanes of a device that has streams; ``device`` has an index."""
    with _lanes_lock:
        lanes = _lanes.get(device)
        if lanes is None:
            lanes = _lanes[device] = Lanes(Lane(device), Lane(device))
        return lanes


def has_streams(device: torch.device) -> bool:
    """Say whether copies to and from the device can run beside its compute."""
    return device.type not in ("cpu", "mps")


def _chunks(target: Tensor, source: Tensor) -> Iterator[tuple[int, int]]:
    """Cut where the host address is a multiple of the chunk, so that no chunk crosses from one registered slab into the next (host.py)."""
    host = source if target.device.type != "cpu" else target
    num_bytes = host.numel()
    start = 0
    stop = min(num_bytes, CHUNK_BYTES - host.data_ptr() % CHUNK_BYTES)
    while start < num_bytes:
        yield start, stop
        start, stop = stop, min(num_bytes, stop + CHUNK_BYTES)


# The edges of [Note: Copy edges].


def _wait_producer(stream: Stream, produced: Event) -> None:
    stream.wait_event(produced)


def _wait_previous_chunk(stream: Stream, copied: Event) -> None:
    stream.wait_event(copied)


def _wait_block(stream: Stream, read: Event) -> None:
    stream.wait_event(read)


def _wait_store(stream: Stream, stored: Event) -> None:
    stream.wait_event(stored)


def _wait_copy(stream: Stream, copied: Event) -> None:
    stream.wait_event(copied)


def _before_copy(stream: Stream) -> None:
    """Do nothing: tests queue a delay here, so that races come out."""
