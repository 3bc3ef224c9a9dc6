"""Elements that a publisher rank needs of others, to quantise blocks that reach beyond what it holds.

In: a rank's rows, and the boxes it needs of others' (`transformed`). Out: at each publish those boxes, verified, of the
version, on every rank or on none.
Not here: which they are (`transform.geometry`), quantising, versions that receivers see (`publisher`).

    A sync among the publishers, by the same planner, parts, leases of memory and transports, in a room of its own at
    their doors: wants = foreign boxes, holdings = all rows. Rank 0 plans, once; and says when all are done.

    begin(v) on every rank -> part (the one it has, if nothing changed) -> take -> quantise -> all are done: fence
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import NotFound, PeerLost, PenstockError, PlanError, SourceStalled, StaleDescriptor
from penstock.hub.sync_messages import Decision, PartReply, PartRequest, Progress, SyncMember, TableReply
from penstock.peer.member import Member
from penstock.plan.columns import decode, encode
from penstock.plan.layout import Layout
from penstock.plan.sync import Part, SyncPlan, plan_sync
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.publish.progress import SubscriberProgress
from penstock.sync.publish.rank_group import decided
from penstock.sync.receive.source_link import LocalLink, SourceLink
from penstock.sync.receive.sources import SourceFailed, open_links
from penstock.sync.receive.transfer import Transfer
from penstock.sync.regions import Regions
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import Row, layout_of, regions_of
from penstock.sync.version_status import VersionStatus

ROOM = "seams"
_ASK_S = 0.02
_LOOK_S = 1.0


class BoundaryPlanner:
    """The planner of rank 0: plans for all ranks when all have reported their needs, and again only after a change.

    Args:
        roster: of the room.
        ours: our own layout.
    """

    def __init__(self, membership: Membership, ours: Layout) -> None:
        self._membership, self._lock, self._planning = membership, threading.Lock(), threading.Lock()
        self._held: dict[str, Layout] = {ours.member: ours}
        self._wants: dict[str, tuple[str, Layout]] = {}
        self._ranks: tuple[SyncMember, ...] = ()
        self._version, self._why = -1, ""
        self._plan: SyncPlan | None = None
        self._of: tuple[str, ...] = ()

    def begin(self, version: int, ranks: Sequence[SyncMember]) -> None:
        """From now on parts of this version are given, to these."""
        with self._lock:
            self._version, self._ranks, self._why = version, tuple(ranks), ""

    def fail(self, why: str) -> None:
        """The version comes to nothing."""
        with self._lock:
            self._why = why

    def lacking(self) -> list[SyncMember]:
        """Ranks that have not said what they need."""
        with self._lock:
            return [one for one in self._ranks if one.member not in self._wants]

    def part(self, asker: str, request: PartRequest) -> PartReply:
        """See `Planner.part`.

        Raises:
            StaleDescriptor: the version came to nothing.
            PlanError: the ranks hold not all elements of a block; lists them.
        """
        with self._lock:
            known = self._wants.get(asker)
            if known is None or known[0] != request.digest:
                if request.layout is None:
                    return PartReply(needs_layout=True)
                told = decode(request.layout, Layout)
                if told.member != asker or told.digest() != request.digest:
                    raise PlanError(
                        f"{asker} sent a layout of {told.member}, or one whose digest differs from its request"
                    )
                self._wants[asker] = request.digest, told
            if request.version != self._version:
                return PartReply(not_yet=f"rank 0 has not begun version {request.version}")
            if self._why:
                raise StaleDescriptor(self._why)
            ranks = self._ranks
            if all(one.member != asker for one in ranks):
                raise StaleDescriptor("another process has that rank")
        if lacking := self.lacking():
            return PartReply(not_yet=f"rank {lacking[0].state.rank} has not said what it needs")
        with self._planning:
            plan = self._planned(ranks)
        if asker not in plan.receivers:
            return PartReply(version=request.version, key=plan.key)
        same = request.have_key == plan.key
        part = None if same else encode(plan.part(plan.receivers.index(asker)))
        return PartReply(version=request.version, key=plan.key, part=part)

    def _planned(self, ranks: Sequence[SyncMember]) -> SyncPlan:
        members = [one.member for one in ranks]
        with self._lock:
            self._held = {name: one for name, one in self._held.items() if name in members}
            self._wants = {name: one for name, one in self._wants.items() if name in members}
            told = [self._wants[name] for name in members if self._wants[name][1].names]
            token = (*members, *(digest for digest, _ in told))
        for name in members:
            if name not in self._held:
                self._held[name] = self._membership.ask(name, lambda sync_client: sync_client.layout())
        if self._plan is None or token != self._of:
            self._plan, self._of = (
                plan_sync([self._held[name] for name in members], [want for _, want in told]),
                token,
            )
        return self._plan

    def table(self) -> TableReply:
        """Nobody asks for a checkpoint here."""
        raise NotFound("no such thing here")


class BoundaryExchange:
    """The exchange of one rank; a context manager by its `close`.

    Attributes:
        moved_bytes: of the last version.

    Args:
        member: this process in the fleet.
        name: of the sync.
        rows: what we hold of tensors that have blocks.
        wants: what we need of others, in memory of its own.
        is_first: whether we are rank 0.
        world_size: ranks.
        stall_s: deadline by progress.

    Raises:
        ConfigError: no transport reaches the rows.
    """

    def __init__(
        self,
        member: Member,
        name: str,
        rows: Sequence[Row],
        wants: Sequence[Row],
        *,
        is_first: bool,
        world_size: int,
        stall_s: float,
    ) -> None:
        self._member, self._world_size, self._stall_s, self.moved_bytes = member, world_size, stall_s, 0
        memories, into = regions_of(rows), regions_of(wants)
        self._membership, self._version_status = Membership(member, name, stall_s, room=ROOM), VersionStatus()
        self._want = layout_of(wants, member.id, secrets.token_hex(8), into)
        self._digest = self._want.digest()
        self._transfer: Transfer | None = None
        self._peers = SubscriberProgress() if is_first else None
        with contextlib.ExitStack() as stack:
            layout = layout_of(rows, member.id, secrets.token_hex(8), memories)
            self._held = LocalVersion(layout, memories, member.links)
            stack.callback(self._held.close)
            self._into = Regions(into, member.links)
            stack.pop_all()
        self._planner = BoundaryPlanner(self._membership, layout)
        member.server.handlers[ROOM] = SyncHandler(
            self._membership.key,
            member.check_grant,
            held=lambda: self._held,
            version_status=self._version_status,
            planner=self._planner,
            subscriber_progress=self._peers,
        )

    @contextlib.contextmanager
    def exchanged(self, version: int, run: str) -> Iterator[None]:
        """Inside, what we need of others is here; on leaving, all ranks are done inside, and parameters may change.

        Raises:
            PeerLost, SourceStalled: a rank is gone, silent, or could not have its own; on every rank. PlanError,
                IntegrityError: a rank's own reason.

        Order: while the parameters are the version's, on every rank.
        """
        self._held.begin(version)
        self._held.ready()
        self._version_status.post(run, version, is_open=True)
        try:
            self._begin(version, run)
            self._run(version, run)
            yield
        except BaseException as error:
            if isinstance(error, PenstockError):
                error.mutated = False  # of memory that is ours alone
            why = str(error) or type(error).__name__
            self._planner.fail(f"version {version} is not quantised: {why}")
            with contextlib.suppress(PenstockError):  # ours is the one that is raised
                self._report(version, run, why[:1024])
            if self._peers is not None:
                self._peers.wait(version, stall_s=self._stall_s, is_gone=self._is_gone)
            raise
        else:
            self._report(version, run, "")
            self._settle(version, run)
        finally:
            self._held.fence()
            self._version_status.post(run, version, is_open=False)

    def _begin(self, version: int, run: str) -> None:
        """As rank 0, know whom to wait for, and give parts."""
        if self._peers is not None:
            self._peers.absent.clear()
            self._peers.begin(version, [self._member.id])
            ranks = self._ranks(run)
            self._peers.begin(version, [one.member for one in ranks])
            self._planner.begin(version, ranks)

    def _report(self, version: int, run: str, why: str) -> None:
        """Tell rank 0 that we are done, or why we cannot be."""
        moved = self.moved_bytes
        told = Progress(version=version, moved_bytes=moved, outcome="failed" if why else "committed", why=why)
        if self._peers is not None:
            self._peers.heard(self._member.id, told)
        else:
            self._membership.ask(run, lambda sync_client: sync_client.progress(told), line="progress")

    def _ranks(self, run: str) -> list[SyncMember]:
        """All ranks of our run, the newest life of each.

        Raises:
            SourceStalled: one did not come.
        """
        deadline = time.monotonic() + self._stall_s
        while True:
            found = {
                one.state.rank: one
                for one in sorted(self._membership.look(), key=lambda one: one.since)
                if one.state.side == "publisher" and one.state.run == run
            }
            if len(found) == self._world_size:
                return [found[rank] for rank in sorted(found)]
            if time.monotonic() > deadline:
                message = f"{len(found)} of {self._world_size} ranks publish {self._membership.name!r}"
                raise SourceStalled(f"{message} after {self._stall_s:g} s")
            time.sleep(_ASK_S)

    def _run(self, version: int, run: str) -> None:
        """Read and verify what we need."""
        self.moved_bytes = 0
        if not self._has_part(version, run):
            return
        assert self._transfer is not None
        part = self._transfer.part
        used = [part.sources[i] for i in part.link_bytes().nonzero()[0].tolist()]
        links: dict[str, SourceLink] = {}
        try:
            links |= open_links(
                self._membership, [one for one in used if one != self._member.id], version, self._stall_s
            )
        except SourceFailed as failed:
            raise failed.error from failed
        if self._member.id in used:
            links[self._member.id] = LocalLink(self._held)
        self.moved_bytes = self._transfer.run(links).nbytes

    def _has_part(self, version: int, run: str) -> bool:
        """Return whether this rank needs anything; `_transfer` is of this version's plan then."""
        have = "" if self._transfer is None else self._transfer.part.key
        layout: bytes | None = None
        begun = looked = time.monotonic()
        while True:
            request = PartRequest(version=version, digest=self._digest, layout=layout, have_key=have)
            reply = self._asked(request, run)
            if reply.needs_layout:
                layout = encode(self._want)
            elif not reply.not_yet:
                break
            elif time.monotonic() - begun > self._stall_s:
                raise SourceStalled(f"version {version} is not exchanged: {reply.not_yet}")
            else:
                time.sleep(_ASK_S)
            if self._peers is not None and time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                for one in self._planner.lacking():
                    if self._is_gone(one.member):
                        raise PeerLost(f"rank {one.state.rank} is gone", uri=f"penstock:{one.member}")
        if reply.part is not None:
            part = decode(reply.part, Part)
            self._transfer = Transfer(part, self._into, names=self._want.names, stall_s=self._stall_s)
        if self._want.names and (self._transfer is None or self._transfer.part.key != reply.key):
            raise PlanError("rank 0 sent no part, or a part whose key differs from the one in its answer")
        return bool(self._want.names)

    def _asked(self, request: PartRequest, run: str) -> PartReply:
        try:
            if self._peers is not None:
                return self._planner.part(self._member.id, request)
            return self._membership.ask(run, lambda sync_client: sync_client.part(request))
        except StaleDescriptor as error:
            raise PeerLost(error.message, uri=f"penstock:{run}") from error

    def _settle(self, version: int, run: str) -> None:
        """Wait until all ranks are done; raise where one is not."""
        if self._peers is not None:
            said = self._peers.wait(version, stall_s=self._stall_s, is_gone=self._is_gone)
        else:
            said = decided(self._membership, run, version, self._stall_s)
        if said.failed or said.late:
            raise _undone(version, said)

    def _is_gone(self, member: str) -> bool:
        found = [one for one in self._membership.look(max_age_s=_LOOK_S) if one.member == member]
        return not found or self._membership.is_gone(found[0])

    def close(self) -> None:
        """End the registrations and conversations. Idempotent."""
        self._held.close()
        self._into.close()
        self._membership.close()


def _undone(version: int, said: Decision) -> PenstockError:
    """Return the error that kept the ranks from quantising a version together."""
    why: Mapping[str, str] = said.failed
    lines = [f"{member[:8]}: {reason}" for member, reason in why.items()]
    lines += [f"{member[:8]}: no progress" for member in said.late]
    message = f"version {version} is not quantised on all ranks: {'; '.join(lines)}"
    return PeerLost(message) if why else SourceStalled(message)
