"""The run of a load plan: fetch -> place -> compute, within one staging budget.

In: a `LoadPlan`, its sources, a `Destination`, optionally a `Checker`. Out: slabs, complete and checked, in plan order.
Not here: executors, ticket and closing (`engine.run`), what a slab becomes (`session`).

    reads --fetch--> staging --place--> slabs --compute--> ready, in order
              `----------------(host memory: straight)--^

A slab is *open* until its last byte arrived, *unchecked* until its digests were compared, then *ready*. Without a
checker a slab is ready once it is complete.
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
"""Bytes of slabs that are enough for a check, however little is left to read: a device digests them in 110 us.
Source: benchmarks/results/h100_202611/digest.md."""

UNDER_WAY_BYTES, UNDER_WAY_PART = GIB, 8
"""A load is under way once so many bytes of it, or this part of them, have arrived. Until then others pin staging,
allocate memory and prepare the checker, and no copies are queued ahead: Python that can wait should wait until then.
Source: benchmarks/results/h200x1_202611/load-history.md."""

BATCH_PER_OPEN = 8
"""A check waits for this many times the bytes that are left to read: a device digests 14 to 60 times as fast as a link
moves bytes, so it is done before those have come, and each check takes the GIL from the thread that moves them."""


class LoadRun(Run):
    """Run of a load plan. A context manager: leaving it drains I/O and device copies.

    Args:
        plan: what to read and where it goes.
        sources: by file index of the plan.
        place: the destination's slabs.
        pool: staging; None only where every read can go straight to its slabs.
        num_fetch_threads: reads under way at once, by threads or by the ring's workers.
        num_direct_threads: threads for what does not suit the ring; 0: as many as that.
        ring: takes the reads of files in the page cache into staging; the run closes it.
        stall_s: deadline by progress of every wait.
        trace: where spans go.
        checker: digests complete slabs; None: slabs are ready when their bytes are.
        reads: which reads of the plan to carry out; None: all.
        window_bytes: reads start at most this far ahead of the slabs consumed; 0: no bound.
        order: the slabs as `slabs` yields them; None: plan order. The plan's reads should be in this order too.

    Attributes:
        reads: file index, offset and bytes of each read of the plan.
        paths: bytes read per (file index, path word).
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
        # To a device, reader threads and the placing thread pass the GIL for every chunk; to the CPU there is no such
        # traffic.
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

        # Lists of Python's own numbers: each is read once per segment, where a numpy scalar costs ten times as much.
        self._slab_nbytes: list[int] = plan.slab_nbytes.tolist()
        before = np.concatenate(([0], np.cumsum(plan.seg_run * plan.seg_rows)))
        self._read_start: list[int] = before[plan.seg_first[:-1]].tolist()
        segments = (plan.seg_src, plan.seg_slab, plan.seg_dst, plan.seg_run, plan.seg_rows, plan.seg_pitch)
        self._segments: list[list[int]] = [column.tolist() for column in segments]
        self._seg_first: list[int] = plan.seg_first.tolist()
        files, offsets, lengths = (column.tolist() for column in (plan.read_file, plan.read_offset, plan.read_nbytes))
        self.reads: list[tuple[int, int, int]] = list(zip(files, offsets, lengths, strict=True))
        self.paths: dict[tuple[int, str], int] = {}

        # The lock guards what follows, `paths`, and the ticket's `moved_bytes`.
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
        # The slab a consumer waits for; until one does, only the last matters, or the first where reads have a window.
        self._order = range(len(self._missing)) if order is None else order
        self._awaited = 0
        if self._order:
            self._awaited = self._order[0] if window_bytes else self._order[-1]
        self._consumed_bytes = 0
        self._is_closed = False

    def start(self) -> RunState:
        """Post every read and return the ticket at once."""
        if self._num_open == 0:
            self.ticket.finish()
        reads = map(partial(_Read, self), self._posted_reads)
        if isinstance(self.fetch, RingFetch):
            self.fetch.start(reads)
            self._ask.post(Item(0, "ask", 0, start=self._learn_cached))
        else:
            # The first reads start while the items of the others are made.
            self.fetch.post(*islice(reads, 2 * self.fetch.num_threads))
            self.fetch.post(*reads)
        return self.ticket

    def prepare_checker(self) -> None:
        """Have the checker prepared; by default that begins with the first arrival. Idempotent.

        Order: in `CudaPlace.allocating`, whose end it waits for: earlier, it would slow the allocation down.
        """
        with self._lock:
            is_prepared, self._is_prepared = self._is_prepared, True
        if not is_prepared and self._checker is not None and self._num_open:
            self._compute.post(Item(-1, "check: prepare", 0, start=self._checker.prepare))

    def slabs(self) -> Iterator[int]:
        """Yield slab indices in plan order, or in the order given, each once it is complete and checked.

        Raises:
            PenstockError: what stopped the run.
        """
        ready, ticket = self._ready, self.ticket
        for index in self._order:
            self._awaited = index
            if not ready[index]:
                if self._window_bytes:
                    # Reads wait in `admit` for what was consumed, or for this slab's turn.
                    ticket.wake()
                    # Its check may wait for a batch that reads beyond the window would have to fill.
                    if self._missing[index] == 0:
                        self._flush_checks()
                ticket.wait_until(lambda at=index: ready[at], stall_s=self.stall_s)  # type: ignore[misc]
            yield index
            self._consumed_bytes += self._slab_nbytes[index]

    def is_under_way(self) -> bool:
        """Return whether the first bytes have arrived; see `UNDER_WAY_BYTES`. The ticket is woken once they have."""
        return self.ticket.moved_bytes >= self._under_way_bytes

    def wait_reads(self, reads: Iterable[int]) -> None:
        """Return once the bytes of these reads are in their slabs; one waiter. Raises what stopped the run."""
        # Emptied by `arrived`, so that only the last of them wakes the waiter.
        awaited = set(reads)
        with self._lock:
            awaited -= self._placed
            self._awaited_reads = awaited
        self.ticket.wait_until(lambda: not awaited, stall_s=self.stall_s)

    def close(self) -> None:
        """Stop what runs, wait for what a device or a kernel call still does. Idempotent.

        Afterwards nothing writes to the slabs or the pool, whose owner may free it, and the run holds no slab.
        """
        if self._is_closed or lifecycle.is_ending():
            return
        if not self.ticket.done:
            self.ticket.cancel()
        # A read may wait for a buffer that no item will give back any more.
        if self.ticket.stopped and self.pool is not None:
            self.pool.cancel()
        super().close()
        self._is_closed = True
        # Nothing of this waits for the garbage collector: it holds memory of the size of the weights.
        del self.place, self._checker

    # -- Called by the items, and by the exchange of a group.

    def segments(self, read: int) -> list[Segment]:
        """Return the read's segments as tuples."""
        # Made for each read: to make all of them takes milliseconds, ahead of the first read.
        at = slice(self._seg_first[read], self._seg_first[read + 1])
        return list(map(Segment, *[column[at] for column in self._segments]))

    def admit(self, read: int, *, wait: bool = True) -> bool:
        """Wait until the window has room for this read, or the ticket stops; without `wait`, say whether it has."""
        if not self._window_bytes:
            return True
        start, first_slab = self._read_start[read], int(self.plan.seg_slab[self.plan.seg_first[read]])
        with self.ticket.changed:
            # A slab larger than the window is read all the same once it is the one waited for.
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
        """Note the path that a read's bytes took."""
        with self._lock:
            self.paths[file, path] = self.paths.get((file, path), 0) + nbytes

    def post_place(self, read: int, buffer: StagingBuffer, segments: Sequence[Segment]) -> None:
        """Copy a buffer's packed segments into their slabs, on the place executor; then give the buffer back."""
        assert self.pool is not None
        self.is_touched = True
        self._place.post(_Copy(self, read, buffer, segments))

    def arrived(self, segments: Sequence[Segment], read: int = -1) -> None:
        """Note that the bytes of these segments are in their slabs; with `read`, that it has no others."""
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
                # Towards the end less: what is checked last, and used only then, adds to the whole time.
                enough = min(self._checker.batch_bytes, max(self._open_bytes * BATCH_PER_OPEN, MIN_BATCH_BYTES))
                flush = self._unchecked_bytes >= enough or self._num_open == 0
                # A stream's consumer may be waiting for a slab that alone does not fill a batch.
                flush |= bool(self._window_bytes) and self._awaited in full
        if self._checker is None:
            self._mark_ready(full)
        else:
            if not self._is_prepared:
                # Not earlier: to load kernels slows the allocation of device memory, which the first bytes wait for.
                self.prepare_checker()
            if flush:
                self._flush_checks()
        if is_last or is_now_under_way:
            self.ticket.wake()

    def _flush_checks(self) -> None:
        """Post a check of the complete slabs that wait for one."""
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
        """Learn what is in the page cache ahead of the ring's thread: to ask takes 0.24 ms for each 64 MiB.

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
        """Let these slabs be given away; the last one finishes the ticket."""
        if not slabs:
            return
        with self._lock:
            for slab in slabs:
                self._ready[slab] = True
            self._num_unready -= len(slabs)
            done = self._num_unready == 0
        if done:
            self.ticket.finish()
        # Not for every slab: each wake-up takes the GIL from the threads that move bytes.
        elif self._ready[self._awaited]:
            self.ticket.wake()


class _Copy:
    """A work item that copies a read's bytes from staging into their slabs, and gives the buffer back."""

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
    """A work item that reads one range into staging, or straight into host slabs.

    A class, for its buffer: a ring's read acquires it in `queue`, copies out of it from `arrived` on, and gives it back
    in `finish` or `abandon`. A thread's read passes it on in `start`.
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
        # The ring read by descriptor: only now is it known that the file is still in the state it was opened in.
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
                # A read that fails midway has filled a part of its buffers; a source that does not count may have.
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
        # From here on the place item gives the buffer back; `abandon` must not do so a second time.
        self._buffer = None
        run.post_place(read, buffer, packed)
        return None

    def finish(self) -> None:
        """See `WorkItem.finish`: the copy is done; without a buffer, `start` has passed the bytes on."""
        if self._buffer is not None:
            self.abandon()
            self._run.arrived(self._segments, self.priority)

    def abandon(self) -> None:
        """See `WorkItem.abandon`."""
        if self._buffer is not None and self._run.pool is not None:
            self._run.pool.release(self._buffer)
            self._buffer = None

    def _packed(self, buffer: StagingBuffer) -> Sequence[Segment]:
        """Return the read's segments, each one run of the buffer."""
        segments = self._run.segments(self.priority)
        return pack(buffer.array, segments) if segments[0].rows > 1 else segments

    def _direct(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        """Return the slabs' own bytes in the order of the read, if it can go straight to them."""
        if sum(s.run for s in segments if s.rows == 1) != self.nbytes:
            return None
        views, direct = [], self._run.place.direct
        for _, slab, dst, nbytes, _, _ in segments:
            view = direct(slab, dst, dst + nbytes)
            if view is None:
                return None
            views.append(view)
        return views
