"""A trainer rank as a publisher: it declares its tensors once, and shows version after version of them.

In: live parameters, a name, a hub or none. Out: for each version a `PublishReport`, when training may go on.
Not here: declaring tensors (`sync.shards`), the rows and copies on offer (`offer`), planning (`sync.planner`), reading
(`sync.receive.subscriber`), the rules of a version that a fleet commits together (`sync.together`).

    live:      begin(v) -> receivers read the parameters themselves -> all done, or late -> fence -> training goes on
    snapshot:  fence -> copy -> begin(v) -> training goes on, receivers read the copy
    together:  the same; rank 0 decides when the receivers have reported: live before the fence, snapshot in a thread
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from penstock.arguments import require_name, require_seconds, require_type, wrong
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import (
    BudgetTooSmall,
    Cancelled,
    ConfigError,
    HubUnavailable,
    PeerLost,
    PenstockError,
    PlanError,
    SourceStalled,
)
from penstock.hub.client import resolve_connection
from penstock.hub.messages import MAX_VERSION, FleetDecision, SyncState
from penstock.lifecycle import Closeable, quick_handover
from penstock.logs import log_named
from penstock.peer.member import Member
from penstock.plan.packing import LEAST_PACK_BYTES, PACK_BYTES
from penstock.sync.check import encode_values
from penstock.sync.local_version import VersionStatus, check_metadata
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.messages import Decision, PartReply, PartRequest
from penstock.sync.planner import Planner
from penstock.sync.publish import rank_group
from penstock.sync.publish.offer import VersionSnapshot
from penstock.sync.publish.registered import OfferOptions, Registered, warn_of_state_dict
from penstock.sync.publish.transformed import Transforms
from penstock.sync.report import PublishMode, PublishReport, publish_outcome
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import Declarable
from penstock.sync.together import Stragglers, Verdict, refusal
from penstock.telemetry.journey import Journey
from penstock.waits import Threads

Commit = Literal["each", "together"]
"""`each`: every subscriber goes live by itself. `together`: the fleet decides once, for all."""

log = log_named("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A snapshot whose version is not decided yet, or was not asked about."""

    report: PublishReport
    decision: Future[Decision]


class Publisher(Closeable):
    """A rank that publishes. Made by `publisher`; a context manager. One thread at a time publishes.

    Attributes:
        name: of the sync.
        version: the newest version that this rank published; -1: none yet.
        latest: the highest version that a member had before this group; all ranks have the same number. Of a rank that
            was started again: the newest version of the group. Later versions must be above it.
        mode: `live` or `snapshot`; see `publisher`.
        rank, world_size: of the trainer.
        member: this process in the fleet.
        planner: plans for the receivers, on rank 0.
    """

    def __init__(
        self,
        name: str,
        member: Member,
        registered: Registered,
        *,
        mode: PublishMode,
        rank: int,
        world_size: int,
        stall_s: float,
    ) -> None:
        self.name = name
        self.member = member
        self.mode: PublishMode = mode
        self.rank = rank
        self.world_size = world_size
        self.version = -1
        self._registered = registered
        self._stall_s = stall_s
        self._run = ""
        self._publishing = threading.Lock()
        self._is_closed = False
        self._version_status = VersionStatus()
        # The status before the newest version, for a version that is withdrawn.
        self._before = self._version_status.now
        self._decision: FleetDecision | None = None
        self._pending: _Pending | None = None
        self._deciding = Threads(1, "penstock-decide", waits_for_calls=True)
        self._subscriber_progress = rank_group.SubscriberProgress()
        self._first_versions = rank_group.FirstVersions(lambda: self.version)
        self._membership = Membership(member, name, stall_s)
        self.planner = Planner(self._membership, self._version_status, lambda: registered.layout, terms=self._terms_for)
        # The handler before the first report: a member that learns of this rank from the hub may send requests at once.
        member.server.handlers["sync"] = SyncHandler(
            self._membership.key,
            member.check_grant,
            local_version=lambda: registered.served,
            version_status=self._version_status,
            planner=self.planner,
            subscriber_progress=self._subscriber_progress if rank == 0 else None,
            first_versions=self._first_versions if rank == 0 else None,
        )
        self._took_s = 0.0
        # The texts that go with the version under way.
        self._metadata: Mapping[str, str] = {}
        member.syncs.append(self._state)
        self.latest = -1
        if rank == 0:
            self._run = member.id
            # Reported before the claim: two groups that start together must see each other, to agree on the first.
            member.report_now()
            rank_group.claim(self._membership)
            self.latest = self._newest_of_others()
            self._first_versions.begin(self.latest)
        else:
            # Joined before the report, which names the run.
            self._join()
            member.report_now()
        registered.connect(name, rank=rank, stall_s=stall_s)

    def _newest_of_others(self) -> int:
        """As rank 0, return the highest version of the members that are not of this run."""
        # This run's own version is not one of others. Another rank may be ahead.
        members = self._membership.look_at_all(self._stall_s)
        return max((other.state.version for other in members if other.state.run != self._run), default=-1)

    def _join(self) -> None:
        """As another rank, belong to the run of rank 0, and begin where it says; nothing to do while it lives."""
        deadline = time.monotonic() + self._stall_s
        while True:
            run = rank_group.join(self._membership, self.rank, self.world_size, self._run, self._stall_s)
            if run == self._run:
                return
            try:
                latest = rank_group.begins_after(self._membership, run, self.rank, self._stall_s)
            except PeerLost:
                # A rank 0 that does not get the name leaves, and another one may come.
                if time.monotonic() > deadline:
                    raise
                continue
            self._run, self.latest = run, max(self.latest, latest)
            return

    def _state(self) -> SyncState:
        """Return what the hub lists about this rank."""
        now = self._version_status.now
        return SyncState(
            name=self.name,
            side="publisher",
            run=self._run,
            rank=self.rank,
            world_size=self.world_size,
            layout=self._registered.digest,
            version=now.version,
            state="open" if now.is_open else "idle",
            nbytes=self.nbytes,
            took_s=self._took_s,
            decision=self._decision,
        )

    @property
    def revision(self) -> str:
        """Return the run of the publishers and the newest version; empty: none is published."""
        return f"{self._run}:{self.version}" if self.version >= 0 else ""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows that this rank holds."""
        # By form first: a model has hundreds of thousands of rows and a handful of forms.
        layout = self._registered.layout
        nbytes = [form.box.num_elements * form.dtype.bits // 8 for form in layout.forms]
        return sum(nbytes[i] for i in layout.form.tolist())

    def publish(
        self,
        version: int,
        *,
        commit: Commit = "each",
        deadline_s: float | None = None,
        laggards: Stragglers = "leave_out",
        check: Mapping[str, object] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> PublishReport:
        """Show a version: the parameters as they are now, on every rank.

        Parameters that were moved, cast back, or replaced in the module since the version before are registered again.

        Live, it returns once the subscribers known at its start have the version, failed, or made no progress for the
        stall deadline; snapshot, once the copy is made. After it the parameters may change.

        Args:
            version: above all before it.
            commit: `each`: a subscriber goes live when it has the version. `together`: all subscribers prepare the
                version, and go live when rank 0 has decided so; or none does. Live, it returns after the decision;
                snapshot, `wait_decision` does.
            deadline_s: together: the decision comes at the latest after these seconds; None: the stall deadline.
            laggards: together: what becomes of the version if a subscriber does not prepare it before the deadline, or
                fails: `leave_out`: the others commit, if there is one. `withdraw`: no subscriber does; for engines of
                several ranks, each of which is a subscriber.
            check: values for the subscribers' `Hooks.check`: numbers, texts, lists and tensors by name, 1 MiB at most.
                Together, at least one check must then pass.
            metadata: texts by name that go with the version, the same on all ranks: `Hooks.before_read` of a subscriber
                gets them before it reads a byte. At most 16, of 65,536 characters each.

        Raises:
            ConfigError: an argument is wrong, the version does not grow, another group publishes the name, or tensors
                have another dtype or shape than when the publisher was made (names them); nothing was shown.
            VersionRefused: together: the version was withdrawn, and never goes live; says why.
            HubUnavailable: together: the hub did not record the decision; subscribers keep the version before, or learn
                from the hub that it was committed.
            PeerLost, SourceStalled: rank 0 is gone, or does not publish this version; it is no longer shown here.
            DestinationError: a device failed. A snapshot on the device may have been shown, and its number is used up.
            PlanError: a tensor cannot be published as it is now: its memory was freed, perhaps. Nothing was shown.
            Cancelled: it was closed.

        Order: all ranks call this with the same arguments; `check` counts on rank 0.
        """
        require_type("version", version, int, "a number that grows from version to version")
        if version > MAX_VERSION:
            raise wrong("version", version, f"a number up to {MAX_VERSION}")
        if deadline_s is not None:
            require_type("deadline_s", deadline_s, (int, float), "seconds, or None")
        terms = self._terms(commit, deadline_s, laggards, needs_check=check is not None)
        values = encode_values(check) if check else b""
        with (
            self._publishing,
            quick_handover(),
            Journey("publish", self.name, version=version, member=self.member.id[:8]) as journey,
        ):
            begun = time.perf_counter()
            self._check(version)
            self._metadata = dict(metadata or {})
            check_metadata(self._metadata)
            # The version before it is read until it is decided.
            self._finish_pending()
            self._follow()
            self._subscriber_progress.offer_check(version, values)
            # A snapshot is read after this returns, so there is nothing to decide about.
            decision = Decision(is_over=True)
            copy_s = 0.0
            snapshot, offer = self._registered.snapshot, self._registered.offer
            if snapshot is None:
                decision = self._publish_live(version, terms)
            else:
                copy_s = self._publish_snapshot(snapshot, version, terms)
            wall_s = self._took_s = time.perf_counter() - begun
            report = PublishReport(
                name=self.name,
                version=version,
                revision=self.revision,
                mode=self.mode,
                nbytes=self.nbytes,
                wall_s=wall_s,
                copy_s=copy_s,
                wait_s=0.0 if snapshot is not None else wall_s - offer.seconds,
                transform_s=offer.seconds,
                transformed_bytes=offer.transformed.nbytes,
                boundary_bytes=offer.transformed.boundary_bytes,
                exchanged_bytes=offer.moved_bytes,
                committed=decision.committed,
                late=decision.late,
                failed=decision.failed,
                outcome="" if terms is None else "committed" if decision.fleet is not None else "pending",
            )
            if report.outcome == "pending":
                self._pending = _Pending(report=report, decision=self._deciding.submit(self._decide_snapshot, version))
            if report.exchanged_bytes:
                journey.received = lambda: {("peer", "exchange"): report.exchanged_bytes}
            journey.outcome = publish_outcome(report)
            return report

    def _check(self, version: int) -> None:
        """Check that the version may come next, and that this group still owns the name."""
        if self._is_closed:
            raise Cancelled("the publisher was closed")
        if self.rank != 0:
            # Rank 0 may have been restarted since the last version: then this rank belongs to its new run.
            self._join()
        newest = max(self.version, self.latest)
        if version <= newest:
            message = f"version {version} of {self.name!r} is not above {newest}"
            raise ConfigError(message, hint="versions grow, over restarts too: number on from Publisher.latest")
        if self.rank == 0:
            rank_group.check_alone(self._membership)

    def _follow(self) -> None:
        """Register the parameters again if they moved since the version before."""
        if self._registered.follow(self._end_version):
            log.info("the parameters of %r were moved: they are registered again", self.name)
            # Before the announcement: planners find the layout by the digest that the hub lists.
            self.member.report_now()
            self._membership.look()

    def _end_version(self) -> None:
        """End the version before, whose memory is unregistered next."""
        self._version_status.post(self._run, self.version, is_open=False)

    def _terms(
        self, commit: Commit, deadline_s: float | None, laggards: Stragglers, *, needs_check: bool
    ) -> rank_group.Together | None:
        """Return the checked terms of a version that is published together; None: it is not."""
        if commit not in ("each", "together"):
            raise wrong("commit", commit, "'each' or 'together'")
        if laggards not in ("leave_out", "withdraw"):
            raise wrong("laggards", laggards, "'leave_out' or 'withdraw'")
        if deadline_s is not None and not 0 < deadline_s < math.inf:
            raise wrong("deadline_s", deadline_s, "seconds above 0, or None for the stall deadline")
        if commit == "each":
            return None
        limit_s = self._stall_s if deadline_s is None else float(deadline_s)
        return rank_group.Together(deadline_s=limit_s, laggards=laggards, needs_check=needs_check)

    def _expect(self, version: int, terms: rank_group.Together | None) -> None:
        """As rank 0, set the subscribers whose reports count. Order: before the version is announced."""
        # A receiver's first report must find a version that expects it.
        members = self._membership.look(max_age_s=rank_group.ASK_S)
        expected = [other.member for other in members if other.state.side == "subscriber"]
        if terms is None:
            self._subscriber_progress.begin(version, expected)
        else:
            self._subscriber_progress.begin_together(version, expected, terms)

    def _publish_live(self, version: int, terms: rank_group.Together | None) -> Decision:
        """Show the live parameters until rank 0 decides that the receivers are done; return the decision.

        Raises:
            VersionRefused: the version was withdrawn.
        """
        try:
            if self.rank == 0:
                self._expect(version, terms)
            with self._dropped_on_error(version, terms):
                self._begin_live(version)
            if self.rank != 0:
                decision = self._decided(version)
            elif terms is None:
                is_gone = partial(self._membership.has_left, max_age_s=rank_group.ASK_S)
                decision = self._subscriber_progress.wait(version, stall_s=self._stall_s, is_gone=is_gone)
            else:
                decision = self._coordinate(version)
        finally:
            # After an error too: the trainer goes on with the next step, and the parameters change.
            self._withdraw()
        if self.rank == 0 and not decision.committed:
            log.warning(
                "no subscriber has received version %s of %r, which was published live: no later update can read it; "
                "call wait_subscribers() first, or use mode='snapshot'",
                version,
                self.name,
            )
        return self._accepted(decision)

    def _coordinate(self, version: int) -> Decision:
        """As rank 0, return the decision on a version that is published together, which the hub has recorded.

        Raises:
            HubUnavailable: it is not known whether the hub recorded the commit.
        """
        progress = self._subscriber_progress
        whereabouts = partial(self._membership.whereabouts, max_age_s=rank_group.ASK_S)
        with self._dropped_on_error(version, True):
            verdict = progress.wait_together(version, whereabouts=whereabouts)
        proposal = verdict.decision(self._run, version)
        try:
            # A withdrawal needs no record: without a recorded commit no subscriber goes live. It is recorded for
            # operators, and for subscribers that cannot reach this rank.
            within_s = self._stall_s if verdict.is_commit else 0.0
            standing = rank_group.recorded(self._membership, proposal, within_s)
        except PenstockError as error:
            if verdict.is_commit:
                message = f"it is not known whether version {version} of {self.name!r} is committed: {error.message}"
                hint = "subscribers keep the version before, or learn from the hub that it is; publish the next version"
                raise HubUnavailable(message, hint=hint) from error
            standing = proposal
        return self._settle(version, verdict, standing)

    def _settle(self, version: int, verdict: Verdict, standing: FleetDecision) -> Decision:
        decision = self._subscriber_progress.settle(version, verdict, standing)
        self._decision = standing
        self.member.beat_now()
        return decision

    @contextlib.contextmanager
    def _dropped_on_error(self, version: int, terms: object) -> Iterator[None]:
        """Withdraw a version that is published together if the block fails, so that no subscriber waits for it."""
        try:
            yield
        except BaseException as error:
            if terms is not None and self.rank == 0:
                why = f"rank 0 failed: {str(error) or type(error).__name__}"
                verdict = Verdict(is_commit=False, why=why)
                # The number is used up: a subscriber may have heard that it is withdrawn.
                self.version = version
                self._settle(version, verdict, verdict.decision(self._run, version))
            raise

    def _accepted(self, decision: Decision) -> Decision:
        """Return a decision that did not withdraw the version; raise VersionRefused for one that did."""
        if decision.fleet is not None and decision.fleet.outcome == "withdrawn":
            raise refusal(self.name, decision.fleet)
        return decision

    def _decide_snapshot(self, version: int) -> Decision:
        """Return the decision on a snapshot's version; a withdrawn one is no longer served."""
        decision = self._coordinate(version) if self.rank == 0 else self._decided(version)
        if decision.fleet is not None and decision.fleet.outcome == "withdrawn":
            self._withdraw()
        return decision

    def _decided(self, version: int) -> Decision:
        """As another rank, return rank 0's decision."""
        decision = rank_group.decided(self._membership, self._run, version, self._stall_s)
        self._decision = decision.fleet or self._decision
        return decision

    def wait_decision(self) -> PublishReport:
        """Return the report of the newest snapshot that was published together, once its version is decided.

        Raises:
            ConfigError: no snapshot was published together. VersionRefused, HubUnavailable, PeerLost: see `publish`.
        """
        pending = self._pending
        if pending is None:
            raise ConfigError(
                "there is no decision to wait for", hint="publish a snapshot with commit='together' first"
            )
        decision = self._accepted(pending.decision.result())
        return replace(
            pending.report,
            outcome="committed",
            committed=decision.committed,
            late=decision.late,
            failed=decision.failed,
        )

    def _finish_pending(self) -> None:
        """Wait until the version before is decided, which its deadline bounds: the next copy replaces its bytes."""
        if self._pending is None:
            return
        wait([self._pending.decision])
        error = self._pending.decision.exception()
        decision = None if error is not None else self._pending.decision.result().fleet
        if error is not None or (decision is not None and decision.outcome == "withdrawn"):
            why = error if decision is None else refusal(self.name, decision).message
            log.warning("the version before of %r did not go live: %s", self.name, why)
        self._pending = None

    def _terms_for(self, asker: str, request: PartRequest, run: str, version: int) -> PartReply:
        """Return the terms of a version for a receiver; see `Planner`."""
        progress = self._subscriber_progress
        refused = progress.refused(version)
        if refused is not None:
            return PartReply(version=version, run=run, refused=refused)
        decide_s = progress.decide_s(version)
        if decide_s is not None and not request.can_wait:
            progress.cannot_wait(asker, version)
            return PartReply(version=version, run=run, not_yet=f"version {version} is not decided yet")
        check = progress.check_of(version) if request.wants_check else b""
        later = self._version_status.now.withdrawn
        withdrawn = later if later is not None and later.version > version else None
        return PartReply(version=version, run=run, decide_s=decide_s, check=check, withdrawn=withdrawn)

    def _begin_live(self, version: int) -> None:
        """Let receivers read the parameters, and the tagged rows once they are filled."""
        local_version, offer = self._registered.local_version, self._registered.offer
        local_version.begin(version, self._metadata)
        local_version.ready(offer.plain_rows)
        # A map made while the device still fills the rows calls them not ready, and receivers then request digests
        # before every read.
        local_version.settle(self._stall_s)
        self._announce(version)
        # After the announcement, so that the plain rows are read while the tagged ones are quantised. Of these a reader
        # waits for no more than its own: the device has written them when `fill` says so.
        ready = partial(local_version.ready, is_written=True)
        offer.fill(version, self._run, ready, stall_s=self._stall_s)

    def _publish_snapshot(self, snapshot: VersionSnapshot, version: int, terms: rank_group.Together | None) -> float:
        """Copy the parameters and let receivers read the copy; return the seconds of the copy."""
        if terms is not None and self.rank == 0:
            self._expect(version, terms)
        try:
            with self._dropped_on_error(version, terms):
                return self._copy_snapshot(snapshot, version)
        except BaseException:
            # Rows that are never ready would keep receivers waiting until their stall deadline. After a decision on the
            # version, which the news then carry.
            self._withdraw()
            raise

    def _copy_snapshot(self, snapshot: VersionSnapshot, version: int) -> float:
        offer = self._registered.offer
        # Host copies have the tagged rows too, so these must be complete before the copy; else they are served from the
        # device, and receivers may read the plain rows meanwhile.
        if offer.is_copied:
            offer.fill(version, self._run, lambda rows: None, stall_s=self._stall_s)
        copy_s = snapshot.snapshot(
            version,
            rows=None if offer.is_copied else offer.plain_rows,
            metadata=self._metadata,
            announce=partial(self._announce, version),
            stall_s=self._stall_s,
        )
        if not offer.is_copied:
            ready = partial(self._registered.local_version.ready, is_written=True)
            offer.fill(version, self._run, ready, stall_s=self._stall_s)
        return copy_s

    def _announce(self, version: int) -> None:
        """Tell receivers and the hub that the version can be read here."""
        self.version = version
        self._before = self._version_status.now
        self._version_status.post(self._run, version, is_open=True)
        self.member.beat_now()

    def _withdraw(self) -> None:
        """End the reads of the version from this rank; after a withdrawal, announce the version before again."""
        self._registered.local_version.fence()
        known, newest, withdrawn = self._decision, self.version, None
        if known is not None and (known.run, known.version, known.outcome) == (self._run, newest, "withdrawn"):
            # Else subscribers that request the newest version would request the withdrawn one.
            newest, withdrawn = self._before.version, known
        self._version_status.post(self._run, newest, is_open=False, withdrawn=withdrawn)
        self.member.beat_now()

    def wait_ranks(self) -> None:
        """Wait until all ranks of this trainer take part. Until then a rank that joins may find a version of theirs.

        Raises:
            SourceStalled: not within the stall deadline.
        """
        deadline = time.monotonic() + self._stall_s
        while len(present := self._ranks_present()) < self.world_size:
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.world_size)) - present)
                raise SourceStalled(
                    f"ranks {missing} of the publisher of {self.name!r} did not come in {self._stall_s:g} s",
                    hint="all ranks call penstock.publisher with the same name and number of ranks",
                )
            time.sleep(0.05)

    def _ranks_present(self) -> set[int]:
        states = [other.state for other in self._membership.look() if other.state.side == "publisher"]
        return {self.rank, *(state.rank for state in states if state.run == self._run)}

    def wait_subscribers(self, count: int, timeout_s: float | None = None) -> None:
        """Wait until this number of subscribers take part.

        Raises:
            SourceStalled: not within `timeout_s`; None: the stall deadline.
        """
        require_type("count", count, int, "a number of subscribers")
        require_seconds("timeout_s", timeout_s)
        limit_s = self._stall_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while (present := sum(other.state.side == "subscriber" for other in self._membership.look())) < count:
            if time.monotonic() > deadline:
                raise SourceStalled(f"{present} of {count} subscribers of {self.name!r} came in {limit_s:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Leave: readers' descriptors become stale, and receivers with the newest version serve it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pending is not None and self.rank == 0:
            # Subscribers hear of it, at this rank or at the hub, before this rank is gone.
            self._subscriber_progress.cancel(self.version, "the publisher was closed before the decision")
            wait([self._pending.decision], self._stall_s)
        # The memory first: its owner may free it once this returns, and no peer may read it then.
        self._registered.close()
        self.member.leave(0.0)
        self._membership.close()
        # Another rank asks rank 0 for the decision: closing the connections ends that.
        self._deciding.close()


def publisher(
    name: str,
    params: torch.nn.Module | Mapping[str, Declarable],
    *,
    connection: ConnectionSettings | str | None = None,
    mode: PublishMode = "snapshot",
    transforms: Transforms | None = None,
    keep_plain: bool = True,
    rank: tuple[int, int] | None = None,
    replica: str = "device",
    arena: bool = False,
    memory_bytes: int | str | None = None,
    pack_bytes: int | str = PACK_BYTES,
) -> Publisher:
    """Publish the weights of this rank under a name that subscribers know.

    Args:
        name: of the sync; one group of ranks publishes it.
        params: a module, or tensors by name: whole ones, DTensors, `Shard`s; the part that is on this rank. It is kept:
            each version has the tensors that are in it then. Those of a `state_dict()` do not follow their module.
        connection: see `join`.
        mode: `snapshot`: receivers read a copy, which takes the size of the parameters once more (`replica`), and
            `publish` waits for the copy alone. `live`: they read the parameters themselves, and `publish` waits for
            them; a version that no subscriber has when it returns is lost.
        transforms: the formats in which tensors are offered in addition: a tag (`fp8-block128`, `cast:BF16`, ...; see
            `transform.formats`), for the weights that checkpoints store in that format, or tags with patterns of names.
            The same on all ranks.
        keep_plain: whether these tensors are also offered as they are.
        rank: this trainer rank and the number of them, as `(0, 8)`; None: of torch.distributed where it is initialised,
            else `(0, 1)`.
        replica: the place of a snapshot's copy: `device`, next to the parameters, or `cpu`, in pinned memory.
        arena: first move the parameters into one arena per device (`memory.rehome`), so that peers reach them by one
            registration; `shm` reaches host memory only there.
        memory_bytes: bound of a snapshot's copy and the transformed tensors together; None: no bound.
        pack_bytes: bound of the memory, on the device of the tensors, into which runs below 8 KiB are packed for
            receivers on other hosts, as columns of a tensor; it is allocated when they ask for it, in eighths. 0: they
            read such runs one by one.

    Raises:
        BudgetTooSmall: `pack_bytes` is above 0, and too small to help.
        PlanError: parameters cannot be declared, or transformed; names them; or there are none.
        BudgetTooSmall: see `memory_bytes`.
        ConfigError: another group publishes the name; names it.
        HubUnavailable: there is no hub. SourceStalled: no rank 0 came.

    Ownership: the parameters' memory stays registered until `close`.
    Order: all ranks call this at the same time, and publish the same versions.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    copies = _copies(name, mode, replica)
    trainer_rank, world_size = rank_of(rank)
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    pack_budget = parse_bytes(pack_bytes)
    if 0 < pack_budget < LEAST_PACK_BYTES:
        message = f"pack_bytes={pack_budget} leaves no buffer that a reader would gain by"
        raise BudgetTooSmall(message, minimum_bytes=LEAST_PACK_BYTES, budget="pack_bytes")
    options = OfferOptions(
        copies=copies,
        transforms=transforms,
        keep_plain=keep_plain,
        arena=arena,
        memory_bytes=budget,
        pack_bytes=pack_budget,
        world_size=world_size,
    )
    registered = Registered(params, options)
    warn_of_state_dict(name, params)
    # One rank of several may have no part of the model; subscribers find out if no rank has any.
    if registered.is_empty and world_size == 1:
        raise PlanError(f"the publisher of {name!r} has no tensors", hint="pass a module or a dict that has tensors")
    with contextlib.ExitStack() as stack:
        member, stall_s = joined(stack, connection)
        stack.callback(registered.close)
        registered.register(member)
        this_rank = Publisher(
            name, member, registered, mode=mode, rank=trainer_rank, world_size=world_size, stall_s=stall_s
        )
        # From here on `close` ends the registrations and leaves.
        stack.pop_all()
    return this_rank


def _copies(name: str, mode: str, replica: str) -> str | None:
    """Return the place that versions are copied to; None: they are not copied."""
    if mode not in ("live", "snapshot") or replica not in ("device", "cpu") or not name:
        message = f"a publisher of {name!r}, mode {mode!r}, replica {replica!r}"
        raise ConfigError(message, hint="it has a name, mode live or snapshot, and replica device or cpu")
    return replica if mode == "snapshot" else None
