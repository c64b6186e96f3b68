"""Every op of the table has a test of its own: values bit for bit in a split backward, in a retained graph, and in both orders."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backhaul.recipe_ops import OPS
from tests.conftest import same
from tests.models import leaf
from tests.recipe_hooks import Hooks, Use

ROWS = torch.tensor([3, 3, 0, 6])
SHAPE = 7, 6


def kept(x: Tensor) -> Tensor:
    """Make a value that somebody saves, so that there is a promise for it."""
    value = x.sin()
    BESIDE.append(Use.apply(value, []))
    return value


BESIDE: list[Tensor] = []
Function = Callable[[Tensor], Tensor]

# By the name of the node that is to be run again. Of views, what is saved is made from one.
CASES: dict[str, Function] = {
    "MulBackward0": lambda x: x * x.sin(),
    "DivBackward0": lambda x: x / (x.sin() + 2),
    "AddBackward0": lambda x: torch.add(kept(x), kept(x), alpha=0.3),
    "SubBackward0": lambda x: torch.sub(kept(x), kept(x), alpha=0.7),
    "NegBackward0": lambda x: -kept(x),
    "PowBackward0": lambda x: x**3,
    "SiluBackward0": F.silu,
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "GluBackward0": lambda x: F.glu(x, -1),
    "NativeLayerNormBackward0": lambda x: F.layer_norm(x, SHAPE[1:], eps=0.1),
    "ToCopyBackward0": lambda x: kept(x).bfloat16(),
    "CloneBackward0": lambda x: kept(x).clone(),
    "CatBackward0": lambda x: torch.cat([kept(x), kept(x)], -1),
    "StackBackward0": lambda x: torch.stack([kept(x), kept(x)], 1),
    "IndexSelectBackward0": lambda x: kept(x).index_select(0, ROWS),
    "IndexBackward0": lambda x: kept(x)[ROWS],
    "GatherBackward0": lambda x: kept(x).gather(0, ROWS[:, None].expand(4, 6)),
    "EmbeddingBackward0": lambda x: F.embedding(ROWS, x),
    "WhereBackward0": lambda x: torch.where(ROWS[:1] > torch.arange(6), kept(x), kept(x)),
    "ViewBackward0": lambda x: -kept(x).view(6, 7),
    "UnsafeViewBackward0": lambda x: -torch.ops.aten._unsafe_view(kept(x), [6, 7]),
    "ReshapeAliasBackward0": lambda x: -torch.ops.aten._reshape_alias(kept(x), [6, 7], [7, 1]),
    "AliasBackward0": lambda x: -torch.ops.aten.alias(kept(x)),
    "UnsqueezeBackward0": lambda x: -kept(x).unsqueeze(1),
    "SqueezeBackward0": lambda x: -kept(x)[None].squeeze(),
    "SqueezeBackward1": lambda x: -kept(x)[None].squeeze(0),
    "SqueezeBackward2": lambda x: -kept(x)[None, None].squeeze((0, 1)),
    "TBackward0": lambda x: -kept(x).t(),
    "TransposeBackward0": lambda x: -kept(x).transpose(0, 1),
    "PermuteBackward0": lambda x: -kept(x).permute(1, 0),
    "ExpandBackward0": lambda x: -kept(x).expand(2, 7, 6),
    "SliceBackward0": lambda x: -kept(x)[1:, ::2],
    "SelectBackward0": lambda x: -kept(x)[2],
    "SplitBackward0": lambda x: -kept(x).split(3, -1)[1],
    "UnsafeSplitBackward0": lambda x: -torch.unsafe_split(kept(x), 3, -1)[1],
    "SplitWithSizesBackward0": lambda x: -kept(x).split([1, 5], -1)[1],
    "UnbindBackward0": lambda x: -kept(x).unbind(1)[3],
}
ON_A_DEVICE = {"FusedRmsNormBackward0": lambda x: F.rms_norm(x, SHAPE[1:])}  # tests/test_recipes.py runs it there
in_each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _nothing_beside():
    yield
    BESIDE.clear()


def run(function: Function, hooks: Hooks | None, backward: Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]) -> list[Tensor]:
    """Have what ``function`` makes saved by a product, and run backward from it and from the product."""
    torch.manual_seed(0)
    x = leaf(*SHAPE)
    with hooks or torch.enable_grad():
        made = function(x)
        weight = torch.linspace(0.5, 1.5, made.numel()).view(made.shape).requires_grad_()
        num_before = 0 if hooks is None else len(hooks.recipes)
        product, alone = (made * weight).sum(), made.float().sum()
        if hooks is not None:
            assert len(hooks.recipes) == num_before + 1  # for what was made, when the product saved it
        del made
    return backward(product, alone, x, weight)


def split(product: Tensor, alone: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Have the node that made the value run, and be freed, before the value is needed."""
    return [*torch.autograd.grad(alone, [x]), *torch.autograd.grad(product, [weight])]


def other_split(product: Tensor, alone: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Run backward for the input, then for the weight, as zero-bubble schedules do."""
    return [*torch.autograd.grad(product, [x], retain_graph=True), *torch.autograd.grad(product, [weight])]


def retained(product: Tensor, alone: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Run backward three times."""
    return [each for keep in (True, True, False) for each in torch.autograd.grad(product, [weight, x], retain_graph=keep)]


def test_every_op_of_the_table_has_a_case() -> None:
    assert set(OPS) == {*CASES, *ON_A_DEVICE}


@in_each_case
def test_a_case_is_about_its_op(name: str) -> None:
    node = CASES[name](leaf(*SHAPE)).grad_fn
    assert node is not None
    assert name in (node.name(), *(before.name() for before, _ in node.next_functions if before is not None))


@in_each_case
@pytest.mark.parametrize("backward", [split, other_split, retained], ids=lambda each: each.__name__)
def test_gradients_are_those_of_plain_autograd(name: str, backward: Callable[..., list[Tensor]]) -> None:
    assert same(run(CASES[name], Hooks(), backward), run(CASES[name], None, backward))


def test_no_op_of_the_table_multiplies_matrices_sends_anything_or_is_random() -> None:
    dear = ("mm", "matmul", "linear", "conv", "attention", "addmm", "bmm", "einsum", "dropout", "rand", "bernoulli", "multinomial", "rrelu")
    sent = ("reduce", "scatter", "allgather", "all_gather", "alltoall", "broadcast", "wait")
    assert [name for name in OPS if any(word in name.lower() for word in (*dear, *sent))] == []
