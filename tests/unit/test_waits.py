"""Waits are aborted when their call exits early: sockets, pauses, calls of libraries, and the threads of a pool."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from penstock import waits
from penstock.errors import Cancelled
from penstock.net.listener import cut

SOON_S = 1.0


def receive(sock: socket.socket) -> bytes:
    with waits.ended_by(partial(cut, sock)):
        return sock.recv(1)


def outcome_of(scope: waits.Scope, work: Callable[[], object]) -> list[object]:
    """Run `work` in a thread of the scope, leave the scope, and return the outcome."""
    outcome: list[object] = []

    def run() -> None:
        with scope.inside():
            try:
                outcome.append(work())
            except Cancelled as error:
                outcome.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.05)
    scope.leave()
    thread.join(SOON_S)
    return outcome


def test_leaving_scope_interrupts_socket_receive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert outcome_of(waits.Scope(), partial(receive, ours)) == [b""]


def test_leaving_scope_interrupts_pause() -> None:
    assert outcome_of(waits.Scope(), partial(waits.pause, 60.0)) == [Cancelled]


def test_leaving_scope_abandons_library_call() -> None:
    over = threading.Event()
    assert outcome_of(waits.Scope(), lambda: waits.in_helper(lambda: over.wait(60))) == [Cancelled]
    over.set()


def test_library_call_error_reaches_caller() -> None:
    def fail() -> None:
        raise ValueError("of the library")

    with pytest.raises(ValueError, match="of the library"):
        waits.in_helper(fail)


def test_leaving_outer_scope_cancels_inner_scope() -> None:
    outer = waits.Scope()
    with outer.inside():
        inner = waits.Scope()
    outer.leave()
    assert inner.is_left


def test_wait_in_exited_scope_raises_immediately() -> None:
    scope = waits.Scope()
    scope.leave()
    ours, theirs = socket.socketpair()
    with ours, theirs, scope.inside(), pytest.raises(Cancelled):
        receive(ours)


def test_failed_block_cancels_pending_calls() -> None:
    ours, theirs = socket.socketpair()
    begun = time.monotonic()
    with ours, theirs, pytest.raises(ZeroDivisionError), waits.Threads(2, "test") as pool:
        waiting = pool.submit(receive, ours)
        never = [pool.submit(time.sleep, 0) for _ in range(2)]
        raise ZeroDivisionError
    assert time.monotonic() - begun < SOON_S
    assert waiting.result() == b""
    assert all(each.done() for each in never[:1])


def test_pool_returns_results_in_order() -> None:
    with waits.Threads(3, "test") as pool:
        assert list(pool.map(pow, [2, 3, 4], [3, 2, 1])) == [8, 9, 4]


def test_pool_without_threads_runs_calls_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with waits.Threads(3, "test") as pool:
        assert pool.submit(threading.get_ident).result() == threading.get_ident()


def test_jitter_does_not_advance_global_generator() -> None:
    # A trainer sets a seed and expects the same numbers with Penstock's threads as without them.
    random.seed(7)
    expected = random.random()
    random.seed(7)
    assert 0.5 <= waits.jitter(0.5, 1.0) <= 1.0
    assert random.random() == expected
