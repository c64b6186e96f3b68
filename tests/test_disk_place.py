"""The disk tier goes where it is told to, and says so when that is no place for it."""

from pathlib import Path

import pytest
import torch

from backhaul.tiers import disk as disk_module
from backhaul.tiers.disk import Disk, filesystem_type


def test_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="create it or pass another path"):
        Disk(tmp_path / "missing")


def test_default_is_the_directory_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module.tempfile, "tempdir", str(tmp_path))
    assert Disk().path == tmp_path


def test_directory_in_memory_warns_once(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "filesystem_type", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match="tmpfs.*TMPDIR") as caught:
        tier = Disk(tmp_path)
        tier.free(tier.store(torch.ones(10, dtype=torch.uint8)))
        tier.close()
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me", "ext4"),
        ("/tmp", "tmpfs"),
        ("/tmp/deep/down", "tmpfs"),
        ("/tmpfiles", "ext4"),
        ("/mnt/two words/x", "xfs"),
        ("/mnt/é", "btrfs"),
        ("/over", "nfs"),
    ],
)
def test_file_system_is_that_of_the_longest_mount_point(tmp_path, path, expected):
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "28 27 0:25 / /tmp rw shared:3 master:1 - tmpfs tmpfs rw\n"
        "29 27 0:26 / /mnt/two\\040words rw - xfs /dev/vdb rw\n"
        "30 27 0:27 / /mnt/é rw - btrfs /dev/vdc rw\n"
        "31 27 0:28 / /over rw - tmpfs tmpfs rw\n"
        "32 31 0:29 / /over rw - nfs server:/over rw\n"
    )
    assert filesystem_type(Path(path), mountinfo) == expected


def test_file_system_is_unknown_where_the_system_does_not_tell(tmp_path):
    assert filesystem_type(tmp_path, tmp_path / "missing") is None
