"""Keep blocks in tiers with budgets; the block that was used least recently makes room.

In: tiers, fastest first; blocks with a way to read them anew. Out: rooms, pinned while they are used; statistics.
Not here: how blocks move (`tier_moves`), the tiers themselves (`tier`), who uses a block (`keeper.resident_model`).

    source --fill--> gpu <--move--> host <--move--> disk --forget--> source
                      '-- pin: here, and not elsewhere, until the `with` block ends

A block moves: it is in one tier at a time, and in two only while a reader still uses the old place. The source is never
written to.

Moving blocks between tiers within their budgets: the inside of `tiers`.

In: tiers with budgets; entries, each with a way to fill it anew. Out: places, pinned; what moved.
Not here: names of blocks, prefetching (`tiers`); what a tier is (`tier`).

One move at a time (`turn`), since moves share links; filling from a source runs in parallel. An entry that is moved or
filled is `busy`: no other thread pins or moves it meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import BudgetTooSmall, ConfigError, DiskFull, IntegrityError, NotFound, SourceBusy, SourceStalled
from penstock.lifecycle import Closing
from penstock.memory.tier import Block, LinkStats, Room, Tier, TiersStats, TierStats, move

log = logging.getLogger("penstock.memory")

SOURCE = "source"
"""The place of a block that is in no tier: it can be read anew."""

Fill = Callable[[Room], None]
"""Write all of a block's bytes into a room, from its source; has deadlines of its own."""


class BlockUser(Protocol):
    """A user of a block that does not pin it."""

    def vacate(self) -> bool:
        """Stop using the block, which is about to leave its room. Return False if it is in use: then it stays."""
        ...

    def moved(self, tier: str, room: Room | None) -> None:
        """Note that the block is in `tier` now; after a move that failed, still."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A tier and its budget."""

    tier: Tier
    budget_bytes: int | None = None
    """None: no bound but the memory there is."""


@dataclass(slots=True, eq=False)
class Place:
    """A room in a tier, and how many use it."""

    room: Room
    charge: int
    pins: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A block; `at` is its tier, `places` all of its rooms: more than one only while an old one is read."""

    block: Block
    fill: Fill
    again: bool
    user: BlockUser | None
    at: int
    used: int = 0
    busy: bool = True
    gone: bool = False
    places: dict[int, Place] = field(default_factory=dict)


class Moves:
    """The blocks' entries and the moves between tiers; see the module.

    Attributes:
        names: of the tiers, fastest first, and `source`.
        source: its index.
        state: the lock and condition over entries and counts.
    """

    def __init__(self, levels: Sequence[Level], stall_s: float) -> None:
        self.levels, self.source, self._stall_s = tuple(levels), len(levels), stall_s
        self.names = [*(level.tier.name for level in levels), SOURCE]
        self.entries: dict[Block, Entry] = {}
        self.used_bytes, self.peak_bytes = [0] * len(levels), [0] * len(levels)
        self.links: dict[tuple[str, str], LinkStats] = {}
        self.hits = self.misses = 0
        self.clock = itertools.count(1)
        # Two locks: `state` for a moment, to look and count; the mover's for whole moves, so that looking never waits
        # for one.
        self.state, self._mover = threading.Condition(), threading.Lock()
        self._progress = time.monotonic()
        self._is_left = False
        """Rooms were closed whose memory no tier has given back."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the right to move for a `with` block. SourceStalled: another thread's move makes no progress."""
        while not self._mover.acquire(timeout=min(1.0, self._stall_s)):
            if time.monotonic() - self._progress > self._stall_s:
                raise SourceStalled(f"another move between these tiers made no progress for {self._stall_s} s")
        self._note()
        try:
            yield
        finally:
            self._trim()
            self._mover.release()
            self._trim()  # what others left meanwhile

    def _trim(self) -> None:
        """Have the tiers free the memory of rooms that were closed in this turn and not reused."""
        if self._is_left:
            self._is_left = False
            for level in self.levels:
                level.tier.trim()

    def _note(self, nbytes: int = 0) -> None:
        self._progress = time.monotonic()

    # -- up

    def bring(self, entry: Entry, to: int, *, is_new: bool = False) -> Place:
        """Return its place, pinned, in `to` or a faster tier. Blocks that were used least recently are pushed out.

        Args:
            is_new: the entry is busy because it is ours to fill.
        """
        while True:
            with self.state:
                # No deadline here: the thread that moves or fills it has its own, and clears `busy` in any case.
                while entry.busy and not entry.gone and not is_new:
                    self.state.wait(1.0)
                if entry.gone:
                    raise NotFound(f"{entry.block} is not in these tiers")
                if entry.at <= to and entry.at < self.source:
                    self.hits += 1
                    place = entry.places[entry.at]
                    place.pins += 1
                    entry.used = next(self.clock)
                    return place
            if to == self.source:
                raise ConfigError(f"{entry.block} is in its source only", hint="name a tier to bring it to")
            with self.turn():
                with self.state:
                    # Looked at again: another thread may have moved it while this one waited for its turn.
                    if not is_new and (entry.busy or entry.gone or entry.at <= to):
                        continue
                    entry.busy, self.misses = True, self.misses + 1
                try:
                    place = self._open(entry, to)
                    if entry.at < self.source and self._shift(entry, to, place):
                        return place
                except BaseException:
                    self._failed(entry, is_new)
                    raise
            try:
                # Outside the turn: a source may take minutes, and moves of other blocks need not wait for it.
                self._fill(entry, to, place)
            except BaseException:
                self._failed(entry, is_new)
                raise
            return place

    def _failed(self, entry: Entry, is_new: bool) -> None:
        with self.state:
            if is_new:
                self.forget(entry)
            self.idle(entry)

    def unpin(self, entry: Entry, place: Place) -> None:
        """Stop using a place. A place that was left meanwhile is freed."""
        with self.state:
            place.pins -= 1
        if not entry.busy:
            self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        """Free the places of an entry that are not its current one and have no users."""
        with self.state:
            left = [i for i, place in entry.places.items() if i != entry.at and not place.pins]
            left = [] if entry.busy else left
            rooms = [(i, entry.places.pop(i)) for i in left]
        self._close(rooms)

    def release(self, entry: Entry, *indices: int) -> None:
        """Free these places of an entry, or all."""
        with self.state:
            rooms = [(i, entry.places.pop(i)) for i in indices or tuple(entry.places)]
        self._close(rooms)

    def _close(self, rooms: Iterable[tuple[int, Place]]) -> None:
        for index, place in rooms:
            place.room.close()
            with self.state:
                self.used_bytes[index] -= place.charge
            self._is_left = True
        # Inside a turn the memory may be reused by the next room; the turn's end trims what was not.
        if not self._mover.locked():
            self._trim()

    def _open(self, entry: Entry, to: int) -> Place:
        """Return a new place in `to`, pinned and counted; the caller holds the turn."""
        tier = self.levels[to].tier
        charge = -(-entry.block.nbytes // tier.unit_bytes) * tier.unit_bytes
        self._make_room(to, charge)
        place = Place(tier.open_room(entry.block.nbytes), charge, 1)
        with self.state:
            entry.places[to] = place
            self.used_bytes[to] += charge
            self.peak_bytes[to] = max(self.peak_bytes[to], self.used_bytes[to])
        return place

    def _shift(self, entry: Entry, to: int, place: Place) -> bool:
        """Move its bytes to an opened place. Return False if they were lost on the way: they come from the source then.

        Raises:
            PenstockError: it is where it was, and the place is closed.
        """
        came, src = entry.at, entry.places[entry.at]
        num_threads = min(self.levels[came].tier.num_threads, self.levels[to].tier.num_threads)
        begun = time.monotonic()
        try:
            move(src.room, place.room, num_threads, self._note)
            self._arrived(entry, to, begun)
        except IntegrityError as error:
            if not entry.again:
                self.release(entry, to)
                raise
            log.warning("%s: what %s gives back is damaged (%s); read again", entry.block, self.names[came], error)
            entry.at = self.source
            self.release(entry, came)
            return False
        except BaseException:
            self.release(entry, to)
            raise
        return True

    def _fill(self, entry: Entry, to: int, place: Place) -> None:
        begun = time.monotonic()
        try:
            entry.fill(place.room)
            place.room.settle()
            self._arrived(entry, to, begun)
        except BaseException:
            self.release(entry, to)
            raise

    def _arrived(self, entry: Entry, to: int, begun: float | None = None) -> None:
        """Set the tier of a block to `to`, and free its old place unless a reader has it."""
        # Before the old place is freed: the user must have let go of it, or it would read freed memory.
        self._tell(entry, to)
        with self.state:
            if begun is not None:
                link = self.names[entry.at], self.names[to]
                seconds = time.monotonic() - begun
                self.links[link] = self.links.get(link, LinkStats()).plus(entry.block.nbytes, seconds)
            entry.at, entry.used = to, next(self.clock)
        self.idle(entry)
        self._leave(entry)

    def _tell(self, entry: Entry, at: int) -> None:
        if entry.user is not None:
            entry.user.moved(self.names[at], entry.places[at].room if at in entry.places else None)

    def idle(self, entry: Entry) -> None:
        """Let others pin or move the entry."""
        with self.state:
            entry.busy = False
            self.state.notify_all()

    # -- down

    def _make_room(self, at: int, charge: int) -> None:
        """Push out what was used least recently until `charge` fits (BudgetTooSmall if it cannot); the turn is held."""
        level, used = self.levels[at], self.used_bytes
        if level.budget_bytes is None:
            return
        with self.state:
            if used[at] + charge <= level.budget_bytes:
                return
            idle = [entry for entry in self.entries.values() if entry.at == at and self._may_leave(entry)]
            # By a counter and not by a clock: uses in one tick would have no order.
            idle.sort(key=lambda entry: entry.used)
            # Computed first: pushing blocks out in vain, before finding that it does not fit, would cost their reload.
            least = used[at] + charge - sum(entry.places[at].charge for entry in idle)
        if least <= level.budget_bytes:
            for entry in idle:
                if used[at] + charge <= level.budget_bytes:
                    break
                try:
                    self.demote(entry)
                except BudgetTooSmall:
                    continue  # nowhere to go for this one
            least = used[at] + charge
        if least > level.budget_bytes:
            name, others = self.names[at], least - charge
            message = f"{charge} bytes do not fit in {name}: {others} of its {level.budget_bytes} bytes cannot be moved"
            raise BudgetTooSmall(message, minimum_bytes=least)

    def _may_leave(self, entry: Entry) -> bool:
        is_free = not entry.busy and not entry.places[entry.at].pins
        return is_free and (entry.again or entry.at + 1 < self.source)

    def demote(self, entry: Entry) -> bool:
        """Move it down to the next tier that has room; the caller holds the turn. Return False if it is in use.

        Raises:
            BudgetTooSmall: there is nowhere to go. PenstockError: of the move; it is where it was.
        """
        with self.state:
            if entry.busy or entry.gone or entry.at == self.source or entry.places[entry.at].pins:
                return False
            entry.busy = True
        # Asked without the state's lock: the user takes locks of its own, and calls back.
        if entry.user is not None and not entry.user.vacate():
            self.idle(entry)
            return False
        try:
            if any(self._sink(entry, to) for to in range(entry.at + 1, self.source + 1)):
                return True
            self._tell(entry, entry.at)
        except BaseException:
            self._tell(entry, entry.at)
            self.idle(entry)
            raise
        self.idle(entry)
        message = f"no tier below {self.names[entry.at]} has room for {entry.block}"
        raise BudgetTooSmall(message, minimum_bytes=entry.block.nbytes)

    def _sink(self, entry: Entry, to: int) -> bool:
        """Move it down to `to`. Return False if there is no room, or if it must not be forgotten."""
        if to == self.source:
            if entry.again:
                self._arrived(entry, to)
            return entry.again
        if to in entry.places:  # it is read there still, so it need not be copied
            self._arrived(entry, to)
            return True
        try:
            place = self._open(entry, to)
            self._shift(entry, to, place)
        except BudgetTooSmall:
            return False
        except DiskFull as error:
            log.warning("%s does not go from %s to %s: %s", entry.block, self.names[entry.at], self.names[to], error)
            return False
        self.unpin(entry, place)
        return True

    def discard(self, entry: Entry) -> None:
        """Drop its bytes in every tier; they are damaged. The caller holds the turn. SourceBusy: it is in use."""
        with self.state:
            if entry.busy or any(place.pins for place in entry.places.values()):
                raise SourceBusy(f"{entry.block} is in use in {self.names[entry.at]}")
            entry.busy = True
        self._arrived(entry, self.source)

    def remove(self, entry: Entry) -> None:
        """Remove the block; the caller holds the turn. SourceBusy: it is in use."""
        with self.state:
            if entry.busy or any(place.pins for place in entry.places.values()):
                raise SourceBusy(f"{entry.block} is in use in {self.names[entry.at]}")
            self.forget(entry)
        self.release(entry)

    def forget(self, entry: Entry) -> None:
        """Remove the entry, so that no lookup finds it any more."""
        with self.state:
            entry.gone = True
            if self.entries.get(entry.block) is entry:
                del self.entries[entry.block]


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
