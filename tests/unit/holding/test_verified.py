"""Verified chunks keep their digests, the source of each digest, and the order of arrival."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.unit.holding.test_placement import make

from penstock.digest.leaf import revision
from penstock.errors import IntegrityError
from penstock.holding.verified import SpotChecks, VerifiedChunks
from penstock.types import U64


@pytest.fixture
def leaves() -> U64:
    placed = make()
    return placed.digest(np.arange(placed.layout.chunks.num_chunks))


@pytest.fixture
def verified() -> VerifiedChunks:
    return VerifiedChunks(make().layout)


def of(leaves: U64, *chunks: int) -> U64:
    """Return the digests of chunks, which have two leaves each."""
    return leaves.reshape(-1, 2)[list(chunks)].reshape(-1)


def test_log_lists_each_chunk_once(verified: VerifiedChunks, leaves: U64) -> None:
    verified.add(np.array([3]), of(leaves, 3))
    verified.add(np.array([0, 3, 1]), of(leaves, 0, 3, 1))
    chunks, digests = verified.logged_after(0)
    assert chunks.tolist() == [3, 0, 1] and digests.tolist() == of(leaves, 3, 0, 1).tolist()
    assert verified.logged_after(1)[0].tolist() == [0, 1] and verified.num_logged == 3
    assert verified.nbytes == 96 and np.flatnonzero(verified.have).tolist() == [0, 1, 3]


def test_unknown_serial_lists_whole_log(verified: VerifiedChunks, leaves: U64) -> None:
    verified.add(np.array([2]), of(leaves, 2))
    assert verified.logged_after(99)[0].tolist() == [2]


def test_peer_digests_contradicting_manifest_are_rejected(leaves: U64) -> None:
    verified = VerifiedChunks(make().layout, leaves)
    chunks, right = np.array([0, 1]), of(leaves, 0, 1)
    assert verified.contradicting(chunks, right).tolist() == []
    assert verified.contradicting(chunks, right + np.array([0, 0, 1, 0], np.uint64)).tolist() == [1]


def test_conflicting_peer_digests_without_manifest_raise(verified: VerifiedChunks, leaves: U64) -> None:
    chunks, right = np.array([0, 1]), of(leaves, 0, 1)
    verified.record(chunks[1:], right[2:], "member a")
    verified.record(chunks, right, "member b")
    assert verified.contradicting(chunks, right + 1).tolist() == []
    with pytest.raises(IntegrityError, match="member b and member c report different digests for chunk 0"):
        verified.record(chunks, right + np.array([1, 0, 0, 0], np.uint64), "member c")
    with pytest.raises(IntegrityError, match="member a and storage report different digests for chunk 1"):
        verified.record(chunks, right + np.array([0, 0, 0, 1], np.uint64), "storage")


def test_root_is_compared_with_named_revisions(leaves: U64) -> None:
    layout = make().layout
    verified = VerifiedChunks(layout, leaves)
    root = revision(layout.table, 16, leaves)
    verified.check_revision("k", "", "main", root[:12])
    assert verified.root() == verified.known_root == root
    with pytest.raises(IntegrityError, match="not w1-0000"):
        verified.check_revision("k", root, "w1-0000")


def test_spot_checks_visit_all_verified_chunks_in_turn() -> None:
    have, checks, chance = np.zeros(8, bool), SpotChecks(), random.Random(3)
    assert checks.next_chunk(have, chance) is None
    have[[1, 4, 6]] = True
    found = [checks.next_chunk(have, chance) for _ in range(6)]
    assert sorted(found[:3]) == [1, 4, 6] and found[:3] == found[3:]
