"""The staging pool: page-aligned buffers of one size, pinned on request, limited by `memory_bytes`.

The thread that first needs a buffer touches and pins it, so that a small load does not pay for the whole pool.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import BudgetTooSmall, Cancelled, DestinationError, SourceStalled
from penstock.waits import start_thread


class Registrar(Protocol):
    """Page-locking of host memory, so that a device's copy engine can reach it."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` from `address`. Raise DestinationError if the device refuses."""

    def unregister(self, address: int) -> None:
        """Unpin registered memory. This never raises."""


class StagingBuffer:
    """A buffer of the pool, as `view` (memoryview) and `array` (numpy). `is_ready` says if the pages are pinned."""

    __slots__ = ("address", "array", "is_ready", "nbytes", "view")

    def __init__(self, memory: mmap.mmap, offset: int, nbytes: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes, offset)
        self.view = memoryview(memory)[offset : offset + nbytes]
        self.address = int(self.array.ctypes.data)
        self.nbytes = nbytes
        self.is_ready = False

    def prepare(self, registrar: Registrar | None) -> None:
        """Touch and pin the buffer, once."""
        if self.is_ready:
            return
        # Touch the pages before pinning, because the driver would fault them in one by one while holding its lock.
        # Write to the pages instead of calling madvise, which would block threads that map memory or start.
        ctypes.memset(self.address, 0, self.nbytes)
        if registrar is not None:
            registrar.register(self.address, self.nbytes)
        self.is_ready = True

    def retire(self, registrar: Registrar | None) -> None:
        """Unpin the buffer, if it was pinned."""
        if self.is_ready and registrar is not None:
            registrar.unregister(self.address)
        self.is_ready = False


class StagingPool:
    """A pool of buffers of equal size."""

    def __init__(self, memory: mmap.mmap, buffer_bytes: int, *, registrar: Registrar | None = None) -> None:
        self.buffer_bytes = buffer_bytes
        self.num_buffers = len(memory) // buffer_bytes
        self._memory = memory
        self._registrar = registrar
        self._all = [StagingBuffer(memory, i * buffer_bytes, buffer_bytes) for i in range(self.num_buffers)]
        # Put the first buffers on top of the stack, so that a small load only touches the start of the memory.
        self._free = self._all[::-1]
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._in_use = 0
        self._num_waiting = 0
        self._num_released = 0
        self.is_cancelled = False
        self._warmers: list[threading.Thread] = []
        self._num_warming = 0
        self.peak_bytes = 0

    @classmethod
    def map(cls, memory_bytes: int, buffer_bytes: int, *, registrar: Registrar | None = None) -> StagingPool:
        """Map a pool of `memory_bytes`, pinned by `registrar`. Raise BudgetTooSmall if two buffers do not fit."""
        # Pinning works on pages, and direct I/O needs page-aligned buffers.
        size = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_buffers = memory_bytes // size
        if num_buffers < 2:
            raise BudgetTooSmall(
                f"memory_bytes={memory_bytes} holds {num_buffers} buffers of {size} bytes, but two are needed",
                minimum_bytes=2 * size,
            )
        # Pages of an unused buffer do not exist. The mapping is private, because shared memory gets no huge pages.
        memory = mmap.mmap(-1, num_buffers * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork, copy-on-write would replace the pages that the device knows.
            memory.madvise(mmap.MADV_DONTFORK)
        return cls(memory, size, registrar=registrar)

    @property
    def is_pinned(self) -> bool:
        """Return whether a device's copy engine can reach the buffers."""
        return self._registrar is not None

    def warm(self, num_threads: int) -> None:
        """Start `num_threads` threads that touch and pin every buffer, and return. `close` waits for the threads."""
        share = -(-self.num_buffers // num_threads)
        for index in range(min(num_threads, self.num_buffers)):
            thread = threading.Thread(target=self._warm, args=(share,), name=f"penstock-staging-{index}", daemon=True)
            with self._lock:
                self._num_warming += 1
            if not start_thread(thread, is_needed=False):
                with self._lock:
                    self._num_warming -= 1
                return
            # Only started threads can be joined by `close`.
            self._warmers.append(thread)

    def end_warming(self) -> None:
        """Wait for the threads that `warm` started."""
        for thread in self._warmers:
            thread.join()

    def _warm(self, share: int) -> None:
        try:
            for _ in range(share):
                with self._state:
                    cold = next((buffer for buffer in self._free if not buffer.is_ready), None)
                    if cold is None or self.is_cancelled:
                        return
                    self._free.remove(cold)
                    self._in_use += 1
                try:
                    cold.prepare(self._registrar)
                finally:
                    self.release(cold)
        except DestinationError:
            # The next `acquire` of this buffer raises the same error.
            return
        finally:
            with self._lock:
                self._num_warming -= 1

    def acquire(self, *, stall_s: float) -> StagingBuffer:
        """Wait for a buffer, which belongs to the caller until `release`.

        Raise SourceStalled if no buffer was released for `stall_s` seconds, Cancelled if the pool was cancelled, and
        DestinationError if the buffer could not be pinned.
        """
        with self._state:
            # Count this thread before it waits, so that `try_acquire` leaves the next released buffer to it.
            self._num_waiting += 1
            try:
                self._wait_for_free(stall_s)
            finally:
                self._num_waiting -= 1
            buffer = self._take()
        return self._prepared(buffer)

    def _wait_for_free(self, stall_s: float) -> None:
        deadline, num_released = time.monotonic() + stall_s, self._num_released
        while not self._free and not self.is_cancelled:
            self._state.wait(max(0.0, deadline - time.monotonic()))
            # Compare a count of releases, because another thread may have taken a released buffer.
            if self._num_released != num_released:
                deadline, num_released = time.monotonic() + stall_s, self._num_released
            elif time.monotonic() >= deadline and not self.is_cancelled:
                raise SourceStalled(
                    f"no staging buffer was released in {stall_s} s", hint="increase memory_bytes or stall_s"
                )
        if self.is_cancelled:
            raise Cancelled("the staging pool was cancelled")

    def _take(self) -> StagingBuffer:
        """Return a free buffer. The caller must hold the lock."""
        buffer = self._free.pop()
        self._in_use += 1
        self.peak_bytes = max(self.peak_bytes, self._in_use * self.buffer_bytes)
        return buffer

    def _prepared(self, buffer: StagingBuffer) -> StagingBuffer:
        # Prepare a cold buffer without holding the lock, because pinning takes milliseconds.
        try:
            buffer.prepare(self._registrar)
        except DestinationError:
            self.release(buffer)
            raise
        return buffer

    def try_acquire(self) -> StagingBuffer | None:
        """Return a free buffer that no thread waits for, or None. During `warm`, return only prepared buffers."""
        with self._lock:
            # Leave a free buffer for each waiting thread, because this caller holds the GIL and could starve them.
            if len(self._free) <= self._num_waiting or self.is_cancelled:
                return None
            if self._num_warming and not self._free[-1].is_ready:
                return None
            buffer = self._take()
        return self._prepared(buffer)

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool. No copy from or to the buffer may be in progress."""
        with self._lock:
            # Reuse the last released buffer first, because its pages are pinned and in the CPU cache.
            self._free.append(buffer)
            self._in_use -= 1
            self._num_released += 1
            # Wake all waiting threads, because each restarts its stall deadline.
            if self._num_waiting:
                self._state.notify_all()

    @property
    def num_in_use(self) -> int:
        """Return the number of buffers in use."""
        with self._lock:
            return self._in_use

    def cancel(self) -> None:
        """Make all current and future waits raise `Cancelled`."""
        with self._state:
            self.is_cancelled = True
            self._state.notify_all()

    def close(self) -> None:
        """Unpin and free all buffers, which must have been released. Idempotent."""
        # A warming thread must not pin memory that is already freed.
        self.end_warming()
        for buffer in self._all:
            buffer.retire(self._registrar)
            buffer.view.release()
        self._all = []
        self._free = []
