"""The contract of a tier: where the bytes of offloaded tensors live.

Covers: what a tier promises ([Note: Tier contract]) and the values it hands out.
Does not cover: which bytes move and when (flow.py), or any one tier (host.py, disk.py).

[Note: Tier contract]
* ``store`` and ``load`` start a copy and return; they do not wait for it. On a device with streams the copy is ordered after everything
  that the calling thread's current stream holds at the time of the call. Where there are no streams a tier may copy at once or on a thread
  of its own.
* A ``Transfer`` is that copy as a value. ``wait`` orders what follows after it: on a device with streams the current stream waits and the
  host goes on; elsewhere the host waits. It raises what the copy raised, as often as it is asked.
* A tier keeps both ends of a copy alive until the copy has ended. ``Transfer.wait`` gives the source up at once, since whoever waited is
  ordered after it.
* ``load`` may be called any number of times, also before ``store`` has ended.
* ``free`` may be called while copies still touch the slot: the bytes are used again only after the last of them. Freeing twice is allowed.
  It is called by finalizers, which run anywhere, also while this thread holds a lock of the tier's: it appends to a ``collections.deque``
  and no more, and the bytes are given back when the tier is next used or asked for ``used_bytes``.
* A tier that has no room raises ``TierFull`` from ``store`` and is unchanged. An ``OSError`` of the medium may come from ``store`` or from
  ``wait``.
* Every method may be called from any thread.
"""

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # bytes; what vectorised kernels and the copy engine like, on the host and on the device


class TierFull(Exception):
    """A tier has no room for the bytes; the message says how many were asked for and how many there are."""


class Transfer(abc.ABC):
    """One copy on its way between a device and a tier."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Order what follows after this copy; raise what it raised."""

    def order(self) -> None:
        """Order what follows after this copy, as ``wait`` does, and keep the source alive until the copy has ended.

        For memory that goes back to the pool of another stream than the one that waits.
        """
        self.wait()

    @abc.abstractmethod
    def done(self) -> bool:
        """Say, without waiting, whether the copy has ended (well or not)."""


class Slot:
    """The bytes of one blob in a tier. Tiers derive from it to note where the bytes are."""

    __slots__ = ("num_bytes", "stored")

    num_bytes: int
    stored: Transfer  # the copy that filled the slot

    def __init__(self, num_bytes: int, stored: Transfer) -> None:
        self.num_bytes = num_bytes
        self.stored = stored


class Tier(abc.ABC):
    """A place for offloaded bytes ([Note: Tier contract])."""

    name: str  # one word for reports: "host", "disk"

    @abc.abstractmethod
    def store(self, source: "Tensor") -> Slot:
        """Start copying ``source`` (1-D, uint8, contiguous, not empty) into the tier. Raise ``TierFull`` where it does not fit."""

    @abc.abstractmethod
    def load(self, slot: Slot, target: "Tensor") -> Transfer:
        """Start copying the slot's bytes into ``target`` (1-D, uint8, contiguous, ``slot.num_bytes`` long)."""

    @abc.abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the slot's bytes back to the tier, without taking a lock ([Note: Tier contract])."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes held by slots that have not been freed."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """The most that ``used_bytes`` has been."""

    @property
    @abc.abstractmethod
    def capacity_bytes(self) -> int | None:
        """The most that ``used_bytes`` may become, or ``None`` where nothing limits it."""

    @property
    def rates_gbps(self) -> tuple[float, float] | None:
        """How fast the tier has been of late, into it and out of it, each by itself, in GB/s; ``None`` while that is not known."""
        return None

    @property
    def duplex_gbps(self) -> float | None:
        """How fast both ways have mostly been, added up, in GB/s; ``None`` while that is not known."""
        return None

    @property
    def pageable_bytes(self) -> int:
        """Bytes stored so far in host memory that could not be page-locked."""
        return 0

    def close(self) -> None:
        """Give everything back: memory, files, threads. Slots still in use stay readable until they are freed."""
