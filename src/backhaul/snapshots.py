"""Whether a module has changed what it was called with.

Covers: what the parts of an argument are: of an object its attributes, of an array its bytes, of a tensor its version.
Does not cover: lists and dicts of arguments, of which a second run gets copies as they were (parts.py).

What is looked at has an end: below ``DEEPEST`` levels, after ``MOST`` parts, at objects of Python's and torch's own kinds, such as a logger
(they remember things all the time, and mean nothing by it), at modules that an argument refers to, in what a function refers to other than
plain values and containers, and where looking is an error. There an object counts as unchanged as long as it is the same one.
"""

import contextlib
import functools
import hashlib
import io
import pickle
import random
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from backhaul import _torch

DEEPEST = 4
MOST = 10_000

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, deque, dict, Set, bytearray)


def is_iterator(value: Any) -> bool:
    """Say whether a value gives what it has once: a second run would go on where the first one has ended."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def may_change(value: Any) -> bool:
    """Say whether an argument is one that a module could write to, so that nothing else will tell."""
    return not isinstance(value, (*_PLAIN, Tensor, torch.Generator, MethodType, BuiltinFunctionType, ModuleType))


class Snapshot:
    """What an argument was. Keeps no tensor alive that the argument has let go."""

    def __init__(self, value: Any) -> None:
        self._parts = dict(_Walk().parts(value, "", 0))

    def changed(self, value: Any) -> str:
        """Return the name of a part that is another one now; "" if there is none."""
        then, now = self._parts, dict(_Walk().parts(value, "", 0))
        names = [name for name in (then | now) if name not in now or name not in then or then[name] != now[name]]
        innermost = (name for name in names if not any(other.startswith(name) for other in names if other != name))
        return "" if not names else next(innermost).removeprefix(".") or "content"


class _Same:
    """Equal to another one of the same object, which it keeps alive only where it has to; of a tensor, if it has not been written."""

    def __init__(self, value: Any) -> None:
        self.version = _torch.version_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0
        self.value: Callable[[], Any]
        try:
            self.value = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        value = self.value()
        return isinstance(other, _Same) and value is not None and value is other.value() and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


class _Walk:
    """One look at an argument."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}  # by id, and alive as long
        self.num = 0

    def parts(self, value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the names of the parts, and what can be compared of each."""
        self.num += 1
        if isinstance(value, _PLAIN):
            yield name, (type(value), value)
            return
        inside = None
        if depth <= DEEPEST and self.num <= MOST and id(value) not in self.seen:
            with contextlib.suppress(Exception):  # of the code behind a strange object's attributes
                inside = self._inside(value, depth)
        self.seen[id(value)] = value
        if inside is None:
            yield name, _Same(value)
        elif isinstance(inside, bytes):
            yield name, inside
        else:
            yield name, (type(value), len(inside))
            for part, each in inside.items():
                yield from self.parts(each, f"{name}{part}", depth + 1)

    def _inside(self, value: Any, depth: int) -> "dict[str, Any] | bytes | None":
        """Return what a value consists of, by name, or all of it as bytes; ``None`` for one that just is."""
        if isinstance(value, Tensor):
            return None
        if isinstance(value, nn.Module):
            return None if depth else _attributes_inside(value)
        if isinstance(value, functools.partial):
            return {".args": value.args, ".keywords": value.keywords}
        if isinstance(value, dict):  # no other mapping, which may make its values as it is asked for them
            return {f"[{key!r}]" if isinstance(key, _PLAIN) else f"[key {index}]": each for index, (key, each) in enumerate(value.items())}
        if isinstance(value, (list, tuple, deque)):
            return {f"[{index}]": each for index, each in enumerate(value)}
        if isinstance(value, Set):
            return "\n".join(sorted(repr(each) if isinstance(each, _PLAIN) else str(id(each)) for each in value)).encode()
        if (state := _state_of_generator(value)) is not None:
            return pickle.dumps(state)
        if isinstance(value, FunctionType):
            return _closure(value) if not depth else None
        if (content := _bytes(value)) is not None:
            return content
        return None if _is_of_a_library(value) else _attributes(value)


# Of a module: those inside are looked at anyway, sharding replaces parameters, hooks and wrappers come and go.
_WRAPPERS = {"forward", "_compiled_call_impl", "__getstate__", "_replicate_for_data_parallel"}
_NOT_LOOKED_AT = (nn.Module().__dict__.keys() - {"_buffers", "training"}) | _WRAPPERS


def _attributes_inside(module: nn.Module) -> dict[str, Any]:
    return {
        f".{name}.{attribute}".replace("..", "."): each
        for name, part in module.named_modules()
        for attribute, each in vars(part).items()
        if attribute not in _NOT_LOOKED_AT
    }


def _state_of_generator(value: Any) -> Any:
    """Return the state of one of Python's or NumPy's random number generators; ``None`` for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if not type(value).__module__.startswith("numpy.random"):
        return None
    if hasattr(value, "get_state"):
        return value.get_state()
    return getattr(getattr(value, "bit_generator", value), "state", None)


def _is_of_a_library(value: Any) -> bool:
    """Say whether an object is one of Python's or torch's own kinds, those apart that are mere bags of attributes."""
    library = type(value).__module__.partition(".")[0]
    return library == "torch" or (library in sys.stdlib_module_names and type(value) not in (SimpleNamespace, Namespace))


def _attributes(value: Any) -> dict[str, Any] | None:
    names = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    found = {f".{name}": getattr(value, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
    found |= {f".{name}": each for name, each in getattr(value, "__dict__", {}).items()}
    return found or None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _closure(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # not set as yet
            continue
        if isinstance(content, (*_PLAIN, *_CONTAINERS)):
            found[f".{name}"] = content
    return found


def _bytes(value: Any) -> bytes | None:
    """Return a digest of what a buffer holds, as of an array of NumPy's; ``None`` for what is none."""
    try:
        with memoryview(value) as view:
            return hashlib.blake2b(view.tobytes(), digest_size=16).digest()
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
