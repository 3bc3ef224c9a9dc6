"""The staging pool: page-aligned buffers of one size, pinned on request, limited by `memory_bytes`.

The thread that first needs a buffer touches and pins it, so that the reading threads share the set-up and a small load
does not pay for the whole pool. The buffer that was released last is reused first.
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
        """Pin `nbytes` from `address`. Raises DestinationError if the device refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`. It never raises for memory that is registered."""
        ...


class StagingBuffer:
    """A buffer of the pool. `view` (memoryview) and `array` (numpy) are the same `nbytes` bytes.

    Attributes:
        is_ready: whether its pages are present and pinned.
    """

    __slots__ = ("address", "array", "is_ready", "nbytes", "view")

    def __init__(self, memory: mmap.mmap, offset: int, nbytes: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes, offset)
        self.view = memoryview(memory)[offset : offset + nbytes]
        self.address = int(self.array.ctypes.data)
        self.nbytes = nbytes
        self.is_ready = False

    def prepare(self, registrar: Registrar | None) -> None:
        """Touch every page and pin it, once."""
        if self.is_ready:
            return
        # Fault the pages before pinning, since the driver would fault them one by one under its lock. Writing holds
        # only the lock of this mapping (since Linux 6.4). madvise would hold the lock of the address space and block
        # threads that map memory or start.
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
        # The first buffers are on top, so that a small load only touches the start of the memory.
        self._free = self._all[::-1]
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._in_use = 0
        self._num_waiting = 0
        self._num_released = 0
        self._cancelled = False
        self._warmers: list[threading.Thread] = []
        self._num_warming = 0
        self.peak_bytes = 0

    @classmethod
    def map(cls, memory_bytes: int, buffer_bytes: int, *, registrar: Registrar | None = None) -> StagingPool:
        """Map memory for a pool.

        Args:
            memory_bytes: Limit of the pool, in bytes.
            buffer_bytes: Size of a buffer, which is rounded up to a page.
            registrar: Pins the buffers. None leaves them pageable.

        Raises:
            BudgetTooSmall: `memory_bytes` is too small for two buffers (one that fills while one drains).
        """
        # Pinning works on pages, and direct I/O needs buffers that begin at one.
        size = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_buffers = memory_bytes // size
        if num_buffers < 2:
            raise BudgetTooSmall(
                f"memory_bytes={memory_bytes} holds {num_buffers} buffers of {size} bytes, but two are needed",
                minimum_bytes=2 * size,
            )
        # Use one mapping for all buffers. Its pages do not exist before their first touch, so an unused buffer costs
        # nothing. It is private, since shared anonymous memory is tmpfs and gets no huge pages.
        memory = mmap.mmap(-1, num_buffers * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A fork makes pages copy-on-write, and the next write would move ours away from the pages that a device
            # knows.
            memory.madvise(mmap.MADV_DONTFORK)
        return cls(memory, size, registrar=registrar)

    @property
    def num_free(self) -> int:
        """Number of buffers that are not in use."""
        return len(self._free)

    def warm(self, num_threads: int) -> None:
        """Start `num_threads` threads that touch and pin every buffer, and return.

        A buffer counts as in use while it is warmed. `close` waits for the threads.
        """
        share = -(-self.num_buffers // num_threads)
        for index in range(min(num_threads, self.num_buffers)):
            thread = threading.Thread(target=self._warm, args=(share,), name=f"penstock-staging-{index}", daemon=True)
            with self._lock:
                self._num_warming += 1
            if not start_thread(thread, is_needed=False):
                # Buffers that are not warmed are prepared on their first use.
                with self._lock:
                    self._num_warming -= 1
                return
            # Store the thread only when it runs, since `close` joins these threads.
            self._warmers.append(thread)

    def _warm(self, share: int) -> None:
        try:
            self._prepare(share)
        finally:
            with self._lock:
                self._num_warming -= 1

    def _prepare(self, share: int) -> None:
        for _ in range(share):
            with self._state:
                cold = next((buffer for buffer in self._free if not buffer.is_ready), None)
                if cold is None or self._cancelled:
                    return
                self._free.remove(cold)
                self._in_use += 1
            try:
                cold.prepare(self._registrar)
            except DestinationError:
                # The next `acquire` of this buffer meets the same error and can raise it to its caller.
                return
            finally:
                self.release(cold)

    def acquire(self, *, stall_s: float) -> StagingBuffer:
        """Wait for a buffer. It belongs to the caller until `release`.

        Raises:
            SourceStalled: nothing was released for `stall_s` seconds, so the thread that drains the pool is stuck.
            Cancelled: the pool was cancelled during the wait.
            DestinationError: the buffer could not be pinned.
        """
        with self._state:
            # Count this thread before it waits, so that `try_acquire` leaves it the next released buffer.
            self._num_waiting += 1
            try:
                self._wait_for_free(stall_s)
            finally:
                self._num_waiting -= 1
            buffer = self._take()
        return self._prepared(buffer)

    def _wait_for_free(self, stall_s: float) -> None:
        """Wait until a buffer is free. The lock is held. Raises like `acquire`."""
        deadline, num_released = time.monotonic() + stall_s, self._num_released
        while not self._free and not self._cancelled:
            self._state.wait(max(0.0, deadline - time.monotonic()))
            # Compare a count of releases, since another thread may have taken a released buffer before this one woke
            # up.
            if self._num_released != num_released:
                deadline, num_released = time.monotonic() + stall_s, self._num_released
            elif time.monotonic() >= deadline and not self._cancelled:
                raise SourceStalled(
                    f"no staging buffer was released in {stall_s} s", hint="raise memory_bytes or stall_s"
                )
        if self._cancelled:
            raise Cancelled("staging pool cancelled")

    def _take(self) -> StagingBuffer:
        """Return a free buffer. The lock is held."""
        buffer = self._free.pop()
        self._in_use += 1
        self.peak_bytes = max(self.peak_bytes, self._in_use * self.buffer_bytes)
        return buffer

    def _prepared(self, buffer: StagingBuffer) -> StagingBuffer:
        # Prepare a cold buffer without the lock, since it takes milliseconds.
        try:
            buffer.prepare(self._registrar)
        except DestinationError:
            self.release(buffer)
            raise
        return buffer

    def try_acquire(self) -> StagingBuffer | None:
        """Return a buffer if one is free and no thread waits for it, or None. Raises like `acquire`.

        While the pool is being warmed, it returns no cold buffer, whose preparation would take milliseconds.
        """
        with self._lock:
            # Keep one free buffer for each waiting thread. A caller that releases a buffer and takes it back
            # immediately would keep the GIL, and with it the buffer, from a notified thread.
            if len(self._free) <= self._num_waiting or self._cancelled:
                return None
            # The buffer on top was released last and is the warmest.
            if self._num_warming and not self._free[-1].is_ready:
                return None
            buffer = self._take()
        return self._prepared(buffer)

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool. No copy from or to it may be in progress."""
        with self._lock:
            # Put it on top, since it is pinned and in the processor's cache.
            self._free.append(buffer)
            self._in_use -= 1
            self._num_released += 1
            # Wake all waiting threads. Each counts a release as progress and restarts its stall deadline.
            self._state.notify_all()

    @property
    def num_in_use(self) -> int:
        """Return the number of buffers in use."""
        with self._lock:
            return self._in_use

    def cancel(self) -> None:
        """Make all current and future waits raise `Cancelled`."""
        with self._state:
            self._cancelled = True
            self._state.notify_all()

    def close(self) -> None:
        """Unpin and free all buffers, which must have been released. Idempotent."""
        # A warming thread may be in the driver with a buffer, and must not pin memory that is already freed.
        for thread in self._warmers:
            thread.join()
        for buffer in self._all:
            buffer.retire(self._registrar)
            buffer.view.release()
        self._all = []
        self._free = []
