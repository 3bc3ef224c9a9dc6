"""A sync within one process: the members' hub, servers and transports are objects in memory.

Real publishers use its `Membership`s. There are no sockets, processes or heartbeat threads. `sync` has members as
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from penstock.errors import HubUnavailable, PeerLost
from penstock.hub.messages import (
    Beat,
    DecideReply,
    DecideRequest,
    FleetDecision,
    Hello,
    SessionRequest,
    SyncMember,
    SyncReply,
    SyncRequest,
    SyncState,
)
from penstock.peer.registration import Registration
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision, PartReply, PartRequest, RankProgress
from penstock.sync.publish.offer import OfferOptions
from penstock.sync.publish.registered import Registered
from penstock.timing import Timing
from penstock.transport.choose import PeerLinks
from penstock.transport.loopback import LoopbackTransport
from penstock_hub.directory import Directory
from penstock_hub.store import MemoryStore

SHORT = Timing(
    group_pause_s=0.005,
    group_list_s=0.0,
    record_pause_s=0.005,
    probe_interval_s=0.02,
    members_pause_s=0.005,
    decision_wait_s=0.05,
)


class Hub:
    """The hub's real logic on a store in memory, and the members by id."""

    def __init__(self, *, ttl_s: float = 10.0) -> None:
        self.directory = Directory(MemoryStore(), fresh=True, ttl_s=ttl_s, seed=bytes(32))
        self.directory.begin()
        self.members: dict[str, MemoryMember] = {}
        self.is_away = False
        """Whether requests fail."""

    def check(self) -> None:
        if self.is_away:
            raise HubUnavailable("the hub does not answer")


class _Server:
    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}


class MemoryMember:
    """Replaces `peer.member.Member`. It reports every change to the hub at once."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.id = name.ljust(32, "0")
        self.host = "host"
        self.trust = None
        self.is_dead = False
        """Whether its process ended without leaving."""
        self.server = _Server()
        self.links = PeerLinks({"loopback": LoopbackTransport})
        self.syncs: list[Callable[[], SyncState]] = []
        self.on_report: Callable[[], object] = lambda: None
        """Called before each report to the hub."""
        self._hub = hub
        client: Any = SimpleNamespace(is_local=False, hello=lambda hello, timeout_s: hub.directory.hello(hello))
        hello = Hello(member=self.id, host="host", doors=(f"unix:///{name}",), name=name)
        self.registration = Registration(client, hello)
        self.registration.open(None, stall_s=1.0, needs_hub=True)
        # The stand-in for a connection carries no grants.
        self.registration.check_grant = lambda request: ""  # type: ignore[method-assign]
        hub.members[self.id] = self

    def report_now(self) -> None:
        self.on_report()
        if not self._hub.is_away and not self.is_dead:
            self._hub.directory.beat(self.id, Beat(holdings=(), syncs=tuple(state() for state in self.syncs)))

    beat_now = report_now

    def sync(self, name: str, grants: tuple[str, ...] = ()) -> SyncReply:
        self._hub.check()
        return self._hub.directory.sync(SyncRequest(member=self.id, name=name, grants=grants))

    def decide(self, name: str, decision: FleetDecision) -> DecideReply:
        self._hub.check()
        return self._hub.directory.decide(DecideRequest(member=self.id, name=name, decision=decision))

    def die(self) -> None:
        """End without leaving. The hub still lists it, and its server refuses connections."""
        self.is_dead = True

    def leave(self, drain_s: float = 0.0) -> None:
        if not self.is_dead and not self._hub.is_away:
            self._hub.directory.leave(self.id)
        self.is_dead = True


class _Client:
    """Replaces `SyncClient`. It calls the other member's request handler."""

    def __init__(self, hub: Hub, other: SyncMember, ours: str, key: str) -> None:
        self._hub, self._other, self._ours, self._key = hub, other.member, ours, key
        self._grant = other.grant
        self.must_be_on_host = True
        self._path: list[str] = []

    def open(self, session: str = "") -> str:
        request = SessionRequest(member=self._ours, key=self._key, grant=self._grant)
        opened = session or self._answer("POST", [], request).session
        self._path = [opened]
        return opened

    def alive(self) -> None:
        if self._hub.members[self._other].is_dead:
            raise PeerLost("its server refuses connections")

    def decision(self, version: int, wait_s: float) -> Decision:
        return self._answer("GET", [*self._path, "decision"], version=version, wait_ms=int(wait_s * 1000))

    def begins_after(self, rank: int, wait_s: float) -> int:
        return self._answer("GET", [*self._path, "begins_after"], rank=rank, wait_ms=int(wait_s * 1000)).version

    def part(self, request: PartRequest) -> PartReply:
        return self._answer("POST", [*self._path, "part"], request)

    def progress(self, progress: RankProgress) -> None:
        self._answer("POST", [*self._path, "progress"], progress)

    def _answer(self, verb: str, path: list[str], body: object = None, **query: int) -> Any:
        self.alive()
        handler = self._hub.members[self._other].server.handlers["sync"]
        raw = b"" if body is None else msgspec.msgpack.encode(body)
        return handler.answer(verb, path, {name: [str(value)] for name, value in query.items()}, lambda limit: raw)

    def close(self) -> None:
        pass


class MemoryMembership(Membership):
    """A real `Membership` whose clients are calls within this process."""

    def __init__(self, hub: Hub, member: MemoryMember, *, stall_s: float = 5.0, timing: Timing = SHORT) -> None:
        super().__init__(member, "policy", stall_s, timing=timing)  # type: ignore[arg-type]
        self._memory_hub = hub
        self.on_look: Callable[[], object] = lambda: None
        """Called before each query of the members."""

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        self.on_look()
        return super().look(max_age_s=max_age_s)

    def connect(self, other: SyncMember, stall_s: float) -> Any:
        return _Client(self._memory_hub, other, self.member.id, self.key)


class MemorySubscriber:
    """A subscriber that only sends reports to a publisher.

    Attributes:
        member: its entry in the hub's list.
    """

    def __init__(self, hub: Hub, name: str) -> None:
        self.member = MemoryMember(hub, name)
        self.member.syncs.append(lambda: SyncState(name="policy", side="subscriber"))
        self.member.report_now()
        self._membership = MemoryMembership(hub, self.member)

    def report(self, publisher: str, version: int, outcome: str, *, why: str = "") -> None:
        """Send a report to the publisher's rank 0."""
        progress = RankProgress(version=version, outcome=outcome, why=why)  # type: ignore[arg-type]
        self._membership.ask(publisher, lambda client: client.progress(progress))

    def decision(self, publisher: str, version: int, wait_s: float = 0.0) -> Decision:
        """Return rank 0's decision."""
        return self._membership.ask(publisher, lambda client: client.decision(version, wait_s))


def registered(member: MemoryMember, params: dict[str, torch.Tensor], *, is_live: bool, world_size: int) -> Registered:
    """Register a rank's tensors with the member's transport."""
    options = OfferOptions(
        copies=None if is_live else "device",
        transforms=None,
        keep_plain=True,
        arena=False,
        memory_bytes=None,
        pack_bytes=0,
        world_size=world_size,
    )
    found = Registered(params, options)
    found.register(member)  # type: ignore[arg-type]
    return found
