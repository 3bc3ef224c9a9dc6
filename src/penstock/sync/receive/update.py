"""A receiver's way to one version: whom to ask for its part, the sources, the reading; again where one was lost.

In: a roster, a target, which version. Out: the version verified in memory, as `Staged`; or a typed error.
Not here: when it becomes live, and what the engine does then (`subscriber`).

    planner: checkpoint's table (once a run) -> wanted -> layout -> part -> links to its sources -> take
       source lost: again without it | fenced: again, for what is newest then | planner lost: the next one
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
from penstock.hub.identity import layout_digest
from penstock.hub.sync_messages import PartReply, PartRequest, SyncMember, TableReply
from penstock.plan.columns import decode, encode
from penstock.plan.layout import Layout
from penstock.plan.sync import Part
from penstock.plan.sync_work import WATERMARK_BYTES
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.receive.delta import Delta
from penstock.sync.receive.formats_offered import shown
from penstock.sync.receive.progress_reports import reporting_progress, tell_failed
from penstock.sync.receive.sources import SourceFailed, open_links
from penstock.sync.receive.target import ReceiveBuffers, Target, wanted_of
from penstock.sync.receive.transfer import Transfer
from penstock.sync.recording.layout import Load
from penstock.sync.recording.requirements import Requirements

TRIES = 8
"""Attempts at one update: each is without a source more, or for a newer version."""
_LOOK_S = 0.5
_PAUSE_S = 0.05
_LOST = (PeerLost, SourceStalled, PermissionDenied, IntegrityError)
"""Of whom another source or planner may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version, read and verified."""

    version: int
    run: str
    part: Part | None
    begun: float
    attempts: int
    nbytes: int = 0
    """Read: less than the version has, where some of it was here."""
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
    """The ways to fill a target; see `subscriber`."""

    staged: bool
    load: Load | None
    strict: bool
    transforms: str | Sequence[str] | None
    serve: bool
    memory_bytes: int | None

    @property
    def watermark_bytes(self) -> int:
        """Most bytes read and not yet verified."""
        return WATERMARK_BYTES if self.staged or self.memory_bytes is None else self.memory_bytes


class UpdateLoop:
    """See the module. One thread at a time takes; the door's threads ask what is held.

    Attributes:
        is_touched: whether a `transfer` wrote to the target itself, since this was set to False.
        told: the checkpoint as a planner said it.

    Args:
        roster: who takes part.
        target, options: what is filled, and how.
        stall_s: deadline by progress.
    """

    def __init__(self, membership: Membership, target: Target, options: Options, *, stall_s: float) -> None:
        self._membership, self._target, self._options, self._stall_s = membership, target, options, stall_s
        self._buffers: ReceiveBuffers | None = None
        self._table: tuple[str, Mapping[str, str]] = ("", {})
        self._run = ""
        self.told: TableReply | None = None
        self._transfer: Transfer | None = None
        self._asking: tuple[str, int] | None = None
        self.is_touched = False

    @property
    def held(self) -> LocalVersion | None:
        """The target's memory, once it is known what is wanted."""
        return None if self._buffers is None else self._buffers.held

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
        zeros = [one for one in members if one.state.side == "publisher" and one.state.rank == 0]
        zeros.sort(key=lambda one: (-one.state.version, one.since))
        having = [one for one in members if one.state.side == "subscriber" and one.state.state == "open"]
        having = [one for one in having if one.member != self._membership.member.id]
        having.sort(key=lambda one: (-one.state.version, one.member))
        return zeros + having

    def news(self, after: int, wait_s: float) -> int | None:
        """The newest version announced, waited for at most `wait_s` if it is not above `after`; None: nobody says."""
        for planner in self.planners():
            with contextlib.suppress(*_LOST, NotFound):
                return self._membership.ask(
                    planner.member, lambda sync_client: sync_client.news(after, wait_s), line="news"
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
            version: which; None: the newest.
            live: the run and version that we have.
            is_dirty: what we have is no version.
            before_read: called with the version before the first byte of each attempt is read.

        Raises:
            NotFound: nothing can be read yet. Else see `Subscriber.update`.
        """
        begun, lost = time.perf_counter(), dict[str, PenstockError]()
        if version is not None and version <= live[1]:
            asked = PartReply(version=version, run=live[0])
            if _is_live(asked, live, is_dirty=is_dirty):
                return _nothing(asked, begun, 0)
        self._asking = None
        try:
            return self._tried(version, live, is_dirty=is_dirty, before_read=before_read, lost=lost, begun=begun)
        except NotFound:
            raise  # it is asked for again
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
        """Attempt after attempt; `lost`: of whom nothing is asked any more."""
        for attempt in range(1, TRIES + 1):
            planner = self._planner(lost)
            try:
                self._asking = planner.member, -1
                buffers = self._landed(planner)
                reply = self._asked(planner, buffers, version, lost)
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
                raise next(reversed(lost.values())) from None  # what is left makes up no version
            if not isinstance(error, StaleDescriptor):
                lost[last] = error
            if attempt == TRIES or not isinstance(error, (*_LOST, StaleDescriptor)):
                raise error
            time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _planner(self, lost: dict[str, PenstockError]) -> SyncMember:
        found = [one for one in self.planners() if one.member not in lost]
        if not found and lost:  # who came in their place is news
            found = [one for one in self.planners(max_age_s=0.0) if one.member not in lost]
        if not found:
            if lost:
                raise next(reversed(lost.values()))
            hint = "start the publisher under this name and hub; `penstock status` shows who takes part"
            raise NotFound(f"nobody publishes {self._membership.name!r} yet", hint=hint)
        return found[0]

    def _landed(self, planner: SyncMember) -> ReceiveBuffers:
        """Return the receive buffers for versions of this run; made anew where its checkpoint is another one."""
        if self._buffers is not None and self._run == planner.state.run:
            return self._buffers
        told = self._membership.ask(planner.member, lambda sync_client: sync_client.checkpoint())
        how, model = self._options, self._target if isinstance(self._target, torch.nn.Module) else None
        seen = shown(told, how.transforms, model)
        key = layout_digest(seen.table), seen.tags
        if self._buffers is None or key != self._table:
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
            made = wanted_of(self._target, seen.table, how.load, strict=how.strict, tags=seen.tags)
            links, member = self._membership.member.links, self._membership.member.id
            self._buffers = ReceiveBuffers(
                made, member, links, staged=how.staged, serve=how.serve, memory_bytes=how.memory_bytes
            )
            self._transfer = None
        self._table, self._run, self.told = key, planner.state.run, told
        return self._buffers

    def _asked(
        self, planner: SyncMember, buffers: ReceiveBuffers, version: int | None, lost: dict[str, PenstockError]
    ) -> PartReply:
        """Our part of the version; `self._transfer` is of its key then."""
        have = self._transfer.part.key if self._transfer is not None else ""
        request = PartRequest(
            version=-1 if version is None else version, digest=buffers.digest, have_key=have, without=tuple(lost)
        )
        reply = self._membership.ask(planner.member, lambda sync_client: sync_client.part(request))
        if reply.needs_layout:
            told = PartRequest(
                version=request.version,
                digest=request.digest,
                layout=encode(buffers.layout),
                have_key=have,
                without=request.without,
            )
            reply = self._membership.ask(planner.member, lambda sync_client: sync_client.part(told))
        if reply.not_yet or reply.needs_layout:
            raise NotFound(reply.not_yet or "the planner does not take our layout")
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
                found = transfer.run(links)
            except PenstockError as error:
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
            nbytes=found.moved_bytes,
            version_bytes=found.nbytes,
            delta=transfer.delta.summary(found) if transfer.delta is not None else "",
            plan_s=plan_s,
            wire_s=found.seconds,
            nbytes_by_path={f"{one.path} <- {one.member[:8]}": one.nbytes for one in found.links if one.nbytes},
            sources={one.member: one.nbytes for one in found.links},
            why=(*dict.fromkeys(one.why for one in found.links if one.why), *buffers.wanted.why()),
        )

    def flip(self, staged: Staged) -> None:
        """Staged mode: what was read becomes the target's."""
        assert self._buffers is not None and staged.part is not None
        self._buffers.flip(staged.part, stall_s=self._stall_s)

    def install(self) -> None:
        """Finish the update once all bytes are in place."""
        assert self._buffers is not None
        self._buffers.install()

    def fence(self) -> None:
        """Stop serving our memory: its bytes may change from now on."""
        held = self.held
        if held is not None and held.version is not None:
            held.fence()

    def check_proven(self) -> None:
        """Before others read what we hold: that it still is what was received.

        Raises:
            StaleDescriptor: an engine changed it in place since; it is given to nobody.
        """
        held, transfer = self.held, self._transfer
        if held is None or transfer is None or held.version is None:
            return
        for strips, wanted in transfer.proven:
            if (held.regions.digests(strips) != wanted).any():
                self.fence()
                message = "weights were modified after the update; this process no longer serves them"
                raise StaleDescriptor(message, hint="give serve=False where the engine changes weights in place")

    def reopen(self, version: int) -> bool:
        """Let others read what we hold, if we hold a version."""
        held = self.held
        if held is None or version < 0 or not self._options.serve:
            return False
        if held.version is not None:
            held.fence()
        held.begin(version)
        held.ready()
        return True

    def close(self) -> None:
        """End the registrations."""
        if self._buffers is not None:
            self._buffers.close()


def _is_live(reply: PartReply, live: tuple[str, int], *, is_dirty: bool) -> bool:
    """Return whether there is nothing to do. ConfigError: the version is not above the live one."""
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
