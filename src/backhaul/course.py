"""A learned step that is expected again, and how far the current one has got in it.

Covers: telling which learned event comes next, and when the schedule has to be made anew.
Does not cover: what the schedule says (scheduling.py), or what to do where a step leaves its course (flow.py).
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from backhaul.schedules import Schedule
from backhaul.scheduling import schedule
from backhaul.steps import Key, Pace, Step
from backhaul.trust import Trust
from backhaul.wire import Link

FEW = 0.1  # of the items of a step may be missing for it to be the same step
DRIFT = 0.05  # of the compute of a step that may be elsewhere than planned
MUCH = 0.1  # by which the link may have changed before another plan cannot wait
LAST = 1 << 60  # later than every event
Blob = TypeVar("Blob")


EARLY_PLANS = 6  # schedules of a step, each made as soon as there is news
EARLY_TIMES = 8  # steps of a course that are timed one after the other; later every so many


class Course(Generic[Blob]):
    """A learned step that the current one is expected to repeat, and how far it has got."""

    def __init__(self, step: Step) -> None:
        self._expect(step)
        self.kind = object()  # by which it is remembered once it is forgotten itself
        self.pace = Pace()
        self.steady = True  # sizes were the same each time
        self.schedule: Schedule | None = None
        self.with_spares: Schedule | None = None  # the same with copies that only help where sizes change
        self.basis: tuple[Link, int | None] | None = None  # the link and the budget that the schedule was made for,
        self.planned: list[float] = []  # and the gaps
        self.stale = False  # sizes or gaps are other ones by now
        self.is_refined = False  # whether that has been looked at in the step at hand
        self.num_since = 0  # steps begun since
        self.num_made = 0  # schedules,
        self.followed = (0, 0)  # and which of them the latest two steps went by
        self.trust = Trust()  # in the link's rates, where nothing shall wait
        self.num_timed = 0  # steps
        self.num_untimed = 0  # steps begun since the last one that was timed
        self.restart([])

    def _expect(self, step: Step) -> None:
        self.step = step
        self.saves, self.needs = step.index()
        self.index = {name: item for item, name in enumerate(step.names)}

    def restart(self, blobs: list[Blob | None]) -> None:
        """Expect the step from its beginning, or from where these blobs have been saved."""
        self.blobs = blobs + [None] * (len(self.step.names) - len(blobs))  # by item
        self.cursor = 0
        self.misses = 0

    def resize(self, step: Step) -> None:
        """Take the sizes of a step that has gone in this order."""
        steady = self.steady and step.sizes == self.step.sizes
        if steady != self.steady or abs(sum(step.sizes) - sum(self.step.sizes)) > 0.02 * sum(step.sizes):
            self.stale = True
        self.step, self.steady = step, steady
        if not steady:
            self.schedule = self.with_spares

    def shrunk(self, step: Step) -> "Course[Blob] | None":
        """Return what is known of a step that has gone in this order but for a few items that were not saved in it; ``None`` if it has not.

        Copies of an item that turn out to free nothing are given up after a while, and no more is known of it; the rest of the step is as
        well known as before. The step with all its items may come again, so its own course stays as it is.
        """
        item_of = {name: item for item, name in enumerate(step.names)}
        places = [item_of.get(name, -1) for name in self.step.names]
        kept = [position for position, event in enumerate(self.step.events) if places[event if event >= 0 else ~event] >= 0]
        events = [places[event] if event >= 0 else ~places[~event] for event in (self.step.events[position] for position in kept)]
        num_missing = len(places) - len(step.names)
        if not 0 < num_missing <= FEW * len(places) or events != step.events:
            return None
        found: Course[Blob] = Course(step)
        found.pace = self.pace.only(kept)
        found.steady = self.steady
        found.num_made, found.num_timed = min(self.num_made, EARLY_PLANS - 1), self.num_timed
        return found

    def measure(self, ms: Sequence[float], waited: Sequence[float], idle: Iterable[int] = ()) -> None:
        """Take the times of the latest step that has gone in this order."""
        self.num_timed += 1
        self.num_untimed = 0
        self.pace.measure(ms, waited, idle)
        moved = sum(abs(gap - planned) for gap, planned in zip(self.pace.gaps, self.planned, strict=False))
        if moved > DRIFT * sum(self.planned):
            self.stale = True
        # Another step has set out since the one that was timed.
        if self.schedule is not None and self.followed[0] == self.num_made:
            self.trust.note((sum(waited) - self.schedule.stall_ms) / ((ms[-1] - ms[0]) or 1.0))

    @property
    def wants_times(self) -> bool:
        """Whether the times of the next step are worth taking."""
        return self.num_timed < EARLY_TIMES or self.num_untimed >= EARLY_TIMES

    def expects(self, event: int, name: tuple[int, Key]) -> bool:
        """Say whether this event comes next, in a step that has gone exactly as expected so far."""
        step = self.step
        return self.cursor < len(step.events) and step.events[self.cursor] == event and (event < 0 or step.names[event] == name)

    def begins_with(self, step: Step) -> bool:
        """Say whether the step has gone like this one so far."""
        return self.step.events[: len(step.events)] == step.events and self.step.names[: len(step.names)] == step.names

    def next_use(self, item: int) -> int:
        """Return the event that needs the item next, or LAST."""
        for position in self.needs[item]:
            if position >= self.cursor:
                return position
        return LAST

    def set_out(self, blobs: list[Blob | None], *, link: Link, budget: int | None) -> None:
        """Expect the step from its beginning, or from where these blobs have been saved; see that there is a schedule for it."""
        self.restart(blobs)
        self.is_refined = False
        self.num_since += 1
        self.num_untimed += 1
        if self.pace.gaps and (self.basis is None or self.basis[1] != budget):
            self._plan(link, budget)
        self.followed = (self.followed[1], self.num_made)

    def refine(self, *, link: Link, budget: int | None) -> None:
        """Make a better schedule for the next step, now that one is over but for its last work, if there is news.

        Planning costs the host from tenths of a second to seconds. At the end of a backward pass the device is behind, at the beginning of
        a step it waits. The first few plans are made as soon as there is news, later ones ever more rarely.
        """
        self.is_refined = True
        due = self.num_made < EARLY_PLANS or self.num_since >= min(64, 8 << (self.num_made - EARLY_PLANS))
        anew = self.basis is None or self.basis[1] != budget or not self.basis[0].is_like(link, share=MUCH)
        if anew:
            self.trust = Trust()
        elif self.schedule is not None and self.schedule.is_eager:
            anew = self.trust.adjust()
        if self.pace.gaps and (anew or (due and (self.stale or self.basis != (link, budget)))):
            self._plan(link, budget)

    def _plan(self, link: Link, budget: int | None) -> None:
        self.num_made += 1
        self.basis, self.planned, self.stale, self.num_since = (link, budget), self.pace.gaps, False, 0
        self.trust.start_anew()
        pace, trust = self.pace, self.trust.share
        found = schedule(self.step, pace.gaps, link=link, budget=budget, reads=pace.reads, host_is_ahead=pace.host_is_ahead, trust=trust)
        self.schedule, self.with_spares = found.without_spares() if self.steady else found, found
