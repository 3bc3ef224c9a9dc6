"""Byte copies between two address spaces as numpy columns. A plan has millions of runs, so nothing loops over them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.types import I64


def spread(first: I64, counts: I64) -> I64:
    """Concatenate the ranges `first[i], first[i] + 1, ...`, with `counts[i]` numbers each."""
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


class Segments(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Runs of bytes to read, as columns.

    Row i copies `nbytes[i]` bytes from offset `src[i]` in the peer's memory to offset `dst[i]` in local memory. The
    destinations of one read do not overlap.
    """

    src: I64
    dst: I64
    nbytes: I64

    def __getitem__(self, which: I64 | npt.NDArray[np.bool_] | slice) -> Segments:
        """Return the chosen rows."""
        return Segments(src=self.src[which], dst=self.dst[which], nbytes=self.nbytes[which])

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError for the first segment that lies outside memory regions of these sizes."""
        if not len(self.src) == len(self.dst) == len(self.nbytes):
            lengths = f"{len(self.src)}, {len(self.dst)} and {len(self.nbytes)}"
            raise PlanError(f"the columns of the segments have different lengths: {lengths}")
        # A peer may have sent these numbers. The checks avoid sums, which could overflow.
        outside = self.nbytes < 0
        for offset, total in ((self.src, src_nbytes), (self.dst, dst_nbytes)):
            outside |= (offset < 0) | (offset > total) | (self.nbytes > total - np.clip(offset, 0, total))
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            raise PlanError(f"segment {i} is outside the memory: {self.nbytes[i]} bytes {where}")

    def joined(self, *, padding_bytes: int = 0) -> Segments:
        """Return the same bytes in as few segments as possible, sorted by destination.

        Segments are joined if they are adjacent at both the source and the destination. Empty segments are dropped.

        Args:
            padding_bytes: largest gap between joined segments, which must be equal at source and destination. The gap
                is copied too, so it must be padding. For two arenas with one layout, use `arena.ALIGN_BYTES - 1`.
        """
        rows = np.flatnonzero(self.nbytes)
        rows = rows[np.argsort(self.dst[rows], kind="stable")]
        if not len(rows):
            return Segments(src=rows, dst=rows, nbytes=rows)
        src, dst, nbytes = self.src[rows], self.dst[rows], self.nbytes[rows]
        first = np.ones(len(rows), bool)
        gap = dst[1:] - dst[:-1] - nbytes[:-1]
        # Unequal gaps would misplace the bytes after the gap.
        first[1:] = (src[1:] - src[:-1] - nbytes[:-1] != gap) | (gap < 0) | (gap > padding_bytes)
        heads = np.flatnonzero(first)
        lasts = np.append(heads[1:], len(rows)) - 1
        return Segments(src=src[heads], dst=dst[heads], nbytes=dst[lasts] + nbytes[lasts] - dst[heads])

    def cut(self, most_bytes: int) -> Segments:
        """Split runs into pieces of at most `most_bytes`, in the same order. Drop empty runs."""
        counts = -(-self.nbytes // most_bytes)
        row = np.repeat(np.arange(len(counts)), counts)
        skipped = spread(np.zeros(len(counts), np.int64), counts) * most_bytes
        nbytes = np.minimum(self.nbytes[row] - skipped, most_bytes)
        return Segments(src=self.src[row] + skipped, dst=self.dst[row] + skipped, nbytes=nbytes)


_COLUMNS = "src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch"


class Rectangles(msgspec.Struct, frozen=True, eq=False, kw_only=True, weakref=True):
    """Runs of equal length at a constant pitch, as columns.

    Row i copies `num_rows[i]` runs of `run_bytes[i]` bytes. The first run starts at `src[i]` in the peer's memory and
    at `dst[i]` in local memory. Later runs follow every `src_pitch[i]` and `dst_pitch[i]` bytes. The destinations of a
    read do not overlap. The columns never change, so a transport may cache data for them while this object is alive.
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
        """Return the chosen rows."""
        return Rectangles(**{name: getattr(self, name)[which] for name in _COLUMNS})

    @property
    def nbytes(self) -> I64:
        """Return the size of each rectangle in bytes."""
        return self.run_bytes * self.num_rows

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError for the first rectangle that lies outside memory regions of these sizes."""
        if len({len(getattr(self, name)) for name in _COLUMNS}) != 1:
            raise PlanError("the columns of the rectangles have different lengths")
        outside = self.outside(src_nbytes=src_nbytes, dst_nbytes=dst_nbytes)
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            runs = f"{self.num_rows[i]} runs of {self.run_bytes[i]} bytes"
            raise PlanError(f"rectangle {i} is outside the memory: {runs} {where}")

    def outside(self, *, src_nbytes: int | I64, dst_nbytes: int) -> npt.NDArray[np.bool_]:
        """Return a mask of rectangles outside memory of these sizes. The source size may differ for each rectangle."""
        outside: npt.NDArray[np.bool_] = (self.run_bytes < 1) | (self.num_rows < 1)
        for offset, pitch, total in ((self.src, self.src_pitch, src_nbytes), (self.dst, self.dst_pitch, dst_nbytes)):
            space = total - np.clip(offset, 0, total) - np.clip(self.run_bytes, 0, total)
            outside |= (offset < 0) | (offset > total) | (self.run_bytes > total) | (space < 0) | (pitch < 0)
            # Divide, because the product of a hostile pitch and number of rows could overflow.
            outside |= (self.num_rows > 1) & (self.num_rows - 1 > space // np.maximum(pitch, 1))
        return outside

    def longest_runs(self) -> I64:
        """Return the run length of each rectangle in bytes. A fully contiguous rectangle is a single run."""
        whole = (self.src_pitch == self.run_bytes) & (self.dst_pitch == self.run_bytes)
        return np.where(whole, self.nbytes, self.run_bytes)

    def segments(self) -> Segments:
        """Return one segment for each run. A fully contiguous rectangle is a single run."""
        run = self.longest_runs()
        rows = self.nbytes // run
        at = np.repeat(np.arange(len(rows)), rows)
        turn = spread(np.zeros(len(rows), np.int64), rows)
        src, dst = self.src[at] + turn * self.src_pitch[at], self.dst[at] + turn * self.dst_pitch[at]
        return Segments(src=src, dst=dst, nbytes=run[at])

    def apart(self, short_bytes: int, many: int) -> tuple[Segments, Rectangles | None]:
        """Separate long runs, which copy engines copy, from short runs, which a kernel copies.

        If there are fewer than `many` short runs, return all runs as segments for the copy engines.
        """
        short = self.longest_runs() < short_bytes
        if int(self.num_rows[short].sum()) < many:
            return self.segments().joined(), None
        return self[~short].segments().joined(), self[short]

    def addressed(self, dst_base: int, src_base: int, about_bytes: int) -> Iterator[Rectangles]:
        """Yield the rectangles in batches of about `about_bytes`, with addresses instead of offsets."""
        for which in gathered(self.nbytes, about_bytes):
            some = self[which]
            yield msgspec.structs.replace(some, src=some.src + src_base, dst=some.dst + dst_base)


def gathered(nbytes: I64, about_bytes: int, *, most_rows: int = 0) -> Iterator[slice]:
    """Yield slices of rows, each with about `about_bytes` bytes and at most `most_rows` rows (0 means no limit)."""
    if not len(nbytes):
        return
    is_edge = np.diff((np.cumsum(nbytes) - 1) // about_bytes) != 0
    if most_rows:
        is_edge |= np.arange(1, len(nbytes)) % most_rows == 0
    for start, stop in pairwise([0, *(np.flatnonzero(is_edge) + 1).tolist(), len(nbytes)]):
        yield slice(start, stop)
