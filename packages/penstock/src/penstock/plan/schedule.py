"""Plan of a load (which file ranges to read, in which order, and where each byte goes), and the chunks of a fetch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.plan.layout import Runs, box_runs
from penstock.segments import spread
from penstock.types import I64, MIB, U64, Box, TensorTable

Bools = npt.NDArray[np.bool_]

SMALL_BYTES = MIB
"""Tensors of at least this size have separate memory. Smaller tensors share slabs. Source: kSmallSize of torch's CUDA
caching allocator."""
SLAB_BYTES = 2 * MIB
"""A row starts a new slab if it is this far from the slab's first byte. Source: kSmallBuffer of the same allocator."""
ALIGN_IN_SLAB = 16
"""Rows share a slab only if their offsets agree modulo this, because vectorised kernels load 16 bytes at a time."""


class LoadPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Reads of one load, as columns. Offsets and lengths are in bytes.

    A read is one contiguous file range of at most `chunk_bytes`. Segments `seg_first[r]:seg_first[r + 1]` are the
    destinations of read `r`. A segment has `seg_rows` runs of `seg_run` bytes, which start at `seg_src` in the read,
    `seg_pitch` apart. The runs are packed at `seg_dst` in slab `seg_slab`.
    """

    table: TensorTable
    """Wanted rows, in file order."""
    boxes: tuple[Box | None, ...]
    row_slab: I64
    """Slab of each row, or -1 for a row without bytes."""
    row_offset: I64
    row_nbytes: I64
    """Size in bytes of each row at the destination. For a row with a box, this is the size of the box."""
    slab_nbytes: I64
    read_file: I64
    read_offset: I64
    read_nbytes: I64
    seg_first: I64
    seg_src: I64
    seg_slab: I64
    seg_dst: I64
    seg_run: I64
    seg_rows: I64
    seg_pitch: I64

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that arrive at the destination."""
        return int(self.slab_nbytes.sum())

    @property
    def num_reads(self) -> int:
        """Return the number of file ranges to read."""
        return len(self.read_file)

    @property
    def max_read_nbytes(self) -> int:
        """Return the size of the largest read, which is the minimum size of a staging buffer."""
        return int(self.read_nbytes.max(initial=0))

    def covered(self) -> Bools:
        """Return, for each read, whether the segments in order cover exactly the bytes of the read.

        A covered read requires no staging buffer.
        """
        seg_bytes = np.where(self.seg_rows == 1, self.seg_run, 0)
        sums = np.add.reduceat(np.append(seg_bytes, 0), self.seg_first[:-1]) if self.num_reads else np.zeros(0)
        return np.asarray(sums == self.read_nbytes)

    def in_order_of(self, slabs: Sequence[int]) -> LoadPlan:
        """Return the plan with its reads in the order in which slabs are wanted. `slabs` lists every slab once."""
        rank = np.empty(len(slabs), np.int64)
        rank[np.asarray(slabs, np.int64)] = np.arange(len(slabs))
        if not self.num_reads:
            return self
        # A read that spans several slabs is sorted by the slab that is wanted first.
        first_wanted = np.minimum.reduceat(rank[self.seg_slab], self.seg_first[:-1])
        reads = np.argsort(first_wanted, kind="stable")
        counts = np.diff(self.seg_first)[reads]
        ends = np.cumsum(counts)
        segments = np.repeat(self.seg_first[:-1][reads] - (ends - counts), counts) + np.arange(int(ends[-1]))
        by_read = {name: getattr(self, name)[reads] for name in ("read_file", "read_offset", "read_nbytes")}
        by_segment = {name: getattr(self, name)[segments] for name in _SEGMENT_COLUMNS}
        return msgspec.structs.replace(
            self, seg_first=np.concatenate(([0], ends)).astype(np.int64), **by_read, **by_segment
        )

    def explain(self, limit: int = 20) -> str:
        """Return a description of the plan: totals, then the first `limit` reads."""
        extra = int(self.read_nbytes.sum()) - self.nbytes
        lines = [
            f"{len(self.table)} tensors, {self.nbytes} bytes, {len(self.slab_nbytes)} slabs, "
            f"{self.num_reads} reads ({extra} bytes over-read)"
        ]
        for r in range(min(limit, self.num_reads)):
            first, last = int(self.seg_first[r]), int(self.seg_first[r + 1])
            lines.append(
                f"read {r}: file {self.read_file[r]} [{self.read_offset[r]}, +{self.read_nbytes[r]}) -> "
                f"{last - first} segments, slabs {self.seg_slab[first]}..{self.seg_slab[last - 1]}"
            )
        if self.num_reads > limit:
            lines.append(f"... and {self.num_reads - limit} more")
        return "\n".join(lines)


_SEGMENT_COLUMNS = ("seg_src", "seg_slab", "seg_dst", "seg_run", "seg_rows", "seg_pitch")


class _Pieces(msgspec.Struct):
    """File ranges and their destinations, sorted by (file, offset). A piece with several rows is a rectangle."""

    file: I64
    offset: I64
    run: I64
    rows: I64
    pitch: I64
    slab: I64
    dst: I64

    @property
    def span(self) -> I64:
        return (self.rows - 1) * self.pitch + self.run


def plan_load(
    table: TensorTable,
    *,
    file_nbytes: Sequence[int],
    chunk_bytes: int,
    boxes: Sequence[Box | None] | None = None,
    pack: bool = True,
    align_bytes: int = 1,
    max_gap_bytes: int = 0,
) -> LoadPlan:
    """Plan to read every row of `table`.

    Args:
        table: wanted rows, in any order.
        chunk_bytes: maximum size of a read, before it is aligned outward.
        boxes: for each row, the region to read. None means the whole row.
        pack: whether small rows share slabs. With `pack=False`, every row is a slab, as for live parameters.
        align_bytes: reads start and end at multiples of this value where the file allows it (4096 for direct I/O).
        max_gap_bytes: a gap of at most this size between two wanted ranges is read instead of skipped.

    Raises:
        PlanError: a box does not fit its tensor.
    """
    if chunk_bytes < 1 or align_bytes < 1 or chunk_bytes % align_bytes:
        raise PlanError(f"chunk_bytes {chunk_bytes} must be a positive multiple of align_bytes {align_bytes}")
    # In file order, each file is read from beginning to end, and neighbours can share a read. The rows of a safetensors
    # file are usually in this order, and then the table is not copied.
    order = np.lexsort((table.offset, table.file_index))
    in_order = bool((order == np.arange(len(order))).all())
    rows = table if in_order else table.take(order.tolist())
    wanted = tuple(boxes[i] for i in order.tolist()) if boxes is not None else (None,) * len(rows)
    is_boxed = wanted.count(None) < len(wanted)
    boxed = np.array([b is not None for b in wanted], bool) if is_boxed else np.zeros(len(rows), bool)
    runs = _box_runs_of(rows, wanted) if is_boxed else {}
    row_nbytes = rows.nbytes.copy()
    for i, of_box in runs.items():
        row_nbytes[i] = of_box.nbytes
    # Compute the slabs first, because they are allocated before the first read begins.
    row_slab, row_offset, slab_nbytes = _slabs(rows, row_nbytes, boxed, pack)
    # Rectangles are aligned outward at both ends and must still fit a chunk.
    room_bytes = chunk_bytes - 2 * (align_bytes - 1)
    pieces = _pieces(rows, row_slab, row_offset, slab_nbytes, boxed, runs, room_bytes, max_gap_bytes)
    spans = _spans(pieces, np.asarray(file_nbytes, np.int64), align_bytes, max_gap_bytes)
    reads = _cut(pieces, spans, chunk_bytes)
    return LoadPlan(
        table=rows,
        boxes=wanted,
        row_slab=row_slab,
        row_offset=row_offset,
        row_nbytes=row_nbytes,
        slab_nbytes=slab_nbytes,
        **reads,
    )


def _box_runs_of(rows: TensorTable, boxes: Sequence[Box | None]) -> dict[int, Runs]:
    runs = {}
    for i, box in enumerate(boxes):
        if box is None:
            continue
        try:
            runs[i] = box_runs(rows.shapes[i], box, rows.dtypes[i].bits)
        except PlanError as error:
            # Add the tensor's name, which `box_runs` does not know.
            error.tensor = rows.names[i]
            raise
    return runs


def _slabs(rows: TensorTable, nbytes: I64, boxed: Bools, pack: bool) -> tuple[I64, I64, I64]:
    slab = np.full(len(rows), -1, np.int64)
    at = np.zeros(len(rows), np.int64)
    full = np.flatnonzero(nbytes > 0)
    if len(full) == 0:
        return slab, at, np.zeros(0, np.int64)
    file, offset, size = rows.file_index[full], rows.offset[full], nbytes[full]
    small = (size < SMALL_BYTES) & ~boxed[full] & pack
    # Rows share a slab only if they are adjacent in the file, because one read of distant rows would include a gap.
    joins = np.zeros(len(full), bool)
    joins[1:] = (
        small[1:]
        & small[:-1]
        & (file[1:] == file[:-1])
        & (offset[1:] == offset[:-1] + size[:-1])
        & (offset[1:] % ALIGN_IN_SLAB == offset[:-1] % ALIGN_IN_SLAB)
    )
    # Neighbours in the file are neighbours in the slab, at the same distances, so that one read fills many rows.
    run_start = np.maximum.accumulate(np.where(joins, 0, np.arange(len(full))))
    tile = (offset - offset[run_start]) // SLAB_BYTES
    starts = ~joins
    starts[1:] |= tile[1:] != tile[:-1]
    ids = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    slab[full] = ids
    at[full] = np.where(starts, 0, offset - offset[first][ids])
    slab_nbytes = np.zeros(len(first), np.int64)
    np.maximum.at(slab_nbytes, ids, at[full] + size)
    return slab, at, slab_nbytes


def _pieces(
    rows: TensorTable,
    row_slab: I64,
    row_offset: I64,
    slab_nbytes: I64,
    boxed: Bools,
    runs: dict[int, Runs],
    room_bytes: int,
    max_gap_bytes: int,
) -> _Pieces:
    """Return one piece for each slab of complete rows, and runs or rectangles for rows with boxes, in file order."""
    whole = np.flatnonzero((row_slab >= 0) & ~boxed & (row_offset == 0))
    columns: list[tuple[I64, ...]] = [
        (
            rows.file_index[whole],
            rows.offset[whole],
            slab_nbytes[row_slab[whole]],
            np.ones(len(whole), np.int64),
            slab_nbytes[row_slab[whole]],
            row_slab[whole],
            np.zeros(len(whole), np.int64),
        )
    ]
    for i, box in runs.items():
        # Skip rows without bytes, which have no slab.
        if row_slab[i] >= 0:
            columns.append(_box_pieces(rows, i, int(row_slab[i]), box, room_bytes, max_gap_bytes))
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    return _Pieces(*(column[order] for column in joined))


def _box_pieces(
    rows: TensorTable, i: int, slab: int, runs: Runs, room_bytes: int, max_gap_bytes: int
) -> tuple[I64, ...]:
    starts, num_rows, run, pitch = runs.offsets + rows.offset[i], runs.num_rows, runs.run_bytes, runs.pitch_bytes
    # Read a rectangle with its gaps if the gaps are small, because this takes fewer reads.
    tall = num_rows > 1 and pitch - run <= max_gap_bytes and pitch <= room_bytes
    step = min(num_rows, room_bytes // pitch) if tall else 1
    row0 = np.arange(0, num_rows, step, dtype=np.int64)
    offset = (starts[:, None] + row0 * pitch).reshape(-1)
    height = np.tile(np.minimum(step, num_rows - row0), len(starts))
    count = len(offset)
    return (
        np.full(count, rows.file_index[i], np.int64),
        offset,
        np.full(count, run, np.int64),
        height,
        np.full(count, pitch if tall else run, np.int64),
        np.full(count, slab, np.int64),
        np.cumsum(height * run) - height * run,
    )


class _Spans(msgspec.Struct):
    """Groups of pieces, each in one file range `[start, stop)`. A tall span is a rectangle and is never cut."""

    of_piece: I64
    file: I64
    start: I64
    stop: I64
    tall: Bools


def _spans(pieces: _Pieces, file_nbytes: I64, align_bytes: int, max_gap_bytes: int) -> _Spans:
    start, stop, tall = pieces.offset, pieces.offset + pieces.span, pieces.rows > 1
    breaks = np.ones(len(start), bool)
    breaks[1:] = (
        (pieces.file[1:] != pieces.file[:-1])
        | (start[1:] - stop[:-1] > max_gap_bytes)
        # Overlapping pieces (two boxes of one tensor) are read separately, so that each segment comes from one read.
        | (start[1:] < stop[:-1])
        | tall[1:]
        | tall[:-1]
    )
    head = np.flatnonzero(breaks)
    tail = np.append(head[1:], len(start))[: len(head)] - 1
    file = pieces.file[head]
    # The end of the file limits the aligned range but never cuts a row.
    end = np.maximum(file_nbytes[file], stop[tail])
    return _Spans(
        of_piece=np.cumsum(breaks) - 1,
        file=file,
        start=start[head] // align_bytes * align_bytes,
        stop=np.minimum(-(-stop[tail] // align_bytes) * align_bytes, end),
        tall=tall[head],
    )


def _cut(pieces: _Pieces, spans: _Spans, chunk_bytes: int) -> dict[str, I64]:
    # Number the chunks of each span. A tall span is one chunk.
    grid_first = np.where(spans.tall, 0, spans.start // chunk_bytes)
    grid_last = np.where(spans.tall, 0, (spans.stop - 1) // chunk_bytes)
    per_span = grid_last - grid_first + 1
    base = np.cumsum(per_span) - per_span
    span = np.repeat(np.arange(len(per_span)), per_span)
    grid = grid_first[span] + np.arange(len(span)) - base[span]
    read_start = np.where(spans.tall[span], spans.start[span], np.maximum(grid * chunk_bytes, spans.start[span]))
    read_stop = np.where(spans.tall[span], spans.stop[span], np.minimum((grid + 1) * chunk_bytes, spans.stop[span]))
    # Compute the segments of each piece over the chunks that it crosses.
    start, stop, tall, own = pieces.offset, pieces.offset + pieces.span, pieces.rows > 1, spans.of_piece
    first = np.where(tall, 0, start // chunk_bytes - grid_first[own]) + base[own]
    last = np.where(tall, 0, (stop - 1) // chunk_bytes - grid_first[own]) + base[own]
    per_piece = last - first + 1
    piece = np.repeat(np.arange(len(start)), per_piece)
    chunk = first[piece] + np.arange(len(piece)) - (np.cumsum(per_piece) - per_piece)[piece]
    seg_start = np.maximum(start[piece], read_start[chunk])
    seg_stop = np.minimum(stop[piece], read_stop[chunk])
    used = np.bincount(chunk, minlength=len(read_start))
    # Do not read a chunk that contains only a gap.
    keep = used > 0
    # A stable sort keeps the segments of a read in file order, as `covered` requires.
    order = np.argsort(chunk, kind="stable")
    return {
        "read_file": spans.file[span][keep],
        "read_offset": read_start[keep],
        "read_nbytes": (read_stop - read_start)[keep],
        "seg_first": np.concatenate(([0], np.cumsum(used[keep]))).astype(np.int64),
        "seg_src": (seg_start - read_start[chunk])[order],
        "seg_slab": pieces.slab[piece][order],
        "seg_dst": (pieces.dst[piece] + np.where(tall[piece], 0, seg_start - start[piece]))[order],
        "seg_run": np.where(tall[piece], pieces.run[piece], seg_stop - seg_start)[order],
        "seg_rows": pieces.rows[piece][order],
        "seg_pitch": pieces.pitch[piece][order],
    }


CHUNK_BYTES = 16 * MIB
"""Maximum size of a chunk. 60 GB are 3,600 chunks, which take 0.03 s of Python time. A receiver gets a chunk 3 to 4 ms
after its upstream, mostly because of the request for the log."""


class ReadPieces(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Byte ranges of rows, as columns: bytes `[start[i], start[i] + nbytes[i])` of row `row[i]`."""

    row: I64
    start: I64
    nbytes: I64


class ChunkTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The leaves and chunks of the bytes of all rows, which are concatenated to a *line*.

    Chunk `c` consists of leaves `first_leaf[c]:first_leaf[c + 1]`. A leaf is at most `leaf_bytes` of one row. There are
    no columns for leaves, because building 230,000 entries delayed a fetch of 60 GB by 10 ms.
    """

    leaf_bytes: int
    chunk_bytes: int
    row_start: I64
    """[num_rows + 1] start of each row in the line, then the line's length."""
    start: I64
    """[num_chunks + 1] start of each chunk in the line, then the line's length."""
    first_leaf: I64
    """[num_chunks + 1] first leaf of each chunk, then the number of leaves."""
    nbytes: I64
    """[num_chunks] size of each chunk in bytes."""

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks in the line."""
        return len(self.nbytes)

    @property
    def num_leaves(self) -> int:
        """Return the number of leaves in the line."""
        return int(self.first_leaf[-1])

    def leaves(self, start: int, stop: int) -> slice:
        """Return the leaves of chunks `[start, stop)`."""
        return slice(int(self.first_leaf[start]), int(self.first_leaf[stop]))

    def leaf_counts(self, chunks: I64) -> I64:
        """Return the number of leaves of each of these chunks."""
        counts: I64 = self.first_leaf[chunks + 1] - self.first_leaf[chunks]
        return counts

    def leaves_of(self, chunks: I64) -> slice | I64:
        """Return the indices of the leaves of these chunks."""
        # Most reads and logs have consecutive chunks. Copying 230,000 leaves takes 0.1 ms by slice and 2 ms by index.
        if len(chunks) and (chunks[1:] == chunks[:-1] + 1).all():
            return self.leaves(int(chunks[0]), int(chunks[-1]) + 1)
        return spread(self.first_leaf[chunks], self.leaf_counts(chunks))

    def differing(self, chunks: I64, got: U64, wanted: U64) -> I64:
        """Return the chunks in which at least one leaf digest differs."""
        if np.array_equal(got, wanted):
            return chunks[:0]
        wrong = np.repeat(np.arange(len(chunks)), self.leaf_counts(chunks))[got != wanted]
        differ: I64 = chunks[np.unique(wrong)]
        return differ

    def pieces(self, chunks: I64) -> ReadPieces:
        """Return the byte ranges of these chunks, in the given order. Adjacent ranges in one row are one piece."""
        joins = chunks[1:] == chunks[:-1] + 1
        heads = np.flatnonzero(np.concatenate(([True], ~joins))[: len(chunks)])
        tails = np.flatnonzero(np.concatenate((~joins, [True]))[: len(chunks)])
        return self._pieces_in(self.start[chunks[heads]], self.start[chunks[tails] + 1])[0]

    def pieces_apart(self, chunks: I64) -> tuple[ReadPieces, I64]:
        """Return the same pieces as `pieces`, but cut at chunk edges, and the index in `chunks` for each piece."""
        return self._pieces_in(self.start[chunks], self.start[chunks + 1])

    def _pieces_in(self, start: I64, stop: I64) -> tuple[ReadPieces, I64]:
        """Return the non-empty slices of rows in these ranges of the line, and the index of each slice's range."""
        first = np.searchsorted(self.row_start, start, side="right") - 1
        counts = np.searchsorted(self.row_start, stop, side="left") - first
        row, owner = spread(first, counts), np.repeat(np.arange(len(start)), counts)
        begin = np.maximum(self.row_start[row], start[owner])
        nbytes = np.minimum(self.row_start[row + 1], stop[owner]) - begin
        # Drop rows without bytes, which a range may also contain.
        if not nbytes.all():
            has_bytes = nbytes > 0
            row, begin, nbytes, owner = row[has_bytes], begin[has_bytes], nbytes[has_bytes], owner[has_bytes]
        return ReadPieces(row=row, start=begin - self.row_start[row], nbytes=nbytes), owner

    def leaf_pieces(self, chunks: I64) -> ReadPieces:
        """Return the leaves of these chunks as byte ranges, in the order of `leaves_of`."""
        pieces = self.pieces(chunks)
        # Every piece begins and ends at the edge of a leaf.
        counts = -(-pieces.nbytes // self.leaf_bytes)
        owner = np.repeat(np.arange(len(counts)), counts)
        at = spread(np.zeros_like(counts), counts) * self.leaf_bytes
        return ReadPieces(
            row=pieces.row[owner],
            start=pieces.start[owner] + at,
            nbytes=np.minimum(pieces.nbytes[owner] - at, self.leaf_bytes),
        )


def chunk_table(row_nbytes: I64, *, leaf_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> ChunkTable:
    """Cut rows of these sizes into leaves and chunks, in line order.

    Each leaf except the last one in a row has `leaf_bytes`. A chunk has at most `chunk_bytes`. PlanError is raised if
    `chunk_bytes` is below `leaf_bytes`.
    """
    if leaf_bytes < 1 or chunk_bytes < leaf_bytes:
        raise PlanError(f"chunks of {chunk_bytes} bytes cannot hold leaves of {leaf_bytes}")
    row_start = np.concatenate(([0], np.cumsum(row_nbytes)))
    start = _chunk_starts(row_start, leaf_bytes, chunk_bytes)
    leaf_before = np.concatenate(([0], np.cumsum(-(-row_nbytes // leaf_bytes))))
    # If several rows start at the same byte, all except the last are empty. No row starts at the end of the line.
    row = np.searchsorted(row_start, start, side="right") - 1
    return ChunkTable(
        leaf_bytes=leaf_bytes,
        chunk_bytes=chunk_bytes,
        row_start=row_start,
        start=start,
        first_leaf=leaf_before[row] + (start - row_start[row]) // leaf_bytes,
        nbytes=np.diff(start),
    )


def _chunk_starts(row_start: I64, leaf_bytes: int, chunk_bytes: int) -> I64:
    # Use Python numbers, because numpy costs more than the work of an iteration.
    bounds = row_start.tolist()
    length, step = bounds[-1], chunk_bytes // leaf_bytes * leaf_bytes
    # Collect runs of chunks that are `step` apart, as the start of the first chunk and the number of chunks.
    firsts, counts, at, row_stop = list[int](), list[int](), 0, 0
    while at < length:
        # Within a row, the next chunk starts after as many whole leaves as fit into a chunk.
        num_whole = len(range(at, row_stop - chunk_bytes, step))
        firsts.append(at)
        counts.append(num_whole + 1)
        # The last chunk of the run continues into the following rows, to the last leaf edge within its limit.
        limit = at + num_whole * step + chunk_bytes
        if limit >= length:
            break
        row = bisect_right(bounds, limit) - 1
        at = limit - (limit - bounds[row]) % leaf_bytes
        row_stop = bounds[row + 1]
    number = spread(np.zeros(len(counts), np.int64), np.array(counts, np.int64))
    start = np.repeat(np.array(firsts, np.int64), counts) + number * step
    return np.append(start, length)


def to_ranges(chunks: I64) -> tuple[tuple[int, int], ...]:
    """Convert sorted chunk numbers to `[start, stop)` ranges."""
    if not len(chunks):
        return ()
    cuts = np.flatnonzero(np.diff(chunks) != 1) + 1
    starts = chunks[np.concatenate(([0], cuts))].tolist()
    stops = chunks[np.concatenate((cuts - 1, [len(chunks) - 1]))].tolist()
    return tuple((start, stop + 1) for start, stop in zip(starts, stops, strict=True))
