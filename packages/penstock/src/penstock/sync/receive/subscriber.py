"""An inference rank as a subscriber, which receives one version after the other, each complete and verified.

A staged update is `stage`, which reads, verifies, checks and votes, and then `commit`, which waits for the fleet's
decision and flips. A direct update reads during the flip.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Self

from msgspec.structs import replace

from penstock.arguments import require_seconds, require_version
from penstock.errors import (
    Cancelled,
    ConfigError,
    NotFound,
    PeerLost,
    SourceError,
    SourceStalled,
    StaleDescriptor,
    VersionRefused,
)
from penstock.hub.messages import SyncStanding, SyncState
from penstock.lifecycle import Closeable
from penstock.loader.progress import Progress, ProgressOption
from penstock.logs import log_named
from penstock.sync.membership import Membership
from penstock.sync.planner import Planner
from penstock.sync.receive.flip import FlipOrder, Pause
from penstock.sync.receive.leases import Leases
from penstock.sync.receive.participant import Participant
from penstock.sync.receive.released import Release, StoredVersion
from penstock.sync.receive.staged import Staged, UpdateOptions
from penstock.sync.receive.states import SubscriberState, SubscriberStates
from penstock.sync.receive.target import Target
from penstock.sync.receive.update import UpdateLoop
from penstock.sync.recording.requirements import Requirements
from penstock.sync.report import UpdateMode, UpdateReport
from penstock.sync.request_handler import SyncHandler
from penstock.telemetry.journey import Journey
from penstock.telemetry.metrics import received_by
from penstock.timing import Timing

S = SubscriberState
log = log_named("penstock")


class Subscriber(Closeable):
    """A rank that receives versions, created by `subscriber`.

    A subscriber is a context manager. Only one thread at a time may update.

    Attributes:
        name: name of the sync.
        member: this process in the fleet.
        planner: plans for other receivers when this rank has a version and no publisher is alive.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        membership: Membership,
        options: UpdateOptions,
        *,
        rank: int,
        world_size: int,
        timing: Timing,
    ) -> None:
        self.name = name
        self.member = membership.member
        self.mode: UpdateMode = "staged" if options.staged else "direct"
        self._rank = rank
        self._world_size = world_size
        self._stall_s = membership.stall_s
        self._timing = timing
        self._staged: Staged | None = None
        self._updating = threading.Lock()
        self._membership = membership
        self._states = states = SubscriberStates()
        self._leases = Leases(lambda: -1 if self.is_dirty else self.version)
        self._target = target
        self._update_loop = loop = UpdateLoop(membership, target, options, states, timing)
        self._participant = Participant(membership, loop, target, options.hooks.check, self._check_open, timing)
        self._flip = FlipOrder(
            states, loop, self._leases, options.hooks, on_live=self._fill_empty, report_now=self.member.beat_now
        )
        self._release = Release(name, target, states, loop, self._leases, self.member.links, timing)
        self.planner = Planner(
            membership, loop.status, loop.layout, checkpoint=lambda: loop.checkpoint, terms=self._participant.terms
        )

    def open(self) -> Self:
        """Join the sync, so that the hub lists this subscriber and other members can send requests."""
        self.member.server.handlers["sync"] = SyncHandler(
            self._membership.key,
            self.member.registration.check_grant,
            local_version=self._update_loop.local_version,
            version_status=self._update_loop.status,
            planner=self.planner,
            check=self._update_loop.require_proven,
        )
        # Set the handler first, because a publisher may send a request as soon as the hub lists this subscriber.
        self.member.syncs.append(self._state)
        self.member.report_now()
        return self

    @property
    def state(self) -> SubscriberState:
        """Return the current state of this subscriber."""
        return self._states.now

    @property
    def version(self) -> int:
        """Return the live version, or -1."""
        return self._states.version

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the metadata that was published with the live version."""
        return self._states.live.metadata

    @property
    def is_dirty(self) -> bool:
        """Return whether a failed update left the target unusable until the next successful update."""
        return self._states.at_rest is S.DIRTY

    @property
    def wanted(self) -> Requirements | None:
        """Return the requirements of an update, or None before the first update or `prepare`."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.wanted

    @property
    def revision(self) -> str:
        """Return the publishers' epoch with the live version, or an empty string. Equal revisions mean equal bytes."""
        return f"{self._states.live.epoch}:{self.version}" if self.version >= 0 else ""

    def _state(self) -> SyncState:
        is_open = self._update_loop.status.now.is_open
        is_busy = self._states.now in (S.RECEIVING, S.PREPARED, S.FLIPPING, S.WRITING)
        live, outcome = self._states.live, self._update_loop.known.newest
        standing: SyncStanding = "dirty" if self.is_dirty else "open" if is_open else "updating" if is_busy else "idle"
        # Read the buffers once, because this runs in the heartbeat thread while an update may replace them.
        buffers = self._update_loop.buffers
        return SyncState(
            name=self.name,
            side="subscriber",
            epoch=live.epoch,
            rank=self._rank,
            world_size=self._world_size,
            layout="" if buffers is None else buffers.digest,
            version=self.version,
            state=standing,
            nbytes=0 if buffers is None else sum(buffers.layout.regions),
            # Limit the length of the path, which names every source.
            path=live.path[:1024],
            took_s=live.took_s,
            pause_s=live.pause_s,
            prepared=self.prepared,
            decision=None if outcome is None else outcome.record(),
        )

    @property
    def prepared(self) -> int:
        """Return the staged version that waits for the fleet's decision, or -1."""
        staged = self._staged
        return staged.version if staged is not None and self._states.now is S.PREPARED else -1

    @property
    def is_behind(self) -> bool:
        """Return whether the fleet has committed a later version, as far as this subscriber knows."""
        return self._update_loop.known.is_behind(self.version)

    @contextlib.contextmanager
    def pinned(self, version: int | None = None, *, ttl_s: float | None = None) -> Iterator[int]:
        """Hold a lease on the live version during the block, and yield the version. A flip waits for the lease.

        Thread-safe, but must not be called in the hooks of an update.

        Args:
            version: version that the caller needs. None means the live version.
            ttl_s: seconds after which the lease expires. None means the stall deadline.

        Raises:
            VersionNotLive: at the start of the block, the version is not live. At the end of the block, the lease has
                expired and a different version was installed, so the results may mix two versions.
        """
        require_seconds("ttl_s", ttl_s)
        with self._leases.lease(version, self._stall_s if ttl_s is None else ttl_s) as live:
            yield live

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Wait until a version is announced that `update` can read, and return the announced version.

        Args:
            version: minimum version. None means any version above the live version.
            timeout_s: seconds to wait. None means to wait while a publisher or another subscriber replies, and then for
                the stall deadline.

        Raises:
            SourceStalled: no such version was announced within the time limit.
            VersionRefused: the version was withdrawn. A second call waits for a later version.
            Cancelled: the subscriber was closed.
        """
        require_seconds("timeout_s", timeout_s)
        require_version(version)
        version = self.version + 1 if version is None else version
        return self._update_loop.await_version(version, timeout_s, self._check_open)

    def __iter__(self) -> Iterator[UpdateReport]:
        """Wait for each new version, make it live, and yield its report, until the subscriber is closed.

        If the trainer or a source is lost, the live version stays and the loop continues to wait. Refused versions are
        skipped. Each loss and each refusal is logged. One thread at a time may iterate or update.

        Raises:
            PenstockError: an error of `update` that waiting would not resolve, such as PlanError, ConfigError or
                DestinationError, or any error that left the target dirty. The iteration can be started again.
        """
        after, last_warning = -1, ""
        while True:
            previous = self.revision
            try:
                self.wait(max(after, self.version) + 1)
                report = self.update()
            except Cancelled:
                return
            except (SourceError, PeerLost, VersionRefused) as error:
                if error.mutated:
                    raise
                if isinstance(error, VersionRefused):
                    after = max(after, error.version)  # do not wait for this version again
                if error.message != last_warning:
                    state = f"serves version {self.version}" if self.version >= 0 else "has no version yet"
                    log.warning("%r %s and waits for the next one: %s", self.name, state, error.message)
                    last_warning = error.message
                time.sleep(self._timing.next_update_pause_s)
                continue
            last_warning = ""
            if self.revision != previous:
                yield report

    def prepare(self, timeout_s: float | None = None) -> bool:
        """Do the one-time work of the first update before a version is published: record, allocate, register and plan.

        Call this while the engine is idle, because the work takes seconds for tens of thousands of tensors. The target
        does not change. The call has no effect if a version is live. Only one thread at a time may call this or update,
        and no other thread may use a module while its loader is recorded.

        Args:
            timeout_s: seconds to wait for all ranks of the publisher. None means the stall deadline. Each request
                to a publisher that does not reply takes up to the stall deadline in addition.

        Returns:
            Whether all the work is done. False means that the publisher did not join in time, so that the first update
            does the remaining work.

        Raises:
            ConfigError: a version is staged, and this call would replace its memory.
            PenstockError: as in `update`, for example if names, dtypes or shapes do not match, or memory is missing.
        """
        require_seconds("timeout_s", timeout_s)
        limit_s = self._stall_s if timeout_s is None else timeout_s
        begun = time.monotonic()
        while True:
            with self._updating, contextlib.suppress(NotFound, PeerLost, SourceStalled, StaleDescriptor):
                self._check_open()
                self._release.require_awake()
                if self._staged is not None and self._staged.origin == "sync":
                    hint = "call commit() first"
                    raise ConfigError(f"version {self._staged.version} of {self.name!r} is already staged", hint=hint)
                # Do nothing if a version is live, because a restarted trainer may have a different checkpoint.
                if self.version < 0:
                    self._update_loop.prepare()
                return True
            if time.monotonic() - begun >= limit_s:
                return False
            time.sleep(self._timing.version_pause_s)

    def update(
        self, version: int | None = None, timeout_s: float | None = None, *, progress: ProgressOption = None
    ) -> UpdateReport:
        """Receive a version and make it live.

        Args:
            version: the exact version to receive. None means the newest version.
            timeout_s: seconds to wait for a version that can be read. None means the stall deadline if no version is
                published yet, and no wait if the version is outdated.
            progress: see `load`. The progress counts verified bytes.

        Returns:
            A report of the update, with 0 bytes if the newest version is already live.

        Raises:
            PlanError: names, dtypes or shapes do not match. The error lists the tensors, and the target is unchanged.
            ConfigError: the version is not above the live version, or weights moved during the update. The target is
                unchanged.
            StaleDescriptor: the version is outdated, and no member has it any more.
            SourceError, PeerLost, IntegrityError: no source could supply the version. In staged mode the previous
                version is still live. In direct mode the target is dirty if `mutated` is set.
            VersionRefused: the version's check failed, or the fleet withdrew it. The previous version is still live.
        """
        require_seconds("timeout_s", timeout_s)
        with self._updating:
            self._check_open()
            self._release.require_awake()
            return self._update(version, timeout_s, progress)

    def _update(self, version: int | None, timeout_s: float | None, progress: ProgressOption = None) -> UpdateReport:
        with self._journey("update") as journey:
            with Progress(progress, self.name) as shown, shown.watching(lambda: self._update_loop.progress):
                if self.mode == "direct":
                    with self._receiving():
                        return _counted(journey, self._flip.run(partial(self._receive, version, timeout_s)))
                self._stage(version, timeout_s)
            # Flip after the progress block, because an error in the progress function must not interrupt a flip.
            return _counted(journey, self._commit(just_checked=True))

    @property
    def is_released(self) -> bool:
        """Return whether the weights are released and not yet restored."""
        return self._states.at_rest is S.RELEASED

    def announced(self) -> int:
        """Return the newest announced version without waiting, or -1 if there is none or no planner replies."""
        newest = self._update_loop.news(-1, 0.0)
        return -1 if newest is None else newest.version

    def release(self, *, free: bool = True, returns: bool = False) -> int:
        """Release the weights while the engine sleeps. Until `restore`, `version` is -1 and no process reads weights.

        The call waits for readers (`pinned`) and also frees the staging memory. Call this while the engine is idle.
        Only one thread at a time may call this or update.

        Args:
            free: whether to free the memory of the tensors that a version fills, whose addresses change. If False, the
                engine frees the memory with its own allocator after this call, and allocates it again before `restore`.
            returns: if `free=False`, whether the engine will also restore the bytes itself. The bytes are digested now,
                to verify them in `restore(in_place=True)`.

        Returns:
            The number of freed bytes. Some memory, such as host memory in an arena, cannot be freed.

        Raises:
            ConfigError: the weights are already released, or `free` is set before the first `prepare` or update, or
                both `free` and `returns` are set.
        """
        with self._updating:
            self._check_open()
            freed_bytes = self._release.release(free=free, returns=returns)
            self._staged = None
            self.member.beat_now()
            return freed_bytes

    def restore(
        self,
        version: int | None = None,
        timeout_s: float | None = None,
        *,
        stored: StoredVersion | None = None,
        in_place: bool = False,
    ) -> UpdateReport:
        """Restore a version into released memory, verify it, and make it live.

        Args:
            version, timeout_s: see `update`. None means the newest version that a publisher or another subscriber has.
            stored: version to restore from storage if no member of the sync has a version. If the stored version is the
                released version, every byte is compared with the digests from the release.
            in_place: whether the engine restored the bytes, to be verified with digests from `release(returns=True)`.

        Raises:
            ConfigError: the weights are not released.
            IntegrityError: restored bytes differ from their digests.
            DeviceOutOfMemory: see `ReleasedMemory.take_back`.
            PenstockError: see `update`. After any error, `version` is still -1, and the call can be retried.
        """
        with self._updating:
            self._check_open()
            return self._release.restore(
                stored,
                timeout_s,
                in_place=in_place,
                update=lambda limit_s: self._update(version, limit_s),
                flip=lambda bring: self._flip.run(lambda pause: bring()),
            )

    def _journey(self, kind: str) -> Journey:
        return Journey(kind, self.name, member=self.member.id[:8])

    def stage(
        self, version: int | None = None, timeout_s: float | None = None, *, progress: ProgressOption = None
    ) -> int:
        """Read and verify a version into the staging copy for `commit`, and return its number.

        Raises the errors of `update`.
        """
        require_seconds("timeout_s", timeout_s)
        if self.mode != "staged":
            raise ConfigError("stage() needs a subscriber with mode='staged'", hint="call update()")
        with (
            self._updating,
            self._journey("stage") as journey,
            Progress(progress, self.name) as shown,
            shown.watching(lambda: self._update_loop.progress),
        ):
            self._check_open()
            self._release.require_awake()
            staged = self._stage(version, timeout_s)
            _counted(journey, staged.report)
            return staged.version

    def commit(self) -> UpdateReport:
        """Make the staged version live. In a two-phase commit, wait for the fleet's decision first.

        Call `commit` soon after `stage`, because the other subscribers go live as soon as the decision is known.

        Raises:
            ConfigError: no version is staged.
            DestinationError, DeviceOutOfMemory: the device failed, or the driver refused the flip. If `mutated` is set,
                the target is dirty. If not, the previous version is still live and the new version still staged.
            VersionRefused: the fleet withdrew the version. The previous version is still live.
            SourceStalled: no process returned the decision. The new version stays staged, so call `commit` again.
            StaleDescriptor: later versions are already decided. The previous version is still live.
        """
        with self._updating, self._journey("commit") as journey:
            report = self._commit()
            # Do not count the bytes and the time that `stage` has already counted.
            journey.pause_s = report.pause_s or None
            journey.report = replace(report, phases={"install": report.phases["install"]}, verified_bytes=0)
            return report

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        """Drop a staged version, whose memory the block overwrites, and enter the state `receiving`."""
        self._check_open()
        self._staged = None
        self._states.enter(S.RECEIVING)
        # Report the new state, so that other receivers wait for this receiver and do not treat the version as lost.
        self.member.beat_now()
        try:
            yield
        finally:
            if self._states.now is S.RECEIVING:
                self._states.enter(self._states.at_rest)

    def _stage(self, version: int | None, timeout_s: float | None) -> Staged:
        with self._receiving():
            staged = self._receive(version, timeout_s, lambda announced: None)
            if staged.origin == "sync":
                self._participant.vote(staged)
            self._staged = staged
            self._states.enter(S.STAGED if staged.decide_by is None else S.PREPARED)
        if staged.decide_by is not None:
            self.member.beat_now()
        return staged

    def _commit(self, *, just_checked: bool = False) -> UpdateReport:
        self._check_open()
        staged = self._staged
        if staged is None:
            raise ConfigError("no version is staged", hint="call stage() first")
        if staged.origin == "here":
            self._give_up_staged()
            return staged.report_now()
        if staged.decide_by is not None:
            try:
                self._participant.await_commit(staged, staged.decide_by)
            except (VersionRefused, StaleDescriptor):
                self._give_up_staged()
                self.member.beat_now()
                raise
        # After a wait, compare the bytes again, because a thread that the check started may have written to them.
        if not just_checked or staged.decide_by is not None:
            try:
                self._participant.require_unaltered(staged)
            except ConfigError:
                self._give_up_staged()
                raise

        def move_bytes(pause: Pause) -> Staged:
            pause(staged.version)
            self._update_loop.copy_staged(staged)
            return staged

        try:
            return self._flip.run(move_bytes)
        finally:
            if self._states.now not in (S.STAGED, S.PREPARED):
                self._staged = None

    def _give_up_staged(self) -> None:
        self._staged = None
        self._states.enter(self._states.at_rest)

    def _receive(self, version: int | None, timeout_s: float | None, pause: Pause) -> Staged:
        require_version(version)
        timing, begun, news = self._timing, time.monotonic(), None
        while True:
            try:
                return self._update_loop.receive(version, pause)
            except (NotFound, StaleDescriptor) as error:
                limit_s = self._stall_s if timeout_s is None else timeout_s
                if isinstance(error, StaleDescriptor) and (version is not None or timeout_s is None):
                    limit_s = timing.version_grace_s
                if (left_s := begun + limit_s - time.monotonic()) < 0:
                    raise
            # A planner replies as soon as the version begins. If it has begun already, other members are missing.
            asked, before, after = time.monotonic(), news, self.version if version is None else version - 1
            news = self._update_loop.news(after, min(timing.news_wait_s, left_s), channel="")
            if news is None or (before is not None and news.version <= before.version):
                time.sleep(max(0.0, asked + timing.version_pause_s - time.monotonic()))
            self._check_open()

    def _fill_empty(self) -> None:
        if isinstance(self._target, MutableMapping) and not self._target and self.wanted is not None:
            self._target.update({row.name: row.tensor for row in self.wanted.rows})

    def _check_open(self) -> None:
        if self._states.now is S.CLOSED:
            raise Cancelled("the subscriber was closed")

    def close(self) -> None:
        """Leave the sync. The target keeps its version. Idempotent."""
        if self._states.now is S.CLOSED:
            return
        self._states.enter(S.CLOSED)
        # Stop all reads by peers, because the owner of the target may free its memory after this call.
        self._update_loop.close()
        self.member.leave(0.0)
        self._membership.close()


def _counted(journey: Journey, report: UpdateReport) -> UpdateReport:
    journey.received = partial(received_by, report.nbytes_by_path)
    journey.num_retries = max(0, report.attempts - 1)
    journey.pause_s = report.pause_s or None
    journey.report = report
    return report
