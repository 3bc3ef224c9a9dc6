"""The parents of receivers: chains below the whole holders, or two trees, and what the choice among them looks at.

In: nodes, which are what members say of one key. Out: receiver -> the member that it reads from in the first place.
Not here: the choice between chains and trees, substitutes of a parent (`relay`).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from math import sqrt

import msgspec

MAX_DEPTH = 32
"""Members of a chain below a whole holder before the holder may get a second one, however little there is to copy: a
slow member slows all below it. Source: docs/design/fetch.md."""
CHUNKS_A_HOP = 44
"""A hop delays by about as many chunks' time at 50 GB/s (15 ms), fewer on slower links; a holder's second child beyond
its host delays both by a whole copy. Source: benchmarks/results/cpu2_202611/simulate.md."""
NUM_TREES = 2
"""Trees that a relay may have: chunk c travels in tree c % 2. With two, a member that sends two children half of the
chunks each sends one copy in all."""
RACK_HOPS = 2
"""Hops that a place in the own rack may be deeper than the best place elsewhere; more would make a chain of racks."""
DEFAULT_CHILDREN = 8
"""Children of a member that names no `max_readers`."""
DISTRUST = 2
"""Callers that must complain before a member is demoted for everyone."""
SCANNED = 64
"""Candidates looked at for one receiver. A bound, since a key may have thousands of members."""


Parents = dict[str, str]
"""Receiver -> the member it reads from in the first place."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A member that has, or is getting, a key."""

    member: str
    host: str
    rack: str = ""
    device: str = "cpu"
    joined: float = 0.0
    """Order of coming; only compared."""
    num_have: int
    num_chunks: int
    draining: bool = False
    num_readers: int = 0
    max_readers: int = 0
    """0: no cap."""
    num_links: int = 0
    """Links of its host to others, each for one copy at once. 0: not known, each member has its own."""
    link: str = ""
    """Which of them its bytes take; empty: not known."""
    complainers: frozenset[str] = frozenset()
    """Members that complain of it, and are not sent there."""
    num_complaining: int = 0
    """Callers that complain, each once by what it authenticated with, however many members it speaks for."""
    parent: str = ""
    """Its upstream so far."""
    second_parent: str = ""
    """Its upstream so far for the chunks of the second tree; empty: the same."""
    follows_trees: bool = False
    """Whether it can read the chunks of two trees from two parents."""

    @property
    def whole(self) -> bool:
        """Return whether it has every chunk."""
        return self.num_have >= self.num_chunks

    @property
    def last_resort(self) -> bool:
        """Return whether it should get no new child while there is another choice."""
        return self.draining or self.demoted or 0 < self.max_readers <= self.num_readers

    @property
    def demoted(self) -> bool:
        """Return whether several complained of it: a single caller may have bad memory or a bad link itself, or lie."""
        return self.num_complaining >= DISTRUST

    @property
    def order(self) -> tuple[float, str]:
        """Return its sort key: the order of coming."""
        return self.joined, self.member


def shared_links(node: Node) -> tuple[str, str]:
    """Return what its readers beyond the host share: its own link if that is known, else all links of its host."""
    return node.host, node.link


def num_shared_links(node: Node) -> int:
    """Return how many copies that carries at once; 0: not known."""
    return 1 if node.link else node.num_links


def places(node: Node) -> tuple[tuple[str, ...], ...]:
    """Return the places it belongs to, nearest first: host and kind of device, host, rack, anywhere."""
    kind = node.device.partition(":")[0]
    rack = (("rack", node.rack),) if node.rack else ()
    return ("kind", node.host, kind), ("host", node.host), *rack, ("any",)


def _serves(parent: Node, child: Node) -> bool:
    """Return whether a parent is worth keeping: not demoted, nor far behind its child."""
    if parent.draining or parent.demoted or child.member in parent.complainers:
        return False
    # A parent may be a little behind: taking its child away for one chunk would change the tree at every beat.
    return parent.num_have + max(4, child.num_chunks // 8) >= child.num_have


def _furthest(node: Node) -> tuple[object, ...]:
    """Return a sort key: the member that is furthest ahead comes first."""
    return -node.num_have, node.order


def _cycles(parents: Parents) -> Iterator[list[str]]:
    """Yield the cycles that parents form, each once; the caller may open one before it asks for the next."""
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
"""Ranks in chains: a whole holder without children; a receiver, which takes one child; a whole holder, for each child
that it has; a receiver so deep that the places directly below the holders come first."""
_Offer = tuple[int, int, int, tuple[float, str]]
"""(rank, chunks it has below 0, depth, order): the least is taken first."""
_Poor = tuple[bool, bool, int, tuple[float, str]]
"""(demoted, draining, chunks it has below 0, order) of a member of last resort: the least is taken first."""


class Chains:
    """Builder of the chains: keeps parents that serve, then puts each head without one below the best open member."""

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
        # k chains below one holder take about k copies and the hops of hosts / k: together least where k is this.
        num_chains = max(1, round(sqrt(CHUNKS_A_HOP * num_hosts / max(1, num_chunks))))
        self._max_depth = max(MAX_DEPTH, -(-num_hosts // num_chains))
        self._keep()
        for node in nodes.values():
            if node.whole:
                self._root(node, 0)
        heads = [node for node in nodes.values() if not node.whole and node.member not in self.parents]
        # Those of a host one after the other: each that hangs near the last gives its own link to another host.
        first = {node.host: node.order for node in reversed(nodes.values())}
        for head in sorted(heads, key=lambda node: (-node.num_have, first[node.host], node.order)):
            parent = self._choose(head)
            self._attach(head, parent)
            self._offer(parent)
            self._root(head, self._depth[parent.member] + 1)

    def _keep(self) -> None:
        """Link members to the parents that they had, where those still serve; open the cycles that this may close."""
        # Those furthest ahead choose first: they lose most if their parent takes others before them.
        for child in sorted(self._nodes.values(), key=lambda node: -node.num_have):
            parent = self._nodes.get(child.parent)
            if parent is None or parent is child or child.whole or not _serves(parent, child):
                continue
            # More may read from it than its cap now allows; the rest get another parent below.
            cap = parent.max_readers or DEFAULT_CHILDREN
            if len(self._children.get(parent.member, ())) < cap:
                self._attach(child, parent)
        # The parents that members report are of different moments, so they may form a cycle.
        for cycle in _cycles(self.parents):
            self._cut(cycle)

    def _cut(self, cycle: list[str]) -> None:
        """Open a cycle of kept parents at the member that is furthest ahead."""
        child = min((self._nodes[name] for name in cycle), key=_furthest)
        parent = self._nodes[self.parents.pop(child.member)]
        self._children[parent.member].remove(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] -= 1
        self._far[shared_links(parent)] -= not near

    def _attach(self, child: Node, parent: Node) -> None:
        """Make one member the child of another, and count it: near ones by member, far ones by the host's links too."""
        self.parents[child.member] = parent.member
        self._children.setdefault(parent.member, []).append(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] = self._load.get((parent.member, near), 0) + 1
        self._far[shared_links(parent)] = self._far.get(shared_links(parent), 0) + (not near)

    def _root(self, top: Node, depth: int) -> None:
        """Mark `top` as a whole holder or below one: it and all below it may take children."""
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
        """Return how willingly it takes one more child over a near or a far link; None: not at all."""
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
        """Put a member among those that take children, at every place where it does."""
        if node.last_resort:
            return
        for place in places(node):
            rank = self._rank(node, place[0] in {"kind", "host"})
            if rank is not None:
                offer = rank, -node.num_have, self._depth[node.member], node.order
                heapq.heappush(self._open.setdefault(place, []), offer)

    def _choose(self, child: Node) -> Node:
        """Return the best open parent: one that is ahead, as near as possible; else any; else one of last resort."""
        for must_be_ahead in (True, False):
            for place in places(child):
                parent = self._first_open(child, place, must_be_ahead=must_be_ahead)
                if parent is not None:
                    return parent
        return self._last_resort(child)

    def _last_resort(self, child: Node) -> Node:
        """Return the best member of last resort, for a child that no member is open to."""
        best = []
        for distance, place in enumerate(places(child)):
            reserve = self._reserve.get(place, [])
            if reserve:
                # The first one that the child does not complain of: nearly always the first one of all.
                willing = (poor for poor in reserve if child.member not in self._nodes[poor[3][1]].complainers)
                demoted, draining, minus_have, order = next(willing, reserve[0])
                complains = child.member in self._nodes[order[1]].complainers
                best.append((complains, demoted, draining, distance, minus_have, order))
        if best:
            return self._nodes[min(best)[-1][1]]
        # There is none, so the child complains of all that are open.
        usable = (self._nodes[name] for name in self._depth)
        return min(usable, key=lambda node: (child.member in node.complainers, -node.num_have, node.order))

    def _first_open(self, child: Node, place: tuple[str, ...], *, must_be_ahead: bool) -> Node | None:
        """Return the most willing member of a place that this child may read from; None: there is none."""
        heap = self._open.get(place, [])
        near = place[0] in {"kind", "host"}
        skipped: list[_Offer] = []
        chosen = None
        while heap and chosen is None and len(skipped) < SCANNED:
            rank, minus_have, depth, order = heap[0]
            node = self._nodes[order[1]]
            now = self._rank(node, near)
            # It, or its host, has taken a child since: the heap is not searched at that time, so stale offers are found
            # here.
            if rank != now:
                heapq.heappop(heap)
                if now is not None:
                    heapq.heappush(heap, (now, minus_have, depth, order))
                continue
            if child.member in node.complainers or (must_be_ahead and -minus_have < child.num_have):
                skipped.append(heapq.heappop(heap))
                continue
            chosen = node
        # They are no parents of this child, but they may be of the next one.
        for item in skipped:
            heapq.heappush(heap, item)
        return chosen


_Rank = tuple[int, int]
"""(level, number): how willingly a member takes one more child; the least is taken first."""
_WITHIN_COPY, _KEPT_HALF, _OTHER_HALF, _OVER_COPY, _FULL, _DRAINING, _DEMOTED, _UNFIT = range(8)
"""Levels of ranks in trees: room within the one copy that a member sends; the half that the first head keeps; the half
meant for the other tree; more than a copy; more readers than it admits; about to leave; demoted; unfit for a child."""
_TreeOffer = tuple[_Rank, int, tuple[float, str]]
"""(rank, depth, order): the least is taken first."""


class Trees:
    """Builder of two trees, each for half of the chunks.

    One member of each host, its head, reads from other hosts, half of the chunks from each of two parents; the others
    of the host hang below it in a chain. Heads take turns: one sends two halves beyond its host in the first tree, the
    next one in the second. So each sends one copy, and both trees are as shallow as trees of two children are.

    Parents that serve are kept. A head that came alone gives one half of its copy to each tree: a chain of such heads
    is a chain as `Chains` makes it.
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
        # Those furthest ahead first: they lose most if others take the places that they could have.
        heads = sorted(self._heads.values(), key=_furthest)
        self._keep(heads)
        self._choose_trees(heads)
        for tree in range(NUM_TREES):
            for node in nodes.values():
                if node.whole:
                    self._root(node, tree, 0)
        own = [(self._tree_of.get(head.member), head) for head in heads]
        # First those that will have children, each in the tree that it sends in, in turns: else the first ones of one
        # tree would take the places that the other tree grows from. Then everyone where it only receives.
        self._place((tree, head) for tree, head in own if tree is not None)
        self._place((tree, head) for head in heads for tree in range(NUM_TREES))

    def _hang_hosts(self) -> None:
        """Choose a head for each host without a whole holder, and hang the others below it, or below the holder."""
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
                # The chain of the host begins at its head as if it were whole already.
                sources = [msgspec.structs.replace(node, num_have=node.num_chunks) for node in sources]
                near = Chains({node.member: node for node in (*sources, *rest)}).parents
                for tree in range(NUM_TREES):
                    for child, parent in near.items():
                        self._attach(self._nodes[child], self._nodes[parent], tree)

    def _as_head(self, node: Node) -> tuple[object, ...]:
        """Return what speaks against a member as the head of its host, the gravest first."""
        parent = self._nodes.get(node.parent)
        is_head = parent is not None and parent.host != node.host
        return node.draining or node.demoted, not is_head, -node.num_have, node.order

    def _keep(self, heads: list[Node]) -> None:
        """Link heads to the parents that they had, where those still serve; open the cycles that this may close."""
        for tree, parents in enumerate(self.trees):
            for head in heads:
                parent = self._nodes.get((tree and head.second_parent) or head.parent)
                if parent is None or parent.host == head.host or not _serves(parent, head):
                    continue
                if not self._is_full(parent) or self._reads(head, parent):
                    self._attach(head, parent, tree)
            for cycle in _cycles(parents):
                # Only the links of heads: those within a host form no cycle.
                child = min((self._heads[name] for name in cycle if name in self._heads), key=_furthest)
                self._detach(child, tree)

    def _choose_trees(self, heads: list[Node]) -> None:
        """Choose the tree in which each head sends: the one where it has children, else those with fewer heads."""
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
        """Link heads that have no parent in a tree to the best open one."""
        for tree, head in wanted:
            if head.member not in self.trees[tree]:
                # The heads of a tree can send one half more than they need. The first one keeps it for members that
                # come later: their tree then begins near the top, and not below the deepest members.
                if self._first[tree] is None and self._tree_of.get(head.member) == tree:
                    self._first[tree] = head.member
                parent = self._choose(head, tree)
                self._attach(head, parent, tree)
                self._root(head, tree, self._depth[tree][parent.member] + 1)

    def _attach(self, child: Node, parent: Node, tree: int) -> None:
        """Make one member the child of another in a tree, and count what leaves the parent's host."""
        # Who reads both trees from it is one reader.
        if not self._reads(child, parent):
            self._num_readers[parent.member] = self._num_readers.get(parent.member, 0) + 1
        self.trees[tree][child.member] = parent.member
        self._children[tree].setdefault(parent.member, []).append(child.member)
        if parent.host != child.host:
            self._halves[tree][parent.member] = self._halves[tree].get(parent.member, 0) + 1
            self._on_links[shared_links(parent)] = self._on_links.get(shared_links(parent), 0) + 1

    def _detach(self, child: Node, tree: int) -> None:
        """Undo `_attach` for a parent on another host."""
        parent = self._nodes[self.trees[tree].pop(child.member)]
        self._children[tree][parent.member].remove(child.member)
        self._num_readers[parent.member] -= not self._reads(child, parent)
        self._halves[tree][parent.member] -= 1
        self._on_links[shared_links(parent)] -= 1

    def _root(self, top: Node, tree: int, depth: int) -> None:
        """Mark `top` as a whole holder or below one in a tree: it and the heads below it may take children."""
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
        """Return whether a member reads from another in at least one tree."""
        return any(parents.get(child.member) == parent.member for parents in self.trees)

    def _is_full(self, node: Node) -> bool:
        """Return whether a member has as many readers as it admits."""
        return self._num_readers.get(node.member, 0) >= (node.max_readers or DEFAULT_CHILDREN)

    def _num_halves(self, node: Node) -> int:
        """Return the halves of a copy that leave its host by its link already."""
        first, second = self._halves
        halves = first.get(node.member, 0) + second.get(node.member, 0)
        num_links = num_shared_links(node)
        return max(halves, self._on_links.get(shared_links(node), 0) // num_links) if num_links else halves

    def _rank(self, node: Node, tree: int) -> _Rank:
        """Return how willingly it takes one more child of another host in a tree."""
        halves = self._num_halves(node)
        if node.demoted:
            return _DEMOTED, halves
        if node.draining:
            return _DRAINING, halves
        if self._is_full(node):
            return _FULL, halves
        if halves >= NUM_TREES:
            # All that read such a member, and those below them, take longer; a holder comes last, since everyone is
            # below it.
            return _OVER_COPY, 2 * halves + node.whole
        if node.whole:
            return (_OTHER_HALF if self._halves[tree].get(node.member) else _WITHIN_COPY), 0
        if self._tree_of.get(node.member, tree) not in {tree, None}:
            return _OTHER_HALF, 0
        return (_KEPT_HALF if halves and node.member == self._first[tree] else _WITHIN_COPY), 0

    def _choose(self, child: Node, tree: int) -> Node:
        """Return the best parent: within its one copy, then shallow, of the own rack if it is not much deeper."""
        best = self._best_offer(child, tree, "")
        # One that all others find full has a reader's place for the child that reads the other tree from it.
        other = self._nodes.get(self.trees[1 - tree].get(child.member, ""))
        if best[0][0] >= _FULL and other is not None and other.member in self._depth[tree] and _serves(other, child):
            return other
        if child.rack and (tree, child.rack) in self._open:
            near = self._best_offer(child, tree, child.rack)
            if near[0] <= best[0] and near[1] <= best[1] + RACK_HOPS:
                best = near
        return self._nodes[best[2][1]]

    def _best_offer(self, child: Node, tree: int, place: str) -> _TreeOffer:
        """Return the best offer of a rack, or of all, for a child; of rank `_UNFIT` if none that was seen serves it."""
        heap = self._open[tree, place]
        skipped: list[_TreeOffer] = []
        chosen = None
        while heap and chosen is None and len(skipped) < SCANNED:
            rank, depth, order = heap[0]
            node = self._nodes[order[1]]
            now = self._rank(node, tree)
            # It, or its link, has taken a child since, as in the heaps of chains.
            if now != rank:
                heapq.heapreplace(heap, (now, depth, order))
            elif _serves(node, child):
                chosen = heap[0]
            else:
                skipped.append(heapq.heappop(heap))
        # They are no parents of this child, but they may be of the next one.
        for offer in skipped:
            heapq.heappush(heap, offer)
        if chosen is None:
            willing = (offer for offer in skipped if child.member not in self._nodes[offer[2][1]].complainers)
            _, depth, order = next(willing, skipped[0])
            chosen = (_UNFIT, 0), depth, order
        return chosen
