"""What flow makes of ramps, changes, bad links and tiny budgets, on a clock."""

import random

import pytest

from backhaul import course, scheduling
from backhaul.flow import CopyOut, Link, Release
from backhaul.simulation import Need, Save
from tests.flow_workload import LAYER, LINK, accumulation, decisions_of, flow_of, gpipe, one_f_one_b, stage, train, vary

W1 = stage(one_f_one_b(12))
SAVED = sum(event.num_bytes for event in W1 if isinstance(event, Save))


def test_before_a_step_is_seen_everything_moves_and_the_budget_holds():
    playback = train(flow_of(20), W1)
    assert playback.out_bytes == SAVED
    assert playback.peak_resident_bytes <= 20e9


def test_ramp_up_uses_memory_that_is_free():
    playback = train(flow_of(30), W1, W1)
    ramp = W1[: 3 * 4 * len(LAYER)]  # three forwards, 29.6 GB
    assert max(num_bytes for _, num_bytes in playback.timeline[: len(ramp)]) > 25e9
    assert playback.timeline[len(ramp)][0] == pytest.approx(sum(event.compute_ms for event in ramp), rel=0.01)


def test_the_last_frames_are_moved_less():
    flow = flow_of(22.9)
    train(flow, W1)
    saves = [event for event in W1 if isinstance(event, Save)]
    moved = [0] * 12
    for decision in decisions_of(flow, W1):
        if isinstance(decision, CopyOut):
            moved[saves[decision.blob].frame] += saves[decision.blob].num_bytes
    assert moved[11] < 0.7 * moved[6]


def test_the_tail_of_forward_is_not_moved():
    events = stage(accumulation(1))
    flow = flow_of(None)
    train(flow, events)
    moved = {decision.blob for decision in decisions_of(flow, events)}
    assert moved
    assert max(moved) < 0.8 * 4 * len(LAYER)


def test_a_new_order_costs_one_step_and_is_learned():
    flow, other = flow_of(25), stage(gpipe(4))
    steady = train(flow, W1, W1).stall_ms
    learned = train(flow_of(25), other, other).stall_ms
    train(flow, other)
    assert train(flow, other).stall_ms == pytest.approx(learned, rel=0.05)
    assert train(flow, W1).stall_ms == pytest.approx(steady, rel=0.05)  # the old one is remembered


def test_two_kinds_of_step_in_turn_are_both_known():
    flow, small = flow_of(12), stage(accumulation(1), layers=8)
    big = [event for event in stage(gpipe(2)) if event.frame < 2]
    train(flow, big, small, big, small)
    misses = flow.num_misses
    train(flow, big, small, big, small)
    assert flow.num_misses == misses


def test_kinds_of_step_that_come_in_a_pattern_are_told_by_the_latest_few():
    """As on the last stage of DualPipeV, where each microbatch is a step and some of the backwards are split in halves."""
    flow, whole = flow_of(4), stage(accumulation(1))
    halves = [*whole, *(event for event in whole if isinstance(event, Need))]
    pattern = [halves, halves, whole, whole, whole]
    train(flow, *pattern * 3)
    reloads = flow.num_demand_reloads
    train(flow, *pattern)
    told = flow.num_demand_reloads - reloads
    in_turn = flow_of(4)
    train(in_turn, *[halves] * 9)
    reloads = in_turn.num_demand_reloads
    train(in_turn, halves, halves)
    assert told <= in_turn.num_demand_reloads - reloads


def test_a_microbatch_less_does_not_lose_the_step():
    flow = flow_of(27.2)
    train(flow, W1, W1)
    playback = train(flow, stage(one_f_one_b(11)))
    assert playback.stall_fraction < 0.05
    assert flow.num_misses < 3


def test_a_blob_more_or_less_here_and_there_does_not_lose_the_step():
    flow, rng = flow_of(27.2), random.Random(0)
    steady = train(flow, W1, W1).stall_fraction
    missing = {(event.frame, event.key) for event in W1 if rng.random() < 0.01}
    fewer = [event for event in W1 if (event.frame, event.key) not in missing]
    assert train(flow, fewer).stall_fraction < steady + 0.05


@pytest.mark.parametrize(("budget_gb", "off", "points"), [(35, 0.1, 0.6), (22.9, 0.1, 0.6), (27.2, 0.3, 3.5)])
def test_sizes_that_change_from_step_to_step_cost_little(budget_gb, off, points):
    rng = random.Random(0)
    flow = flow_of(budget_gb)
    steady = train(flow_of(budget_gb), W1, W1)
    train(flow, *(vary(W1, rng, sizes=off) for _ in range(3)))
    playbacks = [train(flow, vary(W1, rng, sizes=off)) for _ in range(4)]
    assert 100 * (sum(each.stall_fraction for each in playbacks) / 4 - steady.stall_fraction) <= points
    assert max(each.peak_resident_bytes for each in playbacks) <= budget_gb * 1e9 + (1 + off) * max(LAYER)


def test_spare_copies_are_made_only_where_sizes_change():
    def num_spares(flow):
        decisions = decisions_of(flow, W1)
        copied = {decision.blob for decision in decisions if isinstance(decision, CopyOut)}
        return len(copied - {decision.blob for decision in decisions if isinstance(decision, Release)})

    steady, changing = flow_of(27.2), flow_of(27.2)
    train(steady, W1, W1)
    train(changing, W1, vary(W1, random.Random(0), sizes=0.1))
    assert num_spares(steady) == 0
    assert num_spares(changing) > 0


def test_times_that_jitter_cost_little():
    rng = random.Random(0)
    flow = flow_of(27.2)
    steady = train(flow_of(27.2), W1, W1)
    train(flow, *(vary(W1, rng, times=0.1) for _ in range(6)))
    assert train(flow, vary(W1, rng, times=0.1)).stall_fraction <= steady.stall_fraction + 0.01


def test_a_schedule_is_made_again_ever_more_rarely(monkeypatch):
    made = []
    monkeypatch.setattr(course, "schedule", lambda *args, **kwargs: made.append(1) or scheduling.schedule(*args, **kwargs))
    rng, short = random.Random(0), stage(one_f_one_b(4))
    train(flow_of(20), *(vary(short, rng, sizes=0.5, times=0.5) for _ in range(34)))
    assert 4 <= len(made) <= 8  # after 1, 2, 3, 4, 5, 7, 11, 19 steps at most


def test_a_slow_link_moves_less_where_nothing_shall_wait():
    slow = Link(d2h_gbps=10, h2d_gbps=10, both_gbps=20)
    flow = flow_of(None, slow)
    playback = train(flow, W1, W1, W1, link=slow)
    assert playback.stall_fraction < 0.005
    assert 0 < playback.out_bytes < train(flow_of(None), W1, W1).out_bytes / 2


def test_a_link_slower_than_believed_is_found_out():
    slow = Link(d2h_gbps=50, h2d_gbps=50, both_gbps=90)
    playback = train(flow_of(None, LINK), *[W1] * 6, link=slow)
    assert playback.stall_fraction < 0.10


def test_a_one_way_link_is_not_asked_for_both_at_once():
    one_way = Link(d2h_gbps=50, h2d_gbps=50, both_gbps=50)
    flow = flow_of(None, one_way)
    playback = train(flow, W1, W1, W1, link=one_way)
    assert playback.stall_fraction < 0.005
    assert playback.out_bytes + playback.in_bytes <= 50e6 * playback.compute_ms


@pytest.mark.parametrize("budget_gb", [0, 0.1, 1])
def test_a_tiny_budget_holds_but_for_the_blob_at_hand(budget_gb):
    playback = train(flow_of(budget_gb), W1, W1, W1)
    assert playback.peak_resident_bytes <= budget_gb * 1e9 + max(LAYER)
    assert playback.out_bytes >= 0.99 * SAVED


def test_without_times_the_order_alone_is_enough_to_hold_the_budget_and_prefetch():
    flow = flow_of(27.2)
    train(flow, W1, timed=False)
    before = flow.num_demand_reloads
    playback = train(flow, W1, timed=False)
    assert playback.peak_resident_bytes <= 27.2e9
    assert flow.num_demand_reloads - before < before


def test_a_step_in_which_nothing_is_needed_teaches_nothing():
    flow = flow_of(27.2)
    steady = train(flow, W1, W1).stall_ms
    flow.open_frame(-1)
    flow.saved(-1, frame=-1, key="evaluation", num_bytes=1 << 20, movable=True)
    flow.dropped(-1)
    flow.close_frame(-1)
    assert train(flow, W1).stall_ms == pytest.approx(steady)


def test_what_is_needed_twice_is_released_in_between_without_a_second_copy():
    # A split backward: the pass for inputs needs everything once, the pass for weights again later.
    names = [(0, pack) for pack in range(40)]
    events = [Save(frame=0, key=name, num_bytes=200_000_000, compute_ms=3) for name in names]
    events += [Need(frame=0, key=name, compute_ms=8) for name in reversed(names)]
    events += [Need(frame=0, key=name, compute_ms=8) for name in reversed(names)]
    playback = train(flow_of(4), events, events)
    assert playback.out_bytes <= 40 * 200_000_000
    assert playback.in_bytes > playback.out_bytes
    assert playback.peak_resident_bytes <= 4e9 + 200_000_000  # and the one at hand


def test_what_is_needed_twice_comes_back_once():
    """The storage of a norm's output, say: three projections read it one after the other, and without a budget nothing waits for it."""
    events = stage(accumulation(1), layers=8)
    twice = list(events)
    for index in reversed(range(len(events) - 2)):
        if isinstance(events[index], Need):
            twice.insert(index + 3, events[index])  # two other needs lie between
    flow = flow_of(None)
    playback = train(flow, twice, twice, twice)
    assert playback.in_bytes == playback.out_bytes > 0
    assert playback.stall_fraction < 0.005


def test_a_step_that_lacks_a_few_items_is_the_same_step():
    flow = flow_of(22.9)
    steady = train(flow, W1, W1, W1).stall_ms
    futile = {(event.frame, event.key) for event in W1 if event.frame in (2, 7) and event.key in {(1, 1), (3, 8)}}
    fewer = [event for event in W1 if (event.frame, event.key) not in futile]
    train(flow, fewer, timed=False)  # no times of the new order are known
    assert flow.num_misses
    misses = flow.num_misses
    playback = train(flow, fewer)
    assert flow.num_misses == misses
    assert flow.predicted_stall_ms is not None
    assert playback.stall_ms < 1.1 * steady


def test_a_budget_of_one_layer_s_input_hides_the_copies_of_all():
    """As where every layer is a checkpoint: beside the input that the node at work has been given there is room for the next."""
    num_bytes = 64 << 20
    events = [Save(frame=0, key=layer, num_bytes=num_bytes, compute_ms=15) for layer in range(12)]
    events += [Need(frame=0, key=layer, compute_ms=40) for layer in reversed(range(12))]
    flow = flow_of(num_bytes / 1e9)
    playback = train(flow, events, events, events)
    assert playback.out_bytes >= 11 * num_bytes
    assert playback.stall_ms < 0.1
    assert playback.peak_resident_bytes <= 2 * num_bytes


def test_without_a_budget_a_link_that_others_use_too_is_found_out():
    flow = flow_of(None)
    slow = LINK.slower(0.75)
    first = train(flow, W1, W1, link=slow)
    assert first.stall_fraction > 0.02
    settled = train(flow, *[W1] * 12, link=slow)
    assert settled.stall_fraction < 0.005
    assert 0.5 < settled.out_bytes / first.out_bytes < 1


def test_one_slow_step_is_no_reason_to_move_less():
    flow = flow_of(None)
    before = train(flow, W1, W1, W1)
    assert train(flow, W1, link=LINK.slower(0.5)).stall_fraction > 0.02
    assert train(flow, *[W1] * 4).out_bytes == before.out_bytes


def pass_with_a_loss():
    """One forward of 20 GB and 120 ms, a loss that saves next to nothing, its backward, and the backward of the rest."""
    layers = range(40)
    forward = [Save(frame=0, key=("layer", layer), num_bytes=500_000_000, compute_ms=3.0) for layer in layers]
    loss = [Save(frame=0, key=("loss", chunk), num_bytes=2 << 20, compute_ms=5.0) for chunk in range(8)]
    back = [Need(frame=0, key=("loss", chunk), compute_ms=14.0) for chunk in reversed(range(8))]
    return forward, loss, [*back, *(Need(frame=0, key=("layer", layer), compute_ms=6.0) for layer in reversed(layers))]


@pytest.mark.parametrize("budget_gb", [14, 13, 11])
def test_in_a_step_of_one_pass_the_link_goes_on_while_the_loss_runs(budget_gb):
    forward, loss, back = pass_with_a_loss()
    step = [*forward, *loss, *back]
    flow = flow_of(budget_gb)
    playback = train(flow, step, step, step)
    levels = [num_bytes for _, num_bytes in playback.timeline]
    assert max(levels) <= budget_gb * 1e9 + 500_000_000
    assert levels[len(forward) + len(loss)] < (budget_gb - 1.5) * 1e9  # the loss takes 40 ms, the link moves 55 GB/s
    # What the link has not moved by the end of forward is waited for, and nothing else is.
    waits_ms = max(0.0, (20 - budget_gb) / 55.2 * 1e3 - 120)
    assert playback.stall_ms <= waits_ms + 15


def test_in_a_step_of_one_pass_a_budget_that_is_not_reached_moves_nothing():
    forward, loss, back = pass_with_a_loss()
    step = [*forward, *loss, *back]
    flow = flow_of(21)
    assert train(flow, step, step, step).out_bytes == 0


def test_in_a_step_of_one_pass_a_smaller_budget_has_less_resident_during_the_loss_and_waits_no_less():
    forward, loss, back = pass_with_a_loss()
    step = [*forward, *loss, *back]
    levels, stalls = [], []
    for budget_gb in range(19, 8, -1):
        flow = flow_of(budget_gb)
        train(flow, step, step)
        playback = train(flow, step)
        assert playback.out_bytes <= 1.5 * (20 - budget_gb) * 1e9 + 500_000_000
        levels.append([num_bytes for _, num_bytes in playback.timeline][len(forward) + len(loss)])
        stalls.append(playback.stall_ms)
    assert levels == sorted(levels, reverse=True)
    assert stalls == sorted(stalls)
    assert stalls[0] == 0


def test_where_passes_overlap_no_more_is_moved_than_the_budget_needs():
    flow = flow_of(30)
    needed = 1 - 30e9 / (16 * 2.47e9)  # of four passes in flight
    assert train(flow, W1, W1, W1).out_bytes < 1.4 * needed * SAVED


def test_in_a_step_of_one_pass_a_link_slower_than_believed_is_found_out():
    forward, loss, back = pass_with_a_loss()
    step = [*forward, *loss, *back]
    flow, slow = flow_of(12), Link(d2h_gbps=0.8 * 55.2, h2d_gbps=0.8 * 55.5, both_gbps=80.4)
    stalls = [train(flow, step, link=slow).stall_fraction for _ in range(12)]
    compute_ms = sum(event.compute_ms for event in step)
    needed = ((20 - 12) / (0.8 * 55.2) * 1e3 - 120) / compute_ms  # to be within the budget when the forward is over
    assert max(stalls[1:4]) > needed + 0.05  # more than it needs, which comes back late
    assert max(stalls[-2:]) < needed + 0.03


def test_in_a_step_of_one_pass_something_large_that_comes_and_goes_early_does_not_hide_the_peak():
    large = Save(frame=0, key="large", num_bytes=4_500_000_000, compute_ms=5.0)
    layers = [Save(frame=0, key=layer, num_bytes=100_000_000, compute_ms=3.0) for layer in range(35)]
    step = [large, *layers, *(Need(frame=0, key=layer, compute_ms=6.0) for layer in reversed(range(35)))]
    playback = train(flow_of(2), *[step] * 4)
    assert playback.stall_ms < 5
    assert max(num_bytes for _, num_bytes in playback.timeline[1:]) <= 2_100_000_000


def test_in_a_step_of_one_pass_a_link_is_trusted_again_once_it_is_as_fast_as_before():
    sizes = [int(0.15e9 * (0.2 + 1.6 * (layer * 7 % 10) / 9)) for layer in range(40)]
    step = [Save(frame=0, key=layer, num_bytes=size, compute_ms=2.0) for layer, size in enumerate(sizes)]
    step += [Need(frame=0, key=layer, compute_ms=4.0) for layer in reversed(range(40))]
    flow = flow_of(0.4 * sum(sizes) / 1e9)
    before = train(flow, *[step] * 4).stall_ms
    slow = [train(flow, step, link=LINK.slower(0.6)).stall_ms for _ in range(20)]
    assert slow[-1] < 0.6 * max(slow)
    assert train(flow, *[step] * 40).stall_ms <= before + 1
