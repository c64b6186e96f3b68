"""What a handle has counted, and how it is told.

Covers: the running counts, the frozen snapshot ``Stats``, the ``Report`` as text and as a dict.
Does not cover: traces of a run, predictions.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from backhaul.globs import collapse
from backhaul.sizes import format_bytes

MOST_ROWS = 32  # modules that a text shows one by one; of more, those whose names differ in numbers alone are one row
PARAMETERS = ("parameter", "cast of a parameter")  # reasons that are about no activation


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A snapshot of what a handle has counted. The first seven are sums since the handle was made; a storage counts once a frame.

    ``saved_bytes`` is ``kept_bytes`` plus ``offloaded_bytes`` plus ``recomputed_bytes``. Parameters and their aliases appear in
    ``kept_by_reason`` alone. ``host_*``, ``disk_*`` and ``pageable_bytes`` are those of the handle's tier, which other handles may share.
    """

    saved_bytes: int
    kept_bytes: int  # never left the device
    kept_by_reason: dict[str, int]
    offloaded_bytes: int  # copied out
    reloaded_bytes: int  # copied back
    recomputed_bytes: int  # not kept: made again when needed
    futile_bytes: int  # copied out, though the original was still alive when it was needed
    resident_bytes: int  # saved bytes on the device now
    peak_resident_bytes: int
    host_bytes: int
    peak_host_bytes: int
    disk_bytes: int
    peak_disk_bytes: int
    pageable_bytes: int  # stored in host memory that could not be page-locked, so far
    num_offloads: int
    num_demand_reloads: int  # reloads that nothing had started ahead
    exposed_ms: float  # that compute waited for copies


@dataclass(frozen=True, kw_only=True)
class ModuleBytes:
    """The sums of one scope."""

    fqn: str
    saved_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a handle did. ``str()`` is a text for people, ``to_dict()`` for programs."""

    stats: Stats
    modules: tuple[ModuleBytes, ...]
    made_bytes: int = 0  # by running modules again, so far
    note: str = ""  # why nothing moved, if nothing has

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        stats, size = self.stats, format_bytes
        parameters = sum(num_bytes for reason, num_bytes in stats.kept_by_reason.items() if reason in PARAMETERS)
        lines = [
            f"saved      {size(stats.saved_bytes):>12}",
            f"offloaded  {size(stats.offloaded_bytes):>12}  in {stats.num_offloads} copies, {size(stats.futile_bytes)} of it futile",
            f"reloaded   {size(stats.reloaded_bytes):>12}  {stats.num_demand_reloads} times on demand",
            f"recomputed {size(stats.recomputed_bytes):>12}  {size(self.made_bytes)} made by running modules again",
            f"kept       {size(stats.kept_bytes):>12}",
            *(f"  {reason:<32} {size(num_bytes):>12}" for reason, num_bytes in stats.kept_by_reason.items() if reason not in PARAMETERS),
            f"parameters {size(parameters):>12}  stay in any case, and are not in saved",
            f"resident   {size(stats.resident_bytes):>12}  peak {size(stats.peak_resident_bytes)}",
            f"host       {size(stats.host_bytes):>12}  peak {size(stats.peak_host_bytes)}, pageable {size(stats.pageable_bytes)}",
            f"disk       {size(stats.disk_bytes):>12}  peak {size(stats.peak_disk_bytes)}",
            f"exposed    {stats.exposed_ms:>9.1f} ms",
        ]
        if self.note:
            lines += [f"note: {self.note}"]
        if rows := self._rows():
            wide = max(48, *(len(row.fqn) for row in rows))
            lines += ["", f"{'module':<{wide}} {'saved':>12} {'offloaded':>12} {'recomputed':>12}"]
            for row in rows:
                sizes = map(size, (row.saved_bytes, row.offloaded_bytes, row.recomputed_bytes))
                lines.append(" ".join((f"{row.fqn or '(root)':<{wide}}", *(f"{each:>12}" for each in sizes))))
        return "\n".join(lines)

    def _rows(self) -> tuple[ModuleBytes, ...]:
        """Return the modules, as sums of many alike where there are many."""
        if len(self.modules) <= MOST_ROWS:
            return self.modules
        by_fqn = {row.fqn: row for row in self.modules}
        groups = {glob: [by_fqn[fqn] for fqn in members] for glob, members in collapse(by_fqn).items()}
        return tuple(
            ModuleBytes(
                fqn=glob,
                saved_bytes=sum(row.saved_bytes for row in rows),
                offloaded_bytes=sum(row.offloaded_bytes for row in rows),
                recomputed_bytes=sum(row.recomputed_bytes for row in rows),
            )
            for glob, rows in groups.items()
        )


class Tally:
    """The counts of one handle while it runs."""

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.recomputed_bytes = 0
        self.made_bytes = 0  # by running modules again
        self.futile_bytes = 0
        self.num_offloads = 0
        self.num_demand_reloads = 0
        self.num_passes = 0
        self.num_turned_away = 0
        self.obstacle = ""  # why the last of these could not be managed
        self.largest_bytes = 0
        self.kept: Counter[str] = Counter()  # "" for what could move and has not
        self.saved_by_fqn: Counter[str] = Counter()
        self.offloaded_by_fqn: Counter[str] = Counter()
        self.recomputed_by_fqn: Counter[str] = Counter()

    def saved(self, fqn: str, num_bytes: int, reason: str) -> None:
        """Count a storage that a frame saves, as kept for ``reason`` until it is offloaded."""
        self.saved_bytes += num_bytes
        self.saved_by_fqn[fqn] += num_bytes
        self.kept[reason] += num_bytes
        self.largest_bytes = max(self.largest_bytes, num_bytes)

    def recomputes(self, fqn: str, num_bytes: int) -> None:
        """Count a storage that a frame saves and that is made again."""
        self.saved_bytes += num_bytes
        self.saved_by_fqn[fqn] += num_bytes
        self.recomputed_bytes += num_bytes
        self.recomputed_by_fqn[fqn] += num_bytes

    def recomputes_instead(self, fqn: str, num_bytes: int, *, instead_of: str) -> None:
        """Count as made again what was counted as kept."""
        self.kept[instead_of] -= num_bytes
        self.recomputed_bytes += num_bytes
        self.recomputed_by_fqn[fqn] += num_bytes

    def keeps_parameter(self, num_bytes: int, reason: str) -> None:
        """Count what is no activation: a parameter, an alias, a cast of one."""
        self.kept[reason] += num_bytes

    def keeps_instead(self, num_bytes: int, reason: str, *, instead_of: str = "") -> None:
        """Change the reason under which a storage is counted."""
        self.kept[instead_of] -= num_bytes
        self.kept[reason] += num_bytes

    def offloads(self, fqn: str, num_bytes: int) -> None:
        self.kept[""] -= num_bytes
        self.offloaded_bytes += num_bytes
        self.offloaded_by_fqn[fqn] += num_bytes
        self.num_offloads += 1

    def takes_back(self, fqn: str, num_bytes: int) -> None:
        """Undo ``offloads``: the copy failed."""
        self.kept[""] += num_bytes
        self.offloaded_bytes -= num_bytes
        self.offloaded_by_fqn[fqn] -= num_bytes
        self.num_offloads -= 1

    def kept_by_reason(self) -> dict[str, int]:
        return {reason or "not worth moving": num_bytes for reason, num_bytes in self.kept.most_common() if num_bytes}

    def modules(self) -> tuple[ModuleBytes, ...]:
        rows = self.saved_by_fqn.items()
        return tuple(
            ModuleBytes(
                fqn=fqn, saved_bytes=saved, offloaded_bytes=self.offloaded_by_fqn[fqn], recomputed_bytes=self.recomputed_by_fqn[fqn]
            )
            for fqn, saved in rows
        )

    def reasons(self) -> str:
        """Name what stays, most first."""
        return (
            ", ".join(f"{reason} {format_bytes(num_bytes)}" for reason, num_bytes in self.kept_by_reason().items()) or "nothing was saved"
        )

    def why_nothing(self, min_bytes: int) -> str:
        """Say why an enabled handle has moved nothing."""
        if not self.num_passes:
            return self.obstacle or "no forward of a managed module has run with gradients enabled; other code needs handle.region()"
        if not self.kept:
            return "autograd saved nothing in the managed modules; is everything in them frozen, or is forward a generator?"
        if not self.saved_bytes:
            return f"only parameters and their aliases were saved ({self.reasons()})"
        if self.largest_bytes < min_bytes:
            return f"the largest saved tensor has {format_bytes(self.largest_bytes)}, below min_bytes={format_bytes(min_bytes)}"
        advice = ""
        if self.kept["save"] >= self.saved_bytes // 2:
            advice = '; what modules under "save" save stays, whoever made it: add "*": "offload" as the last rule'
        return f"what was saved stays: {self.reasons()}{advice}"
