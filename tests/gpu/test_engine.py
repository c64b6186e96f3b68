"""The engine on a device with streams: values under delayed copies, memory that goes down, and every event edge missed when it is gone."""

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import stations
from backhaul.tiers import host, lanes, slabs
from backhaul.tiers.streams import CudaStream
from tests.conftest import Code, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LONG = 200_000_000  # cycles: about 0.1 s
MIB = 2**20


@pytest.fixture(autouse=True)
def _quiet_device() -> Iterator[None]:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def sleep(cycles: int = LONG) -> None:
    torch.cuda._sleep(cycles)


def delay_copies(monkeypatch: pytest.MonkeyPatch, which: str, cycles: int = LONG) -> None:
    """Queue a delay before every copy of one direction."""
    device = torch.device("cuda", torch.cuda.current_device())
    delayed = getattr(lanes.lanes_of(device), which)._streams

    def before(stream: CudaStream) -> None:
        if any(stream is other for other in delayed):
            with stream.owner:
                sleep(cycles)

    monkeypatch.setattr(lanes, "_before_copy", before)


class Chain(nn.Module):
    """Elementwise code whose every intermediate is saved, and dropped by everybody else."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1, device="cuda") + 1) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x * weight).sin() * x.cos()
        return x


def leaf(num_mib: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_mib * MIB // 4, device="cuda", generator=generator).requires_grad_()


def gradients(model: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return list(torch.autograd.grad(model(x).sum(), [x, *parameters]))


def managed(model: nn.Module, **options: Any) -> bh.Handle:
    return bh.offload(model, **{"tier": "host", "activation_budget": 0, "min_bytes": 0, **options})


@pytest.mark.parametrize("budget", [None, 0, "100MiB"])
@pytest.mark.parametrize("delayed", ["d2h", "h2d", None])
def test_c20_c22_gradients_are_bit_equal_under_delayed_copies(budget: Any, delayed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain()
    expected = [gradients(model, leaf(seed=seed)) for seed in range(6)]
    with managed(model, activation_budget=budget) as handle:
        if delayed:
            delay_copies(monkeypatch, delayed, LONG // 8)
        got = [gradients(model, leaf(seed=seed)) for seed in range(6)]  # no synchronisation in between
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
        assert handle.stats.offloaded_bytes > 0
        assert handle.stats.host_bytes == 0


def test_c21_a_busy_backward_does_not_see_its_input_overwritten() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            sleep(LONG // 20)
            return gradient * ctx.saved_tensors[0]

    model = Code(lambda x: Slow.apply(Slow.apply(Slow.apply(x)).sin()).cos())
    expected = gradients(model, leaf())
    with managed(model):
        for _ in range(10):
            assert same(gradients(model, leaf()), expected)


def test_c06_views_and_casts_of_reloaded_tensors_outlive_them() -> None:
    weight = torch.randn(2, 512, 1024, device="cuda", requires_grad=True)

    def body(x: Tensor) -> Tensor:
        for _ in range(4):
            mask = torch.randint(0, 2, (2, 512, 1), device="cuda", dtype=torch.bool)
            x = (x.float() * mask + ~mask * weight).bfloat16()
        return x

    model = Code(body)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(2, 512, 1024, device="cuda").bfloat16().requires_grad_()
        return list(torch.autograd.grad(model(x).float().sum(), [x, weight]))

    expected = [run(seed) for seed in range(50)]
    with managed(model):
        assert all(same(run(seed), expected[seed]) for seed in range(50))


def test_c26_the_device_holds_less() -> None:
    model = Chain(depth=12)
    x = leaf(32)
    gradients(model, x)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        gradients(model, x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base

    plain = peak()
    with managed(model) as handle:
        peaks = [peak() for _ in range(3)]
        assert max(peaks) < 0.4 * plain
        assert handle.stats.pageable_bytes == 0
    gc.collect()
    assert torch.cuda.memory_allocated() <= base


def received_on_a_communication_stream() -> nn.Module:
    """A model that saves a tensor of another stream's pool, which takes the memory again as soon as it is free."""
    communication = torch.cuda.Stream()

    def body(x: Tensor) -> Tensor:
        with torch.cuda.stream(communication):
            received = torch.empty_like(x)
        communication.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(communication):
            received.copy_(x.detach() * 3)
        torch.cuda.current_stream().wait_stream(communication)
        y = (x * received).sum()
        del received
        with torch.cuda.stream(communication):
            torch.full_like(x, 1e9)
        return y

    return Code(body)


def test_memory_of_another_streams_pool_is_held_until_the_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model = received_on_a_communication_stream()
    expected = gradients(model, leaf())
    with managed(model):
        delay_copies(monkeypatch, "d2h", LONG)
        for _ in range(3):
            assert same(gradients(model, leaf()), expected)


def test_without_looking_at_the_pool_values_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = received_on_a_communication_stream()
    expected = gradients(model, leaf())
    monkeypatch.setattr(stations, "in_current_pool", lambda tensor: True)
    with managed(model):
        delay_copies(monkeypatch, "d2h", LONG)
        assert not all(same(gradients(model, leaf()), expected) for _ in range(3))


def test_a_kernel_that_still_reads_memory_of_another_pool_reads_it_whole() -> None:
    """Its input is copied out and dropped long before a large product has read all of it."""
    communication = torch.cuda.Stream()
    weight = torch.randn(2048, 32768, device="cuda")

    def body(x: Tensor) -> Tensor:
        with torch.cuda.stream(communication):
            received = torch.empty(2048, 2048, device="cuda")
        communication.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(communication):
            received.copy_(x.detach().view(2048, 2048))
        torch.cuda.current_stream().wait_stream(communication)
        product = (x.view(2048, 2048) * received) @ weight
        scaled = received * x.view(2048, 2048)
        y = product.sum() + ((received @ weight) * scaled.sum()).sum()
        del received
        with torch.cuda.stream(communication):
            torch.full((2048, 2048), 1e9, device="cuda")
        return y

    model = Code(body)
    expected = gradients(model, leaf())
    with managed(model):
        for _ in range(4):
            assert same(gradients(model, leaf()), expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_two_compute_streams_share_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    side = torch.cuda.Stream()

    def body(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            left = (x.sin() * x).exp()
        right = (x.cos() * x).exp()
        torch.cuda.current_stream().wait_stream(side)
        left.record_stream(torch.cuda.current_stream())
        return left.sum() + right.sum()

    model = Code(body)
    expected = gradients(model, leaf())
    with managed(model):
        delay_copies(monkeypatch, "d2h", LONG // 4)
        for _ in range(4):
            assert same(gradients(model, leaf()), expected)


def test_a_write_while_the_copy_runs_raises_or_gives_the_packed_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def square(x: Tensor) -> Tensor:
        y = x.clone()
        z = (y * y).sum()
        with torch.no_grad():
            y.mul_(10)
        return z

    model = Code(square)
    delay_copies(monkeypatch, "d2h", LONG // 4)
    for budget in (0, None):
        with managed(model, activation_budget=budget):
            x = leaf()
            try:
                (gradient,) = torch.autograd.grad(model(x), x)
            except RuntimeError as error:
                assert "inplace" in str(error)
            else:
                assert same([gradient], [2 * x])


@pytest.mark.parametrize("missing", ["_wait_producer", "_wait_previous_chunk", "_wait_copy", "drop", "use"])
def test_without_any_one_edge_values_are_wrong(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each edge is taken away while the copies that it orders are delayed, and the gradients must then differ.

    What a load waits for (the store, the last reader of its block) is implied here by the other edges; tests of lanes take those away.
    """
    model = Chain(depth=6)

    def run(seed: int) -> list[Tensor]:
        x = leaf(48, seed)
        if missing == "_wait_producer":
            sleep()  # the host runs ahead of what makes the tensors
        return gradients(model, x)

    expected = [run(seed) for seed in range(4)]
    torch.cuda.synchronize()
    if missing == "drop":
        monkeypatch.setattr(stations.Station, "wait_to_drop", lambda self, copy, source: setattr(copy, "_ends", None))
        delay_copies(monkeypatch, "d2h", LONG // 4)
    elif missing == "use":
        load = host.PinnedHost.load
        monkeypatch.setattr(host.PinnedHost, "load", lambda self, slot, target: (load(self, slot, target), host.Ended())[1])
        delay_copies(monkeypatch, "h2d", LONG // 4)
    else:
        monkeypatch.setattr(lanes, missing, lambda stream, event: None)
        if missing != "_wait_producer":
            delay_copies(monkeypatch, "h2d", LONG // 4)
    with managed(model):
        try:
            right = all(same(run(seed), expected[seed]) for seed in range(4))
        except RuntimeError as error:  # the lane asks how long a copy took, and its events have not passed
            right = not re.search("events must be completed|not ready", str(error))
        torch.cuda.synchronize()
    assert not right, f"nothing depends on {missing}"


def test_c36_each_tensor_returns_to_its_own_device() -> None:
    class NeedsHostMetadata(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
            ctx.save_for_backward(x, lengths)
            return x * int(lengths.sum())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            x, lengths = ctx.saved_tensors
            assert lengths.device.type == "cpu"
            assert x.device == gradient.device
            return gradient * int(lengths.sum()), None

    model = Code(lambda x: NeedsHostMetadata.apply(x * 2, torch.tensor([2, 3])), nn.Linear(1, 1, device="cuda"))
    with managed(model) as handle:
        x = leaf(1)
        assert same(torch.autograd.grad(model(x).sum(), [x]), [torch.full_like(x, 10.0)])
        assert handle.stats.kept_by_reason["on the host"] > 0


def test_c38_reloaded_tensors_are_aligned() -> None:
    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
            ctx.save_for_backward(x, *others)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
            seen.extend(tensor.data_ptr() for tensor in ctx.saved_tensors)
            return gradient, *(None for _ in ctx.saved_tensors[1:])

    def body(x: Tensor) -> Tensor:
        odd = [
            torch.ones(n, dtype=dtype, device="cuda")
            for n, dtype in ((3, torch.uint8), (5, torch.bfloat16), (7, torch.bool), (9, torch.cfloat))
        ]
        return Look.apply(x * 2, *odd)

    model = Code(body)
    with managed(model):
        gradients(model, leaf(1))
    assert len(seen) == 5
    assert all(address % 256 == 0 for address in seen)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_c27_graph_capture_is_refused() -> None:
    model = nn.Linear(8, 8, device="cuda")
    x = torch.ones(4, 8, device="cuda")
    with managed(model):
        model(x).sum().backward()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(graph):
            model(x)
    torch.cuda.synchronize()
    model(x).sum().backward()


def test_c01_c18_a_refused_pin_costs_speed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bh.release_host_memory()

    def refuse(address: int, num_bytes: int, device: torch.device) -> None:
        raise slabs.PinningError("refused by the test")

    monkeypatch.setattr(slabs, "register", refuse)
    monkeypatch.setattr(host, "_warned", False)
    model = Chain()
    expected = gradients(model, leaf())
    with managed(model) as handle, pytest.warns(RuntimeWarning, match="pinned"):
        assert same(gradients(model, leaf()), expected)
    assert handle.stats.pageable_bytes > 0
    monkeypatch.undo()
    bh.release_host_memory()


def test_tensors_offloaded_from_the_gpu_to_disk_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = Chain()
    expected = gradients(model, leaf())
    tier = bh.Disk(path=tmp_path)
    with managed(model, tier=tier) as handle:
        delay_copies(monkeypatch, "d2h", LONG // 16)
        for _ in range(3):
            assert same(gradients(model, leaf()), expected)
        assert handle.stats.peak_disk_bytes > 0
        assert handle.stats.disk_bytes == 0
    tier.close()


def test_an_item_is_not_held_up_by_copies() -> None:
    model = Chain(depth=8)
    x = leaf(256)
    probe = torch.zeros((), device="cuda")
    with managed(model):
        for _ in range(2):
            gradients(model, x)
        y = model(x)
        torch.cuda.current_stream().synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        probe.item()
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) < 1.0
        del y


def test_a_graph_dropped_in_mid_copy_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain()
    expected = gradients(model, leaf())
    with managed(model) as handle:
        delay_copies(monkeypatch, "d2h", LONG // 8)
        for _ in range(3):
            y = model(leaf())
            del y
            torch.full((16 * MIB // 4 * 4,), 7.0, device="cuda")
        assert same(gradients(model, leaf()), expected)
        torch.cuda.synchronize()
        assert handle.stats.host_bytes == 0
        assert handle.stats.resident_bytes == 0
