"""How fast each device's link is, alone and beside the other's.

Covers: copies each way and both ways, through backhaul's lanes and as one plain copy; which node the pages of the arena lie on.
Does not cover: copies beside compute (sharded.py, pipeline.py).
"""

import argparse
import ctypes
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

import backhaul as bh
from backhaul.tiers.numa import node_of
from benchmarks.two_devices.ranks import NUM_RANKS, Findings, Rank

MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # numbers of the system call: libnuma is often not installed
STRIDE = 2 * 2**20  # one page in so many bytes is asked about
DIRECTIONS = ("d2h", "h2d", "both")


class Lanes:
    """Copies through the pinned tier."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.target = source, torch.empty_like(source)
        self.tier = bh.PinnedHost()
        self.slot = self.tier.store(source)

    def out(self) -> None:
        self.tier.free(self.tier.store(self.source))

    def back(self) -> None:
        self.tier.load(self.slot, self.target)


class Plain:
    """One large copy each way, on a stream of its own."""

    def __init__(self, source: Tensor) -> None:
        on_gpu = source.device.type == "cuda"
        self.source, self.target = source, torch.empty_like(source)
        self.there, self.here = (torch.zeros(source.shape, dtype=source.dtype, pin_memory=on_gpu) for _ in range(2))
        self.streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else [nullcontext(), nullcontext()]

    def out(self) -> None:
        with self.streams[0]:
            self.there.copy_(self.source, non_blocking=True)

    def back(self) -> None:
        with self.streams[1]:
            self.target.copy_(self.here, non_blocking=True)


def nodes_of_pages(address: int, num_bytes: int) -> dict[int, int] | None:
    """Return how many of the sampled pages lie on each node; ``None`` where the system does not say."""
    number = MOVE_PAGES.get(platform.machine())
    addresses = range(address, address + num_bytes, STRIDE)
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    nodes = (ctypes.c_int * len(addresses))()
    if number is None or platform.system() != "Linux":
        return None
    arguments = ctypes.c_long(0), ctypes.c_ulong(len(addresses)), pages, None, nodes, ctypes.c_int(0)  # no target nodes: only ask
    if ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments):
        return None
    return dict(Counter(nodes))


def run(rank: Rank, findings: Findings, given: str | None, options: argparse.Namespace) -> None:
    num_bytes, copies, tries = (2**30, 4, 3) if rank.full else (2**20, 2, 1)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=rank.device)
    lanes, plain = Lanes(source), Plain(source)

    lanes.back()
    rank.synchronize()
    same = rank.all(torch.equal(lanes.target, source))
    findings.must("bytes come back as they were", same)

    nodes = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    device_nodes = rank.gather(node_of(rank.device))
    page_nodes = rank.gather(nodes_of_pages(lanes.slot.host.data_ptr(), num_bytes))
    findings.note(nodes=nodes, device_nodes=device_nodes, page_nodes=page_nodes)
    where = f"nodes {nodes}; devices on {device_nodes}; pages on {page_nodes}"
    known = [(node, pages) for node, pages in zip(device_nodes, page_nodes, strict=True) if node is not None and pages is not None]
    findings.aim("arena on the device's node", all(set(pages) == {node} for node, pages in known), where)

    rates: dict[str, dict[str, list[float]]] = {}  # by way and who, then by direction: GB/s of each rank that copies
    for way, name in ((lanes, "lanes"), (plain, "plain")):
        for who in ([0], [1], [0, 1]):
            rows = rates[f"{name}, {who}"] = {}
            for direction in DIRECTIONS:
                issue = {"d2h": [way.out], "h2d": [way.back], "both": [way.out, way.back]}[direction]
                measured = [_rates(rank, who, issue, copies, num_bytes) for _ in range(tries)]
                rows[direction] = [statistics.median(each) for each in zip(*measured, strict=True)]
            text = "  ".join(f"{direction} " + " ".join(f"{rate:.1f}" for rate in rows[direction]) for direction in DIRECTIONS)
            findings.tell(f"{name}: {'both devices at once' if len(who) > 1 else f'device {who[0]} alone'}", f"{text} GB/s")
    findings.note(gbps=rates)
    for direction in DIRECTIONS:
        together = rates["lanes, [0, 1]"][direction]
        shares = [together[index] / rates[f"lanes, [{index}]"][direction][0] for index in range(NUM_RANKS)]
        findings.aim(f"{direction}: at once as fast as alone (95 %)", min(shares) >= 0.95, " ".join(f"{share:.1%}" for share in shares))
        of_plain = [
            a / b
            for who in ("[0]", "[1]", "[0, 1]")
            for a, b in zip(rates[f"lanes, {who}"][direction], rates[f"plain, {who}"][direction], strict=True)
        ]
        findings.aim(f"{direction}: lanes as fast as plain copies (98 %)", min(of_plain) >= 0.98, " ".join(f"{x:.1%}" for x in of_plain))


def _rates(rank: Rank, who: list[int], issue: list[Callable[[], None]], copies: int, num_bytes: int) -> list[float]:
    """Return the GB/s of the ranks that copy, while the others wait."""
    rank.meet()
    start = time.perf_counter()
    if rank.index in who:
        for _ in range(copies):
            for copy in issue:
                copy()
        rank.synchronize()
    gbps = copies * len(issue) * num_bytes / (time.perf_counter() - start) / 1e9
    found = rank.gather(gbps)
    return [found[index] for index in who]
