"""What management costs the host, in microseconds against plain autograd.

    python -m benchmarks.overhead

For each saved tensor that stays, pack and unpack together: 10,000 tensors of 1 KiB are saved in one forward, all below ``min_bytes``, and
brought back by one backward. For each call of a module, entering and leaving its scope: a part that does nothing is called 10,000 times,
under a rule of its own, and under none that needs a scope there. The best of several runs counts.
"""

import argparse
import gc
import json
import platform
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import backhaul as bh

TARGET_US = 15.0  # for a saved tensor
SCOPE_TARGET_US = 10.0  # for a call


class Chain(nn.Module):
    """Saves one new storage at each step."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.num_tensors = num_tensors

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_tensors):
            x = x.sin()
        return x


class Calls(nn.Module):
    """Calls a part that does nothing."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.num_calls = num_calls
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            self.part(x)
        return x.sin()


def scope_us(num_calls: int, repeats: int, plan: dict[str, Any]) -> float:
    """Return what a call of a part takes more under ``plan``."""
    model, x = Calls(num_calls), torch.randn(256, requires_grad=True)
    plain = best([seconds(model, x) for _ in range(repeats)])
    with bh.apply(model, plan, tier="host"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        managed = best([seconds(model, x) for _ in range(repeats)])
    return (managed[0] - plain[0]) * 1e6 / num_calls


def seconds(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Return what a forward and a backward took of this process, whatever else the machine did."""
    gc.collect()
    begin = time.process_time()
    loss = model(x).sum()
    middle = time.process_time()
    loss.backward()
    return middle - begin, time.process_time() - middle


def best(runs: list[tuple[float, float]]) -> tuple[float, float]:
    return min(forward for forward, _ in runs), min(backward for _, backward in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    model, x = Chain(options.tensors), torch.randn(256, requires_grad=True)
    with bh.offload(model, tier="host") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would say that nothing moves, which is the point
        plain_runs, managed_runs = [], []
        for _ in range(options.repeats):
            with handle.paused():
                plain_runs.append(seconds(model, x))
            managed_runs.append(seconds(model, x))
        stats = handle.stats
    assert stats.offloaded_bytes == 0
    assert stats.kept_by_reason["small"] == stats.saved_bytes
    scope, no_scope = (scope_us(options.tensors, options.repeats, plan) for plan in ({"part": "offload"}, {"*": "offload"}))
    plain, managed = best(plain_runs), best(managed_runs)

    per_tensor = 1e6 / options.tensors
    pack, unpack = ((managed[index] - plain[index]) * per_tensor for index in (0, 1))
    result = {
        "num_tensors": options.tensors,
        "plain_us": sum(plain) * per_tensor,
        "managed_us": sum(managed) * per_tensor,
        "pack_us": pack,
        "unpack_us": unpack,
        "overhead_us": pack + unpack,
        "target_us": TARGET_US,
        "scope_us": scope,
        "no_scope_us": no_scope,
        "scope_target_us": SCOPE_TARGET_US,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{options.tensors} tensors of {x.nbytes} bytes, torch {torch.__version__}, Python {result['python']}, one thread; us a tensor")
    print(f"  plain    {result['plain_us']:6.2f}   forward {plain[0] * per_tensor:6.2f}, backward {plain[1] * per_tensor:6.2f}")
    print(f"  managed  {result['managed_us']:6.2f}   forward {managed[0] * per_tensor:6.2f}, backward {managed[1] * per_tensor:6.2f}")
    print(f"  overhead {result['overhead_us']:6.2f}   pack    {pack:6.2f}, unpack   {unpack:6.2f}   (target: at most {TARGET_US:.0f})")
    print(f"  a scope  {scope:6.2f}   a call that no rule is about {no_scope:6.2f}   (target: at most {SCOPE_TARGET_US:.0f}, and nothing)")


if __name__ == "__main__":
    main()
