"""Host memory of one worker: reused buffers, and the bound on all that its tasks hold.

In: a bound in bytes. Out: room for tasks, in turn; buffers, pinned where a device reads them.
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
"""That make pages of a pinned buffer present: the kernel zeroes them, at 2 GB/s a core."""

_FITS = 1.5
"""Times a buffer may be as large as what it is taken for, so that few are made: that takes longer than to fill one."""

ALIGN_BYTES = 256
"""Of each tensor in a buffer: as a device allocates. Source: CUDA C++ Programming Guide, "Device memory accesses"."""


class Buffers:
    """Buffers by size, and a count of what tasks have reserved. Any thread.

    Args:
        memory_bytes: bound of what is reserved and what is kept for reuse, together.
        registrar: pins buffers; None: they are only host memory.

    Attributes:
        peak_bytes: most that was reserved at once.
    """

    def __init__(self, memory_bytes: int, *, registrar: Registrar | None = None) -> None:
        self._bound, self._registrar = memory_bytes, registrar
        self._kept: list[torch.Tensor] = []
        self._kept_bytes = self._lent_bytes = self._reserved = self.peak_bytes = 0
        self._changed = threading.Condition()
        self._pages = ThreadPoolExecutor(_PAGE_THREADS, thread_name_prefix="penstock-pages")

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
        """Return a buffer of at least `nbytes`, flat uint8: of those kept the smallest that fits, or a new one."""
        step = max(MIB, 1 << max(0, nbytes.bit_length() - 4))
        size = max(1, -(-nbytes // step)) * step
        with self._changed:
            fits = [one for one in self._kept if nbytes <= len(one) <= _FITS * size]
            found = min(reversed(fits), key=len, default=None)
            if found is not None:
                self._forget(found)
                size = len(found)
            self._lent_bytes += size
            self._make_room()
        return self._made(size) if found is None else found

    def put(self, buffer: torch.Tensor) -> None:
        """Give back what `get` gave; it must be idle."""
        with self._changed:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            self._lent_bytes -= len(buffer)
            self._make_room()

    def close(self) -> None:
        """Free what is kept; nobody uses a buffer any more. Idempotent."""
        with self._changed:
            while self._kept:
                self._free(self._kept[0])
        self._pages.shutdown()

    def _made(self, size: int) -> torch.Tensor:
        if self._registrar is None:
            return torch.empty(size, dtype=torch.uint8)
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        populate_by(self._pages, buffer.data_ptr(), size)
        self._registrar.register(buffer.data_ptr(), size)
        return buffer

    def _make_room(self) -> None:
        """Free the longest unused for what tasks hold, or have yet to get."""
        while self._kept and self._kept_bytes + max(self._lent_bytes, self._reserved) > self._bound:
            self._free(self._kept[0])

    def _forget(self, buffer: torch.Tensor) -> None:
        self._kept = [one for one in self._kept if one is not buffer]
        self._kept_bytes -= len(buffer)

    def _free(self, buffer: torch.Tensor) -> None:
        self._forget(buffer)
        if self._registrar is not None:
            self._registrar.unregister(buffer.data_ptr())


def packed(sizes: Sequence[int]) -> list[int]:
    """Return where tensors of these sizes begin in one buffer, and where the last ends."""
    return [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the parts of a buffer that `packed` says."""
    return [buffer[at : at + size] for at, size in zip(packed(sizes), sizes, strict=False)]
