"""A trainer rank as a publisher, which declares its tensors once and then publishes one version after the other.

In live mode receivers read the parameters, and training waits for the receivers. In snapshot mode receivers read a
copy. With `commit="all"`, rank 0 decides when the receivers have reported.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Literal

import msgspec
import torch

from penstock.arguments import former_value, formerly, require_name, require_seconds, require_type, wrong
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import Cancelled, ConfigError, PeerLost, PenstockError, PlanError, SourceStalled
from penstock.hub.client import resolve_connection
from penstock.hub.messages import MAX_VERSION, SyncState
from penstock.lifecycle import Closeable, quick_handover
from penstock.logs import log_named
from penstock.sync.check import encode_values
from penstock.sync.commit.announced import Announcements
from penstock.sync.commit.ballot import Ballot, Stragglers
from penstock.sync.commit.coordinator import CommitCoordinator
from penstock.sync.commit.outcome import Committed, Granted, NotYet, Open, Reported, Withdrawn
from penstock.sync.local_version import check_metadata
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.messages import PartRequest
from penstock.sync.planner import Planner
from penstock.sync.publish import rank_group
from penstock.sync.publish.offer import OfferOptions
from penstock.sync.publish.registered import Registered, warn_of_state_dict
from penstock.sync.publish.state import NEXT, PublisherState
from penstock.sync.publish.trainer_rank import TrainerRank
from penstock.sync.publish.transformed import Transforms
from penstock.sync.report import PublishMode, PublishReport
from penstock.sync.request_handler import SyncHandler
from penstock.sync.settings import PublisherSettings
from penstock.sync.shards import Declarable
from penstock.telemetry.journey import Journey
from penstock.waits import Threads

Commit = Literal["each", "all"]
"""With `each`, every subscriber goes live independently. With `all`, the fleet decides once for all subscribers."""

log = log_named("penstock")


class Publisher(Closeable):
    """A rank that publishes, created by `publisher`. A context manager. Only one thread at a time may publish.

    Attributes:
        latest: highest version that earlier groups published, or, if this rank was restarted, that its group published.
            The rank must publish a version above `latest`.
    """

    def __init__(
        self, membership: Membership, registered: Registered, *, mode: PublishMode, rank: int, world_size: int
    ) -> None:
        self.name = membership.name
        self.member = membership.member
        self.mode: PublishMode = mode
        self.rank = rank
        self.world_size = world_size
        self.latest = -1
        self._membership = membership
        self._registered = registered
        self._stall_s = membership.stall_s
        self._publishing = threading.Lock()
        self._entering = threading.Lock()
        self._state = PublisherState.OPENING
        self._announcements = Announcements(membership.member)
        self._coordinator = CommitCoordinator(membership.timing)
        self._first_versions = rank_group.FirstVersions(lambda: self.version)
        self._rank = TrainerRank(
            rank=rank,
            membership=membership,
            registered=registered,
            announcements=self._announcements,
            coordinator=self._coordinator,
        )
        self._pending: tuple[PublishReport, Future[Reported]] | None = None
        self._deciding = Threads(1, "penstock-decide", waits_for_calls=True)
        self._took_s = 0.0

    @classmethod
    def open(
        cls, membership: Membership, registered: Registered, *, mode: PublishMode, rank: int, world_size: int
    ) -> Publisher:
        """Claim the name as rank 0, or join rank 0's epoch. Raises the same errors as `publisher`."""
        opened = cls(membership, registered, mode=mode, rank=rank, world_size=world_size)
        try:
            opened._open()
        except BaseException:
            opened._enter(PublisherState.CLOSED)
            membership.close()
            raise
        return opened

    def _open(self) -> None:
        status, membership = self._announcements, self._membership
        # Set the handler before the first report, because members that learn of this rank from the hub send requests.
        self.member.server.handlers["sync"] = SyncHandler(
            membership.key,
            self.member.registration.check_grant,
            local_version=lambda: self._registered.served,
            version_status=status,
            planner=Planner(membership, status, lambda: self._registered.layout, terms=self._terms_for),
            coordinator=self._coordinator if self.rank == 0 else None,
            first_versions=self._first_versions if self.rank == 0 else None,
        )
        self.member.syncs.append(self._sync_state)
        if self.rank == 0:
            self._announcements.epoch = self.member.id
            # Report before the claim, so that two groups that start at the same time detect each other.
            self.member.report_now()
            rank_group.claim(membership)
            # Ignore versions of this epoch, because another rank may be ahead.
            members = self._membership.look_at_all(self._stall_s)
            self.latest = max((m.state.version for m in members if m.state.epoch != self.member.id), default=-1)
            self._first_versions.begin(self.latest)
        else:
            self._join()
            self.member.report_now()
        self._registered.connect(membership, rank=self.rank)
        self._enter(PublisherState.IDLE)

    def _enter(self, state: PublisherState) -> bool:
        with self._entering:
            if self._state is PublisherState.CLOSED:
                return False
            assert state in NEXT[self._state], f"{self._state.name} -> {state.name}"
            self._state = state
            return True

    @property
    def state(self) -> PublisherState:
        """Return the current state of this publisher."""
        return self._state

    @property
    def version(self) -> int:
        """Return the newest version that this rank published, or -1."""
        return self._announcements.version

    def _join(self) -> None:
        deadline = time.monotonic() + self._stall_s
        while True:
            epoch = rank_group.join(self._membership, self.rank, self.world_size, self._announcements.epoch)
            if epoch == self._announcements.epoch:
                return
            try:
                latest = rank_group.begins_after(self._membership, epoch, self.rank)
            except PeerLost:
                # Retry, because a rank 0 that cannot claim the name exits, and another rank 0 may join.
                if time.monotonic() > deadline:
                    raise
                continue
            self._announcements.epoch, self.latest = epoch, max(self.latest, latest)
            return

    def _sync_state(self) -> SyncState:
        now, outcome = self._announcements.now, self._announcements.outcome
        return SyncState(
            name=self.name,
            side="publisher",
            epoch=self._announcements.epoch,
            rank=self.rank,
            world_size=self.world_size,
            layout=self._registered.digest,
            version=now.version,
            state="open" if now.is_open else "idle",
            nbytes=self.nbytes,
            took_s=self._took_s,
            decision=None if outcome is None else outcome.record(),
        )

    @property
    def revision(self) -> str:
        """Return the publishers' epoch and the newest version as a text, which is empty before the first version."""
        return f"{self._announcements.epoch}:{self.version}" if self.version >= 0 else ""

    @property
    def nbytes(self) -> int:
        """Return the size of this rank's rows in bytes."""
        # Compute sizes by form, because a model has hundreds of thousands of rows but only a few forms.
        layout = self._registered.layout
        nbytes = [form.box.num_elements * form.dtype.bits // 8 for form in layout.forms]
        return sum(nbytes[i] for i in layout.form.tolist())

    @formerly(deadline_s="timeout_s")
    def publish(
        self,
        version: int,
        *,
        commit: Commit = "each",
        timeout_s: float | None = None,
        stragglers: Stragglers = "leave_out",
        check: Mapping[str, object] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> PublishReport:
        """Publish the current parameters of every rank as a version.

        All ranks call this with the same arguments, except that only rank 0's `check` counts. Parameters that were
        moved, cast back or replaced in the module since the previous version are registered again.

        In live mode the call returns when each subscriber that was known at the start has the version, has failed, or
        has made no progress for the stall deadline. In snapshot mode the call returns when the copy is complete. The
        parameters may change after the call.

        Args:
            version: version number, higher than all earlier version numbers.
            commit: with `each`, a subscriber goes live when it has the version. With `all`, the subscribers prepare the
                version, and rank 0 decides whether all of them go live or none. In live mode this call returns after
                the decision. In snapshot mode, call `wait_decision` to wait for the decision.
            timeout_s: with `commit="all"`, maximum seconds until the decision. None means the stall deadline.
            stragglers: with `commit="all"`, what to do if a subscriber fails or does not prepare the version in
                time. `leave_out` commits the version for the other subscribers. `withdraw` withdraws the version. Use
                `withdraw` for engines with several ranks, each of which is a subscriber.
            check: numbers, strings, lists and tensors by name, at most 1 MiB, which the subscribers' `Hooks.check`
                receives. If values are passed with `commit="all"`, at least one check must pass.
            metadata: strings by name, the same on all ranks, which a subscriber's `Hooks.before_read` receives. At most
                16 strings with 65,536 characters each.

        Raises:
            ConfigError: an argument is invalid, the version is not above the previous version, another group publishes
                the name, or dtypes or shapes changed since the publisher was created. Nothing was published.
            VersionRefused: with `commit="all"`, the version was withdrawn and never goes live.
            HubUnavailable: with `commit="all"`, the hub did not record the decision. Subscribers keep the previous
                version, or learn from the hub that this version was committed.
            PeerLost, SourceStalled: rank 0 is gone or does not publish this version. The version is withdrawn.
            DestinationError: a device failed. A snapshot on the device may have been announced, so its version number
                cannot be used again.
            PlanError: a tensor cannot be published, for example because its memory was freed. Nothing was published.
            Cancelled: the publisher was closed.
        """
        commit = former_value("commit", commit, {"together": "all"})
        require_type("version", version, int, "a version number, above the previous one")
        if version > MAX_VERSION:
            raise wrong("version", version, f"a number up to {MAX_VERSION}")
        ballot = self._ballot(commit, timeout_s, stragglers, check)
        texts = dict(metadata or {})
        with (
            self._publishing,
            quick_handover(),
            Journey("publish", self.name, version=version, member=self.member.id[:8]) as journey,
        ):
            begun = time.perf_counter()
            self._check(version)
            check_metadata(texts)
            self._finish_decision()
            if self._registered.follow(self._end_version):
                log.info("registered the parameters of %r again, because they moved", self.name)
                # Report before the announcement, because planners find the layout by the digest that the hub lists.
                self.member.report_now()
                self._membership.look()
            ballot = msgspec.structs.replace(ballot, epoch=self._announcements.epoch)
            copy_s, outcome = self._run(ballot, version, texts)
            self._took_s = time.perf_counter() - begun
            report = self._report(outcome, copy_s, is_two_phase=ballot.is_two_phase)
            if report.outcome == "pending":
                self._pending = report, self._deciding.submit(self._decide, ballot, version)
            if report.exchanged_bytes:
                journey.received = lambda: {("peer", "exchange"): report.exchanged_bytes}
            if self.mode == "live":
                counts = {"committed": report.committed, "late": report.late, "failed": report.failed}
                journey.subscribers = {result: len(members) for result, members in counts.items()}
            journey.report = report
            return report

    def _report(self, outcome: Reported, copy_s: float, *, is_two_phase: bool) -> PublishReport:
        offer = self._registered.offer
        wait_s = self._took_s - offer.seconds if self.mode == "live" else 0.0
        return PublishReport(
            name=self.name,
            version=self.version,
            revision=self.revision,
            mode=self.mode,
            nbytes=self.nbytes,
            wall_s=self._took_s,
            phases={"copy": copy_s, "transform": offer.seconds, "wait": wait_s},
            transformed_bytes=offer.transformed.nbytes,
            boundary_bytes=offer.transformed.boundary_bytes,
            exchanged_bytes=offer.moved_bytes,
            committed=outcome.committed,
            late=outcome.late,
            failed=outcome.failed,
            outcome="" if not is_two_phase else "committed" if isinstance(outcome, Committed) else "pending",
        )

    def _ballot(
        self, commit: Commit, timeout_s: float | None, stragglers: Stragglers, check: Mapping[str, object] | None
    ) -> Ballot:
        if timeout_s is not None:
            require_type("timeout_s", timeout_s, (int, float), "seconds, or None")
        if commit not in ("each", "all"):
            raise wrong("commit", commit, "'each' or 'all'")
        if stragglers not in ("leave_out", "withdraw"):
            raise wrong("stragglers", stragglers, "'leave_out' or 'withdraw'")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise wrong("timeout_s", timeout_s, "seconds above 0, or None for the stall deadline")
        return Ballot(
            stragglers=None if commit == "each" else stragglers,
            needs_check=check is not None,
            check=encode_values(check) if check else b"",
            timeout_s=self._stall_s if timeout_s is None else float(timeout_s),
        )

    def _check(self, version: int) -> None:
        if self._state is PublisherState.CLOSED:
            raise Cancelled("the publisher was closed")
        if self.rank != 0:
            self._join()
        newest = max(self.version, self.latest)
        if version <= newest:
            hint = "continue from Publisher.latest, because versions must grow even across restarts"
            raise ConfigError(f"version {version} of {self.name!r} is not above {newest}", hint=hint)
        if self.rank == 0:
            rank_group.check_alone(self._membership)

    def _finish_decision(self) -> None:
        if self._pending is None:
            return
        # No timeout is needed, because the decision has a deadline.
        if (why := self._pending[1].exception()) is not None:
            log.warning("the previous version of %r did not go live: %s", self.name, why)
        self._pending = None

    def _end_version(self) -> None:
        if self._state is not PublisherState.IDLE:
            self._enter(PublisherState.IDLE)
        self._announcements.post(self._announcements.epoch, self.version, is_open=False)

    def _run(self, ballot: Ballot, version: int, metadata: Mapping[str, str]) -> tuple[float, Reported]:
        self._enter_open(PublisherState.SHOWING)
        outcome: Reported = Open()
        try:
            copy_s = self._rank.show(version, metadata, ballot)
            if self.mode == "live":
                self._enter_open(PublisherState.WAITING)
                outcome = self._rank.wait(version, ballot)
            else:
                self._enter_open(PublisherState.DECIDING if ballot.is_two_phase else PublisherState.SERVING)
        except BaseException as error:
            # Withdraw the version. Receivers would wait for missing rows, and in live mode the parameters change.
            self._withdraw()
            if self._state is PublisherState.CLOSED and isinstance(error, PenstockError):
                raise Cancelled("the publisher was closed") from error
            raise
        if self.mode == "live":
            self._withdraw()
            if self.rank == 0 and not outcome.committed:
                log.warning(
                    "no subscriber received version %s of %r, which was published live, and no later update can read "
                    "it. Call wait_subscribers() first, or use mode='snapshot'",
                    version,
                    self.name,
                )
        return copy_s, outcome

    def _enter_open(self, state: PublisherState) -> None:
        if not self._enter(state):
            raise Cancelled("the publisher was closed")

    def _withdraw(self) -> None:
        self._rank.end_reads()
        self._enter(PublisherState.WITHDRAWN if self._announcements.withdrawn else PublisherState.IDLE)

    def _decide(self, ballot: Ballot, version: int) -> Reported:
        try:
            return self._rank.wait(version, ballot)
        finally:
            if self._announcements.withdrawn:
                self._withdraw()
            else:
                # Keep serving the version after an error, because it may still be committed and read here.
                self._enter(PublisherState.SERVING)

    def wait_decision(self) -> PublishReport:
        """Wait for the decision on the newest snapshot, and return its report. Raises the same errors as `publish`."""
        if self._pending is None:
            raise ConfigError("there is no decision to wait for", hint="publish a snapshot with commit='all' first")
        report, pending = self._pending
        outcome = pending.result()
        return msgspec.structs.replace(
            report, outcome="committed", committed=outcome.committed, late=outcome.late, failed=outcome.failed
        )

    def _terms_for(self, member: str, request: PartRequest, epoch: str, version: int) -> NotYet | Withdrawn | Granted:
        terms = self._coordinator.terms(member, request, epoch, version)
        later = self._announcements.withdrawn
        if isinstance(terms, Granted) and later is not None and later.version > version:
            return msgspec.structs.replace(terms, later=later)
        return terms

    def wait_ranks(self) -> None:
        """Wait until all ranks of this trainer have joined. Raise SourceStalled at the stall deadline."""
        deadline = time.monotonic() + self._stall_s
        while True:
            states = [other.state for other in self._membership.look() if other.state.side == "publisher"]
            present = {state.rank for state in states if state.epoch == self._announcements.epoch}
            missing = sorted(set(range(self.world_size)) - present - {self.rank})
            if not missing:
                return
            if time.monotonic() > deadline:
                message = f"ranks {missing} of the publisher of {self.name!r} did not join within {self._stall_s:g} s"
                hint = "call penstock.publisher on all ranks with the same name and number of ranks"
                raise SourceStalled(message, hint=hint)
            time.sleep(self._membership.timing.members_pause_s)

    def wait_subscribers(self, count: int, timeout_s: float | None = None) -> None:
        """Wait until `count` subscribers have joined. Raise SourceStalled after `timeout_s` or the stall deadline."""
        require_type("count", count, int, "a number of subscribers")
        require_seconds("timeout_s", timeout_s)
        limit_s = self._stall_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while (present := sum(other.state.side == "subscriber" for other in self._membership.look())) < count:
            if time.monotonic() > deadline:
                message = f"only {present} of {count} subscribers of {self.name!r} joined within {limit_s:g} s"
                raise SourceStalled(message)
            time.sleep(self._membership.timing.members_pause_s)

    def close(self) -> None:
        """Leave the sync and invalidate the descriptors of readers. Idempotent."""
        before = self._state
        if not self._enter(PublisherState.CLOSED):
            return
        # Withdraw pending versions before this process leaves, so that subscribers learn of the withdrawal.
        self._coordinator.cancel("the publisher was closed before the decision")
        if before is PublisherState.DECIDING and self.rank == 0 and self._pending is not None:
            wait([self._pending[1]], self._stall_s)
        # Close the registrations first, because the owner may free the memory after this call.
        self._registered.close()
        self.member.leave(0.0)
        self._membership.close()
        # On ranks other than 0, `leave` has aborted a pending request to rank 0 for the decision.
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
    snapshot_device: str = "device",
    settings: PublisherSettings | None = None,
) -> Publisher:
    """Publish the weights of this rank under a name that subscribers know.

    All ranks call this at the same time and publish the same versions. The parameters' memory stays registered until
    `close`.

    Args:
        name: name of the sync, under which only one group of ranks publishes.
        params: a module, or this rank's tensors by name (whole tensors, DTensors or `Shard`s). A version has the
            tensors that `params` contains when the version is published. The tensors in a `state_dict()` do not follow
            their module to new memory.
        connection: see `join`.
        mode: with `snapshot`, receivers read a copy, which takes as much memory as the parameters, and `publish` waits
            only for the copy. With `live`, receivers read the parameters, and `publish` waits for the receivers. A live
            version is lost if no subscriber has it when `publish` returns.
        transforms: additional formats for tensors: a tag (`fp8-block128`, `cast:BF16`, ..., see `transform.formats`)
            for the weights that checkpoints store in that format, or tags with name patterns. Pass the same formats on
            all ranks.
        keep_plain: whether to offer transformed tensors also in their original form.
        rank: rank and number of trainer ranks, such as `(0, 8)`. None means the values of torch.distributed if it is
            initialised, and otherwise `(0, 1)`.
        snapshot_device: memory for snapshots: `device`, next to the parameters, or `cpu`, in pinned memory.
        settings: limits for the buffers, and whether to move the parameters to an arena (`sync.PublisherSettings`).

    Raises:
        PlanError: parameters cannot be declared or transformed, or there are none.
        BudgetTooSmall: `settings.memory_bytes` is too small for a copy.
        ConfigError: another group publishes the name.
        HubUnavailable: there is no hub.
        SourceStalled: no rank 0 joined.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    settings = PublisherSettings.of(settings)
    if mode not in ("live", "snapshot") or snapshot_device not in ("device", "cpu") or not name:
        message = f"invalid publisher: name {name!r}, mode {mode!r}, snapshot_device {snapshot_device!r}"
        raise ConfigError(message, hint="pass a name, mode 'live' or 'snapshot', and snapshot_device 'device' or 'cpu'")
    trainer_rank, world_size = rank_of(rank)
    options = OfferOptions(
        copies=snapshot_device if mode == "snapshot" else None,
        transforms=transforms,
        keep_plain=keep_plain,
        arena=settings.arena,
        memory_bytes=None if settings.memory_bytes is None else parse_bytes(settings.memory_bytes),
        pack_bytes=parse_bytes(settings.pack_bytes),
        world_size=world_size,
    )
    registered = Registered(params, options)
    warn_of_state_dict(name, params)
    # One of several ranks may have no tensors. If all ranks have none, subscribers detect it.
    if registered.is_empty and world_size == 1:
        raise PlanError(f"the publisher of {name!r} has no tensors", hint="pass a module or a dict with tensors")
    with contextlib.ExitStack() as stack:
        member, stall_s = joined(stack, connection)
        stack.callback(registered.close)
        registered.register(member)
        membership = Membership(member, name, stall_s)
        this_rank = Publisher.open(membership, registered, mode=mode, rank=trainer_rank, world_size=world_size)
        stack.pop_all()
    return this_rank
