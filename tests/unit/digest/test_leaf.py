"""Leaf digests match the xxhash library, and revisions name weights independent of their packing."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.digest import leaf
from penstock.types import DType, TensorTable


def table_of(*rows: tuple[str, DType, tuple[int, ...], int]) -> TensorTable:
    """Return a table with rows of (name, dtype, shape, nbytes)."""
    return TensorTable(
        names=tuple(row[0] for row in rows),
        dtypes=tuple(row[1] for row in rows),
        shapes=tuple(row[2] for row in rows),
        file_index=np.zeros(len(rows), np.int64),
        offset=np.zeros(len(rows), np.int64),
        nbytes=np.array([row[3] for row in rows], np.int64),
    )


def leaves_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 32, 240, 241, 1000])
def test_each_leaf_digest_matches_xxh3(nbytes: int) -> None:
    data = bytes(i * 7 % 256 for i in range(nbytes))
    count = int(leaf.num_leaves(np.array([nbytes]), 16)[0])
    out = np.zeros(count, np.uint64)
    leaf.leaf_digests(memoryview(data), 16, out)
    assert out.tolist() == [xxhash.xxh3_64_intdigest(data[i : i + 16], seed=0) for i in range(0, nbytes, 16)]


def test_digests_of_empty_and_zero_bytes_match_constants() -> None:
    # The first is the published test value of XXH3-64. The second must not change with an upgrade.
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2
    out = np.zeros(1, np.uint64)
    leaf.leaf_digests(memoryview(bytes(leaf.LEAF_BYTES)), leaf.LEAF_BYTES, out)
    assert out.tolist() == [0x2D64C035E85FB928]


def test_number_of_leaves_is_rounded_up() -> None:
    assert leaf.num_leaves(np.array([0, 1, 16, 17, 2**62], np.int64), 16).tolist() == [0, 1, 1, 2, 2**58]


@given(st.lists(st.integers(0, 4), max_size=8), st.randoms(use_true_random=False))
def test_leaf_digests_are_selected_by_row(counts: list[int], random: object) -> None:
    rows = list(range(len(counts)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    values = np.arange(sum(counts), dtype=np.uint64)
    groups = np.split(values, np.cumsum(counts)[:-1]) if counts else []
    expected = [value for row in rows for value in groups[row].tolist()]
    taken = leaf.take_leaves(values, np.array(counts, np.int64), np.array(rows, np.int64))
    assert taken.tolist() == expected


BASE = table_of(("a", DType.U8, (20,), 20), ("b", DType.F32, (2, 2), 16), ("é", DType.BF16, (), 2))
LEAVES = leaves_of(1, 2, 3, 4)


def test_revision_matches_recorded_constant() -> None:
    """Manifests contain such revisions, so they may never change."""
    assert leaf.revision(BASE, 16, LEAVES) == "w1-a254ff568c4525c5323503838106eec3d00573682c10d51668c1e3a499723485"


def test_revision_ignores_tensor_order_and_offsets() -> None:
    moved = replace(BASE.take([2, 0, 1]), offset=np.array([9, 8, 7]), file_index=np.array([2, 1, 0]))
    assert leaf.revision(moved, 16, leaves_of(4, 1, 2, 3)) == leaf.revision(BASE, 16, LEAVES)


OTHERS = {
    "name": (replace(BASE, names=("a", "c", "é")), 16, LEAVES),
    "names cut elsewhere": (replace(BASE, names=("aé", "b", "")), 16, LEAVES),
    "dtype": (replace(BASE, dtypes=(DType.I8, DType.F32, DType.BF16)), 16, LEAVES),
    "shape": (replace(BASE, shapes=((4, 5), (2, 2), ())), 16, LEAVES),
    "dims cut elsewhere": (replace(BASE, shapes=((20, 2), (2,), ())), 16, LEAVES),
    "leaf": (BASE, 16, leaves_of(1, 2, 3, 5)),
    "leaves in another order": (BASE, 16, leaves_of(2, 1, 3, 4)),
    "leaf size": (BASE, 17, LEAVES),
    "fewer rows": (BASE.take([0, 1]), 16, leaves_of(1, 2, 3)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_changing_any_input_changes_revision(other: str) -> None:
    table, leaf_bytes, leaves = OTHERS[other]
    assert leaf.revision(table, leaf_bytes, leaves) != leaf.revision(BASE, 16, LEAVES)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_revision_of_small_table_has_version_prefix(num_rows: int) -> None:
    table = BASE.take(range(num_rows))
    assert leaf.revision(table, 16, LEAVES[: 2 * num_rows]).startswith("w1-")


def test_revision_of_headers_ignores_their_order() -> None:
    assert leaf.headers_revision([b"1", b"2"]) == leaf.headers_revision([b"2", b"1"])
    assert leaf.headers_revision([b"1", b"2"]) != leaf.headers_revision([b"1"])
    assert leaf.headers_revision([]).startswith("h1-")
