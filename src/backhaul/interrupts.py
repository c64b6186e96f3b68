"""Doing something around a call and undoing it, whatever interrupts.

Covers: [Note: Interrupts].
Does not cover: what has to be done (replaying.py, rerunning.py, watching.py).

[Note: Interrupts]
Python delivers KeyboardInterrupt where a function of Python begins, where a loop goes round and where a call returns. So a context manager
written in Python, as torch's are, may never get to the first line of its ``__exit__``, and what it should have put back stays as it is for
the rest of the process. Here all that is to be done is a list of functions of C. One call of C runs the list, so that nothing comes between
two of them; another, the first thing in a ``finally``, undoes it.
"""

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Step = Callable[[], object]  # a function of C, or a partial of one

_call = operator.methodcaller("__call__")
_exhaust = deque[object](maxlen=0).extend


class Around:
    """What to do before a call, and to undo after it in the opposite order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.undoing: list[Step] = []

    def add(self, step: Step, undo: Step | None = None) -> None:
        """Add a step that does not fail, and what undoes it."""
        self.steps.append(step)
        if undo is not None:
            self.undoing.append(undo)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``function`` amid all that has been added."""
        do, undo = map(_call, self.steps), map(_call, reversed(self.undoing))
        try:
            _exhaust(do)
            return function(*args, **kwargs)
        finally:
            _exhaust(undo)
