"""Byte copies as columns: many short runs of one address space that are copied to another.

In: offsets and lengths of bytes. Out: the same bytes joined, cut, checked, as runs or as rectangles of runs.
Not here: copying them (`transport`, `cuda`), planning them (`plan`).

Columns of numpy, because a plan has millions of runs: no function here loops over them in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.types import I64


def spread(first: I64, counts: I64) -> I64:
    """Return `first[i], first[i] + 1, ...`, `counts[i]` of them, for each i in turn."""
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segments:
    """Runs of bytes to read, as columns: `nbytes[i]` from `src[i]` of the peer's memory to `dst[i]` of ours.

    Destinations of one read do not overlap.
    """

    src: I64
    dst: I64
    nbytes: I64

    def __getitem__(self, which: I64 | npt.NDArray[np.bool_] | slice) -> Segments:
        """Return the chosen rows."""
        return Segments(src=self.src[which], dst=self.dst[which], nbytes=self.nbytes[which])

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError, naming the first offender, unless all lie within memory of these sizes."""
        if not len(self.src) == len(self.dst) == len(self.nbytes):
            raise PlanError(f"columns of {len(self.src)}, {len(self.dst)} and {len(self.nbytes)} segments")
        # A peer may have sent these numbers. Compared without sums: a sum of hostile numbers could wrap around.
        outside = self.nbytes < 0
        for offset, total in ((self.src, src_nbytes), (self.dst, dst_nbytes)):
            outside |= (offset < 0) | (offset > total) | (self.nbytes > total - np.clip(offset, 0, total))
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            raise PlanError(f"segment {i} lies outside: {self.nbytes[i]} bytes {where}")

    def joined(self, *, padding_bytes: int = 0) -> Segments:
        """Return the same bytes as few segments, by destination: without empty ones, neighbours at both ends joined.

        Args:
            padding_bytes: neighbours may be this far apart, equally at both ends; the bytes between are read too. Use
                it only where they are padding: between tensors placed alike in two arenas, `arena.ALIGN_BYTES - 1`.
        """
        rows = np.flatnonzero(self.nbytes)
        rows = rows[np.argsort(self.dst[rows], kind="stable")]
        if not len(rows):
            return Segments(src=rows, dst=rows, nbytes=rows)
        src, dst, nbytes = self.src[rows], self.dst[rows], self.nbytes[rows]
        first = np.ones(len(rows), bool)
        gap = dst[1:] - dst[:-1] - nbytes[:-1]
        # The same gap at both ends, or the bytes behind it would land in the wrong place.
        first[1:] = (src[1:] - src[:-1] - nbytes[:-1] != gap) | (gap < 0) | (gap > padding_bytes)
        heads = np.flatnonzero(first)
        lasts = np.append(heads[1:], len(rows)) - 1
        return Segments(src=src[heads], dst=dst[heads], nbytes=dst[lasts] + nbytes[lasts] - dst[heads])

    def cut(self, most_bytes: int) -> Segments:
        """Return the same bytes in the same order, runs cut to at most `most_bytes`, empty ones left out."""
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

    Destinations of one read do not overlap. The columns are never changed: a transport may keep what it prepared for
    them as long as this object lives.
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
        """Return the bytes of each rectangle."""
        return self.run_bytes * self.num_rows

    def check(self, *, src_nbytes: int, dst_nbytes: int) -> None:
        """Raise PlanError, naming the first offender, unless all lie within memory of these sizes."""
        if len({len(getattr(self, name)) for name in _COLUMNS}) != 1:
            raise PlanError("rectangles of uneven columns")
        outside = (self.run_bytes < 1) | (self.num_rows < 1)
        for offset, pitch, total in ((self.src, self.src_pitch, src_nbytes), (self.dst, self.dst_pitch, dst_nbytes)):
            room = total - np.clip(offset, 0, total) - np.clip(self.run_bytes, 0, total)
            outside |= (offset < 0) | (offset > total) | (self.run_bytes > total) | (room < 0) | (pitch < 0)
            # By division: the product of a hostile pitch and rows could wrap around.
            outside |= (self.num_rows > 1) & (self.num_rows - 1 > room // np.maximum(pitch, 1))
        if outside.any():
            i = int(outside.argmax())
            where = f"from {self.src[i]} of {src_nbytes} to {self.dst[i]} of {dst_nbytes}"
            raise PlanError(f"rectangle {i} lies outside: {self.num_rows[i]} runs of {self.run_bytes[i]} {where}")

    def longest_runs(self) -> I64:
        """Return the bytes of each rectangle's runs; a rectangle in one piece at both ends is one run."""
        whole = (self.src_pitch == self.run_bytes) & (self.dst_pitch == self.run_bytes)
        return np.where(whole, self.nbytes, self.run_bytes)

    def segments(self) -> Segments:
        """Return the same bytes with a segment for each run; a rectangle in one piece at both ends is one run."""
        run = self.longest_runs()
        rows = self.nbytes // run
        at = np.repeat(np.arange(len(rows)), rows)
        turn = spread(np.zeros(len(rows), np.int64), rows)
        src, dst = self.src[at] + turn * self.src_pitch[at], self.dst[at] + turn * self.dst_pitch[at]
        return Segments(src=src, dst=dst, nbytes=run[at])

    def apart(self, short_bytes: int, many: int) -> tuple[Segments, Rectangles | None]:
        """Return long runs, joined, for copy engines; and the shorter ones, if at least `many`, for a kernel."""
        short = self.longest_runs() < short_bytes
        if int(self.num_rows[short].sum()) < many:
            return self.segments().joined(), None
        return self[~short].segments().joined(), self[short]

    def addressed(self, dst_base: int, src_base: int, about_bytes: int) -> Iterator[Rectangles]:
        """Yield the same with addresses instead of offsets, in batches of about `about_bytes`."""
        for which in gathered(self.nbytes, about_bytes):
            some = self[which]
            yield replace(some, src=some.src + src_base, dst=some.dst + dst_base)


def gathered(nbytes: I64, about_bytes: int, *, most_rows: int = 0) -> Iterator[slice]:
    """Yield rows of these lengths in batches of about `about_bytes`, and of at most `most_rows` rows if not 0."""
    if not len(nbytes):
        return
    is_edge = np.diff((np.cumsum(nbytes) - 1) // about_bytes) != 0
    if most_rows:
        is_edge |= np.arange(1, len(nbytes)) % most_rows == 0
    for start, stop in pairwise([0, *(np.flatnonzero(is_edge) + 1).tolist(), len(nbytes)]):
        yield slice(start, stop)
