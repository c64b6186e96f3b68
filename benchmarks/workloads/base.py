"""What a workload is: models, the order of a step, and where its inputs come from.

Covers: the pipeline schedules, the interface that the runner drives, and the neutral marks around groups of saved tensors.
Does not cover: any one model (dsv3.py, glm.py, qwen.py), or what is done with its saved tensors (benchmarks/variants.py).
"""

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn


class Group(AbstractContextManager[Tensor]):
    """Mark where a group of saved tensors begins and ends, for peers that must be told; by itself do nothing.

    ``with group as tensor`` goes around the module whose saved tensors form the group; ``commit`` gets a tensor made when nothing
    outside the graph needs them any more, and returns it.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.tensor = tensor

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        pass

    def commit(self, output: Tensor) -> Tensor:
        """Say that the group is complete, and return ``output``."""
        return output


class GroupFactory(Protocol):
    """What a model asks for its groups."""

    def __call__(self, name: str, tensor: Tensor) -> Group:
        """Make the group that ``tensor`` enters."""


Kind = Literal["forward", "backward", "input", "weight"]  # the last two are the halves of a backward that is split


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One entry of a schedule: one chunk of the model, forward or backward, for one microbatch."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def one_f_one_b(microbatches: int, *, stages: int, chunks: int = 1) -> tuple[Slot, ...]:
    """Return the slots of a step in the order in which the first stage of a pipeline runs them.

    With one chunk: ``stages - 1`` forwards, then pairs of a forward and a backward, then the backwards that are left. With more chunks, the
    interleaved order of Narayanan et al. 2021 (arXiv:2104.04473): groups of ``stages`` microbatches go through one chunk after the other.

    >>> " ".join(map(str, one_f_one_b(4, stages=3)))
    'F0 F1 F2 B0 F3 B1 B2 B3'
    """
    if chunks > 1 and microbatches % stages:
        raise ValueError(f"an interleaved schedule needs a multiple of {stages} microbatches, not {microbatches}")
    warmup = stages - 1 if chunks == 1 else 2 * (stages - 1) + (chunks - 1) * stages
    total = microbatches * chunks
    warmup = min(warmup, total)

    def slot(kind: Literal["forward", "backward"], index: int) -> Slot:
        rank, within = divmod(index, stages * chunks)
        chunk, offset = divmod(within, stages)
        return Slot(kind=kind, microbatch=rank * stages + offset, chunk=chunk if kind == "forward" else chunks - 1 - chunk)

    slots = [slot("forward", index) for index in range(warmup)]
    for index in range(warmup, total):
        slots += [slot("forward", index), slot("backward", index - warmup)]
    slots += [slot("backward", index) for index in range(total - warmup, total)]
    return tuple(slots)


class Workload(abc.ABC):
    """A training step of a model, as one rank sees it.

    ``chunks`` are the modules that are called once a microbatch; ``blocks`` are what a checkpoint may go around, none where the model
    brings its own.
    """

    chunks: nn.ModuleList
    blocks: list[nn.Module]
    plan: Mapping[str, str] | None = None  # rules for ``bh.apply``: all that is cheap is recomputed
    lean: Mapping[str, str] = {"*": "offload"}  # rules that recompute less; these: what autograd's nodes make again by themselves
    tight: Mapping[str, str] | None = None  # rules that recompute some products, too, to come down to what full checkpointing leaves
    slots: tuple[Slot, ...]
    facts: dict[str, object]  # sizes and versions that the results should name

    @abc.abstractmethod
    def forward(self, slot: Slot) -> Tensor:
        """Run one chunk on the slot's microbatch. What comes in is made here, as if it had just been received."""

    @abc.abstractmethod
    def output_grad(self, slot: Slot) -> Tensor | None:
        """Return the gradient of what ``forward`` returned; ``None`` for a loss."""

    def backward(self, slot: Slot, output: Tensor | None) -> None:
        """Run one chunk's backward. ``output`` is what ``forward`` returned, ``None`` for a second half."""
        torch.autograd.backward(output, self.output_grad(slot))

    def close(self) -> None:  # most workloads hold nothing beyond their tensors
        """Give back what outlives the tensors."""


class Around(Protocol):
    """What a variant does around a step; see benchmarks/variants.py."""

    def start_step(self) -> None:
        """Called once at the start of every step."""

    def microbatch(self, chunk: int) -> AbstractContextManager[object]:
        """Go around one forward of one chunk."""


def run_step(workload: Workload, around: Around, *, before: Callable[[Slot], None] = lambda slot: None) -> None:
    """Run every slot of one step in order; ``before`` is called at the start of each."""
    around.start_step()
    alive: dict[tuple[int, int], Tensor] = {}
    for slot in workload.slots:
        before(slot)
        key = slot.microbatch, slot.chunk
        if slot.kind == "forward":
            with around.microbatch(slot.chunk):
                alive[key] = workload.forward(slot)
        else:
            workload.backward(slot, alive.pop(key, None))


def seeded_normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return normal noise that depends on the seed alone. Made on the device, so that nothing waits for a copy."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int) -> None:
    """Fill matrices with seeded noise that keeps activations of order one, and vectors (the scales of norms) with ones."""
    for index, parameter in enumerate(module.parameters()):
        if parameter.ndim == 1:
            parameter.fill_(1)
        elif not parameter.is_meta:
            # nn.Linear keeps (out, in); the experts keep (expert, in, out).
            fan_in = parameter.shape[1]
            parameter.normal_(std=fan_in**-0.5, generator=torch.Generator(parameter.device).manual_seed(seed * 10_007 + index))
