"""Reads of a peer's memory: the protocol of a transport, and the types and helpers that transports share.

In: memory of this process, and descriptors of a peer's. Out: the peer's bytes in our memory.
Not here: moving the bytes (each transport; `loopback` is the reference), choosing a transport (`choose`), which bytes
come from which peer (`plan`, `peer`).

    holder    register(memory) -> Handle, whose .descriptor is encoded and sent by any channel
    receiver  register(memory) -> Handle;  post_read(handle, descriptor, segments) -> Pending;  wait(pending)

Descriptors cross between processes as typed msgpack, never pickle, and are hostile until they are checked. An ability
that only some transports, handles or reads have is a protocol of its own (`Filling`, `Striding`, `Stoppable`, ...),
checked by `isinstance`. `wait_all` waits for reads that were posted together; a `DeferredRead` is carried out by the
thread that waits for it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import msgspec
import numpy as np

from penstock.errors import MALFORMED, ConfigError, DestinationError, FormatError, PenstockError, SourceStalled
from penstock.segments import Rectangles, Segments

MAX_DESCRIPTOR_BYTES = 64 << 10
"""Longest encoded descriptor that is decoded. A NIXL agent's metadata is 427 bytes; one arena is one registration."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which a peer reads a registration. It is valid for one generation."""

    transport: _Name
    endpoint: _Name
    """Identifies the holder's transport in one life of its process."""
    generation: _Count
    """Generation of the registration. An endpoint never uses a number twice, so memory that is registered later at the
    same address is not mistaken for this."""
    nbytes: _Count
    device: _Name = "cpu"
    payload: bytes = b""
    """The transport's own data: an IPC handle, an agent's metadata. Hostile until that transport has checked it."""

    @property
    def uri(self) -> str:
        """Return the name of the peer's transport in errors."""
        return f"{self.transport}:{self.endpoint}"


_DECODER = msgspec.msgpack.Decoder(Descriptor)
_Payload = TypeVar("_Payload", bound=msgspec.Struct)


def encode(descriptor: Descriptor) -> bytes:
    """Return the descriptor as bytes (msgpack)."""
    return msgspec.msgpack.encode(descriptor)


def decode(raw: bytes) -> Descriptor:
    """Return the descriptor that a peer sent. FormatError for anything else."""
    # Before decoding: the bytes come from another process, and a decoder allocates what they claim.
    if len(raw) > MAX_DESCRIPTOR_BYTES:
        raise FormatError(f"a descriptor has {len(raw)} bytes, more than {MAX_DESCRIPTOR_BYTES}")
    try:
        # Fields that a newer release added are ignored by the decoder: members of two releases read each other.
        return _DECODER.decode(raw)
    except MALFORMED as error:
        raise FormatError(f"malformed descriptor: {error}") from error


def decode_payload(source: Descriptor, decoder: msgspec.msgpack.Decoder[_Payload]) -> _Payload:
    """Return a descriptor's payload, typed. FormatError if it is malformed."""
    try:
        return decoder.decode(source.payload)
    except MALFORMED as error:
        raise FormatError(f"malformed {source.transport} descriptor: {error}") from error


class Owner(ABC):
    """An owner that can free or move its bytes while it is alive."""

    __slots__ = ()

    @abstractmethod
    def has(self, address: int, nbytes: int) -> bool:
        """Return whether the owner has at least `nbytes` bytes at this address now."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Memory:
    """A run of writable bytes of this process.

    Attributes:
        owner: the object that keeps the bytes alive. An `Owner` is asked where they are before they are used.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    owner: object = None

    @classmethod
    def of_buffer(cls, buffer: bytearray | memoryview) -> Memory:
        """Return the host memory behind a contiguous buffer. ConfigError if it may not be written to."""
        # By numpy: ctypes takes no read-only buffer, and the array keeps a bytearray from being resized.
        array = np.frombuffer(buffer, np.uint8)
        if not array.flags.writeable:
            raise ConfigError("memory to register must be writable")
        return cls(address=int(array.ctypes.data), nbytes=array.nbytes, owner=array)

    def is_there(self) -> bool:
        """Return whether the bytes are still at this address."""
        return not isinstance(self.owner, Owner) or self.owner.has(self.address, self.nbytes)


class Handle(Protocol):
    """A local registration. The memory stays alive until it is closed and no read uses it."""

    @property
    def memory(self) -> Memory:
        """Return the registered memory."""
        ...

    @property
    def descriptor(self) -> Descriptor:
        """Return the descriptor of the current generation, to be sent to peers."""
        ...

    def fence(self) -> Descriptor:
        """Begin a generation: descriptors sent before are stale, and so are the reads under way by them.

        Raises:
            Cancelled: it is closed.

        Order: before the memory is changed. A read that ends without an error saw none of the change.
        """
        ...

    def close(self) -> None:
        """End the registration, as `fence`; reads into this memory end with Cancelled. Idempotent, at once."""
        ...


@runtime_checkable
class RevocableHandle(Protocol):
    """A handle whose descriptors can be taken back one by one, without a new generation for all readers."""

    def lend(self, borrower: str) -> Descriptor:
        """Return a descriptor of the current generation for this borrower alone; the same one on a second call."""
        ...

    def take_back(self, borrower: str) -> None:
        """Refuse the borrower's descriptor: new reads are stale, and so are those under way. Idempotent, at once."""
        ...


class PendingRead(Protocol):
    """A posted read; `moved_bytes` of `nbytes` have arrived."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that it is to move."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Return the bytes moved so far; the number only grows."""
        ...


@runtime_checkable
class Stoppable(Protocol):
    """A posted read that can be ended before it is done."""

    def fail(self, error: PenstockError) -> None:
        """End it with this error, unless it is done: its `wait` raises it, and after that no byte is written."""
        ...


@runtime_checkable
class Filling(Protocol):
    """A transport that can read into memory which it cannot show to peers."""

    def register_into(self, memory: Memory) -> Handle:
        """Return a handle to read into, without a descriptor. ConfigError for a device it cannot reach."""
        ...


class Transport(Protocol):
    """A way to read peers' memory. Used by any number of threads; a forked child makes its own."""

    @property
    def name(self) -> str:
        """Return a short stable word, for descriptors and reports."""
        ...

    def register(self, memory: Memory) -> Handle:
        """Make memory reachable, to be read by peers and read into. ConfigError for a device it cannot reach."""
        ...

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> PendingRead:
        """Request segments of a peer's memory and return at once; nothing runs on the peer.

        Raises, with nothing touched:
            PlanError: a segment lies outside its memory.
            ConfigError: the descriptor or the handle is of another transport.
            FormatError: the descriptor's payload is malformed.
            StaleDescriptor, PeerLost: as of `wait`, where it is known already.
            Cancelled: the transport or the handle is closed.

        Any of them ends the use of the peer: no other transport is tried, since the choice was made for all reads of
        it, and others of them may be under way. A transport that cannot read some peer says so before, by
        `TransportKind.unless_peer`.
        """
        ...

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """Return once every byte is there. May be called again; an error's `mutated` says if any byte was written.

        Raises:
            StaleDescriptor: the peer fenced or released the memory before the last byte was read.
            PeerLost: the peer is gone.
            SourceStalled: no byte arrived for `stall_s`.
            Cancelled: `into` or the transport was closed.
        """
        ...

    def close(self) -> None:
        """Close every handle, free everything. Idempotent."""
        ...


@runtime_checkable
class Striding(Protocol):
    """A transport that reads rectangles without a table of their runs, of which there may be millions."""

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> PendingRead:
        """Request rectangles of a peer's memory; see `Transport.post_read`."""
        ...


@runtime_checkable
class Sweeping(Protocol):
    """A transport that keeps peers' memory mapped between reads."""

    def sweep(self) -> None:
        """Let go of memory of peers that are gone or gave it up, so that it is freed there.

        Order: now and then while a peer's descriptors are kept and nothing is read, since a read does so itself.
        """
        ...


@runtime_checkable
class Reaching(Protocol):
    """A transport whose first read of a peer's memory maps it, which takes milliseconds."""

    def reach(self, device: str, source: Descriptor) -> None:
        """Map a peer's memory for a device now, so that the first read does not wait for it.

        Raises as `Transport.post_read`.
        """
        ...


@runtime_checkable
class Coding(Protocol):
    """A transport that may code what crosses a link, where that is faster."""

    def way(self, source: Descriptor) -> tuple[str, str]:
        """Return the name of the path in use, with `+zstd` if compressed, and the ratio or the reason against it."""
        ...


CANNOT_RECALL = frozenset({"cuda_ipc", "pinned_shm"})
"""Transports whose copies cannot be called back once a device has them. After a stall they may still write, over bytes
that were read again and verified by then, so a stall of theirs ends the reader's whole fetch or update."""

LATE_S = 1.0
"""Seconds to wait for each read that is left after one failed, since all of them are read again: a hundred reads of a
peer that fell silent end after `stall_s` and a second for each, not after a hundred times `stall_s`."""


def wait_all(posting: Iterable[tuple[Transport, PendingRead]], *, stall_s: float) -> tuple[PenstockError | None, bool]:
    """Wait for all reads that are posted, failed or not, so that none of them is under way any more.

    Args:
        posting: posts a read per iteration; an error ends the posting, and the earlier reads are waited for.
        stall_s: see `Transport.wait`; less once one failed.

    Returns:
        The first failure, but a DestinationError before others, since bytes may still arrive; and whether a byte of our
        memory may have been written.
    """
    posted: list[tuple[Transport, PendingRead]] = []
    failed: PenstockError | None = None
    is_touched = False
    try:
        for read in posting:
            # One by one, not by list(): those before one that fails are under way and must be waited for.
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
        # Also of a read that succeeded: its bytes are there, whatever became of the others.
        is_touched |= pending.moved_bytes > 0
    return failed, is_touched


Ts = TypeVarTuple("Ts")


class DeferredRead(ABC, Generic[*Ts]):
    """A `PendingRead` that is carried out by the first thread that waits for it, once, however many wait.

    Args:
        nbytes: bytes that it is to move.
        work: arguments of `_carry`; they keep both memories alive until it is done.
    """

    def __init__(self, nbytes: int, *work: *Ts) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self._lock = threading.Lock()
        self._work: tuple[*Ts] | None = work
        self._error: PenstockError | None = None

    def run(self, stall_s: float) -> None:
        """Carry it out, in the first thread that comes; the others wait for it. Each gets the error of the read."""
        # The lock is kept for the whole copy: other waiters of the same read have nothing else to do.
        with self._lock:
            if self._work is not None:
                try:
                    self._carry(stall_s, *self._work)
                except PenstockError as error:
                    error.mutated = error.mutated or self.moved_bytes > 0
                    # The traceback's frames refer to both memories, and would keep them alive with the error.
                    self._error = error.with_traceback(None)
                # Done or failed, it never runs again: both memories may go.
                self._work = None
            if self._error is not None:
                raise self._error

    @abstractmethod
    def _carry(self, stall_s: float, *work: *Ts) -> None:
        """Move every byte, and add to `moved_bytes` as they arrive."""
