"""The names that plans go by: of models in wrappers, of compiled ones, and of modules that a model has under two names."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import backhaul as bh
from backhaul.scopes import wrapper_of
from backhaul.testing import RecordingTier
from tests.conftest import same
from tests.planned import MIXED, NUM_BYTES, WIDTH, X, apply, build, leaf, step


class Wrapped(nn.Module):
    """Holds a model as ``module``, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.module(x)


def compiled_layer() -> nn.Module:
    model = build()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": build,
    "wrapped": lambda: Wrapped(build()),
    "compiled": lambda: torch.compile(build(), backend="eager"),
    "a layer compiled": compiled_layer,
}


@pytest.mark.parametrize("made_for", MODELS)
@pytest.mark.parametrize("applied_to", MODELS)
def test_a_plan_for_a_model_fits_it_in_any_wrapper(made_for: str, applied_to: str) -> None:
    plan = bh.Plan({"*": "offload"}, model=MODELS[made_for]())
    with apply(MODELS[applied_to](), plan):
        pass


def test_a_plan_for_a_model_does_not_fit_one_with_another_layer() -> None:
    model = build()
    plan = bh.Plan(MIXED, model=model)
    model.layers.append(nn.GELU())
    with pytest.raises(ValueError, match=r"had 17 modules, this has 18; this has no 'layers\.\{0\.\.1\}' \(closest: 'layers\.\{0\.\.2\}'"):
        apply(model, plan)


class Shares(nn.Module):
    """Two branches that have one norm, each under a name of its own, and each a head that is the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.a.norm = self.b.norm = nn.LayerNorm(WIDTH)
        self.a.head = nn.Linear(WIDTH, WIDTH)
        self.b.head = nn.Linear(WIDTH, WIDTH)
        self.b.head.weight = self.a.head.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return self.a(x) * self.b(x) + self.a(self.b(x))


@pytest.mark.parametrize(
    "plan",
    [
        {"*.norm": "recompute", "*": "offload"},
        {"a.norm": "recompute", "b": "offload"},
        {"a": "recompute", "b": "offload"},
        {"a": "offload", "b": "recompute"},
        {"a": "recompute", "b": "recompute"},
        {"*.head": "recompute", "*": "offload"},
        {"b.head": "save", "*": "offload"},
    ],
)
def test_modules_and_weights_that_a_model_has_twice_train_the_same_under_any_glob(plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, tier = Shares(), RecordingTier(deferred=True)
    expected = step(model, leaf())
    with apply(model, plan, tier) as handle:
        for _ in range(3):
            assert same(step(model, leaf()), expected)
            assert handle.stats.resident_bytes == tier.used_bytes == 0
        assert handle.stats.recomputed_bytes > 0


def test_a_glob_that_matches_both_names_of_a_module_wraps_it_once_and_each_call_is_a_unit() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin()

    shared = Shared()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared)
    expected = step(model, X)
    with apply(model, {"[13]": "recompute"}) as handle:
        assert [name for name, module in model.named_modules() if wrapper_of(module) is not None] == ["", "1"]
        assert same(step(model, X), expected)
        assert {row.fqn: row.recomputed_bytes for row in handle.report().modules} == {"1": 2 * NUM_BYTES, "": 0}


class Beside(nn.Module):
    """Has a part called ``module`` that is not all it has, and two parts that would have one name without it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"act": nn.GELU(), "up": nn.Linear(WIDTH, WIDTH)})
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Use both."""
        return self.act(self.module["up"](self.module["act"](x)))


@pytest.mark.parametrize("around", [nn.Identity, Wrapped])
@pytest.mark.parametrize(
    ("glob", "names"),
    [("act", {"act"}), ("module.act", {"module.act"}), ("module", {"module.act", "module.up"})],
    ids=["beside", "inside", "all inside"],
)
def test_a_part_that_is_called_module_is_no_wrapper(glob: str, names: set[str], around: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Wrapped(Beside()) if around is Wrapped else Beside()
    with apply(model, {glob: "offload"}) as handle:
        model(leaf()).sum().backward()
        rows = handle.report().modules
        assert {row.fqn for row in rows if row.offloaded_bytes or row.recomputed_bytes} == names
