from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.waits import until_stopped


def test_signal_in_ready_callback_stops_wait() -> None:
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    assert until_stopped(stopped, lambda: None, 30.0, ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.is_set() and signal.getsignal(signal.SIGTERM) is before


def test_ready_callback_runs_once_before_first_check() -> None:
    calls: list[str] = []
    assert not until_stopped(threading.Event(), lambda: calls.append("check"), 0.5, ready=lambda: calls.append("ready"))
    assert calls[0] == "ready" and calls.count("ready") == 1 and "check" in calls


def test_ready_callback_error_restores_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)

    def ready() -> None:
        raise BrokenPipeError("closed pipe")

    with pytest.raises(BrokenPipeError):
        until_stopped(threading.Event(), lambda: None, ready=ready)
    assert signal.getsignal(signal.SIGINT) is before
