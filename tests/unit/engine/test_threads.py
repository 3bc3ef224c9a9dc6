"""Kept threads make one call after another, with no more threads than concurrent calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import ClassVar, cast

import pytest

from penstock.engine import threads
from penstock.engine.run import Item, Run
from penstock.engine.threads import Call, Joinable, KeptThreads, _Kept
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


def test_idle_thread_is_reused(kept: KeptThreads) -> None:
    found: list[int] = []
    for _ in range(20):
        start(kept, here(found)).join(WAIT_S)
    assert len(found) == 20 and len(set(found)) == 1 and found[0] != threading.get_ident()


def test_concurrent_calls_use_separate_threads(kept: KeptThreads) -> None:
    together, found = threading.Barrier(5), list[int]()

    def work() -> None:
        together.wait(WAIT_S)
        found.append(threading.get_ident())

    for _ in range(3):
        for call in [start(kept, work) for _ in range(5)]:
            call.join(WAIT_S)
    assert len(found) == 15 and len(set(found)) == 5


def test_join_returns_after_call_completes(kept: KeptThreads) -> None:
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


def test_reused_thread_is_renamed_and_holds_no_references(kept: KeptThreads) -> None:
    class Weights:
        pass

    weights, names = Weights(), list[str]()
    seen = weakref.ref(weights)

    def work(weights: Weights = weights) -> None:
        names.append(threading.current_thread().name)

    call = start(kept, work, "penstock-a")
    call.join(WAIT_S)
    del work, weights
    # The thread drops the call shortly after `join` returns, and before its next call.
    for _ in range(1000):
        gc.collect()
        if seen() is None:
            break
        time.sleep(0.01)
    assert seen() is None
    start(kept, lambda: names.append(threading.current_thread().name), "penstock-b").join(WAIT_S)
    assert names == ["penstock-a", "penstock-b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_call_terminates_its_thread(kept: KeptThreads) -> None:
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


def test_close_terminates_idle_and_busy_threads() -> None:
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


def test_idle_thread_exits_after_timeout(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    before, found = set(threading.enumerate()), list[threading.Thread]()
    start(kept, lambda: found.append(threading.current_thread())).join(WAIT_S)
    found[0].join(WAIT_S)
    assert not found[0].is_alive() and set(threading.enumerate()) <= before


def test_call_submitted_at_idle_timeout_runs(kept: KeptThreads) -> None:
    call = Call(lambda: None, "penstock-test")

    class TimedOutQueue:
        """A queue whose wait times out just before a call is put."""

        results: ClassVar = [Empty(), call]

        def get(self, timeout: float) -> Call:
            result = self.results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

    taken = _Kept(TimedOutQueue(), threading.current_thread())  # type: ignore[arg-type]
    assert kept._next(taken) is call


def test_claimed_thread_without_call_exits(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    assert kept._next(_Kept(SimpleQueue(), threading.current_thread())) is None


def test_thread_is_reusable_before_join_returns(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    become_idle, seen, calls = kept._become_idle, list[bool](), list[Call]()

    def record(me: _Kept) -> bool:
        seen.append(calls[0]._ended.is_set())
        return become_idle(me)

    monkeypatch.setattr(kept, "_become_idle", record)
    gate = threading.Event()
    calls.append(cast("Call", start(kept, lambda: bool(gate.wait(WAIT_S)) and None)))
    gate.set()
    calls[0].join(WAIT_S)
    assert seen == [False]


def test_last_idle_thread_is_reused_first(kept: KeptThreads) -> None:
    gates, found = [threading.Event(), threading.Event()], list[int]()
    idents: dict[int, int] = {}

    def work(number: int) -> None:
        idents[number] = threading.get_ident()
        gates[number].wait(WAIT_S)

    calls = [start(kept, partial(work, number)) for number in range(2)]
    for number in (1, 0):
        gates[number].set()
        calls[number].join(WAIT_S)
    start(kept, here(found)).join(WAIT_S)
    assert found == [idents[0]]


def test_forked_child_starts_new_threads(kept: KeptThreads) -> None:
    start(kept, lambda: None).join(WAIT_S)
    pid = os.fork()
    if not pid:
        done = list[int]()
        start(kept, here(done)).join(WAIT_S)
        kept.close()
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_pool_thread_can_close_its_pool(kept: KeptThreads) -> None:
    # A finalizer may do this between the end of a call and the wait for the next call.
    me = threading.current_thread()
    kept._idle.append(_Kept(SimpleQueue(), me))
    kept.close()
    assert not kept._idle


def test_process_exits_despite_running_threads() -> None:
    program = """
import threading
from penstock.engine.threads import KeptThreads
kept = KeptThreads()
kept.start(lambda: None, "idle").join()
kept.start(threading.Event().wait, "hangs")
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_idle_threads_above_limit_exit(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_IDLE", 2)
    together, found = threading.Barrier(6), list[threading.Thread]()

    def work() -> None:
        found.append(threading.current_thread())
        together.wait(WAIT_S)

    for call in [start(kept, work) for _ in range(6)]:
        call.join(WAIT_S)
    for _ in range(1000):
        if sum(thread.is_alive() for thread in found) == 2:
            break
        time.sleep(0.01)
    assert sum(thread.is_alive() for thread in found) == 2


def test_failed_start_raises_only_if_thread_is_needed(kept: KeptThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert kept.start(lambda: None, "penstock-test", is_needed=False) is None
    with pytest.raises(DestinationError, match="cannot start a thread"):
        kept.start(lambda: None, "penstock-test")


def test_consecutive_runs_share_threads(kept: KeptThreads) -> None:
    found: list[int] = []
    for _ in range(10):
        with Run(2, trace=Trace(enabled=False), stall_s=WAIT_S, threads=kept) as run:
            executor, second = run.executor("fetch", 2), run.executor("compute", 1)
            done = Item(0, "b", 1, start=here(found), finish=run.ticket.finish)
            executor.post(Item(0, "a", 1, start=here(found), finish=lambda to=second, item=done: to.post(item)))  # type: ignore[misc]
            run.wait()
    assert len(found) == 20 and len(set(found)) <= 3
