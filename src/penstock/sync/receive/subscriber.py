"""An inference rank as a subscriber: it receives version after version, each complete and verified.

In: a live model or tensors, a name, a hub or none. Out: an `UpdateReport` for each update; then a source for others.
Not here: the target's requirements and memory (`target`), reading a version (`update`), planning (`sync.planner`).

    staged:  stage(): read into a staging copy, verify | commit(): before_pause, flip, at_commit, after_resume
    direct:  update(): before_pause, read into the live memory, verify, at_commit, after_resume; on failure: dirty

One thread at a time updates. The server's threads read the version, the layout and the memory at any time: a version is
withdrawn before its first byte changes, and served again after the last.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.arguments import require_name, require_type
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import (
    BudgetTooSmall,
    Cancelled,
    ConfigError,
    NotFound,
    PenstockError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.hub.client import resolve_connection
from penstock.hub.messages import SyncState
from penstock.lifecycle import Closing
from penstock.loader.progress import Progress, ProgressOption
from penstock.peer.member import Member
from penstock.plan.layout import Layout
from penstock.sync.local_version import LocalVersion, VersionStatus
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.planner import Planner
from penstock.sync.receive.target import Target
from penstock.sync.receive.transfer import LEAST_BYTES
from penstock.sync.receive.update import Options, Staged, UpdateLoop
from penstock.sync.recording.layout import Load
from penstock.sync.recording.requirements import Requirements
from penstock.sync.report import UpdateMode, UpdateReport, received, update_outcome
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import to_arenas
from penstock.telemetry.journey import Journey
from penstock.telemetry.metrics import Outcome
from penstock.transform.formats import format_of

ASK_S = 1.0
"""How long one request for a newer version waits at the planner."""
GRACE_S = 1.0
"""How long an update retries while a version has no source: a receiver that just finished it reports much sooner."""
# Between two looks for a version: short beside a training step, long beside the request to the hub that it costs.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The callbacks of an engine around the moment a version becomes live; each is passed the version."""

    before_pause: Callable[[int], object] | None = None
    """After it returns, no request may use the weights."""
    at_commit: Callable[[int], object] | None = None
    """The weights are the version's: drop the prefix cache or change its key."""
    after_resume: Callable[[int], object] | None = None
    """Requests may go on."""


class Subscriber(Closing):
    """A rank that receives. Made by `subscriber`; a context manager. One thread at a time updates.

    Attributes:
        name: of the sync.
        version: the live version; -1: none yet.
        is_dirty: an update failed after it touched the target, which must not be used before an update succeeds.
        member: this process in the fleet.
        planner: plans for other receivers once this one has a version and no publisher lives.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        member: Member,
        options: Options,
        *,
        rank: int,
        world_size: int,
        hooks: Hooks,
        stall_s: float,
    ) -> None:
        self.name = name
        self.member = member
        self.mode: UpdateMode = "staged" if options.staged else "direct"
        self.version = -1
        self.is_dirty = False
        self._rank = rank
        self._world_size = world_size
        self._hooks = hooks
        self._stall_s = stall_s
        self._serves = options.serve
        self._run = ""
        self._path = ""
        self._took_s = self._pause_s = 0.0
        self._staged: Staged | None = None
        self._updating = threading.Lock()
        self._is_closed = False
        self._version_status = VersionStatus()
        self._membership = Membership(member, name, stall_s)
        self._update_loop = UpdateLoop(self._membership, target, options, stall_s=stall_s)
        # Functions instead of values: the receive buffers are new whenever the publishers' checkpoint is another.
        self.planner = Planner(
            self._membership,
            self._version_status,
            self._layout,
            checkpoint=lambda: self._update_loop.checkpoint,
        )
        member.server.handlers["sync"] = SyncHandler(
            self._membership.key,
            member.check_grant,
            local_version=self._local_version,
            version_status=self._version_status,
            planner=self.planner,
            check=self._check_proven,
        )
        # The handler first: a publisher that learns of this subscriber from the hub may ask it at once.
        member.syncs.append(self._state)
        member.report_now()

    @property
    def wanted(self) -> Requirements | None:
        """Return the requirements of an update; None: not known before the first."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.wanted

    def _layout(self) -> Layout | None:
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.layout

    def _local_version(self) -> LocalVersion | None:
        """Return the target's memory, which others read; None: it is not served, or there was no update yet."""
        buffers = self._update_loop.buffers
        return None if buffers is None else buffers.local_version

    def _state(self) -> SyncState:
        """Return what the hub lists about this subscriber."""
        is_open = self._version_status.now.is_open
        state = "dirty" if self.is_dirty else "open" if is_open else "updating" if self._updating.locked() else "idle"
        # Read once: this runs in the member's beat, while an update may replace the buffers.
        buffers = self._update_loop.buffers
        return SyncState(
            name=self.name,
            side="subscriber",
            run=self._run,
            rank=self._rank,
            world_size=self._world_size,
            layout="" if buffers is None else buffers.digest,
            version=self.version,
            state=state,  # type: ignore[arg-type]
            nbytes=0 if buffers is None else sum(buffers.layout.regions),
            # The field's limit: the path names every source, and a large sync has hundreds.
            path=self._path[:1024],
            took_s=self._took_s,
            pause_s=self._pause_s,
        )

    def wait_version(self, version: int, timeout_s: float | None = None) -> int:
        """Wait until this version or a later one is announced, and return the announced version.

        Raises:
            SourceStalled: it was not announced within `timeout_s`; None: no planner answered for the stall deadline.
        """
        begun = last_answer = time.monotonic()
        while True:
            self._check_open()
            newest = self._update_loop.news(version - 1, ASK_S)
            now = time.monotonic()
            if newest is not None:
                # A trainer may take hours per version: without a timeout only the silence of every planner counts.
                last_answer = now
                if newest >= version:
                    return newest
            else:
                time.sleep(_PAUSE_S)
            waited = now - (last_answer if timeout_s is None else begun)
            if waited > (self._stall_s if timeout_s is None else timeout_s):
                raise SourceStalled(f"version {version} of {self.name!r} was not announced in {waited:.1f} s")

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
            ConfigError: the version is not above the live one. StaleDescriptor: it is past, and no member has it now.
            SourceError, PeerLost, IntegrityError: no source could supply it. Staged: the version before is still live.
                Direct: `mutated` says whether the target was touched; if so, it is dirty.
        """
        with self._updating, self._journey("update") as journey:
            with Progress(progress, self.name) as shown, shown.watching(lambda: self._update_loop.progress):
                if self.mode == "direct":
                    return _counted(journey, self._update_direct(version, timeout_s))
                self._stage(version, timeout_s)
            # Outside the block: a caller's progress function that raises must not interrupt a flip.
            return _counted(journey, self._commit())

    def _journey(self, kind: str) -> Journey:
        return Journey(kind, self.name, member=self.member.id[:8])

    def stage(
        self, version: int | None = None, timeout_s: float | None = None, *, progress: ProgressOption = None
    ) -> int:
        """Read and verify a version into the staging copy for `commit`; return the version. Errors as `update`."""
        if self.mode != "staged":
            raise ConfigError("stage() needs a subscriber of mode 'staged'", hint="call update()")
        with (
            self._updating,
            self._journey("stage") as journey,
            Progress(progress, self.name) as shown,
            shown.watching(lambda: self._update_loop.progress),
        ):
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
        """Make the staged version live.

        Raises:
            ConfigError: nothing is staged. DestinationError: the device failed; the target is dirty.
        """
        with self._updating, self._journey("commit") as journey:
            report = self._commit()
            # Its bytes and their time were counted by `stage`.
            outcome = replace(update_outcome(report), phases={"install": report.install_s}, verified_bytes=0)
            journey.outcome = outcome
            return report

    def _stage(self, version: int | None, timeout_s: float | None) -> Staged:
        self._check_open()
        # The hub lists this subscriber as updating: others then wait for it, instead of giving the version up as lost.
        self.member.beat_now()
        # Before the read: it overwrites the staging copy, so what was staged before must not be committed any more.
        self._staged = None
        self._staged = self._receive(version, timeout_s, lambda announced: None)
        return self._staged

    def _commit(self) -> UpdateReport:
        staged = self._staged
        if staged is None:
            raise ConfigError("nothing is staged", hint="call stage() first")
        self._staged = None
        if staged.part is None:
            return self._report(staged, 0.0, 0.0)
        buffers = self._update_loop.buffers
        assert buffers is not None and buffers.staging_copy is not None
        begun = time.perf_counter()
        self._call(self._hooks.before_pause, staged.version)
        # After the pause, so that an engine whose hook raises keeps serving; before the flip, which changes bytes that
        # peers may be reading.
        self._withdraw()
        try:
            buffers.staging_copy.flip(staged.part, stall_s=self._stall_s)
            installed = time.perf_counter()
            buffers.install()
        except BaseException:
            # Every exception, an interrupt too: some rows may have been copied.
            self.is_dirty = True
            raise
        return self._make_live(staged, begun, time.perf_counter() - installed)

    def _update_direct(self, version: int | None, timeout_s: float | None) -> UpdateReport:
        self._check_open()
        paused: list[float] = []

        def pause(announced: int) -> None:
            if not paused:  # an update of several attempts pauses the engine once
                at = time.perf_counter()
                self._call(self._hooks.before_pause, announced)
                # After the hook: if it raises, nothing is paused or touched.
                paused.append(at)
                self._withdraw()

        try:
            staged = self._receive(version, timeout_s, pause)
            if staged.part is None:
                return self._report(staged, 0.0, 0.0)
            buffers = self._update_loop.buffers
            assert buffers is not None
            installed = time.perf_counter()
            buffers.install()
        except BaseException as error:
            if paused and (self._update_loop.is_touched or not isinstance(error, PenstockError)):
                self.is_dirty = True
                self.member.beat_now()
                if isinstance(error, PenstockError):
                    error.mutated = True
            # Not one byte was written: the version before is intact, so the engine can go on with it.
            elif paused and not self.is_dirty and self.version >= 0:
                self._serve()
                self._call(self._hooks.after_resume, self.version)
            raise
        return self._make_live(staged, paused[0], time.perf_counter() - installed)

    def _receive(self, version: int | None, timeout_s: float | None, before_read: Callable[[int], None]) -> Staged:
        """Read and verify a version; wait for one as long as `timeout_s` allows."""
        begun = time.monotonic()
        self._update_loop.is_touched = False
        while True:
            try:
                is_dirty = self.is_dirty or self._update_loop.is_touched
                live = self._run, self.version
                return self._update_loop.receive(version, live=live, is_dirty=is_dirty, before_read=before_read)
            except StaleDescriptor:
                # No member has it at the moment: a receiver that just finished it reports within a beat, and with a
                # timeout the caller may wait for the next version.
                if time.monotonic() - begun > (GRACE_S if version is not None or timeout_s is None else timeout_s):
                    raise
            except NotFound:
                # No publisher, or no version yet: trainer and engines start in any order.
                if time.monotonic() - begun > (self._stall_s if timeout_s is None else timeout_s):
                    raise
            self._check_open()
            time.sleep(_PAUSE_S)

    def _make_live(self, staged: Staged, begun: float, install_s: float) -> UpdateReport:
        """Announce the version that is now in the target, resume the engine, and return the report."""
        self.version = staged.version
        self._run = staged.run
        self.is_dirty = False
        self._path = staged.path
        self._took_s, self._pause_s = time.perf_counter() - staged.begun, time.perf_counter() - begun
        # Before requests resume: cache entries of the old weights must not be used with the new ones.
        self._call(self._hooks.at_commit, staged.version)
        # Before the hook, which may take long or raise: the memory has the version either way.
        self._serve()
        self.member.beat_now()
        self._call(self._hooks.after_resume, staged.version)
        return self._report(staged, time.perf_counter() - begun, install_s)

    def _report(self, staged: Staged, pause_s: float, install_s: float) -> UpdateReport:
        return UpdateReport(
            name=self.name,
            version=self.version,
            revision=f"{self._run}:{self.version}",
            mode=self.mode,
            nbytes=staged.nbytes,
            version_bytes=staged.version_bytes,
            delta=staged.delta,
            wall_s=time.perf_counter() - staged.begun,
            plan_s=staged.plan_s,
            wire_s=staged.wire_s,
            install_s=install_s,
            pause_s=pause_s,
            path=staged.path,
            sources=staged.sources,
            nbytes_by_path=staged.nbytes_by_path,
            why=staged.why,
            attempts=staged.attempts,
        )

    def _call(self, hook: Callable[[int], object] | None, version: int) -> None:
        if hook is not None:
            hook(version)

    def _serve(self) -> None:
        """Serve the live version to others, where this subscriber is a source."""
        local_version = self._local_version()
        # In direct mode the memory is registered to be read into, also where it is not to be served.
        if local_version is None or not self._serves:
            return
        if local_version.version is not None:
            local_version.fence()
        local_version.begin(self.version)
        local_version.ready()
        self._version_status.post(self._run, self.version, is_open=True)

    def _withdraw(self) -> None:
        """Stop serving the live version, because its memory is about to change, or has changed."""
        # The status first: a reader that is fenced asks a planner at once, which must not send it back here.
        self._version_status.post(self._run, self.version, is_open=False)
        local_version = self._local_version()
        if local_version is not None and local_version.version is not None:
            local_version.fence()

    def _check_proven(self) -> None:
        """Check that the target still has the received bytes, before others read it.

        Raises:
            StaleDescriptor: an engine changed the weights in place; they are no longer served.
        """
        if self._update_loop.is_proven():
            return
        self._withdraw()
        # Planners choose sources by the hub's list: without this report they would send every receiver here again.
        self.member.beat_now()
        message = "weights were modified after the update; this process no longer serves them"
        raise StaleDescriptor(message, hint="pass serve=False where the engine changes weights in place")

    def _check_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the subscriber was closed")

    def close(self) -> None:
        """Leave. The target keeps its version. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
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


def subscriber(
    name: str,
    target: Target,
    *,
    connection: ConnectionSettings | str | None = None,
    mode: UpdateMode = "staged",
    load: Load | None = None,
    strict: bool = True,
    transforms: str | Sequence[str] | None = None,
    rank: tuple[int, int] | None = None,
    hooks: Hooks | None = None,
    serve: bool = True,
    arena: bool = False,
    memory_bytes: int | str | None = None,
) -> Subscriber:
    """Receive the versions published under a name into a live model; the publisher may be started later.

    Args:
        name: of the sync.
        target: a module, whose own loader is recorded once; or tensors, DTensors or `Shard`s by the checkpoint's names,
            each in its own layout.
        connection: hub, token, address and transports; see `publisher`.
        arena: first move the target into one arena; see `publisher`.
        mode: `staged`: versions arrive in a staging copy as large as the target, which only the flip touches. `direct`:
            they arrive in the target itself while the engine is paused; no further memory is needed.
        load: takes pairs (name, tensor) and fills the module; None: its `load_weights`, else its state dict's names.
        strict: every parameter of a module must be filled by published tensors.
        transforms: the tags under which tensors are received where they are offered (`fp8-block128`); None: the one
            that the module has codes and scales for, else the plain tensors.
        rank: this rank of the engine and the number of them, as `(0, 8)`, only shown in `penstock status`; None: of
            torch.distributed where it is initialised, else `(0, 1)`.
        hooks: the engine's callbacks around a commit.
        serve: be a source for other receivers between updates; False, where the engine changes weights in place.
        memory_bytes: staged, bound of the staging copy; direct, of bytes read and not yet verified.

    Raises:
        HubUnavailable: there is no hub. ConfigError: an argument is wrong. MissingExtra: a package for it is missing.
        BudgetTooSmall: `memory_bytes` is too little for direct mode; in staged mode the first update raises this.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    require_type(
        "target", target, (torch.nn.Module, Mapping), "a torch.nn.Module, or a dict of tensors or Shards by name"
    )
    if mode not in ("staged", "direct"):
        raise ConfigError(f"a subscriber of {name!r} has mode {mode!r}", hint="give mode staged or direct")
    engine_rank, world_size = rank_of(rank)
    # An unknown tag fails here, and not at the first update, which may be an hour later.
    for tag in (transforms,) if isinstance(transforms, str) else transforms or ():
        format_of(tag)
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    if mode == "direct" and budget is not None and budget < LEAST_BYTES:
        raise BudgetTooSmall(f"direct mode cannot work with memory_bytes={budget}", minimum_bytes=LEAST_BYTES)
    options = Options(
        staged=mode == "staged", load=load, strict=strict, transforms=transforms, serve=serve, memory_bytes=budget
    )
    if arena:
        to_arenas(target)
    with contextlib.ExitStack() as stack:
        member, stall_s = joined(stack, connection)
        this_rank = Subscriber(
            name,
            target,
            member,
            options,
            rank=engine_rank,
            world_size=world_size,
            hooks=hooks or Hooks(),
            stall_s=stall_s,
        )
        # From here on `close` leaves.
        stack.pop_all()
    return this_rank
