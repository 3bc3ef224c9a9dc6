from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan.schedule import ReadPieces, chunk_table, to_ranges
from penstock.types import I64

# Some rows have many chunks, which are cut in one step.
sizes = st.lists(st.integers(0, 70) | st.integers(0, 500), max_size=30)


def _columns(pieces: ReadPieces) -> tuple[I64, I64, I64]:
    return pieces.row, pieces.start, pieces.nbytes


def _bytes(pieces: ReadPieces) -> list[list[tuple[int, int]]]:
    """Return the bytes of each piece, as rows and offsets."""
    columns = zip(*(column.tolist() for column in _columns(pieces)), strict=True)
    return [[(row, byte) for byte in range(start, start + nbytes)] for row, start, nbytes in columns]


@given(sizes, st.integers(1, 9), st.integers(0, 40))
def test_chunks_cover_every_byte_once_within_limits(rows: list[int], leaf: int, more: int) -> None:
    table = chunk_table(np.array(rows, np.int64), leaf_bytes=leaf, chunk_bytes=leaf + more)
    covered = [np.zeros(nbytes, np.int64) for nbytes in rows]
    for chunk in range(table.num_chunks):
        pieces = table.pieces(np.array([chunk]))
        assert 0 < pieces.nbytes.sum() == table.nbytes[chunk] <= leaf + more
        for row, start, nbytes in zip(pieces.row, pieces.start, pieces.nbytes, strict=True):
            covered[row][start : start + nbytes] += 1
            assert start % leaf == 0
    assert all((row == 1).all() for row in covered)


@given(sizes, st.integers(1, 9), st.integers(0, 40), st.randoms())
def test_pieces_cover_exactly_leaves_of_selected_chunks(rows: list[int], leaf: int, more: int, chance) -> None:
    table = chunk_table(np.array(rows, np.int64), leaf_bytes=leaf, chunk_bytes=leaf + more)
    some = [chunk for chunk in range(table.num_chunks) if chance.random() < 0.5]
    chunks = np.array(some, np.int64)
    leaves = [i for chunk in some for i in range(table.first_leaf[chunk], table.first_leaf[chunk + 1])]
    assert np.arange(table.num_leaves)[table.leaves_of(chunks)].tolist() == leaves
    every = [(row, at, min(leaf, size - at)) for row, size in enumerate(rows) for at in range(0, size, leaf)]
    apart = table.leaf_pieces(chunks)
    assert list(zip(*(column.tolist() for column in _columns(apart)), strict=True)) == [every[i] for i in leaves]
    # The pieces have the same bytes in the same order, but neighbours are one piece.
    pieces = table.pieces(chunks)
    assert [byte for piece in _bytes(pieces) for byte in piece] == [byte for piece in _bytes(apart) for byte in piece]
    assert all(a[-1][0] != b[0][0] or a[-1][1] + 1 != b[0][1] for a, b in itertools.pairwise(_bytes(pieces)))


def test_chunk_ends_before_leaf_that_does_not_fit() -> None:
    table = chunk_table(np.array([10, 0, 10, 3], np.int64), leaf_bytes=4, chunk_bytes=12)
    # The leaves are 4 4 2, 4 4 2 and 3, with at most 12 bytes in a chunk.
    assert table.nbytes.tolist() == [10, 10, 3]
    assert table.leaf_pieces(np.arange(3)).row.tolist() == [0, 0, 0, 2, 2, 2, 3]


@given(sizes, st.integers(1, 9), st.integers(0, 40))
def test_chunks_are_filled_greedily_with_leaves(rows: list[int], leaf: int, more: int) -> None:
    """Members that cut a model differently cannot read from each other."""
    table = chunk_table(np.array(rows, np.int64), leaf_bytes=leaf, chunk_bytes=leaf + more)
    first_leaf, filled = [0], 0
    for number, nbytes in enumerate(min(leaf, size - at) for size in rows for at in range(0, size, leaf)):
        if filled + nbytes > leaf + more:
            first_leaf.append(number)
            filled = 0
        filled += nbytes
    assert table.first_leaf.tolist() == first_leaf + [table.num_leaves] * bool(table.num_leaves)


def test_leaf_larger_than_chunk_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot hold leaves"):
        chunk_table(np.array([1], np.int64), leaf_bytes=8, chunk_bytes=4)


@given(st.sets(st.integers(0, 60)))
def test_chunk_byte_ranges_cover_exactly_requested_chunks(chunks: set[int]) -> None:
    ranges = to_ranges(np.array(sorted(chunks), np.int64))
    assert {chunk for start, stop in ranges for chunk in range(start, stop)} == chunks
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@given(sizes, st.integers(1, 9), st.integers(0, 40), st.randoms())
def test_pieces_apart_never_span_two_chunks(rows: list[int], leaf: int, more: int, chance) -> None:
    table = chunk_table(np.array(rows, np.int64), leaf_bytes=leaf, chunk_bytes=leaf + more)
    chunks = np.array([chunk for chunk in range(table.num_chunks) if chance.random() < 0.5], np.int64)
    pieces, owner = table.pieces_apart(chunks)
    found = np.bincount(owner, weights=pieces.nbytes, minlength=len(chunks))
    assert found.tolist() == table.nbytes[chunks].tolist()
    assert pieces.nbytes.sum() == table.pieces(chunks).nbytes.sum()
