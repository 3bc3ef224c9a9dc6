"""A snapshot of one key at the hub: the members that have or fetch it, complaints, and the relay among them.

In: the store's entries. Out: a `HubSnapshot`. Not here: changing anything (`directory`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.hub.claims import Bools
from penstock.hub.messages import Complaint, Hello, HoldingState, MemberStatus, Status
from penstock.hub.store import Entry, Store
from penstock.hub.sync_directory import states_of
from penstock.plan.relay import DISTRUST, Node, Relay

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
