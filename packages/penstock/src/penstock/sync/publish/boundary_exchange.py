"""Exchange of boundary elements between publisher ranks, to quantise blocks that cross the edges of their shards.

In: a rank's rows, and the boxes of other ranks' rows that it needs (`transformed`). Out: at each publish those boxes of
the version, verified, on every rank or on none.
Not here: the choice of the boxes (`transform.formats`), quantising, versions that receivers see (`publisher`).

This is a sync among the publishers with the same parts, maps and transports, under a request handler of its own:
requirements = boxes of other ranks, sources = all rows. Rank 0 plans once, and decides when all are done.

    begin(v) on every rank -> part (unchanged if nothing changed) -> transfer -> quantise -> all done: fence
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
from penstock.hub.messages import SyncMember
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import ReceiverPlan, SyncPlan, plan_sync
from penstock.sync.local_version import LocalVersion, VersionRegions, VersionStatus
from penstock.sync.membership import Membership
from penstock.sync.messages import Decision, PartRequest, RankProgress, TableReply
from penstock.sync.part_outcome import Granted, LayoutNeeded, NotYet, PartOutcome, decode_outcome
from penstock.sync.planner import layout_in
from penstock.sync.publish.rank_group import SubscriberProgress, decided
from penstock.sync.receive.sources import LinkRequests, LocalLink, SourceFailed
from penstock.sync.receive.transfer import Transfer
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import ShardRow, layout_of, regions_of

HANDLER = "boundary"
"""Name of the request handler at the publishers' servers."""


class BoundaryPlanner:
    """The planner of rank 0: plans for all ranks when all have reported their needs, and again only after a change.

    Args:
        membership: the members of the exchange.
        ours: rank 0's own layout.
    """

    def __init__(self, membership: Membership, ours: Layout) -> None:
        self._membership = membership
        # As in `Planner`: `_planning` is kept for a whole plan, `_lock` only for a look at the tables, so that ranks
        # can report their needs while a plan is made.
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        # By member: the layouts of all rows, and of the required rows with their digest.
        self._layouts: dict[str, Layout] = {ours.member: ours}
        self._wants: dict[str, tuple[str, Layout]] = {}
        # By member: the version that it asked for last.
        self._asked: dict[str, int] = {}
        self._ranks: tuple[SyncMember, ...] = ()
        self._version = -1
        # The reason of a failure of this version; empty: none.
        self._why = ""
        self._plan: SyncPlan | None = None
        # The members and digests that `_plan` was made of.
        self._plan_token: tuple[str, ...] = ()

    def begin(self, version: int, ranks: Sequence[SyncMember]) -> None:
        """Start to serve parts of this version to these ranks."""
        with self._lock:
            self._version = version
            self._ranks = tuple(ranks)
            self._why = ""

    def fail(self, why: str) -> None:
        """End the version with a reason; later requests for its parts fail with it."""
        with self._lock:
            self._why = why

    def lacking(self) -> list[SyncMember]:
        """Return the ranks that have not reported their requirements for this version."""
        # Of this version: a rank whose tensors have moved since the version before reports others.
        with self._lock:
            return [rank for rank in self._ranks if self._asked.get(rank.member) != self._version]

    def part(self, asker: str, request: PartRequest) -> PartOutcome:
        """See `Planner.part`.

        Raises:
            StaleDescriptor: the version failed on a rank.
            PlanError: the ranks together lack elements of a block; lists them.
        """
        with self._lock:
            # The layout is taken before the version is checked: the other ranks wait for it, and a rank that is too
            # early need not send it again.
            known = self._wants.get(asker)
            if known is None or known[0] != request.digest:
                if request.layout is None:
                    return LayoutNeeded()
                self._wants[asker] = request.digest, layout_in(request, asker)
                # Its tensors have moved, so its rows have too. Rank 0 makes a new planner when its own have.
                if known is not None and asker != self._membership.member.id:
                    self._layouts.pop(asker, None)
            self._asked[asker] = request.version
            if request.version != self._version:
                return NotYet(why=f"rank 0 has not begun version {request.version}")
            if self._why:
                raise StaleDescriptor(self._why)
            ranks = self._ranks
            if all(rank.member != asker for rank in ranks):
                # The requester is an earlier process of a rank that was started again.
                raise StaleDescriptor("another process has this rank now")
        # A plan without one rank would have to be made again when it comes, and every rank would drop its part.
        if lacking := self.lacking():
            return NotYet(why=f"rank {lacking[0].state.rank} has not reported its requirements")
        with self._planning:
            plan = self._planned(ranks)
        # A rank whose shards end at blocks needs nothing, and still takes part as a source.
        if asker not in plan.receivers:
            return Granted(epoch="", version=request.version, key=plan.key)
        same = request.have_key == plan.key
        part = None if same else encode(plan.part(plan.receivers.index(asker)))
        return Granted(epoch="", version=request.version, key=plan.key, part=part)

    def _planned(self, ranks: Sequence[SyncMember]) -> SyncPlan:
        """Return the plan for these ranks, made again only after a change. Order: one thread at a time."""
        members = [rank.member for rank in ranks]
        with self._lock:
            # Drop ranks that were replaced since the last version: the token below names the processes.
            self._layouts = {name: layout for name, layout in self._layouts.items() if name in members}
            self._wants = {name: want for name, want in self._wants.items() if name in members}
            self._asked = {name: version for name, version in self._asked.items() if name in members}
            reported = [self._wants[name] for name in members]
            wants = [want for want in reported if want[1].names]
            token = (*members, *(digest for digest, _ in reported))
        # Without `_lock`: a request to another rank can take as long as the stall deadline.
        for name in members:
            if name not in self._layouts:
                self._layouts[name] = self._membership.ask(name, lambda sync_client: sync_client.layout())
        if self._plan is None or token != self._plan_token:
            self._plan = plan_sync([self._layouts[name] for name in members], [want for _, want in wants])
            self._plan_token = token
        return self._plan

    def table(self) -> TableReply:
        """Raise NotFound: this exchange has no checkpoint, only boxes of it."""
        raise NotFound("the boundary exchange has no checkpoint table")


class BoundaryExchange:
    """The exchange of one rank; a context manager by its `close`.

    Attributes:
        moved_bytes: bytes read from other ranks for the last version.

    Args:
        sync: the members of the publisher's sync.
        rows: this rank's rows of tensors with blocks.
        wants: the rows needed from other ranks, in memory of their own.
        is_first: whether this is rank 0.
        world_size: the number of ranks.

    Raises:
        ConfigError: no transport reaches the rows.
    """

    def __init__(
        self,
        sync: Membership,
        rows: Sequence[ShardRow],
        wants: Sequence[ShardRow],
        *,
        is_first: bool,
        world_size: int,
    ) -> None:
        self._member = member = sync.member
        self._world_size = world_size
        self._stall_s = sync.stall_s
        self._timing = sync.timing
        # From version to version: those of a version take milliseconds to start.
        self._threads = KeptThreads()
        self.moved_bytes = 0
        memories = regions_of(rows)
        into = regions_of(wants)
        self._membership = Membership(member, sync.name, sync.stall_s, handler=HANDLER, timing=sync.timing)
        self._is_gone = partial(self._membership.has_left, max_age_s=self._timing.exchange_probe_s)
        self._version_status = VersionStatus()
        self._want = layout_of(wants, member.id, secrets.token_hex(8), into)
        self._digest = self._want.digest()
        self._transfer: Transfer | None = None
        # The other ranks are to this rank 0 what subscribers are to a live publish.
        self._peers = SubscriberProgress(self._timing) if is_first else None
        with contextlib.ExitStack() as stack:
            layout = layout_of(rows, member.id, secrets.token_hex(8), memories)
            self._local_version = LocalVersion(layout, memories, member.links)
            stack.callback(self._local_version.close)
            self._into = VersionRegions(into, member.links)
            stack.pop_all()
        self._planner = BoundaryPlanner(self._membership, layout)
        member.server.handlers[HANDLER] = SyncHandler(
            self._membership.key,
            member.check_grant,
            local_version=lambda: self._local_version,
            version_status=self._version_status,
            planner=self._planner,
            subscriber_progress=self._peers,
        )

    @contextlib.contextmanager
    def exchanged(self, version: int, epoch: str) -> Iterator[None]:
        """Read the elements of other ranks, run the body, and wait on leaving until every rank is done.

        After it the parameters may change.

        Raises:
            PeerLost, SourceStalled: a rank is gone, silent, or failed; on every rank. PlanError, IntegrityError: this
                rank's own failure.

        Order: while the parameters are the version's, on every rank.
        """
        self._local_version.begin(version)
        self._local_version.ready()
        self._version_status.post(epoch, version, is_open=True)
        try:
            self._begin(version, epoch)
            self._run(version, epoch)
            yield
        except BaseException as error:
            if isinstance(error, PenstockError):
                # Only the exchange's own buffers were written.
                error.mutated = False
            why = str(error) or type(error).__name__
            self._planner.fail(f"version {version} is not quantised: {why}")
            # The other ranks must hear of the failure, else they wait for the stall deadline. An error of this report
            # must not hide the first one.
            with contextlib.suppress(PenstockError):
                self._report(version, epoch, why[:1024])
            # Rank 0 serves the decision: it stays until the others had time to report, so that they get it.
            if self._peers is not None:
                self._peers.wait(version, stall_s=self._stall_s, is_gone=self._is_gone)
            raise
        else:
            self._report(version, epoch, "")
            self._settle(version, epoch)
        finally:
            # The parameters change from here on.
            self._local_version.fence()
            self._version_status.post(epoch, version, is_open=False)

    def _begin(self, version: int, epoch: str) -> None:
        """As rank 0, set the ranks to wait for, and start to serve their parts."""
        if self._peers is not None:
            # Every rank is needed for every version: none may be skipped for being late once.
            self._peers.absent.clear()
            # Twice: another rank may ask for the decision while this one still looks for the ranks, and must find a
            # version that has begun and is not over.
            self._peers.begin(version, [self._member.id])
            ranks = self._ranks(epoch)
            self._peers.begin(version, [rank.member for rank in ranks])
            self._planner.begin(version, ranks)

    def _report(self, version: int, epoch: str, why: str) -> None:
        """Report to rank 0 that this rank is done, or the reason of its failure."""
        moved = self.moved_bytes
        progress = RankProgress(version=version, moved_bytes=moved, outcome="failed" if why else "committed", why=why)
        if self._peers is not None:
            self._peers.note_progress(self._member.id, progress)
        else:
            self._membership.ask(epoch, lambda sync_client: sync_client.progress(progress), channel="progress")

    def _ranks(self, epoch: str) -> list[SyncMember]:
        """Return all ranks of this epoch, the newest process of each.

        Raises:
            SourceStalled: a rank did not come.
        """
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
        """Read and verify the elements that this rank needs."""
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
        # A box can lie in this rank's own rows: read it in place instead of through its own server.
        if self._member.id in used:
            links[self._member.id] = LocalLink(self._local_version)
        self.moved_bytes = self._transfer.run(links).nbytes

    def _has_part(self, version: int, epoch: str) -> bool:
        """Return whether this rank needs elements of others; if so, `_transfer` is of this version's plan."""
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
                why = outcome.why if isinstance(outcome, NotYet) else outcome.decision.why
                raise SourceStalled(f"version {version} was not exchanged in {self._stall_s:g} s: {why}")
            else:
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, self._timing.exchange_pause_s)
            # Rank 0 waits here for ranks that have not reported: it must notice one that died.
            if self._peers is not None and time.monotonic() - looked > self._timing.exchange_probe_s:
                looked = time.monotonic()
                for rank in self._planner.lacking():
                    if self._is_gone(rank.member):
                        raise PeerLost(f"rank {rank.state.rank} is gone", uri=f"penstock:{rank.member}")
        if outcome.part is not None:
            part = decode(outcome.part, ReceiverPlan)
            names = self._want.names
            self._transfer = Transfer(part, self._into, names=names, stall_s=self._stall_s, threads=self._threads)
        if self._want.names and (self._transfer is None or self._transfer.part.key != outcome.key):
            raise PlanError("rank 0 sent no part, or a part whose key differs from the one in its answer")
        return bool(self._want.names)

    def _request_part(self, request: PartRequest, epoch: str) -> PartOutcome:
        """Request this rank's part; rank 0 asks its own planner."""
        try:
            if self._peers is not None:
                return self._planner.part(self._member.id, request)
            return decode_outcome(self._membership.ask(epoch, lambda sync_client: sync_client.part(request)))
        except StaleDescriptor as error:
            # The planner's word for a failed version. For the trainer it is the loss of a rank, not of a descriptor.
            raise PeerLost(error.message, uri=f"penstock:{epoch}") from error

    def _settle(self, version: int, epoch: str) -> None:
        """Wait until all ranks are done; raise if one failed or is late."""
        if self._peers is not None:
            decision = self._peers.wait(version, stall_s=self._stall_s, is_gone=self._is_gone)
        else:
            decision = decided(self._membership, epoch, version)
        if decision.failed or decision.late:
            raise _undone(version, decision)

    def close(self) -> None:
        """End the registrations, the connections and the threads. Idempotent."""
        with self._threads, contextlib.closing(self._membership), contextlib.closing(self._into):
            self._local_version.close()


def _undone(version: int, decision: Decision) -> PenstockError:
    """Return the error that kept the ranks from quantising a version together."""
    lines = [f"{member[:8]}: {reason}" for member, reason in decision.failed.items()]
    lines += [f"{member[:8]}: no progress" for member in decision.late]
    message = f"version {version} is not quantised on all ranks: {'; '.join(lines)}"
    return PeerLost(message) if decision.failed else SourceStalled(message)
