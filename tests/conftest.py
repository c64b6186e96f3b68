"""Shared by all tests: seeds, threads, and small helpers that read like claims."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import backhaul as bh
from backhaul.testing import RecordingTier


def pytest_collection_finish() -> None:
    """Take what the imports made out of the garbage collector's sight: many tests collect, and it would look at all of that each time."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()


def same(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Say whether all tensors are equal bit for bit."""
    return len(got) == len(expected) and all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and a.equal(b))
        for a, b in zip(got, expected, strict=True)
    )


class Code(nn.Module):
    """A function as a module, so that it can be managed."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def everything(modules: nn.Module | Sequence[nn.Module], tier: bh.Tier | None = None, **options: object) -> bh.Handle:
    """Manage so that all that can move does, through a tier that copies as late as it may and poisons what it has freed."""
    chosen = {"activation_budget": 0, "min_bytes": 0, **options}
    return bh.offload(modules, tier=tier or RecordingTier(deferred=True), **chosen)  # type: ignore[arg-type]


def in_threads(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all at once; raise what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], object]) -> None:
        try:
            start.wait(timeout=30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    for error in errors:
        raise error


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one, and the process group that it needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked as needing a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
