"""Digests of a copy that are computed from its source."""

import numpy as np
import pytest

from penstock.digest.strip import Strips, strip_digests
from penstock.holding.digester import Digester, PrecomputedDigests
from penstock.transport.protocol import Memory


def of(array: np.ndarray) -> Memory:
    return Memory(address=array.ctypes.data, nbytes=array.nbytes, owner=array)


def strips(at: int) -> Strips:
    return Strips(
        at=np.array([at, 5000]), run_bytes=np.array([700, 40]), num_rows=np.array([1, 9]), pitch=np.array([700, 90])
    )


@pytest.fixture
def memories() -> tuple[np.ndarray, np.ndarray]:
    live = np.random.default_rng(5).integers(0, 256, 10_000, np.uint8)
    return live, live.copy()


def test_requested_digests_are_precomputed_for_next_version(memories) -> None:
    live, copy = memories
    digests, first, other = PrecomputedDigests(of(live), Digester("cpu")), strips(0), strips(100)
    assert (digests.digests(of(copy), first) == strip_digests(copy, first)).all()
    live += 1
    digests.look(5.0)  # the copy still has the previous bytes, so the digests differ
    assert (digests.digests(of(copy), first) == strip_digests(live, first)).all()
    assert (
        digests.digests(of(copy), other) == [*strip_digests(copy, other)[:1], *strip_digests(live, first)[1:]]
    ).all()


def test_unrequested_digests_are_no_longer_computed(memories) -> None:
    live, copy = memories
    digests, asked = PrecomputedDigests(of(live), Digester("cpu")), strips(0)
    digests.digests(of(copy), asked)
    for _ in range(2):
        digests.look(5.0)
    live += 1
    assert (digests.digests(of(copy), asked) == strip_digests(copy, asked)).all()
