"""The staging pool is bounded, pins and unpins each buffer once, and has deadlines for all waits."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from penstock.errors import BudgetTooSmall, Cancelled, DestinationError, SourceStalled
from penstock.memory.staging import StagingPool

SIZE = 64 << 10


class Counting:
    """A registrar that records pinned memory and can refuse to pin."""

    def __init__(self, *, room: int = 1 << 30) -> None:
        self.pinned: dict[int, int] = {}
        self.num_calls = 0
        self.room = room
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            self.num_calls += 1
            if len(self.pinned) >= self.room:
                raise DestinationError("no more")
            assert address not in self.pinned
            self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.pinned[address]


Make = Callable[..., StagingPool]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[StagingPool] = []

    def pool(num_buffers: int = 4, **options: object) -> StagingPool:
        made.append(StagingPool.map(num_buffers * SIZE, SIZE, **options))  # type: ignore[arg-type]
        return made[-1]

    yield pool
    for one in made:
        one.close()


def waiting(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Make a call in a thread. Append its result or error to the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_buffers_are_disjoint_aligned_and_writable(make: Make) -> None:
    pool = make(4)
    found = [pool.acquire(stall_s=1) for _ in range(4)]
    assert len({buffer.address // SIZE for buffer in found}) == 4
    for number, buffer in enumerate(found):
        assert buffer.address % mmap.PAGESIZE == 0 and buffer.nbytes == SIZE == len(buffer.view)
        buffer.view[:] = bytes([number]) * SIZE
    assert [set(buffer.array.tolist()) for buffer in found] == [{0}, {1}, {2}, {3}]
    assert pool.peak_bytes == 4 * SIZE


def test_pool_rounds_buffer_size_to_pages_within_budget() -> None:
    pool = StagingPool.map(10 * mmap.PAGESIZE, mmap.PAGESIZE + 1)
    assert (pool.buffer_bytes, pool.num_buffers) == (2 * mmap.PAGESIZE, 5)
    pool.close()


@pytest.mark.parametrize("memory_bytes", [0, 1, SIZE, 2 * SIZE - 1])
def test_budget_below_two_buffers_raises_with_minimum(memory_bytes: int) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        StagingPool.map(memory_bytes, SIZE)
    assert caught.value.minimum_bytes == 2 * SIZE
    StagingPool.map(caught.value.minimum_bytes, SIZE).close()


def test_last_released_buffer_is_reused_first(make: Make) -> None:
    pool = make(4)
    first, second = pool.acquire(stall_s=1), pool.acquire(stall_s=1)
    pool.release(first)
    pool.release(second)
    assert pool.acquire(stall_s=1) is second
    assert pool.peak_bytes == 2 * SIZE


def test_acquire_from_empty_pool_waits_for_release(make: Make) -> None:
    pool = make(2)
    held = [pool.acquire(stall_s=1) for _ in range(2)]
    assert pool.try_acquire() is None
    thread, outcome = waiting(lambda: pool.acquire(stall_s=10))
    pool.release(held[0])
    thread.join(5)
    assert outcome == [held[0]]


def test_stalled_acquire_error_mentions_memory_bytes_option(make: Make) -> None:
    pool = make(2)
    _ = [pool.acquire(stall_s=1) for _ in range(2)]
    with pytest.raises(SourceStalled, match="memory_bytes"):
        pool.acquire(stall_s=0.05)


def waiters(pool: StagingPool, number: int) -> list[tuple[threading.Thread, list[object]]]:
    """Start threads that wait for a buffer, and return once all of them wait."""
    begun = [waiting(lambda: pool.acquire(stall_s=10)) for _ in range(number)]
    while len(pool._state._waiters) < number:  # type: ignore[attr-defined]
        time.sleep(0.001)
    return begun


def test_released_buffer_goes_to_waiting_thread(make: Make) -> None:
    pool = make(2)
    held = [pool.acquire(stall_s=1) for _ in range(2)]
    [(thread, outcome)] = waiters(pool, 1)
    pool.release(held[0])
    # Acquire again before the waiting thread gets the GIL.
    assert pool.try_acquire() is None
    thread.join(5)
    assert outcome == [held[0]]
    pool.release(held[1])
    assert pool.try_acquire() is held[1]


def test_release_renews_deadline_of_waiting_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("penstock.memory.staging.time", SimpleNamespace(monotonic=lambda: now[0]))
    pool = make(2)
    held = [pool.acquire(stall_s=10) for _ in range(2)]
    begun = waiters(pool, 2)

    now[0] = 6.0
    pool.release(held[0])
    while not any(outcome for _, outcome in begun):
        time.sleep(0.001)
    # The buffer that was released at 6 went to the other thread, so as many buffers are in use as before.
    now[0] = 12.0
    with pool._state:
        pool._state.notify_all()
    time.sleep(0.02)
    pool.release(held[1])
    for thread, _ in begun:
        thread.join(5)
    assert sorted(buffer.address for _, [buffer] in begun) == sorted(buffer.address for buffer in held)  # type: ignore[attr-defined]


def test_cancel_wakes_waiters_and_rejects_acquires(make: Make) -> None:
    pool = make(2)
    held = [pool.acquire(stall_s=1) for _ in range(2)]
    waiters = [waiting(lambda: pool.acquire(stall_s=60)) for _ in range(3)]
    time.sleep(0.02)
    pool.cancel()
    for thread, outcome in waiters:
        thread.join(5)
        assert isinstance(outcome[0], Cancelled)
    pool.release(held[0])
    assert pool.try_acquire() is None
    with pytest.raises(Cancelled):
        pool.acquire(stall_s=1)


def test_buffers_are_pinned_once_at_first_use(make: Make) -> None:
    registrar = Counting()
    pool = make(4, registrar=registrar)
    assert registrar.pinned == {}
    for _ in range(3):
        one, two = pool.acquire(stall_s=1), pool.acquire(stall_s=1)
        assert registrar.pinned == {one.address: SIZE, two.address: SIZE}
        pool.release(one)
        pool.release(two)
    assert registrar.num_calls == 2
    pool.close()
    assert registrar.pinned == {}
    pool.close()


def test_failed_pin_raises_without_losing_buffer(make: Make) -> None:
    registrar = Counting(room=1)
    pool = make(2, registrar=registrar)
    kept = pool.acquire(stall_s=1)
    for _ in range(3):
        with pytest.raises(DestinationError, match="no more"):
            pool.acquire(stall_s=1)
    registrar.room = 2
    other = pool.acquire(stall_s=1)
    assert len(registrar.pinned) == 2
    pool.release(kept)
    pool.release(other)
    pool.close()
    assert registrar.pinned == {}


def test_warming_pins_all_buffers_without_acquiring_them(make: Make) -> None:
    registrar = Counting()
    pool = make(7, registrar=registrar)
    pool.warm(3)
    held = [pool.acquire(stall_s=5) for _ in range(7)]
    assert len(registrar.pinned) == registrar.num_calls == 7
    for buffer in held:
        pool.release(buffer)
    pool.close()
    assert registrar.pinned == {}


def test_failed_pin_during_warming_is_raised_by_acquire(make: Make) -> None:
    registrar = Counting(room=0)
    pool = make(4, registrar=registrar)
    pool.warm(2)
    with pytest.raises(DestinationError, match="no more"):
        pool.acquire(stall_s=5)
    registrar.room = 4
    assert len([pool.acquire(stall_s=5) for _ in range(4)]) == 4


def test_warming_continues_if_one_thread_cannot_start(make: Make, refuse_thread: Callable[[str], None]) -> None:
    refuse_thread("penstock-staging-1")
    registrar = Counting()
    pool = make(4, registrar=registrar)
    pool.warm(2)
    for warmer in pool._warmers:
        warmer.join(5)
    # Half of the buffers stay cold, and can still be acquired.
    assert len(registrar.pinned) == 2
    assert all(pool.try_acquire() is not None for _ in range(4))
    pool.close()
    assert registrar.pinned == {}


def test_close_during_warming_unpins_all_buffers(make: Make) -> None:
    registrar = Counting()
    pool = make(64, registrar=registrar)
    pool.warm(4)
    pool.cancel()
    pool.close()
    assert registrar.pinned == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-staging")]
