"""Looking on while a module's parts run, and telling two values apart.

Covers: which part of a module is running, handing what parts return to somebody who may change it; a fingerprint of a tensor.
Does not cover: what is done with any of it (recomputing.py).
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backhaul import _torch
from backhaul.interrupts import Around
from backhaul.kinds import why_it_stays


class Watching:
    """Follows some modules as they run in this thread.

    Args:
        names: the modules, and what to call them.
        began, ended: called with a module's name; ``ended`` also gets what the module returned.
    """

    def __init__(self, names: Mapping[nn.Module, str], began: Callable[[str], None], ended: Callable[[str, Any], None]) -> None:
        self.names = names
        self.began = began
        self.ended = ended
        self.thread = threading.get_ident()

    def put_around(self, around: Around) -> None:
        """Have it done around a call."""
        for module in self.names:
            before, after = _torch.forward_hooks_of(module)
            around.add(partial(before.__setitem__, self, self._before), partial(before.pop, self, None))
            around.add(partial(after.__setitem__, self, self._after), partial(after.pop, self, None))
            around.add(partial(after.move_to_end, self, last=False))  # what other hooks make of what is returned, they make again

    def _before(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.began(self.names[module])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.ended(self.names[module], output)


# Odd numbers with well-spread bits, as splitmix64 uses them.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


def is_workspace(tensor: Tensor) -> bool:
    """Say whether a saved tensor is the workspace of a kernel, as oneDNN's and cuDNN's LSTM have it, not all of which need be written."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


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
