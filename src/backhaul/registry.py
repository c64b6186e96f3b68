"""Which blobs and frames are alive, without keeping any of them so.

Covers: finding the blob of a storage, and learning that blobs and frames are gone.
Does not cover: what follows from that (engine.py), or who keeps them alive (saved.py, [Note: Ownership]).

Finalizers append to ``grave`` and take no lock; ``drain`` does the rest. A garbage collection may end a frame before its blobs, so a frame
is over when both it and all blobs that were saved in it are gone. An interrupt may cut a finalizer short; ``sweep`` finds what it has not
told.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.storage import UntypedStorage

from backhaul.saved import Blob, Dead
from backhaul.scopes import Frame
from backhaul.stations import Station
from backhaul.tiers.base import Slot, Tier


class Steady:
    """A context that notes where an interrupt comes in the middle (engine.py, [Note: Interrupts])."""

    def __init__(self) -> None:
        self.shaken = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.shaken = True


@dataclass
class Record:
    """What is known of a blob, which it outlives by a moment."""

    num: int
    blob: "weakref.ref[Blob]"
    station: Station
    frame: int
    addresses: list[int] = field(default_factory=list)  # where the table has it
    slot: Slot | None = None
    tier: Tier | None = None  # of the slot


@dataclass
class _OpenFrame:
    frame: "weakref.ref[Frame]"
    blobs: set[int] = field(default_factory=set)  # those alive


class Registry:
    """All blobs and frames of an engine.

    Args:
        on_gone: told of each blob that is gone, and of the device memory that it left, if somebody may still read that.
        on_over: told of each frame that is over; it is no longer among ``frames`` then.
    """

    def __init__(self, on_gone: Callable[[Record, UntypedStorage | None], None], on_over: Callable[[int], None]) -> None:
        self.grave: deque[Dead | int] = deque()  # what finalizers append to
        self.records: dict[int, Record] = {}  # by number of the blob
        self.frames: dict[int, _OpenFrame] = {}
        self.table: dict[int, weakref.ref[Blob]] = {}  # by id of the storage; a blob knows whether it is really its own
        self._on_gone = on_gone
        self._on_over = on_over

    def open(self, frame: Frame) -> None:
        """Add a frame."""
        self.frames[frame.num] = _OpenFrame(weakref.ref(frame))

    def add(self, blob: Blob, storage: UntypedStorage, station: Station) -> Record:
        """Add a blob that lies in ``storage``."""
        record = self.records[blob.num] = Record(blob.num, weakref.ref(blob), station, blob.frame.num, tier=blob.tier)
        self.frames[record.frame].blobs.add(blob.num)
        self.locate(record, storage)
        return record

    def locate(self, record: Record, storage: UntypedStorage) -> None:
        """Note that the blob lies in ``storage`` now."""
        record.addresses.append(id(storage))
        self.table[id(storage)] = record.blob

    def find(self, storage: UntypedStorage) -> Blob | None:
        """Return the blob that lies in ``storage``, or lay there last."""
        reference = self.table.get(id(storage))
        blob = reference() if reference is not None else None
        return blob if blob is not None and blob.home() is storage else None

    def newest_frame(self) -> Frame | None:
        """Return the frame that was opened last, of those that exist."""
        return next((frame for opened in reversed(self.frames.values()) if (frame := opened.frame()) is not None), None)

    def drain(self) -> None:
        """Learn what is gone since the last call."""
        grave = self.grave
        while grave:
            item = grave[0]  # taken out afterwards: to bury twice does no harm, to be interrupted before would
            if isinstance(item, Dead):
                self._bury(item.num, item.storage)
            else:
                self._end(item)
            grave.popleft()

    def sweep(self) -> None:
        """Learn also what is gone without a word."""
        self.drain()
        for num, record in list(self.records.items()):
            if record.blob() is None:
                self._bury(num, None)
        for num in list(self.frames):
            self._end(num)

    def _bury(self, num: int, storage: UntypedStorage | None) -> None:
        record = self.records.get(num)
        if record is None:
            return
        for address in record.addresses:
            if self.table.get(address) is record.blob:
                del self.table[address]
        self._on_gone(record, storage)
        opened = self.frames.get(record.frame)
        if opened is not None:
            opened.blobs.discard(num)
        del self.records[num]
        self._end(record.frame)

    def _end(self, num: int) -> None:
        opened = self.frames.get(num)
        if opened is not None and not opened.blobs and opened.frame() is None:
            del self.frames[num]
            self._on_over(num)
