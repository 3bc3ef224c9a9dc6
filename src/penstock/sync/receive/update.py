"""Update loop of a receiver: find a planner, request the part, read it from its sources, and retry after a loss.

In: the members of the sync, a target, a version. Out: the version verified in memory, as `Staged`; or a typed error.
Not here: making it live, and the engine's hooks (`subscriber`).

    planner: checkpoint's table (once per run) -> requirements -> layout -> part -> links to its sources -> transfer
       source lost: retry without it | fenced: retry with the newest version | planner lost: use the next one
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

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
from penstock.hub.messages import PartReply, PartRequest, SyncMember, TableReply, layout_digest
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import WATERMARK_BYTES, Part
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.receive.sources import SourceFailed, open_links, shown
from penstock.sync.receive.target import ReceiveBuffers, Target, wanted_of
from penstock.sync.receive.transfer import Delta, Transfer, reporting_progress, tell_failed
from penstock.sync.recording.layout import Load
from penstock.sync.recording.requirements import Requirements

TRIES = 8
"""Attempts at one update: each one leaves out one more source, or is for a newer version."""
_LOOK_S = 0.5
# After a loss the member list changes within one beat of the hub: a short pause, not a back-off.
_PAUSE_S = 0.05
_LOST = (PeerLost, SourceStalled, PermissionDenied, IntegrityError)
"""Errors after which another source or planner may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version, read and verified."""

    version: int
    run: str
    part: Part | None
    begun: float
    attempts: int
    nbytes: int = 0
    """Bytes read: fewer than the version has, where the receiver had some of them already."""
    version_bytes: int = 0
    delta: str = ""
    plan_s: float = 0.0
    wire_s: float = 0.0
    nbytes_by_path: dict[str, int]
    sources: dict[str, int]
    why: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Return whether the version is live already, so that nothing was read."""
        return self.part is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options for filling a target; see `subscriber`."""

    staged: bool
    load: Load | None
    strict: bool
    transforms: str | Sequence[str] | None
    serve: bool
    memory_bytes: int | None

    @property
    def watermark_bytes(self) -> int:
        """Return the most bytes read and not yet verified."""
        # Staged, `memory_bytes` bounds the staging copy itself, which is checked when it is allocated.
        return WATERMARK_BYTES if self.staged or self.memory_bytes is None else self.memory_bytes


class UpdateLoop:
    """See the module. One thread at a time updates; the server's threads read the properties.

    Attributes:
        is_touched: whether a transfer wrote to the target itself, since this was set to False.
        checkpoint: the checkpoint's table from the planner.

    Args:
        membership: the members of the sync.
        target, options: the target to fill, and how.
        stall_s: the deadline for progress.
    """

    def __init__(self, membership: Membership, target: Target, options: Options, *, stall_s: float) -> None:
        self._membership = membership
        self._target = target
        self._options = options
        self._stall_s = stall_s
        self._buffers: ReceiveBuffers | None = None
        self._table: tuple[str, Mapping[str, str]] = ("", {})
        self._run = ""
        self.checkpoint: TableReply | None = None
        self._transfer: Transfer | None = None
        self._asking: tuple[str, int] | None = None
        self.is_touched = False

    @property
    def local_version(self) -> LocalVersion | None:
        """Return the target's memory, which others read; None before the first update."""
        return None if self._buffers is None else self._buffers.local_version

    @property
    def progress(self) -> tuple[int, int]:
        """Return the verified bytes of the transfer under way, or the last, and the bytes of its part."""
        transfer = self._transfer
        return (0, 0) if transfer is None else (transfer.moved_bytes, transfer.part.nbytes)

    @property
    def wanted(self) -> Requirements | None:
        """Return the requirements of the checkpoint, once they are known."""
        return None if self._buffers is None else self._buffers.wanted

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the receive buffers, once it is known."""
        return None if self._buffers is None else self._buffers.layout

    @property
    def digest(self) -> str:
        """Return the digest of the layout; empty: not known yet."""
        return "" if self._buffers is None else self._buffers.digest

    def planners(self, *, max_age_s: float = _LOOK_S) -> list[SyncMember]:
        """Return the members that may plan for us: publishers' rank 0, then receivers with the newest version."""
        members = self._membership.look(max_age_s=max_age_s)
        zeros = [member for member in members if member.state.side == "publisher" and member.state.rank == 0]
        zeros.sort(key=lambda one: (-one.state.version, one.since))
        having = [member for member in members if member.state.side == "subscriber" and member.state.state == "open"]
        having = [member for member in having if member.member != self._membership.member.id]
        # The same order on every receiver: without a publisher they should all ask the same planner, whose plan then
        # spreads them over the sources.
        having.sort(key=lambda one: (-one.state.version, one.member))
        return zeros + having

    def news(self, after: int, wait_s: float) -> int | None:
        """Return the newest announced version, after at most `wait_s` if it is not above `after`; None: no planner."""
        for planner in self.planners():
            with contextlib.suppress(*_LOST, NotFound):
                return self._membership.ask(
                    planner.member, lambda sync_client: sync_client.news(after, wait_s), channel="news"
                ).version
        return None

    def receive(
        self,
        version: int | None,
        *,
        live: tuple[str, int],
        is_dirty: bool,
        before_read: Callable[[int], None],
    ) -> Staged:
        """Read and verify a version.

        Args:
            version: the version to read; None: the newest.
            live: the run and version that the target has.
            is_dirty: whether the target has a mix of versions.
            before_read: called with the version before the first byte of each attempt is read.

        Raises:
            NotFound: nothing can be read yet. Other errors as `Subscriber.update`.
        """
        begun, lost = time.perf_counter(), dict[str, PenstockError]()
        # Without a request: the answer is known, and a planner need not be there.
        if version is not None and version <= live[1]:
            wanted = PartReply(version=version, run=live[0])
            if _is_live(wanted, live, is_dirty=is_dirty):
                return _nothing(wanted, begun, 0)
        self._asking = None
        try:
            return self._tried(version, live, is_dirty=is_dirty, before_read=before_read, lost=lost, begun=begun)
        except NotFound:
            raise  # the caller waits and calls again: that is no failure of the version
        except BaseException as error:
            tell_failed(self._membership, self._asking, error)
            raise

    def _tried(
        self,
        version: int | None,
        live: tuple[str, int],
        *,
        is_dirty: bool,
        before_read: Callable[[int], None],
        lost: dict[str, PenstockError],
        begun: float,
    ) -> Staged:
        """Try to read a version until it succeeds or `TRIES` is used up; `lost` has the members to leave out."""
        for attempt in range(1, TRIES + 1):
            planner = self._planner(lost)
            try:
                self._asking = planner.member, -1
                buffers = self._landed(planner)
                reply = self._request_part(planner, buffers, version, lost)
                self._asking = planner.member, reply.version
                if _is_live(reply, live, is_dirty=is_dirty):
                    return _nothing(reply, begun, attempt)
                before_read(reply.version)
                return self._read(planner, buffers, reply, begun, attempt)
            except SourceFailed as failed:
                last, error = failed.member, failed.error
            except _LOST as failed:
                last, error = planner.member, failed
            except (PlanError, StaleDescriptor):
                if not lost:
                    raise
                # The remaining members cannot supply the version: the reason is the member that was lost.
                raise next(reversed(lost.values())) from None
            # A source that fenced its version is healthy: it serves the next one, and must not be left out.
            if not isinstance(error, StaleDescriptor):
                lost[last] = error
            if attempt == TRIES or not isinstance(error, (*_LOST, StaleDescriptor)):
                raise error
            time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _planner(self, lost: dict[str, PenstockError]) -> SyncMember:
        candidates = [member for member in self.planners() if member.member not in lost]
        # All known planners are lost: look at the hub again, for a process that was started in their place.
        if not candidates and lost:
            candidates = [member for member in self.planners(max_age_s=0.0) if member.member not in lost]
        if not candidates:
            if lost:
                raise next(reversed(lost.values()))
            hint = "start the publisher under this name and hub; `penstock status` lists the members"
            raise NotFound(f"no publisher of {self._membership.name!r} is known yet", hint=hint)
        return candidates[0]

    def _landed(self, planner: SyncMember) -> ReceiveBuffers:
        """Return the receive buffers for this run's versions; allocate new ones where its checkpoint differs."""
        # A run's checkpoint does not change, so its table is requested once. A restarted trainer is a new run, usually
        # with the same table: the buffers, and the recording of the loader, stay.
        if self._buffers is not None and self._run == planner.state.run:
            return self._buffers
        checkpoint = self._membership.ask(planner.member, lambda sync_client: sync_client.checkpoint())
        how, model = self._options, self._target if isinstance(self._target, torch.nn.Module) else None
        seen = shown(checkpoint, how.transforms, model)
        key = layout_digest(seen.table), seen.tags
        if self._buffers is None or key != self._table:
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
            requirements = wanted_of(self._target, seen.table, how.load, strict=how.strict, tags=seen.tags)
            links, member = self._membership.member.links, self._membership.member.id
            self._buffers = ReceiveBuffers(
                requirements, member, links, staged=how.staged, serve=how.serve, memory_bytes=how.memory_bytes
            )
            self._transfer = None
        self._table, self._run, self.checkpoint = key, planner.state.run, checkpoint
        return self._buffers

    def _request_part(
        self, planner: SyncMember, buffers: ReceiveBuffers, version: int | None, lost: dict[str, PenstockError]
    ) -> PartReply:
        """Request this receiver's part of the version; afterwards `self._transfer` is of its key."""
        # `have_key`: parts are megabytes, and the same for every version of a plan; the planner then sends none.
        have = self._transfer.part.key if self._transfer is not None else ""
        request = PartRequest(
            version=-1 if version is None else version, digest=buffers.digest, have_key=have, without=tuple(lost)
        )
        reply = self._membership.ask(planner.member, lambda sync_client: sync_client.part(request))
        if reply.needs_layout:
            full = PartRequest(
                version=request.version,
                digest=request.digest,
                layout=encode(buffers.layout),
                have_key=have,
                without=request.without,
            )
            reply = self._membership.ask(planner.member, lambda sync_client: sync_client.part(full))
        if reply.not_yet or reply.needs_layout:
            raise NotFound(reply.not_yet or "the planner asked twice for this receiver's layout")
        if reply.part is not None:
            part = decode(reply.part, Part)
            names, watermark = buffers.layout.names, self._options.watermark_bytes
            self._transfer = Transfer(
                part, buffers.into, names=names, watermark_bytes=watermark, stall_s=self._stall_s, delta=Delta()
            )
        if self._transfer is None or self._transfer.part.key != reply.key:
            raise PlanError("the planner sent no part, or a part whose key differs from the one in its answer")
        return reply

    def _read(
        self, planner: SyncMember, buffers: ReceiveBuffers, reply: PartReply, begun: float, attempt: int
    ) -> Staged:
        assert self._transfer is not None
        transfer, part = self._transfer, self._transfer.part
        used = [part.sources[i] for i in part.link_bytes().nonzero()[0].tolist()]
        with reporting_progress(self._membership, planner.member, reply.version, transfer):
            links = open_links(self._membership, used, reply.version, self._stall_s)
            plan_s = time.perf_counter() - begun
            try:
                report = transfer.run(links)
            except PenstockError as error:
                # The transfer's memory is the staging copy in staged mode, which the user never sees. `mutated` is
                # about the target: the subscriber sets it from `is_touched`.
                self.is_touched |= error.mutated and not self._options.staged
                error.mutated = False
                if transfer.lost is not None:
                    raise SourceFailed(transfer.lost, error) from error
                raise
        self.is_touched |= not self._options.staged
        return Staged(
            version=reply.version,
            run=reply.run,
            part=part,
            begun=begun,
            attempts=attempt,
            nbytes=report.moved_bytes,
            version_bytes=report.nbytes,
            delta=transfer.delta.summary(report) if transfer.delta is not None else "",
            plan_s=plan_s,
            wire_s=report.seconds,
            nbytes_by_path={f"{link.path} <- {link.member[:8]}": link.nbytes for link in report.links if link.nbytes},
            sources={link.member: link.nbytes for link in report.links},
            why=(*dict.fromkeys(link.why for link in report.links if link.why), *buffers.wanted.why()),
        )

    def flip(self, staged: Staged) -> None:
        """Copy a staged version to the target."""
        assert self._buffers is not None and staged.part is not None
        self._buffers.flip(staged.part, stall_s=self._stall_s)

    def install(self) -> None:
        """Finish the update once all bytes are in place."""
        assert self._buffers is not None
        self._buffers.install()

    def fence(self) -> None:
        """Stop serving the target's memory: its bytes may change from now on."""
        served = self.local_version
        if served is not None and served.version is not None:
            served.fence()

    def check_proven(self) -> None:
        """Check that the target still has the received bytes, before others read it.

        Raises:
            StaleDescriptor: an engine changed the weights in place; they are no longer served.
        """
        # A reader compares with digests that this process computes of its bytes as they are: changed bytes would pass
        # that check.
        served, transfer = self.local_version, self._transfer
        if served is None or transfer is None or served.version is None:
            return
        for strips, wanted in transfer.proven:
            if (served.regions.digests(strips) != wanted).any():
                self.fence()
                message = "weights were modified after the update; this process no longer serves them"
                raise StaleDescriptor(message, hint="pass serve=False where the engine changes weights in place")

    def reopen(self, version: int) -> bool:
        """Serve the target's memory to others, if it has a version; return whether it is served."""
        served = self.local_version
        if served is None or version < 0 or not self._options.serve:
            return False
        if served.version is not None:
            served.fence()
        served.begin(version)
        served.ready()
        return True

    def close(self) -> None:
        """End the registrations."""
        if self._buffers is not None:
            self._buffers.close()


def _is_live(reply: PartReply, live: tuple[str, int], *, is_dirty: bool) -> bool:
    """Return whether there is nothing to do. ConfigError: the version is not above the live one."""
    # A dirty target may read the live version again: that is the way to repair it.
    run, version = live
    if reply.version > version or (is_dirty and reply.version == version):
        return False
    if reply.version == version and reply.run == run:
        return True
    message = f"version {reply.version} is not above {version}, which is live"
    raise ConfigError(message, hint="versions grow, over restarts of the trainer too: number on from Publisher.latest")


def _nothing(reply: PartReply, begun: float, attempt: int) -> Staged:
    return Staged(
        version=reply.version,
        run=reply.run,
        part=None,
        begun=begun,
        attempts=attempt,
        nbytes_by_path={},
        sources={},
    )
