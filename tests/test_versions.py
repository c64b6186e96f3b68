"""Rule 4: nothing is silently stale. A write in place meets autograd's own error or the value of the forward, never another value."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backhaul.testing import RecordingTier, same_bits
from tests.conftest import Code, everything, same

pytestmark = pytest.mark.filterwarnings("ignore:backhaul offloaded 0 of")  # what is kept on purpose

MOVED = {"min_bytes": 0}
KEPT = {"min_bytes": 1 << 40}
LAZY = {"min_bytes": 0, "activation_budget": 1 << 30}  # may move, and has no need to
BOTH = pytest.mark.parametrize("options", [MOVED, KEPT, LAZY], ids=["moved", "kept", "lazy"])


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (64,)), dtype=dtype).requires_grad_()


def outcome(output: Tensor, *inputs: Tensor, **options: object) -> list[Tensor] | str:
    """Return the gradients, or the first words of autograd's refusal."""
    try:
        return list(torch.autograd.grad(output.sum(), inputs, **options))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return "modified in place"


def as_of_the_forward(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of the values that were saved, whatever was written to them later."""
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        output = function(*inputs)
    return list(torch.autograd.grad(output.sum(), inputs))


def assert_never_stale(
    function: Callable[..., Tensor], *inputs: Tensor, options: dict[str, int], after: Callable[[], None] = lambda: None
) -> list[Tensor] | str:
    """Run ``function``, then ``after``, then backward, three times; it may refuse where plain autograd does. Return the last outcome."""
    plain = function(*inputs)
    after()
    expected = outcome(plain, *inputs)
    forward = as_of_the_forward(function, *inputs)
    module = Code(function)
    with everything(module, **options):
        for _ in range(3):
            output = module(*inputs)
            after()
            got = outcome(output, *inputs)
            if isinstance(expected, str):
                assert isinstance(got, str) or same(got, forward)
            else:
                assert not isinstance(got, str), got
                assert same(got, expected)
    return got


class Square:
    """Squares a copy of what it gets, and lets others have the copy."""

    kept: Tensor

    def __call__(self, a: Tensor) -> Tensor:
        self.kept = a.clone()
        return self.kept * self.kept


@BOTH
def test_c15_write_after_the_forward(options):
    square = Square()

    def write() -> None:
        with torch.no_grad():
            square.kept.mul_(10)

    assert_never_stale(square, leaf(), options=options, after=write)


@BOTH
def test_c15_write_through_a_detached_alias(options):
    kept: list[Tensor] = []

    def square(a: Tensor) -> Tensor:
        b = a.clone()
        kept[:] = [b.detach()]
        return b * b

    assert_never_stale(square, leaf(), options=options, after=lambda: kept[0].mul_(10))


@BOTH
def test_c15_write_in_the_forward_after_saving(options):
    def function(a: Tensor) -> Tensor:
        b = a.clone()
        y = b * b
        b.mul_(10)
        return y + b

    assert_never_stale(function, leaf(), options=options)


@BOTH
def test_c15_write_before_saving_is_no_write(options):
    def function(a: Tensor) -> Tensor:
        b = a.clone()
        b.mul_(10)
        b.detach().add_(1)
        return b * b

    got = assert_never_stale(function, leaf(), options=options)
    assert not isinstance(got, str)


@BOTH
@pytest.mark.parametrize("keep_first", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_c15_one_storage_saved_at_two_versions_gives_each_its_own_or_refuses(options, keep_first, hold):
    """The second save is not written to, so that its backward has to work, whether or not the first one and the tensor itself live on."""
    a = leaf()
    kept: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        first = b * b
        with torch.no_grad():
            b.mul_(10)
        second = b * b
        kept[:] = ([first] if keep_first else []) + ([b] if hold else [])
        return second

    got = assert_never_stale(function, a, options=options)
    assert not isinstance(got, str)
    assert torch.equal(got[0], 2 * (10 * a.detach()))


@BOTH
def test_c15_three_versions_each_backward_alone(options):
    a = leaf()
    outputs: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        outputs.clear()
        for _ in range(3):
            outputs.append(b * b)
            with torch.no_grad():
                b.mul_(2)
        return b

    module = Code(function)
    with everything(module, **options):
        for _ in range(3):
            module(a)
            for power, output in enumerate(outputs):
                got = outcome(output, a)
                assert isinstance(got, str) or torch.equal(got[0], 2 * a.detach() * 2**power)


@BOTH
def test_c15_relu_chain(options):
    def chain(a: Tensor) -> Tensor:
        for _ in range(4):
            a = (a * 1.5 - 0.1).relu_()
        return a

    got = assert_never_stale(chain, leaf(), options=options)
    assert not isinstance(got, str)


@BOTH
def test_c15_relu_on_a_saved_product(options):
    def function(a: Tensor) -> Tensor:
        b = a.clone()
        y = b.sigmoid()  # saves its result
        return y.relu_() + (y * b)

    assert_never_stale(function, leaf(), options=options)


@BOTH
@pytest.mark.parametrize("part", [lambda b: b[:8], lambda b: b.view(8, 8)[:, 1], lambda b: b[3:3]], ids=["slice", "column", "nothing"])
def test_c15_write_into_a_view_of_what_is_saved(options, part):
    def function(a: Tensor) -> Tensor:
        b = a.clone()
        y = b * b
        with torch.no_grad():
            part(b).zero_()
        return y

    assert_never_stale(function, leaf(), options=options)


@BOTH
def test_c15_write_into_the_base_of_what_is_saved(options):
    def function(a: Tensor) -> Tensor:
        b = a.clone()
        row = b.view(8, 8)[2]
        y = row * row
        b.mul_(2)
        return y.sum() + b.sum()

    assert_never_stale(function, leaf(), options=options)


@BOTH
def test_c15_write_with_gradient_into_a_view(options):
    def function(a: Tensor) -> Tensor:
        b = a.clone().view(8, 8)
        b[0].mul_(a[:8])
        b[:, 1].exp_()
        return b.sin()

    got = assert_never_stale(function, leaf(), options=options)
    assert not isinstance(got, str)


@BOTH
def test_c15_residual_added_in_place(options):
    weight = leaf(8, 8)

    def function(x: Tensor) -> Tensor:
        h = x.clone()
        for _ in range(3):
            h += (h @ weight).tanh()
        return h

    assert_never_stale(function, leaf(4, 8), options=options)


@BOTH
def test_c15_optimizer_step_before_backward(options):
    module = nn.Linear(8, 8, dtype=torch.float64)
    x = leaf(4, 8)
    with everything(module, **options):
        loss = module(x).square().sum()
        module.weight.grad = torch.ones_like(module.weight)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert outcome(loss, x) == "modified in place"


@BOTH
def test_c15_write_through_data_is_seen_by_nobody_and_tears_nothing(options):
    """``.data`` counts nothing, so plain autograd gives the gradient of what was written. The forward's value will do, a mixture won't."""
    a = leaf()
    square = Square()
    module = Code(square)
    with everything(module, **options):
        for _ in range(3):
            output = module(a)
            square.kept.data.mul_(10)
            (got,) = torch.autograd.grad(output.sum(), a)
            assert torch.equal(got, 2 * a.detach()) or torch.equal(got, 2 * (10 * a.detach()))


@BOTH
def test_data_replaced_after_saving_changes_nothing(options):
    """Plain autograd would read the new data, without an error: it keeps the variable itself."""
    a = leaf()
    square = Square()
    module = Code(square)
    with everything(module, **options):
        for _ in range(3):
            output = module(a)
            square.kept.data = torch.zeros(64, dtype=torch.float64)
            assert same(outcome(output, a), [2 * a.detach()])


@BOTH
def test_c15_write_between_two_backwards(options):
    a = leaf()
    b = a.detach().clone().requires_grad_()
    module = Code(lambda b: b.clone() * b)

    def function(b: Tensor) -> Tensor:
        return b * b

    for run in (function, module):
        with everything(module, **options):
            output = run(b)
            first = outcome(output, b, retain_graph=True)
            with torch.no_grad():
                b.mul_(2)
            second = outcome(output, b)
            with torch.no_grad():
                b.div_(2)
            assert isinstance(second, str) or same(second, first)


class WritesItsSaved(torch.autograd.Function):
    """Gives the gradient's memory a second use, as fused kernels do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = gradient * x.cos()
        x.zero_()
        return result


@BOTH
@pytest.mark.parametrize("hold", [True, False])
def test_c15_backward_that_writes_what_it_saved_read_again(options, hold):
    a = leaf()
    kept: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        kept[:] = [b] if hold else []
        return WritesItsSaved.apply(b)

    module = Code(function)
    with everything(module, **options):
        for _ in range(3):
            output = module(a)
            first = outcome(output, a, retain_graph=True)
            assert same(first, [a.detach().cos()])
            second = outcome(output, a)
            assert isinstance(second, str) or same(second, first)


@BOTH
@pytest.mark.parametrize("hold", [True, False])
def test_c15_backward_that_writes_what_another_node_saved_too(options, hold):
    kept: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        kept[:] = [b] if hold else []
        return b.exp() * b + WritesItsSaved.apply(b)  # the Function's backward comes first

    assert_never_stale(function, leaf(), options=options)


@BOTH
def test_c15_write_by_the_user_into_what_backward_has_read(options):
    """The tensor outlives the forward, so its copy is futile and handed back; then it is written, and read again."""
    a = leaf()
    square = Square()
    module = Code(square)
    with everything(module, **options):
        for _ in range(4):
            output = module(a)
            first = outcome(output, a, retain_graph=True)
            assert same(first, [2 * a.detach()])
            with torch.no_grad():
                square.kept.add_(1)
            second = outcome(output, a)
            assert isinstance(second, str) or same(second, first)


@BOTH
def test_c15_write_by_a_gradient_hook(options):
    a = leaf()

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        c = b * b
        d = c * c
        c.register_hook(lambda gradient: (b.detach().mul_(10), gradient)[1])
        return d

    module = Code(function)
    with everything(module, **options):
        for _ in range(3):
            got = outcome(module(a), a)
            assert isinstance(got, str) or torch.allclose(got[0], 4 * a.detach() ** 3, rtol=1e-14)


@BOTH
def test_c15_write_inside_a_checkpointed_region(options):
    def region(b: Tensor) -> Tensor:
        c = b * b
        with torch.no_grad():
            c.mul_(2)
        return c.sin() * c

    def function(a: Tensor) -> Tensor:
        return checkpoint(region, a.clone(), use_reentrant=False)

    got = assert_never_stale(function, leaf(), options=options)
    assert not isinstance(got, str)


@BOTH
def test_c15_write_into_the_input_of_a_checkpointed_region(options):
    """Plain checkpointing does not notice; the input as of the forward is right, and so is the refusal."""
    kept: list[Tensor] = []

    def function(a: Tensor) -> Tensor:
        b = a.clone()
        kept[:] = [b]
        return checkpoint(lambda b: b * b, b, use_reentrant=False)

    a = leaf()
    module = Code(function)
    with everything(module, **options):
        for _ in range(3):
            output = module(a)
            kept[0].detach().mul_(10)
            got = outcome(output, a)
            assert isinstance(got, str) or same(got, [2 * a.detach()])


def test_c15_write_while_the_copy_is_on_its_way_is_refused():
    tier = RecordingTier(deferred=True)
    a = leaf()
    square = Square()
    module = Code(square)
    with everything(module, tier, **LAZY):
        output = module(a)
        assert tier.bytes_of("store") == a.nbytes  # asked for, and not made yet: it will read what is written now
        vars(square).pop("kept").detach().mul_(10)
        assert outcome(output, a) == "modified in place"


@BOTH
def test_c15_version_error_of_every_kind_of_tensor_says_the_same(options):
    for dtype in (torch.float32, torch.complex64, torch.bfloat16):
        a = leaf(dtype=dtype)

        def function(a: Tensor) -> Tensor:
            b = a.clone().conj()
            y = b * b
            b.mul_(2)
            return y

        with pytest.raises(RuntimeError) as plain:
            function(a).sum().abs().backward()
        module = Code(function)
        with everything(module, **options):
            output = module(a).sum().abs()
            try:
                (got,) = torch.autograd.grad(output, a)
            except RuntimeError as error:
                ours = str(error)
                assert (
                    ours.split(";")[0].split("] is at")[0].split("operation: ")[0]
                    == str(plain.value).split(";")[0].split("] is at")[0].split("operation: ")[0]
                )
                assert "expected version 0 instead" in ours
            else:
                assert same_bits(got, as_of_the_forward_of_abs(function, a))


def as_of_the_forward_of_abs(function: Callable[..., Tensor], a: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        output = function(a)
    (gradient,) = torch.autograd.grad(output.sum().abs(), a)
    return gradient


def test_a_copy_that_was_read_back_is_no_licence_to_forget_a_write():
    """Saved, moved, reloaded by one backward, released again for room, then read: always the forward's value."""
    a, b = leaf(), leaf()
    module = Code(lambda a, b: (a.clone() * a).sin() + (b.clone() * b).cos())
    tier = RecordingTier(deferred=True)
    with everything(module, tier):
        output = module(a, b)
        first = outcome(output, a, b, retain_graph=True)
        module(b, a)
        second = outcome(output, a, b, retain_graph=True)
        assert same(first, second)


def test_outputs_of_unsafe_chunk_have_counters_of_their_own():
    """RNN cells write one gate after another into one storage; what is saved first must not stand for what is written later."""

    def gates(x: Tensor) -> Tensor:
        first, second = (x * 1).unsafe_chunk(2, 0)
        return first.sigmoid_().sum() + second.tanh_().sum()

    x = torch.randn(8, 4, requires_grad=True)
    expected = torch.autograd.grad(gates(x), x)
    module = Code(gates)
    for options in ({}, LAZY):
        with everything(module, **options):
            for _ in range(3):
                assert same(torch.autograd.grad(module(x), x), expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_networks_give_the_same(kind):
    module = kind(16, 16, batch_first=True)
    x = torch.randn(4, 6, 16, requires_grad=True)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(module(x)[0].square().sum(), [x, *module.parameters()]))

    expected = gradients()
    with everything(module):
        for _ in range(3):
            assert same(gradients(), expected)


class NotOurs(RecordingTier):
    """A tier from elsewhere, for which Dynamo is kept away from the hooks: they are called from one frame further down."""


NotOurs.__module__ = "elsewhere"


@pytest.mark.parametrize("tier", [RecordingTier, NotOurs])
def test_noise_that_rrelu_draws_after_saving_it_stays(tier):
    """``rrelu_with_noise`` saves its noise before it fills it, and no version moves."""
    model = nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64))
    x = torch.randn(16, 64)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    expected = gradients()
    with everything(model, tier=tier(deferred=True), min_bytes=0) as handle:
        for _ in range(3):
            assert same(gradients(), expected)
        assert handle.stats.kept_by_reason["written after it was saved"] == 3 * 16 * 64 * 4
