"""When times are taken and plans are made, and that no moment of the host's own leaves copies undone."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul import course as courses
from backhaul.flow import Flow, Link
from backhaul.schedules import Schedule
from backhaul.scheduling import schedule
from backhaul.simulation import Need, Save, simulate
from backhaul.stations import Station
from backhaul.steps import Pace, Step
from backhaul.tiers.base import Transfer
from backhaul.timing import Timeline, Waits
from backhaul.wire import CopyOut, Release, Reload, Wire
from tests.flow_workload import LINK, accumulation, flow_of, one_f_one_b, stage

MB = 1_000_000


class Stamp:
    """A point in the work that can be referred to weakly."""

    def __init__(self, ms: float) -> None:
        self.ms = ms


class SteppedClock:
    """A clock whose work comes to each stamp at the time that was set, once ``reached_ms`` is as late."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached_ms = 0.0
        self.noted: Callable[[Stamp], object] = id

    def stamp(self) -> Stamp:
        stamp = Stamp(self.now)
        self.noted(stamp)
        return stamp

    def reached(self, stamp: Stamp) -> bool:
        return stamp.ms <= self.reached_ms

    def between_ms(self, begin: Stamp, end: Stamp) -> float:
        return end.ms - begin.ms


class SlowCopy(Transfer):
    """A copy that is waited for ``ms``, and may fail then."""

    def __init__(self, clock: SteppedClock, ms: float, *, fails: bool) -> None:
        self.clock, self.ms, self.fails = clock, ms, fails

    def wait(self) -> None:
        self.clock.now += self.ms
        if self.fails:
            raise OSError("broken")

    order = wait

    def done(self) -> bool:
        return not self.ms


def timed_station() -> tuple[SteppedClock, Timeline, Waits]:
    clock = SteppedClock()
    timeline = Timeline(clock)
    return clock, timeline, Waits(clock, timeline)


def wait_for(waits: Waits, clock: SteppedClock, ms: float, *, fails: bool = False) -> None:
    copy = SlowCopy(clock, ms, fails=fails)
    waits.measure(copy, copy.wait)


def test_waits_are_told_by_the_mark_before_them_in_sum():
    clock, timeline, waits = timed_station()
    wait_for(waits, clock, 100)  # before the first mark: no part of the step
    for position in range(4):
        timeline.mark()
        clock.now += 10
        for ms in ((), (3,), (0, 2, 4), (7,))[position]:
            wait_for(waits, clock, ms)
    timeline.end_step(learned=True)
    clock.reached_ms = clock.now - 1  # all marks, but not the end of the last wait
    assert timeline.finished() is None
    clock.reached_ms = clock.now
    assert timeline.finished() == ([0.0, 10.0, 23.0, 39.0], [0.0, 3.0, 6.0, 7.0], [])
    assert timeline.finished() is None
    assert waits.total_ms == 116.0


def test_a_wait_that_fails_is_told_as_well():
    clock, timeline, waits = timed_station()
    timeline.mark()
    with pytest.raises(OSError, match="broken"):
        wait_for(waits, clock, 5, fails=True)
    timeline.end_step(learned=True)
    clock.reached_ms = clock.now
    assert timeline.finished() == ([0.0], [5.0], [])


def test_a_step_that_teaches_nothing_or_is_begun_anew_tells_nothing_and_leaves_nothing():
    station = Station(torch.device("cpu"), None)
    for forget in (lambda: station.timeline.end_step(learned=False), station.start_anew):
        station.timeline.mark()
        wait_for(station.waits, SteppedClock(), 5)
        forget()
        assert station.timeline.finished() is None
        assert station.timeline.num_marks == 0


def test_stamps_of_waits_that_are_over_are_let_go():
    clock, timeline, waits = timed_station()
    stamps: list[weakref.ref[Stamp]] = []
    clock.noted = lambda stamp: stamps.append(weakref.ref(stamp))
    for _ in range(50):
        timeline.mark()
        wait_for(waits, clock, 5)
        timeline.end_step(learned=True)
        clock.reached_ms = clock.now
        assert timeline.finished() is not None
    gc.collect()
    assert sum(each() is not None for each in stamps) <= 4


def test_a_gap_is_the_lower_of_the_two_in_the_middle_of_the_latest_four_and_never_negative():
    pace = Pace()
    for gap in (1.0, 1.0, 1.0, 1.0, 8.0, 2.0, 4.0, 6.0):
        pace.measure([0.0, gap, gap + 3.0], [0.0, 5.0, 0.0])
    assert pace.gaps == [4.0, 0.0, 0.0]


def test_times_without_waits_are_compute_and_times_of_another_length_are_passed_over():
    flow = flow_of(12)
    events = stage(accumulation(1), layers=2)
    simulate(flow, events, timed=False)
    flow.times([0.0] * 7)
    assert not flow._known[0].pace.gaps
    flow.times([float(position) for position in range(len(events))])
    assert flow._known[0].pace.gaps == [1.0] * (len(events) - 1) + [0.0]


class Overlapping(Flow):
    """A flow that is told the times of a step at the end of the next, as a device is that is far behind its host; it notes its plans."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.untold: tuple[Sequence[float], Sequence[float]] | None = None
        self.plans: list[str] = []  # since the last step: "begin" or "end"
        self.moment = ""

    def open_frame(self, frame: int) -> None:
        self.moment = "begin"
        super().open_frame(frame)
        self.moment = "amid"

    def refine(self) -> None:
        if self.untold is not None:
            super().times(*self.untold)
            self.untold = None
        self.moment = "end"
        super().refine()

    def times(self, ms: Sequence[float], waited: Sequence[float] = (), idle: object = ()) -> None:
        self.untold = (list(ms), list(waited))


@pytest.fixture
def overlapping(monkeypatch) -> Overlapping:
    flow = Overlapping(activation_budget=18_000_000_000, link=LINK)

    def noted(*args: Any, **kwargs: Any) -> Schedule:
        flow.plans.append(flow.moment)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(courses, "schedule", noted)
    return flow


def plans_of(flow: Overlapping, *steps: Sequence[Save | Need]) -> list[list[str]]:
    """Play steps; return the moments at which plans were made in each."""
    made = []
    for events in steps:
        flow.plans = []
        simulate(flow, events)
        made.append(flow.plans)
    return made


def test_a_plan_is_made_at_the_end_of_the_first_step_by_which_times_are_known(overlapping):
    events = stage(one_f_one_b(6))
    assert plans_of(overlapping, *[events] * 3)[:2] == [[], ["end"]]
    assert plans_of(overlapping, *[events] * 20)[2:] == [[]] * 18


def test_another_link_is_planned_for_at_the_end_of_the_next_step_and_another_budget_at_its_beginning(overlapping):
    events = stage(one_f_one_b(6))
    plans_of(overlapping, *[events] * 8)
    overlapping.link = LINK.slower(0.5)
    first, *others = plans_of(overlapping, *[events] * 8)
    assert first == ["end"]
    assert all(set(each) <= {"end"} for each in others)
    assert not any(others[4:])
    overlapping.activation_budget = 20_000_000_000
    assert plans_of(overlapping, events)[0][0] == "begin"


def test_a_link_that_flickers_a_little_is_planned_for_a_few_times(overlapping):
    events, made = stage(one_f_one_b(4)), 0
    for number in range(40):
        overlapping.link = LINK.slower(0.95 if number % 2 else 1.0)
        made += len(plans_of(overlapping, events)[0])
    assert made <= courses.EARLY_PLANS + 4


def test_kinds_of_step_in_turn_are_each_planned_for_once(overlapping):
    kinds = [stage(one_f_one_b(6)), stage(accumulation(1), layers=8)]
    made = sum(map(len, plans_of(overlapping, *kinds * 10)))
    assert 2 <= made <= 4


def recorded(num_blobs: int, num_bytes: int, *, save_ms: float, need_ms: float) -> tuple[Step, list[float]]:
    """Return a step that saves some blobs and needs them in reverse, each dropped after its use, and the compute after each event."""
    events = [*range(num_blobs), *(~item for item in reversed(range(num_blobs)))]
    names: list[tuple[int, Any]] = [(0, item) for item in range(num_blobs)]
    drops = [2 * num_blobs - item for item in range(num_blobs)]
    step = Step(events=events, names=names, sizes=[num_bytes] * num_blobs, drops=drops, fixed=[0] * len(events))
    return step, [save_ms] * num_blobs + [need_ms] * num_blobs


def peak_of(step: Step, plan: Schedule) -> int:
    """Return the most bytes that are resident after an event, where a schedule can be carried out as it is."""
    resident: set[int] = set()
    copied: set[int] = set()
    peak = 0
    for position, event in enumerate(step.events):
        resident -= {item for item in resident if step.drops[item] <= position}
        if event >= 0:
            resident.add(event)
        for decision in plan.decisions.get(position, ()):
            item = decision.blob
            assert (item in resident) is not isinstance(decision, Reload)
            assert (item in copied) is not isinstance(decision, CopyOut)
            if isinstance(decision, CopyOut):
                copied.add(item)
            elif isinstance(decision, Release):
                resident.remove(item)
            else:
                resident.add(item)
        assert event >= 0 or ~event in resident
        peak = max(peak, sum(step.sizes[item] for item in resident))
    return peak


@pytest.mark.parametrize("budget_mb", [None, 0, 200, 700])
@pytest.mark.parametrize("save_ms", [0.0, 0.02, 0.7, 5.0])
def test_a_schedule_can_be_carried_out_wherever_the_host_reads(budget_mb, save_ms):
    step, gaps = recorded(20, 50 * MB, save_ms=save_ms, need_ms=2 * save_ms)
    rng, last = random.Random(0), len(step.events) - 1
    some = sorted(rng.sample(range(last), 6))
    for reads in ([], [0], [last], [0, last], [18, 19, 20, 21], list(range(last + 1)), some, some[::-1]):
        budget = None if budget_mb is None else budget_mb * MB
        peak = peak_of(step, schedule(step, gaps, link=LINK, budget=budget, reads=reads))
        assert budget is None or peak <= budget + 50 * MB


def test_reads_do_not_keep_blobs_on_the_device_for_which_there_is_time():
    step, gaps = recorded(60, 120 * MB, save_ms=3.0, need_ms=6.0)  # copies take 0.8 of the link's time
    plain = peak_of(step, schedule(step, gaps, link=LINK, budget=None))
    polite = peak_of(step, schedule(step, gaps, link=LINK, budget=None, reads=range(2, 60, 3)))
    assert polite <= 3 * plain


def test_a_reload_that_must_start_in_the_gap_after_a_read_does():
    step, gaps = recorded(4, 500 * MB, save_ms=20.0, need_ms=20.0)
    for read in range(5, 8):
        assert schedule(step, gaps, link=LINK, budget=1400 * MB, reads=[read]).stall_ms <= 1.0


def test_a_lane_that_is_empty_has_no_backlog():
    rng, wire = random.Random(0), Wire(Link(d2h_gbps=55.2, h2d_gbps=55.5, both_gbps=100.5))
    for item in range(500):
        wire.copy_out(item, rng.randrange(200 * MB))
        for _ in range(4):
            wire.advance(wire.now + rng.random())
        wire.advance(wire.now + 20)
        assert not wire.queue_out()
        assert wire.backlog_out() == 0


def test_plans_are_made_before_the_last_work_of_a_backward_is_given_to_the_device(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)])
    moments: list[str] = []
    where = "outside"

    def noted(*args: Any, **kwargs: Any) -> Schedule:
        moments.append(where)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(courses, "schedule", noted)
    monkeypatch.setattr(courses, "DRIFT", 0.0)  # there is always news
    with bh.offload(model, activation_budget=200_000, tier="host", min_bytes=0) as handle:
        for _ in range(8):
            where = "forward"
            loss = model(torch.randn(256, 64)).sum()  # of which no copy is futile: nobody else has it
            where = "backward"
            loss.backward()
            del loss
            where = "outside"
        assert handle.stats.offloaded_bytes
    assert moments[0] == "forward"  # the times of the first step are there: it was a CPU
    assert len(moments) > 3
    assert set(moments[1:]) == {"backward"}


def test_without_a_budget_nothing_is_moved_that_leaves_after_the_peak_is_over():
    step, gaps = recorded(60, 100 * MB, save_ms=1.0, need_ms=3.0)
    plan = schedule(step, gaps, link=LINK, budget=None)
    resident: set[int] = set()
    levels = []
    for position, event in enumerate(step.events):
        resident -= {item for item in resident if step.drops[item] <= position}
        resident |= {event} if event >= 0 else set()
        levels.append(len(resident))
        for decision in plan.decisions.get(position, ()):
            if isinstance(decision, Release):
                assert levels[-1] >= 0.75 * max(levels)
                resident.remove(decision.blob)
            elif isinstance(decision, Reload):
                resident.add(decision.blob)
    assert max(levels) < 40  # of 60: some do leave
    num_copies = sum(isinstance(each, CopyOut) for issued in plan.decisions.values() for each in issued)
    assert 20 <= num_copies < 40


def test_where_the_device_waits_for_the_host_a_budget_moves_no_more_than_it_needs():
    step, gaps = recorded(60, 100 * MB, save_ms=1.0, need_ms=3.0)

    def num_copies(*, host_is_ahead: bool) -> int:
        plan = schedule(step, gaps, link=LINK, budget=2500 * MB, host_is_ahead=host_is_ahead).without_spares()
        return sum(isinstance(decision, CopyOut) for issued in plan.decisions.values() for decision in issued)

    assert 35 == num_copies(host_is_ahead=False) < num_copies(host_is_ahead=True)


def test_the_host_is_ahead_unless_the_device_is_idle_at_many_events():
    pace, ms = Pace(), [float(position) for position in range(100)]
    pace.measure(ms, [0.0] * 100, idle=range(1, 100))
    assert not pace.host_is_ahead
    assert not pace.only(range(50)).host_is_ahead
    assert pace.reads == []
    for _ in range(2):
        pace.measure(ms, [0.0] * 100, idle=[7, 50])
    assert pace.host_is_ahead
    assert pace.reads == [7, 50]
