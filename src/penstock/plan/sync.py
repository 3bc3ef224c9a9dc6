"""The plan of a sync: the bytes that each receiver takes of each source, in order. Made once, used every step.

In: publishers' holdings and receivers' wants, as layouts. Out: a frozen `SyncPlan`, and each receiver's `Part` of it.
Not here: reading (`transport`), versions and fences (`sync`), what layouts are recorded from.

    layouts -> match: kinds of tensors -> intersect: pieces, proven -> strips
            -> balance: sources -> buckets  =  SyncPlan -> part(receiver): segments, bucket after bucket

The reads of a sync as its receivers make them, as columns, for a simulation.

In: a `SyncPlan`, rates, a watermark. Out: `Work`: reads in the order in which they are posted, and what each costs.
Not here: when they run, over which links (`simulate_sync`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from blake3 import blake3

from penstock.errors import PlanError
from penstock.plan.cluster import SHORT_RUN_BYTES, Rates
from penstock.plan.intersect import (
    MAX_LISTED,
    Boxes,
    Match,
    Pieces,
    Strips,
    intersect,
    match,
    prove_coverage,
    show,
    strips,
)
from penstock.plan.layout import Layout, decodable, encode
from penstock.plan.simulate import F64
from penstock.plan.tasks import BUCKET_BYTES, Lines, buckets, draw_lines, layer_order
from penstock.segments import spread
from penstock.types import GIB, I64, MIB, Box


@decodable
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """The reads of one receiver. Segments are in bucket order; in a bucket those of one source are neighbours.

    Segment i: `num_rows[i]` runs of `run_bytes[i]`, from `src[i]` of source `source[i]`'s memory to `dst[i]` of ours,
    `src_pitch[i]` apart there and `dst_pitch[i]` here. Segments of one part do not overlap if its wanted rows do not.
    """

    key: str
    """The plan's."""
    receiver: str
    sources: tuple[str, ...]
    """Members of the plan's holdings; `source` counts in it."""
    bucket_first: I64
    """[num_buckets + 1]: bucket b is segments `bucket_first[b]:bucket_first[b + 1]`."""
    row: I64
    """The row of the receiver's layout it fills."""
    source: I64
    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64

    def check(self, *, src_nbytes: Sequence[int], dst_nbytes: int) -> None:
        """Raise PlanError unless it keeps to memories of these sizes: a part may come from another process."""
        columns = (self.row, self.src, self.dst, self.run_bytes, self.num_rows, self.src_pitch, self.dst_pitch)
        first, num = self.bucket_first, len(self.source)
        if len(src_nbytes) != len(self.sources) or any(len(column) != num for column in columns):
            raise PlanError(f"{self.receiver}: a part of uneven columns, or of {len(self.sources)} sources")
        if not len(first) or first[0] or first[-1] != num or (np.diff(first) < 0).any():
            raise PlanError(f"{self.receiver}: buckets that are not its {num} segments in order")
        # Every column is checked against the memories: the part may come from another process, and reads are one-sided.
        wrong = (self.source < 0) | (self.source >= len(self.sources)) | (self.num_rows < 1) | (self.run_bytes < 1)
        sizes = np.append(np.array(src_nbytes, np.int64), 0)[np.where(wrong, -1, self.source)]
        ends = ((self.src, self.src_pitch, sizes), (self.dst, self.dst_pitch, np.full(num, dst_nbytes)))
        for offset, pitch, room in ends:
            wrong |= (offset < 0) | (pitch < 0) | (self.run_bytes > room) | (offset > room - self.run_bytes)
            # By division: the product of a hostile pitch and rows could wrap.
            wrong |= (self.num_rows - 1 > (room - self.run_bytes - offset) // np.maximum(pitch, 1)) & (
                self.num_rows > 1
            )
        if wrong.any():
            i = int(wrong.argmax())
            raise PlanError(f"{self.receiver}: segment {i} lies outside its memories or sources")

    @property
    def nbytes(self) -> int:
        """Return the bytes it takes."""
        return int((self.run_bytes * self.num_rows).sum())

    def link_bytes(self) -> I64:
        """Return bytes from each source."""
        out = np.zeros(len(self.sources), np.int64)
        np.add.at(out, self.source, self.run_bytes * self.num_rows)
        return out

    def windows(self, window_bytes: int) -> list[int]:
        """Join neighbouring buckets to windows of at most `window_bytes`: where each begins, and the last ends."""
        done = np.concatenate(([0], np.cumsum(self.run_bytes * self.num_rows)))
        edges, taken = [0], 0
        for bucket, nbytes in enumerate(np.diff(done[self.bucket_first]).tolist()):
            if taken and taken + nbytes > window_bytes:
                edges.append(bucket)
                taken = 0
            taken += nbytes
        return [*edges, len(self.bucket_first) - 1] if len(self.bucket_first) > 1 else [0]

    def runs(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """Return segments `[start, stop)` as `src`, `dst` and `nbytes` of runs contiguous at both ends."""
        rows = self.num_rows[start:stop]
        at = np.repeat(np.arange(start, stop), rows)
        turn = spread(np.zeros(len(rows), np.int64), rows)
        src = self.src[at] + turn * self.src_pitch[at]
        return src, self.dst[at] + turn * self.dst_pitch[at], self.run_bytes[at]


@decodable
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SyncPlan:
    """All parts, as columns that name what is alike once: a receiver of 130,000 segments is 5,000 rows here.

    A wanted row is a tensor in a pattern; the pattern's strips say which pairs of the tensor it takes from, and each
    pair's team who has it (see `match`); the share's place on the team's line says who gives it (see `balance`).
    """

    key: str
    """`plan_key` of the layouts, and the bucket size: another key is another plan."""
    bucket_bytes: int
    num_buckets: int
    num_tensors: int
    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Tensors that are held and wanted by no receiver."""
    want_first: I64
    """Per receiver its first wanted row; rows are in bucket order."""
    want_row: I64
    """Of the receiver's layout."""
    want_pattern: I64
    want_offset: I64
    want_pair: I64
    """The first pair of the row's tensor."""
    want_bucket: I64
    strip_first: I64
    """Per pattern its first strip."""
    strip_pair: I64
    """Counted from `want_pair`."""
    strip_team: I64
    strip_src: I64
    strip_dst: I64
    strip_run: I64
    strip_rows: I64
    strip_src_pitch: I64
    strip_dst_pitch: I64
    pair_row: I64
    """Per pair its first held row; one row a rank of the team."""
    row_offset: I64
    team_first: I64
    team_source: I64
    share_first: I64
    """Per receiver its first share; see `balance.Lines`."""
    share_team: I64
    share_start: I64
    share_bytes: I64
    line_stop: I64

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SyncPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes that all receivers take."""
        return int(self.share_bytes.sum())

    def part(self, receiver: int) -> Part:
        """Return the segments of one receiver.

        Cost: linear in them; about 0.3 us each.
        """
        rows = slice(int(self.want_first[receiver]), int(self.want_first[receiver + 1]))
        pattern = self.want_pattern[rows]
        counts = np.diff(self.strip_first)[pattern]
        want = np.repeat(np.arange(rows.start, rows.stop), counts)
        strip = spread(self.strip_first[pattern], counts)
        slot = self._slots(receiver, strip)
        team = self.strip_team[strip]
        held_row = self.pair_row[self.want_pair[want] + self.strip_pair[strip]] + slot - self.team_first[team]
        source = self.team_source[slot]
        # By bucket first, since a bucket is read when its source has made it; then by source, for long reads.
        bucket = self.want_bucket[want]
        # Each receiver begins with another source, so that not all fall upon the first.
        begin = receiver * len(self.sources) // len(self.receivers)
        order = np.argsort(bucket * len(self.sources) + (source - begin) % len(self.sources), kind="stable")
        strip, want = strip[order], want[order]
        return Part(
            key=self.key,
            receiver=self.receivers[receiver],
            sources=self.sources,
            bucket_first=np.searchsorted(bucket[order], np.arange(self.num_buckets + 1)),
            row=self.want_row[want],
            source=source[order],
            src=self.row_offset[held_row[order]] + self.strip_src[strip],
            dst=self.want_offset[want] + self.strip_dst[strip],
            run_bytes=self.strip_run[strip],
            num_rows=self.strip_rows[strip],
            src_pitch=self.strip_src_pitch[strip],
            dst_pitch=self.strip_dst_pitch[strip],
        )

    def _slots(self, receiver: int, strip: I64) -> I64:
        """Return the source of each of a receiver's strips, as its place among all ranks of all teams."""
        order = np.argsort(self.strip_team[strip], kind="stable")
        team = self.strip_team[strip][order]
        nbytes = (self.strip_run * self.strip_rows)[strip][order]
        shares = slice(int(self.share_first[receiver]), int(self.share_first[receiver + 1]))
        before = np.cumsum(nbytes) - nbytes
        share = np.searchsorted(self.share_team[shares], team)
        share_bytes = self.share_bytes[shares]
        begin = (self.share_start[shares] - (np.cumsum(share_bytes) - share_bytes))[share]
        slot = np.empty(len(strip), np.int64)
        # By the strip's middle: a strip across a cut is not split, and goes to the rank that has more of it.
        slot[order] = np.searchsorted(self.line_stop, begin + before + nbytes // 2, side="right")
        return slot

    def link_bytes(self) -> I64:
        """Return [num_receivers, num_sources]: the bytes from each source to each receiver."""
        links = [self.part(r).link_bytes() for r in range(len(self.receivers))]
        return np.array(links, np.int64).reshape(len(self.receivers), len(self.sources))

    def explain(self, limit: int = MAX_LISTED) -> str:
        """Return the plan in words: totals, the busiest ends, then the first `limit` receivers."""
        links = self.link_bytes()
        taken, sent = links.sum(axis=1), links.sum(axis=0)
        lines = [
            f"{self.num_tensors} tensors, {len(self.sources)} sources -> {len(self.receivers)} receivers, "
            f"{self.nbytes} bytes in {self.num_buckets} buckets",
            f"plan {self.key}",
        ]
        if self.unwanted:
            some = ", ".join(self.unwanted[:3]) + (", ..." if len(self.unwanted) > 3 else "")
            lines.append(f"held, wanted by nobody: {len(self.unwanted)} ({some})")
        for word, members, moved in (("gives", self.sources, sent), ("takes", self.receivers, taken)):
            if len(moved):
                most = int(moved.argmax())
                lines.append(f"{members[most]} {word} most, {moved[most]} bytes; mean {int(moved.mean())}")
        for r, name in enumerate(self.receivers[:limit]):
            lines.append(f"{name}: {taken[r]} bytes from {int((links[r] > 0).sum())} sources")
        if len(self.receivers) > limit:
            lines.append(f"... and {len(self.receivers) - limit} more")
        return "\n".join(lines)


def plan_key(holdings: Sequence[Layout], wants: Sequence[Layout], bucket_bytes: int = BUCKET_BYTES) -> str:
    """Return a digest of everything a plan depends on, members and addresses among it: 32 hex digits."""
    inputs = (bucket_bytes, [layout.digest() for layout in holdings], [layout.digest() for layout in wants])
    return str(blake3(encode(inputs)).hexdigest(length=16))


def plan_sync(holdings: Sequence[Layout], wants: Sequence[Layout], *, bucket_bytes: int = BUCKET_BYTES) -> SyncPlan:
    """Plan a sync: each wanted element from exactly one source, proven; the same layouts give the same plan.

    Args:
        holdings: one a publishing rank.
        wants: one a receiving rank.
        bucket_bytes: most a receiver takes in one bucket, but for a larger tensor.

    Raises:
        PlanError: a layout is not sound; names, dtypes, shapes or tags of the sides differ (lists them); or no rank
            holds some wanted elements (lists them).

    Cost: linear in rows; a trillion parameters in 70,000 tensors, 256 ranks to 128, take about a second.
    """
    matched = match(holdings, wants)
    pieces, holes = intersect(matched.forms, matched.held, matched.wanted)
    if holes:
        raise _uncovered(matched, holes)
    boxes = Boxes.of([form.box for form in matched.forms])
    # Proven again on the pieces as they are used: a byte read twice or not at all would be a silent wrong weight.
    prove_coverage(boxes[matched.wanted.values], pieces.want, pieces.boxes)
    laid = strips(matched.forms, matched.held.values[pieces.held], matched.wanted.values[pieces.want], pieces.boxes)
    return _assembled(matched, pieces, laid, holdings, wants, bucket_bytes)


def _assembled(
    matched: Match, pieces: Pieces, laid: Strips, holdings: Sequence[Layout], wants: Sequence[Layout], bucket_bytes: int
) -> SyncPlan:
    """Return the plan's columns: strips by pattern, wanted rows by bucket, shares cut."""
    pattern = pieces.want[laid.piece]
    first = np.searchsorted(pattern, np.arange(len(matched.wanted.values) + 1))
    team = matched.held_team[pieces.held[laid.piece]]
    nbytes = laid.run_bytes * laid.num_rows
    lines = _lines(matched, len(wants), first, team, nbytes)
    rows, bucket = _in_buckets(matched, pattern, nbytes, bucket_bytes)
    want_first = np.searchsorted(matched.want_rank[rows], np.arange(len(wants) + 1))
    kind = np.repeat(np.arange(len(matched.wanted.first) - 1), matched.wanted.counts)
    return SyncPlan(
        key=plan_key(holdings, wants, bucket_bytes),
        bucket_bytes=bucket_bytes,
        num_buckets=int(bucket.max(initial=-1)) + 1,
        num_tensors=len(matched.names),
        sources=tuple(layout.member for layout in holdings),
        receivers=tuple(layout.member for layout in wants),
        unwanted=matched.unwanted,
        want_first=want_first,
        want_row=rows - want_first[matched.want_rank[rows]],
        want_pattern=matched.want_form[rows],
        want_offset=matched.want_offset[rows],
        want_pair=matched.pair_first[matched.want_tensor[rows]],
        want_bucket=bucket,
        strip_first=first,
        strip_pair=pieces.held[laid.piece] - matched.held.first[kind[pattern]],
        strip_team=team,
        strip_src=laid.src,
        strip_dst=laid.dst,
        strip_run=laid.run_bytes,
        strip_rows=laid.num_rows,
        strip_src_pitch=laid.src_pitch,
        strip_dst_pitch=laid.dst_pitch,
        pair_row=matched.pair_row,
        row_offset=matched.row_offset,
        team_first=matched.team.first,
        team_source=matched.team.values,
        share_first=lines.first,
        share_team=lines.team,
        share_start=lines.start,
        share_bytes=lines.nbytes,
        line_stop=lines.stop,
    )


def _lines(matched: Match, num_receivers: int, first: I64, team: I64, nbytes: I64) -> Lines:
    """Return shares and cuts; a receiver's rows of one pattern want the same of the same teams, so they are counted."""
    num_patterns = max(len(first) - 1, 1)
    demands, times = np.unique(matched.want_rank * num_patterns + matched.want_form, return_counts=True)
    counts = np.diff(first)[demands % num_patterns]
    strip = spread(first[demands % num_patterns], counts)
    receiver = np.repeat(demands // num_patterns, counts)
    return draw_lines(num_receivers, receiver, team[strip], nbytes[strip] * np.repeat(times, counts), matched.team)


def _in_buckets(matched: Match, pattern: I64, nbytes: I64, bucket_bytes: int) -> tuple[I64, I64]:
    """Return wanted rows by receiver, then layer; and the bucket of each."""
    order, layer = layer_order(matched.names)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    at = place[matched.want_tensor]
    rows = np.lexsort((at, matched.want_rank))
    pattern_bytes = np.zeros(len(matched.wanted.values), np.int64)
    np.add.at(pattern_bytes, pattern, nbytes)
    bucket = buckets(layer, matched.want_rank[rows], at[rows], pattern_bytes[matched.want_form[rows]], bucket_bytes)
    return rows, bucket[at[rows]]


def _uncovered(matched: Match, holes: dict[int, Box]) -> PlanError:
    """Return the error that lists the tensors with wanted elements that no rank holds."""
    kinds = np.searchsorted(matched.wanted.first, np.array(sorted(holes), np.int64), side="right") - 1
    lines = []
    for want, kind in zip(sorted(holes), kinds.tolist(), strict=True):
        alike = np.flatnonzero(matched.kind == kind)
        more = f" and {len(alike) - 1} tensors like it" if len(alike) > 1 else ""
        form = matched.forms[int(matched.wanted.values[want])]
        where = f"nobody holds {show(holes[want])}, wanted in {show(form.box)}"
        lines.append(f"{matched.names[int(alike[0])]}{more}: of {form.spec} {where}")
    listed = lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])
    return PlanError("elements are wanted that nobody holds:\n  " + "\n  ".join(listed))


# How `sync.receive.transfer` runs a part; the simulation uses the same constants.
WATERMARK_BYTES = 16 * GIB
"""Bytes under way by default: steps of 1 to 2 GiB, some milliseconds of NVLink each, so that the threads' own work for
each is small in comparison. They are read into their final places, so this bounds no memory of its own."""
ASK_BYTES = 16 * GIB
"""Digests of this many bytes are requested at once from a source that has them: half a second of a host's core."""
READS_AT_ONCE = 16
"""Steps under way of all sources."""
READS_OF_ONE = 4
"""Steps under way of one source: two or more, so that its link is not idle while one is posted."""
AHEAD_WINDOWS = 2
"""Windows under way: the one being verified, and the next."""
GROUP_BYTES = 256 * MIB
"""Short runs that one kernel of the reader copies, as in `transport.cuda_ipc`; a test compares the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The reads of a sync, as columns, by receiver, then by window; within a window the sources take turns."""

    receiver: I64
    window: I64
    """Buckets joined, counted over all receivers."""
    source: I64
    bucket: I64
    """The last it has something of."""
    nbytes: I64
    far_s: F64
    """The cost of its runs, other than posting it, where each is requested by itself: beyond the node."""
    num_copies: I64
    """Within the node: copies of their own, which long runs are."""
    short_bytes: I64
    """Within the node: the bytes that a kernel of the reader copies."""

    @classmethod
    def of(cls, plan: SyncPlan, rates: Rates, *, watermark_bytes: int = WATERMARK_BYTES) -> Work:
        """Return the steps into which each receiver cuts its part. Cost: that of all parts."""
        names = ("window", "source", "bucket", "nbytes", "far_s", "num_copies", "short_bytes")
        collected: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in (*names, "receiver")}
        collected["far_s"] = [np.zeros(0)]
        num_windows = 0
        for r in range(len(plan.receivers)):
            part = plan.part(r)
            if not len(part.source):
                continue
            columns = _steps(part, rates, watermark_bytes)
            columns["receiver"] = np.full(len(columns["window"]), r)
            columns["window"] += num_windows
            num_windows = int(columns["window"][-1]) + 1
            for name, column in columns.items():
                collected[name].append(column)
        return cls(**{name: np.concatenate(columns) for name, columns in collected.items()})


def _steps(part: Part, rates: Rates, watermark_bytes: int) -> dict[str, np.ndarray]:
    """Return the columns of `Work` for each step of a part, in the order in which they are posted."""
    edges = np.array(part.windows(watermark_bytes // AHEAD_WINDOWS), np.int64)
    bucket = np.repeat(np.arange(len(part.bucket_first) - 1), np.diff(part.bucket_first))
    window = np.searchsorted(edges, bucket, side="right") - 1
    nbytes = part.run_bytes * part.num_rows
    far_s = np.where(part.run_bytes < SHORT_RUN_BYTES, rates.short_run_s, rates.run_s) * part.num_rows
    # As `transport.Rectangles.longest_runs` has it: what lies in one piece at both ends is one run.
    is_whole = (part.src_pitch == part.run_bytes) & (part.dst_pitch == part.run_bytes)
    is_short = np.where(is_whole, nbytes, part.run_bytes) < SHORT_RUN_BYTES
    num_copies = np.where(is_short, 0, np.where(is_whole, 1, part.num_rows))
    short_bytes = np.where(is_short, nbytes, 0)
    # By window and source, then cut where a step would be too large.
    order = np.lexsort((bucket, part.source, window))
    piece_bytes = max(watermark_bytes // 16, 1)
    cuts = -(-nbytes[order] // piece_bytes)
    window, source, bucket = (np.repeat(column[order], cuts) for column in (window, part.source, bucket))
    turn, of = spread(np.zeros(len(cuts), np.int64), cuts), np.repeat(cuts, cuts)

    def share(column: np.ndarray) -> np.ndarray:
        """Return what each piece has of a strip's bytes or copies."""
        each = np.repeat(column[order], cuts)
        # As differences of rounded sums, so that the pieces add up to the whole exactly.
        return each * (turn + 1) // of - each * turn // of

    amounts = {"nbytes": share(nbytes), "num_copies": share(num_copies), "short_bytes": share(short_bytes)}
    # A piece of a strip with a long run is at least part of one copy; rounding down would make it free.
    amounts["num_copies"] = np.maximum(amounts["num_copies"], np.repeat((num_copies > 0)[order], cuts))
    amounts["far_s"] = np.repeat(far_s[order] / cuts, cuts)
    stop = np.cumsum(amounts["nbytes"])
    fresh = np.ones(len(window), bool)
    fresh[1:] = (np.diff(window) != 0) | (np.diff(source) != 0)
    begin = (stop - amounts["nbytes"])[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    fresh[1:] |= np.diff((stop - begin - 1) // piece_bytes) != 0
    head = np.flatnonzero(fresh)
    last = np.append(head[1:], len(window)) - 1
    pair = window[head] * (int(source.max()) + 1) + source[head]
    number = np.arange(len(head)) - np.searchsorted(pair, pair)
    # The first read of every source, then the second of each: so receivers post, that no link is left idle.
    turns = np.lexsort((number, window[head]))
    columns = {"window": window[head][turns], "source": source[head][turns], "bucket": bucket[last][turns]}
    return columns | {name: np.add.reduceat(column, head)[turns] for name, column in amounts.items()}


def transformed_bytes(plan: SyncPlan, holdings: Sequence[Layout], wants: Sequence[Layout]) -> I64:
    """Return [num_sources, num_buckets]: bytes of BF16 that each source reads for the tensors it holds under a tag."""
    bucket_of: dict[str, int] = {}
    for r, want in enumerate(wants):
        rows = slice(int(plan.want_first[r]), int(plan.want_first[r + 1]))
        named = zip(plan.want_row[rows].tolist(), plan.want_bucket[rows].tolist(), strict=True)
        bucket_of.update((want.names[row], bucket) for row, bucket in named)
    nbytes = np.zeros((len(holdings), plan.num_buckets), np.int64)
    for s, holding in enumerate(holdings):
        elements = np.array([f.box.num_elements if f.tag and f.dtype.bits <= 8 else 0 for f in holding.forms], np.int64)
        bucket = np.array([bucket_of.get(name, -1) for name in holding.names], np.int64)
        wanted = bucket >= 0
        # Two bytes an element: a quantised tensor is made from its BF16 original.
        np.add.at(nbytes[s], bucket[wanted], 2 * elements[holding.form[wanted]])
    return nbytes
