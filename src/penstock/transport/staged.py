"""Peers' host memory read into device memory: by a transport of hosts into pinned staging, from there by copy engine.

In: a transport that reaches the peer's host memory (`shm`, `http`). Out: the peer's bytes on our device.
Not here: how bytes cross between hosts' memory (the transport inside), the pool (`memory.staging`).

    peer's host memory --inner.post_read, wait--> staging (bounded, pinned) --copy, event--> device
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np

from penstock.errors import ConfigError, DestinationError
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.transport.cuda_driver import CudaDriver, load_driver
from penstock.transport.descriptor import Descriptor
from penstock.transport.endpoint import Endpoint, IntoHandle
from penstock.transport.page import Page
from penstock.transport.protocol import Coding, Filling, Handle, Memory, Pending, Segments, Transport
from penstock.transport.waited import WaitedRead
from penstock.types import MIB

STAGE_BYTES = 16 * MIB
"""A buffer: a chunk of the line, so that a read is one turn."""
NUM_BUFFERS = 4
"""Reads at once; pinned memory is bounded by four buffers, whatever is read."""
_NAP_S = 0.00005

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


class StagedRead(WaitedRead[IntoHandle, Descriptor, Segments]):
    """See `Pending`."""

    def __init__(self, transport: StagedTransport, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        self._transport = transport
        super().__init__(int(rows.nbytes.sum()), into, source, rows)

    def _carry(self, stall_s: float, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        for batch in batches(rows, STAGE_BYTES):
            self._transport.carry(into, source, batch, stall_s)
            self.moved_bytes += int(batch.nbytes.sum())
        into.check_open()


class StagedTransport:
    """A transport into device memory that peers cannot read by it: nothing is registered with it but to be read into.

    Args:
        name: of `INNER`.
        inner: what reaches the peer; stays its owner's.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: no CUDA driver.
    """

    def __init__(self, name: str, inner: Transport, driver: CudaDriver | None = None) -> None:
        self.name, self._inner = name, inner
        self._driver = load_driver() if driver is None else driver
        self._endpoint = Endpoint(name, Page.create())
        self._lock = threading.Lock()
        self._pool: StagingPool | None = None
        self._staged: dict[int, Handle] = {}
        self._streams: dict[int, int] = {}

    def register(self, memory: Memory) -> Handle:
        """ConfigError: it shows no memory to peers."""
        raise ConfigError(f"{self.name} only reads into memory")

    def register_into(self, memory: Memory) -> IntoHandle:
        """Device memory to read into. ConfigError for the host's; Cancelled if the transport is closed."""
        ordinal(memory.device)
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> StagedRead:
        """See `Transport.post_read`; the descriptor is the inner transport's."""
        if (
            source.transport != self._inner.name
            or not isinstance(into, IntoHandle)
            or into.endpoint is not self._endpoint
        ):
            raise ConfigError(f"{source.transport} descriptor or foreign handle given to {self.name}")
        into.check_open()
        segments.check(src_nbytes=source.nbytes, dst_nbytes=into.memory.nbytes)
        return StagedRead(self, into, source, segments.joined())

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
        """What fits into one buffer. Raises as `wait`."""
        device = ordinal(into.memory.device)
        into.check_open()
        pool = self._open_pool(device)
        buffer = pool.acquire(stall_s=stall_s)
        is_idle = True
        try:
            at = np.cumsum(batch.nbytes) - batch.nbytes
            staged = Segments(src=batch.src, dst=at, nbytes=batch.nbytes)
            inside = self._inner.post_read(self._handle(buffer), source, staged)
            self._inner.wait(inside, stall_s=stall_s)
            is_idle = False
            self._copy(buffer, at, into.memory.address, batch, device, stall_s)
            is_idle = True
        finally:
            if is_idle:
                pool.release(buffer)
            else:
                never_freed.append((into, buffer))  # a device that hangs may still copy

    def _copy(
        self,
        buffer: StagingBuffer,
        at: np.typing.NDArray[np.int64],
        base: int,
        batch: Segments,
        device: int,
        stall_s: float,
    ) -> None:
        driver, deadline = self._driver, time.monotonic() + stall_s
        with driver.entered(device):
            with self._lock:
                if device not in self._streams:
                    self._streams[device] = driver.make_stream()
                stream = self._streams[device]
            event = driver.make_event()
            dst, src = batch.dst.astype(np.uint64) + np.uint64(base), at.astype(np.uint64) + np.uint64(buffer.address)
            driver.copy(dst, src, batch.nbytes.astype(np.uint64), stream)
            driver.record(event, stream)
            while not driver.is_done(event):
                if time.monotonic() > deadline:
                    raise DestinationError(f"cuda:{device} took no staged byte for {stall_s} s")
                time.sleep(_NAP_S)
            driver.free([], [event])

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
                made = inner.register_into(memory) if isinstance(inner, Filling) else inner.register(memory)
                self._staged[buffer.address] = made
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
        if pool is None:
            return
        if pool.num_in_use:
            never_freed.append((self, pool))
            return
        pool.close()
        for device, stream in self._streams.items():
            with self._driver.entered(device):
                self._driver.free([stream], [])


never_freed: list[object] = []
"""What a device that hangs, or a read under way, may still use."""


def ordinal(device: str) -> int:
    """The number of a CUDA device. ConfigError for another one."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"staged reads go to CUDA memory, not to {device}")
    return int(index)


def batches(rows: Segments, most: int) -> Iterator[Segments]:
    """The rows, long ones cut, in turns of at most so many bytes."""
    if not len(rows.nbytes):
        return
    counts = -(-rows.nbytes // most)
    row = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    cut = Segments(
        src=rows.src[row] + skipped,
        dst=rows.dst[row] + skipped,
        nbytes=np.minimum(rows.nbytes[row] - skipped, most),
    )
    start, room = 0, most
    for stop, nbytes in enumerate([*cut.nbytes.tolist(), most + 1]):
        if nbytes > room:
            yield Segments(src=cut.src[start:stop], dst=cut.dst[start:stop], nbytes=cut.nbytes[start:stop])
            start, room = stop, most
        room -= nbytes


_fits: type[Transport] = StagedTransport
