"""The one file of backhaul that Dynamo reads.

Covers: what stands in place of a block's ``forward`` while something larger is being compiled.
Does not cover: anything that happens at run time (scopes.py), or why (compiling.py).

A compiled module is one scope, so a block inside one has none of its own. Its wrapper steps aside while Dynamo traces it, and Dynamo has to
read the function that does so; the rest of the package it must not look into.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backhaul import _torch


def unless_traced(
    call: Callable[..., Any], previous: Callable[..., Any] | None, module: "weakref.ref[nn.Module]", stays: Callable[[], bool]
) -> Callable[..., Any]:
    """Return ``call``, which is not there for Dynamo: it sees what ``call`` has replaced, ``previous`` or the class's own forward.

    ``stays`` runs while Dynamo traces where gradients are recorded; if it says so, ``call`` is there. It never is while ``torch.export``
    is at work: what it makes is not trained here.
    """
    is_there: Callable[[], bool] = torch.compiler.assume_constant_result(lambda: stays())

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and (torch.compiler.is_exporting() or not (torch.is_grad_enabled() and is_there())):
            if previous is not None:
                return previous(*args, **kwargs)
            return forward_of(module(), *args, **kwargs)
        return call(*args, **kwargs)

    _torch.skip_as_outermost(forward)
    return forward


def forward_of(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward. Of a module that comes with torch, Dynamo compiles this frame and not that of the forward."""
    return type(module).forward(module, *args, **kwargs)
