"""The thread that sends a member's heartbeats: at intervals, and at once after a change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.waits import start_thread


class Heartbeats:
    """The heartbeats of one member.

    Args:
        beat: sends one heartbeat in the heartbeats' thread. It raises nothing.
        interval_s: the current interval in seconds.
    """

    def __init__(self, beat: Callable[[], None], interval_s: Callable[[], float]) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._now = threading.Event()
        self._stopped = threading.Event()
        self._beaten_s = self._reported_s = 0.0
        self._thread = threading.Thread(target=self._run, name="penstock-beat", daemon=True)

    def start(self) -> None:
        """Start the thread. The first heartbeat follows after one interval."""
        # The registration counts as a heartbeat, because the members of a starting fleet send many requests now.
        self._beaten_s = self._reported_s = time.monotonic()
        start_thread(self._thread)

    def trigger(self) -> None:
        """Trigger the next heartbeat now, without waiting for its response."""
        self._now.set()

    def postpone(self) -> None:
        """Postpone the next heartbeat by one interval, after a request that has reported weights."""
        # Such a request reports only one key, so it postpones a heartbeat only once.
        self._reported_s = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait in the heartbeats' thread, or until the heartbeats stop."""
        self._stopped.wait(seconds)

    @property
    def are_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self, within_s: float | None = None) -> bool:
        """Stop after the current heartbeat. Return whether the thread ended in `within_s` seconds. Idempotent."""
        self._stopped.set()
        self._now.set()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _until_next_s(self) -> float:
        interval_s = self._interval_s()
        return min(self._reported_s, self._beaten_s + interval_s) + interval_s - time.monotonic()

    def _run(self) -> None:
        while not self._stopped.is_set():
            while (remaining_s := self._until_next_s()) > 0 and not self._now.wait(remaining_s):
                pass
            self._now.clear()
            if self._stopped.is_set():
                return
            self._beaten_s = self._reported_s = time.monotonic()
            self._beat()
