"""Sorted ranges and blocks, compared with sets of single bytes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.byte_ranges import ByteBlocks, RangeSet

SIZE = 60
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=12)


@given(RANGES)
def test_range_set_matches_set_of_bytes(ranges: list[tuple[int, int]]) -> None:
    found, wanted = RangeSet(), set[int]()
    for start, stop in ranges:
        found.add(start, stop)
        wanted.update(range(start, stop))
    for at in range(SIZE + 14):
        end = at
        while end in wanted:
            end += 1
        assert found.end_of(at) == end
        heads = [byte for byte in sorted(wanted) if byte > at and byte - 1 not in wanted]
        assert found.next_start(at) == (heads[0] if heads else None)


@dataclass(eq=False)
class Piece:
    start: int
    stop: int


@given(RANGES)
def test_byte_block_lookup_matches_list_search(ranges: list[tuple[int, int]]) -> None:
    blocks, pieces = ByteBlocks[Piece](), list[Piece]()
    for start, stop in ranges:
        if all(stop <= piece.start or piece.stop <= start for piece in pieces):
            pieces.append(Piece(start, stop))
            blocks.add(pieces[-1])
    for piece in pieces[::2]:
        assert piece in blocks
        blocks.remove(piece)
        assert piece not in blocks
    kept = sorted(pieces[1::2], key=lambda piece: piece.start)
    assert list(blocks) == kept
    assert blocks.nbytes == sum(piece.stop - piece.start for piece in kept)
    for at in range(SIZE + 14):
        assert blocks.block_at(at) is next((piece for piece in kept if piece.start <= at < piece.stop), None)
        assert blocks.next_start(at) == next((piece.start for piece in kept if piece.start > at), None)
        assert blocks.within(at, at + 5) == [piece for piece in kept if piece.start < at + 5 and piece.stop > at]
