"""The hub's side of a sync: the members that take part under a name, and grants to contact them.

In: `SyncState`s of beats, in the store. Out: a `SyncReply`.
Not here: planning and versions (`sync`): the hub only lists the members and their reported states.

    sync/KEY/MEMBER    one entry for each member and name, for as long as it beats
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.hub.grants import GrantSigner
from penstock.hub.messages import Hello, SyncState
from penstock.hub.store import Store
from penstock.hub.sync_messages import SyncMember, SyncReply, SyncRequest, sync_key


class SyncEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry of a member of a sync."""

    hello: Hello
    since: float
    seen: float
    state: SyncState
    certificate: str = ""


_SYNCED = msgspec.msgpack.Decoder(SyncEntry)


def record_states(
    store: Store,
    hello: Hello,
    since: float,
    now: float,
    ttl_s: float,
    states: Iterable[SyncState],
    certificate: str = "",
) -> None:
    """Store the sync states that a heartbeat reports."""
    for state in states:
        entry = msgspec.msgpack.encode(SyncEntry(hello, since, now, state, certificate))
        store.write(f"sync/{sync_key(state.name)}/{hello.member}", entry, ttl_s=ttl_s)


def list_members(store: Store, request: SyncRequest, signer: GrantSigner) -> SyncReply:
    """Return the live members of a sync, the earliest first.

    Raises:
        HubUnavailable: the store did not answer.
    """
    key, wanted = sync_key(request.name), set(request.grants)
    members = []
    for name, entry in store.scan(f"sync/{key}/").items():
        synced = _SYNCED.decode(entry.value)
        if synced.state.name != request.name or store.read(f"member/{name}") is None:
            continue  # it left: its entry here expires later than its membership
        grant = (
            signer.sign(key=key, reader=request.member, source=name, epoch=synced.state.grant_epoch)
            if name in wanted
            else b""
        )
        members.append(
            SyncMember(
                member=name,
                host=synced.hello.host,
                doors=synced.hello.doors,
                called=synced.hello.name,
                since=synced.since,
                seen=synced.seen,
                state=synced.state,
                grant=grant,
                certificate=synced.certificate,
            )
        )
    members.sort(key=lambda member: (member.since, member.member))
    return SyncReply(members=tuple(members), is_new=store.read("hub/quiet") is not None)


def states_of(store: Store) -> dict[str, list[SyncState]]:
    """Return member -> its syncs, for `status`."""
    states_of_member: dict[str, list[SyncState]] = {}
    for name, entry in store.scan("sync/").items():
        states_of_member.setdefault(name.partition("/")[2], []).append(_SYNCED.decode(entry.value).state)
    return {member: sorted(states, key=lambda state: state.name) for member, states in states_of_member.items()}
