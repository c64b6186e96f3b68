"""Which stream's pool the memory of a device tensor came from.

Covers: CUDA's caching allocator, asked seldom ([Note: Pool map]).
Does not cover: what follows from the answer (engine.py).

[Note: Pool map]
The allocator gives memory back to the stream it was allocated on. Where that is not the stream that waited for a copy, the memory may be
dropped only once the copy has ended. The allocator says which stream owns which segment in a snapshot, which takes milliseconds; segments
seldom change, so the map is kept, and a look-up is a bisection. It is drawn again when an address is not on it, and when the allocator has
given segments back since: only then can an address have changed hands. That count takes tens of microseconds, so it is read once a
millisecond at most; to give a segment back and to get its address anew on another stream, the driver synchronises and takes longer.
"""

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backhaul import _torch

_CHECK_EVERY_S = 1e-3


class _Segments(NamedTuple):
    starts: list[int]  # sorted
    ends: list[int]
    streams: list[int]


class PoolMap:
    """Maps addresses to streams ([Note: Pool map]).

    ``snapshot`` returns the allocator's segments; ``released`` a number that changes whenever segments have been given back.
    """

    def __init__(
        self,
        snapshot: Callable[[], Sequence[dict[str, Any]]],
        released: Callable[[], int],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._snapshot = snapshot
        self._released = released
        self._clock = clock
        self._drawn_at = released()
        self._check_at = clock() + _CHECK_EVERY_S
        self._foreign: set[int] = set()  # addresses that the allocator does not own, until the map is drawn again
        self._segments = self._draw()

    def stream_at(self, address: int) -> int | None:
        """Return the handle of the stream (0 is the default stream); ``None`` for memory that is not the allocator's."""
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + _CHECK_EVERY_S
            released = self._released()
            if released != self._drawn_at:
                self._drawn_at = released
                self._segments = self._draw()
        stream = self._look_up(address)
        if stream is None and address not in self._foreign:
            self._segments = self._draw()
            stream = self._look_up(address)
            if stream is None:
                self._foreign.add(address)
        return stream

    def _look_up(self, address: int) -> int | None:
        segments = self._segments
        index = bisect.bisect_right(segments.starts, address) - 1
        return segments.streams[index] if index >= 0 and address < segments.ends[index] else None

    def _draw(self) -> _Segments:
        self._foreign.clear()
        rows = sorted((row["address"], row["address"] + row["total_size"], row["stream"]) for row in self._snapshot())
        return _Segments([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


_maps: dict[torch.device, PoolMap | None] = {}  # the allocator is one for the process, and so is what it says


def pool_stream(tensor: Tensor) -> int | None:
    """Return the handle of the stream whose pool holds the tensor's memory; compare with ``torch.cuda.current_stream().cuda_stream``.

    ``None`` where it cannot be told: another accelerator, the ``cudaMallocAsync`` backend, memory that came from elsewhere.
    """
    device = tensor.device
    if device not in _maps:
        _maps[device] = _cuda_map(device) if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native" else None
    pools = _maps[device]
    return None if pools is None else pools.stream_at(tensor.data_ptr())


def in_current_pool(tensor: Tensor) -> bool:
    """Say whether the tensor's memory is known to go back to the pool of the current stream. On accelerators other than CUDA it is not."""
    pool = pool_stream(tensor)
    return pool is not None and pool == _torch.current_cuda_stream(tensor.device.index)


def _cuda_map(device: torch.device) -> PoolMap:
    def released() -> int:
        # Bytes and not segments, since expandable segments give back parts of themselves.
        return int(torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["freed"])

    return PoolMap(lambda: torch.cuda.memory_snapshot(include_traces=False), released)
