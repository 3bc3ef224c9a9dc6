"""Device memory of processes on one host. The reader's copy engines read the holder's memory, if needed over NVLink.

Nothing runs on the holder's device. Memory from cudaMalloc (torch's default) has one 64-byte IPC handle per allocation.
Virtual memory (torch's `expandable_segments`) consists of pieces of physical memory, 20 MiB each in torch, and each is
shared through a file descriptor. Only file descriptors cross PID namespaces, for example between containers, since an
IPC handle contains a process id.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from penstock.cuda.device_memory import memory_of
from penstock.cuda.driver import IPC_HANDLE_BYTES, CudaDriver, StreamPools, load_driver, never_freed, ordinal
from penstock.errors import (
    ConfigError,
    DestinationError,
    DeviceOutOfMemory,
    FormatError,
    PeerLost,
    PenstockError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.net.unix_sockets import pid_namespace
from penstock.segments import Rectangles, Segments, gathered
from penstock.transport.fd_server import receive_fds
from penstock.transport.host_endpoint import (
    Endpoint,
    FencedHandle,
    GenerationAddress,
    GenerationTable,
    IntoHandle,
    MemoryClaim,
    PeerMappings,
    handle_here,
)
from penstock.transport.protocol import (
    Descriptor,
    Handle,
    Memory,
    PendingRead,
    Reaching,
    Striding,
    Sweeping,
    Transport,
    decode_payload,
)
from penstock.types import MIB

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Length = Annotated[int, msgspec.Meta(gt=0, le=1 << 60)]
_MAX_RUNS = 4096
"""Maximum number of runs of equal pieces in a payload. It keeps a descriptor below its size limit."""
_MAX_PIECES = 1 << 20
"""Maximum number of file descriptors requested for one registration, for 20 TiB in torch's pieces."""


class CudaPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Data with which a peer reaches a registration on a device."""

    page: GenerationAddress
    address: _Count
    """Address of the memory in the holder's process."""
    offset: _Count
    """Offset of the memory in the mapping."""
    handle: Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)] = b""
    door: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Abstract socket address of the server of pieces, for the previous release."""
    pieces: Annotated[tuple[tuple[_Length, _Length], ...], msgspec.Meta(max_length=_MAX_RUNS)] = ()
    """Lengths of the pieces of physical memory, in order, as runs of a count and the bytes of each piece."""

    @property
    def num_pieces(self) -> int:
        """Return the number of file descriptors to request."""
        return sum(count for count, _ in self.pieces)


class Shared:
    """Data that shares a local registration: the IPC handle of its allocation, or the pieces of its virtual memory.

    `offset` is the memory's offset in the allocation or in its first piece. `pieces` lists addresses and sizes.
    """

    def __init__(
        self, driver: CudaDriver, device: int, *, handle: bytes, offset: int, pieces: Sequence[tuple[int, int]]
    ) -> None:
        self.handle = handle
        self.offset = offset
        self.pieces = pieces
        self._driver = driver
        self._device = device

    @classmethod
    def of(cls, driver: CudaDriver, device: int, memory: Memory) -> Shared:
        """Find the IPC handle or the pieces of this memory. Raises ConfigError if the memory cannot be shared."""
        if not memory.nbytes:
            return cls(driver, device, handle=b"", offset=0, pieces=())
        with driver.entered(device):
            base, nbytes = driver.address_range(memory.address)
            offset = memory.address - base
            handle = driver.ipc_handle(base)
            if handle is None:
                return cls(driver, device, handle=b"", offset=offset, pieces=_pieces_of(driver, base, memory))
        if offset + memory.nbytes > nbytes:
            raise ConfigError(
                "memory to register spans two allocations", hint="register one allocation at a time, or use an arena"
            )
        return cls(driver, device, handle=handle, offset=offset, pieces=())

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return the lengths of the pieces as run-length pairs (count, bytes)."""
        runs: list[tuple[int, int]] = []
        for _, nbytes in self.pieces:
            if runs and runs[-1][1] == nbytes:
                runs[-1] = (runs[-1][0] + 1, nbytes)
            else:
                runs.append((1, nbytes))
        if len(runs) > _MAX_RUNS:
            message = f"cannot describe device memory in {len(runs)} runs of pieces, more than {_MAX_RUNS}"
            raise ConfigError(message, hint="allocate the memory in an arena")
        return tuple(runs)

    def export(self) -> Iterator[int]:
        """Yield file descriptors of the pieces, in order. The receiver closes each."""
        for address, _ in self.pieces:
            with self._driver.entered(self._device):
                fd = self._driver.export_fd(address)
            if fd is None:
                # The owner has freed the memory. The peer detects that pieces are missing.
                return
            yield fd


def _pieces_of(driver: CudaDriver, base: int, memory: Memory) -> list[tuple[int, int]]:
    # This export is only a test. Descriptors are created again for each peer that connects.
    fd = driver.export_fd(base)
    if fd is None:
        raise ConfigError(
            "this device memory cannot be shared with other processes",
            hint="it is virtual memory (expandable_segments, cudaMallocAsync) without a POSIX handle, "
            "so set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
        )
    os.close(fd)
    pieces = list[tuple[int, int]]()
    # The pieces of one reservation are adjacent but separate memory for the driver.
    while base < memory.address + memory.nbytes:
        base, nbytes = driver.address_range(base)
        pieces.append((base, nbytes))
        base += nbytes
    return pieces


class Mapped:
    """A peer's memory that is mapped in this process for one device, until this object is collected."""

    def __init__(self, address: int, nbytes: int, keep: object = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.keep = keep


def map_peer(driver: CudaDriver, device: int, source: Descriptor, payload: CudaPayload) -> Mapped:
    """Map a peer's memory for one of our devices. Mapping takes milliseconds, so keep the result.

    Raises ConfigError if the devices cannot reach each other's memory, or if the memory only has a handle from another
    PID namespace, DestinationError if the driver refused, and the errors of `fd_server.receive_fds`.
    """
    if not payload.handle:
        return _map_pieces(driver, device, source, payload)
    if reason := handle_fault(payload):
        raise ConfigError(reason, uri=source.uri, hint=_HANDLE_HINT)
    with driver.entered(device):
        address = driver.ipc_open(payload.handle)
        # The handle opens the whole allocation, whose range is needed to check the peer's offset.
        try:
            base, nbytes = driver.address_range(address)
        except PenstockError:
            driver.ipc_close(address)
            raise
    mapped = Mapped(address, base + nbytes - address)
    _when_gone(mapped, driver, device, partial(driver.ipc_close, address))
    return mapped


_HANDLE_HINT = "start the process that holds the memory with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def handle_fault(payload: CudaPayload) -> str:
    """Return why this process cannot open the memory with its handle, or an empty string."""
    # The driver finds the exporter by its process id, which in another PID namespace names no process or a wrong one.
    # Source: UCX also refuses such handles, https://github.com/openucx/ucx/pull/11513.
    if not payload.handle or payload.page.pid_namespace in (0, pid_namespace()):
        return ""
    return "the peer's device memory has no file descriptors, which other containers need to map it"


def refusal(into: Handle, source: Descriptor) -> str:
    """Return why this transport cannot read a peer's memory, or an empty string; see `TransportKind.unless_peer`."""
    reason = handle_fault(decode_payload(source, _DECODER))
    return reason and f"{reason}: {_HANDLE_HINT}"


def _map_pieces(driver: CudaDriver, device: int, source: Descriptor, payload: CudaPayload) -> Mapped:
    uri = source.uri
    if not 0 < payload.num_pieces <= _MAX_PIECES:
        raise FormatError(
            f"the descriptor has {payload.num_pieces} pieces of device memory, which is out of range", uri=uri
        )
    # Build the list only after the checks, since a hostile count could make the list arbitrarily long.
    lengths = [nbytes for count, nbytes in payload.pieces for _ in range(count)]
    total, at = sum(lengths), 0
    with driver.entered(device):
        # Reserve one range for all pieces, so that offsets are the same as at the holder.
        base = driver.reserve(total)
        try:
            address = payload.page.socket or (payload.door and f"\0{payload.door}")
            fds = receive_fds(address, source.generation, len(lengths), uri)
            for fd, nbytes in zip(fds, lengths, strict=True):
                driver.map_fd(base + at, nbytes, fd)
                at += nbytes
            driver.allow(base, total, device)
        except PenstockError:
            driver.unmap(base, at, total)
            raise
    mapped = Mapped(base, total)
    _when_gone(mapped, driver, device, partial(driver.unmap, base, total, total))
    return mapped


def _when_gone(mapped: Mapped, driver: CudaDriver, device: int, undo: Callable[[], None]) -> None:
    """Call `undo` in the device's context when a mapping is collected."""
    finalizer = weakref.finalize(mapped, _undo, os.getpid(), driver, device, undo)
    # At the interpreter's exit the driver may be gone already.
    finalizer.atexit = False


def _undo(pid: int, driver: CudaDriver, device: int, undo: Callable[[], None]) -> None:
    # A forked child inherits the finalizer and must not unmap memory that its parent uses.
    if pid == os.getpid():
        with driver.entered(device):
            undo()


GROUP_BYTES = 256 * MIB
"""Bytes between two events that show progress: 0.7 ms of NVLink at 397 GB/s."""
SHORT_BYTES = 256 << 10
"""Shorter segments count as short. Starting a copy takes 0.7 us, in which NVLink moves 0.28 MB. Source:
benchmarks/results/h200x2_202611/transport.md."""
MANY = 64
"""Minimum number of short segments in a read that one kernel copies. Its launch and table cost about 0.2 ms."""
LAID_OUT = 4
"""Number of address pairs for which the laid out copies of rectangles are kept. Where a flip exchanges memories
(`cuda.device_memory`), holder and reader each alternate between two."""
SETTLE_S = 30.0
"""Seconds for which `register` waits for kernels queued earlier, and `close` for copies in flight."""
_SPIN_S = 0.0002
_NAP_S = 0.00005
"""A waiting thread polls without pause for `_SPIN_S`, in which NVLink moves 80 MB, and then sleeps at
least `_NAP_S`."""
_FASTEST_BYTES_PER_S = 2.1e12
"""No copy is faster, so a waiting thread sleeps at least as long as the remaining bytes take. Each poll takes the
interpreter's lock from threads that verify and serve. Source: benchmarks/results/h200x2_202611/transport.md."""
_LONGEST_NAP_S = 0.01
_DECODER = msgspec.msgpack.Decoder(CudaPayload)


class _QueuedCopies(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Copies laid out for one stream, which can be queued repeatedly."""

    queue: Callable[[], None]
    stream: int
    nbytes: int


class CudaRead:
    """See `PendingRead`. The read keeps both memories alive until its last event, even if the waiter gave up."""

    def __init__(self, into: IntoHandle, claim: MemoryClaim, source: Mapped | None, nbytes: int, device: int) -> None:
        self.into = into
        self.device = device
        self.claim = claim
        self.source = source
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.events: deque[tuple[int, int]] = deque()
        """Events that have not passed yet, with the number of bytes that have arrived at each."""
        self.lock = threading.Lock()
        self.is_checked = False
        self.error: PenstockError | None = None


class CudaIpcTransport:
    """See `Transport`. Raises ConfigError without a CUDA driver or memfds."""

    name = "cuda_ipc"

    def __init__(self, driver: CudaDriver | None = None, *, num_streams: int = 2) -> None:
        self._driver: CudaDriver = load_driver() if driver is None else driver
        page = GenerationTable.create()
        self._endpoint = Endpoint(self.name, page, abstract_name=f"penstock-{page.name}")
        self._mapped: PeerMappings[Mapped] = PeerMappings()
        self._laid_out: WeakKeyDictionary[Rectangles, dict[tuple[int, int, int], Sequence[_QueuedCopies]]] = (
            WeakKeyDictionary()
        )
        """Laid out copies of rectangles by addresses, since a sync reads the same rectangles for each version."""
        self._streams = StreamPools(self._driver, num_streams=num_streams)
        self._in_flight: set[CudaRead] = set()
        self._lock = threading.RLock()
        self._mapping = threading.Lock()

    def register(self, memory: Memory) -> FencedHandle:
        """See `Transport.register`. Waits up to `SETTLE_S` for the default stream, which may write this memory."""
        device = ordinal(memory.device)
        self._endpoint.check_open()
        shared = Shared.of(self._driver, device, memory)
        # A peer's copy engine does not wait for streams of this process.
        self._settle(device)
        runs = shared.runs()

        def describe(page: GenerationAddress) -> bytes:
            payload = CudaPayload(
                page=page,
                address=memory.address,
                offset=shared.offset,
                handle=shared.handle,
                door=self._endpoint.abstract_name if shared.pieces else "",
                pieces=runs,
            )
            return msgspec.msgpack.encode(payload)

        return self._endpoint.register(memory, describe, keep=shared)

    def register_into(self, memory: Memory) -> IntoHandle:
        """Return a handle for pinned host memory, which a device fills. See `IntoHost` for other memory."""
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def _settle(self, device: int) -> None:
        deadline = time.monotonic() + SETTLE_S
        with self._driver.entered(device):
            with self._lock:
                event = self._streams.of(device).take_event()
            self._driver.record(event, 0)
            while not self._driver.is_done(event):
                if time.monotonic() > deadline:
                    raise DestinationError(f"kernels queued earlier on cuda:{device} did not finish in {SETTLE_S} s")
                time.sleep(_NAP_S)
            with self._lock:
                self._streams.of(device).give_event(event)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> CudaRead:
        """See `Transport.post_read`. The first read from a peer's memory maps it; see `map_peer`."""
        mine = self._endpoint.check_mine(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        rows = segments.joined()
        # Copy engines fill host memory. A kernel that copies short segments would need it mapped.
        least = 0 if mine.memory.device == "cpu" else SHORT_BYTES
        return self._post(mine, source, int(rows.nbytes.sum()), partial(self._groups_of, rows, None, least=least))

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> CudaRead:
        """See `Striding`. Laying out the copies takes about 2 ms per GiB, once per pair of addresses."""
        mine = self._endpoint.check_mine(into, source)
        rectangles.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)

        def lay_out(ours: int, base: int, device: int) -> Sequence[_QueuedCopies]:
            # The same rectangles may be read into different memory, or from a peer that was mapped again.
            prepared, at = self._laid_out.setdefault(rectangles, {}), (ours, base, device)
            if at not in prepared:
                while len(prepared) >= LAID_OUT:
                    prepared.pop(next(iter(prepared)))
                prepared[at] = list(self._groups_of(*rectangles.apart(SHORT_BYTES, MANY), ours, base, device))
            return prepared[at]

        return self._post(mine, source, int(rectangles.nbytes.sum()), lay_out)

    def _post(
        self,
        mine: IntoHandle,
        source: Descriptor,
        nbytes: int,
        lay_out: Callable[[int, int, int], Iterable[_QueuedCopies]],
    ) -> CudaRead:
        """Queue a read. `lay_out` receives the local address, the peer's mapped address, and the device."""
        payload = decode_payload(source, _DECODER)
        claim = self._endpoint.claim(source, payload.page)
        # Map without the lock, since mapping takes milliseconds and may wait for the peer.
        device, mapped = self._map_for(mine.memory, claim, payload) if nbytes else (0, None)
        with self._lock:
            self._endpoint.check_open()
            self.sweep()
            read = CudaRead(mine, claim, mapped, nbytes, device)
            if mapped is not None:
                claim.check_inside(payload.offset, mapped.nbytes)
                base = mapped.address + payload.offset
                try:
                    with self._driver.entered(device):
                        for group in lay_out(mine.memory.address, base, device):
                            group.queue()
                            event = self._streams.of(device).take_event()
                            self._driver.record(event, group.stream)
                            read.events.append((event, group.nbytes + (read.events[-1][1] if read.events else 0)))
                except PenstockError as error:
                    error.mutated = True
                    # Copies queued before the refused one have no event, so their memories can never be freed safely.
                    never_freed.append((read,))
                    raise
                finally:
                    # Even after an error, `sweep` must watch the copies that were queued before it.
                    if read.events:
                        self._in_flight.add(read)
        return read

    def reach(self, device: str, source: Descriptor) -> None:
        """See `Reaching`. Raises like `post_read`."""
        self._endpoint.check_theirs(source)
        payload = decode_payload(source, _DECODER)
        self._map(self._endpoint.claim(source, payload.page), payload, ordinal(device))

    def sweep(self) -> None:
        """See `Sweeping`. `post_read` also sweeps."""
        with self._lock:
            self._reap()
            self._mapped.sweep()

    def _map_for(self, into: Memory, claim: MemoryClaim, payload: CudaPayload) -> tuple[int, Mapped]:
        """Map the memory for the target's device, or for host memory for a device that reaches the peer's memory."""
        if into.device != "cpu":
            device = ordinal(into.device)
            return device, self._map(claim, payload, device)
        # The holder may number its devices differently, so try its number first, among the devices in use here.
        devices = list(range(self._driver.num_devices()))
        devices.sort(key=lambda at: (not self._driver.has_context(at), f"cuda:{at}" != claim.source.device))
        with self._lock:
            if known := [(at, mapped) for at in devices if (mapped := self._mapped.get(claim, at)) is not None]:
                return known[0]
        for device in devices[:-1]:
            with suppress(ConfigError, DeviceOutOfMemory):
                return device, self._map(claim, payload, device)
        return devices[-1], self._map(claim, payload, devices[-1])

    def _map(self, claim: MemoryClaim, payload: CudaPayload, device: int) -> Mapped:
        source = claim.source
        # The driver refuses to open memory of this process, which is already mapped at its own address.
        ours = handle_here(source)
        if ours is not None:
            if source.device != f"cuda:{device}":
                with self._driver.entered(device):
                    self._driver.enable_peer(ordinal(source.device))
                virtual = memory_of(payload.address - payload.offset)
                if virtual is not None:
                    virtual.allow(device)
            return Mapped(payload.address - payload.offset, payload.offset + source.nbytes, keep=ours)
        with self._lock:
            mapped = self._mapped.get(claim, device)
        if mapped is not None:
            return mapped
        # `_mapping` lets one thread map while others wait, and `_lock` stays free for reads from mapped memory.
        with self._mapping:
            with self._lock:
                mapped = self._mapped.get(claim, device)
            if mapped is None:
                try:
                    mapped = map_peer(self._driver, device, source, payload)
                finally:
                    # After a failure, `check` may raise a better reason. After a success, it proves that the holder
                    # still had the memory.
                    claim.check()
                with self._lock:
                    self._mapped.put(claim, mapped, device)
        return mapped

    def _groups_of(
        self, rows: Segments, rectangles: Rectangles | None, ours: int, base: int, device: int, least: int = SHORT_BYTES
    ) -> Iterator[_QueuedCopies]:
        """Yield the copies in groups that alternate between the streams."""
        pool = self._streams.of(device)
        driver = self._driver
        for batch in () if rectangles is None else rectangles.addressed(ours, base, GROUP_BYTES):
            stream = pool.take_stream()
            queue = driver.lay_out_rectangles(batch, device, stream)
            yield _QueuedCopies(queue=queue, stream=stream, nbytes=int(batch.nbytes.sum()))
        short = rows.nbytes < least
        short &= short.sum() >= MANY
        for is_short in (True, False):
            cut = rows[short == is_short].cut(GROUP_BYTES)
            columns = cut.dst.astype(np.uint64) + np.uint64(ours), cut.src.astype(np.uint64) + np.uint64(base)
            for group in gathered(cut.nbytes, GROUP_BYTES):
                dst, src, nbytes = columns[0][group], columns[1][group], cut.nbytes[group].astype(np.uint64)
                stream = pool.take_stream()
                gather = partial(driver.gather, dst, src, nbytes, device, stream)
                queue = gather if is_short else partial(driver.copy, dst, src, nbytes, stream)
                yield _QueuedCopies(queue=queue, stream=stream, nbytes=int(nbytes.sum()))

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. Raises DestinationError with `mutated` if the device failed."""
        assert isinstance(pending, CudaRead)
        # Hold the lock for the whole wait, since other threads that wait for this read have nothing else to do.
        with pending.lock:
            if not pending.is_checked:
                try:
                    self._finish(pending, stall_s)
                except PenstockError as error:
                    # A copy may have written anything before it was known to be done.
                    error.mutated = pending.nbytes > 0
                    # The frames of the traceback refer to both memories and would keep them alive.
                    pending.error = error.with_traceback(None)
                    if isinstance(error, StaleDescriptor | PeerLost):
                        with self._lock:
                            self._mapped.sweep()
                pending.is_checked = True
            if pending.error is not None:
                raise pending.error

    def _finish(self, read: CudaRead, stall_s: float) -> None:
        began = moved = time.monotonic()
        seen = read.moved_bytes
        while read.events:
            read.into.check_open()
            self._advance(read)
            now = time.monotonic()
            # Compare with the last value, since a sweep in another thread also advances this read.
            if read.moved_bytes != seen:
                moved, seen = now, read.moved_bytes
            elif now - moved > stall_s:
                # If the holder is gone or fenced the memory, raise that error, which is more specific.
                read.claim.check()
                raise SourceStalled(f"no byte arrived for {stall_s} s", uri=read.claim.source.uri)
            if read.events:
                nap_s = min(max(_NAP_S, (read.nbytes - read.moved_bytes) / _FASTEST_BYTES_PER_S), _LONGEST_NAP_S)
                time.sleep(0 if now - began < _SPIN_S and nap_s == _NAP_S else nap_s)
        read.into.check_open()
        # Check after the last byte. A holder fences before it changes a byte, so a valid claim saw no change.
        read.claim.check()

    def _advance(self, read: CudaRead) -> None:
        device = read.device
        with self._lock:
            if not read.events:
                return
            with self._driver.entered(device):
                while read.events and self._driver.is_done(read.events[0][0]):
                    event, read.moved_bytes = read.events.popleft()
                    self._streams.of(device).give_event(event)
            if not read.events:
                # A finished read must not keep the holder's memory mapped.
                read.source = None
                self._in_flight.discard(read)

    def _reap(self) -> None:
        """Release reads that the device has finished although their waiting threads gave up."""
        for read in list(self._in_flight):
            self._advance(read)

    def close(self) -> None:
        """See `Transport.close`. Waits at most `SETTLE_S` for copies, then keeps the memory of unfinished copies."""
        if not self._endpoint.page.is_mine:
            return
        # Close the endpoint first, so that no read is posted and waiting threads raise Cancelled.
        self._endpoint.close()
        deadline = time.monotonic() + SETTLE_S
        try:
            while self._in_flight and time.monotonic() < deadline:
                self._reap()
                time.sleep(_NAP_S)
        except DestinationError:
            # The device failed, and waiting threads raise that error. Memory to which it may still write is kept below.
            pass
        with self._lock:
            if self._in_flight:
                # Freed memory could be reused while a copy, which cannot be cancelled, still writes to it.
                never_freed.append((self._in_flight, self._mapped, self._streams))
                return
            self._mapped.clear()
            self._laid_out.clear()
            self._streams.close()


_fits: type[Transport] = CudaIpcTransport
_strides: type[Striding] = CudaIpcTransport
_reaches: type[Reaching] = CudaIpcTransport
_sweeps: type[Sweeping] = CudaIpcTransport
