"""Choice of upstreams: receivers in chains or two trees below the whole holders, or in a ring while none is whole.

In: what members say of one key. Out: the upstreams of each receiver, parent first, then substitutes.
Not here: the building of chains and trees (`relay_parents`), which members are alive and complained of
(`hub.snapshot`), which chunk is read from which (`fetcher.choice`).

    whole -> a -> b -> c      chains, one child per link: a copy leaves each member once on its host, and once beyond it
               -> d (far)     while its host has links for that, so a fleet fills in about the time of one copy

    whole -> a -> b, c, d     two trees, of the even and the odd chunks: each sends two halves of a copy to other
          -> b -> a, e, f     hosts, both in one tree. Used where hosts would form a long chain
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

from penstock.plan.relay_parents import (
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
"""The chunks of each tree, in reports."""
MIN_HOPS = 8
"""Trees are begun where they save the time of this many hops, 0.1 s at 50 GB/s: a receiver of two trees keeps two
leases, and follows two logs. Source: docs/design/fetch.md."""


class Relay:
    """The upstreams of every receiver of one key; once made, a value but for members that `append` adds to a ring.

    Attributes:
        trees: one or two; each is receiver -> the member it reads from in the first place, for the chunks of that tree
            (`NUM_TREES`) or, of one, for all chunks. With a whole holder among the nodes, following them from any
            receiver ends at a whole one; without, they go round in a ring.

    Cost: O(n log n) to make, while members complain of few others; `upstreams` looks at a bounded number of members.
    Order: from several threads, but `append` from one at a time.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        # Sorted, so that hubs that see the same members in another order give the same upstreams.
        self._nodes = {node.member: node for node in sorted(nodes, key=lambda node: node.order)}
        self._number = {member: i for i, member in enumerate(self._nodes)}
        has_whole = any(node.whole for node in self._nodes.values())
        self._is_ring = not has_whole
        ring = () if has_whole else _ring_order(self._nodes)
        self.trees: tuple[Parents, ...] = _chains_or_trees(self._nodes) if has_whole else (_ring(ring),)
        # Place -> the last member of it in the ring. A later one replaces those before it.
        self._last = {place: node.member for node in ring for place in _ring_places(node)}
        self._spans = tuple(_spans(parents) if has_whole else {} for parents in self.trees)
        self._choice: dict[tuple[str, ...], list[Node]] = {}
        best = sorted(
            self._nodes.values(), key=lambda node: (node.last_resort, not node.whole, -node.num_have, node.order)
        )
        # Of the first `SCANNED` of a place, those that are whole, which come first.
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
        """Return the first tree: the only one, unless the chunks are spread over two."""
        return self.trees[0]

    def __contains__(self, member: str) -> bool:
        """Return whether a member is among the nodes."""
        return member in self._nodes

    def append(self, node: Node) -> bool:
        """Add a newcomer to a ring, behind the last member of its host, rack or fleet; return False if this is no ring.

        No other member's upstreams change. Not for chains and trees: these place all that come within a second
        together, and built from single members they become deep, for good, since parents are kept.
        """
        if not self._is_ring or node.whole:
            return False
        before = [self._last[place] for place in _ring_places(node) if place in self._last]
        if before:
            # As in the ring: one that serves, if there is one here.
            keen = (name for name in before if not self._nodes[name].last_resort)
            parent = next((name for name in keen if node.member not in self._nodes[name].complainers), before[0])
            # A new dict, since other threads may be reading this one.
            self.trees = ({**self.trees[0], node.member: parent},)
            places_of_both = {*_ring_places(self._nodes[parent]), *_ring_places(node)}
        else:
            parent, places_of_both = "", set(_ring_places(node))
        # Where its parent was the last one, or nobody was.
        for place in places_of_both:
            if self._last.get(place, parent) == parent:
                self._last[place] = node.member
        self._nodes[node.member] = node
        return True

    def upstreams(self, member: str, *, tree: int = 0, limit: int = 4) -> tuple[str, ...]:
        """Return the members to read from, in order: parent, its own parent, then the near and the far with most.

        Never itself; with a whole holder among the nodes, never one that hangs below it in that tree. Empty for a
        member that is whole or not among the nodes.
        """
        receiver = self._nodes.get(member)
        return () if receiver is None or receiver.whole else self.around(receiver, tree=tree, limit=limit)

    def around(self, receiver: Node, *, tree: int = 0, limit: int = 4) -> tuple[str, ...]:
        """Return the same for a node that need not be among the nodes: then it has no parent, and none is below it."""
        member = receiver.member
        parent = self.trees[tree].get(member)
        good: dict[str, None] = {}
        bad: dict[str, None] = {}
        # Those of last resort are kept apart, and only fill what the others leave of the limit.
        for name in self._candidates(receiver, tree):
            node = self._nodes[name]
            if name == member or name in good or self._below(name, member, tree):
                continue
            # A parent whose readers' places are taken has given one of them to this child.
            is_poor = node.draining or node.demoted if name == parent else node.last_resort
            (bad if is_poor or member in node.complainers else good)[name] = None
            if len(good) == limit:
                break
        # A poor parent still comes first where there is nothing better: its chunks are the ones that this one lacks.
        if parent in bad and not good:
            good[parent] = bad.pop(parent)
        return tuple([*good, *(name for name in bad if name not in good)][:limit])

    def _candidates(self, receiver: Node, tree: int) -> Iterator[str]:
        """Yield members in the order in which a receiver should try them; some more than once."""
        parents = self.trees[tree]
        parent = parents.get(receiver.member)
        if parent is not None:
            yield parent
            if parent in parents:
                yield parents[parent]
        is_new = receiver.member not in self._number
        turn = crc32(receiver.member.encode()) if is_new else self._number[receiver.member]
        for place in places(receiver):
            # Each begins elsewhere among the equally good, so that not all fall upon one when parents fail.
            choice = self._choice.get(place, [])
            num_whole = self._num_whole[place]
            yield from _rotated(choice[:num_whole], turn)
            # To a newcomer, which has nothing yet and no parent, those that are not whole are equally good too.
            yield from _rotated(choice[num_whole : num_whole + SCANNED], turn if is_new else 0)

    def _below(self, member: str, above: str, tree: int) -> bool:
        """Return whether a member hangs below another in a tree: reading from it would close a circle."""
        spans = self._spans[tree]
        first, last = spans.get(above, (0, -1))
        return first < spans.get(member, (-1, -1))[0] <= last


def _rotated(nodes: list[Node], turn: int) -> Iterator[str]:
    """Yield the names of members from number `turn` (modulo their number) on, then those before it."""
    start = turn % len(nodes) if nodes else 0
    yield from (node.member for node in nodes[start:])
    yield from (node.member for node in nodes[:start])


def _chains_or_trees(nodes: dict[str, Node]) -> tuple[Parents, ...]:
    """Return chains; or two trees, where these are in use already or chains would take clearly longer."""
    receivers = [node for node in nodes.values() if not node.whole]
    # Who reads two trees goes on: relinking everyone costs more than a few hops. So it is where a receiver joins that
    # cannot follow them: it reads all chunks from its parents, which get all of them.
    if any(node.second_parent in nodes and node.second_parent != node.parent for node in receivers):
        return Trees(nodes).trees
    chains = (Chains(nodes).parents,)
    can_split = all(node.follows_trees for node in receivers)
    # Towards the end there is too little left for a change of parents to be worth it.
    lacks_most = 2 * sum(node.num_have for node in receivers) < sum(node.num_chunks for node in receivers)
    if not (can_split and lacks_most):
        return chains
    by_chains = _Estimate(nodes, chains)
    # About what the best trees take, without building them: one with two children a host, and the longest chain below a
    # head. This rejects trees for most fleets of some ten hosts, and for large ones of many links.
    per_host = Counter(node.host for node in receivers)
    least = by_chains.left + CHUNKS_A_HOP * (len(per_host).bit_length() + max(per_host.values()) - 1)
    worth = CHUNKS_A_HOP * MIN_HOPS
    if by_chains.time < least + worth:
        return chains
    trees = Trees(nodes).trees
    return trees if by_chains.time >= _Estimate(nodes, trees).time + worth else chains


class _Estimate:
    """About how long a fleet takes to fill by these parents.

    Attributes:
        depth: members of the longest way from a whole holder.
        left: chunks that the last receiver lacks.
        num_copies: most copies that leave a member, or one link of its host, for other hosts.
        time: until all are complete; the unit is the time of one chunk over a link between hosts.
    """

    def __init__(self, nodes: dict[str, Node], trees: tuple[Parents, ...]) -> None:
        self.depth = 0
        by_member, by_links = Counter[str](), Counter[tuple[str, str]]()
        for parents in trees:
            depth: dict[str, int] = {}
            for member in parents:
                trail = [member]
                while trail[-1] in parents and trail[-1] not in depth:
                    trail.append(parents[trail[-1]])
                for name in reversed(trail[:-1]):
                    depth[name] = depth.get(parents[name], 0) + 1
            self.depth = max(self.depth, *depth.values())
            for child, name in parents.items():
                if nodes[name].host != nodes[child].host:
                    by_member[name] += 1
                    by_links[shared_links(nodes[name])] += 1
        num_links = {shared_links(node): num_shared_links(node) for node in nodes.values()}
        of_links = (count / num_links[links] for links, count in by_links.items() if num_links[links])
        self.num_copies = max(max(by_member.values(), default=0), max(of_links, default=0.0)) / len(trees)
        self.left = max(node.num_chunks - node.num_have for node in nodes.values())
        self.time = self.left * max(1.0, self.num_copies) + CHUNKS_A_HOP * self.depth


def _ring_places(node: Node) -> tuple[tuple[str, ...], ...]:
    """Return the places whose members are neighbours in a ring, nearest first."""
    return ("host", node.host), ("rack", node.rack), ("any",)


def _ring_order(nodes: dict[str, Node]) -> list[Node]:
    """Return the order of a ring: that in which members came, those of a rack or host together."""
    first: dict[tuple[str, ...], int] = {}
    for i, node in enumerate(nodes.values()):
        for place in _ring_places(node):
            first.setdefault(place, i)
    return sorted(nodes.values(), key=lambda node: (first["rack", node.rack], first["host", node.host], node.order))


def _ring(order: Sequence[Node]) -> Parents:
    """Return the parents of a ring in which each member reads from the one before it."""
    parents = {}
    for i, node in enumerate(order):
        before = (order[i - k] for k in range(1, min(len(order), SCANNED)))
        keen = (other for other in before if not other.last_resort and node.member not in other.complainers)
        if len(order) > 1:
            # Better a poor upstream than none: a ring with a gap would stop all members behind it.
            parents[node.member] = next(keen, order[i - 1]).member
    return parents


def _spans(parents: Parents) -> dict[str, tuple[int, int]]:
    """Return per member its number in a walk of the trees, and the last number below it."""
    children: dict[str, list[str]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    first: dict[str, int] = {}
    spans: dict[str, tuple[int, int]] = {}
    # A stack and not recursion: a chain of 1,000 members would reach Python's limit.
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
