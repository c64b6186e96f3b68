"""Interrupts at every place of backhaul's own code at which one may come.

Covers: counting those places, and raising ``KeyboardInterrupt`` at one of them.
Does not cover: which frames count (the tests say), or what must hold afterwards.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import backhaul as bh

PACKAGE = os.path.dirname(bh.__file__) + os.sep
FINALIZERS = {"__del__", "<genexpr>"}  # Python itself swallows what is raised there


def ours(frame: FrameType | None) -> bool:
    """Say whether a frame runs backhaul's code. The tier that records is none of a user's."""
    path = frame.f_code.co_filename if frame is not None else ""
    return path.startswith(PACKAGE) and not path.endswith("testing.py")


@contextmanager
def interrupted_at(number: int, counts: Callable[[FrameType], bool]) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the ``number``-th place where the interpreter may deliver a signal, in frames that count.

    That is, as a function begins or as a call of C returns. What is yielded holds the number of places so far.
    """
    count = [0]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or not counts(frame):
            return
        count[0] += 1
        if count[0] == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)
