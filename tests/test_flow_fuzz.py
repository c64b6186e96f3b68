"""Steps of any kinds in any order: decisions can be carried out, the budget holds after each, and nothing piles up."""

import gc
import random
import time
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul import course as courses
from backhaul import scheduling
from backhaul.entries import FlowBlob, FlowFrame
from backhaul.flow import Decision, Flow, Link, Reload
from backhaul.simulation import Need, Save
from backhaul.steps import Pace, Step
from tests.flow_workload import LINK, accumulation, flow_of, one_f_one_b, stage, train
from tests.test_flow import MB, Device, Script, write_script

FLOW_TYPES = (Flow, courses.Course, Step, Pace, scheduling.Schedule, FlowBlob, FlowFrame, list, tuple, dict, set, frozenset, deque)


class StrictDevice(Device):
    """Holds the budget to after each single decision: what comes ahead of its use never adds to what has to be there anyway."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.at_hand = -1

    def carry_out(self, decisions: list[Decision]) -> None:
        budget = self.flow.activation_budget
        for decision in decisions:
            super().carry_out([decision])
            if budget is not None and isinstance(decision, Reload) and decision.blob != self.at_hand:
                fixed_bytes = sum(self.sizes[blob] for blob in self.fixed)
                assert self.resident_bytes <= max(budget, fixed_bytes) + self.sizes[self.at_hand], "came ahead of its use over the budget"

    def save(self, blob: int, frame: int, key: object, num_bytes: int, movable: bool = True) -> None:
        self.at_hand = blob
        super().save(blob, frame, key, num_bytes, movable)

    def need(self, blob: int) -> None:
        self.at_hand = blob
        super().need(blob)


def play(
    device: StrictDevice, script: Script, size_of: Callable[[int, int], int], *, first: int, ends: int, rng: random.Random
) -> list[float]:
    """Play a script as one step up to its line ``ends``, where an exception drops all there is; return made-up times of its events."""
    flow = device.flow
    left: dict[int, int] = {}
    for what, frame, _ in script:
        left[frame] = left.get(frame, 0) + (what == "save")
    blobs: dict[tuple[int, int], int] = {}
    alive: dict[int, set[int]] = {}  # by open frame
    times: list[float] = []
    for position, (what, frame, key) in enumerate(script[:ends]):
        num_events = flow.num_events
        if frame not in alive:
            alive[frame] = set()
            flow.open_frame(first + frame)
        if what == "save":
            blob = blobs[frame, key] = first + len(blobs)
            alive[frame].add(blob)
            device.save(blob, first + frame, ("layer", key), size_of(frame, key), movable=(frame + key) % 7 != 0)
        elif what == "need":
            device.need(blobs[frame, key])
        else:
            device.drop(blobs[frame, key])
            alive[frame].remove(blobs[frame, key])
            left[frame] -= 1
            if not left[frame]:
                del alive[frame]
                flow.close_frame(first + frame)
        if flow.num_events > num_events:
            times.append(0.7 * position)
    for frame in rng.sample(sorted(alive), len(alive)):
        for blob in rng.sample(sorted(alive[frame]), len(alive[frame])):
            device.drop(blob)
        flow.close_frame(first + frame)
    return times


def without(script: Script, share: float, rng: random.Random) -> Script:
    """Return the script without this share of its blobs."""
    missing = {(frame, key) for _, frame, key in script if rng.random() < share}
    return [line for line in script if line[1:] not in missing]


def split(script: Script) -> Script:
    """Return the script with a second backward: whatever is needed is needed again before it is dropped."""
    return [each for line in script for each in ([line, line] if line[0] == "need" else [line])]


def disturbed(script: Script, rng: random.Random) -> Script:
    """Return the script with a few needs left out, and a few there twice."""
    lines = list(script)
    for _ in range(3):
        needs = [position for position, line in enumerate(lines) if line[0] == "need"]
        if needs:
            position = rng.choice(needs)
            lines[position : position + 1] = rng.choice(([], [lines[position]] * 2))
    return lines


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    budget=st.sampled_from((None, 0, 1, 20 * MB, 60 * MB, 100 * MB, 400 * MB, 10_000 * MB)),
    window=st.sampled_from((0, 30 * MB, 1000 * MB)),
    num_scripts=st.integers(1, 4),
    pattern=st.lists(st.integers(0, 11), min_size=1, max_size=7),
)
def test_kinds_of_step_in_any_pattern_keep_the_books_and_the_budget(seed, budget, window, num_scripts, pattern):
    rng = random.Random(seed)
    flow = Flow(activation_budget=budget, link=LINK, window_bytes=window)
    device = StrictDevice(flow)
    kinds: list[Script] = []
    for _ in range(num_scripts):
        script = write_script(rng, num_frames=rng.randint(1, 6), num_keys=rng.randint(1, 12))
        kinds += [script, without(script, rng.choice((0.02, 0.05, 0.1, 0.2)), rng), split(script)]
    sizes = {(frame, key): rng.choice((0, 1, *(rng.randrange(60 * MB) for _ in range(8)))) for frame in range(6) for key in range(12)}
    for number in range(24):
        script = kinds[pattern[number % len(pattern)] % len(kinds)]
        if rng.random() < 0.15:
            script = without(script, 0.08, rng)
        if rng.random() < 0.1:
            script = disturbed(script, rng)
        size = sizes if rng.random() < 0.8 else {name: rng.randrange(60 * MB) for name in sizes}
        if rng.random() < 0.1:
            rate = rng.choice((0.5, 5.0, 50.0, 250.0))
            flow.link = Link(d2h_gbps=rate, h2d_gbps=rng.choice((rate, 50.0)), both_gbps=1.2 * rate)
        ends = len(script) if rng.random() < 0.9 else rng.randrange(len(script) + 1)
        times = play(device, script, lambda frame, key, size=size: size[frame, key], first=1000 * (number + 1), ends=ends, rng=rng)
        assert flow.resident_bytes == flow.ahead_bytes == 0
        if rng.random() < 0.8:
            flow.times(times, [rng.random() for _ in times], [position for position in range(len(times)) if rng.random() < 0.1])
        elif rng.random() < 0.5:
            flow.times(times[1:])


def kept_alive(flow: Flow) -> list[object]:
    """Return what a flow keeps alive by itself."""
    kept: dict[int, object] = {}
    found: list[object] = [flow]
    while found:
        each = found.pop()
        if id(each) not in kept and isinstance(each, FLOW_TYPES):
            kept[id(each)] = each
            found += gc.get_referents(each)
    return list(kept.values())


def test_what_is_remembered_stays_small_over_two_thousand_steps_that_are_all_different():
    rng = random.Random(0)
    device = StrictDevice(Flow(activation_budget=60 * MB, link=LINK))
    kept = []
    for number in range(2000):
        script = write_script(rng, num_frames=2, num_keys=6)
        times = play(device, script, lambda frame, key: rng.randrange(60 * MB), first=1000 * number, ends=len(script), rng=rng)
        device.flow.times(times)
        device.log.clear()
        if number % 100 == 99:
            kept.append(len(kept_alive(device.flow)))
    assert max(kept[1:]) < 1.5 * kept[0]


def test_only_the_kinds_that_are_expected_again_are_remembered_whole():
    rng = random.Random(0)
    device = StrictDevice(Flow(activation_budget=60 * MB, link=LINK))
    for number in range(70):
        script = write_script(rng, num_frames=2, num_keys=6)
        device.flow.times(play(device, script, lambda frame, key: MB, first=1000 * number, ends=len(script), rng=rng))
    assert sum(isinstance(each, courses.Course) for each in kept_alive(device.flow)) <= 8


def test_a_step_that_never_ends_holds_the_budget_and_teaches_nothing():
    """As where a loop holds an output that nobody goes back through until the next one takes its place."""
    events: list[Save | Need] = []
    for frame in range(200):
        events.append(Save(frame=frame, key="held", num_bytes=2 * MB))
        events += [Save(frame=frame, key=key, num_bytes=20 * MB, compute_ms=2) for key in range(8)]
        if frame:
            events.append(Need(frame=frame - 1, key="held"))
        events += [Need(frame=frame, key=key, compute_ms=4) for key in reversed(range(8))]
    events.append(Need(frame=199, key="held"))
    flow = flow_of(0.06)
    playback = train(flow, events)
    assert playback.peak_resident_bytes <= 60 * MB + 20 * MB
    assert flow.num_steps == 1
    assert flow.num_demand_reloads <= 2 * 200  # the guess, the reverse of the order of saving, brings the rest


@pytest.mark.parametrize("budget_gb", [None, 10])
@pytest.mark.parametrize("order", ["reversed", "shuffled", "in halves"])
def test_a_step_of_five_thousand_events_is_planned_in_less_than_three_seconds(budget_gb, order, monkeypatch):
    took: list[float] = []

    def timed(*args, **kwargs):
        began = time.process_time()
        try:
            return scheduling.schedule(*args, **kwargs)
        finally:
            took.append(time.process_time() - began)

    monkeypatch.setattr(courses, "schedule", timed)
    rng, num_items = random.Random(0), 1667 if order == "in halves" else 2500
    saves = [Save(frame=0, key=key, num_bytes=rng.randrange(MB, 64 * MB), compute_ms=0.5) for key in range(num_items)]
    needs = [Need(frame=0, key=key, compute_ms=1) for key in reversed(range(num_items))]
    if order == "shuffled":
        rng.shuffle(needs)
    elif order == "in halves":
        needs *= 2
    train(flow_of(budget_gb), [*saves, *needs], [*saves, *needs])
    assert max(took) < 3


def lacking(events, share, seed):
    rng = random.Random(seed)
    missing = {(event.frame, event.key) for event in events if rng.random() < share}
    return [event for event in events if (event.frame, event.key) not in missing]


@pytest.mark.parametrize("budget_gb", [None, 22.9])
def test_kinds_of_step_that_lack_items_of_each_other_are_all_known_the_second_time(budget_gb):
    whole = stage(one_f_one_b(12))
    fewer = lacking(whole, 0.03, seed=1)
    fewest = lacking(fewer, 0.03, seed=2)
    flow = flow_of(budget_gb)
    train(flow, whole, fewer, fewest)
    misses = flow.num_misses
    for events in (whole, fewer, fewest, whole, fewer, fewest):
        alone = flow_of(budget_gb)
        steady = train(alone, events, events).stall_fraction
        assert train(flow, events).stall_fraction <= steady + 0.03
    assert flow.num_misses == misses


def test_blobs_that_outgrow_the_budget_come_back_once_each():
    """Beside the one at hand there is no room for the next, whatever was planned when they were smaller."""
    small, large = (
        [
            *(Save(frame=0, key=key, num_bytes=num_bytes, compute_ms=15) for key in range(12)),
            *(Need(frame=0, key=key, compute_ms=40) for key in reversed(range(12))),
        ]
        for num_bytes in (50 * MB, 150 * MB)
    )
    flow = flow_of(0.1)
    train(flow, small, small)
    playback = train(flow, large)
    assert playback.in_bytes <= playback.out_bytes
    assert playback.peak_resident_bytes <= 100 * MB + 150 * MB


def test_steps_in_which_the_link_changes_are_planned_for_the_link_there_is():
    events = stage(accumulation(1), layers=8)
    flow = flow_of(12)
    for factor in (1.0, 0.5, 0.1, 2.0, 1.0):
        flow.link = LINK.slower(factor)
        train(flow, events, link=flow.link)
        again = train(flow, events, link=flow.link)
        fresh = train(flow_of(12, flow.link), events, events, link=flow.link)
        assert again.stall_fraction <= 1.05 * fresh.stall_fraction + 0.01
