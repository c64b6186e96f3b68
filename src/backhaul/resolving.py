"""What the rules of a plan mean for the modules of one model.

Covers: which rule decides about a module ([Note: Rules]), units of recompute, and the rules that are refused.
Does not cover: what a glob matches (globs.py), or what becomes of a storage that several modules save (engine.py).

[Note: Rules]
A rule covers the modules that its glob matches and everything inside them. Of the rules that cover a module the first decides; where there
is none, the default. The outermost module that is to be recomputed is a *unit*: it is run again as a whole. What is inside belongs to it: a
rule that wants a part of a unit saved or offloaded is refused rather than ignored. So is a rule that decides about no module.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from backhaul.actions import Action, Recompute, Rule
from backhaul.globs import closest, collapse, matches

LONG = 80  # characters of a glob that a message repeats


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The meaning of a plan for one model. Modules go by their names, in the order of ``named_modules()``."""

    actions: Mapping[str, Action]  # of every module; inside a unit, the unit's
    units: tuple[str, ...]  # run again as a whole
    kept: Mapping[str, tuple[str, ...]]  # by unit that keeps any: the modules inside whose outputs are saved
    boundaries: tuple[str, ...]  # whose action is not that of the module around: these need a wrapper, and, where frames begin, the roots
    matched: Mapping[str, tuple[str, ...]]  # by glob: the modules that it matches itself and that its rule decides about
    decided_by: Mapping[str, str | None]  # the glob of the rule that decides; None is the default


def resolve(rules: Sequence[Rule], default: Action, names: Sequence[str], containers: Collection[str]) -> Resolved:
    """Apply rules to the modules of a model; ``Plan.resolve`` says what is what."""
    callers = _callers(names, containers)
    deciders = _deciders(rules, callers)
    busy = set(deciders.values())
    for idle in rules:
        if idle not in busy:
            raise ValueError(_why_idle(idle, deciders))
    actions: dict[str, Action] = {}
    unit_of: dict[str, str] = {}
    for name, rule in deciders.items():
        caller, action = callers[name], default if rule is None else rule.action
        unit = None if caller is None else unit_of.get(caller)
        if unit is not None:
            if rule is not None and action not in (actions[unit], Recompute()):
                raise ValueError(_contradiction(rule, name, unit, deciders[unit]))
            action = actions[unit]
        elif isinstance(action, Recompute) and name not in containers:
            unit = name
        if unit is not None:
            unit_of[name] = unit
        actions[name] = action
    units = tuple(name for name, unit in unit_of.items() if name == unit)
    changes = (name for name, caller in callers.items() if caller is not None and actions[name] != actions[caller])
    return Resolved(
        actions=actions,
        units=units,
        kept=_kept({unit: actions[unit] for unit in units}, unit_of),
        boundaries=tuple(name for name in changes if name not in containers),
        matched={rule.glob: tuple(name for name, each in deciders.items() if each is rule and matches(rule.glob, name)) for rule in rules},
        decided_by={name: None if rule is None else rule.glob for name, rule in deciders.items()},
    )


def _parent(name: str, known: Collection[str]) -> str | None:
    """Return the innermost module of ``known`` that contains ``name``."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None


def _callers(names: Sequence[str], containers: Collection[str]) -> dict[str, str | None]:
    """Return, for each module, the innermost one around it that can be called."""
    callers: dict[str, str | None] = {}
    for name in names:
        parent = _parent(name, callers)
        callers[name] = callers[parent] if parent is not None and parent in containers else parent
    return callers


def _deciders(rules: Sequence[Rule], names: Collection[str]) -> dict[str, Rule | None]:
    """Return, for each module, the first rule that covers it."""
    numbers: dict[str, int] = {}
    for name in names:
        parent = _parent(name, numbers)
        bound = len(rules) if parent is None else numbers[parent]
        numbers[name] = next((number for number in range(bound) if matches(rules[number].glob, name)), bound)
    return {name: rules[number] if number < len(rules) else None for name, number in numbers.items()}


def _kept(units: Mapping[str, Action], unit_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    globs = {unit: action.keep_outputs for unit, action in units.items() if isinstance(action, Recompute) and action.keep_outputs}
    inside: dict[str, list[str]] = {unit: [] for unit in globs}
    for name, unit in unit_of.items():
        if unit in inside and name != unit:
            inside[unit].append(name)

    def picks(glob: str, unit: str, name: str) -> bool:  # by its name from the root or from the unit
        return matches(glob, name) or matches(glob, name.removeprefix(f"{unit}."))

    kept = {unit: tuple(name for name in names if any(picks(glob, unit, name) for glob in globs[unit])) for unit, names in inside.items()}
    for unit, wanted in globs.items():
        for glob in wanted:
            if not any(picks(glob, other, name) for other, names in kept.items() for name in names):
                hint = _hint(glob, [name for names in inside.values() for name in names])
                raise ValueError(f"keep_outputs has {glob!r}, which matches no module inside {unit!r}{hint}")
    return {unit: names for unit, names in kept.items() if names}


def _why_idle(rule: Rule, deciders: Mapping[str, Rule | None]) -> str:
    hits = [name for name in deciders if matches(rule.glob, name)]
    if not hits:
        return f"rule {_brief(rule.glob)} matches no module of this model{_hint(rule.glob, list(deciders))}"
    earlier = dict.fromkeys(other.glob for name in hits if (other := deciders[name]) is not None)
    return (
        f"rule {_brief(rule.glob)} comes too late: all that it matches ({_list(list(collapse(hits)))}) is covered by "
        f"{_list(list(earlier))} before it; put it before that, or remove it"
    )


def _contradiction(rule: Rule, name: str, unit: str, outer: Rule | None) -> str:
    around = "the default" if outer is None else f"rule {_brief(outer.glob)}"
    where = repr(unit) if unit else "the model"
    if isinstance(rule.action, Recompute):
        advice = "move its keep_outputs there"
    else:
        advice = f"to save what it returns write bh.Recompute(keep_outputs=({rule.glob!r},)) there"
    return (
        f'rule {_brief(rule.glob)} says "{rule.action}" for {name!r}, but {around} runs {where}, which contains it, again as a '
        f"whole; {advice}, or choose smaller units, or remove one of the two"
    )


def _brief(glob: str) -> str:
    return repr(glob if len(glob) <= LONG else f"{glob[: LONG - 3]}...")


def _hint(glob: str, names: Sequence[str]) -> str:
    close = closest(glob, names)
    return f" (closest: {_list(close)})" if close else ""


def _list(texts: Sequence[str]) -> str:
    return ", ".join(map(_brief, texts[:3])) + (", ..." if len(texts) > 3 else "")
