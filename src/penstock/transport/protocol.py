"""Reading a peer's memory, one-sided: the `Transport` protocol and the values that cross it.

In: memory of this process, and descriptors of a peer's. Out: the peer's bytes in our memory.
Not here: how they cross (`loopback`), what a peer is given (`descriptor`), which bytes and from whom (`plan`, `fleet`).

    holder    register(memory) -> Handle, whose .descriptor is encoded and sent by any channel
    receiver  register(memory) -> Handle;  post_read(handle, descriptor, segments) -> Pending;  wait(pending)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, PenstockError, PlanError
from penstock.plan.intersect import spread
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

    def __getitem__(self, which: I64 | npt.NDArray[np.bool_] | slice) -> Segments:
        """Those rows."""
        return Segments(src=self.src[which], dst=self.dst[which], nbytes=self.nbytes[which])

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

    def cut(self, most_bytes: int) -> Segments:
        """The same bytes in the same order, longer runs cut to so many, empty ones left out."""
        counts = -(-self.nbytes // most_bytes)
        row = np.repeat(np.arange(len(counts)), counts)
        skipped = spread(np.zeros(len(counts), np.int64), counts) * most_bytes
        nbytes = np.minimum(self.nbytes[row] - skipped, most_bytes)
        return Segments(src=self.src[row] + skipped, dst=self.dst[row] + skipped, nbytes=nbytes)


_COLUMNS = "src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Rectangles:
    """Equal runs at a pitch, as columns: `num_rows[i]` runs of `run_bytes[i]`, from `src[i]` of the peer's memory to
    `dst[i]` of ours, `src_pitch[i]` apart there and `dst_pitch[i]` here.

    Destinations of one read do not overlap. Not changed: a transport may keep what it made of them while they live.
    """

    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, which: I64 | npt.NDArray[np.bool_] | slice) -> Rectangles:
        """Those rows."""
        return Rectangles(**{name: getattr(self, name)[which] for name in _COLUMNS})

    @property
    def nbytes(self) -> I64:
        """Bytes of each."""
        return self.run_bytes * self.num_rows

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError, naming the first offender, unless all lie within memory of these sizes."""
        if len({len(getattr(self, name)) for name in _COLUMNS}) != 1:
            raise PlanError("rectangles of uneven columns")
        outside = (self.run_bytes < 1) | (self.num_rows < 1)
        for offset, pitch, total in ((self.src, self.src_pitch, src_nbytes), (self.dst, self.dst_pitch, dst_nbytes)):
            room = total - np.clip(offset, 0, total) - np.clip(self.run_bytes, 0, total)
            outside |= (offset < 0) | (offset > total) | (self.run_bytes > total) | (room < 0) | (pitch < 0)
            # By division: the product of a hostile pitch and rows could wrap.
            outside |= (self.num_rows > 1) & (self.num_rows - 1 > room // np.maximum(pitch, 1))
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            raise PlanError(f"rectangle {i} lies outside: {self.num_rows[i]} runs of {self.run_bytes[i]} {where}")

    def longest_runs(self) -> I64:
        """Bytes of each one's runs, where both ends lie in one piece all of it."""
        whole = (self.src_pitch == self.run_bytes) & (self.dst_pitch == self.run_bytes)
        return np.where(whole, self.nbytes, self.run_bytes)

    def segments(self) -> Segments:
        """The same bytes, a run each; those in one piece at both ends are one run."""
        run = self.longest_runs()
        rows = self.nbytes // run
        at = np.repeat(np.arange(len(rows)), rows)
        turn = spread(np.zeros(len(rows), np.int64), rows)
        src, dst = self.src[at] + turn * self.src_pitch[at], self.dst[at] + turn * self.dst_pitch[at]
        return Segments(src=src, dst=dst, nbytes=run[at])

    def apart(self, short_bytes: int, many: int) -> tuple[Segments, Rectangles | None]:
        """Long runs, joined, and those that are shorter, where they are so many: for copy engines, and for a kernel."""
        short = self.longest_runs() < short_bytes
        if int(self.num_rows[short].sum()) < many:
            return self.segments().joined(), None
        return self[~short].segments().joined(), self[short]

    def addressed(self, dst_base: int, src_base: int, about_bytes: int) -> Iterator[Rectangles]:
        """The same with addresses for offsets, so many bytes of them at a time."""
        for which in gathered(self.nbytes, about_bytes):
            some = self[which]
            yield replace(some, src=some.src + src_base, dst=some.dst + dst_base)


def gathered(nbytes: I64, about_bytes: int, *, most_rows: int = 0) -> Iterator[slice]:
    """Rows of these lengths taken together: about so many bytes of them, and at most so many, if that is not 0."""
    if not len(nbytes):
        return
    is_edge = np.diff((np.cumsum(nbytes) - 1) // about_bytes) != 0
    if most_rows:
        is_edge |= np.arange(1, len(nbytes)) % most_rows == 0
    for start, stop in pairwise([0, *(np.flatnonzero(is_edge) + 1).tolist(), len(nbytes)]):
        yield slice(start, stop)


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


@runtime_checkable
class Lending(Protocol):
    """A handle whose descriptors can be taken back one by one, without a new generation for all readers."""

    def lend(self, borrower: str) -> Descriptor:
        """A descriptor of the current generation for this borrower alone; the same one if it is asked for again."""
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
        """What reads from there go by now, `+zstd` if coded; and how much smaller that makes them, or why not."""
        ...
