"""Both sides of a sync joined by tensor, and each wanted box cut to pieces of held ones, as boxes and then as bytes.

In: holdings and wants, as `Layout`s. Out: a `Match`, or PlanError listing what the sides do not agree on; `BoxPieces`,
each wanted element in exactly one of them; `BoxStrips`.
Not here: which of several ranks that hold the same gives a piece (`sync`).

A kind is the tensors that are held in the same forms by the same teams and wanted in the same forms: 70,000 tensors are
a few hundred kinds, each planned once. A team is the ranks that hold the same box of the same tensor.

    held      wanted     pieces    The proof: each box puts signs on its corners, (-1)^(dims at their stop). Where the
    +--+--+   +-----+   +--+--+    signs of the pieces sum to the wanted box's own at every point and nowhere else,
    |a |b |   |     |   |a |b |    each of its elements is in one piece and no other is in any: a function is known by
    +--+--+   +-----+   +--+--+    its mixed differences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np

from penstock.errors import PlanError
from penstock.plan.layout import Form, Layout
from penstock.segments import spread
from penstock.types import I64, Box

_PAIRS_AT_ONCE = 1 << 18
"""Pairs of held and wanted box compared in one go: tens of MiB, however many there are."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Boxes:
    """Boxes as columns [num_boxes, num_dims]; those of fewer dims are padded with `[0, 1)`."""

    start: I64
    stop: I64

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Boxes:
        """Return these boxes as columns, of at least one dim."""
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
        """Return box `i`, with its padding."""
        return Box(start=tuple(self.start[i].tolist()), stop=tuple(self.stop[i].tolist()))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Groups:
    """Runs of values: group g is `values[first[g]:first[g + 1]]`."""

    first: I64
    values: I64

    @property
    def counts(self) -> I64:
        """Return the number of values of each group."""
        return np.diff(self.first)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoxPieces:
    """The box that each wanted box takes from each held one; sorted by `want`."""

    want: I64
    """Index among all wanted forms of all kinds."""
    held: I64
    """Index among all held forms of all kinds."""
    boxes: Boxes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoxStrips:
    """Pieces as bytes: strip i is `num_rows` runs of `run_bytes`, `src_pitch` apart there and `dst_pitch` here.

    `src` and `dst` count from where the held and the wanted box begin.
    """

    piece: I64
    src: I64
    dst: I64
    run_bytes: I64
    num_rows: I64
    src_pitch: I64
    dst_pitch: I64


def intersect(forms: Sequence[Form], held: Groups, wanted: Groups) -> tuple[BoxPieces, dict[int, Box]]:
    """Return pieces that cover each wanted box, and the first hole of each that the held ones do not cover.

    Args:
        forms: of both sides.
        held: per kind the forms it is held in. Where they overlap, the larger gives.
        wanted: per kind the forms it is wanted in.

    Cost: held x wanted forms of each kind, in bounded memory.
    """
    boxes = Boxes.of([form.box for form in forms])
    kind = np.repeat(np.arange(len(wanted.first) - 1), wanted.counts)
    counts = held.counts[kind]
    parts: list[BoxPieces] = []
    holes: dict[int, Box] = {}
    # In blocks: all pairs of a trillion parameters at once would be gigabytes of boxes.
    for first, stop in _blocks(counts):
        num = counts[first:stop]
        want = np.repeat(np.arange(first, stop), num)
        source = spread(held.first[kind[first:stop]], num)
        theirs, mine = boxes[held.values[source]], boxes[wanted.values[want]]
        cut = Boxes(start=np.maximum(theirs.start, mine.start), stop=np.minimum(theirs.stop, mine.stop))
        some = np.flatnonzero((cut.stop > cut.start).all(axis=1))
        crossings = BoxPieces(want=want[some], held=source[some], boxes=cut[some])
        bad = uncovered(boxes[wanted.values[first:stop]], crossings.want - first, crossings.boxes) + first
        parts.append(crossings if not len(bad) else _untangle(crossings, bad, boxes[wanted.values[bad]], holes))
    return _joined(parts, boxes.start.shape[1]), holes


def uncovered(wanted: Boxes, of: I64, pieces: Boxes) -> I64:
    """Return, sorted, the wanted boxes whose pieces (`of`: each one's box) do not hold each element exactly once."""
    # One more than the box: its corners are at `stop`, past its last element.
    extent = wanted.stop - wanted.start + 1
    steps = np.ones_like(extent)
    steps[:, 1:] = np.cumprod(extent[:, :-1], axis=1)
    owner = np.concatenate((of, np.arange(len(wanted))))
    base = wanted.start[owner]
    low = (np.concatenate((pieces.start, wanted.start)) - base) * steps[owner]
    high = (np.concatenate((pieces.stop, wanted.stop)) - base) * steps[owner]
    points = np.zeros((1, len(owner)), np.int64)
    signs = np.ones((1, len(owner)), np.int64)
    signs[:, len(of) :] = -1
    for d in range(low.shape[1]):
        points = np.concatenate((points + low[:, d], points + high[:, d]))
        signs = np.concatenate((signs, -signs))
    owners, flat, sign = np.tile(owner, len(points)), points.reshape(-1), signs.reshape(-1)
    # Sorted, equal points are neighbours, and a single pass sums their signs.
    order = np.lexsort((flat, owners))
    owners, flat, sign = owners[order], flat[order], sign[order]
    new = np.ones(len(order), bool)
    new[1:] = (owners[1:] != owners[:-1]) | (flat[1:] != flat[:-1])
    heads = np.flatnonzero(new)
    # A piece outside its box might share a point with one inside, by wrapping round: that is a fault of its own.
    outside = ((pieces.start < wanted.start[of]) | (pieces.stop > wanted.stop[of])).any(axis=1)
    sums = np.add.reduceat(sign, heads) if len(heads) else sign
    return np.unique(np.concatenate((owners[heads[sums != 0]], of[outside])))


def prove_coverage(wanted: Boxes, of: I64, pieces: Boxes) -> None:
    """Raise PlanError, naming the first hole or overlap, unless each element of each wanted box is in one piece."""
    bad = uncovered(wanted, of, pieces)
    if not len(bad):
        return
    # The proof only tells which box is wrong; what is wrong with it is found box by box, for the message.
    want = wanted.box(int(bad[0]))
    mine = [pieces.box(int(i)) for i in np.flatnonzero(of == bad[0])]
    what, where = _fault(want, mine)
    raise PlanError(f"wanted box {bad[0]} {show(want)}: {what} {show(where)}")


def strips(forms: Sequence[Form], held_form: I64, want_form: I64, boxes: Boxes) -> BoxStrips:
    """Return where the bytes of these boxes lie in both memories, in as few strips as dims that do not fold allow.

    Raises:
        PlanError: a box cuts a byte that packed elements share.
    """
    all_boxes = Boxes.of([form.box for form in forms])
    bits = np.array([form.dtype.bits for form in forms], np.int64)
    steps = np.zeros_like(all_boxes.start)
    for i, form in enumerate(forms):
        assert form.strides is not None
        steps[i, : len(form.strides)] = form.strides
    # In bits, so that strides of packed four-bit elements are whole numbers too.
    steps *= bits[:, None]
    theirs, mine = steps[held_form], steps[want_form]
    src = ((boxes.start - all_boxes.start[held_form]) * theirs).sum(axis=1)
    dst = ((boxes.start - all_boxes.start[want_form]) * mine).sum(axis=1)
    extent, near, far = _levels(bits[held_form], boxes.stop - boxes.start, theirs, mine)
    # Levels beyond a run and its rows are written out.
    counts = extent[:, 2:].prod(axis=1)
    piece = np.repeat(np.arange(len(src)), counts)
    turn = spread(np.zeros(len(src), np.int64), counts)
    src, dst = src[piece], dst[piece]
    for level in range(2, extent.shape[1]):
        digit = turn % extent[piece, level]
        turn //= extent[piece, level]
        src, dst = src + digit * near[piece, level], dst + digit * far[piece, level]
    columns = (src, dst, extent[piece, 0], near[piece, 1], far[piece, 1])
    # In bits until here: four-bit elements lie two a byte, and a box may begin at the second.
    broken = np.any([column % 8 != 0 for column in columns], axis=0)
    if broken.any():
        i = int(piece[broken.argmax()])
        raise PlanError(f"{show(boxes.box(i))} of {forms[int(want_form[i])].spec} cuts inside a byte")
    src, dst, run, src_pitch, dst_pitch = (column // 8 for column in columns)
    rows = extent[piece, 1]
    return BoxStrips(
        piece=piece, src=src, dst=dst, run_bytes=run, num_rows=rows, src_pitch=src_pitch, dst_pitch=dst_pitch
    )


def _levels(bits: I64, extent: I64, near: I64, far: I64) -> tuple[I64, I64, I64]:
    """Return dims as levels, fastest of the destination first, each folded into the one below where both allow.

    Level 0 is the run, in bits; levels that are not there have extent 1 and step 0.
    """
    order = np.argsort(far, axis=1, kind="stable")
    extent, near, far = (np.take_along_axis(column, order, axis=1) for column in (extent, near, far))
    num, num_dims = extent.shape
    levels = np.ones((num, num_dims + 2), np.int64)
    steps_near, steps_far = np.zeros_like(levels), np.zeros_like(levels)
    levels[:, 0] = bits
    steps_near[:, 0] = steps_far[:, 0] = 1
    top = np.zeros(num, np.int64)
    rows = np.arange(num)
    for d in range(num_dims):
        active = extent[:, d] > 1
        length = levels[rows, top]
        # Folded only where the dim goes on without a gap in both memories: then both are one longer run.
        fold = active & (near[:, d] == length * steps_near[rows, top]) & (far[:, d] == length * steps_far[rows, top])
        top += active & ~fold
        levels[rows, top] = np.where(fold, length * extent[:, d], np.where(active, extent[:, d], length))
        push = np.flatnonzero(active & ~fold)
        steps_near[push, top[push]] = near[push, d]
        steps_far[push, top[push]] = far[push, d]
    return levels, steps_near, steps_far


def _blocks(counts: I64) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of at most `_PAIRS_AT_ONCE` pairs together, or one row."""
    stop = np.cumsum(counts)
    at = 0
    while at < len(counts):
        before = int(stop[at] - counts[at])
        end = max(at + 1, int(np.searchsorted(stop, before + _PAIRS_AT_ONCE, side="right")))
        yield at, end
        at = end


def _untangle(found: BoxPieces, bad: I64, wanted: Boxes, holes: dict[int, Box]) -> BoxPieces:
    """Return the pieces, the bad wants' cut until they do not overlap, the largest first; what is left is a hole."""
    keep = np.flatnonzero(~np.isin(found.want, bad))
    want, holders, new = found.want[keep].tolist(), found.held[keep].tolist(), []
    for row, target in enumerate(bad.tolist()):
        mine = np.flatnonzero(found.want == target)
        volume = (found.boxes.stop[mine] - found.boxes.start[mine]).prod(axis=1)
        left = [wanted.box(row)]
        # The largest first, so that the wanted box is cut to few pieces; stable, so that equal inputs give equal plans.
        for i in mine[np.argsort(-volume, kind="stable")].tolist():
            piece = found.boxes.box(i)
            new += [common for rest in left if (common := common_box(rest, piece)) is not None]
            added = len(new) - (len(want) - len(keep))
            want += [target] * added
            holders += [int(found.held[i])] * added
            left = [part for rest in left for part in minus(rest, piece)]
        if left:
            holes[target] = left[0]
    apart = Boxes.of(new) if new else found.boxes[np.zeros(0, np.int64)]
    whole = found.boxes[keep]
    wants = np.array(want, np.int64)
    order = np.argsort(wants, kind="stable")
    cut = Boxes(start=np.concatenate((whole.start, apart.start)), stop=np.concatenate((whole.stop, apart.stop)))
    return BoxPieces(want=wants[order], held=np.array(holders, np.int64)[order], boxes=cut[order])


def common_box(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes have in common; None: nothing."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start=start, stop=stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def minus(a: Box, b: Box) -> Iterator[Box]:
    """Yield `a` without `b`, as boxes that do not overlap."""
    common = common_box(a, b)
    if common is None:
        yield a
        return
    # Dim by dim: what lies before and after the common part is cut off, and the rest shrinks to it.
    start, stop = list(a.start), list(a.stop)
    for d in range(len(start)):
        if start[d] < common.start[d]:
            yield Box(start=tuple(start), stop=(*stop[:d], common.start[d], *stop[d + 1 :]))
        if common.stop[d] < stop[d]:
            yield Box(start=(*start[:d], common.stop[d], *start[d + 1 :]), stop=tuple(stop))
        start[d], stop[d] = common.start[d], common.stop[d]


def _fault(want: Box, pieces: Sequence[Box]) -> tuple[str, Box]:
    """Return what is wrong with pieces that are known not to be right."""
    left = [want]
    for i, piece in enumerate(pieces):
        stray = next(minus(piece, want), None)
        if stray is not None:
            return "a piece lies outside of it at", stray
        again = next((common for other in pieces[:i] if (common := common_box(piece, other)) is not None), None)
        if again is not None:
            return "two pieces cover", again
        left = [part for rest in left for part in minus(rest, piece)]
    # Neither a stray piece nor an overlap: then something is missing.
    return "no piece covers", left[0]


def _joined(parts: Sequence[BoxPieces], num_dims: int) -> BoxPieces:
    """Return the pieces of all blocks; also of none, with the right number of dims."""
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
    """Return a box for people, as an index of its tensor."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + ")"


MAX_LISTED = 20
"""Faults that a PlanError lists; the rest are counted."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Match:
    """Both sides of a sync joined by tensor. Tensors are those wanted, numbered by first mention."""

    forms: tuple[Form, ...]
    names: tuple[str, ...]
    """Of each tensor."""
    unwanted: tuple[str, ...]
    """Tensors that are held and wanted by no receiver."""
    kind: I64
    """Of each tensor."""
    held: Groups
    """Per kind the forms it is held in."""
    held_team: I64
    """The team of each of `held.values`."""
    wanted: Groups
    """Per kind the forms it is wanted in."""
    team: Groups
    """Per team its ranks, ascending."""
    pair_first: I64
    """Per tensor the first of its pairs: a pair is a tensor in one of its kind's held forms, in their order."""
    pair_row: I64
    """Per pair its first row: one row for each rank of the team, in its order."""
    row_offset: I64
    want_rank: I64
    """The columns `want_` are the wanted rows, rank after rank, in the order of their layouts."""
    want_tensor: I64
    want_form: I64
    """Index into `wanted.values`."""
    want_offset: I64


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Rows:
    """All rows of the layouts of one side, with names and forms as numbers."""

    rank: I64
    name: I64
    form: I64
    offset: I64


def match(holdings: Sequence[Layout], wants: Sequence[Layout]) -> Match:
    """Join both sides.

    Raises:
        PlanError: a layout is not sound, or no rank holds a wanted tensor with that dtype, shape and tag.
    """
    for layout in (*holdings, *wants):
        layout.check()
    names: dict[str, int] = defaultdict(count().__next__)
    # Ordered by spec, so that the pairs of one tensor in one spec are neighbours.
    forms = sorted({form for layout in (*holdings, *wants) for form in layout.forms}, key=_order)
    number = {form: i for i, form in enumerate(forms)}
    specs: dict[tuple[object, ...], int] = defaultdict(count().__next__)
    spec = np.array([specs[_spec(form)] for form in forms], np.int64)
    # Holdings first: names are numbered as they come, and the order is to be the publishers'.
    theirs, mine = _gather(holdings, names, number), _gather(wants, names, number)
    num_forms, num_specs, num_ranks = max(len(forms), 1), max(len(specs), 1), max(len(holdings), 1)
    # Held rows by pair, then rank; a rank that holds a box twice gives the first.
    # Name, form and rank in one number, so that a sort joins the rows: with 256 ranks there are millions of them.
    codes, at = np.unique((theirs.name * num_forms + theirs.form) * num_ranks + theirs.rank, return_index=True)
    pair_code, pair_row = _heads(codes // num_ranks)
    want_code, want_pair = np.unique(mine.name * num_forms + mine.form, return_inverse=True)
    held_form, want_form = pair_code % num_forms, want_code % num_forms
    have, have_first = _heads(pair_code // num_forms * num_specs + spec[held_form])
    need, need_first = _heads(want_code // num_forms * num_specs + spec[want_form])
    position = np.searchsorted(have, need)
    known, spare = list(names), have[~np.isin(have, need)]
    # -1 stands for a position past the end, which searchsorted gives for what is above all of `have`.
    missing = need[np.append(have, -1)[position] != need]
    if len(missing):
        raise _mismatch(known, {spec[i]: form.spec for i, form in enumerate(forms)}, missing, have, spare)
    team, pair_team = _teams(theirs.rank[at], pair_row)
    theirs_of, mine_of = (have_first[position], have_first[position + 1]), (need_first[:-1], need_first[1:])
    kind, sample = _kinds((np.stack((held_form, pair_team), axis=1), *theirs_of), (want_form, *mine_of))
    held_forms = _groups(held_form, theirs_of[0][sample], theirs_of[1][sample])
    held_team = _groups(pair_team, theirs_of[0][sample], theirs_of[1][sample])
    wanted = _groups(want_form, mine_of[0][sample], mine_of[1][sample])
    tensor = np.repeat(np.arange(len(need)), np.diff(need_first))[want_pair]
    return Match(
        forms=tuple(forms),
        names=tuple(known[i] for i in (need // num_specs).tolist()),
        unwanted=tuple(known[i] for i in (spare // num_specs).tolist()),
        kind=kind,
        held=held_forms,
        held_team=held_team.values,
        wanted=wanted,
        team=team,
        pair_first=theirs_of[0],
        pair_row=pair_row[:-1],
        row_offset=theirs.offset[at],
        want_rank=mine.rank,
        want_tensor=tensor,
        want_form=wanted.first[kind[tensor]] + want_pair - mine_of[0][tensor],
        want_offset=mine.offset,
    )


def _spec(form: Form) -> tuple[object, ...]:
    """Return what both sides must agree on."""
    return str(form.dtype), form.shape, form.tag


def _order(form: Form) -> tuple[object, ...]:
    """Return the sort key of a form: by spec, then by place in the tensor."""
    return *_spec(form), form.box.start, form.box.stop, form.strides


def _gather(layouts: Sequence[Layout], names: dict[str, int], number: dict[Form, int]) -> _Rows:
    """Return all rows of one side, names and forms by number."""
    of: Callable[[str], int] = names.__getitem__
    none = np.zeros(0, np.int64)
    name, form = [none], [none]
    for layout in layouts:
        name.append(np.fromiter(map(of, layout.names), np.int64, len(layout.names)))
        form.append(np.array([number[row_form] for row_form in layout.forms], np.int64)[layout.form])
    counts = [len(layout.names) for layout in layouts]
    return _Rows(
        rank=np.repeat(np.arange(len(layouts)), counts),
        name=np.concatenate(name),
        form=np.concatenate(form),
        offset=np.concatenate([none, *(layout.offset for layout in layouts)]),
    )


def _heads(column: I64) -> tuple[I64, I64]:
    """Return the values of runs of equal neighbours, and [num_runs + 1] where the runs begin."""
    new = np.ones(len(column), bool)
    new[1:] = column[1:] != column[:-1]
    first = np.flatnonzero(new)
    return column[first], np.append(first, len(column))


def _teams(ranks: I64, first: I64) -> tuple[Groups, I64]:
    """Return teams in the order of their ranks, and each pair's team."""
    # Big-endian, so that bytes sort as the numbers do, and a team is one value that can be hashed.
    raw = ranks.astype(">i8").tobytes()
    keys = [raw[8 * a : 8 * b] for a, b in pairwise(first.tolist())]
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    team = np.fromiter(map(number.__getitem__, keys), np.int64, len(keys))
    counts = np.array([len(key) // 8 for key in number], np.int64)
    values = np.frombuffer(b"".join(number), ">i8").astype(np.int64)
    return Groups(first=np.append(0, np.cumsum(counts)), values=values), team


def _kinds(*sides: tuple[I64, I64, I64]) -> tuple[I64, I64]:
    """Return each tensor's kind and each kind's first tensor; a kind has equal runs of rows on every side."""
    keys: list[Iterable[bytes]] = []
    for rows, first, stop in sides:
        raw = np.ascontiguousarray(rows).tobytes()
        width = 8 * (rows.shape[1] if rows.ndim == 2 else 1)
        keys.append([raw[width * a : width * b] for a, b in zip(first.tolist(), stop.tolist(), strict=True)])
    seen: dict[tuple[bytes, ...], int] = defaultdict(count().__next__)
    kind = np.fromiter(map(seen.__getitem__, zip(*keys, strict=True)), np.int64, len(sides[0][1]))
    return kind, np.unique(kind, return_index=True)[1]


def _groups(column: I64, first: I64, stop: I64) -> Groups:
    """Return these ranges of a column as groups."""
    counts = stop - first
    return Groups(first=np.append(0, np.cumsum(counts)), values=column[spread(first, counts)])


def _mismatch(names: Sequence[str], words: dict[int, str], missing: I64, have: I64, spare: I64) -> PlanError:
    """Return the error that lists tensors wanted in a spec that no rank holds, and those held in a spec not wanted."""
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
    head = (
        f"names, dtypes, shapes or tags differ: {len(missing)} wanted tensors and {len(spare)} held ones have no match:"
    )
    hint = prefix_hint([names[name] for name in wanted_as], [names[name] for name in held_as])
    return PlanError(head + "\n  " + "\n  ".join(lines), hint=hint)


def prefix_hint(wanted: Sequence[str], held: Sequence[str]) -> str | None:
    """Return a hint if held names have one prefix that all wanted names lack; None: they have not."""
    if not wanted:
        return None
    known = set(held)
    for name in held:
        prefix = name.removesuffix(wanted[0])
        if prefix != name and prefix.endswith(".") and all(prefix + other in known for other in wanted):
            return f"the published names begin with {prefix!r}: publish them without it"
    return None
