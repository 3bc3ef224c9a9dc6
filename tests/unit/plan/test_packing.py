"""Short runs are packed at their source, and batches of them have the same bytes in buffers of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.packing import PACK_RUN_BYTES, batches, packable, packed_segments
from penstock.segments import Rectangles
from penstock.types import MIB


def rectangles(*rows: tuple[int, int, int, int, int, int]) -> Rectangles:
    """Return rectangles from rows of src, dst, run_bytes, num_rows, src_pitch and dst_pitch."""
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    names = ("src", "dst", "run_bytes", "num_rows", "src_pitch", "dst_pitch")
    return Rectangles(**dict(zip(names, columns, strict=True)))


@pytest.mark.parametrize(
    ("row", "is_packed"),
    [
        ((0, 0, 256, 1000, 2048, 256), True),
        ((0, 0, PACK_RUN_BYTES, 1000, 1 << 20, PACK_RUN_BYTES), False),  # The run is long enough.
        ((0, 0, 256, 1000, 2048, 512), False),  # Gaps at the reader keep the runs short.
        ((0, 0, 256, 1000, 256, 256), False),  # The rectangle is contiguous at source and reader.
        ((0, 0, 256, 3, 2048, 256), False),  # Three requests become one, but a buffer costs as much.
        ((0, 0, 256, 4, 2048, 256), True),
    ],
)
def test_short_runs_contiguous_at_receiver_are_packed(row, is_packed: bool) -> None:
    assert packable(rectangles(row), MIB).tolist() == [is_packed]
    assert not packable(rectangles(row), 0).any()


def test_scattered_runs_adjacent_at_receiver_are_packed() -> None:
    apart = rectangles(*((4096 * i, 128 * i, 64, 1, 0, 0) for i in range(8)))
    assert not packable(apart, MIB).any()
    together = rectangles(*((4096 * i, 64 * i, 64, 1, 0, 0) for i in reversed(range(8))))
    assert packable(together, MIB).all()


def test_runs_too_long_for_small_buffer_are_not_packed() -> None:
    row = rectangles((0, 0, 2048, 1000, 16384, 2048))
    assert packable(row, 16384).any() and not packable(row, 4096).any()


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 50), st.integers(0, 200)), min_size=1, max_size=12),
    buffer_bytes=st.integers(256, 4000),
    order=st.randoms(use_true_random=False),
)
def test_batches_fit_buffer_and_cover_every_byte(rows, buffer_bytes: int, order) -> None:
    table, src, dst = [], 0, 0
    for run, count, gap in rows:
        table.append((src, dst, run, count, run + gap, run))
        src, dst = src + (run + gap) * count + gap, dst + run * count + gap % 3
    order.shuffle(table)
    memory = np.random.default_rng(0).integers(0, 256, src + 1, np.uint8)
    found, expected = np.zeros(dst + 1, np.uint8), np.zeros(dst + 1, np.uint8)
    taken = rectangles(*table)
    whole = taken.segments()
    for at, to, nbytes in zip(whole.src, whole.dst, whole.nbytes, strict=True):
        expected[to : to + nbytes] = memory[at : at + nbytes]
    for batch in batches(taken, buffer_bytes):
        packed = np.concatenate(
            [
                memory[at + row * pitch :][:run]
                for at, run, count, pitch in zip(
                    batch.src, batch.run_bytes, batch.num_rows, batch.src_pitch, strict=True
                )
                for row in range(count)
            ]
        )
        assert len(packed) == batch.nbytes.sum() <= buffer_bytes
        reads = packed_segments(batch)
        for at, to, nbytes in zip(reads.src, reads.dst, reads.nbytes, strict=True):
            found[to : to + nbytes] = packed[at : at + nbytes]
    assert np.array_equal(found, expected)
