"""Tensors that are more than a dense block: taken apart and put together where that is possible, kept with a reason where it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from backhaul.testing import RecordingTier, same_bits
from tests.conftest import Code, everything, same
from tests.test_views import Keep


class Scaled(Tensor):
    """Two tensors that stand for their product: a wrapper subclass as quantization libraries write them, with a context of its own."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, note: str) -> "Scaled":
        return Tensor._make_wrapper_subclass(cls, values.size(), strides=values.stride(), dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor, note: str) -> None:
        self.values_, self.scale, self.note = values, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values_", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], note: str, size: torch.Size, stride: tuple[int, ...]) -> "Scaled":
        assert inner["values_"].size() == size
        return Scaled(inner["values_"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].values_, args[0].scale, args[0].note)
        if function is torch.ops.aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = tree_map(lambda x: x.values_ * x.scale if isinstance(x, Scaled) else x, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def come_back(
    make: Callable[[], list[Tensor]], tier: RecordingTier, *, steps: int = 1, **options: object
) -> tuple[list[Tensor], dict[str, int]]:
    """Return what the tensors of ``make`` are in backward, and the reasons for which any stayed."""
    x = torch.ones((), requires_grad=True)
    seen: list[Tensor] = []
    module = Code(lambda x: Keep.apply(x, make, seen))
    with everything(module, tier, **options) as handle:
        for _ in range(steps):
            seen.clear()
            module(x).backward()
        return seen, handle.stats.kept_by_reason


def test_a_wrapper_subclass_is_taken_apart_and_put_together():
    tier = RecordingTier(deferred=True)
    (got,), reasons = come_back(lambda: [Scaled(torch.arange(8.0), torch.tensor(0.5), "a note")], tier, steps=3)
    assert type(got) is Scaled
    assert got.note == "a note"
    assert same([got.values_, got.scale], [torch.arange(8.0), torch.tensor(0.5)])
    assert {record.num_bytes for record in tier.records} == {32, 4}
    assert not reasons


def test_wrappers_around_wrappers():
    tier = RecordingTier(deferred=True)

    def make() -> list[Tensor]:
        inner = Scaled(torch.arange(8.0), torch.tensor(0.5), "inner")
        return [Scaled(inner, torch.tensor(2.0), "outer"), inner]

    (outer, inner), reasons = come_back(make, tier)
    assert (type(outer.values_), outer.note, outer.values_.note, inner.note) == (Scaled, "outer", "inner", "inner")
    assert same([outer.values_.values_, inner.values_], [torch.arange(8.0)] * 2)
    assert sorted(record.num_bytes for record in tier.records if record.event == "store") == [4, 4, 32]  # the inner one's parts once
    assert not reasons


def test_parts_that_are_views_keep_their_layout():
    tier = RecordingTier(deferred=True)
    base = torch.arange(64.0).view(8, 8)
    (got,), _ = come_back(lambda: [Scaled(base.clone().t()[1:], torch.ones(2)[1], "")], tier)
    assert same([got.values_], [base.t()[1:]])
    assert got.values_.stride() == base.t()[1:].stride()


def test_a_wrapper_around_a_parameter_stays():
    weight = nn.Parameter(torch.randn(8, 8))

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return Keep.apply(x, lambda: [Scaled(self.weight.detach().t(), torch.tensor(2.0), "")], [])

    tier = RecordingTier(deferred=True)
    module = Wraps()
    with everything(module, tier) as handle:
        module(torch.ones((), requires_grad=True)).backward()
        assert handle.stats.kept_by_reason == {"parameter": 256}
    assert tier.bytes_of("store") == 4


@pytest.mark.parametrize("options", [{}, {"min_bytes": 1 << 30}], ids=["moved", "kept"])
@pytest.mark.parametrize("through", ["itself", "alias", "part"])
@pytest.mark.filterwarnings("ignore:backhaul offloaded 0 of")
def test_c15_a_write_to_a_wrapper_or_to_a_part_is_never_silently_stale(options, through):
    kept: list[Tensor] = []
    seen: list[Tensor] = []

    def make() -> list[Tensor]:
        scaled = Scaled(torch.arange(8.0), torch.tensor(0.5), "")
        kept[:] = [{"itself": scaled, "alias": scaled.detach(), "part": scaled.scale}[through]]
        return [scaled]

    module = Code(lambda x: Keep.apply(x, make, seen))
    with everything(module, **options):
        for _ in range(3):
            seen.clear()
            output = module(torch.ones((), requires_grad=True))
            kept[0].mul_(10)
            try:
                output.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                assert seen[0].scale == 0.5


class Tagged(Tensor):
    """A subclass that only carries a tag, and cannot be taken apart."""


def test_an_unknown_subclass_is_kept_with_its_name():
    tier = RecordingTier(deferred=True)
    (got,), reasons = come_back(lambda: [torch.arange(8.0).as_subclass(Tagged)], tier)
    assert type(got) is Tagged
    assert same([got.as_subclass(Tensor)], [torch.arange(8.0)])
    assert reasons == {"subclass Tagged": 32}
    assert not tier.records


def test_a_module_that_computes_with_an_unknown_subclass_trains_the_same():
    x = torch.randn(8).as_subclass(Tagged).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return (x * 2).exp() * x

    expected = torch.autograd.grad(function(x).sum(), x)
    module = Code(function)
    with everything(module):
        for _ in range(2):
            got = torch.autograd.grad(module(x).sum(), x)
            assert type(got[0]) is Tagged
            assert same([got[0].as_subclass(Tensor)], [expected[0].as_subclass(Tensor)])


SPARSE = {
    "sparse_coo": lambda: torch.eye(16).to_sparse(),
    "sparse_csr": lambda: torch.eye(16).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(16).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(16).to_sparse_bsr((4, 4)),
}


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state", "ignore:Sparse invariant checks")
def test_a_sparse_tensor_is_kept_with_its_layout(layout):
    tier = RecordingTier(deferred=True)
    (got,), reasons = come_back(lambda: [SPARSE[layout]()], tier)
    assert got.layout == SPARSE[layout]().layout
    assert same([got.to_dense()], [torch.eye(16)])
    assert list(reasons) == [layout]
    assert not tier.records


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_counts_as_what_it_holds():
    """Not as the dense one: a million rows with three entries are no gigabytes."""
    huge = torch.sparse_coo_tensor(torch.tensor([[0, 5, 9], [1, 2, 3]]), torch.ones(3), (1_000_000, 1_000_000)).coalesce()
    _, reasons = come_back(lambda: [huge], RecordingTier(deferred=True))
    assert reasons["sparse_coo"] < 1000


def test_c15_a_write_to_a_sparse_tensor_is_refused():
    kept: list[Tensor] = []

    def make() -> list[Tensor]:
        kept[:] = [torch.eye(4).to_sparse().coalesce()]
        return list(kept)

    module = Code(lambda x: Keep.apply(x, make, []))
    with everything(module):
        output = module(torch.ones((), requires_grad=True))
        kept[0].mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()


def test_sparse_products_train_the_same():
    adjacency = torch.eye(8).roll(1, 0).to_sparse()
    x = torch.randn(8, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, (x * 2).sin()).exp()

    expected = torch.autograd.grad(function(x).sum(), x)
    module = Code(function)
    with everything(module) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert "sparse_coo" in handle.stats.kept_by_reason
        assert handle.stats.offloaded_bytes


@pytest.mark.filterwarnings("ignore:.*quantize:", "ignore:torch.ao.quantization", "ignore:.*[Qq]uantiz")
def test_a_quantized_tensor_is_kept():
    tier = RecordingTier(deferred=True)
    (got,), reasons = come_back(lambda: [torch.quantize_per_tensor(torch.arange(8.0), 0.5, 1, torch.quint8)], tier)
    assert same([got.dequantize()], [torch.arange(8.0)])
    assert reasons == {"quantized": 8}
    assert not tier.records


def test_a_meta_tensor_is_kept():
    (got,), reasons = come_back(lambda: [torch.ones(8, device="meta")], RecordingTier(deferred=True))
    assert got.is_meta
    assert reasons == {"meta": 32}


def test_fake_tensors_pass_through():
    """They reach ``pack`` while something compiles."""
    from torch._subclasses import FakeTensorMode

    tier = RecordingTier(deferred=True)
    module = Code(lambda x: (x * 2).sin().exp())
    with everything(module, tier), FakeTensorMode():
        x = torch.randn(8, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x).sum(), x)
        assert gradient.shape == (8,)
    assert not tier.records


def jagged(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, 4) for n in lengths], layout=torch.jagged)


def test_a_jagged_tensor_comes_back_with_its_offsets():
    tier = RecordingTier(deferred=True)
    expected = jagged(2, 5, 1)
    (got,), _ = come_back(lambda: [expected * 1], tier)
    assert got.is_nested
    assert got.layout == torch.jagged
    assert same([got.values(), got.offsets()], [expected.values(), expected.offsets()])
    assert (got + expected).shape == expected.shape  # the same ragged dimension, so that the two still go together
    assert 8 * 4 * 4 in {record.num_bytes for record in tier.records}


def test_jagged_training_is_the_same():
    leaf = torch.nested.nested_tensor([torch.randn(n, 4) for n in (2, 5, 1)], layout=torch.jagged, requires_grad=True)
    linear = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        return (linear(x * 2).sin() * x).values()

    expected = torch.autograd.grad(function(leaf).sum(), [leaf, linear.weight])
    module = Code(function, linear)
    with everything(module) as handle:
        for _ in range(3):
            got = torch.autograd.grad(module(leaf).sum(), [leaf, linear.weight])
            assert same([got[0].values(), got[1]], [expected[0].values(), expected[1]])
        assert handle.stats.offloaded_bytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_old_nested_tensor_is_kept():
    (got,), reasons = come_back(lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])], RecordingTier(deferred=True))
    assert got.is_nested
    assert list(reasons) == ["nested"]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_a_dtensor_keeps_mesh_and_placements(mesh, placement):
    tier = RecordingTier(deferred=True)
    expected = torch.randn(4, 6)
    (got,), reasons = come_back(lambda: [DTensor.from_local(expected.clone(), mesh, [placement])], tier)
    assert type(got) is DTensor
    assert got.placements == (placement,)
    assert got.device_mesh is mesh or got.device_mesh == mesh
    assert got.shape == (4, 6)
    assert same([got.to_local()], [expected])
    assert tier.bytes_of("store") == expected.nbytes
    assert not reasons


def test_an_unfinished_collective_is_waited_for(mesh):
    from torch.distributed._functional_collectives import all_reduce

    tier = RecordingTier(deferred=True)
    x = torch.randn(8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        reduced = all_reduce((x * 2).detach(), "sum", mesh)
        return (x * 3) * reduced

    expected = torch.autograd.grad(function(x).sum(), x)
    module = Code(function)
    with everything(module, tier):
        assert same(torch.autograd.grad(module(x).sum(), x), expected)
    assert tier.bytes_of("store") == x.nbytes


def test_attention_of_every_backend_trains_the_same():
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):

        def function(x: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return nn.functional.scaled_dot_product_attention(x * 1, x * 2, x * 3, is_causal=True)

        expected = torch.autograd.grad(function(x).sum(), x)
        module = Code(function)
        with everything(module) as handle:
            assert same_bits(torch.autograd.grad(module(x).sum(), x)[0], expected[0])
            assert handle.stats.offloaded_bytes


class Sealed(Scaled):
    """The same with parts that cannot be replaced from outside."""

    def __init__(self, values: Tensor, scale: Tensor, note: str) -> None:
        self._inside = (values, scale)
        self.note = note

    values_ = property(lambda self: self._inside[0])
    scale = property(lambda self: self._inside[1])

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], note: str, size: torch.Size, stride: tuple[int, ...]) -> "Sealed":
        return Sealed(inner["values_"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return Sealed(args[0].values_, args[0].scale, args[0].note)


def test_a_wrapper_whose_parts_cannot_be_replaced_comes_back_too() -> None:
    values, scale = torch.arange(8.0), torch.tensor(2.0)
    seen, _ = come_back(lambda: [Sealed(values, scale, "note")], RecordingTier(deferred=True))
    (back,) = seen
    assert isinstance(back, Sealed)
    assert same([back.values_, back.scale], [values, scale])
