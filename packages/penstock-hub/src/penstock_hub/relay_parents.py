"""Parents of receivers, in chains below the complete holders or in two trees. `relay` chooses chains or trees."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from math import sqrt

import msgspec

from penstock.hub.messages import NUM_TREES

MAX_DEPTH = 32
"""Depth at which a chain below a complete holder ends, so that the holder gets a second chain, even for little data. A
slow member slows down all members below it. Source: docs/design/fetch.md."""
CHUNKS_A_HOP = 44
"""Delay of one hop (15 ms), expressed in chunks at 50 GB/s. On slower links a hop delays by fewer chunks. Source:
benchmarks/results/cpu2_202611/simulate.md."""
RACK_HOPS = 2
"""A parent in the same rack may be this many hops deeper than the best parent elsewhere. A larger value would form a
chain of racks."""
DEFAULT_CHILDREN = 8
"""Maximum number of children for a member that does not set `max_readers`."""
DISTRUST = 2
"""Number of callers that must complain before a member is demoted for all receivers."""
SCANNED = 64
"""Maximum number of candidates checked for one receiver, because a key may have thousands of members."""

Parents = dict[str, str]
"""Maps each receiver to the member from which it reads first."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A member that has a key or is receiving it."""

    member: str
    host: str
    rack: str = ""
    device: str = "cpu"
    joined: float = 0.0
    """Time at which the member joined. It is used only to order members."""
    num_have: int
    num_chunks: int
    draining: bool = False
    num_readers: int = 0
    max_readers: int = 0
    """Maximum number of readers. 0 means no maximum."""
    num_links: int = 0
    """Number of links from its host to other hosts, each for one copy at a time. 0 means unknown. Each member then
    counts as having its own link."""
    link: str = ""
    """Name of the network link that its bytes use. Empty means unknown."""
    complainers: frozenset[str] = frozenset()
    """Members that have complained about this member and are not sent to it."""
    num_complaining: int = 0
    """Number of callers that complain. A caller (its credentials) counts once, however many members it speaks for."""
    parent: str = ""
    second_parent: str = ""
    """The member's current upstream for the chunks of the second tree. Empty means the same as `parent`."""
    follows_trees: bool = False
    """Whether the member can read the chunks of two trees from two parents."""

    @property
    def whole(self) -> bool:
        """Return whether the member has every chunk."""
        return self.num_have >= self.num_chunks

    @property
    def last_resort(self) -> bool:
        """Return whether the member should get a new child only if there is no alternative."""
        return self.draining or self.demoted or 0 < self.max_readers <= self.num_readers

    @property
    def demoted(self) -> bool:
        """Return whether several callers complained about the member. One caller may have a broken link, or lie."""
        return self.num_complaining >= DISTRUST

    @property
    def order(self) -> tuple[float, str]:
        """Return the sort key: the order of joining."""
        return self.joined, self.member


def shared_links(node: Node) -> tuple[str, str]:
    """Return an identifier of the links that the node's readers on other hosts share."""
    return node.host, node.link


def num_shared_links(node: Node) -> int:
    """Return how many copies the shared links can carry at once. 0 means unknown."""
    return 1 if node.link else node.num_links


def places(node: Node) -> tuple[tuple[str, ...], ...]:
    """Return the node's topology levels, nearest first: host and kind of device, host, rack, and the whole fleet."""
    kind = node.device.partition(":")[0]
    rack = (("rack", node.rack),) if node.rack else ()
    return ("kind", node.host, kind), ("host", node.host), *rack, ("any",)


def _serves(parent: Node, child: Node) -> bool:
    """Return whether a child should keep this parent: it is not demoted and not far behind the child."""
    if parent.draining or parent.demoted or child.member in parent.complainers:
        return False
    # Tolerate a parent that is slightly behind. Otherwise the tree would change at every heartbeat.
    return parent.num_have + max(4, child.num_chunks // 8) >= child.num_have


def _furthest(node: Node) -> tuple[object, ...]:
    return -node.num_have, node.order


def _cycles(parents: Parents) -> Iterator[list[str]]:
    """Yield each cycle among the parents once. The caller may break a cycle before it requests the next one."""
    checked: set[str] = set()
    for start in list(parents):
        trail: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in checked and at not in trail:
            trail[at] = None
            at = parents.get(at)
        if at is not None and at in trail:
            names = list(trail)
            yield names[names.index(at) :]
        checked.update(trail)


_WHOLE, _RECEIVER, _EACH_CHILD = 0, 1, 2
_TOO_DEEP = _EACH_CHILD * DEFAULT_CHILDREN
"""Ranks of offers in chains, best first: a complete holder without children, a receiver (for one child), a complete
holder (once for each child that it has), and a receiver that is too deep."""
_Offer = tuple[int, int, int, tuple[float, str]]
"""(rank, minus the number of chunks, depth, order). The lowest offer is used first."""
_Poor = tuple[bool, bool, int, tuple[float, str]]
"""(demoted, draining, minus the number of chunks, order) of a member of last resort. The lowest is used first."""


class Chains:
    """Builder of chains, which keeps parents that can still serve and assigns the best parents to other members."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self.parents: Parents = {}
        self._children: dict[str, list[str]] = {}
        self._load: dict[tuple[str, bool], int] = {}
        self._far: dict[tuple[str, str], int] = {}
        self._depth: dict[str, int] = {}
        self._open: dict[tuple[str, ...], list[_Offer]] = {}
        self._reserve: dict[tuple[str, ...], list[_Poor]] = {}
        num_chunks = max((node.num_chunks for node in nodes.values()), default=0)
        num_hosts = len({node.host for node in nodes.values()})
        # With k chains below a holder, filling takes about k copies plus hosts / k hops. This k minimises the sum.
        num_chains = max(1, round(sqrt(CHUNKS_A_HOP * num_hosts / max(1, num_chunks))))
        self._max_depth = max(MAX_DEPTH, -(-num_hosts // num_chains))
        self._keep()
        for node in nodes.values():
            if node.whole:
                self._root(node, 0)
        heads = [node for node in nodes.values() if not node.whole and node.member not in self.parents]
        # Place the heads of one host consecutively. A head below another head of its host uses no link between hosts.
        first = {node.host: node.order for node in reversed(nodes.values())}
        for head in sorted(heads, key=lambda node: (-node.num_have, first[node.host], node.order)):
            parent = self._choose(head)
            self._attach(head, parent)
            self._offer(parent)
            self._root(head, self._depth[parent.member] + 1)

    def _keep(self) -> None:
        # Members with the most chunks choose first, because they lose most if their parent accepts other children.
        for child in sorted(self._nodes.values(), key=lambda node: -node.num_have):
            parent = self._nodes.get(child.parent)
            if parent is None or parent is child or child.whole or not _serves(parent, child):
                continue
            # The parent may have more children than its limit now allows. The excess children get a new parent later.
            cap = parent.max_readers or DEFAULT_CHILDREN
            if len(self._children.get(parent.member, ())) < cap:
                self._attach(child, parent)
        # Members report their parents at different times, so these parents may form a cycle.
        for cycle in _cycles(self.parents):
            self._cut(cycle)

    def _cut(self, cycle: list[str]) -> None:
        child = min((self._nodes[name] for name in cycle), key=_furthest)
        parent = self._nodes[self.parents.pop(child.member)]
        self._children[parent.member].remove(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] -= 1
        self._far[shared_links(parent)] -= not near

    def _attach(self, child: Node, parent: Node) -> None:
        self.parents[child.member] = parent.member
        self._children.setdefault(parent.member, []).append(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] = self._load.get((parent.member, near), 0) + 1
        self._far[shared_links(parent)] = self._far.get(shared_links(parent), 0) + (not near)

    def _root(self, top: Node, depth: int) -> None:
        """Mark `top` as connected to a complete holder. `top` and all members below it may get children."""
        stack = [(top, depth)]
        while stack:
            node, at = stack.pop()
            self._depth[node.member] = at
            if node.last_resort:
                for place in places(node):
                    poor = node.demoted, node.draining, -node.num_have, node.order
                    insort(self._reserve.setdefault(place, []), poor)
            else:
                self._offer(node)
            stack.extend((self._nodes[child], at + 1) for child in self._children.get(node.member, ()))

    def _rank(self, node: Node, near: bool) -> int | None:
        load = self._load.get((node.member, near), 0)
        if num_shared_links(node) and not near:
            load = max(load, self._far.get(shared_links(node), 0) // num_shared_links(node))
        if len(self._children.get(node.member, ())) >= (node.max_readers or DEFAULT_CHILDREN):
            return None
        if node.whole:
            return _WHOLE + _EACH_CHILD * load
        if load:
            return None
        return _RECEIVER if self._depth[node.member] < self._max_depth else _TOO_DEEP

    def _offer(self, node: Node) -> None:
        if node.last_resort:
            return
        for place in places(node):
            rank = self._rank(node, place[0] in {"kind", "host"})
            if rank is not None:
                offer = rank, -node.num_have, self._depth[node.member], node.order
                heapq.heappush(self._open.setdefault(place, []), offer)

    def _choose(self, child: Node) -> Node:
        for must_be_ahead in (True, False):
            for place in places(child):
                parent = self._first_open(child, place, must_be_ahead=must_be_ahead)
                if parent is not None:
                    return parent
        return self._last_resort(child)

    def _last_resort(self, child: Node) -> Node:
        best = []
        for distance, place in enumerate(places(child)):
            reserve = self._reserve.get(place, [])
            if reserve:
                # In nearly all cases, the child accepts the first member.
                willing = (poor for poor in reserve if child.member not in self._nodes[poor[3][1]].complainers)
                demoted, draining, minus_have, order = next(willing, reserve[0])
                complains = child.member in self._nodes[order[1]].complainers
                best.append((complains, demoted, draining, distance, minus_have, order))
        if best:
            return self._nodes[min(best)[-1][1]]
        # The child has complained about all open members.
        usable = (self._nodes[name] for name in self._depth)
        return min(usable, key=lambda node: (child.member in node.complainers, -node.num_have, node.order))

    def _first_open(self, child: Node, place: tuple[str, ...], *, must_be_ahead: bool) -> Node | None:
        heap = self._open.get(place, [])
        near = place[0] in {"kind", "host"}
        skipped: list[_Offer] = []
        chosen = None
        while heap and chosen is None and len(skipped) < SCANNED:
            rank, minus_have, depth, order = heap[0]
            node = self._nodes[order[1]]
            now = self._rank(node, near)
            # An offer is stale if the member or its host has gained a child since the offer. Correct such offers now.
            if rank != now:
                heapq.heappop(heap)
                if now is not None:
                    heapq.heappush(heap, (now, minus_have, depth, order))
                continue
            if child.member in node.complainers or (must_be_ahead and -minus_have < child.num_have):
                skipped.append(heapq.heappop(heap))
                continue
            chosen = node
        # Skipped members cannot be the parent of this child, but may be the parent of the next child.
        for item in skipped:
            heapq.heappush(heap, item)
        return chosen


_Rank = tuple[int, int]
"""(level, number). The member with the lowest rank gets the next child."""
_WITHIN_COPY, _KEPT_HALF, _OTHER_HALF, _OVER_COPY, _FULL, _DRAINING, _DEMOTED, _UNFIT = range(8)
"""Levels of ranks in trees, best first: capacity within the one copy that a member sends, the half that the first head
reserves, the half for the other tree, more than one copy, more readers than allowed, draining, demoted, and unsuitable
for a child."""
_TreeOffer = tuple[_Rank, int, tuple[float, str]]
"""(rank, depth, order). The lowest offer is used first."""


class Trees:
    """Builder of two trees, each for half of the chunks.

    One member of each host, the head, reads from other hosts, half of the chunks from each of two parents. The other
    members of the host form a chain below the head. Heads alternate: one sends two halves to other hosts in the first
    tree, the next head in the second. So each head sends one copy, and both trees are as shallow as binary trees.

    Parents that can still serve are kept. A head that joins alone sends half of its copy in each tree.
    """

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self.trees: tuple[Parents, Parents] = ({}, {})
        self._children: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
        self._num_readers: dict[str, int] = {}
        self._halves: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._on_links: dict[tuple[str, str], int] = {}
        self._depth: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._open: dict[tuple[int, str], list[_TreeOffer]] = {}
        self._heads: dict[str, Node] = {}
        self._tree_of: dict[str, int | None] = {}
        self._first: list[str | None] = [None] * NUM_TREES
        self._hang_hosts()
        # Heads with the most chunks go first, because they lose most if their parents accept other children.
        heads = sorted(self._heads.values(), key=_furthest)
        self._keep(heads)
        self._choose_trees(heads)
        for tree in range(NUM_TREES):
            for node in nodes.values():
                if node.whole:
                    self._root(node, tree, 0)
        own = [(self._tree_of.get(head.member), head) for head in heads]
        # First place each head in the tree in which it sends. Otherwise the first heads of one tree would use up the
        # parents below which the other tree grows. Then place all heads in the tree in which they only receive.
        self._place((tree, head) for tree, head in own if tree is not None)
        self._place((tree, head) for head in heads for tree in range(NUM_TREES))

    def _hang_hosts(self) -> None:
        by_host: dict[str, list[Node]] = {}
        for node in self._nodes.values():
            by_host.setdefault(node.host, []).append(node)
        for members in by_host.values():
            sources = [node for node in members if node.whole and not (node.draining or node.demoted)]
            rest = [node for node in members if not node.whole]
            if rest and not sources:
                head = min(rest, key=self._as_head)
                self._heads[head.member] = head
                rest.remove(head)
                sources = [head]
            if rest:
                # Treat the head as complete, so that its host's chain begins at the head.
                sources = [msgspec.structs.replace(node, num_have=node.num_chunks) for node in sources]
                near = Chains({node.member: node for node in (*sources, *rest)}).parents
                for tree in range(NUM_TREES):
                    for child, parent in near.items():
                        self._attach(self._nodes[child], self._nodes[parent], tree)

    def _as_head(self, node: Node) -> tuple[object, ...]:
        parent = self._nodes.get(node.parent)
        is_head = parent is not None and parent.host != node.host
        return node.draining or node.demoted, not is_head, -node.num_have, node.order

    def _keep(self, heads: list[Node]) -> None:
        for tree, parents in enumerate(self.trees):
            for head in heads:
                parent = self._nodes.get((tree and head.second_parent) or head.parent)
                if parent is None or parent.host == head.host or not _serves(parent, head):
                    continue
                if not self._is_full(parent) or self._reads(head, parent):
                    self._attach(head, parent, tree)
            for cycle in _cycles(parents):
                # Links within a host form no cycle, so break the cycle at a head.
                child = min((self._heads[name] for name in cycle if name in self._heads), key=_furthest)
                self._detach(child, tree)

    def _choose_trees(self, heads: list[Node]) -> None:
        """Choose the tree in which each head sends: the tree where it has children, or the tree with fewer heads."""
        count = [0] * NUM_TREES
        undecided = []
        for head in heads:
            sends = [tree for tree in range(NUM_TREES) if self._halves[tree].get(head.member)]
            if sends:
                self._tree_of[head.member] = sends[0] if len(sends) == 1 else None
                count[sends[0]] += len(sends) == 1
            elif not (head.draining or head.demoted):
                undecided.append(head)
        for head in undecided:
            tree = count.index(min(count))
            self._tree_of[head.member] = tree
            count[tree] += 1

    def _place(self, wanted: Iterable[tuple[int, Node]]) -> None:
        for tree, head in wanted:
            if head.member not in self.trees[tree]:
                # The heads of a tree can send one half more than required. The first head reserves that half for
                # members that join later, so that their subtree begins near the top.
                if self._first[tree] is None and self._tree_of.get(head.member) == tree:
                    self._first[tree] = head.member
                parent = self._choose(head, tree)
                self._attach(head, parent, tree)
                self._root(head, tree, self._depth[tree][parent.member] + 1)

    def _attach(self, child: Node, parent: Node, tree: int) -> None:
        """Make one member the child of another in a tree, and count the halves that leave the parent's host."""
        # A member that reads from the same parent in both trees counts as one reader.
        if not self._reads(child, parent):
            self._num_readers[parent.member] = self._num_readers.get(parent.member, 0) + 1
        self.trees[tree][child.member] = parent.member
        self._children[tree].setdefault(parent.member, []).append(child.member)
        if parent.host != child.host:
            self._halves[tree][parent.member] = self._halves[tree].get(parent.member, 0) + 1
            self._on_links[shared_links(parent)] = self._on_links.get(shared_links(parent), 0) + 1

    def _detach(self, child: Node, tree: int) -> None:
        parent = self._nodes[self.trees[tree].pop(child.member)]
        self._children[tree][parent.member].remove(child.member)
        self._num_readers[parent.member] -= not self._reads(child, parent)
        self._halves[tree][parent.member] -= 1
        self._on_links[shared_links(parent)] -= 1

    def _root(self, top: Node, tree: int, depth: int) -> None:
        """Mark `top` as connected to a complete holder in a tree. `top` and the heads below it may get children."""
        stack = [(top.member, depth)]
        while stack:
            name, at = stack.pop()
            self._depth[tree][name] = at
            node = self._nodes[name]
            if node.whole or name in self._heads:
                rank = self._rank(node, tree)
                for place in ("", node.rack) if node.rack else ("",):
                    heapq.heappush(self._open.setdefault((tree, place), []), (rank, at, node.order))
            stack.extend((child, at + 1) for child in self._children[tree].get(name, ()))

    def _reads(self, child: Node, parent: Node) -> bool:
        return any(parents.get(child.member) == parent.member for parents in self.trees)

    def _is_full(self, node: Node) -> bool:
        return self._num_readers.get(node.member, 0) >= (node.max_readers or DEFAULT_CHILDREN)

    def _num_halves(self, node: Node) -> int:
        first, second = self._halves
        halves = first.get(node.member, 0) + second.get(node.member, 0)
        num_links = num_shared_links(node)
        return max(halves, self._on_links.get(shared_links(node), 0) // num_links) if num_links else halves

    def _rank(self, node: Node, tree: int) -> _Rank:
        halves = self._num_halves(node)
        if node.demoted:
            return _DEMOTED, halves
        if node.draining:
            return _DRAINING, halves
        if self._is_full(node):
            return _FULL, halves
        if halves >= NUM_TREES:
            # Another child slows all members below a node. A complete holder comes last, as all members are below it.
            return _OVER_COPY, 2 * halves + node.whole
        if node.whole:
            return (_OTHER_HALF if self._halves[tree].get(node.member) else _WITHIN_COPY), 0
        if self._tree_of.get(node.member, tree) not in {tree, None}:
            return _OTHER_HALF, 0
        return (_KEPT_HALF if halves and node.member == self._first[tree] else _WITHIN_COPY), 0

    def _choose(self, child: Node, tree: int) -> Node:
        """Return the best parent, which is near the root or in the child's rack and sends less than one copy."""
        best = self._best_offer(child, tree, "")
        # If all offers are full, the child's parent in the other tree still accepts it, because it is already a reader.
        other = self._nodes.get(self.trees[1 - tree].get(child.member, ""))
        if best[0][0] >= _FULL and other is not None and other.member in self._depth[tree] and _serves(other, child):
            return other
        if child.rack and (tree, child.rack) in self._open:
            near = self._best_offer(child, tree, child.rack)
            if near[0] <= best[0] and near[1] <= best[1] + RACK_HOPS:
                best = near
        return self._nodes[best[2][1]]

    def _best_offer(self, child: Node, tree: int, place: str) -> _TreeOffer:
        """Return the best offer of a rack or the fleet, with rank `_UNFIT` if no checked member serves the child."""
        heap = self._open[tree, place]
        skipped: list[_TreeOffer] = []
        chosen = None
        while heap and chosen is None and len(skipped) < SCANNED:
            rank, depth, order = heap[0]
            node = self._nodes[order[1]]
            now = self._rank(node, tree)
            # An offer is stale if the member or its link has gained a child since the offer.
            if now != rank:
                heapq.heapreplace(heap, (now, depth, order))
            elif _serves(node, child):
                chosen = heap[0]
            else:
                skipped.append(heapq.heappop(heap))
        # Skipped members cannot be the parent of this child, but may be the parent of the next child.
        for offer in skipped:
            heapq.heappush(heap, offer)
        if chosen is None:
            willing = (offer for offer in skipped if child.member not in self._nodes[offer[2][1]].complainers)
            _, depth, order = next(willing, skipped[0])
            chosen = (_UNFIT, 0), depth, order
        return chosen
