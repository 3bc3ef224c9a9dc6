"""The run of a load plan: fetch -> place -> compute, within one staging budget.

    reads --fetch--> staging --place--> slabs --compute--> ready, in order
              `-------------(host memory: directly)--^

A slab is *open* until its last byte arrives, *unchecked* until its digests are compared, and then *ready*. Without a
checker a complete slab is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np

from penstock import lifecycle
from penstock.engine.check import Checker
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

MIN_BATCH_BYTES = 256 * MIB
"""Smallest batch for a check, even near the end of the load. A device digests it in 110 us. Source:
benchmarks/results/h100_202611/digest.md."""

UNDER_WAY_BYTES, UNDER_WAY_PART = GIB, 8
"""A load counts as under way when this many bytes, or this fraction of its bytes, have arrived. Until then other
threads pin staging, allocate memory and prepare the checker, and no copies are queued ahead. Python code that can wait
should wait until then. Source: benchmarks/results/h200x1_202611/load-history.md."""

BATCH_PER_OPEN = 8
"""A check waits for a batch of this multiple of the bytes that are still to be read. A device digests 14 to 60 times as
fast as a link moves bytes, so the check is done before the rest arrives. Each check takes the GIL from the thread that
moves bytes."""


class LoadRun(Run):
    """The run of a load plan. Leaving its `with` block ends all reads and device copies.

    Args:
        plan: the reads and their destinations.
        sources: one source for each file index in the plan.
        place: the destination's slabs.
        pool: staging memory. None only if every read can go directly to its slabs.
        num_fetch_threads: number of concurrent reads, by threads or by the ring's workers.
        num_direct_threads: number of threads for reads that do not suit the ring. 0 means the same number.
        ring: reads files in the page cache into staging. The run closes it.
        stall_s: seconds without progress after which a wait fails.
        trace: receives the spans.
        checker: compares digests of complete slabs. None means that complete slabs are ready.
        reads: indices of the reads to execute. None means all.
        window_bytes: limit on how far reads are ahead of consumed slabs, in bytes. 0 means no limit.
        order: order in which `slabs` yields the slabs. None means plan order. The plan's reads should have the same
            order.

    Attributes:
        reads: file index, offset and size of each read in the plan.
        paths: number of bytes read for each (file index, path name).
    """

    def __init__(
        self,
        plan: LoadPlan,
        sources: Sequence[Source],
        place: Destination,
        *,
        pool: StagingPool | None,
        num_fetch_threads: int,
        num_direct_threads: int = 0,
        ring: Uring | None = None,
        stall_s: float,
        trace: Trace,
        checker: Checker | None = None,
        reads: Sequence[int] | None = None,
        window_bytes: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        # For a device, the reading threads and the placing thread pass the GIL for every chunk. On the CPU they do not.
        super().__init__(plan.nbytes, trace=trace, stall_s=stall_s, is_quick=place.registrar is not None)
        self.plan = plan
        self.sources = sources
        self.place = place
        self.pool = pool
        self._checker = checker
        self._posted_reads = range(plan.num_reads) if reads is None else reads
        self._window_bytes = window_bytes
        self.fetch: Executor | RingFetch
        self._place: Executor | HostedExecutor
        threads = Executor("fetch", num_direct_threads or num_fetch_threads, self.ticket, trace=trace, stall_s=stall_s)
        if ring is None:
            self.fetch = self.own(threads)
            self._place = self.executor("place", 1)
        else:
            self.fetch = self.own(
                RingFetch(ring, num_fetch_threads, threads, self.ticket, trace=trace, stall_s=stall_s)
            )
            self._place = self.fetch.place
            self._ask = self.executor("ask", 1)
        self._compute = self.executor("compute", checker.num_threads if checker else 1)

        # Use lists of Python numbers. Each is read once per segment, and reading a numpy scalar costs ten times as
        # much.
        self._slab_nbytes: list[int] = plan.slab_nbytes.tolist()
        before = np.concatenate(([0], np.cumsum(plan.seg_run * plan.seg_rows)))
        self._read_start: list[int] = before[plan.seg_first[:-1]].tolist()
        segments = (plan.seg_src, plan.seg_slab, plan.seg_dst, plan.seg_run, plan.seg_rows, plan.seg_pitch)
        self._segments: list[list[int]] = [column.tolist() for column in segments]
        self._seg_first: list[int] = plan.seg_first.tolist()
        files, offsets, lengths = (column.tolist() for column in (plan.read_file, plan.read_offset, plan.read_nbytes))
        self.reads: list[tuple[int, int, int]] = list(zip(files, offsets, lengths, strict=True))
        self.paths: dict[tuple[int, str], int] = {}

        # The lock guards the following fields, `paths`, and the ticket's `moved_bytes`.
        self._lock = threading.Lock()
        self._missing = list(self._slab_nbytes)
        self._ready = [False] * len(self._missing)
        self._num_open = len(self._missing)
        self._open_bytes = sum(self._missing)
        self._num_unready = len(self._missing)
        self._unchecked: list[int] = []
        self._unchecked_bytes = 0
        self._is_prepared = checker is None
        self._under_way_bytes = min(UNDER_WAY_BYTES, -(-plan.nbytes // UNDER_WAY_PART))
        self._placed: set[int] = set()
        self._awaited_reads: set[int] = set()
        # The slab that a consumer waits for. Until a consumer waits, only the last slab matters, or the first if reads
        # have a window.
        self._order = range(len(self._missing)) if order is None else order
        self._awaited = 0
        if self._order:
            self._awaited = self._order[0] if window_bytes else self._order[-1]
        self._consumed_bytes = 0
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
            # The first reads start while the other items are being created.
            self.fetch.post(*islice(reads, 2 * self.fetch.num_threads))
            self.fetch.post(*reads)
        return self.ticket

    def prepare_checker(self) -> None:
        """Prepare the checker. By default this begins when the first bytes arrive. Idempotent.

        Call it inside `CudaPlace.allocating`. It waits for the end of that block, because it would slow down the
        allocation.
        """
        with self._lock:
            is_prepared, self._is_prepared = self._is_prepared, True
        if not is_prepared and self._checker is not None and self._num_open:
            self._compute.post(Item(-1, "check: prepare", 0, start=self._checker.prepare))

    def slabs(self) -> Iterator[int]:
        """Yield slab indices in plan order, or in the given order, when each slab is complete and checked.

        Raises:
            PenstockError: the error that stopped the run.
        """
        ready, ticket = self._ready, self.ticket
        for index in self._order:
            self._awaited = index
            if not ready[index]:
                if self._window_bytes:
                    # Reads in `admit` wait for consumed slabs, or for this slab's turn.
                    ticket.wake()
                    # Its check may wait for a batch that only reads beyond the window would fill.
                    if self._missing[index] == 0:
                        self._flush_checks()
                ticket.wait_until(lambda at=index: ready[at], stall_s=self.stall_s)  # type: ignore[misc]
            yield index
            self._consumed_bytes += self._slab_nbytes[index]

    def is_under_way(self) -> bool:
        """Return whether the load is under way. The ticket is notified when this becomes true.

        See `UNDER_WAY_BYTES`.
        """
        return self.ticket.moved_bytes >= self._under_way_bytes

    def wait_reads(self, reads: Iterable[int]) -> None:
        """Wait until the bytes of these reads are in their slabs, or raise the error that stopped the run.

        One thread may wait.
        """
        # `arrived` empties this set, so that only the last read wakes the waiter.
        awaited = set(reads)
        with self._lock:
            awaited -= self._placed
            self._awaited_reads = awaited
        self.ticket.wait_until(lambda: not awaited, stall_s=self.stall_s)

    def close(self) -> None:
        """Stop the run, and wait for devices and kernel calls. Idempotent.

        Afterwards nothing writes to the slabs or the pool, and the run refers to no slab, so their owners may release
        them.
        """
        if self._is_closed or lifecycle.is_ending():
            return
        if not self.ticket.done:
            self.ticket.cancel()
        # A read may wait for a buffer that no item will return any more.
        if self.ticket.stopped and self.pool is not None:
            self.pool.cancel()
        super().close()
        self._is_closed = True
        # Drop these now, because memory as large as the weights must not wait for the garbage collector.
        del self.place, self._checker

    # -- Called by the items, and by the exchange of a group.

    def segments(self, read: int) -> list[Segment]:
        """Return the segments of a read as tuples."""
        # Create them for each read, because creating all of them takes milliseconds before the first read.
        at = slice(self._seg_first[read], self._seg_first[read + 1])
        return list(map(Segment, *[column[at] for column in self._segments]))

    def admit(self, read: int, *, wait: bool = True) -> bool:
        """Wait until the window admits this read or the ticket stops.

        Without `wait`, return whether it is admitted now.
        """
        if not self._window_bytes:
            return True
        start, first_slab = self._read_start[read], int(self.plan.seg_slab[self.plan.seg_first[read]])
        with self.ticket.changed:
            # A slab that is larger than the window is read when the consumer waits for it.
            while (
                start - self._consumed_bytes > self._window_bytes
                and first_slab > self._awaited
                and not self.ticket.stopped
            ):
                if not wait:
                    return False
                self.ticket.changed.wait(1.0)
        return True

    def note_path(self, file: int, path: str, nbytes: int) -> None:
        """Record the path of a read's bytes."""
        with self._lock:
            self.paths[file, path] = self.paths.get((file, path), 0) + nbytes

    def post_place(self, read: int, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        """Copy a buffer's packed segments into their slabs on the place executor, and then release the buffer."""
        assert self.pool is not None
        self.is_touched = True
        self._place.post(_StagedCopy(self, read, buffer, segments))

    def arrived(self, segments: Sequence[Segment], read: int = -1) -> None:
        """Record that the bytes of these segments are in their slabs.

        `read` is the read that has only these segments.
        """
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
                # Use smaller batches towards the end, because the last checks add to the total time.
                enough = min(self._checker.batch_bytes, max(self._open_bytes * BATCH_PER_OPEN, MIN_BATCH_BYTES))
                flush = self._unchecked_bytes >= enough or self._num_open == 0
                # The consumer of a stream may wait for a slab that does not fill a batch.
                flush |= bool(self._window_bytes) and self._awaited in full
        if self._checker is None:
            self._mark_ready(full)
        else:
            if not self._is_prepared:
                # Do not prepare earlier, because loading kernels slows down the allocation that the first bytes wait
                # for.
                self.prepare_checker()
            if flush:
                self._flush_checks()
        if is_last or is_now_under_way:
            self.ticket.wake()

    def _flush_checks(self) -> None:
        """Post a check for the complete slabs that wait for one."""
        with self._lock:
            batch, self._unchecked, self._unchecked_bytes = self._unchecked, [], 0
        if batch and self._checker is not None:
            self._compute.post(
                Item(
                    batch[0],
                    f"check {batch[0]}..{batch[-1]}",
                    sum(self._slab_nbytes[slab] for slab in batch),
                    start=partial(self._checker.check, batch),
                    finish=partial(self._mark_ready, batch),
                )
            )

    def _learn_cached(self) -> None:
        """Find out what is in the page cache before the ring's thread needs it, because each 64 MiB takes 0.24 ms.

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
        """Mark these slabs as ready. The last slab finishes the ticket."""
        if not slabs:
            return
        with self._lock:
            for slab in slabs:
                self._ready[slab] = True
            self._num_unready -= len(slabs)
            done = self._num_unready == 0
        if done:
            self.ticket.finish()
        # Do not wake the waiter for every slab, because each wake-up takes the GIL from the threads that move bytes.
        elif self._ready[self._awaited]:
            self.ticket.wake()


class _StagedCopy:
    """A work item that copies a read's bytes from staging into their slabs and then releases the buffer."""

    __slots__ = ("_buffer", "_pool", "_run", "_segments", "nbytes", "priority")

    def __init__(self, run: LoadRun, read: int, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        assert run.pool is not None
        self.priority = read
        self.nbytes = sum([segment.run for segment in segments])
        self._run, self._pool, self._buffer, self._segments = run, run.pool, buffer, segments

    @property
    def name(self) -> str:
        """See `WorkItem.name`."""
        return f"place {self.priority}"

    def start(self) -> PendingItem | None:
        """See `WorkItem.start`."""
        return self._run.place.copy(self._buffer, self._segments)

    def finish(self) -> None:
        """See `WorkItem.finish`."""
        self._pool.release(self._buffer)
        self._run.arrived(self._segments, self.priority)

    def abandon(self) -> None:
        """See `WorkItem.abandon`."""
        self._pool.release(self._buffer)


class _Read:
    """A work item that reads one range into staging, or directly into host slabs.

    It keeps its buffer. A read on a ring acquires it in `queue`, copies from it after `arrived`, and releases it in
    `finish` or `abandon`. A read in a thread passes it on in `start`.
    """

    __slots__ = ("_buffer", "_file", "_offset", "_run", "_segments", "nbytes", "priority")

    def __init__(self, run: LoadRun, read: int) -> None:
        self.priority = read
        self._file, self._offset, self.nbytes = run.reads[read]
        self._run = run
        self._buffer: StagingBuffer | None = None
        self._segments: Sequence[Segment] = ()

    @property
    def name(self) -> str:
        """See `WorkItem.name`."""
        return f"read {self.priority}"

    def queue(self) -> Queued | Literal["later"] | None:
        """See `RingItem.queue`."""
        run, offset, pool = self._run, self._offset, self._run.pool
        source = run.sources[self._file]
        if pool is None or not isinstance(source, FileSource):
            return None
        fd = source.cached_fd(offset, self.nbytes)
        if fd is None:
            return None
        if not run.admit(self.priority, wait=False):
            return "later"
        self._buffer = pool.try_acquire()
        if self._buffer is None:
            return "later"
        return Queued(fd, offset, self._buffer.address, self.nbytes, source.uri, memory=self._buffer)

    def arrived(self) -> PendingItem | None:
        """See `RingItem.arrived`."""
        run, buffer = self._run, self._buffer
        assert buffer is not None
        source = run.sources[self._file]
        assert isinstance(source, FileSource)
        # The ring reads by descriptor, so check now that the file is still in the state in which it was opened.
        source.require_unmodified()
        run.note_path(self._file, "page-cache", self.nbytes)
        run.is_touched = True
        self._segments = self._packed(buffer)
        return run.place.copy(buffer, self._segments)

    def start(self) -> PendingItem | None:
        """See `WorkItem.start`."""
        run, read, source = self._run, self.priority, self._run.sources[self._file]
        run.admit(read)
        segments = run.segments(read)
        views = self._direct(segments)
        if views is not None:
            before = source.received_bytes if isinstance(source, Counting) else -1
            try:
                path = source.readv(self._offset, views)
            except PenstockError:
                # A read that fails midway has filled part of its buffers. A source that does not count bytes may have
                # done so too.
                run.is_touched |= not isinstance(source, Counting) or source.received_bytes != before
                raise
            run.is_touched = True
            run.note_path(self._file, path, self.nbytes)
            run.arrived(segments, read)
            return None
        assert run.pool is not None
        self._buffer = buffer = run.pool.acquire(stall_s=run.stall_s)
        run.note_path(self._file, source.readv(self._offset, [buffer.view[: self.nbytes]]), self.nbytes)
        packed = self._packed(buffer)
        # From here on the place item releases the buffer, and `abandon` must not release it again.
        self._buffer = None
        run.post_place(read, buffer, packed)
        return None

    def finish(self) -> None:
        """Finish the read. Without a buffer, `start` has passed the bytes on already."""
        if self._buffer is not None:
            self.abandon()
            self._run.arrived(self._segments, self.priority)

    def abandon(self) -> None:
        """See `WorkItem.abandon`."""
        if self._buffer is not None and self._run.pool is not None:
            self._run.pool.release(self._buffer)
            self._buffer = None

    def _packed(self, buffer: StagingBuffer) -> Sequence[Segment]:
        """Return the read's segments, each as one run in the buffer."""
        segments = self._run.segments(self.priority)
        return pack(buffer.array, segments) if segments[0].rows > 1 else segments

    def _direct(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        """Return the destination bytes in the slabs, in the order of the read, if the read can go directly to them."""
        if sum(s.run for s in segments if s.rows == 1) != self.nbytes:
            return None
        views, direct = [], self._run.place.direct
        for _, slab, dst, nbytes, _, _ in segments:
            view = direct(slab, dst, dst + nbytes)
            if view is None:
                return None
            views.append(view)
        return views
