"""A sync in memory: holders of versions, and a subscriber that receives from them without processes or sockets.

The planner, the served memory, the update loop, the transfer and the transport (`loopback`) are the real ones. The
membership and the member of the `Subscriber` are in this process.

    sync = MemorySync();  holder = sync.holder("p0");  holder.publish(1, 1.0);  sync.subscriber().update()
    holder.at["digests"] = lambda: holder.withdraw()     runs before each answer to this question
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.digest.strip import Strips
from penstock.errors import NotFound, PeerLost, StaleDescriptor
from penstock.hub.messages import DecideReply, FleetDecision, SyncMember, SyncState
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.outcome import Granted, Withdrawn, to_part_reply
from penstock.sync.local_version import Answer, LocalVersion, VersionMap
from penstock.sync.membership import Membership, Whereabouts
from penstock.sync.messages import Decision, PartReply, PartRequest
from penstock.sync.planner import Planner
from penstock.sync.receive.hooks import Hooks
from penstock.sync.receive.sources import PeerLink
from penstock.sync.receive.staged import UpdateOptions
from penstock.sync.receive.subscriber import Subscriber
from penstock.sync.shards import declared, layout_of, regions_of
from penstock.timing import Timing
from penstock.transport.choose import PeerLinks, open_links

SHAPES = {"a": (64, 8), "b": (32,)}
QUICK = Timing(
    version_grace_s=0.05,
    version_pause_s=0.005,
    member_list_s=0.0,
    retry_pause_s=0.001,
    news_wait_s=0.01,
    no_planner_pause_s=0.005,
    next_update_pause_s=0.01,
    map_wait_s=0.01,
    map_pause_s=0.002,
    digest_wait_s=0.02,
    progress_interval_s=0.05,
    decision_wait_s=0.01,
    decision_pause_s=0.005,
)
STALL_S = 0.3


class MemoryHolder:
    """A publisher with one rank that answers from this process.

    Attributes:
        id: its member id.
        at: for each question, a function that is called before each answer. It may raise.
        asked: the questions so far.
        is_gone: every question raises PeerLost.
        spoils: it sends digests of different bytes.
        silent: it never has digests.
        is_listed: whether the hub lists it.
        decide_s: deadline for versions with a two-phase commit. See `Granted`.
        refused: the withdrawal of its versions.
        decision: the fleet's decision on a version with a two-phase commit.
    """

    def __init__(self, sync: MemorySync, name: str) -> None:
        self.id = name
        self.at: dict[str, Callable[[], object]] = {}
        self.asked: list[str] = []
        self.is_gone = self.spoils = self.silent = False
        self.is_listed = True
        self.decide_s: float | None = None
        self.refused: Withdrawn | None = None
        self.decision: FleetDecision | None = None
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        rows = declared(self.tensors)
        memories = regions_of(rows)
        self.layout = layout_of(rows, name, name, memories)
        self.local_version = LocalVersion(self.layout, memories, sync.links)
        self.status = VersionStatus()
        self._sync = sync
        membership = cast("Membership", MemoryMembership(sync, SimpleNamespace(id=name)))
        self.planner = Planner(membership, self.status, lambda: self.layout, terms=self._terms)

    def _terms(self, asker: str, request: PartRequest, epoch: str, version: int) -> Withdrawn | Granted:
        if self.refused is not None:
            return self.refused
        return Granted(version=version, epoch=epoch, decide_s=self.decide_s)

    @property
    def state(self) -> SyncState:
        now = self.status.now
        return SyncState(
            name="policy",
            side="publisher",
            epoch=now.epoch or self.id,
            layout=self.layout.digest(),
            version=now.version,
            state="open" if now.is_open else "idle",
        )

    def publish(self, version: int, value: float, metadata: dict[str, str] | None = None) -> None:
        """Serve a version whose elements all have the same value."""
        if self.local_version.version is not None:
            self.local_version.fence()
        for tensor in self.tensors.values():
            tensor.fill_(value)
        self.local_version.begin(version, metadata or {})
        self.local_version.ready()
        self.status.post(self.id, version, is_open=True)

    def withdraw(self) -> None:
        """Stop serving the version."""
        self.status.post(self.id, self.status.now.version, is_open=False)
        if self.local_version.version is not None:
            self.local_version.fence()

    def answer(self, question: str) -> None:
        """Record a question. Raise the error that the test has set for it."""
        self.asked.append(question)
        if question in self.at:
            self.at[question]()
        if self.is_gone:
            raise PeerLost("the holder is gone", uri=f"penstock:{self.id}")


class MemoryClient:
    """The part of `SyncClient` that an update uses, for one member and one holder."""

    is_on_host = True

    def __init__(self, holder: MemoryHolder, asker: str) -> None:
        self._holder = holder
        self._asker = asker

    def layout(self) -> Any:
        self._holder.answer("layout")
        return self._holder.layout

    def checkpoint(self) -> Any:
        self._holder.answer("checkpoint")
        return self._holder.planner.table()

    def part(self, request: PartRequest) -> PartReply:
        self._holder.answer("part")
        return to_part_reply(self._holder.planner.part(self._asker, request))

    def news(self, after: int, wait_s: float) -> Any:
        self._holder.answer("news")
        return self._holder.status.wait(after, wait_s)

    def version_map(self, version: int, wait_s: float) -> VersionMap:
        self._holder.answer("map")
        served = self._holder.local_version
        if served.version is None or served.version < version:
            if self._holder.status.is_past(version):
                raise StaleDescriptor(f"version {version} is past")
            raise NotFound(f"version {version} has not begun")
        if served.version != version:
            raise StaleDescriptor(f"version {version} was replaced")
        return served.map()

    def digests(self, strips: Strips, version: int, generation: int, wait_s: float) -> Answer:
        holder = self._holder
        holder.answer("digests")
        answer = holder.local_version.digests(strips, version=version, generation=generation, wait_s=wait_s)
        if holder.silent:
            return Answer(digests=None, num_ready=0)
        if holder.spoils and answer.digests is not None:
            return Answer(digests=answer.digests ^ np.uint64(1), num_ready=answer.num_ready)
        return answer

    def progress(self, progress: object) -> None:
        self._holder.asked.append(f"progress {getattr(progress, 'outcome', '')}".rstrip())

    def decision(self, version: int, wait_s: float) -> Decision:
        self._holder.answer("decision")
        fleet = self._holder.decision
        return Decision(is_over=fleet is not None, is_begun=True, fleet=fleet)


class MemoryMembership:
    """The part of `Membership` that an update uses."""

    name = "policy"
    key = "0" * 32
    stall_s = STALL_S
    timing = QUICK

    def __init__(self, sync: MemorySync, member: Any) -> None:
        self.member = member
        self._sync = sync

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        return self._sync.listed()

    def ask(self, member: str, question: Callable[[Any], Any], *, channel: str = "") -> Any:
        holder = self._sync.holders.get(member)
        if holder is None:
            raise PeerLost("the member left this sync", uri=f"penstock:{member}")
        return question(MemoryClient(holder, self.member.id))

    def whereabouts(self, member: str, *, max_age_s: float) -> Whereabouts:
        return "there" if member in self._sync.holders else "left"

    def close(self) -> None:
        """Do nothing."""


class MemoryMember:
    """The part of `Member` that a subscriber uses."""

    def __init__(self, sync: MemorySync) -> None:
        self.id = "s0"
        self.links: PeerLinks = sync.links
        self.server = SimpleNamespace(handlers={})
        self.syncs: list[Callable[[], SyncState]] = []
        self.reports: list[SyncState] = []
        self.has_left = False
        self.hub_decision: FleetDecision | None = None
        # It checks no grants, because nobody asks this member.
        self.registration = SimpleNamespace(check_grant=None)

    def report_now(self) -> None:
        self.reports += [state() for state in self.syncs]

    beat_now = report_now

    def decide(self, name: str, proposal: FleetDecision) -> DecideReply:
        return DecideReply(decision=self.hub_decision or proposal)

    def leave(self, wait_s: float) -> None:
        self.has_left = True


class MemorySync:
    """A sync within this process.

    Attributes:
        holders: the holders by member id.
        target: the target of the last subscriber.
        calls: the hooks that were called, as (name, version, value of the target then).
        fails: the error that each hook raises.
    """

    def __init__(self, links: PeerLinks) -> None:
        self.links = links
        self.holders: dict[str, MemoryHolder] = {}
        self.target: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[str, int, float]] = []
        self.fails: dict[str, BaseException] = {}
        self.at: dict[str, Callable[[], object]] = {}
        self.member = MemoryMember(self)

    def holder(self, name: str) -> MemoryHolder:
        """Return a new holder."""
        self.holders[name] = made = MemoryHolder(self, name)
        return made

    def listed(self) -> tuple[SyncMember, ...]:
        """Return the members as the hub lists them."""
        states = [(holder.id, holder.state) for holder in self.holders.values() if holder.is_listed]
        states += [(self.member.id, state()) for state in self.member.syncs]
        return tuple(
            SyncMember(member=name, host="h", doors=("unix:///d",), called="", since=float(i), seen=0.0, state=state)
            for i, (name, state) in enumerate(states)
        )

    @property
    def value(self) -> float:
        """Return the value of all elements in the target, or NaN if they differ."""
        flat = torch.cat([tensor.reshape(-1) for tensor in self.target.values()])
        return float(flat[0]) if bool((flat == flat[0]).all()) else float("nan")

    def subscriber(
        self, mode: str = "staged", *, serve: bool = True, check: Any = None, timing: Timing = QUICK
    ) -> Subscriber:
        """Return a subscriber whose target has the value -1 everywhere."""
        self.target = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}

        def hook(name: str) -> Callable[..., None]:
            def call(version: int, *_: object) -> None:
                self.calls.append((name, version, self.value))
                if name in self.at:
                    self.at[name]()
                if name in self.fails:
                    raise self.fails[name]

            return call

        names = ("before_read", "before_pause", "at_commit", "after_resume")
        hooks = Hooks(**{name: hook(name) for name in names}, check=check)
        options = UpdateOptions(
            staged=mode == "staged",
            load=None,
            strict=True,
            transforms=None,
            serve=serve,
            memory_bytes=None,
            hooks=hooks,
        )
        membership = cast("Membership", MemoryMembership(self, self.member))
        made = Subscriber("policy", self.target, membership, options, rank=0, world_size=1, timing=timing)
        return made.open()


@contextlib.contextmanager
def memory_sync() -> Iterator[MemorySync]:
    """Yield a sync in memory. Links to its holders count as links within the process."""
    with pytest.MonkeyPatch.context() as patch, open_links(only=["loopback"]) as links:
        patch.setattr(PeerLink, "same_process", True)
        yield MemorySync(links)
