"""Chunks whose bytes arrived: digested together, compared, and from then on the holding's.

In: arrivals, from upstreams and from storage. Out: the chunks of each that are wrong; the others are gained.
Not here: reading them (`steps`), what becomes of wrong ones (`run`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.fetch.upstream import Following
from penstock.peer.local_weights import Holding
from penstock.types import I64, U64

MAX_CHUNKS = 128
"""Chunks digested at once: 2 GiB, a millisecond of a device, 0.2 s of a processor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Arrival:
    """Chunks in place, not yet verified."""

    chunks: I64
    wanted: U64 | None
    """Their digests as the giver says; None: from storage."""
    path: str
    giver: Following | None


def take(arrived: deque[Arrival], num_takers: int) -> list[Arrival]:
    """A taker's share of what waits, the first first; one at least, if there is one."""
    share, batch, count = -(-len(arrived) // num_takers), list[Arrival](), 0
    while arrived and len(batch) < share and (not batch or count + len(arrived[0].chunks) <= MAX_CHUNKS):
        batch.append(arrived.popleft())
        count += len(batch[-1].chunks)
    return batch


def verify(holding: Holding, batch: Sequence[Arrival]) -> list[tuple[Arrival, I64]]:
    """Digest all and compare; arrivals without a wrong chunk are gained. Each with its wrong chunks.

    Raises:
        IntegrityError: storage and a member say different digests.
    """
    table = holding.line.chunks
    chunks = np.concatenate([one.chunks for one in batch])
    digests, at, found = holding.digest(chunks), 0, []
    for one in batch:
        stop = at + int((table.first_leaf[one.chunks + 1] - table.first_leaf[one.chunks]).sum())
        mine, wanted, at = digests[at:stop], one.wanted, stop
        if wanted is None and holding.has_manifest:
            wanted = holding.leaves[table.leaves_of(one.chunks)]
        wrong = holding.differing(one.chunks, mine, wanted) if wanted is not None else one.chunks[:0]
        if wanted is None:
            holding.hear(one.chunks, mine, "storage, as it was read here")
        found.append((one, mine, wrong))
    good = [(one.chunks, mine) for one, mine, wrong in found if not len(wrong)]
    if good:
        holding.gain(*(np.concatenate(column) for column in zip(*good, strict=True)))
    return [(one, wrong) for one, _, wrong in found]
