"""Rows of all layouts joined by tensor, and tensors gathered into kinds that are planned once.

In: holdings and wants, as `Layout`s. Out: a `Match`, or PlanError listing what the two sides do not agree on.
Not here: what boxes have in common (`intersect`).

A kind is the tensors that are held in the same forms by the same teams and wanted in the same forms: 70,000 tensors are
a few hundred kinds. A team is the ranks that hold the same box of the same tensor: any of them may give it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np

from penstock.errors import PlanError
from penstock.plan.intersect import Groups
from penstock.plan.layout import Form, Layout
from penstock.segments import spread
from penstock.types import I64

MAX_LISTED = 20
"""Faults a PlanError lists; the rest are counted."""


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
    return str(form.dtype), form.shape, form.tag


def _order(form: Form) -> tuple[object, ...]:
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
    head = f"{len(missing)} tensors are wanted that are not held so; {len(spare)} are held that are not wanted so:"
    return PlanError(head + "\n  " + "\n  ".join(lines))
