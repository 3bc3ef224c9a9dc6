"""An inference rank as a subscriber: it receives version after version, each complete and verified.

In: a live model or tensors, a name, a hub or none. Out: an `UpdateReport` for each update; then a source for others.
Not here: its arguments (`subscribe`), its states (`states`), reading a version (`update`), the flip (`flip`),
released weights (`released`), checks and the decision of a fleet (`participant`), planning (`sync.planner`).

    update() = stage(): receive, verify, check, vote -> staged or prepared
             + commit(): the fleet's decision, flip -> live
    direct:  update() = receive, whose reads are a step of the flip -> live

One thread at a time updates. The server's threads read the version, the layout and the memory at any time: a version is
withdrawn before its first byte changes, and served again after the last.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Self

from penstock.arguments import require_seconds, require_version
from penstock.errors import (
    Cancelled,
    ConfigError,
    NotFound,
    PeerLost,
    SourceStalled,
    StaleDescriptor,
    VersionRefused,
)
from penstock.hub.messages import SyncStanding, SyncState
from penstock.lifecycle import Closeable
from penstock.loader.progress import Progress, ProgressOption
from penstock.sync.membership import Membership
from penstock.sync.planner import Planner
from penstock.sync.receive.flip import FlipOrder, Flipped, Pause
from penstock.sync.receive.hooks import Hooks
from penstock.sync.receive.leases import Leases
from penstock.sync.receive.participant import Participant
from penstock.sync.receive.released import Release, StoredVersion
from penstock.sync.receive.serving import Serving
from penstock.sync.receive.staged import Staged, UpdateOptions
from penstock.sync.receive.states import SubscriberState, SubscriberStates
from penstock.sync.receive.target import Target
from penstock.sync.receive.update import UpdateLoop
from penstock.sync.receive.versions import each_version
from penstock.sync.recording.requirements import Requirements
from penstock.sync.report import UpdateMode, UpdateReport, received, update_outcome
from penstock.sync.request_handler import SyncHandler
from penstock.telemetry.journey import Journey
from penstock.telemetry.metrics import Outcome
from penstock.timing import Timing

S = SubscriberState


class Subscriber(Closeable):
    """A rank that receives. Made by `subscriber`; a context manager. One thread at a time updates.

    Attributes:
        name: of the sync.
        member: this process in the fleet.
        planner: plans for other receivers once this one has a version and no publisher lives.
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
        hooks: Hooks,
        timing: Timing,
    ) -> None:
        member, stall_s = membership.member, membership.stall_s
        self.name = name
        self.member = member
        self.mode: UpdateMode = "staged" if options.staged else "direct"
        self._rank = rank
        self._world_size = world_size
        self._stall_s = stall_s
        self._timing = timing
        self._staged: Staged | None = None
        self._updating = threading.Lock()
        self._membership = membership
        self._states = states = SubscriberStates()
        self._leases = Leases(lambda: -1 if self.is_dirty else self.version)
        self._target = target
        self._update_loop = loop = UpdateLoop(
            membership, target, options, states, timing=timing, stall_s=stall_s, before_free=self._stop_serving
        )
        self._serving = Serving(loop, serves=options.serve)
        self._participant = Participant(
            membership, loop, target, hooks.check, check_open=self._check_open, stall_s=stall_s, timing=timing
        )
        self._flip = FlipOrder(
            states, loop, self._leases, self._serving, hooks, on_live=self._fill_empty, report_now=member.beat_now
        )
        self._release = Release(
            name, target, states, loop, self._leases, self._serving, links=member.links, timing=timing
        )
        self.planner = Planner(
            membership,
            self._serving.status,
            self._serving.layout,
            checkpoint=lambda: self._update_loop.checkpoint,
            terms=self._participant.terms,
        )

    def open(self) -> Self:
        """Take part in the sync: answer other members, and be listed by the hub."""
        self.member.server.handlers["sync"] = SyncHandler(
            self._membership.key,
            self.member.check_grant,
            local_version=self._serving.local_version,
            version_status=self._serving.status,
            planner=self.planner,
            check=self._check_proven,
        )
        # The handler first: a publisher that learns of this subscriber from the hub may ask it at once.
        self.member.syncs.append(self._state)
        self.member.report_now()
        return self

    @property
    def state(self) -> SubscriberState:
        """Return what this subscriber does now."""
        return self._states.now

    @property
    def version(self) -> int:
        """Return the live version; -1: none."""
        return self._states.version

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the texts that were published with the live version."""
        return self._states.live.metadata

    @property
    def is_dirty(self) -> bool:
        """Return whether an update failed after it wrote to the target: nothing may use it until one succeeds."""
        return self._states.at_rest is S.DIRTY

    @property
    def wanted(self) -> Requirements | None:
        """Return the requirements of an update; None: not known before the first, or `prepare`."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.wanted

    @property
    def revision(self) -> str:
        """Return the publishers' epoch and the live version: equal revisions are equal bytes. Empty: none is live."""
        return f"{self._states.live.epoch}:{self.version}" if self.version >= 0 else ""

    def _state(self) -> SyncState:
        """Return the state of this subscriber for the hub's list."""
        is_open = self._serving.status.now.is_open
        is_busy = self._states.now in (S.RECEIVING, S.PREPARED, S.FLIPPING, S.WRITING)
        live = self._states.live
        standing: SyncStanding = "dirty" if self.is_dirty else "open" if is_open else "updating" if is_busy else "idle"
        # Read once: this runs in the member's beat, while an update may replace the buffers.
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
            # The field's limit: the path names every source, and a large sync has hundreds.
            path=live.path[:1024],
            took_s=live.took_s,
            pause_s=live.pause_s,
            prepared=self.prepared,
            decision=self._update_loop.decision,
        )

    @property
    def prepared(self) -> int:
        """Return the version that is staged and waits for the fleet's decision; -1: none."""
        staged = self._staged
        return staged.version if staged is not None and self._states.now is S.PREPARED else -1

    @property
    def is_behind(self) -> bool:
        """Return whether the fleet has committed a version that is not live here, as far as this subscriber knows."""
        known = self._update_loop.decision
        return known is not None and known.outcome == "committed" and known.version > self.version

    @contextlib.contextmanager
    def pinned(self, version: int | None = None, *, ttl_s: float | None = None) -> Iterator[int]:
        """Keep the live version while the block runs: a lease, for which a flip waits. Yields the version.

        Args:
            version: the version that the caller needs; None: the live one.
            ttl_s: the lease ends after these seconds, and a flip waits no longer; None: the stall deadline.

        Raises:
            VersionNotLive: on entering, another version is live, or none. On leaving, the lease had ended, and another
                version was installed: what the block computed may be of both.

        Order: any number of threads; not from the hooks of an update.
        """
        require_seconds("ttl_s", ttl_s)
        with self._leases.lease(version, self._stall_s if ttl_s is None else ttl_s) as live:
            yield live

    def wait(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Wait until a version is announced that `update` can take, and return the announced version.

        Args:
            version: this version or a later one; None: any that is newer than the live one.
            timeout_s: how long to wait; None: as long as a publisher or another subscriber answers, and after that for
                the stall deadline.

        Raises:
            SourceStalled: it was not announced in this time.
            VersionRefused: it was withdrawn, which this subscriber had not learned yet; call again for a later version.
            Cancelled: the subscriber was closed.
        """
        require_seconds("timeout_s", timeout_s)
        require_version(version)
        version = self.version + 1 if version is None else version
        return self._update_loop.await_version(version, timeout_s, self._check_open)

    def __iter__(self) -> Iterator[UpdateReport]:
        """Wait for each new version, make it live, and yield its report, until the subscriber is closed.

        While the trainer is away, or a source is lost, the live version stays and the loop goes on waiting. A version
        that was refused is skipped. Both are warnings in the log.

        Raises:
            PlanError, ConfigError, DestinationError and others as `update`, which waiting would not cure; and any error
                that left the target dirty. The loop can be entered again.

        Order: like an update, one thread at a time.
        """
        return each_version(self, self._timing.next_update_pause_s)

    def prepare(self, timeout_s: float | None = None) -> bool:
        """Do now what the first update does once, before a version is published: record, allocate, register, plan.

        Call it when the subscriber is made and the engine is idle. Without it the first update takes that much longer:
        seconds for tens of thousands of tensors. Nothing of the target changes. It does nothing if a version is live.

        Args:
            timeout_s: how long to wait for all ranks of the publisher; None: the stall deadline. Each request to a
                publisher that does not answer takes up to the stall deadline, too.

        Returns:
            Whether all of it is done. False: the publisher was not there in time, and the first update does the rest.

        Raises:
            ConfigError: a version is staged, whose memory this would replace.
            PlanError and others as `update`: names, dtypes or shapes of the two sides differ, or there is no memory.

        Order: like an update: one thread at a time, and nothing else uses a module whose loader is recorded.
        """
        require_seconds("timeout_s", timeout_s)
        limit_s = self._stall_s if timeout_s is None else timeout_s
        begun = time.monotonic()
        while True:
            # A member that is lost may come back, or another in its place: the same wait as for one that is late.
            with self._updating, contextlib.suppress(NotFound, PeerLost, SourceStalled, StaleDescriptor):
                self._check_open()
                self._release.require_awake()
                if self._staged is not None and self._staged.origin == "sync":
                    raise ConfigError(
                        f"version {self._staged.version} of {self.name!r} is staged", hint="call commit() first"
                    )
                # A restarted trainer may have another checkpoint: the live version is served until an update begins.
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
            version: exactly this version; None: the newest.
            timeout_s: how long to wait for a version that can be read; None: the stall deadline if none is published
                yet, and no wait if the version is past.
            progress: see `load`; counts verified bytes.

        Returns:
            A report; with 0 bytes if the newest version is live already.

        Raises:
            PlanError: names, dtypes or shapes of the two sides differ (lists them); nothing was touched.
            ConfigError: the version is not above the live one; or weights were moved while the update ran: nothing was
                touched. StaleDescriptor: the version is past, and no member has it now.
            SourceError, PeerLost, IntegrityError: no source could supply it. Staged: the version before is still live.
                Direct: `mutated` says whether the target was touched; if so, it is dirty.
            VersionRefused: its check failed, or the fleet withdrew it; the version before is still live.
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
                        return _counted(journey, self._go_live(partial(self._receive, version, timeout_s)))
                self._stage(version, timeout_s)
            # Outside the block: a caller's progress function that raises must not interrupt a flip.
            return _counted(journey, self._commit(just_checked=True))

    @property
    def is_released(self) -> bool:
        """Return whether the weights are released, until `restore`."""
        return self._states.at_rest is S.RELEASED

    def announced(self) -> int:
        """Return the newest version that is announced, without waiting for one; -1: none, or no planner answers."""
        newest = self._update_loop.news(-1, 0.0)
        return -1 if newest is None else newest.version

    def release(self, *, free: bool = True, returns: bool = False) -> int:
        """Free the weights while the engine sleeps: until `restore`, `version` is -1 and no process reads them.

        Waits for readers (`pinned`). The staging memory is freed too.

        Args:
            free: free the memory of the tensors that a version fills; they have other addresses afterwards. False: the
                engine frees it by its own allocator once this returns, and has it again before `restore`.
            returns: with `free=False`: the engine also brings the bytes back itself: digest them now, for
                `restore(in_place=True)`.

        Returns:
            The bytes that were freed. Memory that cannot be freed stays: host memory in an arena, for example.

        Raises:
            ConfigError: they are released already; or `free`, and neither `prepare` nor an update was called yet, or
                `returns`.

        Order: when the engine is idle; like an update, one thread at a time.
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
        """Bring a version back into released memory, verified, and make it live.

        Args:
            version, timeout_s: see `update`; None: the newest that a publisher or another subscriber has.
            stored: where a version is if no member of the sync has one. If it is the version that was released, every
                byte is compared with the digests of then.
            in_place: the engine brought the bytes back: compare them with the digests of `release(returns=True)`.

        Raises:
            ConfigError: nothing is released. IntegrityError: bytes differ from their digests. DeviceOutOfMemory: see
                `ReleasedMemory.take_back`. Others as `update`. After each of them `version` is still -1: call it again.
        """
        with self._updating:
            self._check_open()
            return self._release.restore(
                stored,
                timeout_s,
                in_place=in_place,
                update=lambda limit_s: self._update(version, limit_s),
                flip=lambda bring: self._go_live(lambda pause: bring()),
            )

    def _journey(self, kind: str) -> Journey:
        return Journey(kind, self.name, member=self.member.id[:8])

    def stage(
        self, version: int | None = None, timeout_s: float | None = None, *, progress: ProgressOption = None
    ) -> int:
        """Read and verify a version into the staging copy for `commit`; return the version. Errors as `update`."""
        require_seconds("timeout_s", timeout_s)
        if self.mode != "staged":
            raise ConfigError("stage() needs a subscriber of mode 'staged'", hint="call update()")
        with (
            self._updating,
            self._journey("stage") as journey,
            Progress(progress, self.name) as shown,
            shown.watching(lambda: self._update_loop.progress),
        ):
            self._check_open()
            self._release.require_awake()
            staged = self._stage(version, timeout_s)
            journey.received = lambda: received(staged.nbytes_by_path)
            journey.num_retries = staged.attempts - 1
            journey.outcome = Outcome(
                nbytes=staged.nbytes,
                phases={"plan": staged.plan_s, "wire": staged.wire_s},
                verified_bytes=staged.nbytes,
                path=staged.path,
                attributes={"version": staged.version},
            )
            return staged.version

    def commit(self) -> UpdateReport:
        """Make the staged version live. In a two-phase commit, wait for the fleet's decision first.

        Raises:
            ConfigError: nothing is staged.
            DestinationError, DeviceOutOfMemory: the device failed, or the driver refused the flip; `mutated`: the
                target is dirty, else the version before is live and the new one still staged.
            VersionRefused: the fleet withdrew the version; the version before is still live.
            SourceStalled: the decision could not be learned; the version before is still live. The version stays
                staged: call this again.
            StaleDescriptor: later versions are decided already; the version before is still live.

        Order: soon after `stage`: the other subscribers go live as soon as the decision is known.
        """
        with self._updating, self._journey("commit") as journey:
            report = self._commit()
            # Its bytes and their time were counted by `stage`.
            outcome = replace(update_outcome(report), phases={"install": report.install_s}, verified_bytes=0)
            journey.outcome = outcome
            return report

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        """Look for a version in the block. What was staged before is given up: the read overwrites the staging copy."""
        self._check_open()
        self._staged = None
        self._states.enter(S.RECEIVING)
        # The hub lists this subscriber as updating: others then wait for it, instead of giving the version up as lost.
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
            raise ConfigError("nothing is staged", hint="call stage() first")
        if staged.origin == "here":
            self._give_up_staged()
            return self._report(Flipped(staged=staged))
        if staged.decide_by is not None:
            self._await_commit(staged, staged.decide_by)
        # The bytes that go live must be those that were verified. While this waited, a check's thread could write.
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
            return self._go_live(move_bytes)
        finally:
            if self._states.now not in (S.STAGED, S.PREPARED):
                self._staged = None

    def _give_up_staged(self) -> None:
        self._staged = None
        self._states.enter(self._states.at_rest)

    def _await_commit(self, staged: Staged, decide_by: float) -> None:
        try:
            self._participant.await_commit(staged, decide_by)
        except VersionRefused:
            self._give_up_staged()
            self.member.beat_now()
            raise
        except StaleDescriptor:
            self._give_up_staged()
            raise

    def _receive(self, version: int | None, timeout_s: float | None, pause: Pause) -> Staged:
        """Read and verify a version; wait for one as long as `timeout_s` allows."""
        require_version(version)
        grace_s = self._timing.version_grace_s
        begun = time.monotonic()
        while True:
            try:
                return self._update_loop.receive(version, pause)
            except StaleDescriptor:
                # No member has it at the moment: a receiver that just finished it reports within a beat, and with a
                # timeout the caller may wait for the next version.
                if time.monotonic() - begun > (grace_s if version is not None or timeout_s is None else timeout_s):
                    raise
            except NotFound:
                # No publisher, or no version yet: trainer and engines start in any order.
                if time.monotonic() - begun > (self._stall_s if timeout_s is None else timeout_s):
                    raise
            self._check_open()
            time.sleep(self._timing.version_pause_s)

    def _go_live(self, move_bytes: Callable[[Pause], Staged]) -> UpdateReport:
        return self._report(self._flip.run(move_bytes))

    def _fill_empty(self) -> None:
        """Put the tensors into a target that was given empty: they appear with the first version, all or none."""
        if isinstance(self._target, MutableMapping) and not self._target and self.wanted is not None:
            self._target.update({row.name: row.tensor for row in self.wanted.rows})

    def _report(self, flipped: Flipped) -> UpdateReport:
        staged = flipped.staged
        return UpdateReport(
            name=self.name,
            version=self.version,
            revision=self.revision,
            mode=self.mode,
            nbytes=staged.nbytes,
            version_bytes=staged.version_bytes,
            delta=staged.delta,
            wall_s=time.perf_counter() - staged.begun,
            plan_s=staged.plan_s,
            wire_s=staged.wire_s,
            install_s=flipped.install_s,
            pause_s=flipped.pause_s,
            path=staged.path,
            sources=staged.sources,
            nbytes_by_path=staged.nbytes_by_path,
            why=staged.why,
            attempts=staged.attempts,
            lost=staged.lost,
            packed_bytes=staged.packed_bytes,
            staging_bytes=staged.staging_bytes,
        )

    def _stop_serving(self) -> None:
        """Withdraw the live version and report it at once: planners choose sources by the hub's list."""
        if self.version >= 0:
            self._serving.withdraw(self._states.live.epoch, self.version)
            self.member.beat_now()

    def _check_proven(self) -> None:
        """Check that the target still has the received bytes, before others read it.

        Raises:
            StaleDescriptor: an engine changed the weights in place; they are no longer served.
        """
        try:
            self._serving.require_unchanged()
        except StaleDescriptor:
            self._stop_serving()
            raise

    def _check_open(self) -> None:
        if self._states.now is S.CLOSED:
            raise Cancelled("the subscriber was closed")

    def close(self) -> None:
        """Leave. The target keeps its version. Idempotent."""
        if self._states.now is S.CLOSED:
            return
        self._states.enter(S.CLOSED)
        # The memory first: its owner may free it once this returns, and no peer may read it then.
        self._update_loop.close()
        self.member.leave(0.0)
        self._membership.close()


def _counted(journey: Journey, report: UpdateReport) -> UpdateReport:
    """Set what a journey shows of an update; return its report."""
    journey.received = lambda: received(report.nbytes_by_path)
    journey.num_retries = max(0, report.attempts - 1)
    journey.outcome = update_outcome(report)
    return report
