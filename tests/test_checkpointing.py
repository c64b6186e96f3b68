"""C04: beside torch.utils.checkpoint, around and inside it, in every nesting; recomputation is never switched off."""

import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import backhaul as bh
from backhaul.testing import RecordingTier, assert_same_training
from tests.conftest import Code, everything, same

WIDTH = 16
ROWS = 8
INPUT_BYTES = ROWS * WIDTH * 4

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, depth: int = 3) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def step(model: nn.Module) -> Tensor:
    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    return loss


def moved_sizes(tier: RecordingTier) -> list[int]:
    return [record.num_bytes for record in tier.records if record.event == "store"]


@REENTRANT
def test_c04_around_checkpoints_exactly_the_block_inputs_move(reentrant):
    tier = RecordingTier(deferred=True)
    model = Checkpointed(reentrant)
    with everything(model, tier) as handle:
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        # The input of `first`, and of each of the three blocks; nothing from inside a block.
        assert moved_sizes(tier) == [INPUT_BYTES] * 4
        loss.backward()
        del loss
        assert moved_sizes(tier) == [INPUT_BYTES] * 4
        assert [layer.num_runs for layer in model.layers] == [2, 2, 2]
        assert handle.stats.saved_bytes == 4 * INPUT_BYTES
        assert handle.stats.resident_bytes == tier.used_bytes == 0


@REENTRANT
def test_c04_around_checkpoints_training_is_the_same(reentrant):
    result = assert_same_training(lambda: Checkpointed(reentrant), step, everything, steps=4)
    assert result.stats.reloaded_bytes > 0
    assert result.stats.resident_bytes == 0


@REENTRANT
def test_c04_a_managed_module_around_one_checkpoint_of_everything_trains_the_same(reentrant):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x).sin(), use_reentrant=reentrant).cos()

    assert assert_same_training(Whole, step, everything, steps=4).stats.offloaded_bytes > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # a reentrant one runs its forward without grad
@pytest.mark.parametrize("outer", [True, False], ids=["reentrant outside", "non-reentrant outside"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant inside", "non-reentrant inside"])
def test_c04_nested_checkpoints_inside_a_managed_module_train_the_same(outer, inner):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(WIDTH, WIDTH), Block(), Block()

        def region(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, checkpoint(self.a, x.sin(), use_reentrant=inner).tanh(), use_reentrant=inner)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, self.first(x), use_reentrant=outer).exp()

    result = assert_same_training(Nested, step, everything, steps=4)
    assert result.stats.offloaded_bytes > 0
    assert result.stats.resident_bytes == 0


@REENTRANT
def test_c04_checkpoint_sequential_trains_the_same(reentrant):
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.Sequential(*[Block() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 2, self.first(x), use_reentrant=reentrant)

    assert assert_same_training(Segments, step, everything, steps=3).stats.offloaded_bytes > 0


def test_c04_managed_blocks_inside_a_checkpoint_go_on_recomputing_and_say_so():
    model = Checkpointed(reentrant=False)
    tier = RecordingTier(deferred=True)
    x = torch.randn(ROWS, WIDTH)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for layer in model.layers:
        layer.num_runs = 0
    with everything(model.layers, tier) as handle:
        with pytest.warns(UserWarning, match="offloaded 0 of 0 B in three passes: it runs inside a checkpointed region") as caught:
            gradients = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for _ in range(3)]
        assert len(caught) == 1
        assert "where hooks would switch recomputation off; manage what is around it" in str(caught[0].message)
        assert all(same(found, expected) for found in gradients)
        assert [layer.num_runs for layer in model.layers] == [6, 6, 6]
        assert handle.stats.offloaded_bytes == handle.stats.saved_bytes == tier.peak_bytes == 0


def test_c04_managed_blocks_inside_a_reentrant_checkpoint_stay_out_of_its_recomputation():
    # Its forward runs without grad, its recomputation within backward.
    tier = RecordingTier(deferred=True)
    with pytest.warns(UserWarning, match="runs inside a checkpoint"):
        assert_same_training(lambda: Checkpointed(reentrant=True), step, lambda model: everything(model.layers, tier), steps=4)
    assert tier.peak_bytes == 0


def test_c04_a_region_inside_a_checkpoint_leaves_the_recomputation_on():
    block, tier = Block(), RecordingTier(deferred=True)
    other = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    block.num_runs = 0
    with everything(other, tier) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def inner(x: Tensor) -> Tensor:
            with handle.region():
                return block(x)

        for _ in range(3):
            assert same(torch.autograd.grad(checkpoint(inner, x, use_reentrant=False).sum(), x), expected)
        assert block.num_runs == 6
        assert tier.peak_bytes == 0


def test_c04_a_checkpoint_within_a_region_moves_its_input():
    block, tier, other = Block(), RecordingTier(deferred=True), nn.Linear(WIDTH, WIDTH)
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(checkpoint(block, leaf * 2, use_reentrant=False).sum(), leaf)
    with everything(other, tier) as handle:
        for _ in range(3):
            with handle.region():
                y = checkpoint(block, leaf * 2, use_reentrant=False)
            assert same(torch.autograd.grad(y.sum(), leaf), expected)
        assert set(moved_sizes(tier)) == {INPUT_BYTES}


def test_c04_selective_checkpointing_inside_a_managed_module_trains_the_same():
    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(WIDTH, WIDTH), Block()

        def forward(self, x: Tensor) -> Tensor:
            def contexts():
                return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

            return checkpoint(self.block, self.first(x), use_reentrant=False, context_fn=contexts)

    assert assert_same_training(Selective, step, everything, steps=3).stats.offloaded_bytes > 0


@REENTRANT
def test_dropout_under_a_checkpoint_is_recomputed_the_same(reentrant):
    def build() -> nn.Module:
        model = Checkpointed(reentrant)
        for layer in model.layers:
            layer.down = nn.Sequential(nn.Dropout(0.5), layer.down)
        return model

    assert assert_same_training(build, step, everything, steps=3).stats.offloaded_bytes > 0


class Scaled(nn.Module):
    """A block with a second input, which can be given by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.block(x) * scale


@pytest.mark.parametrize(
    ("plan", "freed"),
    [
        ({"*": "offload"}, [True, False]),  # the checkpoint itself holds what is given by keyword, where nobody sees it
        ({"parts.1": "recompute", "*": "offload"}, [True, True]),  # a unit in its place starts from both
    ],
    ids=["checkpoint", "unit"],
)
def test_c04_of_a_region_with_keywords_what_can_be_seen_moves(plan, freed):
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(x: Tensor) -> Tensor:
        x, scale = model.parts[0](x).cumsum(0), model.parts[2](x).cumsum(0)
        storages[:] = [weakref.ref(each.untyped_storage()) for each in (x, scale)]
        is_unit = "parts.1" in plan
        y = model.parts[1](x, scale=scale) if is_unit else checkpoint(model.parts[1], x, scale=scale, use_reentrant=False)
        return y.sin().cumsum(0).cos().exp()  # what was saved last leaves when more is saved

    model = Code(forward, nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH))
    x, tier, parameters = torch.randn(ROWS, WIDTH), RecordingTier(), list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    with bh.apply(model, plan, tier=tier, activation_budget=0, min_bytes=0) as handle:
        for _ in range(3):
            loss = model(x).square().sum()
            assert [storage() is None for storage in storages] == freed
            assert same(torch.autograd.grad(loss, parameters), expected)
            del loss
            assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_a_checkpoint_that_stops_early_leaves_our_own_hooks_where_they_were():
    block = Block()
    module = Code(lambda x: checkpoint(block, x.sin(), use_reentrant=False).tanh().exp(), block)
    tier = RecordingTier(deferred=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module, tier):
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
    assert tier.bytes_of("load") > 0
    assert tier.used_bytes == 0


# transformers


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).train()


def checkpointed_llama(reentrant: bool) -> nn.Module:
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def language_step(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 64, (2, 16))
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


@REENTRANT
@pytest.mark.parametrize("part", ["root", "layers", "list"])
def test_c04_a_checkpointed_llama_trains_the_same(part, reentrant):
    def managed_part(model: nn.Module) -> nn.Module | list[nn.Module]:
        return {"root": model, "layers": model.model.layers, "list": list(model.model.layers)}[part]

    tier = RecordingTier(deferred=True)
    result = assert_same_training(
        lambda: checkpointed_llama(reentrant), language_step, lambda model: everything(managed_part(model), tier), steps=3
    )
    sizes = moved_sizes(tier)
    layer_input = 2 * 16 * 32 * 4
    assert sizes.count(layer_input) >= 3 * 2  # at least the layers whose input nothing else keeps, three steps long
    assert result.stats.resident_bytes == tier.used_bytes == 0


def test_c04_of_a_checkpointed_llama_s_layers_only_the_inputs_move():
    plain, checkpointed = RecordingTier(), RecordingTier()
    for tier, model in ((plain, llama()), (checkpointed, checkpointed_llama(False))):
        torch.manual_seed(0)
        with everything(model.model.layers, tier, activation_budget=0):
            language_step(model)
    assert checkpointed.bytes_of("store") <= 3 * 2 * 16 * 32 * 4
    assert plain.bytes_of("store") > 5 * checkpointed.bytes_of("store")


def test_handles_on_both_sides_of_a_checkpoint_do_their_own_part():
    model = Checkpointed(reentrant=False)
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    inputs = [*model.parameters(), *head.parameters()]
    expected = torch.autograd.grad(head(model(x)).sum(), inputs)
    tiers = RecordingTier(deferred=True), RecordingTier(deferred=True)
    handles: list[bh.Handle] = [everything(model, tiers[0]), everything(head, tiers[1])]
    for _ in range(3):
        assert same(torch.autograd.grad(head(model(x)).sum(), inputs), expected)
    for handle, tier in zip(handles, tiers, strict=True):
        handle.remove()
        assert tier.bytes_of("load") > 0
        assert tier.used_bytes == 0
