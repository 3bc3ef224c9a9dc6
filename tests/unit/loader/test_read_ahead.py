"""Read-ahead returns the same bytes in few reads, in any order and within its memory."""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.config import Settings
from penstock.errors import ConfigError, SourceStalled, SourceTruncated, SourceUnavailable
from penstock.loader import read_ahead as module
from penstock.loader.read_ahead import ReadAhead
from penstock.storage import MemorySource
from penstock.types import MIB

SIZE = 24 * MIB
BYTES = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
SETTINGS = Settings(memory_bytes=8 * MIB, chunk_bytes=MIB)


class CountingSource(MemorySource):
    """A source that counts its reads, and may be slow, fail or hang."""

    def __init__(self, data: bytes = BYTES) -> None:
        super().__init__(data)
        self.num_reads = 0
        self.read_bytes = 0
        self.most_bytes = 0
        self.received_bytes = 0
        self.is_closed = False
        self.before: Callable[[int, int], None] = lambda start, stop: None
        self._lock = threading.Lock()

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        assert not self.is_closed
        nbytes = sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            self.num_reads += 1
            self.read_bytes += nbytes
            self.most_bytes = max(self.most_bytes, module.shared_pool.nbytes)
        self.before(offset, offset + nbytes)
        path = super().readv(offset, buffers)
        self.received_bytes += nbytes
        assert not self.is_closed
        return path

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def source() -> CountingSource:
    return CountingSource()


@pytest.fixture
def file(source: CountingSource) -> Iterator[ReadAhead]:
    reader = ReadAhead(source, SETTINGS, num_reads=4)
    yield reader
    reader.close()
    wait_until(lambda: source.is_closed)
    assert not module.shared_pool.nbytes
    assert not module.shared_pool.queue


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def read(file: ReadAhead, start: int, stop: int) -> None:
    buffer = bytearray(stop - start)
    file.readv(start, [memoryview(buffer)])
    assert buffer == BYTES[start:stop]


def tensors(nbytes: int, size: int = SIZE) -> list[tuple[int, int]]:
    return [(at, min(at + nbytes, size)) for at in range(0, size, nbytes)]


@pytest.mark.parametrize("nbytes", [10_000, 300_000, 5 * MIB])
def test_sequential_reads_fetch_each_byte_once(file: ReadAhead, source: CountingSource, nbytes: int) -> None:
    for start, stop in tensors(nbytes):
        read(file, start, stop)
    assert source.read_bytes == SIZE
    assert source.num_reads <= 40
    assert source.most_bytes <= SETTINGS.memory_bytes


@pytest.mark.parametrize("seed", range(3))
def test_nearly_sequential_reads_refetch_few_bytes(file: ReadAhead, source: CountingSource, seed: int) -> None:
    order = tensors(20_000)
    shuffle = random.Random(seed)
    keys = {piece: index + shuffle.uniform(0, 8) for index, piece in enumerate(order)}
    for start, stop in sorted(order, key=keys.__getitem__):
        read(file, start, stop)
    assert source.read_bytes <= 1.05 * SIZE
    assert source.num_reads < len(order) / 10


def test_interleaved_sequential_reads_are_read_ahead(file: ReadAhead, source: CountingSource) -> None:
    half = SIZE // 2
    for first, second in zip(tensors(50_000, half), tensors(50_000, half), strict=True):
        read(file, *first)
        read(file, second[0] + half, second[1] + half)
    assert source.read_bytes <= 1.05 * SIZE
    assert source.num_reads < 60


def test_sparse_slices_read_few_extra_bytes(file: ReadAhead, source: CountingSource) -> None:
    for start in range(0, SIZE, MIB // 2):
        read(file, start, start + 4096)
    assert source.read_bytes == 4096 * (SIZE // (MIB // 2))


def test_few_small_reads_prefetch_few_bytes(file: ReadAhead, source: CountingSource) -> None:
    for start, stop in tensors(4096, 5 * 4096):
        read(file, start, stop)
    assert source.read_bytes <= 2 * MIB + 5 * 4096


def layers_by_number(count: int) -> list[tuple[str, int, int]]:
    """Return names of layers, stored in the order of text and sorted by layer number."""
    size = SIZE // count
    names = sorted(f"layer.{index}.w" for index in range(count))
    places = [(name, at * size, (at + 1) * size) for at, name in enumerate(names)]
    return sorted(places, key=lambda place: int(re.sub(r"\D", "", place[0])))


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("count", [40, 1500])
def test_reads_in_hinted_order_fetch_each_byte_once(
    file: ReadAhead, source: CountingSource, count: int, num_threads: int
) -> None:
    order = layers_by_number(count)
    file.expect([(start, stop) for _, start, stop in order])
    assert source.num_reads == 0
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda place: read(file, place[1], place[2]), order))
    assert source.read_bytes <= 1.05 * (SIZE // count * count)
    # Each of the runs of layers 10 to 19, 100 to 199 and so on has one or two reads.
    assert source.num_reads < 400
    assert source.most_bytes <= SETTINGS.memory_bytes


def test_reads_against_hinted_order_stay_within_memory_limit(file: ReadAhead, source: CountingSource) -> None:
    file.expect(tensors(MIB))
    for start in reversed(range(0, SIZE, 2 * MIB)):
        read(file, start, start + 1000)
    assert source.read_bytes <= SIZE
    assert source.most_bytes <= SETTINGS.memory_bytes


def test_read_hint_outside_file_raises(file: ReadAhead) -> None:
    with pytest.raises(ConfigError, match="outside the file"):
        file.expect([(0, SIZE + 1)])


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 3 * MIB)), max_size=12),
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 3 * MIB)), max_size=12),
)
def test_random_reads_after_hint_return_correct_bytes(
    hints: list[tuple[int, int]], requests: list[tuple[int, int]]
) -> None:
    file = ReadAhead(CountingSource(), SETTINGS, num_reads=3)
    file.expect((start, min(start + nbytes, SIZE)) for start, nbytes in hints)
    for start, nbytes in requests:
        read(file, start, min(start + nbytes, SIZE))
    file.close()


def test_concurrently_read_files_stay_within_memory_limit(source: CountingSource) -> None:
    sources = [source, CountingSource(), CountingSource()]
    files = [ReadAhead(each, SETTINGS, num_reads=4) for each in sources]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda place: read(place[0], *place[1]), [(f, p) for p in tensors(100_000) for f in files]))
    for each, file in zip(sources, files, strict=True):
        assert each.most_bytes <= SETTINGS.memory_bytes
        file.close()


def test_failed_read_raises_and_later_read_succeeds(file: ReadAhead, source: CountingSource) -> None:
    def fail(start: int, stop: int) -> None:
        if stop > 4 * MIB:
            raise SourceUnavailable("broken", uri="memory:")

    source.before = fail
    with pytest.raises(SourceUnavailable, match="broken"):
        for start, stop in tensors(100_000):
            read(file, start, stop)
    assert start >= 3 * MIB
    source.before = lambda start, stop: None
    for start, stop in tensors(100_000):
        read(file, start, stop)


def test_partially_failed_large_read_raises(file: ReadAhead, source: CountingSource) -> None:
    def fail(start: int, stop: int) -> None:
        if start >= 3 * MIB:
            raise SourceUnavailable("broken", uri="memory:")

    source.before = fail
    with pytest.raises(SourceUnavailable, match="broken"):
        read(file, 0, 6 * MIB)
    source.before = lambda start, stop: None
    read(file, 0, 6 * MIB)


def test_reads_beyond_file_end_raise(file: ReadAhead) -> None:
    with pytest.raises(SourceTruncated):
        file.readv(SIZE - 1, [memoryview(bytearray(2))])


def test_close_returns_before_last_read_completes(source: CountingSource) -> None:
    file = ReadAhead(source, SETTINGS, num_reads=4)
    going_on, under_way = threading.Event(), threading.Event()

    def hold(start: int, stop: int) -> None:
        if threading.current_thread().name == "penstock-read-ahead":
            under_way.set()
            assert going_on.wait(10)

    source.before = hold
    for start, stop in tensors(4096, 3 * 4096):
        read(file, start, stop)
    assert under_way.wait(10)
    file.close()
    assert not source.is_closed
    going_on.set()
    wait_until(lambda: source.is_closed)
    file.close()
    with pytest.raises(ConfigError, match="closed"):
        read(file, 0, 10)


def test_hanging_source_raises_source_stalled() -> None:
    source = CountingSource()
    file = ReadAhead(source, SETTINGS, num_reads=2, stall_s=0.2)
    read(file, 0, 1000)
    going_on = threading.Event()
    source.before = lambda start, stop: [None, going_on.wait(10)][0]
    with pytest.raises(SourceStalled, match=r"no byte arrived for 0\.2 s"):
        read(file, 5 * MIB, 5 * MIB + 1000)
    going_on.set()
    file.close()


def test_hanging_server_does_not_block_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 0.2)
    dead = CountingSource()
    going_on = threading.Event()
    dead.before = lambda start, stop: [None, going_on.wait(30)][0]
    files = [ReadAhead(each, SETTINGS, num_reads=2, stall_s=10) for each in (dead, CountingSource())]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, files[0], 0, 8 * MIB)
        wait_until(lambda: dead.num_reads == 2)
        read(files[1], 0, 8 * MIB)
        assert dead.num_reads == 2 and not waiting.done()
        going_on.set()
        waiting.result()
    for file in files:
        file.close()


def test_hanging_read_raises_source_stalled_during_other_reads() -> None:
    dead = CountingSource()
    going_on = threading.Event()
    dead.before = lambda start, stop: [None, going_on.wait(30)][0]
    file = ReadAhead(dead, SETTINGS, num_reads=2, stall_s=0.5)

    def read_others() -> None:
        while not going_on.is_set():
            other = ReadAhead(CountingSource(), SETTINGS, num_reads=8, stall_s=10)
            read(other, 0, 2 * MIB)
            other.close()

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(read_others)
        timer = threading.Timer(20, going_on.set)
        timer.start()
        with pytest.raises(SourceStalled):
            read(file, 0, MIB)
        timer.cancel()
        going_on.set()
        others.result()
    file.close()


def test_closing_file_aborts_waiting_request(source: CountingSource) -> None:
    file = ReadAhead(source, SETTINGS, num_reads=1)
    going_on = threading.Event()
    source.before = lambda start, stop: [None, going_on.wait(30)][0]
    file.expect(tensors(MIB))
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(read, file, 0, 10), pool.submit(read, file, 2 * MIB, 2 * MIB + 10)]
        wait_until(lambda: sum(block.users for block in file.blocks) == 1)
        file.close()
        going_on.set()
        with pytest.raises(ConfigError, match="closed"):
            requests[1].result(10)
        assert requests[0].exception(10) is None
    wait_until(lambda: source.is_closed)


def test_forked_child_reads_independently(file: ReadAhead, source: CountingSource) -> None:
    going_on = threading.Event()
    holding: list[int] = []

    def hold(start: int, stop: int) -> None:
        if threading.current_thread().name == "penstock-read-ahead":
            holding.append(start)
            assert going_on.wait(10)

    source.before = hold
    for start, stop in tensors(4096, 3 * 4096):
        read(file, start, stop)
    # Wait until now, because the fork would copy the source's lock while a thread holds it.
    wait_until(lambda: len(holding) == 2)
    child = os.fork()
    if not child:
        code = 1
        try:
            source.before = lambda start, stop: None
            for start, stop in tensors(500_000):
                read(file, start, stop)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
    going_on.set()
    read(file, 3 * 4096, 8 * MIB)
