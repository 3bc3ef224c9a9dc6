"""A snapshot of one key at the hub: the members that have or fetch it, complaints, and the relay among them.

In: the store's entries. Out: a `HubSnapshot`. Not here: changing anything (`directory`).

The hub's side of a sync: the members that take part under a name, and grants to contact them.

In: `SyncState`s of beats, in the store. Out: a `SyncReply`.
Not here: planning and versions (`sync`): the hub only lists the members and their reported states.

    sync/KEY/MEMBER    one entry for each member and name, for as long as it beats

Explanations of why members read a model from their upstreams: differing identities, states, complaints.

In: a request, the hub's snapshot of each key. Out: lines for people. Not here: the answer's transport (`app`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.hub.claims import Bools
from penstock.hub.grants import GrantSigner
from penstock.hub.messages import (
    Complaint,
    Hello,
    HoldingState,
    Identity,
    MemberStatus,
    Status,
    SyncMember,
    SyncReply,
    SyncRequest,
    SyncState,
    WhyRequest,
    sync_key,
)
from penstock.hub.store import Entry, Store
from penstock.plan.relay import DISTRUST, Node, Relay


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


T = TypeVar("T")
CHEAP_READ_S = 0.0005
"""A snapshot that costs no more than this is made for every request: some tens of members. Source: bench_hub."""


class HoldingEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry of one member and key."""

    hello: Hello
    since: float
    """Time at which the member joined, by the hub's clock."""
    holding: HoldingState
    num_have: int
    requested_at: float = 0.0
    """Time of its last request for upstreams or claims, by the hub's clock."""
    reads_storage: bool = False
    certificate: str = ""
    """See `MemberEntry`."""


class MemberEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry of a member."""

    hello: Hello
    since: float
    seen: float
    keys: tuple[str, ...] = ()
    caller: str = ""
    """`Caller.name` of its hello."""
    certificate: str = ""
    """Names in the certificate that it showed then."""


class ComplaintEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry of a complaint."""

    complaint: Complaint
    caller: str
    """`Caller.name` of the complaining member."""
    is_proven: bool = False
    """Whether it came with a valid proof."""


HOLDING_DECODER = msgspec.msgpack.Decoder(HoldingEntry)
MEMBER_DECODER = msgspec.msgpack.Decoder(MemberEntry)
COMPLAINT_DECODER = msgspec.msgpack.Decoder(ComplaintEntry)


class HubSnapshot:
    """The state of one key when the snapshot was made.

    Args:
        held: members that have or fetch the key.
        complaints: those that still count.
        before: the snapshot before this one: its parents stay for members that do not report theirs.
    """

    def __init__(
        self,
        held: Mapping[str, HoldingEntry],
        complaints: Mapping[str, ComplaintEntry],
        *,
        before: HubSnapshot | None = None,
    ) -> None:
        self.held = held
        self._complained = tuple(complaints.values())
        self.complaints = tuple(entry.complaint for entry in self._complained)
        self._parents = before.parents if before is not None else {}
        self._relays: dict[int, Relay] = {}
        self._had: dict[tuple[int, frozenset[str]], Bools] = {}

    @property
    def parents(self) -> dict[str, str]:
        """Return receiver -> parent, of the relays made so far."""
        parents = dict(self._parents) if not self._relays else {}
        for relay in self._relays.values():
            parents |= relay.parents
        return parents

    @cached_property
    def complainers(self) -> dict[str, frozenset[str]]:
        """Return member -> the members that complain of it."""
        by_member: dict[str, set[str]] = {}
        for complaint in self.complaints:
            by_member.setdefault(complaint.of, set()).add(complaint.member)
        return {member: frozenset(names) for member, names in by_member.items()}

    @cached_property
    def proven(self) -> frozenset[str]:
        """Return the members that provably stated wrong digests."""
        return frozenset(entry.complaint.of for entry in self._complained if entry.is_proven)

    @cached_property
    def callers(self) -> dict[str, frozenset[str]]:
        """Return member -> the callers whose complaints count for all, each once, for any number of its members.

        Complaints of wrong bytes are not included: they count for all only with a proof, else for their reader alone.
        """
        by_member: dict[str, set[str]] = {}
        for entry in self._complained:
            if entry.complaint.fault != "wrong bytes":
                by_member.setdefault(entry.complaint.of, set()).add(entry.caller)
        return {member: frozenset(names) for member, names in by_member.items()}

    def num_complaining(self, member: str) -> int:
        """Return the number of callers that complain of a member; a proof counts as `DISTRUST` callers."""
        return DISTRUST if member in self.proven else len(self.callers.get(member, ()))

    @cached_property
    def num_sharing(self) -> int:
        """Return the number of members that fetch the key and can read storage."""
        return sum(1 for holder in self.held.values() if holder.reads_storage and holder.holding.state == "filling")

    @cached_property
    def reading(self) -> frozenset[str]:
        """Return the members that report to read from storage."""
        return frozenset(name for name, holder in self.held.items() if holder.holding.claims)

    def reader_silent_s(self, *, besides: str) -> float:
        """Return the shortest time since one of the other readers of storage received bytes; -1: there is none."""
        silent = (self.held[name].holding.silent_s for name in self.reading if name != besides)
        return min((seconds for seconds in silent if seconds >= 0), default=-1.0)

    def demoted(self, member: str) -> bool:
        """Return True if the member is the last choice for all readers, and its chunks do not count."""
        return self.num_complaining(member) >= DISTRUST

    def out_of_reach(self, reader: str) -> list[str]:
        """Return the members that this reader cannot read from: it complained of them, or they are demoted."""
        return [name for name, by in self.complainers.items() if reader in by or self.demoted(name)]

    def relay(self, num_chunks: int) -> Relay:
        """Return the relay of the members that cut the weights into this number of chunks."""
        if num_chunks not in self._relays:
            same = ((name, holder) for name, holder in self.held.items() if holder.holding.num_chunks == num_chunks)
            self._relays[num_chunks] = Relay(self._node(name, holder) for name, holder in same)
        return self._relays[num_chunks]

    def known_to(self, reader: Hello, holding: HoldingState) -> tuple[str, ...]:
        """Return the holders for a member that is not in this snapshot yet, near ones first."""
        sizes = Counter(holder.holding.num_chunks for holder in self.held.values())
        num_chunks = holding.num_chunks or max(sizes, key=lambda size: (sizes[size], size))
        asks = Node(
            member=reader.member,
            host=reader.host,
            rack=reader.rack,
            device=holding.device,
            num_have=0,
            num_chunks=max(1, num_chunks),
        )
        return self.relay(num_chunks).around(asks)

    def had(self, reader: str, num_chunks: int) -> Bools:
        """Return the chunks of the members that `reader` can read from."""
        avoid = frozenset(self.out_of_reach(reader))
        if (num_chunks, avoid) not in self._had:
            same = (holder.holding.have for holder in self.held.values() if holder.holding.num_chunks == num_chunks)
            if avoid:
                named = ((name, holder.holding) for name, holder in self.held.items() if name not in avoid)
                same = (holding.have for _, holding in named if holding.num_chunks == num_chunks)
            edges = np.array([edge for have in same for bounds in have for edge in bounds], np.int64)
            # Ranges that begin minus ranges that end, summed up to a chunk, is the number of members that have it.
            # This takes one pass over all ranges, where a mask per member would take members times chunks.
            begun = np.bincount(edges[::2], minlength=num_chunks + 1)
            ended = np.bincount(edges[1::2], minlength=num_chunks + 1)
            self._had[num_chunks, avoid] = np.cumsum(begun - ended)[:num_chunks] > 0
        return self._had[num_chunks, avoid]

    def _node(self, name: str, holder: HoldingEntry) -> Node:
        holding = holder.holding
        return Node(
            member=name,
            host=holder.hello.host,
            rack=holder.hello.rack,
            device=holding.device,
            joined=holder.since,
            num_have=holder.num_have,
            num_chunks=holding.num_chunks,
            draining=holding.state == "draining" or bool(holding.tier),  # off its device: slower, so the last choice
            num_readers=holding.num_readers,
            max_readers=holding.max_readers,
            num_links=holder.hello.num_links,
            complainers=self.complainers.get(name, frozenset()),
            num_complaining=self.num_complaining(name),
            parent=holding.parent or self._parents.get(name, ""),
        )


class SnapshotReader:
    """A reader that makes snapshots of one key and decodes each version of an entry once."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._held: dict[str, tuple[bytes, HoldingEntry]] = {}
        self._complaints: dict[str, tuple[bytes, ComplaintEntry]] = {}
        self._view: HubSnapshot | None = None

    def read(self) -> HubSnapshot:
        """Make a snapshot of the key as the store has it now.

        Raises:
            HubUnavailable: the store did not answer.
        """
        holders = self._store.scan(f"hold/{self._key}/")
        complaints = self._store.scan(f"complaint/{self._key}/")
        self._held = _decoded(HOLDING_DECODER, holders, self._held)
        self._complaints = _decoded(COMPLAINT_DECODER, complaints, self._complaints)
        self._view = HubSnapshot(
            {name: value for name, (_, value) in self._held.items()},
            {name: value for name, (_, value) in self._complaints.items()},
            before=self._view,
        )
        return self._view


def _decoded(
    decoder: msgspec.msgpack.Decoder[T], entries: Mapping[str, Entry], before: Mapping[str, tuple[bytes, T]]
) -> dict[str, tuple[bytes, T]]:
    decoded = {}
    for name, entry in entries.items():
        known = before.get(name)
        same = known is not None and known[0] == entry.version
        decoded[name] = known if known is not None and same else (entry.version, decoder.decode(entry.value))
    return decoded


class SnapshotCache:
    """A cache of one key's snapshot, renewed only as often as its share of the time allows."""

    def __init__(self, reading: SnapshotReader) -> None:
        self._reading = reading
        self._lock = threading.Lock()
        self._view: HubSnapshot | None = None
        self._next = 0.0

    def at(self, timer: Callable[[], float], share: float, *, again: bool) -> HubSnapshot:
        """Return the present snapshot (`again`), or the cached one while it is valid."""
        with self._lock:
            start = timer()
            if self._view is None or again or start >= self._next:
                self._view = self._reading.read()
                # Relays now, inside the measured time: they are most of a snapshot's cost for a large fleet.
                for num_chunks in {holder.holding.num_chunks for holder in self._view.held.values()}:
                    self._view.relay(num_chunks)
                stop = timer()
                cost_s = stop - start
                self._next = stop if cost_s < CHEAP_READ_S else stop + cost_s / share
            return self._view


def record_key(store: Store, holding: HoldingState, *, ttl_s: float) -> None:
    """Let `keys_of` find a holding's key for `ttl_s`."""
    store.write(f"model/{quote(holding.identity.model, safe='')}/{holding.key}", b"1", ttl_s=ttl_s)


def keys_of(store: Store, model: str) -> tuple[str, ...]:
    """Return the keys under which members have or fetch a model."""
    return tuple(sorted(store.scan(f"model/{quote(model, safe='')}/")))


def status(store: Store, model: str | None, now: float) -> Status:
    """Return the members and their holdings; of one model, those that have or fetch it.

    Raises:
        HubUnavailable: the store did not answer.
    """
    holdings_of: dict[str, list[HoldingState]] = {}
    complained: Counter[str] = Counter()
    for below in [""] if model is None else [f"{key}/" for key in keys_of(store, model)]:
        for name, entry in store.scan(f"hold/{below}").items():
            holdings_of.setdefault(name.rpartition("/")[2], []).append(HOLDING_DECODER.decode(entry.value).holding)
        complained.update(name.rpartition("/")[2].partition("~")[0] for name in store.scan(f"complaint/{below}"))
    syncs = {
        name: states
        for name, all_states in states_of(store).items()
        if (states := [state for state in all_states if model in (None, state.name)])
    }
    if model is None:
        members_found = store.scan("member/")
    else:
        entries = ((name, store.read(f"member/{name}")) for name in {*holdings_of, *syncs})
        members_found = {name: entry for name, entry in entries if entry is not None}
    members = []
    for name, entry in sorted(members_found.items()):
        known = MEMBER_DECODER.decode(entry.value)
        members.append(
            MemberStatus(
                member=name,
                name=known.hello.name,
                host=known.hello.host,
                rack=known.hello.rack,
                doors=known.hello.doors,
                age_s=max(0.0, now - known.since),
                silent_s=max(0.0, now - known.seen),
                holdings=tuple(sorted(holdings_of.get(name, ()), key=lambda holding: holding.key)),
                syncs=tuple(syncs.get(name, ())),
                complaints=complained[name],
            )
        )
    return Status(members=tuple(members))


_MAX_LINES = 200


def explain_lines(request: WhyRequest, views: Mapping[str, HubSnapshot]) -> tuple[str, ...]:
    """Return the explanation, at most 200 lines."""
    if not views:
        return (f"no member has or fetches {request.model}: the first one to fetch it reads storage",)
    lines = list(_lines(request, views))
    # A fleet of 1,000 members would fill a terminal with a line for each pair; the bound also limits the answer's size.
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"... and {len(lines) - _MAX_LINES} lines more: name a member"]
    return tuple(lines)


def _lines(request: WhyRequest, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    if request.identity is not None:
        yield from _of_identity(request.identity, request.identity.key(), views)
        return
    askers = [
        (key, name, holder)
        for key, view in sorted(views.items())
        for name, holder in sorted(view.held.items())
        if (request.member == name if request.member else holder.holding.state == "filling")
    ]
    if not askers:
        if request.member:
            yield f"{request.member} neither has nor fetches {request.model}"
        else:
            yield f"no member is fetching {request.model}"
        for key, view in sorted(views.items()):
            for name, holder in sorted(view.held.items()):
                demoted = f"; {words}" if (words := _demoted(view, name)) else ""
                yield f"{name} {_has(holder)} under key {key[:8]}{_came(holder)}{demoted}"
        yield from _between_keys(views)
        return
    for key, name, holder in askers:
        yield from _of_member(key, name, holder, views)


def _of_member(key: str, name: str, holder: HoldingEntry, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    view = views[key]
    if holder.holding.state != "filling":
        yield f"{name} {_has(holder)}: it needs no upstream{_came(holder)}"
        return
    order = view.relay(holder.holding.num_chunks).upstreams(name)
    yield f"{name} {_has(holder)} and reads from {', then '.join(order) if order else 'storage alone'}{_came(holder)}"
    for other, theirs in sorted(view.held.items()):
        if other != name:
            yield f"  {other}: {_between(name, holder, other, theirs, view, order)}"
    yield from (f"  {line}" for line in _of_identity(holder.holding.identity, key, views, ours=False))


def _between(
    name: str, holder: HoldingEntry, other: str, theirs: HoldingEntry, view: HubSnapshot, order: tuple[str, ...]
) -> str:
    facts = [_has(theirs)]
    if theirs.holding.num_chunks != holder.holding.num_chunks:
        facts.append(f"cuts the weights into {theirs.holding.num_chunks} chunks, not {holder.holding.num_chunks}")
    facts += [
        f"{complaint.member} complains: {complaint.fault} {complaint.detail}".rstrip()
        for complaint in view.complaints
        if complaint.of == other
    ]
    if words := _demoted(view, other):
        facts.append(words)
    if 0 < theirs.holding.max_readers <= theirs.holding.num_readers:
        facts.append(f"busy with {theirs.holding.num_readers} readers of at most {theirs.holding.max_readers}")
    if other in order:
        facts.append("parent" if order[0] == other else f"substitute, number {order.index(other)}")
    elif theirs.holding.parent == name:
        facts.append("reads from it")
    else:
        facts.append("not among its upstreams: others are nearer, further ahead, or it is a descendant")
    return "; ".join(facts)


def _of_identity(identity: Identity, key: str, views: Mapping[str, HubSnapshot], *, ours: bool = True) -> Iterator[str]:
    for other, view in sorted(views.items()):
        for name, holder in sorted(view.held.items()):
            if other == key:
                if ours:
                    can = "it admits no new reader" if holder.holding.state == "draining" else "it can be read"
                    yield f"{name} {_has(holder)}: the identities are equal, {can}"
                continue
            differing = identity.differences(holder.holding.identity)
            words = "; ".join(
                f"{field}: {mine or 'empty'} is not {theirs or 'empty'}" for field, (mine, theirs) in differing.items()
            )
            yield f"{name}: cannot be read, the identities differ: {words}"


def _between_keys(views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    """Yield the identity fields that keep the keys of one model apart, each compared with the first."""
    identities = [
        (key, next(iter(view.held.values())).holding.identity) for key, view in sorted(views.items()) if view.held
    ]
    for key, identity in identities[1:]:
        # Each with the first only: all pairs of n keys would repeat most differences n times.
        first, of_first = identities[0]
        words = "; ".join(f"{name}: {a!r} is not {b!r}" for name, (a, b) in of_first.differences(identity).items())
        yield f"key {first[:8]} and key {key[:8]} are not exchanged, the identities differ: {words}"


def _came(holder: HoldingEntry) -> str:
    """Return the path of a member's bytes and the reason for it."""
    holding = holder.holding
    why = f" ({holding.why})" if holding.why else ""
    return f"; its bytes came by: {holding.path}{why}" if holding.path else ""


def _demoted(view: HubSnapshot, name: str) -> str:
    """Return that a member is the last choice for everyone, and why; empty: it is not."""
    if not view.demoted(name):
        return ""
    why = ": it signed digests that are not the revision's" if name in view.proven else ""
    return f"demoted for everyone{why}"


def _has(holder: HoldingEntry) -> str:
    holding = holder.holding
    if holding.state == "whole":
        return "is whole"
    return f"is {holding.state} with {holder.num_have} of {holding.num_chunks} chunks"
