"""backhaul: activation memory for PyTorch. ``import backhaul as bh``; the README says what for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backhaul.api import Handle, offload, release_host_memory
    from backhaul.reporting import Report, Stats
    from backhaul.tiers.base import Tier, TierFull
    from backhaul.tiers.disk import Disk
    from backhaul.tiers.host import PinnedHost

__version__ = "0.1.0"

_HOMES = {
    "Disk": "backhaul.tiers.disk",
    "Handle": "backhaul.api",
    "PinnedHost": "backhaul.tiers.host",
    "Report": "backhaul.reporting",
    "Stats": "backhaul.reporting",
    "Tier": "backhaul.tiers.base",
    "TierFull": "backhaul.tiers.base",
    "offload": "backhaul.api",
    "release_host_memory": "backhaul.api",
}

__all__ = [
    "Disk",
    "Handle",
    "PinnedHost",
    "Report",
    "Stats",
    "Tier",
    "TierFull",
    "offload",
    "release_host_memory",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
