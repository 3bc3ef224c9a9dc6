"""Peers' host memory read into device memory: by a transport of hosts into pinned staging, from there by copy engine.

In: a transport that reaches the peer's host memory (`shm`, `http`). Out: the peer's bytes on our device.
Not here: how bytes cross between hosts' memory (the transport inside), the pool (`memory.staging`).

    peer's host memory --inner.post_read, wait--> staging (bounded, pinned) --copy, event--> device

Transports into device memory that peers cannot read by it: what those that copy from host memory share.

In: addresses of host memory that is pinned. Out: its bytes on our device, in place when the call returns.
Not here: whose memory it is and how it comes to be pinned (`staged`, `pinned`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from penstock.cuda.driver import CudaDriver, StreamPools, load_driver, never_freed, ordinal
from penstock.errors import ConfigError, DestinationError, PenstockError
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.segments import Segments
from penstock.transport.host_endpoint import Endpoint, GenerationTable, IntoHandle
from penstock.transport.protocol import Coding, DeferredRead, Descriptor, Filling, Handle, Memory, Pending, Transport
from penstock.types import MIB


class IntoDevice:
    """Nothing is registered with it but to be read into.

    Args:
        name: of the transport.
        source: name of the transport whose descriptors it takes.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: no CUDA driver.
    """

    nap_s: ClassVar[float]
    """Between two looks at a copy."""

    def __init__(self, name: str, source: str, driver: CudaDriver | None) -> None:
        self.name, self._source_name = name, source
        self._driver = load_driver() if driver is None else driver
        self._endpoint = Endpoint(name, GenerationTable.create())
        self._lanes = StreamPools(self._driver, num_streams=1)
        self._lock = threading.Lock()
        self._is_stuck = False

    def register(self, memory: Memory) -> Handle:
        """ConfigError: it shows no memory to peers."""
        raise ConfigError(f"{self.name} only reads into memory")

    def register_into(self, memory: Memory) -> IntoHandle:
        """Device memory to read into. ConfigError for the host's; Cancelled if the transport is closed."""
        ordinal(memory.device)
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def _check(self, into: Handle, source: Descriptor) -> IntoHandle:
        """Our own open handle. ConfigError: it or the descriptor is another transport's. Cancelled: it is closed."""
        is_mine = isinstance(into, IntoHandle) and into.endpoint is self._endpoint
        if source.transport != self._source_name or not is_mine:
            raise ConfigError(f"{source.transport} descriptor or foreign handle given to {self.name}")
        assert isinstance(into, IntoHandle)
        into.check_open()
        return into

    def copy(self, into: IntoHandle, base: int, rows: Segments, stall_s: float, *, keep: object) -> None:
        """Copy host memory from `base` on, which `keep` keeps alive; returns once it is there. Raises as `queued`."""
        dst = rows.dst.astype(np.uint64) + np.uint64(into.memory.address)
        src = rows.src.astype(np.uint64) + np.uint64(base)
        nbytes = rows.nbytes.astype(np.uint64)
        self.queued(into, lambda device, stream: self._driver.copy(dst, src, nbytes, stream), stall_s, keep=keep)

    def queued(self, into: IntoHandle, queue: Callable[[int, int], None], stall_s: float, *, keep: object) -> None:
        """Queue copies of memory that `keep` keeps alive, on a stream of the device; returns once they are made.

        Args:
            queue: given the device and the stream; with the device's context entered.

        Raises:
            DestinationError: the device failed, or copied nothing for `stall_s`: both memories are kept for good, and
                `mutated` is true.
        """
        driver, device = self._driver, ordinal(into.memory.device)
        deadline = time.monotonic() + stall_s
        with driver.entered(device):
            # Queue under the lock, wait without it: a pool of streams and events serves one thread at a time, but
            # copies of several threads run at once.
            with self._lock:
                self._endpoint.check_open()
                lane = self._lanes.of(device)
                event, stream = lane.take_event(), lane.take_stream()
                with self._used(into, keep):
                    queue(device, stream)
                    driver.record(event, stream)
            with self._used(into, keep):
                while not driver.is_done(event):
                    if time.monotonic() > deadline:
                        raise DestinationError(f"cuda:{device} copied nothing for {stall_s} s")
                    time.sleep(self.nap_s)
            with self._lock:
                lane.give_event(event)

    @contextmanager
    def _used(self, *memories: object) -> Iterator[None]:
        """Keep the memories for good if the block ends early, because the device may still copy then."""
        try:
            yield
        except BaseException as error:
            # A copy on a device cannot be cancelled. Freed memory could be used again while it is still written.
            self._is_stuck = True
            never_freed.append((self, *memories))
            if isinstance(error, PenstockError):
                error.mutated = True
            raise

    def _close_lanes(self) -> None:
        """Order: the endpoint is closed. Does nothing where a device may still copy."""
        with self._lock:
            if not self._is_stuck:
                self._lanes.close()


def batches(rows: Segments, most: int) -> Iterator[Segments]:
    """Yield the rows in batches of at most `most` bytes, with long rows cut."""
    if not len(rows.nbytes):
        return
    cut, start, room = rows.cut(most), 0, most
    for stop, nbytes in enumerate([*cut.nbytes.tolist(), most + 1]):
        if nbytes > room:
            yield cut[start:stop]
            start, room = stop, most
        room -= nbytes


STAGE_BYTES = 16 * MIB
"""A buffer: a chunk of the line, so that a read is one turn."""
NUM_BUFFERS = 4
"""Reads at once; pinned memory is bounded by four buffers, whatever is read."""

INNER = {"staged_shm": "shm", "staged_http": "http"}
"""Which transport each goes by."""


class _Pins:
    """See `memory.staging.Registrar`."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device

    def register(self, address: int, nbytes: int) -> None:
        with self._driver.entered(self._device):
            self._driver.pin(address, nbytes)

    def unregister(self, address: int) -> None:
        with self._driver.entered(self._device):
            self._driver.unpin(address)


class StagedRead(DeferredRead[IntoHandle, Descriptor, Segments]):
    """See `Pending`."""

    def __init__(self, transport: StagedTransport, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        self._transport = transport
        super().__init__(int(rows.nbytes.sum()), into, source, rows)

    def _carry(self, stall_s: float, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        for batch in batches(rows, STAGE_BYTES):
            self._transport.carry(into, source, batch, stall_s)
            self.moved_bytes += int(batch.nbytes.sum())
        into.check_open()


class StagedTransport(IntoDevice):
    """See `IntoDevice`.

    Args:
        name: of `INNER`.
        inner: what reaches the peer; stays its owner's.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: no CUDA driver.
    """

    nap_s = 0.00005

    def __init__(self, name: str, inner: Transport, driver: CudaDriver | None = None) -> None:
        super().__init__(name, inner.name, driver)
        self._inner = inner
        self._pool: StagingPool | None = None
        self._staged: dict[int, Handle] = {}

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> StagedRead:
        """See `Transport.post_read`; the descriptor is the inner transport's."""
        mine = self._check(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        return StagedRead(self, mine, source, segments.joined())

    def wait(self, pending: Pending, *, stall_s: float) -> None:
        """See `Transport.wait`.

        Raises:
            DestinationError: the device failed, or did not take what was staged for `stall_s`.
            SourceStalled: also if no staging buffer came free.
        """
        assert isinstance(pending, StagedRead)
        pending.run(stall_s)

    def way(self, source: Descriptor) -> tuple[str, str]:
        """See `Coding.way`; of the inner transport."""
        if not isinstance(self._inner, Coding):
            return self.name, ""
        name, why = self._inner.way(source)
        return self.name + name.removeprefix(self._inner.name), why

    def carry(self, into: IntoHandle, source: Descriptor, batch: Segments, stall_s: float) -> None:
        """Copy what fits into one buffer. Raises as `wait`."""
        into.check_open()
        pool = self._open_pool(ordinal(into.memory.device))
        buffer = pool.acquire(stall_s=stall_s)
        try:
            at = np.cumsum(batch.nbytes) - batch.nbytes
            staged = Segments(src=batch.src, dst=at, nbytes=batch.nbytes)
            inside = self._inner.post_read(self._handle(buffer), source, staged)
            self._inner.wait(inside, stall_s=stall_s)
        except BaseException as error:
            pool.release(buffer)
            if isinstance(error, PenstockError):
                error.mutated = False  # only the staging buffer was written
            raise
        rows = Segments(src=at, dst=batch.dst, nbytes=batch.nbytes)
        # Released only after a copy that ended: after an error the device may still read the buffer, which then stays
        # out of the pool for good.
        self.copy(into, buffer.address, rows, stall_s, keep=buffer)
        pool.release(buffer)

    def _open_pool(self, device: int) -> StagingPool:
        with self._lock:
            self._endpoint.check_open()
            if self._pool is None:
                pins = _Pins(self._driver, device)
                self._pool = StagingPool(NUM_BUFFERS * STAGE_BYTES, STAGE_BYTES, registrar=pins)
            return self._pool

    def _handle(self, buffer: StagingBuffer) -> Handle:
        with self._lock:
            if buffer.address not in self._staged:
                memory = Memory(address=buffer.address, nbytes=buffer.nbytes, owner=buffer)
                inner = self._inner
                handle = inner.register_into(memory) if isinstance(inner, Filling) else inner.register(memory)
                self._staged[buffer.address] = handle
            return self._staged[buffer.address]

    def close(self) -> None:
        """See `Transport.close`. Staging that a device may still read is kept."""
        if not self._endpoint.page.is_mine:
            return
        self._endpoint.close()
        with self._lock:
            pool, self._pool = self._pool, None
            for handle in self._staged.values():
                handle.close()
            self._staged.clear()
        if pool is not None and pool.num_in_use:
            never_freed.append((self, pool))
            return
        self._close_lanes()
        if pool is not None:
            pool.close()


_fits: type[Transport] = StagedTransport
