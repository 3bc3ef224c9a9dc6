"""Plan of a sync: the bytes that each receiver reads from each source, in order. Every step reuses the plan.

Ranks that hold the same bytes form a team and share the reads. The line of a team consists of the bytes that all
receivers read from the team, end to end. Each rank sends one section of the line, so that no rank sends more than its
share and few receivers read from two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from blake3 import blake3

from penstock.errors import PlanError
from penstock.plan.intersect import (
    MAX_LISTED,
    Boxes,
    Groups,
    Match,
    intersect,
    match,
    prove_coverage,
    show,
    strips,
)
from penstock.plan.layout import Layout, encode
from penstock.segments import Rectangles, spread
from penstock.types import GIB, I64, MIB, Box

BUCKET_BYTES = 256 * MIB
"""Maximum number of bytes that a receiver reads in a bucket, unless one tensor is larger. It takes 5 ms at 50 GB/s.
With 128 ranks and a trillion parameters a layer has two buckets, so that stages overlap. Source:
docs/design/sync.md."""

# The following constants are for `sync.receive.transfer` and for the simulation.
WATERMARK_BYTES = 64 * GIB
"""Default maximum number of bytes in flight. A window is half of this limit. Within a window a receiver reads all its
bytes from one device of its host before it continues with the next device, so that receivers do not read the same
device at the same time."""
STEP_BYTES = GIB
"""A step ends after this many bytes, and has at most twice as many. It takes several milliseconds over NVLink, which is
long compared with the Python time."""
ASK_BYTES = 16 * GIB
"""Number of bytes whose digests are requested from a source at once. Digesting them takes a host core half a second."""
READS_AT_ONCE = 16
"""Maximum number of steps in flight from all sources."""
READS_OF_ONE = 4
"""Maximum number of steps in flight in one queue, which is a source or all devices of this host. Two or more keep a
link busy while the next step is posted."""
NEAR_READS = 2
"""Maximum number of reads in flight into one device from all devices of its host. Two receivers that read the same
sources at once get 305 to 325 of 393 GB/s each. They get 373 if each reads one source after another and starts with a
different source. With four reads in flight the orders drift. Source: benchmarks/results/h200x4_202611/sync.md."""
START_FRACTION = 0.5
"""A receiver starts with a source that supplies at least this fraction of its largest source. If FSDP over two sends
rows to an engine with TP over two, the engine needs 84 % from one trainer. Starting with the other trainer made three
of four steps of an FP8 version wait for 20 ms. Source: benchmarks/results/h200x4_202611/sync.md."""
AHEAD_WINDOWS = 2
"""Windows in flight: the window that is being verified, and the next window."""
GROUP_BYTES = 256 * MIB
"""Most bytes of short runs that one kernel of the reader copies. A test compares it with `transport.cuda_ipc`."""


def step_bytes(watermark_bytes: int) -> int:
    """Return the number of bytes after which a receiver begins another step."""
    return max(min(STEP_BYTES, watermark_bytes // 16), 1)


class ReceiverPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Reads of one receiver. Segments are sorted by bucket, and within a bucket by source.

    Segment i has `num_rows[i]` runs of `run_bytes[i]`. The first run is at `src[i]` in the memory of source
    `source[i]` and at `dst[i]` in the receiver's memory, with pitches `src_pitch[i]` and `dst_pitch[i]`. Segments do
    not overlap unless wanted rows overlap.
    """

    key: str
    """Key of the plan that contains this part."""
    receiver: str
    sources: tuple[str, ...]
    """Members of the plan's holdings. `source` contains indices into this tuple."""
    bucket_first: I64
    """[num_buckets + 1]. Bucket b consists of segments `bucket_first[b]:bucket_first[b + 1]`."""
    row: I64
    """Row of the receiver's layout that each segment fills."""
    source: I64
    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64
    first_source: int = 0
    """Source with which the receiver starts. The others follow in their order. Receivers start with different sources
    where possible. Publishers of earlier releases do not send this field."""
    addresses: tuple[str, ...] = ()
    """For each source, the registration to which the offsets belong (`Layout.address`). Publishers of earlier releases
    do not send this field."""

    def moved(self, addresses: Mapping[str, str]) -> list[str]:
        """Return the sources that have registered their memory again since this plan was created.

        `addresses` contains the current registration of each source. An empty address means unknown.
        """
        planned = dict(zip(self.sources, self.addresses, strict=False))
        return [name for name, address in addresses.items() if address and planned.get(name, address) != address]

    def turn_of(self, source: I64) -> I64:
        """Return the position of each source in the receiver's order."""
        turn: I64 = (source - self.first_source) % max(len(self.sources), 1)
        return turn

    def check(self, *, src_nbytes: Sequence[int], dst_nbytes: int) -> None:
        """Raise PlanError unless all segments lie within memory regions of these sizes.

        This check is necessary because the plan may come from another process and reads are one-sided.
        """
        columns = (self.row, self.src, self.dst, self.run_bytes, self.num_rows, self.src_pitch, self.dst_pitch)
        first, num = self.bucket_first, len(self.source)
        if not 0 <= self.first_source < max(len(self.sources), 1):
            raise PlanError(
                f"{self.receiver}: first_source is {self.first_source}, but there are {len(self.sources)} sources"
            )
        if len(src_nbytes) != len(self.sources) or any(len(column) != num for column in columns):
            raise PlanError(
                f"{self.receiver}: the column lengths differ, or the number of source sizes is not {len(self.sources)}"
            )
        if not len(first) or first[0] or first[-1] != num or (np.diff(first) < 0).any():
            raise PlanError(f"{self.receiver}: the buckets do not contain its {num} segments in order")
        rows = Rectangles(
            src=self.src,
            dst=self.dst,
            run_bytes=self.run_bytes,
            num_rows=self.num_rows,
            src_pitch=self.src_pitch,
            dst_pitch=self.dst_pitch,
        )
        # Row -1 stands for a source that does not exist and therefore has no memory.
        known = np.where((self.source < 0) | (self.source >= len(self.sources)), -1, self.source)
        sizes = np.append(np.array(src_nbytes, np.int64), -1)[known]
        outside = rows.outside(src_nbytes=sizes, dst_nbytes=dst_nbytes)
        if outside.any():
            raise PlanError(f"{self.receiver}: segment {int(outside.argmax())} has no source or is outside the memory")

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the receiver reads."""
        return int((self.run_bytes * self.num_rows).sum())

    def link_bytes(self) -> I64:
        """Return the bytes that the receiver reads from each source."""
        out = np.zeros(len(self.sources), np.int64)
        np.add.at(out, self.source, self.run_bytes * self.num_rows)
        return out

    def used_sources(self) -> list[str]:
        """Return the sources from which the receiver reads, in the order of `sources`."""
        return [self.sources[i] for i in self.link_bytes().nonzero()[0].tolist()]

    def windows(self, window_bytes: int) -> list[int]:
        """Join adjacent buckets into windows of up to `window_bytes`. Return the windows' first buckets and the end."""
        done = np.concatenate(([0], np.cumsum(self.run_bytes * self.num_rows)))
        edges, taken = [0], 0
        for bucket, nbytes in enumerate(np.diff(done[self.bucket_first]).tolist()):
            if taken and taken + nbytes > window_bytes:
                edges.append(bucket)
                taken = 0
            taken += nbytes
        return [*edges, len(self.bucket_first) - 1] if len(self.bucket_first) > 1 else [0]

    def runs(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """Return segments `[start, stop)` as `src`, `dst` and `nbytes` of runs that are contiguous at both ends."""
        rows = self.num_rows[start:stop]
        at = np.repeat(np.arange(start, stop), rows)
        index = spread(np.zeros(len(rows), np.int64), rows)
        src = self.src[at] + index * self.src_pitch[at]
        return src, self.dst[at] + index * self.dst_pitch[at], self.run_bytes[at]


class SyncPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Parts of all receivers, as columns without repetition. A receiver with 130,000 segments has only 5,000 rows here.

    A wanted row is a tensor with a pattern. Each strip of the pattern refers to a pair of the tensor, and each pair
    refers to the team of ranks that holds the pair (see `match`). The position on the team's line determines the
    sending rank (see `TeamLines`).
    """

    key: str
    """`plan_key` of the layouts and the bucket size."""
    bucket_bytes: int
    num_buckets: int
    num_tensors: int
    sources: tuple[str, ...]
    addresses: tuple[str, ...]
    receivers: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Tensors that are held but wanted by no receiver."""
    want_first: I64
    """First wanted row of each receiver. Rows are in bucket order."""
    want_row: I64
    """Row in the receiver's layout."""
    want_pattern: I64
    want_offset: I64
    want_pair: I64
    """First pair of the row's tensor."""
    want_bucket: I64
    strip_first: I64
    """First strip of each pattern."""
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
    """First held row of each pair. A pair has one row for each rank of its team."""
    row_offset: I64
    team_first: I64
    team_source: I64
    share_first: I64
    """First share of each receiver. See `TeamLines`."""
    share_team: I64
    share_start: I64
    share_bytes: I64
    line_stop: I64

    def __eq__(self, other: object) -> bool:
        """Return whether both plans are equal, column by column."""
        if not isinstance(other, SyncPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)

    def __hash__(self) -> int:
        """Return the hash of the key."""
        return hash(self.key)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that all receivers read."""
        return int(self.share_bytes.sum())

    def part(self, receiver: int) -> ReceiverPlan:
        """Return the segments of one receiver. The cost is linear, about 0.3 us per segment."""
        # Expand the plan for one receiver only, because the segments of all receivers would use gigabytes.
        rows = slice(int(self.want_first[receiver]), int(self.want_first[receiver + 1]))
        pattern = self.want_pattern[rows]
        counts = np.diff(self.strip_first)[pattern]
        want = np.repeat(np.arange(rows.start, rows.stop), counts)
        strip = spread(self.strip_first[pattern], counts)
        slot = self._slots(receiver, strip)
        team = self.strip_team[strip]
        held_row = self.pair_row[self.want_pair[want] + self.strip_pair[strip]] + slot - self.team_first[team]
        source = self.team_source[slot]
        # Sort by bucket first, because a source finishes one bucket after another. Then sort by source, for long reads.
        bucket = self.want_bucket[want]
        from_each = np.bincount(source, (self.strip_run * self.strip_rows)[strip], minlength=len(self.sources))
        begin = self._first_source(receiver, from_each.astype(np.int64))
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
        if not len(self.sources):
            return 0
        # The bytes of a small source are spread over all layers, and a source that quantises finishes the last layer
        # last. Receivers that read equal amounts from each source start with different sources.
        turn = (np.arange(len(self.sources)) - receiver * len(self.sources) // len(self.receivers)) % len(self.sources)
        return int(np.argmin(np.where(nbytes >= START_FRACTION * nbytes.max(), turn, len(self.sources))))

    def _slots(self, receiver: int, strip: I64) -> I64:
        order = np.argsort(self.strip_team[strip], kind="stable")
        team = self.strip_team[strip][order]
        nbytes = (self.strip_run * self.strip_rows)[strip][order]
        shares = slice(int(self.share_first[receiver]), int(self.share_first[receiver + 1]))
        before = np.cumsum(nbytes) - nbytes
        share = np.searchsorted(self.share_team[shares], team)
        share_bytes = self.share_bytes[shares]
        begin = (self.share_start[shares] - (np.cumsum(share_bytes) - share_bytes))[share]
        slot = np.empty(len(strip), np.int64)
        # A strip across a cut is not split. The rank whose section contains the strip's middle sends it.
        slot[order] = np.searchsorted(self.line_stop, begin + before + nbytes // 2, side="right")
        return slot

    def link_bytes(self) -> I64:
        """Return the bytes that each receiver reads from each source, as [num_receivers, num_sources]."""
        links = [self.part(r).link_bytes() for r in range(len(self.receivers))]
        return np.array(links, np.int64).reshape(len(self.receivers), len(self.sources))


def plan_key(holdings: Sequence[Layout], wants: Sequence[Layout], bucket_bytes: int = BUCKET_BYTES) -> str:
    """Return a digest of everything that a plan depends on, including members and addresses, as 32 hex digits."""
    inputs = (bucket_bytes, [layout.digest() for layout in holdings], [layout.digest() for layout in wants])
    return str(blake3(encode(inputs)).hexdigest(length=16))


def plan_sync(holdings: Sequence[Layout], wants: Sequence[Layout], *, bucket_bytes: int = BUCKET_BYTES) -> SyncPlan:
    """Plan a sync in which each wanted element comes from exactly one source. Equal layouts give equal plans.

    Planning takes about a second for a trillion parameters in 70,000 tensors, from 256 ranks to 128 ranks.

    Args:
        holdings: layout of each publishing rank.
        wants: layout of each receiving rank.
        bucket_bytes: maximum number of bytes that a receiver reads in one bucket, unless one tensor is larger.

    Raises:
        PlanError: a layout is invalid, the sides differ in names, dtypes, shapes or tags, or no rank holds some wanted
            elements. The message lists the faults.
    """
    matched = match(holdings, wants)
    pieces, holes = intersect(matched.forms, matched.held, matched.wanted)
    if holes:
        raise _uncovered(matched, holes)
    boxes = Boxes.of([form.box for form in matched.forms])
    # A byte that is read twice or not at all would silently make a weight wrong.
    prove_coverage(boxes[matched.wanted.values], pieces.want, pieces.boxes)
    laid = strips(matched.forms, matched.held.values[pieces.held], matched.wanted.values[pieces.want], pieces.boxes)
    # A pattern is a kind of tensor in a wanted form. A receiver's rows with the same pattern share its strips. Strips
    # are sorted by pattern, and wanted rows by bucket.
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
    """Return the lines of all teams, cut so that the ranks of each team send about equal amounts.

    All rows of a receiver with the same pattern want the same number of bytes, so the rows are only counted.
    """
    num_patterns, num_teams = max(len(first) - 1, 1), len(matched.team.first) - 1
    demands, times = np.unique(matched.want_rank * num_patterns + matched.want_form, return_counts=True)
    counts = np.diff(first)[demands % num_patterns]
    strip = spread(first[demands % num_patterns], counts)
    # Encode receiver and team as one number, so that a single sort finds equal demands.
    code, share = np.unique(np.repeat(demands // num_patterns, counts) * num_teams + team[strip], return_inverse=True)
    total = np.zeros(len(code), np.int64)
    np.add.at(total, share, nbytes[strip] * np.repeat(times, counts))
    receiver, team = code // max(num_teams, 1), code % max(num_teams, 1)
    along = np.lexsort((receiver, team))
    start = np.zeros(len(code), np.int64)
    start[along] = np.cumsum(total[along]) - total[along]
    whole = np.zeros(num_teams, np.int64)
    np.add.at(whole, team, total)
    return TeamLines(
        first=np.searchsorted(receiver, np.arange(num_receivers + 1)),
        team=team,
        start=start,
        nbytes=total,
        stop=np.cumsum(_quotas(whole, matched.team)),
    )


def _in_buckets(matched: Match, pattern: I64, nbytes: I64, bucket_bytes: int) -> tuple[I64, I64]:
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
    kinds = np.searchsorted(matched.wanted.first, np.array(sorted(holes), np.int64), side="right") - 1
    lines = []
    for want, kind in zip(sorted(holes), kinds.tolist(), strict=True):
        same_kind = np.flatnonzero(matched.kind == kind)
        more = f" and {len(same_kind) - 1} tensors like it" if len(same_kind) > 1 else ""
        form = matched.forms[int(matched.wanted.values[want])]
        where = f"no rank holds {show(holes[want])}, wanted in {show(form.box)}"
        lines.append(f"{matched.names[int(same_kind[0])]}{more}: {form.spec}, {where}")
    # Limit the list, because a layout usually has the same fault in thousands of tensors.
    listed = lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])
    return PlanError("no rank holds some wanted elements:\n  " + "\n  ".join(listed))


_LAYER = re.compile(r"\.(\d+)\.")


class TeamLines(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Shares of all receivers, as sections of one line per team: the bytes that are read from the team.

    The shares of receiver r are `first[r]:first[r + 1]`, sorted by team. A share begins at `start` of its line. Each
    rank of a team sends the section from the previous rank's `stop` to its own `stop`.
    """

    first: I64
    team: I64
    start: I64
    nbytes: I64
    stop: I64
    """End of the section of each rank of each team."""


def _quotas(whole: I64, teams: Groups) -> I64:
    quota = np.repeat(whole, teams.counts)
    load = np.zeros(int(teams.values.max(initial=-1)) + 1, np.int64)
    # A team of one rank leaves no choice, so add the load of these teams first.
    alone = np.repeat(teams.counts == 1, teams.counts)
    np.add.at(load, teams.values[alone], quota[alone])
    # Continue with small teams, because larger teams can balance the uneven load later.
    for t in np.argsort(teams.counts, kind="stable")[int((teams.counts == 1).sum()) :].tolist():
        span = slice(int(teams.first[t]), int(teams.first[t + 1]))
        ranks = teams.values[span]
        order = np.argsort(load[ranks], kind="stable")
        before = load[ranks[order]]
        # Find the level that the k least loaded ranks reach without exceeding the load of the next rank. The first rank
        # gets the bytes lost by rounding down.
        levels = (np.cumsum(before) + int(whole[t])) / np.arange(1, len(before) + 1)
        k = int(np.argmax(np.append(levels[:-1] <= before[1:], True))) + 1
        fill = np.zeros(len(before), np.int64)
        fill[:k] = np.maximum(np.floor(levels[k - 1]).astype(np.int64) - before[:k], 0)
        # Shares must sum exactly to the total, because a byte without a rank would be a hole in the plan.
        fill[0] += int(whole[t]) - int(fill.sum())
        quota[span][order] = fill
        load[ranks] += quota[span]
    return quota


def layer_order(names: Sequence[str]) -> tuple[I64, I64]:
    """Return the tensors sorted by layer, and the layer of each tensor.

    The layer is the first number between dots in a name. Tensors without a layer are sorted first.
    """
    numbers = (_LAYER.search(name) for name in names)
    layer = np.array([-1 if number is None else int(number[1]) for number in numbers], np.int64)
    # Sort stably, so that equal inputs give equal plans in the order of the layouts.
    order = np.argsort(layer, kind="stable")
    return order, layer[order]


def buckets(layer: I64, receiver: I64, place: I64, nbytes: I64, bucket_bytes: int) -> I64:
    """Return the bucket of each tensor. A bucket is one or more whole layers if they fit, or a slice of one layer.

    `layer` is ascending. `receiver`, `place` and `nbytes` describe the reads of tensors, sorted by receiver and place.
    """
    num_tensors = len(layer)
    edges = np.flatnonzero(np.diff(receiver)) + 1
    takers = [(p, np.cumsum(n)) for p, n in zip(np.split(place, edges), np.split(nbytes, edges), strict=True)]
    # Append the end to the starts of layers, so that the search below always succeeds.
    layer_starts = np.append(np.flatnonzero(np.diff(layer, prepend=layer[:1] - 1)), num_tensors)
    starts, at = [], 0
    while at < num_tensors:
        starts.append(at)
        stop = num_tensors
        # Buckets are the same for all receivers, so a bucket ends as soon as it is full for any receiver.
        for places, sums in takers:
            row = int(np.searchsorted(places, at))
            before = int(sums[row - 1]) if row else 0
            full = int(np.searchsorted(sums, before + bucket_bytes, side="right"))
            if full < len(places):
                stop = min(stop, int(places[full]))
        # A tensor that is larger than a bucket gets its own bucket.
        stop = max(stop, at + 1)
        # End at the start of a layer unless that empties the bucket, because a bucket is ready when its last layer is.
        edge = int(layer_starts[np.searchsorted(layer_starts, stop, side="right") - 1])
        at = edge if edge > at else stop
    return np.searchsorted(np.array(starts, np.int64), np.arange(num_tensors), side="right") - 1
