"""The exchange of boundary elements between publisher ranks, needed to quantise blocks that cross shard edges.

At each publish, every rank reads and verifies the regions that it needs from other ranks. Rank 0 plans the reads, and
the exchange succeeds on all ranks or on no rank. The exchange is a sync among publishers with its own request handler.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

from penstock.engine.threads import KeptThreads
from penstock.errors import NotFound, PeerLost, PenstockError, PlanError, SourceStalled, StaleDescriptor
from penstock.holding.regions import VersionRegions
from penstock.hub.messages import SyncMember
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import ReceiverPlan, SyncPlan, plan_sync
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.coordinator import CommitCoordinator
from penstock.sync.commit.outcome import Granted, LayoutNeeded, NotYet, PartOutcome, Reported, of_part_reply
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.messages import PartRequest, RankProgress, TableReply
from penstock.sync.planner import layout_in
from penstock.sync.publish.rank_group import decided
from penstock.sync.receive.sources import LinkRequests, LocalLink
from penstock.sync.receive.transfer import Transfer
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import ShardRow, layout_of, regions_of
from penstock.transfer.blame import SourceFailed

HANDLER = "boundary"


class BoundaryPlanner:
    """The planner on rank 0, which plans when all ranks have reported their requirements, and again after a change."""

    def __init__(self, membership: Membership, ours: Layout) -> None:
        self._membership = membership
        # Planning holds only `_planning`, so that ranks can report their requirements in the meantime.
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        # For each member: the layout of all rows, the required rows with a digest, and the last requested version.
        self._layouts: dict[str, Layout] = {ours.member: ours}
        self._required: dict[str, tuple[str, Layout]] = {}
        self._requested: dict[str, int] = {}
        self._ranks: tuple[SyncMember, ...] = ()
        self._version = -1
        self._why = ""
        self._plan: SyncPlan | None = None
        self._plan_token: tuple[str, ...] = ()

    def begin(self, version: int, ranks: Sequence[SyncMember]) -> None:
        """From now on, serve parts of the plan for this version to these ranks."""
        with self._lock:
            self._version = version
            self._ranks = tuple(ranks)
            self._why = ""

    def fail(self, why: str) -> None:
        """From now on, reject requests for this version with a reason."""
        with self._lock:
            self._why = why

    def lacking(self) -> list[SyncMember]:
        """Return the ranks that have not reported their requirements for this version."""
        with self._lock:
            return [rank for rank in self._ranks if self._requested.get(rank.member) != self._version]

    def part(self, member: str, request: PartRequest) -> PartOutcome:
        """See `Planner.part`. Raise StaleDescriptor if the version failed, or PlanError if elements are missing."""
        with self._lock:
            # Store the layout even if the version is wrong, because other ranks wait for the layout.
            known = self._required.get(member)
            if known is None or known[0] != request.digest:
                if request.layout is None:
                    return LayoutNeeded()
                self._required[member] = request.digest, layout_in(request, member)
                # The rank's tensors moved, so drop its layout. If rank 0's tensors move, it creates a new planner.
                if known is not None and member != self._membership.member.id:
                    self._layouts.pop(member, None)
            self._requested[member] = request.version
            if request.version != self._version:
                return NotYet(why=f"rank 0 has not begun version {request.version}")
            if self._why:
                raise StaleDescriptor(self._why)
            ranks = self._ranks
            if all(rank.member != member for rank in ranks):
                raise StaleDescriptor("this process was replaced by a newer process of the same rank")
        # Plan only when all ranks have reported, because an earlier plan would have to be made again.
        if lacking := self.lacking():
            return NotYet(why=f"rank {lacking[0].state.rank} has not reported its requirements")
        with self._planning:
            plan = self._planned(ranks)
        if member not in plan.receivers:
            return Granted(epoch="", version=request.version, key=plan.key)
        same = request.have_key == plan.key
        part = None if same else encode(plan.part(plan.receivers.index(member)))
        return Granted(epoch="", version=request.version, key=plan.key, part=part)

    def _planned(self, ranks: Sequence[SyncMember]) -> SyncPlan:
        """Return the plan for these ranks. The caller holds `_planning`."""
        members = [rank.member for rank in ranks]
        with self._lock:
            self._layouts = {name: layout for name, layout in self._layouts.items() if name in members}
            self._required = {name: want for name, want in self._required.items() if name in members}
            self._requested = {name: version for name, version in self._requested.items() if name in members}
            reported = [self._required[name] for name in members]
            token = (*members, *(digest for digest, _ in reported))
        # Do not hold `_lock`, because a request to another rank can take as long as the stall deadline.
        for name in members:
            if name not in self._layouts:
                self._layouts[name] = self._membership.ask(name, lambda sync_client: sync_client.layout())
        if self._plan is None or token != self._plan_token:
            wants = [want for _, want in reported if want.names]
            self._plan = plan_sync([self._layouts[name] for name in members], wants)
            self._plan_token = token
        return self._plan

    def table(self) -> TableReply:
        """Raise NotFound, because this exchange has only regions and no checkpoint table."""
        raise NotFound("the boundary exchange has no checkpoint table")


class BoundaryExchange:
    """One rank's side of the exchange. `rows` are its tensors with blocks. `wants` are for other ranks' elements."""

    def __init__(
        self, sync: Membership, rows: Sequence[ShardRow], wants: Sequence[ShardRow], *, is_first: bool, world_size: int
    ) -> None:
        self._member = member = sync.member
        self._world_size = world_size
        self._stall_s = sync.stall_s
        self._timing = sync.timing
        self._threads = KeptThreads()
        self.moved_bytes = 0
        memories = regions_of(rows)
        into = regions_of(wants)
        self._membership = Membership(member, sync.name, sync.stall_s, handler=HANDLER, timing=sync.timing)
        self._whereabouts = partial(self._membership.whereabouts, max_age_s=self._timing.exchange_probe_s)
        self._version_status = VersionStatus()
        self._want = layout_of(wants, member.id, secrets.token_hex(8), into)
        self._digest = self._want.digest()
        self._transfer: Transfer | None = None
        self._peers = CommitCoordinator(self._timing) if is_first else None
        with contextlib.ExitStack() as stack:
            layout = layout_of(rows, member.id, secrets.token_hex(8), memories)
            self._local_version = LocalVersion(layout, memories, member.links)
            stack.callback(self._local_version.close)
            self._into = VersionRegions(into, member.links)
            stack.pop_all()
        self._planner = BoundaryPlanner(self._membership, layout)
        member.server.handlers[HANDLER] = SyncHandler(
            self._membership.key,
            member.registration.check_grant,
            local_version=lambda: self._local_version,
            version_status=self._version_status,
            planner=self._planner,
            coordinator=self._peers,
        )

    @contextlib.contextmanager
    def exchanged(self, version: int, epoch: str) -> Iterator[None]:
        """Read elements from other ranks, run the body, and wait until every rank is done. Call it on every rank."""
        self._local_version.begin(version)
        self._local_version.ready()
        self._version_status.post(epoch, version, is_open=True)
        try:
            self._begin(version, epoch)
            self._run(version, epoch)
            yield
        except BaseException as error:
            if isinstance(error, PenstockError):
                error.mutated = False
            why = str(error) or type(error).__name__
            self._planner.fail(f"version {version} is not quantised: {why}")
            # Tell the other ranks, which would otherwise wait until the stall deadline. Do not hide the original error.
            with contextlib.suppress(PenstockError):
                self._report(version, epoch, why[:1024])
            # Wait until the other ranks have requested and received the decision from rank 0.
            if self._peers is not None:
                self._peers.propose(version, stall_s=self._stall_s, whereabouts=self._whereabouts)
            raise
        else:
            self._report(version, epoch, "")
            self._wait_for_ranks(version, epoch)
        finally:
            self._local_version.fence()
            self._version_status.post(epoch, version, is_open=False)

    def _begin(self, version: int, epoch: str) -> None:
        if self._peers is not None:
            # Expect every rank for every version, even a rank that was late before.
            self._peers.absent.clear()
            # Begin before this rank waits for members, because another rank may request the decision in the meantime.
            self._peers.begin(version, [self._member.id])
            ranks = self._ranks(epoch)
            self._peers.begin(version, [rank.member for rank in ranks])
            self._planner.begin(version, ranks)

    def _report(self, version: int, epoch: str, why: str) -> None:
        moved = self.moved_bytes
        progress = RankProgress(version=version, moved_bytes=moved, outcome="failed" if why else "committed", why=why)
        if self._peers is not None:
            self._peers.note_progress(self._member.id, progress)
        else:
            self._membership.ask(epoch, lambda sync_client: sync_client.progress(progress), channel="progress")

    def _ranks(self, epoch: str) -> list[SyncMember]:
        deadline = time.monotonic() + self._stall_s
        while True:
            newest = {
                member.state.rank: member
                for member in sorted(self._membership.look(), key=lambda member: member.since)
                if member.state.side == "publisher" and member.state.epoch == epoch
            }
            if len(newest) == self._world_size:
                return [newest[rank] for rank in sorted(newest)]
            if time.monotonic() > deadline:
                message = f"only {len(newest)} of {self._world_size} ranks publish {self._membership.name!r}"
                raise SourceStalled(f"{message} after {self._stall_s:g} s")
            time.sleep(self._timing.exchange_pause_s)

    def _run(self, version: int, epoch: str) -> None:
        self.moved_bytes = 0
        if not self._has_part(version, epoch):
            return
        assert self._transfer is not None
        part = self._transfer.part
        used = part.used_sources()
        others = [source for source in used if source != self._member.id]
        try:
            with LinkRequests(self._membership, others, version, self._stall_s, self._threads) as requests:
                links = requests.take(others, version)
        except SourceFailed as failed:
            raise failed.error from failed
            # Read regions in this rank's own rows directly and not through its server.
        if self._member.id in used:
            links[self._member.id] = LocalLink(self._local_version)
        self.moved_bytes = self._transfer.run(links).nbytes

    def _has_part(self, version: int, epoch: str) -> bool:
        have = "" if self._transfer is None else self._transfer.part.key
        layout: bytes | None = None
        begun = looked = time.monotonic()
        nap_s = self._timing.exchange_first_pause_s
        while True:
            request = PartRequest(version=version, digest=self._digest, layout=layout, have_key=have)
            outcome = self._request_part(request, epoch)
            if isinstance(outcome, Granted):
                break
            if isinstance(outcome, LayoutNeeded):
                layout = encode(self._want)
            elif time.monotonic() - begun > self._stall_s:
                raise SourceStalled(f"version {version} was not exchanged within {self._stall_s:g} s: {outcome.why}")
            else:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, self._timing.exchange_pause_s)
            # Rank 0 waits here for other ranks' reports, so it must detect a rank whose process is gone.
            if self._peers is not None and time.monotonic() - looked > self._timing.exchange_probe_s:
                looked = time.monotonic()
                for rank in self._planner.lacking():
                    if self._whereabouts(rank.member) != "there":
                        raise PeerLost(f"rank {rank.state.rank} is gone", uri=f"penstock:{rank.member}")
        if outcome.part is not None:
            part = decode(outcome.part, ReceiverPlan)
            names = self._want.names
            self._transfer = Transfer(part, self._into, names=names, stall_s=self._stall_s, threads=self._threads)
        if self._want.names and (self._transfer is None or self._transfer.part.key != outcome.key):
            raise PlanError("rank 0 sent no part, or a part whose key differs from the key in its reply")
        return bool(self._want.names)

    def _request_part(self, request: PartRequest, epoch: str) -> PartOutcome:
        try:
            if self._peers is not None:
                return self._planner.part(self._member.id, request)
            return of_part_reply(self._membership.ask(epoch, lambda sync_client: sync_client.part(request)))
        except StaleDescriptor as error:
            # The planner reports a failed version as StaleDescriptor. For the trainer, this means that a rank was lost.
            raise PeerLost(error.message, uri=f"penstock:{epoch}") from error

    def _wait_for_ranks(self, version: int, epoch: str) -> None:
        outcome: Reported
        if self._peers is not None:
            outcome = self._peers.propose(version, stall_s=self._stall_s, whereabouts=self._whereabouts)
        else:
            outcome = decided(self._membership, epoch, version)
        if outcome.failed or outcome.late:
            lines = [f"{member[:8]}: {reason}" for member, reason in outcome.failed.items()]
            lines += [f"{member[:8]}: no progress" for member in outcome.late]
            message = f"version {version} is not quantised on all ranks: {'; '.join(lines)}"
            raise PeerLost(message) if outcome.failed else SourceStalled(message)

    def close(self) -> None:
        """End the registrations, the connections and the threads. Idempotent."""
        with self._threads, contextlib.closing(self._membership), contextlib.closing(self._into):
            self._local_version.close()
