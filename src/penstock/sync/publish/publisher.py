"""A trainer rank as a publisher: it declares what it holds, and shows version after version of it.

In: live parameters, a name, a hub or none. Out: for each version a `PublishReport`, when training may go on.
Not here: what is declared (`sync.shards`), who takes what (`sync.planner`), what receivers do
(`sync.receive.subscriber`).

    live:      begin(v) -> receivers read the parameters themselves -> all done, or late -> fence -> training goes on
    snapshot:  fence -> copy -> begin(v) -> training goes on, receivers read the copy
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from penstock.arguments import require_name
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import Cancelled, ConfigError, SourceStalled
from penstock.hub.client import resolve_connection
from penstock.hub.messages import Decision, SyncState
from penstock.lifecycle import Closing, quick_handover
from penstock.peer.member import Member
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.planner import Planner
from penstock.sync.publish import rank_group
from penstock.sync.publish.offer import Offer, VersionSnapshot
from penstock.sync.publish.transformed import Transforms
from penstock.sync.receive.target import to_arenas
from penstock.sync.report import PublishMode, PublishReport, VersionStatus
from penstock.sync.request_handler import SubscriberProgress, SyncHandler
from penstock.sync.shards import Declarable, declared, layout_of


class Publisher(Closing):
    """A rank that publishes. Made by `publisher`; a context manager. One thread at a time publishes.

    Attributes:
        name: of the sync.
        version: the newest published by this rank; -1: none yet.
        latest: the highest version that anybody had when this was made: number on from it.
        rank, world_size: of the trainer.
    """

    def __init__(
        self,
        name: str,
        member: Member,
        held: LocalVersion,
        replica: VersionSnapshot | None,
        offer: Offer,
        *,
        rank: int,
        world_size: int,
        stall_s: float,
    ) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self.version = self.latest = -1
        self.mode: PublishMode = "live" if replica is None else "snapshot"
        self.member, self._held, self._replica, self._stall_s = member, held, replica, stall_s
        self._offer = offer
        self._version_status, self._subscriber_progress, self._run = VersionStatus(), SubscriberProgress(), ""
        self._membership = Membership(member, name, stall_s)
        self.planner = Planner(self._membership, self._version_status, lambda: held.layout)
        self._digest, self._publishing, self._is_closed = held.layout.digest(), threading.Lock(), False
        sync_handler = SyncHandler(
            self._membership.key,
            member.check_grant,
            local_version=lambda: self._held,
            version_status=self._version_status,
            planner=self.planner,
            subscriber_progress=self._subscriber_progress if rank == 0 else None,
        )
        member.server.handlers["sync"] = sync_handler
        member.syncs.append(self._state)
        if rank == 0:
            self._run = member.id
            member.report_now()
            rank_group.claim(self._membership)
        else:
            self._run = rank_group.join(self._membership, rank, world_size, "", stall_s)
            member.report_now()
        offer.connect(member, name, rank=rank, world_size=world_size, stall_s=stall_s)
        self.latest = max([one.state.version for one in self._membership.look()], default=-1)

    def _state(self) -> SyncState:
        now = self._version_status.now
        return SyncState(
            name=self.name,
            side="publisher",
            run=self._run,
            rank=self.rank,
            world_size=self.world_size,
            layout=self._digest,
            version=now.version,
            state="open" if now.is_open else "idle",
            nbytes=self.nbytes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that this rank holds."""
        layout = self._held.layout
        span = [form.box.num_elements * form.dtype.bits // 8 for form in layout.forms]
        return sum(span[i] for i in layout.form.tolist())

    def publish(self, version: int) -> PublishReport:
        """Show a version: the parameters as they are now, on every rank.

        Live, it returns once the subscribers known at its start have the version, failed, or made no progress for the
        stall deadline; snapshot, once the copy is made. After it the parameters may change.

        Raises:
            ConfigError: the version does not grow, or another group publishes the name; nothing was shown.
            PeerLost, SourceStalled: rank 0 is gone, or does not publish this version; it is no longer shown here.
            Cancelled: it was closed.
        """
        with self._publishing, quick_handover():
            begun = time.perf_counter()
            self._check(version)
            decision, copy_s = Decision(is_over=True), 0.0
            if self._replica is not None:
                copy_s = self._copy(self._replica, version)
            else:
                decision = self._show(version)
            wall_s = time.perf_counter() - begun
            return PublishReport(
                name=self.name,
                version=version,
                mode=self.mode,
                nbytes=self.nbytes,
                wall_s=wall_s,
                copy_s=copy_s,
                wait_s=0.0 if self._replica is not None else wall_s - self._offer.seconds,
                transform_s=self._offer.seconds,
                transformed_bytes=self._offer.transformed.nbytes,
                boundary_bytes=self._offer.transformed.boundary_bytes,
                exchanged_bytes=self._offer.moved_bytes,
                committed=decision.committed,
                late=decision.late,
                failed=decision.failed,
            )

    def _check(self, version: int) -> None:
        """Check that the version may come next, and that the name is still ours."""
        if self._is_closed:
            raise Cancelled("the publisher was closed")
        if version <= max(self.version, self.latest):
            message = f"version {version} of {self.name!r} is not above {max(self.version, self.latest)}"
            raise ConfigError(message, hint="versions grow, over restarts too: number on from Publisher.latest")
        if self.rank == 0:
            rank_group.check_alone(self._membership)
        else:
            self._run = rank_group.join(self._membership, self.rank, self.world_size, self._run, self._stall_s)

    def _begin(self, version: int) -> None:
        """From now on receivers may have it."""
        self._held.begin(version)
        self._held.ready(self._offer.plain)
        self._held.settle(self._stall_s)
        self._say(version)
        self._offer.fill(version, self._run, self._held.ready, stall_s=self._stall_s)

    def _say(self, version: int) -> None:
        self.version = version
        self._version_status.post(self._run, version, is_open=True)
        self.member.beat_now()

    def _copy(self, replica: VersionSnapshot, version: int) -> float:
        offer = self._offer
        if offer.is_copied:
            offer.fill(version, self._run, lambda rows: None, stall_s=self._stall_s)
        seconds = replica.snapshot(version, rows=None if offer.is_copied else offer.plain, stall_s=self._stall_s)
        self._say(version)
        if not offer.is_copied:
            try:
                offer.fill(version, self._run, self._held.ready, stall_s=self._stall_s)
            except BaseException:
                self._end()
                raise
        return seconds

    def _show(self, version: int) -> Decision:
        """Live: until the receivers are done."""
        try:
            if self.rank == 0:
                known = [
                    one.member
                    for one in self._membership.look(max_age_s=rank_group.ASK_S)
                    if one.state.side == "subscriber"
                ]
                self._subscriber_progress.begin(version, known)
                self._begin(version)
                return self._subscriber_progress.wait(version, stall_s=self._stall_s, is_gone=self._is_gone)
            self._begin(version)
            return rank_group.decided(self._membership, self._run, version, self._stall_s)
        finally:
            self._end()

    def _end(self) -> None:
        """The version can be read of us no more."""
        self._held.fence()
        self._version_status.post(self._run, self.version, is_open=False)
        self.member.beat_now()

    def _is_gone(self, member: str) -> bool:
        found = [one for one in self._membership.look(max_age_s=rank_group.ASK_S) if one.member == member]
        return not found or self._membership.is_gone(found[0])

    def wait_subscribers(self, count: int, timeout_s: float | None = None) -> None:
        """Wait until this number of subscribers take part.

        Raises:
            SourceStalled: not within `timeout_s`; None: the stall deadline.
        """
        limit = self._stall_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while (found := sum(one.state.side == "subscriber" for one in self._membership.look())) < count:
            if time.monotonic() > deadline:
                raise SourceStalled(f"{found} of {count} subscribers of {self.name!r} came in {limit:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Leave: readers' descriptors are stale; receivers that have the newest version give it now. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._offer.close()
        if self._replica is not None:
            self._replica.close()
        self._held.close()
        self.member.leave(0.0)
        self._membership.close()


def publisher(
    name: str,
    params: torch.nn.Module | Mapping[str, Declarable],
    *,
    connection: ConnectionSettings | str | None = None,
    mode: PublishMode = "live",
    transforms: Transforms | None = None,
    keep_plain: bool = True,
    rank: tuple[int, int] | None = None,
    replica: str = "device",
    arena: bool = False,
    memory_bytes: int | str | None = None,
) -> Publisher:
    """Publish what this rank holds, under a name that receivers know.

    Args:
        name: of the sync; one group of ranks publishes it.
        params: a module, or tensors by name: whole ones, DTensors, `Shard`s: only what this rank holds.
        connection: see `join`.
        mode: `live`: receivers read the parameters themselves, and `publish` waits for them. `snapshot`: they read a
            copy, and `publish` waits for the copy alone.
        transforms: what tensors are offered as too: a tag (`fp8-block128`, `cast:BF16`, ...; `transform.formats`), for
            the weights that checkpoints have so, or tags with patterns of names. Alike on all ranks.
        keep_plain: whether such tensors can also be had as they are.
        rank: this trainer rank and the number of them, as `(0, 8)`; None: of torch.distributed where it is initialised,
            else `(0, 1)`.
        replica: where a snapshot's copy is: `device`, beside the parameters, or `cpu`, in pinned memory.
        arena: first move the parameters into one arena a device (`memory.rehome`), so that peers reach them by one
            registration; host memory is reached by `shm` only there.
        memory_bytes: bound of a snapshot's copy and of transformed tensors; None: as large as it must be.

    Raises:
        PlanError: parameters cannot be declared, or transformed; names them. BudgetTooSmall: see `memory_bytes`.
        ConfigError: another group publishes the name; names it.
        HubUnavailable: there is no hub. SourceStalled: no rank 0 came.

    Ownership: the parameters' memory stays registered until `close`.
    Order: all ranks are made at the same time, and publish the same versions.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    copies = _copies(name, mode, replica)
    trainer_rank, world_size = rank_of(rank)
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    if arena:
        to_arenas(params)
    offer = Offer(
        declared(params), transforms, keep_plain=keep_plain, world_size=world_size, copies=copies, memory_bytes=budget
    )
    with contextlib.ExitStack() as stack:
        member, wait_s = joined(stack, connection)
        held, copy = _shown(stack, offer, member, copies)
        made = Publisher(name, member, held, copy, offer, rank=trainer_rank, world_size=world_size, stall_s=wait_s)
        stack.pop_all()
    return made


def _copies(name: str, mode: str, replica: str) -> str | None:
    """Return the place that versions are copied to; None: they are not copied."""
    if mode not in ("live", "snapshot") or replica not in ("device", "cpu") or not name:
        message = f"a publisher of {name!r}, mode {mode!r}, replica {replica!r}"
        raise ConfigError(message, hint="it has a name, mode live or snapshot, and replica device or cpu")
    return replica if mode == "snapshot" else None


def _shown(
    stack: contextlib.ExitStack, offer: Offer, member: Member, copies: str | None
) -> tuple[LocalVersion, VersionSnapshot | None]:
    """Return the memory that readers see, registered until the stack is left: the offer's own, or a copy."""
    memories = (*offer.memories, *offer.filled)
    layout, address = layout_of(offer.rows, member.id, "", memories), secrets.token_hex(8)
    copy = None
    if copies is not None:
        on_host = copies == "cpu"
        copy = VersionSnapshot(
            layout, offer.memories, member.links, address=address, on_host=on_host, filled=offer.filled
        )
        stack.callback(copy.close)
    held = (
        LocalVersion(replace(layout, address=address), memories, member.links) if copy is None else copy.local_version
    )
    stack.callback(held.close)
    stack.callback(offer.close)
    return held, copy
