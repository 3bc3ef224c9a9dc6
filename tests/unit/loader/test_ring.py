"""Runs whose reads are made by io_uring workers behave like runs with threads."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ring import ring_refused

from penstock.engine.fetch_ring import READS_AHEAD
from penstock.engine.place import HostPlace, Segment
from penstock.engine.run import PendingItem
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, SourceChanged, SourceTruncated, SourceUnavailable
from penstock.loader.run import LoadRun, Readers
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.plan.schedule import plan_load
from penstock.storage import MemorySource, Source
from penstock.storage.files import FileSource
from penstock.storage.io_uring import Uring
from penstock.testing.source_suite import sample
from penstock.types import DType, TensorTable

CHUNK = 64 << 10
NUM_READS = 3
MODEL_BYTES = 40 * CHUNK


pytestmark = pytest.mark.skipif(bool(ring_refused()), reason=f"no io_uring: {ring_refused()}")


class Copy:
    """A fake device copy that is complete at the second poll."""

    def __init__(self, copy: Callable[[], None], is_held: threading.Event) -> None:
        self._copy, self._is_held, self._looks = copy, is_held, 0

    def done(self) -> bool:
        self._looks += not self._is_held.is_set()
        if self._looks == 2:
            self._copy()
        return self._looks >= 2


class DevicePlace(HostPlace):
    """Host slabs that behave like device slabs."""

    def __init__(self, slab_nbytes: Sequence[int]) -> None:
        super().__init__(slab_nbytes)
        self.is_held = threading.Event()
        self.on_copy: Callable[[int], None] = lambda number: None
        self.num_copies = 0

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        return None

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> PendingItem | None:
        self.num_copies += 1
        self.on_copy(self.num_copies)
        copy = super().copy
        return Copy(lambda: copy(buffer, segments) and None, self.is_held)


class Bench:
    """A run over files with these sizes, and optionally a source in memory."""

    def __init__(self, directory: Path, num_files: int, memory_nbytes: int = 0) -> None:
        self.paths = [directory / f"{number}.bin" for number in range(num_files)]
        self.data = [sample(MODEL_BYTES + number) for number in range(num_files)]
        for path, data in zip(self.paths, self.data, strict=True):
            path.write_bytes(data)
        self.sources: list[Source] = [FileSource.open(str(path)) for path in self.paths]
        if memory_nbytes:
            self.data.append(sample(memory_nbytes))
            self.sources.append(MemorySource(self.data[-1]))
        sizes = [len(data) for data in self.data]
        table = TensorTable(
            names=tuple(f"t{number}" for number in range(len(sizes))),
            dtypes=(DType.U8,) * len(sizes),
            shapes=tuple((size,) for size in sizes),
            file_index=np.arange(len(sizes), dtype=np.int64),
            offset=np.zeros(len(sizes), np.int64),
            nbytes=np.array(sizes, np.int64),
        )
        self.plan = plan_load(table, file_nbytes=sizes, chunk_bytes=CHUNK)
        self.pool = StagingPool.map((NUM_READS + READS_AHEAD + 2) * CHUNK, CHUNK)
        self.place = DevicePlace(self.plan.slab_nbytes.tolist())
        self.ring = Uring.open(2 * (NUM_READS + READS_AHEAD), NUM_READS)
        self.run: LoadRun | None = None

    def start(self, **options: Any) -> LoadRun:
        self.run = LoadRun(
            self.plan,
            self.sources,
            self.place,
            Readers(pool=self.pool, num_threads=NUM_READS, ring=self.ring),
            stall_s=20.0,
            trace=Trace(enabled=True),
            **options,
        )
        self.run.start()
        return self.run

    def close(self) -> None:
        """End the run, and check that all buffers were released and all threads have ended."""
        self.place.is_held.clear()
        if self.run is not None:
            self.run.close()
        assert self.pool.num_in_use == 0
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
        self.pool.close()
        for source in self.sources:
            source.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(num_files: int = 1, **options: Any) -> Bench:
        made.append(Bench(tmp_path, num_files, **options))
        return made[-1]

    yield bench
    for one in made:
        one.close()


@pytest.mark.parametrize("window_bytes", [0, 4 * CHUNK])
def test_io_uring_delivers_all_bytes(make: Callable[..., Bench], window_bytes: int) -> None:
    bench = make(3)
    run = bench.start(window_bytes=window_bytes)
    found = [bench.place.take(slab).tobytes() for slab in run.slabs()]
    assert found == bench.data
    assert run.paths == {(file, "page-cache"): len(data) for file, data in enumerate(bench.data)}


@pytest.mark.parametrize("limits_workers", [True, False])
def test_reads_in_flight_are_limited(make: Callable[..., Bench], limits_workers: bool) -> None:
    bench = make()
    assert bench.ring.limits_workers, "this kernel is older than 5.15"
    bench.ring.limits_workers = limits_workers
    in_flight, most = 0, 0
    queue_read, wait = bench.ring.queue_read, bench.ring.wait

    def queue(fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        queue_read(fd, offset, address, nbytes, token)

    def complete(timeout_s: float) -> list[tuple[int, int]]:
        nonlocal in_flight
        done = wait(timeout_s)
        in_flight -= len(done)
        return done

    bench.ring.queue_read, bench.ring.wait = queue, complete  # type: ignore[method-assign]
    list(bench.start().slabs())
    assert most == NUM_READS + (READS_AHEAD if limits_workers else 0)


def test_workers_get_new_reads_before_batch_is_copied(make: Callable[..., Bench]) -> None:
    bench = make()
    events: list[str] = []
    queue_read, wait = bench.ring.queue_read, bench.ring.wait

    def queue(fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        events.append("queue")
        queue_read(fd, offset, address, nbytes, token)

    def complete(timeout_s: float) -> list[tuple[int, int]]:
        completed = wait(timeout_s)
        if "batch" in events:
            events.append("submit")
            return completed
        while len(completed) < NUM_READS + READS_AHEAD:
            completed += wait(timeout_s)
        events.append("batch")
        return completed

    bench.ring.queue_read, bench.ring.wait = queue, complete  # type: ignore[method-assign]
    bench.place.on_copy = lambda number: events.append("copy")
    list(bench.start().slabs())
    after = events[events.index("batch") + 1 :]
    # The pool has two spare buffers, so two reads start before the second of the seven copies.
    assert after[:2] == ["copy", "queue"] and "submit" in after[: after.index("copy", 1)], after[:8]


def test_bytes_from_memory_source_are_copied_by_ring_thread(make: Callable[..., Bench]) -> None:
    bench = make(1, memory_nbytes=10 * CHUNK)
    threads = set()
    bench.place.on_copy = lambda number: threads.add(threading.current_thread().name)
    run = bench.start()
    found = [bench.place.take(slab).tobytes() for slab in run.slabs()]
    assert found == bench.data
    assert {path for _, path in run.paths} == {"page-cache", "memory"}
    assert threads == {"penstock-fetch-ring"}


def test_file_modified_during_load_raises_source_changed(make: Callable[..., Bench]) -> None:
    bench = make()

    def change(number: int) -> None:
        if number == 2:
            # Change a byte that is not read, so that only the file's times differ.
            os.utime(bench.paths[0], ns=(1, 1))

    bench.place.on_copy = change
    run = bench.start()
    with pytest.raises(SourceChanged, match="modified after it was opened"):
        list(run.slabs())
    assert bench.place.num_copies < run.plan.num_reads


def test_truncated_file_raises_source_truncated(make: Callable[..., Bench]) -> None:
    bench = make()
    os.truncate(bench.paths[0], 5 * CHUNK)
    with pytest.raises(SourceTruncated):
        list(bench.start().slabs())


def test_failed_device_copy_fails_run(make: Callable[..., Bench]) -> None:
    bench = make()

    def fail(number: int) -> None:
        raise DestinationError("the device is gone")

    bench.place.on_copy = fail
    with pytest.raises(DestinationError, match="the device is gone"):
        list(bench.start().slabs())


def test_cancel_waits_for_running_copies_and_reads(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.place.is_held.set()
    is_copying = threading.Event()
    bench.place.on_copy = lambda number: is_copying.set()
    run = bench.start()
    assert is_copying.wait(20)
    run.ticket.cancel()
    with pytest.raises(Cancelled):
        next(run.slabs())


def error_of(run: LoadRun) -> BaseException | None:
    """Return the error that stopped a run, or None if there is none within 10 s."""
    with run.ticket.changed:
        run.ticket.changed.wait_for(lambda: run.ticket.done, 10)
    return run.ticket.error


def test_failed_thread_start_fails_run(make: Callable[..., Bench], refuse_thread: Callable[[str], None]) -> None:
    refuse_thread("penstock-fetch-0")
    run = make(1, memory_nbytes=10 * CHUNK).start()
    error = error_of(run)
    assert isinstance(error, DestinationError)
    assert "cannot start a thread" in str(error)


def test_failed_ring_thread_waits_for_reads_in_flight(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    wait = bench.ring.wait

    def fail(timeout_s: float) -> list[tuple[int, int]]:
        bench.ring.wait = wait  # type: ignore[method-assign]
        raise ZeroDivisionError("a defect")

    bench.ring.wait = fail  # type: ignore[method-assign]
    run = bench.start()
    assert isinstance(error_of(run), ZeroDivisionError)
    run.close()
    assert not run.fetch.is_busy()


def test_read_that_cannot_be_queued_fails_run(make: Callable[..., Bench]) -> None:
    bench = make()
    queue_read = bench.ring.queue_read
    tokens: list[int] = []

    def queue(fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        tokens.append(token)
        if len(tokens) == 3:
            raise OverflowError("a defect")
        queue_read(fd, offset, address, nbytes, token)

    bench.ring.queue_read = queue  # type: ignore[method-assign]
    run = bench.start()
    assert isinstance(error_of(run), OverflowError)
    run.close()
    assert not run.fetch.is_busy()


def test_failed_ring_keeps_memory_of_pending_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []
    monkeypatch.setattr("penstock.engine.fetch_ring._lost", lost)
    # Do not use the fixture, which requires every buffer to be released.
    bench = Bench(tmp_path, 1)
    ring, wait = bench.ring, bench.ring.wait

    def fail(timeout_s: float) -> list[tuple[int, int]]:
        raise OSError(errno.EIO, "io_uring_enter")

    ring.wait = fail  # type: ignore[method-assign]
    run = bench.start()
    assert isinstance(error_of(run), SourceUnavailable)
    run.close()
    num_lost = NUM_READS + READS_AHEAD
    assert bench.pool.num_in_use == num_lost
    memory = weakref.ref(bench.pool._memory)
    bench.pool.close()
    bench.sources[0].close()
    del bench, run
    gc.collect()
    assert memory() is not None
    # The kernel completes the reads after the failure.
    num_ended = 0
    while num_ended < num_lost:
        num_ended += len(wait(1.0))
    ring.close()
    lost.clear()
    gc.collect()
    assert memory() is None


def test_short_read_is_not_continued_on_failed_ring(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1)
    ring, wait = bench.ring, bench.ring.wait
    batches: list[list[tuple[int, int]]] = []

    def fail_once(timeout_s: float) -> list[tuple[int, int]]:
        if len(batches) == 1:
            batches.append([])
            raise OSError(errno.EIO, "io_uring_enter")
        if batches:
            return wait(timeout_s)
        completed = wait(timeout_s)
        while len(completed) < NUM_READS + READS_AHEAD:
            completed += wait(timeout_s)
        batches.append(completed)
        return [(token, result // 2) for token, result in completed]

    ring.wait = fail_once  # type: ignore[method-assign]
    run = bench.start()
    assert isinstance(error_of(run), SourceUnavailable)
    closing = threading.Thread(target=run.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and not run.fetch.is_busy()
    # Only the reads that were queued before the failure keep their buffers: the rest of the first read, and two more.
    assert bench.pool.num_in_use == 3
    ring.close()
    bench.pool.close()
    bench.sources[0].close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs")
def test_tmpfs_file_can_be_read_by_ring() -> None:
    path = Path("/dev/shm") / f"penstock-ring-{os.getpid()}"
    path.write_bytes(sample(CHUNK))
    try:
        source = FileSource.open(str(path))
        # tmpfs rejects non-blocking reads with an error, although the pages are present.
        assert source.readv(0, [memoryview(bytearray(8))]) == "page-cache"
        assert source.cached_fd(0, CHUNK) is not None
        source.close()
    finally:
        path.unlink()
