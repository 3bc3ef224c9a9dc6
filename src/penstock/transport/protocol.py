"""Reading a peer's memory, one-sided: the `Transport` protocol and the values that cross it.

In: memory of this process, and descriptors of a peer's. Out: the peer's bytes in our memory.
Not here: how they cross (`loopback`), what a peer is given (`descriptor`), which bytes and from whom (`plan`, `fleet`).

    holder    register(memory) -> Handle, whose .descriptor is encoded and sent by any channel
    receiver  register(memory) -> Handle;  post_read(handle, descriptor, segments) -> Pending;  wait(pending)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.errors import ConfigError, PlanError
from penstock.transport.descriptor import Descriptor
from penstock.types import I64


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segments:
    """Runs of bytes to read, as columns: `nbytes[i]` from `src[i]` of the peer's memory to `dst[i]` of ours.

    Destinations of one read do not overlap.
    """

    src: I64
    dst: I64
    nbytes: I64

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError, naming the first offender, unless all lie within memory of these sizes."""
        if not len(self.src) == len(self.dst) == len(self.nbytes):
            raise PlanError(f"columns of {len(self.src)}, {len(self.dst)} and {len(self.nbytes)} segments")
        outside = self.nbytes < 0
        for offset, total in ((self.src, src_nbytes), (self.dst, dst_nbytes)):
            outside |= (offset < 0) | (offset > total) | (self.nbytes > total - np.clip(offset, 0, total))
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            raise PlanError(f"segment {i} lies outside: {self.nbytes[i]} bytes {where}")

    def joined(self, *, padding_bytes: int = 0) -> Segments:
        """The same bytes as few segments, by destination: empty ones left out, neighbours at both ends made one.

        Args:
            padding_bytes: neighbours may be so far apart, as far at both ends; what lies between is read too. Say so
                only where that is nobody's: between tensors placed alike in two arenas, `memory.arena.ALIGN_BYTES - 1`.
        """
        rows = np.flatnonzero(self.nbytes)
        rows = rows[np.argsort(self.dst[rows], kind="stable")]
        if not len(rows):
            return Segments(src=rows, dst=rows, nbytes=rows)
        src, dst, nbytes = self.src[rows], self.dst[rows], self.nbytes[rows]
        first = np.ones(len(rows), bool)
        gap = dst[1:] - dst[:-1] - nbytes[:-1]
        first[1:] = (src[1:] - src[:-1] - nbytes[:-1] != gap) | (gap < 0) | (gap > padding_bytes)
        heads = np.flatnonzero(first)
        lasts = np.append(heads[1:], len(rows)) - 1
        return Segments(src=src[heads], dst=dst[heads], nbytes=dst[lasts] + nbytes[lasts] - dst[heads])


class Handle(Protocol):
    """One registration, ours and local. The memory stays alive until it is closed and no read uses it."""

    @property
    def memory(self) -> Memory:
        """What was registered."""
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


class Transport(Protocol):
    """One way for bytes to cross. Used by any number of threads; a forked child makes its own."""

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
