"""A disk as a tier.

Covers: where blobs go, copies on threads, and the way through host memory for a device ([Note: Through the host]).
Does not cover: files that cannot be left behind (segments.py), pinned memory and copy streams (host.py, lanes.py), or when bytes move
(flow.py).

[Note: Through the host]
Files are read and written from host memory. A tensor on a device goes through a ``PinnedHost``, its *stage*:
* store: d2h into the stage; a thread waits for that copy, writes, and frees the stage. ``wait`` orders after the d2h copy alone, so no host
  thread ever waits for the disk. If the write fails later, the device tensor may be gone: the stage is kept, and loads are served from it.
* load: a thread reads into the stage, then issues the h2d copy. The target belongs to the stream that was current when ``load`` was called,
  so the copy waits for an event recorded there and then. Whoever waits for the load blocks until the h2d copy has been issued.
* A stage full of bytes that wait to be written makes ``store`` raise ``TierFull``. ``load`` must not fail for that: it goes through
  pageable memory.

Price: bytes pass through the page cache, so some memory is dirty pages until the kernel writes them back; it slows writers when there are
too many.
"""

import collections
import ctypes
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backhaul.sizes import format_bytes, parse_bytes
from backhaul.tiers.base import Slot, Tier, TierFull, Transfer
from backhaul.tiers.rates import BusyRate
from backhaul.tiers.segments import Segment

if TYPE_CHECKING:
    from backhaul.tiers.host import HostSlot, PinnedHost

NUM_THREADS = 4
SEGMENT_BYTES = 4 << 30


class Disk(Tier):
    """Keep offloaded bytes in files below ``path`` ([Note: Nameless files] in segments.py).

    Args:
        path: a directory on the disk to use; default ``tempfile.gettempdir()`` (``TMPDIR``). Use a local NVMe disk.
        capacity: most bytes to hold, as a number or as text ("200GiB"); default: whatever is free on that disk.

    The bytes are private to this process and gone when it ends. A disk without room raises ``TierFull`` from ``store``; a write or read
    that fails is an ``OSError`` from ``Transfer.wait``. POSIX only.

    >>> disk = Disk()
    >>> slot = disk.store(torch.arange(5, dtype=torch.uint8))
    >>> target = torch.empty(5, dtype=torch.uint8)
    >>> disk.load(slot, target).wait()
    >>> target.tolist(), disk.num_files
    ([0, 1, 2, 3, 4], 1)
    >>> disk.free(slot)
    >>> disk.used_bytes, disk.num_files
    (0, 0)
    """

    name = "disk"

    def __init__(self, path: str | os.PathLike[str] | None = None, capacity: int | str | None = None) -> None:
        self.path = Path(tempfile.gettempdir() if path is None else path)
        if not self.path.is_dir() or not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"disk tier: {str(self.path)!r} is not a directory this process may write to; create it or pass another path")
        if filesystem_type(self.path) in ("tmpfs", "ramfs"):
            warnings.warn(
                f"disk tier: {str(self.path)!r} is a tmpfs, that is host memory and no disk; pass Disk(path=...) or set TMPDIR to a "
                "directory on a disk, or use the host tier",
                stacklevel=2,
            )
        self._capacity = None if capacity is None else parse_bytes(capacity, what="capacity")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._heads: list[Segment | None] = [None] * NUM_THREADS  # the segments being filled
        self._num_stores = 0
        self._num_files = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        self._freed: collections.deque[DiskSlot] = collections.deque()  # finalizers append to it, without a lock
        self._unwritten_bytes = 0  # promised to blobs, not yet missing from the free space that the file system reports
        self._writes = BusyRate()
        self._reads = BusyRate()
        self._pool: ThreadPoolExecutor | None = None
        self._stage: PinnedHost | None = None
        self._streams: dict[torch.device, torch.Stream] = {}  # where h2d copies wait for their targets
        self._closed = False

    def store(self, source: torch.Tensor) -> Slot:
        if self._closed:
            raise RuntimeError("disk tier: store after close; make a new Disk")
        self._check_process()
        self._give_back_later()
        if _is_on_host(source):
            slot = self._reserve(source.nbytes)
            slot.stored = self._submit(_HostStore(self, slot, source))
            return slot
        stage = self._staging()
        staged = stage.store(source)
        try:
            slot = self._reserve(source.nbytes)
        except BaseException:
            stage.free(staged)
            raise
        slot.stored = self._submit(_DeviceStore(self, slot, stage, staged))
        return slot

    def load(self, slot: Slot, target: torch.Tensor) -> Transfer:
        assert isinstance(slot, DiskSlot)
        self._check_process()
        with self._lock:
            slot.num_copies += 1
        copy = _HostLoad(self, slot, target) if _is_on_host(target) else _DeviceLoad(self, slot, self._staging(), target)
        self._submit(copy)
        self._give_back_later()
        return copy

    def free(self, slot: Slot) -> None:
        assert isinstance(slot, DiskSlot)
        self._freed.append(slot)

    @property
    def used_bytes(self) -> int:
        self._take_back_freed()
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def capacity_bytes(self) -> int | None:
        return self._capacity

    @property
    def num_files(self) -> int:
        """Files that hold bytes now. None of them has a name, so no directory shows them."""
        self._take_back_freed()
        return self._num_files

    @property
    def rates_gbps(self) -> tuple[float, float] | None:
        writes, reads = self._writes.gbps, self._reads.gbps  # of the files; the copies between device and stage are faster
        return None if writes is None or reads is None else (writes, reads)

    @property
    def pageable_bytes(self) -> int:
        return 0 if self._stage is None else self._stage.pageable_bytes

    def close(self) -> None:
        """Wait for copies under way, then give the threads and the staging memory back. Files go with their last slot."""
        if os.getpid() != self._pid:
            return
        self._take_back_freed()
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
            stage, self._stage = self._stage, None
        if pool is not None:
            pool.shutdown()
        if stage is not None:
            stage.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"disk tier: it belongs to process {self._pid}, and this is a fork of it; make a new Disk in the child")

    def _reserve(self, num_bytes: int) -> "DiskSlot":
        with self._lock:
            if self._capacity is not None and self._used_bytes + num_bytes > self._capacity:
                raise TierFull(
                    f"the disk tier holds {format_bytes(self._used_bytes)} of its capacity of {format_bytes(self._capacity)}; "
                    f"{format_bytes(num_bytes)} more do not fit"
                )
            free_bytes = _free_bytes(self.path) - self._unwritten_bytes
            if num_bytes > free_bytes:
                free = format_bytes(max(0, free_bytes))
                raise TierFull(f"the disk tier was asked for {format_bytes(num_bytes)}, and {str(self.path)!r} has {free} left")
            head_index = self._num_stores % NUM_THREADS
            head = self._heads[head_index]
            if head is None or head.end + num_bytes > SEGMENT_BYTES:
                head = self._heads[head_index] = Segment(self.path)
                self._num_files += 1
            slot = DiskSlot(num_bytes, head)
            self._num_stores += 1
            self._unwritten_bytes += num_bytes
            self._used_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return slot

    def _write(self, slot: "DiskSlot", host: torch.Tensor) -> None:
        """Write a blob, unless it was freed meanwhile and nobody waits to read it."""
        self._take_back_freed()
        with self._lock:
            needed = not slot.freed or slot.num_copies > 1
        try:
            if needed:
                with self._writes.measure(slot.num_bytes):
                    slot.write(host)
        finally:
            with self._lock:
                self._unwritten_bytes -= slot.num_bytes

    def _read(self, slot: "DiskSlot", host: torch.Tensor) -> None:
        with self._reads.measure(slot.num_bytes):
            slot.read(host)

    def _end_copy(self, slot: "DiskSlot") -> None:
        with self._lock:
            slot.num_copies -= 1
            unused = slot.freed and slot.num_copies == 0
        if unused:
            self._give_back(slot)

    def _take_back_freed(self) -> None:
        """Give back what has been freed since the last call."""
        for slot in self._newly_unused():
            self._give_back(slot)

    def _give_back_later(self) -> None:
        """Count what has been freed since the last call, and leave it to the threads to punch the holes, which takes milliseconds."""
        for slot in self._newly_unused():
            self._run(partial(self._give_back, slot))

    def _newly_unused(self) -> "list[DiskSlot]":
        """Count what has been freed since the last call, and return the slots that no copy touches. Each slot is returned once."""
        unused: list[DiskSlot] = []
        if os.getpid() != self._pid:
            return unused
        with self._lock:  # around both: whoever finds nothing to take must find it counted
            while self._freed:
                slot = self._freed.popleft()
                if not slot.freed:
                    slot.freed = True
                    self._used_bytes -= slot.num_bytes
                    if slot.num_copies == 0:
                        unused.append(slot)
        return unused

    def _give_back(self, slot: "DiskSlot") -> None:
        """Return the space of a slot that is freed and that no copy touches. Its segment is open until this slot is off it."""
        slot.segment.punch(slot.offset, slot.num_bytes)
        if slot.kept is not None:
            stage, kept = slot.kept
            stage.free(kept)
        with self._lock:
            slot.segment.num_slots -= 1
            empty = slot.segment.num_slots == 0
            if empty:
                self._num_files -= 1
                self._heads = [None if head is slot.segment else head for head in self._heads]
        if empty:
            slot.segment.close()

    def _submit(self, copy: "_Copy") -> "_Copy":
        self._run(copy.run)
        return copy

    def _run(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="backhaul-disk")
            self._pool.submit(work)

    def _staging(self) -> "PinnedHost":
        with self._lock:
            if self._stage is None:
                from backhaul.tiers.host import PinnedHost  # only a device needs it

                self._stage = PinnedHost()
            return self._stage

    def _ordered_after_now(self, device: torch.device) -> AbstractContextManager[object]:
        """Note the current point of the current stream; copies issued inside the returned context, on any thread, come after it."""
        from backhaul.tiers.lanes import has_streams

        if not has_streams(device):
            return nullcontext()
        now = torch.accelerator.current_stream(device).record_event()
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            return _after(now, self._streams[device])


@contextmanager
def _after(event: torch.Event, stream: torch.Stream) -> Iterator[None]:
    stream.wait_event(event)
    with torch.accelerator.device_index(stream.device.index), stream:
        yield


class DiskSlot(Slot):
    """A blob in a segment. It stays there while it is not freed or a copy touches it."""

    __slots__ = ("freed", "kept", "num_copies", "offset", "segment")

    def __init__(self, num_bytes: int, segment: Segment) -> None:
        self.num_bytes = num_bytes
        self.segment = segment
        self.offset = segment.append(num_bytes)
        self.num_copies = 1  # the store
        self.freed = False
        self.kept: tuple[PinnedHost, HostSlot] | None = None  # the staged bytes, where writing them failed

    def write(self, host: torch.Tensor) -> None:
        rest, offset = _view(host), self.offset
        while rest:
            num_bytes = os.pwrite(self.segment.fd, rest, offset)
            rest, offset = rest[num_bytes:], offset + num_bytes

    def read(self, host: torch.Tensor) -> None:
        rest, offset = _view(host), self.offset
        while rest:
            num_bytes = os.preadv(self.segment.fd, [rest], offset)
            if num_bytes == 0:
                raise OSError(f"disk tier: the file ends {len(rest)} bytes before the blob does")
            rest, offset = rest[num_bytes:], offset + num_bytes


class _Copy(Transfer):
    """A copy that a thread of the tier makes. A slot holds its store, so a copy that has ended holds neither slot nor tensors."""

    def __init__(self, tier: Disk, slot: DiskSlot, work: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = partial(tier._end_copy, slot)
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        work, on_end = self._work, self._on_end
        assert work is not None and on_end is not None
        self._work = self._on_end = None
        try:
            work()
        except BaseException as error:  # raised by `wait`; the traceback would keep the tensors alive
            self._error = error.with_traceback(None)
        del work  # and with it the tensors, before anybody is told
        on_end()
        self._ended.set()

    def wait(self) -> None:
        self.wait_for_thread()
        self.raise_error()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait_for_thread(self) -> None:
        self._ended.wait()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)


class _HostStore(_Copy):
    def __init__(self, tier: Disk, slot: DiskSlot, source: torch.Tensor) -> None:
        super().__init__(tier, slot, partial(tier._write, slot, source))


class _HostLoad(_Copy):
    def __init__(self, tier: Disk, slot: DiskSlot, target: torch.Tensor) -> None:
        super().__init__(tier, slot, partial(self._read, tier, slot, target))

    def _read(self, tier: Disk, slot: DiskSlot, target: torch.Tensor) -> None:
        slot.stored.wait()  # it came before in the queue, so a thread has it already
        tier._read(slot, target)


class _DeviceStore(_Copy):
    """Write staged bytes. To the outside it is the d2h copy; [Note: Through the host] says why."""

    def __init__(self, tier: Disk, slot: DiskSlot, stage: "PinnedHost", staged: "HostSlot") -> None:
        super().__init__(tier, slot, partial(self._drain, tier, slot, stage, staged))
        self._d2h = staged.stored

    def _drain(self, tier: Disk, slot: DiskSlot, stage: "PinnedHost", staged: "HostSlot") -> None:
        self._d2h.synchronize()
        try:
            tier._write(slot, staged.host)
        except OSError:
            slot.kept = (stage, staged)
            raise
        stage.free(staged)

    def wait(self) -> None:
        self._d2h.wait()
        self.raise_error()

    def done(self) -> bool:
        return self._d2h.done()


class _DeviceLoad(_Copy):
    """Read into the stage, then copy h2d, ordered after the point at which ``load`` was called."""

    def __init__(self, tier: Disk, slot: DiskSlot, stage: "PinnedHost", target: torch.Tensor) -> None:
        super().__init__(tier, slot, partial(self._read, tier, slot, stage, target, tier._ordered_after_now(target.device)))
        self._h2d: Transfer | None = None

    def _read(self, tier: Disk, slot: DiskSlot, stage: "PinnedHost", target: torch.Tensor, ordered: AbstractContextManager[object]) -> None:
        assert isinstance(slot.stored, _DeviceStore)
        slot.stored.wait_for_thread()  # it came before in the queue, so a thread has it already
        if slot.kept is not None:
            keeper, kept = slot.kept
            with ordered:
                self._h2d = keeper.load(kept, target)
            return
        try:
            staged = stage.reserve(slot.num_bytes, target.device)
        except TierFull:
            pageable = torch.empty(slot.num_bytes, dtype=torch.uint8)
            tier._read(slot, pageable)
            with ordered:
                target.copy_(pageable)  # has ended when it returns, so there is no h2d to wait for
            return
        try:
            tier._read(slot, staged.host)
            with ordered:
                self._h2d = stage.load(staged, target)
        finally:
            stage.free(staged)

    def wait(self) -> None:
        super().wait()
        if self._h2d is not None:
            self._h2d.wait()

    def done(self) -> bool:
        return super().done() and (self._h2d is None or self._h2d.done())


def filesystem_type(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that holds ``path`` ("ext4", "tmpfs"), or ``None`` where the system does not tell."""
    try:
        lines = mountinfo.read_text().splitlines()
    except FileNotFoundError:
        return None
    path = path.resolve()
    mounts = {}
    for line in lines:
        # 25 24 0:23 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw; of two mounts at one point the later one is seen
        fields, _, tail = line.partition(" - ")
        mount_point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])  # a space is written \040
        mounts[Path(mount_point)] = tail.split()[0]
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), None)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _view(host: torch.Tensor) -> memoryview:
    """View the memory of a CPU tensor without numpy, which torch can do without. The caller keeps the tensor alive."""
    return memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B")
