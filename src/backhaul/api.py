"""The verbs that users call, and the handle that they get.

Covers: ``offload``, ``Handle``, what is refused.
Does not cover: how anything is done (engine.py and below).
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from backhaul import _torch
from backhaul.engine import Engine
from backhaul.reporting import Report, Stats
from backhaul.scopes import Wrapper, blocks_of, clean_fqn, paused, region, wrapper_of
from backhaul.sizes import parse_bytes
from backhaul.tiers.base import Tier

MIN_BYTES = 1 << 20


class Handle:
    """Management of one or more modules; a context manager that ends it.

    Dropping the handle changes nothing: the modules stay managed until ``remove``, or until they are gone themselves.
    """

    def __init__(self, engine: Engine, wrappers: Sequence[Wrapper], *, owns_tier: bool) -> None:
        self._engine = engine
        self._wrappers = wrappers
        self._owns_tier = owns_tier

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __reduce__(self) -> str:
        raise TypeError("a Handle cannot be copied or pickled; copy the model, which then carries no handle, and manage the copy")

    @property
    def stats(self) -> Stats:
        """What has been counted so far, as a frozen snapshot."""
        engine = self._engine
        with engine.lock:
            engine.tidy_up()
            tally, stations = engine.tally, engine.stations.values()
            on_disk = engine.tier.name == "disk"
            used, peak = engine.tier.used_bytes, engine.tier.peak_bytes
            kept_by_reason = tally.kept_by_reason()
            return Stats(
                saved_bytes=tally.saved_bytes,
                kept_bytes=tally.saved_bytes - tally.offloaded_bytes,
                kept_by_reason=kept_by_reason,
                offloaded_bytes=tally.offloaded_bytes,
                reloaded_bytes=tally.reloaded_bytes,
                recomputed_bytes=0,
                futile_bytes=tally.futile_bytes,
                resident_bytes=sum(station.flow.resident_bytes for station in stations),
                peak_resident_bytes=sum(station.peak_resident_bytes for station in stations),
                host_bytes=0 if on_disk else used,
                peak_host_bytes=0 if on_disk else peak,
                disk_bytes=used if on_disk else 0,
                peak_disk_bytes=peak if on_disk else 0,
                pageable_bytes=engine.tier.pageable_bytes,
                num_offloads=tally.num_offloads,
                num_demand_reloads=tally.num_demand_reloads,
                exposed_ms=sum(station.waits.total_ms for station in stations),
            )

    def report(self) -> Report:
        """Return what was done: print it, or take ``to_dict()``."""
        stats, tally = self.stats, self._engine.tally
        note = "" if stats.offloaded_bytes else f"nothing was offloaded: {tally.why_nothing(self._engine.min_bytes)}"
        return Report(stats=stats, modules=tally.modules(), note=note)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Manage code outside the modules, such as a loss. Each entry is a frame; inside a managed module it changes nothing.

        >>> import torch, backhaul as bh
        >>> handle = bh.offload(torch.nn.Linear(4, 4), tier="host", min_bytes=0)
        >>> x = torch.ones(8, requires_grad=True)
        >>> with handle.region():
        ...     loss = (x * 2).exp().sum()
        >>> loss.backward()
        >>> handle.remove()
        """
        return contextlib.nullcontext() if self._engine.closed else region(self._engine)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Step aside on this thread: the hooks are off until the context ends, also for managed modules called inside.

        ``torch.func`` needs it.
        """
        return paused(self._engine)

    def remove(self) -> None:
        """Leave the modules exactly as they were. What is saved already still comes back. Calling it again does nothing."""
        for wrapper in self._wrappers:
            wrapper.remove()
        engine = self._engine
        with engine.lock:
            engine.tidy_up()
            if self._owns_tier and not engine.closed:
                engine.tier.close()
            engine.closed = True


def offload(
    modules: nn.Module | Sequence[nn.Module],
    *,
    activation_budget: int | str | None = None,
    tier: "str | Tier | None" = None,
    min_bytes: int | str | None = None,
) -> Handle:
    """Move saved tensors of ``modules`` out of device memory between forward and backward.

    Autograd keeps tensors from the forward pass until the backward pass needs them. While a module is managed they are copied to ``tier``
    and dropped, and come back, bit for bit, before they are needed. Nothing in the model changes; parameters and whatever shares their
    storage stay. The first step shows the order in which tensors are needed, and later steps bring them back ahead of time.

    Args:
        modules: the modules to manage, none inside another. A ``ModuleList`` stands for its elements. Each forward is a frame: one
            microbatch.
        activation_budget: bytes of saved tensors that may stay on each device. ``None`` moves what the link hides, 0 everything that can
            move.
        tier: ``"host"`` (pinned memory), ``"disk"``, or a ``Tier``. The default is host on an accelerator and disk on a CPU.
        min_bytes: smaller storages stay; 1 MiB unless given, 0 moves all.

    Raises:
        ValueError: for an unknown tier, a size that is none, a module given twice or managed already.

    >>> import torch, backhaul as bh
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    >>> with bh.offload(model, tier="host", activation_budget=0, min_bytes=0) as handle:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> handle.stats.offloaded_bytes
    24576
    """
    named = _named_modules(modules)
    budget = None if activation_budget is None else parse_bytes(activation_budget, what="activation_budget")
    smallest = MIN_BYTES if min_bytes is None else parse_bytes(min_bytes, what="min_bytes")
    engine = Engine([module for _, module in named], tier=_tier(tier, named), activation_budget=budget, min_bytes=smallest)
    wrappers: list[Wrapper] = []
    for prefix, root in named:
        wrappers.append(Wrapper(engine, root, clean_fqn(prefix), is_root=True))
        if _torch.compiled_call(root) is None and _torch.original_module(root) is None:
            for name, block in dict.fromkeys(blocks_of(root)):
                if wrapper_of(block) is None:
                    wrappers.append(Wrapper(engine, block, clean_fqn(f"{prefix}.{name}" if prefix else name), is_root=False))
    return Handle(engine, wrappers, owns_tier=not isinstance(tier, Tier))


def release_host_memory() -> None:
    """Give pinned host memory that no handle uses back to the system."""
    from backhaul.tiers import host

    host.release_host_memory()


def _named_modules(modules: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules to manage with the prefix of their names, or refuse them."""
    if isinstance(modules, nn.Module):
        named = list(_callable_modules("", modules))
    elif isinstance(modules, Sequence):
        for index, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise ValueError(f"modules[{index}] is a {type(module).__name__}, not a module; give torch.nn.Module instances")
        named = [pair for index, module in enumerate(modules) for pair in _callable_modules(str(index), module)]
    else:
        raise ValueError(f"modules is a {type(modules).__name__}; give a torch.nn.Module or a list of them")
    if not named:
        raise ValueError("there is no module to manage: the list is empty")
    names: dict[nn.Module, str] = {}
    for prefix, root in named:
        if root in names:
            raise ValueError(f"{prefix!r} is the same module as {names[root]!r}; give each module once, and none that another one contains")
        names[root] = prefix
    for prefix, root in named:
        for name, module in root.named_modules(prefix=prefix):
            if wrapper_of(module) is not None:
                known = name or type(module).__name__
                raise ValueError(f"{known!r} is managed by a handle already; remove that handle first, or leave the module out")
            if module is not root and module in names:
                inner, outer = names[module], prefix
                raise ValueError(f"{inner!r} is inside {outer!r}; give each module once, and none that another one contains")
    return named


def _callable_modules(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module, or where it is a mere container, which is never called, what it contains."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for name, child in module.named_children():
            yield from _callable_modules(f"{prefix}.{name}" if prefix else name, child)
    else:
        yield prefix, module


def _tier(tier: "str | Tier | None", named: Sequence[tuple[str, nn.Module]]) -> Tier:
    if isinstance(tier, Tier):
        return tier
    if tier is None:
        devices = {tensor.device.type for _, module in named for tensor in (*module.parameters(), *module.buffers())}
        tier = "disk" if devices == {"cpu"} or not torch.accelerator.is_available() else "host"
    if tier == "host":
        from backhaul.tiers.host import PinnedHost

        return PinnedHost()
    if tier == "disk":
        from backhaul.tiers.disk import Disk

        return Disk()
    raise ValueError(f'tier={tier!r} is unknown; use "host", "disk" or a backhaul.Tier')
