"""What a learned step tells about the next one: which blob should leave when, and when it should start back.

Covers: the record of a step, and the schedule made from it ([Note: Schedule]).
Does not cover: what to do while nothing is known or the step turns out different (flow.py), or real copies (engine.py).

[Note: Schedule]
A step is a list of events, saves and needs, with the compute time between them. The schedule is found by playing the step against the wire,
greedily, with its whole future known, and it is a list of decisions for each event:

* Copy out, whenever the lane is idle before the next event: the resident blob whose next use is furthest, if a round trip ends before that use.
  Only the longest-lived share of each frame leaves, since bytes beyond what the budget needs slow down the other direction.
* Release, only when room is needed: the copied blob whose next use is furthest. Compute waits where its copy has not ended.
* Reload in order of use: find the latest start that meets every coming use, and start then. A reload makes room by releasing what is used later.

Several shares are played; the one that stalls least is kept.
"""

import heapq
import math
from bisect import insort
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from backhaul.wire import CopyOut, Decision, Link, Release, Reload, Wire

Key = Hashable  # names a blob from step to step, within its frame: (fqn, call, pack)


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
    issued: list[tuple[int, Decision]] = field(default_factory=list)  # (event, decision on an item), as the step went
    gaps: list[float] = field(default_factory=list)  # by event: ms of compute until the next; empty while nothing was measured

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

    def measure(self, ms: Sequence[float], link: Link) -> bool:
        """Take the times at which the device reached each event, less what it waited for our copies. Say whether the gaps have changed."""
        wire = Wire(link)
        found: list[float] = []
        issued = iter((*self.issued, (len(self.events), CopyOut(-1))))
        at, decision = next(issued)
        for position, (begin, end) in enumerate(zip(ms, (*ms[1:], ms[-1]), strict=True)):
            now = wire.advance(begin)
            while at == position:
                now = wire.play(decision, self.sizes[decision.blob])
                at, decision = next(issued)
            event = self.events[position]
            if event < 0:
                now = wire.wait_in(~event)
            found.append(max(0.0, end - max(now, begin)))
        before = sum(self.gaps)
        self.gaps = [min(pair) for pair in zip(self.gaps, found, strict=True)] if self.gaps else found
        return abs(sum(self.gaps) - before) > 0.01 * before


@dataclass(frozen=True)
class Schedule:
    """Decisions on items by event, and what they were found to cost."""

    decisions: dict[int, list[Decision]]
    stall_ms: float


def schedule(step: Step, *, link: Link, budget: int | None, avoid: frozenset[Key] | set[Key] = frozenset()) -> Schedule:
    """Find when each blob of a step should leave and come back ([Note: Schedule]).

    Args:
        step: what is expected to happen again; its gaps must be known.
        link: rates of the tier.
        budget: bytes that may be resident; ``None`` moves what the link hides.
        avoid: keys that are not to be moved.
    """
    table = _Table(step, avoid)
    if budget is None:
        return _Play(table, link, None, 1.0).run()
    found = [_Play(table, link, budget, share).run() for share in (0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)]
    return min(found, key=lambda each: each.stall_ms)


class _Table:
    """A step by item and by event: what every play of it needs to know."""

    def __init__(self, step: Step, avoid: frozenset[Key] | set[Key]) -> None:
        self.step = step
        self.saves, self.needs = step.index()
        self.at = [0.0]  # by event: ms since the step began, were there no stalls
        for gap in step.gaps:
            self.at.append(self.at[-1] + gap)
        num_events = len(step.events)
        self.drops: dict[int, list[int]] = {}
        for item, event in enumerate(step.drops):
            self.drops.setdefault(min(event, num_events), []).append(item)
        self.alive = []  # by event: bytes that would be resident if nothing moved
        movable = 0
        for position, event in enumerate(step.events):
            movable -= sum(step.sizes[item] for item in self.drops.get(position, ()))
            movable += step.sizes[event] if event >= 0 else 0
            self.alive.append(movable + step.fixed[position])
        frames: dict[int, list[tuple[float, int]]] = {}
        for item, (ordinal, key) in enumerate(step.names):
            if self.needs[item] and key not in avoid:
                life = self.at[self.needs[item][0]] - self.at[self.saves[item]]
                frames.setdefault(ordinal, []).append((-life, item))
        self.depth = [2.0] * len(step.names)  # by item: the share of its frame's bytes that live longer
        for items in frames.values():
            total = sum(step.sizes[item] for _, item in items)
            longer = 0
            for _, item in sorted(items):
                self.depth[item] = longer / total
                longer += step.sizes[item]


class _Play:
    """One playing of a step against the wire."""

    def __init__(self, table: _Table, link: Link, budget: int | None, share: float) -> None:
        self.table = table
        self.budget = budget
        self.share = share
        self.wire = Wire(link)
        self.sizes = table.step.sizes
        self.num_events = len(table.step.events)
        self.resident = [False] * len(self.sizes)
        self.has_copy = [False] * len(self.sizes)
        self.resident_bytes = 0  # movable ones
        self.uncopied: list[tuple[int, int]] = []  # heap of (-next use, item)
        self.copied: list[tuple[int, int]] = []  # the same
        self.absent: list[tuple[int, int]] = []  # (next use, item), sorted
        self.next_use = [needs[0] if needs else self.num_events for needs in table.needs]
        self.num_uses = [0] * len(self.sizes)
        self.decisions: dict[int, list[Decision]] = {}
        self.issued: list[Decision] = []
        self.slip = 0.0  # ms of stall so far

    def run(self) -> Schedule:
        """Play the step to its end."""
        table, wire = self.table, self.wire
        over = self.num_events
        next_over = [over] * (self.num_events + 1)  # by event: the first from here on at which something must be away
        for position in range(self.num_events - 1, -1, -1):
            if self.budget is None or table.alive[position] > self.budget:
                over = position
            next_over[position] = over
        for position, event in enumerate(table.step.events):
            for item in table.drops.get(position, ()):
                self._drop(item)
            self.issued = []
            item = event if event >= 0 else ~event
            arrival = wire.now
            if event >= 0:
                self._arrive(item)
                heapq.heappush(self.uncopied, (-self.next_use[item], item))
            else:
                self._use(item)
            if self.budget is not None:
                self._make_room(self.budget - table.step.fixed[position], item)
            due = wire.now + table.step.gaps[position]
            if wire.coming(item):
                due += wire.eta_in(item)
            if self.budget is None:
                self._release_copied(item)
            self._reload_until(due, position)
            self._copy_out_until(due, next_over[position])
            wire.wait_in(item)
            self.slip += wire.now - arrival
            if self.issued:
                self.decisions[position] = self.issued
            wire.advance(wire.now + table.step.gaps[position])
        return Schedule(self.decisions, self.slip)

    def _arrive(self, item: int) -> None:
        self.resident[item] = True
        self.resident_bytes += self.sizes[item]

    def _drop(self, item: int) -> None:
        if self.resident[item]:
            self.resident_bytes -= self.sizes[item]
            self.resident[item] = False
        elif self.has_copy[item]:
            self.absent.remove((self.next_use[item], item))
        self.next_use[item] = -1

    def _use(self, item: int) -> None:
        """Bring the item back if it is away, and let its next use be the one after."""
        if not self.resident[item]:
            if self.budget is not None:
                self._make_room(self.budget - self.sizes[item], item)
            self.absent.remove((self.next_use[item], item))
            self._reload(item)
        self.num_uses[item] += 1
        needs = self.table.needs[item]
        self.next_use[item] = needs[self.num_uses[item]] if self.num_uses[item] < len(needs) else self.num_events
        if self.num_uses[item] < len(needs):
            heapq.heappush(self.copied if self.has_copy[item] else self.uncopied, (-self.next_use[item], item))

    def _reload(self, item: int) -> None:
        self._arrive(item)
        self.issued.append(Reload(item))
        self.wire.copy_in(item, self.sizes[item])

    def _release(self, item: int) -> None:
        self.wire.wait_in(item)
        self.wire.wait_out(item)
        self.issued.append(Release(item))
        self.resident[item] = False
        self.resident_bytes -= self.sizes[item]
        insort(self.absent, (self.next_use[item], item))

    def _copy_out(self, item: int) -> None:
        self.issued.append(CopyOut(item))
        self.wire.copy_out(item, self.sizes[item])
        self.has_copy[item] = True
        heapq.heappush(self.copied, (-self.next_use[item], item))

    def _victim(self, spared: int, later_than: int) -> int | None:
        """Take the copied resident item whose next use is furthest and whose copy has ended, if that use is late enough."""
        waiting = []
        found = None
        while self.copied:
            entry = heapq.heappop(self.copied)
            use, item = -entry[0], entry[1]
            if not self.resident[item] or use != self.next_use[item]:
                continue
            if use <= later_than:
                waiting.append(entry)
                break
            if item == spared or self.wire.leaving(item) or self.wire.coming(item):
                waiting.append(entry)
                continue
            found = item
            break
        for entry in waiting:
            heapq.heappush(self.copied, entry)
        return found

    def _make_room(self, limit: int, spared: int) -> None:
        while self.resident_bytes > limit:
            item = self._victim(spared, -1)
            if item is None:
                item = self._soonest(spared)
            if item is None:
                return
            self._release(item)

    def _soonest(self, spared: int) -> int | None:
        """Take the item whose copy out ends first; start one if there is none."""
        leaving = [item for item in self.wire.queue_out() if item != spared and self.resident[item] and self.next_use[item] >= 0]
        if leaving:
            return leaving[0]
        kept = []
        found = None
        while self.uncopied and found is None:
            entry = heapq.heappop(self.uncopied)
            item = entry[1]
            if not self.resident[item] or self.has_copy[item] or -entry[0] != self.next_use[item]:
                continue
            if item == spared or self.table.depth[item] > 1:
                kept.append(entry)
                continue
            self._copy_out(item)
            found = item
        for entry in kept:
            heapq.heappush(self.uncopied, entry)
        return found

    def _reload_until(self, due: float, position: int) -> None:
        """Start the reloads that must start before then so that every coming use is met."""
        wire, at = self.wire, self.table.at
        start = wire.now + wire.backlog_in()
        while self.absent and start < due:
            latest, queued = float("inf"), 0.0
            for use, item in self.absent:
                queued += self.sizes[item] * wire.in_ms
                latest = min(latest, at[use] + self.slip - queued)
            if latest > due:
                return
            use, item = self.absent[0]
            if self.budget is not None:
                while self.resident_bytes + self.sizes[item] > self.budget - self.table.step.fixed[position]:
                    victim = self._victim(item, use)
                    if victim is None:
                        return
                    self._release(victim)
            self.absent.pop(0)
            self._reload(item)
            heapq.heappush(self.copied, (-use, item))
            start = wire.now + wire.backlog_in()

    def _copy_out_until(self, due: float, next_over: int) -> None:
        """Keep the lane to the tier busy until then."""
        wire, at = self.wire, self.table.at
        kept = []
        while self.uncopied and wire.now + wire.backlog_out() < due:
            entry = heapq.heappop(self.uncopied)
            use, item = -entry[0], entry[1]
            if not self.resident[item] or self.has_copy[item] or use != self.next_use[item]:
                continue
            kept.append(entry)
            if use <= next_over or use >= self.num_events:
                break
            if self.table.depth[item] >= self.share:
                continue
            back = wire.now + wire.backlog_out() + self.sizes[item] * (wire.out_ms + wire.in_ms)
            if back > at[use] + self.slip:
                break
            kept.pop()
            self._copy_out(item)
        for entry in kept:
            heapq.heappush(self.uncopied, entry)

    def _release_copied(self, spared: int) -> None:
        """Without a budget: release what has been copied, as long as every use can still be met."""
        while (item := self._victim(spared, -1)) is not None:
            self._release(item)
