"""Wait for a request to stop: a call in this process, SIGTERM or SIGINT; or for a failed check.

In: an event, a check. Out: True if the event was set. Not here: the reaction (`fetch.join`, `keeper.keeper`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOOK_S = 0.2
"""Length of one wait: Python runs signal handlers of the main thread only between waits."""


def until_stopped(stopped: threading.Event, check: Callable[[], None], timeout_s: float | None = None) -> bool:
    """Wait until `stopped` is set, by any thread or by a signal; return False if `timeout_s` passed first.

    Args:
        stopped: ends the wait.
        check: called several times a second; an error that it raises ends the wait, too.
        timeout_s: limit of the wait; None: no limit.

    Order: handles signals in the main thread only; restores the previous handlers before it returns.
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
