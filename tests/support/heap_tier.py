"""The reference tier, with which the tests compare others: plain memory of this process."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.memory.tier import UncachedTier
from penstock.memory.tier_host import ViewedRoom


class HeapRoom(ViewedRoom):
    """A room in plain memory of this process."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._memory = bytearray(nbytes)

    def views(self) -> Sequence[memoryview]:
        """See `HostRoom.views`."""
        return [memoryview(self._memory)]

    def close(self) -> None:
        """See `Room.close`."""
        self._memory = bytearray()


class HeapTier(UncachedTier):
    """The reference tier in plain memory, with any name."""

    num_threads = 1

    def __init__(self, name: str = "host", unit_bytes: int = 1) -> None:
        self.name = name
        self.unit_bytes = unit_bytes

    def open_room(self, nbytes: int) -> HeapRoom:
        """See `Tier.open_room`."""
        return HeapRoom(nbytes)
