"""The host budget is what the container leaves, divided by the ranks, and says so (C03)."""

from pathlib import Path

import pytest

from backhaul.tiers.limits import host_memory_budget

GiB = 2**30
V1_NO_LIMIT = "9223372036854771712"


def lay_out(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.fixture
def machine(tmp_path):
    """Build a fake machine: 450 GiB available, and the given cgroup files; return the arguments that read it."""

    def build(cgroup: dict[str, object], *, own_cgroup: str = "0::/", available: int = 450 * GiB):
        meminfo = f"MemTotal:       {2 * available // 1024} kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:       0"
        proc = lay_out(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": own_cgroup})
        return {"cgroup_root": lay_out(tmp_path / "cgroup", cgroup), "proc_root": proc}

    return build


def test_C03_container_limit_and_ranks_bound_the_budget(machine):
    budget = host_memory_budget(**machine({"memory.max": 2 * GiB, "memory.current": 3 * GiB // 2}), local_ranks=8)
    assert budget.num_bytes == GiB // 2 // 8
    assert "cgroup memory.max" in str(budget) and "8 ranks" in str(budget)


def test_C03_cgroup_v1_names(machine):
    files = {"memory/memory.limit_in_bytes": 2 * GiB, "memory/memory.usage_in_bytes": GiB}
    budget = host_memory_budget(**machine(files, own_cgroup="4:memory:/"), local_ranks=1)
    assert budget.num_bytes == GiB
    assert "cgroup memory.limit_in_bytes" in budget.limited_by


@pytest.mark.parametrize(
    ("own_cgroup", "files"),
    [
        ("0::/", {"memory.max": "max", "memory.current": GiB}),
        ("4:memory:/", {"memory/memory.limit_in_bytes": V1_NO_LIMIT, "memory/memory.usage_in_bytes": GiB}),
        ("0::/", {}),
    ],
    ids=["v2 max", "v1 huge number", "no cgroup"],
)
def test_C03_no_limit_leaves_what_the_host_has(machine, own_cgroup, files):
    budget = host_memory_budget(**machine(files, own_cgroup=own_cgroup, available=450 * GiB), local_ranks=2)
    assert budget.num_bytes == 225 * GiB
    assert "MemAvailable" in budget.limited_by and "2 ranks" in budget.limited_by


def test_C03_host_with_less_than_the_limit_wins(machine):
    budget = host_memory_budget(**machine({"memory.max": 64 * GiB, "memory.current": 0}, available=3 * GiB), local_ranks=1)
    assert budget.num_bytes == 3 * GiB


@pytest.mark.parametrize("tight", ["", "job/", "job/step/"])
def test_C03_tightest_cgroup_on_the_way_up_counts(machine, tight):
    files = {}
    for level in ("", "job/", "job/step/"):
        files[f"{level}memory.max"] = 4 * GiB if level == tight else 32 * GiB
        files[f"{level}memory.current"] = GiB
    budget = host_memory_budget(**machine(files, own_cgroup="0::/job/step"), local_ranks=1)
    assert budget.num_bytes == 3 * GiB


def test_C03_path_of_the_host_seen_from_a_container(machine):
    """Docker without a cgroup namespace: /proc names the host's path, while the container's own limits are mounted at the top."""
    files = {"memory/memory.limit_in_bytes": 2 * GiB, "memory/memory.usage_in_bytes": 0}
    budget = host_memory_budget(**machine(files, own_cgroup="11:memory,cpu:/docker/0123abcd\n0::/docker/0123abcd"), local_ranks=1)
    assert budget.num_bytes == 2 * GiB


def test_reclaimable_page_cache_counts_as_free(machine):
    files = {"memory.max": 4 * GiB, "memory.current": 4 * GiB, "memory.stat": f"anon {GiB}\ninactive_file {2 * GiB}\nactive_file {GiB}"}
    assert host_memory_budget(**machine(files), local_ranks=1).num_bytes == 2 * GiB


def test_cgroup_over_its_limit_leaves_nothing(machine):
    assert host_memory_budget(**machine({"memory.max": GiB, "memory.current": 2 * GiB}), local_ranks=1).num_bytes == 0


def test_ranks_are_read_when_asked(machine, monkeypatch):
    roots = machine({"memory.max": 8 * GiB, "memory.current": 0})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_memory_budget(**roots).num_bytes == 8 * GiB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory_budget(**roots).num_bytes == 2 * GiB
    assert host_memory_budget(**roots, local_ranks=2).num_bytes == 4 * GiB


def test_no_ranks_is_refused(machine):
    with pytest.raises(ValueError, match="at least 1"):
        host_memory_budget(**machine({}), local_ranks=0)


def test_this_machine_has_some_memory():
    assert host_memory_budget(local_ranks=1).num_bytes > 0
