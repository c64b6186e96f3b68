"""Real model classes, one line of backhaul each: are the loss and every gradient the same, bit for bit?

    python -m benchmarks.model_classes [--only NAME ...] [--device DEVICE] [--tier TIER] [--json FILE]

Covers: the verdict on each class of model_class_cases.py ([Note: How a class is judged]), and the table.
Does not cover: speed or memory (each model is tiny), or generation.

[Note: How a class is judged]
A *trace* makes the model and takes ``NUM_STEPS`` steps of SGD, always from the same seeds, and keeps each loss, each gradient and, from
the end, each parameter and buffer. Two plain traces say whether the class is equal to itself; one that is not cannot be judged. In the
third trace everything that can move moves, in all steps but the first and the last: so what a handle leaves behind shows, too.

    bit-equal         the same as plain in every step, and bytes moved out and back
    kept (why)        the same as plain, but nothing came back from the tier; why: ``stats.kept_by_reason``
    refused (why)     ``bh.offload`` raised
    unstable (where)  the plain model differs from itself
    FAILED (why)      a step raised that does not raise plain
    WRONG (where)     a loss, gradient, parameter or buffer differs from plain
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import backhaul as bh
from benchmarks.model_class_cases import Case, available_cases

NUM_STEPS = 4  # plain; offloaded, to learn the order; offloaded, in the order expected; plain again
SHARE_NEEDED = 38 / 40  # of the cases must be bit-equal


@dataclass(frozen=True)
class Trace:
    """What a few steps of training leave behind, by name ("step 1 loss", "step 1 gradient of lm_head.weight", ...)."""

    tensors: Mapping[str, Tensor]
    stats: Any = None  # of the handle, where there was one

    def first_difference(self, other: "Trace") -> str | None:
        """Name the first tensor that differs in any bit, or that only one of the two has."""
        if self.tensors.keys() != other.tensors.keys():
            return min(self.tensors.keys() ^ other.tensors.keys()) + " exists once only"
        return next((name for name, tensor in self.tensors.items() if not same_bits(tensor, other.tensors[name])), None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    # As bytes: equal NaNs are equal, and 0.0 is not -0.0.
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The verdict on one case, and what the handle moved in its two steps."""

    name: str
    family: str
    verdict: str
    why: str = ""
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    futile_bytes: int = 0
    kept_by_reason: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class RefusedError(Exception):
    """``bh.offload`` would not take the model; the message says why."""


def leave_alone(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def offload_everything(model: nn.Module, tier: str) -> AbstractContextManager[Any]:
    try:
        return bh.offload(model, tier=tier, min_bytes=0, activation_budget=0)
    except (ValueError, RuntimeError) as error:
        raise RefusedError(str(error)) from error


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # the masks of wav2vec2 and its kin
    torch.manual_seed(number)


def loss_of(output: Any) -> Tensor:
    return output.square().mean() if isinstance(output, Tensor) else output.loss


def trace(case: Case, device: torch.device, manage: Callable[[nn.Module], AbstractContextManager[Any]] = leave_alone) -> Trace:
    """Train the case's model for ``NUM_STEPS`` steps, all but the first and the last of them under ``manage(model)``."""
    seed(0)
    model = case.make().to(device).train()
    case.variant.prepare(model)
    with device:
        inputs = case.inputs()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    tensors = {}

    def step(number: int) -> None:
        seed(number)
        with case.variant.around(device):
            loss = loss_of(model(**inputs))
        loss.backward()
        tensors[f"step {number} loss"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                tensors[f"step {number} gradient of {name}"] = parameter.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(0)
    with manage(model) as handle:
        for number in range(1, NUM_STEPS - 1):
            step(number)
        stats = handle.stats if handle else None
    step(NUM_STEPS - 1)
    tensors |= {f"final {name}": tensor for name, tensor in model.state_dict().items()}
    return Trace(tensors, stats)


def judge(case: Case, device: torch.device, tier: str) -> Result:
    """Compare the case under backhaul with the plain one ([Note: How a class is judged])."""
    began = time.perf_counter()

    def result(verdict: str, why: str = "", **moved: Any) -> Result:
        return Result(name=case.name, family=case.family, verdict=verdict, why=why, seconds=time.perf_counter() - began, **moved)

    plain = trace(case, device)
    if difference := plain.first_difference(trace(case, device)):
        return result("unstable", difference)
    try:
        managed = trace(case, device, lambda model: offload_everything(model, tier))
    except RefusedError as refusal:
        return result("refused", str(refusal))
    except Exception as error:  # whatever it is, it is a finding: the plain model did not raise it
        return result("FAILED", f"{type(error).__name__}: {error}")
    stats = managed.stats
    moved = {name: getattr(stats, name) for name in ("saved_bytes", "offloaded_bytes", "reloaded_bytes", "futile_bytes")}
    moved["kept_by_reason"] = dict(stats.kept_by_reason)
    if difference := plain.first_difference(managed):
        return result("WRONG", difference, **moved)
    if not stats.reloaded_bytes:
        return result("kept", ", ".join(stats.kept_by_reason) or "nothing was saved", **moved)
    return result("bit-equal", **moved)


# ---- the table


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


HEADER = f"{'class':<50}{'saved':>10}{'offloaded':>10}{'reloaded':>10}{'futile':>10}{'s':>7}  {'verdict':<12}kept, by reason"


def row(result: Result) -> str:
    columns = (result.saved_bytes, result.offloaded_bytes, result.reloaded_bytes, result.futile_bytes)
    verdict = f"{result.verdict} ({result.why})" if result.why else result.verdict
    kept = ", ".join(f"{reason} {megabytes(num_bytes)}" for reason, num_bytes in Counter(result.kept_by_reason).most_common())
    return f"{result.name:<50}{''.join(f'{megabytes(column):>10}' for column in columns)}{result.seconds:>7.1f}  {verdict:<12}{kept}"


def total(results: list[Result]) -> Result:
    """Add the results up, as one more row."""
    kept: Counter[str] = Counter()
    for result in results:
        kept.update(result.kept_by_reason)
    names = ("saved_bytes", "offloaded_bytes", "reloaded_bytes", "futile_bytes", "seconds")
    sums = {name: sum(getattr(result, name) for result in results) for name in names}
    return Result(name="total", family="", verdict="", kept_by_reason=kept, **sums)


def summary(results: list[Result]) -> str:
    verdicts = Counter(result.verdict for result in results)
    num_classes = len({result.name.split(" ")[0] for result in results})
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    return f"{len(results)} cases of {num_classes} classes: {counts}"


def acceptable(results: list[Result]) -> bool:
    """Whether nothing is wrong, and enough is bit-equal."""
    verdicts = Counter(result.verdict for result in results)
    return not (verdicts["WRONG"] or verdicts["FAILED"]) and verdicts["bit-equal"] >= SHARE_NEEDED * len(results)


def main() -> int:
    about = "Compare real model classes under backhaul with plain ones, bit for bit."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_classes", description=about)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tier", choices=("host", "disk"), default="host")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny: on a busy machine two threads take many times as long as one
    if options.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it matrix products differ from run to run
        torch.use_deterministic_algorithms(True, warn_only=True)
    cases = [case for case in available_cases() if not options.only or any(name in case.name for name in options.only)]
    if not cases:
        parser.error(f"no case is named like {' or '.join(options.only)}")

    print(HEADER)
    results = []
    for case in cases:
        results.append(judge(case, options.device, options.tier))
        print(row(results[-1]), flush=True)
    print(row(total(results)))
    print(f"MB over the {NUM_STEPS - 2} managed steps of each model; {options.tier} tier, everything that can move moves")
    print(summary(results))
    if options.json:
        run = {"torch": torch.__version__, "transformers": transformers.__version__, "device": str(options.device), "tier": options.tier}
        options.json.write_text(json.dumps(run | {"results": [asdict(result) for result in results]}, indent=1) + "\n")
    return 0 if acceptable(results) else 1


if __name__ == "__main__":
    sys.exit(main())
