"""The handle: regions, pauses, how it leaves no trace, and what may be managed."""

import inspect

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import _torch
from backhaul.testing import RecordingTier
from tests.conftest import Code, everything, same
from tests.models import Net, X, build, step

EXPECTED = step(build())


def traces(model: nn.Module) -> list[object]:
    """All that management could have changed about a model."""
    return [
        [
            (
                name,
                type(module),
                {key: id(value) for key, value in module.__dict__.items() if not key.startswith("_")},
                sorted(module.__dict__),
                [len(value) for key, value in sorted(module.__dict__.items()) if key.endswith("_hooks") or key.endswith("_kwargs")],
                "forward" in module.__dict__,
                str(inspect.signature(module.forward)),
                module.forward.__doc__,
                module.forward.__name__,
            )
            for name, module in model.named_modules()
        ],
        {name: id(parameter) for name, parameter in model.named_parameters()},
        {name: id(buffer) for name, buffer in model.named_buffers()},
        list(model.state_dict()),
        repr(model),
    ]


# Regions


def test_a_region_manages_code_outside_the_modules():
    tier = RecordingTier(deferred=True)
    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(x.exp().sin().cos().sum(), x)
    with everything(build(), tier) as handle:
        for _ in range(3):
            with handle.region():
                loss = x.exp().sin().cos().sum()
            assert same(torch.autograd.grad(loss, x), expected)
        assert tier.bytes_of("load") > 0
        assert {row.fqn for row in handle.report().modules} == {"region"}


def test_a_region_inside_a_managed_module_or_another_region_changes_nothing():
    tier = RecordingTier(deferred=True)
    x = torch.randn(64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with handle.region(), handle.region():
            return x.exp().sin()

    module = Code(run)
    with everything(module, tier) as handle:
        with handle.region():
            before = _torch.top_saved_tensors_hooks()
            with handle.region():
                assert _torch.top_saved_tensors_hooks() == before
        module(x)
        assert {row.fqn for row in handle.report().modules} == {""}
    assert _torch.top_saved_tensors_hooks() is None


def test_a_managed_module_inside_a_region_belongs_to_the_region_s_frame():
    model = build()

    def loss_of() -> Tensor:
        return model(X).exp().sin().square().sum()

    expected = torch.autograd.grad(loss_of(), list(model.parameters()))
    with everything(model) as handle:
        with handle.region():
            loss = loss_of()
            assert len(handle._engine.registry.frames) == 1
        assert same(torch.autograd.grad(loss, list(model.parameters())), expected)
        assert {"region", "", "blocks.0"} <= {row.fqn for row in handle.report().modules}


def test_a_region_without_grad_or_of_a_removed_handle_does_nothing():
    tier = RecordingTier(deferred=True)
    handle = everything(build(), tier)
    with torch.no_grad(), handle.region():
        assert _torch.top_saved_tensors_hooks() is None
    handle.remove()
    with handle.region():
        assert _torch.top_saved_tensors_hooks() is None


# Pausing


def test_c35_torch_func_works_while_the_handle_is_paused():
    x = torch.randn(3)
    model = build()

    def f(v: Tensor) -> Tensor:
        return v.sin().sum()

    with everything(model) as handle, handle.region():
        with pytest.raises(RuntimeError):
            torch.func.grad(f)(x)  # torch's own guard
        with handle.paused():
            assert torch.func.grad(f)(x).equal(x.cos())
            _, pull = torch.func.vjp(f, x)
            assert pull(torch.tensor(1.0))[0].equal(x.cos())
            assert torch.func.jacrev(torch.sin)(x).diagonal().equal(x.cos())
            with handle.paused():
                assert torch.func.grad(f)(x).equal(x.cos())
            assert torch.func.grad(f)(x).equal(x.cos())
        assert torch.func.vmap(torch.sin)(x).equal(x.sin())  # allowed
        assert _torch.top_saved_tensors_hooks() is not None
    assert _torch.top_saved_tensors_hooks() is None
    assert same(step(model), EXPECTED)


def test_c35_a_managed_module_inside_a_transform_is_refused_by_name():
    model = build()
    with everything(nn.ModuleList([model])) as handle:
        with pytest.raises(RuntimeError, match=r"torch\.func.*handle\.paused\(\)"):
            torch.func.grad(lambda x: model(x).sum())(X)
        assert _torch.top_saved_tensors_hooks() is None
        assert same(step(model), EXPECTED)
        with handle.paused():
            gradient = torch.func.grad(lambda x: model(x).sum())(X)
        assert same(step(model), EXPECTED)
        assert handle.stats.resident_bytes == 0
    assert gradient.equal(torch.func.grad(lambda x: model(x).sum())(X))


def test_c35_vmap_inside_a_managed_module_gives_the_same():
    linear = nn.Linear(16, 16)
    module = Code(lambda x: torch.func.vmap(lambda row: linear(row).tanh().exp())(x), linear)
    x = torch.randn(8, 16, requires_grad=True)
    inputs = [x, *linear.parameters()]
    expected = torch.autograd.grad(module(x).sum(), inputs)
    with everything(module) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), inputs), expected)
        assert handle.stats.resident_bytes == 0


def test_c35_a_managed_module_can_pause_around_its_own_transform():
    def run(x: Tensor) -> Tensor:
        with handle.paused():
            slope = torch.func.grad(lambda v: v.pow(3).sum())(x.detach())
        return (x * slope).exp()

    handle = everything(build())
    module, x = Code(run), torch.randn(16, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    handle.remove()
    with everything(module) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert handle.stats.reloaded_bytes > 0


def test_while_paused_a_managed_module_runs_untouched():
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        with handle.paused():
            assert same(step(model), EXPECTED)
        assert tier.peak_bytes == handle.stats.saved_bytes == 0
        assert same(step(model), EXPECTED)
        assert tier.peak_bytes > 0


def test_pausing_between_forward_and_backward_brings_everything_back():
    model = build()
    with everything(model) as handle:
        loss = model(X).square().sum()
        with handle.paused():
            assert same(torch.autograd.grad(loss, list(model.parameters())), EXPECTED)


# Leaving


@pytest.mark.parametrize("num_steps", [0, 3])
def test_removal_leaves_attributes_hooks_state_dict_names_and_signatures_as_they_were(num_steps):
    model = build()
    before = traces(model)
    handle = everything(model)
    for _ in range(num_steps):
        step(model)
    handle.remove()
    assert traces(model) == before
    handle.remove()  # again does nothing
    assert traces(model) == before
    assert same(step(model), EXPECTED)


def test_while_managed_names_state_dict_and_signature_are_those_of_the_model():
    plain, model = build(), build()
    with everything(model):
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert model.forward.__doc__ == "Run it."
        assert model.forward.__name__ == "forward"
        assert repr(model) == repr(plain)
        assert isinstance(model, Net)
        assert model(X, shift=0.5).equal(plain(X, shift=0.5))
        model.load_state_dict(plain.state_dict())


def test_a_forward_set_on_the_instance_is_used_and_put_back():
    model = build()
    original = model.forward
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x)

    model.forward = forward
    with everything(model) as handle:
        assert same(step(model), EXPECTED)
        assert handle.stats.offloaded_bytes > 0
    assert model.forward is forward
    assert calls == [1]


def test_removal_under_a_wrapper_that_came_later_leaves_that_wrapper_working():
    model = build()
    handle = everything(model)
    ours = model.forward
    calls = []

    def later(x: Tensor) -> Tensor:
        calls.append(1)
        return ours(x)

    model.forward = later
    assert same(step(model), EXPECTED)
    saved = handle.stats.saved_bytes
    assert saved > 0
    handle.remove()
    assert model.forward is later
    assert same(step(model), EXPECTED)
    assert handle.stats.saved_bytes == saved
    assert calls == [1, 1]
    with everything(model) as again:
        assert same(step(model), EXPECTED)
        assert again.stats.offloaded_bytes > 0
    assert model.forward is later


def test_a_copy_of_a_model_from_which_the_handle_went_under_a_later_wrapper_is_a_model_of_its_own():
    model = build()
    handle = everything(model)
    ours = model.forward
    model.forward = lambda x: ours(x)
    handle.remove()
    assert "__getstate__" not in model.__dict__


def test_handles_may_be_removed_in_any_order():
    model = build()
    before = traces(model)
    handles = [everything(part) for part in (model.blocks[0], model.blocks[1], model.head)]
    assert same(step(model), EXPECTED)
    for index in (1, 0, 2):
        handles[index].remove()
        assert same(step(model), EXPECTED)
    assert traces(model) == before


def test_a_model_can_be_managed_again_after_removal():
    model = build()
    before = traces(model)
    for options in ({}, {"activation_budget": None}, {"min_bytes": 513}):
        with everything(model, **options) as handle:
            assert same(step(model), EXPECTED)
            assert handle.stats.saved_bytes > 0
    assert traces(model) == before


def test_a_handle_that_is_removed_within_forward_leaves_that_step_right():
    model = build()
    handle = everything(model)

    def run(x: Tensor) -> Tensor:
        x = model.blocks[0](x)
        handle.remove()
        for block in model.blocks[1:]:
            x = block(x)
        return model.head(x * model.scale).tanh()

    model.forward = run
    assert same(step(model), EXPECTED)
    assert _torch.top_saved_tensors_hooks() is None


def test_our_own_tier_is_closed_at_the_end_and_a_user_s_is_not():
    class Closes(RecordingTier):
        closed = False

        def close(self) -> None:
            self.closed = True

    tier, model = Closes(), build()
    everything(model, tier).remove()
    assert not tier.closed
    handle = bh.offload(model, tier="disk", min_bytes=0, activation_budget=0)
    loss = model(X).square().sum()
    handle.remove()
    assert same(torch.autograd.grad(loss, list(model.parameters())), EXPECTED)


# What may be managed


def test_several_handles_on_disjoint_parts_of_one_model():
    model = build()
    tiers = [RecordingTier(deferred=True) for _ in range(3)]
    handles = [everything(part, tier) for part, tier in zip((model.blocks[0], model.blocks[2], model.head), tiers, strict=True)]
    for _ in range(3):
        assert same(step(model), EXPECTED)
    for handle, tier in zip(handles, tiers, strict=True):
        assert handle.stats.saved_bytes > 0
        assert handle.stats.resident_bytes == tier.used_bytes == 0
        handle.remove()


def test_a_module_list_stands_for_its_elements():
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model.blocks, tier) as handle:
        for _ in range(3):
            assert same(step(model), EXPECTED)
        assert {row.fqn.split(".")[0] for row in handle.report().modules} == {"0", "1", "2"}
        assert tier.bytes_of("load") > 0


def test_a_module_dict_stands_for_its_elements():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Tanh()})
    with everything(model) as handle:
        model["b"](model["a"](X).exp()).sum().backward()
        assert {row.fqn for row in handle.report().modules} == {"a", "b"}


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_modules_is_managed_each_as_a_frame(kind):
    model, tier = build(), RecordingTier(deferred=True)
    with everything(kind(model.blocks), tier) as handle:
        for _ in range(3):
            assert same(step(model), EXPECTED)
        assert handle.stats.resident_bytes == tier.used_bytes == 0
        assert tier.bytes_of("load") > 0


def test_a_module_compiled_in_place_is_one_scope_and_stays_compiled():
    model, tier = build(), RecordingTier(deferred=True)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    with everything(model, tier) as handle:
        for _ in range(3):
            assert same(step(model), EXPECTED)
        assert {row.fqn for row in handle.report().modules} == {""}
        assert tier.bytes_of("load") > 0
    assert model._compiled_call_impl is compiled
    assert same(step(model), EXPECTED)


def test_a_compiled_wrapper_is_one_scope_too():
    model, tier = torch.compile(build(), backend="eager"), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(3):
            assert same(step(model), EXPECTED)
        assert {row.fqn for row in handle.report().modules} == {""}
        assert tier.bytes_of("load") > 0
    assert same(step(model), EXPECTED)


def test_a_module_that_is_compiled_while_managed_still_trains_the_same():
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier):
        model.compile(backend="eager")
        for _ in range(3):
            assert same(step(model), EXPECTED)
    assert same(step(model), EXPECTED)


def test_a_bound_forward_without_its_module_says_what_is_missing():
    module = nn.Linear(4, 4)
    handle = everything(module)
    forward = module.forward
    del module
    with pytest.raises(RuntimeError, match="keep the module"):
        forward(torch.ones(1, 4))
    handle.remove()


def test_c02_adapters_train_beside_frozen_weights_and_a_frozen_embedding():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.base(x) + self.up(self.down(x)))

    embedding = nn.Embedding(10, 8).requires_grad_(False)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    ids = torch.randint(0, 10, (2, 5))

    def gradients() -> list[Tensor]:
        trainable = [parameter for parameter in blocks.parameters() if parameter.requires_grad]
        return list(torch.autograd.grad(blocks(embedding(ids)).pow(2).sum(), trainable))

    expected = gradients()
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    with everything(blocks) as handle:
        for _ in range(3):
            assert same(gradients(), expected)
    assert handle.stats.offloaded_bytes > 0


def test_c10_outputs_keep_their_device_dtype_and_structure():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, image: Tensor, *, text: Tensor, mask: Tensor | None = None) -> dict[str, object]:
            assert mask is None
            return {"image": self.image(image).relu(), "text": (self.text(text).bfloat16(), None), "note": "kept"}

    block, image, text = Block(), torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    with everything(block):
        out = block(image, text=text)
        assert list(out) == ["image", "text", "note"]
        assert out["note"] == "kept"
        assert out["text"][1] is None
        assert (out["image"].device, out["text"][0].dtype) == (image.device, torch.bfloat16)
        (out["image"].sum() + out["text"][0].sum()).backward()
