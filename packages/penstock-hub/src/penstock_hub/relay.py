"""Choice of upstreams: receivers form chains or two trees below the complete holders, or a ring if no member is
complete.

In a chain each member has one child per link. Each member sends one copy within its host and one copy to another host.
All members are complete in about the time that one copy takes. Two trees, for the even and the odd chunks, replace long
chains of hosts. In one of the trees a member sends half of a copy to each of two other hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

from penstock_hub.relay_parents import (
    CHUNKS_A_HOP,
    SCANNED,
    Chains,
    Node,
    Parents,
    Trees,
    num_shared_links,
    places,
    shared_links,
)

TREE_NAMES = ("even", "odd")
"""Names of the trees in reports."""
MIN_HOPS = 8
"""Trees are used if they save the time of this many hops, 0.1 s at 50 GB/s, because a receiver of two trees holds two
leases and follows two logs. Source: docs/design/fetch.md."""


class Relay:
    """Upstreams of every receiver of one key. Only `append` changes the object, for members of a ring.

    All methods are thread-safe, except that `append` must not run in two threads at once.

    Attributes:
        trees: a mapping from each receiver to its parent, or two mappings, for the even and the odd chunks. If any node
            is complete, the parents lead to a complete node. If no node is complete, members form a ring.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        # Sort the nodes, so that all hubs compute the same upstreams.
        self._nodes = {node.member: node for node in sorted(nodes, key=lambda node: node.order)}
        self._number = {member: i for i, member in enumerate(self._nodes)}
        has_whole = any(node.whole for node in self._nodes.values())
        self._is_ring = not has_whole
        ring = () if has_whole else _ring_order(self._nodes)
        self.trees: tuple[Parents, ...] = _chains_or_trees(self._nodes) if has_whole else (_ring(ring),)
        # For each place, the last member in the ring.
        self._last = {place: node.member for node in ring for place in _ring_places(node)}
        self._spans = tuple(_spans(parents) if has_whole else {} for parents in self.trees)
        self._choice: dict[tuple[str, ...], list[Node]] = {}
        best = sorted(
            self._nodes.values(), key=lambda node: (node.last_resort, not node.whole, -node.num_have, node.order)
        )
        # For each place, the number of complete members among its first `SCANNED` members. Complete members come first.
        self._num_whole: Counter[tuple[str, ...]] = Counter()
        for node in best:
            is_good = node.whole and not node.last_resort
            for place in places(node):
                here = self._choice.setdefault(place, [])
                here.append(node)
                if is_good and len(here) <= SCANNED:
                    self._num_whole[place] += 1

    @property
    def parents(self) -> Parents:
        """Return the first tree, which is the only one unless the chunks are spread over two trees."""
        return self.trees[0]

    def __contains__(self, member: str) -> bool:
        """Return whether a member is among the nodes."""
        return member in self._nodes

    def append(self, node: Node) -> bool:
        """Add a new member to a ring, after the last member of its host, rack or fleet. Return False if no ring exists.

        Chains and trees instead place all members that joined within a second at once. Adding members one by one would
        make chains and trees permanently deep, because parents are kept.
        """
        if not self._is_ring or node.whole:
            return False
        before = [self._last[place] for place in _ring_places(node) if place in self._last]
        if before:
            # Prefer a member that serves, as in the ring.
            willing = (name for name in before if not self._nodes[name].last_resort)
            parent = next((name for name in willing if node.member not in self._nodes[name].complainers), before[0])
            # Create a new dict, because other threads may be reading the current one.
            self.trees = ({**self.trees[0], node.member: parent},)
            places_of_both = {*_ring_places(self._nodes[parent]), *_ring_places(node)}
        else:
            parent, places_of_both = "", set(_ring_places(node))
        # Update places that were empty, and places where the parent was the last member.
        for place in places_of_both:
            if self._last.get(place, parent) == parent:
                self._last[place] = node.member
        self._nodes[node.member] = node
        return True

    def upstreams(self, member: str, *, tree: int = 0, limit: int = 4) -> tuple[str, ...]:
        """Return the members to read from, in order: the parent, its parent, then near and far members with the most
        chunks.

        If any node is complete, no member below this member in the tree is returned. The result is empty for a member
        that is complete or not among the nodes.
        """
        receiver = self._nodes.get(member)
        return () if receiver is None or receiver.whole else self.around(receiver, tree=tree, limit=limit)

    def around(self, receiver: Node, *, tree: int = 0, limit: int = 4) -> tuple[str, ...]:
        """Return upstreams for a receiver that need not be among the nodes. The receiver may have no parent."""
        member = receiver.member
        parent = self.trees[tree].get(member)
        good: dict[str, None] = {}
        bad: dict[str, None] = {}
        # Collect members of last resort separately. They are used only if there are fewer good members than the limit.
        for name in self._candidates(receiver, tree):
            node = self._nodes[name]
            if name == member or name in good or self._below(name, member, tree):
                continue
            # Even a parent that is full has a reservation for this child.
            is_poor = node.draining or node.demoted if name == parent else node.last_resort
            (bad if is_poor or member in node.complainers else good)[name] = None
            if len(good) == limit:
                break
        # If there is no good upstream, put a poor parent first, because it has the chunks that this member lacks.
        if parent in bad and not good:
            good[parent] = bad.pop(parent)
        return tuple([*good, *(name for name in bad if name not in good)][:limit])

    def _candidates(self, receiver: Node, tree: int) -> Iterator[str]:
        parents = self.trees[tree]
        parent = parents.get(receiver.member)
        if parent is not None:
            yield parent
            if parent in parents:
                yield parents[parent]
        is_new = receiver.member not in self._number
        turn = crc32(receiver.member.encode()) if is_new else self._number[receiver.member]
        for place in places(receiver):
            # Spread the load when parents fail: each receiver starts with a different one of the equally good members.
            choice = self._choice.get(place, [])
            num_whole = self._num_whole[place]
            yield from _rotated(choice[:num_whole], turn)
            # A new member has no chunks and no parent, so all incomplete members are equally good for it.
            yield from _rotated(choice[num_whole : num_whole + SCANNED], turn if is_new else 0)

    def _below(self, member: str, above: str, tree: int) -> bool:
        """Return whether a member is below `above` in a tree, so that `above` must not read from it."""
        spans = self._spans[tree]
        first, last = spans.get(above, (0, -1))
        return first < spans.get(member, (-1, -1))[0] <= last


def _rotated(nodes: list[Node], turn: int) -> Iterator[str]:
    start = turn % len(nodes) if nodes else 0
    yield from (node.member for node in nodes[start:])
    yield from (node.member for node in nodes[:start])


def _chains_or_trees(nodes: dict[str, Node]) -> tuple[Parents, ...]:
    receivers = [node for node in nodes.values() if not node.whole]
    # Keep two trees while a receiver uses them, because relinking all members costs more than a few hops. A receiver
    # that cannot follow trees reads all chunks from its parent, which receives all chunks.
    if any(node.second_parent in nodes and node.second_parent != node.parent for node in receivers):
        return Trees(nodes).trees
    chains = (Chains(nodes).parents,)
    can_split = all(node.follows_trees for node in receivers)
    # Near the end of a transfer a change of parents does not pay off.
    lacks_most = 2 * sum(node.num_have for node in receivers) < sum(node.num_chunks for node in receivers)
    if not (can_split and lacks_most):
        return chains
    chains_time = _fill_time(nodes, chains)
    # Lower bound for the best trees without building them: two children per host, plus the longest chain within a host.
    per_host = Counter(node.host for node in receivers)
    lower_bound = _num_left(nodes) + CHUNKS_A_HOP * (len(per_host).bit_length() + max(per_host.values()) - 1)
    gain = CHUNKS_A_HOP * MIN_HOPS
    if chains_time < lower_bound + gain:
        return chains
    trees = Trees(nodes).trees
    return trees if chains_time >= _fill_time(nodes, trees) + gain else chains


def _fill_time(nodes: dict[str, Node], trees: tuple[Parents, ...]) -> float:
    """Estimate how long a fleet takes to fill with these parents, in units of one chunk over a link between hosts."""
    max_depth = 0
    by_member, by_links = Counter[str](), Counter[tuple[str, str]]()
    for parents in trees:
        depth: dict[str, int] = {}
        for member in parents:
            trail = [member]
            while trail[-1] in parents and trail[-1] not in depth:
                trail.append(parents[trail[-1]])
            for name in reversed(trail[:-1]):
                depth[name] = depth.get(parents[name], 0) + 1
        max_depth = max(max_depth, *depth.values())
        for child, name in parents.items():
            if nodes[name].host != nodes[child].host:
                by_member[name] += 1
                by_links[shared_links(nodes[name])] += 1
    num_links = {shared_links(node): num_shared_links(node) for node in nodes.values()}
    by_link = (count / num_links[links] for links, count in by_links.items() if num_links[links])
    # Number of copies that the busiest member, or the busiest link of a host, sends to other hosts.
    num_copies = max(max(by_member.values(), default=0), max(by_link, default=0.0)) / len(trees)
    return _num_left(nodes) * max(1.0, num_copies) + CHUNKS_A_HOP * max_depth


def _num_left(nodes: dict[str, Node]) -> int:
    return max(node.num_chunks - node.num_have for node in nodes.values())


def _ring_places(node: Node) -> tuple[tuple[str, ...], ...]:
    return ("host", node.host), ("rack", node.rack), ("any",)


def _ring_order(nodes: dict[str, Node]) -> list[Node]:
    first: dict[tuple[str, ...], int] = {}
    for i, node in enumerate(nodes.values()):
        for place in _ring_places(node):
            first.setdefault(place, i)
    return sorted(nodes.values(), key=lambda node: (first["rack", node.rack], first["host", node.host], node.order))


def _ring(order: Sequence[Node]) -> Parents:
    parents = {}
    for i, node in enumerate(order):
        before = (order[i - k] for k in range(1, min(len(order), SCANNED)))
        willing = (other for other in before if not other.last_resort and node.member not in other.complainers)
        if len(order) > 1:
            # A poor upstream is better than a gap in the ring, which would stall all members behind the gap.
            parents[node.member] = next(willing, order[i - 1]).member
    return parents


def _spans(parents: Parents) -> dict[str, tuple[int, int]]:
    """Return each member's number in a depth-first walk of the tree, and the last number below that member."""
    children: dict[str, list[str]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    first: dict[str, int] = {}
    spans: dict[str, tuple[int, int]] = {}
    # Use a stack, because recursion over a chain of 1,000 members would reach Python's limit.
    stack = [(root, False) for root in children if root not in parents]
    while stack:
        member, done = stack.pop()
        if done:
            spans[member] = (first[member], len(first) - 1)
            continue
        first[member] = len(first)
        stack.append((member, True))
        stack.extend((child, False) for child in children.get(member, ()))
    return spans
