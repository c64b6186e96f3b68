"""A model that is copied or pickled while managed carries no handle, and the copy works on its own."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from backhaul.testing import RecordingTier
from tests.conftest import everything, same
from tests.models import Net, X, build, step

EXPECTED = step(build())


def copies_of(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "copy": copy.copy(model),
    }


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled in place"])
def test_a_copy_of_a_managed_model_carries_no_handle_and_works_on_its_own(how, compiled):
    model, tier = build(), RecordingTier(deferred=True)
    if compiled:
        model.compile(backend="eager")
    with everything(model, tier) as handle:
        step(model)
        twin = copies_of(model)[how]
        before = handle.stats
        assert type(twin) is Net
        if how != "copy":  # a shallow copy shares its submodules, and those are managed
            assert all("forward" not in module.__dict__ and "__getstate__" not in module.__dict__ for module in twin.modules())
            assert {id(parameter) for parameter in twin.parameters()}.isdisjoint({id(parameter) for parameter in model.parameters()})
            with everything(twin) as other:
                assert same(step(twin), EXPECTED)
                assert other.stats.offloaded_bytes > 0
        assert same(step(twin), EXPECTED)
        after = handle.stats
        assert (after.saved_bytes, after.kept_by_reason) == (before.saved_bytes, before.kept_by_reason)
    assert same(step(twin), EXPECTED)
    assert "forward" not in twin.__dict__


def test_a_copy_of_a_copy_and_a_copy_after_removal_work_too():
    model = build()
    with everything(model):
        twin = copy.deepcopy(copy.deepcopy(model))
    assert same(step(twin), EXPECTED)
    assert same(step(copy.deepcopy(model)), EXPECTED)


def test_a_class_with_its_own_getstate_is_pickled_by_it():
    model = WithState()
    with everything(model):
        model(X).sum().backward()
        twin = pickle.loads(pickle.dumps(model))
    assert twin.note == "restored"
    assert "forward" not in twin.__dict__
    twin(X).sum().backward()


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.note = nn.Linear(16, 16), "fresh"

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "note": "restored"}


def test_a_handle_itself_cannot_be_copied():
    handle = everything(build())
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copy the model, which then carries no handle"):
            how(handle)
    handle.remove()
