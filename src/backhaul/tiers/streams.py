"""Streams, events and copies, as lanes and clocks need them of a device.

Covers: the current stream; streams, events and copies through torch, on any accelerator; on CUDA through the runtime, at a fraction of the
cost on the host ([Note: Host cost]).
Does not cover: which copy waits for what (lanes.py), or what is measured (timing.py).

[Note: Host cost]
A model whose router reads a count on the host has nothing queued on the device at that moment, so every microsecond that offloading takes
on the host just then is one that the device waits. Through torch a timed event costs 9 to 22 us to make and record, and a copy of a chunk
16 us; the CUDA runtime does either in 2 to 4. Events are used again, since making one costs more than recording it. Where nobody asks an
event for its time it has none: a timed one keeps the stream that records it busy for longer.
"""

import ctypes
import functools
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from backhaul import _torch


class Event(Protocol):
    """A point in the work of a stream. Who waits for it waits for what was recorded last."""

    def record(self, stream: Any) -> None:
        """Let the event be the point that ``stream`` has been given work up to."""
        ...

    def query(self) -> bool:
        """Say, without waiting, whether the device has reached the point."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has reached the point."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this point to ``end``, both reached."""
        ...


class Stream(Protocol):
    """A queue of work."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on wait for the event."""
        ...


class Streams(Protocol):
    """What lanes and clocks ask of one device."""

    def new_stream(self) -> Stream:
        """Return a stream to copy on."""
        ...

    def new_event(self, *, timed: bool = True) -> Event:
        """Return an event, which can tell time if it is ``timed``."""
        ...

    def current(self) -> Stream:
        """Return this thread's current stream."""
        ...

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context for any number of ``copy``: it leaves current stream and device as they were."""
        ...

    def copy(self, stream: Any, target: Tensor, source: Tensor, start: int, stop: int) -> None:
        """Queue a copy of some bytes between contiguous uint8 tensors, one of them page-locked."""
        ...


class TorchStreams:
    """Any accelerator, through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    def new_event(self, *, timed: bool = True) -> torch.Event:
        return torch.Event(device=self.device, enable_timing=timed)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def copying(self) -> "_AsItWas":
        return _AsItWas(self.device)

    def copy(self, stream: torch.Stream, target: Tensor, source: Tensor, start: int, stop: int) -> None:
        torch.accelerator.set_stream(
            stream
        )  # to enter and leave it costs several times as much, and there are thousands of chunks a second
        target[start:stop].copy_(source[start:stop], non_blocking=True)


class _AsItWas:
    """Leaves the current stream of a device, and the current device, as they were."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.accelerator.current_stream(device)
        self.index = torch.accelerator.device_index(device.index)

    def __enter__(self) -> None:
        self.index.__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.accelerator.set_stream(self.stream)
        self.index.__exit__(*exception)


class CudaStream:
    """A stream by its handle. ``owner`` is torch's stream, if it is one that was made here."""

    __slots__ = ("device", "handle", "owner", "runtime")

    def __init__(self, runtime: "_Runtime", device: int, handle: int, owner: torch.cuda.Stream | None = None) -> None:
        self.runtime = runtime
        self.device = device
        self.handle = handle
        self.owner = owner

    def wait_event(self, event: "CudaEvent") -> None:
        self.call(self.runtime.wait, self.handle, event.handle, 0)

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function of the runtime where the handle means this stream: that of the default stream, 0, is the current device's."""
        if self.handle or _torch.current_cuda_device() == self.device:
            self.runtime.check(function(*arguments))
        else:
            with torch.cuda.device(self.device):
                self.runtime.check(function(*arguments))


class CudaEvent:
    """An event whose handle goes back to be used again."""

    __slots__ = ("free", "handle", "runtime")

    def __init__(self, runtime: "_Runtime", free: deque[int], handle: int) -> None:
        self.runtime = runtime
        self.free = free
        self.handle = handle

    def record(self, stream: CudaStream) -> None:
        stream.call(self.runtime.record, self.handle, stream.handle)

    def query(self) -> bool:
        answer = self.runtime.query(self.handle)
        if answer == self.runtime.NOT_READY:
            return False
        self.runtime.check(answer)
        return True

    def synchronize(self) -> None:
        self.runtime.check(self.runtime.synchronize(self.handle))

    def elapsed_time(self, end: "CudaEvent") -> float:
        ms = ctypes.c_float()
        self.runtime.check(self.runtime.elapsed(ctypes.byref(ms), self.handle, end.handle))
        return ms.value

    def __del__(self) -> None:
        self.free.append(self.handle)


class CudaStreams:
    """A CUDA device, through the CUDA runtime ([Note: Host cost])."""

    def __init__(self, device: torch.device, runtime: "_Runtime") -> None:
        self.index: int = device.index
        self.runtime = runtime
        self.free: tuple[deque[int], deque[int]] = deque(), deque()  # events to be used again: untimed, timed
        self.known: dict[int, CudaStream] = {}  # current ones, by handle

    def new_stream(self) -> CudaStream:
        owner = torch.cuda.Stream(self.index)
        return CudaStream(self.runtime, self.index, owner.cuda_stream, owner)

    def new_event(self, *, timed: bool = True) -> CudaEvent:
        free = self.free[timed]
        try:
            handle = free.pop()
        except IndexError:
            handle = self._make_event(timed)
        return CudaEvent(self.runtime, free, handle)

    def current(self) -> CudaStream:
        handle = _torch.current_cuda_stream(self.index)
        stream = self.known.get(handle)
        if stream is None:
            stream = self.known[handle] = CudaStream(self.runtime, self.index, handle)
        return stream

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self, stream: CudaStream, target: Tensor, source: Tensor, start: int, stop: int) -> None:
        runtime = self.runtime
        runtime.check(runtime.copy(target.data_ptr() + start, source.data_ptr() + start, stop - start, runtime.ANY_KIND, stream.handle))

    def _make_event(self, timed: bool) -> int:
        handle = ctypes.c_void_p()
        with torch.cuda.device(self.index):
            self.runtime.check(self.runtime.create(ctypes.byref(handle), 0 if timed else self.runtime.UNTIMED))
        assert handle.value is not None
        return handle.value


class _Runtime:
    """The functions of the CUDA runtime that are in use here: https://docs.nvidia.com/cuda/cuda-runtime-api."""

    NOT_READY = 600  # cudaErrorNotReady
    ANY_KIND = 4  # cudaMemcpyDefault: the addresses say which way
    UNTIMED = 2  # cudaEventDisableTiming

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, reference = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self.create = _function(library.cudaEventCreateWithFlags, reference, ctypes.c_uint)
        self.record = _function(library.cudaEventRecord, pointer, pointer)
        self.query = _function(library.cudaEventQuery, pointer)
        self.synchronize = _function(library.cudaEventSynchronize, pointer)
        self.elapsed = _function(library.cudaEventElapsedTime, ctypes.POINTER(ctypes.c_float), pointer, pointer)
        self.wait = _function(library.cudaStreamWaitEvent, pointer, pointer, ctypes.c_uint)
        self.copy = _function(library.cudaMemcpyAsync, pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)
        self.take_error = _function(library.cudaGetLastError)
        self.describe = library.cudaGetErrorString
        self.describe.argtypes, self.describe.restype = [ctypes.c_int], ctypes.c_char_p

    def check(self, error: int) -> None:
        """Raise what a call returned, if it is an error, and clear it."""
        if error:
            self.take_error()
            raise RuntimeError(f"CUDA error: {self.describe(error).decode()}")


def _function(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


@functools.cache
def _runtime() -> _Runtime | None:
    """Return the runtime that torch has loaded; ``None`` where it is not found by its name, or torch is built for another platform."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    for name in (f"libcudart.so.{major}", f"libcudart.so.{major}.0", f"cudart64_{major}.dll"):
        try:
            return _Runtime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """Return what there is for a device that has streams; ``device`` has an index."""
    runtime = _runtime() if device.type == "cuda" else None
    return TorchStreams(device) if runtime is None else CudaStreams(device, runtime)


_current: dict[tuple[torch.device, int], torch.Stream] = {}  # seen so far, by handle or id


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream, the same object each time; ``None`` on a device without streams."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        stream = torch.accelerator.current_stream(device)
        return _current.setdefault((device, stream.stream_id), stream)
    key = device, _torch.current_cuda_stream(device.index)
    known = _current.get(key)
    if known is None:  # to ask torch takes several microseconds
        known = _current[key] = torch.accelerator.current_stream(device)
    return known
