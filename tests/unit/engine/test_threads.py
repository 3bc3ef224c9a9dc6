"""Kept threads: one call after the other, in as few threads as are needed at once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from penstock.engine import threads
from penstock.engine.run import Item, Run
from penstock.engine.threads import Joinable, KeptThreads
from penstock.engine.trace import Trace
from penstock.errors import DestinationError

WAIT_S = 10.0


@pytest.fixture
def kept() -> Iterator[KeptThreads]:
    with KeptThreads() as kept:
        yield kept


def start(kept: KeptThreads, work: Callable[[], None], name: str = "penstock-test") -> Joinable:
    call = kept.start(work, name)
    assert call is not None
    return call


def here(found: list[int]) -> Callable[[], None]:
    return lambda: found.append(threading.get_ident())


def test_a_thread_makes_one_call_after_another(kept: KeptThreads) -> None:
    found: list[int] = []
    for _ in range(20):
        start(kept, here(found)).join(WAIT_S)
    assert len(found) == 20 and len(set(found)) == 1 and found[0] != threading.get_ident()


def test_calls_at_the_same_time_have_a_thread_each(kept: KeptThreads) -> None:
    together, found = threading.Barrier(5), list[int]()

    def work() -> None:
        together.wait(WAIT_S)
        found.append(threading.get_ident())

    for _ in range(3):
        for call in [start(kept, work) for _ in range(5)]:
            call.join(WAIT_S)
    assert len(found) == 15 and len(set(found)) == 5


def test_join_returns_after_the_call_and_not_before(kept: KeptThreads) -> None:
    gate, log = threading.Event(), list[str]()

    def work() -> None:
        gate.wait(WAIT_S)
        log.append("work")

    call = start(kept, work)
    call.join(0.05)
    assert not log
    gate.set()
    call.join(WAIT_S)
    assert log == ["work"]


def test_a_thread_has_the_name_of_its_call_and_holds_nothing_of_it_afterwards(kept: KeptThreads) -> None:
    class Weights:
        pass

    weights, names = Weights(), list[str]()
    seen = weakref.ref(weights)

    def work(weights: Weights = weights) -> None:
        names.append(threading.current_thread().name)

    start(kept, work, "penstock-a").join(WAIT_S)
    del work, weights
    start(kept, lambda: names.append(threading.current_thread().name), "penstock-b").join(WAIT_S)
    gc.collect()
    assert names == ["penstock-a", "penstock-b"] and seen() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_ends_the_thread_and_the_wait_for_it(kept: KeptThreads) -> None:
    failed: list[threading.Thread] = []

    def work() -> None:
        failed.append(threading.current_thread())
        raise ValueError("a bug")

    start(kept, work).join(WAIT_S)
    failed[0].join(WAIT_S)
    assert not failed[0].is_alive()
    found: list[int] = []
    start(kept, here(found)).join(WAIT_S)
    assert found


def test_closing_ends_the_threads_that_wait_and_the_others_after_their_call() -> None:
    kept, gate = KeptThreads(), threading.Event()
    before = set(threading.enumerate())
    start(kept, lambda: None).join(WAIT_S)
    call = start(kept, lambda: bool(gate.wait(WAIT_S)) and None)
    start(kept, lambda: None).join(WAIT_S)
    mine = set(threading.enumerate()) - before
    kept.close()
    assert sum(thread.is_alive() for thread in mine) == 1, "those that wait have ended"
    kept.close()
    gate.set()
    call.join(WAIT_S)
    for thread in mine:
        thread.join(WAIT_S)
    assert mine and not any(thread.is_alive() for thread in mine)


def test_a_thread_without_work_for_long_ends(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    before, found = set(threading.enumerate()), list[threading.Thread]()
    start(kept, lambda: found.append(threading.current_thread())).join(WAIT_S)
    found[0].join(WAIT_S)
    assert not found[0].is_alive() and set(threading.enumerate()) <= before
    # Whether it ends or takes a call is decided once: no call is lost between the two.
    numbers: list[int] = []
    for number in range(300):
        start(kept, lambda number=number: numbers.append(number)).join(WAIT_S)  # type: ignore[misc]
    assert numbers == list(range(300))


def test_more_threads_than_may_wait_end(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_IDLE", 2)
    together, found = threading.Barrier(6), list[threading.Thread]()

    def work() -> None:
        found.append(threading.current_thread())
        together.wait(WAIT_S)

    for call in [start(kept, work) for _ in range(6)]:
        call.join(WAIT_S)
    deadline = threading.Event()
    for _ in range(200):
        if sum(thread.is_alive() for thread in found) == 2:
            break
        deadline.wait(0.01)
    assert sum(thread.is_alive() for thread in found) == 2


def test_where_no_thread_can_be_started_it_says_so_or_goes_without(
    kept: KeptThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert kept.start(lambda: None, "penstock-test", is_needed=False) is None
    with pytest.raises(DestinationError, match="no thread"):
        kept.start(lambda: None, "penstock-test")


def test_the_runs_of_one_owner_use_the_same_threads(kept: KeptThreads) -> None:
    found: list[int] = []
    for _ in range(10):
        with Run(2, trace=Trace(enabled=False), stall_s=WAIT_S, threads=kept) as run:
            executor, second = run.executor("fetch", 2), run.executor("compute", 1)
            done = Item(0, "b", 1, start=here(found), finish=run.ticket.finish)
            executor.post(Item(0, "a", 1, start=here(found), finish=lambda to=second, item=done: to.post(item)))  # type: ignore[misc]
            run.wait()
    assert len(found) == 20 and len(set(found)) <= 3
