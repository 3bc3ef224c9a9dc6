"""Plan for all receivers of a sync, in one member: the publishers' rank 0, or else a receiver.

In: who takes part (`membership`), their layouts, asked at their doors; receivers' questions. Out: their parts; the
table.
Not here: the plan itself (`plan.sync`), what a receiver does with its part (`sync.receive.subscriber`).

    part(receiver, layout): who can give the version? -> their layouts, once each -> plan_sync of all receivers known,
    again only where one of these changed -> its part
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import NotFound, PeerLost, PlanError, SourceStalled, StaleDescriptor
from penstock.hub.sync_messages import PartReply, PartRequest, SyncMember, TableReply
from penstock.plan.balance import BUCKET_BYTES
from penstock.plan.columns import decode, encode
from penstock.plan.layout import Layout
from penstock.plan.sync import SyncPlan, plan_sync
from penstock.sync.membership import Membership
from penstock.sync.version_status import VersionStatus

LOOK_S = 0.5
"""How old the planner's view of who takes part may be."""
_KEPT_PLANS = 4

Told = tuple[str, str]
"""A member and the digest of its layout."""


@dataclass(slots=True)
class _Plan:
    """A plan, and the parts that were asked for."""

    plan: SyncPlan
    parts: dict[str, bytes] = field(default_factory=dict)


class Planner:
    """See the module. Used by the door's threads: one plans at a time, who comes meanwhile is in the next plan.

    Args:
        roster: who takes part.
        board: our own versions.
        ours: our own layout, once there is one.
        told: the checkpoint as a receiver was told it.
        bucket_bytes: of plans.
    """

    def __init__(
        self,
        membership: Membership,
        version_status: VersionStatus,
        ours: Callable[[], Layout | None],
        *,
        told: Callable[[], TableReply | None] = lambda: None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._membership, self._version_status, self._ours, self._told = membership, version_status, ours, told
        self._bucket_bytes = bucket_bytes
        self._planning, self._lock = threading.Lock(), threading.Lock()
        self._held: dict[str, Layout] = {}
        self._wants: dict[str, tuple[str, Layout]] = {}
        self._plans: OrderedDict[tuple[tuple[Told, ...], tuple[Told, ...]], _Plan] = OrderedDict()

    def part(self, asker: str, request: PartRequest) -> PartReply:
        """Return the part that a receiver reads, and its sources.

        Raises:
            PlanError: what it wants is not what is held; lists what differs.
            StaleDescriptor: that version is past, and nobody else has it. NotFound: it is not known at all.
        """
        if not self._learn(asker, request):
            return PartReply(needs_layout=True)
        members = self._membership.look(max_age_s=LOOK_S)
        version = request.version if request.version >= 0 else self._newest(members)
        if version < 0:
            return PartReply(not_yet="no version is published yet")
        try:
            run, holders = self._holders(members, asker, version, request)
        except StaleDescriptor:
            members = self._membership.look()  # somebody may have it since
            run, holders = self._holders(members, asker, version, request)
        if isinstance(holders, str):
            return PartReply(version=version, run=run, not_yet=holders)
        try:
            made, raw = self._planned(asker, members, holders)
        except PlanError as error:
            if not _missing(holders) and holders[0].state.side == "publisher":
                raise
            # Receivers have what they wanted, which need not be all that this one wants.
            message = f"the members with version {version} lack tensors that are required: {error.message}"
            raise StaleDescriptor(message) from error
        same = request.have_key == made.plan.key
        return PartReply(version=version, run=run, key=made.plan.key, part=None if same else raw)

    def table(self) -> TableReply:
        """Names, dtypes and shapes of what the publishers hold together; of a receiver, as it was told.

        Raises:
            NotFound: nobody holds anything yet, or not all publishers are there.
        """
        told = self._told()
        if told is not None:
            return told
        members = self._membership.look(max_age_s=LOOK_S)
        holders = _ranks(members, self._run(members))
        if not holders or _missing(holders):
            raise NotFound(_missing(holders) or "nobody holds anything yet")
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

    def explain(self) -> str:
        """The newest plan in words."""
        with self._lock:
            made = next(reversed(self._plans.values()), None)
        return "nothing was planned yet" if made is None else made.plan.explain()

    def _learn(self, asker: str, request: PartRequest) -> bool:
        """Return whether the requester's layout is known, from before or by this request."""
        with self._lock:
            known = self._wants.get(asker)
        if known is not None and known[0] == request.digest:
            return True
        if request.layout is None:
            return False
        layout = decode(request.layout, Layout)
        if layout.member != asker or layout.digest() != request.digest:
            raise PlanError(f"{asker} sent a layout of {layout.member}, or one whose digest differs from its request")
        layout.check()
        with self._lock:
            self._wants[asker] = request.digest, layout
        return True

    def _run(self, members: Sequence[SyncMember]) -> str:
        """Return the run of the versions: our own as a publisher, or that of the version we have."""
        if self._version_status.now.run:
            return self._version_status.now.run
        return next((one.state.run for one in reversed(members) if one.state.run == one.member), "")

    def _newest(self, members: Sequence[SyncMember]) -> int:
        run = self._run(members)
        told = [one.state.version for one in members if one.state.run == run]
        return max([self._version_status.now.version, *told])

    def _holders(
        self, members: Sequence[SyncMember], asker: str, version: int, request: PartRequest
    ) -> tuple[str, list[SyncMember] | str]:
        """The run of a version and who can give it: the publishers while they can, else receivers that have it; or why
        it must be waited for."""
        run, now = self._run(members), self._version_status.now
        ranks = [one for one in _ranks(members, run) if one.member not in request.without]
        is_ours = (
            now.is_open and now.version == version and any(one.member == self._membership.member.id for one in ranks)
        )
        if is_ours and not request.without:
            return run, _missing(ranks) or ranks
        having = [
            one
            for one in members
            if one.state.side == "subscriber"
            and (one.state.run, one.state.version, one.state.state) == (run, version, "open")
            and one.member not in (asker, *request.without)
        ]
        found = having + (ranks if is_ours else [])
        if found:
            return run, found
        if version > now.version:
            return run, f"version {version} is not published yet"
        if any(one.state.state == "updating" and one.member != asker for one in members):
            return run, f"version {version} is being taken by others, who may give it then"
        raise StaleDescriptor(f"no member has version {version} any more; update to the next one")

    def _planned(self, asker: str, members: Sequence[SyncMember], holders: list[SyncMember]) -> tuple[_Plan, bytes]:
        """The plan of these holders for all receivers known, and the asker's part."""
        with self._planning:
            found = self._layouts(holders)
            giving = {one.member for one, _ in found}
            there = {one.member for one in members if one.state.side == "subscriber"} | {asker}
            with self._lock:
                self._wants = {member: want for member, want in self._wants.items() if member in there}
                wants = {member: want for member, want in self._wants.items() if member not in giving}
            token = tuple((one.member, one.state.layout) for one, _ in found)
            made = self._made(asker, token, [layout for _, layout in found], wants)
            if asker not in made.parts:
                made.parts[asker] = encode(made.plan.part(made.plan.receivers.index(asker)))
            return made, made.parts[asker]

    def _made(
        self,
        asker: str,
        held_token: tuple[Told, ...],
        layouts: Sequence[Layout],
        wants: dict[str, tuple[str, Layout]],
    ) -> _Plan:
        token = held_token, tuple((member, digest) for member, (digest, _) in sorted(wants.items()))
        made = self._plans.get(token)
        if made is None:
            try:
                plan = self._plan(layouts, [wants[member][1] for member in sorted(wants)])
            except PlanError:
                # One that does not fit must not keep the others from theirs: each hears of its own faults alone.
                plan = self._plan(
                    layouts, [wants[one][1] for one in sorted(wants) if self._fits(layouts, wants[one][1])]
                )
            made = self._plans[token] = _Plan(plan)
        with self._lock:
            self._plans.move_to_end(token)
            while len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        if asker not in made.plan.receivers:
            return _Plan(self._plan(layouts, [wants[asker][1]]))  # raises what does not fit
        return made

    def _plan(self, layouts: Sequence[Layout], wants: Sequence[Layout]) -> SyncPlan:
        return plan_sync(layouts, wants, bucket_bytes=self._bucket_bytes)

    def _fits(self, layouts: Sequence[Layout], want: Layout) -> bool:
        """Return whether a receiver can be served."""
        try:
            self._plan(layouts, [want])
        except PlanError:
            return False
        return True

    def _layouts(self, holders: Sequence[SyncMember]) -> list[tuple[SyncMember, Layout]]:
        """Return the members' layouts, requested once for each digest; receivers that are gone are left out.

        Raises:
            PeerLost, SourceStalled: a publisher is gone, or silent. StaleDescriptor: nobody is left.
        """
        found = []
        for one in holders:
            layout = self._ours() if one.member == self._membership.member.id else None
            with self._lock:
                layout = layout or self._held.get(one.state.layout)
            if layout is None:
                try:
                    layout = self._membership.ask(one.member, lambda sync_client: sync_client.layout())
                except (PeerLost, SourceStalled):
                    if one.state.side == "publisher":
                        raise
                    continue
                if layout.digest() != one.state.layout:
                    raise NotFound(f"{one.member} has a different layout than it reported")
                with self._lock:
                    self._held[one.state.layout] = layout
            found.append((one, layout))
        with self._lock:
            current = {one.state.layout for one in self._membership.look(max_age_s=60.0)}
            self._held = {digest: layout for digest, layout in self._held.items() if digest in current}
        if not found:
            raise StaleDescriptor("the members that had this version are gone; update to the next one")
        return found


def _ranks(members: Sequence[SyncMember], run: str) -> list[SyncMember]:
    """The publishers of a run, by rank."""
    found = [one for one in members if one.state.side == "publisher" and one.state.run == run and one.state.layout]
    return sorted(found, key=lambda one: one.state.rank)


def _missing(ranks: Sequence[SyncMember]) -> str:
    """Return the ranks of a run that are absent; empty: none is, or the ranks are receivers."""
    if not ranks or ranks[0].state.side != "publisher":
        return ""
    there = {one.state.rank for one in ranks}
    absent = [str(rank) for rank in range(ranks[0].state.world_size) if rank not in there]
    return f"publisher ranks {', '.join(absent[:8])} of {ranks[0].state.world_size} are not there" if absent else ""
