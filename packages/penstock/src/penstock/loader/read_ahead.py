"""Bounded read-ahead for a file that is read tensor by tensor, where every read costs a round trip.

Dense requests in file order start the read-ahead, which reads ahead at most twice as many bytes as were requested so
far. `expect` announces ranges in a different order, and the first request after `expect` starts the reads of these
ranges. The blocks of all files in the process together stay within `Settings.memory_bytes`.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import msgspec
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
"""Size of a run's first blocks. Blocks grow with the run, up to `chunk_bytes`."""

_MIN_REQUESTS = 3
"""Number of requests that form a run. Two requests are often only a weight and its bias."""

_MIN_RUN_BYTES = 4 * MIB
"""Total size from which two requests form a run. An unnecessary read of this size costs little."""

_MAX_RUNS = 4
"""Maximum number of runs per file. Files that store their dtypes separately have one run for each dtype."""

_GAP_BYTES = 64 << 10
"""Largest gap between delivered ranges that is not read separately. Source: `safe_open._GAP_BYTES`."""

_SLOW_S = 5.0
"""Seconds after which a read no longer counts towards the maximum number of threads, so that a server that does not
respond cannot block the reads of other files."""

_SMALL_BYTES = 256 << 10
"""Largest request that is copied without releasing the GIL, because releasing the GIL would take longer."""

_LOOK_S = 1.0
"""Longest wait between two checks for progress, in seconds."""


class _State(Enum):
    QUEUED = auto()
    READING = auto()
    READY = auto()
    FAILED = auto()


class _ReadBlock:
    """A range of a file that is queued, being read, or in memory.

    Attributes:
        target: the bytes, or None until the block is read. A direct block uses the caller's buffer from the start.
        left: number of bytes that no call has requested yet.
        users: number of requests that copy from the block and delay its release.
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


class _SharedBlocks:
    """The blocks and reading threads of all files in this process. The `lock` guards every field."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.queue: deque[_ReadBlock] = deque()
        self.reading: dict[_ReadBlock, float] = {}
        self.num_threads = 0
        self.nbytes = 0
        # The ready blocks, in the order of their last use.
        self.ready: OrderedDict[_ReadBlock, None] = OrderedDict()
        self.closing: deque[ReadAhead] = deque()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock inside the block, and afterwards close the files whose `close` could not acquire the lock."""
        with self.lock:
            yield
        if self.closing:
            self.close_files()

    def close_files(self) -> None:
        """Close the files in `closing`. If another thread holds the lock, that thread closes the files."""
        # Never wait for the lock, because a finalizer may run in the thread that holds the lock.
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

    def forget(self, block: _ReadBlock) -> None:
        block.owner.blocks.remove(block)
        self.ready.pop(block, None)
        self.nbytes -= block.nbytes
        if block.state is _State.READY:
            block.target = None

    def make_space(self, nbytes: int, limit: int, owner: ReadAhead, keep_from: int) -> bool:
        """Release the least recently used blocks until `nbytes` more bytes fit, or return False if that is impossible.

        Keep the blocks of `owner` from offset `keep_from` on, because they will still be requested.
        """
        if self.nbytes + nbytes <= limit:
            return True
        for block in list(self.ready):
            if block.users or (block.owner is owner and block.stop > keep_from):
                continue
            self.forget(block)
            if self.nbytes + nbytes <= limit:
                return True
        return False

    def start_threads(self, num_reads: int) -> None:
        """Start a thread for each queued block, at most `num_reads`. Raise DestinationError if no thread can start."""
        slow_before = time.monotonic() - _SLOW_S
        num_slow = sum(since < slow_before for since in self.reading.values())
        for _ in range(min(num_reads + num_slow - self.num_threads, len(self.queue))):
            thread = threading.Thread(target=self._work, name="penstock-read-ahead", daemon=True)
            if not start_thread(thread, is_needed=not self.num_threads):
                return
            self.num_threads += 1

    def _work(self) -> None:
        while True:
            with self.locked():
                block = next((each for each in self.queue if each.owner.under_way < each.owner.num_reads), None)
                if block is None:
                    # The files of all remaining blocks have reached their maximum number of reads. The threads that
                    # make these reads will also read the remaining blocks.
                    self.num_threads -= 1
                    return
                self.queue.remove(block)
                block.state = _State.READING
                block.owner.under_way += 1
                self.reading[block] = time.monotonic()
            self._read(block)

    def _read(self, block: _ReadBlock) -> None:
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
            # An unexpected error ends this thread, so wake the waiting threads in that case too.
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
                # Set the state last, because waiting threads read it without the lock.
                block.state = _State.READY if is_read else _State.FAILED
                is_last = owner.is_closed and not owner.under_way
                if not is_read and error is None:
                    self.num_threads -= 1
                self.changed.notify_all()
            if is_last:
                owner.source.close()


shared_pool = _SharedBlocks()


def _forked() -> None:
    # The reading threads exist only in the parent, and one of them may have held the lock.
    shared_pool.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forked)


class _SequentialRun(msgspec.Struct):
    """Consecutive requests through the file.

    Attributes:
        origin, position: start of the first request, and end of the furthest request.
        nbytes: number of requested bytes.
        next_look_nbytes: value of `nbytes` at which another block may be due.
    """

    origin: int
    position: int
    nbytes: int
    num_requests: int = 1
    next_look_nbytes: int = 0

    @property
    def is_dense(self) -> bool:
        """Return whether the run requests at least half of the bytes that it spans."""
        enough = self.num_requests >= (2 if self.nbytes >= _MIN_RUN_BYTES else _MIN_REQUESTS)
        return enough and 2 * self.nbytes >= self.position - self.origin


class ReadAhead:
    """A source that reads bytes before they are requested. Thread-safe.

    Args:
        source: the file, which this object closes.
        settings: `memory_bytes` limits the blocks of all files together, and `chunk_bytes` limits each block.
        num_reads: maximum number of concurrent reads.
        stall_s: seconds without a byte after which a wait raises SourceStalled, for a source that has no deadlines and
            counts its bytes (`Counting`). If `stall_s` is set, separate threads make all reads, because a read that
            hangs in the kernel cannot be interrupted.
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
        # The pool accesses these three fields under its lock.
        self.blocks = ByteBlocks[_ReadBlock]()
        self.under_way = 0
        self.is_closed = False
        self._delivered = RangeSet()
        self._runs: list[_SequentialRun] = []
        # The expected ranges in order, at most as large as a block, the next range to queue, and the ranges by offset.
        self._expected: list[tuple[int, int]] = []
        self._next_expected = 0
        self._places: list[tuple[int, int]] = []
        _alive.add(self)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """Read like `Source.readv`, on the path `read-ahead`. Raise SourceStalled if no byte arrives for `stall_s`."""
        _, left = span(self, offset, buffers)
        for buffer in left:
            self._fill(offset, buffer)
            offset += buffer.nbytes
        return "read-ahead"

    def close(self) -> None:
        """Drop all blocks, and close the source after its last running read. Return at once. Idempotent."""
        shared_pool.closing.append(self)
        shared_pool.close_files()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce the ranges `[start, stop)` that will be requested, in order. Replace the previous announcement.

        The first request after this call starts the reads. Adjacent ranges share a read, a range may be requested in
        parts, and requests in a different order are served too.
        """
        planned: list[tuple[int, int]] = []
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.nbytes:
                raise ConfigError(f"bytes [{start}, {stop}) are outside the file of {self.nbytes} bytes", uri=self.uri)
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
        """Return whether any byte of `[start, stop)` is in memory, being read, or expected."""
        with shared_pool.locked():
            return bool(self.blocks.within(start, stop)) or self._index_of(start, stop) is not None

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
                    shared_pool.queue.remove(block)
                    shared_pool.queue.appendleft(block)
            pieces = self._pieces(start, stop, blocks)
            # Read one piece in this thread if the read cannot hang, which avoids a thread switch for a small read.
            own = pieces.pop(0) if pieces and self._stall_s is None else None
            direct = [_ReadBlock(self, at, end, buffer[at - start : end - start]) for at, end in pieces]
            shared_pool.queue.extendleft(reversed(direct))
            self._delivered.add(start, stop)
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
                    # Remove direct blocks that an error left in the queue, because no request waits for them.
                    if block.state is _State.QUEUED:
                        shared_pool.queue.remove(block)

    def small(self, start: int, stop: int) -> memoryview | None:
        """Return the bytes of a small request, or None unless one block contains all of these bytes.

        The caller must copy the bytes, because other requests read the same memory. Nearly every small tensor takes
        this path, which takes 5 us instead of 30.
        """
        if stop - start > _SMALL_BYTES:
            return None
        with shared_pool.lock:
            block = self.blocks.block_at(start)
            run = self._runs[-1] if self._runs else None
            if block is None or block.stop < stop or block.target is None or run is None:
                return None
            # If the run continues, no new block is due before more bytes were requested.
            is_expected = self._next_expected < len(self._expected)
            if start != run.position or is_expected or run.nbytes >= run.next_look_nbytes:
                return None
            found = block.target[start - block.start : stop - block.start]
            self._delivered.add(start, stop)
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
        """Read in this thread, and keep the source open during the read, because a closed descriptor may be reused."""
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

    def _pieces(self, start: int, stop: int, blocks: list[_ReadBlock]) -> list[tuple[int, int]]:
        gaps, at = [], start
        for block in blocks:
            if at < block.start:
                gaps.append((at, block.start))
            at = block.stop
        if at < stop:
            gaps.append((at, stop))
        step = self._block_bytes
        return [(at, min(at + step, end)) for first, end in gaps for at in range(first, end, step)]

    def _copy(self, block: _ReadBlock, start: int, buffer: memoryview) -> None:
        begin, end = max(start, block.start), min(start + buffer.nbytes, block.stop)
        self._wait(block)
        part = buffer[begin - start : end - start]
        source = block.target
        if source is None:
            # Another request has raised the error of the block, so read the bytes again.
            self._read_here(begin, part)
            return
        # Copy with numpy, which releases the GIL.
        np.copyto(
            np.frombuffer(part, np.uint8), np.frombuffer(source[begin - block.start : end - block.start], np.uint8)
        )

    def _wait(self, block: _ReadBlock) -> None:
        """Wait until the block is read. The first waiter raises the block's error. A stall raises SourceStalled."""
        if block.state is _State.READY:
            return
        received, since = -1, time.monotonic()
        look_s = _LOOK_S if self._stall_s is None else min(_LOOK_S, self._stall_s / 2)
        with shared_pool.changed:
            while block.state in {_State.QUEUED, _State.READING}:
                if not shared_pool.changed.wait(interrupts.longest_wait_s(look_s)) and block.state is _State.QUEUED:
                    # The running reads may have become slow, so more threads may start.
                    shared_pool.start_threads(self.num_reads)
                interrupts.raise_if_noted()
                now_received = getattr(self.source, "received_bytes", 0)
                if now_received != received:
                    received, since = now_received, time.monotonic()
                elif self._stall_s is not None and time.monotonic() - since > self._stall_s:
                    raise SourceStalled(
                        f"no byte arrived for {self._stall_s:g} s",
                        uri=self.uri,
                        byte_range=(block.start, block.stop),
                        hint="check the file server, or increase PENSTOCK_STALL_S",
                    )
            error, block.error = block.error, None
        if error is not None:
            raise error
        if block.state is _State.FAILED and block.is_direct and block.target is not None:
            self._read_here(block.start, block.target)

    def _release(self, blocks: list[_ReadBlock], start: int, stop: int) -> None:
        for block in blocks:
            block.users -= 1
            block.left -= min(stop, block.stop) - max(start, block.start)
            if block.left <= 0 and not block.users and block.state is _State.READY and block in self.blocks:
                shared_pool.forget(block)

    def _note(self, start: int, stop: int) -> None:
        nbytes = stop - start
        for index, run in enumerate(self._runs):
            if run.origin - self._block_bytes <= start <= run.position + self._block_bytes:
                run.origin = min(run.origin, start)
                run.position = max(run.position, stop)
                run.nbytes += nbytes
                run.num_requests += 1
                self._runs.append(self._runs.pop(index))
                return
        self._runs.append(_SequentialRun(start, stop, nbytes))
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
            if end > horizon or not self._queue(at, end, keep_from=run.position):
                break
            at = end
        run.next_look_nbytes = run.nbytes + size // 4

    def _queue_expected(self, start: int, stop: int) -> None:
        index = self._index_of(start, stop)
        if index is not None and index > self._next_expected:
            # The program is ahead of the reads. Skipped ranges are read when they are requested.
            self._next_expected = index
            self._drop_skipped(index)
        while self._next_expected < len(self._expected):
            at, limit = self._expected[self._next_expected]
            while (at := self._next_free(at)) < limit:
                end = self._end_of_free(at, limit)
                if self.blocks.nbytes + end - at > self._limit // 2 or not self._queue(at, end, keep_from=0):
                    return
                at = end
            self._next_expected += 1

    def _drop_skipped(self, index: int) -> None:
        """Release blocks for expected ranges before `index`, if the blocks use half of their memory limit."""
        for block in list(self.blocks):
            if self.blocks.nbytes <= self._limit // 4:
                return
            place = self._index_of(block.start, block.stop)
            if block.state is _State.READY and not block.users and (place is None or place < index):
                shared_pool.forget(block)

    def _index_of(self, start: int, stop: int) -> int | None:
        place = bisect.bisect_right(self._places, (start, len(self._expected))) - 1
        for first, index in self._places[max(place, 0) : place + 2]:
            if first < stop and self._expected[index][1] > start:
                return index
        return None

    def _next_free(self, at: int) -> int:
        """Return the first byte from `at` on that no block contains and that was not delivered."""
        while True:
            block = self.blocks.block_at(at)
            end = self._delivered.end_of(at if block is None else block.stop)
            if end == at:
                return at
            at = end

    def _end_of_free(self, at: int, stop: int) -> int:
        for taken in (self.blocks.next_start(at), self._delivered.next_start(at)):
            if taken is not None and taken < stop:
                stop = taken
        return stop

    def _queue(self, start: int, stop: int, *, keep_from: int) -> bool:
        """Queue a block, or skip a small gap. Return False at the memory limit. See `_SharedBlocks.make_space`."""
        if stop - start < _GAP_BYTES and self._delivered.next_start(start) == stop:
            return True
        if not shared_pool.make_space(stop - start, self._limit, self, keep_from):
            return False
        block = _ReadBlock(self, start, stop)
        self.blocks.add(block)
        shared_pool.nbytes += block.nbytes
        shared_pool.queue.append(block)
        return True

    def stop_ahead(self) -> None:
        """After a failed read, stop reading ahead until new requests form a run."""
        self._runs.clear()
        self._next_expected = len(self._expected)

    def drop_all(self) -> None:
        """Reject further requests, and drop every block and the queue. The caller holds the pool's lock."""
        self.is_closed = True
        for block in [each for each in shared_pool.queue if each.owner is self]:
            shared_pool.queue.remove(block)
            # A request in another thread may be waiting for this block.
            block.error = ConfigError("file is closed", uri=self.uri)
            block.state = _State.FAILED
        shared_pool.changed.notify_all()
        for block in list(self.blocks):
            shared_pool.forget(block)

    def reset_after_fork(self) -> None:
        """Drop the parent's blocks and reads in a forked child."""
        self.blocks = ByteBlocks[_ReadBlock]()
        self.under_way = 0
        self._runs = []
        self._next_expected = 0


_alive = lifecycle.release_after_fork(ReadAhead.reset_after_fork)
