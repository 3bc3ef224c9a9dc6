"""Verifies received chunks: digests a batch, compares the digests, and marks correct chunks as verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.fetcher.upstream import UpstreamReader
from penstock.peer.local_weights import LocalWeights
from penstock.types import I64, U64

MAX_CHUNKS = 128
"""Maximum number of chunks in a batch (2 GiB). Computing its digests takes a device 1 ms and a CPU core 0.2 s."""


class ReceivedChunks(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Chunks whose bytes are in place and not yet verified."""

    chunks: I64
    wanted: U64 | None
    """The chunks' digests as stated by the upstream. None means that the chunks were read from storage."""
    path: str
    upstream_reader: UpstreamReader | None


def next_batch(waiting: deque[ReceivedChunks], num_threads: int) -> list[ReceivedChunks]:
    """Remove and return one thread's share of the waiting chunks, oldest first. Return at least one waiting entry."""
    share, batch, count = -(-len(waiting) // num_threads), list[ReceivedChunks](), 0
    while waiting and len(batch) < share and (not batch or count + len(waiting[0].chunks) <= MAX_CHUNKS):
        batch.append(waiting.popleft())
        count += len(batch[-1].chunks)
    return batch


def verify(weights: LocalWeights, batch: Sequence[ReceivedChunks]) -> list[tuple[ReceivedChunks, I64]]:
    """Digest a batch and compare the digests. Mark entries without a wrong chunk as verified.

    Returns each entry with its wrong chunks. Raises IntegrityError if storage and a member state different digests.
    """
    table = weights.layout.chunks
    chunks = np.concatenate([entry.chunks for entry in batch])
    # Make one call for the batch, because on a device each call is a kernel launch and a wait.
    digests, at, compared = weights.memory.digest(chunks), 0, []
    for entry in batch:
        stop = at + int(table.leaf_counts(entry.chunks).sum())
        mine, wanted, at = digests[at:stop], entry.wanted, stop
        if wanted is None and weights.verified.has_manifest:
            wanted = weights.verified.leaves[table.leaves_of(entry.chunks)]
        wrong = table.differing(entry.chunks, mine, wanted) if wanted is not None else entry.chunks[:0]
        if wanted is None:
            weights.record_digests(entry.chunks, mine, "storage, as it was read here")
        compared.append((entry, mine, wrong))
    # Drop the whole entry if a chunk is wrong, because its source is no longer trusted.
    good = [(entry.chunks, mine) for entry, mine, wrong in compared if not len(wrong)]
    if good:
        weights.mark_verified(*(np.concatenate(column) for column in zip(*good, strict=True)))
    return [(entry, wrong) for entry, _, wrong in compared]
