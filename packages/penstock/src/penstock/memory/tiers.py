"""Blocks in memory tiers with budgets. To free space in a tier, the least recently used blocks move to a slower tier.

A block is in one tier at a time. After a move, the old room is kept while a reader uses the room, or as a copy if the
slower tier has `keeps_copies` set. Only one move runs at a time, because moves share links, while fills run in
parallel. A thread that moves or fills an entry marks it as `busy`, so that no other thread pins or moves it.

Acquire the mover's lock (`_turn`) before the state's lock. Do not hold the state's lock while calling the user of a
block, because the user may call back.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.errors import BudgetTooSmall, ConfigError, DiskFull, IntegrityError, NotFound, SourceBusy, SourceStalled
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.memory import SOURCE
from penstock.memory.tier import LinkStats, Room, Tier, TierBlock, TiersStats, TierStats, move

_log = log_named("penstock.memory")

Fill = Callable[[Room], None]
"""Copies all bytes of a block from its source into a room, with deadlines."""


class BlockUser(Protocol):
    """A user that is notified of a block's moves, but does not pin the block."""

    def vacate(self) -> bool:
        """Stop using the block, which is about to leave its room. Return False to keep the block in its room."""

    def moved(self, tier: str, room: Room | None) -> None:
        """Record that the block is now in `tier`, or is still in `tier` after a failed move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A tier and its budget."""

    tier: Tier
    budget_bytes: int | None = None
    """Maximum total size of rooms in bytes. None means no limit."""
    keeps_copies: bool = False
    """Whether a block that moves up leaves a copy here until the space is needed."""
    budget: str = "memory_bytes"
    """Name of the argument that sets `budget_bytes`, for hints."""


class _OccupiedRoom(msgspec.Struct, eq=False):
    room: Room
    charge: int
    pins: int = 0


class _TieredBlock(msgspec.Struct, eq=False):
    """A block and its rooms by tier. Rooms in tiers other than `at` are still being read, or are copies.

    Attributes:
        again: whether `fill` can be called again.
        used: sequence number of the last use of the block.
        gone: whether the block was removed, so that waiting threads must not use it.
    """

    block: TierBlock
    fill: Fill
    again: bool
    user: BlockUser | None
    at: int
    used: int = 0
    busy: bool = True
    gone: bool = False
    places: dict[int, _OccupiedRoom] = msgspec.field(default_factory=dict)


class Tiers(Closeable):
    """Blocks in tiers with budgets. Thread-safe. Leaving the `with` block frees every room.

    Args:
        stall_s: seconds to wait for another thread's move that makes no progress.
        num_prefetching: maximum number of concurrent prefetches.
    """

    def __init__(self, levels: Sequence[Level], *, stall_s: float = 30.0, num_prefetching: int = 2) -> None:
        self._levels = tuple(levels)
        self._source = len(levels)
        self._names = [*(level.tier.name for level in levels), SOURCE]
        self._stall_s = stall_s
        self._entries: dict[TierBlock, _TieredBlock] = {}
        self._used_bytes = [0] * len(levels)
        self._peak_bytes = [0] * len(levels)
        self._links: dict[tuple[str, str], LinkStats] = {}
        self._hits = 0
        self._misses = 0
        # Use a counter, because uses within one tick of a clock would have no order.
        self._clock = itertools.count(1)
        # Hold the state's lock briefly, and the mover's lock for whole moves, so that reads never wait for a move.
        self._state = threading.Condition()
        self._mover = threading.Lock()
        self._progress = time.monotonic()
        # Whether a tier still caches the memory of closed rooms.
        self._is_left = False
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
        """Add a block, free space for it, and fill it.

        Args:
            fill: writes the bytes, which never change. `fill` is called for each read of the block from its source.
            tier: tier in which to fill the block. None means the fastest tier, and `source` means not to fill it yet.
            again: whether `fill` can be called again. With `again=False`, the block never leaves the last tier.
            user: is notified of moves, and may forbid a move.

        Raises:
            ConfigError: the block was already added.
            BudgetTooSmall: there is not enough space. Errors from `fill` are raised too.
        """
        to = self._index(tier)
        entry = _TieredBlock(block, fill, again, user, self._source)
        with self._state:
            if block in self._entries:
                raise ConfigError(f"{block} was already added to these tiers")
            self._entries[block] = entry
        if to == self._source:
            self._idle(entry)
            return
        try:
            place = self._pin_in(entry, to, is_new=True)
        except BaseException:
            self._forget(entry)
            raise
        self._unpin(entry, place)

    @contextmanager
    def pin(self, block: TierBlock, tier: str | None = None) -> Iterator[Room]:
        """Yield the block's room, which stays in its tier until the `with` block ends.

        `tier` is the slowest tier in which to pin the block, which moves up from a slower tier. None means the fastest
        tier, and `source` means no move. Raise NotFound for an unknown block, and BudgetTooSmall if space is short.
        """
        entry, to = self._entry(block), self._index(tier)
        place = self._pin_in(entry, to)
        try:
            yield place.room
        finally:
            self._unpin(entry, place)

    def promote(self, block: TierBlock, tier: str | None = None) -> None:
        """Move a block up to this tier, or to the fastest tier. See `pin`."""
        with self.pin(block, tier):
            pass

    def prefetch(self, block: TierBlock, tier: str | None = None) -> Future[None]:
        """Start to `promote` a block in the background. The future raises the error of a failed move."""
        entry, to = self._entry(block), self._index(tier)

        def bring() -> None:
            self._unpin(entry, self._pin_in(entry, to))

        return self._pool.submit(bring)

    def demote(self, block: TierBlock) -> None:
        """Move a block down to the next tier with enough space. Raise SourceBusy if the block is in use."""
        entry = self._entry(block)
        with self._turn():
            if not self._push_down(entry):
                raise SourceBusy(f"{block} is in use in {self._names[entry.at]}, or is only in its source")

    def discard(self, block: TierBlock) -> None:
        """Drop the corrupted bytes of a block in every tier. Raise SourceBusy if the block is pinned."""
        entry = self._entry(block)
        with self._turn():
            with self._state:
                self._check_unused(entry)
                entry.busy = True
            self._arrived(entry, self._source)

    def drop(self, block: TierBlock) -> None:
        """Remove a block. Raise SourceBusy if the block is pinned, and NotFound if it was not added."""
        entry = self._entry(block)
        with self._turn():
            with self._state:
                self._check_unused(entry)
                self._forget(entry)
            self._release(entry)

    def where(self, blocks: Iterable[TierBlock]) -> list[str | None]:
        """Return the tier of each of these blocks, `source` for a block in no tier, or None for an unknown block."""
        with self._state:
            entries = [self._entries.get(block) for block in blocks]
            return [None if entry is None else self._names[entry.at] for entry in entries]

    def stats(self) -> TiersStats:
        """Return the current blocks in each tier, and the moves so far."""
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
        """Free every room, which must not be in use, and cancel prefetches that have not started. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        with self._state:
            entries = list(self._entries.values())
        for entry in entries:
            self._forget(entry)
            self._release(entry)
        for level in self._levels:
            level.tier.close()

    def _index(self, tier: str | None) -> int:
        names = self._names
        if tier is not None and tier not in names:
            raise ConfigError(f"no tier {tier!r} exists", hint=f"use one of {', '.join(names)}")
        return 0 if tier is None else names.index(tier)

    def _entry(self, block: TierBlock) -> _TieredBlock:
        with self._state:
            entry = self._entries.get(block)
        if entry is None:
            raise NotFound(f"{block} is not in these tiers")
        return entry

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the right to move blocks. Raise SourceStalled if another thread's move makes no progress."""
        # Measure progress, because a large block may move for minutes.
        while not self._mover.acquire(timeout=min(1.0, self._stall_s)):
            if time.monotonic() - self._progress > self._stall_s:
                raise SourceStalled(f"a move of a different block made no progress for {self._stall_s} s")
        self._note()
        try:
            yield
        finally:
            self._trim()
            self._mover.release()
            # Trim again, because a reader that closed a room before the release left the trimming to this thread.
            self._trim()

    def _trim(self) -> None:
        if self._is_left:
            self._is_left = False
            for level in self._levels:
                level.tier.trim()

    def _note(self, nbytes: int = 0) -> None:
        self._progress = time.monotonic()

    def _pin_in(self, entry: _TieredBlock, to: int, *, is_new: bool = False) -> _OccupiedRoom:
        """Return an entry's pinned room in `to` or a faster tier. If `is_new` is set, the caller is adding it."""
        while True:
            with self._state:
                # The thread that moves or fills the entry has a deadline and always clears `busy`.
                while entry.busy and not entry.gone and not is_new:
                    self._state.wait(1.0)
                if entry.gone:
                    raise NotFound(f"{entry.block} is not in these tiers")
                if entry.at <= to and entry.at < self._source:
                    self._hits += 1
                    place = entry.places[entry.at]
                    place.pins += 1
                    entry.used = next(self._clock)
                    return place
            if to == self._source:
                raise ConfigError(
                    f"{entry.block} is only in its source", hint="pass the tier to which to move the block"
                )
            with self._turn():
                with self._state:
                    # Another thread may have moved the entry while this thread waited.
                    if not is_new and (entry.busy or entry.gone or entry.at <= to):
                        continue
                    entry.busy = True
                    self._misses += 1
                try:
                    place = self._open(entry, to)
                    if entry.at < self._source and self._move_bytes(entry, to, place):
                        return place
                except BaseException:
                    self._failed(entry, is_new)
                    raise
            # Fill without holding `_turn`, because a source may take minutes.
            started_at = time.monotonic()
            try:
                entry.fill(place.room)
                place.room.settle()
                self._arrived(entry, to, started_at)
            except BaseException:
                self._release(entry, to)
                self._failed(entry, is_new)
                raise
            return place

    def _failed(self, entry: _TieredBlock, is_new: bool) -> None:
        with self._state:
            if is_new:
                self._forget(entry)
            self._idle(entry)

    def _unpin(self, entry: _TieredBlock, place: _OccupiedRoom) -> None:
        with self._state:
            place.pins -= 1
        if not entry.busy:
            self._leave(entry)

    def _leave(self, entry: _TieredBlock) -> None:
        with self._state:
            if entry.busy:
                return
            unused = [i for i, place in entry.places.items() if i != entry.at and not place.pins]
            unused = [i for i in unused if i < entry.at or not self._levels[i].keeps_copies]
            rooms = [(i, entry.places.pop(i)) for i in unused]
        self._close(rooms)

    def _release(self, entry: _TieredBlock, *indices: int) -> None:
        with self._state:
            rooms = [(i, entry.places.pop(i)) for i in indices or tuple(entry.places)]
        self._close(rooms)

    def _close(self, rooms: Iterable[tuple[int, _OccupiedRoom]]) -> None:
        """Close removed rooms without holding the state's lock, because a disk may be slow."""
        for index, place in rooms:
            place.room.close()
            with self._state:
                self._used_bytes[index] -= place.charge
            self._is_left = True
        # While `_turn` is held, the next room may reuse the memory. The end of `_turn` trims the remaining memory.
        if not self._mover.locked():
            self._trim()

    def _open(self, entry: _TieredBlock, to: int) -> _OccupiedRoom:
        """Return a new room in `to`, pinned and counted. The caller must hold `_turn`."""
        tier = self._levels[to].tier
        charge = -(-entry.block.nbytes // tier.unit_bytes) * tier.unit_bytes
        self._make_space(to, charge)
        place = _OccupiedRoom(tier.open_room(entry.block.nbytes), charge, 1)
        with self._state:
            entry.places[to] = place
            self._used_bytes[to] += charge
            self._peak_bytes[to] = max(self._peak_bytes[to], self._used_bytes[to])
        return place

    def _move_bytes(self, entry: _TieredBlock, to: int, place: _OccupiedRoom) -> bool:
        """Move an entry's bytes to a new room. Return False if the bytes were corrupted. A failure closes the room."""
        old = entry.at
        src = entry.places[old]
        num_threads = min(self._levels[old].tier.num_threads, self._levels[to].tier.num_threads)
        started_at = time.monotonic()
        try:
            move(src.room, place.room, num_threads, self._note)
            self._arrived(entry, to, started_at)
        except IntegrityError as error:
            if not entry.again:
                self._release(entry, to)
                raise
            # Read the source again instead of raising an error for the corrupted copy.
            _log.warning(
                "%s is damaged in %s (%s), reading it again from its source", entry.block, self._names[old], error
            )
            entry.at = self._source
            self._release(entry, old)
            return False
        except BaseException:
            self._release(entry, to)
            raise
        return True

    def _arrived(self, entry: _TieredBlock, to: int, started_at: float | None = None) -> None:
        # Notify the user before the old room is closed, so that the user does not read freed memory.
        self._report_move(entry, to)
        with self._state:
            if started_at is not None:
                link = self._names[entry.at], self._names[to]
                seconds = time.monotonic() - started_at
                self._links[link] = self._links.get(link, LinkStats()).plus(entry.block.nbytes, seconds)
            entry.at = to
            entry.used = next(self._clock)
        self._idle(entry)
        self._leave(entry)

    def _report_move(self, entry: _TieredBlock, at: int) -> None:
        if entry.user is not None:
            entry.user.moved(self._names[at], entry.places[at].room if at in entry.places else None)

    def _idle(self, entry: _TieredBlock) -> None:
        with self._state:
            entry.busy = False
            self._state.notify_all()

    def _make_space(self, at: int, charge: int) -> None:
        """Move the least recently used blocks down until `charge` bytes fit. The caller must hold `_turn`."""
        level, used = self._levels[at], self._used_bytes
        if level.budget_bytes is None:
            return
        with self._state:
            if used[at] + charge <= level.budget_bytes:
                return
            by_use = sorted(self._entries.values(), key=lambda entry: entry.used)
            idle = [entry for entry in by_use if entry.at == at and self._may_leave(entry)]
            copies = [e for e in by_use if e.at < at and at in e.places and not e.busy and not e.places[at].pins]
            # Check the space first, because blocks that move down in vain would have to be reloaded.
            least = used[at] + charge - sum(entry.places[at].charge for entry in (*idle, *copies))
        if least <= level.budget_bytes:
            # Drop copies first, because another tier holds the bytes of their blocks.
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
                    # No tier below has enough space for this block, but the next block may be smaller.
                    continue
            least = used[at] + charge
        if least > level.budget_bytes:
            name, others = self._names[at], least - charge
            message = f"{charge} bytes are needed in {name}, whose limit is {level.budget_bytes} bytes"
            if others:
                message += f", and {others} bytes are in use and cannot be moved"
            raise BudgetTooSmall(message, minimum_bytes=least, budget=level.budget)

    def _may_leave(self, entry: _TieredBlock) -> bool:
        # A block that cannot be read again stays in the last tier.
        is_free = not entry.busy and not entry.places[entry.at].pins
        return is_free and (entry.again or entry.at + 1 < self._source)

    def _push_down(self, entry: _TieredBlock) -> bool:
        with self._state:
            if entry.busy or entry.gone or entry.at == self._source or entry.places[entry.at].pins:
                return False
            entry.busy = True
        if entry.user is not None and not entry.user.vacate():
            self._idle(entry)
            return False
        try:
            if any(self._move_down(entry, to) for to in range(entry.at + 1, self._source + 1)):
                return True
            self._report_move(entry, entry.at)
        except BaseException:
            self._report_move(entry, entry.at)
            self._idle(entry)
            raise
        self._idle(entry)
        below = self._levels[entry.at + 1 :]
        message = f"no tier below {self._names[entry.at]} has enough space for {entry.block}"
        budget = " or ".join(level.budget for level in below) or self._levels[entry.at].budget
        raise BudgetTooSmall(message, minimum_bytes=entry.block.nbytes, budget=budget)

    def _move_down(self, entry: _TieredBlock, to: int) -> bool:
        if to == self._source:
            if entry.again:
                self._arrived(entry, to)
            return entry.again
        if to in entry.places:
            # The room in `to` is a copy or is still being read, and has the same bytes.
            self._arrived(entry, to)
            return True
        try:
            place = self._open(entry, to)
            self._move_bytes(entry, to, place)
        except BudgetTooSmall:
            return False
        except DiskFull as error:
            # Other processes may fill the disk too, so try the next tier.
            _log.warning("cannot move %s from %s to %s: %s", entry.block, self._names[entry.at], self._names[to], error)
            return False
        self._unpin(entry, place)
        return True

    def _check_unused(self, entry: _TieredBlock) -> None:
        """Raise SourceBusy if the entry is being moved or is pinned. The caller must hold the state's lock."""
        if entry.busy or any(place.pins for place in entry.places.values()):
            raise SourceBusy(f"{entry.block} is in use in {self._names[entry.at]}")

    def _forget(self, entry: _TieredBlock) -> None:
        with self._state:
            entry.gone = True
            if self._entries.get(entry.block) is entry:
                del self._entries[entry.block]
