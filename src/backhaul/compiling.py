"""Modules that are compiled, and what that means where they are managed.

Covers: which modules are compiled; units that are compiled, or have compiled parts ([Note: Compiled afterwards]).
Does not cover: which rules are refused (applying.py), or what Dynamo sees of a wrapper (tracing.py).

[Note: Compiled afterwards]
What is compiled before it is managed has the wrapper around it. What is compiled afterwards has the wrapper inside: Dynamo runs it as it is
where it is the outermost frame, and compiles the module's own forward as the next one, which makes the same graph. But that frame is
compiled for no other reason than that Dynamo is at work in this thread. Where it runs again in the backward pass, Dynamo has to be put to
work again, or the second run would save other tensors than the first.

A wrapper that is not outermost is traced with what is around it, and that is one scope. If it only says which block is running it steps
aside. If a rule has put it there it must not, since the rule would be forgotten: it breaks the graph, and raises when it runs. Where it is
around what was compiled before, Dynamo does not see it. So the managed module looks, each time, at what is around those.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from backhaul import _torch

if TYPE_CHECKING:
    from backhaul.sites import Site


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled as a whole, in whichever way."""
    return (
        _torch.compiled_call(module) is not None
        or _torch.original_module(module) is not None
        or _torch.is_compiled_function(module.forward)
    )


def is_scripted(module: nn.Module) -> bool:
    """Say whether ``torch.jit`` has compiled a module. Its forward is not Python, so it cannot have a wrapper."""
    return isinstance(module, torch.jit.ScriptModule)


def first_compiled(model: nn.Module, names: Iterable[str]) -> str:
    """Return the first of these names of modules inside that is compiled as the model is now, or an empty string."""
    for name in names:
        part: object = model
        for attribute in name.split("."):
            part = getattr(part, attribute, None)
        if isinstance(part, nn.Module) and is_compiled(part):
            return name
    return ""


def look_into_no_trace(site: "Site") -> None:
    """Have neither modes nor hooks look into the parts of a unit that are compiled.

    Raises:
        ValueError: an output is to be kept that nobody will see.
    """
    unit = site.module()
    assert unit is not None
    compiled = [part for part in unit.modules() if is_compiled(part)]
    if compiled:
        _leave_alone(site, {inner for part in compiled for inner in _traced_with(part)})


def is_compiled_whole(site: "Site") -> None:
    """Take note that a unit is compiled from outside its wrapper.

    Raises:
        ValueError: as above.
    """
    if site.chooses is not False or site.watched:
        _leave_alone(site, set(site.watched))


def _traced_with(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose hooks are in the graph of a compiled one: all inside, and itself if its call is what is compiled."""
    return (inner for inner in part.modules() if inner is not part or _torch.compiled_call(part) is not None)


def _leave_alone(site: "Site", traced: Collection[nn.Module]) -> None:
    for part, name in list(site.watched.items()):
        if part in traced:
            if name in site.kept:
                raise ValueError(
                    f"keep_outputs of {site.fqn or 'the model'!r} names {name!r}, which is compiled as part of something larger and so "
                    "returns no tensor of its own; leave it out of keep_outputs, or compile the modules inside one by one"
                )
            del site.watched[part]
    site.chooses = False  # a mode would have compiled code compiled again
