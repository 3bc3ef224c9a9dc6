"""Parts of tensors held to their digests: each byte counts, and the one that is wrong is named by its leaf."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.digest.leaf import leaf_digests, num_leaves
from penstock.engine.check import TensorChecker
from penstock.errors import IntegrityError
from penstock.types import DType, Manifest, TensorTable

LEAF_BYTES = 10
SIZES = [25, 0, 10, 3]


@pytest.fixture
def body() -> bytearray:
    return bytearray(np.random.default_rng(1).bytes(sum(SIZES)))


def checker(body: bytearray) -> TensorChecker:
    nbytes = np.array(SIZES, np.int64)
    offset = np.cumsum(nbytes) - nbytes
    table = TensorTable(
        names=("a", "none", "b", "c"),
        dtypes=(DType.U8,) * 4,
        shapes=tuple((size,) for size in SIZES),
        file_index=np.zeros(4, np.int64),
        offset=offset + 100,
        nbytes=nbytes,
    )
    leaves = [np.zeros(count, np.uint64) for count in num_leaves(nbytes, LEAF_BYTES).tolist()]
    for start, size, out in zip(offset.tolist(), SIZES, leaves, strict=True):
        leaf_digests(memoryview(body)[start : start + size], LEAF_BYTES, out)
    found = Manifest(files=(), tensors=table, leaf_bytes=LEAF_BYTES, leaves=np.concatenate(leaves), revision="")
    return TensorChecker(found)


def test_leaves_as_they_were_pass_in_whatever_parts_they_come(body: bytearray) -> None:
    held, view = checker(body), memoryview(body)
    held.check(0, 0, view[:25], uri="f")
    held.check(0, 10, view[10:20], uri="f")
    held.check(0, 20, view[20:25], uri="f")
    held.check(1, 0, view[25:25], uri="f")
    held.check(2, 0, view[25:35], uri="f")
    held.check(3, 0, view[35:], uri="f")


@pytest.mark.parametrize("at", range(sum(SIZES)))
def test_a_flipped_bit_is_found_wherever_it_is(body: bytearray, at: int) -> None:
    held = checker(body)
    body[at] ^= 4
    row, start, name = (0, 0, "a") if at < 25 else (2, 25, "b") if at < 35 else (3, 35, "c")
    with pytest.raises(IntegrityError) as caught:
        held.check(row, 0, memoryview(body)[start : start + SIZES[row]], uri="weights")
    leaf = (at - start) // LEAF_BYTES * LEAF_BYTES
    stop = min(leaf + LEAF_BYTES, SIZES[row])
    error = caught.value
    assert (error.tensor, error.uri, error.byte_range) == (name, "weights", (100 + start + leaf, 100 + start + stop))
    assert error.message.startswith(f"bytes [{leaf}, {stop}) of the tensor differ")
    assert error.blame == "source" and not error.mutated and error.hint


def test_a_part_is_compared_with_its_own_leaves(body: bytearray) -> None:
    with pytest.raises(IntegrityError, match=r"\[10, 20\)"):
        checker(body).check(0, 10, memoryview(body)[:10], uri="f")
