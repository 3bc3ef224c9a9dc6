"""The run loop of every journey. Executors run work items by priority, and a ticket holds progress and the first error.

An executor calls an item's `start`, and then `finish` once its work is complete. If the ticket is stopped or `start`
fails, the executor calls `abandon` instead. After `Run.close`, no item touches memory any more.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from penstock import interrupts, lifecycle
from penstock.engine.threads import Joinable, KeptThreads, start_call
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceStalled
from penstock.lifecycle import Closeable, quick_handover
from penstock.waits import Scope

T = TypeVar("T")


class AnyExecutor(Protocol):
    """The part of an executor that a `Run` needs."""

    def is_busy(self) -> bool:
        """Return whether the executor is running an item."""

    def close(self) -> None:
        """See `Executor.close`."""


E = TypeVar("E", bound=AnyExecutor)


class Run(Closeable):
    """The base class of runs, with executors, a ticket and a trace. Leaving the `with` block ends all work of the run.

    A journey derives a class from this class, posts items to executors and calls `ticket.finish` after the last item.

    Args:
        stall_s: seconds without progress after which a wait fails.
        is_quick: let the process hand over the GIL quickly while the executors have threads. See `quick_handover`.
        threads: reusable threads for the executors. None means new threads.

    Attributes:
        ticket: progress and outcome. The first error of an item stops the run.
        is_touched: whether the caller's existing memory may have been written to, which errors report as `mutated`.
    """

    def __init__(
        self, nbytes: int, *, trace: Trace, stall_s: float, is_quick: bool = False, threads: KeptThreads | None = None
    ) -> None:
        self.trace = trace
        self.stall_s = stall_s
        self.ticket = RunState(nbytes, self.is_busy, received=self.received_bytes)
        self.is_touched = False
        self._is_quick = is_quick
        self._kept_threads = threads
        self._executors: list[AnyExecutor] = []

    def executor(self, name: str, num_threads: int, *, on_thread_start: Callable[[], None] | None = None) -> Executor:
        """Create an executor in this run. Create executors in the order in which they post items to each other."""
        return self.own(
            Executor(
                name,
                num_threads,
                self.ticket,
                trace=self.trace,
                stall_s=self.stall_s,
                on_thread_start=on_thread_start,
                is_quick=self._is_quick,
                threads=self._kept_threads,
            )
        )

    def own(self, executor: E) -> E:
        """Add an executor of a different class to this run, and return it."""
        self._executors.append(executor)
        return executor

    def is_busy(self) -> bool:
        """Return whether an executor is running an item, whose deadline then replaces the ticket's deadline."""
        return any(executor.is_busy() for executor in self._executors)

    def received_bytes(self) -> int:
        """Return the bytes received so far, also by running items, or 0 if only finished items count as progress."""
        return 0

    def wait(self) -> None:
        """Wait until the ticket is finished, or raise the error that stopped it. See `RunState.wait_until`."""
        self.ticket.wait(stall_s=self.stall_s)

    def end(self) -> None:
        """Cancel unfinished work and wait until no item touches memory any more. Idempotent."""
        if lifecycle.is_ending():
            return
        if not self.ticket.done:
            self.ticket.cancel()
        # Close executors in the order of the items, so that an item can still post the next item.
        for executor in self._executors:
            executor.close()

    def close(self) -> None:
        """End the run and drop the references that would keep its memory alive. Idempotent."""
        if lifecycle.is_ending():
            return
        self.end()
        # The ticket refers to this run, and its error to an item's frames. These cycles would keep the weights alive
        # until the garbage collector runs.
        self.ticket.release()


LOOK_S = 1.0
"""Longest pause in seconds between two checks of the progress. A longer gap counts as this time, because the process
was suspended."""


LEAST_BYTES = 64 << 10
"""Number of received bytes that counts as progress. A hostile peer that sends single bytes to occupy its reader sends
fewer bytes than this within a deadline of 30 s."""


class StallTimer:
    """A timer of the seconds without progress, not counting time in which this process was suspended.

    Progress means that bytes reached their destination (`moved`), or that `LEAST_BYTES` more bytes were received.
    `seconds` is the result of the last `look`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved = -1
        self._received = 0
        self._looked = time.monotonic()

    def look(self, moved: int, received: int = 0, *, is_paused: Callable[[], bool] | None = None) -> float:
        """Record the progress so far and return `seconds`. During a wait, call this at least every `LOOK_S` seconds.

        The timer stops while `is_paused` returns True, because work with a separate deadline is running.
        """
        now = time.monotonic()
        passed_s = min(now - self._looked, LOOK_S)
        self._looked = now
        # The number of received bytes falls when a read fails. Bytes that are received again must count as progress.
        self._received = min(self._received, received)
        if moved != self._moved or received >= self._received + LEAST_BYTES:
            self._moved, self._received, self.seconds = moved, received, 0.0
        # A pause does not reset the timer, because a series of silent sources could otherwise postpone the deadline.
        elif is_paused is None or not is_paused():
            self.seconds += passed_s
        return self.seconds

    def begin(self) -> None:
        """Begin a wait. The time before this call does not count as stalled."""
        self._moved, self._received = -1, 0


class RunState:
    """The state of one run: progress, outcome and cancellation. The first error wins. Thread-safe.

    Attributes:
        moved_bytes: number of bytes at their destination so far.
        is_busy: returns whether an executor is running an item, whose deadline then replaces the ticket's deadline.
        received: returns the bytes received so far, also by running items, or is None if only finished items count.
        error: the first error, or None if there was no error or the ticket was released.
        blamed: the source whose fault the first error is, or None.
        stopped: whether the run failed or was cancelled, so that no new item may start.
        changed: condition that is notified at every change, and whose lock is held during every change.
        waits: scope of the items' waits, which end when the work stops.
    """

    def __init__(self, nbytes: int, is_busy: Callable[[], bool], *, received: Callable[[], int] | None = None) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.is_busy = is_busy
        self.received = received
        self.changed = threading.Condition()
        self.waits = Scope()
        self._silence = StallTimer()
        self._goes_on = False
        self.error: BaseException | None = None
        self.blamed: str | None = None
        self.stopped = False
        self.is_finished = False

    @property
    def done(self) -> bool:
        """Return whether the run finished, failed or was cancelled."""
        return self.is_finished or self.stopped

    def wake(self) -> None:
        """Wake every waiting thread, so that it checks its condition again."""
        with self.changed:
            self.changed.notify_all()

    def fail(self, error: BaseException, *, source: str | None = None) -> None:
        """Stop the work with an error, which may be the fault of a `source`. Later errors are dropped."""
        with self.changed:
            if not self.done:
                self.error, self.blamed, self.stopped = error, source, True
            self.changed.notify_all()
        # End the network waits of items now, and not at their deadlines.
        if self.stopped:
            self.waits.leave()

    def cancel(self) -> None:
        """Stop the work. `wait` then raises Cancelled."""
        self.fail(Cancelled("cancelled by the caller"))

    def finish(self) -> None:
        """Record that all bytes arrived."""
        with self.changed:
            self.is_finished = True
            self.changed.notify_all()

    def look(self) -> float:
        """Return the seconds without progress. Call this only during a wait. See `StallTimer`."""
        received = 0 if self.received is None else self.received()
        return self._silence.look(self.moved_bytes, received, is_paused=self.is_busy)

    def wait_until(self, reached: Callable[[], bool], *, stall_s: float, timeout_s: float = math.inf) -> bool:
        """Wait until `reached()` is true. The condition is evaluated after every change, with the lock of `changed`.

        Return False after `timeout_s`. The next wait then goes on with this one, and so does its timer. Raise the error
        that stopped the work, SourceStalled if no byte arrived and no item ran for `stall_s` seconds, or
        KeyboardInterrupt for SIGINT inside `interrupts.deferred`.
        """
        deadline = time.monotonic() + timeout_s
        with self.changed:
            # Start the timer now, because the consumer of a stream may have been busy for a long time.
            if not self._goes_on:
                self._silence.begin()
            self._goes_on = False
            while not reached() and not self.stopped:
                if self.look() > stall_s:
                    where = f"{self.moved_bytes} of {self.nbytes} bytes"
                    self.fail(SourceStalled(f"no progress for {stall_s} s at {where}"))
                    break
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._goes_on = True
                    return False
                # Wait only briefly, because received bytes do not wake waiters and an interrupt must be detected soon.
                self.changed.wait(interrupts.longest_wait_s(min(stall_s, LOOK_S, left_s)))
                interrupts.raise_if_noted()
        self.check()
        return True

    def wait(self, *, stall_s: float) -> None:
        """Wait until all bytes arrived. See `wait_until`."""
        self.wait_until(lambda: self.is_finished, stall_s=stall_s)

    def release(self) -> None:
        """Drop the references to the error and the callbacks, which keep the work and its memory alive."""
        with self.changed:
            self.error = None
            self.is_busy = lambda: False
            self.received = None
        self.waits.close()

    def check(self) -> None:
        """Raise the error that stopped the work, if there is one."""
        if not self.stopped:
            return
        if self.error is None:
            raise Cancelled("the run was cancelled, and its error is no longer stored")
        if isinstance(self.error, PenstockError):
            raise self.error
        raise RuntimeError("an engine step failed because of a bug in Penstock or in the caller's code") from self.error


class PendingItem(Protocol):
    """Work that a device is doing."""

    def done(self) -> bool:
        """Return whether the work is complete, without blocking. Raise the device's error if the work failed."""


class WorkItem(Protocol):
    """Work for one executor, which calls `start`, then `finish` or `abandon`. Only `start` may raise."""

    priority: int
    """Items with a lower number run first. Items with equal numbers run in posting order."""
    nbytes: int
    """Number of bytes for the trace, read when the item is complete."""

    @property
    def name(self) -> str:
        """Return the name of the item's span in the trace."""

    def start(self) -> PendingItem | None:
        """Do the work, or start the work on a device."""

    def finish(self) -> None:
        """Pass on the result of the completed work."""

    def abandon(self) -> None:
        """Release the item's resources, because the ticket stopped before or during the work."""


def _nothing() -> None:
    pass


class Item(msgspec.Struct, eq=False):
    """A `WorkItem` built from functions, for work that needs no class."""

    priority: int
    name: str
    nbytes: int
    start: Callable[[], PendingItem | None]
    finish: Callable[[], None] = _nothing
    abandon: Callable[[], None] = _nothing


POLL_S = 5e-4
"""Pause in seconds between checks of a busy device while no item waits. Three copies of 8 MiB over PCIe 5 take this
long, and frequent checks would take the GIL from the readers."""


class Executor:
    """Threads that take items from one priority queue.

    Args:
        name: `fetch`, `place`, `compute`, `send` or `ask`, for the trace and the threads.
        num_threads: maximum number of threads, which `post` starts as needed.
        stall_s: seconds that an item may run on a device before the ticket fails.
        on_thread_start: called once in each thread, for example to choose its device. Not allowed with `threads`.
        is_quick, threads: see `Run`.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        ticket: RunState,
        *,
        trace: Trace,
        stall_s: float,
        on_thread_start: Callable[[], None] | None = None,
        is_quick: bool = False,
        threads: KeptThreads | None = None,
    ) -> None:
        self.name = name
        self.num_threads = num_threads
        self._ticket = ticket
        self._trace = trace
        self._stall_s = stall_s
        self._on_thread_start = on_thread_start
        self._is_quick = is_quick
        self._heap: list[tuple[int, int, WorkItem]] = []
        self._sequence = itertools.count()
        self._state = threading.Condition()
        self._closed = False
        assert threads is None or on_thread_start is None, "on_thread_start would change a kept thread"
        self._kept = threads
        self._threads: list[Joinable] = []
        self._running: list[WorkItem | None] = [None] * num_threads

    def is_busy(self) -> bool:
        """Return whether a thread runs an item."""
        return self._running.count(None) < self.num_threads

    def post(self, *items: WorkItem) -> None:
        """Queue items. Raise DestinationError if no thread can start."""
        with self._state:
            # Start the threads first, so that nothing is queued if no thread can start.
            for _ in range(min(len(items), self.num_threads - len(self._threads))):
                index = len(self._threads)
                work, name = partial(self._work, index), f"penstock-{self.name}-{index}"
                thread = start_call(work, name, self._kept, is_needed=not index)
                if thread is None:
                    break
                self._threads.append(thread)
            for item in items:
                # The sequence number keeps the order of equal priorities, and prevents comparisons of items.
                heapq.heappush(self._heap, (item.priority, next(self._sequence), item))
            self._state.notify(len(items))

    def close(self) -> None:
        """Wait until the queue is empty and the threads have ended. Idempotent.

        A stopped ticket abandons queued items. Device work in flight is always awaited.
        """
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self, in_flight: bool) -> WorkItem | None:
        with self._state:
            # A device wakes no thread when it is done, so check it again soon.
            if not self._heap and in_flight:
                self._state.wait(POLL_S)
            while not self._heap:
                if in_flight or self._closed:
                    return None
                self._state.wait()
            return heapq.heappop(self._heap)[2]

    def _work(self, index: int) -> None:
        with self._ticket.waits.inside(), quick_handover() if self._is_quick else contextlib.nullcontext():
            self._take_items(index)

    def _take_items(self, index: int) -> None:
        in_flight: deque[InFlight] = deque()
        if self._on_thread_start is not None:
            # A failure stops the ticket, so this thread abandons the queued items.
            guarded(self._ticket, self._on_thread_start)
        while True:
            item = self._next(bool(in_flight))
            if item is not None:
                self._running[index] = item
                self.run_item(item, in_flight)
                # The executor stays busy while a device works. `retire` checks the device's deadline.
                self._running[index] = in_flight[0].item if in_flight else None
                # Drop the item before waiting, because it may keep memory as large as the weights alive.
                item = None
            elif not in_flight:
                return
            while in_flight and self.retire(in_flight):
                self._running[index] = in_flight[0].item if in_flight else None

    def run_item(self, item: WorkItem, in_flight: deque[InFlight]) -> None:
        """Run one item in the calling thread. Work on a device is added to `in_flight`."""
        if self._ticket.stopped:
            item.abandon()
            return
        start = time.perf_counter()
        outcome = guarded(self._ticket, item.start)
        if isinstance(outcome, RunFailed):
            item.abandon()
        elif outcome is None:
            # Add the span first, because `finish` may end the run.
            self._trace.add(self.name, item.name, start, time.perf_counter(), item.nbytes)
            guarded(self._ticket, item.finish)
        else:
            in_flight.append(InFlight(outcome, item, start))

    def retire(self, in_flight: deque[InFlight]) -> bool:
        """Check the oldest item in flight, which completes first. Return whether the item left the queue."""
        oldest = in_flight[0]
        item = oldest.item
        now = time.perf_counter()
        done = guarded(self._ticket, oldest.pending.done)
        if done is False:
            silent_s = now - oldest.start
            if silent_s > self._stall_s:
                message = f"{item.name}: the device made no progress for {self._stall_s} s"
                self._ticket.fail(DestinationError(message, mutated=True))
            # Abandon the item only after twice `stall_s`, because the device may still write to the item's memory. The
            # wait is bounded in case the device is lost.
            if silent_s <= 2 * self._stall_s:
                return False
        in_flight.popleft()
        if done is True:
            self._trace.add(self.name, item.name, oldest.start, now, item.nbytes)
            guarded(self._ticket, item.finish)
        else:
            item.abandon()
        return True


class InFlight(NamedTuple):
    """An item whose work is running on a device."""

    pending: PendingItem
    item: WorkItem
    start: float


class RunFailed:
    """The result of `guarded` for a call that raised. A reference to the error would create a reference cycle."""


def guarded(ticket: RunState, call: Callable[[], T]) -> T | RunFailed:
    """Make a call and return its result. An error stops the ticket, whose waiter raises it.

    Executors make all foreign calls through this function, because an error must not end their threads.
    """
    try:
        return call()
    except BaseException as error:  # noqa: BLE001
        ticket.fail(error)
        return RunFailed()
