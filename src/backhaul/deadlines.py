"""Copies with deadlines that one lane makes in order of their deadlines.

Covers: when the first of them must start at the latest so that all are in time, told anew in logarithmic time as copies come and go.
Does not cover: which copies there are, and what is done about them (scheduling.py).
"""

import math
from collections.abc import Sequence

NOTHING_MS = 1e-9  # rounding leaves less


class Deadlines:
    """A tree over the deadlines: each node knows how long its copies take, and when the first of them must start.

    Args:
        at: the possible deadlines in ms, rising.

    >>> queue = Deadlines([10.0, 20.0, 30.0])
    >>> queue.add(1, 8.0)
    >>> queue.add(2, 15.0)  # from 15 to 30, so the other from 7 to 15
    >>> queue.latest_start
    7.0
    """

    def __init__(self, at: Sequence[float]) -> None:
        self._at = at
        self._size = 1 << max(0, len(at) - 1).bit_length()
        self._total = [0.0] * (2 * self._size)  # by node, leaves last: ms
        self._latest = [math.inf] * (2 * self._size)

    @property
    def latest_start(self) -> float:
        """When the first copy must start, in ms; infinity where there are none."""
        return self._latest[1]

    def add(self, deadline: int, ms: float) -> None:
        """Add a copy that takes so long and must have ended by a deadline, given by its number; a negative time takes one away."""
        totals, latest = self._total, self._latest
        node = deadline + self._size
        total = totals[node] + ms
        totals[node], latest[node] = (total, self._at[deadline] - total) if total > NOTHING_MS else (0.0, math.inf)
        while node > 1:
            node >>= 1
            left, right = 2 * node, 2 * node + 1
            totals[node] = totals[left] + totals[right]
            latest[node] = min(latest[left], latest[right] - totals[left])
