"""Reading a peer's memory, one-sided: the `Transport` protocol and the values that cross it.

In: memory of this process, and descriptors of a peer's. Out: the peer's bytes in our memory.
Not here: moving the bytes (`loopback`), the form of a descriptor (`descriptor`), choosing bytes and sources (`plan`,
`peer`).

    holder    register(memory) -> Handle, whose .descriptor is encoded and sent by any channel
    receiver  register(memory) -> Handle;  post_read(handle, descriptor, segments) -> Pending;  wait(pending)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from penstock.errors import ConfigError, PenstockError
from penstock.segments import Rectangles, Segments
from penstock.transport.descriptor import Descriptor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Memory:
    """A run of writable bytes of this process; `owner` is whatever keeps them alive."""

    address: int
    nbytes: int
    device: str = "cpu"
    owner: object = None

    @classmethod
    def of_buffer(cls, buffer: bytearray | memoryview) -> Memory:
        """Host memory behind a contiguous buffer. ConfigError if it may not be written to."""
        array = np.frombuffer(buffer, np.uint8)
        if not array.flags.writeable:
            raise ConfigError("memory to register must be writable")
        return cls(address=int(array.ctypes.data), nbytes=array.nbytes, owner=array)


class Handle(Protocol):
    """A local registration. The memory stays alive until it is closed and no read uses it."""

    @property
    def memory(self) -> Memory:
        """Return the registered memory."""
        ...

    @property
    def descriptor(self) -> Descriptor:
        """For peers; that of the current generation."""
        ...

    def fence(self) -> Descriptor:
        """Begin a generation: descriptors given before are stale, and so are the reads under way by them.

        Raises: Cancelled if it is closed.

        Order: before the memory is changed. A read that ends without an error saw none of the change.
        """
        ...

    def close(self) -> None:
        """End the registration, as `fence`; reads into this memory end with Cancelled. Idempotent, at once."""
        ...


@runtime_checkable
class Lending(Protocol):
    """A handle whose descriptors can be taken back one by one, without a new generation for all readers."""

    def lend(self, borrower: str) -> Descriptor:
        """Return a descriptor of the current generation for this borrower alone; the same one on a second call."""
        ...

    def take_back(self, borrower: str) -> None:
        """Refuse what was lent to it: new reads are stale, and so are those under way. Idempotent, at once."""
        ...


class Pending(Protocol):
    """A posted read; `moved_bytes` of `nbytes` have arrived."""

    @property
    def nbytes(self) -> int:
        """Bytes it is to move."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far; only grows."""
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
        """A handle to read into, without a descriptor. ConfigError for a device it cannot reach."""
        ...


class Transport(Protocol):
    """A way to read peers' memory. Used by any number of threads; a forked child makes its own."""

    @property
    def name(self) -> str:
        """A short stable word, in descriptors and reports."""
        ...

    def register(self, memory: Memory) -> Handle:
        """Make memory reachable, to be read by peers and read into. ConfigError for a device it cannot reach."""
        ...

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> Pending:
        """Ask for segments of a peer's memory; nothing runs on the peer. Returns at once.

        Raises, with nothing touched:
            PlanError: a segment lies outside its memory.
            ConfigError: the descriptor or the handle is of another transport.
            StaleDescriptor, PeerLost: as of `wait`, where it is known already.
            Cancelled: the transport or the handle is closed.
        """
        ...

    def wait(self, pending: Pending, *, stall_s: float) -> None:
        """Return once every byte is there; more than once if you like. `mutated` says if any was written before.

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

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> Pending:
        """As `Transport.post_read`, of rectangles."""
        ...


@runtime_checkable
class Coding(Protocol):
    """A transport that may code what crosses a link, where that is faster."""

    def way(self, source: Descriptor) -> tuple[str, str]:
        """Return the name of the path in use, with `+zstd` if compressed, and the ratio or the reason against it."""
        ...
