"""The planner for all receivers of a sync, on the publishers' rank 0, or on a receiver if there is no publisher."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.errors import NotFound, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.hub.messages import SyncMember
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import BUCKET_BYTES, SyncPlan, plan_sync
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.outcome import Granted, LayoutNeeded, NotYet, PartOutcome, Withdrawn
from penstock.sync.membership import Membership
from penstock.sync.messages import PartRequest, TableReply

# Number of cached plans. A few plans are enough, because a version's sources are publishers and later only receivers.
_KEPT_PLANS = 4

Terms = Callable[[str, PartRequest, str, int], NotYet | Withdrawn | Granted]
"""Returns the terms of a version without a part. The arguments are the receiver, its request, the epoch and the
version."""


LayoutToken = tuple[str, ...]


class _EncodedPlan(msgspec.Struct):
    plan: SyncPlan
    parts: dict[str, bytes] = msgspec.field(default_factory=dict)


class Planner(msgspec.Struct, eq=False, dict=True):
    """The planner of a member, whose layout is `ours`. Any thread may call the planner. One thread plans at a time."""

    membership: Membership
    version_status: VersionStatus
    ours: Callable[[], Layout | None]
    checkpoint: Callable[[], TableReply | None] = lambda: None
    terms: Terms = lambda asker, request, epoch, version: Granted(version=version, epoch=epoch)
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        self._plan = partial(plan_sync, bucket_bytes=self.bucket_bytes)
        # Planning takes seconds and holds only `_planning`. `_lock` guards the tables, so that no request waits.
        self._planning = threading.Lock()
        self._lock = threading.Lock()
        # Layouts of sources by their digest, and each receiver's layout with its digest.
        self._layouts_by_digest: dict[str, Layout] = {}
        self._wants: dict[str, tuple[str, Layout]] = {}
        self._plans: OrderedDict[tuple[tuple[LayoutToken, ...], tuple[LayoutToken, ...]], _EncodedPlan] = OrderedDict()

    def part(self, asker: str, request: PartRequest) -> PartOutcome:
        """Return a receiver's part of the plan. Raise PlanError if the tensors do not match."""
        # Store the layout before any step that may fail, so that the receiver need not send it again.
        if not self._learn(asker, request):
            return LayoutNeeded()
        # For an outdated request, fetch a new member list. A source reports its new layout before it serves from it.
        members = self.membership.look(max_age_s=0.0 if request.is_outdated else self.membership.timing.member_list_s)
        epoch = self._epoch_of(members)
        ranks = _ranks(members, epoch)
        if request.is_ahead and ranks and not _missing(ranks):
            plan, raw = self._planned(asker, members, ranks)
            return Granted(epoch=epoch, key=plan.plan.key, part=None if request.have_key == plan.plan.key else raw)
        versions = [request.version] if request.version >= 0 else self._newest_first(members, request.refused)
        if not versions:
            return NotYet(why="no version is published yet")
        for version in versions:
            terms = self.terms(asker, request, epoch, version)
            # Skip withdrawn versions, which may still be in the list.
            if not isinstance(terms, Withdrawn):
                break
        if not isinstance(terms, Granted):
            return terms
        try:
            sources = self._sources(members, asker, version, request)
        except StaleDescriptor:
            # Fetch the list again, because another receiver may have finished this version in the meantime.
            members = self.membership.look()
            sources = self._sources(members, asker, version, request)
        if isinstance(sources, NotYet):
            return sources
        try:
            plan, raw = self._planned(asker, members, sources)
        except PlanError as error:
            if not _missing(sources) and sources[0].state.side == "publisher":
                raise
            # A receiver serves only the tensors that it received, so the request may succeed with other sources.
            message = f"the members with version {version} lack tensors that are required: {error.message}"
            raise StaleDescriptor(message) from error
        # A part takes several megabytes and is the same for every version, so send it only once.
        has_part = request.have_key == plan.plan.key
        return msgspec.structs.replace(
            terms, epoch=self._epoch_of(members), key=plan.plan.key, part=None if has_part else raw
        )

    def table(self) -> TableReply:
        """Return the table of all publishers' tensors. Raise NotFound while ranks are missing."""
        known = self.checkpoint()
        if known is not None:
            return known
        members = self.membership.look(max_age_s=self.membership.timing.member_list_s)
        holders = _ranks(members, self._epoch_of(members))
        if not holders or _missing(holders):
            raise NotFound(_missing(holders) or "no publisher has reported its tensors yet")
        rows: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for _, layout in self._layouts(holders):
            specs = [(form.tag, (str(form.dtype), form.shape)) for form in layout.forms]
            for name, i in zip(layout.names, layout.form.tolist(), strict=True):
                rows.setdefault((name, specs[i][0]), specs[i][1])
        return TableReply(
            names=tuple(name for name, _ in rows),
            dtypes=tuple(dtype for dtype, _ in rows.values()),
            shapes=tuple(shape for _, shape in rows.values()),
            tags=tuple(tag for _, tag in rows) if any(tag for _, tag in rows) else (),
        )

    def _learn(self, asker: str, request: PartRequest) -> bool:
        with self._lock:
            known = self._wants.get(asker)
        if known is not None and known[0] == request.digest:
            return True
        if request.layout is None:
            return False
        layout = layout_in(request, asker)
        with self._lock:
            self._wants[asker] = request.digest, layout
        return True

    def _epoch_of(self, members: Sequence[SyncMember]) -> str:
        if self.version_status.now.epoch:
            return self.version_status.now.epoch
        return next((member.state.epoch for member in reversed(members) if member.state.epoch == member.member), "")

    def _newest_first(self, members: Sequence[SyncMember], refused: Sequence[int]) -> list[int]:
        epoch, ours = self._epoch_of(members), self.version_status.now.version
        theirs = {member.state.version for member in members if member.state.epoch == epoch}
        # Skip withdrawn versions, because a dead publisher stays listed for a while with its last version.
        theirs -= {version for version in refused if version > ours}
        return sorted({version for version in (ours, *theirs) if version >= 0}, reverse=True)

    def _sources(
        self, members: Sequence[SyncMember], asker: str, version: int, request: PartRequest
    ) -> list[SyncMember] | NotYet:
        epoch, now = self._epoch_of(members), self.version_status.now
        ranks = [rank for rank in _ranks(members, epoch) if rank.member not in request.without]
        is_ours = (
            now.is_open and now.version == version and any(rank.member == self.membership.member.id for rank in ranks)
        )
        if is_ours and not request.without:
            why = _missing(ranks)
            return NotYet(version=version, epoch=epoch, why=why) if why else ranks
        having = [
            member
            for member in members
            if member.state.side == "subscriber"
            and (member.state.epoch, member.state.version, member.state.state) == (epoch, version, "open")
            and member.member not in (asker, *request.without)
        ]
        available = having + (ranks if is_ours else [])
        if available:
            return available
        # Return a reason to wait if possible, because an error would end the receiver's update.
        if version > now.version:
            return NotYet(version=version, epoch=epoch, why=f"version {version} is not published yet")
        if any(member.state.state == "updating" and member.member != asker for member in members):
            why = f"other receivers are reading version {version} now and may serve it afterwards"
            return NotYet(version=version, epoch=epoch, why=why)
        raise StaleDescriptor(f"no member has version {version} any more", hint="update to the next version")

    def _planned(
        self, asker: str, members: Sequence[SyncMember], holders: list[SyncMember]
    ) -> tuple[_EncodedPlan, bytes]:
        # Receivers request the same version within milliseconds, so let later requests reuse the plan of the first.
        with self._planning:
            sources = self._layouts(holders)
            giving = {source.member for source, _ in sources}
            # Plan for all known receivers at once. In separate plans, all would read sources in the same order.
            there = {member.member for member in members if member.state.side == "subscriber"} | {asker}
            with self._lock:
                is_unlisted = any(member not in there for member in self._wants)
            if is_unlisted:
                # A receiver that has just joined may be missing from the list.
                there |= {member.member for member in self.membership.look() if member.state.side == "subscriber"}
            with self._lock:
                self._wants = {member: want for member, want in self._wants.items() if member in there}
                wants = {member: want for member, want in self._wants.items() if member not in giving}
            # Include the address in the token, because the list may be older than this member's layout.
            token = tuple((source.member, source.state.layout, layout.address) for source, layout in sources)
            plan = self._cached_plan(asker, token, [layout for _, layout in sources], wants)
            if asker not in plan.parts:
                plan.parts[asker] = encode(plan.plan.part(plan.plan.receivers.index(asker)))
            return plan, plan.parts[asker]

    def _cached_plan(
        self,
        asker: str,
        source_token: tuple[LayoutToken, ...],
        layouts: Sequence[Layout],
        wants: dict[str, tuple[str, Layout]],
    ) -> _EncodedPlan:
        """Return the plan from these layouts to the receivers. The caller holds the planning lock."""
        token = source_token, tuple((member, digest) for member, (digest, _) in sorted(wants.items()))
        cached = self._plans.get(token)
        if cached is None:
            wanted = [layout for _, (_, layout) in sorted(wants.items())]
            try:
                plan = self._plan(layouts, wanted)
            except PlanError:
                # A receiver with mismatching tensors must not block the other receivers.
                plan = self._plan(layouts, [layout for layout in wanted if self._fits(layouts, layout)])
            cached = self._plans[token] = _EncodedPlan(plan)
        with self._lock:
            self._plans.move_to_end(token)
            while len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        if asker not in cached.plan.receivers:
            # The requester's tensors do not match, so plan for the requester alone to raise the error.
            return _EncodedPlan(self._plan(layouts, [wants[asker][1]]))
        return cached

    def _fits(self, layouts: Sequence[Layout], want: Layout) -> bool:
        try:
            self._plan(layouts, [want])
        except PlanError:
            return False
        return True

    def _layouts(self, holders: Sequence[SyncMember]) -> list[tuple[SyncMember, Layout]]:
        """Return the layouts of members, except unreachable receivers. Raise StaleDescriptor if no member remains."""
        layouts = []
        for holder in holders:
            layout = self.ours() if holder.member == self.membership.member.id else None
            with self._lock:
                layout = layout or self._layouts_by_digest.get(holder.state.layout)
            if layout is None:
                try:
                    layout = self.membership.ask(holder.member, lambda sync_client: sync_client.layout())
                except (PeerLost, SourceStalled):
                    # Only a publisher rank has elements that no other source has.
                    if holder.state.side == "publisher":
                        raise
                    continue
                if layout.digest() != holder.state.layout:
                    # The member's layout changed after its report to the hub.
                    raise NotFound(f"{holder.member} has a different layout from the one that it reported")
                with self._lock:
                    self._layouts_by_digest[holder.state.layout] = layout
            layouts.append((holder, layout))
        with self._lock:
            current = {member.state.layout for member in self.membership.look(max_age_s=60.0)}
            self._layouts_by_digest = {
                digest: layout for digest, layout in self._layouts_by_digest.items() if digest in current
            }
        if not layouts:
            raise StaleDescriptor("the members that had this version are gone", hint="update to the next version")
        return layouts


def layout_in(request: PartRequest, asker: str) -> Layout:
    """Return the layout in a receiver's request. Raise PlanError if the layout is invalid or another member's."""
    assert request.layout is not None
    layout = decode(request.layout, Layout)
    # Reject a layout with another member's id, which would lead to a wrong plan for that member.
    if layout.member != asker or layout.digest() != request.digest:
        raise PlanError(
            f"the layout that {asker} sent belongs to {layout.member}, or its digest differs from the request's"
        )
    layout.check()
    return layout


def _ranks(members: Sequence[SyncMember], epoch: str) -> list[SyncMember]:
    publishers = [
        member
        for member in members
        if member.state.side == "publisher" and member.state.epoch == epoch and member.state.layout
    ]
    return sorted(publishers, key=lambda publisher: publisher.state.rank)


def _missing(ranks: Sequence[SyncMember]) -> str:
    # If the sources are receivers, no rank is missing, because planning checks whether all elements are available.
    if not ranks or ranks[0].state.side != "publisher":
        return ""
    there = {rank.state.rank for rank in ranks}
    absent = [str(rank) for rank in range(ranks[0].state.world_size) if rank not in there]
    return f"publisher ranks {', '.join(absent[:8])} of {ranks[0].state.world_size} are missing" if absent else ""
