"""The second run does the same as the first, or says what differs; what cannot be run twice is refused."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from backhaul import _torch
from backhaul.sites import Site
from tests.conftest import same
from tests.models import leaf
from tests.recomputing_harness import Harness
from tests.test_recomputing import Around, Block, Code, GatedMlp, step


class Router(nn.Module):
    """Top-2 of 4 experts, in one of the ways that models do it."""

    def __init__(self, way: str = "topk") -> None:
        super().__init__()
        self.gate, self.way = nn.Linear(16, 4, bias=False), way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the chosen experts."""
        scores = self.gate(x).softmax(-1)
        if self.way == "topk":
            return torch.topk(scores, 2, dim=-1)
        if self.way == "topk method":
            return scores.topk(k=2)
        if self.way == "sort":
            values, indices = scores.sort(dim=-1, descending=True)
            return values[:, :2], indices[:, :2]
        if self.way == "argsort":
            indices = scores.argsort(-1)[:, -2:]
        elif self.way == "max":
            values, indices = scores.max(dim=-1)
            return values.unsqueeze(-1), indices.unsqueeze(-1)
        elif self.way == "max keepdim":
            return torch.max(scores, -1, keepdim=True)
        elif self.way == "argmax":
            indices = scores.argmax(-1, keepdim=True)
        elif self.way == "kthvalue":
            return torch.kthvalue(scores, 4, keepdim=True)
        else:
            indices = torch.multinomial(scores, 2)
        return scores.gather(-1, indices), indices


class Experts(nn.Module):
    """Runs each expert on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(GatedMlp() for _ in range(4))

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Return the weighted sum of what the experts return."""
        out = torch.zeros_like(x)
        for expert, choice in zip(self.experts, F.one_hot(indices, 4).permute(2, 1, 0), strict=True):
            slot, token = torch.where(choice)
            out = out.index_add(0, token, self.experts[0](x[token]) * 0 + expert(x[token]) * weights[token, slot, None])
        return out


class Moe(nn.Module):
    """A mixture of experts."""

    def __init__(self, way: str = "topk") -> None:
        super().__init__()
        self.router, self.experts = Router(way), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.router(flat)).view_as(x)


WAYS = ("topk", "topk method", "sort", "argsort", "max", "max keepdim", "argmax", "kthvalue", "multinomial")


@pytest.mark.parametrize("way", WAYS)
def test_a_mixture_of_experts(way: str) -> None:
    model, x = Around(Moe(way)), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",))
    for _ in range(2):
        assert same(step(harness, model, x), expected)
    assert harness.num_runs["unit"] == 2


class Wavering(Moe):
    """Its router sees other inputs the second time, as after a rounding difference, only larger."""

    num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        flat = x.flatten(0, 1)
        self.num_runs += 1
        with torch.no_grad():
            noise = torch.linspace(-3, 3, flat.numel()).view_as(flat) * (self.num_runs - 1)
        return self.experts(flat, *self.router(flat + noise)).view_as(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_goes_to_the_same_experts_though_the_router_would_decide_otherwise(way: str) -> None:
    routes: list[list[Tensor]] = []
    model, x = Around(Wavering(way)), leaf(2, 5, 16)
    model.unit.experts.register_forward_pre_hook(lambda _, args: routes.append([args[2].clone(), args[1].detach().clone()]))
    step(Harness(model, ("unit",)), model, x)
    assert len(routes) == 2
    assert routes[0][0].equal(routes[1][0])
    with torch.no_grad():
        assert not routes[0][1].equal(routes[1][1])  # the weights are those of the second time, for the same experts
        chosen = model.unit.router(model.before(x).flatten(0, 1) + torch.linspace(-3, 3, 160).view(10, 16))[1]
    assert not routes[0][0].equal(chosen)


def test_without_the_record_the_route_differs_and_that_is_an_error() -> None:
    model, x = Around(Wavering()), leaf(2, 5, 16)
    harness = Harness(model, ("unit",))
    harness.sites["unit"].chooses = False
    with pytest.raises(RuntimeError, match="'unit' is recomputed, but"):
        step(harness, model, x)


def test_a_module_that_makes_no_choices_is_watched_only_once() -> None:
    model = Around(Block())
    harness = Harness(model, ("unit",))
    assert harness.sites["unit"].chooses is None
    harness(leaf(2, 5, 16))
    assert harness.sites["unit"].chooses is False


def test_outputs_that_are_kept_are_not_made_again() -> None:
    class Drifting(nn.Module):
        """Returns something else each time."""

        num_runs = 0

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            self.num_runs += 1
            y = self.gate(x).sigmoid() * self.num_runs
            return y, {"softmax": y.softmax(-1)}

    def forward(self: Code, x: Tensor) -> Tensor:
        y, more = self.part(x)
        return self.last(y * more["softmax"] * x)

    model, x = Around(Code(forward, Drifting(), nn.Linear(16, 16))), leaf(2, 5, 16)
    expected = step(model, model, x)
    for glob in ("part", "unit.p*", "{part,nothing}"):
        model.unit.part.num_runs = 0
        harness = Harness(model, ("unit",), keep_outputs=(glob,))
        got = step(harness, model, x)
        assert model.unit.part.num_runs == 2
        assert got[0].equal(expected[0])
        assert got[-2].equal(expected[-2])
        assert same(got[5:9], expected[5:9])  # of what is behind the kept outputs
        harness.remove()
    with pytest.raises(ValueError, match="matches no module inside 'unit'"):
        Site("unit", model.unit, keep_outputs=("prat",))


def test_the_router_can_be_kept_by_name() -> None:
    model, x = Around(Moe()), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",), keep_outputs=("router",))
    assert same(step(harness, model, x), expected)


@pytest.mark.parametrize("name", ["moe", "block", "keep"])
def test_verifying_changes_nothing(name: str) -> None:
    model, x = Around(Block() if name == "block" else Moe()), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",), verify=True, keep_outputs=("router",) if name == "keep" else ())
    assert same(step(harness, model, x), expected)


def test_verifying_names_the_module_and_the_tensor_that_differ() -> None:
    class Counting(nn.Module):
        num_runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_runs += 1
            return (x.roll(self.num_runs, 0) * 1.5).exp()

    model, x = Around(nn.Sequential(nn.Linear(16, 16), nn.Sequential(Counting(), nn.Linear(16, 16)))), leaf(2, 5, 16)
    harness = Harness(model, ("unit",))
    step(harness, model, x)  # nothing that can be seen
    harness.remove()
    harness = Harness(model, ("unit",), verify=True)
    with pytest.raises(RuntimeError, match=r"'unit.1.0' is recomputed, but saved tensor \d+ \(float32\[2, 5, 16\].*other values"):
        step(harness, model, x)


def test_another_number_of_saved_tensors_is_an_error() -> None:
    class Growing(nn.Module):
        def __init__(self, by: int) -> None:
            super().__init__()
            self.num_runs, self.by = 2, by

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.num_runs):
                x = x.tanh()
            self.num_runs += self.by
            return x

    for by in (-1, 1):
        model = Around(Code(lambda self, x: self.part(x) * 1.5, Growing(by)))
        with pytest.raises(RuntimeError, match="'unit' is recomputed, but it saves"):
            step(Harness(model, ("unit",)), model, leaf(2, 5, 16))


def test_another_shape_or_dtype_or_stride_is_an_error() -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[:1],
        lambda x: x.double(),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ]
    for change in changes:

        def forward(self: Code, x: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            self.num_runs = getattr(self, "num_runs", 0) + 1
            x = x * 1.5
            return (change(x) if self.num_runs == 2 else x).exp().sum().float() * x

        with pytest.raises(RuntimeError, match=r"'unit' is recomputed, but .* the second time and .* the first"):
            model = Around(Code(forward))
            step(Harness(model, ("unit",)), model, leaf(2, 5, 16))


def test_after_a_failed_run_nothing_is_left_and_the_error_comes_again() -> None:
    model, x = Around(Wavering()), leaf(2, 5, 16)
    harness = Harness(model, ("unit",), verify=True)
    harness.sites["unit"].chooses = False
    loss = harness(x).sum()
    for _ in range(2):
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="is recomputed, but"):
            loss.backward(retain_graph=True)
        assert torch.get_rng_state().equal(state)
        assert harness.here.unit is None
        assert _torch.top_saved_tensors_hooks() is None


class Writing(nn.Module):
    """Writes something in its forward, after having drawn random numbers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.norm = what, nn.BatchNorm1d(5) if what == "batch norm" else nn.Identity()
        self.register_buffer("load", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, *, extra: dict[str, Tensor] | None = None) -> Tensor:
        """Run it."""
        y = F.dropout(x, 0.5) * self.scale
        with torch.no_grad():
            if self.what == "buffer":
                self.load.add_(1)
            if self.what == "new buffer":
                self.load = self.load + 1
            if self.what == "parameter":
                self.scale.mul_(1)
            if self.what == "nested input":
                assert extra is not None
                extra["mask"][:1].zero_()
        return F.relu(x, inplace=True) if self.what == "input" else self.norm(y)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("input", "writes to an input in place"),
        ("nested input", "writes to an input in place"),
        ("buffer", "writes to 'load'"),
        ("new buffer", "writes to 'load'"),
        ("parameter", "writes to 'scale'"),
        ("batch norm", "writes to 'norm.num_batches_tracked'"),
    ],
)
def test_a_module_that_writes_what_it_did_not_make_is_refused(what: str, reason: str) -> None:
    model = Code(lambda self, x: self.part(x * 1, extra={"mask": torch.ones(3)}), Writing(what))
    harness, x = Harness(model, ("part",)), leaf(2, 5, 16)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"'part' cannot be under \"recompute\": it {reason}"):
        harness(x)
    assert torch.get_rng_state().equal(state)
    assert harness.here.unit is None
    assert _torch.top_saved_tensors_hooks() is None


def test_batch_norm_in_eval_mode_is_run_again() -> None:
    model, x = Around(nn.BatchNorm1d(5).eval()), leaf(2, 5, 16)
    expected = step(model, model, x)
    assert same(step(Harness(model, ("unit",)), model, x), expected)


def test_a_cache_is_refused() -> None:
    class DynamicCache:
        """Grows."""

    model = Code(lambda self, x: self.part(x, past_key_values=DynamicCache()), Code(lambda self, x, past_key_values: x))
    with pytest.raises(ValueError, match=r"'part' cannot be .* takes a cache.*use_cache=False"):
        Harness(model, ("part",))(leaf(3))


def test_what_is_written_between_forward_and_backward_is_an_error_that_names_the_module() -> None:
    model = Around(Block())

    def after(write: Callable[[Tensor], object]) -> None:
        inputs: list[Tensor] = []
        hook = model.unit.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        loss = Harness(model, ("unit",))(leaf(2, 5, 16)).sum()
        hook.remove()
        with torch.no_grad():
            write(inputs[0])
        loss.backward()

    after(lambda x: None)
    with pytest.raises(RuntimeError, match=r"'unit' is recomputed, but what it was called with .* modified by an inplace"):
        after(lambda x: x.mul_(2))
    with pytest.raises(RuntimeError, match=r"'unit' is recomputed, but its 'norm.bias' has been written"):
        after(lambda x: model.unit.norm.bias.mul_(2))
    with pytest.raises(RuntimeError, match=r"'unit' is recomputed, but it was switched between train\(\) and eval\(\)"):
        after(lambda x: model.eval())


def test_the_error_is_that_of_autograd_where_an_output_is_written_after_it_was_saved() -> None:
    def forward(self: Code, x: Tensor) -> Tensor:
        y = self.part(x)
        z = y.exp() * y
        with torch.no_grad():
            y.mul_(2)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Harness(Code(forward, nn.Linear(16, 16)), ("part",))(leaf(3, 16)).sum().backward()


def test_settings_by_which_torch_chooses_kernels_are_put_back() -> None:
    seen: list[tuple[Any, ...]] = []

    def forward(self: Code, x: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.cuda.math_sdp_enabled()))
        return x.exp().exp()

    model = Around(Code(forward))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.backends.cudnn.flags(benchmark=True):
            loss = Harness(model, ("unit",))(leaf(2, 5, 16)).sum()
    finally:
        torch.use_deterministic_algorithms(False)
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()
    loss.backward()
    assert seen[0] == seen[1] == (True, True, True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()) == before


def test_a_generator_among_the_arguments_is_put_back() -> None:
    generator = torch.Generator()
    model = Code(lambda self, x: self.part(x, generator), Code(lambda self, x, g: (x * torch.rand(x.shape, generator=g)).exp()))
    x = leaf(3, 16)
    generator.manual_seed(3)
    expected, after = step(model, model, x), generator.get_state()
    generator.manual_seed(3)
    assert same(step(Harness(model, ("part",)), model, x), expected)
    assert generator.get_state().equal(after)


def test_state_is_kept_only_where_the_forward_moved_it() -> None:
    from backhaul.replaying import Surroundings

    quiet, drawn = Surroundings(()), Surroundings(())
    quiet.settle()
    torch.rand(1)
    drawn.settle()
    assert not quiet.generators
    assert len(drawn.generators) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("compiled", ["function", "module", "in place"])
def test_compiled_code_inside(compiled: str) -> None:
    torch.compiler.reset()
    block = Block()
    block.attention.dropout = 0.0
    if compiled == "function":
        function = torch.compile(lambda x, y: F.silu(x) * y.topk(16)[0], backend="aot_eager", fullgraph=True)
        unit = Code(lambda self, x: function(self.part(x), x), block)
    elif compiled == "module":
        unit = Code(lambda self, x: self.part(x) * 2, torch.compile(block, backend="aot_eager", fullgraph=True))
    else:
        block.compile(backend="aot_eager", fullgraph=True)
        unit = Code(lambda self, x: self.part(x) * 2, block)
    model, x = Around(unit), leaf(2, 5, 16)
    expected = step(model, model, x)
    harness = Harness(model, ("unit",))
    for _ in range(2):
        assert same(step(harness, model, x), expected)
    assert harness.num_runs["unit"] == 2
    assert harness.sites["unit"].chooses is False  # what is compiled is looked at as a whole


def test_wrapper_subclasses_are_taken_apart() -> None:
    model, x = Code(lambda self, x: self.last(self.part(x).tanh()), Block(), nn.Linear(16, 16)), TwoTensor(leaf(2, 5, 16), leaf(2, 5, 16))
    model.part.attention.dropout = 0.0
    x = x.detach().requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    harness = Harness(model, ("part",))
    got = torch.autograd.grad(harness(x).sum(), [x, *model.parameters()])
    assert all(a.a.equal(b.a) and a.b.equal(b.b) for a, b in zip(got, expected, strict=True))
    assert harness.num_runs == {"part": 1}


def test_a_model_with_units_can_be_copied_while_its_graph_is_alive() -> None:
    model = Around(Block())
    harness = Harness(model, ("unit",))
    loss = harness(leaf(2, 5, 16)).sum()
    harness.remove()
    copy.deepcopy(model)
    assert loss.grad_fn is not None


def test_a_site_does_not_keep_its_module() -> None:
    model = Block()
    site, gone = Site("unit", model, keep_outputs=("mlp",), verify=True), weakref.ref(model.mlp.gate.weight)
    del model
    gc.collect()
    assert gone() is None
    assert site.fqn == "unit"


class Holder:
    """An argument that is no pytree."""

    def __init__(self, t):
        self.t = t


@pytest.mark.parametrize("change", ["replaced", "written"])
def test_an_argument_that_is_changed_after_the_forward_is_an_error_and_never_another_value(change):
    def forward(x):
        state = Holder(x * 2)
        y = model.part(state)
        if change == "replaced":
            state.t = x * 3
        else:
            with torch.no_grad():
                state.t.mul_(2)
        return y * y

    model = Code(lambda self, x: forward(x), Code(lambda self, state: state.t.sin().exp()))
    with pytest.raises(RuntimeError, match="'t' of an argument, a Holder, has been changed since"):
        step(Harness(model, ("part",)), model, leaf(3))
