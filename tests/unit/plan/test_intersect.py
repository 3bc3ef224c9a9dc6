"""Pieces are compared with dense arrays of ownership: each wanted element is covered once, and the proof agrees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan import intersect as room
from penstock.plan.intersect import Boxes, Groups, intersect, prove_coverage, uncovered
from penstock.plan.layout import Form
from penstock.types import Box, DType

SHAPES = [(), (0,), (5,), (3, 4), (1, 6), (4, 3, 2), (2, 0)]


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def some_box(shape: tuple[int, ...], chance: random.Random) -> Box:
    pairs = [sorted((chance.randint(0, n), chance.randint(0, n))) for n in shape]
    return Box(start=tuple(a for a, _ in pairs), stop=tuple(b for _, b in pairs))


def groups(*values: list[int]) -> Groups:
    first = np.append(0, np.cumsum([len(one) for one in values]))
    return Groups(first=first.astype(np.int64), values=np.array([v for one in values for v in one], np.int64))


@given(st.sampled_from(SHAPES), st.randoms(use_true_random=False))
def test_intersections_cover_wanted_and_held_elements_once(shape: tuple[int, ...], chance: random.Random) -> None:
    boxes = [some_box(shape, chance) for _ in range(chance.randint(1, 8))]
    boxes += [Box.full(shape)] * chance.randint(0, 1)
    forms = [Form(dtype=DType.U8, shape=shape, box=box) for box in boxes]
    cut = chance.randint(0, len(forms) - 1)
    held, wanted = list(range(cut)), list(range(cut, len(forms)))
    pieces, holes = intersect(forms, groups(held), groups(wanted))
    for q, f in enumerate(wanted):
        count = np.zeros(shape, int)
        owned = np.zeros(shape, bool)
        for h in held:
            owned[index(boxes[h])] = True
        for i in np.flatnonzero(pieces.want == q).tolist():
            box = pieces.boxes.box(i)
            box = Box(start=box.start[: len(shape)], stop=box.stop[: len(shape)])
            count[index(box)] += 1
            source = np.zeros(shape, bool)
            source[index(boxes[held[pieces.held[i]]])] = True
            assert source[index(box)].all()
        mine = np.zeros(shape, bool)
        mine[index(boxes[f])] = True
        assert (count == (mine & owned)).all()
        assert (q in holes) == bool((mine & ~owned).any())
        if q in holes:
            hole = holes[q]
            where = index(Box(start=hole.start[: len(shape)], stop=hole.stop[: len(shape)]))
            assert hole.num_elements and not owned[where].any() and mine[where].all()
    assert (np.diff(pieces.want) >= 0).all()


@given(st.sampled_from([(5,), (3, 4), (4, 3, 2)]), st.randoms(use_true_random=False))
def test_coverage_check_matches_element_counts(shape: tuple[int, ...], chance: random.Random) -> None:
    wants = [some_box(shape, chance) for _ in range(3)]
    of, boxes = [], []
    for q, want in enumerate(wants):
        if chance.random() < 0.5:
            # A correct result: the box is cut in two along a dim, and the halves are in any order.
            d = chance.randrange(len(shape))
            at = chance.randint(want.start[d], want.stop[d])
            cut = tuple(at if i == d else n for i, n in enumerate(want.stop))
            rest = tuple(at if i == d else n for i, n in enumerate(want.start))
            boxes += [Box(start=want.start, stop=cut), Box(start=rest, stop=want.stop)]
            of += [q, q]
        for _ in range(chance.randint(0, 2) if chance.random() < 0.5 else 0):
            boxes.append(some_box(shape, chance))
            of.append(q)
    bad = []
    for q, want in enumerate(wants):
        count = np.zeros(shape, int)
        for box in (box for owner, box in zip(of, boxes, strict=True) if owner == q):
            count[index(box)] += 1
        count[index(want)] -= 1
        strays = any(
            any(a < b for a, b in zip(box.start, want.start, strict=True))
            or any(a > b for a, b in zip(box.stop, want.stop, strict=True))
            for owner, box in zip(of, boxes, strict=True)
            if owner == q
        )
        if count.any() or strays:
            bad.append(q)
    columns = Boxes.of(wants), np.array(of, np.int64), Boxes.of(boxes) if boxes else Boxes.of(wants)[np.zeros(0, int)]
    assert uncovered(*columns).tolist() == bad
    if not bad:
        prove_coverage(*columns)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([((0, 0), (4, 1)), ((0, 2), (4, 4))], r"no piece covers \[0:4, 1:2\)"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 4))], r"two pieces cover \[0:4, 2:3\)"),
        ([((0, 0), (4, 4)), ((0, 3), (4, 5))], r"a piece lies outside the box at \[0:4, 4:5\)"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], r"two pieces cover \[0:2, 0:4\)"),
        ([], r"no piece covers \[0:4, 0:4\)"),
    ],
)
def test_coverage_error_names_first_wrong_range(
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]], says: str
) -> None:
    boxes = Boxes.of([Box(start=a, stop=b) for a, b in [((0, 0), (1, 1)), *pieces]])
    wanted = Boxes.of([Box(start=(0, 0), stop=(1, 1)), Box(start=(0, 0), stop=(4, 4))])
    with pytest.raises(PlanError, match=r"wanted box 1 \[0:4, 0:4\): " + says):
        prove_coverage(wanted, np.array([0] + [1] * len(pieces)), boxes)


def test_intersection_is_independent_of_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (12,)
    rows = [Form(dtype=DType.U8, shape=shape, box=Box(start=(i,), stop=(i + 2,))) for i in range(0, 12, 2)]
    wide = [Form(dtype=DType.U8, shape=shape, box=Box(start=(i,), stop=(i + 6,))) for i in (0, 3, 6)]
    sides = groups([0, 1, 2, 3, 4, 5], [0, 1, 2]), groups([6, 7, 8], [6])
    whole, _ = intersect([*rows, *wide], *sides)
    monkeypatch.setattr(room, "_PAIRS_AT_ONCE", 7)
    parts, holes = intersect([*rows, *wide], *sides)
    assert not holes and parts.want.tolist() == whole.want.tolist() and parts.held.tolist() == whole.held.tolist()
    assert (parts.boxes.start == whole.boxes.start).all() and (parts.boxes.stop == whole.boxes.stop).all()


def test_empty_input_returns_no_intersections() -> None:
    pieces, holes = intersect([], groups(), groups())
    assert len(pieces.want) == len(pieces.boxes) == 0 and not holes
    prove_coverage(Boxes.of([]), pieces.want, pieces.boxes)
