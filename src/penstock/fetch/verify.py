"""Chunks whose bytes arrived: digested together, compared, and from then on the holding's.

In: arrivals, from upstreams and from storage. Out: the chunks of each that are wrong; the others are gained.
Not here: reading them (`steps`), what becomes of wrong ones (`run`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.fetch.upstream import UpstreamReader
from penstock.peer.local_weights import LocalWeights
from penstock.types import I64, U64

MAX_CHUNKS = 128
"""Chunks digested at once: 2 GiB, a millisecond of a device, 0.2 s of a processor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReceivedChunks:
    """Chunks in place, not yet verified."""

    chunks: I64
    wanted: U64 | None
    """Their digests as the giver says; None: from storage."""
    path: str
    giver: UpstreamReader | None


def next_batch(arrived: deque[ReceivedChunks], num_takers: int) -> list[ReceivedChunks]:
    """A taker's share of what waits, the first first; one at least, if there is one."""
    share, batch, count = -(-len(arrived) // num_takers), list[ReceivedChunks](), 0
    while arrived and len(batch) < share and (not batch or count + len(arrived[0].chunks) <= MAX_CHUNKS):
        batch.append(arrived.popleft())
        count += len(batch[-1].chunks)
    return batch


def verify(weights: LocalWeights, batch: Sequence[ReceivedChunks]) -> list[tuple[ReceivedChunks, I64]]:
    """Digest all and compare; arrivals without a wrong chunk are gained. Each with its wrong chunks.

    Raises:
        IntegrityError: storage and a member say different digests.
    """
    table = weights.layout.chunks
    chunks = np.concatenate([one.chunks for one in batch])
    digests, at, found = weights.digest(chunks), 0, []
    for one in batch:
        stop = at + int((table.first_leaf[one.chunks + 1] - table.first_leaf[one.chunks]).sum())
        mine, wanted, at = digests[at:stop], one.wanted, stop
        if wanted is None and weights.has_manifest:
            wanted = weights.leaves[table.leaves_of(one.chunks)]
        wrong = weights.differing_chunks(one.chunks, mine, wanted) if wanted is not None else one.chunks[:0]
        if wanted is None:
            weights.record_digests(one.chunks, mine, "storage, as it was read here")
        found.append((one, mine, wrong))
    good = [(one.chunks, mine) for one, mine, wrong in found if not len(wrong)]
    if good:
        weights.mark_verified(*(np.concatenate(column) for column in zip(*good, strict=True)))
    return [(one, wrong) for one, _, wrong in found]
