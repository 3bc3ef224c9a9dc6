"""The update loop of a receiver: find a planner, request the part, read it from its sources, and retry after a loss.

After a lost source there is a new plan, and all bytes are read again. After a fence the plan may be the same, and
verified steps whose digests still match are not read again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from penstock.digest.strip import Strips
from penstock.engine.threads import KeptThreads
from penstock.errors import (
    ConfigError,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.hub.messages import SyncMember, layout_digest
from penstock.logs import log_named
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import ReceiverPlan
from penstock.report import shares_text
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.learned import KnownOutcomes
from penstock.sync.commit.outcome import Decided, Granted, LayoutNeeded, NotYet, Withdrawn, of_part_reply, of_record
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.messages import MAX_REASON_CHARS, NewsReply, PartRequest, RankProgress, TableReply
from penstock.sync.receive.followed import FollowedTarget
from penstock.sync.receive.hooks import noted
from penstock.sync.receive.sources import LinkRequests, SourceLink
from penstock.sync.receive.staged import Staged, StagedOrigin, UpdateOptions
from penstock.sync.receive.states import SubscriberState, SubscriberStates
from penstock.sync.receive.target import ReceiveBuffers, Target, TensorSelection, select_tensors
from penstock.sync.receive.tied import TiedRows
from penstock.sync.receive.transfer import (
    ChangedRanges,
    Transfer,
    report,
    reporting_progress,
    require_planned,
)
from penstock.sync.recording.requirements import Requirements
from penstock.sync.report import UpdateReport
from penstock.timing import Timing
from penstock.transfer.blame import FailedSources, SourceFailed
from penstock.transport.storages import RegisteredStorages
from penstock.types import U64

log = log_named("penstock")

TRIES = 8
"""Maximum number of attempts in an update. Each attempt excludes one more source, or reads a newer version."""
_LOST = (PeerLost, SourceStalled, PermissionDenied, IntegrityError)
"""Errors after which another source or planner may succeed."""


class UpdateLoop(msgspec.Struct, eq=False, dict=True):
    """The update loop of a receiver, and its live version as a source for other members.

    One thread at a time updates, and the server's threads read the attributes.

    Attributes:
        buffers: memory that receives versions, or None before `prepare` and the first update.
        requirements: the target's requirements, kept when `buffers` is freed, or None if unknown or the target moved.
    """

    membership: Membership
    target: Target
    options: UpdateOptions
    states: SubscriberStates
    timing: Timing

    def __post_init__(self) -> None:
        self.status = VersionStatus()
        self.buffers: ReceiveBuffers | None = None
        self.requirements: Requirements | None = None
        self.checkpoint: TableReply | None = None
        self.known = KnownOutcomes()
        self._stall_s = self.membership.stall_s
        self._followed = FollowedTarget(self.target, self.options.load, self.options.strict)
        self._storages = RegisteredStorages(())
        self._threads = KeptThreads()
        self._live_proven: list[tuple[Strips, U64]] = []
        self._epoch = ""
        self._table: tuple[str, Mapping[str, str]] = ("", {})
        self._transfer: Transfer | None = None
        self._tied: TiedRows | None = None
        self._is_outdated = False
        self._announced = -1
        self._request: tuple[str, int] | None = None
        self._last_warning = ""

    @property
    def progress(self) -> tuple[int, int]:
        """Return the verified bytes of the running or last transfer, and the size of its part."""
        transfer = self._transfer
        return (0, 0) if transfer is None else (transfer.moved_bytes, transfer.part.nbytes)

    def layout(self) -> Layout | None:
        """Return the layout of the target's memory, or None before the first update."""
        return None if self.buffers is None else self.buffers.layout

    def local_version(self) -> LocalVersion | None:
        """Return the target's memory as a source, or None before the first update or if the memory is not served."""
        return None if self.buffers is None else self.buffers.local_version

    def serve(self) -> None:
        """Serve the live version to other members, if this subscriber is a source."""
        live, local_version = self.states.live, self.local_version()
        # In direct mode the memory is registered even if it is not served.
        if local_version is None or not self.options.serve or not live.epoch:
            return
        if local_version.version is not None:
            local_version.fence()
        local_version.begin(live.version, live.metadata)
        local_version.ready()
        self.status.post(live.epoch, live.version, is_open=True)

    def withdraw(self) -> None:
        """Stop serving the live version, because its memory is about to change or has changed."""
        # Change the status first, so that a planner does not send a fenced reader back to this member.
        self.status.post(self.states.live.epoch, self.states.version, is_open=False)
        local_version = self.local_version()
        if local_version is not None and local_version.version is not None:
            local_version.fence()

    def require_proven(self) -> None:
        """Stop serving and raise StaleDescriptor if the served bytes changed since they were verified."""
        # Readers compare with digests of the current bytes, so they cannot detect that an engine changed the bytes.
        local_version = self.local_version()
        if local_version is None or local_version.version is None:
            return
        digests = local_version.regions.digests
        if not (self._storages.are_there() and all((digests(s) == wanted).all() for s, wanted in self._live_proven)):
            self._stop_serving()
            message = "the weights were modified after the update, so this process no longer serves them"
            raise StaleDescriptor(message, hint="set serve=False for an engine that changes weights in place")

    def _stop_serving(self) -> None:
        if self.states.version >= 0:
            self.withdraw()
            # Send a heartbeat now, because planners choose sources from the hub's list.
            self.membership.member.beat_now()

    def note_outcome(self, outcome: Decided, cause: BaseException | None = None) -> None:
        """Store an outcome. Raise VersionRefused if it is a withdrawal."""
        self.known = self.known.noted(outcome)
        if isinstance(outcome, Withdrawn):
            raise outcome.error(self.membership.name) from cause

    def _refuse_news(self, withdrawn: Decided | None) -> None:
        # Raise a withdrawal only once, because the caller may wait for a later version.
        if withdrawn is not None and self.known.withdrawn(withdrawn.epoch, withdrawn.version) is None:
            self.note_outcome(withdrawn)

    def note_live(self) -> None:
        """Record that the version of the last transfer is live now."""
        self._last_warning = ""
        # A version that is only staged must not be compared with the live memory.
        self._live_proven = [] if self._transfer is None else self._transfer.proven

    def altered(self) -> list[str]:
        """Return the names of staged tensors that changed since they were verified."""
        assert self.buffers is not None and self._transfer is not None
        return self.buffers.altered(self._transfer.proven)

    def report(self, outcome: Literal["committed", "prepared", "refused", "failed"], why: str = "") -> None:
        """Report the outcome of the last transfer to its planner. See `sync.messages.RankProgress`."""
        if self._request is not None and self._transfer is not None:
            planner, version = self._request
            is_checked = outcome == "prepared" and self.options.has_check
            moved = self._transfer.moved_bytes
            progress = RankProgress(
                version=version, moved_bytes=moved, outcome=outcome, why=why[:MAX_REASON_CHARS], is_checked=is_checked
            )
            report(self.membership, planner, progress)

    def news(self, after: int, wait_s: float, *, channel: str = "news") -> NewsReply | None:
        """Return a planner's status when its version exceeds `after`, or after `wait_s`. None means no reply."""
        for planner in self._planners():
            # During a restart the list contains planners that are gone.
            with contextlib.suppress(*_LOST, NotFound):
                # A request for a part must not wait behind this long poll.
                news = self.membership.ask(
                    planner.member, lambda sync_client: sync_client.news(after, wait_s), channel=channel
                )
                self._announced = news.version
                return news
        return None

    def await_version(self, version: int, timeout_s: float | None, check_open: Callable[[], None]) -> int:
        """See `Subscriber.wait`. `check_open` is called before each request, and raises an error to stop the wait."""
        begun = last_reply = time.monotonic()
        after = version - 1
        while True:
            check_open()
            news = self.news(after, self.timing.news_wait_s)
            now = time.monotonic()
            if news is not None:
                # A version may take hours, so without a timeout only the time since a planner's last reply is limited.
                last_reply = now
                if news.version >= version:
                    return news.version
                if news.withdrawn is not None and news.withdrawn.version >= version:
                    after = news.withdrawn.version
                    self._refuse_news(of_record(news.withdrawn))
            else:
                time.sleep(self.timing.no_planner_pause_s)
            waited = now - (last_reply if timeout_s is None else begun)
            if waited > (self._stall_s if timeout_s is None else timeout_s):
                message = f"version {version} of {self.membership.name!r} was not announced in {waited:.1f} s"
                raise SourceStalled(message)

    def prepare(self) -> None:
        """Do the one-time work of the first update in advance. Raise NotFound while publisher ranks are missing."""
        self.follow()
        lost = FailedSources()
        while True:
            # A restarted trainer is listed together with its old process, which does not reply.
            planner = self._choose_planner(lost)
            try:
                buffers = self._prepare_buffers(planner)
                self._request_part(planner, buffers, None, FailedSources(), is_ahead=True)
                break
            except _LOST as error:
                lost.errors[planner.member] = error
        buffers.into.warm_up()

    def receive(self, version: int | None, pause: Callable[[int], None]) -> Staged:
        """Read and verify a version. None means the newest. Raise NotFound if no version can be read yet.

        `pause` is called with the version before the first byte of each attempt is read into place.
        """
        begun = time.perf_counter()
        self.follow()
        if version is not None and version <= self.states.version:
            epoch = self.states.live.epoch
            if self._is_live(version, epoch):
                return self.unread(version, epoch, begun, attempts=0)
        self._request = None
        try:
            return self._attempts(version, pause, begun)
        except NotFound:
            # The caller waits and calls again, so this does not count as a failure of the version.
            raise
        except BaseException as error:
            # Report the failure, so that a publish does not wait for this receiver.
            if self._request is not None:
                planner, of = self._request
                why = str(error)[:MAX_REASON_CHARS]
                report(self.membership, planner, RankProgress(version=of, outcome="failed", why=why))
            raise

    def _attempts(self, version: int | None, pause: Callable[[int], None], begun: float) -> Staged:
        lost = FailedSources()
        # Epochs in which a member was lost.
        damaged: set[str] = set()
        for attempt in range(1, TRIES + 1):
            planner = self._choose_planner(lost)
            try:
                self._request = planner.member, -1
                buffers = self._prepare_buffers(planner)
                with self._link_requests(planner, version, lost) as requests:
                    granted = self._request_part(planner, buffers, version, lost)
                    self._request = planner.member, granted.version
                    if self._is_live(granted.version, granted.epoch):
                        self._refuse_news(granted.later)
                        return self.unread(granted.version, granted.epoch, begun, attempts=attempt)
                    staged = self.unread(granted.version, granted.epoch, begun, attempts=attempt, origin="sync")
                    return self._read(staged, planner, buffers, granted, requests, lost, pause)
            except SourceFailed as failed:
                member, error = failed.member, failed.error
            except _LOST as failed:
                member, error = lost.at_fault(planner.member, failed), failed
            except (PlanError, StaleDescriptor) as failed:
                # A restarted trainer does not depend on members of its old epoch.
                if planner.state.epoch not in damaged:
                    raise
                # The lost member is the reason why the remaining members cannot supply the version.
                raise lost.last from failed
            # A source that fenced its version is healthy and serves the next one.
            if not isinstance(error, StaleDescriptor):
                lost.errors[member] = error
                damaged.add(planner.state.epoch)
            if attempt == TRIES or not isinstance(error, (*_LOST, StaleDescriptor)):
                raise error
            without = f" without {member[:8]}" if member in lost.errors else ""
            text = f"update of {self.membership.name!r}: attempt {attempt} failed, reading again{without}: "
            # A caller that waits for a source repeats the same attempt many times a second, so log each text once.
            if text + error.summary != self._last_warning:
                self._last_warning = text + error.summary
                log.warning("%s", self._last_warning)
            time.sleep(self.timing.retry_pause_s)
        raise AssertionError("unreachable")

    def unread(
        self, version: int, epoch: str, begun: float, *, attempts: int = 1, origin: StagedOrigin = "here"
    ) -> Staged:
        """Return a version of which no byte has been read."""
        report = UpdateReport(
            name=self.membership.name,
            version=version,
            revision=f"{epoch}:{version}" if version >= 0 else "",
            mode="staged" if self.options.staged else "direct",
            nbytes=0,
            wall_s=0.0,
            phases={"plan": 0.0, "wire": 0.0},
            attempts=attempts,
        )
        return Staged(version=version, epoch=epoch, origin=origin, begun=begun, report=report)

    def _is_live(self, version: int, epoch: str) -> bool:
        """Return whether this version is already live. Raise ConfigError if the live version is newer."""
        live = self.states.version
        if version > live:
            return False
        if version == live and not self.states.is_current:
            return False
        # The same version number in another epoch has different bytes.
        if version == live and epoch == self.states.live.epoch:
            return True
        message = f"version {version} is not above {live}, which is live"
        hint = "continue from Publisher.latest, because versions must grow even across restarts of the trainer"
        raise ConfigError(message, hint=hint)

    def _planners(self, *, max_age_s: float | None = None) -> list[SyncMember]:
        max_age_s = self.timing.member_list_s if max_age_s is None else max_age_s
        members = self.membership.look(max_age_s=max_age_s)
        zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
        # The hub lists a restarted publisher's old process for a while, so the newest version comes first.
        zeros.sort(key=lambda zero: (-zero.state.version, zero.since))
        receivers = [
            member
            for member in members
            if member.state.side == "subscriber"
            and member.state.state == "open"
            and member.member != self.membership.member.id
        ]
        # All receivers use the same order, so that one planner spreads all receivers over the sources.
        return zeros + sorted(receivers, key=lambda receiver: (-receiver.state.version, receiver.member))

    def _choose_planner(self, lost: FailedSources) -> SyncMember:
        members = self._planners(max_age_s=0.0 if lost.errors else None)
        candidates = [member for member in members if member.member not in lost.errors]
        if not candidates:
            if lost.errors:
                raise lost.last
            # The hub also drops a publisher that it has not heard from, for example a stopped process.
            state = "is not reachable any more" if self.checkpoint else "has not joined yet"
            hint = "start the publisher under this name and hub, and run `penstock status` to list the members"
            raise NotFound(f"the publisher of {self.membership.name!r} {state}", hint=hint)
        return candidates[0]

    def _prepare_buffers(self, planner: SyncMember) -> ReceiveBuffers:
        # An epoch's checkpoint does not change. A restarted trainer has a new epoch, usually with the same table.
        if self.requirements is not None and self._epoch == planner.state.epoch:
            if self.buffers is None:
                self.buffers = self._allocate(self.requirements)
            return self.buffers
        checkpoint = self.membership.ask(planner.member, lambda sync_client: sync_client.checkpoint())
        selection = self._selected(checkpoint)
        key = layout_digest(selection.table), selection.tags
        buffers = self.buffers
        if buffers is None or key != self._table:
            requirements = self.requirements
            if requirements is None or key != self._table:
                # If names or shapes do not match, keep the buffers, so that the live version is still served.
                requirements = self._followed.requirements(selection.table, selection.tags)
            # Free the old buffers first, because a device rarely has memory for two staging copies.
            self._give_up_buffers()
            buffers = self._allocate(requirements)
            self.buffers, self.requirements = buffers, requirements
        self._table = key
        self._epoch = planner.state.epoch
        self.checkpoint = checkpoint
        return buffers

    def _selected(self, checkpoint: TableReply) -> TensorSelection:
        model = self.target if isinstance(self.target, torch.nn.Module) else None
        return select_tensors(checkpoint, self.options.transforms, model)

    def follow(self) -> list[str]:
        """If tensors moved, drop the data that depends on their memory. Return the names of replaced tensors."""
        moved = [] if self.requirements is None else self._followed.moved()
        if moved:
            self.requirements = None
        # Torch may also free or move the memory of the same tensors.
        if moved or (self.buffers is not None and not self._storages.are_there()):
            if self.states.at_rest is SubscriberState.LIVE:
                # The tensors may have arbitrary values now, so the live version is read again.
                self.states.enter(SubscriberState.MOVED)
            self._give_up_buffers()
        return moved

    def require_in_place(self) -> None:
        """Raise ConfigError if tensors have moved since the version was planned or staged."""
        moved = [] if self.requirements is None else self._followed.moved()
        if not moved and self._storages.are_there():
            return
        some = f"{len(moved)} tensors of the target have" if moved else "memory of the target has"
        raise ConfigError(
            f"{some} moved since the update began",
            tensor=moved[0] if moved else None,
            hint="call stage() or update() again, and do not move the weights until the version is live",
        )

    def _give_up_buffers(self) -> None:
        if self.buffers is not None:
            self._stop_serving()
        self.free()

    def _link_requests(self, planner: SyncMember, version: int | None, lost: FailedSources) -> LinkRequests:
        members: Sequence[str] = ()
        expected = self._announced if version is None else version
        if self._transfer is not None and not lost.errors and expected >= 0 and self._epoch == planner.state.epoch:
            assert self._tied is not None
            members = self._tied.sources
        return LinkRequests(self.membership, members, expected, self._stall_s, self._threads, self.timing)

    def _request_part(
        self,
        planner: SyncMember,
        buffers: ReceiveBuffers,
        version: int | None,
        lost: FailedSources,
        *,
        is_ahead: bool = False,
    ) -> Granted:
        # Because of `have_key`, the planner does not send an unchanged part of several megabytes for every version.
        have = self._transfer.part.key if self._transfer is not None else ""
        request = PartRequest(
            version=-1 if version is None else version,
            digest=buffers.digest,
            have_key=have,
            without=tuple(lost.errors),
            can_wait=self.options.staged,
            wants_check=self.options.has_check,
            refused=tuple(one.version for one in reversed(self.known.withdrawals) if one.epoch == planner.state.epoch),
            is_ahead=is_ahead,
            is_outdated=self._is_outdated,
        )
        outcome = of_part_reply(self.membership.ask(planner.member, lambda client: client.part(request)))
        if isinstance(outcome, LayoutNeeded):
            whole = msgspec.structs.replace(request, layout=encode(buffers.layout))
            outcome = of_part_reply(self.membership.ask(planner.member, lambda client: client.part(whole)))
            if isinstance(outcome, LayoutNeeded):
                raise NotFound("the planner requested this receiver's layout a second time")
        # A version that is known to be withdrawn must not go live, whatever a planner replies.
        withdrawn = self.known.refused(outcome)
        if withdrawn is not None:
            self.note_outcome(withdrawn)
        if isinstance(outcome, NotYet):
            raise NotFound(outcome.why)
        if isinstance(outcome, Granted) and outcome.part is not None:
            self._transfer = self._tied = None
            names = buffers.layout.names
            self._tied = TiedRows(decode(outcome.part, ReceiverPlan), buffers.wanted.tied, names, buffers.into)
            self._transfer = Transfer(
                self._tied.part,
                buffers.into,
                names=names,
                watermark_bytes=self.options.watermark_bytes,
                stall_s=self._stall_s,
                delta=ChangedRanges(),
                threads=self._threads,
                timing=self.timing,
            )
        if not isinstance(outcome, Granted) or self._transfer is None or self._transfer.part.key != outcome.key:
            raise PlanError("the planner sent no part, or a part whose key differs from the one in its reply")
        return outcome

    def _read(
        self,
        staged: Staged,
        planner: SyncMember,
        buffers: ReceiveBuffers,
        granted: Granted,
        requests: LinkRequests,
        lost: FailedSources,
        pause: Callable[[int], None],
    ) -> Staged:
        transfer, tied = self._transfer, self._tied
        assert transfer is not None and tied is not None
        part, requested = transfer.part, time.monotonic()
        with reporting_progress(self.membership, planner.member, granted.version, transfer, self._threads):
            links = requests.take(tied.sources, granted.version)
            # If the check below fails, the next request must lead to a new plan.
            self._is_outdated = True
            try:
                require_planned(part, links.values())
            except StaleDescriptor as error:
                raise SourceFailed(planner.member, error) from error
            self._is_outdated = False
            metadata = _metadata_of(links)
            if self.options.hooks.before_read is not None:
                is_writing = self.states.now is SubscriberState.WRITING
                state = "the target may have bytes of it" if is_writing else "the target was not touched"
                with noted("before_read", granted.version, state):
                    self.options.hooks.before_read(granted.version, metadata)
            tied.compare(links, stall_s=self._stall_s)
            pause(granted.version)
            plan_s = time.perf_counter() - staged.begun
            try:
                moved = transfer.run(links)
            except PenstockError as error:
                if error.mutated and not self.options.staged:
                    self.states.enter(SubscriberState.WRITING)
                # The state already records writes to the target, and writes to the staging copy do not matter.
                error.mutated = False
                if transfer.lost is not None:
                    raise SourceFailed(transfer.lost, error) from error
                raise
        if not self.options.staged:
            self.states.enter(SubscriberState.WRITING)
        if granted.decide_s is None and not self.options.has_check:
            # A publish of live weights waits only until the bytes are read.
            self.report("committed")
        nbytes_by_path = moved.nbytes_by_path()
        report = msgspec.structs.replace(
            staged.report,
            nbytes=moved.moved_bytes,
            verified_bytes=moved.moved_bytes,
            version_bytes=moved.nbytes,
            delta="" if transfer.delta is None else transfer.delta.summary(moved),
            packed_bytes=moved.packed_bytes,
            staging_bytes=buffers.staging_bytes,
            wall_s=time.perf_counter() - staged.begun,
            phases={"plan": plan_s, "wire": moved.seconds},
            path=shares_text(nbytes_by_path),
            sources={read.member: read.nbytes for read in moved.reads},
            nbytes_by_path=nbytes_by_path,
            why=(*dict.fromkeys(read.why for read in moved.reads if read.why), *moved.packing(), *buffers.wanted.why()),
            lost={member: error.summary for member, error in lost.errors.items()},
        )
        return msgspec.structs.replace(
            staged,
            part=part,
            report=report,
            decide_by=None if granted.decide_s is None else requested + granted.decide_s,
            check=granted.check,
            metadata=metadata,
        )

    def _allocate(self, requirements: Requirements) -> ReceiveBuffers:
        member = self.membership.member
        buffers = ReceiveBuffers(requirements, member.id, member.links, self.options)
        self._storages = RegisteredStorages(buffers.memories)
        return buffers

    def free(self) -> list[tuple[Strips, U64]]:
        """Close the registrations, free the staging memory, and return the live version's strips with their digests."""
        proven, self._live_proven = self._live_proven, []
        self._transfer = self._tied = None
        if self.buffers is not None:
            self.buffers.close()
            self.buffers = None
        return proven

    def allocate_again(self, proven: list[tuple[Strips, U64]]) -> ReceiveBuffers:
        """Allocate buffers again after `free`, for a restored version with the verified digests `proven`."""
        assert self.checkpoint is not None
        if self.follow():
            proven = []  # the strips belong to the old memory
        if self.requirements is None:
            selection = self._selected(self.checkpoint)
            self.requirements = self._followed.requirements(selection.table, selection.tags)
        if self.buffers is None:
            self.buffers = self._allocate(self.requirements)
        self._live_proven = proven
        return self.buffers

    def install(self) -> None:
        """Finish the update when all bytes are in the target's memory and scratch."""
        assert self.buffers is not None
        self.buffers.install()

    def copy_staged(self, staged: Staged) -> None:
        """Copy the staged bytes into the target, or swap their memory. Raises like `StagingCopy.flip`."""
        assert self.buffers is not None and self.buffers.staging_copy is not None and staged.part is not None
        if self.buffers.staging_copy.flip(staged.part, stall_s=self._stall_s) and self._transfer is not None:
            # The staging copy now holds the memory and the bytes of the previous version.
            self._transfer.note_exchange()

    def close(self) -> None:
        """Close the registrations and stop the threads. Idempotent."""
        with self._threads:
            self._transfer = self._tied = None
            if self.buffers is not None:
                self.buffers.close()


def _metadata_of(links: Mapping[str, SourceLink]) -> dict[str, str]:
    metadata = [(member, link.map.metadata) for member, link in links.items()]
    for member, texts in metadata[1:]:
        first, expected = metadata[0]
        if texts != expected:
            names = sorted(name for name in {*texts, *expected} if texts.get(name) != expected.get(name))
            message = f"{first[:8]} and {member[:8]} published the version with different metadata: {', '.join(names)}"
            raise PlanError(message, hint="publish a version with the same metadata on all ranks")
    return metadata[0][1] if metadata else {}
