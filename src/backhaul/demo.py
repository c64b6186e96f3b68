"""The demo: train a small model twice, plain and offloaded, and compare everything.

Covers: the text, the training steps, what is measured and how ([Note: Honest memory], [Note: Honest gradients]).
Does not cover: the model (demo_model.py), the command line and the table (cli.py).

[Note: Honest memory]
Each variant trains in a fresh process, so neither finds memory that the other left warm. On a CPU the figure is the peak of the
process's resident memory, sampled while it trains, less what was resident before the first step. glibc would blur it: it raises its own
threshold for returning memory as it sees large blocks freed, and then keeps such blocks for later. ``_ENVIRONMENT`` pins that threshold,
for both variants, so that a freed tensor leaves the process at once. On a device the allocator's own peak is exact.

[Note: Honest gradients]
Both processes start from the same seed, use deterministic kernels and see the same text. After each step they hash the bits of the loss and
of every parameter's gradient; the hashes are compared. A gradient that is off by one bit is another gradient.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.demo_model import ByteModel

_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**17),  # bytes; setting it also stops glibc from raising it ([Note: Honest memory])
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
    "OMP_WAIT_POLICY": "PASSIVE",  # threads of a CPU kernel that spin for their next one starve those that copy, and every other process
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic only with a workspace of fixed size
}
_SAMPLE_EVERY_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to train, and where."""

    device: str
    tier: str
    steps: int
    layers: int
    hidden: int
    seq: int
    batch: int
    activation_budget: int | None = None  # for the offloaded variant; None: a quarter of what the plain one keeps

    @classmethod
    def for_device(cls, device: str | None = None, **sizes: int | str | None) -> "Config":
        """Return sizes that suit a device, by default the best one present; ``sizes`` that are not None win."""
        device = check_device(device or best_device())
        if torch.device(device).type == "cpu":
            defaults = {"tier": "disk", "steps": 4, "layers": 4, "hidden": 256, "seq": 512, "batch": 8}
        else:
            defaults = {"tier": "host", "steps": 4, "layers": 8, "hidden": 1024, "seq": 4096, "batch": 2}
        return cls(device=device, **(defaults | {name: value for name, value in sizes.items() if value is not None}))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one variant did. Bytes out and in are sums over all steps."""

    step_s: list[float]
    losses: list[float]
    digests: list[dict[str, str]]  # one a step: fqn -> hash of the gradient's bits; "loss" -> hash of the loss's
    peak_saved_bytes: int
    offloaded_bytes: int
    reloaded_bytes: int
    baseline_bytes: int  # memory of the process (CPU) or device before the first step: model, optimizer, libraries
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both variants side by side."""

    config: Config
    plain: Measurement
    offloaded: Measurement

    @property
    def differences(self) -> list[str]:
        """Name every loss and gradient that is not identical in both, as ``"step 2: blocks.0.experts.router.weight"``."""
        return [
            f"step {step}: {name}"
            for step, (plain, offloaded) in enumerate(zip(self.plain.digests, self.offloaded.digests, strict=True))
            for name in sorted(plain.keys() | offloaded.keys())
            if plain.get(name) != offloaded.get(name)
        ]

    @property
    def num_compared(self) -> int:
        """Count the losses and gradients that were compared."""
        return sum(len(step) for step in self.plain.digests)


def best_device() -> str:
    """Name the device to use: an accelerator with memory of its own, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU computes in host memory: moving activations from there to there would free nothing.
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def check_device(device: str) -> str:
    """Return the device, or refuse one that this machine does not have."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used here ({reason}); use {best_device()!r}, or leave it out") from error
    return device


def compare(config: Config, on_step: Callable[[str, float], None] = lambda variant, loss: None) -> Comparison:
    """Train plain, then offloaded, and return both measurements; ``on_step(variant, loss)`` is called after each step."""
    plain = measure(config, "plain", on_step)
    if config.activation_budget is None:
        config = replace(config, activation_budget=plain.peak_saved_bytes // 4)
    return Comparison(config=config, plain=plain, offloaded=measure(config, "offloaded", on_step))


def measure(config: Config, variant: str, on_step: Callable[[str, float], None]) -> Measurement:
    """Train one variant in a fresh process ([Note: Honest memory]). Raises ``CalledProcessError`` when that process fails."""
    command = [sys.executable, "-m", "backhaul.demo", variant, json.dumps(asdict(config))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | _ENVIRONMENT) as process:
        assert process.stdout is not None
        result = None
        for line in process.stdout:
            message = json.loads(line)
            if "loss" in message:
                on_step(variant, message["loss"])
            else:
                result = Measurement(**message)
    if process.returncode or result is None:
        raise subprocess.CalledProcessError(process.returncode, command)
    return result


def train(config: Config, variant: str, on_step: Callable[[float], None]) -> Measurement:
    """Train one variant in this process, and say what it took."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    # A debugging aid that comes with the line above, costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    device = torch.device(config.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = ByteModel(layers=config.layers, hidden=config.hidden, seq=config.seq).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [batch.to(device) for batch in _batches(config)]

    def step(text: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, so they count as there before the first step
        loss: Tensor = model(text)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(batches[0][:1, :17])  # a tiny one first: libraries load, and gradients and optimizer state come to be

    step_s, losses, digests = [], [], []
    handle = bh.offload(model, activation_budget=config.activation_budget, tier=config.tier) if variant == "offloaded" else None
    memory = ProcessMemory() if device.type == "cpu" else DeviceMemory(device)
    with handle if handle else contextlib.nullcontext():
        with memory:
            for batch in batches:
                began = time.perf_counter()
                loss = float(step(batch))  # waits for the device
                step_s.append(time.perf_counter() - began)
                losses.append(loss)
                digests.append({"loss": loss.hex()} | {fqn: _digest(parameter.grad) for fqn, parameter in model.named_parameters()})
                on_step(loss)
        stats = handle.stats if handle else None
    return Measurement(
        step_s=step_s,
        losses=losses,
        digests=digests,
        peak_saved_bytes=stats.peak_resident_bytes if stats else _peak_saved_bytes(model, batches[-1]),
        offloaded_bytes=stats.offloaded_bytes if stats else 0,
        reloaded_bytes=stats.reloaded_bytes if stats else 0,
        baseline_bytes=memory.baseline_bytes,
        peak_bytes=memory.peak_bytes,
    )


def _batches(config: Config) -> Iterator[Tensor]:
    """Yield one batch (batch, seq + 1; int64) a step, cut at random from the source of Python's standard library."""
    needed = 2**20 + config.seq
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) < needed:
            text += path.read_bytes()
    source = torch.frombuffer(text, dtype=torch.uint8)
    for _ in range(config.steps):
        starts = torch.randint(len(source) - config.seq, (config.batch,)).tolist()
        yield torch.stack([source[start : start + config.seq + 1] for start in starts]).long()


def _digest(tensor: Tensor | None) -> str:
    """Hash the bits of a tensor."""
    assert tensor is not None
    return hashlib.sha256(tensor.detach().flatten().view(torch.uint8).cpu().numpy().data).hexdigest()


def _peak_saved_bytes(model: nn.Module, batch: Tensor) -> int:
    """Run one more step and return the most bytes that saved tensors kept alive in it: each storage once, parameters aside.

    It is a step of its own, after the measured ones, so that counting costs them nothing.
    """
    parameters = weakref.WeakSet(parameter.untyped_storage() for parameter in model.parameters())
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    peak = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal peak
        storage = tensor.untyped_storage()
        if storage not in parameters and storage not in alive:
            alive.add(storage)
            peak = max(peak, sum(other.nbytes() for other in alive))
        return tensor.detach()  # undetached, an op that saves its own output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch).backward()
    return peak


class ProcessMemory:
    """Sample this process's resident memory while it is entered."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.baseline_bytes = self.peak_bytes = 0

    def __enter__(self) -> None:
        self.baseline_bytes = self.peak_bytes = self._process.memory_info().rss
        self._sampler.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


class DeviceMemory:
    """Read the peak of a device's allocator while it is entered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.baseline_bytes = self.peak_bytes = 0

    def __enter__(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self.baseline_bytes = torch.accelerator.memory_allocated(self._device)

    def __exit__(self, *exception: object) -> None:
        self.peak_bytes = torch.accelerator.max_memory_allocated(self._device)


def _work() -> None:
    """Be the process that ``measure`` starts: one JSON object a line, a loss for each step and the measurement last."""
    variant, config = sys.argv[1:]

    def say(**message: object) -> None:
        print(json.dumps(message), flush=True)

    say(**asdict(train(Config(**json.loads(config)), variant, on_step=lambda loss: say(loss=loss))))


if __name__ == "__main__":
    _work()
