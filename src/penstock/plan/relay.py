"""Choice of upstreams: receivers in chains below the whole holders, or in a ring while no member is whole.

In: what members say of one key. Out: the upstreams of each receiver, parent first, then substitutes.
Not here: which members are alive and complained of (`hub.directory`), which chunk is read from which (`fetch.run`).

    whole -> a -> b -> c      one child per link: a copy leaves each member once on its host, and once beyond it while
               -> d (far)     its host has links for that, so a fleet fills in about the time of one copy
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

MAX_DEPTH = 32
"""Members of a chain below a whole holder before the holder may get a second one, however little there is to copy: a
slow member slows all below it. Source: docs/design/003-fetch.md."""
CHUNKS_A_HOP = 12
"""A hop delays by about as many chunks' time at 50 GB/s (4 ms), fewer on slower links; a holder's second child beyond
its host delays both by a whole copy. So a chain may be as deep as a twelfth of the chunks. Source:
benchmarks/results/cpu2_202611/simulate.md."""
DEFAULT_CHILDREN = 8
"""Children of a whole holder that names no `max_readers`."""
DISTRUST = 2
"""Callers that must complain before a member is demoted for everyone."""
_SCANNED = 64
"""Candidates looked at for one receiver. A bound, since a key may have thousands of members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
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
    complainers: frozenset[str] = frozenset()
    """Members that complain of it, and are not sent there."""
    num_complaining: int = 0
    """Callers that complain, each once by what it authenticated with, however many members it speaks for."""
    parent: str = ""
    """Its upstream so far."""

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


def _places(node: Node) -> tuple[tuple[str, ...], ...]:
    """Return the places it belongs to, nearest first: host and kind of device, host, rack, anywhere."""
    kind = node.device.partition(":")[0]
    rack = (("rack", node.rack),) if node.rack else ()
    return ("kind", node.host, kind), ("host", node.host), *rack, ("any",)


class Relay:
    """The upstreams of every receiver of one key; a value once made.

    Attributes:
        parents: receiver -> the member it reads from in the first place. With a whole holder among the nodes, following
            them from any receiver ends at a whole one; without, they go round in a ring.

    Cost: O(n log n) to make, `upstreams` O(limit).
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        # Sorted, so that hubs that see the same members in another order give the same upstreams.
        self._nodes = {node.member: node for node in sorted(nodes, key=lambda node: node.order)}
        self._number = {member: i for i, member in enumerate(self._nodes)}
        self._ring = not any(node.whole for node in self._nodes.values())
        self.parents = _ring(self._nodes) if self._ring else _Chains(self._nodes).parents
        self._span = {} if self._ring else _spans(self.parents)
        self._choice: dict[tuple[str, ...], list[Node]] = {}
        best = sorted(
            self._nodes.values(), key=lambda node: (node.last_resort, not node.whole, -node.num_have, node.order)
        )
        for node in best:
            for place in _places(node):
                self._choice.setdefault(place, []).append(node)

    def upstreams(self, member: str, *, limit: int = 4) -> tuple[str, ...]:
        """Return the members to read from, in order: parent, its own parent, then the near and the far with most.

        Never itself; with a whole holder among the nodes, never one that hangs below it. Empty for a member that is
        whole or not among the nodes.
        """
        receiver = self._nodes.get(member)
        return () if receiver is None or receiver.whole else self.around(receiver, limit=limit)

    def around(self, receiver: Node, *, limit: int = 4) -> tuple[str, ...]:
        """Return the same for a node that need not be among the nodes: then it has no parent, and none is below it."""
        member = receiver.member
        good: dict[str, None] = {}
        bad: dict[str, None] = {}
        # Those of last resort are kept apart, and only fill what the others leave of the limit.
        for name in self._candidates(receiver):
            node = self._nodes[name]
            if name == member or name in good or self._below(name, member):
                continue
            (bad if node.last_resort or member in node.complainers else good)[name] = None
            if len(good) == limit:
                break
        # A poor parent still comes first where there is nothing better: its chunks are the ones that this one lacks.
        parent = self.parents.get(member)
        if parent in bad and not good:
            good[parent] = bad.pop(parent)
        return tuple([*good, *(name for name in bad if name not in good)][:limit])

    def _candidates(self, receiver: Node) -> Iterator[str]:
        """Yield members in the order in which a receiver should try them; some more than once."""
        parent = self.parents.get(receiver.member)
        if parent is not None:
            yield parent
            if parent in self.parents:
                yield self.parents[parent]
        for place in _places(receiver):
            # Each begins elsewhere among the equally good, so that not all fall upon one when parents fail.
            choice = self._choice.get(place, [])
            num_whole = sum(1 for node in choice[:_SCANNED] if node.whole and not node.last_resort)
            turn = self._number.get(receiver.member, crc32(receiver.member.encode())) % num_whole if num_whole else 0
            yield from (node.member for node in choice[turn:num_whole])
            yield from (node.member for node in choice[:turn])
            yield from (node.member for node in choice[num_whole : num_whole + _SCANNED])

    def _below(self, member: str, above: str) -> bool:
        """Return whether a member hangs below another: reading from it would close a circle."""
        first, last = self._span.get(above, (0, -1))
        return first < self._span.get(member, (-1, -1))[0] <= last


def _serves(parent: Node, child: Node) -> bool:
    """Return whether a parent is worth keeping: not demoted, nor far behind its child."""
    if parent.draining or parent.demoted or child.member in parent.complainers:
        return False
    # A parent may be a little behind: taking its child away for one chunk would change the tree at every beat.
    return parent.num_have + max(4, child.num_chunks // 8) >= child.num_have


def _ring(nodes: dict[str, Node]) -> dict[str, str]:
    """Return a ring in which each reads from the one that came before it; members of a rack or host are neighbours."""
    first: dict[tuple[str, ...], int] = {}
    for i, node in enumerate(nodes.values()):
        for place in (("rack", node.rack), ("host", node.host)):
            first.setdefault(place, i)
    order = sorted(nodes.values(), key=lambda node: (first["rack", node.rack], first["host", node.host], node.order))
    parents = {}
    for i, node in enumerate(order):
        before = (order[i - k] for k in range(1, min(len(order), _SCANNED)))
        keen = (other for other in before if not other.last_resort and node.member not in other.complainers)
        if len(order) > 1:
            # Better a poor upstream than none: a ring with a gap would stop all members behind it.
            parents[node.member] = next(keen, order[i - 1]).member
    return parents


def _spans(parents: dict[str, str]) -> dict[str, tuple[int, int]]:
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


_Offer = tuple[int, int, int, tuple[float, str]]
"""(rank, chunks it has below 0, depth, order): the least is taken first."""


class _Chains:
    """Builder of the chains: keeps parents that serve, then puts each head without one below the best open member."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self.parents: dict[str, str] = {}
        self._children: dict[str, list[str]] = {}
        self._load: dict[tuple[str, bool], int] = {}
        self._far: dict[str, int] = {}
        self._depth: dict[str, int] = {}
        self._open: dict[tuple[str, ...], list[_Offer]] = {}
        self._reserve: list[Node] = []
        num_chunks = max((node.num_chunks for node in nodes.values()), default=0)
        self._max_depth = max(MAX_DEPTH, num_chunks // CHUNKS_A_HOP)
        self._keep()
        for node in nodes.values():
            if node.whole:
                self._root(node, 0)
        heads = [node for node in nodes.values() if not node.whole and node.member not in self.parents]
        # Those of a host one after the other: each that hangs near the last gives its own link to another host.
        first = {node.host: node.order for node in reversed(nodes.values())}
        for head in sorted(heads, key=lambda node: (-node.num_have, first[node.host], node.order)):
            parent = self._choose(head)
            self._link(head, parent)
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
                self._link(child, parent)
        # The parents that members report are of different moments, so they may form a cycle.
        checked: set[str] = set()
        for start in self._nodes:
            trail: dict[str, None] = {}
            at: str | None = start
            while at is not None and at not in checked and at not in trail:
                trail[at] = None
                at = self.parents.get(at)
            if at is not None and at in trail:
                names = list(trail)
                self._cut(names[names.index(at) :])
            checked.update(trail)

    def _cut(self, cycle: list[str]) -> None:
        """Open a cycle of kept parents at the member that is furthest ahead."""
        child = min((self._nodes[name] for name in cycle), key=lambda node: (-node.num_have, node.order))
        parent = self._nodes[self.parents.pop(child.member)]
        self._children[parent.member].remove(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] -= 1
        self._far[parent.host] = self._far.get(parent.host, 0) - (not near)

    def _link(self, child: Node, parent: Node) -> None:
        """Make one member the child of another, and count the link: near ones by member, far ones by host too."""
        self.parents[child.member] = parent.member
        self._children.setdefault(parent.member, []).append(child.member)
        near = parent.host == child.host
        self._load[parent.member, near] = self._load.get((parent.member, near), 0) + 1
        self._far[parent.host] = self._far.get(parent.host, 0) + (not near)

    def _root(self, top: Node, depth: int) -> None:
        """Mark `top` as a whole holder or below one: it and all below it may take children."""
        stack = [(top, depth)]
        while stack:
            node, at = stack.pop()
            self._depth[node.member] = at
            if node.last_resort:
                self._reserve.append(node)
            else:
                self._offer(node)
            stack.extend((self._nodes[child], at + 1) for child in self._children.get(node.member, ()))

    def _rank(self, node: Node, near: bool) -> int | None:
        """Return how willingly it takes one more child over a near or a far link; None: not at all."""
        load = self._load.get((node.member, near), 0)
        if node.num_links and not near:
            load = max(load, self._far.get(node.host, 0) // node.num_links)
        if len(self._children.get(node.member, ())) >= (node.max_readers or DEFAULT_CHILDREN):
            return None
        if node.whole:
            return 2 * load
        if load:
            return None
        # Too deep: still open, but after the places directly below the holders.
        return 1 if self._depth[node.member] < self._max_depth else 2 * DEFAULT_CHILDREN

    def _offer(self, node: Node) -> None:
        """Put a member among those that take children, at every place where it does."""
        if node.last_resort:
            return
        for place in _places(node):
            rank = self._rank(node, place[0] in {"kind", "host"})
            if rank is not None:
                offer = rank, -node.num_have, self._depth[node.member], node.order
                heapq.heappush(self._open.setdefault(place, []), offer)

    def _choose(self, child: Node) -> Node:
        """Return the best open parent: one that is ahead, as near as possible; else any; else one of last resort."""
        for must_be_ahead in (True, False):
            for place in _places(child):
                parent = self._first_open(child, place, must_be_ahead=must_be_ahead)
                if parent is not None:
                    return parent
        usable = self._reserve or [node for node in self._nodes.values() if node.member in self._depth]

        def cost(node: Node) -> tuple[object, ...]:
            """Return what speaks against a node as a parent, the gravest first."""
            mine = _places(child)
            distance = next(i for i, place in enumerate(mine) if place in _places(node))
            return child.member in node.complainers, node.demoted, node.draining, distance, -node.num_have, node.order

        return min(usable, key=cost)

    def _first_open(self, child: Node, place: tuple[str, ...], *, must_be_ahead: bool) -> Node | None:
        """Return the most willing member of a place that this child may read from; None: there is none."""
        heap = self._open.get(place, [])
        near = place[0] in {"kind", "host"}
        skipped: list[_Offer] = []
        chosen = None
        while heap and chosen is None and len(skipped) < _SCANNED:
            rank, minus_have, depth, order = heap[0]
            node = self._nodes[order[1]]
            now = self._rank(node, near)
            # The heap is not changed when a member takes a child (that would be a search); stale entries are found
            # here.
            # It, or its host, has taken a child since.
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
