"""Chooses the chunks that a fetch reads from each upstream, from the hub's orders and the missing chunks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from penstock.fetcher.upstream import UNNAMED, UpstreamReader
from penstock.hub.messages import UpstreamsReply
from penstock.types import I64, Bools


class ChunkChoice:
    """The upstreams of a fetch, and the chunks that are present or being read. The owner's lock guards this object."""

    def __init__(self, have: Bools, flying: Bools) -> None:
        self.readers: list[UpstreamReader] = []
        self.num_trees = 1
        self._have = have
        self._flying = flying
        self._is_placed = False

    def ranks(self, reply: UpstreamsReply) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each member after a reply from the hub, which may change the number of trees."""
        if reply.is_placed or not self._is_placed:
            self._is_placed = reply.is_placed
            self.num_trees = max(1, len(reply.orders))
            orders = reply.orders or (tuple(range(len(reply.upstreams))),)
            return {
                upstream.member: tuple(order.index(i) if i in order else UNNAMED for order in orders)
                for i, upstream in enumerate(reply.upstreams)
            }
        # A restarted hub names arbitrary holders, so keep the parents by ranking new upstreams last.
        ranks = {reader.upstream.member: reader.ranks for reader in self.readers}
        behind = 1 + max((rank for by_tree in ranks.values() for rank in by_tree if rank != UNNAMED), default=-1)
        new = (upstream.member for upstream in reply.upstreams if upstream.member not in ranks)
        return ranks | {member: (behind + i,) * self.num_trees for i, member in enumerate(new)}

    def rank(self, ranks: dict[str, tuple[int, ...]]) -> None:
        """Set the ranks of the readers. Readers without a rank come last."""
        # With one order, a reader without a rank is a last resort. With trees, no upstream waits for that reader.
        last = (len(ranks),) if self.num_trees == 1 else (UNNAMED,) * self.num_trees
        for reader in self.readers:
            reader.ranks = ranks.get(reader.upstream.member, last)
        self.readers.sort(key=lambda reader: min(reader.ranks))

    def is_idle(self) -> bool:
        """Return True if nothing is being read and no upstream has a chunk for this fetch."""
        return not (self._flying.any() or any((reader.has & ~self._have).any() for reader in self.readers))

    def next_chunks(self, reader: UpstreamReader) -> I64:
        """Return the chunks to read from an upstream now, which no earlier upstream will provide."""
        free = {tree for tree in range(self.num_trees) if self.may_read(reader, tree)}
        chunks: I64 = np.flatnonzero(self._wanted(reader, free))[: reader.step_chunks]
        # Do not probe a parent, because its pace is known from the reads of its tree.
        if len(chunks) or len(free) == self.num_trees or (self.num_trees > 1 and reader.is_parent):
            return chunks
        others: I64 = np.flatnonzero(self._wanted(reader, set(range(self.num_trees))))[: reader.step_chunks]
        return others[-1:] if len(others) and reader.should_probe() else others[:0]

    def may_read(self, reader: UpstreamReader, tree: int) -> bool:
        """Return True if no earlier upstream can provide a tree's chunks equally soon."""
        return all(reader.is_much_faster_than(other) for other in self._earlier(reader, tree))

    def wants_news(self, reader: UpstreamReader) -> bool:
        """Return True if the upstream's log should be requested at once, because few readable chunks are known."""
        # An upstream without a rank in a tree gets an extra log request only if all upstreams with a rank stall.
        own = {tree for tree in range(self.num_trees) if not self._earlier(reader, tree)}
        return bool(own) and int(self._wanted(reader, own).sum()) < reader.step_chunks

    def _earlier(self, reader: UpstreamReader, tree: int) -> list[UpstreamReader]:
        rank = reader.ranks[tree]
        return [other for other in self.readers if other.ranks[tree] < rank and other.holds_back(tree)]

    def _wanted(self, reader: UpstreamReader, trees: Collection[int]) -> Bools:
        wanted = reader.has & ~self._have & ~self._flying
        if len(trees) < self.num_trees:
            for tree in set(range(self.num_trees)).difference(trees):
                wanted[tree :: self.num_trees] = False
        return wanted

    def pop_unneeded(self) -> list[UpstreamReader]:
        """Remove and return upstreams that are not needed once every tree has a working parent."""
        # With one order, all upstreams stay as spares. With trees, spares would occupy slots that children need.
        if self.num_trees == 1 or not all(self._has_working_parent(tree) for tree in range(self.num_trees)):
            return []
        unneeded = [
            reader
            for reader in self.readers
            if not (reader.error or reader.num_flying) and (min(reader.ranks) == UNNAMED or self._is_slow_spare(reader))
        ]
        self.readers = [reader for reader in self.readers if reader not in unneeded]
        return unneeded

    def _has_working_parent(self, tree: int) -> bool:
        first = min(self.readers, key=lambda reader: reader.ranks[tree], default=None)
        return first is not None and first.is_connected and first.holds_back(tree)

    def _is_slow_spare(self, reader: UpstreamReader) -> bool:
        return reader.is_measured and not any(self.may_read(reader, tree) for tree in range(self.num_trees))
