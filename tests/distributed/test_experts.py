"""Expert parallel: experts that are DTensors stay, in compiled blocks too, and tokens that came by all-to-all move."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from backhaul import _torch
from tests.distributed.launcher import World
from tests.distributed.models import DEPTH, INPUT_BYTES, ROWS, WIDTH, Checkpointed, Stack, step
from tests.distributed.training import Moved, moved

NUM_EXPERTS, EXPERT_WIDTH = 4, 24
EXPERT_BYTES = ROWS * EXPERT_WIDTH * 4
FIRST = pytest.mark.parametrize("managed_first", [False, True], ids=["managed last", "managed first"])


class Experts(nn.Module):
    """As many tokens for each local expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, EXPERT_WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, EXPERT_WIDTH, WIDTH) / EXPERT_WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        hidden = torch.bmm(x.reshape(up.shape[0], -1, WIDTH), up)
        return torch.bmm(nn.functional.silu(hidden), down).reshape(-1, WIDTH) * 1


class Block(nn.Module):
    """Routes every token to an expert of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x * self.gate(x).sigmoid())


def spread(model: nn.Module, over: str = "ep", shape: tuple[int, int] = (1, 2)) -> nn.Module:
    """Make the experts' weights DTensors, sharded over experts."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))[over]
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("up", "down"):
                setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])))
    return model


def in_place(module: nn.Module, backend: str = "aot_eager") -> nn.Module:
    module.compile(backend=backend, fullgraph=True)
    return module


def in_inductor(module: nn.Module) -> nn.Module:
    return in_place(module, "inductor")


# W2: compiled blocks that take local experts as graph inputs

NESTINGS: dict[str, list[Callable[[nn.Module], nn.Module]]] = {
    "compile(block)": [in_place],
    "checkpoint(compile(block))": [in_place, Checkpointed],
    "compile(checkpoint(block))": [Checkpointed, in_place],
    "checkpoint(inductor(block))": [in_inductor, Checkpointed],
    "inductor(block)": [in_inductor],
    "checkpoint(block)": [Checkpointed],
    "block": [],
}


def train_w2(nesting: str, managed_first: bool) -> Moved:
    def change(model: nn.Module) -> nn.Module:
        spread(model)
        for apply in NESTINGS[nesting]:
            model.layers = nn.ModuleList([apply(layer) for layer in model.layers])
        return model

    return moved(lambda: Stack(Block), change, step, managed_first=managed_first)


@FIRST
@pytest.mark.parametrize("nesting", ["checkpoint(compile(block))", "checkpoint(block)"])
def test_w2_of_checkpointed_blocks_exactly_the_layer_inputs_move(world: World, nesting, managed_first):
    for answer in world.run(train_w2, nesting, managed_first):
        assert answer.weights == []
        assert answer.steps[0] == [INPUT_BYTES] * (DEPTH + 1)  # and the head's
        assert answer.saved_bytes == 3 * (DEPTH + 1) * INPUT_BYTES


@FIRST
@pytest.mark.parametrize("nesting", ["compile(block)", "block"])
def test_w2_of_blocks_no_expert_moves(world: World, nesting, managed_first):
    # The input, the gate, what the experts get, what they make of it before and after the SiLU.
    activations = [INPUT_BYTES] * 3 + [EXPERT_BYTES] * 2
    for answer in world.run(train_w2, nesting, managed_first):
        assert answer.weights == []
        assert answer.first == sorted(DEPTH * activations + [INPUT_BYTES])


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["checkpoint(inductor(block))", "inductor(block)"])
def test_w2_of_blocks_that_inductor_compiled_no_expert_moves(world: World, nesting):
    for answer in world.run(train_w2, nesting, False):
        assert answer.weights == []
        if "checkpoint" in nesting:
            assert answer.steps[0] == [INPUT_BYTES] * (DEPTH + 1)
        else:
            assert sum(answer.first) > DEPTH * INPUT_BYTES


def train_w2_compiled_checkpoint() -> Moved | str:
    """Return what moved, or what the compiler says where it cannot compile that, with or without backhaul."""
    try:
        return train_w2("compile(checkpoint(block))", False)
    except (AssertionError, RuntimeError) as error:
        return str(error)


def test_w2_of_compiled_checkpoints_the_layer_inputs_move_where_torch_can_compile_them(world: World):
    for answer in world.run(train_w2_compiled_checkpoint):
        if isinstance(answer, str):
            assert "expected all tensors_saved_with_vc_check to be Tensors" in answer  # torch 2.13
        else:
            assert answer.weights == []
            assert answer.first == [INPUT_BYTES] * (DEPTH + 1)


# Groups of their own under FSDP2


def train_grouped(shape: tuple[int, int], compiled: bool, whole: bool, half: bool) -> Moved:
    """Shard experts over one dimension of a mesh and gather them over the other, apart from the rest of their block."""

    def change(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))["dp"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
        options = {"mesh": mesh, "mp_policy": policy}
        spread(model, shape=shape)
        for layer in model.layers:
            if compiled:
                layer.experts.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer.experts, **options)
            if not whole:
                fully_shard(layer, **options)
        return fully_shard(model, **options)

    return moved(lambda: Stack(Block), change, step)


@pytest.mark.parametrize("whole", [True, False], ids=["experts", "experts and blocks"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["spread", "gathered"])
def test_c13_experts_gathered_in_groups_of_their_own_stay(world: World, shape, compiled, whole):
    for answer in world.run(train_grouped, shape, compiled, whole, False):
        assert answer.weights == []
        assert answer.first == sorted(DEPTH * ([INPUT_BYTES] * 3 + [EXPERT_BYTES] * 2) + [INPUT_BYTES])


def test_c13_experts_gathered_in_half_precision_stay(world: World):
    for answer in world.run(train_grouped, (2, 1), False, False, True):
        assert answer.weights == []
        assert answer.first == sorted(DEPTH * ([INPUT_BYTES // 2] * 3 + [EXPERT_BYTES // 2] * 2) + [INPUT_BYTES // 2])


# Tokens that travel


class Exchange(nn.Module):
    """Sends each token to the rank of its expert and back; how many go where is known by the data alone."""

    through = "functional collectives"

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        weight, rank = self.router(x).softmax(-1).max(-1)
        order = rank.argsort(stable=True)
        sent = torch.bincount(rank, minlength=2)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        tokens = self.exchange(x.index_select(0, order), here, there)
        up, down = (weight.to_local() for weight in (self.experts.up, self.experts.down))
        tokens = nn.functional.silu(tokens @ up[0]) @ down[0] + nn.functional.silu(tokens @ up[1]) @ down[1]
        back = self.exchange(tokens, there, here)
        return x + torch.zeros_like(x).index_add(0, order, back * weight.index_select(0, order)[:, None])

    def exchange(self, x: Tensor, here: list[int], there: list[int]) -> Tensor:
        if self.through == "functional collectives":
            return all_to_all_single_autograd(x.contiguous(), here, there, dist.group.WORLD)
        output = x.new_empty(sum(here), WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in use everywhere
            return all_to_all_single(output, x.contiguous(), output_split_sizes=here, input_split_sizes=there)


class ExchangeOnce(Exchange):
    through = "torch.distributed.nn"


def train_exchange(through: str, checkpointed: bool) -> Moved:
    block = Exchange if through == Exchange.through else ExchangeOnce

    def change(model: nn.Module) -> nn.Module:
        spread(model)
        if checkpointed:
            model.layers = nn.ModuleList([Checkpointed(layer) for layer in model.layers])
        return model

    return moved(lambda: Stack(block), change, step)


def hold_what_was_received(layer: Exchange) -> None:
    """Hold the tokens that came, until backward has gone through what was sent back: as a collective does that is not done."""
    exchange, held = layer.exchange, []

    def holding(x: Tensor, here: list[int], there: list[int]) -> Tensor:
        result = exchange(x, here, there)
        if _torch.inside_backward():
            return result
        if held:
            result.register_hook(lambda gradient: held.clear())
        else:
            held.append(result)
        return result

    layer.exchange = holding


def train_exchange_by_plan(through: str, one_holds: bool) -> Moved:
    block = Exchange if through == Exchange.through else ExchangeOnce

    def change(model: nn.Module) -> nn.Module:
        spread(model)
        for layer in model.layers if one_holds and dist.get_rank() else ():
            hold_what_was_received(layer)
        return model

    return moved(lambda: Stack(block), change, step, plan={"layers.*": "recompute", "*": "offload"})


@pytest.mark.parametrize("one_holds", [False, True], ids=["alike", "one rank holds more"])
@pytest.mark.parametrize("through", ["functional collectives", "torch.distributed.nn"])
def test_a_plan_recomputes_blocks_that_send_tokens_equally_often_on_all_ranks(world: World, through, one_holds):
    for answer in world.run(train_exchange_by_plan, through, one_holds):
        assert answer.weights == []
        assert answer.recomputed_bytes > 0


@pytest.mark.parametrize("checkpointed", [True, False], ids=["checkpoint", "eager"])
@pytest.mark.parametrize("through", ["functional collectives", "torch.distributed.nn"])
def test_tokens_that_went_to_their_experts_train_the_same(world: World, through, checkpointed):
    answers = world.run(train_exchange, through, checkpointed)
    for answer in answers:
        assert answer.weights == []
        assert sum(answer.first) > 0
    if checkpointed:
        assert [answer.first for answer in answers] == [[INPUT_BYTES] * (DEPTH + 1)] * 2
    else:
        # Every token is somewhere: both ranks together move what the experts make of all of them, before and after the SiLU, twice.
        sizes = [size for answer in answers for size in answer.first]
        assert sum(sizes) > 2 * DEPTH * 4 * EXPERT_BYTES
