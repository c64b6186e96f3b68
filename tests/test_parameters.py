"""Rule 3: only what frees memory is copied. Parameters, buffers, whatever shares their storage, and autocast's copies of them stay."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations

from backhaul.testing import RecordingTier, assert_same_training
from tests.conftest import Code, everything, same


def bytes_out(module: nn.Module, *inputs: Tensor, autocast: bool = False) -> int:
    """Train a step; return the bytes that left, after comparing every gradient with the untouched module's."""

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(*inputs)
        leaves = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
        return list(torch.autograd.grad(output.float().sum(), leaves, allow_unused=True))

    expected = gradients()
    tier = RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        assert same(gradients(), expected)
        assert handle.stats.offloaded_bytes == tier.bytes_of("store")
    return tier.bytes_of("store")


class Own(nn.Module):
    """Computes with something of its own."""

    def __init__(self, function, *, buffer: bool = False, shape: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("own", torch.randn(shape))
        else:
            self.own = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1, self.own)  # `x * 1` dies with the forward, so it can move


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 8, requires_grad=True)


USES = {
    "itself": lambda x, w: x * w[0] + x * w[0].detach(),
    "weight.t()": lambda x, w: x @ w.t(),
    "a row": lambda x, w: x * w[3],
    "a reshaped view": lambda x, w: x @ w.view(-1).view(8, 8)[:, :8],
    "a view of a view": lambda x, w: x * w.t()[2:5].t()[:, 1],
    "an expanded row": lambda x, w: x * w[1].expand(2, 8),
    "detached": lambda x, w: x @ w.detach().t(),
    "data": lambda x, w: x @ w.data,
    "chunks": lambda x, w: x[:, :4] @ w.chunk(2)[0] + x[:, :4] @ w.chunk(2)[1],
    "unbound": lambda x, w: sum(x * row for row in w.unbind()),
    "real view": lambda x, w: x @ torch.view_as_real(torch.view_as_complex(w.view(8, 4, 2))).view(8, 8),
}


@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("use", USES)
def test_c13_views_of_parameters_and_buffers_stay(x, use, buffer):
    needs_x = not buffer and use not in ("detached", "data")  # for the gradient of the weight
    assert bytes_out(Own(USES[use], buffer=buffer), x) == (x.nbytes if needs_x else 0)


def test_c13_linear_moves_its_input_and_not_its_weight():
    linear = nn.Linear(512, 512, bias=False)
    x = torch.randn(2, 512)
    assert bytes_out(nn.Sequential(nn.Identity(), Code(lambda x: x * 2), linear), x) == x.nbytes


def test_c13_parameters_appear_in_kept_by_reason_alone(x):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with everything(model) as handle:
        model(x).sum().backward()
        stats = handle.stats
        assert stats.kept_by_reason["parameter"] == 2 * 8 * 8 * 4
        assert stats.saved_bytes == 2 * x.nbytes


def test_c13_a_weight_used_many_times_in_a_pass_is_counted_once(x):
    module = Own(lambda x, w: x @ w @ w @ w.t())
    with everything(module) as handle:
        module(x).sum().backward()
        assert handle.stats.kept_by_reason["parameter"] == module.own.nbytes


def test_c13_tied_weights_stay():
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    tokens = torch.tensor([[1, 2, 3]])
    out = bytes_out(nn.Sequential(embedding, head), tokens)
    assert out == tokens.nbytes + 3 * 8 * 4  # the tokens, which the embedding saves; the embedded, which the head saves


def test_c13_weights_tied_to_a_module_outside_stay(x):
    """A managed part whose weight belongs to an unmanaged one, too."""
    outer = nn.Linear(8, 8, bias=False)
    inner = nn.Linear(8, 8, bias=False)
    inner.weight = outer.weight
    assert bytes_out(nn.Sequential(Code(lambda x: x * 1), inner), x) == x.nbytes


def test_c13_a_parameter_of_nobody_stays(x):
    """Handed to the forward from outside the managed modules, and used through a view."""
    weight = nn.Parameter(torch.randn(8, 8))
    assert bytes_out(Code(lambda x, weight: (x * 1) @ weight.t()), x, weight) == x.nbytes


def test_parameters_replaced_between_steps_stay(x):
    """`.data =`, a new Parameter, `.to()`: the table of storages is made anew for each step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    tier = RecordingTier(deferred=True)
    changes = [
        lambda: None,
        lambda: setattr(model[0].weight, "data", torch.randn(8, 8)),
        lambda: setattr(model[2], "weight", nn.Parameter(torch.randn(8, 8))),
        lambda: model.double(),
        lambda: model.float(),
        lambda: model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True),
    ]
    with everything(model, tier) as handle:
        for change in changes:
            change()
            model(x.detach().to(model[0].weight.dtype)).sum().backward()
            weights = {parameter.nbytes for parameter in model.parameters() if parameter.dim() == 2}
            assert not any(record.num_bytes in weights for record in tier.records)
        assert handle.stats.offloaded_bytes


@pytest.mark.parametrize("use", [lambda x, w: x @ w.t(), lambda x, w: x * x @ w.detach().t()], ids=["weight.t()", "detached"])
def test_a_parameter_made_in_the_forward_stays(x, use):
    """What a gathering wrapper does: the module's Parameter is a new one in each forward."""

    class Gathers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            stored = self.weight
            gathered = torch.cat([stored.detach().clone()])
            del self._parameters["weight"]
            self.weight = nn.Parameter(gathered)
            try:
                return use(x, self.weight)
            finally:
                self.weight = stored

    module = nn.Sequential(Code(lambda x: x * 1), Gathers(8, 8))
    tier = RecordingTier(deferred=True)
    with everything(module, tier):
        module(x).sum().backward()
    assert {record.num_bytes for record in tier.records} == {x.nbytes}


def test_frozen_base_of_an_adapter_stays():
    """LoRA: the base weight is frozen and saved all the same, since the input needs a gradient."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(False)
            self.a, self.b = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + self.b(self.a(x)))

    x = torch.randn(3, 64, requires_grad=True)
    model = nn.Sequential(Adapted(), Adapted())
    low_rank = 3 * 2 * 4
    assert bytes_out(model, x * 1) == 3 * x.nbytes + 2 * low_rank  # the input, each tanh's result, each a's output


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight_norm", "spectral_norm"])
def test_parametrized_weights_train_the_same(make):
    def step(model: nn.Module) -> Tensor:
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        return loss

    assert_same_training(lambda: nn.Sequential(make(nn.Linear(8, 8)), nn.Tanh(), make(nn.Linear(8, 8))), step, everything, steps=3)


# Autocast


def test_c11_autocast_copies_of_weights_are_made_again_and_not_moved():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    tier = RecordingTier(deferred=True)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().sum().backward()  # outside autocast
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    with everything(model, tier) as handle:
        for _ in range(3):
            assert same(gradients(), expected)
        stats = handle.stats
        weight_bytes = 64 * 64 * 2
        assert stats.kept_by_reason["cast of a parameter"] % weight_bytes == 0
        assert not any(record.num_bytes == weight_bytes for record in tier.records)
        assert stats.resident_bytes == 0


@pytest.mark.parametrize(
    "cast",
    [
        lambda w: w.to(torch.bfloat16),
        lambda w: w.double(),
        lambda w: w.to(torch.bfloat16).t(),
        lambda w: w.half()[2:4].t(),
        lambda w: w.to(torch.complex64),
    ],
)
def test_c11_a_cast_by_hand_is_made_again(cast):
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            w = cast(self.own)
            return (x.to(w.dtype) * w).abs()

    module = Casts()
    x = torch.randn((), requires_grad=True)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(module(x).double().sum(), [x, module.own]))

    expected = gradients()
    with everything(module) as handle:
        for _ in range(3):
            assert same(gradients(), expected)
        assert handle.stats.kept_by_reason["cast of a parameter"]


@pytest.mark.parametrize("unseen", [True, False], ids=["no_grad", "with gradient"])
def test_c11_a_cast_that_was_written_is_no_longer_a_cast(unseen):
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            w = self.own.to(torch.bfloat16)
            with torch.set_grad_enabled(not unseen):
                w.mul_(10)
            return x * w

    module = Rounds()
    x = torch.ones((), requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module):
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)


def test_c11_a_cast_written_after_saving_is_refused_or_as_of_the_forward():
    kept: list[Tensor] = []

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            w = self.own.to(torch.bfloat16)
            kept[:] = [w]
            return x * w

    module = Casts()
    x = torch.ones((), requires_grad=True)
    with everything(module):
        output = module(x)
        with torch.no_grad():
            kept[0].mul_(10)
        try:
            (got,) = torch.autograd.grad(output.sum(), x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert got == 64


def test_c11_a_parameter_written_before_the_cast_is_made_again_is_never_silently_stale():
    """Plain autograd has the old copy. The cast cannot be made again, so the only other right answer is the refusal."""
    module = Own(lambda x, w: x.to(torch.bfloat16) * w.to(torch.bfloat16), shape=(8,))
    x = torch.ones(8, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module):
        output = module(x)
        with torch.no_grad():
            module.own.add_(1)
        try:
            got = torch.autograd.grad(output.sum(), x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert same(got, expected)


@pytest.mark.parametrize("when", ["in the forward", "between forwards"])
def test_c11_a_parameter_written_between_its_cast_and_the_save(when):
    """The cast is one of the old value: made anew, it would be another. Autocast's cache does this when the optimizer steps inside."""

    class Stale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(8, 8))
            self.cached: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            w = self.own.to(torch.bfloat16) if self.cached is None else self.cached
            if when == "in the forward":
                self.write()
            else:
                self.cached = w
            return x * w

        @torch.no_grad()
        def write(self) -> None:
            self.own.mul_(2)

    x = torch.ones((), requires_grad=True)

    def gradients(module: Stale) -> list[Tensor]:
        found = []
        for _ in range(3):
            found += torch.autograd.grad(module(x).sum(), x)
            module.write()
        return found

    expected = gradients(Stale())
    module = Stale()
    with everything(module):
        assert same(gradients(module), expected)


def test_c11_a_second_cast_of_a_cast_moves(x):
    """Rounded once, it is no cast of the parameter any more."""
    module = Own(lambda x, w: x @ w.to(torch.bfloat16).to(torch.float32))
    assert bytes_out(module, x) == x.nbytes + module.own.nbytes


# DTensor, on a world of one


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_c13_the_local_tensor_of_a_sharded_parameter_stays(mesh, placement):
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [placement]))

        def forward(self, x: Tensor) -> Tensor:
            return (x * 1) @ self.own.to_local().t()  # as expert shards are used

    x = torch.randn(2, 8, requires_grad=True)
    module = Local()
    expected = torch.autograd.grad(module(x).sum(), x)
    tier = RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert tier.bytes_of("store") == x.nbytes
        assert handle.stats.kept_by_reason == {"parameter": 8 * 8 * 4}


def test_c13_a_linear_of_dtensors_moves_its_input_alone(mesh):
    linear = nn.Linear(8, 8, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    x = DTensor.from_local(torch.randn(2, 8), mesh, [Replicate()]).requires_grad_()
    model = nn.Sequential(Code(lambda x: x * 2), linear)
    tier = RecordingTier(deferred=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0].to_local()
    with everything(model, tier):
        got = torch.autograd.grad(model(x).sum(), x)[0]
    assert same([got.to_local()], [expected])
    assert tier.bytes_of("store") == 2 * 8 * 4


def test_c13_fully_sharded_weights_stay(mesh):
    """FSDP2 gathers weights into storages of their own; a world of one is enough to see it."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Sigmoid(), nn.Linear(32, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh) if isinstance(layer, nn.Linear) else None
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 8)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x * 1).sum().backward()
        return [parameter.grad.to_local().clone() for parameter in model.parameters()]

    expected = gradients()
    tier = RecordingTier(deferred=True)
    with everything(model, tier):
        for _ in range(2):
            assert same(gradients(), expected)
    assert not any(record.num_bytes == 8 * 32 * 4 for record in tier.records)
    assert any(record.num_bytes == 2 * 32 * 4 for record in tier.records)


def test_parameters_can_be_swapped_while_managed(x):
    """`to` and `load_state_dict` swap wrapper subclasses always, plain tensors on request; a weak reference to a parameter forbids it."""
    module = nn.Linear(x.shape[-1], 4)
    with everything(module):
        module(x).sum().backward()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module(x.double()).dtype == torch.float64


def test_lazy_modules_become_what_they_are_in_their_first_forward(x):
    module = nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyLinear(4))
    with everything(module) as handle:
        module(x).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert handle.stats.kept_by_reason["parameter"] > 0
