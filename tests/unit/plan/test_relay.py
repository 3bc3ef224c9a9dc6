"""Relays: no member is below itself, every member reaches a complete holder, and parents are kept."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock_hub.relay import Relay
from penstock_hub.relay_parents import CHUNKS_A_HOP, DEFAULT_CHILDREN, MAX_DEPTH, Node

CHUNKS = 100


def node(member: str, have: int = 0, host: str = "", **fields) -> Node:
    return Node(member=member, host=host or f"host-{member}", num_have=have, num_chunks=CHUNKS, **fields)


def members(count: int, **fields) -> list[Node]:
    return [node(f"m{i}", joined=i, **fields) for i in range(count)]


def chain_up(parents: dict[str, str], member: str) -> list[str]:
    trail = []
    while member in parents:
        member = parents[member]
        assert member not in trail, "a ring"
        trail.append(member)
    return trail


@st.composite
def fleets(draw) -> list[Node]:
    count = draw(st.integers(1, 14))
    names = [f"m{i}" for i in range(count)]
    some = st.frozensets(st.sampled_from(names), max_size=3)
    return [
        Node(
            member=name,
            host=draw(st.sampled_from("ABC")),
            rack=draw(st.sampled_from(["", "r", "s"])),
            device=draw(st.sampled_from(["cpu", "cuda:0", "cuda:1"])),
            joined=draw(st.integers(0, 3)),
            num_have=draw(st.sampled_from([0, 1, 40, 60, CHUNKS])),
            num_chunks=CHUNKS,
            draining=draw(st.booleans()) and draw(st.booleans()),
            num_readers=draw(st.integers(0, 3)),
            max_readers=draw(st.integers(0, 3)),
            complainers=(complainers := draw(some) if draw(st.booleans()) else frozenset()),
            num_complaining=draw(st.integers(min(1, len(complainers)), len(complainers))),
            parent=draw(st.sampled_from(["", "gone", *names])),
            num_links=draw(st.sampled_from([0, 1, 2])),
        )
        for name in names
    ]


@given(fleets())
@settings(max_examples=150, deadline=None)
def test_every_receiver_descends_from_complete_holder(fleet) -> None:
    relay = Relay(fleet)
    whole = {one.member for one in fleet if one.whole}
    if not whole:
        return
    receivers = {one.member for one in fleet} - whole
    assert set(relay.parents) == receivers
    for member in receivers:
        assert chain_up(relay.parents, member)[-1] in whole


@given(fleets())
@settings(max_examples=150, deadline=None)
def test_upstreams_never_form_a_cycle(fleet) -> None:
    relay = Relay(fleet)
    whole = {one.member for one in fleet if one.whole}
    for one in fleet:
        found = relay.upstreams(one.member, limit=20)
        assert len(set(found)) == len(found) and one.member not in found
        if one.whole:
            assert found == ()
        elif whole:
            assert found
            assert all(one.member not in chain_up(relay.parents, other) for other in found)
        elif len(fleet) > 1:
            assert relay.parents[one.member] in found


@given(fleets())
@settings(max_examples=150, deadline=None)
def test_rebuilt_relay_keeps_parents_that_still_serve(fleet) -> None:
    first = Relay(fleet).parents
    again = Relay([replace(one, parent=first.get(one.member, "")) for one in fleet])
    by_name = {one.member: one for one in fleet}
    if not any(one.whole for one in fleet):
        assert again.parents == first
        return
    for child, parent in first.items():
        up = by_name[parent]
        crowded = list(first.values()).count(parent) > (up.max_readers or DEFAULT_CHILDREN)
        serves = not crowded and not up.draining and not up.demoted and child not in up.complainers
        if serves and up.num_have + max(4, CHUNKS // 8) >= by_name[child].num_have:
            assert again.parents[child] == parent


@given(fleets(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_node_order_does_not_change_relay(fleet, chance) -> None:
    shuffled = list(fleet)
    chance.shuffle(shuffled)
    assert Relay(shuffled).parents == Relay(fleet).parents


@given(st.lists(st.sampled_from("ABCD"), min_size=2, max_size=12))
def test_members_without_holder_form_one_ring(hosts) -> None:
    fleet = [node(f"m{i}", host=host, joined=i) for i, host in enumerate(hosts)]
    parents = Relay(fleet).parents
    at, seen = "m0", []
    for _ in fleet:
        seen.append(at)
        at = parents[at]
    assert at == "m0" and len(set(seen)) == len(fleet)
    host_of = {one.member: one.host for one in fleet}
    crossings = sum(host_of[one.member] != host_of[parents[one.member]] for one in fleet)
    assert crossings == (len(set(hosts)) if len(set(hosts)) > 1 else 0)


def test_newcomer_joins_ring_at_nearest_member() -> None:
    places = {"a1": ("A", "r"), "b1": ("B", "s"), "a2": ("A", "r"), "c1": ("C", "r")}
    relay = Relay(node(name, host=host, rack=rack, joined=i) for i, (name, (host, rack)) in enumerate(places.items()))
    before = dict(relay.parents)
    newcomers = {
        "a3": ("A", "r", "a2"),
        "a4": ("A", "r", "a3"),
        # As in the ring, the last member of the rack is on host C.
        "d1": ("D", "r", "c1"),
        "d2": ("D", "r", "d1"),
        "e1": ("E", "t", "b1"),
        "f1": ("F", "u", "e1"),
    }
    for name, (host, rack, parent) in newcomers.items():
        newcomer = node(name, host=host, rack=rack, joined=9)
        assert relay.append(newcomer) and name in relay
        assert relay.parents[name] == relay.upstreams(name)[0] == parent
        assert name not in relay.upstreams(name)
    # The upstreams of all other members stay the same.
    assert {name: relay.parents[name] for name in before} == before


def test_newcomer_skips_unsuitable_ring_members() -> None:
    full = node("a1", host="A", joined=1, num_readers=2, max_readers=2)
    poor = node("b1", host="B", joined=2, complainers=frozenset({"b2"}))
    relay = Relay([node("c1", host="C", joined=0), full, poor, node("d1", host="D", joined=3)])
    assert relay.append(node("a2", host="A", joined=4)) and relay.parents["a2"] == "d1"
    assert relay.append(node("b2", host="B", joined=5)) and relay.parents["b2"] == "a2"
    # A poor upstream is better than none.
    alone = Relay([full])
    assert alone.append(node("z", host="Z", joined=6)) and alone.upstreams("z") == ("a1",)


def test_newcomer_is_appended_only_to_ring() -> None:
    empty = Relay([])
    assert empty.append(node("a")) and empty.upstreams("a") == ()
    assert empty.append(node("b")) and empty.upstreams("b") == ("a",)
    assert not empty.append(node("w", CHUNKS)) and "w" not in empty
    for fleet in ([node("w", CHUNKS)], [node("w", CHUNKS), *members(5)]):
        relay = Relay(fleet)
        before = relay.parents
        assert not relay.append(node("late")) and "late" not in relay and relay.parents == before


def test_receivers_form_one_chain_below_holder() -> None:
    fleet = [node("w", CHUNKS, joined=0), *(replace(one, joined=one.joined + 1) for one in members(5))]
    relay = Relay(fleet)
    assert len({relay.parents[one.member] for one in fleet[1:]}) == 5
    assert len(chain_up(relay.parents, "m4")) == 5


def test_every_holder_is_used_before_receivers_relay() -> None:
    fleet = [node("w", CHUNKS), node("v", CHUNKS), *members(2)]
    assert set(Relay(fleet).parents.values()) == {"w", "v"}


def test_nearer_parent_is_preferred() -> None:
    fleet = [
        node("w", CHUNKS, host="A"),
        node("a", 60, host="B", parent="w", rack="r"),
        node("b", 0, host="B", rack="r"),
        node("v", CHUNKS, host="C", rack="r"),
    ]
    assert Relay(fleet).parents["b"] == "a"
    assert Relay([one for one in fleet if one.member != "a"]).parents["b"] == "v"


def test_holder_on_device_is_preferred_over_host_memory() -> None:
    fleet = [
        node("keeper", CHUNKS, host="A", device="cpu"),
        node("engine", CHUNKS, host="A", device="cuda:0", joined=1),
        node("new", host="A", device="cuda:1", joined=2),
    ]
    assert Relay(fleet).upstreams("new") == ("engine", "keeper")


def test_member_serves_one_local_and_one_remote_child() -> None:
    fleet = [
        node("w", CHUNKS, host="W"),
        node("r1", host="B", joined=1, parent="w"),
        node("s1", host="C", joined=2, parent="r1"),
        node("r2", host="B", joined=3),
        node("s2", host="C", joined=4),
    ]
    parents = Relay(fleet).parents
    assert (parents["r2"], parents["s2"]) == ("r1", "s1")


def test_holder_serves_second_child_if_chain_exceeds_limit() -> None:
    fleet = [node("w", CHUNKS, joined=-1), *members(MAX_DEPTH + 2)]
    parents = Relay(fleet).parents
    assert sum(parent == "w" for parent in parents.values()) == 2
    assert max(len(chain_up(parents, member)) for member in parents) == MAX_DEPTH


def many(nodes: int, per_node: int, *, chunks: int = 7000, **fields) -> list[Node]:
    """Return a holder and receivers on as many hosts. The order of joining is independent of the hosts."""
    count = nodes * per_node
    return [
        Node(
            member=f"m{i}",
            host=f"host-{i // per_node}",
            num_have=0 if i else chunks,
            num_chunks=chunks,
            joined=i * 7919 % count,
            **fields,
        )
        for i in range(count)
    ]


def far_children(fleet: list[Node], parents: dict[str, str]) -> tuple[Counter, Counter]:
    """Count the children on other hosts, by member and by host."""
    host = {one.member: one.host for one in fleet}
    far = [parent for child, parent in parents.items() if host[parent] != host[child]]
    return Counter(far), Counter(host[parent] for parent in far)


def test_member_sends_at_most_one_remote_copy() -> None:
    fleet = many(256, 8)
    parents = Relay(fleet).parents
    by_member, _ = far_children(fleet, parents)
    assert max(by_member.values()) == 1
    assert max(len(chain_up(parents, member)) for member in parents) < 2 * MAX_DEPTH


@pytest.mark.parametrize("num_links", [1, 2])
def test_host_sends_one_copy_per_link(num_links: int) -> None:
    fleet = many(48, 8, num_links=num_links)
    _, by_host = far_children(fleet, Relay(fleet).parents)
    assert max(by_host.values()) == num_links


def test_chains_stay_shallow_when_members_join_later() -> None:
    fleet, parents = sorted(many(128, 8), key=lambda one: (not one.whole, one.joined)), {}
    for count in range(64, len(fleet) + 1, 64):
        here = [replace(one, parent=parents.get(one.member, "")) for one in fleet[:count]]
        before, parents = parents, Relay(here).parents
        assert all(parents[member] == parent for member, parent in before.items())
    by_member, _ = far_children(fleet, parents)
    assert max(by_member.values()) == 1
    assert max(len(chain_up(parents, member)) for member in parents) < 4 * MAX_DEPTH


def test_larger_models_allow_deeper_chains() -> None:
    fleet = many(300, 1, chunks=600 * CHUNKS_A_HOP)
    assert Counter(Relay(fleet).parents.values())["m0"] == 1
    fleet = many(300, 1, chunks=100)
    assert Counter(Relay(fleet).parents.values())["m0"] > 1


def test_max_readers_limits_number_of_children() -> None:
    fleet = [node("w", CHUNKS, max_readers=2), *(node(f"c{i}", 10 + i, parent="w") for i in range(4))]
    assert sum(parent == "w" for parent in Relay(fleet).parents.values()) == 2
    assert DEFAULT_CHILDREN > 2


def test_unavailable_holders_are_ordered_last() -> None:
    holders = {
        "drains": node("drains", CHUNKS, draining=True),
        "busy": node("busy", CHUNKS, num_readers=2, max_readers=2),
        "mine": node("mine", CHUNKS, complainers=frozenset({"r"})),
        "theirs": node("theirs", CHUNKS, complainers=frozenset({"x", "y"}), num_complaining=2),
    }
    for name, bad in holders.items():
        found = Relay([bad, node("good", CHUNKS, joined=9), node("r", 10, parent=name)]).upstreams("r")
        assert found[-1] == name or name == "busy"
        assert Relay([bad, node("r")]).upstreams("r") == (name,)


def test_parent_adopts_children_of_leaving_member() -> None:
    fleet = [node("w", CHUNKS), node("a", 50, parent="w"), node("b", 40, parent="a")]
    assert Relay(fleet).upstreams("b") == ("a", "w")
    assert Relay([fleet[0], fleet[2]]).upstreams("b") == ("w",)


def test_parent_far_behind_child_is_replaced() -> None:
    fleet = [node("w", CHUNKS), node("slow", 10, parent="w"), node("fast", 90, parent="slow")]
    assert Relay(fleet).parents["fast"] == "w"


def test_alternative_parents_are_spread_over_holders() -> None:
    fleet = [*(node(f"w{i}", CHUNKS, joined=i) for i in range(8)), *(node(f"r{i}", joined=9 + i) for i in range(8))]
    relay = Relay(fleet)
    assert len({relay.upstreams(f"r{i}")[1] for i in range(8)}) > 3


def test_nearby_upstreams_are_suggested_to_unknown_member() -> None:
    relay = Relay([node("w", CHUNKS, host="A"), node("a", 5, host="B")])
    assert relay.upstreams("x") == ()
    assert relay.around(node("x", host="B"))[0] == "a"


def test_second_upstreams_of_newcomers_are_spread_over_members() -> None:
    relay = Relay([node("w", CHUNKS), *(node(f"m{i}", 10, joined=i) for i in range(200))])
    second = Counter(relay.around(node(f"new-{i}"))[1] for i in range(200))
    assert len(second) > 30 and max(second.values()) < 20
    assert {relay.around(node(f"new-{i}"))[0] for i in range(9)} == {"w"}


def test_single_member_has_no_upstream() -> None:
    assert Relay([node("a")]).upstreams("a") == ()
    assert Relay([]).parents == {}


@pytest.mark.parametrize("whole", [0, 1])
def test_relay_is_built_for_thousand_members(whole: int) -> None:
    fleet = [node(f"m{i}", CHUNKS if i < whole else 0, host=f"h{i // 8}", joined=i) for i in range(1000)]
    relay = Relay(fleet)
    assert all(relay.upstreams(one.member) for one in fleet if not one.whole)
