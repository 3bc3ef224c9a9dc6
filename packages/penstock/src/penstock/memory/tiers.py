"""Blocks in tiers of memory with budgets; the block that was used least recently makes room.

In: tiers, fastest first; blocks with a way to read them anew. Out: rooms, pinned while they are used; statistics.
Not here: the tiers themselves and moves between two rooms (`tier`), the user of a block (`cache.resident_model`).

    source --fill--> gpu <--move--> host <--move--> disk --forget--> source
                      '-- pin: here, and not elsewhere, until the `with` block ends

A block moves: it is in one tier at a time. An old place stays while a reader uses it, and as a copy in a slower tier
that keeps copies (`Level.keeps_copies`) until its room is needed. The source is never written to. One move runs at a
time (`_turn`), since moves share links; filling from a source runs in parallel. An entry
that is moved or filled is `busy`: no other thread pins or moves it meanwhile.

Locks: the mover's (`_turn`) before the state's, never the reverse. The user of a block is called without the state's
lock, because it takes locks of its own and may call back.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import BudgetTooSmall, ConfigError, DiskFull, IntegrityError, NotFound, SourceBusy, SourceStalled
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.memory.tier import LinkStats, Room, Tier, TierBlock, TiersStats, TierStats, move

_log = log_named("penstock.memory")

SOURCE = "source"
"""The place of a block that is in no tier: it can be read anew."""

Fill = Callable[[Room], None]
"""Writes all of a block's bytes into a room, from its source; has deadlines of its own."""


class BlockUser(Protocol):
    """A user of a block that does not pin it."""

    def vacate(self) -> bool:
        """Stop using the block, which is about to leave its room. Return False if it is in use: then it stays."""
        ...

    def moved(self, tier: str, room: Room | None) -> None:
        """Note that the block is in `tier` now, or, after a move that failed, still."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A tier and its budget."""

    tier: Tier
    budget_bytes: int | None = None
    """Bytes that rooms may take; None: as many as there are."""
    keeps_copies: bool = False
    """Whether a block that moves up leaves its bytes here until the room is needed: then nothing is copied down."""
    budget: str = "memory_bytes"
    """The argument that sets `budget_bytes`, for the hint of an error."""


@dataclass(slots=True, eq=False)
class _Place:
    """A room in a tier, its bytes against the tier's budget, and the number of its users."""

    room: Room
    charge: int
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A block and its rooms, by tier: others than that of `at` are read still, or are copies.

    Attributes:
        again: `fill` can be called again.
        at: index of its tier, or of the source.
        used: number of its last use, by a counter.
        busy: a thread moves or fills it.
        gone: it was removed, and waiters must not use it.
    """

    block: TierBlock
    fill: Fill
    again: bool
    user: BlockUser | None
    at: int
    used: int = 0
    busy: bool = True
    gone: bool = False
    places: dict[int, _Place] = field(default_factory=dict)


class Tiers(Closeable):
    """Blocks in tiers with budgets. Any thread calls any method; a context manager whose end frees every room.

    Args:
        levels: fastest first.
        stall_s: deadline, by progress, of waiting for another's move.
        num_prefetching: prefetches under way at once.
    """

    def __init__(self, levels: Sequence[Level], *, stall_s: float = 30.0, num_prefetching: int = 2) -> None:
        self._levels = tuple(levels)
        self._source = len(levels)
        self._names = [*(level.tier.name for level in levels), SOURCE]
        self._stall_s = stall_s
        self._entries: dict[TierBlock, _Entry] = {}
        self._used_bytes = [0] * len(levels)
        self._peak_bytes = [0] * len(levels)
        self._links: dict[tuple[str, str], LinkStats] = {}
        self._hits = 0
        self._misses = 0
        # A counter and not a clock: uses in one tick of a clock would have no order.
        self._clock = itertools.count(1)
        # Two locks: `_state` for a moment, to look and count; the mover's for whole moves, so that a look never waits
        # for a move.
        self._state = threading.Condition()
        self._mover = threading.Lock()
        self._progress = time.monotonic()
        self._is_left = False
        """Rooms were closed whose memory no tier has given back."""
        self._pool = ThreadPoolExecutor(num_prefetching, thread_name_prefix="penstock-prefetch")

    def put(
        self,
        block: TierBlock,
        fill: Fill,
        *,
        tier: str | None = None,
        again: bool = True,
        user: BlockUser | None = None,
    ) -> None:
        """Add a block: make room for it, and have it filled.

        Args:
            block: its bytes must not change.
            fill: writes its bytes; called again whenever it comes from its source.
            tier: the tier to fill it in; None: the fastest; `source`: none yet.
            again: whether `fill` can be called again. If not, the block never leaves the last tier.
            user: gets its moves, and may forbid one.

        Raises:
            ConfigError: it is there already.
            BudgetTooSmall: no room can be made; says the least that would do. Any error that `fill` raises.
        """
        to = self._index(tier)
        entry = _Entry(block, fill, again, user, self._source)
        with self._state:
            if block in self._entries:
                raise ConfigError(f"{block} was put in these tiers already")
            self._entries[block] = entry
        if to == self._source:
            self._idle(entry)
            return
        try:
            place = self._bring(entry, to, is_new=True)
        except BaseException:
            # A block that never arrived is not in these tiers: it can be put again.
            self._forget(entry)
            raise
        self._unpin(entry, place)

    @contextmanager
    def pin(self, block: TierBlock, tier: str | None = None) -> Iterator[Room]:
        """Yield the block's room, which stays where it is until the `with` block ends.

        Args:
            block: one that was put.
            tier: it is brought up to this tier if it is further down; None: the fastest; `source`: it is not moved.

        Raises:
            NotFound: there is no such block. ConfigError: it is in no tier, and none was named.
            BudgetTooSmall, and what the move or its source raises: see `put`.
        """
        entry, to = self._entry(block), self._index(tier)
        place = self._bring(entry, to)
        try:
            yield place.room
        finally:
            self._unpin(entry, place)

    def promote(self, block: TierBlock, tier: str | None = None) -> None:
        """Bring a block up to this tier, or the fastest; see `pin`."""
        with self.pin(block, tier):
            pass

    def prefetch(self, block: TierBlock, tier: str | None = None) -> Future[None]:
        """Start to `promote` a block in the background, in the order of the calls. The future has the error, if any."""
        entry, to = self._entry(block), self._index(tier)

        def bring() -> None:
            self._unpin(entry, self._bring(entry, to))

        return self._pool.submit(bring)

    def demote(self, block: TierBlock) -> None:
        """Move a block down to the next tier that has room.

        Raises:
            SourceBusy: it is pinned, its user needs it, or it is in its source already.
            BudgetTooSmall: there is nowhere to go.
        """
        entry = self._entry(block)
        with self._turn():
            if not self._push_down(entry):
                raise SourceBusy(f"{block} is in {self._names[entry.at]}, in use")

    def discard(self, block: TierBlock) -> None:
        """Drop a block's bytes in every tier, since they are damaged: it is only in its source from now on.

        The user cannot forbid it. SourceBusy: it is pinned, or moves; NotFound: it is not there.
        """
        entry = self._entry(block)
        with self._turn():
            with self._state:
                self._check_unused(entry)
                entry.busy = True
            self._arrived(entry, self._source)

    def drop(self, block: TierBlock) -> None:
        """Remove a block. SourceBusy: it is pinned; NotFound: it is not there."""
        entry = self._entry(block)
        with self._turn():
            with self._state:
                self._check_unused(entry)
                self._forget(entry)
            self._release(entry)

    def where(self, blocks: Iterable[TierBlock]) -> list[str | None]:
        """Return the tier that each of these blocks is in, or `source`; None: the block is not known here."""
        with self._state:
            entries = [self._entries.get(block) for block in blocks]
            return [None if entry is None else self._names[entry.at] for entry in entries]

    def stats(self) -> TiersStats:
        """Return the blocks in each tier now, and the moves so far."""
        with self._state:
            at = [entry.at for entry in self._entries.values()]
            tiers = {
                level.tier.name: TierStats(
                    num_blocks=at.count(i),
                    used_bytes=self._used_bytes[i],
                    peak_bytes=self._peak_bytes[i],
                    budget_bytes=level.budget_bytes,
                )
                for i, level in enumerate(self._levels)
            }
            return TiersStats(tiers=tiers, links=dict(self._links), hits=self._hits, misses=self._misses)

    def close(self) -> None:
        """Free every room; none may be in use. Prefetches that have not begun are cancelled. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        with self._state:
            entries = list(self._entries.values())
        for entry in entries:
            self._forget(entry)
            self._release(entry)
        for level in self._levels:
            level.tier.close()

    def _index(self, tier: str | None) -> int:
        """Return the index of a tier by name. ConfigError for another name."""
        names = self._names
        if tier is not None and tier not in names:
            raise ConfigError(f"there is no tier {tier!r}", hint=f"there are {', '.join(names)}")
        return 0 if tier is None else names.index(tier)

    def _entry(self, block: TierBlock) -> _Entry:
        """Return a block's entry. NotFound for a block that was not put, or was dropped."""
        with self._state:
            entry = self._entries.get(block)
        if entry is None:
            raise NotFound(f"{block} is not in these tiers")
        return entry

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the right to move for a `with` block. SourceStalled: another thread's move makes no progress."""
        # By progress and not by time: a large block may move for minutes, and each piece of it counts.
        while not self._mover.acquire(timeout=min(1.0, self._stall_s)):
            if time.monotonic() - self._progress > self._stall_s:
                raise SourceStalled(f"another move between these tiers made no progress for {self._stall_s} s")
        self._note()
        try:
            yield
        finally:
            self._trim()
            self._mover.release()
            # Again: a reader that let go of its room while the mover's lock was held left the trimming to its holder.
            self._trim()

    def _trim(self) -> None:
        """Have the tiers free the memory of rooms that were closed in this turn and not reused."""
        if self._is_left:
            self._is_left = False
            for level in self._levels:
                level.tier.trim()

    def _note(self, nbytes: int = 0) -> None:
        """Note progress of the move under way, by which others that wait for their turn measure a stall."""
        self._progress = time.monotonic()

    def _bring(self, entry: _Entry, to: int, *, is_new: bool = False) -> _Place:
        """Return an entry's place, pinned, in `to` or a faster tier; push out blocks that were used least recently.

        Args:
            is_new: the entry is busy because it is ours to fill.
        """
        while True:
            with self._state:
                # No deadline here: the thread that moves or fills it has its own, and clears `busy` in any case.
                while entry.busy and not entry.gone and not is_new:
                    self._state.wait(1.0)
                if entry.gone:
                    raise NotFound(f"{entry.block} is not in these tiers")
                # A faster tier than wanted will do: the block is not moved down for one reader.
                if entry.at <= to and entry.at < self._source:
                    self._hits += 1
                    place = entry.places[entry.at]
                    place.pins += 1
                    entry.used = next(self._clock)
                    return place
            if to == self._source:
                raise ConfigError(f"{entry.block} is in its source only", hint="name a tier to bring it to")
            with self._turn():
                with self._state:
                    # Looked at again: another thread may have moved it while this one waited for its turn.
                    if not is_new and (entry.busy or entry.gone or entry.at <= to):
                        continue
                    entry.busy = True
                    self._misses += 1
                try:
                    place = self._open(entry, to)
                    if entry.at < self._source and self._shift(entry, to, place):
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

    def _failed(self, entry: _Entry, is_new: bool) -> None:
        """Leave an entry that could not be brought to others; one that `put` was adding is removed."""
        with self._state:
            if is_new:
                self._forget(entry)
            self._idle(entry)

    def _unpin(self, entry: _Entry, place: _Place) -> None:
        """Stop using a place, and free it if the block left it meanwhile."""
        with self._state:
            place.pins -= 1
        # A busy entry is left to the thread that moves it, which frees old places when it is done.
        if not entry.busy:
            self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        """Free the places of an entry that are not its current one, have no users, and are no copies to keep."""
        with self._state:
            if entry.busy:
                return
            left = [i for i, place in entry.places.items() if i != entry.at and not place.pins]
            left = [i for i in left if i < entry.at or not self._levels[i].keeps_copies]
            rooms = [(i, entry.places.pop(i)) for i in left]
        self._close(rooms)

    def _release(self, entry: _Entry, *indices: int) -> None:
        """Free these places of an entry, or all of them."""
        with self._state:
            rooms = [(i, entry.places.pop(i)) for i in indices or tuple(entry.places)]
        self._close(rooms)

    def _close(self, rooms: Iterable[tuple[int, _Place]]) -> None:
        """Close rooms that were taken out of their entries. Without the state's lock: a disk may take long."""
        for index, place in rooms:
            place.room.close()
            with self._state:
                self._used_bytes[index] -= place.charge
            self._is_left = True
        # Inside a turn the memory may be reused by the next room; the turn's end trims what was not.
        if not self._mover.locked():
            self._trim()

    def _open(self, entry: _Entry, to: int) -> _Place:
        """Return a new place in `to`, pinned and counted; the caller holds the turn."""
        tier = self._levels[to].tier
        charge = -(-entry.block.nbytes // tier.unit_bytes) * tier.unit_bytes
        self._make_room(to, charge)
        place = _Place(tier.open_room(entry.block.nbytes), charge, 1)
        with self._state:
            entry.places[to] = place
            self._used_bytes[to] += charge
            self._peak_bytes[to] = max(self._peak_bytes[to], self._used_bytes[to])
        return place

    def _shift(self, entry: _Entry, to: int, place: _Place) -> bool:
        """Move an entry's bytes to an opened place. Return False if they were damaged: the source has them still.

        Raises:
            PenstockError: the entry is where it was, and the place is closed.
        """
        came = entry.at
        src = entry.places[came]
        num_threads = min(self._levels[came].tier.num_threads, self._levels[to].tier.num_threads)
        begun = time.monotonic()
        try:
            move(src.room, place.room, num_threads, self._note)
            self._arrived(entry, to, begun)
        except IntegrityError as error:
            if not entry.again:
                self._release(entry, to)
                raise
            # The copy in the tier is of no use, and its source can be read again: better than an error.
            _log.warning("%s is damaged in %s (%s); reading it from its source", entry.block, self._names[came], error)
            entry.at = self._source
            self._release(entry, came)
            return False
        except BaseException:
            self._release(entry, to)
            raise
        return True

    def _fill(self, entry: _Entry, to: int, place: _Place) -> None:
        begun = time.monotonic()
        try:
            entry.fill(place.room)
            place.room.settle()
            self._arrived(entry, to, begun)
        except BaseException:
            self._release(entry, to)
            raise

    def _arrived(self, entry: _Entry, to: int, begun: float | None = None) -> None:
        """Set the tier of a block to `to`, let others use it, and free its old place unless a reader has it."""
        # Before the old place is freed: the user must have let go of it, or it would read freed memory.
        self._report_move(entry, to)
        with self._state:
            if begun is not None:
                link = self._names[entry.at], self._names[to]
                seconds = time.monotonic() - begun
                self._links[link] = self._links.get(link, LinkStats()).plus(entry.block.nbytes, seconds)
            entry.at = to
            entry.used = next(self._clock)
        self._idle(entry)
        self._leave(entry)

    def _report_move(self, entry: _Entry, at: int) -> None:
        if entry.user is not None:
            entry.user.moved(self._names[at], entry.places[at].room if at in entry.places else None)

    def _idle(self, entry: _Entry) -> None:
        """Let others pin or move the entry again."""
        with self._state:
            entry.busy = False
            self._state.notify_all()

    def _make_room(self, at: int, charge: int) -> None:
        """Push out the blocks used least recently until `charge` fits; the caller holds the turn.

        Raises:
            BudgetTooSmall: it does not fit, whatever is pushed out.
        """
        level, used = self._levels[at], self._used_bytes
        if level.budget_bytes is None:
            return
        with self._state:
            if used[at] + charge <= level.budget_bytes:
                return
            by_use = sorted(self._entries.values(), key=lambda entry: entry.used)
            idle = [entry for entry in by_use if entry.at == at and self._may_leave(entry)]
            copies = [entry for entry in by_use if entry.at < at and self._is_copy(entry, at)]
            # Computed first: pushing blocks out in vain, before finding that it does not fit, would cost their reload.
            least = used[at] + charge - sum(entry.places[at].charge for entry in (*idle, *copies))
        if least <= level.budget_bytes:
            # Copies first: the blocks have their bytes elsewhere.
            for entry in copies:
                if used[at] + charge <= level.budget_bytes:
                    break
                self._release(entry, at)
            for entry in idle:
                if used[at] + charge <= level.budget_bytes:
                    break
                try:
                    self._push_down(entry)
                except BudgetTooSmall:
                    # No tier below has room for this block; another may be smaller.
                    continue
            least = used[at] + charge
        if least > level.budget_bytes:
            name, others = self._names[at], least - charge
            message = f"{charge} bytes are needed in {name}, whose limit is {level.budget_bytes} bytes"
            if others:
                message += f", {others} of them in use by what cannot be moved"
            raise BudgetTooSmall(message, minimum_bytes=least, budget=level.budget)

    def _is_copy(self, entry: _Entry, at: int) -> bool:
        """Return whether an entry has a copy here that nobody uses; the caller holds the state's lock."""
        return at in entry.places and not entry.busy and not entry.places[at].pins

    def _may_leave(self, entry: _Entry) -> bool:
        # One that cannot be read again stays in the last tier: to forget it would lose it.
        is_free = not entry.busy and not entry.places[entry.at].pins
        return is_free and (entry.again or entry.at + 1 < self._source)

    def _push_down(self, entry: _Entry) -> bool:
        """Move an entry to the next tier below that has room; the caller holds the turn. Return False if it is in use.

        Raises:
            BudgetTooSmall: there is nowhere to go. PenstockError: of the move; the entry is where it was.
        """
        with self._state:
            if entry.busy or entry.gone or entry.at == self._source or entry.places[entry.at].pins:
                return False
            entry.busy = True
        if entry.user is not None and not entry.user.vacate():
            self._idle(entry)
            return False
        try:
            if any(self._sink(entry, to) for to in range(entry.at + 1, self._source + 1)):
                return True
            self._report_move(entry, entry.at)
        except BaseException:
            self._report_move(entry, entry.at)
            self._idle(entry)
            raise
        self._idle(entry)
        below = self._levels[entry.at + 1 :]
        message = f"no tier below {self._names[entry.at]} has room for {entry.block}"
        budget = " or ".join(level.budget for level in below) or self._levels[entry.at].budget
        raise BudgetTooSmall(message, minimum_bytes=entry.block.nbytes, budget=budget)

    def _sink(self, entry: _Entry, to: int) -> bool:
        """Move an entry down to `to`. Return False if there is no room, or if its source cannot be read again."""
        if to == self._source:
            if entry.again:
                self._arrived(entry, to)
            return entry.again
        if to in entry.places:
            # A copy was kept there, or a reader still has the old room: the same bytes, and nothing need be copied.
            self._arrived(entry, to)
            return True
        try:
            place = self._open(entry, to)
            self._shift(entry, to, place)
        except BudgetTooSmall:
            return False
        except DiskFull as error:
            # The budget had room and the disk does not: other processes write to it too. The next tier may do.
            _log.warning("%s does not go from %s to %s: %s", entry.block, self._names[entry.at], self._names[to], error)
            return False
        self._unpin(entry, place)
        return True

    def _check_unused(self, entry: _Entry) -> None:
        """Raise SourceBusy if the entry moves or is pinned in any tier; the caller holds the state's lock."""
        if entry.busy or any(place.pins for place in entry.places.values()):
            raise SourceBusy(f"{entry.block} is in use in {self._names[entry.at]}")

    def _forget(self, entry: _Entry) -> None:
        """Remove the entry, so that no lookup finds it and threads that wait for it give up."""
        with self._state:
            entry.gone = True
            if self._entries.get(entry.block) is entry:
                del self._entries[entry.block]
