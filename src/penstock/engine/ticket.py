"""Tickets: what posting work returns. Progress, outcome, cancel; the first error wins.

In: `advance`, `fail`, `finish` from the engine's threads. Out: `wait` in the caller's.
Not here: the work itself (`run`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock import interrupt
from penstock.errors import Cancelled, PenstockError, SourceStalled

LOOK_S = 1.0
"""Longest pause between two looks at what moved, and the most of it that counts as silence: a process that was stopped
itself, or did not get the processor, has waited for nobody meanwhile."""


LEAST_BYTES = 64 << 10
"""Bytes received within a deadline that count as progress: 2 kB/s at 30 s. A peer that gives a byte at a time to keep
its reader waiting gives less, and no link that weights are moved over does."""


class Silence:
    """Seconds without progress, as the waiting process lived them; `seconds` as of the last look.

    Progress is bytes that reached their end (`moved`), or `LEAST_BYTES` more that were received on the way there. While
    the wait is paused the seconds stand still: something is under way that has a deadline of its own. They do not begin
    anew, or one source after another that gives nothing would put the deadline off for ever.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved, self._received, self._looked = -1, 0, time.monotonic()

    def look(self, moved: int, received: int = 0, *, is_paused: Callable[[], bool] | None = None) -> float:
        """Note what moved so far. Order: again and again while waiting, `LOOK_S` apart at most."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, LOOK_S), now
        self._received = min(self._received, received)  # a read that failed is no longer counted
        if moved != self._moved or received >= self._received + LEAST_BYTES:
            self._moved, self._received, self.seconds = moved, received, 0.0
        elif is_paused is None or not is_paused():
            self.seconds += passed_s
        return self.seconds

    def begin(self) -> None:
        """No thread waited before: the next look finds progress."""
        self._moved, self._received = -1, 0


class Ticket:
    """The state of one posted piece of work.

    Attributes:
        nbytes: bytes the work is to move.
        moved_bytes: bytes at their destination so far.
        is_busy: whether a step is inside an executor now; while one is, its own deadline holds, not the ticket's. Who
            tries a step that failed again (`fetch.run`) does not count what gave nothing before.
        received: bytes received so far, also of steps under way; None: only whole steps are seen.
    """

    def __init__(self, nbytes: int, is_busy: Callable[[], bool], *, received: Callable[[], int] | None = None) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.is_busy = is_busy
        self.received = received
        self.changed = threading.Condition()
        self._silence = Silence()
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
            # The first error is the cause; later ones come from work that it interrupted.
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
        """Return seconds without a byte and without a step under way; see `Silence`. Order: while waiting."""
        received = 0 if self.received is None else self.received()
        return self._silence.look(self.moved_bytes, received, is_paused=self.is_busy)

    def wait_until(self, reached: Callable[[], bool], *, stall_s: float) -> None:
        """Return once `reached()` is true; it is evaluated with `changed` held, after every change.

        Args:
            reached: whether what the caller waits for holds.
            stall_s: raise when no byte arrived and no step was running for this many seconds.

        Raises:
            PenstockError: whatever stopped the work; `mutated` as the engine set it.
            SourceStalled: see `stall_s`.
            KeyboardInterrupt: SIGINT came, inside `interrupt.deferred`.
        """
        with self.changed:
            self._silence.begin()
            while not reached() and not self._stopped:
                if self.look() > stall_s:
                    where = f"{self.moved_bytes} of {self.nbytes} bytes"
                    self.fail(SourceStalled(f"no progress for {stall_s} s at {where}"))
                    break
                # Never longer: progress by bytes alone wakes no waiter, and an interrupt must be seen soon.
                self.changed.wait(interrupt.longest_wait_s(min(stall_s, LOOK_S)))
                interrupt.raise_if_noted()
        self.check()

    def wait(self, *, stall_s: float) -> None:
        """`wait_until` everything arrived."""
        self.wait_until(lambda: self._done, stall_s=stall_s)

    def release(self) -> None:
        """Drop the references to the error and the callbacks, which would keep the work and its memory alive."""
        with self.changed:
            self._error, self.is_busy, self.received = None, _never, None

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
