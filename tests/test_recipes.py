"""Each op of the table: what it made comes back bit for bit, in its place, from what its node keeps, and its storage is freed meanwhile."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.recipe_hooks import Use, assert_comes_back

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Shaped = Callable[[Tensor], Tensor]


BESIDE: list[Tensor] = []  # results of ops that have saved something


@pytest.fixture(autouse=True)
def _nothing_beside() -> Iterator[None]:
    yield
    BESIDE.clear()


def seen_by_a_saver(x: Tensor) -> Tensor:
    """Have ``x`` saved by an op beside, so that there is a promise for it."""
    BESIDE.append(Use.apply(x, []))
    return x


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: torch.randn(3, 5, 7, 9).to(dtype),
    "transposed": lambda dtype: torch.randn(9, 5, 3, 7).to(dtype).transpose(0, 2).transpose(2, 3).transpose(0, 0),
    "channels last": lambda dtype: torch.randn(3, 5, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last),
    "expanded": lambda dtype: torch.randn(3, 1, 7, 1).to(dtype).expand(3, 5, 7, 9),
    "every other": lambda dtype: torch.randn(3, 5, 7, 18).to(dtype)[..., ::2],
    "at an offset": lambda dtype: torch.randn(3 * 5 * 7 * 9 + 3).to(dtype)[3:].view(3, 5, 7, 9),
}
ONE_OPERAND: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1).detach().requires_grad_(), -1),
    "square": lambda x: x.square(),
    "cube": lambda x: x**3,
    "odd power": lambda x: x**1.7,
    "inverse root": lambda x: x**-0.5,
    "times a number": lambda x: seen_by_a_saver(x) * 2.1,
    "number times": lambda x: 3 * seen_by_a_saver(x),
    "by a number": lambda x: seen_by_a_saver(x) / 3.3,
    "negative": lambda x: -seen_by_a_saver(x),
    "to float32": lambda x: seen_by_a_saver(x).to(torch.float32, copy=True),
    "to bfloat16": lambda x: seen_by_a_saver(x).to(torch.bfloat16, copy=True),
    "clone": lambda x: seen_by_a_saver(x).clone(),
    "contiguous clone": lambda x: seen_by_a_saver(x).clone(memory_format=torch.contiguous_format),
    "channels last clone": lambda x: seen_by_a_saver(x).clone(memory_format=torch.channels_last),
    "cat": lambda x: torch.cat([seen_by_a_saver(x), x, x], -2),
    "stack": lambda x: torch.stack([seen_by_a_saver(x), x], -1),
    "index_select": lambda x: seen_by_a_saver(x).index_select(-1, torch.tensor([3, 3, 0])),
    "gather": lambda x: seen_by_a_saver(x).gather(-2, torch.zeros(2, 3, 4, 5, dtype=torch.long)),
    "where": lambda x: torch.where(torch.arange(9) > 4, seen_by_a_saver(x), x.transpose(0, 0)),
    "copied reshape": lambda x: seen_by_a_saver(x).transpose(0, 2).reshape(7, -1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ONE_OPERAND)
def test_an_op_with_one_operand_comes_back(op: str, layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](dtype).detach().requires_grad_()
    assert_comes_back(ONE_OPERAND[op], x)


TWO_OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "add": lambda x, y: seen_by_a_saver(x) + seen_by_a_saver(y),
    "add with alpha": lambda x, y: torch.add(seen_by_a_saver(x), seen_by_a_saver(y), alpha=0.3),
    "sub": lambda x, y: seen_by_a_saver(x) - seen_by_a_saver(y),
    "sub with alpha": lambda x, y: torch.sub(seen_by_a_saver(x), seen_by_a_saver(y), alpha=-3),
}


@pytest.mark.parametrize(("first", "second"), [("contiguous", "contiguous"), ("transposed", "every other"), ("channels last", "expanded")])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32), (torch.float64, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("op", TWO_OPERANDS)
def test_an_op_with_two_operands_comes_back(op: str, dtypes: tuple[torch.dtype, torch.dtype], first: str, second: str) -> None:
    x, y = (LAYOUTS[layout](dtype).detach().requires_grad_() for layout, dtype in zip((first, second), dtypes, strict=True))
    assert_comes_back(TWO_OPERANDS[op], x, y)


@pytest.mark.parametrize("shape", [(9,), (7, 1), (5, 1, 9), (2, 1, 1, 1, 1), ()], ids=str)
@pytest.mark.parametrize("op", TWO_OPERANDS)
def test_operands_are_broadcast(op: str, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(3, 5, 7, 9, requires_grad=True), torch.rand(shape, dtype=torch.float64).requires_grad_()
    assert_comes_back(TWO_OPERANDS[op], x.bfloat16().detach().requires_grad_(), y)
    assert_comes_back(lambda x, y: TWO_OPERANDS[op](y, x), x, y)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other"])
def test_layer_norm_comes_back(layout: str, dtype: torch.dtype, with_weight: bool, with_bias: bool) -> None:
    x = LAYOUTS[layout](dtype).detach().requires_grad_()
    weight = torch.rand(x.shape[-1], dtype=dtype, requires_grad=True) if with_weight else None
    bias = torch.rand(x.shape[-1], dtype=dtype) if with_bias else None
    for eps in (1e-5, 0.3):
        assert_comes_back(lambda x, eps=eps: F.layer_norm(x, (x.shape[-1],), weight, bias, eps), x)


@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("x_learns", [True, False])
def test_a_layer_norm_comes_back_whichever_of_its_operands_learn(x_learns: bool, learned: tuple[bool, bool]) -> None:
    if not x_learns and not any(learned):
        return
    weight, bias = (torch.nn.Parameter(torch.rand(9), requires_grad=each) for each in learned)
    assert_comes_back(lambda x: F.layer_norm(x, (9,), weight, bias), torch.randn(5, 9, requires_grad=x_learns))


def test_a_norm_whose_eps_nobody_has_seen_does_not() -> None:
    assert_comes_back(lambda x: torch.layer_norm(x, (9,), eps=1e-3), torch.randn(5, 9, requires_grad=True), recipe=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_rms_norm_comes_back(eps: float | None, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 9).to(dtype).requires_grad_(), torch.nn.Parameter(torch.rand(9, dtype=dtype))
    assert_comes_back(lambda x: F.rms_norm(x, (9,), weight, eps), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("with_weight", [True, False])
def test_the_fused_rms_norm_comes_back(with_weight: bool, eps: float | None, dtype: torch.dtype) -> None:
    x = torch.randn(64, 1024, device="cuda").to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.rand(1024, dtype=dtype, device="cuda")) if with_weight else None
    assert F.rms_norm(x, (1024,), weight, eps).grad_fn.name() == "FusedRmsNormBackward0"
    assert_comes_back(lambda x: F.rms_norm(x, (1024,), weight, eps), x)


def test_advanced_indexing_comes_back() -> None:
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 4])
    for index in (
        (rows,),
        (slice(None), columns),
        (rows, columns),
        (rows[:, None], columns),
        (rows % 2 == 0, None),
        (torch.tensor(1), rows),
    ):
        assert_comes_back(lambda x, index=index: seen_by_a_saver(x)[index], torch.randn(3, 5, 7, requires_grad=True))


def test_repeated_heads_come_back() -> None:
    heads = torch.randn(3, 5, 7, 9, requires_grad=True)
    assert_comes_back(lambda x: seen_by_a_saver(x)[:, :, None].expand(3, 5, 2, 7, 9).reshape(3, 10, 7, 9), heads)


def test_an_embedding_comes_back() -> None:
    table = torch.randn(10, 4, requires_grad=True)
    assert_comes_back(lambda table: F.embedding(torch.tensor([[1, 2], [9, 1]]), table), table)


VIEWS: dict[str, Shaped] = {
    "view": lambda x: x.view(15, 63),
    "flatten": lambda x: x.flatten(1, 2),
    "unflatten": lambda x: x.unflatten(-1, (3, -1)),
    "transpose": lambda x: x.transpose(-1, -3),
    "permute": lambda x: x.permute(-1, 0, -2, 1),
    "movedim": lambda x: x.movedim(-1, 0),
    "matrix transpose": lambda x: x.mT,
    "t": lambda x: x[0, 0].t(),
    "expand": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze a dim": lambda x: x[:, 2:3].squeeze(-3),
    "squeeze dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "slice": lambda x: x[..., 2:-1],
    "slice of the end": lambda x: x[..., -3:, :],
    "strided slice": lambda x: x[:, 1::2, :, ::3],
    "narrow": lambda x: x.narrow(-1, -4, 2),
    "select": lambda x: x.select(-1, -1),
    "number": lambda x: x[1, ..., -2],
    "split": lambda x: x.split(2, -1)[-1],
    "split by sizes": lambda x: x.split([2, 3, 4], -1)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unsafe_chunk": lambda x: x.unsafe_chunk(3, -1)[2],
    "unbind": lambda x: x.unbind(-3)[3],
    "view_as": lambda x: x.view_as(x),
    "alias": torch.ops.aten.alias.default,
    "new axis": lambda x: x[:, None, ..., None],
}


@pytest.mark.parametrize("view", VIEWS)
def test_an_operand_may_be_a_view_of_what_was_saved(view: str) -> None:
    assert_comes_back(lambda x: -VIEWS[view](seen_by_a_saver(x @ torch.eye(9))), torch.randn(3, 5, 7, 9, requires_grad=True))


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_saved_may_be_a_view_of_what_is_made(view: str) -> None:
    if view != "unsafe_chunk":  # which autograd takes for a tensor of its own
        assert_comes_back(lambda x: VIEWS[view](x * x), torch.randn(3, 5, 7, 9, requires_grad=True))


def test_an_operand_may_be_what_a_saved_tensor_is_a_view_of() -> None:
    def function(x: Tensor) -> Tensor:
        whole = x @ x
        seen_by_a_saver(whole[2:, 1])
        return torch.cat([whole, whole])

    assert_comes_back(function, torch.randn(9, 9, requires_grad=True))


@pytest.mark.parametrize("op", [torch.exp, torch.sigmoid, torch.tanh, torch.relu, torch.sqrt, torch.rsqrt, lambda x: x.softmax(-1)])
def test_an_operand_may_be_what_its_own_node_keeps(op: Shaped) -> None:
    assert_comes_back(lambda x: torch.cat([op(x), op(x)]), torch.rand(5, 9, requires_grad=True))


def test_a_dropout_whose_mask_is_kept_comes_back() -> None:
    assert_comes_back(lambda x: F.dropout(seen_by_a_saver(x), 0.3), torch.randn(5, 9, requires_grad=True))
