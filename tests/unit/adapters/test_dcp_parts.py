"""Location of the box of a stored tensor in its file."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.types import Box, DType
from penstock_dcp.checkpoint import CheckpointRow
from penstock_dcp.parts import FilePart


@pytest.mark.parametrize("shape", [(6,), (1, 5), (4, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_byte_span_covers_slice(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    numbers = np.arange(size).reshape(shape)
    row = CheckpointRow(name="w", file=0, offset=100, nbytes=4 * size, dtype=DType.F32, shape=shape)
    for bounds in itertools.product(*(itertools.combinations(range(n + 1), 2) for n in shape)):
        start, stop = zip(*bounds, strict=True)
        inside = numbers[tuple(map(slice, start, stop))].reshape(-1)
        offset, nbytes, is_run = FilePart(row=row, box=Box(start=start, stop=stop), items=[], targets=[]).span()
        first, last = int(inside[0]), int(inside[-1]) + 1
        assert (offset, nbytes, is_run) == (100 + 4 * first, 4 * (last - first), last - first == len(inside)), bounds


def test_empty_slice_has_no_bytes() -> None:
    row = CheckpointRow(name="w", file=0, offset=8, nbytes=48, dtype=DType.F32, shape=(4, 3))
    assert FilePart(row=row, box=Box(start=(2, 0), stop=(2, 3)), items=[], targets=[]).span()[1] == 0
