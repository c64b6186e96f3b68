"""Python's garbage collector, which has more patience while a forward pass waits for its backward.

Covers: the threshold of young collections, raised while frames are alive ([Note: Patience]).
Does not cover: who owns what (saved.py, [Note: Ownership]); nothing here is left to the collector.

[Note: Patience]
The collector looks at young objects whenever some 700 more have been made than dropped, and at all objects of the process once enough of
them have survived that. The promises of a step are tens of thousands of objects which live until backward, so each step had hundreds of
young collections and a full one, which takes tenths of a second in a process that has imported torch; and none of them found anything, as
promises die by reference counting. So while a frame is alive the threshold is higher, and afterwards it is what it was. A threshold and not
``gc.disable``, so that cycles of the user's own are still found where a graph is kept for long.
"""

import gc

PATIENT = 100_000  # objects made and not dropped before the next look at the young ones

alive: set[int] = set()  # frames, by number in the process; sets change in one step, so this needs no lock, which finalizers must not take
before: list[tuple[int, int, int]] = []  # the thresholds to go back to, if they have been changed


def frame_begins(token: int) -> None:
    """Have patience from now on, if the collector is on and has less."""
    alive.add(token)
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < PATIENT:
        before[:] = [thresholds]
        gc.set_threshold(PATIENT, *thresholds[1:])


# The end of a frame is in its finalizer (scopes.py), in place: no function of Python is called there, in which an interrupt would be lost.
