"""Bounded read-ahead for a file that is read tensor by tensor, where each read alone costs a round trip.

In: a source, and requests in the order of a program. Out: the same bytes, most of them read before they are wanted.
Not here: the meaning of the bytes (`safe_open`), whole checkpoints, whose reads are planned beforehand (`load`).

    readv(offset, buffers) -> blocks in memory: copied out
                           -> blocks under way: waited for, then copied out
                           -> anything else: read straight into the buffers, in several reads where it is large

A `ReadAhead` is itself a `Source`. What it reads ahead is decided in two ways:

- By itself, in file order, once a run of requests is dense: at least three that follow one another (two from 4 MiB on),
  and at least half of the bytes that they passed were asked for. It then reads at most twice as many bytes ahead as the
  run has asked for: a few slices of a large file bring in little more than themselves. Several runs may go on at once,
  as in a file whose dtypes lie apart.
- By a hint. `expect(ranges)` says which bytes will be asked for, in which order; an integration that knows the order of
  its tensors calls `safe_open.expect(names)`. Reads begin with the first request after it, so that a program may open
  and announce all files of a checkpoint at once. The order need not be that of the file: neighbours in both orders
  share a read. Requests out of that order are answered all the same; the hint costs bytes only where what it names is
  never asked for. Several threads may take the tensors: each request that lies ahead of the others moves the reads on.

Memory: blocks of all open files of this process together stay within `Settings.memory_bytes`. A block is freed once all
of its bytes were asked for, else as the least recently used one. Bytes that were given out are not read ahead again.

Threads: `readv` may be called by any number of them. The reads are made by threads of the process, at most `num_reads`
of them for a file, that end when nothing is queued.

Errors: a failed read is raised by the first request that needs its bytes, as the source raised it; a later request
reads them itself. A failed read of bytes that no request needed is not raised.

Fork: a child starts without blocks and without threads, and reads for itself. `close` returns at once; the source is
closed when the last read under way has ended.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from penstock import interrupts, lifecycle
from penstock.config import Settings
from penstock.errors import ConfigError, PenstockError, SourceStalled
from penstock.loader.byte_ranges import ByteBlocks, RangeSet
from penstock.storage import Source
from penstock.storage.source import span
from penstock.types import MIB
from penstock.waits import start_thread

_FIRST_BYTES = MIB
"""Size of the first blocks of a run; they grow with what the run has asked for, up to `chunk_bytes`."""

_MIN_REQUESTS = 3
"""Requests that make a run. Two would take a lone pair of neighbours (a weight and its bias) for a pass."""

_MIN_RUN_BYTES = 4 * MIB
"""Bytes from which two requests make a run: reading as much again in vain would cost little more than they did."""

_MAX_RUNS = 4
"""Runs that a file's requests are sorted into: more dtypes than that are never interleaved by name."""

_GAP_BYTES = 64 << 10
"""Holes between bytes already given out that are not worth a read of their own. Source: `safe_open._GAP_BYTES`."""

_SLOW_S = 5.0
"""Reads that take longer do not count among the threads of the process: those of a server that does not answer must not
keep other files from being read."""

_SMALL_BYTES = 256 << 10
"""Requests up to here are copied without letting other threads run: that would take longer."""

_LOOK_S = 1.0
"""Longest wait between two looks at whether bytes still arrive."""


class _State(Enum):
    QUEUED = auto()
    READING = auto()
    READY = auto()
    FAILED = auto()


class _Block:
    """A range of a file that is queued, being read, or in memory.

    Attributes:
        target: its bytes; None until it is read. A direct block has the caller's buffer from the start.
        left: bytes that no call has requested yet.
        users: requests that copy from it now; it is not freed before they are done.
    """

    __slots__ = ("error", "is_direct", "left", "owner", "start", "state", "stop", "target", "users")

    def __init__(self, owner: ReadAhead, start: int, stop: int, target: memoryview | None = None) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.target = target
        self.is_direct = target is not None
        self.state = _State.QUEUED
        self.error: PenstockError | MemoryError | None = None
        self.left = stop - start
        self.users = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class _Pool:
    """Blocks and reading threads of all files of this process; every field is guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.queue: deque[_Block] = deque()
        # Blocks that are being read, with the time since when.
        self.reading: dict[_Block, float] = {}
        self.num_threads = 0
        self.nbytes = 0
        # Ready blocks, the least recently used first.
        self.ready: OrderedDict[_Block, None] = OrderedDict()
        self.closing: deque[ReadAhead] = deque()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Take the lock; after it is released, close the files whose `close` could not take it."""
        with self.lock:
            yield
        if self.closing:
            self.close_files()

    def close_files(self) -> None:
        """Close the files in `closing`, unless another thread holds the lock: it then does so when it lets go."""
        # Never waits for the lock: a finalizer may run in the thread that holds it.
        while self.closing and self.lock.acquire(blocking=False):
            idle = []
            try:
                while self.closing:
                    file = self.closing.popleft()
                    file.drop_all()
                    if not file.under_way:
                        idle.append(file.source)
            finally:
                self.lock.release()
            for source in idle:
                source.close()

    def forget(self, block: _Block) -> None:
        """Free a block."""
        block.owner.blocks.remove(block)
        self.ready.pop(block, None)
        self.nbytes -= block.nbytes
        if block.state is _State.READY:
            block.target = None

    def make_room(self, nbytes: int, limit: int, owner: ReadAhead, spared_from: int) -> bool:
        """Free the least recently used blocks until `nbytes` more fit; False if they do not.

        Args:
            limit: bytes of all blocks together.
            owner, spared_from: blocks of this file from there on are kept: they are still to be asked for.
        """
        if self.nbytes + nbytes <= limit:
            return True
        for block in list(self.ready):
            if block.users or (block.owner is owner and block.stop > spared_from):
                continue
            self.forget(block)
            if self.nbytes + nbytes <= limit:
                return True
        return False

    def start_threads(self, num_reads: int) -> None:
        """Start a thread for each queued block, up to `num_reads` in all. DestinationError: none can start."""
        slow_before = time.monotonic() - _SLOW_S
        num_slow = sum(since < slow_before for since in self.reading.values())
        for _ in range(min(num_reads + num_slow - self.num_threads, len(self.queue))):
            # Daemons: a program that ends must not wait for bytes that nobody will use.
            thread = threading.Thread(target=self._work, name="penstock-read-ahead", daemon=True)
            if not start_thread(thread, is_needed=not self.num_threads):
                return
            self.num_threads += 1

    def _work(self) -> None:
        """Read queued blocks until there are none: the body of a thread."""
        while True:
            with self.locked():
                block = next((each for each in self.queue if each.owner.under_way < each.owner.num_reads), None)
                if block is None:
                    # Blocks may be left, of files with as many reads as they may have: those threads go on with them.
                    self.num_threads -= 1
                    return
                self.queue.remove(block)
                block.state = _State.READING
                block.owner.under_way += 1
                self.reading[block] = time.monotonic()
            self._read(block)

    def _read(self, block: _Block) -> None:
        owner, target, is_read = block.owner, block.target, False
        error: PenstockError | MemoryError | None = None
        try:
            if target is None:
                target = np.empty(block.nbytes, np.uint8).data
            owner.source.readv(block.start, [target])
            is_read = True
        except (PenstockError, MemoryError) as raised:
            error = raised
        finally:
            # Also after an error of another class, which ends this thread: those that wait must not wait for ever.
            with self.locked():
                del self.reading[block]
                owner.under_way -= 1
                is_kept = not block.is_direct and block in owner.blocks
                if is_kept and is_read:
                    block.target = target
                    self.ready[block] = None
                elif is_kept:
                    self.forget(block)
                    owner.stop_ahead()
                block.error = error
                # Last: those that wait look at it without the lock first.
                block.state = _State.READY if is_read else _State.FAILED
                is_last = owner.is_closed and not owner.under_way
                if not is_read and error is None:
                    self.num_threads -= 1
                self.changed.notify_all()
            if is_last:
                owner.source.close()


shared_pool = _Pool()


def _forked() -> None:
    # The threads that read are the parent's, and one of them may have held the lock.
    shared_pool.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forked)


@dataclass(slots=True)
class _Run:
    """Requests that follow one another through the file.

    Attributes:
        origin, position: where the first began, and where the furthest ended.
        nbytes: asked for.
        next_look_nbytes: value of `nbytes` from which it may be time to queue another block.
    """

    origin: int
    position: int
    nbytes: int
    num_requests: int = 1
    next_look_nbytes: int = 0

    @property
    def is_dense(self) -> bool:
        """Return whether it reads so much of what it passes that reading ahead of it pays."""
        enough = self.num_requests >= (2 if self.nbytes >= _MIN_RUN_BYTES else _MIN_REQUESTS)
        return enough and 2 * self.nbytes >= self.position - self.origin


class ReadAhead:
    """A source whose next bytes are read before they are asked for; see the module.

    Args:
        source: the file; this object closes it.
        settings: `memory_bytes` bounds the blocks of all files together, `chunk_bytes` each of them.
        num_reads: reads under way at once.
        stall_s: seconds without a byte after which a wait raises SourceStalled, for a source that has no deadlines of
            its own and counts its bytes (`Counting`). All its reads are then made by other threads, because one that
            hangs in the kernel cannot be interrupted.

    Attributes:
        uri, nbytes, identity: see `Source`.
        source, num_reads: as given.
    """

    def __init__(self, source: Source, settings: Settings, *, num_reads: int, stall_s: float | None = None) -> None:
        self.source = source
        self.uri = source.uri
        self.nbytes = source.nbytes
        self.identity = source.identity
        self.num_reads = num_reads
        self._stall_s = stall_s
        self._limit = settings.memory_bytes
        self._block_bytes = max(1, min(settings.chunk_bytes, settings.memory_bytes // 4))
        # For the pool, under its lock.
        self.blocks = ByteBlocks[_Block]()
        self.under_way = 0
        self.is_closed = False
        self._given = RangeSet()
        self._runs: list[_Run] = []
        # What is expected: ranges of at most a block, in order; the next one to queue; and the same by place.
        self._expected: list[tuple[int, int]] = []
        self._next_expected = 0
        self._places: list[tuple[int, int]] = []
        _alive.add(self)

    # -- Source

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. Path: `read-ahead`. SourceStalled also where `stall_s` was given, see the class."""
        _, left = span(self, offset, buffers)
        for buffer in left:
            self._fill(offset, buffer)
            offset += buffer.nbytes
        return "read-ahead"

    def close(self) -> None:
        """Drop all blocks, and close the source once no read of it is under way. Returns at once; idempotent."""
        shared_pool.closing.append(self)
        shared_pool.close_files()

    # -- hints

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which bytes `[start, stop)` will be asked for, in this order; replaces what was said before.

        Args:
            ranges: within the file. A range may be asked for in parts.

        Cost: no read yet; see the module.
        """
        planned: list[tuple[int, int]] = []
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.nbytes:
                raise ConfigError(f"bytes {start} to {stop} are not within {self.nbytes}", uri=self.uri)
            while start < stop:
                if planned and 0 <= start - planned[-1][1] <= _GAP_BYTES:
                    first, end = planned[-1]
                    cut = min(stop, first + self._block_bytes)
                    if cut > end:
                        planned[-1] = (first, cut)
                        start = max(start, cut)
                        continue
                cut = min(stop, start + self._block_bytes)
                planned.append((start, cut))
                start = cut
        with shared_pool.locked():
            self._expected = planned
            self._next_expected = 0
            self._places = sorted((start, index) for index, (start, _) in enumerate(planned))

    def is_ahead(self, start: int, stop: int) -> bool:
        """Return whether any of `[start, stop)` is in memory, under way or expected."""
        with shared_pool.locked():
            return bool(self.blocks.within(start, stop)) or self._index_of(start, stop) is not None

    # -- one request

    def _fill(self, start: int, buffer: memoryview) -> None:
        stop = start + buffer.nbytes
        if (found := self.small(start, stop)) is not None:
            buffer[:] = found
            return
        with shared_pool.locked():
            if self.is_closed:
                raise ConfigError("file is closed", uri=self.uri)
            blocks = self.blocks.within(start, stop)
            for block in blocks:
                block.users += 1
                if block.state is _State.READY:
                    shared_pool.ready.move_to_end(block)
                elif block.state is _State.QUEUED and len(shared_pool.queue) > 1:
                    # Someone waits for this one: it goes before all that nobody waits for yet.
                    shared_pool.queue.remove(block)
                    shared_pool.queue.appendleft(block)
            pieces = self._pieces(start, stop, blocks)
            # By this thread itself, if that cannot hang and saves handing a small read to another one.
            own = pieces.pop(0) if pieces and self._stall_s is None else None
            direct = [_Block(self, at, end, buffer[at - start : end - start]) for at, end in pieces]
            shared_pool.queue.extendleft(reversed(direct))
            self._given.add(start, stop)
            self._note(start, stop)
            self._queue_ahead(start, stop)
        try:
            with shared_pool.locked():
                shared_pool.start_threads(self.num_reads)
            if own is not None:
                self._read_here(own[0], buffer[own[0] - start : own[1] - start])
            for block in direct:
                self._wait(block)
            for block in blocks:
                self._copy(block, start, buffer)
        finally:
            with shared_pool.locked():
                self._release(blocks, start, stop)
                for block in direct:
                    # After an error: nobody wants these any more. One that is being read keeps its memory alive.
                    if block.state is _State.QUEUED:
                        shared_pool.queue.remove(block)

    def small(self, start: int, stop: int) -> memoryview | None:
        """Return the bytes of a small request if all of them are in one block; None, and nothing is done, if not.

        It is the way of nearly every small tensor, of which a file may have tens of thousands: 5 us instead of 30.
        Ownership: others read the same memory; copy it.
        """
        if stop - start > _SMALL_BYTES:
            return None
        with shared_pool.lock:
            block = self.blocks.block_at(start)
            run = self._runs[-1] if self._runs else None
            if block is None or block.stop < stop or block.target is None or run is None:
                return None
            # Where the run goes on as it did, the next block is not due before some more bytes were asked for.
            is_expected = self._next_expected < len(self._expected)
            if start != run.position or is_expected or run.nbytes >= run.next_look_nbytes:
                return None
            found = block.target[start - block.start : stop - block.start]
            self._given.add(start, stop)
            run.position = stop
            run.nbytes += stop - start
            run.num_requests += 1
            block.left -= stop - start
            if block.left <= 0 and not block.users:
                shared_pool.forget(block)
        if shared_pool.closing:
            shared_pool.close_files()
        return found

    def _read_here(self, offset: int, buffer: memoryview) -> None:
        """Read on this thread. The source stays open for it: its descriptor may be another file's once it is closed."""
        with shared_pool.locked():
            if self.is_closed:
                raise ConfigError("file is closed", uri=self.uri)
            self.under_way += 1
        try:
            self.source.readv(offset, [buffer])
        finally:
            with shared_pool.locked():
                self.under_way -= 1
                is_last = self.is_closed and not self.under_way
            if is_last:
                self.source.close()

    def _pieces(self, start: int, stop: int, blocks: list[_Block]) -> list[tuple[int, int]]:
        """Return the ranges of `[start, stop)` that no block has, each of at most a block's size."""
        gaps, at = [], start
        for block in blocks:
            if at < block.start:
                gaps.append((at, block.start))
            at = block.stop
        if at < stop:
            gaps.append((at, stop))
        step = self._block_bytes
        return [(at, min(at + step, end)) for first, end in gaps for at in range(first, end, step)]

    def _copy(self, block: _Block, start: int, buffer: memoryview) -> None:
        """Copy what `block` has of the request into its buffer, once it is read."""
        begin, end = max(start, block.start), min(start + buffer.nbytes, block.stop)
        self._wait(block)
        part = buffer[begin - start : end - start]
        source = block.target
        if source is None:
            # Another request has raised its error: this one asks again.
            self._read_here(begin, part)
            return
        # By numpy, which lets other threads run meanwhile.
        np.copyto(
            np.frombuffer(part, np.uint8), np.frombuffer(source[begin - block.start : end - block.start], np.uint8)
        )

    def _wait(self, block: _Block) -> None:
        """Return once `block` is read. Raises its error, once; SourceStalled."""
        if block.state is _State.READY:
            return
        received, since = -1, time.monotonic()
        look_s = _LOOK_S if self._stall_s is None else min(_LOOK_S, self._stall_s / 2)
        with shared_pool.changed:
            while block.state in {_State.QUEUED, _State.READING}:
                if not shared_pool.changed.wait(interrupts.longest_wait_s(look_s)) and block.state is _State.QUEUED:
                    # Those that were started may be slow by now.
                    shared_pool.start_threads(self.num_reads)
                interrupts.raise_if_noted()
                now_received = getattr(self.source, "received_bytes", 0)
                if now_received != received:
                    received, since = now_received, time.monotonic()
                elif self._stall_s is not None and time.monotonic() - since > self._stall_s:
                    raise SourceStalled(
                        f"no byte for {self._stall_s:g} s",
                        uri=self.uri,
                        byte_range=(block.start, block.stop),
                        hint="the file server does not answer; PENSTOCK_STALL_S sets the time",
                    )
            error, block.error = block.error, None
        if error is not None:
            raise error
        if block.state is _State.FAILED and block.is_direct and block.target is not None:
            self._read_here(block.start, block.target)

    def _release(self, blocks: list[_Block], start: int, stop: int) -> None:
        """Let go of blocks after a request for `[start, stop)`; those that were asked for whole are freed."""
        for block in blocks:
            block.users -= 1
            block.left -= min(stop, block.stop) - max(start, block.start)
            if block.left <= 0 and not block.users and block.state is _State.READY and block in self.blocks:
                shared_pool.forget(block)

    # -- what is read ahead

    def _note(self, start: int, stop: int) -> None:
        """Add a request to the run that it continues, or begin another one."""
        nbytes = stop - start
        for index, run in enumerate(self._runs):
            if run.origin - self._block_bytes <= start <= run.position + self._block_bytes:
                run.origin = min(run.origin, start)
                run.position = max(run.position, stop)
                run.nbytes += nbytes
                run.num_requests += 1
                self._runs.append(self._runs.pop(index))
                return
        self._runs.append(_Run(start, stop, nbytes))
        del self._runs[:-_MAX_RUNS]

    def _queue_ahead(self, start: int, stop: int) -> None:
        if self._next_expected < len(self._expected):
            self._queue_expected(start, stop)
            return
        run = self._runs[-1]
        if not run.is_dense:
            return
        size = min(self._block_bytes, max(_FIRST_BYTES, run.nbytes))
        horizon = run.position + min(self._limit // 2, max(2 * size, 2 * run.nbytes))
        at = run.position
        while (at := self._next_free(at)) < self.nbytes:
            end = self._end_of_free(at, min(at + size, self.nbytes))
            if end > horizon or not self._queue(at, end, spared_from=run.position):
                break
            at = end
        run.next_look_nbytes = run.nbytes + size // 4

    def _queue_expected(self, start: int, stop: int) -> None:
        index = self._index_of(start, stop)
        if index is not None and index > self._next_expected:
            # The program is further on than the reads: what it passed is read when it is asked for.
            self._next_expected = index
            self._drop_skipped(index)
        while self._next_expected < len(self._expected):
            at, limit = self._expected[self._next_expected]
            while (at := self._next_free(at)) < limit:
                end = self._end_of_free(at, limit)
                if self.blocks.nbytes + end - at > self._limit // 2 or not self._queue(at, end, spared_from=0):
                    return
                at = end
            self._next_expected += 1

    def _drop_skipped(self, index: int) -> None:
        """Free blocks of what is expected before `index`, where they hold half of the room for blocks."""
        for block in list(self.blocks):
            if self.blocks.nbytes <= self._limit // 4:
                return
            place = self._index_of(block.start, block.stop)
            if block.state is _State.READY and not block.users and (place is None or place < index):
                shared_pool.forget(block)

    def _index_of(self, start: int, stop: int) -> int | None:
        """Return the index of what is expected that `[start, stop)` overlaps; None: nothing."""
        place = bisect.bisect_right(self._places, (start, len(self._expected))) - 1
        for first, index in self._places[max(place, 0) : place + 2]:
            if first < stop and self._expected[index][1] > start:
                return index
        return None

    def _next_free(self, at: int) -> int:
        """Return the first byte from `at` on that no block has and that was not given out."""
        while True:
            block = self.blocks.block_at(at)
            end = self._given.end_of(at if block is None else block.stop)
            if end == at:
                return at
            at = end

    def _end_of_free(self, at: int, stop: int) -> int:
        """Return where the free bytes that begin at `at` end, at `stop` at most."""
        for taken in (self.blocks.next_start(at), self._given.next_start(at)):
            if taken is not None and taken < stop:
                stop = taken
        return stop

    def _queue(self, start: int, stop: int, *, spared_from: int) -> bool:
        """Queue a block, or leave out a small hole; False: there is no room. `spared_from`: see `_Pool.make_room`."""
        if stop - start < _GAP_BYTES and self._given.next_start(start) == stop:
            return True
        if not shared_pool.make_room(stop - start, self._limit, self, spared_from):
            return False
        block = _Block(self, start, stop)
        self.blocks.add(block)
        shared_pool.nbytes += block.nbytes
        shared_pool.queue.append(block)
        return True

    # -- for the pool, under its lock

    def stop_ahead(self) -> None:
        """Read nothing ahead until new requests show a run: a read of it has failed."""
        self._runs.clear()
        self._next_expected = len(self._expected)

    def drop_all(self) -> None:
        """Close for requests: drop every block, and what is queued."""
        self.is_closed = True
        for block in [each for each in shared_pool.queue if each.owner is self]:
            shared_pool.queue.remove(block)
            # A request of another thread may wait for it.
            block.error = ConfigError("file is closed", uri=self.uri)
            block.state = _State.FAILED
        shared_pool.changed.notify_all()
        for block in list(self.blocks):
            shared_pool.forget(block)

    def let_go(self) -> None:
        """In a forked child: forget the parent's blocks and reads."""
        self.blocks = ByteBlocks[_Block]()
        self.under_way = 0
        self._runs = []
        self._next_expected = 0


_alive = lifecycle.release_after_fork(ReadAhead.let_go)
