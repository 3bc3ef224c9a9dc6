"""Rectangles as segments, and checks of hostile rectangles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.segments import Rectangles

NAMES = ("src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch")


def rectangles(*rows: tuple[int, ...]) -> Rectangles:
    return Rectangles(**dict(zip(NAMES, np.array(rows, np.int64).reshape(-1, 6).T, strict=True)))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(1, 9),
            st.integers(1, 6),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=5,
    )
)
def test_segments_match_rectangle_rows(given: list[tuple[int, ...]]) -> None:
    rows = [(src, dst, run, num, run + more, run + gap) for src, dst, run, num, more, gap in given]
    made = rectangles(*rows)
    bytes_of = {
        (src + i * src_pitch + k, dst + i * dst_pitch + k)
        for src, dst, run, num, src_pitch, dst_pitch in rows
        for i in range(num)
        for k in range(run)
    }
    runs = made.segments()
    columns = zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True)
    assert {(src + k, dst + k) for src, dst, nbytes in columns for k in range(nbytes)} == bytes_of
    assert int(runs.nbytes.sum()) == int(made.nbytes.sum())
    src_nbytes = max((src for src, _ in bytes_of), default=0) + 1
    dst_nbytes = max((dst for _, dst in bytes_of), default=0) + 1
    made.check(src_nbytes=src_nbytes, dst_nbytes=dst_nbytes)
    if rows:
        with pytest.raises(PlanError):
            made.check(src_nbytes=src_nbytes - 1, dst_nbytes=dst_nbytes)
        with pytest.raises(PlanError):
            made.check(src_nbytes=src_nbytes, dst_nbytes=dst_nbytes - 1)


@pytest.mark.parametrize(
    "row",
    [
        (-1, 0, 1, 1, 0, 0),
        (0, 0, 0, 1, 0, 0),
        (0, 0, 1, 0, 0, 0),
        (0, 0, 1, 2, -1, 1),
        (0, 0, 1, 1 << 62, 1 << 62, 1),
        (1 << 62, 0, 1 << 62, 1, 0, 0),
    ],
)
def test_hostile_rectangle_numbers_are_rejected(row: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="rectangle 1"):
        rectangles((0, 0, 4, 1, 4, 4), row).check(src_nbytes=100, dst_nbytes=100)
