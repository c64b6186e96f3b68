"""Recipes hold promises and nothing else: graphs die at once, nodes may have been freed, writes are noticed, and any backward works."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backhaul.recipes import Recipe, Step
from backhaul.remade import Made
from backhaul.saved import Kept, flat
from tests.conftest import same
from tests.models import leaf
from tests.recipe_hooks import Hooks, Use, gradients


class Mark:
    pass


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def gated_inputs() -> list[Tensor]:
    return [leaf(4, 8), leaf(8, 16), leaf(8, 16), leaf(16, 8)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (F.silu(x * 2) * x) @ x,
        lambda x: F.layer_norm(x * x, (8,)) @ x,
        lambda x: torch.cat([x.exp(), x.sigmoid()]) @ x,
        lambda x: x.relu().square() @ x,
        lambda x: x.index_select(0, torch.arange(8)).t().contiguous() @ x,
        lambda x: Use.apply(x.softmax(-1).view(2, 4, 8)[0] * 3, []),
    ],
)
@pytest.mark.parametrize("backward", [True, False])
def test_c34_a_graph_dies_with_its_last_user_without_garbage_collection(function: Callable[[Tensor], Tensor], backward: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        hooks = Hooks()
        with hooks:
            result = function(leaf(8, 8))
        assert hooks.recipes
        nodes, marks = [result.grad_fn], []
        while nodes:
            node = nodes.pop()
            mark = Mark()
            node.metadata["mark"] = mark
            marks.append(weakref.ref(mark))
            nodes.extend(each for each, _ in node.next_functions if each is not None and each.name() != "torch::autograd::AccumulateGrad")
        del node, mark
        if backward:
            result.sum().backward()
        recipes = [weakref.ref(made) for reference in hooks.made.values() if (made := reference()) is not None]
        made = None
        hooks.recipes.clear()
        del result
        assert not [mark for mark in marks if mark() is not None]
        assert not [made for made in recipes if made() is not None]
    finally:
        gc.enable()


def test_the_node_may_have_been_freed_in_a_split_backward() -> None:
    def split(hooks: Hooks | None) -> list[Tensor]:
        torch.manual_seed(0)
        x, gate, up, down = gated_inputs()
        with hooks or torch.enable_grad():
            product = F.silu(x @ gate) * (x @ up)
            first, second = product.sum(), (product @ down).sum()
        del product
        return [*torch.autograd.grad(first, [x, gate, up]), *torch.autograd.grad(second, [down])]

    hooks = Hooks()
    assert same(split(hooks), split(None))
    assert len(hooks.recipes) == 2


def test_backward_runs_as_often_as_the_graph_is_retained() -> None:
    inputs = gated_inputs()
    expected = gradients(gated, inputs)[1:]
    hooks = Hooks()
    with hooks:
        result = gated(*inputs)
    weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
    for _ in range(3):
        assert same(torch.autograd.grad(result, inputs, weight, retain_graph=True), expected)
    assert same(torch.autograd.grad(result, inputs, weight), expected)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_have_gradients(inside: bool) -> None:
    def second(hooks: Hooks | None) -> list[Tensor]:
        torch.manual_seed(0)
        inputs = gated_inputs()
        with hooks or torch.enable_grad():
            result = gated(*inputs)
            if inside:
                first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        if not inside:
            first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), inputs))

    hooks = Hooks()
    assert same(second(hooks), second(None))
    assert len(hooks.recipes) >= 2


@pytest.mark.parametrize("in_backward", [True, False])
def test_autocast_in_backward_changes_nothing(in_backward: bool) -> None:
    def run(hooks: Hooks | None) -> list[Tensor]:
        torch.manual_seed(0)
        x, gate, up, down = gated_inputs()
        with torch.autocast("cpu", torch.bfloat16), hooks or torch.enable_grad():
            product = F.silu(x @ gate) * (x @ up)
            normed = F.layer_norm(torch.cat([product, product.float()]), (16,))
            result = (normed @ down).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=in_backward):
            return list(torch.autograd.grad(result, [x, gate, up, down]))

    hooks = Hooks()
    assert same(run(hooks), run(None))
    assert len(hooks.recipes) >= 2


def test_an_operand_that_is_written_after_the_op_raises_what_autograd_raises() -> None:
    def run(hooks: Hooks | None) -> str:
        x, y = leaf(4, 4) * 1, leaf(4, 4)
        with hooks or torch.enable_grad():
            result = (x * y) @ y
            with torch.no_grad():
                x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            result.sum().backward()
        return str(caught.value).split(" [")[0]

    assert run(Hooks()) == run(None)


def test_a_product_that_is_written_after_it_was_saved_raises_what_autograd_raises() -> None:
    x = leaf(4, 4)
    hooks = Hooks()
    with hooks:
        product = x * x
        result = product @ x
        product.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        result.sum().backward()
    assert len(hooks.recipes) == 1


def test_backward_may_run_on_another_thread() -> None:
    inputs = gated_inputs()
    expected = gradients(gated, inputs)[1:]
    with Hooks():
        result = gated(*inputs)
    got: list[Tensor] = []
    weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape)
    thread = threading.Thread(target=lambda: (torch.set_num_threads(1), got.extend(torch.autograd.grad(result, inputs, weight))))
    thread.start()
    thread.join()
    assert same(got, expected)


def test_what_another_thread_made_may_be_an_operand() -> None:
    hooks, x = Hooks(), leaf(4, 4)
    parts: list[Tensor] = []

    def forward(index: int) -> None:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, lambda promise: promise.restore(None)):
            parts.append(Use.apply(x * (index + 1), []))

    threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    with hooks:
        result = torch.cat(parts) @ x
    hooks.assert_all_exact()
    expected = torch.cat([x * 1 * 1, x * 2 * 1])
    assert torch.equal(result.detach(), (expected @ x).detach())


def test_memory_is_freed_between_forward_and_backward_and_after_it() -> None:
    x = leaf(64, 64)
    hooks = Hooks()
    with hooks:
        result = F.silu(x @ x) * (x @ x)
        product = weakref.ref(result.untyped_storage())
        result = result @ x
    assert product() is None
    result.sum().backward()
    assert all(made() is None or made().storage is None for made in hooks.made.values())


def test_a_recipe_is_followed_without_autocast_and_without_grad_and_drops_what_it_no_longer_needs() -> None:
    x, seen, alive = leaf(4, 4), [], []

    def watched(value: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        result = -value
        alive.append(weakref.ref(result.untyped_storage()))
        assert [each() is not None for each in alive[:-2]] == [False] * len(alive[:-2])
        return result

    steps = [Step(watched, (index,), torch.float32) for index in range(4)]
    recipe, original = Recipe([Kept(x), *steps], x.detach(), cheap=True), x.detach().clone().untyped_storage()
    made = Made(recipe, original)
    with torch.autocast("cpu", torch.bfloat16):
        recipe.make(made, lambda blob: None)
    assert seen == [(False, False)] * 4
    assert torch.equal(flat(made.storage), flat(original))


def test_what_is_made_shares_no_memory_with_an_operand() -> None:
    x = leaf(4, 4)
    recipe = Recipe([Kept(x), Step(lambda value: value, (0,), torch.float32)], x.detach(), cheap=True)
    made = Made(recipe, x.detach().clone().untyped_storage())
    recipe.make(made, lambda blob: None)
    assert made.storage.data_ptr() != x.data_ptr()
