"""backhaul: activation memory for PyTorch. ``import backhaul as bh``; the README says what for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backhaul import presets
    from backhaul.actions import Offload, Recompute, Save
    from backhaul.api import Handle, apply, offload, release_host_memory
    from backhaul.plans import Plan
    from backhaul.reporting import Report, Stats
    from backhaul.tiers.base import Tier, TierFull
    from backhaul.tiers.disk import Disk
    from backhaul.tiers.host import PinnedHost

__version__ = "0.1.0"

_HOMES = {
    "Disk": "backhaul.tiers.disk",
    "Handle": "backhaul.api",
    "Offload": "backhaul.actions",
    "PinnedHost": "backhaul.tiers.host",
    "Plan": "backhaul.plans",
    "Recompute": "backhaul.actions",
    "Report": "backhaul.reporting",
    "Save": "backhaul.actions",
    "Stats": "backhaul.reporting",
    "Tier": "backhaul.tiers.base",
    "TierFull": "backhaul.tiers.base",
    "apply": "backhaul.api",
    "offload": "backhaul.api",
    "release_host_memory": "backhaul.api",
}

__all__ = [
    "Disk",
    "Handle",
    "Offload",
    "PinnedHost",
    "Plan",
    "Recompute",
    "Report",
    "Save",
    "Stats",
    "Tier",
    "TierFull",
    "apply",
    "offload",
    "presets",
    "release_host_memory",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "presets":
        return importlib.import_module("backhaul.presets")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
