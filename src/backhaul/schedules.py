"""A schedule: what to do with each blob of a step, and when.

Covers: decisions by event, what they were found to cost, and what can be left out of them.
Does not cover: finding them (scheduling.py), or keeping to them (course.py, flow.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from backhaul.steps import Step
from backhaul.wire import Decision, Release, Reload

HIGH = 0.8  # of the peak is near enough to it for what else needs memory to make another one


@dataclass(frozen=True)
class Schedule:
    """Decisions on items by event, and what they were found to cost."""

    decisions: dict[int, list[Decision]]
    at: list[float]  # by event: ms since the step began
    stall_ms: float
    cost_ms: float  # the same, and what copies slow down compute and the host
    wait_ms: float = 0.0  # the same without what they slow down compute
    levels: Sequence[int] = ()  # by event: bytes that are resident after it
    is_eager: bool = False  # moves what the link hides, whether the budget needs it or not

    @property
    def peak_bytes(self) -> int:
        return max(self.levels, default=0)

    def up_to_peaks(self, step: Step, *, turn: int = 0, budget: int | None = None) -> "Schedule":
        """Return the schedule without what leaves only after the last moment at which much is resident: it would not lower a peak.

        ``turn`` is an event at which there may be a peak of which nothing is known here.
        """
        peak = self.peak_bytes if budget is None else min(self.peak_bytes, budget)
        last = max((position for position, level in enumerate(self.levels) if level >= HIGH * peak), default=-1)
        last = max(last, turn)
        while True:
            found = self._until(last + 1, step)  # what leaves there ends it
            both = enumerate(zip(self.levels, found.levels, strict=True))
            higher = [position for position, (before, level) in both if level > max(before, peak)]
            if not higher:
                return found
            last = higher[-1]

    def _until(self, last: int, step: Step) -> "Schedule":
        """Return the schedule without what leaves for the first time after this event."""
        leaves: dict[int, int] = {}  # by item: the event at which it is released first
        away: dict[int, int] = {}  # by item left out: the event at which it was released last
        more = [0] * (len(self.levels) + 1)  # by event: bytes that are resident from then on because they stay
        for position in sorted(self.decisions):
            for decision in self.decisions[position]:
                item = decision.blob
                if isinstance(decision, Release):
                    if leaves.setdefault(item, position) > last:
                        away[item] = position
                        more[position] += step.sizes[item]
                elif item in away and isinstance(decision, Reload):
                    del away[item]
                    more[position] -= step.sizes[item]
        for item in away:
            more[min(step.drops[item], len(self.levels))] -= step.sizes[item]
        levels = [level + added for level, added in zip(self.levels, accumulate(more), strict=False)]
        return replace(self._only({item for item, position in leaves.items() if position <= last}), levels=levels)

    def without_spares(self) -> "Schedule":
        """Return the schedule without the copies of what it never releases; they only help where sizes change."""
        return self._only({decision.blob for issued in self.decisions.values() for decision in issued if isinstance(decision, Release)})

    def _only(self, items: Collection[int]) -> "Schedule":
        kept = {position: [each for each in issued if each.blob in items] for position, issued in self.decisions.items()}
        return replace(self, decisions=kept)
