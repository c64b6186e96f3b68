"""The accounting of saved bytes: what may stay on the device, what leaves, what comes back next.

Covers: the state of every blob, the budget, and following a learned step ([Note: Flow]).
Does not cover: how a step's schedule is found (scheduling.py), or how a decision is carried out (engine.py with streams, simulation.py
with a clock).

[Note: Flow]
Events come in the order in which the host issues them, and each returns decisions to carry out in that order. Nothing is polled: the host
runs ahead of the device, so stream order is what counts, and time is known only from steps that have ended.

* Until a step has been seen, everything movable is copied out when it is saved and released, oldest first, when the budget (or, without
  one, a window) needs the bytes. Reloads come on demand, and ahead of it by a guess: the reverse of the order of saving.
* Once a step has been seen, the next is expected to be the same. With times, it follows a schedule; without, it only knows the order of
  uses.
* Events that are missing move the cursor on; late and unknown ones are counted, and past a few of them the step is lost: the rest of it
  goes as if nothing had been seen, and its order is learned anew. A wrong guess costs time, never values.
* Without a budget nothing shall wait. Where steps wait longer than their schedule foresaw, the next one counts on less of the link.
* Whatever was guessed or scheduled, the budget is enforced after each event that can move something.
"""

import heapq
from collections.abc import Iterable, Sequence

from backhaul.course import LAST, Course
from backhaul.entries import COPYING_IN, COPYING_OUT, KEPT, RELEASED, RELOADED, RESIDENT, STALE, BlobState, FlowBlob, FlowFrame
from backhaul.steps import Key, Step
from backhaul.wire import CopyOut, Decision, Link, Release, Reload

__all__ = ["BlobState", "CopyOut", "Decision", "Flow", "Key", "Link", "Release", "Reload"]

DEFAULT_LINK = Link(d2h_gbps=50.0, h2d_gbps=50.0, both_gbps=90.0)  # about PCIe 5 x16, until it has been measured
KNOWN_STEPS = 8  # orders remembered, so that kinds of step may take turns
MOST_PAST = 64  # steps of which the kind is remembered,
MOST_CONTEXT = 8  # and by how many of them the next is told
GUESS_SPAN = 32  # events looked at for one prefetch by guess
MOST_EVENTS = 1 << 20  # of a step that never ends; what comes after is not learned
NOWHERE = range(0)


class Flow:
    """Decide what saved bytes do, from the order of events and from the steps that have ended ([Note: Flow]).

    Args:
        activation_budget: saved bytes that may be resident; ``None`` moves what the link hides, 0 everything that can move.
        link: rates of the tier; may be assigned once they have been measured.
        window_bytes: without a budget, the movable bytes that may be resident while nothing is learned; the most to prefetch by guess.
    """

    def __init__(self, *, activation_budget: int | None, link: Link = DEFAULT_LINK, window_bytes: int = 512 << 20) -> None:
        self.activation_budget = activation_budget
        self.link = link
        self.window_bytes = window_bytes
        self.resident_bytes = 0  # saved bytes on the device, those that cannot move included
        self.peak_resident_bytes = 0
        self.ahead_bytes = 0  # reloads issued and not yet used
        self.num_steps = 0
        self.num_demand_reloads = 0
        self.num_misses = 0  # events that did not come as a learned step has them
        self._blobs: dict[int, FlowBlob] = {}
        self._frames: dict[int, FlowFrame] = {}
        self._num_frames = 0  # of this step
        self._fixed_bytes = 0  # resident, and cannot move
        self._immovable_bytes = 0  # those among them that never could
        self.peak_immovable_bytes = 0
        self._loose_bytes = 0  # resident, and no schedule says when they leave
        self._copied: list[tuple[int, int, FlowBlob]] = []  # heaps by rank: what can be released at once,
        self._uncopied: list[tuple[int, int, FlowBlob]] = []  # and what must be copied out first
        self._ticks = 0
        self._out_ends = 0.0  # when the queue to the tier should be empty, in ms of the schedule
        self._step = Step()
        self._known: list[Course[FlowBlob]] = []  # latest first
        self._past: list[object] = []  # kinds of the steps that ended, latest last
        self._course: Course[FlowBlob] | None = None
        self._last: Course[FlowBlob] | None = None  # of the step that ended last; None where nothing was learned from it
        self._decisions: list[Decision] = []

    @property
    def learned(self) -> bool:
        """Whether a step has been seen, so that the next has an expected order."""
        return bool(self._known)

    @property
    def scheduled(self) -> bool:
        """Whether the current step goes by a schedule."""
        return self._course is not None and self._course.schedule is not None

    @property
    def num_events(self) -> int:
        """Events of the current step so far. A call that raises it was an event, and ``times`` wants its time."""
        return len(self._step.events)

    @property
    def wants_times(self) -> bool:
        """Whether the times of the next step would be news. To take them costs the host some microseconds an event."""
        expected = self._expected
        return expected is None or expected.wants_times

    @property
    def is_through(self) -> bool:
        """Whether the last event of the expected step has come: the moment to ``refine``, once the decisions are carried out."""
        course = self._course
        return course is not None and course.cursor == len(course.step.events) and not course.is_refined

    @property
    def is_refined(self) -> bool:
        """Whether that has been done in this step."""
        return self._course is not None and self._course.is_refined

    def refine(self) -> None:
        """Plan the next step, if what is known has changed. It takes the host some tenths of a second."""
        if self._course is not None:
            self._course.refine(link=self.link, budget=self.activation_budget)

    @property
    def predicted_stall_ms(self) -> float | None:
        """What the latest schedule expects compute to wait in a step, or ``None`` while there is no schedule."""
        schedule = self._known[0].schedule if self._known else None
        return None if schedule is None else schedule.stall_ms

    def state(self, blob: int) -> BlobState:
        """Return where the blob is."""
        return self._blobs[blob].state

    def open_frame(self, frame: int) -> None:
        """Begin a forward of the managed module; with the first one a step begins."""
        if not self._frames and self._known:
            self._course = self._expected
            self._out_ends = 0.0
            assert self._course is not None
            self._set_out(self._course, [])
        self._frames[frame] = FlowFrame(self._num_frames)
        self._num_frames += 1

    def close_frame(self, frame: int) -> None:
        """End a frame of which nothing is alive; with the last one the step ends, and its order is learned."""
        small_bytes = self._frames.pop(frame).small_bytes
        self.resident_bytes -= small_bytes
        self._cannot_move(-small_bytes)
        if not self._frames:
            self._learn()

    def saved_small(self, frame: int, num_bytes: int) -> None:
        """Count bytes that are too few to move. They are taken as resident until their frame is closed."""
        self._frames[frame].small_bytes += num_bytes
        self._cannot_move(num_bytes)
        self.resident_bytes += num_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def saved(self, blob: int, *, frame: int, key: Key, num_bytes: int, movable: bool) -> Sequence[Decision]:
        """Count a blob that autograd has saved."""
        entry = self._blobs[blob] = FlowBlob(blob, num_bytes)
        self._arrive(entry)
        if not movable:
            self._cannot_move(num_bytes)
            return ()
        decisions: list[Decision] = []
        self._decisions = decisions
        entry.state = RESIDENT
        entry.frame = home = self._frames[frame]
        entry.name = (home.ordinal, key)
        entry.place = len(home.blobs)
        home.blobs.append(entry)
        step = self._step
        if len(step.events) < MOST_EVENTS:
            entry.item = len(step.names)
            step.names.append(entry.name)
            step.sizes.append(num_bytes)
            step.drops.append(MOST_EVENTS)
        passed = self._event(entry, entry.item)
        if passed and self.scheduled:
            self._rank(entry)
            self._follow(passed)
            self._enforce(entry, allowance=num_bytes)
        else:
            entry.loose = True
            self._loose_bytes += num_bytes
            self._copy_out(entry)
            self._enforce(None, allowance=0)
        return decisions

    def needed(self, blob: int) -> Sequence[Decision]:
        """Bring back what autograd needs now. Once the decisions are carried out in order, the blob is resident."""
        entry = self._blobs[blob]
        if entry.item < 0 and entry.state is KEPT:
            return ()
        decisions: list[Decision] = []
        self._decisions = decisions
        passed = self._event(entry, ~entry.item)
        if passed and self.scheduled:
            self._follow(passed, needed=entry)
        if entry.state is RELEASED:
            self.num_demand_reloads += 1
            self._enforce(entry, allowance=0 if entry.loose else entry.num_bytes, coming=entry.num_bytes)
            self._reload(entry)
        if entry.state is COPYING_IN:
            self.ahead_bytes -= entry.num_bytes
            entry.state = RELOADED
        entry.num_needs += 1
        if entry.state is not KEPT:
            self._rank(entry)
        self._enforce(entry, allowance=0 if entry.loose else entry.num_bytes)
        if not self.scheduled:
            self._guess(entry)
        return decisions

    def dropped(self, blob: int) -> None:
        """Forget a blob of which autograd has dropped the last saved tensor."""
        entry = self._blobs.pop(blob)
        if entry.frame is None:
            self._cannot_move(-entry.num_bytes)
        elif entry.state is KEPT:
            self._fixed_bytes -= entry.num_bytes
        if entry.state is COPYING_IN:
            self.ahead_bytes -= entry.num_bytes
        if entry.state is not RELEASED:
            self._depart(entry)
        entry.state = KEPT
        entry.rank = STALE
        if entry.item >= 0:
            self._step.drops[entry.item] = len(self._step.events)
        if entry.following >= 0 and self._course is not None:
            self._course.blobs[entry.following] = None

    def keep(self, blob: int) -> None:
        """Count a blob as immovable from now on: its copy failed, or the tier was full."""
        entry = self._blobs[blob]
        if entry.state is RELEASED:
            self._arrive(entry)
        if entry.state is COPYING_IN:
            self.ahead_bytes -= entry.num_bytes
        if entry.state is not KEPT:
            self._fixed_bytes += entry.num_bytes
        if entry.loose:
            self._loose_bytes -= entry.num_bytes
            entry.loose = False
        entry.state = KEPT
        entry.rank = STALE

    def readopted(self, blob: int) -> None:
        """Count a blob as resident again without a copy: its original storage turned out to be alive. Call before ``needed``."""
        entry = self._blobs[blob]
        if entry.state is RELEASED:
            self._arrive(entry)
        elif entry.state is COPYING_IN:
            self.ahead_bytes -= entry.num_bytes
        else:
            return
        entry.state = RELOADED
        self._rank(entry)

    def times(self, ms: Sequence[float], waited: Sequence[float] = (), idle: Iterable[int] = ()) -> None:
        """Take the times in ms at which the device reached each event of the last step, waits for our own copies included.

        ``waited`` are these waits, in ms from each event to the next; by default there were none. ``idle`` are the events before which the
        device had done all that it had been given: the host has waited for it. The times are passed over where nothing was learned from
        that step, or where an exception has cost some of them.
        """
        course = self._last
        if course is not None and len(ms) == len(course.step.events):
            course.measure(ms, waited or [0.0] * len(ms), idle)

    # -- residency -----------------------------------------------------------------------------------------------------------------------

    def _cannot_move(self, num_bytes: int) -> None:
        self._fixed_bytes += num_bytes
        self._immovable_bytes += num_bytes
        self.peak_immovable_bytes = max(self.peak_immovable_bytes, self._immovable_bytes)

    def _arrive(self, entry: FlowBlob) -> None:
        self.resident_bytes += entry.num_bytes
        if entry.loose:
            self._loose_bytes += entry.num_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def _depart(self, entry: FlowBlob) -> None:
        self.resident_bytes -= entry.num_bytes
        if entry.loose:
            self._loose_bytes -= entry.num_bytes

    def _copy_out(self, entry: FlowBlob) -> None:
        entry.state = COPYING_OUT
        if self.scheduled:
            entry.ends = self._out_ends = max(self._out_ends, self._now()) + entry.num_bytes / self.link.d2h_gbps / 1e6
        self._decisions.append(CopyOut(entry.token))
        self._rank(entry)

    def _release(self, entry: FlowBlob) -> None:
        if entry.state is COPYING_IN:
            self.ahead_bytes -= entry.num_bytes
        entry.state = RELEASED
        entry.rank = STALE
        self._depart(entry)
        self._decisions.append(Release(entry.token))

    def _reload(self, entry: FlowBlob) -> None:
        entry.state = COPYING_IN
        self.ahead_bytes += entry.num_bytes
        self._arrive(entry)
        self._decisions.append(Reload(entry.token))
        self._rank(entry)

    def _rank(self, entry: FlowBlob) -> None:
        """Queue a resident blob for release: furthest use first, as far as uses are known; else oldest first; what has been used last."""
        self._ticks += 1
        course = self._course
        next_use = course.next_use(entry.following) if course is not None and entry.following >= 0 else None
        if next_use is None or (next_use == LAST and entry.num_needs):
            entry.rank = self._ticks if not entry.num_needs else LAST
        else:
            entry.rank = -next_use
        if self.activation_budget is None and not entry.loose:
            return
        heap = self._uncopied if entry.state is RESIDENT else self._copied
        heapq.heappush(heap, (entry.rank, self._ticks, entry))
        if len(heap) > 4 * len(self._blobs) + 64:  # mostly stale
            heap[:] = [(rank, tick, each) for rank, tick, each in heap if each.rank == rank]
            heapq.heapify(heap)

    def _enforce(self, needed: FlowBlob | None, *, allowance: int, coming: int = 0) -> None:
        """Release until the budget holds, but for the allowance; bytes that are coming count. The needed blob stays."""
        excess = self._excess() + coming - allowance
        if excess <= 0:
            return
        now = self._now()
        late: list[tuple[int, int, FlowBlob]] = []  # still being copied
        spared: list[tuple[int, int, FlowBlob]] = []
        for heap in (self._copied, late, self._uncopied):
            if heap is late:
                late.sort(key=lambda each: each[2].ends, reverse=True)
            while heap and excess > 0:
                candidate = heap.pop() if heap is late else heapq.heappop(heap)
                rank, _, entry = candidate
                if entry.rank != rank or (entry.state is RESIDENT) is not (heap is self._uncopied):
                    continue
                if entry is needed:
                    spared.append(candidate)
                    continue
                if entry.ends > now and heap is self._copied:
                    late.append(candidate)
                    continue
                if entry.state is RESIDENT:
                    self._copy_out(entry)
                self._release(entry)
                excess -= entry.num_bytes
        for candidate in (*late, *spared):
            heapq.heappush(self._uncopied if candidate[2].state is RESIDENT else self._copied, candidate)

    def _now(self) -> float:
        """Return the time of the current event in ms of the schedule, or 0 where there is none."""
        course = self._course
        if course is None or course.schedule is None:
            return 0.0
        return course.schedule.at[course.cursor - 1] if course.cursor else 0.0

    def _excess(self) -> int:
        if self.activation_budget is None:
            return self._loose_bytes - self.window_bytes
        return self.resident_bytes - self.activation_budget

    def _guess(self, needed: FlowBlob) -> None:
        """Prefetch into room that is free: by the order of uses where it is known, else by the reverse of the order of saving."""
        room = min(-self._excess(), self.window_bytes - self.ahead_bytes)
        course = self._course
        if course is not None:
            coming = (course.blobs[~event] for event in course.step.events[course.cursor : course.cursor + GUESS_SPAN] if event < 0)
        else:
            assert needed.frame is not None
            coming = (needed.frame.blobs[place] for place in range(needed.place - 1, max(-1, needed.place - 1 - GUESS_SPAN), -1))
        for entry in coming:
            if entry is not None and entry.state is RELEASED:
                room -= entry.num_bytes
                if room < 0:
                    return
                self._reload(entry)

    # -- the learned step ----------------------------------------------------------------------------------------------------------------

    def _event(self, entry: FlowBlob, event: int) -> range:
        """Record an event. Return the events of the learned step that it passes, itself as the last; nothing where it was not expected."""
        step = self._step
        if entry.item < 0 or len(step.events) >= MOST_EVENTS:
            return NOWHERE
        course = self._course
        if course is not None and not course.misses and not course.expects(event, entry.name):
            course = self._switch(event, entry.name)
        step.events.append(event)
        step.fixed.append(self._fixed_bytes)
        if course is None:
            return NOWHERE
        if event >= 0:
            item = event if not course.misses and course.expects(event, entry.name) else course.index.get(entry.name, -1)
            if item >= 0 and course.blobs[item] is None:
                entry.following = item
                course.blobs[item] = entry
        position = -1
        if entry.following >= 0:
            position = course.saves[entry.following] if event >= 0 else course.next_use(entry.following)
        if position != course.cursor:
            course.misses += 1
            self.num_misses += 1
            if course.misses > 8 + len(course.step.events) // 16:  # lost
                self._course = None
                return NOWHERE
            if position < course.cursor or position == LAST:
                return NOWHERE
        passed = range(course.cursor, position + 1)
        course.cursor = position + 1
        return passed

    def _switch(self, event: int, name: tuple[int, Key]) -> Course[FlowBlob] | None:
        """Turn to another learned step that begins as this one did and goes on with this event, if there is one."""
        for other in self._known:
            if other is not self._course and other.begins_with(self._step):
                assert self._course is not None
                blobs = self._course.blobs[: len(self._step.names)]
                other.cursor = len(self._step.events)
                if other.expects(event, name):
                    self._set_out(other, blobs)
                    other.cursor = len(self._step.events)
                    self._course = other
                    break
        return self._course

    def _set_out(self, course: Course[FlowBlob], blobs: list[FlowBlob | None]) -> None:
        course.set_out(blobs, link=self.link, budget=self.activation_budget)

    def _follow(self, passed: range, needed: FlowBlob | None = None) -> None:
        """Carry out what the schedule has for these events of the learned step, as far as it still makes sense."""
        course = self._course
        assert course is not None
        assert course.schedule is not None
        decisions = course.schedule.decisions
        allowance = 0 if needed is None else needed.num_bytes
        for position in passed:
            for decision in decisions.get(position, ()):
                entry = course.blobs[decision.blob]
                if entry is None:
                    continue
                if isinstance(decision, CopyOut):
                    if entry.state is RESIDENT:
                        self._copy_out(entry)
                elif isinstance(decision, Reload):
                    # Where events were left out, reloads of many meet here.
                    if entry.state is RELEASED and (len(passed) == 1 or self._excess() + entry.num_bytes <= 0):
                        # Where sizes or the order differ, the releases that were to make room for this may not have come.
                        coming = entry.num_bytes
                        if needed is not None and needed is not entry and needed.state is RELEASED:  # it comes in any case
                            coming += needed.num_bytes
                        self._enforce(needed, allowance=allowance, coming=coming)
                        if self.activation_budget is None or self._excess() + coming <= allowance:
                            self._reload(entry)
                elif entry is not needed and entry.state in (COPYING_OUT, RELOADED, COPYING_IN):
                    self._release(entry)

    @property
    def _expected(self) -> "Course[FlowBlob] | None":
        """The learned step that should come next: what came after steps like the latest few, since kinds of step may take turns."""
        past, known = self._past, {course.kind: course for course in self._known}
        for length in range(min(MOST_CONTEXT, len(past) - 1), 0, -1):
            latest = past[-length:]
            for end in range(len(past) - 1, length - 1, -1):
                if past[end - length : end] == latest and past[end] in known:
                    return known[past[end]]
        return self._known[0] if self._known else None

    def _learn(self) -> None:
        """End the step: what was recorded is what to expect."""
        step, self._step = self._step, Step()
        self._course = self._last = None
        self._num_frames = 0
        self._copied.clear()
        self._uncopied.clear()
        if not any(event < 0 for event in step.events) or len(step.events) >= MOST_EVENTS:
            return
        self.num_steps += 1
        for course in self._known:
            if course.step.events == step.events and course.step.names == step.names:
                course.resize(step)
                break
        else:
            shrunk: Course[FlowBlob] | None = next((found for known in self._known if (found := known.shrunk(step)) is not None), None)
            course = Course(step) if shrunk is None else shrunk
        self._last = course
        self._past = [*self._past[1 - MOST_PAST :], course.kind]
        if not course.is_refined:
            course.refine(link=self.link, budget=self.activation_budget)
        self._known[:] = [course, *(other for other in self._known if other is not course)][:KNOWN_STEPS]
