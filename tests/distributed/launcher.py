"""A few processes that wait for functions to run together, so that the tests of one session start them once.

Covers: starting and ending the processes, their gloo group, and what a rank's failure looks like in the test that caused it.
Does not cover: what the ranks do; a function given to ``World.run`` is a module's own, so that it can be sent by name.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 180.0  # for one function, compilation included
GRACE_S = 3.0  # what the other ranks have left once one has failed


class World:
    """Ranks of one gloo group. They start when first needed, and anew after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self._place: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run ``function(*args)`` on every rank, and return what each returned. Raise what went wrong, rank by rank."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, args, timeout_s))
        answers = self._gather(timeout_s)
        if len(answers) == self.size and all(ok for ok, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        self.close()
        silent = f"gave no answer within {timeout_s:.0f} s, or within {GRACE_S:.0f} s of another's failure; its stack is in stderr"
        failures = [
            f"rank {rank}: {answers[rank][1] if rank in answers else silent}"
            for rank in range(self.size)
            if not answers.get(rank, (False,))[0]
        ]
        raise AssertionError("\n".join(failures))

    def _gather(self, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = False, f"died with exit code {self._ranks[rank][0].exitcode}"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._place = tempfile.TemporaryDirectory(prefix="backhaul-ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, self._place.name), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def close(self) -> None:
        """End the processes."""
        for _, pipe in self._ranks:
            pipe.close()  # a rank that waits for a function ends by itself, once all others do
        for process, _ in self._ranks:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._ranks = []
        if self._place is not None:
            self._place.cleanup()


def _serve(pipe: Connection, rank: int, size: int, place: str) -> None:
    """Run what comes through the pipe until it is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes that outlives a rank
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(place) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            function, args, timeout_s = pipe.recv()
        except EOFError:
            break
        faulthandler.dump_traceback_later(timeout_s)
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
                warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")  # Inductor is imported
                answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc(limit=-12)
        finally:
            faulthandler.cancel_dump_traceback_later()
            torch.compiler.reset()
        pipe.send(answer)
    dist.destroy_process_group()
