"""Runs: items built from functions, with one deadline and one end for all executors."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from penstock.engine.run import Item, Run
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, SourceStalled, SourceUnavailable
from penstock.lifecycle import HANDOVER_S


@pytest.fixture
def run() -> Iterator[Run]:
    with Run(10, trace=Trace(enabled=True), stall_s=30.0) as run:
        yield run


def test_items_run_through_executors_until_finish(run: Run) -> None:
    first, second = run.executor("fetch", 2), run.executor("compute", 1)
    log: list[str] = []

    def pass_on() -> None:
        second.post(Item(0, "check", 1, start=lambda: log.append("check"), finish=run.ticket.finish))

    first.post(Item(0, "read", 3, start=lambda: log.append("read"), finish=pass_on))
    run.wait()
    run.close()
    assert log == ["read", "check"]
    assert [(span[0], span[1], span[5]) for span in run.trace.take()] == [("fetch", "read", 3), ("compute", "check", 1)]


def test_close_cancels_waiting_items_and_stops_threads(run: Run) -> None:
    # A thread of an earlier test in this process may take a moment to end.
    others = set(threading.enumerate())
    executor, gate, log = run.executor("fetch", 1), threading.Event(), list[str]()
    began = threading.Event()

    def work() -> None:
        began.set()
        assert gate.wait(10)

    executor.post(
        Item(0, "a", 1, start=work, finish=lambda: log.append("finish a")),
        Item(1, "b", 1, start=lambda: log.append("start b"), abandon=lambda: log.append("abandon b")),
    )
    assert began.wait(10) and run.is_busy()
    threading.Timer(0.05, gate.set).start()
    run.close()
    run.close()
    assert log == ["finish a", "abandon b"], "the item that ran has ended before `close` returns"
    assert not run.is_busy()
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("penstock")]
    with pytest.raises(Cancelled):
        run.wait()


def test_executors_close_in_pipeline_order(run: Run) -> None:
    first, second = run.executor("fetch", 1), run.executor("send", 1)
    ends: list[str] = []
    began = threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.05)

    def pass_on() -> None:
        second.post(Item(0, "send", 1, start=lambda: None, abandon=lambda: ends.append("abandon")))

    first.post(Item(0, "read", 1, start=work, finish=pass_on))
    assert began.wait(10)
    run.close()
    assert ends == ["abandon"], "what the last item passed on was taken, not left behind"


def test_item_error_is_raised_by_wait(run: Run) -> None:
    def fail() -> None:
        raise SourceUnavailable("gone")

    run.executor("fetch", 1).post(Item(0, "read", 1, start=fail))
    with pytest.raises(SourceUnavailable, match="gone"):
        run.wait()


def test_idle_run_without_bytes_raises_source_stalled() -> None:
    with Run(10, trace=Trace(enabled=False), stall_s=0.1) as run:
        run.executor("fetch", 1)
        with pytest.raises(SourceStalled, match="0 of 10 bytes"):
            run.wait()


def test_received_bytes_count_as_progress() -> None:
    class Receiving(Run):
        received = 0

        def received_bytes(self) -> int:
            self.received += 1 << 20
            return self.received

    with Receiving(10, trace=Trace(enabled=False), stall_s=0.1) as run:
        threading.Timer(0.4, run.ticket.finish).start()
        run.wait()


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed"])
def test_closed_run_is_freed_without_garbage_collector(how: str) -> None:
    gc.disable()
    try:
        run = Run(10, trace=Trace(enabled=False), stall_s=30.0)

        def fail() -> None:
            raise SourceUnavailable("gone")

        if how == "failed":
            run.executor("fetch", 1).post(Item(0, "read", 1, start=fail))
            with pytest.raises(SourceUnavailable):
                run.wait()
        elif how == "finished":
            run.ticket.finish()
        run.close()
        alive, ticket = weakref.ref(run), run.ticket
        del run
        assert alive() is None and ticket.done
    finally:
        gc.enable()


def test_failed_thread_start_queues_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, log = run.executor("fetch", 2), list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DestinationError):
            executor.post(Item(0, "a", 1, start=lambda: log.append("a")))
    executor.post(Item(0, "b", 1, start=lambda: log.append("b"), finish=run.ticket.finish))
    run.wait()
    assert log == ["b"]


def test_thread_switch_interval_is_shorter_during_quick_run() -> None:
    before, seen = sys.getswitchinterval(), list[float]()
    with Run(1, trace=Trace(enabled=False), stall_s=30.0, is_quick=True) as run:
        executor = run.executor("fetch", 2)
        assert sys.getswitchinterval() == before
        executor.post(Item(0, "a", 1, start=lambda: seen.append(sys.getswitchinterval()), finish=run.ticket.finish))
        run.wait()
    assert seen == [pytest.approx(HANDOVER_S)]
    assert sys.getswitchinterval() == before


def test_on_thread_start_error_is_raised_by_wait(run: Run) -> None:
    def fail() -> None:
        raise SourceUnavailable("no device", uri="x")

    abandoned = threading.Event()
    executor = run.executor("fetch", 1, on_thread_start=fail)
    executor.post(Item(0, "a", 1, start=lambda: None, abandon=abandoned.set))
    with pytest.raises(SourceUnavailable, match="no device"):
        run.wait()
    run.close()
    assert abandoned.is_set()
