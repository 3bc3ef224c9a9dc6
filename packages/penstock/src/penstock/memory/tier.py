"""Tiers of memory: rooms that hold the bytes of one block each, moves between rooms, and statistics of both.

In: a block's size. Out: a room of one tier; its bytes, in another's.
Not here: which block is where, when it moves (`tiers`); the tiers themselves (`tier_host`, `tier_cuda`, `tier_disk`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.types import GB, MIB
from penstock.waits import Threads

PIECE_BYTES = 16 * MIB
"""Bytes moved at once: a chunk of a fetch, enough for every link. Offsets in rooms are multiples of it."""


@dataclass(frozen=True, slots=True, order=True)
class TierBlock:
    """The bytes `[start, stop)` of a content, which is a revision or any other name; not of a place."""

    content: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Return the block's length."""
        return self.stop - self.start


class Room(Protocol):
    """Memory for one block. One thread at a time uses one range of it; several threads may use several."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the block."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Begin to copy bytes from host memory, which must stay unchanged until `settle` returns."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Begin to copy bytes to host memory; they are there when `settle` returns.

        Raises:
            IntegrityError: they are not the bytes that were written. SourceError: they cannot be read.
        """
        ...

    def settle(self) -> None:
        """Wait until all copies that were begun are done.

        Raises:
            DestinationError, DiskFull, SourceStalled: they cannot be done.
        """
        ...

    def close(self) -> None:
        """Free it; nothing may use it any more. Idempotent."""
        ...


@runtime_checkable
class HostRoom(Protocol):
    """A room whose bytes are in this process's memory: a move to or from it needs no buffer between."""

    def views(self) -> Sequence[memoryview]:
        """Return all of its bytes, in order; each view but the last is a multiple of `PIECE_BYTES` long."""
        ...


class Tier(Protocol):
    """A kind of memory in which rooms are opened."""

    @property
    def name(self) -> str:
        """Return `gpu`, `host` or `disk`."""
        ...

    @property
    def unit_bytes(self) -> int:
        """Return the unit: a room takes a multiple of it."""
        ...

    @property
    def num_threads(self) -> int:
        """Return the number of pieces moved at once that saturates its link."""
        ...

    def open_room(self, nbytes: int) -> Room:
        """Return a new room for a block.

        Raises:
            DiskFull, DeviceOutOfMemory, DestinationError: there is no memory, whatever the budget says.
        """
        ...

    def trim(self) -> None:
        """Give the memory of closed rooms back to the system; until then a room that is opened may reuse it."""
        ...

    def close(self) -> None:
        """Free the tier's own resources, once its rooms are closed. Idempotent."""
        ...


def move(src: Room, dst: Room, num_threads: int, moved: Callable[[int], None]) -> None:
    """Copy all bytes from one room to another; call `moved` with the length of each piece.

    Raises:
        PenstockError: of either room; no copy is under way any more, and the content of `dst` is undefined.

    Cost: no copy between, unless neither room is in host memory: then one piece at a time is.
    """
    # A room in host memory is itself the buffer of the other room's copies.
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
            # Settled before the next read: the piece of memory in between is used again.
            dst.settle()
            moved(len(piece))


def _pieces(views: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield the views cut to pieces, each with its offset."""
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
    """Call `step` with each piece, `num_threads` at once; return when none is under way any more."""

    def move_piece(piece: tuple[int, memoryview]) -> None:
        step(*piece)
        moved(len(piece[1]))

    # As of a GPU, whose copies are queued on one stream: no threads are needed.
    if num_threads == 1:
        for piece in pieces:
            move_piece(piece)
        return
    # After an error too, pieces that run are waited for: they still use both rooms.
    with Threads(num_threads, "penstock-tier", waits_for_calls=True) as pool:
        for begun in [pool.submit(move_piece, piece) for piece in pieces]:
            begun.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The use of one tier now; `used_bytes` are of rooms, rounded up to the tier's unit."""

    num_blocks: int
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """The moves in one direction between two tiers, so far."""

    num_moves: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Return the rate in GB/s; 0 where nothing took time."""
        return self.nbytes / GB / self.seconds if self.seconds else 0.0

    def plus(self, nbytes: int, seconds: float) -> LinkStats:
        """Return the same with one more move."""
        return LinkStats(num_moves=self.num_moves + 1, nbytes=self.nbytes + nbytes, seconds=self.seconds + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersStats:
    """Statistics of all tiers and links."""

    tiers: Mapping[str, TierStats]
    """By name, fastest first."""
    links: Mapping[tuple[str, str], LinkStats]
    """By the names of the two tiers, from and to; `source` counts as one."""
    hits: int
    """Requests for blocks that were in the wanted tier, or a faster one."""
    misses: int
