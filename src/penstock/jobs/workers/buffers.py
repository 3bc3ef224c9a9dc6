"""Host memory of one worker: reused buffers, and the bound on the memory of all its tasks.

In: a bound in bytes. Out: reservations for tasks, in order; buffers, pinned where a device reads them.
Not here: device memory, which torch keeps (`compute`).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from penstock.errors import Cancelled
from penstock.memory.pages import populate_by
from penstock.memory.staging import Registrar
from penstock.types import MIB

_PAGE_THREADS = 8
"""Threads that populate a pinned buffer's pages: the kernel zeroes them, at 2 GB/s a core."""

_FITS = 1.5
"""Largest ratio of a reused buffer to the size that is needed: making a new buffer takes longer than filling one."""

ALIGN_BYTES = 256
"""Alignment of tensors in a buffer, as on a device. Source: CUDA C++ Programming Guide, "Device memory accesses"."""


class Buffers:
    """Buffers by size, and a count of what tasks have reserved. Any thread.

    Args:
        memory_bytes: bound on reserved memory and memory kept for reuse, together.
        registrar: pins buffers; None: they are only host memory.

    Attributes:
        peak_bytes: most bytes reserved at once.
    """

    def __init__(self, memory_bytes: int, *, registrar: Registrar | None = None) -> None:
        self._bound = memory_bytes
        self._registrar = registrar
        self._kept: list[torch.Tensor] = []
        self._kept_bytes = self._lent_bytes = self._reserved = self.peak_bytes = 0
        self._changed = threading.Condition()
        self._pages = ThreadPoolExecutor(_PAGE_THREADS, thread_name_prefix="penstock-pages")

    def reserve(self, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Wait until there is room for a task of `nbytes`; a task that is alone always has room.

        Raises:
            Cancelled: `stopped` became true meanwhile.
        """
        with self._changed:
            # No deadline of its own: the tasks that hold the memory have one, and ending them wakes this wait.
            # A task above the bound runs alone instead of waiting for ever; `check_budget` has refused it before that.
            while self._reserved and self._reserved + nbytes > self._bound:
                if stopped():
                    raise Cancelled("the job ended while a task waited for memory")
                self._changed.wait(0.1)  # a stop does not notify this condition, so it is polled
            self._reserved += nbytes
            self.peak_bytes = max(self.peak_bytes, self._reserved)

    def unreserve(self, nbytes: int) -> None:
        """Release a task's reservation."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def get(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes`, flat uint8: the smallest kept one that fits, or a new one."""
        # Sizes are rounded to an eighth or less of themselves, so that tasks of nearly one size share buffers.
        step = max(MIB, 1 << max(0, nbytes.bit_length() - 4))
        size = max(1, -(-nbytes // step)) * step
        with self._changed:
            # Reversed: of equal buffers the one used last, so that surplus buffers stay unused and are freed first.
            fits = [buffer for buffer in self._kept if nbytes <= len(buffer) <= _FITS * size]
            reused = min(reversed(fits), key=len, default=None)
            if reused is not None:
                self._forget(reused)
                size = len(reused)
            self._lent_bytes += size
            self._make_room()
        return self._allocate(size) if reused is None else reused

    def put(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `get` for reuse; nothing may read or write it any more."""
        with self._changed:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            self._lent_bytes -= len(buffer)
            self._make_room()

    def close(self) -> None:
        """Free the kept buffers. Order: after the last use of any buffer. Idempotent."""
        with self._changed:
            while self._kept:
                self._free(self._kept[0])
        self._pages.shutdown()

    def _allocate(self, size: int) -> torch.Tensor:
        if self._registrar is None:
            return torch.empty(size, dtype=torch.uint8)
        # Pinning populates pages on one thread; several threads do it first, in a fraction of the time.
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        populate_by(self._pages, buffer.data_ptr(), size)
        self._registrar.register(buffer.data_ptr(), size)
        return buffer

    def _make_room(self) -> None:
        """Free the buffers that were unused longest, until the kept ones fit in the bound with what tasks hold."""
        while self._kept and self._kept_bytes + max(self._lent_bytes, self._reserved) > self._bound:
            self._free(self._kept[0])

    def _forget(self, buffer: torch.Tensor) -> None:
        self._kept = [kept_buffer for kept_buffer in self._kept if kept_buffer is not buffer]
        self._kept_bytes -= len(buffer)

    def _free(self, buffer: torch.Tensor) -> None:
        self._forget(buffer)
        if self._registrar is not None:
            self._registrar.unregister(buffer.data_ptr())


def packed(sizes: Sequence[int]) -> list[int]:
    """Return the offsets at which tensors of these sizes begin in one buffer, and the end of the last."""
    return [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut a buffer into tensors at the offsets of `packed`."""
    return [buffer[at : at + size] for at, size in zip(packed(sizes), sizes, strict=False)]
