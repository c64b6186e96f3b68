"""Schedules for flow: what one rank of a pipeline saves and needs, in order."""

from collections.abc import Iterator

from backhaul.simulation import Event, Need, Save

MIB = 1 << 20
# One layer of the DeepSeek-V3 stage: what it saves for one microbatch, in MB as given (2.47 GB in all).
LAYER_MB = (56, 56, 192, 192, 256, 128, 56, 56, 56, 448, 256, 128, 448, 56, 56)


def one_f_one_b(num_microbatches: int, in_flight: int) -> Iterator[tuple[str, int]]:
    """Yield ("F" or "B", microbatch) as the first stage of a pipeline runs them."""
    waiting: list[int] = []
    for microbatch in range(num_microbatches):
        yield "F", microbatch
        waiting.append(microbatch)
        if len(waiting) == in_flight:
            yield "B", waiting.pop(0)
    for microbatch in waiting:
        yield "B", microbatch


def stage(order: Iterator[tuple[str, int]], *, layers: int = 4, forward_ms: float = 44.9 / 4, backward_ms: float = 101.3 / 4, sizes=None) -> list[Event]:
    """Return the events of a stage: forwards that save, backwards that need the same in reverse; ms are of one layer."""
    sizes = sizes or [size * 1_000_000 * 2470 // sum(LAYER_MB) for size in LAYER_MB]
    total = sum(sizes)
    events: list[Event] = []
    for kind, microbatch in order:
        names = [(layer, pack) for layer in range(layers) for pack in range(len(sizes))]
        if kind == "F":
            events += [Save(frame=microbatch, key=name, num_bytes=sizes[name[1]], compute_ms=forward_ms * sizes[name[1]] / total) for name in names]
        else:
            events += [Need(frame=microbatch, key=name, compute_ms=backward_ms * sizes[name[1]] / total) for name in reversed(names)]
    return events
