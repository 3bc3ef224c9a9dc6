"""Counters for the metrics of this process."""

from __future__ import annotations

import threading
from weakref import WeakSet

from penstock.lifecycle import release_after_fork


class Total:
    """A thread-safe sum that only grows, for events that take a millisecond or more, not for single rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        _totals.add(self)

    def add(self, amount: int = 1) -> None:
        """Add to the sum."""
        with self._lock:
            self.value += amount

    def forget(self) -> None:
        """Reset the sum in a forked child, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self.value = 0


_totals: WeakSet[Total] = release_after_fork(Total.forget)
