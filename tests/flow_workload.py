"""What one rank of a pipeline saves and needs, in order."""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from backhaul.flow import Decision, Flow, Link
from backhaul.simulation import Event, Need, Playback, Save, simulate

LINK = Link(d2h_gbps=55.2, h2d_gbps=55.5, both_gbps=100.5)  # PCIe 5 x16 as measured

# One layer of a DeepSeek-V3 stage and 4096 tokens, in MiB and in the order of saving, stretched to 2.47 GB with the small rest.
LAYER_MIB = (56, 56, 192, 192, 256, 128, 56, 56, 56, 448, 256, 128, 448, 56, 56)
LAYER = [size * 2_470_000_000 // sum(LAYER_MIB) for size in LAYER_MIB]
FORWARD_MS = 44.9 / 4  # one layer
BACKWARD_MS = 101.3 / 4

Order = Iterable[tuple[str, int]]  # ("F" or "B", frame)


def one_f_one_b(num_microbatches: int, in_flight: int = 4) -> Iterator[tuple[str, int]]:
    """Order as the first stage of a pipeline runs it: ramp-up, forward and backward in turn, cool-down."""
    for microbatch in range(num_microbatches):
        yield "F", microbatch
        if microbatch >= in_flight - 1:
            yield "B", microbatch - in_flight + 1
    for microbatch in range(max(0, num_microbatches - in_flight + 1), num_microbatches):
        yield "B", microbatch


def interleaved(num_microbatches: int, *, ranks: int = 4, chunks: int = 2) -> Iterator[tuple[str, int]]:
    """Order of the first rank of an interleaved pipeline; a frame is one chunk of one microbatch."""

    def frame(number: int, *, backward: bool) -> int:
        group, place = divmod(number, ranks * chunks)
        chunk = place // ranks
        return (group * ranks + place % ranks) * chunks + (chunks - 1 - chunk if backward else chunk)

    total = num_microbatches * chunks
    ramp = min(total, (ranks - 1) * 2 + (chunks - 1) * ranks)
    for number in range(total + ramp):
        if number < total:
            yield "F", frame(number, backward=False)
        if number >= ramp:
            yield "B", frame(number - ramp, backward=True)


def gpipe(num_microbatches: int) -> Iterator[tuple[str, int]]:
    """All forwards, then all backwards in the same order."""
    yield from (("F", microbatch) for microbatch in range(num_microbatches))
    yield from (("B", microbatch) for microbatch in range(num_microbatches))


def accumulation(num_microbatches: int) -> Iterator[tuple[str, int]]:
    """One microbatch after the other; nothing is alive in between, so each is a step of its own."""
    for microbatch in range(num_microbatches):
        yield "F", microbatch
        yield "B", microbatch


def stage(order: Order, *, layers: int = 4) -> list[Event]:
    """Forwards that save layer by layer, and backwards that need the same in reverse."""
    names = [(layer, pack) for layer in range(layers) for pack in range(len(LAYER))]
    shares = [size / sum(LAYER) for size in LAYER]
    events: list[Event] = []
    for kind, frame in order:
        if kind == "F":
            events += [Save(frame=frame, key=name, num_bytes=LAYER[name[1]], compute_ms=FORWARD_MS * shares[name[1]]) for name in names]
        else:
            events += [Need(frame=frame, key=name, compute_ms=BACKWARD_MS * shares[name[1]]) for name in reversed(names)]
    return events


def vary(events: Sequence[Event], rng: random.Random, *, sizes: float = 0.0, times: float = 0.0) -> list[Event]:
    """Return the events with each size and each time off by up to these fractions."""

    def off(most: float) -> float:
        return rng.uniform(1 - most, 1 + most)

    return [
        dataclasses.replace(event, compute_ms=event.compute_ms * off(times), num_bytes=int(event.num_bytes * off(sizes)))
        if isinstance(event, Save)
        else dataclasses.replace(event, compute_ms=event.compute_ms * off(times))
        for event in events
    ]


def flow_of(budget_gb: float | None, link: Link = LINK) -> "OverheardFlow":
    """Return a flow with this budget in GB."""
    return OverheardFlow(activation_budget=None if budget_gb is None else int(budget_gb * 1e9), link=link)


def train(flow: Flow, *steps: Sequence[Event], link: Link = LINK, timed: bool = True) -> Playback:
    """Play the steps one after the other; return the last."""
    for events in steps:
        playback = simulate(flow, events, link=link, timed=timed)
    return playback


def decisions_of(flow: "OverheardFlow", events: Sequence[Event]) -> list[Decision]:
    """Return what flow decides over a step; blobs are numbered as they are saved."""
    flow.made = []
    train(flow, events)
    return flow.made


class OverheardFlow(Flow):
    """A flow that notes what it decides."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.made: list[Decision] = []

    def saved(self, *args: Any, **kwargs: Any) -> Sequence[Decision]:
        decisions = super().saved(*args, **kwargs)
        self.made += decisions
        return decisions

    def needed(self, blob: int) -> Sequence[Decision]:
        decisions = super().needed(blob)
        self.made += decisions
        return decisions
