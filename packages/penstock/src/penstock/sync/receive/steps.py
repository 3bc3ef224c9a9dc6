"""Divide a part of the plan into steps. A step is a read of limited size from one source, in the order of the buckets.

Small adjacent buckets form a window. A step reads pieces of one window from one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from penstock.digest.strip import Strips
from penstock.holding.regions import locate
from penstock.plan.sync import ReceiverPlan
from penstock.segments import Rectangles, spread
from penstock.types import I64


# Compare steps by identity, because they are keys of dicts within a run and from one version to the next.
class Step(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Strips that are read from one source in one step."""

    window: int
    source: int
    nbytes: int
    rows: I64
    theirs: Strips
    ours: Strips
    reads: tuple[tuple[int, int, Rectangles], ...]
    """The same strips as rectangles between a source region and a receiver region, with offsets within each."""
    places: tuple[I64, ...]


class Windows(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The windows and steps of a receiver's part. Window i has buckets `[bucket_first[i], bucket_first[i + 1])`."""

    bucket_first: tuple[int, ...]
    steps: tuple[Step, ...]

    def digest_requests(self, source: int, ask_bytes: int) -> list[list[Step]]:
        """Return a source's steps in order, grouped into requests of at most `ask_bytes`."""
        groups: list[list[Step]] = []
        taken = ask_bytes  # the first step begins a new request
        for step in self.steps:
            if step.source == source:
                if taken + step.nbytes > ask_bytes:
                    groups.append([])
                    taken = 0
                groups[-1].append(step)
                taken += step.nbytes
        return groups

    def __len__(self) -> int:
        return len(self.bucket_first) - 1


def cut(part: ReceiverPlan, theirs: Sequence[I64], ours: I64, *, window_bytes: int, piece_bytes: int) -> Windows:
    """Divide a checked part into windows of up to `window_bytes` and steps of up to twice `piece_bytes`."""
    # Use numpy, because a part can have millions of segments. Only the loop over steps below is in Python.
    windows = part.windows(window_bytes)
    segment_window = np.repeat(np.arange(len(windows) - 1), np.diff(part.bucket_first[windows]))
    order = np.lexsort((np.arange(len(segment_window)), part.turn_of(part.source), segment_window))
    table, at = _pieces(part, order, piece_bytes)
    window, source = segment_window[at], part.source[at]
    # Begin a step when the window or the source changes, and otherwise after every `piece_bytes`.
    stop = np.cumsum(table.nbytes)
    fresh = np.ones(len(at), bool)
    fresh[1:] = (np.diff(window) != 0) | (np.diff(source) != 0)
    heads = np.flatnonzero(fresh)
    begin = (stop - table.nbytes)[heads][np.cumsum(fresh) - 1]
    fresh[1:] |= np.diff((stop - begin - 1) // piece_bytes) != 0
    edges = [*np.flatnonzero(fresh).tolist(), len(at)]
    steps = []
    for start, end in pairwise(edges):
        mine = slice(start, end)
        number = int(source[start])
        steps.append(_step(int(window[start]), number, part.row[at[mine]], table[mine], theirs[number], ours))
    return Windows(bucket_first=tuple(windows), steps=_by_turns(steps))


def _pieces(part: ReceiverPlan, order: I64, piece_bytes: int) -> tuple[Rectangles, I64]:
    counts = -(-part.run_bytes[order] // piece_bytes)
    at = np.repeat(order, counts)
    skipped = spread(np.zeros(len(order), np.int64), counts) * piece_bytes
    width = np.minimum(part.run_bytes[at] - skipped, piece_bytes)
    rows_each = np.maximum(piece_bytes // width, 1)
    total = part.num_rows[at]
    blocks = -(-total // rows_each)
    again = np.repeat(np.arange(len(at)), blocks)
    row = spread(np.zeros(len(at), np.int64), blocks) * rows_each[again]
    at, skipped = at[again], skipped[again]
    pieces = Rectangles(
        src=part.src[at] + skipped + row * part.src_pitch[at],
        dst=part.dst[at] + skipped + row * part.dst_pitch[at],
        run_bytes=width[again],
        num_rows=np.minimum(total[again] - row, rows_each[again]),
        src_pitch=part.src_pitch[at],
        dst_pitch=part.dst_pitch[at],
    )
    return pieces, at


def _step(window: int, source: int, rows: I64, table: Rectangles, theirs: I64, ours: I64) -> Step:
    here = Strips(at=table.dst, run_bytes=table.run_bytes, num_rows=table.num_rows, pitch=table.dst_pitch)
    there = Strips(at=table.src, run_bytes=table.run_bytes, num_rows=table.num_rows, pitch=table.src_pitch)
    from_region, to_region = locate(theirs, there.at, there.stop), locate(ours, here.at, here.stop)
    # Group by pairs of regions, because each region is registered separately and a read connects one pair.
    pair = from_region * len(ours) + to_region
    reads, places = [], []
    for region_pair in np.unique(pair).tolist():
        of, to = divmod(region_pair, len(ours))
        places.append(np.flatnonzero(pair == region_pair))
        some = table[places[-1]]
        reads.append((of, to, msgspec.structs.replace(some, src=some.src - theirs[of], dst=some.dst - ours[to])))
    return Step(
        window=window,
        source=source,
        nbytes=int(table.nbytes.sum()),
        rows=rows,
        theirs=there,
        ours=here,
        reads=tuple(reads),
        places=tuple(places),
    )


def some_of(step: Step, which: I64) -> Step:
    """Return a step with only the selected strips. `which` lists their numbers in ascending order."""
    is_taken = np.zeros(len(step.ours), bool)
    is_taken[which] = True
    number = np.cumsum(is_taken) - 1
    reads, places = [], []
    for (of, to, table), at in zip(step.reads, step.places, strict=True):
        mine = is_taken[at]
        if mine.any():
            reads.append((of, to, table[mine]))
            places.append(number[at[mine]])
    return msgspec.structs.replace(
        step,
        nbytes=int(step.ours.nbytes[which].sum()),
        rows=step.rows[which],
        theirs=step.theirs[which],
        ours=step.ours[which],
        reads=tuple(reads),
        places=tuple(places),
    )


def joined(some: Sequence[Strips]) -> Strips:
    """Return the strips of several sequences, in order."""
    at, run_bytes, num_rows, pitch = map(np.concatenate, zip(*(strips.columns for strips in some), strict=True))
    return Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)


def _by_turns(steps: Sequence[Step]) -> tuple[Step, ...]:
    turn: dict[tuple[int, int], int] = {}
    keys = []
    for step in steps:
        number = turn[step.window, step.source] = turn.get((step.window, step.source), -1) + 1
        keys.append((step.window, number))
    return tuple(steps[i] for i in sorted(range(len(steps)), key=keys.__getitem__))
