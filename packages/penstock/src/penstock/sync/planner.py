"""The planner for all receivers of a sync.

One member runs it: the publishers' rank 0, or a receiver without publishers.

    part(receiver, layout): find the members that have the version -> request each layout once -> plan_sync for all
    known receivers, again only if a layout changed -> the receiver's part
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.errors import NotFound, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.hub.messages import SyncMember
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import BUCKET_BYTES, SyncPlan, plan_sync
from penstock.sync.local_version import VersionStatus
from penstock.sync.membership import Membership
from penstock.sync.messages import PartRequest, TableReply
from penstock.sync.part_outcome import Granted, LayoutNeeded, NotYet, PartOutcome, Withdrawn

# A plan belongs to one set of sources and receivers. A few plans are kept, because the set changes while a version is
# read: publishers serve first, and receivers after the fence. More plans would only keep old layouts in memory.
_KEPT_PLANS = 4

Terms = Callable[[str, PartRequest, str, int], NotYet | Withdrawn | Granted]
"""Returns the terms of a version without a part. The arguments are the receiver, its request, the epoch and the
version."""


def _no_terms(asker: str, request: PartRequest, epoch: str, version: int) -> Granted:
    return Granted(version=version, epoch=epoch)


LayoutToken = tuple[str, ...]
"""A member and the digest of its layout."""


@dataclass(slots=True)
class _EncodedPlan:
    """A plan, and its encoded parts that were requested so far."""

    plan: SyncPlan
    parts: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The members from which a version can be read."""

    epoch: str
    members: list[SyncMember]


class Planner:
    """The planner, as the module's docstring describes. The server's threads use it.

    One plans at a time, and later receivers are in the next plan.

    Args:
        membership: the members of the sync.
        version_status: this member's versions.
        ours: returns this member's layout, or None before it has one.
        checkpoint: returns the table that a receiver got from its planner. If None, the table is derived from the
            layouts.
        terms: returns the terms of a version for a receiver: when it may go live, or why it may not.
        bucket_bytes: size of the plans' buckets in bytes.
    """

    def __init__(
        self,
        membership: Membership,
        version_status: VersionStatus,
        ours: Callable[[], Layout | None],
        *,
        checkpoint: Callable[[], TableReply | None] = lambda: None,
        terms: Terms = _no_terms,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._membership = membership
        self._version_status = version_status
        self._ours = ours
        self._checkpoint = checkpoint
        self._terms = terms
        self._bucket_bytes = bucket_bytes
        # There are two locks. Planning takes seconds and asks other members, while `_lock` guards only the tables. A
        # receiver with an unknown layout therefore gets its answer during another receiver's planning.
        self._planning = threading.Lock()
        self._lock = threading.Lock()
        # Layouts of sources by their digest, as the hub lists it, and layouts of receivers by member, with the digest.
        self._layouts_by_digest: dict[str, Layout] = {}
        self._wants: dict[str, tuple[str, Layout]] = {}
        self._plans: OrderedDict[tuple[tuple[LayoutToken, ...], tuple[LayoutToken, ...]], _EncodedPlan] = OrderedDict()

    def part(self, asker: str, request: PartRequest) -> PartOutcome:
        """Return a receiver's part of the plan with its sources.

        Raises:
            PlanError: the receiver's tensors do not match the sources'. The message lists the differences.
            StaleDescriptor: the version is past, and no member has it.
            NotFound: a source's layout is not the one that it reported.
        """
        # Do this before anything that may fail, so that the layout stays known and the receiver need not send it again.
        if not self._learn(asker, request):
            return LayoutNeeded()
        # A source that registers its memory again first reports its new layout.
        members = self._membership.look(max_age_s=0.0 if request.is_outdated else self._membership.timing.member_list_s)
        epoch = self._epoch_of(members)
        ranks = _ranks(members, epoch)
        if request.is_ahead and ranks and not _missing(ranks):
            # Layouts do not change between versions, so the plan for the next version is known before it is published.
            plan, raw = self._planned(asker, members, ranks)
            return Granted(epoch=epoch, key=plan.plan.key, part=None if request.have_key == plan.plan.key else raw)
        versions = [request.version] if request.version >= 0 else self._newest_first(members, request.refused)
        if not versions:
            return NotYet(why="no version is published yet")
        for version in versions:
            terms = self._terms(asker, request, epoch, version)
            # A member's last heartbeat may name a version that was withdrawn since. The previous version is then the
            # newest.
            if not isinstance(terms, Withdrawn):
                break
        if not isinstance(terms, Granted):
            return terms
        try:
            sources = self._sources(members, asker, version, request)
        except StaleDescriptor:
            # The list may be half a second old, and a receiver may have finished this version since. Look again before
            # declaring the version lost.
            members = self._membership.look()
            sources = self._sources(members, asker, version, request)
        if isinstance(sources, NotYet):
            return sources
        try:
            plan, raw = self._planned(asker, members, sources.members)
        except PlanError as error:
            if not _missing(sources.members) and sources.members[0].state.side == "publisher":
                raise
            # Receivers serve only the tensors that they received, which may be fewer than this receiver needs. For this
            # receiver the version is then lost, but its request was right.
            message = f"the members with version {version} lack tensors that are required: {error.message}"
            raise StaleDescriptor(message) from error
        # The part has megabytes and is the same for every version of a plan, so send it once.
        has_part = request.have_key == plan.plan.key
        return replace(terms, epoch=sources.epoch, key=plan.plan.key, part=None if has_part else raw)

    def table(self) -> TableReply:
        """Return names, dtypes and shapes of the tensors of all publishers.

        On a receiver, return the table that it received.

        Raises:
            NotFound: no publisher has reported a layout yet, or ranks are missing.
        """
        known = self._checkpoint()
        if known is not None:
            return known
        members = self._membership.look(max_age_s=self._membership.timing.member_list_s)
        holders = _ranks(members, self._epoch_of(members))
        if not holders or _missing(holders):
            raise NotFound(_missing(holders) or "no publisher has reported its tensors yet")
        rows: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for _, layout in self._layouts(holders):
            # Convert each form once, because a layout has hundreds of thousands of rows and a handful of forms.
            specs = [(form.tag, (str(form.dtype), form.shape)) for form in layout.forms]
            for name, i in zip(layout.names, layout.form.tolist(), strict=True):
                rows.setdefault((name, specs[i][0]), specs[i][1])
        return TableReply(
            names=tuple(name for name, _ in rows),
            dtypes=tuple(dtype for dtype, _ in rows.values()),
            shapes=tuple(shape for _, shape in rows.values()),
            tags=tuple(tag for _, tag in rows) if any(tag for _, tag in rows) else (),
        )

    def explain(self) -> str:
        """Describe the newest plan as text."""
        with self._lock:
            newest = next(reversed(self._plans.values()), None)
        return "no plan was made yet" if newest is None else newest.plan.explain()

    def _learn(self, asker: str, request: PartRequest) -> bool:
        """Return whether the requester's layout is known, from before or from this request."""
        with self._lock:
            known = self._wants.get(asker)
        # The layout of a large model takes megabytes, so a receiver sends it once, and later sends its digest.
        if known is not None and known[0] == request.digest:
            return True
        if request.layout is None:
            return False
        layout = layout_in(request, asker)
        with self._lock:
            self._wants[asker] = request.digest, layout
        return True

    def _epoch_of(self, members: Sequence[SyncMember]) -> str:
        """Return the epoch of this member's version, or of the newest publisher."""
        if self._version_status.now.epoch:
            return self._version_status.now.epoch
        return next((member.state.epoch for member in reversed(members) if member.state.epoch == member.member), "")

    def _newest_first(self, members: Sequence[SyncMember], refused: Sequence[int]) -> list[int]:
        """Return the versions of the epoch that members have, the newest first.

        Args:
            members: the members of the sync.
            refused: versions that the receiver knows to be withdrawn. They are left out if this member does not have
                them.
        """
        # Ask about all members, because this member may be a receiver that is behind others.
        epoch, ours = self._epoch_of(members), self._version_status.now.version
        theirs = {member.state.version for member in members if member.state.epoch == epoch}
        # The hub lists a publisher for a while after its death, with a version that may have been withdrawn since. This
        # member may not know that, but the receiver does, and would raise VersionRefused for it a second time.
        theirs -= {version for version in refused if version > ours}
        return sorted({version for version in (ours, *theirs) if version >= 0}, reverse=True)

    def _sources(
        self, members: Sequence[SyncMember], asker: str, version: int, request: PartRequest
    ) -> _Sources | NotYet:
        """Return the epoch of a version and its sources, or the reason to wait.

        Sources are the publishers while they serve the version, and afterwards the receivers that have it.
        """
        epoch, now = self._epoch_of(members), self._version_status.now
        ranks = [rank for rank in _ranks(members, epoch) if rank.member not in request.without]
        is_ours = (
            now.is_open and now.version == version and any(rank.member == self._membership.member.id for rank in ranks)
        )
        # The publishers are complete and consistent. Prefer them until the receiver reports that one of them failed.
        if is_ours and not request.without:
            why = _missing(ranks)
            return NotYet(version=version, epoch=epoch, why=why) if why else _Sources(epoch, ranks)
        having = [
            member
            for member in members
            if member.state.side == "subscriber"
            and (member.state.epoch, member.state.version, member.state.state) == (epoch, version, "open")
            and member.member not in (asker, *request.without)
        ]
        available = having + (ranks if is_ours else [])
        if available:
            return _Sources(epoch, available)
        # There is no source now. Return a reason to wait if there is one, because an error would end the receiver's
        # update.
        if version > now.version:
            return NotYet(version=version, epoch=epoch, why=f"version {version} is not published yet")
        if any(member.state.state == "updating" and member.member != asker for member in members):
            why = f"other receivers are reading version {version} now and may serve it afterwards"
            return NotYet(version=version, epoch=epoch, why=why)
        raise StaleDescriptor(f"no member has version {version} any more", hint="update to the next version")

    def _planned(
        self, asker: str, members: Sequence[SyncMember], holders: list[SyncMember]
    ) -> tuple[_EncodedPlan, bytes]:
        """Return the plan with these sources for all known receivers, and the requester's encoded part."""
        # Make one plan at a time. Receivers ask for the same version within milliseconds, and the second must use the
        # plan of the first.
        with self._planning:
            sources = self._layouts(holders)
            giving = {source.member for source, _ in sources}
            # Plan for all known receivers and not only for the requester. With a plan for each alone, all would read
            # from the same sources in the same order. Receivers that left are dropped.
            there = {member.member for member in members if member.state.side == "subscriber"} | {asker}
            with self._lock:
                is_unlisted = any(member not in there for member in self._wants)
            if is_unlisted:
                # The list may be half a second old, and must not make a receiver that has just joined look like one
                # that left.
                there |= {member.member for member in self._membership.look() if member.state.side == "subscriber"}
            with self._lock:
                self._wants = {member: want for member, want in self._wants.items() if member in there}
                wants = {member: want for member, want in self._wants.items() if member not in giving}
            # The token contains the address, because this member's layout may be newer than the list.
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
        """Return the plan for these layouts. The first request creates it. Only one thread may call this at a time."""
        token = source_token, tuple((member, digest) for member, (digest, _) in sorted(wants.items()))
        cached = self._plans.get(token)
        if cached is None:
            try:
                plan = self._plan(layouts, [wants[member][1] for member in sorted(wants)])
            except PlanError:
                # A receiver that does not match must not block the others. Each gets only its own error.
                plan = self._plan(
                    layouts,
                    [wants[receiver][1] for receiver in sorted(wants) if self._fits(layouts, wants[receiver][1])],
                )
            cached = self._plans[token] = _EncodedPlan(plan)
        with self._lock:
            self._plans.move_to_end(token)
            while len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        if asker not in cached.plan.receivers:
            # The requester was left out because it does not match. Planning for it alone raises the error with the
            # reasons.
            return _EncodedPlan(self._plan(layouts, [wants[asker][1]]))
        return cached

    def _plan(self, layouts: Sequence[Layout], wants: Sequence[Layout]) -> SyncPlan:
        return plan_sync(layouts, wants, bucket_bytes=self._bucket_bytes)

    def _fits(self, layouts: Sequence[Layout], want: Layout) -> bool:
        """Return whether these layouts can serve a receiver."""
        try:
            self._plan(layouts, [want])
        except PlanError:
            return False
        return True

    def _layouts(self, holders: Sequence[SyncMember]) -> list[tuple[SyncMember, Layout]]:
        """Return the members' layouts, which are requested once for each digest. Receivers that are gone are left out.

        Raises:
            PeerLost, SourceStalled: a publisher is gone or silent.
            StaleDescriptor: no source is left.
        """
        layouts = []
        for holder in holders:
            layout = self._ours() if holder.member == self._membership.member.id else None
            with self._lock:
                layout = layout or self._layouts_by_digest.get(holder.state.layout)
            if layout is None:
                try:
                    layout = self._membership.ask(holder.member, lambda sync_client: sync_client.layout())
                except (PeerLost, SourceStalled):
                    # Every publisher rank has elements that no other source has, but one of several receivers can be
                    # left out.
                    if holder.state.side == "publisher":
                        raise
                    continue
                if layout.digest() != holder.state.layout:
                    # The layout changed between the report to the hub and this request. The caller asks again.
                    raise NotFound(f"{holder.member} has a different layout from the one that it reported")
                with self._lock:
                    self._layouts_by_digest[holder.state.layout] = layout
            layouts.append((holder, layout))
        # Drop layouts of members that left, because each can be megabytes and a long run sees many restarts.
        with self._lock:
            current = {member.state.layout for member in self._membership.look(max_age_s=60.0)}
            self._layouts_by_digest = {
                digest: layout for digest, layout in self._layouts_by_digest.items() if digest in current
            }
        if not layouts:
            raise StaleDescriptor("the members that had this version are gone", hint="update to the next version")
        return layouts


def layout_in(request: PartRequest, asker: str) -> Layout:
    """Return the checked layout from a receiver's request, which must contain one.

    Raises:
        PlanError: it belongs to another member, its digest differs from the request's, or it is invalid.
    """
    assert request.layout is not None
    layout = decode(request.layout, Layout)
    # The layout comes from another process. With another member's id it would give that member a wrong part.
    if layout.member != asker or layout.digest() != request.digest:
        raise PlanError(
            f"the layout that {asker} sent belongs to {layout.member}, or its digest differs from the request's"
        )
    layout.check()
    return layout


def _ranks(members: Sequence[SyncMember], epoch: str) -> list[SyncMember]:
    """Return the publishers of an epoch, in the order of their ranks."""
    publishers = [
        member
        for member in members
        if member.state.side == "publisher" and member.state.epoch == epoch and member.state.layout
    ]
    return sorted(publishers, key=lambda publisher: publisher.state.rank)


def _missing(ranks: Sequence[SyncMember]) -> str:
    """Return a message about missing ranks of an epoch. It is empty if none is missing, or if these are receivers."""
    # Receivers are not ranks of the trainer. Planning checks whether they have all elements.
    if not ranks or ranks[0].state.side != "publisher":
        return ""
    there = {rank.state.rank for rank in ranks}
    absent = [str(rank) for rank in range(ranks[0].state.world_size) if rank not in there]
    return f"publisher ranks {', '.join(absent[:8])} of {ranks[0].state.world_size} are missing" if absent else ""
