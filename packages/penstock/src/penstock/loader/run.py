"""The run of a load plan: reads into staging or host slabs, copies into slabs, and checks of complete slabs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from penstock import lifecycle
from penstock.engine.fetch_ring import HostedExecutor, Queued, RingFetch
from penstock.engine.place import Destination, Segment, pack
from penstock.engine.run import Executor, Item, PendingItem, Run, RunState
from penstock.engine.trace import Trace
from penstock.errors import PenstockError
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.plan.schedule import LoadPlan
from penstock.storage import Counting, Source
from penstock.storage.files import FileSource
from penstock.storage.io_uring import Uring
from penstock.types import GIB, MIB

if TYPE_CHECKING:
    from penstock.engine.check import Checker

MIN_BATCH_BYTES = 256 * MIB
"""Smallest batch for a check. A device digests it in 110 us. Source: benchmarks/results/h100_202611/digest.md."""

UNDER_WAY_BYTES, UNDER_WAY_PART = GIB, 8
"""A load is under way when this many bytes, or this fraction of its bytes, have arrived. Until then other threads pin
staging and allocate memory, so Python code that can wait should wait. Source:
benchmarks/results/h200x1_202611/load-history.md."""

BATCH_PER_OPEN = 8
"""A check waits for a batch of this multiple of the unread bytes, because each check takes the GIL from the reading
thread. A device digests 14 to 60 times as fast as a link moves bytes."""


class Readers(msgspec.Struct, frozen=True, kw_only=True):
    """The threads, staging and ring that make the reads of a load."""

    pool: StagingPool | None
    """Staging memory. None only if every read can go directly to its slabs."""
    num_threads: int
    """Number of concurrent reads, by threads or by the ring's workers."""
    num_direct_threads: int = 0
    """Number of threads for reads that do not suit the ring. 0 means `num_threads`."""
    ring: Uring | None = None
    """Reads files in the page cache into staging. The run closes it."""


class LoadRun(Run):
    """The run of a load plan. Leaving its `with` block ends all reads and device copies.

    Args:
        sources: one source for each file index in the plan.
        place: the destination's slabs.
        checker: compares digests of complete slabs, or None if complete slabs need no comparison.
        reads: indices of the reads to execute, or None for all reads.
        window_bytes: limit in bytes on how far reads are ahead of consumed slabs. 0 means no limit.
        order: order in which `slabs` yields the slabs, ideally also the order of the reads, or None for plan order.

    Attributes:
        reads: file index, offset and size of each read in the plan.
        paths: number of bytes read for each (file index, path name).
    """

    def __init__(
        self,
        plan: LoadPlan,
        sources: Sequence[Source],
        place: Destination,
        readers: Readers,
        *,
        stall_s: float,
        trace: Trace,
        checker: Checker | None = None,
        reads: Sequence[int] | None = None,
        window_bytes: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        # For a device, the reading threads and the placing thread hand over the GIL for every chunk.
        super().__init__(plan.nbytes, trace=trace, stall_s=stall_s, is_quick=place.registrar is not None)
        self.plan = plan
        self.sources = sources
        self.place = place
        self.pool = readers.pool
        self._checker = checker
        self._posted_reads = range(plan.num_reads) if reads is None else reads
        self._window_bytes = window_bytes
        self.fetch: Executor | RingFetch
        self._place: Executor | HostedExecutor
        num_threads = readers.num_direct_threads or readers.num_threads
        threads = Executor("fetch", num_threads, self.ticket, trace=trace, stall_s=stall_s)
        if readers.ring is None:
            self.fetch = self.own(threads)
            self._place = self.executor("place", 1)
        else:
            ring = RingFetch(readers.ring, readers.num_threads, threads, self.ticket, trace=trace, stall_s=stall_s)
            self.fetch = self.own(ring)
            self._place = ring.place
            self._ask = self.executor("ask", 1)
        self._compute = self.executor("compute", checker.num_threads if checker else 1)

        # Use lists of Python numbers, because reading a numpy scalar costs ten times as much.
        self._slab_nbytes: list[int] = plan.slab_nbytes.tolist()
        before = np.concatenate(([0], np.cumsum(plan.seg_run * plan.seg_rows)))
        self._read_start: list[int] = before[plan.seg_first[:-1]].tolist()
        segments = (plan.seg_src, plan.seg_slab, plan.seg_dst, plan.seg_run, plan.seg_rows, plan.seg_pitch)
        self._segments = list(zip(*(column.tolist() for column in segments), strict=True))
        self._seg_first: list[int] = plan.seg_first.tolist()
        files, offsets, lengths = (column.tolist() for column in (plan.read_file, plan.read_offset, plan.read_nbytes))
        self.reads: list[tuple[int, int, int]] = list(zip(files, offsets, lengths, strict=True))
        self.paths: dict[tuple[int, str], int] = {}

        # The lock guards the following fields, `paths`, and the ticket's `moved_bytes`.
        self._lock = threading.Lock()
        self._missing = list(self._slab_nbytes)
        self._ready = [False] * len(self._missing)
        self._num_open = self._num_unready = len(self._missing)
        self._open_bytes = sum(self._missing)
        self._unchecked: list[int] = []
        self._unchecked_bytes = 0
        self._is_prepared = checker is None
        self._under_way_bytes = min(UNDER_WAY_BYTES, -(-plan.nbytes // UNDER_WAY_PART))
        self._placed: set[int] = set()
        self._awaited_reads: set[int] = set()
        # The slab that a consumer waits for. Before a consumer waits, this is the last slab, or the first slab if
        # reads have a window.
        self._order = range(len(self._missing)) if order is None else order
        self._rank = self._order if order is None else np.argsort(np.asarray(order, np.int64)).tolist()
        self._awaited = self._order[0 if window_bytes else -1] if self._order else 0
        self._consumed_bytes = 0
        # The number of reads that wait in `admit`, guarded by `ticket.changed`.
        self._num_held = 0
        self._is_closed = False

    def start(self) -> RunState:
        """Post every read, and return the ticket at once."""
        if self._num_open == 0:
            self.ticket.finish()
        reads = map(partial(_Read, self), self._posted_reads)
        if isinstance(self.fetch, RingFetch):
            self.fetch.start(reads)
            self._ask.post(Item(0, "ask", 0, start=self._learn_cached))
        else:
            self.fetch.post(*islice(reads, 2 * self.fetch.num_threads))
            self.fetch.post(*reads)
        return self.ticket

    def prepare_checker(self) -> None:
        """Queue the checker's preparation, which waits for the end of a `CudaPlace.allocating` block. Idempotent."""
        with self._lock:
            is_prepared, self._is_prepared = self._is_prepared, True
        if not is_prepared and self._checker is not None and self._num_open:
            self._compute.post(Item(-1, "check: prepare", 0, start=self._checker.prepare))

    def slabs(self) -> Iterator[int]:
        """Yield slab indices in plan order, or in `order`, when each slab is complete and checked."""
        ready, ticket = self._ready, self.ticket
        for index in self._order:
            self._awaited = index
            if not ready[index]:
                if self._window_bytes:
                    # Wake the reads in `admit`, which wait until a slab has been consumed or is awaited.
                    ticket.wake()
                    # Do not wait for a full batch, because the window may block the reads that would fill it.
                    if self._missing[index] == 0:
                        self._flush_checks()
                ticket.wait_until(lambda at=index: ready[at], stall_s=self.stall_s)  # type: ignore[misc]
            yield index
            self._consumed_bytes += self._slab_nbytes[index]
            # Wake the reads that wait until a slab was consumed.
            if self._window_bytes and isinstance(self.fetch, RingFetch):
                self.fetch.wake()
            if self._num_held:
                ticket.wake()

    def is_under_way(self) -> bool:
        """Return whether the load is under way, see `UNDER_WAY_BYTES`. The change wakes the ticket's waiters."""
        return self.ticket.moved_bytes >= self._under_way_bytes

    def wait_reads(self, reads: Iterable[int], timeout_s: float = math.inf) -> bool:
        """Wait until the bytes of these reads are in their slabs. Return False at the timeout. One thread may wait."""
        # `arrived` empties this set, so that only the last read wakes the waiter.
        awaited = set(reads)
        with self._lock:
            awaited -= self._placed
            self._awaited_reads = awaited
        return self.ticket.wait_until(lambda: not awaited, stall_s=self.stall_s, timeout_s=timeout_s)

    def close(self) -> None:
        """Stop the run, wait for devices and kernel calls, and drop the slabs and the pool. Idempotent."""
        if self._is_closed or lifecycle.is_ending():
            return
        if not self.ticket.done:
            self.ticket.cancel()
        # A read may wait for a buffer that no item will release any more.
        if self.ticket.stopped and self.pool is not None:
            self.pool.cancel()
        super().close()
        self._is_closed = True
        # Drop the slabs now, because the garbage collector may run late.
        del self.place, self._checker

    def segments(self, read: int) -> list[Segment]:
        """Create only the segments of one read, because creating those of all reads would delay the first read."""
        return list(map(Segment._make, self._segments[self._seg_first[read] : self._seg_first[read + 1]]))

    def admit(self, read: int, *, wait: bool = True) -> bool:
        """Return whether the window admits a read. If `wait` is set, first wait for the window or the ticket's end."""
        needed_bytes, rank = self._read_start[read] - self._window_bytes, self._rank
        if not self._window_bytes or self._consumed_bytes >= needed_bytes:
            return True
        first = min(rank[segment.slab] for segment in self.segments(read))
        with self.ticket.changed:
            # A slab that is larger than the window is read when the consumer waits for the slab.
            while self._consumed_bytes < needed_bytes and first > rank[self._awaited] and not self.ticket.stopped:
                if not wait:
                    return False
                self._num_held += 1
                self.ticket.changed.wait(1.0)
                self._num_held -= 1
        return True

    def note_path(self, file: int, path: str, nbytes: int) -> None:
        """Record the path of a read's bytes."""
        with self._lock:
            self.paths[file, path] = self.paths.get((file, path), 0) + nbytes

    def post_place(self, read: int, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        """Copy a buffer's packed segments into their slabs on the place executor, and then release the buffer."""
        pool = self.pool
        assert pool is not None
        self.is_touched = True

        def finish() -> None:
            pool.release(buffer)
            self.arrived(segments, read)

        nbytes = sum([segment.run for segment in segments])
        copy = partial(self.place.copy, buffer, segments)
        self._place.post(Item(read, f"place {read}", nbytes, copy, finish, partial(pool.release, buffer)))

    def arrived(self, segments: Sequence[Segment], read: int = -1) -> None:
        """Record that the bytes of these segments are in their slabs. `read` consists of these segments only."""
        total = 0
        full = []
        is_last = False
        with self._lock:
            was_under_way = self.is_under_way()
            if read >= 0:
                self._placed.add(read)
                if read in self._awaited_reads:
                    self._awaited_reads.remove(read)
                    is_last = not self._awaited_reads
            for segment in segments:
                nbytes = segment.run * segment.rows
                total += nbytes
                self._missing[segment.slab] -= nbytes
                if self._missing[segment.slab] == 0:
                    full.append(segment.slab)
            self.ticket.moved_bytes += total
            is_now_under_way = not was_under_way and self.is_under_way()
            if self._checker is not None:
                nbytes = sum(self._slab_nbytes[slab] for slab in full)
                self._unchecked.extend(full)
                self._unchecked_bytes += nbytes
                self._open_bytes -= nbytes
                self._num_open -= len(full)
                # Use smaller batches towards the end, because the last checks extend the load.
                enough = min(self._checker.batch_bytes, max(self._open_bytes * BATCH_PER_OPEN, MIN_BATCH_BYTES))
                flush = self._unchecked_bytes >= enough or self._num_open == 0
                # The consumer of a stream may be waiting for a slab that does not fill a batch.
                flush |= bool(self._window_bytes) and self._awaited in full
        if self._checker is None:
            self._mark_ready(full)
        else:
            if not self._is_prepared:
                # Do not prepare the checker before bytes arrive, because loading kernels would delay the allocation.
                self.prepare_checker()
            if flush:
                self._flush_checks()
        if is_last or is_now_under_way:
            self.ticket.wake()

    def _flush_checks(self) -> None:
        with self._lock:
            batch, self._unchecked, self._unchecked_bytes = self._unchecked, [], 0
        if batch and self._checker is not None:
            nbytes = sum(self._slab_nbytes[slab] for slab in batch)
            check, finish = partial(self._checker.check, batch), partial(self._mark_ready, batch)
            self._compute.post(Item(batch[0], f"check {batch[0]}..{batch[-1]}", nbytes, check, finish))

    def _learn_cached(self) -> None:
        """Query the page cache before the ring's thread needs the result, because a query takes 0.24 ms per 64 MiB.

        Source: benchmarks/results/h200x1_202611/load-history.md.
        """
        plan = self.plan
        for file, source in enumerate(self.sources):
            of_file = plan.read_file == file
            if isinstance(source, FileSource) and of_file.any():
                starts = plan.read_offset[of_file]
                stops = starts + plan.read_nbytes[of_file]
                source.learn_cached(int(starts.min()), int(stops.max()), lambda: self.ticket.done)

    def _mark_ready(self, slabs: Sequence[int]) -> None:
        if not slabs:
            return
        with self._lock:
            for slab in slabs:
                self._ready[slab] = True
            self._num_unready -= len(slabs)
            done = self._num_unready == 0
        if done:
            self.ticket.finish()
        # Wake the waiter only for its slab, because each wake-up takes the GIL from the threads that move bytes.
        elif self._ready[self._awaited]:
            self.ticket.wake()


class _Read:
    """A work item that reads one range into staging, or directly into host slabs.

    A read in the ring owns its buffer from `queue` to `finish` or `abandon`. A read in a thread passes its buffer to
    the place executor in `start`.
    """

    __slots__ = ("_buffer", "_fd", "_file", "_offset", "_run", "_segments", "nbytes", "priority")

    def __init__(self, run: LoadRun, read: int) -> None:
        self.priority = read
        self._file, self._offset, self.nbytes = run.reads[read]
        self._run = run
        self._fd: int | None = None
        self._buffer: StagingBuffer | None = None
        self._segments: Sequence[Segment] = ()

    @property
    def name(self) -> str:
        return f"read {self.priority}"

    def queue(self) -> Queued | Literal["no buffer", "held"] | None:
        run, offset, pool = self._run, self._offset, self._run.pool
        source = run.sources[self._file]
        if pool is None or not isinstance(source, FileSource):
            return None
        if self._fd is None:
            fd = source.cached_fd(offset, self.nbytes)
            if fd is None:
                return None
            if not run.admit(self.priority, wait=False):
                return "held"
            # Remember the descriptor, because this method is called again until a buffer is free.
            self._fd = fd
        self._buffer = pool.try_acquire()
        if self._buffer is None:
            return "no buffer"
        return Queued(self._fd, offset, self._buffer.address, self.nbytes, source.uri, memory=self._buffer)

    def arrived(self) -> PendingItem | None:
        run, buffer = self._run, self._buffer
        assert buffer is not None
        source = run.sources[self._file]
        assert isinstance(source, FileSource)
        # The ring reads by descriptor, so check that the file was not modified since it was opened.
        source.require_unmodified()
        run.note_path(self._file, "page-cache", self.nbytes)
        run.is_touched = True
        self._segments = self._packed(buffer)
        return run.place.copy(buffer, self._segments)

    def start(self) -> PendingItem | None:
        run, read, source = self._run, self.priority, self._run.sources[self._file]
        run.admit(read)
        segments = run.segments(read)
        views = self._direct(segments)
        if views is not None:
            before = source.received_bytes if isinstance(source, Counting) else -1
            try:
                path = source.readv(self._offset, views)
            except PenstockError:
                # A failed read may have filled part of its buffers, unless the source has counted no bytes.
                run.is_touched |= not isinstance(source, Counting) or source.received_bytes != before
                raise
            run.is_touched = True
            run.note_path(self._file, path, self.nbytes)
            run.arrived(segments, read)
            return None
        assert run.pool is not None
        self._buffer = buffer = run.pool.acquire(stall_s=run.stall_s)
        run.note_path(self._file, source.readv(self._offset, [buffer.view[: self.nbytes]]), self.nbytes)
        # From here on the place item releases the buffer.
        self._buffer, packed = None, self._packed(buffer)
        run.post_place(read, buffer, packed)
        return None

    def finish(self) -> None:
        if self._buffer is not None:
            self.abandon()
            self._run.arrived(self._segments, self.priority)

    def abandon(self) -> None:
        if self._buffer is not None and self._run.pool is not None:
            self._run.pool.release(self._buffer)
            self._buffer = None

    def _packed(self, buffer: StagingBuffer) -> Sequence[Segment]:
        segments = self._run.segments(self.priority)
        return pack(buffer.array, segments) if segments[0].rows > 1 else segments

    def _direct(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        if sum(s.run for s in segments if s.rows == 1) != self.nbytes:
            return None
        views, direct = [], self._run.place.direct
        for _, slab, dst, nbytes, _, _ in segments:
            view = direct(slab, dst, dst + nbytes)
            if view is None:
                return None
            views.append(view)
        return views
