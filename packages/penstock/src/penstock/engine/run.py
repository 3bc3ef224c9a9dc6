"""The run loop of every journey: executors run work items by priority; a ticket holds progress and the first error.

In: work items (`Item`, or a class with the same methods). Out: their effects; on the ticket, progress and the outcome.
Not here: which items there are (`loader.run`, `fetcher.run`, `sync.receive.transfer`, `jobs.workers.worker`).

    with Run(...) as run:
        executor = run.executor("fetch", 4)      # threads start with the first item
        executor.post(Item(...))  --heap--> start() --None--> finish()
                                              `---Pending--> (device works on) --done--> finish()
                                    (the ticket stopped, or start failed) --> abandon()
        run.wait()                               # finished, the first error, or no progress for stall_s
    # closed: the rest is cancelled, no thread works for it, and no item touches memory any more

Threads: items run on their executor's threads, `wait` and `close` on the caller's; any thread may use the ticket.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from penstock import interrupts, lifecycle
from penstock.engine.threads import Joinable, KeptThreads, start_call
from penstock.engine.trace import Trace
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceStalled
from penstock.lifecycle import Closeable, quick_handover
from penstock.waits import Scope

T = TypeVar("T")


# -- The run: executors and ticket, from the first item until nothing touches memory.


class AnyExecutor(Protocol):
    """The part of an executor that a `Run` needs."""

    def is_busy(self) -> bool:
        """Return whether an item is inside it now."""
        ...

    def close(self) -> None:
        """See `Executor.close`."""
        ...


E = TypeVar("E", bound=AnyExecutor)


class Run(Closeable):
    """Base of a journey's run: its executors, ticket and trace. A context manager: leaving it ends the work of every
    thread.

    A journey derives its own class, posts items to the executors, and calls `ticket.finish` after the last one. It may
    override `is_busy` and `received_bytes`.

    Args:
        nbytes: bytes the work is to move.
        trace: where spans go.
        stall_s: deadline by progress of every wait.
        is_quick: while the executors have threads, the process hands over the GIL quickly; see `quick_handover`.
        threads: where the executors take their threads, and leave them for the next run; None: they start new ones.

    Attributes:
        ticket: progress and outcome; stopped by the first error of an item.
        is_touched: whether a byte of the caller's memory may have been written; set by journeys that write to memory
            which the caller had before, for the `mutated` of their errors.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        trace: Trace,
        stall_s: float,
        is_quick: bool = False,
        threads: KeptThreads | None = None,
    ) -> None:
        self.trace = trace
        self.stall_s = stall_s
        self.ticket = RunState(nbytes, self.is_busy, received=self.received_bytes)
        self.is_touched = False
        self._is_quick = is_quick
        self._kept_threads = threads
        self._executors: list[AnyExecutor] = []

    def executor(self, name: str, num_threads: int, *, on_thread_start: Callable[[], None] | None = None) -> Executor:
        """Return a new executor of this run. Order: those that post to others come before them; see `end`."""
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
        """Take over an executor of another kind; return it."""
        self._executors.append(executor)
        return executor

    def is_busy(self) -> bool:
        """Return whether an item is inside an executor: its own deadline holds then, not the ticket's."""
        return any(executor.is_busy() for executor in self._executors)

    def received_bytes(self) -> int:
        """Return bytes received so far, also by items under way; 0: progress is only seen at the end of items."""
        return 0

    def wait(self) -> None:
        """Return once the ticket is finished. Raises what stopped it; see `RunState.wait_until`."""
        self.ticket.wait(stall_s=self.stall_s)

    def end(self) -> None:
        """Cancel what has not finished, and wait until no item touches memory any more. Idempotent.

        Returns at once while the interpreter ends: the threads of the executors are gone.
        """
        if lifecycle.is_ending():
            return
        if not self.ticket.done:
            self.ticket.cancel()
        # In the order in which items move on, so that an item can still post the next one. Those that go back (a sync
        # reads on once bytes are verified) do so only for a stopped ticket by now, and nothing starts for one.
        for executor in self._executors:
            executor.close()

    def close(self) -> None:
        """`end` the run, and drop what would keep its memory alive. Idempotent."""
        if lifecycle.is_ending():
            return
        self.end()
        # The ticket refers to this run, and its error to the frames of an item. Both cycles hold memory of the size of
        # the weights, which would otherwise wait for Python's cyclic collector.
        self.ticket.release()


# -- The ticket.

LOOK_S = 1.0
"""Longest pause between two looks at the progress, and the most of it that counts as silence: a process that was itself
stopped, or did not get the processor, has not waited for its source meanwhile."""


LEAST_BYTES = 64 << 10
"""Bytes received within a deadline that count as progress: 2 kB/s at 30 s. A peer that sends a byte at a time to keep
its reader waiting sends less, and every link that weights are moved over carries more."""


class StallTimer:
    """Seconds without progress, as the waiting process lived them; `seconds` as of the last look.

    Progress is bytes that reached their end (`moved`), or `LEAST_BYTES` more that were received on the way there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._moved = -1
        self._received = 0
        self._looked = time.monotonic()

    def look(self, moved: int, received: int = 0, *, is_paused: Callable[[], bool] | None = None) -> float:
        """Note the progress so far, and return `seconds`. Order: repeatedly while waiting, at most `LOOK_S` apart.

        Args:
            moved: bytes at their destination.
            received: bytes received so far, verified or not.
            is_paused: whether something is under way that has a deadline of its own.
        """
        now = time.monotonic()
        passed_s = min(now - self._looked, LOOK_S)
        self._looked = now
        # A read that failed is no longer counted, so the number can fall: what is received anew must count again.
        self._received = min(self._received, received)
        if moved != self._moved or received >= self._received + LEAST_BYTES:
            self._moved, self._received, self.seconds = moved, received, 0.0
        # While paused the seconds stand still instead of beginning anew: one source after another that sends nothing
        # would otherwise put the deadline off for ever.
        elif is_paused is None or not is_paused():
            self.seconds += passed_s
        return self.seconds

    def begin(self) -> None:
        """Begin a wait: the time before it does not count, so the next look finds progress."""
        self._moved, self._received = -1, 0


class RunState:
    """The state of one run: progress, outcome, cancel. The first error wins. Any thread.

    Attributes:
        nbytes: bytes the work is to move.
        moved_bytes: bytes at their destination so far.
        is_busy: whether an item is inside an executor now; while one is, its own deadline holds, not the ticket's. A
            run that retries failed items (`fetcher.run`) does not count sources that sent nothing before.
        received: bytes received so far, also by items under way; None: only whole items are seen.
        changed: notified at every change; its lock is held for the changes.
        waits: the waits of items, which end when the work stops.
    """

    def __init__(self, nbytes: int, is_busy: Callable[[], bool], *, received: Callable[[], int] | None = None) -> None:
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.is_busy = is_busy
        self.received = received
        self.changed = threading.Condition()
        self.waits = Scope()
        self._silence = StallTimer()
        self._error: BaseException | None = None
        self._stopped = False
        self._done = False

    @property
    def stopped(self) -> bool:
        """Failed or cancelled: nothing new may start."""
        return self._stopped

    @property
    def is_finished(self) -> bool:
        """Everything arrived."""
        return self._done

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
        # Items that wait for the network must not wait until their own deadlines.
        if self._stopped:
            self.waits.leave()

    def cancel(self) -> None:
        """Stop the work; `wait` raises Cancelled."""
        self.fail(Cancelled("cancelled by the caller"))

    def finish(self) -> None:
        """Note that all bytes arrived."""
        with self.changed:
            self._done = True
            self.changed.notify_all()

    def look(self) -> float:
        """Return seconds without a byte and without an item under way; see `StallTimer`. Order: while waiting."""
        received = 0 if self.received is None else self.received()
        return self._silence.look(self.moved_bytes, received, is_paused=self.is_busy)

    def wait_until(self, reached: Callable[[], bool], *, stall_s: float) -> None:
        """Return once `reached()` is true; it is evaluated with `changed` held, after every change.

        Args:
            reached: whether what the caller waits for holds.
            stall_s: raise when no byte arrived and no item was running for this many seconds.

        Raises:
            PenstockError: whatever stopped the work.
            SourceStalled: see `stall_s`.
            KeyboardInterrupt: SIGINT came, inside `interrupts.deferred`.
        """
        with self.changed:
            # Silence counts from here on: the consumer of a stream may have done other things for long.
            self._silence.begin()
            while not reached() and not self._stopped:
                if self.look() > stall_s:
                    where = f"{self.moved_bytes} of {self.nbytes} bytes"
                    self.fail(SourceStalled(f"no progress for {stall_s} s at {where}"))
                    break
                # Never longer: progress by bytes alone wakes no waiter, and an interrupt must be seen soon.
                self.changed.wait(interrupts.longest_wait_s(min(stall_s, LOOK_S)))
                interrupts.raise_if_noted()
        self.check()

    def wait(self, *, stall_s: float) -> None:
        """Return once everything arrived; see `wait_until`."""
        self.wait_until(lambda: self.is_finished, stall_s=stall_s)

    def release(self) -> None:
        """Drop the references to the error and the callbacks, which would keep the work and its memory alive."""
        with self.changed:
            self._error = None
            self.is_busy = _never
            self.received = None
        self.waits.close()

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


# -- Work items.


class PendingItem(Protocol):
    """Device work in flight."""

    def done(self) -> bool:
        """Return whether it completed; never blocks. Raises what the device reports."""
        ...


class WorkItem(Protocol):
    """Piece of work of one executor.

    Exactly one of `finish` (after `start`, when its work is complete) and `abandon` is called, from the executor's
    thread; `abandon` must free what the item holds, and never raises.
    """

    priority: int
    """Lower runs first; of equal ones, the one that was posted first."""
    nbytes: int
    """The bytes of its span; read when the item is complete."""

    @property
    def name(self) -> str:
        """Return the name of its span in the trace."""
        ...

    def start(self) -> PendingItem | None:
        """Do the work, or start it on a device."""
        ...

    def finish(self) -> None:
        """Pass on the result; the work is complete."""
        ...

    def abandon(self) -> None:
        """Free what the item holds: the ticket stopped before or while it ran."""
        ...


def _nothing() -> None:
    pass


class Item:
    """A `WorkItem` made of functions, for work without state of its own."""

    __slots__ = ("abandon", "finish", "name", "nbytes", "priority", "start")

    def __init__(
        self,
        priority: int,
        name: str,
        nbytes: int,
        start: Callable[[], PendingItem | None],
        finish: Callable[[], None] = _nothing,
        abandon: Callable[[], None] = _nothing,
    ) -> None:
        self.priority = priority
        self.name = name
        self.nbytes = nbytes
        self.start = start
        self.finish = finish
        self.abandon = abandon


# -- Executors.

POLL_S = 5e-4
"""Pause between looks at a device that is still working while no item waits. Three 8 MiB copies over PCIe 5: more often
only takes the GIL from the readers."""


class Executor:
    """`num_threads` threads named after the executor that take items from one priority queue.

    Args:
        name: `fetch`, `place`, `compute`, `send` or `ask`; the row of the trace.
        num_threads: the most threads; the first `post` starts them.
        ticket: stopped by the first error of an item.
        trace: where spans go.
        stall_s: an item in flight on a device longer than this fails the ticket.
        on_thread_start: called once in each thread (to choose its device); not for kept threads, which would keep it.
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
        assert threads is None or on_thread_start is None, "a kept thread stays as it was left"
        self._kept = threads
        self._threads: list[Joinable] = []
        self._running: list[WorkItem | None] = [None] * num_threads

    def is_busy(self) -> bool:
        """Return whether a thread is inside an item."""
        return any(item is not None for item in self._running)

    def post(self, *items: WorkItem) -> None:
        """Queue items. Raises DestinationError if the system allows not even one thread."""
        with self._state:
            # Threads first: without any, nothing is queued, and the items stay the caller's.
            for _ in range(min(len(items), self.num_threads - len(self._threads))):
                # Without one more thread, those that run do the work, more slowly.
                index = len(self._threads)
                work, name = partial(self._work, index), f"penstock-{self.name}-{index}"
                thread = start_call(work, name, self._kept, is_needed=not index)
                if thread is None:
                    break
                self._threads.append(thread)
            for item in items:
                # The sequence number keeps equals in their order, and the heap from comparing items.
                heapq.heappush(self._heap, (item.priority, next(self._sequence), item))
            self._state.notify(len(items))

    def close(self) -> None:
        """Let the threads end their work once the queue is empty, and wait for that. Idempotent.

        Items of a stopped ticket are abandoned, device work in flight is waited for: nothing writes to memory
        the caller may free after this returns.
        """
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self, in_flight: bool) -> WorkItem | None:
        """Return the next item; None when there is none now (with work in flight) or will be none."""
        with self._state:
            # A device wakes no thread when it is done, so this one looks again soon.
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
            # A failure stops the ticket: this thread goes on, and abandons what is queued.
            guarded(self._ticket, self._on_thread_start)
        while True:
            item = self._next(bool(in_flight))
            if item is not None:
                self._running[index] = item
                self.run_item(item, in_flight)
                # Still busy while a device works: its deadline is in `retire`, and the ticket's stands still.
                self._running[index] = in_flight[0].item if in_flight else None
                # While this thread waits for its next item: this one may hold memory of the size of the weights.
                item = None
            elif not in_flight:
                return
            while in_flight and self.retire(in_flight):
                self._running[index] = in_flight[0].item if in_flight else None

    def run_item(self, item: WorkItem, in_flight: deque[InFlight]) -> None:
        """Start one item in the calling thread; device work goes to `in_flight`."""
        if self._ticket.stopped:
            item.abandon()
            return
        start = time.perf_counter()
        outcome = guarded(self._ticket, item.start)
        if isinstance(outcome, RunFailed):
            item.abandon()
        elif outcome is None:
            # Before `finish`, which may end the run: the trace is complete when its last item is.
            self._trace.add(self.name, item.name, start, time.perf_counter(), item.nbytes)
            guarded(self._ticket, item.finish)
        else:
            in_flight.append(InFlight(outcome, item, start))

    def retire(self, in_flight: deque[InFlight]) -> bool:
        """Look at the oldest item in flight; True when it left the queue."""
        # The oldest alone: a device carries out the work of one stream in order.
        oldest = in_flight[0]
        item = oldest.item
        now = time.perf_counter()
        done = guarded(self._ticket, oldest.pending.done)
        if done is False:
            silent_s = now - oldest.start
            if silent_s > self._stall_s:
                message = f"{item.name}: the device made no progress for {self._stall_s} s"
                self._ticket.fail(DestinationError(message, mutated=True))
            # Once more as long, since the device may still write to memory that `abandon` frees; a device that is lost
            # must not hang the caller for ever.
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
    """An item whose work a device is carrying out."""

    pending: PendingItem
    item: WorkItem
    start: float


class RunFailed:
    """The result of `guarded` for a call that raised. It does not hold the error: the error's traceback leads to the
    frame that would hold this object, and the two would wait for the cyclic collector."""


def guarded(ticket: RunState, call: Callable[[], T]) -> T | RunFailed:
    """Call; an error stops the ticket, whose waiter raises it.

    The one place where an executor's thread meets foreign code: an error that ended the thread would leave the items
    behind it waiting for ever.
    """
    try:
        return call()
    except BaseException as error:  # noqa: BLE001
        ticket.fail(error)
        return RunFailed()
