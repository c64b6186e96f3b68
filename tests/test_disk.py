"""The disk tier leaves nothing behind, gives space back, and turns every failure of the medium into an OSError or a full tier."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import deque

import pytest
import torch

from backhaul.testing import check_tier
from backhaul.tiers import disk as disk_module
from backhaul.tiers.base import ALIGNMENT, TierFull
from backhaul.tiers.disk import NUM_THREADS, Disk

MiB = 2**20


def noise(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def load(tier, slot):
    target = torch.zeros(slot.num_bytes, dtype=torch.uint8)
    tier.load(slot, target).wait()
    return target


def disk_bytes(slot):
    return os.fstat(slot.segment.fd).st_blocks * 512


def run_python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def tier(tmp_path):
    tier = Disk(tmp_path)
    yield tier
    tier.close()
    assert os.listdir(tmp_path) == []


# Space


def test_C14_use_of_the_disk_shows_and_ends(tier):
    assert (tier.used_bytes, tier.num_files) == (0, 0)
    slot = tier.store(noise(MiB))
    slot.stored.wait()
    assert (tier.used_bytes, tier.num_files) == (MiB, 1)
    assert disk_bytes(slot) >= MiB
    tier.free(slot)
    assert (tier.used_bytes, tier.num_files, tier.peak_bytes) == (0, 0, MiB)


def test_space_of_each_freed_blob_goes_back_while_others_stay(tier):
    slots = [tier.store(noise(MiB, seed)) for seed in range(2 * NUM_THREADS)]
    for slot in slots:
        slot.stored.wait()
    first, second = slots[0], slots[NUM_THREADS]
    assert first.segment is second.segment and disk_bytes(second) >= 2 * MiB
    tier.free(first)
    assert tier.used_bytes == (2 * NUM_THREADS - 1) * MiB  # whoever asks gives it back
    assert MiB <= disk_bytes(second) < 2 * MiB
    assert torch.equal(load(tier, second), noise(MiB, NUM_THREADS))


@pytest.mark.parametrize("use", ["store", "load"])
def test_next_use_of_the_tier_gives_freed_space_back(tier, use):
    kept, freed = (tier.store(noise(MiB, seed)) for seed in range(2))
    for slot in (kept, freed):
        slot.stored.wait()
    segment = weakref.ref(freed.segment)
    assert segment().num_slots == 1
    tier.free(freed)
    assert segment().num_slots == 1  # free itself does nothing: a finalizer may have called it
    if use == "store":
        tier.store(noise(10)).stored.wait()
    else:
        load(tier, kept)
    deadline = time.monotonic() + 10
    while segment().num_slots:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_room_of_a_freed_blob_is_there_for_the_next_store(tmp_path):
    tier = Disk(tmp_path, capacity=MiB)
    for _ in range(3):
        slot = tier.store(noise(MiB))
        slot.stored.wait()
        tier.free(slot)


def test_used_bytes_are_right_while_another_thread_takes_back_what_was_freed(tier):
    class Slow(deque):
        def popleft(self):
            slot = super().popleft()
            time.sleep(0.1)
            return slot

    slot = tier.store(noise(100))
    slot.stored.wait()
    tier._freed = Slow()
    tier.free(slot)
    thread = threading.Thread(target=lambda: tier.used_bytes)
    thread.start()
    while tier._freed:
        time.sleep(0.001)
    assert tier.used_bytes == 0
    thread.join()


@pytest.mark.parametrize("can_punch", [True, False])
def test_space_goes_back_though_a_forked_child_holds_the_file_open(tier, monkeypatch, can_punch):
    if not can_punch:
        monkeypatch.setattr(disk_module.Segment, "punch", lambda *arguments: None)
    slot = tier.store(noise(MiB))
    slot.stored.wait()
    held_elsewhere = os.dup(slot.segment.fd)
    try:
        assert os.fstat(held_elsewhere).st_blocks > 0
        tier.free(slot)
        assert tier.used_bytes == 0
        assert os.fstat(held_elsewhere).st_blocks == 0
    finally:
        os.close(held_elsewhere)


def test_many_blobs_take_few_descriptors(tier):
    before = len(os.listdir("/proc/self/fd"))
    slots = [tier.store(noise(1000, seed)) for seed in range(500)]
    assert len(os.listdir("/proc/self/fd")) - before == tier.num_files == NUM_THREADS
    for slot in slots:
        tier.free(slot)
    for slot in slots:
        slot.stored.wait()
    assert tier.num_files == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_cut_when_they_grow_large(tier, monkeypatch):
    monkeypatch.setattr(disk_module, "SEGMENT_BYTES", MiB)
    slots = [tier.store(noise(MiB // 2 + 1, seed)) for seed in range(3 * NUM_THREADS)]
    assert tier.num_files == len(slots)
    for seed, slot in enumerate(slots):
        assert torch.equal(load(tier, slot), noise(MiB // 2 + 1, seed))
        tier.free(slot)
    assert tier.num_files == 0


def test_C38_blobs_are_aligned(tier):
    for num_bytes in (1, 3, 5, 257, 4097):
        slots = [tier.store(noise(num_bytes)) for _ in range(2 * NUM_THREADS)]
        assert all(slot.offset % ALIGNMENT == 0 for slot in slots)


def test_capacity_is_a_number_or_a_text(tmp_path):
    assert Disk(tmp_path, "2MiB").capacity_bytes == Disk(tmp_path, capacity=2 * MiB).capacity_bytes == 2 * MiB
    assert Disk(tmp_path).capacity_bytes is None


# Nothing is left behind


def test_file_has_no_name_and_one_owner(tier, tmp_path):
    slot = tier.store(noise(10))
    status = os.fstat(slot.segment.fd)
    assert status.st_nlink == 0 and status.st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_C31_killed_process_leaves_no_file(tmp_path, signal_number):
    process = run_python(
        """
        import sys, time, torch
        from backhaul.tiers.disk import Disk
        tier = Disk(sys.argv[1])
        slots = [tier.store(torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(8)]
        print("stored", flush=True)
        time.sleep(60)
        """,
        tmp_path,
    )
    assert process.stdout.readline() == "stored\n", process.communicate()[1]
    process.send_signal(signal_number)
    process.communicate()
    assert process.returncode == -signal_number  # nobody took the signal over
    assert os.listdir(tmp_path) == []


def test_C31_exception_ends_the_process_with_copies_under_way(tmp_path):
    process = run_python(
        """
        import sys, torch
        from backhaul.tiers.disk import Disk
        tier = Disk(sys.argv[1])
        slots = [tier.store(torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(30)]
        loads = [tier.load(slot, torch.empty(1 << 20, dtype=torch.uint8)) for slot in slots]
        raise SystemExit("as the user wanted")
        """,
        tmp_path,
    )
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "as the user wanted\n")
    assert os.listdir(tmp_path) == []


def test_threads_start_late_and_end_with_the_tier(tier):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("backhaul-disk")]

    assert threads() == []
    tier.free(tier.store(noise(10)))
    assert threads()
    tier.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="after close"):
        tier.store(noise(10))


def test_tier_that_nobody_closes_closes_its_files():
    before = len(os.listdir("/proc/self/fd"))
    tier = Disk()
    slot = tier.store(noise(MiB))
    slot.stored.wait()
    assert len(os.listdir("/proc/self/fd")) > before
    del tier, slot
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline  # a thread may hold the tier a moment longer
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_cannot_harm_its_parent(tier):
    slot = tier.store(noise(MiB))
    slot.stored.wait()
    child = os.fork()
    if child == 0:
        try:
            tier.free(slot)
            tier.close()
            with pytest.raises(RuntimeError, match="fork"):
                tier.store(noise(10))
            with pytest.raises(RuntimeError, match="fork"):
                tier.load(slot, noise(MiB))
            del slot, tier
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(load(tier, slot), noise(MiB))


# Failures


def test_C31_full_disk_is_a_full_tier_and_changes_nothing(tier, monkeypatch):
    kept = tier.store(noise(MiB, 1))
    kept.stored.wait()
    monkeypatch.setattr(disk_module, "_free_bytes", lambda path: MiB)
    freed = tier.store(noise(MiB))
    freed.stored.wait()
    tier.free(freed)
    assert tier.used_bytes == MiB
    with pytest.raises(TierFull, match=r"1\.0 MiB"):
        tier.store(noise(MiB + 1))
    assert (tier.used_bytes, tier.num_files) == (MiB, 1)
    assert torch.equal(load(tier, kept), noise(MiB, 1))


def test_C31_bytes_still_to_be_written_are_not_free(tier, monkeypatch):
    monkeypatch.setattr(disk_module, "_free_bytes", lambda path: MiB)
    gate, pwrite = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: gate.wait() and pwrite(*arguments))
    slot = tier.store(noise(MiB))
    try:
        with pytest.raises(TierFull):
            tier.store(noise(1))
    finally:
        gate.set()
    slot.stored.wait()
    tier.store(noise(1)).stored.wait()


def test_C31_failed_write_is_raised_by_every_wait_and_its_space_is_given_back(tier, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        source = noise(MiB)
        storage = weakref.ref(source.untyped_storage())
        slot = tier.store(source)
        while not slot.stored.done():
            time.sleep(0.001)
        del source
        assert storage() is None  # no traceback keeps it, though nobody has waited
        for _ in range(2):
            with pytest.raises(OSError, match="No space") as caught:
                slot.stored.wait()
            assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            load(tier, slot)
    tier.free(slot)
    assert (tier.used_bytes, tier.num_files) == (0, 0)
    slot = tier.store(noise(MiB))
    assert torch.equal(load(tier, slot), noise(MiB))


def test_no_more_descriptors_leave_the_tier_as_it_was(tier, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.tempfile, "TemporaryFile", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            tier.store(noise(10))
    assert (tier.used_bytes, tier.num_files, tier.peak_bytes) == (0, 0, 0)


def test_source_is_let_go_before_anybody_is_told(tier, monkeypatch):
    gate, pwrite, end_copy, gone = threading.Event(), os.pwrite, Disk._end_copy, []
    monkeypatch.setattr(os, "pwrite", lambda *arguments: gate.wait() and pwrite(*arguments))
    monkeypatch.setattr(Disk, "_end_copy", lambda tier, slot: (gone.append(storage() is None), end_copy(tier, slot)))
    source = noise(MiB)
    storage = weakref.ref(source.untyped_storage())
    slot = tier.store(source)
    del source
    gate.set()
    slot.stored.wait()
    assert gone == [True]


def test_short_writes_and_reads_are_continued(tier, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:777]], offset))
    slot = tier.store(noise(10_001))
    assert torch.equal(load(tier, slot), noise(10_001))


def test_file_that_lost_its_end_is_an_error(tier):
    slot = tier.store(noise(MiB))
    slot.stored.wait()
    os.ftruncate(slot.segment.fd, 1000)
    with pytest.raises(OSError, match="before the blob does"):
        load(tier, slot)


def test_blob_freed_before_its_turn_is_not_written(tier, monkeypatch):
    gate, pwrite, num_bytes = threading.Event(), os.pwrite, []

    def gated(fd, data, offset):
        gate.wait()
        num_bytes.append(len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", gated)
    slots = [tier.store(noise(100)) for _ in range(NUM_THREADS)]  # every thread has one
    freed = tier.store(noise(200))
    tier.free(freed)
    gate.set()
    freed.stored.wait()
    for slot in slots:
        slot.stored.wait()
    assert num_bytes == [100] * NUM_THREADS


# Speed and needs


def test_rates_are_those_of_all_threads_together_and_of_large_blobs(tier, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *arguments: time.sleep(0.05) or pwrite(*arguments))
    monkeypatch.setattr(os, "preadv", lambda *arguments: time.sleep(0.1) or preadv(*arguments))
    small = tier.store(noise(MiB - 1))
    load(tier, small)
    assert tier.rates_gbps is None
    slots = [tier.store(noise(MiB)) for _ in range(4 * NUM_THREADS)]
    for slot in slots:
        slot.stored.wait()
    assert tier.rates_gbps is None  # reads have not been measured
    for transfer in [tier.load(slot, noise(MiB)) for slot in slots]:
        transfer.wait()
    writes, reads = tier.rates_gbps
    one_writer, one_reader = MiB / 0.05 / 1e9, MiB / 0.1 / 1e9
    assert 1.5 * one_writer < writes <= 1.1 * NUM_THREADS * one_writer
    assert 1.5 * one_reader < reads <= 1.1 * NUM_THREADS * one_reader


def test_numpy_is_not_needed(tmp_path):
    process = run_python(
        """
        import sys
        sys.modules["numpy"] = None
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that numpy is missing
            import torch
        from backhaul.tiers.disk import Disk
        tier, source = Disk(sys.argv[1]), torch.arange(200, dtype=torch.uint8)
        slot, target = tier.store(source), torch.zeros(200, dtype=torch.uint8)
        tier.load(slot, target).wait()
        assert torch.equal(source, target)
        """,
        tmp_path,
    )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


# Tensors on a device: the way through host memory, here with the host as the device


@pytest.fixture
def staged(tier, monkeypatch):
    monkeypatch.setattr(disk_module, "_is_on_host", lambda tensor: False)
    return tier


def test_staged_tier_keeps_the_contract(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "_is_on_host", lambda tensor: False)
    check_tier(lambda: Disk(tmp_path))
    check_tier(lambda: Disk(tmp_path, "8MiB"))


def test_staging_memory_is_free_once_bytes_are_written(staged):
    slots = [staged.store(noise(MiB, seed)) for seed in range(4)]
    for slot in slots:
        slot.stored.wait_for_thread()
    assert staged._stage.used_bytes == 0 < staged._stage.peak_bytes
    assert torch.equal(load(staged, slots[2]), noise(MiB, 2))
    assert staged._stage.used_bytes == 0


def test_staged_bytes_that_cannot_be_written_stay_in_host_memory(staged, monkeypatch):
    """Their device tensor may be gone before the write fails."""

    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    slot = staged.store(noise(MiB))
    assert torch.equal(load(staged, slot), noise(MiB))
    with pytest.raises(OSError, match="No space"):
        slot.stored.wait()
    assert staged._stage.used_bytes == MiB
    staged.free(slot)
    assert (staged.used_bytes, staged.num_files, staged._stage.used_bytes) == (0, 0, 0)


def test_full_stage_refuses_stores_but_never_loads(staged):
    slot = staged.store(noise(MiB))
    slot.stored.wait_for_thread()
    stage = staged._stage
    stage._capacity = MiB
    hog = stage.store(noise(MiB))
    with pytest.raises(TierFull):
        staged.store(noise(MiB))
    assert (staged.used_bytes, staged.num_files) == (MiB, 1)
    assert torch.equal(load(staged, slot), noise(MiB))
    stage.free(hog)


def test_stage_is_not_left_filled_by_a_full_disk(staged, monkeypatch):
    monkeypatch.setattr(disk_module, "_free_bytes", lambda path: 0)
    with pytest.raises(TierFull):
        staged.store(noise(MiB))
    assert staged._stage.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_C20_tensors_on_a_device_keep_the_contract(tmp_path):
    device = torch.accelerator.current_accelerator()
    check_tier(lambda: Disk(tmp_path), device=device)
    check_tier(lambda: Disk(tmp_path, "8MiB"), device=device)
