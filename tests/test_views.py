"""Rule 2: a storage is copied once, and each view of it comes back with its own size, stride, offset, dtype and bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backhaul.saved import View
from backhaul.testing import RecordingTier, same_bits
from tests.conftest import Code, everything, same

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, *FLOAT8),
]


class Keep(torch.autograd.Function):
    """Saves the tensors that ``make`` returns, and notes them as they come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], list[Tensor]], seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*make())
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.extend(ctx.saved_tensors)
        return gradient, None, None


def come_back(make: Callable[[], list[Tensor]], tier: RecordingTier | None = None, *, steps: int = 1, **options: object) -> list[Tensor]:
    """Return what the tensors of ``make`` are in backward, after they have been away."""
    x = torch.ones((), requires_grad=True)
    seen: list[Tensor] = []
    module = Code(lambda x: Keep.apply(x, make, seen))
    with everything(module, tier, **options):
        for _ in range(steps):
            seen.clear()
            module(x).backward()
    return seen


def assert_same_tensor(got: Tensor, expected: Tensor) -> None:
    assert same_bits(got, expected)
    assert got.stride() == expected.stride()
    assert got.storage_offset() == expected.storage_offset()
    assert got.is_conj() == expected.is_conj()
    assert got.is_neg() == expected.is_neg()
    assert got.layout == expected.layout
    assert not got.requires_grad


def every_bit_pattern(dtype: torch.dtype, num_bytes: int = 64) -> Tensor:
    """Return NaN payloads, negative zeros, subnormals and all."""
    if dtype is torch.bool:
        return torch.arange(num_bytes) % 3 == 0
    return torch.arange(num_bytes, dtype=torch.int64).mul(37).add(130).remainder(256).to(torch.uint8).view(dtype)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "transpose": lambda t: t.view(4, -1).t(),
    "permuted": lambda t: t.view(2, 2, -1).permute(2, 0, 1),
    "second half": lambda t: t[t.numel() // 2 :],
    "every other": lambda t: t[::2],
    "column": lambda t: t.view(-1, 4)[:, 1],
    "diagonal": lambda t: t[:4].view(2, 2).diagonal(),
    "expanded": lambda t: t[:1].expand(100, 1),
    "expanded in the middle": lambda t: t.view(2, 1, -1).expand(2, 50, -1),
    "overlapping": lambda t: t.unfold(0, 3, 1),
    "strides of nothing": lambda t: t.as_strided((2, 1, 0, 3), (7, 5, 3, 1)),
    "odd stride of one": lambda t: t.as_strided((1, 4), (17, 1)),
    "0-dim": lambda t: t[3],
    "zero rows": lambda t: t.view(4, -1)[:0],
    "channels_last": lambda t: t[: t.numel() // 4 * 4].view(1, 2, 1, -1).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_view_comes_back_with_its_layout_and_every_bit(view):
    """In every dtype."""
    tier = RecordingTier(deferred=True)
    got = come_back(lambda: [view(every_bit_pattern(dtype)) for dtype in DTYPES], tier)
    for tensor, dtype in zip(got, DTYPES, strict=True):
        assert_same_tensor(tensor, view(every_bit_pattern(dtype)))
    stored = [record.num_bytes for record in tier.records if record.event == "store"]
    few = [tensor for tensor in got if tensor.numel() * tensor.element_size() * 16 < 64]  # too little of the storage for it to move
    assert stored == [64] * (len(DTYPES) - len(few))


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_a_view_of_another_dtype_at_an_odd_offset_of_bytes_comes_back(offset):
    """Two dtypes look at one storage: bytes, and floats that begin inside."""
    raw = every_bit_pattern(torch.uint8)
    floats = raw[offset * 4 :].view(torch.float32)
    tier = RecordingTier(deferred=True)
    got = come_back(lambda: (lambda raw: [raw, raw[offset * 4 :].view(torch.float32), raw[offset:]])(every_bit_pattern(torch.uint8)), tier)
    for tensor, expected in zip(got, [raw, floats, raw[offset:]], strict=True):
        assert_same_tensor(tensor, expected)
    assert tier.bytes_of("store") == 64


def test_a_storage_that_is_no_multiple_of_its_elements_comes_back():
    def make() -> list[Tensor]:
        raw = every_bit_pattern(torch.uint8, 67)
        return [raw[:64].view(torch.float64), raw]

    tier = RecordingTier(deferred=True)
    for got, expected in zip(come_back(make, tier), make(), strict=True):
        assert_same_tensor(got, expected)
    assert tier.bytes_of("store") == 67


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugates_and_negatives_stay_lazy(dtype):
    def make() -> list[Tensor]:
        z = every_bit_pattern(torch.float32).to(torch.float64).nan_to_num().view(torch.complex128).to(dtype)
        return [z, z.conj(), z.conj().imag, z.conj().t() if z.dim() == 2 else z.view(2, -1).conj().t(), z.imag, z.real, -z.conj().imag]

    tier = RecordingTier(deferred=True)
    got = come_back(make, tier)
    for tensor, expected in zip(got, make(), strict=True):
        assert_same_tensor(tensor, expected)
    assert got[1].is_conj()
    assert got[2].is_neg()


def test_many_views_are_one_copy_out_and_one_back():
    def make() -> list[Tensor]:
        base = torch.arange(1024.0).view(32, 32)
        return [base, base.t(), base[3], base[:, ::2], base.view(-1), base[4:8, 4:8], base.expand(3, 32, 32), base.detach()]

    tier = RecordingTier(deferred=True)
    for got, expected in zip(come_back(make, tier), make(), strict=True):
        assert_same_tensor(got, expected)
    assert [(record.event, record.num_bytes) for record in tier.records] == [("store", 4096), ("load", 4096), ("free", 4096)]


def test_views_of_one_storage_still_share_it_when_they_are_back():
    first, second = come_back(lambda: (lambda base: [base[:4], base[2:]])(torch.arange(8.0)))
    assert first.untyped_storage() is second.untyped_storage()


def test_an_expanded_tensor_is_never_blown_up():
    tier = RecordingTier(deferred=True)
    a = torch.randn(8, 1, requires_grad=True)
    module = Code(lambda a: (a * 1).expand(8, 100_000).sin())
    with everything(module, tier):
        module(a).sum().backward()
    assert tier.bytes_of("store") == a.nbytes


def test_chunks_are_one_copy():
    """SwiGLU's two halves, the q, k and v of a fused projection."""
    tier = RecordingTier(deferred=True)
    x = torch.randn(16, 48, requires_grad=True)

    def fused(x: Tensor) -> Tensor:
        q, k, v = (x * 2).chunk(3, -1)
        return q * k * v

    expected = torch.autograd.grad(fused(x).sum(), x)
    module = Code(fused)
    with everything(module, tier) as handle:
        assert same(torch.autograd.grad(module(x).sum(), x), expected)
    stored = [record.num_bytes for record in tier.records if record.event == "store"]
    assert sorted(stored) == [16 * 16 * 4, x.nbytes]  # q * k, and the one storage of all three
    assert handle.stats.saved_bytes == sum(stored)


def test_a_small_slice_does_not_make_a_huge_storage_move():
    tier = RecordingTier(deferred=True)
    got = come_back(lambda: [torch.arange(10_000.0)[10:20]], tier)
    assert_same_tensor(got[0], torch.arange(10_000.0)[10:20])
    assert tier.bytes_of("store") == 0


def test_a_small_slice_is_counted_with_its_reason():
    x = torch.ones(10_000, requires_grad=True)
    module = Code(lambda x: (x * 1)[:10].sin())
    with everything(module) as handle:
        module(x).sum().backward()
        assert handle.stats.kept_by_reason == {"slice": 40_000}


def test_a_small_slice_whose_storage_is_saved_as_a_whole_later_moves():
    tier = RecordingTier(deferred=True)

    def make() -> list[Tensor]:
        base = torch.arange(10_000.0)
        return [base[10:20], base, base[:3]]

    for got, expected in zip(come_back(make, tier), make(), strict=True):
        assert_same_tensor(got, expected)
    assert tier.bytes_of("store") == 40_000


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_layouts_survive_learned_steps(steps):
    def make() -> list[Tensor]:
        base = torch.arange(64, dtype=torch.float64).view(8, 8)
        return [base.t()[1:], torch.ones(0, 3), torch.tensor(3.5), (base > 30)[::2], base.to(torch.complex64).conj()]

    for got, expected in zip(come_back(make, steps=steps), make(), strict=True):
        assert_same_tensor(got, expected)


def test_channels_last_convolution_trains_the_same_and_stays_channels_last():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last).requires_grad_()

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))

    expected = gradients()
    with everything(model) as handle:
        for _ in range(3):
            got = gradients()
            assert same(got, expected)
            assert [g.stride() for g in got] == [e.stride() for e in expected]
        assert handle.stats.offloaded_bytes


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x * 2, 0.5) * 2,
        lambda x: x.masked_fill(x > 0, 1.0).sin(),
        lambda x: torch.where(x > 0, x.sin(), x.exp()),
        lambda x: x.view(2, 32).max(0)[0] * x.sort()[0][:32],
        lambda x: F.embedding(torch.tensor([1, 1, 3]), x.view(8, 8)).sin(),
        lambda x: torch.fft.fft(x).abs() + torch.view_as_complex(x.view(-1, 2)).conj().angle().sum(),
        lambda x: F.scaled_dot_product_attention(*(x.view(1, 1, 8, 8) * k for k in (1, 2, 3)), is_causal=True),
        lambda x: F.max_pool1d(x.view(1, 4, 16), 3).sin(),
        lambda x: torch.linalg.svd(x.view(8, 8))[1],
        lambda x: torch.einsum("ab,cb->ac", x.view(8, 8).t(), x.view(8, 8)),
        lambda x: x.view(8, 8)[:, ::3].cumsum(0).prod(1),
        lambda x: x[:0].sin().sum() + x.sum() * 0 + x.mean() ** 3,
    ],
)
def test_an_operation_gives_the_same_gradient(function):
    x = torch.randn(64, requires_grad=True)

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return torch.autograd.grad(run(x).sum(), x)

    expected = gradients(function)
    module = Code(function)
    with everything(module) as handle:
        for _ in range(3):
            assert same(gradients(module), expected)
        assert handle.stats.offloaded_bytes


def test_c38_every_blob_comes_back_to_aligned_memory():
    sizes = [(3, torch.uint8), (5, torch.bfloat16), (7, torch.float32), (1, torch.bool), (9, torch.complex64)]
    got = come_back(lambda: [torch.arange(n).to(dtype) for n, dtype in sizes])
    for tensor, (n, dtype) in zip(got, sizes, strict=True):
        assert same_bits(tensor, torch.arange(n).to(dtype))
        assert tensor.untyped_storage().data_ptr() % 64 == 0  # what the CPU allocator gives; a GPU's gives 512


def test_c36_tensors_on_their_own_device_come_back_there():
    """An int tensor of lengths, 0-dim numbers: all on the host here, and all of them move."""
    tier = RecordingTier(deferred=True)
    got = come_back(lambda: [torch.tensor([2, 3]), torch.tensor(5), torch.ones(4)], tier)
    assert [tensor.device.type for tensor in got] == ["cpu"] * 3
    assert tier.bytes_of("store") == 16 + 8 + 16


def test_c29_an_address_used_again_is_a_new_tensor():
    x = torch.randn(4096, requires_grad=True)

    def loop(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(20):
            total = total + (x * float(i + 1) / 20).exp().sum()
            (x * 3.0).exp().sum()  # freed at once; its address and its id are used again
        return total

    expected = torch.autograd.grad(loop(x), x)
    module = Code(loop)
    tier = RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        assert same(torch.autograd.grad(module(x), x), expected)
        assert handle.stats.num_offloads == 40
    assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_a_tensor_that_many_operations_save_is_moved_as_one_view(monkeypatch):
    moves: list[View] = []
    move_to = View.move_to

    def counted(view: View, root: Tensor) -> None:
        moves.append(view)
        move_to(view, root)

    def forward(x: Tensor) -> Tensor:
        y = x.cumsum(0)
        return sum((y * weight for weight in weights), start=y * 0)

    monkeypatch.setattr(View, "move_to", counted)
    weights = [nn.Parameter(torch.rand(16)) for _ in range(20)]
    model, x = Code(forward), torch.rand(8, 16)
    expected = torch.autograd.grad(model(x).sum(), weights)
    with everything(model) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(model(x).sum(), weights), expected)
        assert 0 < len(moves) <= handle.stats.reloaded_bytes / x.nbytes
