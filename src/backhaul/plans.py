"""Plans: an action for every module, as a value and as a file.

Covers: ``Plan``, the model that one was made for, JSON, and how a person reads and compares plans.
Does not cover: what rules mean for a model (resolving.py), how promises are kept (engine.py, recomputing.py), or which plan is best
(planning.py).
"""

import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul.actions import Action, Offload, Recompute, Rule, Save, action_of, from_fields, to_fields
from backhaul.globs import alternatives, collapse, pattern, similar
from backhaul.resolving import LONG, Resolved, resolve
from backhaul.sizes import format_bytes

__all__ = ["SCHEMA", "Action", "Fingerprint", "Offload", "Plan", "Recompute", "Resolved", "Rule", "Save"]

SCHEMA = 1


@dataclass(frozen=True)
class Fingerprint:
    """The modules of the model that a plan was made for: enough to know another one, and to say what differs."""

    num_modules: int
    modules: tuple[str, ...]  # names; those that differ in numbers alone are written as one

    @classmethod
    def of(cls, names: Iterable[str]) -> "Fingerprint":
        """Take it of the names of all modules."""
        names = dict.fromkeys(names)
        return cls(len(names), tuple(sorted(collapse(names))))

    def check(self, names: Iterable[str]) -> None:
        """Refuse another model."""
        other = Fingerprint.of(names)
        if other == self:
            return
        missing = [each for each in self.modules if each not in other.modules]
        added = [each for each in other.modules if each not in self.modules]
        told = [f"no {each!r} (closest: {', '.join(map(repr, similar(each, added))) or 'none'})" for each in missing[:3]]
        told = told or [f"also {each!r}" for each in added[:3]]
        raise ValueError(
            f"the plan was made for another model: that had {self.num_modules} modules, this has {other.num_modules}; this has "
            f"{', '.join(told)}; make the plan again for this model"
        )


@dataclass(frozen=True, init=False)
class Plan:
    """An action for every module of a model.

    Args:
        rules: globs over module names (globs.py, [Note: Globs]) and what to do with what is saved there: ``"save"``, ``"offload"``,
            ``"recompute"``, or an action that says more. A rule covers what it matches and everything inside; the first that does so
            decides.
        default: for what no rule covers.
        model: the model that the plan is made for, as a module or as its ``Fingerprint``; it is refused for others.
        rule_bytes: by glob, the bytes of saved tensors that fall under that rule in one frame, for whoever reads the plan.

    Raises:
        ValueError: for an unknown action, or a glob that cannot be read.

    >>> plan = Plan({"layers.1": "save", "*.norm": "recompute", "*.mlp": Offload(tier="disk")})
    >>> print(plan)
    action           rule  modules
    save                1  layers.1
    recompute           2  *.norm
    offload to disk     3  *.mlp
    save                   everything else
    """

    rules: tuple[Rule, ...]
    default: Action
    model: Fingerprint | None

    def __init__(
        self,
        rules: Mapping[str, Action | str],
        *,
        default: Action | str = "save",
        model: "Fingerprint | Any | None" = None,
        rule_bytes: Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(rules, Mapping):
            raise ValueError(f'a plan is a mapping from globs to actions, such as {{"*.mlp": "offload"}}, and not a {type(rules).__name__}')
        sizes = rule_bytes or {}
        for glob in rules:
            if not isinstance(glob, str):
                raise ValueError(f"rule {glob!r} is no glob over module names; write a string")
            pattern(glob)
        for glob in sizes:
            if glob not in rules:
                raise ValueError(f"rule_bytes has {glob!r}, which is no rule of the plan")
        made = tuple(Rule(glob, action_of(action, what=f"rule {glob!r}"), sizes.get(glob)) for glob, action in rules.items())
        object.__setattr__(self, "rules", made)
        object.__setattr__(self, "default", action_of(default, what="the default"))
        if model is not None and not isinstance(model, Fingerprint):
            from backhaul.naming import named_modules  # not above: plans need no torch, and who has a module has it

            model = Fingerprint.of(name for name, _ in named_modules(model))
        object.__setattr__(self, "model", model)

    def resolve(self, names: Iterable[str], *, containers: Collection[str] = ()) -> Resolved:
        """Say what the plan means for a model (resolving.py, [Note: Rules]).

        Args:
            names: of all modules, in the order of ``named_modules()``, without what wrappers put into them; ``""`` is the root.
            containers: those that are never called, such as a ``ModuleList``. A rule that matches one is about the modules in it.

        Raises:
            ValueError: for a rule that decides about no module, one that contradicts a unit around, or another model.

        >>> plan = Plan({"*.norm": "recompute"})
        >>> plan.resolve(["", "layer", "layer.norm", "layer.mlp"]).units
        ('layer.norm',)
        """
        unique = list(dict.fromkeys(names))
        if self.model is not None:
            self.model.check(unique)
        return resolve(self.rules, self.default, unique, containers)

    def to_json(self) -> str:
        """Return the plan as JSON, with a line for each rule."""
        rules = [
            {"modules": rule.glob, **to_fields(rule.action, what=f"rule {rule.glob!r}"), "bytes": rule.num_bytes} for rule in self.rules
        ]
        rules = [{name: value for name, value in fields.items() if value is not None} for fields in rules]
        default = json.dumps(to_fields(self.default, what="the default"))
        parts = [f'  "schema": {SCHEMA}', f'  "default": {default}', _lines_of("rules", rules, indent="  ")]
        if self.model is not None:
            modules = _lines_of("modules", self.model.modules, indent="    ")
            parts.append(f'  "model": {{\n    "num_modules": {self.model.num_modules},\n{modules}\n  }}')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what ``to_json``, or a person, has written."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the plan is not JSON: {error}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f'the plan has "schema": {json.dumps(schema)}, and this backhaul reads {SCHEMA}; make the plan again')
        _check(data, "the plan", required={"schema": int, "rules": list}, optional={"default": dict, "model": dict})
        rules: dict[str, Action] = {}
        sizes: dict[str, int] = {}
        for number, line in enumerate(data["rules"], start=1):
            what = f"rule {number}"
            _check(line, what, required={"modules": str, "action": str}, optional={"tier": str, "keep_outputs": list, "bytes": int})
            glob = line.pop("modules")
            if glob in rules:
                raise ValueError(f"{what} is about {glob!r}, as one before it is; remove one of them")
            if "bytes" in line:
                sizes[glob] = line.pop("bytes")
            rules[glob] = from_fields(line, what=f"{what} ({glob!r})")
        default = Save() if "default" not in data else from_fields(data["default"], what="the default")
        model = None
        if "model" in data:
            _check(data["model"], "model", required={"num_modules": int, "modules": list}, optional={})
            model = Fingerprint(data["model"]["num_modules"], tuple(sorted(map(str, data["model"]["modules"]))))
        return cls(rules, default=default, model=model, rule_bytes=sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file that a person can read, edit and compare."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def diff(self, other: "Plan | Mapping[str, Action | str]") -> str:
        """Say how plans differ: ``-`` is before what only this one says, ``+`` before what only ``other`` does, in the order of rules."""
        other = other if isinstance(other, Plan) else Plan(other)
        lines = difflib.unified_diff(self._lines(), other._lines(), n=1, lineterm="")
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@")) or "no difference"

    def __str__(self) -> str:
        """Return a table: rules by action, and with their place, since the first that matches decides."""
        rules = self._collapsed()
        rows = [("action", "rule", "modules", "bytes" if any(_size(rule) for _, rule in rules) else "")]
        for action in dict.fromkeys(str(rule.action) for _, rule in rules):
            word = action
            for place, rule in rules:
                if str(rule.action) == action:
                    first, *more = _lines_of_glob(rule.glob)
                    rows += [(word, place, first, _size(rule)), *(("", "", line, "") for line in more)]
                    word = ""
        rows.append((str(self.default), "", "everything else", ""))
        wide = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{action:{wide[0]}}  {place:>{wide[1]}}  {glob:{wide[2]}}  {size:>{wide[3]}}".rstrip() for action, place, glob, size in rows
        )

    def _collapsed(self) -> list[tuple[str, Rule]]:
        """Return the rules with their places. Neighbours with one action, whose globs differ in numbers alone, are one."""
        found: list[tuple[str, Rule]] = []
        start = 0
        while start < len(self.rules):
            action, end = self.rules[start].action, start
            while end < len(self.rules) and self.rules[end].action == action:
                end += 1
            run = self.rules[start:end]
            places = {rule.glob: place for place, rule in enumerate(run, start + 1)}
            for glob, members in collapse(places).items():
                sizes = [size for member in members if (size := self.rules[places[member] - 1].num_bytes) is not None]
                first, last = min(places[member] for member in members), max(places[member] for member in members)
                found.append((str(first) if first == last else f"{first}..{last}", Rule(glob, action, sum(sizes) if sizes else None)))
            start = end
        return found

    def _lines(self) -> list[str]:
        rules: list[str] = []
        for _, rule in self._collapsed():
            first, *more = _lines_of_glob(rule.glob)
            rules += [f"{first}: {rule.action}  {_size(rule)}".rstrip(), *(f"{line}: {rule.action}" for line in more)]
        model = [] if self.model is None else [f"made for {self.model.num_modules} modules:", *self.model.modules]
        return [*rules, f"everything else: {self.default}", *model]


def _size(rule: Rule) -> str:
    return "" if rule.num_bytes is None else format_bytes(rule.num_bytes)


def _lines_of_glob(glob: str) -> list[str]:
    """Return what a table shows for a glob: itself, or its parts where it is long."""
    return [glob] if len(glob) <= LONG else alternatives(glob)


def _lines_of(name: str, items: Sequence[Any], *, indent: str) -> str:
    """Return a JSON list as a field, one item a line."""
    inside = ",\n".join(f"{indent}  {json.dumps(item)}" for item in items)
    return f'{indent}"{name}": [\n{inside}\n{indent}]' if items else f'{indent}"{name}": []'


def _check(data: object, what: str, *, required: Mapping[str, type], optional: Mapping[str, type]) -> None:
    """Refuse fields that are unknown, missing, or of another type."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {json.dumps(data)}, and should be an object")
    known = {**required, **optional}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{what} has the unknown field {name!r}; it knows {', '.join(map(repr, known))}")
        if not isinstance(value, known[name]):
            raise ValueError(f"{what} has {json.dumps(value)} for {name!r}, which should be a {known[name].__name__}")
    for name in required:
        if name not in data:
            raise ValueError(f"{what} lacks the field {name!r}")
