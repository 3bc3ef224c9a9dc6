"""The line: tensors sorted by name, cut into leaves, leaves gathered into chunks.

In: the tensors' sizes. Out: which rows' bytes a chunk is.
Not here: where the bytes lie (`peer.local_weights`), their digests (`digest`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.types import I64, MIB

CHUNK_BYTES = 16 * MIB
"""Largest chunk: 60 GB are 3,600 chunks, few enough that their bookkeeping costs 0.03 s of Python in all. A
receiver has a chunk 3 to 4 ms after its upstream (two processes on two busy cores), most of it the log's answer."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pieces:
    """Byte ranges of rows, as columns: row `row[i]`, bytes `[start[i], start[i] + nbytes[i])`."""

    row: I64
    start: I64
    nbytes: I64


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChunkTable:
    """Leaves and chunks of a line.

    Chunk `c` is leaves `first_leaf[c]:first_leaf[c + 1]`; a leaf is at most `leaf_bytes` of one row.
    """

    leaf_bytes: int
    chunk_bytes: int
    leaf_row: I64
    leaf_start: I64
    leaf_nbytes: I64
    first_leaf: I64
    """[num_chunks + 1]."""
    nbytes: I64
    """[num_chunks] bytes of each chunk."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the line; 0 for a line of no bytes."""
        return len(self.nbytes)

    def leaves(self, start: int, stop: int) -> slice:
        """Return the leaves of chunks `[start, stop)`."""
        return slice(int(self.first_leaf[start]), int(self.first_leaf[stop]))

    def leaves_of(self, chunks: I64) -> I64:
        """Return the indices of the leaves of these chunks, chunk after chunk."""
        counts = self.first_leaf[chunks + 1] - self.first_leaf[chunks]
        before = np.cumsum(counts) - counts
        return np.repeat(self.first_leaf[chunks] - before, counts) + np.arange(int(counts.sum()))

    def pieces(self, chunks: I64) -> Pieces:
        """Return the byte ranges of these chunks, in their order; neighbours within a row are one piece."""
        return self._joined(self.leaves_of(chunks), np.zeros(0, np.int64))

    def pieces_apart(self, chunks: I64) -> tuple[Pieces, I64]:
        """Return pieces as `pieces` does, but none crosses chunks; and per piece its chunk's position in `chunks`."""
        counts = self.first_leaf[chunks + 1] - self.first_leaf[chunks]
        starts = np.cumsum(counts) - counts
        pieces = self._joined(self.leaves_of(chunks), starts)
        owner = np.searchsorted(np.cumsum(self.nbytes[chunks]), np.cumsum(pieces.nbytes))
        return pieces, owner

    def _joined(self, at: I64, cuts: I64) -> Pieces:
        """Return leaves as pieces: neighbours within a row are joined, but not across the positions `cuts`."""
        row, start, nbytes = self.leaf_row[at], self.leaf_start[at], self.leaf_nbytes[at]
        breaks = np.ones(len(at), bool)
        breaks[1:] = (row[1:] != row[:-1]) | (start[1:] != start[:-1] + nbytes[:-1])
        breaks[cuts] = True
        head = np.flatnonzero(breaks)
        total = np.add.reduceat(nbytes, head) if len(head) else nbytes
        return Pieces(row=row[head], start=start[head], nbytes=total)


def chunk_table(row_nbytes: I64, *, leaf_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> ChunkTable:
    """Cut rows of these sizes, in line order.

    Args:
        row_nbytes: bytes of each row; rows of no bytes have no leaf.
        leaf_bytes: bytes of a leaf but for a row's last.
        chunk_bytes: largest chunk; at least `leaf_bytes`.

    Raises:
        PlanError: a chunk could not hold a leaf.
    """
    if leaf_bytes < 1 or chunk_bytes < leaf_bytes:
        raise PlanError(f"chunks of {chunk_bytes} bytes cannot hold leaves of {leaf_bytes}")
    counts = -(-row_nbytes // leaf_bytes)
    leaf_row = np.repeat(np.arange(len(row_nbytes)), counts)
    number = np.arange(len(leaf_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    leaf_start = number * leaf_bytes
    leaf_nbytes = np.minimum(row_nbytes[leaf_row] - leaf_start, leaf_bytes)
    stop = np.cumsum(leaf_nbytes)
    # Greedy: a chunk ends before the leaf that would make it too large. No leaf is larger than `leaf_bytes`, so at
    # least
    # `least` leaves fit; the search for more runs only where one more fits.
    least, first, end = chunk_bytes // leaf_bytes, [0] if len(stop) else [], len(stop)
    while first and first[-1] < end:
        at = first[-1]
        # `item` and not `int(stop[at])`: this loop runs once a chunk, and a numpy scalar costs more than the
        # arithmetic.
        limit, after = stop.item(at) - leaf_nbytes.item(at) + chunk_bytes, min(at + least, end)
        if after < end and stop.item(after) <= limit:
            after += int(stop[after:].searchsorted(limit, side="right"))
        first.append(after)
    first_leaf = np.array(first or [0], np.int64)
    before = np.concatenate(([0], stop))
    return ChunkTable(
        leaf_bytes=leaf_bytes,
        chunk_bytes=chunk_bytes,
        leaf_row=leaf_row,
        leaf_start=leaf_start,
        leaf_nbytes=leaf_nbytes,
        first_leaf=first_leaf,
        nbytes=before[first_leaf[1:]] - before[first_leaf[:-1]],
    )


def to_ranges(chunks: I64) -> tuple[tuple[int, int], ...]:
    """Return sorted chunk numbers as `[start, stop)` ranges."""
    if not len(chunks):
        return ()
    cuts = np.flatnonzero(np.diff(chunks) != 1) + 1
    starts = chunks[np.concatenate(([0], cuts))].tolist()
    stops = chunks[np.concatenate((cuts - 1, [len(chunks) - 1]))].tolist()
    return tuple((start, stop + 1) for start, stop in zip(starts, stops, strict=True))
