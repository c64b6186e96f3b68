"""Host memory as a tier: what goes in comes out, within its capacity, aligned, and also where nothing can be page-locked."""

import mmap
import os
import random
import re
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backhaul.tiers import host, numa, slabs
from backhaul.tiers.base import TierFull
from backhaul.tiers.host import PinnedHost, release_host_memory
from backhaul.tiers.limits import HostBudget
from tests.conftest import in_threads

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def _arena_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_memories", {})
    monkeypatch.setattr(host, "_warned", False)


def pattern(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def refuse(address: int, num_bytes: int, device: torch.device) -> None:
    raise slabs.PinningError("CUDA error: out of memory")


def test_bytes_come_back_as_they_were():
    tier = PinnedHost()
    tensors = [pattern(size, seed) for seed, size in enumerate([1, 3, 255, 256, 257, 100_003])]
    stored = [tier.store(tensor) for tensor in tensors]
    for slot, tensor in zip(stored, tensors, strict=True):
        for _ in range(2):
            target = torch.empty_like(tensor)
            tier.load(slot, target).wait()
            assert target.equal(tensor)
        assert slot.host.equal(tensor)
        assert slot.stored.done()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_every_slot_is_aligned_and_every_dtype_survives(dtype):
    tier = PinnedHost()
    for count in (3, 5, 7, 1, 9):
        raw = pattern(count * dtype.itemsize, count) % 2 if dtype == torch.bool else pattern(count * dtype.itemsize, count)
        slot = tier.store(raw)
        assert slot.host.data_ptr() % 256 == 0
        target = torch.empty(count, dtype=dtype)
        tier.load(slot, target.view(torch.uint8)).wait()
        assert target.view(torch.uint8).equal(raw)  # as bytes: NaN payloads count


def test_use_is_counted_from_store_to_free():
    tier = PinnedHost(capacity="1MiB")
    first, second = tier.store(pattern(1000)), tier.store(pattern(500))
    assert (tier.used_bytes, tier.peak_bytes, tier.capacity_bytes) == (1500, 1500, MIB)
    tier.free(first)
    tier.free(first)
    assert (tier.used_bytes, tier.peak_bytes) == (500, 1500)
    tier.free(second)
    assert tier.used_bytes == 0


def test_a_full_tier_says_so_and_is_unchanged():
    tier = PinnedHost(capacity=1000)
    slot = tier.store(pattern(600))
    with pytest.raises(TierFull, match="600 B of its capacity of 1000 B; 500 B more"):
        tier.store(pattern(500))
    assert (tier.used_bytes, tier.peak_bytes) == (600, 600)
    tier.free(slot)
    tier.store(pattern(1000))


def test_without_a_capacity_the_host_is_asked_before_the_arena_grows(monkeypatch):
    asked = []

    def budget() -> HostBudget:
        asked.append(1)
        return HostBudget(8 * MIB, "a cgroup")

    monkeypatch.setattr(host, "host_memory_budget", budget)
    tier = PinnedHost()
    slots = [tier.store(torch.zeros(MIB, dtype=torch.uint8)) for _ in range(8)]
    assert len(asked) == 1
    assert tier.capacity_bytes == 16 * MIB  # what is held, and what could be had when the host was last asked
    monkeypatch.setattr(host, "host_memory_budget", lambda: HostBudget(MIB // 2, "a cgroup"))
    with pytest.raises(TierFull, match=r"1\.0 MiB of host memory were asked for, and this process may take only 512\.0 KiB more"):
        tier.store(torch.zeros(MIB, dtype=torch.uint8))
    assert tier.used_bytes == 8 * MIB
    tier.free(slots[0])
    tier.store(torch.zeros(MIB, dtype=torch.uint8))


def test_slabs_are_no_larger_than_a_small_tier(monkeypatch):
    made = []
    monkeypatch.setattr(slabs, "register", lambda address, num_bytes, device: made.append(num_bytes))
    PinnedHost(capacity=5 * MIB).store(torch.zeros(100, dtype=torch.uint8))
    assert made == [4 * MIB]
    PinnedHost(capacity="3GiB").store(torch.zeros(5 * MIB, dtype=torch.uint8))
    assert made[1:] == [2**30]


def test_tensors_may_lie_across_slabs(monkeypatch):
    monkeypatch.setattr(host, "SLAB_BYTES", 4 * MIB)
    tier = PinnedHost(capacity="64MiB")
    tensors = [pattern(3 * MIB, seed) for seed in range(5)] + [pattern(11 * MIB)]
    stored = [tier.store(tensor) for tensor in tensors]
    assert all(slot.host.equal(tensor) for slot, tensor in zip(stored, tensors, strict=True))
    assert sum(memory.held_bytes for memory in host._memories.values()) <= 26 * MIB + 4 * MIB


def test_freed_memory_is_used_again_by_any_tier():
    made = []
    first, second = PinnedHost(capacity="4MiB"), PinnedHost(capacity="4MiB")
    for _ in range(20):
        for tier in (first, second):
            slot = tier.store(torch.zeros(3 * MIB, dtype=torch.uint8))
            made.append(slot.host.data_ptr())
            tier.free(slot)
    assert len(set(made)) == 1


def test_a_reserved_slot_is_for_the_host_to_fill():
    tier = PinnedHost()
    slot = tier.reserve(1000, CPU)
    assert slot.stored.done()
    slot.host.copy_(pattern(1000))
    target = torch.empty(1000, dtype=torch.uint8)
    tier.load(slot, target).wait()
    assert target.equal(pattern(1000))


def test_memory_goes_back_to_the_system_when_asked():
    tier = PinnedHost(capacity="8MiB")
    slot = tier.store(pattern(MIB))
    assert release_host_memory() == 0
    assert slot.host.equal(pattern(MIB))
    tier.free(slot)
    assert release_host_memory() == 8 * MIB
    assert release_host_memory() == 0
    assert tier.store(pattern(MIB)).host.equal(pattern(MIB))


def test_closing_the_last_tier_gives_memory_back_but_keeps_slots_readable(monkeypatch):
    monkeypatch.setattr(host, "_open_tiers", set())
    first, second = PinnedHost(capacity="4MiB"), PinnedHost(capacity="4MiB")
    kept, freed = first.store(pattern(4 * MIB)), second.store(pattern(4 * MIB, 1))
    second.free(freed)
    second.close()
    assert sum(memory.held_bytes for memory in host._memories.values()) == 8 * MIB
    first.close()
    assert sum(memory.held_bytes for memory in host._memories.values()) == 4 * MIB
    assert kept.host.equal(pattern(4 * MIB))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What is registered: bytes by address."""
    found: dict[int, int] = {}

    def register(address: int, num_bytes: int, device: torch.device) -> None:
        assert not any(address < other + size and other < address + num_bytes for other, size in found.items()), "registered twice"
        found[address] = num_bytes

    monkeypatch.setattr(slabs, "register", register)
    monkeypatch.setattr(slabs, "unregister", lambda address, device: found.pop(address))
    return found


def test_changing_sizes_lock_little_more_than_their_peak_and_nothing_after_a_while(registered, monkeypatch):
    """200 steps whose token counts change at random, in slabs of a thirty-second of their size."""
    monkeypatch.setattr(host, "SLAB_BYTES", 32 * MIB)
    tier, rng = PinnedHost(capacity="2GiB"), random.Random(0)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for step in range(200):
        in_flight = []
        for _ in range(8):
            in_flight.append(
                [tier.reserve(int(rng.uniform(0.7, 1.3) * mib * MIB), CPU) for mib in (14, 14, 8, 8, 6, 6, 4, 4, *[1.75] * 7, 0.25)]
            )
            if len(in_flight) == 4:
                for slot in reversed(in_flight.pop(0)):
                    tier.free(slot)
        for slot in (slot for microbatch in in_flight for slot in microbatch):
            tier.free(slot)
        if step == 99:
            warm = dict(registered)
    assert registered == warm
    assert sum(registered.values()) <= 1.02 * tier.peak_bytes + 32 * MIB
    assert len(Path("/proc/self/maps").read_text().splitlines()) - before <= 50 + len(registered)
    tier.close()


def test_closing_unregisters_what_nobody_holds(registered, monkeypatch):
    monkeypatch.setattr(host, "_open_tiers", set())
    monkeypatch.setattr(host, "SLAB_BYTES", 4 * MIB)
    tier = PinnedHost(capacity="64MiB")
    slots = [tier.reserve(3 * MIB, CPU) for _ in range(6)]
    assert sum(registered.values()) >= 18 * MIB
    for slot in slots[1:]:
        tier.free(slot)
    tier.close()
    assert sum(registered.values()) == 4 * MIB
    tier.free(slots[0])
    tier.close()
    assert not registered


def test_a_slab_is_larger_only_for_a_larger_tensor(registered, monkeypatch):
    monkeypatch.setattr(host, "SLAB_BYTES", 4 * MIB)
    tier = PinnedHost(capacity="64MiB")
    for mib in (1, 3, 2, 9, 1, 1):
        tier.reserve(mib * MIB, CPU)
    assert list(registered.values()) == [4 * MIB, 4 * MIB, 8 * MIB, 4 * MIB]


def test_slabs_are_of_one_gibibyte():
    assert host.SLAB_BYTES == slabs.SLAB_BYTES == 2**30


def test_pages_are_touched_in_parallel(monkeypatch):
    all_at_once = threading.Barrier(8)
    touched = []

    def touch(address: int, value: int, num_bytes: int) -> None:
        all_at_once.wait(timeout=10)
        touched.append((address, num_bytes))

    pages = slabs.PlainPages()
    monkeypatch.setattr(slabs.ctypes, "memset", touch)
    pages.touch(4 * MIB, 64 * MIB)
    assert sorted(touched) == [(pages.address + (4 + 8 * share) * MIB, 8 * MIB) for share in range(8)]


def test_slabs_lie_in_anonymous_memory_of_huge_pages():
    try:
        mmap.mmap(-1, 4 * MIB).madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pytest.skip("a kernel without huge pages")
    pages = slabs.PlainPages()
    smaps = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (.*?)^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL)
    if not smaps:
        pytest.skip("a kernel that does not tell")
    found = [(header, flags.split()) for start, end, header, flags in smaps if int(start, 16) <= pages.address < int(end, 16)]
    assert len(found) == 1
    assert found[0][0].splitlines()[0].split()[3] == "0"  # no file
    assert "hg" in found[0][1]


def test_the_error_of_a_refused_registration_is_taken_out_of_the_runtime(monkeypatch):
    status = SimpleNamespace(success=0)
    runtime = SimpleNamespace(cudaError=status, cudaHostRegister=lambda *args: 2, cudaGetErrorString=lambda code: f"error {code}")
    consumed = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(slabs, "_consume_error", consumed.append)
    device = torch.device("cuda", 0)
    with pytest.raises(slabs.PinningError, match="error 2"):
        slabs.register(4096, MIB, device)
    assert consumed == [device]


class TestWherePagesCannotBeLocked:
    def test_bytes_go_to_pageable_memory_with_one_warning(self, monkeypatch):
        monkeypatch.setattr(slabs, "register", refuse)
        tier = PinnedHost(capacity="64MiB")
        with pytest.warns(RuntimeWarning, match="pinned") as caught:
            stored = [tier.store(pattern(20 * MIB, seed)) for seed in range(3)]
        assert len(caught) == 1
        assert all(slot.host.equal(pattern(20 * MIB, seed)) for seed, slot in enumerate(stored))
        assert tier.pageable_bytes == tier.used_bytes == 60 * MIB

    def test_what_was_locked_before_is_still_used(self, monkeypatch):
        tier = PinnedHost(capacity="2MiB")
        tier.free(tier.store(pattern(MIB)))
        monkeypatch.setattr(slabs, "register", refuse)
        tier.store(pattern(MIB))
        assert tier.pageable_bytes == 0

    def test_locking_is_tried_again_only_after_memory_was_released(self, monkeypatch):
        tries = []

        def count_and_refuse(address: int, num_bytes: int, device: torch.device) -> None:
            tries.append(num_bytes)
            refuse(address, num_bytes, device)

        monkeypatch.setattr(slabs, "register", count_and_refuse)
        monkeypatch.setattr(host, "SLAB_BYTES", 4 * MIB)
        tier = PinnedHost(capacity="8MiB")
        with pytest.warns(RuntimeWarning, match="pinned"):
            slots = [tier.store(pattern(3 * MIB)) for _ in range(2)]
        assert len(tries) == 1
        for slot in slots:
            tier.free(slot)
        assert release_host_memory() > 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once is enough
            tier.store(pattern(MIB))
        assert len(tries) == 2


def test_a_copy_that_fails_gives_its_bytes_back(monkeypatch):
    tier, memory = PinnedHost(capacity="4MiB"), host._memory_of(CPU)
    monkeypatch.setattr(host, "_memory_of", lambda device: memory)
    with pytest.raises(NotImplementedError, match="meta"):
        tier.store(torch.empty(100, dtype=torch.uint8, device="meta"))
    assert tier.used_bytes == 0


def test_threads_share_the_arena():
    tier = PinnedHost(capacity="32MiB")
    wrong = []

    def work(seed: int) -> None:
        for step in range(100):
            tensor = torch.full((1000 * (seed + 1),), (seed * 100 + step) % 251, dtype=torch.uint8)
            slot = tier.store(tensor)
            if not slot.host.equal(tensor):
                wrong.append(step)
            tier.free(slot)

    in_threads(*[lambda seed=seed: work(seed) for seed in range(4)])
    assert not wrong
    assert tier.used_bytes == 0


def test_touched_pages_are_there_and_discarded_ones_are_not():
    pages = slabs.PlainPages()
    pages.touch(0, 5 * MIB + 4096)
    view = pages.view(0, 8 * MIB)
    view.fill_(7)
    pages.unmake(0, 4 * MIB)
    assert int(view[: 4 * MIB].sum()) == 0
    assert int(view[4 * MIB]) == 7


def test_the_node_of_a_device_is_read_from_the_system(tmp_path: Path, monkeypatch):
    cuda = SimpleNamespace(type="cuda")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    )
    assert numa.node_of(cuda, sysfs=tmp_path) is None
    entry = tmp_path / "0000:1b:00.0" / "numa_node"
    entry.parent.mkdir()
    entry.write_text("1\n")
    assert numa.node_of(cuda, sysfs=tmp_path) == 1
    entry.write_text("-1\n")
    assert numa.node_of(cuda, sysfs=tmp_path) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert numa.node_of(cuda, sysfs=tmp_path) is None
    assert numa.node_of(CPU) is None


def test_placing_pages_is_a_wish(monkeypatch):
    pages = slabs.PlainPages()
    numa.prefer_node(pages.address, MIB, 1023)  # a system refuses it or does not, and nothing is raised
    assert not numa.prefer_node(pages.address + 1, MIB, 0)  # the call does reach the system, which wants whole pages
    monkeypatch.setattr(numa.platform, "machine", lambda: "z80")
    assert not numa.prefer_node(pages.address, MIB, 0)


def test_a_forked_child_is_told_that_the_memory_is_not_its_own():
    tier = PinnedHost()
    tier.free(tier.store(torch.zeros(8, dtype=torch.uint8)))
    child = os.fork()
    if child == 0:
        try:
            tier.store(torch.zeros(8, dtype=torch.uint8))
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
