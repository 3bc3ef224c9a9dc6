"""Registered memory with a generation, a fence, and the readers that wait for its bytes.

The owner calls `fence` before bytes change. A reader requests descriptors, reads, and compares the generation. If the
generation is unchanged after the last byte, no byte was changed during the read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from penstock.holding.regions import Regions, close_handles
from penstock.lifecycle import Closeable


class Holding(Closeable):
    """Memory that other processes may read. Thread-safe.

    A subclass guards its state with `lock`, and calls `wake` after every change for which readers may wait.

    Attributes:
        generation: number of times that the memory was fenced or closed. A read across a fence is invalid.
    """

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.generation = 0
        self.lock = threading.RLock()
        self._waiting: list[_WaitingReader] = []

    def wait_until(self, is_over: Callable[[], bool], deadline: float) -> bool:
        """Wait until `is_over` returns True or the deadline is reached. Return the last result of `is_over`.

        The caller holds the lock, which is released while waiting. `wake` calls `is_over` in other threads.
        """
        reader = _WaitingReader(is_over, threading.Condition(self.lock))
        self._waiting.append(reader)
        try:
            return reader.woken.wait_for(is_over, max(0.0, deadline - time.monotonic()))
        finally:
            self._waiting.remove(reader)

    def wake(self) -> None:
        """Wake the readers whose wait is over. The caller holds the lock."""
        for reader in self._waiting:
            if reader.is_over():
                reader.woken.notify()

    def fence(self) -> None:
        """Make every descriptor stale and begin a new generation. Call this before any byte changes."""
        with self.lock:
            # Fence the descriptors first, because a transport checks the generation after the bytes have arrived.
            self.regions.fence()
            self.generation += 1
            # Readers that wait for bytes of the earlier generation return now and not at their deadline.
            self.wake()

    def close(self) -> None:
        """Close the registrations without freeing the memory, which belongs to its owner. Idempotent."""
        with self.lock:
            self._mark_closed()
            self.generation += 1
            handles = self.regions.detach()
            self.wake()
        # A handle's `close` may wait for a running read, so do not hold the lock.
        close_handles(handles)

    def _mark_closed(self) -> None:
        """Change the state of a subclass for `close`, which holds the lock."""


class _WaitingReader(msgspec.Struct, eq=False):
    """A waiting thread. One condition for all threads would wake all of them at each change, to contend for the GIL."""

    is_over: Callable[[], bool]
    woken: threading.Condition
