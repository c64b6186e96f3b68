"""What flow.py knows of one blob and of one frame.

Covers: the states of a blob, its places in this step and in the learned one.
Does not cover: what is decided about it (flow.py).
"""

import enum

from backhaul.course import LAST
from backhaul.steps import Key

STALE = LAST + 1  # the rank of what is not to be released at all


class BlobState(enum.Enum):
    """Where the bytes of a blob are."""

    RESIDENT = enum.auto()  # the device tensor is the only copy
    COPYING_OUT = enum.auto()  # d2h issued, perhaps ended; the device tensor is still there
    RELEASED = enum.auto()  # only the tier holds the bytes
    COPYING_IN = enum.auto()  # h2d issued, perhaps ended, and not used since
    RELOADED = enum.auto()  # used since it came back; the tier still holds the bytes, so a release needs no copy
    KEPT = enum.auto()  # on the device, and never moved


RESIDENT, COPYING_OUT, RELEASED, COPYING_IN, RELOADED, KEPT = BlobState  # attributes of an enum are slow to look up, and events are many


class FlowBlob:
    """One blob: its state, and its places in this step and in the learned one."""

    __slots__ = ("ends", "following", "frame", "item", "loose", "name", "num_bytes", "num_needs", "place", "rank", "state", "token")

    def __init__(self, token: int, num_bytes: int) -> None:
        self.token = token
        self.num_bytes = num_bytes
        self.state = KEPT
        self.name: tuple[int, Key] = (-1, None)
        self.frame: FlowFrame | None = None
        self.place = 0  # in the order of saving in its frame
        self.item = -1  # in the step being recorded; -1: not recorded
        self.following = -1  # the same in the learned step; -1: unknown there
        self.num_needs = 0
        self.rank = STALE  # the least rank is released first
        self.loose = False  # movable, and no schedule says when it leaves
        self.ends = 0.0  # when its copy to the tier should have ended, in ms of the schedule


class FlowFrame:
    """One forward: its number in the step, and its movable blobs in the order of saving."""

    __slots__ = ("blobs", "ordinal", "small_bytes")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.blobs: list[FlowBlob] = []
        self.small_bytes = 0
