"""The members of a sync at the hub, their grants, and decisions on versions."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.hubs import HubBench

from penstock.errors import GrantRefused, PermissionDenied, UnknownMember
from penstock.hub.grants import GrantChecker
from penstock.hub.messages import (
    Beat,
    DecideRequest,
    FleetDecision,
    Hello,
    SyncRequest,
    SyncState,
    sync_key,
)


@pytest.fixture
def bench() -> HubBench:
    return HubBench()


def state(name: str = "policy", version: int = 3) -> SyncState:
    return SyncState(name=name, side="publisher", epoch="a", version=version, state="open")


def request_sync(hub, member: str, name: str = "policy", grants=()):
    return hub.sync(SyncRequest(member=member, name=name, grants=grants))


def test_sync_members_are_listed_in_join_order(bench) -> None:
    hub = bench.hub()
    for name in ("b", "a", "c"):
        bench.join(hub, name)
        bench.now += 0.1
    hub.beat("a", Beat(syncs=(state(),)))
    hub.beat("b", Beat(syncs=(state(version=2), state("other"))))
    assert [(one.member, one.state.version) for one in request_sync(hub, "c").members] == [("b", 2), ("a", 3)]
    assert [one.member for one in request_sync(hub, "c", "other").members] == ["b"]
    hub.beat("a", Beat(syncs=(state(version=4),)))
    assert request_sync(hub, "c").members[1].state.version == 4


def test_departed_or_silent_member_is_not_listed(bench) -> None:
    hub = bench.hub()
    bench.join(hub, "a", "b", "c")
    for name in ("a", "b"):
        hub.beat(name, Beat(syncs=(state(),)))
    hub.leave("a")
    assert [one.member for one in request_sync(hub, "c").members] == ["b"]
    bench.now += hub.ttl_s / 2
    hub.beat("c", Beat())
    bench.now += hub.ttl_s / 2 + 0.1
    assert request_sync(hub, "c").members == ()


def test_sync_grant_is_rejected_for_different_sync_name(bench) -> None:
    hub = bench.hub()
    bench.join(hub, "a")
    welcome = hub.hello(Hello(member="b", host="h", doors=("unix:///b",)))
    checker = GrantChecker(welcome.grant_key, "a")
    hub.beat("a", Beat(syncs=(msgspec.structs.replace(state(), grant_epoch=checker.epoch()),)))
    (one,) = request_sync(hub, "b", grants=("a",)).members
    with pytest.raises(GrantRefused, match="another key"):
        checker.check(one.grant, key=sync_key("other"), reader="b")
    with pytest.raises(GrantRefused, match="another reader"):
        checker.check(one.grant, key=sync_key("policy"), reader="c")
    checker.check(one.grant, key=sync_key("policy"), reader="b")
    (one,) = request_sync(hub, "b").members
    assert one.grant == b""
    with pytest.raises(UnknownMember):
        request_sync(hub, "nobody")


def test_new_hub_reports_sync_list_as_incomplete(bench) -> None:
    hub = bench.hub(fresh=False)
    bench.join(hub, "a")
    assert request_sync(hub, "a").is_new
    bench.now += 2 * hub.beat_s
    assert not request_sync(hub, "a").is_new


def propose(hub, member: str, outcome: str, *, version: int = 8, epoch: str = "a", name: str = "policy", by: str = ""):
    decision = FleetDecision(epoch=epoch, version=version, outcome=outcome, by=by)
    return hub.decide(DecideRequest(member=member, name=name, decision=decision))


def test_first_proposed_decision_for_version_wins(bench) -> None:
    hub = bench.hub()
    bench.join(hub, "a", "b", "c")
    for member in ("a", "b"):
        hub.beat(member, Beat(syncs=(state(),)))
    assert propose(hub, "b", "").decision is None
    assert propose(hub, "a", "committed").decision.outcome == "committed"
    assert propose(hub, "b", "withdrawn").decision.outcome == "committed"
    assert propose(hub, "b", "withdrawn", version=9).decision.outcome == "withdrawn"
    assert propose(hub, "a", "committed", version=9).decision.outcome == "withdrawn"
    with pytest.raises(PermissionDenied, match="only rank 0"):
        propose(hub, "b", "committed", version=10)
    with pytest.raises(PermissionDenied, match="is not part of"):
        propose(hub, "c", "withdrawn", version=10)
    with pytest.raises(PermissionDenied, match="is not part of"):
        propose(hub, "b", "withdrawn", name="other")
    with pytest.raises(UnknownMember):
        propose(hub, "nobody", "withdrawn")


def test_restarted_hub_learns_decisions_from_members(bench) -> None:
    hub = bench.hub(fresh=False)
    bench.join(hub, "a", "b", "c")
    committed = FleetDecision(epoch="a", version=8, outcome="committed")
    hub.beat("a", Beat(syncs=(state(),)))
    hub.beat("b", Beat(syncs=(state(),)))
    # Neither a commit nor another member's withdrawal is safe before all members have reported.
    assert propose(hub, "a", "committed").decision is None and propose(hub, "b", "withdrawn").decision is None
    hub.beat("c", Beat(syncs=(msgspec.structs.replace(state(version=8), decision=committed),)))
    assert propose(hub, "b", "withdrawn").decision == committed
    assert propose(hub, "b", "withdrawn", version=7).is_past, "version 8 of the run is decided"
    assert propose(hub, "a", "withdrawn", version=9).decision.outcome == "withdrawn", "rank 0 alone commits"
    begun = bench.now
    while propose(hub, "a", "committed", version=10).decision is None:
        bench.now += hub.beat_s
        for member in ("a", "b", "c"):
            hub.beat(member, Beat(syncs=(state(),)))
    assert hub.ttl_s < bench.now - begun < 2 * hub.ttl_s, "by then each has reported, or is forgotten"


def test_hub_treats_live_version_as_committed(bench) -> None:
    hub = bench.hub()
    bench.join(hub, "b", "c")
    # This subscriber read the version after the commit, so that it knows no decision. Rank 0 and the record are gone.
    live = msgspec.structs.replace(state(version=8), side="subscriber", epoch="a")
    hub.beat("b", Beat(syncs=(live,)))
    hub.beat("c", Beat(syncs=(msgspec.structs.replace(live, version=7),)))
    assert propose(hub, "c", "withdrawn").decision == FleetDecision(epoch="a", version=8, outcome="committed")
    assert propose(hub, "c", "withdrawn", version=9).decision.outcome == "withdrawn"
