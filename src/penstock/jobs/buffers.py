"""Host memory of one worker: reused buffers, and the bound on all that its tasks hold.

In: a bound in bytes. Out: room for tasks, in turn; buffers, pinned where a device reads them.
Not here: device memory, which torch keeps (`lane`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from penstock.errors import Cancelled
from penstock.types import MIB


class Buffers:
    """Buffers by size, and a count of what tasks have reserved. Any thread.

    Args:
        memory_bytes: bound of reserved bytes, and of what is kept for reuse.
        pinned: page-lock them.

    Attributes:
        peak_bytes: most that was reserved at once.
    """

    def __init__(self, memory_bytes: int, *, pinned: bool) -> None:
        self._bound, self._pinned = memory_bytes, pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self._kept_bytes = self._reserved = self.peak_bytes = 0
        self._changed = threading.Condition()

    def reserve(self, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Wait until there is room for a task of `nbytes`; one that is alone always has room.

        Raises:
            Cancelled: `stopped` became true meanwhile: those who hold memory have their own deadlines.
        """
        with self._changed:
            while self._reserved and self._reserved + nbytes > self._bound:
                if stopped():
                    raise Cancelled("the job ended while a task waited for memory")
                self._changed.wait(0.1)
            self._reserved += nbytes
            self.peak_bytes = max(self.peak_bytes, self._reserved)

    def unreserve(self, nbytes: int) -> None:
        """A task holds nothing any more."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def get(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes`, cut to that: flat uint8."""
        size = max(1, -(-nbytes // MIB)) * MIB
        with self._changed:
            if found := self._free.get(size):
                self._kept_bytes -= size
                return found.pop()[:nbytes]
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)[:nbytes]

    def put(self, buffer: torch.Tensor) -> None:
        """Give back what `get` gave; it must be idle."""
        storage = buffer.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        with self._changed:
            if self._kept_bytes + storage.nbytes() <= self._bound // 2:
                self._free.setdefault(storage.nbytes(), []).append(whole)
                self._kept_bytes += storage.nbytes()
