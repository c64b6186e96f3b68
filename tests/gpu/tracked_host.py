"""A host tier whose slots can all be freed, so that a test which drops slots, or fails, leaves the process's arena empty for the next."""

import torch

from backhaul.tiers.host import HostSlot, PinnedHost, release_host_memory


class TrackedHost(PinnedHost):
    """Remembers its slots."""

    def __init__(self, capacity: int | str) -> None:
        super().__init__(capacity)
        self._slots: list[HostSlot] = []

    def _take(self, *args: object) -> HostSlot:
        slot = super()._take(*args)  # type: ignore[arg-type]
        self._slots.append(slot)
        return slot

    def empty(self) -> None:
        """Free all slots and give all memory back to the system."""
        torch.cuda.synchronize()
        for slot in self._slots:
            self.free(slot)
        self._slots.clear()
        release_host_memory()
