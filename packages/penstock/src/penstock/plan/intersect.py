"""Join both sides of a sync by tensor, and cut each wanted box into pieces of held boxes.

A team is the set of ranks that hold the same box of the same tensor. Tensors are of one kind if the same teams hold
them in the same forms and receivers want them in the same forms. 70,000 tensors form a few hundred kinds, and each kind
is planned once.

The proof of coverage assigns a sign to each corner of a box: (-1)^(number of dims in which the corner is at `stop`).
If, at every point, the signs of all pieces sum to the sign of the wanted box, then each element of the wanted box is in
exactly one piece, and no piece has other elements. The proof holds because mixed differences determine a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, pairwise

import msgspec
import numpy as np

from penstock.errors import PlanError
from penstock.plan.layout import Form, Layout
from penstock.segments import spread
from penstock.types import I64, Box

_PAIRS_AT_ONCE = 1 << 18
"""Maximum number of pairs of a held and a wanted box to compare in one step, which limits memory to tens of MiB."""


class Boxes(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Boxes as columns [num_boxes, num_dims]. Boxes with fewer dims are padded with `[0, 1)`."""

    start: I64
    stop: I64

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Boxes:
        """Return these boxes as columns with at least one dim."""
        num_dims = max((len(box.start) for box in boxes), default=1) or 1
        start = np.zeros((len(boxes), num_dims), np.int64)
        stop = np.ones((len(boxes), num_dims), np.int64)
        for i, box in enumerate(boxes):
            start[i, : len(box.start)], stop[i, : len(box.stop)] = box.start, box.stop
        return cls(start=start, stop=stop)

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, rows: I64) -> Boxes:
        return Boxes(start=self.start[rows], stop=self.stop[rows])

    def box(self, i: int) -> Box:
        """Return box `i`, including its padding."""
        return Box(start=tuple(self.start[i].tolist()), stop=tuple(self.stop[i].tolist()))


class Groups(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Groups of values. Group g is `values[first[g]:first[g + 1]]`."""

    first: I64
    values: I64

    @property
    def counts(self) -> I64:
        """Return the number of values in each group."""
        return np.diff(self.first)


class BoxPieces(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The regions in which wanted boxes intersect held boxes, sorted by `want`."""

    want: I64
    """Index among all wanted forms of all kinds."""
    held: I64
    """Index among all held forms of all kinds."""
    boxes: Boxes


class BoxStrips(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Pieces as bytes. Strip i has `num_rows` runs of `run_bytes`, which are `src_pitch` and `dst_pitch` apart.

    `src` and `dst` are offsets from the first byte of the held box and of the wanted box.
    """

    piece: I64
    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64


def intersect(forms: Sequence[Form], held: Groups, wanted: Groups) -> tuple[BoxPieces, dict[int, Box]]:
    """Return pieces that cover each wanted box, and the first hole in each wanted box that the held boxes do not cover.

    `held` and `wanted` group the forms by kind. Where held boxes overlap, the larger box is used.
    """
    boxes = Boxes.of([form.box for form in forms])
    kind = np.repeat(np.arange(len(wanted.first) - 1), wanted.counts)
    counts = held.counts[kind]
    parts: list[BoxPieces] = []
    holes: dict[int, Box] = {}
    # Work in blocks, because the boxes of all pairs would take gigabytes for a model with a trillion parameters.
    for first, stop in _blocks(counts):
        num_held = counts[first:stop]
        want = np.repeat(np.arange(first, stop), num_held)
        source = spread(held.first[kind[first:stop]], num_held)
        held_boxes, wanted_boxes = boxes[held.values[source]], boxes[wanted.values[want]]
        cut = Boxes(
            start=np.maximum(held_boxes.start, wanted_boxes.start), stop=np.minimum(held_boxes.stop, wanted_boxes.stop)
        )
        nonempty = np.flatnonzero((cut.stop > cut.start).all(axis=1))
        crossings = BoxPieces(want=want[nonempty], held=source[nonempty], boxes=cut[nonempty])
        bad = uncovered(boxes[wanted.values[first:stop]], crossings.want - first, crossings.boxes) + first
        parts.append(crossings if not len(bad) else _untangle(crossings, bad, boxes[wanted.values[bad]], holes))
    return _joined(parts, boxes.start.shape[1]), holes


def uncovered(wanted: Boxes, piece_want: I64, pieces: Boxes) -> I64:
    """Return the sorted indices of the wanted boxes with an element that is not in exactly one piece.

    `piece_want` is the index of the wanted box of each piece.
    """
    # Corners may be at `stop`, after the last element, so the extent is one larger than the extent of the box.
    extent = wanted.stop - wanted.start + 1
    steps = np.ones_like(extent)
    steps[:, 1:] = np.cumprod(extent[:, :-1], axis=1)
    owner = np.concatenate((piece_want, np.arange(len(wanted))))
    base = wanted.start[owner]
    low = (np.concatenate((pieces.start, wanted.start)) - base) * steps[owner]
    high = (np.concatenate((pieces.stop, wanted.stop)) - base) * steps[owner]
    points = np.zeros((1, len(owner)), np.int64)
    signs = np.ones((1, len(owner)), np.int64)
    signs[:, len(piece_want) :] = -1
    for d in range(low.shape[1]):
        points = np.concatenate((points + low[:, d], points + high[:, d]))
        signs = np.concatenate((signs, -signs))
    owners, flat, sign = np.tile(owner, len(points)), points.reshape(-1), signs.reshape(-1)
    # Sort, so that equal points are neighbours and one pass sums their signs.
    order = np.lexsort((flat, owners))
    owners, flat, sign = owners[order], flat[order], sign[order]
    new = np.ones(len(order), bool)
    new[1:] = (owners[1:] != owners[:-1]) | (flat[1:] != flat[:-1])
    heads = np.flatnonzero(new)
    # Check separately for a piece outside its box, because its points could wrap around to points inside the box.
    outside = ((pieces.start < wanted.start[piece_want]) | (pieces.stop > wanted.stop[piece_want])).any(axis=1)
    sums = np.add.reduceat(sign, heads) if len(heads) else sign
    return np.unique(np.concatenate((owners[heads[sums != 0]], piece_want[outside])))


def prove_coverage(wanted: Boxes, piece_want: I64, pieces: Boxes) -> None:
    """Raise PlanError with the first hole or overlap unless each element of each wanted box is in exactly one piece."""
    bad = uncovered(wanted, piece_want, pieces)
    if not len(bad):
        return
    # Find the hole or overlap in the first bad box, for the message.
    want = wanted.box(int(bad[0]))
    fault, where = _fault(want, [pieces.box(int(i)) for i in np.flatnonzero(piece_want == bad[0])])
    raise PlanError(f"wanted box {bad[0]} {show(want)}: {fault} {show(where)}")


def strips(forms: Sequence[Form], held_form: I64, want_form: I64, boxes: Boxes) -> BoxStrips:
    """Return the bytes of these boxes in both memories, in as few strips as the layouts allow.

    Raises PlanError if a box cuts a byte that packed elements share.
    """
    all_boxes = Boxes.of([form.box for form in forms])
    bits = np.array([form.dtype.bits for form in forms], np.int64)
    steps = np.zeros_like(all_boxes.start)
    for i, form in enumerate(forms):
        assert form.strides is not None
        steps[i, : len(form.strides)] = form.strides
    # Count in bits, so that strides of packed four-bit elements are also integers.
    steps *= bits[:, None]
    src_steps, dst_steps = steps[held_form], steps[want_form]
    src = ((boxes.start - all_boxes.start[held_form]) * src_steps).sum(axis=1)
    dst = ((boxes.start - all_boxes.start[want_form]) * dst_steps).sum(axis=1)
    extent, src_step, dst_step = _levels(bits[held_form], boxes.stop - boxes.start, src_steps, dst_steps)
    # Levels 0 and 1 are a run and its rows. Create one strip for each combination of indices of the other levels.
    counts = extent[:, 2:].prod(axis=1)
    piece = np.repeat(np.arange(len(src)), counts)
    index = spread(np.zeros(len(src), np.int64), counts)
    src, dst = src[piece], dst[piece]
    for level in range(2, extent.shape[1]):
        digit = index % extent[piece, level]
        index //= extent[piece, level]
        src, dst = src + digit * src_step[piece, level], dst + digit * dst_step[piece, level]
    columns = (src, dst, extent[piece, 0], src_step[piece, 1], dst_step[piece, 1])
    # Two four-bit elements share a byte, so a box may begin in the middle of a byte.
    broken = np.any([column % 8 != 0 for column in columns], axis=0)
    if broken.any():
        i = int(piece[broken.argmax()])
        raise PlanError(f"{show(boxes.box(i))} of {forms[int(want_form[i])].spec} cuts through a byte")
    src, dst, run, src_pitch, dst_pitch = (column // 8 for column in columns)
    return BoxStrips(
        piece=piece,
        src=src,
        dst=dst,
        run_bytes=run,
        num_rows=extent[piece, 1],
        src_pitch=src_pitch,
        dst_pitch=dst_pitch,
    )


def _levels(bits: I64, extent: I64, src_step: I64, dst_step: I64) -> tuple[I64, I64, I64]:
    """Return the dims as levels, the destination's fastest dim first. Level 0 is the run, in bits.

    A dim is folded into the level below if both layouts allow it. Missing levels have extent 1 and step 0.
    """
    order = np.argsort(dst_step, axis=1, kind="stable")
    extent, src_step, dst_step = (np.take_along_axis(column, order, axis=1) for column in (extent, src_step, dst_step))
    num, num_dims = extent.shape
    levels = np.ones((num, num_dims + 2), np.int64)
    src_levels, dst_levels = np.zeros_like(levels), np.zeros_like(levels)
    levels[:, 0] = bits
    src_levels[:, 0] = dst_levels[:, 0] = 1
    top = np.zeros(num, np.int64)
    rows = np.arange(num)
    for d in range(num_dims):
        active = extent[:, d] > 1
        length = levels[rows, top]
        # Fold a dim only if it continues without a gap in both memories.
        fold = (
            active
            & (src_step[:, d] == length * src_levels[rows, top])
            & (dst_step[:, d] == length * dst_levels[rows, top])
        )
        top += active & ~fold
        levels[rows, top] = np.where(fold, length * extent[:, d], np.where(active, extent[:, d], length))
        push = np.flatnonzero(active & ~fold)
        src_levels[push, top[push]] = src_step[push, d]
        dst_levels[push, top[push]] = dst_step[push, d]
    return levels, src_levels, dst_levels


def _blocks(counts: I64) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most `_PAIRS_AT_ONCE` pairs in total, or a single row."""
    stop = np.cumsum(counts)
    at = 0
    while at < len(counts):
        before = int(stop[at] - counts[at])
        end = max(at + 1, int(np.searchsorted(stop, before + _PAIRS_AT_ONCE, side="right")))
        yield at, end
        at = end


def _untangle(pieces: BoxPieces, bad: I64, wanted: Boxes, holes: dict[int, Box]) -> BoxPieces:
    """Cut the pieces of the bad boxes until no pieces overlap. Record uncovered regions in `holes`."""
    keep = np.flatnonzero(~np.isin(pieces.want, bad))
    want, holders, new = pieces.want[keep].tolist(), pieces.held[keep].tolist(), []
    for row, target in enumerate(bad.tolist()):
        mine = np.flatnonzero(pieces.want == target)
        volume = (pieces.boxes.stop[mine] - pieces.boxes.start[mine]).prod(axis=1)
        left = [wanted.box(row)]
        # Start with the largest piece, so that a wanted box is cut into few pieces. Sort stably, so that equal inputs
        # give equal plans.
        for i in mine[np.argsort(-volume, kind="stable")].tolist():
            piece = pieces.boxes.box(i)
            new += [common for rest in left if (common := common_box(rest, piece)) is not None]
            added = len(new) - (len(want) - len(keep))
            want += [target] * added
            holders += [int(pieces.held[i])] * added
            left = [part for rest in left for part in minus(rest, piece)]
        if left:
            holes[target] = left[0]
    new_boxes = Boxes.of(new) if new else pieces.boxes[np.zeros(0, np.int64)]
    kept_boxes = pieces.boxes[keep]
    wants = np.array(want, np.int64)
    order = np.argsort(wants, kind="stable")
    cut = Boxes(
        start=np.concatenate((kept_boxes.start, new_boxes.start)),
        stop=np.concatenate((kept_boxes.stop, new_boxes.stop)),
    )
    return BoxPieces(want=wants[order], held=np.array(holders, np.int64)[order], boxes=cut[order])


def common_box(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start=start, stop=stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def minus(a: Box, b: Box) -> Iterator[Box]:
    """Yield the region `a` minus `b`, as boxes that do not overlap."""
    common = common_box(a, b)
    if common is None:
        yield a
        return
    # In each dim, cut off the regions before and after the intersection, and continue with the part that remains.
    start, stop = list(a.start), list(a.stop)
    for d in range(len(start)):
        if start[d] < common.start[d]:
            yield Box(start=tuple(start), stop=(*stop[:d], common.start[d], *stop[d + 1 :]))
        if common.stop[d] < stop[d]:
            yield Box(start=(*start[:d], common.stop[d], *start[d + 1 :]), stop=tuple(stop))
        start[d], stop[d] = common.start[d], common.stop[d]


def _fault(want: Box, pieces: Sequence[Box]) -> tuple[str, Box]:
    left = [want]
    for i, piece in enumerate(pieces):
        stray = next(minus(piece, want), None)
        if stray is not None:
            return "a piece lies outside the box at", stray
        again = next((common for other in pieces[:i] if (common := common_box(piece, other)) is not None), None)
        if again is not None:
            return "two pieces cover", again
        left = [part for rest in left for part in minus(rest, piece)]
    # There is no stray piece and no overlap, so a region must be uncovered.
    return "no piece covers", left[0]


def _joined(parts: Sequence[BoxPieces], num_dims: int) -> BoxPieces:
    none = np.zeros((0, num_dims), np.int64)
    return BoxPieces(
        want=np.concatenate([none[:, 0], *(part.want for part in parts)]),
        held=np.concatenate([none[:, 0], *(part.held for part in parts)]),
        boxes=Boxes(
            start=np.concatenate([none, *(part.boxes.start for part in parts)]),
            stop=np.concatenate([none, *(part.boxes.stop for part in parts)]),
        ),
    )


def show(box: Box) -> str:
    """Return a box as an index of its tensor, for error messages."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + ")"


MAX_LISTED = 20
"""Maximum number of faults that a PlanError lists. Further faults are only counted."""


class Match(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The two sides of a sync, joined by tensor. Wanted tensors are numbered in the order in which they first occur."""

    forms: tuple[Form, ...]
    names: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Tensors that are held but wanted by no receiver."""
    kind: I64
    held: Groups
    """Forms in which each kind is held."""
    held_team: I64
    """The team of each of `held.values`."""
    wanted: Groups
    team: Groups
    """Ranks of each team, ascending."""
    pair_first: I64
    """First pair of each tensor. A pair is a tensor in one of the held forms of its kind."""
    pair_row: I64
    """First row of each pair. A pair has one row for each rank of its team, in the team's order."""
    row_offset: I64
    want_rank: I64
    """Receiver of each wanted row. The `want_` columns list the wanted rows by rank, in the order of the layouts."""
    want_tensor: I64
    want_form: I64
    """Index into `wanted.values`."""
    want_offset: I64


class _Rows(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """All rows of the layouts on one side of the sync, with names and forms as numbers."""

    rank: I64
    name: I64
    form: I64
    offset: I64


def match(holdings: Sequence[Layout], wants: Sequence[Layout]) -> Match:
    """Join both sides. Raise PlanError if no rank holds a wanted tensor with the same dtype, shape and tag."""
    for layout in (*holdings, *wants):
        layout.check()
    names: dict[str, int] = defaultdict(count().__next__)
    # Sort by spec, so that the pairs of one tensor with one spec are neighbours.
    unsorted = {form for layout in (*holdings, *wants) for form in layout.forms}
    forms = sorted(unsorted, key=lambda form: (*_spec(form), form.box.start, form.box.stop, form.strides))
    number = {form: i for i, form in enumerate(forms)}
    specs: dict[tuple[object, ...], int] = defaultdict(count().__next__)
    spec = np.array([specs[_spec(form)] for form in forms], np.int64)
    # Number the names of holdings first, because the publishers' order determines the plan's order.
    held_rows, wanted_rows = _gather(holdings, names, number), _gather(wants, names, number)
    num_forms, num_specs, num_ranks = max(len(forms), 1), max(len(specs), 1), max(len(holdings), 1)
    # Sort held rows by pair, then by rank. If a rank holds a box twice, its first copy is used. One number encodes
    # name, form and rank, so that a single sort joins millions of rows from 256 ranks.
    codes, at = np.unique((held_rows.name * num_forms + held_rows.form) * num_ranks + held_rows.rank, return_index=True)
    pair_code, pair_row = _heads(codes // num_ranks)
    want_code, want_pair = np.unique(wanted_rows.name * num_forms + wanted_rows.form, return_inverse=True)
    held_form, want_form = pair_code % num_forms, want_code % num_forms
    have, have_first = _heads(pair_code // num_forms * num_specs + spec[held_form])
    need, need_first = _heads(want_code // num_forms * num_specs + spec[want_form])
    position = np.searchsorted(have, need)
    all_names, spare = list(names), have[~np.isin(have, need)]
    # For a code above all codes in `have`, searchsorted returns the end. The -1 appended there marks it as missing.
    missing = need[np.append(have, -1)[position] != need]
    if len(missing):
        raise _mismatch(all_names, {spec[i]: form.spec for i, form in enumerate(forms)}, missing, have, spare)
    team, pair_team = _teams(held_rows.rank[at], pair_row)
    held_range, wanted_range = (have_first[position], have_first[position + 1]), (need_first[:-1], need_first[1:])
    kind, sample = _kinds((np.stack((held_form, pair_team), axis=1), *held_range), (want_form, *wanted_range))
    held_forms = _groups(held_form, held_range[0][sample], held_range[1][sample])
    held_team = _groups(pair_team, held_range[0][sample], held_range[1][sample])
    wanted = _groups(want_form, wanted_range[0][sample], wanted_range[1][sample])
    tensor = np.repeat(np.arange(len(need)), np.diff(need_first))[want_pair]
    return Match(
        forms=tuple(forms),
        names=tuple(all_names[i] for i in (need // num_specs).tolist()),
        unwanted=tuple(all_names[i] for i in (spare // num_specs).tolist()),
        kind=kind,
        held=held_forms,
        held_team=held_team.values,
        wanted=wanted,
        team=team,
        pair_first=held_range[0],
        pair_row=pair_row[:-1],
        row_offset=held_rows.offset[at],
        want_rank=wanted_rows.rank,
        want_tensor=tensor,
        want_form=wanted.first[kind[tensor]] + want_pair - wanted_range[0][tensor],
        want_offset=wanted_rows.offset,
    )


def _spec(form: Form) -> tuple[object, ...]:
    return str(form.dtype), form.shape, form.tag


def _gather(layouts: Sequence[Layout], names: dict[str, int], number: dict[Form, int]) -> _Rows:
    number_of_name: Callable[[str], int] = names.__getitem__
    none = np.zeros(0, np.int64)
    name, form = [none], [none]
    for layout in layouts:
        name.append(np.fromiter(map(number_of_name, layout.names), np.int64, len(layout.names)))
        form.append(np.array([number[row_form] for row_form in layout.forms], np.int64)[layout.form])
    counts = [len(layout.names) for layout in layouts]
    return _Rows(
        rank=np.repeat(np.arange(len(layouts)), counts),
        name=np.concatenate(name),
        form=np.concatenate(form),
        offset=np.concatenate([none, *(layout.offset for layout in layouts)]),
    )


def _heads(column: I64) -> tuple[I64, I64]:
    """Return the value of each run of equal neighbours, and [num_runs + 1] starts of the runs."""
    new = np.ones(len(column), bool)
    new[1:] = column[1:] != column[:-1]
    first = np.flatnonzero(new)
    return column[first], np.append(first, len(column))


def _teams(ranks: I64, first: I64) -> tuple[Groups, I64]:
    # As big-endian bytes, a team is one hashable value and sorts like its numbers.
    raw = ranks.astype(">i8").tobytes()
    keys = [raw[8 * a : 8 * b] for a, b in pairwise(first.tolist())]
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    team = np.fromiter(map(number.__getitem__, keys), np.int64, len(keys))
    counts = np.array([len(key) // 8 for key in number], np.int64)
    values = np.frombuffer(b"".join(number), ">i8").astype(np.int64)
    return Groups(first=np.append(0, np.cumsum(counts)), values=values), team


def _kinds(*sides: tuple[I64, I64, I64]) -> tuple[I64, I64]:
    """Return each tensor's kind and each kind's first tensor. Tensors with equal rows on every side are one kind."""
    keys: list[Iterable[bytes]] = []
    for rows, first, stop in sides:
        raw = np.ascontiguousarray(rows).tobytes()
        width = 8 * (rows.shape[1] if rows.ndim == 2 else 1)
        keys.append([raw[width * a : width * b] for a, b in zip(first.tolist(), stop.tolist(), strict=True)])
    seen: dict[tuple[bytes, ...], int] = defaultdict(count().__next__)
    kind = np.fromiter(map(seen.__getitem__, zip(*keys, strict=True)), np.int64, len(sides[0][1]))
    return kind, np.unique(kind, return_index=True)[1]


def _groups(column: I64, first: I64, stop: I64) -> Groups:
    counts = stop - first
    return Groups(first=np.append(0, np.cumsum(counts)), values=column[spread(first, counts)])


def _mismatch(names: Sequence[str], words: dict[int, str], missing: I64, have: I64, spare: I64) -> PlanError:
    wanted_as: dict[int, list[str]] = defaultdict(list)
    held_as: dict[int, list[str]] = defaultdict(list)
    concerned = have[np.isin(have // len(words), missing // len(words)) | np.isin(have, spare)]
    for side, codes in ((wanted_as, missing), (held_as, concerned)):
        for code in codes.tolist():
            side[code // len(words)].append(words[code % len(words)])
    lines = []
    for name in islice(dict.fromkeys((*wanted_as, *held_as)), MAX_LISTED):
        sides = (("wanted", wanted_as), ("held", held_as))
        texts = [f"{word} as {', '.join(side[name])}" if name in side else f"not {word}" for word, side in sides]
        lines.append(f"{names[name]}: {', '.join(texts)}")
    if len(wanted_as.keys() | held_as.keys()) > MAX_LISTED:
        lines.append(f"and {len(wanted_as.keys() | held_as.keys()) - MAX_LISTED} more")
    head = f"names, dtypes, shapes or tags differ: {len(missing)} wanted and {len(spare)} held tensors have no match:"
    hint = prefix_hint([names[name] for name in wanted_as], [names[name] for name in held_as])
    return PlanError(head + "\n  " + "\n  ".join(lines), hint=hint)


def prefix_hint(wanted: Sequence[str], held: Sequence[str]) -> str | None:
    """Return a hint if all held names share a prefix that the wanted names lack, or None."""
    if not wanted:
        return None
    known = set(held)
    for name in held:
        prefix = name.removesuffix(wanted[0])
        if prefix != name and prefix.endswith(".") and all(prefix + other in known for other in wanted):
            return f"the published names begin with {prefix!r}: publish them without it"
    return None
