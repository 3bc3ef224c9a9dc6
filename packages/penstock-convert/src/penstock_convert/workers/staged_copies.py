"""Copies bytes between host functions and device memory, through a few pinned buffers.

    fill:   read --> staging buffer --copy--> device          a piece at a time, in the calling thread
    drain:  device --copy--> staging buffer --> write

Each piece uses the most recently released buffer. Only about one buffer per thread is therefore in use, and the buffers
stay in the CPU cache, so that each byte crosses the host's memory bus once in each direction instead of three times.
Source: benchmarks/results/h200x2_202611/convert.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from penstock.cuda.driver import never_freed
from penstock.errors import DestinationError
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock_convert.workers.compute import Read, Write

_NAP_S = 1e-4
"""Seconds between checks of a copy. 8 MiB take 160 us over PCIe 5, and each check takes the GIL from other threads."""


class CopyDriver(Protocol):
    """The methods of `cuda.driver.CudaDriver` that `StagedCopies` uses."""

    def entered(self, device: int) -> AbstractContextManager[None]:
        """Make the device's context current in this thread."""
        ...

    def copy_to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy from pinned host memory to device memory."""
        ...

    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy from device memory to pinned host memory."""
        ...

    def make_event(self) -> int:
        """Return a new event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Queue the event on the stream, after all work that is already queued."""
        ...

    def is_done(self, event: int) -> bool:
        """Return whether the device has finished all work before the event."""
        ...

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        """Destroy streams and events."""
        ...


class StagedCopies:
    """Copies between host functions and one device. Thread-safe.

    Args:
        pool: pinned buffers, which this object owns.
        driver: driver of the device.
        device: number of the device.
        up, down: streams for copies to the device and copies from the device.
        stall_s: time limit in seconds for one copy. The time limit for getting a free buffer is `2 * stall_s`.
    """

    def __init__(
        self, pool: StagingPool, driver: CopyDriver, device: int, *, up: int, down: int, stall_s: float
    ) -> None:
        self.pool = pool
        self._driver = driver
        self._device = device
        self._up, self._down = up, down
        self._stall_s = stall_s
        self._events: dict[int, int] = {}
        """Maps a buffer's address to the event after its last copy."""
        self._lost: list[StagingBuffer] = []
        """Buffers whose copy did not complete. The device may still use these buffers."""

    def fill(self, address: int, nbytes: int, read: Read, *, step: int) -> None:
        """Fill device memory with the bytes that `read` supplies.

        Args:
            address, nbytes: address and size in bytes of the device memory.
            read: function that is called for each piece and fills a staging buffer.
            step: size of a piece in bytes, at most the size of a staging buffer.

        Raises:
            DestinationError: a copy did not finish in time, or the device reported an error.
            SourceStalled: no buffer became free in time.
        """
        with self._driver.entered(self._device):
            for at in range(0, nbytes, step):
                with self._lent() as buffer:
                    num = min(step, nbytes - at)
                    read(at, buffer.view[:num])
                    self._copy(self._driver.copy_to_device, address + at, buffer.address, num, self._up, buffer)

    def drain(self, address: int, nbytes: int, write: Write) -> None:
        """Pass the bytes of device memory to `write`, one buffer at a time. Raises the same errors as `fill`."""
        step = self.pool.buffer_bytes
        with self._driver.entered(self._device):
            for at in range(0, nbytes, step):
                with self._lent() as buffer:
                    num = min(step, nbytes - at)
                    self._copy(self._driver.copy_to_host, buffer.address, address + at, num, self._down, buffer)
                    write(at, buffer.view[:num])

    @contextmanager
    def _lent(self) -> Iterator[StagingBuffer]:
        """Lend a buffer to a `with` block. Do not release the buffer if its copy did not finish."""
        # Use twice the time limit of a copy, so that a hanging copy raises its error before this wait fails.
        buffer = self.pool.acquire(stall_s=2 * self._stall_s)
        try:
            yield buffer
        finally:
            if buffer not in self._lost:
                self.pool.release(buffer)

    def _copy(
        self,
        queue: Callable[[int, int, int, int], None],
        dst: int,
        src: int,
        nbytes: int,
        stream: int,
        buffer: StagingBuffer,
    ) -> None:
        """Queue a copy and wait until it is complete."""
        event = self._events.get(buffer.address)
        if event is None:
            event = self._events[buffer.address] = self._driver.make_event()
        queue(dst, src, nbytes, stream)
        self._driver.record(event, stream)
        deadline = time.monotonic() + self._stall_s
        while not self._driver.is_done(event):
            if time.monotonic() > deadline:
                self._lost.append(buffer)
                # A copy cannot be cancelled, so its memory must stay allocated until this process exits.
                never_freed.append((self.pool,))
                message = f"cuda:{self._device} did not finish a copy of {nbytes} bytes within {self._stall_s:g} s"
                raise DestinationError(message, hint="check nvidia-smi and the kernel's log, and restart this process")
            time.sleep(_NAP_S)

    def close(self) -> None:
        """Free the buffers, unless a copy may still use one. Call this last. Idempotent."""
        try:
            with self._driver.entered(self._device):
                self._driver.free([], list(self._events.values()))
        finally:
            self._events.clear()
            if not self._lost:
                self.pool.close()
