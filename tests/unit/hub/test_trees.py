"""Two trees of upstreams in the hub's responses: which readers get them, which parents stay, and their explanation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from tests.support.hubs import HubBench, key_state

from penstock.hub.messages import NUM_TREES, Hello, UpstreamsReply, UpstreamsRequest, WhyRequest, follows_trees
from penstock_hub import snapshot
from penstock_hub.directory import Directory
from penstock_hub.relay import Relay
from penstock_hub.relay_parents import Node, Parents
from penstock_hub.store import MemoryStore

WHOLE = ((0, 100),)
MEMBERS = [f"m{i}" for i in range(60)]


@pytest.fixture
def bench() -> HubBench:
    return HubBench()


@pytest.fixture
def hub(bench: HubBench) -> Directory:
    """Register a complete holder and readers on many hosts before the first request."""
    hub = bench.hub()
    bench.join(hub, "w", *MEMBERS)
    bench.beat(hub, "w", key_state(WHOLE))
    for member in MEMBERS:
        bench.beat(hub, member, key_state())
    return hub


def request_upstreams(hub: Directory, member: str, **state: str) -> UpstreamsReply:
    return hub.upstreams(UpstreamsRequest(member=member, holding=key_state(**state)))


def parents(reply: UpstreamsReply) -> list[str]:
    return [reply.upstreams[order[0]].member for order in reply.orders]


def test_upstreams_reply_has_one_member_order_per_tree(hub: Directory) -> None:
    two = 0
    for member in MEMBERS:
        reply = request_upstreams(hub, member)
        assert len(reply.orders) == NUM_TREES and reply.is_placed
        assert {i for order in reply.orders for i in order} == set(range(len(reply.upstreams)))
        first = {upstream.member for upstream in reply.upstreams[: len(set(parents(reply)))]}
        assert first == set(parents(reply)) and member not in first
        assert all(upstream.grant for upstream in reply.upstreams)
        two += len(first) == NUM_TREES
    assert two > len(MEMBERS) * 3 / 4


def test_reported_parents_stay_unchanged_on_another_hub(bench: HubBench, hub: Directory) -> None:
    first = {member: parents(request_upstreams(hub, member)) for member in MEMBERS}
    assert {member: parents(request_upstreams(hub, member)) for member in MEMBERS} == first
    reported = {member: key_state(parent=up, second_parent=second) for member, (up, second) in first.items()}
    # Another hub on the same store has made no relay.
    other = bench.hub()
    for member, state in reported.items():
        bench.beat(other, member, state)
    for member, (up, second) in first.items():
        assert parents(request_upstreams(other, member, parent=up, second_parent=second)) == [up, second]


def test_departed_member_is_replaced_as_parent(bench: HubBench, hub: Directory) -> None:
    first = {member: parents(request_upstreams(hub, member)) for member in MEMBERS}
    gone = next(up for member in MEMBERS for up in first[member] if up != "w")
    hub.leave(gone)
    for member in MEMBERS:
        if member != gone:
            now = parents(request_upstreams(hub, member, parent=first[member][0], second_parent=first[member][1]))
            assert gone not in now
            assert [b for a, b in zip(first[member], now, strict=True) if a != gone] == [
                up for up in first[member] if up != gone
            ]


def test_member_with_older_protocol_forces_single_tree(bench: HubBench, hub: Directory) -> None:
    hub.hello(Hello(member="old", host="host-old", doors=("unix:///old",), protocol="2.3"))
    bench.beat(hub, "old", key_state())
    for member in (*MEMBERS, "old"):
        assert request_upstreams(hub, member).orders == ()
    assert [follows_trees(version) for version in ("1.0", "2.3", "2.4", "2.10", "3.0")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_two_trees_remain_when_older_member_joins(bench: HubBench, hub: Directory) -> None:
    first = {member: parents(request_upstreams(hub, member)) for member in MEMBERS}
    for member, (up, second) in first.items():
        bench.beat(hub, member, key_state(parent=up, second_parent=second))
    hub.hello(Hello(member="old", host="host-old", doors=("unix:///old",), protocol="2.3"))
    bench.beat(hub, "old", key_state())
    reply = request_upstreams(hub, "old")
    assert reply.orders == () and 0 < len(reply.upstreams) <= 4
    for member, (up, second) in first.items():
        assert parents(request_upstreams(hub, member, parent=up, second_parent=second)) == [up, second]
    # The reader reports and keeps one parent, from which it reads all chunks.
    mine = reply.upstreams[0].member
    assert request_upstreams(hub, "old", parent=mine).upstreams[0].member == mine
    assert "even chunks" not in hub.why(WhyRequest(model="llama", member="old")).lines[0]


def test_upstreams_reply_from_older_hub_decodes_with_defaults(hub: Directory) -> None:
    said = msgspec.json.decode(msgspec.json.encode(request_upstreams(hub, "m1")))
    for name in ("orders", "is_placed"):
        del said[name]
    old = msgspec.convert(said, UpstreamsReply)
    assert old.orders == () and old.is_placed


def test_member_missing_from_snapshot_is_not_placed_in_trees(bench: HubBench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)))
    bench.join(hub, "w", "a", "b")
    bench.beat(hub, "w", key_state(WHOLE))
    assert request_upstreams(hub, "a").is_placed
    late = request_upstreams(hub, "b")
    assert not late.is_placed and [upstream.member for upstream in late.upstreams] == ["w", "a"]


def test_newcomer_in_large_fleet_receives_short_retry_delay(bench: HubBench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)))
    members = [f"m{i}" for i in range(300)]
    bench.join(hub, "w", "late", *members)
    bench.beat(hub, "w", key_state(WHOLE))
    for member in members:
        bench.beat(hub, member, key_state())
    assert request_upstreams(hub, "m1").ask_again_s > 2
    late = request_upstreams(hub, "late")
    assert not late.is_placed and late.ask_again_s < 0.7


def test_newcomer_without_complete_holder_is_placed_immediately(bench: HubBench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)))
    members = [f"m{i}" for i in range(600)]
    bench.join(hub, *members)
    bench.join(hub, "n1", "n2", "n3", host="host-n")
    for member in members:
        bench.beat(hub, member, key_state())
    assert request_upstreams(hub, "m1").ask_again_s > 3.7
    first = request_upstreams(hub, "n1")
    assert first.is_placed and len(first.upstreams) == 4
    # The hub knows the other members of the host, although the snapshot is older.
    second = request_upstreams(hub, "n2")
    assert second.is_placed and second.upstreams[0].member == "n1" and second.upstreams[0].grant
    assert request_upstreams(hub, "n3").upstreams[0].member == "n2"
    # The newcomer polls for later members sooner than a member that knows the whole fleet.
    assert all(1.5 <= reply.ask_again_s <= 2.5 for reply in (first, second))
    assert request_upstreams(hub, "n1").ask_again_s <= 2.5
    # The next snapshots have the newcomer in the ring too.
    for _ in range(100):
        again = request_upstreams(hub, "n2", parent="n1")
        assert again.is_placed and again.upstreams[0].member == "n1"
    assert again.ask_again_s > 3.7


def test_claim_size_accounts_for_newcomers(bench: HubBench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)))
    members = [f"m{i}" for i in range(8)]
    bench.join(hub, *members)
    pieces = []
    for member in members:
        state = key_state(num_chunks=1600)
        reply = hub.upstreams(UpstreamsRequest(member=member, holding=state, can_read_storage=True, claim=True))
        assert reply.is_placed and reply.claim is not None
        pieces.append(sum(stop - start for start, stop in reply.claim.ranges))
    # A piece is a quarter of an equal share for the current members, at most 1 GiB.
    assert pieces == [64] * 6 + [57, 50]


def test_members_starting_together_receive_short_retry_delay(bench: HubBench) -> None:
    seconds = itertools.count()
    hub = Directory(bench.store, fresh=True, clock=lambda: bench.now, timer=lambda: float(next(seconds)))
    members = ["a", "b", "c"]
    bench.join(hub, *members)
    for member in members:
        bench.beat(hub, member, key_state())
    cold = request_upstreams(hub, "a")
    assert cold.is_placed and cold.upstreams and cold.ask_again_s < 0.3
    bench.beat(hub, "b", key_state(WHOLE))
    # The hub renews its snapshot after some requests.
    assert any(request_upstreams(hub, "a").ask_again_s > 0.7 for _ in range(100))


def test_why_query_lists_parents_for_even_and_odd_chunks(hub: Directory) -> None:
    member = next(m for m in MEMBERS if len(set(parents(request_upstreams(hub, m)))) == NUM_TREES)
    even, odd = parents(request_upstreams(hub, member))
    lines = hub.why(WhyRequest(model="llama", member=member)).lines
    assert lines[0].startswith(f"{member} is filling with 0 of 100 chunks and reads from {even}")
    assert "for even chunks, and from" in lines[0] and lines[0].endswith("for odd chunks")
    assert any(line.startswith(f"  {even}:") and "parent for even chunks" in line for line in lines)
    assert any(line.startswith(f"  {odd}:") and "parent for odd chunks" in line for line in lines)


def test_parents_are_returned_while_relay_is_rebuilt(hub: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    request_upstreams(hub, "m1")
    view = hub._view(key_state().key)
    before, sizes = view.parents, itertools.count(7)
    trees = Relay.parents.fget

    def make_another(relay: Relay) -> Parents:
        # The newcomer divides the weights into a different number of chunks.
        view.relay(next(sizes))
        return trees(relay)

    monkeypatch.setattr(Relay, "parents", property(make_another))
    assert view.parents == before


def test_retried_claim_builds_relay_only_once(bench: HubBench, hub: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lost = [], []
    write = MemoryStore.write

    def lose_three(store: MemoryStore, name: str, *args: object, **options: object) -> bool:
        if name.startswith("claim/") and len(lost) < 3:
            lost.append(name)
            return False
        return write(store, name, *args, **options)

    def make(nodes: Iterable[Node]) -> Relay:
        made.append(1)
        return Relay(nodes)

    monkeypatch.setattr(MemoryStore, "write", lose_three)
    monkeypatch.setattr(snapshot, "Relay", make)
    hub.leave("w")
    assert bench.claim(hub, "m1", key_state()).ranges
    assert len(lost) == 3 and len(made) == 1
    # The upstreams do not change.
    assert len(request_upstreams(hub, "m1").upstreams) > 0
