"""Plans: which rule decides about which module, what is refused, and plans as files."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backhaul import presets
from backhaul.globs import alternatives, collapse, matches
from backhaul.plans import Action, Fingerprint, Offload, Plan, Recompute, Resolved, Save
from backhaul.testing import RecordingTier


def names_of(num_layers: int) -> list[str]:
    parts = ("", ".input_layernorm", ".self_attn", ".self_attn.q_proj", ".mlp", ".mlp.gate", ".mlp.experts", ".mlp.experts.act_fn")
    return ["", "model", "model.layers", *(f"model.layers.{layer}{part}" for layer in range(num_layers) for part in parts), "lm_head"]


NAMES = names_of(3)


def words(resolved: Resolved, *names: str) -> list[str]:
    return [resolved.actions[name].word for name in names]


class TestRules:
    def test_the_page_of_the_design_means_what_it_says(self) -> None:
        plan = Plan(
            {
                "model.layers.2.*": "save",
                "*.input_layernorm": "recompute",
                "*.mlp.experts.act_fn": "recompute",
                "*.mlp.experts": "offload",
            }
        )
        resolved = plan.resolve(NAMES)
        assert resolved.units == tuple(f"model.layers.{i}.{part}" for i in (0, 1) for part in ("input_layernorm", "mlp.experts.act_fn"))
        assert words(resolved, "model.layers.0.mlp.experts", "model.layers.2.mlp.experts", "model.layers.2.input_layernorm") == [
            "offload",
            "save",
            "save",
        ]
        assert resolved.decided_by["model.layers.2.input_layernorm"] == "model.layers.2.*"
        assert resolved.matched["*.mlp.experts"] == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")

    def test_what_no_rule_covers_is_saved(self) -> None:
        resolved = Plan({"*.mlp": "offload"}).resolve(NAMES)
        assert resolved.actions["lm_head"] == Save()
        assert resolved.decided_by["lm_head"] is None

    def test_the_default_may_be_another(self) -> None:
        resolved = Plan({"lm_head": "save"}, default="offload").resolve(NAMES)
        assert words(resolved, "", "model.layers.0.mlp", "lm_head") == ["offload", "offload", "save"]

    def test_a_rule_covers_everything_inside(self) -> None:
        resolved = Plan({"model.layers.1": "offload"}).resolve(NAMES)
        assert words(resolved, "model.layers.1.mlp.experts.act_fn", "model.layers.0.mlp") == ["offload", "save"]

    def test_a_star_crosses_dots_and_matches_the_root(self) -> None:
        assert Plan({"*": "offload"}).resolve(NAMES).matched["*"] == tuple(NAMES)

    def test_only_where_the_action_changes_a_wrapper_is_needed(self) -> None:
        boundaries = Plan({"model.layers.0.mlp.gate": "save", "*.mlp": "offload"}).resolve(NAMES).boundaries
        assert boundaries == ("model.layers.0.mlp", "model.layers.0.mlp.gate", "model.layers.1.mlp", "model.layers.2.mlp")
        assert Plan({"*": "offload"}).resolve(NAMES).boundaries == ()

    def test_another_tier_is_another_action(self) -> None:
        resolved = Plan({"*.gate": Offload(tier="disk"), "*.mlp": Offload(tier="host")}).resolve(NAMES)
        assert "model.layers.0.mlp.gate" in resolved.boundaries

    def test_a_list_of_modules_has_several_roots(self) -> None:
        resolved = Plan({"1.norm": "offload"}).resolve(["0", "0.norm", "1", "1.norm"])
        assert resolved.boundaries == ("1.norm",)


class TestUnits:
    def test_the_outermost_module_is_run_again(self) -> None:
        resolved = Plan({"*.act_fn": "recompute", "model.layers.0": "recompute"}).resolve(NAMES)
        assert resolved.units == ("model.layers.0", "model.layers.1.mlp.experts.act_fn", "model.layers.2.mlp.experts.act_fn")

    def test_what_is_inside_belongs_to_it_whatever_later_rules_say(self) -> None:
        resolved = Plan({"model.layers.0": "recompute", "*.input_layernorm": "offload"}).resolve(NAMES)
        assert words(resolved, "model.layers.0.input_layernorm", "model.layers.1.input_layernorm") == ["recompute", "offload"]

    @pytest.mark.parametrize("action", ["save", "offload"])
    def test_an_earlier_rule_for_a_part_of_it_is_refused_and_both_are_named(self, action: str) -> None:
        with pytest.raises(
            ValueError, match=r"'\*\.gate' says \"(save|offload)\" for 'model.layers.0.mlp.gate', but rule '\*\.mlp'"
        ) as caught:
            Plan({"*.gate": action, "*.mlp": "recompute"}).resolve(NAMES)
        assert "keep_outputs=('*.gate',)" in str(caught.value)

    def test_an_earlier_rule_is_refused_inside_a_default_unit_too(self) -> None:
        with pytest.raises(ValueError, match="but the default runs the model"):
            Plan({"*.gate": "save"}, default="recompute").resolve(NAMES)

    def test_outputs_to_keep_belong_to_the_unit(self) -> None:
        with pytest.raises(ValueError, match="move its keep_outputs there"):
            Plan({"*.mlp": Recompute(("*.gate",)), "model.layers.*": "recompute"}).resolve(NAMES)

    def test_kept_outputs_are_found_inside_each_unit_and_not_elsewhere(self) -> None:
        resolved = Plan({"*.[12].mlp": Recompute(keep_outputs=("*.gate", "*.mlp"))}).resolve([*NAMES, "model.layers.1.mlp.mlp"])
        assert resolved.kept == {
            "model.layers.1.mlp": ("model.layers.1.mlp.gate", "model.layers.1.mlp.mlp"),
            "model.layers.2.mlp": ("model.layers.2.mlp.gate",),
        }

    def test_outputs_to_keep_that_are_nowhere_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"keep_outputs has '\*.gat'.*closest: '\*.gate'"):
            Plan({"*.mlp": Recompute(("*.gat",))}).resolve(NAMES)

    def test_a_container_is_never_called_so_its_elements_are_the_units(self) -> None:
        resolved = Plan({"model.layers": "recompute"}).resolve(NAMES, containers={"model.layers"})
        assert resolved.units == resolved.boundaries == ("model.layers.0", "model.layers.1", "model.layers.2")

    def test_a_container_with_an_action_of_its_own_needs_no_wrapper_but_its_elements_do(self) -> None:
        resolved = Plan({"model.layers": "offload"}).resolve(NAMES, containers={"model.layers"})
        assert resolved.boundaries == ("model.layers.0", "model.layers.1", "model.layers.2")


class TestRefusals:
    @pytest.mark.parametrize(
        ("glob", "hint"),
        [
            ("input_layernorm", "'*.input_layernorm'"),
            ("*.input_layernrm", "'*.input_layernorm'"),
            ("*.MLP", "'*.mlp'"),
            ("model.layers.7.mlp", "'model.layers.{0..2}.mlp'"),
            ("module.model.layers.0", "'model.layers.0'"),
            ("*.lm_head", "'lm_head'"),
            ("zzz", "'"),
        ],
    )
    def test_a_rule_that_matches_nothing_is_refused_with_the_closest_names(self, glob: str, hint: str) -> None:
        with pytest.raises(ValueError, match="matches no module") as caught:
            Plan({glob: "save"}).resolve(NAMES)
        assert repr(glob) in str(caught.value)
        assert hint in str(caught.value).partition("closest: ")[2]

    def test_a_rule_that_comes_too_late_is_refused_in_other_words(self) -> None:
        with pytest.raises(ValueError, match=r"'\*\.gate' comes too late.*'model.layers.\{0..2\}.mlp.gate'.*covered by '\*\.mlp'"):
            Plan({"*.mlp": "offload", "*.gate": "save"}).resolve(NAMES)

    @pytest.mark.parametrize("action", ["sav", "", 3, None])
    def test_an_unknown_action_is_refused_with_the_rule_and_the_words(self, action: object) -> None:
        with pytest.raises(ValueError, match=r"'\*\.mlp'.*\"save\", \"offload\", \"recompute\""):
            Plan({"*.mlp": action})  # type: ignore[dict-item]

    @pytest.mark.parametrize("glob", ["a{b", "a}b", "[z-a]"])
    def test_a_glob_that_cannot_be_read_is_refused(self, glob: str) -> None:
        with pytest.raises(ValueError, match="glob"):
            Plan({glob: "save"})

    def test_what_is_no_plan_is_refused(self) -> None:
        for rules in ("*.mlp", [("*.mlp", "save")], {3: "save"}):
            with pytest.raises(ValueError, match=r"not a (str|list)|rule 3"):
                Plan(rules)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'b'"):
            Plan({"a": "save"}, rule_bytes={"b": 3})

    def test_options_of_actions_are_checked(self) -> None:
        with pytest.raises(ValueError, match="'ram'"):
            Offload(tier="ram")
        with pytest.raises(ValueError, match="keep_outputs"):
            Recompute(keep_outputs="*.gate")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (names_of(2), "no 'model.layers.{0..2}' (closest: 'model.layers.{0..1}'"),
            ([*NAMES, "extra"], "also 'extra'"),
            ([name.replace("mlp", "moe") for name in NAMES], "no 'model.layers.{0..2}.mlp' (closest: 'model.layers.{0..2}.moe'"),
        ],
    )
    def test_a_plan_for_another_model_is_refused_with_what_differs(self, names: list[str], told: str) -> None:
        plan = Plan({"*.mlp": "save"}, model=Fingerprint.of(NAMES))
        assert plan.resolve(NAMES).matched["*.mlp"]
        with pytest.raises(ValueError, match="made for another model") as caught:
            plan.resolve(names)
        assert told in str(caught.value)


class TestFiles:
    def test_a_plan_comes_back_from_its_file(self, tmp_path: Path) -> None:
        plan = Plan(
            {"*.norm": "recompute", "*.mlp": Recompute(("*.gate",)), "b": Offload("disk")},
            default="offload",
            model=Fingerprint.of(NAMES),
            rule_bytes={"b": 3},
        )
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan

    def test_a_rule_is_a_line(self) -> None:
        lines = Plan({"*.norm": "recompute", "b": Offload("disk")}, rule_bytes={"b": 3}).to_json().splitlines()
        assert '    {"modules": "b", "action": "offload", "tier": "disk", "bytes": 3}' in lines

    def test_the_order_of_rules_is_part_of_a_plan(self) -> None:
        assert Plan({"a": "save", "b": "offload"}) != Plan({"b": "offload", "a": "save"})

    def test_a_tier_object_does_not_fit_into_a_file(self, tmp_path: Path) -> None:
        plan = Plan({"*.mlp": Offload(RecordingTier())})
        with pytest.raises(ValueError, match=r"'\*\.mlp' offloads to a RecordingTier object"):
            plan.save(tmp_path / "plan.json")
        assert not (tmp_path / "plan.json").exists()

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"schema": 2}, "schema.*2.*reads 1"),
            ({"schema": None}, "schema"),
            ({"colour": "red"}, "unknown field 'colour'"),
            ({"rules": {}}, "'rules'"),
            ({"rules": [3]}, "rule 1 is 3"),
            ({"rules": [{"modules": "a"}]}, "rule 1 lacks the field 'action'"),
            ({"rules": [{"modules": "a", "action": "save", "byte": 3}]}, "rule 1 has the unknown field 'byte'"),
            ({"rules": [{"modules": "a", "action": "safe"}]}, "'safe'"),
            ({"rules": [{"modules": "a", "action": "save", "tier": "host"}]}, "'save' the option 'tier'"),
            ({"rules": [{"modules": "a", "action": "offload", "tier": "ram"}]}, "'a'.*'ram'"),
            ({"rules": [{"modules": "a", "action": "offload", "tier": 3}]}, "'tier'"),
            ({"rules": [{"modules": "a", "action": "save"}] * 2}, "rule 2 is about 'a'"),
            ({"default": {"action": "keep"}}, "the default.*'keep'"),
            ({"default": "save"}, "'default'"),
            ({"model": {"num_modules": 3}}, "model lacks the field 'modules'"),
        ],
    )
    def test_a_file_with_a_mistake_is_refused_with_its_path(self, tmp_path: Path, change: Mapping[str, object], told: str) -> None:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"schema": 1, "rules": [], **change}), encoding="utf-8")
        with pytest.raises(ValueError, match=told) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("text", ["", "[1]", '{"rules": ['])
    def test_what_is_no_plan_at_all_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="the plan"):
            Plan.from_json(text)


class TestReading:
    def test_a_table_groups_rules_by_action_and_tells_their_order_and_bytes(self) -> None:
        layers = {f"model.layers.{layer}.mlp": "offload" for layer in range(47)}
        plan = Plan({"*.norm": "recompute", "lm_head": "save", "*.act_fn": "recompute", **layers}, rule_bytes=dict.fromkeys(layers, 2**30))
        assert str(plan).splitlines() == [
            "action      rule  modules                      bytes",
            "recompute      1  *.norm",
            "               3  *.act_fn",
            "save           2  lm_head",
            "offload    4..50  model.layers.{0..46}.mlp  47.0 GiB",
            "save              everything else",
        ]

    def test_a_long_glob_takes_a_line_for_each_of_its_alternatives(self) -> None:
        plan = Plan({"lm_head": "save", **presets.norms_and_activations}, rule_bytes=dict.fromkeys(presets.norms_and_activations, 2**30))
        lines = str(plan).splitlines()
        assert max(map(len, lines)) < 140
        assert [line.split()[0] for line in lines] == ["action", "save", "recompute", *(line.split()[0] for line in lines[3:6]), "save"]
        assert [line.endswith("1.0 GiB") for line in lines] == [False, False, True, False, False, False, False]
        assert "*{_act,_act_fn}" in lines[5]
        (removed,) = (line for line in Plan(presets.norms_and_activations).diff({}).splitlines() if "_act_fn}" in line)
        assert removed == "-*{_act,_act_fn}: recompute"

    def test_a_message_does_not_repeat_all_of_a_long_glob(self) -> None:
        with pytest.raises(ValueError, match="matches no module") as caught:
            Plan(presets.norms_and_activations).resolve(["", "layers", "layers.0"])
        assert len(str(caught.value)) < 200

    def test_rules_are_not_joined_across_one_that_decides_between_them(self) -> None:
        text = str(Plan({"a.0": "offload", "a.*": "save", "a.1": "offload"}))
        assert "a.{0..1}" not in text

    def test_a_difference_shows_what_only_one_of_them_says(self) -> None:
        before = Plan({"*.norm": "recompute", **{f"a.{layer}": "offload" for layer in range(4)}})
        after = Plan({"*.norm": "recompute", **{f"a.{layer}": "offload" for layer in range(3)}, "a.3": Offload("disk")}, default="offload")
        assert before.diff(after).splitlines() == [
            " *.norm: recompute",
            "-a.{0..3}: offload",
            "-everything else: save",
            "+a.{0..2}: offload",
            "+a.3: offload to disk",
            "+everything else: offload",
        ]
        assert before.diff(before) == "no difference"


class TestGlobs:
    @pytest.mark.parametrize(
        ("glob", "name", "expected"),
        [
            ("*.mlp", "model.layers.0.mlp", True),
            ("*.mlp", "mlp", False),
            ("{*.,}mlp", "mlp", True),
            ("*.MLP", "a.mlp", False),
            ("a.?", "a.1", True),
            ("a.?", "a.12", False),
            ("a.[0-2]", "a.1", True),
            ("a.[!0-2]", "a.1", False),
            ("a.[]x]", "a.]", True),
            ("a.{b,c.d}", "a.c.d", True),
            ("a.{b,c.d}", "a.c", False),
            ("a.{b{1,2},c}.x", "a.b2.x", True),
            ("a.{0..11}", "a.11", True),
            ("a.{0..11}", "a.12", False),
            ("a.{0..2,7}.b", "a.7.b", True),
            ("a.{0..2,7}.b", "a.3.b", False),
            ("a,b", "a,b", True),
            ("a.b", "axb", False),
            ("a+(b", "a+(b", True),
            ("a[0].{", "a[0].{", True),
        ],
    )
    def test_a_glob_matches(self, glob: str, name: str, expected: bool) -> None:
        assert matches(glob, name) is expected


def test_planning_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from backhaul import plans, presets; print(plans.Plan(presets.norms_and_activations))"
    assert "recompute" in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


PART = st.sampled_from(["a", "b", "0", "1", "2", "norm"])
PATHS = st.lists(st.lists(PART, min_size=1, max_size=4), min_size=1, max_size=12)
GLOBS = st.lists(st.sampled_from(["a", "b", "0", "{0..1}", "[ab]", "?", "*", "{a,b.0}"]), min_size=1, max_size=3).map(".".join)
ACTIONS = st.sampled_from([Save(), Offload(), Offload("disk"), Recompute(), Recompute(("*",))])
PLANS = st.builds(
    lambda rules, default, sizes: Plan(rules, default=default, rule_bytes=dict(zip(rules, sizes, strict=False))),
    st.dictionaries(GLOBS, ACTIONS, max_size=4),
    ACTIONS,
    st.lists(st.integers(0, 2**40), max_size=4),
)


def tree(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of a tree of modules, parents first."""
    return sorted(
        {".".join(path[:end]) for path in paths for end in range(len(path) + 1)}, key=lambda name: name.split(".") if name else []
    )


def around(name: str) -> list[str]:
    """Return the modules that contain one, the outermost first, and itself."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def by_the_book(plan: Plan, names: Sequence[str]) -> dict[str, Action] | None:
    """Say what is to be done, straight from the sentences of the design; ``None`` where the plan is to be refused."""
    first = {name: next((rule for rule in plan.rules if any(matches(rule.glob, outer) for outer in around(name))), None) for name in names}
    if {rule.glob for rule in plan.rules} - {rule.glob for rule in first.values() if rule is not None}:
        return None
    own = {name: plan.default if rule is None else rule.action for name, rule in first.items()}
    actions = {}
    for name in names:
        unit = next((outer for outer in around(name) if isinstance(own[outer], Recompute)), None)
        actions[name] = own[name] if unit is None else own[unit]
        if unit is not None and own[name] not in (own[unit], Recompute()):
            return None
    units = [
        name for name in names if isinstance(actions[name], Recompute) and not any(isinstance(own[o], Recompute) for o in around(name)[:-1])
    ]
    keeping = [unit for unit in units if actions[unit] == Recompute(("*",))]
    if keeping and not any(unit in around(name)[:-1] for unit in keeping for name in names):
        return None
    return actions


@st.composite
def plans_and_names(draw: st.DrawFn) -> tuple[Plan, list[str]]:
    """Draw a model, and rules of which most match something in it."""
    names = tree(draw(PATHS))
    close = st.sampled_from(names).flatmap(lambda name: st.sampled_from([name, f"*{name[1:]}", f"{name[:2]}*", f"{{{name},b}}"]))
    rules = draw(st.dictionaries(st.one_of(close, close, GLOBS), ACTIONS, max_size=3))
    return Plan(rules, default=draw(st.sampled_from([Save(), Save(), Offload(), Recompute()]))), names


@given(plans_and_names())
def test_rules_mean_what_the_design_says(drawn: tuple[Plan, list[str]]) -> None:
    plan, names = drawn
    expected = by_the_book(plan, names)
    if expected is None:
        with pytest.raises(ValueError, match=r"rule|keep_outputs"):
            plan.resolve(names)
        return
    resolved = plan.resolve(names)
    assert resolved.actions == expected
    recomputed = {name for name in names if isinstance(expected[name], Recompute)}
    assert list(resolved.units) == [name for name in names if name in recomputed and not recomputed & set(around(name)[:-1])]
    assert list(resolved.boundaries) == [name for name in names if name and expected[name] != expected[around(name)[-2]]]


@given(PLANS, st.one_of(st.none(), PATHS.map(tree).map(Fingerprint.of)))
def test_json_gives_back_the_same_plan(plan: Plan, model: Fingerprint | None) -> None:
    sizes = {rule.glob: rule.num_bytes for rule in plan.rules if rule.num_bytes is not None}
    plan = Plan({rule.glob: rule.action for rule in plan.rules}, default=plan.default, model=model, rule_bytes=sizes)
    assert Plan.from_json(plan.to_json()) == plan


ANY_GLOB = st.one_of(GLOBS, st.text(alphabet="a0.*?[]!-,\\ é\n", max_size=8))


@given(st.lists(st.tuples(ANY_GLOB, ACTIONS), max_size=6).map(dict))
def test_any_plan_can_be_read_as_a_table_and_compared(rules: dict[str, Action]) -> None:
    try:
        plan = Plan(rules)
    except ValueError:
        return
    assert str(plan).splitlines()[0].split() == ["action", "rule", "modules"]
    assert plan.diff(plan) == "no difference"
    assert Plan({}, default="offload").diff(plan) != "no difference"


BRACES = st.recursive(GLOBS | st.just(""), lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda some: f"{{{','.join(some)}}}"))


@given(BRACES, PATHS.map(tree))
@example("{0..1,a}", ["0", "1", "a", "0..1"])
@example("{a,b}.{a,b}", ["a", "a.b"])
def test_the_alternatives_of_a_glob_match_what_it_matches(glob: str, names: list[str]) -> None:
    for name in names:
        assert matches(glob, name) is any(matches(each, name) for each in alternatives(glob))


@given(PATHS, PATHS)
def test_names_written_as_one_are_a_glob_that_matches_these_and_no_others(some: list[list[str]], others: list[list[str]]) -> None:
    names = {".".join(path) for path in some}
    globs = collapse(sorted(names))
    assert sorted(name for members in globs.values() for name in members) == sorted(names)
    for name in names | {".".join(path) for path in others}:
        assert any(matches(glob, name) for glob in globs) is (name in names)
