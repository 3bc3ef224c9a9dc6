"""Complaints of readers about sources: their limits for each caller, and their records in the store.

In: a complaint and its caller. Out: an entry that expires by itself.
Not here: who may complain (`directory`), the effect of complaints on the choice of sources (`snapshot`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.errors import SourceBusy
from penstock.hub.auth import Caller, RateLimit
from penstock.hub.messages import FaultReport
from penstock.hub.snapshot import COMPLAINT_DECODER, ComplaintEntry
from penstock.hub.store import Store

# Time after which a holder that could not be read is tried again.
COMPLAINT_TTL_S = 30.0
# Wrong bytes are a fault of memory or of a link, which lasts.
WRONG_BYTES_TTL_S = 600.0
# A holder that does not know a new hub's grants knows them after its next beat.
_REFUSED_TTL_S = 3.0
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 20.0, 2_000
"""Of one caller: 1,000 members of one token that lose the same two holders complain within a second; honest callers
need no higher rate for long. A complaint takes some 300 bytes for up to 600 s: 4 MB of the hub at most for a caller."""
_encode = msgspec.msgpack.encode


class Complaints:
    """The recording of complaints in one store.

    Args:
        store: of the hub.
        counts: its `complaints` are counted up.
        timer: monotonic seconds of this process.

    Order: any thread.
    """

    def __init__(self, store: Store, counts: Counter[str], *, timer: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._counts = counts
        self._rate = RateLimit(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE, clock=timer)

    def record(self, complaint: FaultReport, caller: Caller) -> None:
        """Record a complaint about a holder. SourceBusy: the caller complains too often."""
        if not self._rate.allow(caller.name):
            raise SourceBusy("too many complaints at once", hint="the earlier ones count")
        self._counts["complaints"] += 1
        ttl_s = {"wrong bytes": WRONG_BYTES_TTL_S, "refused": _REFUSED_TTL_S}.get(complaint.fault, COMPLAINT_TTL_S)
        name = f"complaint/{complaint.key}/{complaint.of}~{complaint.member}"
        before = self._store.read(name)
        # Without the proof that a member of an earlier release may send. It may have megabytes.
        noted = ComplaintEntry(msgspec.structs.replace(complaint, proof=None), caller.name)
        # An earlier complaint of wrong bytes must not be replaced by one that expires sooner.
        is_graver = before is not None and COMPLAINT_DECODER.decode(before.value).complaint.fault == "wrong bytes"
        if is_graver and complaint.fault != "wrong bytes":
            return
        self._store.write(name, _encode(noted), ttl_s=ttl_s)
