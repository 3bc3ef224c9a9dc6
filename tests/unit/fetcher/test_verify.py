"""Received chunks are digested in batches. A wrong chunk does not delay the others."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from penstock.errors import IntegrityError
from penstock.fetcher import verify as arrival
from penstock.fetcher.verify import ReceivedChunks, next_batch, verify
from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import Identity
from penstock.peer.local_weights import LocalWeights
from penstock.types import U64, DType


def make(*, has_manifest: bool = False) -> LocalWeights:
    """Return weights with four tensors of two chunks each. Their bytes are in place and not verified."""
    tensors = {f"t{i}": torch.full((64,), i, dtype=torch.uint8) for i in range(4)}
    _, rows = layout_of_tensors(tensors)
    line = WeightLayout.of(tabulate(sorted(tensors), [DType.U8] * 4, [(64,)] * 4), leaf_bytes=16, chunk_bytes=32)
    leaves = LocalWeights(Identity(model="m"), line, rows).memory.digest(np.arange(8)) if has_manifest else None
    return LocalWeights(Identity(model="m"), line, rows, leaves=leaves)


def arrived(*chunks: int, wanted: U64 | None = None) -> ReceivedChunks:
    return ReceivedChunks(chunks=np.array(chunks), wanted=wanted, path="a path", upstream_reader=None)


def test_waiting_chunks_are_divided_among_verify_threads(monkeypatch) -> None:
    waiting = deque(arrived(i) for i in range(5))
    first = next_batch(waiting, 2)
    assert [int(one.chunks[0]) for one in first] == [0, 1, 2]
    assert [int(one.chunks[0]) for one in next_batch(waiting, 2)] == [3]
    assert len(next_batch(waiting, 2)) == 1
    assert next_batch(waiting, 2) == []
    monkeypatch.setattr(arrival, "MAX_CHUNKS", 3)
    waiting.extend([arrived(0, 1, 2, 3), arrived(4, 5), arrived(6), arrived(7)])
    assert len(next_batch(waiting, 1)) == 1  # The batch is too large, but a thread must verify it.
    assert len(next_batch(waiting, 1)) == 2


def test_wrong_chunks_are_reported_and_correct_chunks_accepted() -> None:
    holding = make()
    right = holding.memory.digest(np.array([0, 3]))
    other = holding.memory.digest(np.array([5, 6]))
    other[-1] ^= np.uint64(1)
    found = verify(holding, [arrived(0, 3, wanted=right), arrived(5, 6, wanted=other), arrived(7)])
    assert [wrong.tolist() for _, wrong in found] == [[], [6], []]
    assert np.flatnonzero(holding.verified.have).tolist() == [0, 3, 7]
    assert np.frombuffer(holding.log_after(0, 0.0).chunks, "<u4").tolist() == [0, 3, 7]


def test_storage_bytes_contradicting_manifest_are_rejected() -> None:
    holding = make(has_manifest=True)
    holding.memory.rows[2][40] += 1  # The second chunk of t2.
    found = verify(holding, [arrived(4, 5), arrived(0, 1)])
    assert [wrong.tolist() for _, wrong in found] == [[5], []]
    assert np.flatnonzero(holding.verified.have).tolist() == [0, 1]


def test_storage_contradicting_member_raises_integrity_error() -> None:
    holding = make()
    said = holding.memory.digest(np.array([2]))
    said[0] ^= np.uint64(1)
    holding.record_digests(np.array([2]), said, "member x")
    with pytest.raises(IntegrityError, match="different digests"):
        verify(holding, [arrived(0), arrived(2)])
    assert not holding.verified.have.any()
