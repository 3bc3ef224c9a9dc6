"""Tickets: what posting work returns. Progress, outcome, cancel; the first error wins.

In: `advance`, `fail`, `finish` from the engine's threads. Out: `wait` in the caller's.
Not here: the work itself (`run`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.errors import Cancelled, PenstockError, SourceStalled

LOOK_S = 1.0
"""Longest pause between two looks at what moved, and the most of it that counts as silence: a process that was stopped
itself, or did not get the processor, has waited for nobody meanwhile."""


class Ticket:
    """The state of one posted piece of work.

    Attributes:
        nbytes: bytes the work is to move.
        moved_bytes: bytes at their destination so far.
        is_busy: whether a step is inside an executor now; while one is, its own deadline holds, not the ticket's.
        silent_s: see `look`.
    """

    def __init__(self, nbytes: int, is_busy: Callable[[], bool]) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.is_busy = is_busy
        self.changed = threading.Condition()
        self.silent_s = 0.0
        self._seen, self._looked = -1, time.monotonic()
        self._error: BaseException | None = None
        self._stopped = self._done = False

    @property
    def stopped(self) -> bool:
        """Failed or cancelled: nothing new may start."""
        return self._stopped

    @property
    def done(self) -> bool:
        """Finished, failed or cancelled."""
        return self._done or self._stopped

    @property
    def error(self) -> BaseException | None:
        """The first error, if one happened and the ticket was not released."""
        return self._error

    def wake(self) -> None:
        """Let every waiter look again."""
        with self.changed:
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop the work with `error`; later ones are dropped."""
        with self.changed:
            if not self.done:
                self._error, self._stopped = error, True
            self.changed.notify_all()

    def cancel(self) -> None:
        """Stop the work; `wait` raises Cancelled."""
        self.fail(Cancelled("cancelled by the caller"))

    def finish(self) -> None:
        """Everything arrived."""
        with self.changed:
            self._done = True
            self.changed.notify_all()

    def look(self) -> float:
        """Seconds since a byte arrived or a step ran, as whoever waits lived them. Order: while waiting."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, LOOK_S), now
        self.silent_s += passed_s
        if self.moved_bytes != self._seen or self.is_busy():
            self._seen, self.silent_s = self.moved_bytes, 0.0
        return self.silent_s

    def wait_until(self, reached: Callable[[], bool], *, stall_s: float) -> None:
        """Return once `reached()`, which is asked with `changed` held, whenever something changed.

        Args:
            reached: whether what the caller waits for holds.
            stall_s: raise when no byte arrived and no step was running for this many seconds.

        Raises:
            PenstockError: whatever stopped the work; `mutated` as the engine set it.
            SourceStalled: see `stall_s`.
        """
        with self.changed:
            self._seen = -1  # nobody waited before
            while not reached() and not self._stopped:
                if self.look() > stall_s:
                    where = f"{self.moved_bytes} of {self.nbytes} bytes"
                    self.fail(SourceStalled(f"no progress for {stall_s} s at {where}"))
                    break
                self.changed.wait(min(stall_s, LOOK_S))
        self.check()

    def wait(self, *, stall_s: float) -> None:
        """`wait_until` everything arrived."""
        self.wait_until(lambda: self._done, stall_s=stall_s)

    def release(self) -> None:
        """Forget the error and whom to ask whether they are busy: both lead back to the work and what it holds."""
        with self.changed:
            self._error, self.is_busy = None, _never

    def check(self) -> None:
        """Raise what stopped the work, if something did."""
        if not self._stopped:
            return
        if self._error is None:
            raise Cancelled("the work was given up")
        if isinstance(self._error, PenstockError):
            raise self._error
        raise RuntimeError("a step of the engine failed: a bug in Penstock or in the caller's code") from self._error


def _never() -> bool:
    return False
