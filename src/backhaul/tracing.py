"""The one file of backhaul that Dynamo reads.

Covers: what stands in place of a block's ``forward`` while something larger is being compiled.
Does not cover: anything that happens at run time (scopes.py).

A compiled module is one scope, so a block inside one has none of its own. Its wrapper steps aside while Dynamo traces it, and Dynamo has to
read the function that does so; the rest of the package it must not look into.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backhaul import _torch


def unless_traced(call: Callable[..., Any], previous: Callable[..., Any] | None, module: "weakref.ref[nn.Module]") -> Callable[..., Any]:
    """Return ``call``, which is not there for Dynamo: it sees what ``call`` has replaced, ``previous`` or the class's own forward."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if previous is not None:
                return previous(*args, **kwargs)
            inner = module()
            return type(inner).forward(inner, *args, **kwargs)  # type: ignore[union-attr]
        return call(*args, **kwargs)

    _torch.skip_as_outermost(forward)
    return forward
