"""SIGINT inside `deferred`, `allow_interrupts` and `defer_in_finalizer`."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from penstock import interrupts
from penstock.interrupts import Interrupt, State


def send() -> None:
    signal.raise_signal(signal.SIGINT)


def test_interrupt_is_raised_when_outermost_deferred_block_exits() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            send()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupts.deferred():  # The signal is no longer noted.
        interrupts.raise_if_noted()


def test_interrupt_noted_in_deferred_block_is_raised_once() -> None:
    assert interrupts.longest_wait_s(30) == 30
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        assert interrupts.longest_wait_s(30) == interrupts.LOOK_S
        send()
        try:
            interrupts.raise_if_noted()
        finally:
            interrupts.raise_if_noted()
            cleaned.append(True)
    assert cleaned == [True]


def test_signal_replaces_error_inside_deferred_block() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.deferred():
        send()
        raise ValueError
    assert isinstance(raised.value.__context__, ValueError)


def test_allowed_interrupt_raises_inside_library_wait() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.allow_interrupts():
            pass
        assert interrupts.is_deferring()
        with interrupts.allow_interrupts():
            send()
            reached.append(True)
    assert not reached
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        send()
        with interrupts.allow_interrupts():  # The signal arrived before.
            reached.append(True)
    assert not reached


def test_repeated_signal_interrupts_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "INSISTS_S", 0.01)
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        send()
        time.sleep(0.02)
        send()
        reached.append(True)
    assert not reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signal_in_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    swallowed = []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)
    finished = []

    class Dropped:
        def __del__(self) -> None:
            with interrupts.defer_in_finalizer():
                send()
                finished.append(True)

    dropped: Dropped | None = Dropped()
    with pytest.raises(KeyboardInterrupt):
        dropped = None
        assert finished == [True]
        time.sleep(5)
    assert dropped is None
    assert not swallowed


def test_deferred_block_leaves_foreign_handlers_and_threads_unaffected() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with interrupts.deferred():
            send()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

    inside = []

    def enter() -> None:
        with interrupts.deferred():
            inside.append(interrupts.is_deferring())

    with interrupts.deferred():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert inside == [False]


def test_signal_handler_installed_inside_block_stays_installed() -> None:
    def handler(number: int, frame: object) -> None:
        pass

    with interrupts.deferred():
        signal.signal(signal.SIGINT, handler)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


FORKS = """
import os, signal, threading
from penstock import interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)

def fork():
    child = os.fork()
    if not child:
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
    codes.append(os.waitpid(child, 0)[1])

codes = []
with interrupts.deferred():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
assert codes == [0], codes
"""


def test_child_forked_by_second_thread_is_interruptible() -> None:
    # Use a separate process, because torch's threads do not survive a fork.
    child = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, "")


class _Alarm:
    """A signal handler that is an object."""

    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("of the program")


def _raise_timeout(prefix: str, number: int, frame: object) -> None:
    raise TimeoutError(prefix)


@pytest.mark.parametrize("handler", [_Alarm(), functools.partial(_raise_timeout, "mine"), _Alarm().__call__])
def test_error_raised_by_signal_handler_is_recognised(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert interrupts.is_of_handler(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_library_timeout_is_not_attributed_to_signal_handler() -> None:
    """concurrent.futures raises the builtin TimeoutError inside its module."""
    with pytest.raises(TimeoutError) as raised:
        Future[None]().result(timeout=0)
    assert not interrupts.is_of_handler(raised.value)


def in_state(state: State) -> Interrupt:
    """Return a machine in a state that it reached by its own steps. A signal, if any, arrived at 100 s."""
    machine = Interrupt()
    if state is not State.OUTSIDE:
        machine.begin()
    if state in {State.NOTED, State.RAISED}:
        machine.note(100.0)
    if state is State.RAISED:
        machine.take()
    assert machine.state is state
    return machine


@pytest.mark.parametrize(
    ("state", "begun", "noted", "taken", "was_noted"),
    [
        (State.OUTSIDE, State.DEFERRING, State.NOTED, State.OUTSIDE, False),
        (State.DEFERRING, State.DEFERRING, State.NOTED, State.DEFERRING, False),
        (State.NOTED, State.NOTED, State.NOTED, State.RAISED, True),
        (State.RAISED, State.RAISED, State.RAISED, State.RAISED, True),
    ],
)
def test_interrupt_state_machine_follows_transition_table(
    state: State, begun: State, noted: State, taken: State, was_noted: bool
) -> None:
    machine = in_state(state)
    machine.begin()
    assert machine.state is begun
    machine = in_state(state)
    assert not machine.note(101.0)
    assert machine.state is noted
    machine = in_state(state)
    assert machine.take() == (state is State.NOTED)
    assert machine.state is taken
    machine = in_state(state)
    assert machine.end() == was_noted
    assert machine.state is State.OUTSIDE


def test_signal_before_deferred_block_is_raised() -> None:
    machine = Interrupt()
    machine.note(1.0)
    machine.begin()
    assert machine.take()


def test_late_second_signal_interrupts_immediately() -> None:
    machine = in_state(State.RAISED)
    assert not machine.note(100.0 + interrupts.INSISTS_S)
    assert machine.note(100.1 + interrupts.INSISTS_S)
    # The first signal of the next block does not raise.
    machine.end()
    machine.begin()
    assert not machine.note(500.0)
