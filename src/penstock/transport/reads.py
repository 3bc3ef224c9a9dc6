"""Reads posted together, by whatever transports, and waited for: at the end none of them is under way any more.

In: reads as they are posted. Out: what failed first, and whether a byte of our memory may have been written.
Not here: which reads, and what becomes of a source that failed (`fetch.run`, `sync.receive.source_read`).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import DestinationError, PenstockError, SourceStalled
from penstock.transport.protocol import Pending, Transport

CANNOT_RECALL = frozenset({"cuda_ipc", "pinned_shm"})
"""Transports whose copies, once a device has them, cannot be called back: after a stall what they still write would be
written over bytes that were read again and verified, so it is the end of whoever reads."""

LATE_S = 1.0
"""Patience with what is left where a read failed, since all of it is read again: a hundred reads of a peer that fell
silent end after `stall_s`, and so much for each, not after a hundred times that."""


def wait_all(posting: Iterable[tuple[Transport, Pending]], *, stall_s: float) -> tuple[PenstockError | None, bool]:
    """Wait for all that is posted, well or not: what is read again must not be written over.

    Args:
        posting: posts a read per iteration; an error ends the posting, and the earlier reads are waited for.
        stall_s: see `Transport.wait`; less once one failed.

    Returns:
        The first failure, but a DestinationError before others: bytes may still arrive. And whether any was written.
    """
    posted: list[tuple[Transport, Pending]] = []
    failed: PenstockError | None = None
    is_touched = False
    try:
        for read in posting:
            posted.append(read)  # one by one: those before one that fails are waited for
    except PenstockError as error:
        failed, is_touched = error, error.mutated
    for transport, pending in posted:
        is_patient = failed is None or (transport.name in CANNOT_RECALL and not isinstance(failed, DestinationError))
        try:
            transport.wait(pending, stall_s=stall_s if is_patient else min(stall_s, LATE_S))
        except PenstockError as error:
            met: PenstockError = error
            if isinstance(error, SourceStalled) and transport.name in CANNOT_RECALL:
                met = DestinationError(f"{error.message}, and may still arrive", mutated=True)
            is_touched |= met.mutated
            if failed is None or (isinstance(met, DestinationError) and not isinstance(failed, DestinationError)):
                failed = met
        is_touched |= pending.moved_bytes > 0
    return failed, is_touched
