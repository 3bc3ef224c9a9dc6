"""Complaints of readers about sources: their limits for each caller, their proofs, and their records in the store.

In: a complaint, the holder that it is about, its caller. Out: an entry that expires by itself.
Not here: who may complain (`directory`), the effect of complaints on the choice of sources (`snapshot`), checking a
proof (`proof`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.errors import SourceBusy
from penstock.hub.auth import Caller, RateLimit
from penstock.hub.messages import FaultReport
from penstock.hub.proof import proof_fault
from penstock.hub.snapshot import COMPLAINT_DECODER, ComplaintEntry, HoldingEntry
from penstock.hub.store import Store
from penstock.logs import log_named

# Time after which a holder that could not be read is tried again.
COMPLAINT_TTL_S = 30.0
# Wrong bytes are a fault of memory or of a link, which lasts.
WRONG_BYTES_TTL_S = 600.0
# A holder that does not know a new hub's grants knows them after its next beat.
_REFUSED_TTL_S = 3.0
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 20.0, 2_000
"""Of one caller: 1,000 members of one token that lose the same two holders complain within a second; honest callers
need no higher rate for long. A complaint takes some 300 bytes for up to 600 s: 4 MB of the hub at most for a caller."""
PROOFS_PER_S, PROOFS_AT_ONCE = 1.0, 10
"""Of one caller: the largest takes a hub some 20 ms. The first valid proof is enough for all readers."""
_encode = msgspec.msgpack.encode
audit = log_named("penstock.audit")


class Complaints:
    """The recording of complaints in one store.

    Args:
        store: of the hub.
        counts: its `complaints` and `proofs` are counted up.
        timer: monotonic seconds of this process.

    Order: any thread.
    """

    def __init__(self, store: Store, counts: Counter[str], *, timer: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._counts = counts
        self._rate = RateLimit(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE, clock=timer)
        self._proof_rate = RateLimit(PROOFS_PER_S, PROOFS_AT_ONCE, clock=timer)

    def record(self, complaint: FaultReport, holder: HoldingEntry, caller: Caller) -> None:
        """Record a complaint about a holder. SourceBusy: the caller complains too often."""
        if not self._rate.allow(caller.name):
            raise SourceBusy("too many complaints at once", hint="the earlier ones count")
        self._counts["complaints"] += 1
        ttl_s = {"wrong bytes": WRONG_BYTES_TTL_S, "refused": _REFUSED_TTL_S}.get(complaint.fault, COMPLAINT_TTL_S)
        name = f"complaint/{complaint.key}/{complaint.of}~{complaint.member}"
        before = self._store.read(name)
        # The proof itself is not stored: it may have megabytes, and is of no use once it was checked.
        is_proven = self._is_proven(complaint, holder, caller)
        noted = ComplaintEntry(msgspec.structs.replace(complaint, proof=None), caller.name, is_proven)
        # An earlier complaint that is graver must not be replaced by one that expires sooner.
        if before is not None and _weight(noted) < _weight(COMPLAINT_DECODER.decode(before.value)):
            return
        self._store.write(name, _encode(noted), ttl_s=ttl_s)

    def _is_proven(self, complaint: FaultReport, holder: HoldingEntry, caller: Caller) -> bool:
        """Return True if a complaint has a valid proof; with an invalid one it counts like any other."""
        if complaint.fault != "wrong bytes" or complaint.proof is None:
            return False
        fault = "too many proofs of one caller"
        # Limited before it is checked: checking a large proof costs milliseconds, which a caller could force in a loop.
        if self._proof_rate.allow(caller.name):
            fault = proof_fault(complaint.proof, complaint.of, holder.hello.digest_key, holder.holding)
        if fault:
            audit.warning("event=unproven member=%s of=%s why=%r", complaint.member, complaint.of, fault)
            return False
        self._counts["proofs"] += 1
        audit.warning("event=proven member=%s of=%s key=%s", complaint.member, complaint.of, complaint.key)
        return True


def _weight(complained: ComplaintEntry) -> int:
    """Return the weight of a complaint: of one reader's complaints the graver one is kept."""
    return 2 if complained.is_proven else int(complained.complaint.fault == "wrong bytes")
