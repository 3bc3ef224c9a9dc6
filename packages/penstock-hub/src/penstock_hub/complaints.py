"""Complaints of readers about sources: their rate for each caller, and their records in the store."""

from __future__ import annotations

import msgspec

from penstock.hub.messages import FaultReport
from penstock_hub.snapshot import COMPLAINT_DECODER, ComplaintEntry
from penstock_hub.store import Store

# Seconds after which an unreachable holder is retried.
COMPLAINT_TTL_S = 30.0
# Wrong bytes are a lasting fault in memory or in a link.
WRONG_BYTES_TTL_S = 600.0
# A holder receives the grant key of a new hub in the response to its next heartbeat.
_REFUSED_TTL_S = 3.0
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 20.0, 2_000
"""Rate and burst of complaints for one caller. If 1,000 members with one token lose the same two holders, all complain
within a second. A complaint takes about 300 bytes for up to 600 s, so a caller uses at most 4 MB in the hub."""


def record_complaint(store: Store, complaint: FaultReport, caller: str) -> None:
    """Record a complaint about a holder. `caller` is `Caller.name` of the complaining member."""
    ttl_s = {"wrong bytes": WRONG_BYTES_TTL_S, "refused": _REFUSED_TTL_S}.get(complaint.fault, COMPLAINT_TTL_S)
    name = f"complaint/{complaint.key}/{complaint.of}~{complaint.member}"
    before = store.read(name)
    # A complaint that expires sooner must not replace an earlier complaint about wrong bytes.
    is_graver = before is not None and COMPLAINT_DECODER.decode(before.value).complaint.fault == "wrong bytes"
    if is_graver and complaint.fault != "wrong bytes":
        return
    # Drop the proof that a member of an earlier release may send, because it may be several megabytes long.
    entry = ComplaintEntry(msgspec.structs.replace(complaint, proof=None), caller)
    store.write(name, msgspec.msgpack.encode(entry), ttl_s=ttl_s)
