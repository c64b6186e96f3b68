"""What a plan means for the modules of one model: which of them get a wrapper, and with what duty.

Covers: names without what wrappers put into them, compiled modules, the modules that need no wrapper.
Does not cover: what rules mean (resolving.py), or what a wrapper does (scopes.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import nn

from backhaul.actions import Action, Offload
from backhaul.compiling import is_compiled, is_scripted, look_into_no_trace
from backhaul.engine import Engine
from backhaul.globs import matches
from backhaul.naming import blocks_of, named_modules
from backhaul.plans import Plan, Resolved
from backhaul.scopes import Duty, Wrapper
from backhaul.sites import Site
from backhaul.tiers.base import Tier


def wrappers_for(
    engine: Engine, model: nn.Module, plan: Plan, tier_of: Callable[[str | Tier], Tier], *, verify: bool
) -> tuple[list[Wrapper], list[Tier]]:
    """Put a wrapper around each module where the plan needs one; return them, and the tiers that its actions name themselves."""
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        modules.setdefault(name, module)  # of a wrapper and what it wraps, the wrapper is what is called
    _refuse_scripted(plan, model, modules)
    containers = {name for name, module in modules.items() if is_container(module)}
    seconds = _second_names(model, modules)
    _refuse_second_names(plan, modules, seconds)
    resolved = plan.resolve(modules, containers=containers)
    compiled = {name: module for name, module in modules.items() if is_compiled(module)}
    _refuse_inside_compiled(resolved, compiled)
    strangers: list[Tier] = []

    def duty_of_action(action: Action) -> Duty:
        if not isinstance(action, Offload):
            return Duty(keep=True)
        if isinstance(action.tier, Tier):
            strangers.append(action.tier)
        return Duty(tier=None if action.tier is None else tier_of(action.tier), recipes=True)

    units = set(resolved.units)
    _refuse_units_around_scripted({name: modules[name] for name in resolved.units})

    def duty_of(name: str) -> Duty:
        if name not in units:
            return duty_of_action(resolved.actions[name])
        around = [modules[outer] for outer in outer_names(name) if outer in modules]
        site = Site(name, modules[name], keep_outputs=resolved.kept.get(name, ()), verify=verify, around=around)
        look_into_no_trace(site)
        return Duty(keep=True, site=site)

    engine.has_plan = True
    engine.verifies = verify
    engine.moves = bool(resolved.units) or any(isinstance(action, Offload) for action in resolved.actions.values())
    engine.default = duty_of_action(plan.default)
    with_rules = {*resolved.boundaries, *units}
    duties = {
        name: duty_of(name) for name in _places(model, resolved, modules, compiled, set(seconds.values()))
    }  # all of them before anything is changed
    wrappers = [
        Wrapper(engine, modules[name] if name else model, name, is_root=not name, duty=duty, has_rule=name in with_rules)
        for name, duty in duties.items()
    ]
    root = next(wrapper for wrapper in wrappers if wrapper.is_root)
    root.rule_inside = next((name for name in duties if name and name in with_rules), "")
    with_rules_compiled = [name for name in compiled if name in with_rules and not inside(name, compiled)]
    root.unseen = {outer: name for name in with_rules_compiled for outer in outer_names(name)[1:]}
    return wrappers, strangers


def is_container(module: nn.Module) -> bool:
    """Say whether a module has no forward, and so is never called, as a ``ModuleList``; its parts are."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def outer_names(name: str) -> list[str]:
    """Return the names of what is around a module, the model's first.

    >>> outer_names("layers.0.norm")
    ['', 'layers', 'layers.0']
    """
    parts = name.split(".")
    return ["", *(".".join(parts[:end]) for end in range(1, len(parts)))] if name else []


def inside(name: str, others: Collection[str]) -> bool:
    """Say whether a module is inside one of the others."""
    return any(outer in others for outer in outer_names(name))


def may_widen(module: nn.Module) -> bool:
    """Say whether a module may be plain code that casts what it is given to twice the width, as norms do that are written out.

    Then that has to be seen, since it can be held instead of the cast (recipes.py). Modules of torch save what they are given.
    """
    return next(module.children(), None) is None and type(module).__module__.partition(".")[0] != "torch"


def _places(
    model: nn.Module, resolved: Resolved, modules: dict[str, nn.Module], compiled: Collection[str], shared: Collection[str]
) -> Iterator[str]:
    """Yield the names of the modules that need a wrapper, each once: outer ones first.

    A module that is also called under a second name needs one wherever that is, since it goes by its first.
    """
    blocks = {name for name, _ in blocks_of(model)} if "" not in compiled else set()
    units = set(resolved.units)
    boundaries = {*resolved.boundaries, *(name for name in shared if not is_container(modules[name]) and not inside(name, compiled))}
    for name, module in modules.items():
        moves = isinstance(resolved.actions[name], Offload) and not inside(name, compiled)
        if not name or name in units or name in boundaries or (moves and (name in blocks or may_widen(module))):
            yield name


def _second_names(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the first names of modules that the model has under two, by their others."""
    first = {id(module): name for name, module in modules.items()}
    names = named_modules(model, twice=True)
    return {name: first[id(module)] for name, module in names if name not in modules and id(module) in first}


def _refuse_second_names(plan: Plan, modules: dict[str, nn.Module], seconds: dict[str, str]) -> None:
    """Refuse a rule for the second name of a module that the model has under two."""
    for rule in plan.rules if seconds else ():
        if not any(matches(rule.glob, name) for name in modules):
            for second in seconds:
                if matches(rule.glob, second):
                    raise ValueError(f"rule {rule.glob!r} names {second!r}, which is the same module as {seconds[second]!r}; use that name")


def _refuse_scripted(plan: Plan, model: nn.Module, modules: Collection[str]) -> None:
    """Refuse a rule for nothing but what ``torch.jit`` has compiled, which has no name here."""
    scripted = [name for name, module in model.named_modules() if is_scripted(module)]
    for rule in plan.rules if scripted else ():
        if not any(matches(rule.glob, name) for name in modules):
            name = next((name for name in scripted if matches(rule.glob, name)), None)
            if name is not None:
                raise ValueError(f"rule {rule.glob!r} names {name!r}, which torch.jit has compiled; make a rule for what is around it")


def _refuse_units_around_scripted(units: Mapping[str, nn.Module]) -> None:
    """Refuse to run again what ``torch.jit`` has compiled: it is optimized between the first runs, and then need not do the same."""
    for name, unit in units.items():
        inside = next((part for part, module in unit.named_modules() if is_scripted(module)), None)
        if inside is not None:
            raise ValueError(
                f'{name or "the model"!r} cannot be under "recompute": torch.jit has compiled {inside!r} inside, and optimizes it between '
                "its first runs; put it under another rule, or only those modules inside it that have nothing to do with that"
            )


def _refuse_inside_compiled(resolved: Resolved, compiled: Collection[str]) -> None:
    for name in (*resolved.boundaries, *resolved.units):
        outer = next((each for each in outer_names(name) if each in compiled), None)
        if outer is not None and resolved.actions[name] != resolved.actions[outer]:
            rule = resolved.decided_by[name]
            raise ValueError(
                f"rule {rule!r} reaches {name!r}, inside {outer or 'the model'!r}, which is compiled and so is one scope; make a rule for "
                "the whole of it, or compile the modules inside one by one"
            )
