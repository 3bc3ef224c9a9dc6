"""Random chains of views and copies, recorded and filled, against torch itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.holding.weight_layout import tabulate
from penstock.sync.recording.layout import fill
from penstock.sync.recording.requirements import record
from penstock.sync.recording.stride_map import (
    MAX_BOXES,
    NotBoxes,
    StridedView,
    StrideGrid,
    StrideMap,
    _between,
    between,
    boxes,
    chain,
    restrict,
)
from penstock.types import Box, DType

EXTENTS = (1, 2, 3, 4, 6, 12)


@st.composite
def shapes(draw: Callable, most: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=most)))


def factorised(draw: Callable, count: int) -> list[int]:
    found = []
    while count > 1:
        factor = draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0]))
        found.append(factor)
        count //= factor
    return found or [1]


def step(draw: Callable, t: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draw an operator that accepts a tensor of this shape."""
    what = draw(st.sampled_from(["permute", "narrow", "reshape", "clone", "turn", "select", "stack", "every other"]))
    dim = draw(st.integers(0, t.ndim - 1))
    if what == "permute":
        order = draw(st.permutations(range(t.ndim)))
        return lambda x: x.permute(order)
    if what == "narrow":
        start = draw(st.integers(0, t.shape[dim] - 1))
        count = draw(st.integers(1, t.shape[dim] - start))
        return lambda x: x.narrow(dim, start, count)
    if what == "reshape":
        shape = factorised(draw, t.numel())
        return lambda x: x.reshape(shape)
    if what == "turn":
        return lambda x: torch.cat(x.split(max(1, x.shape[dim] // 2), dim)[::-1], dim)
    if what == "select" and t.ndim > 1:
        at = draw(st.integers(0, t.shape[dim] - 1))
        return lambda x: x.select(dim, at)
    if what == "stack" and t.numel() < 2000:
        return lambda x: torch.stack([x, x], dim)
    if what == "every other":
        slices = (*(slice(None),) * dim, slice(None, None, 2))
        return lambda x: x[slices]
    return lambda x: x.clone()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_stride_map_composes_views_and_copies(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    source = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    steps, shown = [], source
    for _ in range(data.draw(st.integers(0, 6))):
        steps.append(step(data.draw, shown))
        shown = steps[-1](shown)
    order = data.draw(st.permutations(range(shown.ndim)))
    model = nn.Module()
    model.register_buffer("p", torch.full([shown.shape[d] for d in order], -1.0))

    def load(weights) -> None:
        for _, w in weights:
            for operator in steps:
                w = operator(w)
            model.p.copy_(w.permute(order))

    recording = record(model, tabulate(["w"], [DType.F32], [shape]), load=load)
    assert bool(recording.unrecorded) == bool(recording.unfilled)
    fill(recording, {"w": source}, model, load=load)
    assert torch.equal(model.p, shown.permute(order))


def full(shape: tuple[int, ...]) -> StrideGrid:
    return StrideGrid(shape, torch.empty(shape, device="meta").stride())


def test_contiguous_copy_maps_to_one_region() -> None:
    (only,) = boxes(between(StridedView(full((8, 6)), 13, (6, 1)), StridedView(full((2, 3)), 0, (3, 1)), (2, 3)))
    assert only.source_box() == Box(start=(2, 1), stop=(4, 4))
    assert only.target_box() == Box.full((2, 3))
    assert only.order() == ((2, 3), (0, 1))


def test_split_rows_map_to_separate_regions() -> None:
    # View kv_b [2 heads * (3 + 1), 5] as [2, 4, 5] and copy the first 3 rows of each head.
    cut = boxes(
        between(StridedView(full((8, 5)), 0, (20, 5, 1)), StridedView(full((2, 3, 5)), 0, (15, 5, 1)), (2, 3, 5))
    )
    assert [part.source_box() for part in cut] == [Box(start=(0, 0), stop=(3, 5)), Box(start=(4, 0), stop=(7, 5))]
    assert [part.target_box().start for part in cut] == [(0, 0, 0), (1, 0, 0)]


def test_restricted_stride_map_yields_requested_rows() -> None:
    # View 12 rows as [3, 4], transpose to [4, 3], and copy rows 2 to 9 of the flat result.
    whole = between(StridedView(full((12,)), 0, (1, 4)), StridedView(full((12,)), 0, (3, 1)), (4, 3))
    parts = [part for cut in restrict(whole, Box(start=(2,), stop=(9,))) for part in boxes(cut)]
    rows = {}
    for part in parts:
        assert part.source_box().num_elements == part.target_box().num_elements == 1 or part.digits
        for value in range(part.target_box().num_elements):
            n_step = part.digits[0] if part.digits else (1, 0, 0, 0, 0)
            rows[part.target_start[0] + value * n_step[4]] = part.source_start[0] + value * n_step[2]
    turned = torch.arange(12).view(3, 4).t().flatten().tolist()
    assert rows == {row: turned[row] for row in range(2, 9)}


def outcome(run: Callable[[], StrideMap]) -> StrideMap | str:
    try:
        return run()
    except NotBoxes as error:
        return str(error)


def test_cached_stride_map_matches_uncached() -> None:
    kinds = set()
    for source_shape, target_shape, shape in product(
        [(4, 6), (2, 2, 6), (24,)], [(3, 8), (24,)], [(3,), (2, 3), (2, 1, 4), (12,)]
    ):
        source, target = full(source_shape), full(target_shape)
        strides = [(1,), (2,), (4,), (6,)] if len(shape) == 1 else [(6, 1), (4, 2), (12, 1), (0, 1)]
        if len(shape) == 3:
            strides = [(outer, 5, inner) for outer, inner in strides]
        for mine, theirs, offset in product(strides, strides, range(24)):
            views = StridedView(source, offset, mine), StridedView(target, (7 * offset) % 24, theirs)
            # All starts have the same digits, unless the view leaves a dim of a tensor.
            found = outcome(partial(between, *views, shape))
            assert found == outcome(partial(_between, *views, shape)), views
            kinds.add(type(found))
    assert kinds == {StrideMap, str}


@pytest.mark.parametrize(
    ("offset", "strides", "shape"), [(0, (7,), (3,)), (48, (1,), (1,)), (0, (5, 1), (4, 2)), (4, (1,), (5,))]
)
def test_unevenly_strided_view_is_refused(offset: int, strides: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(NotBoxes):
        between(StridedView(full((8, 6)), offset, strides), StridedView(full((8, 6)), 0, strides), shape)


def test_stride_map_with_repeated_elements_is_rejected() -> None:
    with pytest.raises(NotBoxes, match="repeats"):
        between(StridedView(StrideGrid((4, 6), (0, 1)), 0, (0, 1)), StridedView(full((4, 6)), 0, (6, 1)), (4, 6))


def test_copy_with_too_many_regions_is_rejected() -> None:
    many = 2 * MAX_BOXES + 2
    with pytest.raises(NotBoxes, match="separate boxes"):
        boxes(between(StridedView(full((many,)), 0, (2,)), StridedView(full((many // 2,)), 0, (1,)), (many // 2,)))


def test_incompatible_reshapes_are_refused() -> None:
    first = StrideMap(source_start=(0, 0), target_start=(0,), digits=((3, 1, 1, 0, 4), (4, 0, 1, 0, 1)))
    then = StrideMap(source_start=(0,), target_start=(0, 0), digits=((4, 0, 3, 1, 1), (3, 0, 1, 0, 1)))
    with pytest.raises(NotBoxes, match="divide"):
        list(chain(first, then))
    assert not list(chain(first, StrideMap(source_start=(20,), target_start=(0,), digits=())))
