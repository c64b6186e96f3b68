"""How fast copies are that run beside each other.

Covers: one running estimate for copies that host threads make in parallel.
Does not cover: copies on a device's streams, which run one at a time in each direction (lanes.py).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE_BYTES = 1 << 20  # smaller copies say more about latency
_KEPT = 0.95  # of what was measured, at each new copy: the last twenty or so count


class BusyRate:
    """Measure copies that overlap: their bytes, by the time in which at least one of them ran.

    The rate of one copy says little where others share the medium with it. Bytes and busy time fade alike with every copy that ends, so
    their quotient follows a medium that gets slower or faster.

    >>> times = iter([0.0, 1.0, 2.0])  # two copies begin together; one ends after a second, the other after two
    >>> rate = BusyRate(lambda: next(times))
    >>> with rate.measure(10**9), rate.measure(10**9):
    ...     pass
    >>> round(rate.gbps, 3)
    1.0
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_running = 0
        self._counted_until = 0.0  # busy time before it is in `_busy_s`
        self._busy_s = 0.0
        self._num_bytes = 0.0

    @property
    def gbps(self) -> float | None:
        """The estimate, in GB/s; ``None`` before a large copy has ended."""
        with self._lock:
            return self._num_bytes / self._busy_s / 1e9 if self._busy_s else None

    @contextmanager
    def measure(self, num_bytes: int) -> Iterator[None]:
        """Measure the copy in the context, if it is a large one and does not fail."""
        if num_bytes < LARGE_BYTES:
            yield
            return
        with self._lock:
            if self._num_running == 0:
                self._counted_until = self._clock()
            self._num_running += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._num_running -= 1
            raise
        with self._lock:
            now = self._clock()
            self._num_running -= 1
            self._num_bytes = _KEPT * self._num_bytes + num_bytes
            self._busy_s = _KEPT * self._busy_s + now - self._counted_until
            self._counted_until = now
