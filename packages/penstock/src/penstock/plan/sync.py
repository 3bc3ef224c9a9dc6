"""The plan of a sync: the bytes that each receiver takes of each source, in order. Made once, used every step.

In: publishers' holdings and receivers' wants, as layouts. Out: a frozen `SyncPlan`, and each receiver's `ReceiverPlan`
of it.
Not here: which ranks hold the same (`intersect`), reading (`transport`), versions and fences (`sync`).

    layouts -> match: kinds of tensors -> intersect: pieces, proven -> strips
            -> lines: sources -> buckets  =  SyncPlan -> part(receiver): segments, bucket after bucket

Several ranks may hold the same bytes: they are a team, and divide what is taken of it. The line of team {4, 9} is what
receivers 0, 1, 2 take of it, end to end; each rank gives a stretch, so that none gives more than its share, and few
receivers take from two:

        0        1        2
    |--------|--------|--------|
    4           ^9
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from blake3 import blake3

from penstock.errors import PlanError
from penstock.plan.intersect import (
    MAX_LISTED,
    Boxes,
    BoxPieces,
    BoxStrips,
    Groups,
    Match,
    intersect,
    match,
    prove_coverage,
    show,
    strips,
)
from penstock.plan.layout import Layout, decodable, encode
from penstock.segments import spread
from penstock.types import GIB, I64, MIB, Box

BUCKET_BYTES = 256 * MIB
"""Most bytes a receiver takes in one bucket, but for a larger tensor: 5 ms at 50 GB/s, and two buckets a layer where
128 ranks take a trillion parameters, so that stages overlap. Source: docs/design/sync.md."""

# How `sync.receive.transfer` runs a part; the simulation uses the same constants.
WATERMARK_BYTES = 64 * GIB
"""Bytes under way by default. They are read into their final places, so this bounds no memory of its own. Half of it is
a window, in which a receiver reads all it needs of a device of its host before it turns to the next: with few turns,
receivers seldom read the same device at once."""
STEP_BYTES = GIB
"""Bytes after which a step ends. It has at most twice as many: some milliseconds of NVLink, so that the threads' own
work for it is small in comparison."""
ASK_BYTES = 16 * GIB
"""Digests of this many bytes are requested at once from a source that has them: half a second of a host's core."""
READS_AT_ONCE = 16
"""Steps under way of all sources."""
READS_OF_ONE = 4
"""Steps under way of one queue, which is a source, or all devices of this host: two or more, so that a link is not idle
while one is posted."""
NEAR_READS = 2
"""Reads under way into one device, of all devices of its host together. Receivers that read the same sources at once
share their links: two of them get 305 to 325 GB/s each of 393, and 373 where each reads one source after the other and
begins with another one. With four reads under way they drift into each other's turns.
Source: benchmarks/results/h200x4_202611/sync.md."""
MUCH = 0.5
"""A receiver begins with a source of which it needs this fraction of what it needs of any. Of rows of FSDP over two an
engine of TP over two needs 84 % from one trainer, and the rest from the other: with the rest first, three of four steps
of an FP8 version waited for 20 ms. Source: benchmarks/results/h200x4_202611/sync.md."""
AHEAD_WINDOWS = 2
"""Windows under way: the one being verified, and the next."""
GROUP_BYTES = 256 * MIB
"""Short runs that one kernel of the reader copies, as in `transport.cuda_ipc`; a test compares the two."""


def step_bytes(watermark_bytes: int) -> int:
    """Return the bytes after which a receiver begins another step."""
    return max(min(STEP_BYTES, watermark_bytes // 16), 1)


@decodable
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReceiverPlan:
    """The reads of one receiver. Segments are in bucket order; in a bucket those of one source are neighbours.

    Segment i: `num_rows[i]` runs of `run_bytes[i]`, from `src[i]` of source `source[i]`'s memory to `dst[i]` of ours,
    `src_pitch[i]` apart there and `dst_pitch[i]` here. Segments of one part do not overlap if its wanted rows do not.
    """

    key: str
    """Key of the plan that it is part of."""
    receiver: str
    sources: tuple[str, ...]
    """Members of the plan's holdings; `source` counts in it."""
    bucket_first: I64
    """[num_buckets + 1]: bucket b is segments `bucket_first[b]:bucket_first[b + 1]`."""
    row: I64
    """The row of the receiver's layout that it fills."""
    source: I64
    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64
    first_source: int = 0
    """The source with which the receiver begins, the others following in their order: one of which it needs much. Where
    there are several, each receiver has another one, so that not all read the first at once. Publishers of earlier
    releases do not send it."""
    addresses: tuple[str, ...] = ()
    """The registration of each source that the offsets belong to (`Layout.address`). Publishers of earlier releases do
    not send it."""

    def moved(self, addresses: Mapping[str, str]) -> list[str]:
        """Return the sources that have registered their memory again since the plan was made.

        Args:
            addresses: the address of each source's registration now. Empty: it does not say.
        """
        planned = dict(zip(self.sources, self.addresses, strict=False))
        return [name for name, address in addresses.items() if address and planned.get(name, address) != address]

    def turn_of(self, source: I64) -> I64:
        """Return the place of sources in the receiver's order."""
        turn: I64 = (source - self.first_source) % max(len(self.sources), 1)
        return turn

    def check(self, *, src_nbytes: Sequence[int], dst_nbytes: int) -> None:
        """Raise PlanError unless it keeps to memories of these sizes: a part may come from another process."""
        columns = (self.row, self.src, self.dst, self.run_bytes, self.num_rows, self.src_pitch, self.dst_pitch)
        first, num = self.bucket_first, len(self.source)
        if not 0 <= self.first_source < max(len(self.sources), 1):
            raise PlanError(f"{self.receiver}: it begins with source {self.first_source} of {len(self.sources)}")
        if len(src_nbytes) != len(self.sources) or any(len(column) != num for column in columns):
            raise PlanError(
                f"{self.receiver}: columns of the part differ in length, or it is not of {len(self.sources)} sources"
            )
        if not len(first) or first[0] or first[-1] != num or (np.diff(first) < 0).any():
            raise PlanError(f"{self.receiver}: the buckets are not its {num} segments in order")
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
        """Return the number of bytes that it reads."""
        return int((self.run_bytes * self.num_rows).sum())

    def link_bytes(self) -> I64:
        """Return the bytes that it reads from each source."""
        out = np.zeros(len(self.sources), np.int64)
        np.add.at(out, self.source, self.run_bytes * self.num_rows)
        return out

    def used_sources(self) -> list[str]:
        """Return the sources that it reads from, in their order; others of the plan give it nothing."""
        return [self.sources[i] for i in self.link_bytes().nonzero()[0].tolist()]

    def windows(self, window_bytes: int) -> list[int]:
        """Join neighbouring buckets to windows of at most `window_bytes`; return their first buckets, and the end."""
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
    pair's team who has it (see `match`); the share's place on the team's line says which rank gives it (see
    `TeamLines`).
    """

    key: str
    """`plan_key` of the layouts, and the bucket size: another key is another plan."""
    bucket_bytes: int
    num_buckets: int
    num_tensors: int
    sources: tuple[str, ...]
    addresses: tuple[str, ...]
    """The registration of each source; see `Layout.address`."""
    receivers: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Tensors that are held and wanted by no receiver."""
    want_first: I64
    """Number of the first wanted row of each receiver; rows are in bucket order."""
    want_row: I64
    """Row of the receiver's layout."""
    want_pattern: I64
    want_offset: I64
    want_pair: I64
    """The first pair of the row's tensor."""
    want_bucket: I64
    strip_first: I64
    """Number of the first strip of each pattern."""
    strip_pair: I64
    """Pair of each strip, counted from `want_pair`."""
    strip_team: I64
    strip_src: I64
    strip_dst: I64
    strip_run: I64
    strip_rows: I64
    strip_src_pitch: I64
    strip_dst_pitch: I64
    pair_row: I64
    """First held row of each pair; it has one row for each rank of its team."""
    row_offset: I64
    team_first: I64
    team_source: I64
    share_first: I64
    """Number of the first share of each receiver; see `TeamLines`."""
    share_team: I64
    share_start: I64
    share_bytes: I64
    line_stop: I64

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same plan, column by column: columns have no truth value of their own."""
        if not isinstance(other, SyncPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        """Return the hash of the key, which stands for all the plan was made of."""
        return hash(self.key)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that all receivers take."""
        return int(self.share_bytes.sum())

    def part(self, receiver: int) -> ReceiverPlan:
        """Return the segments of one receiver.

        Cost: linear in them; about 0.3 us each.
        """
        # Expanded only here, for one receiver: all segments of all receivers at once would be gigabytes.
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
        of_each = np.bincount(source, (self.strip_run * self.strip_rows)[strip], minlength=len(self.sources))
        begin = self._first_source(receiver, of_each.astype(np.int64))
        order = np.argsort(bucket * len(self.sources) + (source - begin) % len(self.sources), kind="stable")
        strip, want = strip[order], want[order]
        return ReceiverPlan(
            key=self.key,
            receiver=self.receivers[receiver],
            sources=self.sources,
            addresses=self.addresses,
            bucket_first=np.searchsorted(bucket[order], np.arange(self.num_buckets + 1)),
            row=self.want_row[want],
            source=source[order],
            src=self.row_offset[held_row[order]] + self.strip_src[strip],
            dst=self.want_offset[want] + self.strip_dst[strip],
            run_bytes=self.strip_run[strip],
            num_rows=self.strip_rows[strip],
            src_pitch=self.strip_src_pitch[strip],
            dst_pitch=self.strip_dst_pitch[strip],
            first_source=begin,
        )

    def _first_source(self, receiver: int, nbytes: I64) -> int:
        """Return the source with which a receiver begins; `nbytes` is what it needs of each."""
        if not len(self.sources):
            return 0
        # Not one of which it needs little: that little is of all layers, and a source that quantises has the last of
        # them last. Receivers that need as much of each begin with another one each.
        turn = (np.arange(len(self.sources)) - receiver * len(self.sources) // len(self.receivers)) % len(self.sources)
        return int(np.argmin(np.where(nbytes >= MUCH * nbytes.max(), turn, len(self.sources))))

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
            lines.append(f"held, but not wanted: {len(self.unwanted)} ({some})")
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
    matched: Match,
    pieces: BoxPieces,
    laid: BoxStrips,
    holdings: Sequence[Layout],
    wants: Sequence[Layout],
    bucket_bytes: int,
) -> SyncPlan:
    """Return the plan's columns: strips by pattern, wanted rows by bucket, shares cut."""
    # A pattern is a wanted form of a kind; a receiver's rows of one pattern share its strips.
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
        addresses=tuple(layout.address for layout in holdings),
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


def _lines(matched: Match, num_receivers: int, first: I64, team: I64, nbytes: I64) -> TeamLines:
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
        where = f"no rank holds {show(holes[want])}, wanted in {show(form.box)}"
        lines.append(f"{matched.names[int(alike[0])]}{more}: of {form.spec} {where}")
    # A layout that is wrong in one place is usually wrong in thousands: the first ones show how.
    listed = lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])
    return PlanError("some wanted elements are held by no rank:\n  " + "\n  ".join(listed))


_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TeamLines:
    """The shares of all receivers, as stretches of one line on which the bytes taken of each team lie end to end.

    Receiver r's shares are `first[r]:first[r + 1]`, by team; its share of a team begins at `start`. A rank of a team
    gives what lies before its `stop` and not before the one's before it.
    """

    first: I64
    team: I64
    start: I64
    nbytes: I64
    stop: I64
    """End of the stretch of each rank of each team, in their order."""


def draw_lines(num_receivers: int, receiver: I64, team: I64, nbytes: I64, teams: Groups) -> TeamLines:
    """Return the lines of these demands (any order, several of a receiver and team), cut so that ranks give alike.

    Cost: a few microseconds a team of several ranks.
    """
    num_teams = len(teams.first) - 1
    # One number for receiver and team, so that a single sort finds equal demands.
    code, of = np.unique(receiver * num_teams + team, return_inverse=True)
    total = np.zeros(len(code), np.int64)
    np.add.at(total, of, nbytes)
    receiver, team = code // max(num_teams, 1), code % max(num_teams, 1)
    along = np.lexsort((receiver, team))
    start = np.zeros(len(code), np.int64)
    start[along] = np.cumsum(total[along]) - total[along]
    # What each team gives in all, to be divided among its ranks.
    whole = np.zeros(num_teams, np.int64)
    np.add.at(whole, team, total)
    return TeamLines(
        first=np.searchsorted(receiver, np.arange(num_receivers + 1)),
        team=team,
        start=start,
        nbytes=total,
        stop=np.cumsum(_quotas(whole, teams)),
    )


def _quotas(whole: I64, teams: Groups) -> I64:
    """Return the bytes that each rank of each team gives, dealt to the ranks that have least so far."""
    quota = np.repeat(whole, teams.counts)
    load = np.zeros(int(teams.values.max(initial=-1)) + 1, np.int64)
    # Teams of one rank have no choice: their load is there before the others are divided.
    alone = np.repeat(teams.counts == 1, teams.counts)
    np.add.at(load, teams.values[alone], quota[alone])
    # Teams of few ranks first: they have the least choice, and larger teams can then fill what they left uneven.
    for t in np.argsort(teams.counts, kind="stable")[int((teams.counts == 1).sum()) :].tolist():
        span = slice(int(teams.first[t]), int(teams.first[t + 1]))
        ranks = teams.values[span]
        order = np.argsort(load[ranks], kind="stable")
        before = load[ranks[order]]
        # The level that all who are below it reach together: k of them, once it is not above the next one's load.
        # Floats lose less than a byte here; the bytes lost by rounding down go to the first rank below.
        levels = (np.cumsum(before) + int(whole[t])) / np.arange(1, len(before) + 1)
        k = int(np.argmax(np.append(levels[:-1] <= before[1:], True))) + 1
        fill = np.zeros(len(before), np.int64)
        fill[:k] = np.maximum(np.floor(levels[k - 1]).astype(np.int64) - before[:k], 0)
        # Shares must sum to the whole exactly: a byte given to no rank would be a hole in the plan.
        fill[0] += int(whole[t]) - int(fill.sum())
        quota[span][order] = fill
        load[ranks] += quota[span]
    return quota


def layer_order(names: Sequence[str]) -> tuple[I64, I64]:
    """Return tensors by layer (the first number between dots; those of none come first), and each one's layer."""
    numbers = (_LAYER.search(name) for name in names)
    layer = np.array([-1 if number is None else int(number[1]) for number in numbers], np.int64)
    # Stable, so that equal inputs give equal plans, in the order of the layouts.
    order = np.argsort(layer, kind="stable")
    return order, layer[order]


def buckets(layer: I64, receiver: I64, place: I64, nbytes: I64, bucket_bytes: int) -> I64:
    """Return the bucket of each tensor: whole layers while they fit, else parts of one.

    Args:
        layer: of each tensor, ascending.
        receiver, place, nbytes: what receivers take of which tensor; sorted by receiver, then place.
        bucket_bytes: most that one receiver takes in a bucket, unless of one tensor.
    """
    num_tensors = len(layer)
    edges = np.flatnonzero(np.diff(receiver)) + 1
    takers = [(p, np.cumsum(n)) for p, n in zip(np.split(place, edges), np.split(nbytes, edges), strict=True)]
    # Where a layer begins, and the end, so that the search below always finds one.
    layer_starts = np.append(np.flatnonzero(np.diff(layer, prepend=layer[:1] - 1)), num_tensors)
    starts, at = [], 0
    while at < num_tensors:
        starts.append(at)
        stop = num_tensors
        # The bucket ends where the first receiver is full: buckets are the same for all, so that a source makes each
        # once.
        for places, sums in takers:
            row = int(np.searchsorted(places, at))
            before = int(sums[row - 1]) if row else 0
            full = int(np.searchsorted(sums, before + bucket_bytes, side="right"))
            if full < len(places):
                stop = min(stop, int(places[full]))
        # A tensor larger than a bucket must still be in one, or the loop would not go on.
        stop = max(stop, at + 1)
        # Back to a layer's begin where that leaves anything: a bucket is ready once its layer is, and not before.
        edge = int(layer_starts[np.searchsorted(layer_starts, stop, side="right") - 1])
        at = edge if edge > at else stop
    return np.searchsorted(np.array(starts, np.int64), np.arange(num_tensors), side="right") - 1
