"""SIGINT inside `deferred`, `allow_interrupts` and `defer_in_finalizer`; the verbs are in
`tests/integration/load/test_interrupts.py`.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from penstock import lifecycle


def send() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_outermost_block_raises_once_its_work_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), lifecycle.deferred():
        with lifecycle.deferred():
            send()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with lifecycle.deferred():  # nothing is left of the signal
        lifecycle.raise_if_noted()


def test_a_wait_inside_raises_once() -> None:
    assert lifecycle.longest_wait_s(30) == 30
    cleaned = []
    with pytest.raises(KeyboardInterrupt), lifecycle.deferred():
        assert lifecycle.longest_wait_s(30) == lifecycle.LOOK_S
        send()
        try:
            lifecycle.raise_if_noted()
        finally:
            lifecycle.raise_if_noted()
            cleaned.append(True)
    assert cleaned == [True]


def test_an_error_gives_way_to_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, lifecycle.deferred():
        send()
        raise ValueError
    assert isinstance(raised.value.__context__, ValueError)


def test_a_signal_is_let_through_where_a_library_waits() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), lifecycle.deferred():
        with lifecycle.allow_interrupts():
            pass
        assert lifecycle.is_deferring()
        with lifecycle.allow_interrupts():
            send()
            reached.append(True)
    assert not reached
    with pytest.raises(KeyboardInterrupt), lifecycle.deferred():
        send()
        with lifecycle.allow_interrupts():  # it came before
            reached.append(True)
    assert not reached


def test_a_user_who_insists_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_INSISTS_S", 0.01)
    reached = []
    with pytest.raises(KeyboardInterrupt), lifecycle.deferred():
        send()
        time.sleep(0.02)
        send()
        reached.append(True)
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    swallowed = []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)
    finished = []

    class Dropped:
        def __del__(self) -> None:
            with lifecycle.defer_in_finalizer():
                send()
                finished.append(True)

    dropped: Dropped | None = Dropped()
    with pytest.raises(KeyboardInterrupt):
        dropped = None
        assert finished == [True]
        time.sleep(5)
    assert dropped is None
    assert not swallowed


def test_other_handlers_and_threads_are_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with lifecycle.deferred():
            send()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

    inside = []

    def enter() -> None:
        with lifecycle.deferred():
            inside.append(lifecycle.is_deferring())

    with lifecycle.deferred():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert inside == [False]


def test_a_handler_that_is_installed_inside_stays() -> None:
    def handler(number: int, frame: object) -> None:
        pass

    with lifecycle.deferred():
        signal.signal(signal.SIGINT, handler)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


FORKS = """
import os, signal, threading
from penstock import lifecycle

signal.signal(signal.SIGINT, signal.default_int_handler)

def fork():
    child = os.fork()
    if not child:
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    codes.append(os.waitpid(child, 0)[1])

codes = []
with lifecycle.deferred():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
assert codes == [0], codes
"""


def test_a_child_forked_by_another_thread_may_be_interrupted() -> None:
    # In a process of its own: what torch started here does not live through a fork.
    child = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, "")


def test_the_interval_is_short_inside_and_as_before_outside() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(OSError), lifecycle.quick_handover(), lifecycle.quick_handover():
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
        raise OSError
    assert sys.getswitchinterval() == before


def test_a_forked_child_has_the_interval_of_before() -> None:
    before = sys.getswitchinterval()
    with lifecycle.quick_handover():
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == pytest.approx(lifecycle.HANDOVER_S)
    assert sys.getswitchinterval() == before


class _Alarm:
    """A signal handler that is an object."""

    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("of the program")


def _raise_timeout(prefix: str, number: int, frame: object) -> None:
    raise TimeoutError(prefix)


@pytest.mark.parametrize("handler", [_Alarm(), functools.partial(_raise_timeout, "mine"), _Alarm().__call__])
def test_error_of_signal_handler_is_recognised(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert lifecycle.is_of_handler(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_error_of_library_is_no_handlers_error() -> None:
    """concurrent.futures raises the builtin TimeoutError in a module of its own."""
    with pytest.raises(TimeoutError) as raised:
        Future[None]().result(timeout=0)
    assert not lifecycle.is_of_handler(raised.value)
