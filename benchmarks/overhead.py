"""What the hooks cost the host: microseconds for each saved tensor that stays, pack and unpack together, against plain autograd.

    python -m benchmarks.overhead

10,000 tensors of 1 KiB are saved in one forward, all below ``min_bytes``, and brought back by one backward. The best of several runs
counts.
"""

import argparse
import gc
import json
import platform
import time
import warnings

import torch
from torch import Tensor, nn

import backhaul as bh

TARGET_US = 15.0


class Chain(nn.Module):
    """Saves one new storage at each step."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.num_tensors = num_tensors

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_tensors):
            x = x.sin()
        return x


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


if __name__ == "__main__":
    main()
