"""Which memory node a device hangs on, and pages placed there.

Covers: Linux; page-locked memory on the far socket copies at a third of the speed, and cannot move once it is locked.
Does not cover: which pages, or when (host.py). Where the node is unknown or the container forbids it, nothing happens.
"""

import contextlib
import ctypes
import platform
from pathlib import Path
from typing import Any

import torch

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call: libnuma is often not installed
_PREFERRED = 1  # that node first, another one when it is full
_MAX_NODES = 1024


def node_of(device: torch.device, *, sysfs: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the node next to a device; ``None`` where there is one node only, or where it cannot be told."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((sysfs / bus_id / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Have pages that nobody has touched yet placed on a node; say whether the system agreed."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    syscall = ctypes.CDLL(None).syscall
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), _PREFERRED, mask, ctypes.c_ulong(_MAX_NODES), 0
    return bool(syscall(ctypes.c_long(number), *arguments) == 0)
