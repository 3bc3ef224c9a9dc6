"""Keep blocks in tiers with budgets; the block that was used least recently makes room.

In: tiers, fastest first; blocks with a way to read them anew. Out: rooms, pinned while they are used; statistics.
Not here: how blocks move (`tier_moves`), the tiers themselves (`tier`), who uses a block (`keeper.resident_model`).

    source --fill--> gpu <--move--> host <--move--> disk --forget--> source
                      '-- pin: here, and not elsewhere, until the `with` block ends

A block moves: it is in one tier at a time, and in two only while a reader still uses the old place. The source is never
written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from penstock.closing import Closing
from penstock.errors import ConfigError, NotFound, SourceBusy
from penstock.memory.tier import Block, Room
from penstock.memory.tier_moves import SOURCE, BlockUser, Entry, Fill, Level, Moves
from penstock.memory.tier_stats import TiersStats, TierStats

__all__ = ["SOURCE", "Block", "BlockUser", "Fill", "Level", "Tiers"]


class Tiers(Closing):
    """Blocks in tiers with budgets. Any thread calls any method; a context manager whose end frees every room.

    Args:
        levels: fastest first.
        stall_s: deadline, by progress, of waiting for another's move.
        num_prefetching: prefetches under way at once.
    """

    def __init__(self, levels: Sequence[Level], *, stall_s: float = 30.0, num_prefetching: int = 2) -> None:
        self._moves = Moves(levels, stall_s)
        self._pool = ThreadPoolExecutor(num_prefetching, thread_name_prefix="penstock-prefetch")

    def put(
        self, block: Block, fill: Fill, *, tier: str | None = None, again: bool = True, user: BlockUser | None = None
    ) -> None:
        """Take a block in: make room for it, and have it filled.

        Args:
            fill: writes its bytes; called again whenever it comes from its source.
            tier: where to; None: the fastest; `source`: nowhere yet.
            again: whether `fill` can be called again. A block of which it cannot never leaves the last tier.

        Raises:
            ConfigError: it is there already.
            BudgetTooSmall: no room can be made; says the least that would do. Any error that `fill` raises.
        """
        moves, to = self._moves, self._index(tier)
        entry = Entry(block, fill, again, user, moves.source)
        with moves.state:
            if block in moves.entries:
                raise ConfigError(f"{block} was put in these tiers already")
            moves.entries[block] = entry
        if to == moves.source:
            moves.idle(entry)
            return
        try:
            place = moves.bring(entry, to, is_new=True)
        except BaseException:
            moves.forget(entry)
            raise
        moves.unpin(entry, place)

    @contextmanager
    def pin(self, block: Block, tier: str | None = None) -> Iterator[Room]:
        """Return its room, which stays there until the `with` block ends.

        Args:
            tier: it is brought up to this one if it is further down; None: the fastest; `source`: it stays where it is.

        Raises:
            NotFound: there is no such block. ConfigError: it is in no tier, and none was named.
            BudgetTooSmall, and what the move or its source raises: see `put`.
        """
        entry, to = self._entry(block), self._index(tier)
        place = self._moves.bring(entry, to)
        try:
            yield place.room
        finally:
            self._moves.unpin(entry, place)

    def promote(self, block: Block, tier: str | None = None) -> None:
        """Bring it up to this tier, or the fastest; see `pin`."""
        with self.pin(block, tier):
            pass

    def prefetch(self, block: Block, tier: str | None = None) -> Future[None]:
        """Start to `promote` in the background, in the order of the calls. The future has the error, if any."""
        return self._pool.submit(self._prefetch, self._entry(block), self._index(tier))

    def _prefetch(self, entry: Entry, to: int) -> None:
        self._moves.unpin(entry, self._moves.bring(entry, to))

    def demote(self, block: Block) -> None:
        """Move it down to the next tier that has room.

        Raises:
            SourceBusy: it is pinned, its user needs it, or it is in its source already.
            BudgetTooSmall: there is nowhere to go.
        """
        entry = self._entry(block)
        with self._moves.turn():
            if not self._moves.demote(entry):
                raise SourceBusy(f"{block} is in {self._moves.names[entry.at]}, in use")

    def discard(self, block: Block) -> None:
        """Drop its bytes in every tier, since they are damaged: it is only in its source from now on.

        Its user has no veto. SourceBusy: it is pinned, or moves; NotFound: it is not there.
        """
        entry = self._entry(block)
        with self._moves.turn():
            self._moves.discard(entry)

    def drop(self, block: Block) -> None:
        """Remove a block. SourceBusy: it is pinned; NotFound: it is not there."""
        entry = self._entry(block)
        with self._moves.turn():
            self._moves.remove(entry)

    def where(self, blocks: Iterable[Block]) -> list[str | None]:
        """Return the tier that each of these is in, or `source`; None: not known here."""
        with self._moves.state:
            entries = [self._moves.entries.get(block) for block in blocks]
            return [None if entry is None else self._moves.names[entry.at] for entry in entries]

    def stats(self) -> TiersStats:
        """Return the blocks in each tier now, and the moves so far."""
        moves = self._moves
        with moves.state:
            at = [entry.at for entry in moves.entries.values()]
            tiers = {
                level.tier.name: TierStats(
                    num_blocks=at.count(i),
                    used_bytes=moves.used_bytes[i],
                    peak_bytes=moves.peak_bytes[i],
                    budget_bytes=level.budget_bytes,
                )
                for i, level in enumerate(moves.levels)
            }
            return TiersStats(tiers=tiers, links=dict(moves.links), hits=moves.hits, misses=moves.misses)

    def close(self) -> None:
        """Free every room; none may be in use. Prefetches that have not begun are cancelled. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        with self._moves.state:
            entries = list(self._moves.entries.values())
        for entry in entries:
            self._moves.forget(entry)
            self._moves.release(entry)
        for level in self._moves.levels:
            level.tier.close()

    def _index(self, tier: str | None) -> int:
        names = self._moves.names
        if tier is not None and tier not in names:
            raise ConfigError(f"no tier {tier!r} here", hint=f"there are {', '.join(names)}")
        return 0 if tier is None else names.index(tier)

    def _entry(self, block: Block) -> Entry:
        with self._moves.state:
            entry = self._moves.entries.get(block)
        if entry is None:
            raise NotFound(f"{block} is not in these tiers")
        return entry
