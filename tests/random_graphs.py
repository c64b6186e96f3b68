"""Random training steps as plain data, and the claim that managing them changes no bit.

Covers: running a program (random_programs.py) plain and managed, comparing every gradient, making programs with hypothesis.
Does not cover: any one feature; the tests named after it do.

    python -m tests.random_graphs 50000
"""

import gc
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import backhaul as bh
from backhaul._torch import version_of
from backhaul.testing import RecordingTier, same_bits
from backhaul.tiers.base import TierFull
from tests.random_programs import LATE, NAMES, Instruction, Program, perform

NUM_STEPS = 3  # the first is learned from, the second follows it, and after two futile copies a key is left alone

# Running a program


def randn(shape: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Block(nn.Module):
    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        super().__init__()
        self.instructions = instructions

    def forward(self, values: list[Tensor], log: list[str]) -> None:
        for instruction in self.instructions:
            log.append(perform(values, instruction))


class Model(nn.Module):
    """Runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(block) for block in program.blocks)
        self.weight = nn.Parameter(torch.zeros(program.shape))
        self.register_buffer("buffer", torch.zeros(program.shape))
        self.num_outputs = program.num_outputs

    def forward(self, leaves: list[Tensor], log: list[str], values: list[Tensor]) -> list[Tensor]:
        values += [
            *leaves,
            self.weight.t() if self.weight.dim() == 2 else self.weight,
            self.weight.to(torch.bfloat16),
            self.buffer,
            self.weight,
        ]
        for leaf in leaves:
            values.append(leaf * 1)  # one that may be written in place
        for block in self.blocks:
            block(values, log)
        wanted = [value for value in values if value.requires_grad and value.numel()]
        return wanted[-self.num_outputs :]


def leaves_of(program: Program, step: int, frame: int) -> list[Tensor]:
    seed = 100 * step + frame
    x, y = randn(program.shape, seed=seed), randn((3,), seed=seed, dtype=torch.float64)
    z = randn((2, 4), seed=seed, dtype=torch.complex64)
    return [leaf.requires_grad_() for leaf in (x, y, z)]


def loss_of(output: Tensor) -> Tensor:
    output = output.float() if output.dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16) else output
    return (torch.view_as_real(output) if output.is_complex() else output).double().sum()


Outcome = list[Tensor | None] | BaseException


def gradients(outputs: list[Tensor], inputs: list[Tensor], **options: bool) -> Outcome:
    try:
        losses = [loss_of(output) for output in outputs]
        return list(torch.autograd.grad(sum(losses[1:], losses[0]), inputs, allow_unused=True, **options))
    except (RuntimeError, OSError) as error:
        error.__traceback__ = None
        return error


def backwards(how: str, outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[Outcome]:
    """Take the outputs back in one of several ways."""
    if how == "sum":
        yield gradients(outputs, inputs)
    elif how == "each":
        for number, output in enumerate(outputs):
            yield gradients([output], inputs, retain_graph=number < len(outputs) - 1)
    elif how == "backwards":  # the outputs in the other order, each twice
        for output in reversed(outputs):
            yield gradients([output], inputs, retain_graph=True)
            yield gradients([output], inputs, retain_graph=True)
    elif how == "twice":
        yield gradients(outputs, inputs, retain_graph=True)
        yield gradients(outputs, inputs)
        yield gradients(outputs, inputs)  # the graph is gone
    elif how == "penalty":
        first = gradients(outputs, inputs, create_graph=True)
        yield first
        if not isinstance(first, BaseException):
            again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
            if again:
                yield gradients(again, inputs)
    elif how == "some":
        yield gradients(outputs[:1], inputs[:1])
    else:
        assert how == "none"


BACKWARDS = ("sum", "each", "backwards", "twice", "penalty", "some", "none")


def detached(outcome: Outcome) -> Outcome:
    return outcome if isinstance(outcome, BaseException) else [None if g is None else g.detach().clone() for g in outcome]


def train(program: Program, model: nn.Module) -> Iterator[tuple[list[str], list[list[Outcome]]]]:
    """Run the program's steps; yield, for each, what its instructions did and what the backwards of each frame gave."""
    for step in range(NUM_STEPS):
        # Nothing is carried over: where plain autograd refuses a backward and a managed one goes on, it may write what is the model's.
        model.buffer = randn(program.shape, seed=2 * step)
        with torch.no_grad():
            model.weight.copy_(randn(program.shape, seed=2 * step + 1))
        log: list[str] = []
        results: list[list[Outcome]] = []
        frames = []
        for frame in range(program.num_frames):
            torch.default_generator.manual_seed(frame)  # torch.manual_seed formats stacks
            leaves, values = leaves_of(program, step, frame), []
            frames.append(([*leaves, model.weight], model(leaves, log, values)))
            for instruction in program.late_writes:
                log.append(perform(values, instruction))
            del values
        for inputs, outputs in reversed(frames) if program.num_frames == 2 else frames:
            if outputs:
                results.append([detached(outcome) for outcome in backwards(program.backward, outputs, inputs)])
        del frames, inputs, outputs, leaves
        yield log, results


class Fault:
    """Fails one copy of a kind, each time with an exception of its own: one that is kept would keep what its traceback holds."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = kind, number

    def __call__(self, number: int) -> Exception | None:
        if number != self.number:
            return None
        return TierFull("no room") if self.kind == "store" else OSError("bad disk")


def tier_of(program: Program) -> RecordingTier:
    faults = {f"fail_{kind}": Fault(kind, number) for kind, number in program.faults}
    return RecordingTier(deferred=program.deferred, capacity=program.capacity, **faults)


def described(outcome: Outcome) -> str:
    return (
        f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else "\n".join(str(gradient) for gradient in outcome)
    )


def equal(a: Outcome, b: Outcome) -> bool:
    return (
        isinstance(a, list)
        and isinstance(b, list)
        and len(a) == len(b)
        and all((x is None and y is None) or (x is not None and y is not None and same_bits(x, y)) for x, y in zip(a, b, strict=True))
    )


@dataclass(frozen=True)
class Leave:
    """What else a managed backward may do."""

    to_fail: bool = False  # a copy back fails
    to_refuse: bool = False  # the weight is written, so that a cast of it cannot be made again; plain autograd has kept the cast


def acceptable(managed: Outcome, plain: Outcome, forward: Outcome, leave: Leave) -> bool:
    """Say whether the managed outcome is plain autograd's, or, where that one refuses, a refusal or what the forward's values give."""
    if leave.to_fail and isinstance(managed, OSError):
        return True
    if leave.to_refuse and isinstance(managed, RuntimeError) and "inplace" in str(managed):
        return True
    if isinstance(plain, list):
        return equal(managed, plain)
    written = "inplace" in str(plain)
    if isinstance(managed, BaseException):
        same = str(managed) == str(plain) or (written and ("inplace" in str(managed) or str(managed) == str(forward)))
        return type(managed) is type(plain) and same
    return written and equal(managed, forward)


def assert_acceptable(managed: list[Outcome], plain: list[Outcome], forward: list[Outcome], leave: Leave, *, where: str) -> None:
    """Assert it for the backwards of a frame. Where one of them fails, there may be fewer."""
    assert len(managed) == len(plain) or leave != Leave() or any(isinstance(outcome, BaseException) for outcome in plain)
    failed = False
    for number, (got, expected) in enumerate(zip(managed, plain, strict=False)):
        right = forward[number] if number < len(forward) else expected
        if failed and any(equal(got, other) for other in forward):
            continue  # the backward that failed was to be the last, and has left the graph to the next one
        failed = failed or isinstance(got, OSError)
        assert acceptable(got, expected, right, leave), (
            f"{where}, backward {number}: got\n{described(got)}\nplain autograd gives\n{described(expected)}\n"
            f"with the forward's values\n{described(right)}"
        )


@dataclass
class Count:
    """What a run of many programs has covered."""

    num_programs: int = 0
    num_moving: int = 0  # in which bytes left the device
    num_refused: int = 0  # in which plain autograd refused a backward
    num_gradients: int = 0


def check(program: Program, count: Count) -> None:
    """Assert that managing the program changes nothing but memory."""
    oldest = torch.ones((), requires_grad=True) * 2
    untouched = Model(program)
    expected = list(train(program, untouched))
    refused = any(isinstance(outcome, BaseException) for _, frames in expected for frame in frames for outcome in frame)
    if refused:
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor.clone()):
            forward = list(train(program, Model(program)))
    else:
        forward = expected
    model, tier = Model(program), tier_of(program)
    leave = Leave(
        to_fail=any(kind == "load" for kind, _ in program.faults),
        to_refuse=version_of(untouched.weight) > NUM_STEPS,  # by others than `train`
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        handle = bh.offload(model, activation_budget=program.budget, tier=tier, min_bytes=program.min_bytes)
        steps = train(program, model)
        for step in range(NUM_STEPS):
            try:
                log, results = next(steps)
            except ValueError as error:
                if "is below the" in str(error) and program.budget:
                    break  # what cannot move is more than the budget
                raise
            assert log == expected[step][0], f"step {step}: instructions went otherwise:\n{log}\nexpected\n{expected[step][0]}"
            assert len(results) == len(expected[step][1])
            for managed, plain, right in zip(results, expected[step][1], forward[step][1], strict=True):
                assert_acceptable(managed, plain, right, leave, where=f"step {step}")
                count.num_gradients += len(managed)
            log = results = managed = plain = right = None
    steps.close()
    stats = handle.stats
    handle.remove()
    del model, steps  # a buffer that was written with gradient holds its graph
    assert_nothing_left(handle, tier, oldest)
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes
    count.num_programs += 1
    count.num_moving += bool(stats.offloaded_bytes)
    count.num_refused += refused


def assert_nothing_left(handle: bh.Handle, tier: RecordingTier, oldest: Tensor) -> None:
    """Assert that all memory is back. ``oldest`` is the end of a graph older than the program's."""
    if handle.stats.resident_bytes or tier.used_bytes:
        # A backward that raised leaves nodes in this thread's queue, and cycles of exceptions and frames. The queue is worked off
        # newest first, so that an old graph's backward empties it.
        oldest.backward()
        gc.collect()
    assert handle.stats.resident_bytes == 0
    assert tier.used_bytes == 0


# Programs as hypothesis makes them

numbers = st.integers(0, 11)
choices = st.integers(0, 5)
faults = st.tuples(st.sampled_from(["store", "write", "load"]), st.integers(0, 8))


def instructions(names: Sequence[str], *, min_size: int, max_size: int) -> st.SearchStrategy[tuple[Instruction, ...]]:
    return st.lists(st.tuples(st.sampled_from(names), numbers, numbers, choices), min_size=min_size, max_size=max_size).map(tuple)


def often_empty(strategy: st.SearchStrategy[tuple[Any, ...]]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.one_of(st.just(()), st.just(()), strategy)


programs = st.builds(
    Program,
    blocks=st.lists(instructions(NAMES, min_size=1, max_size=12), min_size=1, max_size=3).map(tuple),
    shape=st.sampled_from([(4, 3), (6,), (2, 3, 4), (16, 17), (0, 3)]),
    num_outputs=st.integers(1, 3),
    num_frames=st.integers(1, 3),
    backward=st.sampled_from(BACKWARDS),
    late_writes=often_empty(instructions(LATE, min_size=0, max_size=2)),
    budget=st.sampled_from([0, 0, None, 1 << 30, 512, 2048]),
    min_bytes=st.sampled_from([0, 0, 0, 64, 200]),
    capacity=st.sampled_from([None, None, None, 1024, 100]),
    faults=often_empty(st.lists(faults, max_size=2, unique_by=lambda fault: fault[0]).map(tuple)),
    deferred=st.sampled_from([True, True, True, False]),
)


def check_many(num_programs: int, *, derandomize: bool) -> Count:
    """Check so many different programs; raise for the smallest that fails."""
    count = Count()

    @settings(
        max_examples=num_programs,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(programs)
    def every_program(program: Program) -> None:
        note(str(program))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, about casts
            check(program, count)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that a collection looks at the program's objects alone
    try:
        every_program()
    finally:
        gc.unfreeze()
    return count


if __name__ == "__main__":
    begin = time.perf_counter()
    print(check_many(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, derandomize=False), f"in {time.perf_counter() - begin:.0f} s")
