"""Executors: threads that take steps from one priority queue, each with its own device to saturate.

In: `Step`s, by priority (layer order: lower first). Out: their effects; errors go to the step's ticket.
Not here: which steps there are (`run`).

    post --heap--> start() --None--> finish()
                       `---Pending--> (device works on) --done--> finish()

Tickets: what posting work returns. Progress, outcome, cancel; the first error wins.

In: `advance`, `fail`, `finish` from the engine's threads. Out: `wait` in the caller's.
Not here: the work itself (`run`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from penstock import lifecycle
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceStalled

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
                self.changed.wait(lifecycle.longest_wait_s(min(stall_s, LOOK_S)))
                lifecycle.raise_if_noted()
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


T = TypeVar("T")


class Pending(Protocol):
    """Device work in flight."""

    def done(self) -> bool:
        """Return whether it completed; never blocks. Raises what the device reports."""
        ...


class Step(Protocol):
    """One piece of work of one executor.

    Exactly one of `finish` (after `start`, when its work is complete) and `abandon` is called, from the executor's
    thread; `abandon` must free what the step holds, and never raises.
    """

    priority: int
    name: str
    nbytes: int
    ticket: Ticket

    def start(self) -> Pending | None:
        """Do the work, or set it going on a device."""
        ...

    def finish(self) -> None:
        """The work is complete."""
        ...

    def abandon(self) -> None:
        """The ticket stopped before or while the step ran."""
        ...


class Work:
    """A `Step` but for its `start`: one that hands on nothing at its end, and holds nothing to free."""

    __slots__ = ("name", "nbytes", "priority", "ticket")

    def __init__(self, ticket: Ticket, priority: int, name: str, nbytes: int = 0) -> None:
        self.ticket, self.priority, self.name, self.nbytes = ticket, priority, name, nbytes

    def finish(self) -> None:
        """See `Step.finish`."""

    def abandon(self) -> None:
        """See `Step.abandon`."""


_POLL_S = 5e-4
"""Pause between looks at a device that is still working while no step waits. Three 8 MiB copies over PCIe 5: more often
only takes the GIL from the readers."""


class Executor:
    """`num_threads` threads named after the executor; started by the first `post`.

    Args:
        name: `fetch`, `place`, `compute` or `send`; the row of the trace.
        num_threads: how many.
        trace: where spans go.
        stall_s: a step in flight on a device longer than this fails its ticket.
        on_thread_start: called once in each thread (to choose its device).
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        trace: Trace,
        stall_s: float,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.num_threads = num_threads
        self._trace = trace
        self._stall_s = stall_s
        self._on_thread_start = on_thread_start
        self._heap: list[tuple[int, int, Step]] = []
        self._sequence = itertools.count()
        self._state = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._running: list[Step | None] = [None] * num_threads

    def is_busy(self) -> bool:
        """Return whether a thread is inside a step."""
        return any(step is not None for step in self._running)

    def post(self, *steps: Step) -> None:
        """Queue steps."""
        with self._state:
            for step in steps:
                heapq.heappush(self._heap, (step.priority, next(self._sequence), step))
            for _ in range(min(len(steps), self.num_threads - len(self._threads))):
                index = len(self._threads)
                name = f"penstock-{self.name}-{index}"
                thread = threading.Thread(target=self._work, args=(index,), name=name, daemon=True)
                if not start_thread(thread, is_needed=not self._threads):
                    break  # those that run do the work, more slowly
                self._threads.append(thread)
            self._state.notify(len(steps))

    def close(self) -> None:
        """Let the threads end once the queue is empty, and join them. Idempotent.

        Steps of a stopped ticket are abandoned, device work in flight is waited for: nothing writes to memory
        the caller may free after this returns.
        """
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self, in_flight: bool) -> Step | None:
        """Return the next step; None when there is none now (with work in flight) or will be none."""
        with self._state:
            if not self._heap and in_flight:
                self._state.wait(_POLL_S)
            while not self._heap:
                if in_flight or self._closed:
                    return None
                self._state.wait()
            return heapq.heappop(self._heap)[2]

    def _work(self, index: int) -> None:
        in_flight: deque[_InFlight] = deque()
        if self._on_thread_start is not None:
            self._on_thread_start()
        while True:
            step = self._next(bool(in_flight))
            if step is not None:
                self._running[index] = step
                self.run_step(step, in_flight)
                self._running[index] = in_flight[0].step if in_flight else None
            elif not in_flight:
                return
            while in_flight and self.retire(in_flight):
                self._running[index] = in_flight[0].step if in_flight else None

    def run_step(self, step: Step, in_flight: deque[_InFlight]) -> None:
        """Start one step in the calling thread; device work goes to `in_flight`."""
        if step.ticket.stopped:
            step.abandon()
            return
        start = time.perf_counter()
        outcome = guarded(step.ticket, step.start)
        if isinstance(outcome, Failed):
            step.abandon()
        elif outcome is None:
            self._trace.add(self.name, step.name, start, time.perf_counter(), step.nbytes)
            guarded(step.ticket, step.finish)
        else:
            in_flight.append(_InFlight(outcome, step, start))

    def retire(self, in_flight: deque[_InFlight]) -> bool:
        """Look at the oldest step in flight; True when it left the queue."""
        oldest = in_flight[0]
        step = oldest.step
        now = time.perf_counter()
        done = guarded(step.ticket, oldest.pending.done)
        if done is False:
            silent_s = now - oldest.start
            if silent_s > self._stall_s:
                message = f"{step.name}: the device made no progress for {self._stall_s} s"
                step.ticket.fail(DestinationError(message, mutated=True))
            if silent_s <= 2 * self._stall_s:
                return False
        in_flight.popleft()
        if done is True:
            self._trace.add(self.name, step.name, oldest.start, now, step.nbytes)
            guarded(step.ticket, step.finish)
        else:
            step.abandon()
        return True


def start_thread(thread: threading.Thread, *, is_needed: bool = True) -> bool:
    """Start a thread; False if the system allows no more of them and this one is not needed.

    Raises:
        DestinationError: it is needed; names the limits that there are.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if not is_needed:
            return False
        raise DestinationError(
            f"no thread can be started ({_thread_limits()})",
            hint="raise the limit (ulimit -u, or pids.max of the cgroup), or end other processes of this user",
        ) from error
    return True


def _thread_limits() -> str:
    """Return what limits the threads of this process, for a message."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [f"RLIMIT_NPROC {'unlimited' if soft == resource.RLIM_INFINITY else soft}"]
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_bytes().decode().strip().rpartition("::")[2].lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        now, most = (group.joinpath(f"pids.{name}").read_bytes().decode().strip() for name in ("current", "max"))
        limits.append(f"cgroup pids {now} of {most}")
    return ", ".join(limits)


class HostedExecutor:
    """An executor without a thread: another executor's thread carries out its steps, by `turn`.

    Args:
        name, trace, stall_s: see `Executor`.
        wake: called when a step was posted, from the posting thread.
    """

    def __init__(self, name: str, *, trace: Trace, stall_s: float, wake: Callable[[], None]) -> None:
        self._loop = Executor(name, 1, trace=trace, stall_s=stall_s)
        self._steps: deque[Step] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._wake = wake

    def is_busy(self) -> bool:
        """Return whether a step is in flight."""
        return bool(self._in_flight)

    def has_steps(self) -> bool:
        """Return whether a posted step waits for its turn."""
        return bool(self._steps)

    def post(self, *steps: Step) -> None:
        """Queue steps, from any thread."""
        self._steps.extend(steps)
        self._wake()

    def turn(self) -> bool:
        """Start what was posted, finish what is done; whether something is still in flight."""
        while self._steps:
            self._loop.run_step(self._steps.popleft(), self._in_flight)
        while self._in_flight and self._loop.retire(self._in_flight):
            pass
        return bool(self._in_flight)

    def close(self) -> None:
        """Carry out or abandon what is left; the hosting thread must have ended."""
        while self.turn():
            time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _InFlight:
    pending: Pending
    step: Step
    start: float


class Failed:
    """What `guarded` returns for a call that raised. Not the error: its traceback leads to the frame that would hold it
    and the two would wait for the garbage collector."""


def guarded(ticket: Ticket, call: Callable[[], T]) -> T | Failed:
    """Call; an error stops the ticket, whose waiter raises it.

    The one place where an executor's thread meets foreign code: nothing may end the thread without a word.
    """
    try:
        return call()
    except BaseException as error:  # noqa: BLE001
        ticket.fail(error)
        return Failed()
