"""Looking on while a module's parts run, and telling two values apart.

Covers: which part of a module is running, handing what parts return to somebody who may change it; a fingerprint of a tensor.
Does not cover: what is done with any of it (recomputing.py).
"""

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from backhaul.kinds import why_it_stays


class Watching:
    """A context that follows some modules as they run in this thread.

    Args:
        names: the modules, and what to call them.
        began, ended: called with a module's name; ``ended`` also gets what the module returned.
    """

    def __init__(self, names: Mapping[nn.Module, str], began: Callable[[str], None], ended: Callable[[str, Any], None]) -> None:
        self.names = names
        self.began = began
        self.ended = ended
        self.thread = threading.get_ident()
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for module in self.names:
            self.handles.append(module.register_forward_pre_hook(self._before))
            self.handles.append(module.register_forward_hook(self._after, prepend=True))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.began(self.names[module])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.ended(self.names[module], output)


# Odd numbers with well-spread bits, as splitmix64 uses them.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def fingerprint(tensor: Tensor) -> int | None:
    """Return a number that all bytes of a tensor, their order included, go into; ``None`` for a tensor that has no plain bytes.

    Worked out on the tensor's device, so that gigabytes need not cross the link. Synchronizes.
    """
    if why_it_stays(tensor) or not tensor.numel():
        return None
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        words = torch.nn.functional.pad(content, (0, -content.numel() % 8)).view(torch.int64)
        mixed = (words ^ (torch.arange(words.numel(), device=words.device) * _SPREAD)) * _MIX
        return int(((mixed ^ (mixed >> 29)) * _SPREAD).sum())
