"""Flow keeps its books right and its budget, whatever happens in whatever order."""

import random
from collections.abc import Callable, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.flow import BlobState, CopyOut, Decision, Flow, Link, Release

LINK = Link(d2h_gbps=50.0, h2d_gbps=50.0, both_gbps=90.0)
MB = 1_000_000


class Device:
    """What a device would hold if it did as flow says; refuses what cannot be done."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.sizes: dict[int, int] = {}
        self.resident: set[int] = set()
        self.copied: set[int] = set()
        self.fixed: set[int] = set()
        self.log: list[Decision] = []

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            blob = decision.blob
            assert blob in self.sizes, "decides about a blob that is gone"
            assert blob not in self.fixed, "moves what cannot be moved"
            self.log.append(decision)
            if isinstance(decision, CopyOut):
                assert blob in self.resident and blob not in self.copied
                self.copied.add(blob)
            elif isinstance(decision, Release):
                assert blob in self.resident and blob in self.copied
                self.resident.remove(blob)
            else:
                assert blob not in self.resident and blob in self.copied
                self.resident.add(blob)

    def save(self, blob: int, frame: int, key: object, num_bytes: int, movable: bool = True) -> None:
        self.sizes[blob] = num_bytes
        self.resident.add(blob)
        if not movable:
            self.fixed.add(blob)
        decisions = self.flow.saved(blob, frame=frame, key=key, num_bytes=num_bytes, movable=movable)
        self.carry_out(decisions)
        self.check(blob)

    def need(self, blob: int) -> None:
        self.carry_out(self.flow.needed(blob))
        assert blob in self.resident
        self.check(blob)

    def drop(self, blob: int) -> None:
        self.flow.dropped(blob)
        for group in (self.resident, self.copied, self.fixed):
            group.discard(blob)
        del self.sizes[blob]

    def keep(self, blob: int) -> None:
        self.flow.keep(blob)
        self.resident.add(blob)
        self.fixed.add(blob)

    def readopt(self, blob: int) -> None:
        self.flow.readopted(blob)
        self.resident.add(blob)

    @property
    def resident_bytes(self) -> int:
        return sum(self.sizes[blob] for blob in self.resident)

    def check(self, blob: int) -> None:
        """The books are right, and the budget holds but for this event's blob, as long as anything else could leave."""
        assert self.flow.resident_bytes == self.resident_bytes
        for each in self.sizes:
            assert (self.flow.state(each) is BlobState.RELEASED) == (each not in self.resident)
        budget = self.flow.activation_budget
        if budget is not None and blob not in self.fixed and self.resident_bytes > budget + self.sizes[blob]:
            assert self.resident - self.fixed <= {blob}, "over the budget, and something could leave"


Script = list[tuple[str, int, int]]  # what happens, frame, key


def write_script(rng: random.Random, *, num_frames: int, num_keys: int) -> Script:
    """Interleave frames at random: every blob is saved once, needed up to three times or never, dropped at last."""
    script: Script = []
    todo = list(range(num_frames))
    alive: list[tuple[int, int]] = []
    saving: dict[int, int] = {}
    while todo or saving or alive:
        choice = rng.random()
        if todo and (choice < 0.2 or not (saving or alive)):
            saving[todo.pop(0)] = 0
        elif saving and (choice < 0.6 or not alive):
            frame = rng.choice(sorted(saving))
            script.append(("save", frame, saving[frame]))
            alive.append((frame, saving[frame]))
            saving[frame] += 1
            if saving[frame] == num_keys:
                del saving[frame]
        elif alive:
            frame, key = alive[-1] if rng.random() < 0.7 else rng.choice(alive)
            script += [("need", frame, key)] * rng.choice((0, 1, 1, 1, 1, 2, 3))
            script.append(("drop", frame, key))
            alive.remove((frame, key))
    return script


def play(
    device: Device, script: Script, size_of: Callable[[int, int], int], *, tokens: int = 0, chaos: random.Random | None = None
) -> list[float]:
    """Play a script as one step; return made-up times of its events."""
    flow = device.flow
    left: dict[int, int] = {}
    for what, frame, _ in script:
        left[frame] = left.get(frame, 0) + (what == "save")
    blobs: dict[tuple[int, int], int] = {}
    opened: set[int] = set()
    times: list[float] = []
    now = 0.0
    for what, frame, key in script:
        now += (7 * key + 3 * frame) % 5 * 0.3
        before = flow.num_events
        if frame not in opened:
            opened.add(frame)
            flow.open_frame(tokens + frame)
        if what == "save":
            blob = blobs[frame, key] = tokens + len(blobs)
            device.save(blob, tokens + frame, ("layer", key), size_of(frame, key), movable=(frame + key) % 7 != 0)
        elif what == "need":
            device.need(blobs[frame, key])
        else:
            device.drop(blobs[frame, key])
            left[frame] -= 1
            if not left[frame]:
                flow.close_frame(tokens + frame)
        if flow.num_events > before:
            times.append(now)
        if chaos is not None and device.sizes and chaos.random() < 0.05:
            blob = chaos.choice(sorted(device.sizes))
            if chaos.random() < 0.3:
                device.keep(blob)
            elif blob in device.copied:
                device.readopt(blob)
    return times


@settings(max_examples=60, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    budget=st.sampled_from((None, 0, 1, 20 * MB, 100 * MB, 400 * MB, 10_000 * MB)),
    window=st.sampled_from((0, 30 * MB, 1000 * MB)),
    timed=st.booleans(),
    num_frames=st.integers(1, 6),
    num_keys=st.integers(1, 12),
)
def test_books_and_budget_hold_over_any_order_of_events(rng, budget, window, timed, num_frames, num_keys):
    flow = Flow(activation_budget=budget, link=LINK, window_bytes=window)
    device = Device(flow)
    script = write_script(rng, num_frames=num_frames, num_keys=num_keys)
    other = write_script(rng, num_frames=num_frames, num_keys=num_keys)
    sizes = {(frame, key): rng.randrange(60 * MB) for frame in range(num_frames) for key in range(num_keys)}
    chaos = random.Random(rng.randrange(1 << 30))
    steps = [(script, sizes, None), (script, sizes, None), (script, sizes, None)]
    steps += [
        (other, sizes, None),
        (script, {name: rng.randrange(60 * MB) for name in sizes}, None),
        (other, sizes, chaos),
        (script, sizes, chaos),
    ]
    missing = {(frame, key) for _, frame, key in script if rng.random() < 0.1}
    steps += [([line for line in script if line[1:] not in missing], sizes, None), (script, sizes, None)]
    for number, (lines, size, disorder) in enumerate(steps):
        times = play(device, lines, lambda frame, key, size=size: size[frame, key], tokens=1000 * number, chaos=disorder)
        assert flow.resident_bytes == 0
        assert flow.ahead_bytes == 0
        if timed:
            flow.times(times)
