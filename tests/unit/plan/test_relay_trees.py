"""Two trees for one key: they have no cycle, are shallow, and each member and link sends one copy."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock_hub import relay, relay_parents
from penstock_hub.relay import MIN_HOPS, Relay
from penstock_hub.relay_parents import MAX_DEPTH, NUM_TREES, Node, Parents

CHUNKS = 7000


def hosts(
    count: int, per_host: int = 1, *, holders: int = 1, links: int = 0, named: bool = False, seed: int = 0
) -> list[Node]:
    """Return members on as many hosts, in an order that is independent of the hosts. The first members are complete."""
    order = list(range(count * per_host))
    random.Random(seed).shuffle(order)
    return [
        Node(
            member=f"m{i}",
            host=f"host-{i // per_host}",
            joined=order[i],
            num_have=CHUNKS if i < holders else 0,
            num_chunks=CHUNKS,
            num_links=links,
            link=f"nic-{i % per_host * links // per_host}" if named else "",
            follows_trees=True,
        )
        for i in range(count * per_host)
    ]


def in_trees(fleet: list[Node]) -> Relay:
    """Return two trees, even if chains would be faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "MIN_HOPS", -1000)
        return Relay(fleet)


def way_up(parents: Parents, member: str) -> list[str]:
    trail = [member]
    while trail[-1] in parents:
        trail.append(parents[trail[-1]])
        assert len(set(trail)) == len(trail), "a cycle"
    return trail


def depth(made: Relay) -> int:
    return max((len(way_up(parents, member)) - 1 for parents in made.trees for member in parents), default=0)


def far_children(fleet: list[Node], made: Relay) -> tuple[list[Counter[str]], Counter[str], Counter[tuple[str, str]]]:
    """Count the children on other hosts: by member in each tree, by host, and by link."""
    node = {one.member: one for one in fleet}
    in_tree = [
        Counter(up for child, up in parents.items() if node[up].host != node[child].host) for parents in made.trees
    ]
    by_host, by_link = Counter[str](), Counter[tuple[str, str]]()
    for tree in in_tree:
        for member, count in tree.items():
            by_host[node[member].host] += count
            by_link[node[member].host, node[member].link] += count
    return in_tree, by_host, by_link


def again(fleet: list[Node], made: Relay) -> list[Node]:
    """Return the members after they have reported their assigned parents."""
    first, last = made.trees[0], made.trees[-1]
    return [replace(one, parent=first.get(one.member, ""), second_parent=last.get(one.member, "")) for one in fleet]


@st.composite
def fleets(draw) -> list[Node]:
    """Fleets at any moment: some members are complete, slow, leaving, or have complaints and old parents."""
    names = [f"m{i}" for i in range(draw(st.integers(1, 14)))]
    any_name = st.sampled_from(["", "gone", *names])
    return [
        Node(
            member=name,
            host=draw(st.sampled_from("ABCDEFGH")),
            rack=draw(st.sampled_from(["", "r", "s"])),
            device=draw(st.sampled_from(["cpu", "cuda:0"])),
            joined=draw(st.integers(0, 3)),
            num_have=draw(st.sampled_from([0, 1, 40, 60, 100])),
            num_chunks=100,
            draining=draw(st.booleans()) and draw(st.booleans()),
            num_readers=draw(st.integers(0, 3)),
            max_readers=draw(st.integers(0, 3)),
            complainers=(complainers := draw(st.frozensets(st.sampled_from(names), max_size=2))),
            num_complaining=len(complainers),
            num_links=(links := draw(st.sampled_from([0, 1, 2]))),
            link=draw(st.sampled_from(["", "nic-0", "nic-1"])) if links else "",
            parent=draw(any_name),
            second_parent=draw(any_name),
            follows_trees=True,
        )
        for name in names
    ]


@given(fleets())
@settings(max_examples=300, deadline=None)
def test_receivers_descend_from_holder_in_both_trees(fleet: list[Node]) -> None:
    made = in_trees(fleet)
    whole = {one.member for one in fleet if one.whole}
    if not whole:
        assert len(made.trees) == 1
        return
    for tree, parents in enumerate(made.trees):
        assert set(parents) == {one.member for one in fleet} - whole
        for member in parents:
            assert way_up(parents, member)[-1] in whole
            found = made.upstreams(member, tree=tree, limit=20)
            assert found and member not in found
            assert all(member not in way_up(parents, other) for other in found)


@given(fleets(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_member_order_does_not_change_trees(fleet: list[Node], chance: random.Random) -> None:
    shuffled = list(fleet)
    chance.shuffle(shuffled)
    assert in_trees(shuffled).trees == in_trees(fleet).trees


@given(st.integers(2, 150), st.integers(1, 3), st.sampled_from([0, 1]), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_hosts_with_one_member_send_one_copy(count: int, holders: int, links: int, seed: int) -> None:
    fleet = hosts(count, holders=min(holders, count - 1), links=links, seed=seed)
    made = in_trees(fleet)
    assert len(made.trees) == NUM_TREES
    in_tree, _, _ = far_children(fleet, made)
    for one in fleet:
        sent = [tree[one.member] for tree in in_tree]
        assert sum(sent) <= NUM_TREES
        assert one.whole or min(sent) == 0, "inner in both trees"
    assert depth(made) <= math.log2(count) + 3


@given(st.integers(2, 20), st.integers(1, 8), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_host_reads_each_tree_once(count: int, per_host: int, links: int, named: bool) -> None:
    fleet = hosts(count, per_host, links=links, named=named)
    made = in_trees(fleet)
    node = {one.member: one for one in fleet}
    _, by_host, by_link = far_children(fleet, made)
    assert max(by_host.values()) <= NUM_TREES
    assert max(by_link.values()) <= NUM_TREES
    for parents in made.trees:
        reads = Counter(node[child].host for child, up in parents.items() if node[up].host != node[child].host)
        assert set(reads.values()) == {1} and len(reads) == count - 1
    assert depth(made) <= math.log2(count) + 3 + per_host


@given(st.integers(2, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_remaining_members_keep_parents_after_join_and_leave(count: int, data: st.DataObject) -> None:
    fleet = hosts(count)
    made = in_trees(fleet)
    gone = data.draw(st.sampled_from(fleet[1:])).member
    new = Node(member="new", host="new", joined=1e9, num_have=0, num_chunks=CHUNKS, follows_trees=True)
    after = [one for one in again(fleet, made) if one.member != gone] + [new]
    later = in_trees(after)
    for before, now in zip(made.trees, later.trees, strict=True):
        kept = {child: up for child, up in before.items() if gone not in {child, up}}
        assert {child: now[child] for child in kept} == kept
        assert gone not in now.values()
    in_tree, _, _ = far_children(after, later)
    # Members with half of a copy to spare replace the lost member.
    assert all(sum(tree[one.member] for tree in in_tree) <= NUM_TREES for one in after)


def test_members_joining_in_waves_change_no_earlier_parent() -> None:
    fleet, made = sorted(hosts(512), key=lambda one: (not one.whole, one.joined)), None
    for count in range(32, len(fleet) + 1, 32):
        here = fleet[:count] if made is None else again(fleet[:count], made)
        before, made = made, Relay(here)
        for tree in range(len(made.trees) if before is not None else 0):
            old = before.trees[min(tree, len(before.trees) - 1)]
            assert {child: made.trees[tree][child] for child in old} == old
    assert made is not None and len(made.trees) == NUM_TREES
    in_tree, _, _ = far_children(fleet, made)
    assert all(sum(tree[one.member] for tree in in_tree) <= NUM_TREES for one in fleet)
    # The trees of a wave attach near the root of the previous wave's trees, and add little depth.
    assert depth(made) <= math.log2(32) + 3 + 2 * 15


def test_members_joining_one_by_one_form_chain() -> None:
    fleet, made = hosts(12), None
    for count in range(1, 13):
        made = in_trees(fleet[:count] if made is None else again(fleet[:count], made))
    assert made is not None and made.trees[0] == made.trees[1]
    assert depth(made) == 11


def racks(made: Relay, fleet: list[Node]) -> Iterator[int]:
    """Count the links between racks in each tree."""
    rack = {one.member: one.rack for one in fleet}
    for parents in made.trees:
        yield sum(rack[child] != rack[up] for child, up in parents.items())


def test_racks_form_subtrees_without_deep_chains() -> None:
    fleet = [replace(one, rack=f"rack-{i // 16}") for i, one in enumerate(hosts(256))]
    alone = in_trees([replace(one, rack="") for one in fleet])
    made = in_trees(fleet)
    assert max(racks(made, fleet)) < min(racks(alone, fleet)) / 2
    assert depth(made) <= depth(alone) + relay_parents.RACK_HOPS + 2


@pytest.mark.parametrize("count", [2, MIN_HOPS + 1, 12])
def test_few_hosts_form_a_chain(count: int) -> None:
    assert len(Relay(hosts(count)).trees) == 1


def test_single_host_forms_a_chain() -> None:
    assert len(Relay(hosts(1, 64, links=1)).trees) == 1


def test_hosts_with_many_links_form_shallow_chains() -> None:
    fleet = hosts(256, 8, links=8, named=True)
    made = Relay(fleet)
    assert len(made.trees) == 1 and depth(made) < MAX_DEPTH


def test_many_single_link_hosts_form_two_trees() -> None:
    for fleet in (hosts(512), hosts(256, 8, links=1)):
        made = Relay(fleet)
        assert len(made.trees) == NUM_TREES and depth(made) <= 9 + 3 + 7
        _, by_host, _ = far_children(fleet, made)
        assert max(by_host.values()) == NUM_TREES


def test_one_member_without_tree_support_forces_chains() -> None:
    fleet = hosts(256)
    assert len(Relay([*fleet[:-1], replace(fleet[-1], follows_trees=False)]).trees) == 1
    late = [one if one.whole else replace(one, num_have=CHUNKS * 3 // 4) for one in fleet]
    assert len(Relay(late).trees) == 1
    # Members that read two trees continue to do so.
    made = Relay(fleet)
    assert Relay(again(late, made)).trees == made.trees


def test_two_trees_remain_when_member_without_support_joins() -> None:
    fleet = hosts(256)
    made = Relay(fleet)
    old = Node(member="old", host="old", joined=1e9, num_have=0, num_chunks=CHUNKS)
    here = [*again(fleet, made), old]
    later = Relay(here)
    assert len(later.trees) == NUM_TREES
    for before, now in zip(made.trees, later.trees, strict=True):
        assert {child: now[child] for child in before} == before
    in_tree, _, _ = far_children(here, later)
    assert all(sum(tree[one.member] for tree in in_tree) <= NUM_TREES for one in here)


def test_each_named_link_carries_one_copy() -> None:
    fleet = hosts(64, 8, links=4, named=True)
    made = Relay(fleet)
    assert len(made.trees) == 1
    _, by_host, by_link = far_children(fleet, made)
    assert max(by_link.values()) == 1 and max(by_host.values()) > 1


def test_current_parent_stays_first_upstream_even_when_full() -> None:
    fleet = [replace(one, num_readers=3, max_readers=3) for one in hosts(64)]
    made = Relay(again(fleet, Relay(fleet)))
    for tree, parents in enumerate(made.trees):
        assert all(made.upstreams(member, tree=tree)[0] == parents[member] for member in parents)


def work(fleet: list[Node]) -> int:
    """Count the calls of Python functions for building the relay of a fleet."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        Relay(fleet)
    finally:
        sys.setprofile(before)
    return count


def draining(count: int, every: int) -> list[Node]:
    return [replace(one, draining=not one.whole and i % every == 0) for i, one in enumerate(hosts(count))]


def without_parents(count: int) -> list[Node]:
    chance = random.Random(1)
    return [one if one.whole else replace(one, num_have=chance.randrange(CHUNKS * 2 // 5)) for one in hosts(count)]


def admitting(readers: int, fleet: list[Node]) -> list[Node]:
    return [replace(one, max_readers=readers) for one in fleet]


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(lambda n: admitting(2, hosts(n // 4, 8, links=1)), id="8 a host, two readers each"),
        pytest.param(lambda n: admitting(1, hosts(n)), id="one reader each"),
        pytest.param(lambda n: draining(n, 1), id="all receivers drain"),
        pytest.param(lambda n: draining(n, 2), id="half of them drain"),
        pytest.param(lambda n: [replace(one, num_complaining=2) for one in hosts(n)], id="all demoted"),
        pytest.param(without_parents, id="of different progress, without parents"),
    ],
)
def test_relay_build_time_grows_linearly(fleet: Callable[[int], list[Node]]) -> None:
    assert work(fleet(800)) < 2.6 * work(fleet(400))


def test_reader_limit_makes_trees_share_parents() -> None:
    made = in_trees(admitting(2, hosts(200, 8, links=1)))
    pairs = {(child, up) for parents in made.trees for child, up in parents.items()}
    readers = Counter(up for _, up in pairs)
    # The members allow one reader less than there are children, because the holder's own host reads from it too.
    assert sum(max(0, count - 2) for count in readers.values()) <= 1


def test_trees_are_built_only_when_faster_than_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_nodes: object) -> None:
        raise AssertionError("trees are built")

    monkeypatch.setattr(relay, "Trees", build)
    for fleet in (hosts(12), hosts(1, 64, links=1), hosts(1000, 8)):
        assert len(Relay(fleet).trees) == 1
    with pytest.raises(AssertionError, match="trees are built"):
        Relay(hosts(512))
