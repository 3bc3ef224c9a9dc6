from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, IntegrityError
from penstock.holding.placement import place_rows
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import Identity
from penstock.memory.arena import Arena
from penstock.peer.local_weights import LocalWeights
from penstock.types import DType


def make(count: int = 5) -> LocalWeights:
    """Return weights with `count` tensors of 64 bytes, leaves of 16 bytes and chunks of 32 bytes."""
    tensors = {f"t{i}": torch.full((64,), i, dtype=torch.uint8) for i in range(count)}
    _, rows = layout_of_tensors(tensors)
    table = tabulate(sorted(tensors), [DType.U8] * count, [(64,)] * count)
    return LocalWeights(Identity(model="m"), WeightLayout.of(table, leaf_bytes=16, chunk_bytes=32), rows)


def mark_verified(holding: LocalWeights, *chunks: int) -> None:
    at = np.array(chunks, np.int64)
    holding.mark_verified(at, holding.digest(at))


def test_chunk_log_lists_chunks_in_order_of_arrival() -> None:
    holding = make()
    mark_verified(holding, 3)
    mark_verified(holding, 0, 1)
    reply = holding.log_after(0, 0.0)
    assert np.frombuffer(reply.chunks, "<u4").tolist() == [3, 0, 1] and reply.serial == 3
    assert np.frombuffer(reply.leaves, "<u8").tolist() == holding.digest(np.array([3, 0, 1])).tolist()
    assert holding.log_after(3, 0.0).chunks == b""
    assert holding.log_after(99, 0.0).serial == 3


def test_chunk_verified_twice_is_logged_once() -> None:
    holding = make()
    mark_verified(holding, 1)
    mark_verified(holding, 1, 2)
    assert np.frombuffer(holding.log_after(0, 0.0).chunks, "<u4").tolist() == [1, 2]


def test_new_chunk_wakes_waiting_log_reader() -> None:
    holding = make()
    threading.Timer(0.05, mark_verified, (holding, 0)).start()
    begun = time.monotonic()
    assert holding.log_after(0, 30.0).serial == 1
    assert time.monotonic() - begun < 10


def test_flipped_bit_changes_only_digest_of_its_chunk() -> None:
    holding = make()
    chunks = np.arange(holding.layout.chunks.num_chunks)
    before = holding.digest(chunks)
    holding.rows[2][40] ^= 1
    assert holding.differing_chunks(chunks, holding.digest(chunks), before).tolist() == [5]


def test_peer_digests_contradicting_manifest_are_rejected() -> None:
    draft = make()
    chunks = np.array([0, 1])
    leaves = draft.digest(np.arange(draft.layout.chunks.num_chunks))
    weights = LocalWeights(draft.identity, draft.layout, draft.rows, leaves=leaves)
    right = leaves[weights.layout.chunks.leaves_of(chunks)]
    assert weights.contradicting_chunks(chunks, right).tolist() == []
    assert weights.contradicting_chunks(chunks, right + np.array([0, 0, 1, 0], np.uint64)).tolist() == [1]


def test_conflicting_peer_digests_without_manifest_raise() -> None:
    holding = make()
    chunks = np.array([0, 1])
    leaves = holding.digest(chunks)
    holding.record_digests(chunks[1:], leaves[2:], "member a")
    holding.record_digests(chunks, leaves, "member b")
    assert holding.contradicting_chunks(chunks, leaves + 1).tolist() == []
    with pytest.raises(IntegrityError, match="member b and member c report different digests for chunk 0"):
        holding.record_digests(chunks, leaves + np.array([1, 0, 0, 0], np.uint64), "member c")
    with pytest.raises(IntegrityError, match="member a and storage report different digests for chunk 1"):
        holding.record_digests(chunks, leaves + np.array([0, 0, 0, 1], np.uint64), "storage")


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


def test_weights_status_lists_verified_ranges() -> None:
    holding = make()
    mark_verified(holding, 0, 1, 4)
    state = holding.status()
    assert state.have == ((0, 2), (4, 5)) and state.key == holding.identity.key()
    assert state.nbytes == 320 and state.num_chunks == 10


def test_spot_check_detects_changed_bytes() -> None:
    holding = make()
    chance = random.Random(1)
    assert holding.spot_check(chance) is None
    mark_verified(holding, 0, 1, 2)
    assert all(holding.spot_check(chance) is None for _ in range(10))
    holding.rows[0][5] ^= 1
    assert {holding.spot_check(chance) for _ in range(40)} == {None, 0}


def test_chunk_reads_never_overwrite_neighbouring_chunks() -> None:
    """The bytes between two reads may belong to a chunk that the peer has not verified."""
    nbytes = [1100, 1024]
    arena = Arena.allocate(4096)
    rows = [arena.bytes_at(at, n) for at, n in zip(arena.place(nbytes), nbytes, strict=True)]
    table = tabulate(["a", "b"], [DType.U8] * 2, [(n,) for n in nbytes])
    layout = WeightLayout.of(table, leaf_bytes=1024, chunk_bytes=1024)
    assert layout.chunks.nbytes.tolist() == [1024, 76, 1024]
    holding = LocalWeights(Identity(model="m"), layout, rows, arenas=[arena])
    found = holding.segments(np.array([0, 2]), holding.place.row_region, holding.place.row_offset)[0, 0]
    assert found.dst.tolist() == [0, 1536] and found.nbytes.tolist() == [1024, 1024]


def test_failed_registration_rolls_back_all_regions() -> None:
    """Leaked registrations would occupy the page until the process exits."""
    registered: list[str] = []
    closed: list[str] = []

    class FakeHandle:
        def __init__(self, name: str) -> None:
            self.name = name
            registered.append(name)

        def close(self) -> None:
            closed.append(self.name)

    class TwoRegistrations:
        def register(self, memory: object) -> dict[str, FakeHandle]:
            if len(registered) == 2:
                raise ConfigError("the page is full")
            return {"shm": FakeHandle(f"h{len(registered)}")}

    holding = make(3)
    with pytest.raises(ConfigError):
        holding.register(TwoRegistrations())
    assert closed == registered == ["h0", "h1"] and not holding.map().regions
