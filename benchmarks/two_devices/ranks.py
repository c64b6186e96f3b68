"""What every run needs: a rank in its group, steps that are measured, findings that survive a failure.

Covers: the environment, NCCL or gloo, a second gloo group for meeting and telling, time and peak memory of a step, claims.
Does not cover: what is run (links.py, sharded.py, pipeline.py, tensor.py), or how findings are shown (__main__.py).
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import backhaul as bh

NUM_RANKS = 2
FOUND = "found.json"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
DEFAULTS = {
    **NO_MULTICAST,
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic products
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host
    "NCCL_SOCKET_IFNAME": "lo",
}


def prepare() -> None:
    """Set what torch and NCCL read when they start, unless somebody has."""
    for name, value in DEFAULTS.items():
        if not (name == "PYTORCH_ALLOC_CONF" and "PYTORCH_CUDA_ALLOC_CONF" in os.environ):
            os.environ.setdefault(name, value)


def enter(index: int, function: "Run", given: str | None, options: argparse.Namespace, place: Path) -> None:
    """Be one rank of a run."""
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)  # each may take half of what the host can spare
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{place / 'rendezvous'}",
        rank=index,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=options.limit),
    )
    rank = Rank(index, device, full=options.size == "full")
    findings = Findings(place / FOUND if index == 0 else None, judges_aims=rank.full and on_gpu)
    function(rank, findings, given, options)
    rank.meet()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """One step on this rank. ``peak_bytes`` is above what was allocated before it; ``None`` on a CPU."""

    ms: float
    peak_bytes: int | None
    result: Any


class Rank:
    """This process's place among the ranks."""

    def __init__(self, index: int, device: torch.device, *, full: bool) -> None:
        self.index, self.device, self.full = index, device, full
        self.on_gpu = device.type == "cuda"
        self._control = dist.new_group(backend="gloo")  # so that whoever waits keeps off the devices

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gives."""
        values: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(values, value, group=self._control)
        return values

    def all(self, holds: bool) -> bool:
        """Say whether it holds on every rank."""
        return all(self.gather(holds))

    def meet(self) -> None:
        """Wait for the other ranks, and for this rank's device."""
        self.synchronize()
        dist.barrier(group=self._control)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def measure(self, step: Callable[[], Any]) -> Measured:
        """Run a step that all ranks begin together."""
        self.meet()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = step()
        self.synchronize()
        ms = (time.perf_counter() - start) * 1e3
        return Measured(ms, torch.cuda.max_memory_allocated() - before if self.on_gpu else None, result)

    def slowest_ms(self, steps: Sequence[Measured]) -> list[float]:
        """Return, step by step, how long the slowest rank took."""
        return [max(times) for times in zip(*self.gather([step.ms for step in steps]), strict=True)]

    def peaks(self, steps: Sequence[Measured]) -> list[int] | None:
        """Return the highest peak of each rank; ``None`` on a CPU."""
        return self.gather(max(step.peak_bytes or 0 for step in steps)) if self.on_gpu else None


@dataclass(frozen=True)
class InTurn:
    """Steps with backhaul and without, one after the other, so that a change of clocks meets both."""

    managed_ms: list[float]  # of the slowest rank
    plain_ms: list[float]
    peak_bytes: list[int] | None  # of each rank, with backhaul

    @property
    def ratio(self) -> float:
        return statistics.median(self.managed_ms) / statistics.median(self.plain_ms)

    @property
    def figure(self) -> str:
        return f"{statistics.median(self.managed_ms):.1f} for {statistics.median(self.plain_ms):.1f} ms: {self.ratio - 1:+.1%}"


def in_turn(rank: Rank, handles: Sequence[bh.Handle], step: Callable[[], Any], pairs: int) -> InTurn:
    """Time ``pairs`` steps with backhaul and as many beside which it steps aside."""
    managed, plain = [], []
    for _ in range(pairs):
        managed.append(rank.measure(step))
        with ExitStack() as aside:
            for handle in handles:
                aside.enter_context(handle.paused())
            plain.append(rank.measure(step))
    return InTurn(rank.slowest_ms(managed), rank.slowest_ms(plain), rank.peaks(managed))


class Findings:
    """Facts and claims, in a file after each of them, so that a failure loses nothing. Only the first rank writes it."""

    def __init__(self, path: Path | None, *, judges_aims: bool) -> None:
        self._path, self._judges_aims = path, judges_aims
        self._facts: dict[str, Any] = {}
        self._claims: list[dict[str, Any]] = []

    def note(self, **facts: Any) -> None:
        """Note facts that nobody judges."""
        self._facts |= facts
        self._save()

    def must(self, text: str, holds: bool, figure: str = "") -> None:
        """Note a claim without which the run has failed."""
        self._claims.append({"text": text, "must": True, "holds": bool(holds), "figure": figure})
        self._save()

    def aim(self, text: str, holds: bool | None, figure: str) -> None:
        """Note how near an aim of time or memory came; small sizes are not judged."""
        self._claims.append({"text": text, "must": False, "holds": bool(holds) if self._judges_aims else None, "figure": figure})
        self._save()

    def tell(self, text: str, figure: str) -> None:
        """Note a figure for the table that nobody judges."""
        self._claims.append({"text": text, "must": False, "holds": None, "figure": figure})
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({"facts": self._facts, "claims": self._claims}, default=str))


Run = Callable[[Rank, Findings, str | None, argparse.Namespace], None]


def gb(num_bytes: int | float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e3:.1f} KB"


def sizes_of(each: Iterable[int] | None) -> str:
    return "-" if each is None else " ".join(map(gb, each))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of gradients of which each rank has a part of its own."""
    norms = [torch.linalg.vector_norm(local(gradient), dtype=torch.float32) for gradient in gradients]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def sign_step(parameters: Iterable[torch.nn.Parameter], *, lr: float) -> None:
    """Move every weight by ``lr`` against the sign of its gradient, so that a gradient that differs shows in the next loss."""
    for parameter in parameters:
        assert parameter.grad is not None
        local(parameter).sub_(local(parameter.grad).sign_(), alpha=lr)
        parameter.grad = None


def first_difference(got: Sequence[float], expected: Sequence[float]) -> str:
    """Say where two rows of numbers begin to differ."""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a != b:
            return f"step {number}: {a!r}, without backhaul {b!r}"
    return f"{len(got)} of {len(got)} equal, last {got[-1]:.6g}"
