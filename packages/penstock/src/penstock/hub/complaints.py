"""Complaints of readers about sources: their limits for each caller, and their records in the store."""

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

# After this many seconds a holder that could not be read is tried again.
COMPLAINT_TTL_S = 30.0
# Wrong bytes are a lasting fault in memory or in a link.
WRONG_BYTES_TTL_S = 600.0
# A holder that does not know the grants of a new hub learns about them after its next heartbeat.
_REFUSED_TTL_S = 3.0
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 20.0, 2_000
"""Rate and burst of complaints for one caller. 1,000 members with one token that lose the same two holders complain
within a second. Honest callers need no higher rate for long. A complaint takes about 300 bytes for up to 600 s, so a
caller uses at most 4 MB in the hub."""
_encode = msgspec.msgpack.encode


class Complaints:
    """Records complaints in one store. Any thread may use it.

    Args:
        counts: its entry `complaints` is incremented.
        timer: monotonic seconds in this process.
    """

    def __init__(self, store: Store, counts: Counter[str], *, timer: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._counts = counts
        self._rate = RateLimit(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE, clock=timer)

    def record(self, complaint: FaultReport, caller: Caller) -> None:
        """Record a complaint about a holder. Raise SourceBusy if the caller complains too often."""
        if not self._rate.allow(caller.name):
            raise SourceBusy(
                "too many complaints at once", hint="wait before you send more, because the earlier complaints count"
            )
        self._counts["complaints"] += 1
        ttl_s = {"wrong bytes": WRONG_BYTES_TTL_S, "refused": _REFUSED_TTL_S}.get(complaint.fault, COMPLAINT_TTL_S)
        name = f"complaint/{complaint.key}/{complaint.of}~{complaint.member}"
        before = self._store.read(name)
        # Drop the proof that a member of an earlier release may send, because it may have megabytes.
        noted = ComplaintEntry(msgspec.structs.replace(complaint, proof=None), caller.name)
        # A complaint that expires sooner must not replace an earlier complaint about wrong bytes.
        is_graver = before is not None and COMPLAINT_DECODER.decode(before.value).complaint.fault == "wrong bytes"
        if is_graver and complaint.fault != "wrong bytes":
            return
        self._store.write(name, _encode(noted), ttl_s=ttl_s)
