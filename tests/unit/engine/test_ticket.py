"""Tickets: the first outcome wins, waiters are woken, and a wait without progress has a deadline."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from penstock.engine import run as ticket_module
from penstock.engine.run import RunState
from penstock.errors import Cancelled, IntegrityError, SourceStalled, SourceUnavailable


def idle() -> bool:
    return False


def test_finish_wakes_waiting_thread() -> None:
    ticket = RunState(10, idle)
    assert not ticket.done and not ticket.stopped
    threading.Timer(0.02, ticket.finish).start()
    ticket.wait(stall_s=10)
    assert ticket.done and not ticket.stopped and ticket.error is None
    ticket.check()


def test_run_raises_its_first_error() -> None:
    ticket = RunState(10, idle)
    first = SourceUnavailable("first")
    ticket.fail(first)
    ticket.fail(IntegrityError("second"))
    ticket.cancel()
    assert ticket.stopped and ticket.done and ticket.error is first
    with pytest.raises(SourceUnavailable, match="first"):
        ticket.wait(stall_s=10)


def test_error_after_finish_is_ignored() -> None:
    ticket = RunState(10, idle)
    ticket.finish()
    ticket.fail(SourceUnavailable("late"))
    assert ticket.done and not ticket.stopped
    ticket.wait(stall_s=10)


def test_cancel_wakes_every_waiter() -> None:
    ticket = RunState(10, idle)
    heard: list[type[BaseException]] = []

    def wait() -> None:
        try:
            ticket.wait(stall_s=60)
        except Cancelled as error:
            heard.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    ticket.cancel()
    for thread in threads:
        thread.join(10)
    assert heard == [Cancelled] * 3


def test_unexpected_error_is_reported_as_bug() -> None:
    ticket = RunState(10, idle)
    ticket.fail(ZeroDivisionError("oops"))
    with pytest.raises(RuntimeError, match="bug") as caught:
        ticket.wait(stall_s=10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_silent_run_raises_source_stalled() -> None:
    ticket = RunState(10, idle)
    with pytest.raises(SourceStalled, match="at 0 of 10 bytes"):
        ticket.wait(stall_s=0.05)
    assert ticket.stopped, "a stall stops the work, so that it can be drained"


def test_progress_extends_deadline() -> None:
    ticket = RunState(10, idle)

    def move() -> None:
        for _ in range(10):
            time.sleep(0.2)
            ticket.moved_bytes += 1
            ticket.wake()
        ticket.finish()

    threading.Thread(target=move).start()
    ticket.wait(stall_s=1.5)  # a busy machine may be that late, and less than all of it
    assert ticket.moved_bytes == 10


def test_time_while_suspended_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 61.5, 62.0, 62.25])
    monkeypatch.setattr(ticket_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    ticket = RunState(10, idle)
    assert [ticket.look() for _ in range(4)] == [0.0, 0.5, 0.5 + ticket_module.LOOK_S, 2.0]
    ticket.moved_bytes = 1
    assert ticket.look() == 0.0


def test_busy_step_pauses_stall_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(20))
    monkeypatch.setattr(ticket_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    busy, received = [False], [0]
    ticket = RunState(10, lambda: busy[0], received=lambda: received[0])
    assert [ticket.look() for _ in range(3)] == [0.0, 1.0, 2.0]
    busy[0] = True
    assert [ticket.look() for _ in range(3)] == [2.0] * 3, "a step that gives nothing does not begin it anew"
    busy[0] = False
    received[0] = ticket_module.LEAST_BYTES - 1
    assert ticket.look() == 3.0, "a byte now and then is no progress"
    received[0] = ticket_module.LEAST_BYTES
    assert [ticket.look(), ticket.look()] == [0.0, 1.0]


def test_busy_step_may_exceed_stall_deadline() -> None:
    ticket = RunState(10, lambda: True)
    threading.Timer(0.3, ticket.finish).start()
    begin = time.monotonic()
    ticket.wait(stall_s=0.05)
    assert ticket.done and time.monotonic() - begin > 0.25


def test_wait_returns_when_condition_is_met() -> None:
    ticket = RunState(10, idle)
    seen = [False]

    def reach() -> None:
        seen[0] = True
        ticket.wake()

    threading.Timer(0.02, reach).start()
    ticket.wait_until(lambda: seen[0], stall_s=10)
    assert not ticket.done


def test_released_run_state_holds_no_references() -> None:
    class Work:
        def busy(self) -> bool:
            return False

    gc.disable()
    try:
        work = Work()
        ticket = RunState(10, work.busy)
        error: SourceUnavailable | None = SourceUnavailable("gone")
        assert error is not None
        ticket.fail(error)
        held = [weakref.ref(work), weakref.ref(error)]
        ticket.release()
        del work, error
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
    assert ticket.stopped and ticket.done
    with pytest.raises(Cancelled):
        ticket.check()
