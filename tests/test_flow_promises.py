"""What flow promises of the time of its decisions: nothing leaves before its bytes are wanted, nothing comes back long before its use."""

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from backhaul.flow import Decision, Release, Reload
from backhaul.simulation import Event, Need, Playback, Save
from tests.flow_workload import LAYER, LINK, OverheardFlow, flow_of, one_f_one_b, stage, train

W1 = stage(one_f_one_b(12))
SAVES = [event for event in W1 if isinstance(event, Save)]
LAYER_MS = sum(LAYER) / LINK.h2d_gbps / 1e6  # to bring back one layer


class LoggingFlow(OverheardFlow):
    """A flow that notes its decisions by event, and how much was on its way back."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by_event: list[Sequence[Decision]] = []
        self.peak_ahead_bytes = 0

    def saved(self, *args: Any, **kwargs: Any) -> Sequence[Decision]:
        return self._log(super().saved(*args, **kwargs))

    def needed(self, blob: int) -> Sequence[Decision]:
        return self._log(super().needed(blob))

    def _log(self, decisions: Sequence[Decision]) -> Sequence[Decision]:
        self.by_event.append(decisions)
        self.peak_ahead_bytes = max(self.peak_ahead_bytes, self.ahead_bytes)
        return decisions


def third_step(budget_gb: float | None, factor: float = 1.0) -> tuple[LoggingFlow, Playback]:
    """Return a flow that has logged its third step alone, over a link at this part of its rates."""
    link = LINK.slower(factor)
    flow = LoggingFlow(activation_budget=None if budget_gb is None else int(budget_gb * 1e9), link=link)
    train(flow, W1, W1, link=link)
    flow.by_event, flow.peak_ahead_bytes = [], 0
    return flow, train(flow, W1, link=link)


def leads_ms(flow: LoggingFlow, playback: Playback) -> list[float]:
    """Return for each reload how long before its use it was issued."""
    item = {(event.frame, event.key): place for place, event in enumerate(SAVES)}
    uses = {item[event.frame, event.key]: position for position, event in enumerate(W1) if isinstance(event, Need)}
    at = [ms for ms, _ in playback.timeline]
    return [
        at[uses[decision.blob]] - at[position]
        for position, decisions in enumerate(flow.by_event)
        for decision in decisions
        if isinstance(decision, Reload)
    ]


def waits_ms(playback: Playback, events: Sequence[Event], begin: int, end: int) -> float:
    """Return how long compute waited between two events."""
    took = playback.timeline[end][0] - playback.timeline[begin][0]
    return took - sum(
        (events[position + 1].compute_ms if isinstance(events[position + 1], Save) else 0.0)
        + (events[position].compute_ms if isinstance(events[position], Need) else 0.0)
        for position in range(begin, end)
    )


@pytest.mark.parametrize("budget_gb", [35, 27.2, 22.9])
def test_what_is_released_at_an_event_would_not_have_fitted_into_the_budget(budget_gb):
    flow, playback = third_step(budget_gb)
    num_releases = num_wanted = 0
    for decisions, (_, resident_bytes) in zip(flow.by_event, playback.timeline, strict=True):
        released = [SAVES[decision.blob].num_bytes for decision in decisions if isinstance(decision, Release)]
        num_releases += len(released)
        num_wanted += len(released) * (resident_bytes + sum(released) > 0.98 * budget_gb * 1e9)
    assert num_releases > 0
    assert num_wanted >= 0.97 * num_releases


@pytest.mark.parametrize("budget_gb", [35, 27.2, 22.9, None])
def test_prefetch_is_just_in_time(budget_gb):
    flow, playback = third_step(budget_gb)
    leads = leads_ms(flow, playback)
    assert leads
    assert statistics.median(leads) < LAYER_MS
    assert max(leads) < 2 * LAYER_MS  # of a step of 1754 ms
    assert flow.peak_ahead_bytes < 2 * sum(LAYER)  # the rest of the budget is for what has yet to leave


def test_prefetch_begins_sooner_over_a_slower_link():
    fast, slow = (statistics.median(leads_ms(*third_step(35, factor))) for factor in (1.0, 0.5))
    assert 1.5 * fast < slow < 4 * fast


@pytest.mark.parametrize("budget_gb", [35, 27.2, 22.9])
def test_neither_ramp_up_within_the_budget_nor_cool_down_waits(budget_gb):
    playback = third_step(budget_gb)[1]
    per_pass = 4 * len(LAYER)
    two_forwards, three_backwards = 2 * per_pass, len(W1) - 3 * per_pass
    assert waits_ms(playback, W1, 0, two_forwards) < 1
    assert waits_ms(playback, W1, three_backwards, len(W1) - 1) < 1


def test_a_copy_is_waited_for_only_where_the_budget_is_too_small():
    assert train(flow_of(45), W1, W1, W1).stall_ms == pytest.approx(0, abs=1e-6)
    assert third_step(35)[1].stall_ms < 1
    assert third_step(None)[1].stall_ms < 1
