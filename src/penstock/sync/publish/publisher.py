"""A trainer rank as a publisher: it declares its tensors once, and shows version after version of them.

In: live parameters, a name, a hub or none. Out: for each version a `PublishReport`, when training may go on.
Not here: declaring tensors (`sync.shards`), the rows and copies on offer (`offer`), planning (`sync.planner`), reading
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
from functools import partial

import torch

from penstock.arguments import require_name
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import Cancelled, ConfigError, SourceStalled
from penstock.hub.client import resolve_connection
from penstock.hub.messages import Decision, SyncState
from penstock.lifecycle import Closing, quick_handover
from penstock.peer.member import Member
from penstock.sync.local_version import LocalVersion, VersionStatus
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.planner import Planner
from penstock.sync.publish import rank_group
from penstock.sync.publish.offer import Offer, VersionSnapshot
from penstock.sync.publish.transformed import Transforms
from penstock.sync.report import PublishMode, PublishReport, publish_outcome
from penstock.sync.request_handler import SyncHandler
from penstock.sync.shards import Declarable, declared, layout_of, to_arenas
from penstock.telemetry.journey import Journey


class Publisher(Closing):
    """A rank that publishes. Made by `publisher`; a context manager. One thread at a time publishes.

    Attributes:
        name: of the sync.
        version: the newest version that this rank published; -1: none yet.
        latest: the highest version that any member had when this rank joined; later versions must be above it.
        mode: `live` or `snapshot`; see `publisher`.
        rank, world_size: of the trainer.
        member: this process in the fleet.
        planner: plans for the receivers, on rank 0.
    """

    def __init__(
        self,
        name: str,
        member: Member,
        local_version: LocalVersion,
        snapshot: VersionSnapshot | None,
        offer: Offer,
        *,
        rank: int,
        world_size: int,
        stall_s: float,
    ) -> None:
        self.name = name
        self.member = member
        self.mode: PublishMode = "live" if snapshot is None else "snapshot"
        self.rank = rank
        self.world_size = world_size
        self.version = -1
        self._local_version = local_version
        self._snapshot = snapshot
        self._offer = offer
        self._stall_s = stall_s
        # Computed once: the hub gets the digest with every beat, and the layout never changes.
        self._digest = local_version.layout.digest()
        self._run = ""
        self._publishing = threading.Lock()
        self._is_closed = False
        self._version_status = VersionStatus()
        self._subscriber_progress = rank_group.SubscriberProgress()
        self._membership = Membership(member, name, stall_s)
        self.planner = Planner(self._membership, self._version_status, lambda: local_version.layout)
        # The handler before the first report: whoever finds this rank at the hub may ask it at once.
        member.server.handlers["sync"] = SyncHandler(
            self._membership.key,
            member.check_grant,
            local_version=lambda: local_version,
            version_status=self._version_status,
            planner=self.planner,
            subscriber_progress=self._subscriber_progress if rank == 0 else None,
        )
        self._took_s = 0.0
        member.syncs.append(self._state)
        if rank == 0:
            self._run = member.id
            # Reported before the claim: two groups that start together must see each other, to agree on the first.
            member.report_now()
            rank_group.claim(self._membership)
        else:
            # Joined before the report, which names the run.
            self._run = rank_group.join(self._membership, rank, world_size, "", stall_s)
            # Before the report: once all ranks are seen, rank 0 may publish, and the ranks must start from one number.
            self.latest = self._newest_of_others()
            member.report_now()
        offer.connect(member, name, rank=rank, world_size=world_size, stall_s=stall_s)
        if rank == 0:
            self.latest = self._newest_of_others()

    def _newest_of_others(self) -> int:
        return max((other.state.version for other in self._membership.look()), default=-1)

    def _state(self) -> SyncState:
        """Return what the hub lists about this rank."""
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
            took_s=self._took_s,
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows that this rank holds."""
        # By form first: a model has hundreds of thousands of rows and a handful of forms.
        layout = self._local_version.layout
        nbytes = [form.box.num_elements * form.dtype.bits // 8 for form in layout.forms]
        return sum(nbytes[i] for i in layout.form.tolist())

    def publish(self, version: int) -> PublishReport:
        """Show a version: the parameters as they are now, on every rank.

        Live, it returns once the subscribers known at its start have the version, failed, or made no progress for the
        stall deadline; snapshot, once the copy is made. After it the parameters may change.

        Raises:
            ConfigError: the version does not grow, or another group publishes the name; nothing was shown.
            PeerLost, SourceStalled: rank 0 is gone, or does not publish this version; it is no longer shown here.
            Cancelled: it was closed.
        """
        with (
            self._publishing,
            quick_handover(),
            Journey("publish", self.name, version=version, member=self.member.id[:8]) as journey,
        ):
            begun = time.perf_counter()
            self._check(version)
            # A snapshot is read after this returns, so there is nothing to decide about.
            decision = Decision(is_over=True)
            copy_s = 0.0
            if self._snapshot is None:
                decision = self._publish_live(version)
            else:
                copy_s = self._publish_snapshot(self._snapshot, version)
            wall_s = self._took_s = time.perf_counter() - begun
            offer = self._offer
            report = PublishReport(
                name=self.name,
                version=version,
                mode=self.mode,
                nbytes=self.nbytes,
                wall_s=wall_s,
                copy_s=copy_s,
                wait_s=0.0 if self._snapshot is not None else wall_s - offer.seconds,
                transform_s=offer.seconds,
                transformed_bytes=offer.transformed.nbytes,
                boundary_bytes=offer.transformed.boundary_bytes,
                exchanged_bytes=offer.moved_bytes,
                committed=decision.committed,
                late=decision.late,
                failed=decision.failed,
            )
            if report.exchanged_bytes:
                journey.received = lambda: {("peer", "exchange"): report.exchanged_bytes}
            journey.outcome = publish_outcome(report)
            return report

    def _check(self, version: int) -> None:
        """Check that the version may come next, and that this group still owns the name."""
        if self._is_closed:
            raise Cancelled("the publisher was closed")
        newest = max(self.version, self.latest)
        if version <= newest:
            message = f"version {version} of {self.name!r} is not above {newest}"
            raise ConfigError(message, hint="versions grow, over restarts too: number on from Publisher.latest")
        if self.rank == 0:
            rank_group.check_alone(self._membership)
        else:
            # Rank 0 may have been restarted since the last version: then this rank belongs to its new run.
            self._run = rank_group.join(self._membership, self.rank, self.world_size, self._run, self._stall_s)

    def _publish_live(self, version: int) -> Decision:
        """Show the live parameters until rank 0 decides that the receivers are done; return the decision."""
        try:
            if self.rank != 0:
                self._begin_live(version)
                return rank_group.decided(self._membership, self._run, version, self._stall_s)
            members = self._membership.look(max_age_s=rank_group.ASK_S)
            expected = [other.member for other in members if other.state.side == "subscriber"]
            # Before the version is announced: a receiver's first report must find a version that expects it.
            self._subscriber_progress.begin(version, expected)
            self._begin_live(version)
            is_gone = partial(self._membership.has_left, max_age_s=rank_group.ASK_S)
            return self._subscriber_progress.wait(version, stall_s=self._stall_s, is_gone=is_gone)
        finally:
            # After an error too: the trainer goes on with the next step, and the parameters change.
            self._withdraw()

    def _begin_live(self, version: int) -> None:
        """Let receivers read the parameters, and the tagged rows once they are filled."""
        local_version = self._local_version
        local_version.begin(version)
        local_version.ready(self._offer.plain_rows)
        # A map made while the device still fills the rows calls them not ready, and receivers then request digests
        # before every read.
        local_version.settle(self._stall_s)
        self._announce(version)
        # After the announcement, so that the plain rows are read while the tagged ones are quantised.
        self._offer.fill(version, self._run, local_version.ready, stall_s=self._stall_s)

    def _publish_snapshot(self, snapshot: VersionSnapshot, version: int) -> float:
        """Copy the parameters and let receivers read the copy; return the seconds of the copy."""
        offer = self._offer
        # Host copies have the tagged rows too, so these must be complete before the copy; else they are served from the
        # device, and receivers may read the plain rows meanwhile.
        if offer.is_copied:
            offer.fill(version, self._run, lambda rows: None, stall_s=self._stall_s)
            copy_s = snapshot.snapshot(version, stall_s=self._stall_s)
            self._announce(version)
            return copy_s
        copy_s = snapshot.snapshot(version, rows=offer.plain_rows, stall_s=self._stall_s)
        self._announce(version)
        try:
            offer.fill(version, self._run, self._local_version.ready, stall_s=self._stall_s)
        except BaseException:
            # Rows that are never ready would keep receivers waiting until their stall deadline.
            self._withdraw()
            raise
        return copy_s

    def _announce(self, version: int) -> None:
        """Tell receivers and the hub that the version can be read here."""
        self.version = version
        self._version_status.post(self._run, version, is_open=True)
        self.member.beat_now()

    def _withdraw(self) -> None:
        """End the reads of the version from this rank."""
        self._local_version.fence()
        self._version_status.post(self._run, self.version, is_open=False)
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
        # The memory first: its owner may free it once this returns, and no peer may read it then.
        self._offer.close()
        if self._snapshot is not None:
            self._snapshot.close()
        self._local_version.close()
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
    """Publish the weights of this rank under a name that subscribers know.

    Args:
        name: of the sync; one group of ranks publishes it.
        params: a module, or tensors by name: whole ones, DTensors, `Shard`s; the part that is on this rank.
        connection: see `join`.
        mode: `live`: receivers read the parameters themselves, and `publish` waits for them. `snapshot`: they read a
            copy, and `publish` waits for the copy alone.
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

    Raises:
        PlanError: parameters cannot be declared, or transformed; names them. BudgetTooSmall: see `memory_bytes`.
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
    if arena:
        to_arenas(params)
    offer = Offer(
        declared(params), transforms, keep_plain=keep_plain, world_size=world_size, copies=copies, memory_bytes=budget
    )
    with contextlib.ExitStack() as stack:
        member, stall_s = joined(stack, connection)
        local_version, snapshot = _serve(stack, offer, member, copies)
        this_rank = Publisher(
            name, member, local_version, snapshot, offer, rank=trainer_rank, world_size=world_size, stall_s=stall_s
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


def _serve(
    stack: contextlib.ExitStack, offer: Offer, member: Member, copies: str | None
) -> tuple[LocalVersion, VersionSnapshot | None]:
    """Return the memory that readers see, registered until the stack is left: the offer's own, or a copy."""
    memories = (*offer.memories, *offer.filled)
    layout = layout_of(offer.rows, member.id, "", memories)
    # A new address for each registration: a planner that knows the old layout must not reuse its descriptors.
    address = secrets.token_hex(8)
    stack.callback(offer.close)
    if copies is None:
        local_version = LocalVersion(replace(layout, address=address), memories, member.links)
        stack.callback(local_version.close)
        return local_version, None
    snapshot = VersionSnapshot(
        layout, offer.memories, member.links, address=address, on_host=copies == "cpu", filled=offer.filled
    )
    stack.callback(snapshot.close)
    return snapshot.local_version, snapshot
