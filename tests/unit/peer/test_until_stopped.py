from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.peer.member import until_stopped


def test_a_signal_sent_as_soon_as_it_is_ready_ends_the_wait_and_not_the_process() -> None:
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    assert until_stopped(stopped, lambda: None, 30.0, ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.is_set() and signal.getsignal(signal.SIGTERM) is before


def test_it_is_ready_once_and_before_the_first_look() -> None:
    calls: list[str] = []
    assert not until_stopped(threading.Event(), lambda: calls.append("check"), 0.5, ready=lambda: calls.append("ready"))
    assert calls[0] == "ready" and calls.count("ready") == 1 and "check" in calls


def test_an_error_of_ready_ends_the_wait_and_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)

    def ready() -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError):
        until_stopped(threading.Event(), lambda: None, ready=ready)
    assert signal.getsignal(signal.SIGINT) is before
