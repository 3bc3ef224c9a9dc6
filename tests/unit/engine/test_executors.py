"""Executors: order, errors, device work in flight, and exactly one end for each item."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from penstock.engine.run import Executor, PendingItem, RunState
from penstock.engine.trace import Trace
from penstock.errors import DestinationError, SourceUnavailable


class Work:
    """Fake device work that completes on request. `fault` is the device's error."""

    def __init__(self) -> None:
        self.is_done, self.fault, self.num_looks = False, None, 0

    fault: Exception | None

    def done(self) -> bool:
        self.num_looks += 1
        if self.fault is not None:
            raise self.fault
        return self.is_done


class Recorded:
    """A work item that records its calls."""

    def __init__(
        self, log: list[str], *, priority: int = 0, run: Callable[[], PendingItem | None] = lambda: None
    ) -> None:
        self.log, self.priority, self.name, self.nbytes = log, priority, f"s{priority}", 1
        self.run = run
        self.ends: list[str] = []

    def start(self) -> PendingItem | None:
        self.log.append(self.name)
        return self.run()

    def finish(self) -> None:
        self.ends.append("finish")

    def abandon(self) -> None:
        self.ends.append("abandon")


@pytest.fixture
def ticket() -> RunState:
    return RunState(100, lambda: False)


Make = Callable[..., Executor]


@pytest.fixture
def make(ticket: RunState) -> Iterator[Make]:
    made: list[Executor] = []

    def executor(num_threads: int = 1, *, stall_s: float = 30.0) -> Executor:
        made.append(Executor("fetch", num_threads, ticket, trace=Trace(enabled=True), stall_s=stall_s))
        return made[-1]

    yield executor
    for one in made:
        one.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def after(wait: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        wait()

    return run


def refuse(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_items_run_in_priority_order(ticket: RunState, make: Make) -> None:
    executor, gate = make(), threading.Event()
    log: list[str] = []
    executor.post(Recorded(log, priority=9, run=after(gate.wait)))
    wait_until(lambda: bool(log))
    executor.post(*(Recorded(log, priority=p) for p in (5, 3, 7)))
    early = Recorded(log, priority=3)
    early.name = "later equal"
    executor.post(early)
    gate.set()
    executor.close()
    assert log == ["s9", "s3", "later equal", "s5", "s7"]


def test_idle_thread_releases_its_last_item(ticket: RunState, make: Make) -> None:
    """An item may hold the last reference to the weights."""
    executor, ended = make(2), threading.Event()
    item = Recorded([], run=after(ended.wait))
    executor.post(item)
    held = weakref.ref(item)
    del item
    ended.set()
    wait_until(lambda: held() is None)


def test_executor_threads_exist_only_between_post_and_close(ticket: RunState, make: Make) -> None:
    before = threading.active_count()
    executor = make(4)
    assert threading.active_count() == before
    executor.close()
    executor = make(4)
    steps = [Recorded([], priority=p) for p in range(20)]
    executor.post(*steps)
    executor.close()
    executor.close()
    assert threading.active_count() == before
    assert [step.ends for step in steps] == [["finish"]] * 20
    assert not executor.is_busy()


def test_executor_threads_run_items_concurrently(ticket: RunState, make: Make) -> None:
    executor, together = make(3), threading.Barrier(3, timeout=10)
    executor.post(*(Recorded([], priority=p, run=after(together.wait)) for p in range(3)))
    executor.close()
    assert not ticket.stopped


def test_error_stops_run_and_abandons_waiting_items(ticket: RunState, make: Make) -> None:
    executor = make()
    error = SourceUnavailable("gone")
    first = Recorded([], priority=0, run=refuse(error))
    rest = [Recorded([], priority=p) for p in range(1, 5)]
    executor.post(first, *rest)
    executor.close()
    assert ticket.error is error
    assert first.ends == ["abandon"]
    assert [step.ends for step in rest] == [["abandon"]] * 4
    assert rest[0].log == [], "nothing starts after the ticket stopped"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_executor_thread_survives_unexpected_error(ticket: RunState, make: Make, error: BaseException) -> None:
    executor = make()
    executor.post(Recorded([], run=refuse(error)))
    wait_until(lambda: ticket.stopped)
    threads = executor._threads[:]
    after = Recorded([])
    executor.post(after)
    wait_until(lambda: bool(after.ends))
    assert after.ends == ["abandon"] and executor._threads == threads, "the thread still takes items"
    assert threads[0].is_alive()


def test_error_in_finish_callback_stops_run(ticket: RunState, make: Make) -> None:
    executor = make()
    step = Recorded([])
    step.finish = refuse(SourceUnavailable("late"))  # type: ignore[method-assign]
    executor.post(step)
    executor.close()
    assert isinstance(ticket.error, SourceUnavailable)
    assert step.ends == [], "finished, though badly: not abandoned as well"


def test_device_work_finishes_in_post_order(ticket: RunState, make: Make) -> None:
    executor = make()
    works = [Work() for _ in range(3)]
    steps = [Recorded([], priority=p, run=lambda w=work: w) for p, work in enumerate(works)]  # type: ignore[misc]
    executor.post(*steps)
    wait_until(lambda: all(step.log for step in steps))
    assert executor.is_busy()
    works[1].is_done = True
    time.sleep(0.02)
    assert [step.ends for step in steps] == [[], [], []], "the oldest is still at work"
    works[0].is_done = works[2].is_done = True
    wait_until(lambda: steps[2].ends == ["finish"])
    wait_until(lambda: not executor.is_busy())
    assert [step.ends for step in steps] == [["finish"]] * 3


def test_device_error_aborts_run(ticket: RunState, make: Make) -> None:
    executor, work = make(), Work()
    step = Recorded([], run=lambda: work)
    executor.post(step)
    work.fault = DestinationError("the device is lost")
    wait_until(lambda: ticket.stopped)
    executor.close()
    assert step.ends == ["abandon"]


def test_cancelled_run_waits_for_device(ticket: RunState, make: Make) -> None:
    executor, work = make(), Work()
    step = Recorded([], run=lambda: work)
    executor.post(step)
    wait_until(lambda: bool(step.log))
    ticket.cancel()
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (executor.close(), closed.set()))
    closing.start()
    assert not closed.wait(0.05), "the device may still write"
    assert step.ends == []
    work.is_done = True
    closing.join(10)
    assert step.ends == ["finish"] or step.ends == ["abandon"]


def test_silent_device_raises_source_stalled(ticket: RunState, make: Make) -> None:
    executor, work = make(stall_s=0.05), Work()
    step = Recorded([], run=lambda: work)
    executor.post(step)
    wait_until(lambda: ticket.stopped)
    assert isinstance(ticket.error, DestinationError) and ticket.error.mutated
    executor.close()
    assert step.ends == ["abandon"]
    assert work.num_looks > 1


def test_spans_include_device_work(ticket: RunState) -> None:
    trace, work = Trace(enabled=True), Work()
    executor = Executor("place", 1, ticket, trace=trace, stall_s=30)
    step = Recorded([], run=lambda: work)
    executor.post(step)
    wait_until(lambda: bool(step.log))  # it has begun
    threading.Timer(0.05, lambda: setattr(work, "is_done", True)).start()
    executor.close()
    assert trace.busy_s()["place"] >= 0.04
