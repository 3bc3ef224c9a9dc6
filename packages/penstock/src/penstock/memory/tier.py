"""Tiers of memory, rooms that hold one block each, moves between rooms, and statistics."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.types import GB, MIB
from penstock.waits import Threads

PIECE_BYTES = 16 * MIB
"""Number of bytes moved at once, the size of a chunk of a fetch. Offsets in rooms are multiples of it."""


@dataclass(frozen=True, slots=True, order=True)
class TierBlock:
    """The bytes `[start, stop)` of some content, such as a revision."""

    content: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Return the length of the block in bytes."""
        return self.stop - self.start


class Room(Protocol):
    """Memory for one block in a tier. Only one thread at a time may use a range of the room."""

    @property
    def nbytes(self) -> int:
        """Return the size of the block in bytes."""

    def write(self, offset: int, data: memoryview) -> None:
        """Start to copy bytes from host memory, which must stay unchanged until `settle` returns."""

    def read(self, offset: int, into: memoryview) -> None:
        """Start to copy bytes to host memory; `settle` completes it. Raise IntegrityError for corrupted bytes."""

    def settle(self) -> None:
        """Wait until all copies have finished. Raise DestinationError, DiskFull or SourceStalled if a copy failed."""

    def close(self) -> None:
        """Free the room, which must not be in use. Idempotent."""


@runtime_checkable
class HostRoom(Protocol):
    """A room in this process's memory. `move` copies from and to this room without a buffer."""

    def views(self) -> Sequence[memoryview]:
        """Return all bytes in order. The length of each view except the last is a multiple of `PIECE_BYTES`."""


class Tier(Protocol):
    """A kind of memory in which rooms are opened."""

    @property
    def name(self) -> str:
        """Return `gpu`, `host` or `disk`."""

    @property
    def unit_bytes(self) -> int:
        """Return the unit in bytes to which sizes of rooms are rounded up."""

    @property
    def num_threads(self) -> int:
        """Return the number of concurrent pieces that saturates the tier's link."""

    def open_room(self, nbytes: int) -> Room:
        """Return a new room for a block. Raise DiskFull, DeviceOutOfMemory or DestinationError if memory is short."""

    def trim(self) -> None:
        """Return the memory of closed rooms to the system. A new room may reuse memory that was not yet returned."""

    def close(self) -> None:
        """Free the tier's resources after its rooms are closed. Idempotent."""


class UncachedTier:
    """A tier whose closed rooms hold no memory."""

    def trim(self) -> None:
        """See `Tier.trim`."""

    def close(self) -> None:
        """See `Tier.close`."""


def move(src: Room, dst: Room, num_threads: int, moved: Callable[[int], None]) -> None:
    """Copy all bytes from one room to another, and call `moved` with the length of each piece.

    If a room fails, raise its error after all copies have ended. After an error, the content of `dst` is undefined.
    """
    # A room in host memory is itself the buffer for the other room's copies.
    if isinstance(dst, HostRoom):
        _each(_pieces(dst.views()), src.read, num_threads, moved)
        src.settle()
    elif isinstance(src, HostRoom):
        _each(_pieces(src.views()), dst.write, num_threads, moved)
        dst.settle()
    else:
        between = memoryview(mmap.mmap(-1, max(1, min(PIECE_BYTES, src.nbytes))))
        for at in range(0, src.nbytes, PIECE_BYTES):
            piece = between[: min(PIECE_BYTES, src.nbytes - at)]
            src.read(at, piece)
            src.settle()
            dst.write(at, piece)
            # Settle before the next read, which reuses the buffer.
            dst.settle()
            moved(len(piece))


def _pieces(views: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    base = 0
    for view in views:
        for at in range(0, len(view), PIECE_BYTES):
            yield base + at, view[at : at + PIECE_BYTES]
        base += len(view)


def _each(
    pieces: Iterator[tuple[int, memoryview]],
    step: Callable[[int, memoryview], None],
    num_threads: int,
    moved: Callable[[int], None],
) -> None:
    def move_piece(piece: tuple[int, memoryview]) -> None:
        step(*piece)
        moved(len(piece[1]))

    # A GPU needs no threads, because its copies are queued on one stream.
    if num_threads == 1:
        for piece in pieces:
            move_piece(piece)
        return
    # After an error, wait for running pieces too, because they still use both rooms.
    with Threads(num_threads, "penstock-tier", waits_for_calls=True) as pool:
        for future in [pool.submit(move_piece, piece) for piece in pieces]:
            future.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Current usage of one tier. `used_bytes` counts rooms, rounded up to the tier's unit."""

    num_blocks: int
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Moves so far in one direction between two tiers."""

    num_moves: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Return the rate in GB/s, or 0 if no move took time."""
        return self.nbytes / GB / self.seconds if self.seconds else 0.0

    def plus(self, nbytes: int, seconds: float) -> LinkStats:
        """Return these statistics with one move added."""
        return LinkStats(num_moves=self.num_moves + 1, nbytes=self.nbytes + nbytes, seconds=self.seconds + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersStats:
    """Statistics of all tiers and links."""

    tiers: Mapping[str, TierStats]
    """Statistics by the name of the tier, fastest first."""
    links: Mapping[tuple[str, str], LinkStats]
    """Statistics by the two tiers between which blocks move. `source` counts as a tier."""
    hits: int
    """Number of requests for blocks that were in the wanted tier or a faster tier."""
    misses: int
