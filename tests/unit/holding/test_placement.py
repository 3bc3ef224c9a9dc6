"""Rows and chunks are found, digested and read at their places in real memory."""

from __future__ import annotations

import numpy as np
import torch

from penstock.holding.placement import PlacedChunks, place_rows
from penstock.holding.weight_layout import WeightLayout, tabulate
from penstock.memory.arena import Arena
from penstock.types import DType


def make(count: int = 5) -> PlacedChunks:
    """Return chunks of `count` tensors of 64 bytes, with leaves of 16 bytes and chunks of 32 bytes."""
    table = tabulate([f"t{i}" for i in range(count)], [DType.U8] * count, [(64,)] * count)
    rows = [torch.full((64,), i, dtype=torch.uint8) for i in range(count)]
    return PlacedChunks(WeightLayout.of(table, leaf_bytes=16, chunk_bytes=32), rows)


def test_flipped_bit_changes_only_digest_of_its_chunk() -> None:
    placed = make()
    chunks = np.arange(placed.layout.chunks.num_chunks)
    before = placed.digest(chunks)
    assert placed.layout.chunks.differing(chunks, placed.digest(chunks), before).tolist() == []
    placed.rows[2][40] ^= 1
    assert placed.layout.chunks.differing(chunks, placed.digest(chunks), before).tolist() == [5]


def test_chunks_name_their_regions() -> None:
    placed = make()
    assert placed.regions_of(np.array([5])) == {2} and placed.regions_of(np.array([0, 1, 9])) == {0, 4}


def test_tensors_in_arena_form_one_region() -> None:
    arena = Arena.allocate(4096)
    inside = [arena.bytes_at(offset, 100) for offset in arena.place([100, 100])]
    alone, empty = torch.zeros(8, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)
    place = place_rows([*inside, alone, empty], [arena])
    assert place.row_region.tolist() == [0, 0, 1, -1] and place.row_offset.tolist() == [0, 512, 0, 0]
    assert place.row_address.tolist() == [arena.address, arena.address + 512, alone.data_ptr(), 0]
    assert [region.nbytes for region in place.regions] == [4096, 8] and place.regions[0].owner is arena


def test_each_arena_and_storage_forms_a_region() -> None:
    arenas = [Arena.allocate(1024) for _ in range(3)]
    shared = torch.zeros(32, dtype=torch.uint8)
    rows = [shared[16:], arenas[1].bytes_at(512, 10), arenas[0].bytes_at(0, 1024), shared[:8], arenas[1].bytes_at(0, 1)]
    place = place_rows(rows, arenas)
    regions = [place.regions[number] for number in place.row_region.tolist()]
    assert [region.address for region in regions] == [
        shared.data_ptr(),
        arenas[1].address,
        arenas[0].address,
        shared.data_ptr(),
        arenas[1].address,
    ]
    assert place.row_offset.tolist() == [16, 512, 0, 0, 0] and len(place.regions) == 3
    assert place.row_address.tolist() == [row.data_ptr() for row in rows]
    assert [region.nbytes for region in place.regions] == [1024, 1024, 32]


def test_chunk_reads_never_overwrite_neighbouring_chunks() -> None:
    """The bytes between two reads may belong to a chunk that the peer has not verified."""
    nbytes = [1100, 1024]
    arena = Arena.allocate(4096)
    rows = [arena.bytes_at(at, n) for at, n in zip(arena.place(nbytes), nbytes, strict=True)]
    table = tabulate(["a", "b"], [DType.U8] * 2, [(n,) for n in nbytes])
    layout = WeightLayout.of(table, leaf_bytes=1024, chunk_bytes=1024)
    assert layout.chunks.nbytes.tolist() == [1024, 76, 1024]
    placed = PlacedChunks(layout, rows, [arena])
    found = placed.segments(np.array([0, 2]), placed.place.row_region, placed.place.row_offset)[0, 0]
    assert found.dst.tolist() == [0, 1536] and found.nbytes.tolist() == [1024, 1024]
