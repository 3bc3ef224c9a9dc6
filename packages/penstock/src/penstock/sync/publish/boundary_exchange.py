"""The exchange of boundary elements between publisher ranks, to quantise blocks that cross the edges of their shards.

At each publish a rank reads and verifies the boxes that it needs from other ranks. It succeeds on every rank or on
none. This is a sync among the publishers with the same parts, maps and transports, but with a separate request handler.
Its requirements are boxes on other ranks, and its sources are all rows. Rank 0 plans once, and decides when all ranks
are done.

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
    """The planner on rank 0.

    It plans for all ranks when all have reported their requirements, and again after a change.

    Args:
        membership: the members of the exchange.
        ours: rank 0's layout.
    """

    def __init__(self, membership: Membership, ours: Layout) -> None:
        self._membership = membership
        # As in `Planner`, `_planning` is held for a whole plan, and `_lock` only for access to the tables, so that
        # ranks can report their requirements while a plan is made.
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        # For each member, the layout of all rows, and the layout of the required rows with its digest.
        self._layouts: dict[str, Layout] = {ours.member: ours}
        self._wants: dict[str, tuple[str, Layout]] = {}
        # For each member, the version that it requested last.
        self._asked: dict[str, int] = {}
        self._ranks: tuple[SyncMember, ...] = ()
        self._version = -1
        # Why this version failed. Empty if it did not fail.
        self._why = ""
        self._plan: SyncPlan | None = None
        # The members and digests for which `_plan` was made.
        self._plan_token: tuple[str, ...] = ()

    def begin(self, version: int, ranks: Sequence[SyncMember]) -> None:
        """Begin serving parts of this version to these ranks."""
        with self._lock:
            self._version = version
            self._ranks = tuple(ranks)
            self._why = ""

    def fail(self, why: str) -> None:
        """End the version with a reason. Later requests for its parts fail with this reason."""
        with self._lock:
            self._why = why

    def lacking(self) -> list[SyncMember]:
        """Return the ranks that have not reported their requirements for this version."""
        # Check the current version, because a rank whose tensors moved since the previous one reports new requirements.
        with self._lock:
            return [rank for rank in self._ranks if self._asked.get(rank.member) != self._version]

    def part(self, asker: str, request: PartRequest) -> PartOutcome:
        """See `Planner.part`.

        Raises:
            StaleDescriptor: the version failed on a rank.
            PlanError: the ranks together lack elements of a block; lists them.
        """
        with self._lock:
            # Store the layout before checking the version. The other ranks wait for it, and a rank that is too early
            # need not send it again.
            known = self._wants.get(asker)
            if known is None or known[0] != request.digest:
                if request.layout is None:
                    return LayoutNeeded()
                self._wants[asker] = request.digest, layout_in(request, asker)
                # The rank's tensors moved, so its rows did too. Rank 0 creates a new planner when its own tensors
                # moved.
                if known is not None and asker != self._membership.member.id:
                    self._layouts.pop(asker, None)
            self._asked[asker] = request.version
            if request.version != self._version:
                return NotYet(why=f"rank 0 has not begun version {request.version}")
            if self._why:
                raise StaleDescriptor(self._why)
            ranks = self._ranks
            if all(rank.member != asker for rank in ranks):
                # The requester is an earlier process of a restarted rank.
                raise StaleDescriptor("this process was replaced by a newer process of the same rank")
        # Wait for all ranks. A plan without one rank would have to be made again, and every rank would drop its part.
        if lacking := self.lacking():
            return NotYet(why=f"rank {lacking[0].state.rank} has not reported its requirements")
        with self._planning:
            plan = self._planned(ranks)
        # A rank whose shards end at block edges needs nothing, but is still a source.
        if asker not in plan.receivers:
            return Granted(epoch="", version=request.version, key=plan.key)
        same = request.have_key == plan.key
        part = None if same else encode(plan.part(plan.receivers.index(asker)))
        return Granted(epoch="", version=request.version, key=plan.key, part=part)

    def _planned(self, ranks: Sequence[SyncMember]) -> SyncPlan:
        """Return the plan for these ranks, and make it again only after a change.

        Only one thread at a time may call this.
        """
        members = [rank.member for rank in ranks]
        with self._lock:
            # Drop ranks that were replaced since the previous version. The token below contains the processes.
            self._layouts = {name: layout for name, layout in self._layouts.items() if name in members}
            self._wants = {name: want for name, want in self._wants.items() if name in members}
            self._asked = {name: version for name, version in self._asked.items() if name in members}
            reported = [self._wants[name] for name in members]
            wants = [want for want in reported if want[1].names]
            token = (*members, *(digest for digest, _ in reported))
        # Do not hold `_lock`, because a request to another rank can take as long as the stall deadline.
        for name in members:
            if name not in self._layouts:
                self._layouts[name] = self._membership.ask(name, lambda sync_client: sync_client.layout())
        if self._plan is None or token != self._plan_token:
            self._plan = plan_sync([self._layouts[name] for name in members], [want for _, want in wants])
            self._plan_token = token
        return self._plan

    def table(self) -> TableReply:
        """Raise NotFound, because this exchange has boxes and no checkpoint."""
        raise NotFound("the boundary exchange has no checkpoint table")


class BoundaryExchange:
    """The exchange of one rank. It is a context manager.

    Attributes:
        moved_bytes: number of bytes read from other ranks for the last version.

    Args:
        sync: the members of the publisher's sync.
        rows: this rank's rows of tensors with blocks.
        wants: the rows needed from other ranks, in separate memory.
        is_first: whether this is rank 0.
        world_size: number of ranks.

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
        # Keep the threads between versions, because starting them takes milliseconds.
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
        # For rank 0 the other ranks are like subscribers to a live publish.
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
        """Read elements from other ranks, run the body, and then wait until every rank is done.

        Call it on every rank while the parameters have the version's values. After it the parameters may change.

        Raises:
            PeerLost, SourceStalled: a rank is gone, silent, or failed. Every rank raises it.
            PlanError, IntegrityError: this rank failed.
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
                # Only buffers of the exchange were written.
                error.mutated = False
            why = str(error) or type(error).__name__
            self._planner.fail(f"version {version} is not quantised: {why}")
            # Report the failure to the other ranks, which would otherwise wait for the stall deadline. An error of this
            # report must not hide the first one.
            with contextlib.suppress(PenstockError):
                self._report(version, epoch, why[:1024])
            # Rank 0 serves the decision, so it stays until the others had time to get it.
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
        """As rank 0, set the ranks to wait for, and begin serving their parts."""
        if self._peers is not None:
            # Every version needs every rank, so a rank that was late once must not be skipped.
            self._peers.absent.clear()
            # Begin twice. Another rank may ask for the decision while this one is still looking for the ranks, and must
            # find a version that has begun and is not over.
            self._peers.begin(version, [self._member.id])
            ranks = self._ranks(epoch)
            self._peers.begin(version, [rank.member for rank in ranks])
            self._planner.begin(version, ranks)

    def _report(self, version: int, epoch: str, why: str) -> None:
        """Report to rank 0 that this rank is done, or why it failed."""
        moved = self.moved_bytes
        progress = RankProgress(version=version, moved_bytes=moved, outcome="failed" if why else "committed", why=why)
        if self._peers is not None:
            self._peers.note_progress(self._member.id, progress)
        else:
            self._membership.ask(epoch, lambda sync_client: sync_client.progress(progress), channel="progress")

    def _ranks(self, epoch: str) -> list[SyncMember]:
        """Return all ranks of this epoch, each with its newest process.

        Raises:
            SourceStalled: a rank did not join in time.
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
        # A box may be in this rank's rows. Read it in place instead of through its own server.
        if self._member.id in used:
            links[self._member.id] = LocalLink(self._local_version)
        self.moved_bytes = self._transfer.run(links).nbytes

    def _has_part(self, version: int, epoch: str) -> bool:
        """Return whether this rank needs elements from other ranks.

        If so, `_transfer` belongs to this version's plan.
        """
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
            # Rank 0 waits here for ranks that have not reported, and must notice a rank that died.
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
        """Request this rank's part. Rank 0 asks its own planner."""
        try:
            if self._peers is not None:
                return self._planner.part(self._member.id, request)
            return decode_outcome(self._membership.ask(epoch, lambda sync_client: sync_client.part(request)))
        except StaleDescriptor as error:
            # The planner reports a failed version in this way. For the trainer this is the loss of a rank and not of a
            # descriptor.
            raise PeerLost(error.message, uri=f"penstock:{epoch}") from error

    def _settle(self, version: int, epoch: str) -> None:
        """Wait until all ranks are done. Raise if a rank failed or is late."""
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
    """Return the error that prevented the ranks from quantising a version together."""
    lines = [f"{member[:8]}: {reason}" for member, reason in decision.failed.items()]
    lines += [f"{member[:8]}: no progress" for member in decision.late]
    message = f"version {version} is not quantised on all ranks: {'; '.join(lines)}"
    return PeerLost(message) if decision.failed else SourceStalled(message)
