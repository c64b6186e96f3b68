"""A plan applied: which promise a storage gets that falls under several rules, tiers, budgets, what is freed and what is refused."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

import backhaul as bh
from backhaul.scopes import wrapper_of
from backhaul.testing import RecordingTier
from tests.conftest import Code, same
from tests.planned import MIXED, NUM_BYTES, WIDTH, X, apply, build, leaf, step

PLANS: dict[str, Any] = {
    "nothing": {},
    "save all": {"*": "save"},
    "offload all": {"*": "offload"},
    "recompute all": {"*": "recompute"},
    "recompute the model": bh.Plan({}, default="recompute"),
    "recompute layers": {"layers.*": "recompute", "*": "offload"},
    "one layer each way": {"layers.0": "recompute", "layers.1": "offload"},
    "mixed": MIXED,
    "norms, and nothing moves": {"*.norm": "recompute"},
    "projections": {"*.[qkv]": "recompute", "*.norm": "save", "*": "offload"},
}


def managed(model: nn.Module, plan: Any, *inputs: Tensor, steps: int = 1, **options: Any) -> tuple[RecordingTier, Any]:
    """Claim that training is that of the plain model; return the tier and what was counted."""
    expected, tier = step(model, *inputs), RecordingTier(deferred=True)
    with apply(model, plan, tier, **options) as handle:
        for _ in range(steps):
            assert same(step(model, *inputs), expected)
            assert handle.stats.resident_bytes == tier.used_bytes == 0
        return tier, handle.stats


@pytest.mark.filterwarnings("ignore:backhaul offloaded 0")
@pytest.mark.parametrize("budget", [0, 7500, None])
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_and_all_is_counted_once(plan, budget):
    tier, stats = managed(build(), PLANS[plan], activation_budget=budget, steps=4)
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes
    activations = {reason: num_bytes for reason, num_bytes in stats.kept_by_reason.items() if reason != "parameter"}
    assert sum(activations.values()) == stats.kept_bytes
    assert all(num_bytes > 0 for num_bytes in activations.values())
    assert bool(stats.recomputed_bytes) == (plan not in ("nothing", "save all"))
    if budget == 0:
        assert stats.offloaded_bytes == tier.bytes_of("store")
        assert bool(stats.offloaded_bytes) == ("offload" in str(PLANS[plan]))


@pytest.mark.parametrize("plan", [{}, {"*": "save"}])
def test_a_plan_by_which_nothing_is_to_move_warns_of_nothing(plan):
    managed(build(), plan, steps=4)


# Precedence


class Fork(nn.Module):
    """A value that several modules read, in the order in which they are given."""

    def __init__(self, producer: nn.Module, **readers: nn.Module) -> None:
        super().__init__()
        self.producer = producer
        self.readers = list(readers)
        for name, module in readers.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        y = self.producer(x)
        return torch.stack([getattr(self, name)(y) for name in self.readers]).sum(0)


def projections(producer: nn.Module, order: str) -> Fork:
    return Fork(producer, **{name: nn.Linear(WIDTH, WIDTH) for name in order})


def without_recipe() -> nn.Module:
    """Return a module that saves nothing, and whose output no recipe makes."""
    return Code(lambda x: x.cumsum(0))


ORDERS = pytest.mark.parametrize("order", ["qkv", "vqk", "kvq"])


@ORDERS
def test_a_norm_s_output_that_one_projection_is_to_save_is_saved_whichever_comes_first(order):
    model = projections(nn.LayerNorm(WIDTH), order)
    tier, stats = managed(model, {"producer": "recompute", "v": "save", "*": "offload"}, X)
    assert stats.kept_by_reason["save"] == NUM_BYTES
    assert tier.bytes_of("store") == NUM_BYTES  # what the norm starts from


@ORDERS
def test_a_norm_s_output_that_all_projections_offload_is_made_again(order):
    model = projections(nn.LayerNorm(WIDTH), order)
    tier, stats = managed(model, {"producer": "recompute", "*": "offload"}, X)
    assert "save" not in stats.kept_by_reason
    assert stats.recomputed_bytes >= NUM_BYTES
    assert tier.bytes_of("store") == NUM_BYTES


@ORDERS
@pytest.mark.parametrize("action", ["save", "offload"])
def test_what_no_rule_makes_again_is_offloaded_once_however_many_save_it(order, action):
    tier, stats = managed(projections(without_recipe(), order), {"producer": action, "*": "offload"}, leaf())
    assert tier.bytes_of("store") == stats.offloaded_bytes == stats.saved_bytes == NUM_BYTES


@pytest.mark.filterwarnings("ignore:backhaul offloaded 0")
@ORDERS
def test_what_one_rule_saves_is_not_offloaded_for_the_others(order):
    tier, stats = managed(projections(without_recipe(), order), {"v": "save", "*": "offload"}, leaf(), steps=3)
    assert tier.bytes_of("load") == 0
    assert stats.offloaded_bytes == 0
    assert stats.kept_by_reason["save"] == stats.saved_bytes == 3 * NUM_BYTES


def test_a_storage_that_has_been_copied_and_released_already_is_saved_all_the_same():
    model = Fork(without_recipe(), first=Code(torch.sin), other=Code(lambda y: y.cumsum(1).cos()), last=Code(torch.cos))
    expected, tier, seen = step(model, leaf()), RecordingTier(deferred=True), []
    model.last.register_forward_hook(lambda *_: seen.append((tier.bytes_of("store"), tier.used_bytes)))
    with apply(model, {"last": "save", "*": "offload"}, tier) as handle:
        assert same(step(model, leaf()), expected)
        stats = handle.stats
    assert seen == [(2 * NUM_BYTES, NUM_BYTES)]  # both were stored, one has been given back
    assert tier.bytes_of("load") == NUM_BYTES
    assert (stats.kept_by_reason["save"], stats.offloaded_bytes, stats.futile_bytes) == (NUM_BYTES, NUM_BYTES, 0)


def test_a_storage_of_which_a_slice_was_saved_first_is_saved_all_the_same():
    model = Fork(without_recipe(), slice=Code(lambda y: y[:1, :1].sin().expand_as(y)), whole=Code(torch.cos))
    tier, stats = managed(model, {"whole": "save", "*": "offload"}, leaf())
    assert tier.bytes_of("store") == 0
    assert stats.kept_by_reason == {"save": NUM_BYTES}


def test_what_a_unit_starts_from_falls_under_the_rule_around_it():
    for around, stored in (("offload", NUM_BYTES), ("save", 0)):
        tier, stats = managed(nn.Sequential(without_recipe(), nn.LayerNorm(WIDTH)), {"1": "recompute", "*": around}, leaf())
        assert tier.bytes_of("store") == stored
        assert stats.kept_by_reason.get("save", 0) == NUM_BYTES - stored


# Tiers


def test_each_rule_has_a_tier_of_its_own_beside_the_handle_s():
    mine, other, model = RecordingTier(deferred=True), RecordingTier(deferred=True), nn.Sequential()
    for _ in range(3):
        model.append(Code(lambda x: x.cumsum(0).sin()))
    expected = step(model, leaf())
    plan = {"0": bh.Offload(tier=other), "1": bh.Offload(tier="disk"), "*": "offload"}
    with apply(model, plan, mine) as handle:
        result = model(leaf())
        stats = handle.stats
        assert (mine.used_bytes, other.used_bytes, stats.disk_bytes) == (NUM_BYTES, NUM_BYTES, NUM_BYTES)
        assert stats.host_bytes == 2 * NUM_BYTES
        del result
        for _ in range(4):
            assert same(step(model, leaf()), expected)
            stats = handle.stats
            assert mine.used_bytes == other.used_bytes == stats.disk_bytes == stats.resident_bytes == 0
        assert stats.offloaded_bytes > mine.bytes_of("store") + other.bytes_of("store")  # the rest is on the disk
        assert stats.peak_disk_bytes == NUM_BYTES


def test_tiers_that_rules_name_are_opened_once_and_closed_with_the_handle_while_a_user_s_stays_open():
    class Closes(RecordingTier):
        num_closes = 0

        def close(self) -> None:
            self.num_closes += 1

    mine, other, model = Closes(), Closes(), build()
    plan = {"layers.0.norm": bh.Offload(tier="disk"), "layers.1": bh.Offload(tier="disk"), "*": bh.Offload(tier=other)}
    handle = apply(model, plan, mine)
    (disk,) = handle._owned
    assert step(model)
    handle.remove()
    assert (mine.num_closes, other.num_closes) == (0, 0)
    with pytest.raises(RuntimeError, match="after close"):
        disk.store(torch.zeros(8, dtype=torch.uint8))


def test_the_handle_s_own_tier_serves_rules_that_name_its_kind():
    model = build()
    expected = step(model)
    with apply(model, {"layers.0": bh.Offload(tier="disk"), "*": "offload"}, "disk") as handle:
        assert same(step(model), expected)
        assert len(handle._tiers) == 1


def test_a_region_goes_by_the_plan_s_default_and_so_by_its_tier():
    mine, other = RecordingTier(deferred=True), RecordingTier(deferred=True)
    with apply(nn.Linear(2, 2), bh.Plan({}, default=bh.Offload(tier=other)), mine) as handle:
        with handle.region():
            loss = leaf().cumsum(0).sin().sum()
        loss.backward()
    assert (mine.bytes_of("store"), other.bytes_of("store")) == (0, NUM_BYTES)


def test_a_full_tier_of_one_rule_leaves_the_others_alone():
    small, tier, model = RecordingTier(capacity=0), RecordingTier(deferred=True), build()
    expected = step(model)
    with apply(model, {"layers.0": bh.Offload(tier=small), "*": "offload"}, tier) as handle:
        with pytest.warns(UserWarning, match="tier is full"):
            assert same(step(model), expected)
        gc.collect()
        assert tier.bytes_of("store") > 0
        assert handle.stats.kept_by_reason["tier full"] > 0


# Budgets


@pytest.mark.parametrize("plan", ["offload", "recompute"])
@pytest.mark.parametrize("num_kept", [0, 3])
def test_what_is_resident_stays_within_the_budget_and_what_one_node_needs(plan, num_kept):
    budget, depth = num_kept * NUM_BYTES, 10
    model = nn.Sequential(*[Code(lambda x: x.cumsum(0).sin()) for _ in range(depth)])
    rules = {"*": "offload"} if plan == "offload" else {"[05]": "recompute", "*": "offload"}
    _, stats = managed(model, rules, leaf(), steps=4, activation_budget=budget)
    assert stats.offloaded_bytes > 0
    assert stats.peak_resident_bytes <= budget + 2 * NUM_BYTES  # one that is released is still there when the next one comes


# What is freed


class Watched(nn.Module):
    """Notes, weakly, the storages of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Pass it on."""
        self.seen.append(weakref.ref(x.untyped_storage()))
        return x

    @property
    def num_alive(self) -> int:
        """How many there are still."""
        return sum(storage() is not None for storage in self.seen)


RECIPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a gated activation": lambda a, b: nn.functional.silu(a) * b,
    "a norm": lambda a, b: nn.functional.layer_norm(a, (WIDTH,)) * b,
    "a cast": lambda a, b: a.double() * b.double(),
    "a gather": lambda a, b: (a * b)[torch.tensor([3, 3, 1, 0, 2])],
    "a concatenation": lambda a, b: torch.cat([a, b], -1).view(2, -1, WIDTH),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_plain_code_makes_cheaply_is_freed_and_comes_back(name):
    watched = Watched()

    def run(x: Tensor) -> Tensor:
        a, b = x.cumsum(0), x.cumsum(1)
        rest = a.cos() + b.cos()  # saves both
        return watched(RECIPES[name](a, b)).sin().sum() + rest

    model = Code(run)
    expected = step(model, leaf())
    watched.seen.clear()
    with apply(model, {"*": "offload"}) as handle:
        result = model(leaf())
        assert (len(watched.seen), watched.num_alive) == (1, 0)
        del result
        assert same(step(model, leaf()), expected)
        assert handle.stats.recomputed_bytes > 0


def test_what_a_unit_saves_and_returns_is_freed_until_it_is_needed_and_again_after_that():
    watched = Watched()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Code(lambda x: watched(watched(x.exp()).sin().exp())), nn.Linear(WIDTH, WIDTH))
    expected = step(model, X)
    watched.seen.clear()
    with apply(model, {"1": "recompute", "*": "offload"}):
        result = model(X)
        assert (len(watched.seen), watched.num_alive) == (2, 0)
        result.square().sum().backward()
        assert len(watched.seen) > 2
        assert watched.num_alive == 0
    assert same([parameter.grad for parameter in model.parameters()], expected[1:])


# Chains


def chain(num_links: int) -> nn.Module:
    weight = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))

    def run(x: Tensor) -> Tensor:
        for _ in range(num_links):
            x = x * weight
        return x

    module = Code(run)
    module.weight = weight
    return module


@pytest.mark.parametrize("kind", ["recipes", "units"])
def test_a_long_chain_of_values_that_could_each_be_made_from_the_one_before_is_cut(kind):
    model = chain(500) if kind == "recipes" else nn.Sequential(*[nn.LayerNorm(WIDTH) for _ in range(250)])
    managed(model, {"*": "offload"} if kind == "recipes" else {"[0-9]*": "recompute", "*": "offload"}, leaf())


def test_a_chain_is_not_unrolled_at_once(monkeypatch):
    from backhaul.remade import Made

    made: list[weakref.ref[UntypedStorage]] = []
    peaks: list[int] = []

    def fill(self: Made, storage: UntypedStorage) -> None:
        real(self, storage)
        made.append(weakref.ref(storage))
        peaks.append(sum(each() is not None for each in made))

    real = Made.fill
    monkeypatch.setattr(Made, "fill", fill)
    managed(chain(60), {"*": "offload"}, leaf())
    assert max(peaks) < 30


# Wrappers


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, {""}),
        ({"*": "save"}, {""}),
        ({"*.norm": "recompute"}, {"", "layers.0.norm", "layers.1.norm"}),
        ({"layers.0": "offload"}, {"", "layers.0"}),
        ({"layers.0.act": "save", "layers.0": "recompute"}, None),
        ({"layers.0.act": "save", "layers": "offload"}, {"", "layers.0", "layers.0.act", "layers.1"}),
        ({"*": "offload"}, {"", "layers.0", "layers.1"}),  # blocks have keys of their own, so that a step is recognized
    ],
)
def test_modules_that_no_rule_needs_are_not_wrapped(plan, expected):
    model = build()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    if expected is None:
        with pytest.raises(ValueError, match="again as a whole"):
            apply(model, plan)
    else:
        with apply(model, plan):
            assert {name for name, module in model.named_modules() if wrapper_of(module) is not None} == expected
            assert {name for name, module in model.named_modules() if set(module.__dict__) != before[name]} == expected
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def scope_us(num_calls: int = 2000) -> float:
    """Return the microseconds that entering and leaving a scope takes of this process: the least of several runs, less a plain call."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Code(lambda x: x)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(num_calls):
                self.inner(x)
            return x

    model = Calls()
    model.train()

    def seconds() -> float:
        begin = time.process_time()
        model(X)
        return time.process_time() - begin

    plain = min(seconds() for _ in range(5))
    with apply(model, {"inner": "offload"}):
        return (min(seconds() for _ in range(5)) - plain) / num_calls * 1e6


@pytest.mark.filterwarnings("ignore:backhaul offloaded 0")
def test_entering_and_leaving_a_scope_takes_microseconds():
    assert scope_us() < 40  # 10 on a quiet machine is what is asked for; benchmarks say


# What is refused


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (nn.ModuleList([nn.Linear(2, 2)]), {"*": "save"}, "ModuleList"),
        (nn.Linear(2, 2), {"*": "drop"}, "'drop'"),
        (nn.Linear(2, 2), {"*": None}, "None"),
        (nn.Sequential(nn.Linear(2, 2)), {"layers.*": "save"}, r"'layers.\*' matches no module"),
        (nn.Sequential(nn.Linear(2, 2)), {"*": "save", "0": "offload"}, "comes too late"),
        (nn.Sequential(nn.Linear(2, 2)), {"*": bh.Recompute(keep_outputs=("gate",))}, "keep_outputs has 'gate'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_leaves_nothing(model, plan, message):
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        bh.apply(model, plan, tier="disk")
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_a_tier_that_cannot_be_opened_leaves_nothing(monkeypatch):
    def no_room(*_: object) -> None:
        raise OSError("no room")

    model = build()
    monkeypatch.setattr("backhaul.tiers.disk.Disk.__init__", no_room)
    with pytest.raises(OSError, match="no room"):
        apply(model, {"layers.0": "offload", "layers.1": bh.Offload(tier="disk")})
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_a_plan_that_was_made_for_another_model_is_refused():
    from backhaul.plans import Fingerprint

    names = ["", *(f"layers.{number}" for number in range(3))]
    with pytest.raises(ValueError, match="made for another model"):
        apply(build(), bh.Plan({"*": "save"}, model=Fingerprint.of(names)))


def test_a_model_of_which_a_part_is_managed_is_refused_by_the_name_of_that_part():
    model = build()
    with apply(model.layers[1], {"*": "offload"}), pytest.raises(ValueError, match=r"'layers\.1' is managed by a handle already"):
        apply(model, {"*": "offload"})


def test_a_module_with_two_names_goes_by_the_first():
    shared = nn.GELU()
    model = nn.Sequential(without_recipe(), shared, without_recipe(), shared, without_recipe())
    tier, stats = managed(model, {"1": "recompute", "*": "offload"}, leaf())
    assert tier.bytes_of("store") == 2 * NUM_BYTES  # both calls are units
    assert stats.offloaded_bytes == 2 * NUM_BYTES


def test_a_rule_for_the_second_name_of_a_module_is_told_the_first():
    shared = nn.GELU()
    with pytest.raises(ValueError, match="'1'"):
        apply(nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared), {"3": "recompute"})


def saves_once() -> nn.Module:
    """Return a module that saves one tensor, which no recipe makes."""
    return Code(lambda x: x.cumsum(0).cos())


class Parts(nn.Module):
    """Holds modules that others call, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.act = saves_once()


class CallsParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Parts()

    def forward(self, x: Tensor) -> Tensor:
        return self.body.act(x)


@pytest.mark.parametrize(("rules", "stays"), [({"body": "save", "*": "offload"}, True), ({"body": "offload"}, False)])
def test_a_rule_for_a_module_without_a_forward_is_about_its_parts(rules, stays):
    tier, stats = managed(CallsParts(), rules, leaf())
    assert stats.kept_by_reason.get("save", 0) == (NUM_BYTES if stays else 0)
    assert tier.bytes_of("store") == (0 if stays else NUM_BYTES)


def test_a_shared_module_goes_by_its_first_name_where_it_is_called_by_its_second():
    shared = saves_once()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    tier, stats = managed(model, {"0": "save", "1": "offload"}, leaf())
    assert not tier.bytes_of("store")
    assert stats.kept_by_reason["save"] == 2 * NUM_BYTES
