"""What a sharded run claims: on each rank the same bits as without backhaul, the expected bytes moved, no weight among them.

Covers: training a model twice from one seed, unmanaged and managed, and what was stored meanwhile.
Does not cover: how a model is sharded; each test file has its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import backhaul as bh
from backhaul.testing import RecordingTier, same_bits

Change = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Moved:
    """What one rank stored. A dataclass of plain values, since it travels between processes."""

    steps: list[list[int]]  # the size of each store, step by step
    weights: list[str]  # names of the parameters whose bytes were among them
    fqns: list[str]
    kept: dict[str, int]  # by reason
    saved_bytes: int  # in all steps
    recomputed_bytes: int  # in all steps

    @property
    def first(self) -> list[int]:
        """What the first step stored, in which everything moves that can."""
        return sorted(self.steps[0])


class Watchful(RecordingTier):
    """Knows the bytes of all weights, whole and in shards, in every precision, and notes when it is given some."""

    def __init__(self) -> None:
        super().__init__(deferred=True)
        self.known: dict[bytes, str] = {}
        self.weights: list[str] = []

    def learn(self, model: nn.Module) -> None:
        """Look the weights up anew, since a step changes them."""
        self.known = {}
        for name, parameter in model.named_parameters():
            for tensor in _forms(parameter):
                if tensor.unique().numel() > 1:  # zeros are anybody's
                    self.known[_content(tensor)] = name

    @torch.compiler.disable
    def store(self, source: Tensor) -> Any:
        name = self.known.get(_content(source))
        if name is not None:
            self.weights.append(name)
        return super().store(source)


def _forms(parameter: Tensor) -> Iterator[Tensor]:
    whole = parameter.detach()
    parts = [whole]
    if isinstance(whole, DTensor):
        parts = [whole.full_tensor(), whole.to_local()]
    for part in parts:
        for chunk in (part, *part.chunk(2), *part.chunk(4)):
            yield from (chunk, chunk.to(torch.bfloat16))


def _content(tensor: Tensor) -> bytes:
    # A copy, since a storage that NumPy has seen cannot be resized, as FSDP resizes its own.
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def unchanged(model: nn.Module) -> nn.Module:
    """Change nothing."""
    return model


def moved(
    build: Callable[[], nn.Module],
    change: Change,
    step: Step,
    *,
    managed_first: bool = False,
    part: Callable[[nn.Module], Any] = unchanged,
    plan: dict[str, Any] | None = None,
    steps: int = 3,
    lr: float = 1e-2,
) -> Moved:
    """Train a model with and without backhaul, assert that this rank sees no difference, and return what moved.

    Args:
        build: makes the model.
        change: shards it, compiles it, wraps it; returns what is trained.
        step: runs forward and backward; returns what else has to be the same.
        managed_first: manage the model before it is changed, not after.
        part: what of the model is managed.
        plan: applied to it, rather than everything be offloaded.
        steps: how many.
        lr: of the SGD.
    """
    torch.manual_seed(0)
    expected = list(_train(change(build()), step, steps=steps, lr=lr))
    torch.compiler.reset()
    tier = Watchful()
    torch.manual_seed(0)
    model = build()
    manage = bh.offload if plan is None else partial(bh.apply, plan=plan)
    options: dict[str, Any] = {"tier": tier, "activation_budget": 0, "min_bytes": 0}
    handle = manage(part(model), **options) if managed_first else None
    model = change(model)
    if handle is None:
        handle = manage(part(model), **options)
    stored: list[list[int]] = []
    with handle:
        num_seen = 0
        for index, state in enumerate(_train(model, step, steps=steps, lr=lr, tier=tier)):
            _assert_same(state, expected[index], step=index)
            stored.append([record.num_bytes for record in tier.records[num_seen:] if record.event == "store"])
            num_seen = len(tier.records)
        stats, report = handle.stats, handle.report()
    assert stats.resident_bytes == tier.used_bytes == 0
    return Moved(stored, tier.weights, [row.fqn for row in report.modules], stats.kept_by_reason, stats.saved_bytes, stats.recomputed_bytes)


def _train(model: nn.Module, step: Step, *, steps: int, lr: float, tier: Watchful | None = None) -> Iterator[dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
    torch.manual_seed(1)
    for _ in range(steps):
        if tier is not None:
            tier.learn(model)
        state: dict[str, Any] = {"output": step(model)}
        for name, parameter in model.named_parameters():
            state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        yield state


def _assert_same(state: dict[str, Any], expected: dict[str, Any], *, step: int) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        pairs = zip(value, state[name], strict=True) if isinstance(value, list) else [(value, state[name])]
        for wanted, got in pairs:
            assert type(got) is type(wanted), f"step {step}: {name} is a {type(got).__name__}, not a {type(wanted).__name__}"
            if isinstance(wanted, DTensor):
                assert (got.placements, got.device_mesh) == (wanted.placements, wanted.device_mesh), (
                    f"step {step}: {name} is placed elsewhere"
                )
                wanted, got = wanted.to_local(), got.to_local()
            same = same_bits(wanted, got) if isinstance(wanted, Tensor) else wanted == got
            assert same, f"step {step}: {name} is {got}, without backhaul {wanted}"
