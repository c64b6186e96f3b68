"""The vocabulary of random programs: what an instruction does to a list of tensors.

Covers: ``Program`` as plain data, custom Functions that save in unusual ways, ``perform``.
Does not cover: running a program plain and managed (random_graphs.py).

A program is a list of instructions on a growing list of tensors. An instruction is a name and three small numbers: which tensors it takes,
counted from the newest modulo how many there are, and a choice. So any numbers make a program, and what a failure shrinks to can be read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Custom Functions


class SavesAll(torch.autograd.Function):
    """Saves an input, an intermediate, its output and a mask; reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half, mask = x * 0.5, x.abs() > 0.5
        y = half * x
        ctx.save_for_backward(x, half, mask, y, None, x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, half, mask, y, nothing, again = ctx.saved_tensors
        assert nothing is None
        twice = ctx.saved_tensors
        return gradient * (x + half + again + mask * y + twice[1] * twice[3]).conj()


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class WritesSaved(torch.autograd.Function):
    """Uses the memory of what it saved once more, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = gradient * x
        if x.is_contiguous() and not torch.is_grad_enabled():
            x.mul_(3)
        return result


# Instructions: (the list of tensors, two tensors of it, a choice) -> new tensors, or None


def fit(b: Tensor, a: Tensor) -> Tensor:
    """Return ``b`` where it goes with ``a``, else its mean."""
    if b.shape == a.shape:
        return b
    b = b if b.is_floating_point() or b.is_complex() else b.float()
    return b.mean() if b.numel() else b.sum()


def numeric(a: Tensor) -> Tensor:
    return a if a.is_floating_point() or a.is_complex() else a.float()


def real(a: Tensor) -> Tensor:
    return torch.view_as_real(a).sum(-1) if a.is_complex() else numeric(a)


def small(a: Tensor) -> Tensor:
    """Bound the values, so that programs do not run off to infinity."""
    return torch.tanh(a) if a.abs().sum() > 1e4 else a


def unsafely_chunked(a: Tensor, n: int) -> list[Tensor]:
    """Write to one of two outputs that share a storage and no version counter, as recurrent cells do."""
    if a.dim() == 0 or a.shape[0] < 2:
        return [a]
    first, *rest = (a * 1).unsafe_chunk(2, dim=0)
    used = first.sin()
    return [used, first, *(each.mul_(2) for each in rest)] if n % 2 else [first, *(each.mul_(2) for each in rest)]


def chunked(a: Tensor, n: int) -> list[Tensor]:
    return list(a.chunk(2, dim=0)) if a.dim() else [a]


def written(a: Tensor, write: Callable[[Tensor], object]) -> None:
    write(a)


def written_unseen(a: Tensor, write: Callable[[Tensor], object]) -> None:
    with torch.no_grad():
        write(a)


DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float32, torch.float8_e4m3fn)

MAKE: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "sin": lambda a, b, n: numeric(a).sin(),
    "exp": lambda a, b, n: small(numeric(a)).exp(),
    "sigmoid": lambda a, b, n: real(a).sigmoid(),
    "tanh": lambda a, b, n: numeric(a).tanh(),
    "softmax": lambda a, b, n: real(a).softmax(-1) if a.dim() else a,
    "relu": lambda a, b, n: real(a).relu(),
    "square": lambda a, b, n: small(numeric(a)) ** 2,
    "norm": lambda a, b, n: F.layer_norm(real(a), real(a).shape[-1:]) if a.dim() and a.numel() else a,
    "prod": lambda a, b, n: small(real(a)).prod(),
    "mul": lambda a, b, n: small(numeric(a)) * fit(b, a),
    "div": lambda a, b, n: numeric(a) / (2 + fit(b, a) * fit(b, a)),
    "mul_self": lambda a, b, n: small(numeric(a)) * a,
    "add": lambda a, b, n: a + fit(b, a),
    "where": lambda a, b, n: torch.where(real(a) > 0, numeric(a), fit(numeric(b), a).to(numeric(a).dtype)),
    "matmul": lambda a, b, n: real(a).reshape(-1, 1).float() @ real(b).reshape(1, -1).float()[:, :3],
    "linear": lambda a, b, n: real(a).float().reshape(-1)[:4] @ real(b).float().reshape(-1)[:4] if min(a.numel(), b.numel()) >= 4 else a,
    "cat": lambda a, b, n: torch.cat([a.reshape(-1), b.reshape(-1).to(a.dtype)]),
    "stack": lambda a, b, n: torch.stack([numeric(a), fit(numeric(b), a).to(numeric(a).dtype).expand_as(a)]),
    "transpose": lambda a, b, n: a.transpose(0, -1) if a.dim() else a,
    "permute": lambda a, b, n: a.permute(*range(1, a.dim()), 0) if a.dim() else a,
    "flatten": lambda a, b, n: a.reshape(-1),
    "unsqueeze": lambda a, b, n: a.unsqueeze(0),
    "expand": lambda a, b, n: a.unsqueeze(0).expand(n + 2, *a.shape),
    "slice": lambda a, b, n: a[..., n % 2 :: 2] if a.dim() else a,
    "narrow": lambda a, b, n: a.reshape(-1)[n : n + 1],
    "select": lambda a, b, n: a.select(-1, n % a.shape[-1]) if a.dim() and a.shape[-1] else a,
    "empty": lambda a, b, n: a[..., :0] if a.dim() else a,
    "diagonal": lambda a, b, n: a.diagonal() if a.dim() >= 2 else a,
    "unfold": lambda a, b, n: a.reshape(-1).unfold(0, 2, 1) if a.numel() >= 2 else a,
    "chunk": lambda a, b, n: chunked(a, n),
    "unsafe_chunk": lambda a, b, n: unsafely_chunked(a, n),
    "conj": lambda a, b, n: a.conj(),
    "complex": lambda a, b, n: torch.view_as_complex(torch.stack([real(a).float(), real(a).float()], -1)),
    "imag": lambda a, b, n: a.conj().imag if a.is_complex() else a,
    "real": lambda a, b, n: a.real,
    "to": lambda a, b, n: (real(a) if n != 3 else a).to(DTYPES[n]),
    "index": lambda a, b, n: a.reshape(-1)[torch.arange(a.numel() - 1, -1, -2)],
    "masked": lambda a, b, n: a.masked_fill(real(a) > 0, 0),
    "gather": lambda a, b, n: real(a).sort(-1)[0] if a.dim() else a,
    "max": lambda a, b, n: real(a).max(-1)[0] if a.dim() and a.shape[-1] else a,
    "dropout": lambda a, b, n: F.dropout(real(a), 0.5),
    "clone": lambda a, b, n: a.clone(),
    "mean": lambda a, b, n: numeric(a).mean(0) if a.dim() and a.shape[0] else a,
    "detach": lambda a, b, n: a.detach(),
    "leaf": lambda a, b, n: numeric(a.detach()).requires_grad_(),
    "bool": lambda a, b, n: real(a) > 0,
    "saves_all": lambda a, b, n: SavesAll.apply(small(numeric(a))),
    "saves_output": lambda a, b, n: SavesOutput.apply(small(numeric(a))),
    "writes_saved": lambda a, b, n: WritesSaved.apply(small(numeric(a))),
    "checkpoint": lambda a, b, n: checkpoint(lambda x, y: (x.sin() * y).tanh(), real(a), fit(real(b), a), use_reentrant=False),
    "no_grad": lambda a, b, n: torch.no_grad()(lambda: numeric(a) * 2)(),
}

WRITE: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "mul_": lambda a, b, n: written(a, lambda a: a.mul_(0.5)),
    "relu_": lambda a, b, n: written(a, lambda a: a.relu_()),
    "exp_": lambda a, b, n: written(a, lambda a: a.tanh_()),
    "add_": lambda a, b, n: written(a, lambda a: a.add_(fit(b, a))),
    "mul_by_": lambda a, b, n: written(a, lambda a: a.mul_(fit(b, a))),
    "fill_part_": lambda a, b, n: written(a, lambda a: a[..., : n + 1].fill_(0.25)),
    "copy_part_": lambda a, b, n: written(a, lambda a: a.select(0, 0).copy_(fit(b, a.select(0, 0)))),
    "unseen_mul_": lambda a, b, n: written_unseen(a, lambda a: a.mul_(0.75)),
    "unseen_part_": lambda a, b, n: written_unseen(a, lambda a: a[..., : n + 1].neg_()),
    "alias_add_": lambda a, b, n: written(a, lambda a: a.detach().add_(0.5)),
}

LATE = tuple(
    name for name in WRITE if name != "mul_by_"
)  # outside the hooks, `a.mul_(a)` saves `a` in its own graph, and torch never frees that

DROP = "drop"
NAMES = (*MAKE, *MAKE, *WRITE, DROP)  # writes make programs that plain autograd refuses; most should run

Instruction = tuple[str, int, int, int]


@dataclass(frozen=True)
class Program:
    """A training step, and how it is managed."""

    blocks: tuple[tuple[Instruction, ...], ...]  # each a module of its own
    shape: tuple[int, ...] = (4, 3)
    num_outputs: int = 1
    num_frames: int = 1
    backward: str = "sum"  # how the outputs are taken back; see `backwards`
    late_writes: tuple[Instruction, ...] = ()  # after the forward, before backward
    budget: int | None = 0
    min_bytes: int = 0
    capacity: int | None = None
    faults: tuple[tuple[str, int], ...] = ()  # (which copy fails, its number)
    deferred: bool = True

    def __str__(self) -> str:
        how = ", ".join(f"{name}={getattr(self, name)}" for name in self.__dataclass_fields__ if name not in ("blocks", "late_writes"))
        lines = [
            how,
            f"x {self.shape}, y (3,) float64, z (2, 4) complex64, weight.t(), weight.bfloat16(), buffer, weight, x * 1, y * 1, z * 1",
        ]
        for number, block in enumerate(self.blocks):
            lines += [f"block {number}:"] + [f"    {name}(v[{a}], v[{b}], {n})" for name, a, b, n in block]
        lines += ["late:"] + [f"    {name}(v[{a}], v[{b}], {n})" for name, a, b, n in self.late_writes] if self.late_writes else []
        return "\n".join(lines)


def perform(values: list[Tensor], instruction: Instruction) -> str:
    """Carry an instruction out on the list; return what came of it, since plain and managed must agree on that, too."""
    name, first, second, choice = instruction
    a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
    if name == DROP:
        if len(values) > 1:
            del values[-1 - first % len(values)]
        return "ok"
    try:
        made = (MAKE.get(name) or WRITE[name])(a, b, choice)
    except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    values.extend(made if isinstance(made, list) else [] if made is None else [made])
    return "ok"
