"""A run moves a plan's bytes to their slabs within its budget, and finishes, fails or is cancelled."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.shards import shard_box

from penstock.engine.check import Expected, HostChecker
from penstock.engine.place import Bytes, HostPlace, Segment
from penstock.engine.run import PendingItem, RunState
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, IntegrityError, PenstockError, SourceStalled, SourceUnavailable
from penstock.loader.run import LoadRun, Readers
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.storage import MemorySource
from penstock.testing.source_suite import sample
from penstock.types import Box, DType, TensorTable

KIB = 1 << 10
CHUNK = 64 * KIB


def table_of(*nbytes: int) -> TensorTable:
    stops = np.cumsum(nbytes)
    return TensorTable(
        names=tuple(f"t{i:03}" for i in range(len(nbytes))),
        dtypes=(DType.U8,) * len(nbytes),
        shapes=tuple((n,) for n in nbytes),
        file_index=np.zeros(len(nbytes), np.int64),
        offset=(stops - nbytes).astype(np.int64),
        nbytes=np.array(nbytes, np.int64),
    )


class Gated(MemorySource):
    """A source whose reads can wait, fail or be counted."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.open, self.offsets = threading.Event(), list[int]()
        self.open.set()
        self.fail_from: int | None = None

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        self.offsets.append(offset)
        assert self.open.wait(20)
        if self.fail_from is not None and offset >= self.fail_from:
            raise SourceUnavailable("the disk is gone", uri=self.uri)
        return super().readv(offset, buffers)


class SlowCopy:
    """A fake device copy that is complete after several polls."""

    def __init__(self, copy: Callable[[], None], num_looks: int) -> None:
        self._copy, self._left = copy, num_looks

    def done(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self._copy()
        return self._left <= 0


class DevicePlace(HostPlace):
    """Host slabs that behave like device slabs: no direct reads, and slow copies."""

    def __init__(self, slab_nbytes: Sequence[int], *, num_looks: int = 2) -> None:
        super().__init__(slab_nbytes)
        self.num_looks = num_looks
        self.fault: Exception | None = None

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        return None

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> PendingItem | None:
        if self.fault is not None:
            raise self.fault
        copy = super().copy

        def carry_out() -> None:
            copy(buffer, segments)

        return SlowCopy(carry_out, self.num_looks)


class Bench:
    """A plan of tensors with these sizes over a gated source, and runs of the plan."""

    def __init__(self, *nbytes: int, boxes: Sequence[Box | None] | None = None) -> None:
        self.data = sample(sum(nbytes))
        self.source = Gated(self.data)
        self.plan: LoadPlan = plan_load(
            table_of(*nbytes), file_nbytes=[len(self.data)], chunk_bytes=CHUNK, boxes=boxes, pack=False
        )
        self.pool = StagingPool.map(4 * CHUNK, CHUNK)
        self.place = DevicePlace(self.plan.slab_nbytes.tolist())
        self.run: LoadRun | None = None

    def start(self, **options: Any) -> LoadRun:
        readers = Readers(pool=options.pop("pool", self.pool), num_threads=options.pop("num_threads", 3))
        defaults: dict[str, Any] = {"stall_s": 20.0, "trace": Trace(enabled=False)}
        place = options.pop("place", self.place)
        self.run = LoadRun(self.plan, [self.source], place, readers, **(defaults | options))
        self.run.start()
        return self.run

    def wanted(self, slab: int) -> bytes:
        row = self.plan.row_slab.tolist().index(slab)
        at = int(self.plan.table.offset[row])
        return self.data[at : at + int(self.plan.row_nbytes[row])]

    def all_buffers_are_back(self) -> bool:
        return self.pool.num_in_use == 0

    def close(self) -> None:
        self.source.open.set()
        if self.run is not None:
            self.run.close()
        self.pool.close()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def bench(*nbytes: int, **options: Any) -> Bench:
        made.append(Bench(*nbytes, **options))
        return made[-1]

    yield bench
    for one in made:
        one.close()


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def leaves_of(bench: Bench) -> tuple[Expected, HostChecker]:
    from penstock.digest.leaf import leaf_digests, num_leaves

    counts = num_leaves(bench.plan.table.nbytes, CHUNK)
    leaves = np.empty(int(counts.sum()), np.uint64)
    at = 0
    for slab, count in enumerate(counts.tolist()):
        leaf_digests(memoryview(bytearray(bench.wanted(slab))), CHUNK, leaves[at : at + count])
        at += count
    expected = Expected(bench.plan, leaves, CHUNK, [bench.source.uri])
    return expected, HostChecker(expected, lambda slab: memoryview(bench.place.slab(slab)))


SIZES = {
    "one byte": (1,),
    "many": (10, 70_000, 3, 200_000, 1) * 5,
    "larger than the pool": (1_000_003, 17, 900_000),
    "chunks exactly": (CHUNK, CHUNK, 2 * CHUNK),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("straight", [True, False])
def test_slabs_arrive_complete_and_in_order(make: Make, sizes: str, straight: bool) -> None:
    bench = make(*SIZES[sizes])
    place = HostPlace(bench.plan.slab_nbytes.tolist()) if straight else bench.place
    run = bench.start(place=place, pool=None if straight else bench.pool)
    found = [(slab, place.take(slab).tobytes()) for slab in run.slabs()]
    assert [slab for slab, _ in found] == list(range(len(SIZES[sizes])))
    assert all(data == bench.wanted(slab) for slab, data in found)
    run.ticket.wait(stall_s=5)
    run.close()
    assert (
        run.ticket.moved_bytes == bench.plan.nbytes == sum(n for (_, path), n in run.paths.items() if path == "memory")
    )
    assert bench.all_buffers_are_back() and not own_threads()
    assert straight or 0 < bench.pool.peak_bytes <= 4 * CHUNK


def test_sliced_rows_are_packed_in_staging(make: Make) -> None:
    nbytes = 300 * 500
    bench = Bench(nbytes)
    shape, box = (300, 500), shard_box((300, 500), 1, 1, 4)
    table = TensorTable(
        names=("t",),
        dtypes=(DType.U8,),
        shapes=(shape,),
        file_index=np.zeros(1, np.int64),
        offset=np.zeros(1, np.int64),
        nbytes=np.array([nbytes], np.int64),
    )
    bench.plan = plan_load(table, file_nbytes=[nbytes], chunk_bytes=CHUNK, boxes=[box], max_gap_bytes=1000)
    assert int(bench.plan.seg_rows.max()) > 1
    bench.place = DevicePlace(bench.plan.slab_nbytes.tolist())
    run = bench.start()
    whole = np.frombuffer(bench.data, np.uint8).reshape(shape)
    wanted = whole[box.start[0] : box.stop[0], box.start[1] : box.stop[1]]
    assert [bench.place.slab(slab).tobytes() for slab in run.slabs()] == [wanted.tobytes()]
    bench.close()
    assert make is not None


def test_empty_run_finishes_immediately(make: Make) -> None:
    bench = make(0, 0)
    run = bench.start()
    run.ticket.wait(stall_s=1)
    assert list(run.slabs()) == []


def test_run_performs_only_selected_reads(make: Make) -> None:
    bench = make(CHUNK, CHUNK, CHUNK, CHUNK)
    run = bench.start(reads=[0, 2])
    run.wait_reads([2])
    run.wait_reads([0])
    assert sorted(bench.source.offsets) == [0, 2 * CHUNK]
    for read in (1, 3):
        run.arrived(run.segments(read))
    run.ticket.wait(stall_s=5)


@pytest.mark.parametrize("when", ["reading", "copying", "between"])
def test_cancelling_run_returns_every_buffer(make: Make, when: str) -> None:
    bench = make(*[CHUNK] * 40)
    if when == "reading":
        bench.source.open.clear()
    if when == "copying":
        bench.place.num_looks = 20
    run = bench.start()
    slabs = run.slabs()
    if when != "reading":
        assert next(slabs) == 0
    else:
        wait_until(lambda: len(bench.source.offsets) == 3)
        threading.Timer(0.05, bench.source.open.set).start()
    run.close()
    run.close()
    assert bench.all_buffers_are_back() and not own_threads()
    assert len(bench.source.offsets) < 40
    with pytest.raises(Cancelled):
        list(slabs)


@pytest.mark.parametrize("ask", ["slabs", "wait", "wait_read"])
def test_source_error_is_raised_and_frees_pool(make: Make, ask: str) -> None:
    bench = make(*[CHUNK] * 20)
    bench.source.fail_from = 7 * CHUNK
    run = bench.start()
    with pytest.raises(SourceUnavailable, match="the disk is gone"):
        if ask == "slabs":
            for _ in run.slabs():
                pass
        elif ask == "wait":
            run.ticket.wait(stall_s=10)
        else:
            run.wait_reads([19])
    run.close()
    assert bench.all_buffers_are_back() and not own_threads()


def test_destination_error_is_raised_and_frees_pool(make: Make) -> None:
    bench = make(*[CHUNK] * 20)
    bench.place.fault = DestinationError("the device is lost")
    run = bench.start()
    with pytest.raises(DestinationError):
        run.ticket.wait(stall_s=10)
    run.close()
    assert bench.all_buffers_are_back() and not own_threads()


@pytest.mark.parametrize("size", [CHUNK, 1_000_000])
def test_read_ahead_stays_within_window(make: Make, size: int) -> None:
    bench, window = make(*[size] * 12), 2 * size
    run = bench.start(window_bytes=window)
    for slab in run.slabs():
        time.sleep(0.01)
        ahead = max(bench.source.offsets) - slab * size
        assert ahead <= window + size
        assert bench.place.take(slab).tobytes() == bench.wanted(slab)
    run.ticket.wait(stall_s=5)


def test_window_smaller_than_slab_does_not_deadlock(make: Make) -> None:
    bench = make(1_000_000, 5, 1_000_000)
    run = bench.start(window_bytes=1)
    assert [slab for slab in run.slabs() if bench.place.take(slab).tobytes() == bench.wanted(slab)] == [0, 1, 2]


def test_slow_consumer_does_not_raise_source_stalled(make: Make) -> None:
    bench = make(*[CHUNK] * 3)
    run = bench.start(window_bytes=CHUNK, stall_s=1.0)
    seen = []
    for slab in run.slabs():
        time.sleep(1.2)
        seen.append(slab)
    run.ticket.wait(stall_s=5)
    assert seen == list(range(3)) and run.ticket.moved_bytes == 3 * CHUNK


def test_ticket_deadline_does_not_fail_running_read(make: Make) -> None:
    """The source's deadline applies while a read runs, and the ticket's deadline otherwise."""
    bench = make(CHUNK)
    bench.source.open.clear()
    run = bench.start(stall_s=1.0)
    wait_until(lambda: bool(bench.source.offsets))
    threading.Timer(2.0, bench.source.open.set).start()
    run.ticket.wait(stall_s=1.0)


def test_wait_for_read_that_never_arrives_raises_source_stalled(make: Make) -> None:
    bench = make(CHUNK, CHUNK)
    run = bench.start(reads=[0])
    with pytest.raises(SourceStalled):
        run.ticket.wait(stall_s=0.1)


@pytest.mark.parametrize("window_bytes", [0, 3 * CHUNK])
def test_verified_slabs_are_delivered_with_correct_bytes(make: Make, window_bytes: int) -> None:
    bench = make(*[CHUNK, 10, 3 * CHUNK, CHUNK + 5] * 4)
    _, checker = leaves_of(bench)
    run = bench.start(checker=checker, window_bytes=window_bytes)
    assert all(bench.place.take(slab).tobytes() == bench.wanted(slab) for slab in run.slabs())
    run.ticket.wait(stall_s=5)


@pytest.mark.parametrize("batch_bytes", [1, 10 * CHUNK, 1 << 30])
@pytest.mark.parametrize("window_bytes", [0, 3 * CHUNK])
def test_corrupt_slab_is_never_delivered(make: Make, batch_bytes: int, window_bytes: int) -> None:
    bench = make(*[CHUNK] * 8)
    _, checker = leaves_of(bench)
    checker.batch_bytes = batch_bytes
    flipped = bytearray(bench.data)
    flipped[5 * CHUNK + 77] ^= 4
    bench.source._data = memoryview(flipped)
    run = bench.start(checker=checker, window_bytes=window_bytes)
    given: list[int] = []
    with pytest.raises(IntegrityError) as caught:
        given.extend(run.slabs())
    assert 5 not in given and caught.value.tensor == "t005"
    run.close()
    assert bench.all_buffers_are_back() and not own_threads()


def test_exception_in_verification_is_raised_by_wait(make: Make) -> None:
    class Broken:
        num_threads = batch_bytes = 1

        def prepare(self) -> None:
            pass

        def check(self, slabs: Sequence[int]) -> PendingItem | None:
            raise ZeroDivisionError

    run = make(*[CHUNK] * 8).start(checker=Broken())
    with pytest.raises(RuntimeError, match="bug") as caught:
        run.ticket.wait(stall_s=10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_last_verification_batch_is_small(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.run.MIN_BATCH_BYTES", CHUNK)

    class Recorder:
        num_threads, batch_bytes = 1, 16 * CHUNK

        def __init__(self) -> None:
            self.called: list[int] = []

        def prepare(self) -> None:
            self.called.append(0)

        def check(self, slabs: Sequence[int]) -> PendingItem | None:
            self.called.append(len(slabs))
            return None

    checker = Recorder()
    make(*[CHUNK] * 64).start(checker=checker, num_threads=1).ticket.wait(stall_s=10)
    assert checker.called == [0, 16, 16, 16, 15, 1]


def test_run_is_under_way_after_one_eighth_of_bytes(make: Make) -> None:
    bench, seen = make(*[CHUNK] * 64), list[int]()
    bench.source.open.clear()
    run = bench.start(num_threads=1)
    run.ticket.wake = lambda: seen.append(run.ticket.moved_bytes)  # type: ignore[method-assign]
    assert not run.is_under_way()
    bench.source.open.set()
    run.ticket.wait(stall_s=10)
    assert seen == [8 * CHUNK] and run.is_under_way()


def test_empty_run_is_under_way_immediately(make: Make) -> None:
    assert make().start().is_under_way()


class Preparing:
    """A checker that records when it is prepared."""

    num_threads, batch_bytes = 1, CHUNK

    def __init__(self) -> None:
        self.is_prepared = threading.Event()
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1
        self.is_prepared.set()

    def check(self, slabs: Sequence[int]) -> PendingItem | None:
        return None


@pytest.mark.parametrize("is_asked", [True, False])
def test_verification_checker_is_prepared_only_once(make: Make, is_asked: bool) -> None:
    bench, checker = make(*[CHUNK] * 8), Preparing()
    bench.source.open.clear()
    run = bench.start(checker=checker)
    if is_asked:
        run.prepare_checker()
    assert checker.is_prepared.wait(10 if is_asked else 0.05) == is_asked
    bench.source.open.set()
    run.ticket.wait(stall_s=10)
    run.prepare_checker()
    run.close()
    assert checker.num_prepared == 1


def test_empty_run_does_not_prepare_verification_checker(make: Make) -> None:
    checker = Preparing()
    run = make().start(checker=checker)
    run.prepare_checker()
    run.close()
    assert checker.num_prepared == 0


def test_trace_contains_every_read_and_placement(make: Make) -> None:
    trace = Trace(enabled=True)
    bench = make(*[CHUNK] * 5)
    _, checker = leaves_of(bench)
    run = bench.start(checker=checker, trace=trace)
    run.ticket.wait(stall_s=10)
    run.close()
    names = [name for _, name, *_ in trace.take() if not name.startswith("check")]
    assert sorted(names) == sorted([f"read {i}" for i in range(5)] + [f"place {i}" for i in range(5)])
    assert set(trace.busy_s()) == {"fetch", "place", "compute"}


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed"])
def test_closed_run_is_freed_without_garbage_collector(how: str) -> None:
    gc.disable()
    try:
        bench = Bench(*[CHUNK] * 8)
        refs: deque[weakref.ref[Any]] = deque()
        refs.append(weakref.ref(bench.place))
        slab: Bytes = bench.place.slab(3)
        refs.append(weakref.ref(slab))
        del slab
        if how == "failed":
            bench.source.fail_from = 2 * CHUNK
        run = bench.start(checker=leaves_of(bench)[1])
        try:
            if how == "cancelled":
                next(run.slabs())
            else:
                run.ticket.wait(stall_s=10)
        except PenstockError:
            assert how == "failed"
        ticket: RunState = run.ticket
        bench.close()
        del bench.place
        assert [ref() for ref in refs] == [None, None], "although the run and the ticket live"
        refs.append(weakref.ref(run))
        bench.run = None
        del run
        assert refs[-1]() is None, "although the ticket lives"
        assert ticket.done
    finally:
        gc.enable()
