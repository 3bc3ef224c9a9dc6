"""The slabs of a device that are allocated ahead of the others."""

import pytest

from penstock.engine.place import FIRST_BYTES, num_first_slabs

HALF = FIRST_BYTES // 2


@pytest.mark.parametrize(
    ("slab_nbytes", "num_first"),
    [
        ([], 0),
        ([1], 1),
        ([10, 20, 30], 3),
        ([HALF, HALF - 1], 2),
        ([4 * FIRST_BYTES], 1),
        ([4 * FIRST_BYTES, 1], 1),
        ([HALF, FIRST_BYTES, FIRST_BYTES], 2),
        ([1, 0, 0], 3),
    ],
)
def test_first_slabs_reach_the_bytes_or_are_all(slab_nbytes: list[int], num_first: int) -> None:
    assert num_first_slabs(slab_nbytes) == num_first
