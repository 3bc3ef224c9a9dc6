"""A registrar that pins no memory, for pools of staging without a device."""

from __future__ import annotations


class Pins:
    """A registrar that records which addresses are pinned."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        """Record a pinned address."""
        self.pinned.add(address)

    def unregister(self, address: int) -> None:
        """Forget an address. Raise KeyError if it is not pinned."""
        self.pinned.remove(address)
