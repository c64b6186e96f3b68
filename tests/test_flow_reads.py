"""Copies keep out of the way of the host's own reads: a router's counts, an ``.item()``."""

from collections.abc import Iterable

import pytest

from backhaul.schedules import Schedule
from backhaul.scheduling import READ_COST, schedule
from backhaul.steps import Pace, Step
from backhaul.timing import Timeline
from backhaul.wire import Release, Wire
from tests.flow_workload import BACKWARD_MS, FORWARD_MS, LAYER, LINK, one_f_one_b

ROUTER = 9  # what a layer saves before its router reads counts on the host


def recorded(num_microbatches: int = 20) -> tuple[Step, list[float], list[int]]:
    """Return a step of a pipeline stage, the compute after each event, and the events before which the host has read."""
    step, gaps, reads = Step(), [], []
    items: dict[int, list[int]] = {}
    shares = [size / sum(LAYER) for size in LAYER]
    for kind, frame in one_f_one_b(num_microbatches):
        if kind == "F":
            for layer in range(4):
                for pack, size in enumerate(LAYER):
                    if pack == ROUTER:
                        reads.append(len(step.events))
                    items.setdefault(frame, []).append(len(step.names))
                    step.events.append(len(step.names))
                    step.names.append((frame, (layer, pack)))
                    step.sizes.append(size)
                    step.drops.append(0)
                    gaps.append(FORWARD_MS * shares[pack])
        else:
            for item in reversed(items[frame]):
                step.events.append(~item)
                step.drops[item] = len(step.events)
                gaps.append(BACKWARD_MS * shares[item % len(LAYER)])
    step.fixed = [0] * len(step.events)
    return step, gaps, reads


def busy_reads(step: Step, gaps: list[float], reads: list[int], plan: Schedule) -> int:
    """Play a schedule; return how many reads find a copy on the lane to the tier."""
    wire, busy = Wire(LINK), 0
    for position, event in enumerate(step.events):
        busy += position in reads and wire.backlog_out() > 0
        for decision in plan.decisions.get(position, ()):
            wire.play(decision, step.sizes[decision.blob])
        if event < 0:
            wire.wait_in(~event)
        wire.advance(wire.now + gaps[position])
    return busy


@pytest.mark.parametrize(("budget_gb", "share"), [(32, 0.4), (28, 0.45), (23.5, 0.45)])
def test_few_reads_find_the_lane_busy_and_it_pays(budget_gb, share):
    step, gaps, reads = recorded()
    plain = schedule(step, gaps, link=LINK, budget=int(budget_gb * 1e9)).without_spares()
    polite = schedule(step, gaps, link=LINK, budget=int(budget_gb * 1e9), reads=reads).without_spares()
    assert busy_reads(step, gaps, reads, polite) <= share * len(reads)
    assert busy_reads(step, gaps, reads, polite) < 0.8 * busy_reads(step, gaps, reads, plain)
    assert cost_ms(step, gaps, reads, polite) <= cost_ms(step, gaps, reads, plain)


def cost_ms(step: Step, gaps: list[float], reads: list[int], plan: Schedule) -> float:
    return plan.stall_ms + READ_COST * busy_reads(step, gaps, reads, plan)


@pytest.mark.parametrize("budget_gb", [None, 32, 28, 23.5])
def test_just_after_a_read_little_is_issued(budget_gb):
    step, gaps, reads = recorded()
    budget = None if budget_gb is None else int(budget_gb * 1e9)

    def issued_bytes(plan: Schedule, events: Iterable[int]) -> int:
        issued = [each for position in events for each in plan.decisions.get(position, ()) if not isinstance(each, Release)]
        return sum(step.sizes[each.blob] for each in issued)

    after = [position for read in reads for position in range(read, read + 2) if sum(gaps[read:position]) < 1]
    polite = schedule(step, gaps, link=LINK, budget=budget, reads=reads)
    plain = schedule(step, gaps, link=LINK, budget=budget)
    assert issued_bytes(polite, after) <= 0.03 * issued_bytes(polite, range(len(gaps)))
    assert issued_bytes(plain, after) > 0.05 * issued_bytes(plain, range(len(gaps)))


class ScriptedClock:
    """A clock of a device that comes to a mark when it is told."""

    def __init__(self) -> None:
        self.num_stamps = 0
        self.num_reached = 0

    def stamp(self) -> int:
        self.num_stamps += 1
        return self.num_stamps

    def reached(self, stamp: int) -> bool:
        return stamp <= self.num_reached

    def between_ms(self, begin: int, end: int) -> float:
        return float(end - begin)


def test_the_host_has_read_where_the_device_had_done_all_it_was_given():
    clock = ScriptedClock()
    timeline = Timeline(clock)
    for position in range(10):
        if position in (3, 7):
            clock.num_reached = clock.num_stamps
        timeline.mark()
    clock.num_reached = 10
    timeline.end_step(learned=True)
    assert timeline.finished() == ([float(ms) for ms in range(10)], [0.0] * 10, [3, 7])
    assert timeline.finished() is None


def test_a_moment_counts_as_a_read_if_it_comes_in_every_step_and_not_if_the_host_is_always_late():
    _, gaps, _ = recorded(num_microbatches=4)
    times = [sum(gaps[:position]) for position in range(len(gaps))]
    pace = Pace()
    waited = [0.0] * len(times)
    pace.measure(times, waited, idle=[1, 2])  # the first step is like no other
    pace.measure(times, waited, idle=[5, 9, 40])
    pace.measure(times, waited, idle=[9, 40, 77])
    assert pace.reads == [9, 40]
    for _ in range(3):
        pace.measure(times, waited, idle=range(len(times)))
    assert pace.reads == []


def test_the_first_step_is_forgotten_once_there_is_another():
    pace = Pace()
    pace.measure([0.0, 500.0, 800.0], [0.0, 0.0, 0.0])
    assert pace.gaps == [500.0, 300.0, 0.0]
    pace.measure([0.0, 5.0, 9.0], [0.0, 1.0, 0.0])
    assert pace.gaps == [5.0, 3.0, 0.0]


def test_gaps_are_what_compute_took_in_most_steps_less_its_waits():
    pace = Pace()
    for first, wait in ((90.0, 0.0), (10.0, 0.0), (14.0, 4.0), (30.0, 0.0), (10.0, 0.0)):
        pace.measure([0.0, first, first + 5.0], [wait, 0.0, 0.0])
    assert pace.gaps[0] == 10.0
    assert pace.gaps[1] == 5.0
