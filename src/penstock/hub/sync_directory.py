"""The hub's side of a sync: who takes part under which name, and grants to ask them.

In: `SyncState`s of beats, in the store. Out: a `SyncReply`.
Not here: who plans, which version is whose (`sync`): the hub knows who they are and what they say.

    sync/KEY/MEMBER    one entry a member and name, for as long as it beats
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
    found = []
    for name, entry in store.scan(f"sync/{key}/").items():
        synced = _SYNCED.decode(entry.value)
        if synced.state.name != request.name or store.read(f"member/{name}") is None:
            continue  # one that left is not heard of again
        grant = (
            signer.sign(key=key, reader=request.member, source=name, epoch=synced.state.grant_epoch)
            if name in wanted
            else b""
        )
        found.append(
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
    found.sort(key=lambda one: (one.since, one.member))
    return SyncReply(members=tuple(found), is_new=store.read("hub/quiet") is not None)


def states_of(store: Store) -> dict[str, list[SyncState]]:
    """Member -> its syncs, for `status`."""
    found: dict[str, list[SyncState]] = {}
    for name, entry in store.scan("sync/").items():
        found.setdefault(name.partition("/")[2], []).append(_SYNCED.decode(entry.value).state)
    return {member: sorted(states, key=lambda state: state.name) for member, states in found.items()}
