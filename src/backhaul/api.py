"""The verbs that users call, and the handle that they get.

Covers: ``offload``, ``Handle``, what is refused.
Does not cover: how anything is done (engine.py and below).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from backhaul.compiling import is_compiled, is_scripted
from backhaul.engine import Engine
from backhaul.naming import blocks_of
from backhaul.reporting import Report, Stats
from backhaul.scopes import Wrapper, paused, region, wrapper_of
from backhaul.sizes import parse_bytes
from backhaul.tiers.base import Tier

if TYPE_CHECKING:
    from backhaul.actions import Action
    from backhaul.plans import Plan

MIN_BYTES = 1 << 20


class Handle:
    """Management of one or more modules; a context manager that ends it.

    Dropping the handle changes nothing: the modules stay managed until ``remove``, or until they are gone themselves.
    """

    def __init__(
        self, engine: Engine, wrappers: Sequence[Wrapper], *, owns_tier: bool, tiers: Sequence[Tier] = (), strangers: Sequence[Tier] = ()
    ) -> None:
        self._engine = engine
        self._wrappers = wrappers
        self._owned = [engine.tier] if owns_tier else []  # closed at the end
        self._owned += tiers
        self._tiers = list(dict.fromkeys((engine.tier, *tiers, *strangers)))  # all that tensors move to

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
            disks = [tier for tier in self._tiers if tier.name == "disk"]
            hosts = [tier for tier in self._tiers if tier.name != "disk"]
            kept_by_reason = tally.kept_by_reason()
            return Stats(
                saved_bytes=tally.saved_bytes,
                kept_bytes=tally.saved_bytes - tally.offloaded_bytes - tally.recomputed_bytes,
                kept_by_reason=kept_by_reason,
                offloaded_bytes=tally.offloaded_bytes,
                reloaded_bytes=tally.reloaded_bytes,
                recomputed_bytes=tally.recomputed_bytes,
                futile_bytes=tally.futile_bytes,
                resident_bytes=sum(station.flow.resident_bytes for station in stations),
                peak_resident_bytes=sum(station.peak_resident_bytes for station in stations),
                host_bytes=sum(tier.used_bytes for tier in hosts),
                peak_host_bytes=sum(tier.peak_bytes for tier in hosts),
                disk_bytes=sum(tier.used_bytes for tier in disks),
                peak_disk_bytes=sum(tier.peak_bytes for tier in disks),
                pageable_bytes=sum(tier.pageable_bytes for tier in self._tiers),
                num_offloads=tally.num_offloads,
                num_demand_reloads=tally.num_demand_reloads,
                exposed_ms=sum(station.waits.total_ms for station in stations),
            )

    def report(self) -> Report:
        """Return what was done: print it, or take ``to_dict()``."""
        stats, tally = self.stats, self._engine.tally
        moved = stats.offloaded_bytes or stats.recomputed_bytes
        note = "" if moved else f"nothing was offloaded: {tally.why_nothing(self._engine.min_bytes)}"
        return Report(stats=stats, modules=tally.modules(), made_bytes=tally.made_bytes, note=note)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Manage code outside the modules, such as a loss. Each entry is a frame; inside a managed module it changes nothing.

        With a plan it goes by the plan's default action, since no rule is about it.

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
            if not engine.closed:
                for tier in self._owned:
                    tier.close()
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
    try:
        for prefix, root in named:
            wrappers.append(Wrapper(engine, root, prefix, is_root=True))
            if not is_compiled(root):
                for name, block in dict.fromkeys(blocks_of(root)):
                    if wrapper_of(block) is None:
                        wrappers.append(Wrapper(engine, block, f"{prefix}.{name}" if prefix else name, is_root=False))
    except BaseException:
        for wrapper in wrappers:
            wrapper.remove()
        raise
    return Handle(engine, wrappers, owns_tier=not isinstance(tier, Tier))


def apply(
    model: nn.Module,
    plan: "Plan | Mapping[str, Action | str]",
    *,
    activation_budget: int | str | None = None,
    tier: "str | Tier | None" = None,
    min_bytes: int | str | None = None,
    verify_recompute: bool = False,
) -> Handle:
    """Keep, move or make again what ``model`` saves for backward, module by module as ``plan`` says.

    Where the action is ``"offload"``, saved tensors move as with ``offload``; and those that plain code makes cheaply from what is kept in
    any case (products, activations, norms, casts, gathers) are made again, if that is certain to give the same bits. Where it is
    ``"recompute"``, a module keeps what it was called with alone, and runs again when what it has saved, or returned, is needed. Where it
    is ``"save"``, the device keeps them. A storage that several modules save is kept if any of them says so; else it is made again if its
    producer says so.

    Args:
        model: one module, whose forward is a frame.
        plan: a ``Plan``, or its rules: globs over module names, and an action for each; what no rule covers is saved.
        activation_budget: as with ``offload``.
        tier: as with ``offload``; a rule can name another (``bh.Offload(tier="disk")``).
        min_bytes: as with ``offload``; what a recomputed module saves inside is made again whatever its size.
        verify_recompute: compare values that are made again with what they were, and raise where they differ. Slow: for finding out.

    Raises:
        ValueError: for a rule that matches nothing or that contradicts another, an unknown action, a plan for another model, a rule that
            reaches into a compiled module, and for what ``offload`` refuses. In the first forward, for a module that cannot run twice.

    >>> import torch, backhaul as bh
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    >>> with bh.apply(model, {"0": "recompute", "2": "recompute", "*": "offload"}, tier="host", activation_budget=0, min_bytes=0) as handle:
    ...     model(torch.ones(32, 64)).sum().backward()
    >>> handle.stats.recomputed_bytes, handle.stats.offloaded_bytes  # outputs of norm and GELU; inputs of both
    (16640, 16384)
    """
    from backhaul.applying import wrappers_for
    from backhaul.plans import Plan

    named = _named_modules(model)
    if len(named) != 1 or named[0][1] is not model:
        raise ValueError("a plan is applied to one module that is called itself; a ModuleList is not, so apply to each of its elements")
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    budget = None if activation_budget is None else parse_bytes(activation_budget, what="activation_budget")
    smallest = MIN_BYTES if min_bytes is None else parse_bytes(min_bytes, what="min_bytes")
    engine = Engine([model], tier=_tier(tier, named), activation_budget=budget, min_bytes=smallest)
    others: dict[str, Tier] = {}  # by name

    def tier_of(wanted: "str | Tier") -> Tier:
        if isinstance(wanted, Tier):
            return wanted
        if wanted == engine.tier.name:
            return engine.tier
        return others.setdefault(wanted, _tier(wanted, named))

    owns_tier = not isinstance(tier, Tier)
    try:
        wrappers, strangers = wrappers_for(engine, model, plan, tier_of, verify=verify_recompute)
    except BaseException:
        for each in (*([engine.tier] if owns_tier else []), *others.values()):
            each.close()
        raise
    return Handle(engine, wrappers, owns_tier=owns_tier, tiers=list(others.values()), strangers=strangers)


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
            if module is root and is_scripted(module):
                raise ValueError(f"{prefix or 'the model'!r} has been compiled by torch.jit; manage what is around it")
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
