"""Counts of what this process has done in its life, added where it is done and read by its metrics.

In: numbers, from any thread. Out: their sum.
Not here: names, labels and formats (`telemetry.metrics`).
"""

from __future__ import annotations

import threading
from weakref import WeakSet

from penstock.lifecycle import release_after_fork


class Total:
    """A sum that only grows. For events of a millisecond or more; it is too slow to count rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        _totals.add(self)

    def add(self, amount: int = 1) -> None:
        """Add to the sum."""
        with self._lock:
            self.value += amount

    def forget(self) -> None:
        """In a forked child: start again, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self.value = 0


_totals: WeakSet[Total] = release_after_fork(Total.forget)
