"""Waiting to be told to stop: by a call in this process, by SIGTERM, by SIGINT; or for a reason to fail.

In: an event, a check. Out: whether the event was set. Not here: what is done then (`fetch.join`, `keeper.keeper`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOOK_S = 0.2
"""Signals are heard between waits."""


def until_stopped(stopped: threading.Event, check: Callable[[], None], timeout_s: float | None = None) -> bool:
    """Wait until `stopped` is set, by whomever, or a signal comes, which sets it; False: `timeout_s` passed.

    Args:
        stopped: ends the wait.
        check: called several times a second; what it raises ends the wait, too.
        timeout_s: of the wait; None: no bound.

    Order: hears signals in the main thread only; their handlers are put back before it returns.
    """
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            if stopped.wait(left):
                return True
            check()
            if deadline is not None and time.monotonic() >= deadline:
                return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
