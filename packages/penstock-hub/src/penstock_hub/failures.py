"""Records of the failed calls that each member reports, which the hub keeps in its store."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.hub.auth import Caller
from penstock.hub.messages import FailureReport, FleetFailure, Hello, MemberStatus
from penstock.net.shares import Shares
from penstock_hub.store import Store

FAILURE_TTL_S = 3600.0
"""Seconds for which a failure is shown. The page's charts cover the same time."""
MAX_LOST = 8
"""Maximum number of a lost member's models to keep, and of the failures that it reported."""


class FailuresEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for a member's failures."""

    failures: tuple[FleetFailure, ...]
    at: float
    """Time of the heartbeat to which the ages refer."""
    caller: str = ""
    """`Caller.name` of the member."""


_ENTRY = msgspec.msgpack.Decoder(FailuresEntry)


def record_failed_calls(
    store: Store, hello: Hello, failures: Iterable[FailureReport], now: float, caller: Caller, max_members: int
) -> None:
    """Record the failures of a member's process, which may exit before anyone reads them.

    Args:
        caller: failures for models that this caller may not access are omitted.
        max_members: maximum number of members with stored failures.
    """
    # A process reports its failures again as long as it runs, so keep only failures from the last hour.
    listed = tuple(
        FleetFailure(member=hello.member, name=hello.name, host=hello.host, **msgspec.structs.asdict(failure))
        for failure in failures
        if failure.age_s < FAILURE_TTL_S and (not failure.model or caller.may_ask((failure.model,)))
    )
    before = _read(store, hello.member)
    # Readers compute the ages from the time of the entry, so write only if there are new failures.
    if listed and (before is None or _without_ages(before.failures) != _without_ages(listed)):
        _write(store, hello.member, FailuresEntry(listed, now, caller.name), max_members, is_new=before is None)


def _read(store: Store, member: str) -> FailuresEntry | None:
    entry = store.read(f"failure/{member}")
    return None if entry is None else _ENTRY.decode(entry.value)


def _write(store: Store, member: str, failures: FailuresEntry, max_members: int, *, is_new: bool) -> None:
    """Store a member's failures. A new entry may displace another member's failures."""
    if is_new and len(stored := store.scan("failure/")) >= max_members:
        entries = {name: _ENTRY.decode(entry.value) for name, entry in stored.items()}
        shares = Shares[str](len(entries))
        by_age = sorted(entries, key=lambda name: entries[name].at)
        for name in by_age:
            shares.enter(name, entries[name].caller)
        # If each caller has only one entry, the oldest failures are dropped.
        for name in shares.enter(member, failures.caller) or (by_age[0],):
            store.write(f"failure/{name}", None)
    store.write(f"failure/{member}", msgspec.msgpack.encode(failures), ttl_s=FAILURE_TTL_S)


def record_lost(store: Store, member: MemberStatus, caller: str, now: float, max_members: int) -> None:
    """Record a member that fell silent without signing off, with its holdings. `caller` sent its hello."""
    if store.read(f"gone/{member.member}") is not None or store.read(f"member/{member.member}") is not None:
        return
    held = {holding.identity.model: f"its copy was {holding.state}" for holding in member.holdings}
    held |= {state.name: f"it was a {state.side} with version {state.version}" for state in member.syncs}
    lost = tuple(
        FleetFailure(
            member=member.member,
            name=member.name,
            host=member.host,
            age_s=0.0,
            verb="member",
            model=model,
            error="PeerLost",
            message=f"the process stopped sending heartbeats without signing off, and {what}",
            blame="source",
        )
        for model, what in list((held or {"": "it held nothing"}).items())[:MAX_LOST]
    )
    # The member's own failures may be the reason why it exited, so keep them.
    before = _read(store, member.member)
    earlier = () if before is None else before.failures
    older_s = 0.0 if before is None else max(0.0, now - before.at)
    aged = [msgspec.structs.replace(failure, age_s=failure.age_s + older_s) for failure in earlier]
    entry = FailuresEntry((*lost, *aged)[:MAX_LOST], now, caller)
    _write(store, member.member, entry, max_members, is_new=before is None)


def _without_ages(failures: Iterable[FleetFailure]) -> list[FleetFailure]:
    return [msgspec.structs.replace(failure, age_s=0.0) for failure in failures]


def failures_of(store: Store, model: str | None, now: float) -> tuple[FleetFailure, ...]:
    """Return the failures of the last `FAILURE_TTL_S` seconds, for one model or all, the latest first."""
    # Several members in one process report the same failures, so merge them by call.
    found = {
        (failure.name, failure.verb, failure.model, failure.message): msgspec.structs.replace(failure, age_s=age_s)
        for entry in (_ENTRY.decode(stored.value) for stored in store.scan("failure/").values())
        for failure in entry.failures
        if model in (None, failure.model) and (age_s := max(0.0, now - entry.at + failure.age_s)) < FAILURE_TTL_S
    }
    return tuple(sorted(found.values(), key=lambda failure: (failure.age_s, failure.member)))
