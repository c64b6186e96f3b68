"""How much host memory this process may take.

Covers: container limits (cgroup v2 and v1), memory the host has to spare, and the share of one rank ([Note: Host budget]).
Does not cover: the limit on page-locked memory, which only shows when pinning fails (host.py), or free space on a disk (disk.py).

[Note: Host budget]
A process that takes more than its container allows is killed without a word, often hours in. So the budget is what is left now, at the
tightest place, divided by the ranks that share the host:

    min(cgroup limit - cgroup usage + reclaimable page cache, MemAvailable) / local ranks

Three things to know about the figure:
* Limits nest. A process is bound by its own cgroup and by every one above it, so all of them are read.
* Files that were read recently count as usage, though the kernel drops them before it kills anyone: ``inactive_file`` counts as free.
* It is a reading of this moment. Every rank must take it before any of them allocates, or the first one's share is counted twice.

Some virtual machines start small and grow while memory is used; there ``MemAvailable`` is far too low. An explicit capacity
(``PinnedHost(capacity=200 << 30)``) never asks this module.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 has no word for "no limit": it shows the largest multiple of the page size that fits 63 bits, so it depends on the page size.
_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostBudget:
    """Host memory that one rank may take, and what limits it.

    ``str()`` of it completes the sentence "host memory: ...".
    """

    num_bytes: int
    limited_by: str

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:.2f} GiB ({self.limited_by})"


@dataclass(frozen=True)
class _CgroupVersion:
    """Where one version of cgroups keeps its figures."""

    controllers: str  # the second field of its line in /proc/self/cgroup
    mount: str  # below the cgroup root
    limit: str
    usage: str
    reclaimable: str  # the key in memory.stat, children included


_VERSIONS = (
    _CgroupVersion("", "", "memory.max", "memory.current", "inactive_file"),
    _CgroupVersion("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory_budget(
    *, cgroup_root: Path = Path("/sys/fs/cgroup"), proc_root: Path = Path("/proc"), local_ranks: int | None = None
) -> HostBudget:
    """Return the host memory that this process may still take ([Note: Host budget]).

    ``local_ranks`` is how many processes share the host; the default is ``LOCAL_WORLD_SIZE`` as ``torchrun`` sets it, read now, else 1.
    The two roots are there for tests and for hosts that mount these elsewhere. Where the system does not say what is available
    (no ``/proc/meminfo``), the budget is all physical memory.

    >>> host_memory_budget(local_ranks=2).limited_by  # doctest: +ELLIPSIS
    '..., divided by 2 ranks on this host'
    """
    if local_ranks is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_ranks < 1:
        raise ValueError(f"local_ranks is {local_ranks}; it is the number of processes on this host, so at least 1")
    num_bytes, limited_by = min([_host_available(proc_root), *_cgroup_headrooms(cgroup_root, proc_root)])
    if local_ranks > 1:
        limited_by += f", divided by {local_ranks} ranks on this host"
    return HostBudget(num_bytes // local_ranks, limited_by)


def _host_available(proc_root: Path) -> tuple[int, str]:
    try:
        fields = _read_stat(proc_root / "meminfo")
    except FileNotFoundError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "physical memory of the host"
    return fields["MemAvailable"] * 1024, "MemAvailable of the host"


def _cgroup_headrooms(cgroup_root: Path, proc_root: Path) -> Iterator[tuple[int, str]]:
    """Yield what is left below each memory limit that binds this process."""
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, own_path = line.split(":", 2)
        for version in _VERSIONS:
            if version.controllers not in controllers.split(","):
                continue
            own = Path(own_path.lstrip("/"))
            for relative in (own, *own.parents):
                # In a container the path may be the host's, of which only the top is mounted: what is not there is skipped.
                headroom = _headroom(cgroup_root / version.mount / relative, version)
                if headroom is not None:
                    yield headroom, f"cgroup {version.limit}"


def _headroom(directory: Path, version: _CgroupVersion) -> int | None:
    try:
        limit = (directory / version.limit).read_text().strip()
        usage = int((directory / version.usage).read_text())
    except FileNotFoundError:
        return None
    if limit == "max" or int(limit) >= _V1_NO_LIMIT:
        return None
    try:
        reclaimable = _read_stat(directory / "memory.stat")[version.reclaimable]
    except FileNotFoundError:
        reclaimable = 0
    return max(0, int(limit) - max(0, usage - reclaimable))


def _read_stat(path: Path) -> dict[str, int]:
    """Read lines of ``name value`` or ``name: value kB``."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}
