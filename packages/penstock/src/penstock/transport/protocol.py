"""Protocol of a transport, which reads a peer's memory, and the types and helpers that transports share.

The holder registers memory and sends the encoded descriptor by any channel. The reader registers its own memory, then
calls `post_read` and `wait`. A descriptor travels as typed msgpack, never as a pickle, and is untrusted until it is
checked. An ability that only some transports, handles or reads have is a separate protocol, checked by `isinstance`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Generic, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import msgspec
import numpy as np

from penstock.errors import MALFORMED, ConfigError, DestinationError, FormatError, PenstockError, SourceStalled
from penstock.segments import Rectangles, Segments

MAX_DESCRIPTOR_BYTES = 64 << 10
"""Maximum size of an encoded descriptor. A NIXL agent's metadata is 427 bytes, and an arena is one registration."""
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Data with which a peer reads one generation of a registration."""

    transport: _Name
    endpoint: _Name
    """Identifies the holder's transport. A restarted process uses a new value."""
    generation: _Count
    """Generation of the registration. An endpoint never reuses a number, so a later registration of the same address
    has a different one."""
    nbytes: _Count
    device: _Name = "cpu"
    payload: bytes = b""
    """Data for the transport, such as an IPC handle or an agent's metadata. It is hostile until that transport has
    checked it."""

    @property
    def uri(self) -> str:
        """Return the name of the peer's transport for errors."""
        return f"{self.transport}:{self.endpoint}"


_DECODER = msgspec.msgpack.Decoder(Descriptor)
_Payload = TypeVar("_Payload", bound=msgspec.Struct)


def encode(descriptor: Descriptor) -> bytes:
    """Return the descriptor as msgpack."""
    return msgspec.msgpack.encode(descriptor)


def decode(raw: bytes) -> Descriptor:
    """Return the descriptor that a peer sent. Raises FormatError if the bytes are malformed."""
    # Check the length first, since the bytes come from another process and a decoder allocates what they claim.
    if len(raw) > MAX_DESCRIPTOR_BYTES:
        raise FormatError(f"a descriptor has {len(raw)} bytes, but at most {MAX_DESCRIPTOR_BYTES} are allowed")
    try:
        # The decoder ignores fields that a newer release added, so that members of two releases can read each other.
        return _DECODER.decode(raw)
    except MALFORMED as error:
        raise FormatError(f"malformed descriptor: {error}") from error


def decode_payload(source: Descriptor, decoder: msgspec.msgpack.Decoder[_Payload]) -> _Payload:
    """Return the typed payload of a descriptor. Raises FormatError if the payload is malformed."""
    try:
        return decoder.decode(source.payload)
    except MALFORMED as error:
        raise FormatError(f"malformed {source.transport} descriptor: {error}") from error


class Owner(ABC):
    """An owner of memory that can free or move its bytes while it is alive."""

    __slots__ = ()

    @abstractmethod
    def has(self, address: int, nbytes: int) -> bool:
        """Return whether the owner still has at least `nbytes` bytes at this address."""


class Memory(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A range of writable bytes in this process.

    Attributes:
        owner: object that keeps the bytes alive. An `Owner` confirms the address of the bytes before each use.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    owner: object = None

    @classmethod
    def of_buffer(cls, buffer: bytearray | memoryview) -> Memory:
        """Return the host memory of a contiguous buffer. Raises ConfigError if the buffer is read-only."""
        # Use numpy, since ctypes refuses read-only buffers. The array keeps a bytearray from being resized.
        array = np.frombuffer(buffer, np.uint8)
        if not array.flags.writeable:
            raise ConfigError("memory to register must be writable")
        return cls(address=int(array.ctypes.data), nbytes=array.nbytes, owner=array)

    def is_there(self) -> bool:
        """Return whether the bytes are still at this address."""
        return not isinstance(self.owner, Owner) or self.owner.has(self.address, self.nbytes)


class Handle(Protocol):
    """A local registration. The memory stays alive until the handle is closed and no read uses it."""

    @property
    def memory(self) -> Memory:
        """Return the registered memory."""

    @property
    def descriptor(self) -> Descriptor:
        """Return the descriptor of the current generation, to be sent to peers."""

    def fence(self) -> Descriptor:
        """Begin a generation. Earlier descriptors and reads in flight with them become stale.

        Call `fence` before the memory is changed. A read that succeeds contains no byte of the change.

        Raises:
            Cancelled: the handle is closed.
        """

    def close(self) -> None:
        """Close the registration immediately, like `fence`. Reads into this memory raise Cancelled. Idempotent."""


@runtime_checkable
class RevocableHandle(Protocol):
    """A handle whose descriptors can be revoked one by one, without a new generation for all readers."""

    def lend(self, borrower: str) -> Descriptor:
        """Return the descriptor of the current generation for this borrower alone."""

    def take_back(self, borrower: str) -> None:
        """Revoke the borrower's descriptor immediately. Reads with this descriptor become stale. Idempotent."""


class PendingRead(Protocol):
    """A posted read, of which `moved_bytes` of `nbytes` have arrived so far."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes to move."""

    @property
    def moved_bytes(self) -> int:
        """Return the number of bytes moved so far, which only grows."""


@runtime_checkable
class Stoppable(Protocol):
    """A posted read that can be aborted."""

    def fail(self, error: PenstockError) -> None:
        """Abort the read unless it is done. `wait` then raises `error`, after which no byte is written."""


@runtime_checkable
class Filling(Protocol):
    """A transport that can read into memory which it cannot offer to peers."""

    def register_into(self, memory: Memory) -> Handle:
        """Return a handle without a descriptor. Raises ConfigError for a device that the transport cannot reach."""


class Transport(Protocol):
    """A thread-safe mechanism that reads peers' memory. A forked child must create a new transport."""

    @property
    def name(self) -> str:
        """Return a short name that does not change, for descriptors and reports."""

    def register(self, memory: Memory) -> Handle:
        """Register memory for reads from and into it. Raises ConfigError if the transport cannot reach the device."""

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> PendingRead:
        """Request segments of a peer's memory and return. Nothing runs on the peer.

        An error ends the use of the peer, and no other transport is tried, since other reads may be in flight. A
        transport that cannot read some peer reports the reason before the first read, with `TransportKind.unless_peer`.

        Raises, without touching memory:
            PlanError: a segment is outside the peer's memory or outside `into`.
            ConfigError: the descriptor or the handle belongs to a different transport.
            FormatError: the payload of the descriptor is malformed.
            StaleDescriptor, PeerLost: see `wait`, if the failure is already known.
            Cancelled: the transport or the handle is closed.
        """

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """Return when every byte has arrived. Can be called repeatedly. An error's `mutated` says whether any byte
        was written.

        Raises:
            StaleDescriptor: the peer fenced or released the memory before the last byte was read.
            PeerLost: the peer is gone.
            SourceStalled: no byte arrived for `stall_s`.
            Cancelled: `into` or the transport was closed.
        """

    def close(self) -> None:
        """Close every handle and free everything. Idempotent."""


@runtime_checkable
class Striding(Protocol):
    """A transport that reads rectangles without a table of their runs, of which there may be millions."""

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> PendingRead:
        """Request rectangles of a peer's memory; see `Transport.post_read`."""


@runtime_checkable
class Sweeping(Protocol):
    """A transport that keeps peers' memory mapped between reads."""

    def sweep(self) -> None:
        """Unmap the memory of peers that are gone or have released the memory, so that the system can free it.

        Call `sweep` from time to time while a peer's descriptors are kept without a read. Each read also sweeps.
        """


@runtime_checkable
class Reaching(Protocol):
    """A transport whose first read from a peer's memory maps it, which takes milliseconds."""

    def reach(self, device: str, source: Descriptor) -> None:
        """Map a peer's memory for a device, so that the first read does not wait. Raises like `Transport.post_read`."""


@runtime_checkable
class Coding(Protocol):
    """A transport that may compress data on a link where that is faster."""

    def way(self, source: Descriptor) -> tuple[str, str]:
        """Return the transport's name, with `+zstd` if compressed, and the ratio or the reason against compression."""


CANNOT_RECALL = frozenset({"cuda_ipc", "pinned_shm"})
"""Transports whose copies cannot be cancelled when a device has them. After a stall they may still overwrite bytes that
were read again and verified, so their stall ends the reader's whole fetch or update."""
LATE_S = 1.0
"""Seconds to wait for each remaining read after one has failed, since all are read again. Without it a hundred reads
from a silent peer would take a hundred times `stall_s`."""


def wait_all(posting: Iterable[tuple[Transport, PendingRead]], *, stall_s: float) -> tuple[PenstockError | None, bool]:
    """Wait for all posted reads, so that none is in flight any more, even after a failure.

    `posting` posts a read in each iteration. An error of `posting` ends the loop, and earlier reads are still waited
    for. Return a DestinationError if there is one, since bytes may still arrive, or else the first failure. Also return
    whether a byte of our memory may have been written.
    """
    posted: list[tuple[Transport, PendingRead]] = []
    failed: PenstockError | None = None
    is_touched = False
    try:
        for read in posting:
            # Do not use list(), since reads before one that fails are in flight and must be waited for.
            posted.append(read)
    except PenstockError as error:
        failed, is_touched = error, error.mutated
    for transport, pending in posted:
        is_patient = failed is None or (transport.name in CANNOT_RECALL and not isinstance(failed, DestinationError))
        try:
            transport.wait(pending, stall_s=stall_s if is_patient else min(stall_s, LATE_S))
        except PenstockError as error:
            failure: PenstockError = error
            if isinstance(error, SourceStalled) and transport.name in CANNOT_RECALL:
                failure = DestinationError(f"{error.message}, and may still arrive", mutated=True)
            is_touched |= failure.mutated
            if failed is None or (isinstance(failure, DestinationError) and not isinstance(failed, DestinationError)):
                failed = failure
        # Also count a successful read, whose bytes have arrived whatever happened to the others.
        is_touched |= pending.moved_bytes > 0
    return failed, is_touched


Ts = TypeVarTuple("Ts")


class DeferredRead(ABC, Generic[*Ts]):
    """A `PendingRead` that the first waiting thread carries out. `work` keeps both memories alive during the read."""

    def __init__(self, nbytes: int, *work: *Ts) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self._lock = threading.Lock()
        self._work: tuple[*Ts] | None = work
        self._error: PenstockError | None = None

    def run(self, stall_s: float) -> None:
        """Carry out the read in the first thread, while others wait for it. Each thread raises the read's error."""
        # Hold the lock for the whole copy, since other threads that wait for this read have nothing else to do.
        with self._lock:
            if self._work is not None:
                try:
                    self._carry(stall_s, *self._work)
                except PenstockError as error:
                    error.mutated = error.mutated or self.moved_bytes > 0
                    # The frames of the traceback refer to both memories and would keep them alive.
                    self._error = error.with_traceback(None)
                # The read never runs again, so release both memories.
                self._work = None
            if self._error is not None:
                raise self._error

    @abstractmethod
    def _carry(self, stall_s: float, *work: *Ts) -> None:
        """Move every byte, and update `moved_bytes` as bytes arrive."""
