"""The names of modules, as people write them.

Covers: names without what wrappers put into them, so that a plan fits a model before and after it is compiled, sharded or wrapped; the
blocks of a model.
Does not cover: which names a glob means (globs.py).
"""

from collections.abc import Iterator

from torch import nn

from backhaul import _torch
from backhaul.compiling import is_compiled, is_scripted

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # the only part of a wrapper, as torch calls it,
_PERHAPS_WRAPPED = "module"  # and as DDP and others do; where there are more parts, that is just a name
_ADAPTED = "base_model.model."  # what peft puts in front


def named_modules(root: nn.Module, *, twice: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``root.named_modules()`` does, under clean names, but for what ``torch.jit`` has compiled.

    A wrapper and what it wraps have the same name, the wrapper comes first.

    Args:
        root: whose own name is empty.
        twice: yield a module that has several names under each of them.

    >>> import torch
    >>> wrapped = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.ReLU()))
    >>> [(name, type(module).__name__) for name, module in named_modules(wrapped)]
    [('', 'DataParallel'), ('', 'Sequential'), ('0', 'ReLU')]
    """
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen and not twice:
            return
        seen.add(module)
        yield name.removeprefix(_ADAPTED), module
        for part, child in _torch.own_modules(module).items():
            if child is not None and not is_scripted(child):
                yield from walk(child, name_of_part(name, module, part))

    yield from walk(root, "")


def name_of_part(outer: str, module: nn.Module, part: str) -> str:
    """Return the name of a part of the module that is called ``outer``: the same, if all that the module does is to wrap it."""
    if part in _WRAPPED or (part == _PERHAPS_WRAPPED and len(_torch.own_modules(module)) == 1):
        return outer
    return f"{outer}.{part}" if outer else part


def blocks_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the uppermost elements of ModuleLists and Sequentials below ``root``, with their names. Does not look into compiled modules.

    What ``torch.jit`` has compiled is left out.
    """

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        for part, child in module.named_children():
            inner = name_of_part(name, module, part)
            if is_scripted(child):
                continue
            if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield inner.removeprefix(_ADAPTED), child
            elif not is_compiled(child):
                yield from walk(child, inner)

    yield from walk(root, "")
