"""Transports that read peers' host memory into device memory, and one that reads devices of this host into host memory.

`StagedTransport` reads with an inner transport into pinned staging buffers, and copies from these buffers to the
device. `PinnedTransport` maps and pins the peer's memory, and the device's copy engine reads it directly. Pinning takes
three times as long as a copy (pinning 0.053 s per GB, copies 55 GB/s: benchmarks/results/h200x4_202611/sync.md), so use
`PinnedTransport` for memory that is read repeatedly and that the publisher has not pinned.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from penstock.cuda.driver import CudaDriver, StreamPools, load_driver, never_freed, ordinal
from penstock.errors import ConfigError, DestinationError, PeerLost, PenstockError, StaleDescriptor
from penstock.memory.mapping import Mapping as MappedMemory
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.segments import Rectangles, Segments
from penstock.transport.host_endpoint import Endpoint, GenerationTable, IntoHandle, MemoryClaim, PeerMappings
from penstock.transport.protocol import (
    Coding,
    DeferredRead,
    Descriptor,
    Filling,
    Handle,
    Memory,
    PendingRead,
    Reaching,
    Striding,
    Sweeping,
    Transport,
)
from penstock.transport.shm import ShmTransport
from penstock.types import MIB

HOST_TARGET = "staged_cuda_ipc"
DERIVED: Mapping[str, str] = {
    "pinned_shm": "shm",
    "staged_shm": "shm",
    "staged_http": "http",
    HOST_TARGET: "cuda_ipc",
}
"""Transports between host memory and devices, nearest first, each with the transport whose descriptors it accepts."""
STAGE_BYTES = 16 * MIB
"""Size of a staging buffer: a chunk of a fetch."""
NUM_BUFFERS = 4
"""Maximum number of concurrent staged reads. It limits pinned memory to four buffers."""
TURN_BYTES = 256 * MIB
"""Bytes of pinned memory that are copied between two checks of the fence: 5 ms at 55 GB/s."""
SHORT_BYTES = 64 << 10
"""Shorter runs count as short. Starting a copy takes 0.7 us, in which the link moves 38 KB."""
MANY = 64
"""Minimum number of short runs in a read that are laid out as rectangles, which costs about 0.2 ms."""


class IntoDevice:
    """Base of `StagedTransport` and `PinnedTransport`. `source` is the transport whose descriptors are accepted."""

    nap_s: ClassVar[float]
    """Seconds between two polls of a copy."""

    def __init__(self, name: str, source: str, driver: CudaDriver | None) -> None:
        self.name = name
        self._driver = load_driver() if driver is None else driver
        self._endpoint = Endpoint(name, GenerationTable.create(), reads=source)
        self._streams = StreamPools(self._driver, num_streams=1)
        self._lock = threading.Lock()
        self._is_stuck = False

    def register(self, memory: Memory) -> Handle:
        """Raise ConfigError, since peers cannot read this memory."""
        raise ConfigError(f"{self.name} can only read into memory, and cannot offer memory to peers")

    def register_into(self, memory: Memory) -> IntoHandle:
        """Return a handle for reads into device memory. Raises ConfigError for host memory, Cancelled after `close`."""
        ordinal(memory.device)
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def copy(self, into: IntoHandle, base: int, rows: Segments, stall_s: float, *, keep: object) -> None:
        """Copy host memory that starts at `base`; see `queued`."""
        dst = rows.dst.astype(np.uint64) + np.uint64(into.memory.address)
        src = rows.src.astype(np.uint64) + np.uint64(base)
        nbytes = rows.nbytes.astype(np.uint64)
        self.queued(into, lambda device, stream: self._driver.copy(dst, src, nbytes, stream), stall_s, keep=keep)

    def queued(self, into: IntoHandle, queue: Callable[[int, int], None], stall_s: float, *, keep: object) -> None:
        """Call `queue` with the device and a stream, and wait until the queued copies are done.

        `keep` keeps the copies' memory alive. Raises DestinationError, with `mutated` set, if the device failed or
        copied nothing for `stall_s`. After such an error, both memories are never freed.
        """
        driver, device = self._driver, ordinal(into.memory.device)
        deadline = time.monotonic() + stall_s
        with driver.entered(device):
            # A pool serves one thread at a time, but copies of several threads run concurrently.
            with self._lock:
                self._endpoint.check_open()
                pool = self._streams.of(device)
                event, stream = pool.take_event(), pool.take_stream()
                with self._used(into, keep):
                    queue(device, stream)
                    driver.record(event, stream)
            with self._used(into, keep):
                # Poll, since a wait in the driver never ends if the device hangs.
                while not driver.is_done(event):
                    if time.monotonic() > deadline:
                        raise DestinationError(f"cuda:{device} copied nothing for {stall_s} s")
                    time.sleep(self.nap_s)
            with self._lock:
                pool.give_event(event)

    @contextmanager
    def _used(self, *memories: object) -> Iterator[None]:
        """Keep the memories permanently if the block fails, because the device may still copy."""
        try:
            yield
        except BaseException as error:
            # A copy on a device cannot be cancelled, and freed memory could be reused while it is written.
            self._is_stuck = True
            never_freed.append((self, *memories))
            if isinstance(error, PenstockError):
                error.mutated = True
            raise

    def _close_streams(self) -> None:
        with self._lock:
            if not self._is_stuck:
                self._streams.close()


def batches(rows: Segments, most: int) -> Iterator[Segments]:
    """Yield the rows in batches of at most `most` bytes. Long rows are split."""
    if not len(rows.nbytes):
        return
    cut, start, left = rows.cut(most), 0, most
    # The added row is larger than any batch, so that the loop also yields the last batch.
    for stop, nbytes in enumerate([*cut.nbytes.tolist(), most + 1]):
        if nbytes > left:
            yield cut[start:stop]
            start, left = stop, most
        left -= nbytes


class _DeviceRegistrar:
    """See `memory.staging.Registrar`. Memory is pinned in the context of one device."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver = driver
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        with self._driver.entered(self._device):
            self._driver.pin(address, nbytes)

    def unregister(self, address: int) -> None:
        with self._driver.entered(self._device):
            self._driver.unpin(address)


class StagedRead(DeferredRead[IntoHandle, Descriptor, Segments]):
    """See `PendingRead`."""

    def __init__(self, transport: StagedTransport, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        self._transport = transport
        super().__init__(int(rows.nbytes.sum()), into, source, rows)

    def _carry(self, stall_s: float, into: IntoHandle, source: Descriptor, rows: Segments) -> None:
        for batch in batches(rows, STAGE_BYTES):
            self._transport.carry(into, source, batch, stall_s)
            self.moved_bytes += int(batch.nbytes.sum())
        into.check_open()


class StagedTransport(IntoDevice):
    """See `Transport`. Reads with `inner` into pinned staging buffers. The caller still owns `inner`."""

    nap_s = 0.00005

    def __init__(self, name: str, inner: Transport, driver: CudaDriver | None = None) -> None:
        super().__init__(name, inner.name, driver)
        self._inner = inner
        self._pool: StagingPool | None = None
        self._staged: dict[int, Handle] = {}

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> StagedRead:
        """See `Transport.post_read`. The descriptor is that of the inner transport."""
        mine = self._endpoint.check_mine(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        return StagedRead(self, mine, source, segments.joined())

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. Raises DestinationError if the device failed."""
        assert isinstance(pending, StagedRead)
        pending.run(stall_s)

    def way(self, source: Descriptor) -> tuple[str, str]:
        """See `Coding.way` of the inner transport."""
        if not isinstance(self._inner, Coding):
            return self.name, ""
        name, why = self._inner.way(source)
        return self.name + name.removeprefix(self._inner.name), why

    def carry(self, into: IntoHandle, source: Descriptor, batch: Segments, stall_s: float) -> None:
        """Read a batch that fits one buffer, and copy it to the device. Raises like `wait`."""
        into.check_open()
        pool = self._open_pool(into.memory)
        buffer = pool.acquire(stall_s=stall_s)
        inside: PendingRead | None = None
        try:
            at = np.cumsum(batch.nbytes) - batch.nbytes
            staged = Segments(src=batch.src, dst=at, nbytes=batch.nbytes)
            inside = self._inner.post_read(self._handle(buffer), source, staged)
            self._inner.wait(inside, stall_s=stall_s)
        except BaseException as error:
            # A copy that a device has cannot be cancelled, so bytes may still arrive in the buffer.
            if getattr(inside, "events", ()) or (inside is None and isinstance(error, DestinationError)):
                never_freed.append((self, buffer))
            else:
                pool.release(buffer)
            if isinstance(error, PenstockError):
                # Only the staging buffer was written.
                error.mutated = False
            raise
        rows = Segments(src=at, dst=batch.dst, nbytes=batch.nbytes)
        # After an error the device may still read the buffer, so it is not released.
        self.copy(into, buffer.address, rows, stall_s, keep=buffer)
        pool.release(buffer)

    def _open_pool(self, into: Memory) -> StagingPool:
        # Pinned memory is scarce, and most processes never need staging.
        with self._lock:
            self._endpoint.check_open()
            if self._pool is None:
                # Memory that is pinned for one device is pinned for all. Use a device that this process uses already.
                if into.device == "cpu":
                    device = next(filter(self._driver.has_context, range(self._driver.num_devices())), 0)
                else:
                    device = ordinal(into.device)
                registrar = _DeviceRegistrar(self._driver, device)
                self._pool = StagingPool.map(NUM_BUFFERS * STAGE_BYTES, STAGE_BYTES, registrar=registrar)
            return self._pool

    def _handle(self, buffer: StagingBuffer) -> Handle:
        # Keep the handle, since registering with NIXL or RDMA takes long.
        with self._lock:
            if buffer.address not in self._staged:
                memory = Memory(address=buffer.address, nbytes=buffer.nbytes, owner=buffer)
                inner = self._inner
                handle = inner.register_into(memory) if isinstance(inner, Filling) else inner.register(memory)
                self._staged[buffer.address] = handle
            return self._staged[buffer.address]

    def close(self) -> None:
        """See `Transport.close`. Staging buffers that a device may still read are kept."""
        # In a forked child, the driver and the peers belong to the parent.
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
        self._close_streams()
        if pool is not None:
            pool.close()


class IntoHost(StagedTransport):
    """See `Transport`. Reads devices of this host by `cuda_ipc` into staging buffers, and copies to any host memory."""

    def register_into(self, memory: Memory) -> IntoHandle:
        """Return a handle for reads into host memory. Raises ConfigError for other memory, Cancelled after `close`."""
        if memory.device != "cpu":
            raise ConfigError(f"{self.name} only fills host memory, not {memory.device}")
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def copy(self, into: IntoHandle, base: int, rows: Segments, stall_s: float, *, keep: object) -> None:
        """Copy from a staging buffer at `base`."""
        into.check_open()
        for dst, src, nbytes in zip(rows.dst.tolist(), rows.src.tolist(), rows.nbytes.tolist(), strict=True):
            ctypes.memmove(into.memory.address + dst, base + src, nbytes)


class _Pinned:
    """A peer's mapped memory, page-locked until this object is collected. Then it is unmapped."""

    def __init__(self, driver: CudaDriver, device: int, mapped: MappedMemory) -> None:
        self._driver = driver
        self._device = device
        # Set this after pinning, so that `__del__` does not undo a failed pin.
        self._mapped: MappedMemory | None = None
        with driver.entered(device):
            driver.pin(mapped.address, mapped.nbytes, is_read_only=True)
        self._mapped = mapped

    def __del__(self) -> None:
        if self._mapped is not None:
            with self._driver.entered(self._device):
                self._driver.unpin(self._mapped.address)


class PinnedRead(DeferredRead[IntoHandle, MemoryClaim, _Pinned, int]):
    """See `PendingRead`."""

    def __init__(
        self,
        transport: PinnedTransport,
        into: IntoHandle,
        claim: MemoryClaim,
        source: _Pinned,
        base: int,
        rows: Segments,
        short: Rectangles | None = None,
    ) -> None:
        self._transport = transport
        self._rows = rows
        self._short = short
        nbytes = int(rows.nbytes.sum()) + (0 if short is None else int(short.nbytes.sum()))
        super().__init__(nbytes, into, claim, source, base)

    def _carry(self, stall_s: float, into: IntoHandle, claim: MemoryClaim, source: _Pinned, base: int) -> None:
        for batch in batches(self._rows, TURN_BYTES):
            into.check_open()
            claim.check()
            self._transport.copy(into, base, batch, stall_s, keep=source)
            self.moved_bytes += int(batch.nbytes.sum())
        for some in () if self._short is None else self._short.addressed(into.memory.address, base, TURN_BYTES):
            into.check_open()
            claim.check()
            self._transport.gather(into, some, stall_s, keep=source)
            self.moved_bytes += int(some.nbytes.sum())
        into.check_open()
        # Check after the last byte, since a holder fences before it changes a byte.
        claim.check()


class PinnedTransport(IntoDevice):
    """See `Transport`. Maps and pins peers' memory with `shm`, so that a device's copy engine reads it directly."""

    name = "pinned_shm"
    nap_s = 0.0002

    def __init__(self, shm: ShmTransport, driver: CudaDriver | None = None) -> None:
        super().__init__(self.name, shm.name, driver)
        self._shm = shm
        self._pinned: PeerMappings[_Pinned] = PeerMappings()

    def reach(self, device: str, source: Descriptor) -> None:
        """See `Reaching`. Also pins the memory."""
        self._endpoint.check_theirs(source)
        self._reached(device, source)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> PinnedRead:
        """See `Transport.post_read`. The first read from a peer's memory pins it, which may raise DestinationError."""
        mine = self._endpoint.check_mine(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        claim, pinned, base = self._reached(mine.memory.device, source)
        return PinnedRead(self, mine, claim, pinned, base, segments.joined())

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> PinnedRead:
        """See `Striding`. Raises like `post_read`."""
        mine = self._endpoint.check_mine(into, source)
        rectangles.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        # If the kernels cannot read host addresses, copy engines copy short runs one by one.
        if not self._driver.sees_host(ordinal(mine.memory.device)):
            return self.post_read(into, source, rectangles.segments())
        claim, pinned, base = self._reached(mine.memory.device, source)
        return PinnedRead(self, mine, claim, pinned, base, *rectangles.apart(SHORT_BYTES, MANY))

    def gather(self, into: IntoHandle, rows: Rectangles, stall_s: float, *, keep: object) -> None:
        """Copy rectangles whose `src` and `dst` are addresses; see `queued`."""
        driver = self._driver
        self.queued(into, lambda *at: driver.lay_out_rectangles(rows, *at)(), stall_s, keep=keep)

    def _reached(self, name: str, source: Descriptor) -> tuple[MemoryClaim, _Pinned, int]:
        claim, mapped, base = self._shm.view(source)
        device = ordinal(name)
        # Hold the lock, since two threads that pin the same pages would be refused or pay twice.
        with self._lock:
            pinned = self._pinned.get(claim, device)
            if pinned is None:
                self._endpoint.check_open()
                pinned = _Pinned(self._driver, device, mapped)
                self._pinned.put(claim, pinned, device)
        return claim, pinned, base

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. Raises DestinationError if the device failed or copied nothing for `stall_s`."""
        assert isinstance(pending, PinnedRead)
        try:
            pending.run(stall_s)
        except (StaleDescriptor, PeerLost):
            # The pin holds the mapping of `shm`, and the memory is freed only when both release it.
            self.sweep()
            self._shm.sweep()
            raise

    def sweep(self) -> None:
        """See `Sweeping`."""
        with self._lock:
            self._pinned.sweep()

    def close(self) -> None:
        """See `Transport.close`."""
        if not self._endpoint.page.is_mine:
            return
        self._endpoint.close()
        with self._lock:
            self._pinned.clear()
        self._close_streams()


_staged_fits: type[Transport] = StagedTransport
_pinned_fits: type[Transport] = PinnedTransport
_strides: type[Striding] = PinnedTransport
_reaches: type[Reaching] = PinnedTransport
_sweeps: type[Sweeping] = PinnedTransport
