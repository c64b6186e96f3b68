"""Carrying out what flow.py decides about blobs.

Covers: copies out, releases and reloads of one handle's blobs, bringing back what is needed, copies that freed nothing, tiers that fail.
Does not cover: which tensors become blobs (engine.py), when anything moves (flow.py), or how (tiers/).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.storage import UntypedStorage

from backhaul.flow import CopyOut, Decision, Release
from backhaul.registry import Registry, Steady
from backhaul.reporting import Tally
from backhaul.saved import Blob
from backhaul.sizes import format_bytes
from backhaul.stations import Station
from backhaul.tiers.base import TierFull

MOST_PASSES = 256  # of a step


class Warner:
    """Warns of each topic once a handle."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Warn, unless that has been done for the topic."""
        if topic not in self._topics:
            self._topics.add(topic)
            warnings.warn(message, stacklevel=3)

    def say_if_nothing_moves(self, tally: Tally, min_bytes: int) -> None:
        """Warn after three passes in which nothing was moved or made again."""
        if (tally.num_passes or tally.num_turned_away) >= 3 and not (tally.offloaded_bytes or tally.recomputed_bytes):
            reason = tally.why_nothing(min_bytes)
            self.once("nothing", f"backhaul offloaded 0 of {format_bytes(tally.saved_bytes)} in three passes: {reason}")

    def say_if_no_step_ends(self, tally: Tally, stations: Iterable[Station]) -> None:
        """Warn after many passes none of which has shown the end of a step, so that no order can be learned."""
        if tally.num_passes >= MOST_PASSES and tally.offloaded_bytes and not any(station.flow.num_steps for station in stations):
            self.once(
                "endless",
                f"in {MOST_PASSES} passes there was no moment at which nothing saved was alive, so the order of a step cannot be learned "
                "and copies are waited for; drop outputs that nobody goes back through, or detach them",
            )


class Mover:
    """Moves the blobs of one handle. Its methods are called with the engine's lock held.

    ``steady`` tells where an interrupt has left the counts at odds (engine.py, [Note: Interrupts]); then flow.py is not asked.
    """

    def __init__(self, registry: Registry, tally: Tally, steady: Steady, warner: Warner) -> None:
        self.registry = registry
        self.tally = tally
        self.steady = steady
        self.warner = warner
        self.futile: Counter[Any] = Counter()  # by key: how often a copy freed nothing

    def offer(self, station: Station, blob: Blob) -> None:
        """Have flow.py count a blob and decide about it, if it can move."""
        frame, movable = blob.frame.num, not blob.reason
        decisions = station.flow.saved(blob.num, frame=frame, key=blob.key, num_bytes=blob.num_bytes, movable=movable)
        station.mark()
        self.carry_out(station, decisions)

    def offer_again(self, station: Station, blob: Blob) -> None:
        """Let a blob move that had a reason to stay."""
        self.tally.keeps_instead(blob.num_bytes, "", instead_of=blob.reason)
        blob.reason = ""
        station.flow.dropped(blob.num)
        self.offer(station, blob)

    def stay(self, station: Station, blob: Blob, storage: UntypedStorage, reason: str) -> None:
        """Have a blob stay whose storage is alive, whatever has been done with it."""
        if blob.reason:
            self.tally.keeps_instead(blob.num_bytes, reason, instead_of=blob.reason)
            blob.reason = reason
            return
        if blob.released:
            blob.take_back(storage)
        self._forget_copy(blob)
        self.keep(station, blob, reason)

    def _forget_copy(self, blob: Blob) -> None:
        """Give up the copy in the tier, made or under way."""
        slot = blob.slot
        if slot is not None:
            blob.slot = self.registry.records[blob.num].slot = None
            blob.tier.free(slot)
            self.tally.takes_back(blob.key.fqn, blob.num_bytes)

    def bring(self, blob: Blob) -> None:
        """Have the blob on the device and order the current stream after its arrival."""
        if blob.reason:
            return
        station = self.registry.records[blob.num].station
        was_released = blob.released
        if not self.steady.shaken:
            decisions = station.flow.needed(blob.num)
            station.mark()
            self.carry_out(station, decisions)
        if blob.released:
            self._reload(station, blob)
        if was_released and blob.incoming is not None:
            self.tally.num_demand_reloads += 1
        if blob.incoming is not None:
            try:
                station.waits.measure(blob.incoming, blob.incoming.wait)
            except BaseException:
                blob.release()  # what it was to hold is not there; the next need asks the tier again
                raise
            station.current_stream()
            blob.outlives = len(station.streams) > 1
            if not blob.outlives:
                blob.incoming = None

    def carry_out(self, station: Station, decisions: Iterable[Decision]) -> None:
        """Do what flow.py has decided, in that order."""
        for decision in decisions:
            record = self.registry.records.get(decision.blob)
            blob = record.blob() if record is not None else None
            if blob is None or blob.reason:
                continue
            if isinstance(decision, CopyOut):
                self._copy_out(station, blob)
            elif isinstance(decision, Release):
                self._release(station, blob)
            else:
                self._reload(station, blob)

    def _copy_out(self, station: Station, blob: Blob) -> None:
        if blob.slot is not None or blob.released:
            return
        if blob.changed:
            self.keep(station, blob, "written in place")
            return
        try:
            with station.on(blob.stream):
                blob.slot = self.registry.records[blob.num].slot = blob.tier.store(blob.source())
        except (TierFull, OSError) as error:
            self._tier_failed(station, blob, error)
            return
        self.tally.offloads(blob.key.fqn, blob.num_bytes)

    def _release(self, station: Station, blob: Blob) -> None:
        if blob.released:
            return
        self._copy_out(station, blob)
        slot = blob.slot
        if slot is None:
            return
        if blob.incoming is not None:  # it has come back and nobody has used it; who needs it next meets the error, if there is one
            with contextlib.suppress(OSError):
                station.wait_to_drop(blob.incoming, blob.source())
            blob.release()
            return
        try:
            station.wait_to_drop(slot.stored, blob.source())
        except BaseException as error:  # the copy failed: whatever it was, the tensor is still here and the slot is of no use
            self._forget_copy(blob)
            _ = blob.tier.used_bytes  # takes the slot back now: it holds the error, whose traceback may hold the graph
            if not isinstance(error, OSError):
                self.keep(station, blob, "tier failed")
                raise
            self._tier_failed(station, blob, error)
            return
        blob.release()

    def _reload(self, station: Station, blob: Blob) -> None:
        if not blob.released:
            return
        survivor = blob.survivor
        if survivor is not None:
            blob.take_back(survivor)
            self._was_futile(station, blob)
            return
        assert blob.slot is not None
        with station.on(blob.stream):
            target = torch.empty(blob.num_bytes, dtype=torch.uint8, device=station.device)
            incoming = blob.tier.load(blob.slot, target)
        storage = target.untyped_storage()
        blob.move_to(storage, incoming)
        self.registry.locate(self.registry.records[blob.num], storage)
        self.tally.reloaded_bytes += blob.num_bytes

    def _was_futile(self, station: Station, blob: Blob) -> None:
        """The storage is still alive: copying it freed nothing."""
        station.flow.readopted(blob.num)
        if station.holds(blob.source().untyped_storage()):  # not for long
            return
        self.tally.futile_bytes += blob.num_bytes
        self.futile[blob.key] += 1

    def keep(self, station: Station, blob: Blob, reason: str) -> None:
        """Have a blob stay on the device from now on, where it is."""
        blob.reason = reason
        station.flow.keep(blob.num)
        self.tally.keeps_instead(blob.num_bytes, reason)

    def _tier_failed(self, station: Station, blob: Blob, error: Exception) -> None:
        full = isinstance(error, TierFull)
        self.keep(station, blob, "tier full" if full else "tier failed")
        self.warner.once(
            "tier",
            f"the {blob.tier.name} tier {'is full' if full else 'failed'} ({error}); tensors that it cannot take stay on the device. "
            f"First seen for {format_bytes(blob.num_bytes)} saved in {blob.key.fqn!r}",
        )
