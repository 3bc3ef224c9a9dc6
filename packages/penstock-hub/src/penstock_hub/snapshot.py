"""The hub's state in its store: the entries, snapshots of one key, the members of a sync, and the status of the fleet.

member/MEMBER             a member, until it is silent for too long
hold/KEY/MEMBER           its state for one key
complaint/KEY/OF~MEMBER   a reader's complaint about a holder
model/MODEL/KEY           the keys of a model
sync/KEY/MEMBER           its state in a sync; KEY is the digest of the sync's name
decision/KEY/EPOCH/VERSION  the decision on a version of a sync with a two-phase commit, for an hour
job/JOB                   a conversion, until an hour after its last report
undrained/MEMBER          an operator has just undone its drain
failure/MEMBER            the last failures of its process, for an hour
gone/MEMBER               a member that left, for as long as a late request from it may arrive
claim/KEY/CHUNKS          the table of claims for a key
hub/life, quiet, seed     a mark that a hub runs; a mark that it is new; the key with which it signs grants
hub/recent                a mark that some members may not have reported to it yet
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import zip_longest
from typing import TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.errors import PermissionDenied
from penstock.hub import messages
from penstock.hub.grants import GrantSigner
from penstock.phases import Boot
from penstock.types import Bools
from penstock_hub.conversions import jobs_of
from penstock_hub.failures import failures_of
from penstock_hub.relay import Relay
from penstock_hub.relay_parents import DISTRUST, Node
from penstock_hub.store import ABSENT, Store, StoreEntry

T = TypeVar("T")
# A snapshot that takes at most this many seconds is made for every request, which suffices for a few dozen members.
# Source: bench_hub.
_CHEAP_READ_S = 0.0005


class HoldingEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for one member and key."""

    hello: messages.Hello
    since: float
    """Time at which the member joined, on the hub's clock."""
    holding: messages.HoldingState
    num_have: int
    requested_at: float = 0.0
    """Time of the member's last request for upstreams or claims, on the hub's clock."""
    reads_storage: bool = False
    certificate: str = ""
    """See `MemberEntry`."""
    is_drained: bool = False
    """Whether an operator has ordered to drain the member."""


class MemberEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for a member."""

    hello: messages.Hello
    since: float
    seen: float
    keys: tuple[str, ...] = ()
    caller: str = ""
    """`Caller.name` of the caller that sent the member's hello."""
    certificate: str = ""
    """Names in the certificate that the member presented with its hello."""
    drain: messages.Drain | None = None
    """An operator's current order to drain the member."""
    boot: bytes = b""
    """The state and phase of a start in the last heartbeat, from `encode_state`. Empty if it has loaded nothing."""
    nbytes: int = 0
    """The member's weight in the caller's quota (`limits`). 0 if a hub of an earlier release wrote the entry."""


class ComplaintEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for a complaint."""

    complaint: messages.FaultReport
    caller: str
    """`Caller.name` of the complaining member."""
    is_proven: bool = False
    """Unused. Hubs of an earlier release set this field for a complaint with a valid proof."""


HOLDING_DECODER = msgspec.msgpack.Decoder(HoldingEntry)
MEMBER_DECODER = msgspec.msgpack.Decoder(MemberEntry)
BOOT_DECODER = msgspec.msgpack.Decoder(Boot)
COMPLAINT_DECODER = msgspec.msgpack.Decoder(ComplaintEntry)


class HubSnapshot:
    """The state of one key at one moment.

    Args:
        held: entries of the members that have or fetch the key.
        complaints: complaints that still count.
        before: the previous snapshot, which supplies the parents of each member that does not report its parents.
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
        self.num_sharing = sum(map(_shares_storage, held.values()))
        """Number of members that fetch the key and can read storage."""
        self.newcomers: set[str] = set()
        """Members that joined after the snapshot was created."""
        # The version of a table of claims in which no chunk is free for other members, and the claimants in this table.
        self._all_claimed: tuple[bytes, frozenset[str]] | None = None
        # Created on demand, because most requests in a large fleet use one relay and one reader's chunks.
        self._relays: dict[int, Relay] = {}
        self._readable: dict[tuple[int, frozenset[str]], Bools] = {}

    @property
    def parents(self) -> dict[str, tuple[str, str]]:
        """Return each receiver's parents in the first and the last tree, for all relays created so far."""
        # A snapshot without relays has the parents of the previous snapshot.
        relays = list(self._relays.values())
        parents = dict(self._parents) if not relays else {}
        for relay in relays:
            last = relay.trees[-1]
            parents |= {child: (parent, last[child]) for child, parent in relay.parents.items()}
        return parents

    @cached_property
    def has_whole(self) -> bool:
        """Return whether a member has every chunk."""
        return any(entry.holding.state == "whole" for entry in self.held.values())

    @cached_property
    def complainers(self) -> dict[str, frozenset[str]]:
        """Return, for each member, the members that complain about it."""
        return _grouped((complaint.of, complaint.member) for complaint in self.complaints)

    @cached_property
    def callers(self) -> dict[str, frozenset[str]]:
        """Return, for each member, the callers whose complaints (except about wrong bytes) count for all readers."""
        by_others = (entry for entry in self._complained if entry.complaint.fault != "wrong bytes")
        return _grouped((entry.complaint.of, entry.caller) for entry in by_others)

    def add(self, newcomer: HoldingEntry) -> None:
        """Add a member that joined after the snapshot was created, and from which only later newcomers may read."""
        name, num_chunks = newcomer.hello.member, newcomer.holding.num_chunks
        self.relay(num_chunks).append(self._node(name, newcomer))
        # Other threads may be reading the current dict, so replace it.
        self.held = {**self.held, name: newcomer}
        self.newcomers.add(name)
        self.num_sharing += _shares_storage(newcomer)

    def is_placed(self, member: str, num_chunks: int) -> bool:
        """Return whether a member has a place in the relay for this number of chunks."""
        return member in self.held and member in self.relay(num_chunks)

    @cached_property
    def reading(self) -> frozenset[str]:
        """Return the members that report reads from storage."""
        return frozenset(name for name, holder in self.held.items() if holder.holding.claims)

    def reader_silent_s(self, *, besides: str) -> float:
        """Return the shortest time since a storage reader other than `besides` received bytes, or -1."""
        silent = (self.held[name].holding.silent_s for name in self.reading if name != besides)
        return min((seconds for seconds in silent if seconds >= 0), default=-1.0)

    def demoted(self, member: str) -> bool:
        """Return whether so many callers complained that the member is the last choice for all readers."""
        return len(self.callers.get(member, ())) >= DISTRUST

    @cached_property
    def drained(self) -> frozenset[str]:
        """Return the members that an operator drains, to which no reader is sent."""
        return frozenset(name for name, holder in self.held.items() if holder.is_drained)

    def out_of_reach(self, reader: str) -> list[str]:
        """Return the members that this reader avoids: demoted and drained members, and members it complained about."""
        complained = [name for name, by in self.complainers.items() if reader in by or self.demoted(name)]
        return [*complained, *(name for name in self.drained if name not in complained)]

    def note_all_claimed(self, version: bytes, claimants: Iterable[str]) -> None:
        """Record that no chunk is free for other members in this version of a table of claims."""
        self._all_claimed = version, frozenset(claimants)

    def is_all_claimed(self, version: bytes, *, besides: str) -> bool:
        """Return whether `note_all_claimed` recorded this version and `besides` is not a claimant in it."""
        known = self._all_claimed
        return known is not None and known[0] == version and besides not in known[1]

    def orders(self, reader: str, num_chunks: int) -> tuple[tuple[str, ...], ...]:
        """Return the upstreams for each tree, in order. A reader that cannot follow trees gets a single order."""
        relay = self.relay(num_chunks)
        # The reader may require a lease at each upstream, so each of two trees has fewer upstreams than a single tree.
        limit = 4 if len(relay.trees) == 1 else 3
        orders = tuple(
            tuple(name for name in relay.upstreams(reader, tree=tree, limit=limit) if name not in self.drained)
            for tree in range(len(relay.trees))
        )
        return orders if messages.follows_trees(self.held[reader].hello.protocol) else (by_rank(orders)[:4],)

    def relay(self, num_chunks: int) -> Relay:
        """Return the relay for the members that divide the weights into this number of chunks."""
        if num_chunks not in self._relays:
            # Members that divide the weights differently have different chunks under the same numbers.
            same = ((name, holder) for name, holder in self.held.items() if holder.holding.num_chunks == num_chunks)
            self._relays[num_chunks] = Relay(self._node(name, holder) for name, holder in same)
        return self._relays[num_chunks]

    @cached_property
    def _usual_num_chunks(self) -> int:
        """Return the number of chunks into which most members divide the weights."""
        sizes = Counter(holder.holding.num_chunks for holder in self.held.values())
        return max(sizes, key=lambda size: (sizes[size], size))

    def holders_near(self, reader: messages.Hello, holding: messages.HoldingState) -> tuple[str, ...]:
        """Return the holders for a member that is not in this snapshot yet, nearby holders first."""
        # For a member that does not know the layout yet, return members with the most common layout.
        num_chunks = holding.num_chunks or self._usual_num_chunks
        asks = Node(
            member=reader.member,
            host=reader.host,
            rack=reader.rack,
            device=holding.device,
            num_have=0,
            num_chunks=max(1, num_chunks),
        )
        return tuple(name for name in self.relay(num_chunks).around(asks) if name not in self.drained)

    def readable_chunks(self, reader: str, num_chunks: int) -> Bools:
        """Return the chunks of the members from which `reader` can read."""
        # Nearly all readers avoid the same members, so cache by the members to avoid and not by reader.
        avoid = frozenset(self.out_of_reach(reader))
        if (num_chunks, avoid) not in self._readable:
            self._readable[num_chunks, avoid] = self._chunks_without(avoid, num_chunks)
        return self._readable[num_chunks, avoid]

    def _chunks_without(self, avoid: frozenset[str], num_chunks: int) -> Bools:
        named = ((name, holder) for name, holder in self.held.items() if holder.holding.num_chunks == num_chunks)
        holders = [holder for name, holder in named if name not in avoid]
        # Skip the count below if a member has all chunks. Receivers with two trees report thousands of one-chunk
        # ranges.
        if any(holder.num_have >= num_chunks for holder in holders):
            return np.ones(num_chunks, np.bool_)
        edges = np.array([edge for holder in holders for bounds in holder.holding.have for edge in bounds], np.int64)
        # The number of ranges that begin at or before a chunk, minus those that end there, is the number of members
        # that have it.
        begun = np.bincount(edges[::2], minlength=num_chunks + 1)
        ended = np.bincount(edges[1::2], minlength=num_chunks + 1)
        return np.cumsum(begun - ended)[:num_chunks] > 0

    def _node(self, name: str, holder: HoldingEntry) -> Node:
        holding = holder.holding
        parents = holding.parent, holding.second_parent
        parent, second = parents if holding.parent else self._parents.get(name, ("", ""))
        return Node(
            member=name,
            host=holder.hello.host,
            rack=holder.hello.rack,
            device=holding.device,
            joined=holder.since,
            num_have=holder.num_have,
            num_chunks=holding.num_chunks,
            # A weight cache's lower tier is slow, so it is the last choice, like a member that is about to leave.
            draining=holding.state == "draining" or bool(holding.tier) or holder.is_drained,
            num_readers=holding.num_readers,
            max_readers=holding.max_readers,
            num_links=holder.hello.num_links,
            complainers=self.complainers.get(name, frozenset()),
            num_complaining=len(self.callers.get(name, ())),
            link=holding.link,
            parent=parent,
            second_parent=second,
            follows_trees=messages.follows_trees(holder.hello.protocol),
        )


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    groups: dict[str, set[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, set()).add(value)
    return {key: frozenset(values) for key, values in groups.items()}


def _shares_storage(holder: HoldingEntry) -> bool:
    """Return whether a member is fetching the key and can read storage."""
    return holder.reads_storage and holder.holding.state == "filling"


def by_rank(orders: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Merge several orders into one order of distinct members, sorted by the best position in any order."""
    names = (name for ranked in zip_longest(*orders) for name in ranked if name is not None)
    return tuple(dict.fromkeys(names))


class SnapshotCache:
    """The latest snapshot of one key, renewed only as often as its share of time allows."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        # For each member, its entry's version and the decoded entry.
        self._held: dict[str, tuple[bytes, HoldingEntry]] = {}
        self._complaints: dict[str, tuple[bytes, ComplaintEntry]] = {}
        self._lock = threading.Lock()
        self._view: HubSnapshot | None = None
        # After this time the snapshot is too old for ordinary requests.
        self._next = 0.0
        # Seconds that building the last relays took.
        self._relays_s = 0.0

    def _read(self) -> HubSnapshot:
        holders = self._store.scan(f"hold/{self._key}/")
        complaints = self._store.scan(f"complaint/{self._key}/")
        self._held = _decoded(HOLDING_DECODER, holders, self._held)
        self._complaints = _decoded(COMPLAINT_DECODER, complaints, self._complaints)
        return HubSnapshot(
            {name: value for name, (_, value) in self._held.items()},
            {name: value for name, (_, value) in self._complaints.items()},
            before=self._view,
        )

    def at(
        self, timer: Callable[[], float], share: float, *, again: bool, newcomer: HoldingEntry | None = None
    ) -> HubSnapshot:
        """Return a snapshot that includes the member `newcomer`. The snapshot may be cached unless `again` is set."""
        # Hold the lock, so that one of many concurrent requests renews the snapshot and the others use it.
        with self._lock:
            start = timer()
            if self._view is None or again or start >= self._next:
                self._view = self._read()
                stop = timer()
                read_s = stop - start
                # Include the time for relays, which dominates in a large fleet. A claim that lost a race requires no
                # relays.
                if not again:
                    for num_chunks in {holder.holding.num_chunks for holder in self._view.held.values()}:
                        self._view.relay(num_chunks)
                    stop = timer()
                    self._relays_s = stop - start - read_s
                cost_s = read_s + self._relays_s
                self._next = stop if cost_s < _CHEAP_READ_S else stop + cost_s / share
            if newcomer is not None and newcomer.hello.member not in self._view.held:
                self._view.add(newcomer)
            return self._view


def _decoded(
    decoder: msgspec.msgpack.Decoder[T], entries: Mapping[str, StoreEntry], before: Mapping[str, tuple[bytes, T]]
) -> dict[str, tuple[bytes, T]]:
    """Return the decoded entries with their versions. Entries with an unchanged version are taken from `before`."""
    decoded = {}
    for name, entry in entries.items():
        known = before.get(name)
        # Decoding takes most of the time, and only some members have written since the last snapshot.
        is_same = known is not None and known[0] == entry.version
        decoded[name] = known if known is not None and is_same else (entry.version, decoder.decode(entry.value))
    return decoded


def record_key(store: Store, holding: messages.HoldingState, *, ttl_s: float) -> None:
    """Record a holding's key, so that `keys_of` finds it for `ttl_s`."""
    # The model's name may contain slashes, which separate the parts of names in the store.
    store.write(f"model/{quote(holding.identity.model, safe='')}/{holding.key}", b"1", ttl_s=ttl_s)


def keys_of(store: Store, model: str) -> tuple[str, ...]:
    """Return the keys under which members hold or fetch a model."""
    return tuple(sorted(store.scan(f"model/{quote(model, safe='')}/")))


def status(store: Store, model: str | None, now: float) -> messages.Status:
    """Return the members and their holdings. If `model` is set, include only members that have or fetch it."""
    holdings_of: dict[str, list[messages.HoldingState]] = {}
    complained: Counter[str] = Counter()
    for below in [""] if model is None else [f"{key}/" for key in keys_of(store, model)]:
        # The rest of a name is KEY/MEMBER or MEMBER, depending on the scan. The member is last in both.
        for name, entry in store.scan(f"hold/{below}").items():
            holdings_of.setdefault(name.rpartition("/")[2], []).append(HOLDING_DECODER.decode(entry.value).holding)
        complained.update(name.rpartition("/")[2].partition("~")[0] for name in store.scan(f"complaint/{below}"))
    syncs = {
        name: states
        for name, all_states in _sync_states(store).items()
        if (states := [state for state in all_states if model in (None, state.name)])
    }
    if model is None:
        registered = store.scan("member/")
    else:
        entries = ((name, store.read(f"member/{name}")) for name in {*holdings_of, *syncs})
        # None means that the member left and its other entries are about to expire.
        registered = {name: entry for name, entry in entries if entry is not None}
    members = []
    for name, entry in sorted(registered.items()):
        known = MEMBER_DECODER.decode(entry.value)
        held = sorted(holdings_of.get(name, ()), key=lambda holding: holding.key)
        if known.drain is not None:
            held = [msgspec.structs.replace(holding, state="draining") for holding in held]
        members.append(
            messages.MemberStatus(
                member=name,
                name=known.hello.name,
                host=known.hello.host,
                rack=known.hello.rack,
                doors=known.hello.doors,
                age_s=max(0.0, now - known.since),
                silent_s=max(0.0, now - known.seen),
                holdings=tuple(held),
                syncs=tuple(syncs.get(name, ())),
                complaints=complained[name],
                drain=known.drain,
                boot=_standing(known),
            )
        )
    jobs, failures = jobs_of(store, model, now), failures_of(store, model, now)
    return messages.Status(members=tuple(members), jobs=jobs, failures=failures)


def encode_state(boot: Boot | None) -> bytes:
    """Encode the state and phase of a start for the store. Return b"" if the member has loaded nothing."""
    if boot is None:
        return b""
    return msgspec.msgpack.encode(Boot(started_at=boot.started_at, state=boot.state, phase=boot.phase))


def _standing(known: MemberEntry) -> str:
    """Describe a member's start in a few words. Return an empty string if it has loaded nothing."""
    if not known.boot:
        return ""
    boot = BOOT_DECODER.decode(known.boot)
    return f"{boot.state}: {boot.phase}" if boot.phase else boot.state


class SyncEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for a member of a sync."""

    hello: messages.Hello
    since: float
    seen: float
    state: messages.SyncState
    certificate: str = ""


_SYNCED = msgspec.msgpack.Decoder(SyncEntry)


def record_sync_states(
    store: Store, known: MemberEntry, states: Iterable[messages.SyncState], now: float, ttl_s: float
) -> None:
    """Store the sync states that a member's heartbeat reports."""
    for state in states:
        entry = msgspec.msgpack.encode(SyncEntry(known.hello, known.since, now, state, known.certificate))
        store.write(f"sync/{messages.sync_key(state.name)}/{known.hello.member}", entry, ttl_s=ttl_s)


def sync_entries(store: Store, name: str) -> dict[str, SyncEntry]:
    """Return the entries of the live members of a sync, by member."""
    entries = {
        member: _SYNCED.decode(entry.value) for member, entry in store.scan(f"sync/{messages.sync_key(name)}/").items()
    }
    # Skip members that left, because their entries in the sync expire later.
    return {
        member: entry
        for member, entry in entries.items()
        if entry.state.name == name and store.read(f"member/{member}") is not None
    }


def sync_members(store: Store, request: messages.SyncRequest, signer: GrantSigner) -> messages.SyncReply:
    """Return the live members of a sync, the earliest first."""
    key, asked = messages.sync_key(request.name), frozenset(request.grants)
    live = sync_entries(store, request.name)
    wanted = [name for name in live if name in asked]
    grants = signer.sign(
        key=key,
        reader=request.member,
        epochs={name: live[name].state.grant_epoch for name in wanted},
        protocols={name: live[name].hello.protocol for name in wanted},
    )
    members = [
        messages.SyncMember(
            member=name,
            host=entry.hello.host,
            doors=entry.hello.doors,
            called=entry.hello.name,
            since=entry.since,
            seen=entry.seen,
            state=entry.state,
            grant=grants.get(name, b""),
            certificate=entry.certificate,
        )
        for name, entry in live.items()
    ]
    members.sort(key=lambda member: (member.since, member.member))
    return messages.SyncReply(members=tuple(members), is_new=store.read("hub/quiet") is not None)


DECISION_TTL_S = 3600.0
"""Seconds for which a decision is kept. A subscriber that was disconnected for longer receives a later version."""
_DECISION = msgspec.msgpack.Decoder(messages.FleetDecision)


def decision_name(request: messages.DecideRequest) -> str:
    """Return the name of a decision in the store."""
    return f"decision/{messages.sync_key(request.name)}/{request.decision.epoch}/{request.decision.version}"


def decide(store: Store, request: messages.DecideRequest) -> messages.DecideReply:
    """Return the decision on a version. The first proposal becomes the decision.

    Raises:
        PermissionDenied: the caller is not in the sync, or it proposes a commit and is not rank 0 of the publishers.
    """
    proposal, key = request.decision, messages.sync_key(request.name)
    states = {member: _SYNCED.decode(entry.value).state for member, entry in store.scan(f"sync/{key}/").items()}
    if request.member not in states or states[request.member].name != request.name:
        raise PermissionDenied(f"member {request.member} is not part of the sync {request.name!r}")
    if proposal.outcome == "committed" and request.member != proposal.epoch:
        raise PermissionDenied("only rank 0 of the publishers may commit a version")
    name = decision_name(request)
    entry = store.read(name)
    if entry is not None:
        return messages.DecideReply(decision=_DECISION.decode(entry.value))
    reply = standing(proposal, states, request.member, is_recent=store.read("hub/recent") is not None)
    if reply.decision is None or store.write(
        name, msgspec.msgpack.encode(reply.decision), ttl_s=DECISION_TTL_S, expected=ABSENT
    ):
        return reply
    # Another proposal arrived first.
    entry = store.read(name)
    return messages.DecideReply(decision=None if entry is None else _DECISION.decode(entry.value))


def standing(
    proposal: messages.FleetDecision, states: Mapping[str, messages.SyncState], caller: str, *, is_recent: bool
) -> messages.DecideReply:
    """Return the decision on a version of which this hub has no record.

    Args:
        proposal: the caller's proposal. An empty outcome only requests the decision.
        states: states of all members of the sync, as they reported them.
        is_recent: whether the hub may have lost a record that members have not reported again yet.
    """
    known = [(member, state.decision) for member, state in states.items() if state.decision is not None]
    ours = [(member, decision) for member, decision in known if decision.epoch == proposal.epoch]
    # The hub that had the record may be gone, so prefer decisions that members report. A subscriber's refusal counts
    # last, because the fleet may have committed without it.
    # A subscriber that read the version after the commit has it live without knowing the decision.
    live = messages.FleetDecision(epoch=proposal.epoch, version=proposal.version, outcome="committed")
    ours += [
        (member, live)
        for member, state in states.items()
        if (state.side, state.epoch, state.version) == ("subscriber", proposal.epoch, proposal.version)
    ]
    for outcome in ("committed", "withdrawn"):
        for member, decision in ours:
            is_own = decision.outcome == "withdrawn" and decision.by == member
            if (decision.version, decision.outcome) == (proposal.version, outcome) and not (is_own and is_recent):
                return messages.DecideReply(decision=decision)
    if any(decision.version > proposal.version for _, decision in ours):
        return messages.DecideReply(is_past=True)
    # A subscriber that follows a lost decision may not have reported the decision yet. Only rank 0 commits, so rank 0
    # may withdraw at any time.
    is_safe = not is_recent or (caller == proposal.epoch and proposal.outcome == "withdrawn")
    return messages.DecideReply(decision=proposal if proposal.outcome and is_safe else None)


def _sync_states(store: Store) -> dict[str, list[messages.SyncState]]:
    by_member: dict[str, list[messages.SyncState]] = {}
    for name, entry in store.scan("sync/").items():
        by_member.setdefault(name.partition("/")[2], []).append(_SYNCED.decode(entry.value).state)
    return {member: sorted(states, key=lambda state: state.name) for member, states in by_member.items()}
