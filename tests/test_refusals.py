"""Bad input is refused with what, where and what to do; an enabled handle that moves nothing says why, once."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul import _torch
from backhaul.scopes import wrapper_of
from backhaul.testing import RecordingTier
from tests.conftest import Code, everything


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).tanh()


def managed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if wrapper_of(module) is not None]


@pytest.mark.parametrize("tier", ["dsik", "Host", "", 3, object(), RecordingTier])
def test_c14_an_unknown_tier_is_refused(tier):
    model = Net()
    with pytest.raises(ValueError, match=r'tier=.* is unknown; use "host", "disk" or a backhaul\.Tier'):
        bh.offload(model, tier=tier)
    assert not managed(model)


@pytest.mark.parametrize("name", ["activation_budget", "min_bytes"])
@pytest.mark.parametrize("size", ["12 potatoes", "GiB", "", "-1GiB", "1e9", "1,5GB", -1, 1.5, True, [1]])
def test_a_size_that_is_none_is_refused_by_name(name, size):
    model = Net()
    with pytest.raises(ValueError, match=rf'{name}=.* is not a size; write .*"12GiB"'):
        bh.offload(model, tier=RecordingTier(), **{name: size})
    assert not managed(model)


@pytest.mark.parametrize("size", ["0", "1", "12GiB", "500MB", "0.5 kb", " 3 GiB ", "1TiB", 0, 1 << 40])
def test_sizes_as_people_write_them_are_taken(size):
    bh.offload(Net(), tier=RecordingTier(), activation_budget=size, min_bytes=size).remove()


@pytest.mark.parametrize("empty", [[], (), nn.ModuleList(), nn.ModuleDict()])
def test_nothing_to_manage_is_refused(empty):
    with pytest.raises(ValueError, match="no module to manage"):
        bh.offload(empty)


@pytest.mark.parametrize(("modules", "where"), [([torch.relu], 0), ([nn.Linear(2, 2), "layers.0"], 1), ([torch.zeros(2)], 0), ([None], 0)])
def test_what_is_no_module_is_refused_with_its_place(modules, where):
    with pytest.raises(ValueError, match=rf"modules\[{where}\] is a .*, not a module; give torch\.nn\.Module instances"):
        bh.offload(modules)


@pytest.mark.parametrize("thing", [None, 3, torch.relu, "model", torch.zeros(2)], ids=["None", "int", "function", "str", "tensor"])
def test_what_is_neither_a_module_nor_a_list_is_refused(thing):
    with pytest.raises(ValueError, match="module"):
        bh.offload(thing)


def test_a_module_given_twice_is_refused():
    block = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"'1' .*'0'.*; give each (module )?once"):
        bh.offload([block, block])
    assert wrapper_of(block) is None


@pytest.mark.parametrize(
    ("order", "names"), [((0, 1), "'1' is inside '0'"), ((1, 0), "'0' is inside '1'")], ids=["outer first", "inner first"]
)
def test_a_module_inside_another_is_refused(order, names):
    model = Net()
    modules = [model, model.blocks[1]]
    with pytest.raises(ValueError, match=rf"{names}.*; (give each module once|leave one of them out)"):
        bh.offload([modules[index] for index in order])
    assert not managed(model)


def test_a_module_list_among_the_modules_is_never_called_and_so_refused_or_taken_apart():
    model = Net()
    handle = everything([model.blocks, model.head])
    model(torch.ones(4, 16)).sum().backward()
    names = {row.fqn for row in handle.report().modules}
    handle.remove()
    assert any(name.startswith("0") for name in names)


@pytest.mark.parametrize("which", ["the same", "a part", "the whole"])
def test_a_module_managed_twice_is_refused_by_name(which):
    model = Net()
    first, second, name = {
        "the same": (model, model, "Net"),
        "a part": (model, model.blocks, "0"),
        "the whole": (model.blocks[1], model, r"blocks\.1"),
    }[which]
    with everything(first):
        before = managed(model)
        with pytest.raises(ValueError, match=rf"'{name}' is managed by a handle already; remove that handle first"):
            everything(second)
        assert managed(model) == before
    everything(second).remove()


def test_a_budget_below_what_cannot_be_moved_is_refused_with_how_much_that_is():
    model = Net()
    with everything(model, activation_budget=600, min_bytes=600) as handle:
        model(torch.ones(8, 16)).sum().backward()  # 512 bytes each, all below min_bytes; the first step shows it
        with pytest.raises(ValueError, match=r"=600 B is below the .* of saved tensors on cpu that cannot be moved \(.*small") as caught:
            model(torch.ones(8, 16))
        assert "lower min_bytes, or use 0" in str(caught.value)
        assert _torch.top_saved_tensors_hooks() is None
        assert handle.stats.resident_bytes == 0


def test_a_budget_of_nothing_moves_what_it_can_and_is_never_refused():
    model = Net()
    with everything(model, activation_budget=0, min_bytes=513):
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()


def test_a_module_that_is_captured_into_a_cuda_graph_is_refused(monkeypatch):
    model = Net()
    with everything(nn.ModuleList([model])) as handle:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"'0' is being captured into a CUDA graph.*handle\.paused\(\), or remove the handle"):
            model(torch.ones(8, 16))
        with pytest.raises(RuntimeError, match="'region' is being captured"), handle.region():
            pass
        with handle.paused():
            model(torch.ones(8, 16))
        monkeypatch.undo()
        assert _torch.top_saved_tensors_hooks() is None
        model(torch.ones(8, 16)).sum().backward()
        assert handle.stats.offloaded_bytes > 0


def test_c35_a_transform_around_a_managed_module_is_refused():
    model = Net()
    with everything(nn.ModuleList([model])) as handle:
        for transform in (torch.func.grad, torch.func.grad_and_value):
            with pytest.raises(RuntimeError, match=r"'0' was called inside a torch\.func transform.*handle\.paused\(\)"):
                transform(lambda x: model(x).sum())(torch.ones(8, 16))
        assert _torch.top_saved_tensors_hooks() is None
        assert handle._engine.here.scope is None


# An enabled handle that moves nothing says why


def texts_of_five_steps(model: nn.Module, x: Tensor, **options: object) -> list[str]:
    with everything(model, **options), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            y = model(x)
            if y.requires_grad:
                y.sum().backward()
    return [str(warning.message) for warning in caught]


def test_c14_tensors_that_are_all_below_min_bytes_are_told_once():
    (text,) = texts_of_five_steps(Net(), torch.ones(8, 16), min_bytes=1 << 40)
    assert text.startswith("backhaul offloaded 0 of ")
    assert "in three passes: the largest saved tensor has 512 B, below min_bytes=1.0 TiB" in text


def test_c14_a_module_that_saves_nothing_but_parameters_is_told_once():
    (text,) = texts_of_five_steps(Code(nn.Linear(16, 16).requires_grad_(True).__call__), nn.Parameter(torch.ones(4, 16)))
    assert "in three passes: only parameters and their aliases were saved (parameter " in text


def test_c14_a_module_in_which_all_is_frozen_is_told_once():
    (text,) = texts_of_five_steps(Net().requires_grad_(False), torch.ones(8, 16))
    assert "in three passes: autograd saved nothing in the managed modules; is everything in them frozen" in text


def test_c14_a_module_inside_a_checkpoint_is_told_once():
    inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    outer = Code(lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False), inner)
    with everything(inner), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            outer(torch.ones(8, 16)).sum().backward()
    (text,) = [str(warning.message) for warning in caught]
    assert "in three passes: it runs inside a checkpointed region" in text


def test_c14_two_steps_are_too_few_to_complain_and_eval_is_no_pass():
    model = Net()
    with everything(model, min_bytes=1 << 40):
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
        model.eval()
        for _ in range(5):
            model(torch.ones(8, 16)).sum().backward()
        with torch.no_grad():
            model.train()(torch.ones(8, 16))


def test_c14_a_handle_that_moves_something_never_complains():
    assert texts_of_five_steps(Net(), torch.ones(8, 16)) == []


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_c14_each_tier_by_name_really_moves_bytes_there(tier):
    model = Net()
    with bh.offload(model, tier=tier, min_bytes=0, activation_budget=0) as handle:
        loss = model(torch.ones(8, 16)).sum()
        stats = handle.stats
        assert (stats.disk_bytes > 0) == (tier == "disk")
        assert (stats.host_bytes > 0) == (tier == "host")
        loss.backward()
        assert handle.stats.disk_bytes == handle.stats.host_bytes == 0


def test_a_part_of_a_module_that_another_handle_manages_is_refused_when_it_runs():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))))
    with everything(model), everything(model[0][1][1]), pytest.raises(ValueError, match="another handle manages already"):
        model(torch.ones(2, 4, requires_grad=True))
    model(torch.ones(2, 4)).sum().backward()
