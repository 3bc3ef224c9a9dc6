"""Runs a load plan: fetch -> place -> compute, one budget, one ticket, one trace.

In: a `LoadPlan`, its sources, a `Place`, optionally a `Checker`. Out: slabs, complete and checked, in plan order.
Not here: what a slab becomes (`loader`).

    reads --fetch--> staging --place--> slabs --compute--> ready, in order
              `----------------(host memory: straight)--^
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from penstock.engine.check import Checker
from penstock.engine.executors import Executor, HostedExecutor, Pending, Ticket, Work
from penstock.engine.fetch_ring import Queued, RingFetch
from penstock.engine.place import Place, Segment, pack
from penstock.engine.trace import Trace
from penstock.lifecycle import Closing
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.plan.schedule import LoadPlan
from penstock.storage import Source
from penstock.storage.files import FileSource
from penstock.storage.io_uring import Uring


class LoadRun(Closing):
    """One running load. A context manager: leaving it drains I/O and device copies.

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
    """

    def __init__(
        self,
        plan: LoadPlan,
        sources: Sequence[Source],
        place: Place,
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
    ) -> None:
        self.plan, self.sources, self.place, self.pool, self.stall_s = plan, sources, place, pool, stall_s
        self._checker = checker
        self._reads = range(plan.num_reads) if reads is None else reads
        self._window_bytes = window_bytes
        threads = Executor("fetch", num_direct_threads or num_fetch_threads, trace=trace, stall_s=stall_s)
        self.fetch: Executor | RingFetch = threads
        if ring is not None:
            self.fetch = RingFetch(ring, num_fetch_threads, threads, trace=trace, stall_s=stall_s)
        self._place: Executor | HostedExecutor = Executor("place", 1, trace=trace, stall_s=stall_s)
        if isinstance(self.fetch, RingFetch):
            self._place = self.fetch.place
        self._compute = Executor("compute", checker.num_threads if checker else 1, trace=trace, stall_s=stall_s)
        self.ticket = Ticket(plan.nbytes, lambda: any(e.is_busy() for e in (self.fetch, self._place, self._compute)))
        self._slab_nbytes: list[int] = plan.slab_nbytes.tolist()
        self._missing = list(self._slab_nbytes)
        self._ready = [False] * len(self._missing)
        self._num_open = self._num_unready = len(self._missing)
        # The slab a consumer waits for; until one does, only the last matters, or the first where reads have a window.
        self._awaited = 0 if window_bytes else max(0, len(self._missing) - 1)
        self._placed: set[int] = set()
        self._awaited_reads: set[int] = set()
        self._unchecked: list[int] = []
        self._unchecked_bytes = 0
        self._consumed_bytes = 0
        before = np.concatenate(([0], np.cumsum(plan.seg_run * plan.seg_rows)))
        self._read_start: list[int] = before[plan.seg_first[:-1]].tolist()
        segments = (plan.seg_src, plan.seg_slab, plan.seg_dst, plan.seg_run, plan.seg_rows, plan.seg_pitch)
        self._segments = list(map(Segment._make, zip(*(column.tolist() for column in segments), strict=True)))
        self._seg_first: list[int] = plan.seg_first.tolist()
        files, offsets, lengths = (column.tolist() for column in (plan.read_file, plan.read_offset, plan.read_nbytes))
        self.reads: list[tuple[int, int, int]] = list(zip(files, offsets, lengths, strict=True))
        """File index, offset and bytes of each read."""
        self._lock = threading.Lock()
        self._closed = False
        self.paths: dict[tuple[int, str], int] = {}
        """Bytes read per (file index, path word)."""

    def start(self) -> Ticket:
        """Set everything going; returns at once."""
        if self._num_open == 0:
            self.ticket.finish()
        # The first reads start while the steps of the others are made.
        first = 2 * self.fetch.num_threads
        for part in (self._reads[:first], self._reads[first:]):
            self.fetch.post(*[_FetchStep(self, r) for r in part])
        return self.ticket

    def slabs(self) -> Iterator[int]:
        """Slab indices in plan order, each once it is complete and checked.

        Raises:
            PenstockError: what stopped the run.
        """
        ready, ticket = self._ready, self.ticket
        for index, nbytes in enumerate(self._slab_nbytes):
            self._awaited = index
            if not ready[index]:
                if self._window_bytes:
                    ticket.wake()
                if self._window_bytes and self._missing[index] == 0:
                    self._flush_checks()
                ticket.wait_until(lambda at=index: ready[at], stall_s=self.stall_s)  # type: ignore[misc]
            yield index
            self._consumed_bytes += nbytes

    def close(self) -> None:
        """Stop what runs, wait for what a device or a kernel call still does. Idempotent.

        Afterwards nothing writes to the slabs or the pool, whose owner may free it, and the run holds no slab.
        """
        if self._closed:
            return
        if not self.ticket.done:
            self.ticket.cancel()
        if self.ticket.stopped and self.pool is not None:
            self.pool.cancel()
        for executor in (self.fetch, self._place, self._compute):
            executor.close()
        self._closed = True
        # Nothing of this waits for the garbage collector: it holds memory of the size of the weights.
        del self.place, self._checker
        self.ticket.release()

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

    def segments(self, read: int) -> list[Segment]:
        """Return the read's segments as tuples."""
        return self._segments[self._seg_first[read] : self._seg_first[read + 1]]

    def took(self, file: int, path: str, nbytes: int) -> None:
        """Note which path a read's bytes took."""
        with self._lock:
            self.paths[file, path] = self.paths.get((file, path), 0) + nbytes

    def post_place(self, step: _PlaceStep) -> None:
        """Hand a full staging buffer to the place executor."""
        self._place.post(step)

    def wait_reads(self, reads: Iterable[int]) -> None:
        """Return once the bytes of these reads are in their slabs; one waiter. Raises what stopped the run."""
        awaited = set(reads)
        with self._lock:
            awaited -= self._placed
            self._awaited_reads = awaited
        self.ticket.wait_until(lambda: not awaited, stall_s=self.stall_s)

    def placed(self, read: int, segments: Sequence[Segment]) -> None:
        """This read's bytes are in their slabs."""
        self.arrived(segments)
        with self._lock:
            self._placed.add(read)
            is_last = self._awaited_reads == {read}
            self._awaited_reads.discard(read)
        if is_last:
            self.ticket.wake()

    def arrived(self, segments: Sequence[Segment]) -> None:
        """The bytes of these segments are in their slabs."""
        total = 0
        full = []
        with self._lock:
            for segment in segments:
                nbytes = segment.run * segment.rows
                total += nbytes
                self._missing[segment.slab] -= nbytes
                if self._missing[segment.slab] == 0:
                    full.append(segment.slab)
            self.ticket.moved_bytes += total
            if self._checker is not None:
                self._unchecked.extend(full)
                self._unchecked_bytes += sum(self._slab_nbytes[slab] for slab in full)
                self._num_open -= len(full)
                flush = self._unchecked_bytes >= self._checker.batch_bytes or self._num_open == 0
                # A stream's consumer may be waiting for a slab that alone does not fill a batch.
                flush |= bool(self._window_bytes) and self._awaited in full
        if self._checker is None:
            self.mark_ready(full)
        elif flush:
            self._flush_checks()

    def mark_ready(self, slabs: Sequence[int]) -> None:
        """These slabs may be given away; the last one finishes the ticket."""
        if not slabs:
            return
        with self._lock:
            for slab in slabs:
                self._ready[slab] = True
            self._num_unready -= len(slabs)
            done = self._num_unready == 0
        if done:
            self.ticket.finish()
        elif self._ready[self._awaited]:
            self.ticket.wake()

    def _flush_checks(self) -> None:
        """Post a check of the complete slabs that wait for one."""
        with self._lock:
            batch, self._unchecked, self._unchecked_bytes = self._unchecked, [], 0
        if batch and self._checker is not None:
            self._compute.post(_CheckStep(self, self._checker, batch))


class _FetchStep(Work):
    """Read one range into staging (or straight into host slabs)."""

    __slots__ = ("_buffer", "_file", "_offset", "_read", "_run")

    def __init__(self, run: LoadRun, read: int) -> None:
        self._file, self._offset, nbytes = run.reads[read]
        super().__init__(run.ticket, read, f"read {read}", nbytes)
        self._run, self._read = run, read
        self._buffer: StagingBuffer | None = None

    def queue(self) -> Queued | Literal["later"] | None:
        """See `FetchStep.queue`."""
        run, r, offset = self._run, self._read, self._offset
        source = run.sources[self._file]
        fd = source.cached_fd(offset, self.nbytes) if isinstance(source, FileSource) and run.pool is not None else None
        if fd is None or run.pool is None:
            return None
        if not run.admit(r, wait=False):
            return "later"
        self._buffer = run.pool.try_acquire()
        if self._buffer is None:
            return "later"
        return Queued(fd, offset, self._buffer.address, self.nbytes, source.uri)

    def arrived(self) -> None:
        """See `FetchStep.arrived`."""
        assert self._buffer is not None
        source = self._run.sources[self._file]
        assert isinstance(source, FileSource)
        source.require_unmodified()
        self._run.took(self._file, "page-cache", self.nbytes)
        self._hand_on(self._buffer)

    def start(self) -> Pending | None:
        """See `Step.start`."""
        run, r, file, offset = self._run, self._read, self._file, self._offset
        run.admit(r)
        segments = run.segments(r)
        views = self._direct(segments)
        if views is not None:
            run.took(file, run.sources[file].readv(offset, views), self.nbytes)
            run.placed(r, segments)
            return None
        assert run.pool is not None
        self._buffer = buffer = run.pool.acquire(stall_s=run.stall_s)
        run.took(file, run.sources[file].readv(offset, [buffer.view[: self.nbytes]]), self.nbytes)
        self._hand_on(buffer)
        return None

    def _hand_on(self, buffer: StagingBuffer) -> None:
        segments: Sequence[Segment] = self._run.segments(self._read)
        if segments[0].rows > 1:
            segments = pack(buffer.array, segments)
        self._buffer = None
        self._run.post_place(_PlaceStep(self._run, self._read, buffer, segments))

    def _direct(self, segments: Sequence[Segment]) -> list[memoryview] | None:
        if sum(s.run for s in segments if s.rows == 1) != self.nbytes:
            return None
        views = []
        for _, slab, dst, run, _, _ in segments:
            view = self._run.place.direct(slab, dst, dst + run)
            if view is None:
                return None
            views.append(view)
        return views

    def abandon(self) -> None:
        """See `Step.abandon`."""
        if self._buffer is not None and self._run.pool is not None:
            self._run.pool.release(self._buffer)
            self._buffer = None


class _PlaceStep(Work):
    """Copy a staging buffer's segments into their slabs, then give the buffer back."""

    __slots__ = ("_buffer", "_run", "_segments")

    def __init__(self, run: LoadRun, read: int, buffer: StagingBuffer, packed: Sequence[Segment]) -> None:
        super().__init__(run.ticket, read, f"place {read}", sum(s.run for s in packed))
        self._run, self._buffer, self._segments = run, buffer, packed

    def start(self) -> Pending | None:
        """See `Step.start`."""
        return self._run.place.copy(self._buffer, self._segments)

    def finish(self) -> None:
        """See `Step.finish`."""
        self.abandon()
        self._run.placed(self.priority, self._segments)

    def abandon(self) -> None:
        """See `Step.abandon`."""
        assert self._run.pool is not None
        self._run.pool.release(self._buffer)


class _CheckStep(Work):
    """Digest a batch of complete slabs and compare."""

    __slots__ = ("_checker", "_run", "_slabs")

    def __init__(self, run: LoadRun, checker: Checker, slabs: list[int]) -> None:
        nbytes = sum(int(run.plan.slab_nbytes[s]) for s in slabs)
        super().__init__(run.ticket, slabs[0], f"check {slabs[0]}..{slabs[-1]}", nbytes)
        self._run, self._checker, self._slabs = run, checker, slabs

    def start(self) -> Pending | None:
        """See `Step.start`."""
        return self._checker.check(self._slabs)

    def finish(self) -> None:
        """See `Step.finish`."""
        self._run.mark_ready(self._slabs)
