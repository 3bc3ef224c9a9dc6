"""Plans for receivers: parts are reused, and a receiver's faults do not affect others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.errors import NotFound, PeerLost, PlanError, StaleDescriptor
from penstock.hub.messages import SyncMember, SyncState
from penstock.plan.layout import Layout, decode, encode
from penstock.plan.sync import ReceiverPlan
from penstock.sync.commit.announced import VersionStatus
from penstock.sync.commit.outcome import Granted, LayoutNeeded, NotYet, Withdrawn
from penstock.sync.messages import PartRequest
from penstock.sync.planner import Planner
from penstock.sync.shards import Shard, declared, layout_of, regions_of
from penstock.timing import Timing


def layout(
    member: str, *, start: int = 0, stop: int = 8, name: str = "w", dtype: torch.dtype = torch.float32
) -> Layout:
    tensor = torch.zeros(stop - start, 4, dtype=dtype)
    rows = declared({name: Shard(tensor=tensor, global_shape=(8, 4), offset=(start, 0))})
    return layout_of(rows, member, member, regions_of(rows))


class Group:
    """Members and their layouts, as `Membership` lists them."""

    key = "0" * 32
    timing = Timing()

    def __init__(self, us: str) -> None:
        self.member, self.id = self, us
        self.members: dict[str, SyncMember] = {}
        self.layouts: dict[str, Layout] = {}
        self.gone: set[str] = set()

    def add(self, held: Layout, **state: Any) -> None:
        reported = SyncState(name="p", layout=held.digest(), **state)
        self.members[held.member] = SyncMember(
            member=held.member, host="h", doors=("unix:///d",), called="", since=0.0, seen=0.0, state=reported
        )
        self.layouts[held.member] = held

    def look(self, *, max_age_s: float = 0.0) -> tuple[SyncMember, ...]:
        return tuple(self.members.values())

    def ask(self, member: str, question: Callable[[Any], Any], *, line: str = "") -> Any:
        if member in self.gone:
            raise PeerLost("gone")
        held = self.layouts[member]

        class Talking:
            def layout(self) -> Layout:
                return held

        return question(Talking())


@pytest.fixture
def group() -> Group:
    """Two publisher ranks, of which the first is this process."""
    found = Group("p0")
    for rank in (0, 1):
        held = layout(f"p{rank}", start=4 * rank, stop=4 * rank + 4)
        found.add(held, side="publisher", epoch="p0", rank=rank, world_size=2, version=3, state="open")
    return found


@pytest.fixture
def version_status() -> VersionStatus:
    found = VersionStatus()
    found.post("p0", 3, is_open=True)
    return found


@pytest.fixture
def planner(group: Group, version_status: VersionStatus) -> Planner:
    return Planner(group, version_status, lambda: group.layouts["p0"])  # type: ignore[arg-type]


def request_part(planner: Planner, want: Layout, version: int = -1, **more: Any) -> Any:
    return planner.part(want.member, PartRequest(version=version, digest=want.digest(), layout=encode(want), **more))


def test_layout_and_plan_are_sent_once(planner: Planner, group: Group) -> None:
    want = layout("s0")
    group.add(want, side="subscriber")
    first = planner.part("s0", PartRequest(version=-1, digest=want.digest()))
    assert first == LayoutNeeded()
    reply = request_part(planner, want)
    assert (reply.version, reply.epoch) == (3, "p0")
    part = decode(reply.part, ReceiverPlan)
    assert part.nbytes == 128 and [part.sources[i] for i in part.source] == ["p0", "p1"]
    again = planner.part("s0", PartRequest(version=3, digest=want.digest(), have_key=reply.key))
    assert again.part is None and again.key == reply.key


def test_plan_is_built_before_publication(group: Group) -> None:
    planner = Planner(group, VersionStatus(), lambda: group.layouts["p0"])  # type: ignore[arg-type]
    want = layout("s0")
    group.add(want, side="subscriber")
    for held in ("p0", "p1"):
        group.add(group.layouts[held], side="publisher", epoch="p0", rank=int(held[1]), world_size=2)
    assert isinstance(request_part(planner, want), NotYet)
    ahead = request_part(planner, want, is_ahead=True)
    assert isinstance(ahead, Granted) and (ahead.version, ahead.epoch) == (-1, "p0")
    assert decode(ahead.part, ReceiverPlan).nbytes == 128
    # The version's part is the same, and is not sent again.
    planner.version_status.post("p0", 3, is_open=True)
    reply = request_part(planner, want, 3, have_key=ahead.key)
    assert (reply.version, reply.key, reply.part) == (3, ahead.key, None)
    # A missing rank may have elements that no other rank has.
    del group.members["p1"]
    assert "missing" in request_part(planner, want, is_ahead=True).why


def test_receiver_missing_from_cached_member_list_stays_planned(
    planner: Planner, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, look = group.look(), group.look
    monkeypatch.setattr(group, "look", lambda *, max_age_s=0.0: old if max_age_s else look())
    wants = [layout("s0"), layout("s1", start=2, stop=6)]
    for want in wants:
        group.add(want, side="subscriber")
        request_part(planner, want)
    # Its layout is still known, and is in the second receiver's plan.
    assert isinstance(planner.part("s0", PartRequest(version=3, digest=wants[0].digest())), Granted)
    assert [plan.plan.receivers for plan in planner._plans.values()] == [("s0",), ("s0", "s1")]
    # A receiver that left is dropped.
    del group.members["s0"]
    request_part(planner, layout("s1", start=0, stop=4))
    assert planner.part("s0", PartRequest(version=3, digest=wants[0].digest())) == LayoutNeeded()


def test_joining_receiver_changes_plan_but_not_bytes(planner: Planner, group: Group) -> None:
    wants = [layout("s0"), layout("s1", start=2, stop=6)]
    keys = []
    for want in wants:
        group.add(want, side="subscriber")
        keys.append(request_part(planner, want).key)
    again = request_part(planner, wants[0], have_key=keys[0])
    assert again.key == keys[1] != keys[0]
    assert decode(again.part, ReceiverPlan).nbytes == 128


def test_mismatched_layout_fails_only_its_receiver(planner: Planner, group: Group) -> None:
    good, other, bad = layout("s0"), layout("s1"), layout("s2", dtype=torch.bfloat16)
    for want in (good, other, bad):
        group.add(want, side="subscriber")
    for _ in range(2):
        request_part(planner, good)
        with pytest.raises(PlanError, match="BF16"):
            request_part(planner, bad)
        assert decode(request_part(planner, other).part, ReceiverPlan).nbytes == 128


def test_withdrawn_version_in_old_heartbeat_is_ignored(group: Group, version_status: VersionStatus) -> None:
    withdrawn = Withdrawn(epoch="p0", version=4, by="s9", why="not finite")

    def terms(asker: str, request: PartRequest, epoch: str, version: int) -> Withdrawn | Granted:
        return withdrawn if version == 4 else Granted(version=version, epoch=epoch)

    planner = Planner(group, version_status, lambda: group.layouts["p0"], terms=terms)  # type: ignore[arg-type]
    group.add(layout("s9"), side="subscriber", epoch="p0", version=4, state="idle")
    joins = layout("s0")
    group.add(joins, side="subscriber")
    reply = request_part(planner, joins)
    assert isinstance(reply, Granted) and reply.version == 3 and decode(reply.part, ReceiverPlan).nbytes == 128
    # An explicit request for the version is refused.
    assert request_part(planner, joins, 4) == withdrawn


def test_version_that_receiver_reports_withdrawn_is_skipped(group: Group, version_status: VersionStatus) -> None:
    # The publishers are dead and still listed with version 4. This receiver has version 3 and knows no decision.
    group.id = "s1"
    group.add(layout("s1"), side="subscriber", epoch="p0", version=3, state="open")
    for rank in (0, 1):
        held = group.layouts[f"p{rank}"]
        group.add(held, side="publisher", epoch="p0", rank=rank, world_size=2, version=4, state="open")
    planner = Planner(group, version_status, lambda: group.layouts["s1"])  # type: ignore[arg-type]
    joins = layout("s0")
    group.add(joins, side="subscriber")
    assert request_part(planner, joins, without=("p0",)).why == "version 4 is not published yet"
    reply = request_part(planner, joins, without=("p0",), refused=(4,))
    assert reply.version == 3 and decode(reply.part, ReceiverPlan).nbytes == 128
    # A live version is committed, whatever the other receiver reports.
    assert request_part(planner, joins, without=("p0",), refused=(3, 4)).version == 3


def test_layout_of_different_member_is_refused(planner: Planner) -> None:
    want = layout("s0")
    with pytest.raises(PlanError):
        planner.part("s1", PartRequest(version=-1, digest=want.digest(), layout=encode(want)))


def test_missing_publisher_rank_is_awaited(planner: Planner, group: Group) -> None:
    del group.members["p1"]
    assert "ranks 1 of 2" in request_part(planner, layout("s0")).why
    with pytest.raises(NotFound, match="ranks 1 of 2"):
        planner.table()
    assert "not published yet" in request_part(planner, layout("s0"), 4).why


def test_withdrawn_version_is_read_from_receivers_that_have_it(
    planner: Planner, group: Group, version_status: VersionStatus
) -> None:
    version_status.post("p0", 3, is_open=False)
    with pytest.raises(StaleDescriptor):
        request_part(planner, layout("s0"))
    group.add(layout("s1"), side="subscriber", epoch="p0", version=3, state="open")
    group.add(layout("s2"), side="subscriber", epoch="p0", version=2, state="open")
    group.add(layout("s3"), side="subscriber", epoch="other", version=3, state="open")
    part = decode(request_part(planner, layout("s0")).part, ReceiverPlan)
    assert {part.sources[i] for i in part.source} == {"s1"}
    with pytest.raises(StaleDescriptor):
        request_part(planner, layout("s0"), without=("s1",))
    group.add(layout("s5", start=2), side="subscriber", epoch="p0", version=3, state="open")
    with pytest.raises(StaleDescriptor, match="lack tensors"):
        request_part(planner, layout("s0"), without=("s1",))
    del group.members["s5"]
    group.gone.add("s4")
    group.add(layout("s4"), side="subscriber", epoch="p0", version=3, state="open")
    part = decode(request_part(planner, layout("s0")).part, ReceiverPlan)
    assert {part.sources[i] for i in part.source} == {"s1"}, "who is gone gives nothing"


def test_updating_receiver_is_awaited(planner: Planner, group: Group, version_status: VersionStatus) -> None:
    version_status.post("p0", 3, is_open=False)
    group.add(layout("s1"), side="subscriber", epoch="p0", version=2, state="updating")
    assert "other receivers" in request_part(planner, layout("s0")).why


def test_receivers_replace_lost_publisher(planner: Planner, group: Group) -> None:
    group.add(layout("s1", start=4), side="subscriber", epoch="p0", version=3, state="open")
    part = decode(request_part(planner, layout("s0"), without=("p1",)).part, ReceiverPlan)
    assert {part.sources[i] for i in part.source} == {"p0", "s1"}


def test_planner_table_covers_all_ranks(planner: Planner, group: Group) -> None:
    table = planner.table()
    assert (table.names, table.dtypes, table.shapes) == (("w",), ("F32",), ((8, 4),))
