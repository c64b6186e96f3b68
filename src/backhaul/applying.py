"""What a plan means for the modules of one model: which of them get a wrapper, and with what duty.

Covers: names without what wrappers put into them, compiled modules, the modules that need no wrapper.
Does not cover: what rules mean (resolving.py), or what a wrapper does (scopes.py).
"""

from collections.abc import Callable, Collection, Iterator

from torch import nn

from backhaul import _torch
from backhaul.actions import Action, Offload
from backhaul.engine import Engine
from backhaul.globs import matches
from backhaul.plans import Plan, Resolved
from backhaul.recomputing import Site
from backhaul.scopes import Duty, Wrapper, blocks_of, clean_fqn
from backhaul.tiers.base import Tier

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called


def wrappers_for(
    engine: Engine, model: nn.Module, plan: Plan, tier_of: Callable[[str | Tier], Tier], *, verify: bool
) -> tuple[list[Wrapper], list[Tier]]:
    """Put a wrapper around each module where the plan needs one; return them, and the tiers that its actions name themselves."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(clean_fqn(name), module)  # of a wrapper and what it wraps, the wrapper is what is called
    containers = {name for name, module in modules.items() if isinstance(module, CONTAINERS)}
    _refuse_second_names(model, plan, modules)
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

    def duty_of(name: str) -> Duty:
        if name not in resolved.units:
            return duty_of_action(resolved.actions[name])
        around = [module for outer, module in modules.items() if name != outer and (not outer or name.startswith(f"{outer}."))]
        site = Site(name, modules[name], keep_outputs=resolved.kept.get(name, ()), verify=verify, around=around)
        return Duty(keep=True, site=site)

    engine.has_plan = True
    engine.verifies = verify
    engine.moves = bool(resolved.units) or any(isinstance(action, Offload) for action in resolved.actions.values())
    engine.default = duty_of_action(plan.default)
    duties = {name: duty_of(name) for name in _places(model, resolved, modules, compiled)}  # all of them before anything is changed
    wrappers = [Wrapper(engine, modules[name] if name else model, name, is_root=not name, duty=duty) for name, duty in duties.items()]
    return wrappers, strangers


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled as a whole."""
    return _torch.compiled_call(module) is not None or _torch.original_module(module) is not None


def _places(model: nn.Module, resolved: Resolved, modules: dict[str, nn.Module], compiled: Collection[str]) -> Iterator[str]:
    """Yield the names of the modules that need a wrapper, each once: outer ones first."""
    blocks = {clean_fqn(name) for name, _ in blocks_of(model)} if "" not in compiled else set()
    units = set(resolved.units)
    boundaries = set(resolved.boundaries)
    for name in modules:
        if not name or name in units or name in boundaries or (name in blocks and isinstance(resolved.actions[name], Offload)):
            yield name


def _refuse_second_names(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Refuse a rule for the second name of a module that the model has under two."""
    first = {id(module): name for name, module in modules.items()}
    names = ((clean_fqn(name), module) for name, module in model.named_modules(remove_duplicate=False))
    seconds = {name: first[id(module)] for name, module in names if name not in modules and id(module) in first}
    for rule in plan.rules if seconds else ():
        if not any(matches(rule.glob, name) for name in modules):
            for second in seconds:
                if matches(rule.glob, second):
                    raise ValueError(f"rule {rule.glob!r} names {second!r}, which is the same module as {seconds[second]!r}; use that name")


def _refuse_inside_compiled(resolved: Resolved, compiled: Collection[str]) -> None:
    for name in (*resolved.boundaries, *resolved.units):
        outer = next((each for each in compiled if name != each and (not each or name.startswith(f"{each}."))), None)
        if outer is not None and resolved.actions[name] != resolved.actions[outer]:
            rule = resolved.decided_by[name]
            raise ValueError(
                f"rule {rule!r} reaches {name!r}, inside {outer or 'the model'!r}, which is compiled and so is one scope; make a rule for "
                "the whole of it, or compile the modules inside one by one"
            )
