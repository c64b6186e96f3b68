"""Rules 6 and 7 in one process: what the first rank of each schedule does, loops written by hand, and backwards in two halves."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import backhaul as bh
from backhaul.testing import RecordingTier
from benchmarks import measure
from benchmarks.pipelined import SINGLE, Pipelined
from benchmarks.variants import Variant
from benchmarks.workloads.base import run_step
from benchmarks.workloads.dsv3 import TINY, DeepSeekStage
from tests.conftest import everything, same
from tests.pipelines.ranks import HIDDEN, LENGTH, MOST_OF_A_NODE, ROWS, SCHEDULES, make_stage

CPU = torch.device("cpu")
Order = Sequence[tuple[str, int]]  # "F" or "B", and the microbatch


# The first of four ranks


@pytest.fixture
def first_rank() -> Iterator[object]:
    made = []

    def make(name: str) -> Pipelined:
        sizes = replace(TINY, tokens=32, num_layers=2, chunks=1 if name in SINGLE else 2)
        made.append(Pipelined(DeepSeekStage(sizes, device=CPU), name))
        return made[-1]

    yield make
    for workload in reversed(made):
        workload.close()


def managed(chunks: nn.ModuleList, budgets: Sequence[int]) -> list[bh.Handle]:
    return [everything(chunk, activation_budget=budget) for chunk, budget in zip(chunks, budgets, strict=True)]


def train(workload: Pipelined) -> list[Tensor]:
    measure.zero_grads(workload)
    run_step(workload, Variant())
    return measure.host_copies(workload)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_of_four_ranks_gives_the_same_within_its_budgets(first_rank, name):
    workload = first_rank(name)
    expected = train(workload)
    roomy = managed(workload.chunks, [1 << 40] * len(workload.chunks))
    assert same(train(workload), expected)
    wants = [handle.stats.peak_resident_bytes for handle in roomy]
    for handle in roomy:
        handle.remove()

    budgets = [want // 2 for want in wants]
    handles = managed(workload.chunks, budgets)
    before = [0] * len(handles)
    for _ in range(5):
        before = [handle.stats.num_demand_reloads for handle in handles]
        assert same(train(workload), expected)
    for chunk, (handle, want, reloads) in enumerate(zip(handles, wants, before, strict=True)):
        stats = handle.stats
        assert stats.resident_bytes == stats.host_bytes == 0
        assert stats.offloaded_bytes > 0
        assert stats.peak_resident_bytes < 0.75 * want
        assert stats.num_demand_reloads - reloads <= 1, chunk
        handle.remove()


# Loops written by hand


def one_forward_one_backward(microbatches: int, warmup: int) -> list[tuple[str, int]]:
    order = [("F", index) for index in range(warmup)]
    for index in range(microbatches - warmup):
        order += [("F", index + warmup), ("B", index)]
    return order + [("B", index) for index in range(microbatches - warmup, microbatches)]


def some_order(microbatches: int, most: int, choice: random.Random) -> list[tuple[str, int]]:
    """Return an order of forwards and backwards with at most so many microbatches between the two."""
    order, begun, ended = [], 0, 0
    while ended < microbatches:
        if begun < microbatches and (begun == ended or (begun - ended < most and choice.random() < 0.6)):
            order.append(("F", begun))
            begun += 1
        else:
            order.append(("B", ended))
            ended += 1
    return order


def loop(model: nn.Module, order: Order) -> list[Tensor]:
    """Run a step in an order, on inputs that depend on the microbatch alone. Return the gradients of inputs and parameters."""
    inputs, outputs = {}, {}
    for kind, microbatch in order:
        if kind == "F":
            torch.manual_seed(microbatch)
            inputs[microbatch] = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
            outputs[microbatch] = model(inputs[microbatch])
        else:
            outputs.pop(microbatch).square().sum().backward()
    found = [inputs[microbatch].grad for microbatch in sorted(inputs)] + [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "order",
    [one_forward_one_backward(6, warmup=3), [(kind, microbatch) for microbatch in range(4) for kind in "FB"]],
    ids=["1F1B", "gradient accumulation"],
)
def test_a_loop_that_repeats_is_followed_within_its_budget(order):
    model = make_stage(0)
    expected = loop(model, order)
    in_flight = max(sum(1 if kind == "F" else -1 for kind, _ in order[:end]) for end in range(1, len(order) + 1))
    with everything(model) as handle:
        model(torch.ones(ROWS, LENGTH, HIDDEN, requires_grad=True))
        frame = handle.stats.saved_bytes
    with everything(model, activation_budget=in_flight * frame // 2) as handle:
        reloads = [0]
        for _ in range(5):
            assert same(loop(model, order), expected)
            reloads.append(handle.stats.num_demand_reloads)
            assert handle.stats.resident_bytes == handle.stats.host_bytes == 0
        assert reloads[-1] == reloads[-3]
        assert handle.stats.reloaded_bytes > 0
        assert handle.stats.peak_resident_bytes <= in_flight * frame // 2 + MOST_OF_A_NODE


@pytest.mark.parametrize("seed", [0, 1, 3, 16, 18])
def test_orders_that_change_in_any_way_are_never_wrong_and_keep_to_the_budget(seed):
    choice = random.Random(seed)
    model, budget = make_stage(0), choice.choice([20_000, 35_000, 50_000])
    orders = [some_order(microbatches, 4, choice) for microbatches in (4, 6, 8)]
    expected = [loop(model, order) for order in orders]
    with everything(model, activation_budget=budget) as handle:
        for _ in range(12):
            which = choice.randrange(3)
            assert same(loop(model, orders[which]), expected[which])
        assert handle.stats.resident_bytes == handle.stats.host_bytes == 0
        assert handle.stats.peak_resident_bytes <= budget + MOST_OF_A_NODE


def test_a_reference_model_and_an_evaluation_between_steps_leave_the_learned_order_alone():
    model, order, x = make_stage(0), one_forward_one_backward(6, warmup=3), torch.ones(ROWS, LENGTH, HIDDEN)
    expected, value = loop(model, order), model(x).detach()
    with everything(model, activation_budget=40_000) as handle:
        reloads, saved = [0], 0
        for _ in range(5):
            with torch.no_grad():
                assert model(x).equal(value)
            assert same(loop(model, order), expected)
            saved = saved or handle.stats.saved_bytes
            with torch.inference_mode():
                assert model.eval()(x).equal(value)
            assert model(x).equal(value)
            model.train()
            reloads.append(handle.stats.num_demand_reloads)
        assert reloads[-1] == reloads[-3]
        assert handle.stats.saved_bytes == 5 * saved


# Backwards in two halves


def halves(model: nn.Module, seed: int):
    """Run forward and the input half. Return the gradient of the input, and what the weight half takes."""
    torch.manual_seed(seed)
    x = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    (gradient,), groups = stage_backward_input([model(x)], None, [x], model.parameters())
    return gradient, groups


def weights(model: nn.Module, groups) -> list[Tensor]:
    stage_backward_weight(model.parameters(), groups)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("budget", [0, 12_000, 30_000, None])
def test_weight_halves_may_run_in_any_order_and_much_later(budget):
    model = make_stage(0)

    def step() -> list[Tensor]:
        first, second, third = (halves(model, seed) for seed in range(3))
        found = [*weights(model, second[1]), *weights(model, third[1])]
        fourth = halves(model, 3)
        return [*found, *weights(model, first[1]), *weights(model, fourth[1]), first[0], second[0], third[0], fourth[0]]

    expected = step()
    with everything(model, activation_budget=budget) as handle:
        for _ in range(4):
            assert same(step(), expected)
            assert handle.stats.resident_bytes == handle.stats.host_bytes == 0
        assert handle.stats.offloaded_bytes > 0
        assert budget is None or handle.stats.peak_resident_bytes <= budget + MOST_OF_A_NODE


def test_what_waits_for_its_weight_half_counts_and_leaves_again_without_a_copy():
    model, tier = make_stage(0), RecordingTier(deferred=True)
    with everything(model) as handle:
        model(torch.ones(ROWS, LENGTH, HIDDEN, requires_grad=True))
        frame = handle.stats.saved_bytes
    expected = weights(model, halves(model, 0)[1])
    with everything(model, tier, activation_budget=frame // 2) as handle:
        _, waiting = halves(model, 0)
        assert 0 < handle.stats.resident_bytes <= frame // 2
        stored, offloads = tier.bytes_of("store"), handle.stats.num_offloads
        y = model(torch.ones(ROWS, LENGTH, HIDDEN, requires_grad=True))  # takes the room
        assert handle.stats.resident_bytes <= frame // 2 + MOST_OF_A_NODE
        assert tier.bytes_of("store") - stored <= frame  # of the new frame alone
        assert handle.stats.num_offloads - offloads <= offloads
        assert same(weights(model, waiting), expected)
        del y
        assert handle.stats.resident_bytes == handle.stats.host_bytes == 0


def test_a_weight_half_that_never_runs_leaves_nothing_behind():
    model = make_stage(0)
    with everything(model, activation_budget=12_000) as handle:
        for _ in range(3):
            _, groups = halves(model, 0)
            assert handle.stats.host_bytes > 0
            del groups
            assert handle.stats.resident_bytes == handle.stats.host_bytes == 0
