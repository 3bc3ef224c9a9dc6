"""Each caller's quotas for the hub's memory: for members, tables of claims and decisions.

`net.shares` decides whose entries are removed from a full hub. `failures` and `conversions` limit their own entries.
Several hubs on one store count members together: a hub that has admitted many members counts all members in the store
at every heartbeat interval. Entries of every other kind are counted only by the hub that received them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from penstock.errors import SourceBusy
from penstock.hub.auth import RateLimit
from penstock.hub.messages import Beat, sync_key
from penstock.net.shares import Shares
from penstock.units import MIB
from penstock_hub.complaints import COMPLAINTS_AT_ONCE, COMPLAINTS_PER_S
from penstock_hub.snapshot import DECISION_TTL_S, MEMBER_DECODER, MemberEntry
from penstock_hub.store import Store

MEMBER_BYTES = 32 << 10
"""Minimum weight of a member."""
CLAIMS_TTL_S = 86400.0
"""Seconds for which a table of claims is kept after the last claim, longer than any storage takes to read a piece."""
JOB_REPORTS_PER_S, JOB_REPORTS_AT_ONCE = 50.0, 500
"""Rate and burst of reports for one caller, which reports each of its conversions once a second."""
LEAVES_PER_S, LEAVES_AT_ONCE = 50.0, 2_000
"""Rate and burst at which a caller may sign off unknown members. The hub remembers each such member for a minute."""
MANY_HUBS = 16
"""Maximum number of hubs on one store. While each hub has admitted less than `1 / MANY_HUBS` of the limit, their total
is below the limit."""
_HOLDING_BYTES, _RANGE_BYTES, _SYNC_BYTES = 2 << 10, 32, 4 << 10
_BUSY_HINT = "stop processes that use this token and are not needed. The hub keeps its present entries"


class Capacity(msgspec.Struct, frozen=True):
    """The maximum number or total size of each kind of entry in a hub, for all callers together."""

    members_bytes: int = 640 * MIB
    """Bytes for all members with their holdings and syncs. The default suffices for 20,000 members with a few models
    each."""
    tables_bytes: int = 256 * MIB
    """Bytes for tables of claims, which are kept for a day. A table for 60 GB that 1,000 members read takes about 50
    KB."""
    member_models: int = 1024
    """Number of models that one member may fetch and hold. A heartbeat may list as many."""
    decisions: int = 20_000
    """Number of decisions on versions with a two-phase commit. Decisions are kept for an hour, so the default allows
    five a second."""
    failing_members: int = 500
    """Number of members whose failures are kept for an hour. With four failures of 2 KB each they take at most 4 MB."""
    conversions: int = 256
    """Number of conversions that the hub shows."""


class Limits:
    """The callers' quotas and rate limits in one hub process. Thread-safe.

    Args:
        ttl_s: a member that is silent for this long is removed.
        timer: returns monotonic seconds in this process.
        look_share: maximum share of time spent on counting the members of all hubs.
    """

    def __init__(
        self,
        store: Store,
        capacity: Capacity,
        *,
        ttl_s: float,
        timer: Callable[[], float],
        look_share: float,
    ) -> None:
        self._store = store
        self._capacity = capacity
        self._timer = timer
        self._look_share = look_share
        self._next_count = float("-inf")
        self._members = Shares[str](capacity.members_bytes, ttl_s=ttl_s, clock=timer)
        self._tables = Shares[str](capacity.tables_bytes, ttl_s=CLAIMS_TTL_S, clock=timer)
        self._decisions = Shares[str](capacity.decisions, ttl_s=DECISION_TTL_S, clock=timer)
        self.complaints = RateLimit(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE, clock=timer)
        self.job_reports = RateLimit(JOB_REPORTS_PER_S, JOB_REPORTS_AT_ONCE, clock=timer)
        self.unknown_leaves = RateLimit(LEAVES_PER_S, LEAVES_AT_ONCE, clock=timer)

    def admit(self, member: str, caller: str, beat: Beat | None = None) -> int:
        """Count a member and its heartbeat toward its caller's quota. Return their size in bytes, without syncs.

        Raise SourceBusy if the hub is full.
        """
        nbytes = 0
        syncs: list[str] = []
        if beat is not None:
            ranges = sum(len(holding.have) + len(holding.claims) for holding in beat.holdings)
            nbytes += _HOLDING_BYTES * len(beat.holdings) + _RANGE_BYTES * ranges
            # Syncs are separate entries, which stay until they expire even if the next heartbeat omits them.
            syncs = [f"sync/{sync_key(state.name)}/{member}" for state in beat.syncs]
        nbytes = max(MEMBER_BYTES, nbytes)
        for name, weight in ((f"member/{member}", nbytes), *((name, _SYNC_BYTES) for name in syncs)):
            victims = self._members.enter(name, caller, weight, displaces_own=False)
            if victims is None:
                raise SourceBusy("this token has already registered the maximum number of members", hint=_BUSY_HINT)
            self._remove(victims)
        return nbytes

    def count_members(self) -> None:
        """Count the members of all hubs once a heartbeat interval, and remove members that exceed a caller's quota."""
        begun = self._timer()
        if self._members.used * MANY_HUBS < self._capacity.members_bytes or begun < self._next_count:
            return
        found = self._store.scan("member/")
        known = {member: MEMBER_DECODER.decode(entry.value) for member, entry in found.items()}
        # All hubs must remove the same members, so each uses the same order.
        for member in sorted(known, key=lambda name: (known[name].seen, name)):
            self._enter(f"member/{member}", known[member].caller, max(MEMBER_BYTES, known[member].nbytes))
        for name in self._store.scan("sync/"):
            member = name.rpartition("/")[2]
            if member in known:
                self._enter(f"sync/{name}", known[member].caller, _SYNC_BYTES)
        self._next_count = begun + (self._timer() - begun) / self._look_share

    def _enter(self, name: str, caller: str, nbytes: int) -> None:
        """Count an entry in the store. If the hub is full, remove this entry or other entries."""
        victims = self._members.enter(name, caller, nbytes)
        self._remove((name,) if victims is None else victims)

    def _remove(self, victims: Iterable[str]) -> None:
        for victim in victims:
            folder, _, member = victim.partition("/")
            entry = self._store.read(victim) if folder == "member" else None
            if entry is None:
                self._store.write(victim, None)
            else:
                remove_member(self._store, member, MEMBER_DECODER.decode(entry.value))

    def caller_of(self, member: str) -> str:
        """Return the caller to which a member belongs, even for a moment after the member fell silent."""
        return self._members.caller_of(f"member/{member}")

    def forget(self, member: str) -> None:
        """Stop counting a member that has left."""
        self._members.drop(f"member/{member}")

    def table(self, name: str, caller: str, nbytes: int) -> None:
        """Count a table of claims that was written. 0 bytes mean that the table was removed."""
        if nbytes:
            self._keep(self._tables, name, caller, nbytes)
        else:
            self._tables.drop(name)

    def decision(self, name: str, caller: str) -> None:
        """Count a decision on a version."""
        self._keep(self._decisions, name, caller)

    def _keep(self, shares: Shares[str], name: str, caller: str, weight: int = 1) -> None:
        """Count an entry in the store, and remove entries that exceed a caller's quota, possibly this entry."""
        victims = shares.enter(name, caller, weight)
        for victim in (name,) if victims is None else victims:
            self._store.write(victim, None)


def remove_member(store: Store, member: str, known: MemberEntry) -> None:
    """Remove a member, so that no reader is sent to it."""
    # Remove the member first. A concurrent heartbeat then fails as unknown instead of renewing the member.
    store.write(f"member/{member}", None)
    for key in known.keys:
        store.write(f"hold/{key}/{member}", None)
