"""When memory may be dropped where more than one stream computes ([Note: Whose memory] in stations.py)."""

import weakref

import torch

from backhaul.flow import Link
from backhaul.stations import DUPLEX, Station
from backhaul.tiers.base import Transfer


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class FakeStream:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


class FakeCopy(Transfer):
    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait(self) -> None:
        self.asked.append("wait")

    def order(self) -> None:
        self.asked.append("order")

    def done(self) -> bool:
        return False


def station_with(num_streams: int) -> tuple[Station, list[FakeStream]]:
    station = Station(torch.device("cpu"), None)
    streams = [FakeStream() for _ in range(num_streams)]
    station.streams = dict(enumerate(streams))  # type: ignore[arg-type]
    return station, streams


def test_with_one_stream_it_is_enough_to_wait():
    station, _ = station_with(1)
    copy = FakeCopy()
    station.wait_to_drop(copy, torch.zeros(4, dtype=torch.uint8))
    assert copy.asked == ["wait"]
    assert not station.dropped


def test_with_two_streams_memory_is_held_while_anybody_else_may_give_it_to_a_kernel():
    station, (first, _) = station_with(2)
    source = torch.zeros(4, dtype=torch.uint8)
    station.wait_to_drop(FakeCopy(), source)
    station.let_go()
    assert not first.events
    assert station.holds(source.untyped_storage())
    del source
    station.let_go()
    assert len(first.events) == 1
    assert not station.dropped


def test_with_two_streams_memory_is_held_until_both_have_passed_what_came_before_the_next_call():
    station, (first, second) = station_with(2)
    copy, source = FakeCopy(), torch.zeros(4, dtype=torch.uint8)
    storage = weakref.ref(source.untyped_storage())
    station.wait_to_drop(copy, source)
    del source
    assert copy.asked == ["order"]
    assert not first.events  # the kernel that reads it is not launched yet: this is still the pack of its operation
    station.let_go()
    assert (len(first.events), len(second.events)) == (1, 1)
    first.events[0].passed = True
    station.let_go()
    assert storage() is not None
    second.events[0].passed = True
    station.let_go()
    assert storage() is None


class FakeTier:
    rates_gbps: tuple[float, float] | None = None
    duplex_gbps: float | None = None


def test_the_link_is_what_the_tier_reaches_each_way_and_both_ways():
    station, tier = Station(torch.device("cpu"), None), FakeTier()
    guessed = station.flow.link
    station.measure(tier, only_if_new=True)
    assert station.flow.link == guessed
    tier.rates_gbps = (54.0, 56.0)
    station.measure(tier, only_if_new=True)
    assert station.flow.link == Link(d2h_gbps=54.0, h2d_gbps=56.0, both_gbps=DUPLEX * 110.0)
    tier.duplex_gbps = 105.0  # most copies ran alone
    station.measure(tier, only_if_new=False)
    assert station.flow.link.both_gbps == DUPLEX * 110.0
    tier.duplex_gbps = 80.0  # another device of the host copies, too
    station.measure(tier, only_if_new=False)
    assert station.flow.link.both_gbps == 80.0
    tier.rates_gbps = (54.5, 55.5)
    station.measure(tier, only_if_new=False)
    assert station.flow.link == Link(d2h_gbps=54.0, h2d_gbps=56.0, both_gbps=80.0)
