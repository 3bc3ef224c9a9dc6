"""The fetch executor for files in the page cache: one thread and the kernel's workers, instead of many threads.

In: fetch items, in order. Out: the same effects as `run.Executor`, which takes the items that do not suit a ring.
Not here: the ring (`storage.io_uring`), what an item reads (`loader.run`).

    items --> item.queue() --None--> the executor of threads (not cached, remote, straight into slabs)
                 `--Queued--> ring --completion--> item.arrived() --device's copy--> item.finish()
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

from penstock.engine.run import POLL_S, Executor, InFlight, PendingItem, RunFailed, RunState, WorkItem, guarded
from penstock.engine.trace import Trace
from penstock.errors import SourceError, SourceStalled, SourceTruncated, SourceUnavailable
from penstock.storage.io_uring import Uring
from penstock.storage.local import typed_error
from penstock.waits import start_thread


class Queued(NamedTuple):
    """A read for the ring: file bytes `[offset, offset + nbytes)` of `fd` to `address`.

    Attributes:
        memory: an object that keeps the memory at `address`.
    """

    fd: int
    offset: int
    address: int
    nbytes: int
    uri: str
    memory: object


class RingItem(WorkItem, Protocol):
    """A work item that a ring can carry out: `queue`, `arrived`, then `finish` or `abandon`."""

    def queue(self) -> Queued | Literal["later"] | None:
        """Return the read, its buffer acquired; None: run the item as any other; "later": there is no room now."""
        ...

    def arrived(self) -> PendingItem | None:
        """Copy the bytes to their places, or start a device's copy: the queued read is complete."""
        ...


READS_AHEAD = 4
"""Reads that wait in the kernel for a worker: one that has ended a read begins the next without waiting for Python."""

_WAIT_S = 0.1
"""Longest stay in the kernel before looking whether the work was stopped."""


_lost: list[tuple[Uring, list[object]]] = []
"""Rings that failed and the memory of their reads in flight, to which the kernel may write until the process ends."""


@dataclass(slots=True)
class _Flying:
    item: RingItem
    read: Queued
    start: float
    num_read: int = 0


class RingFetch:
    """Executor of fetch items on a ring; its thread also starts and awaits the copies of what was read.

    One thread for both: two threads that hand over every chunk of a 55 GB/s stream spend their time on the GIL.
    `place` takes the place items of reads that the threads carried out.

    Args:
        ring: of at least `num_reads + READS_AHEAD` entries; closed with the executor.
        num_reads: that the kernel's workers carry out at the same time.
        threads: takes the items that do not suit the ring; closed with this one.
        ticket: stopped by the first error of an item.
        trace: where spans go.
        stall_s: a read in flight longer than this fails the ticket.
    """

    name = "fetch"

    def __init__(
        self, ring: Uring, num_reads: int, threads: Executor, ticket: RunState, *, trace: Trace, stall_s: float
    ) -> None:
        self.place = HostedExecutor("place", ticket, trace=trace, stall_s=stall_s, wake=self._wake)
        self._ring = ring
        self._depth = num_reads + (READS_AHEAD if ring.limits_workers else 0)
        self._threads = threads
        self._ticket = ticket
        self._trace = trace
        self._stall_s = stall_s
        self._items: Iterator[RingItem] = iter(())
        # The item that was taken out of `items` and had to wait.
        self._next: RingItem | None = None
        self._tokens = itertools.count()
        self._state = threading.Condition()
        self._closed = False
        self._flying: dict[int, _Flying] = {}
        self._is_lost = False
        self._thread: threading.Thread | None = None

    def is_busy(self) -> bool:
        """Return whether a read or a copy is in flight."""
        return bool(self._flying) or self._threads.is_busy() or self.place.is_busy()

    def start(self, items: Iterable[RingItem]) -> None:
        """Carry out all items, in their order. Call it once.

        The ring's thread makes each item when it has room for it: to make thousands takes milliseconds, in which the
        first reads can be under way already.
        """
        self._items = iter(items)
        thread = threading.Thread(target=self._work, name="penstock-fetch-ring", daemon=True)
        start_thread(thread)
        # Stored once it runs: `close` joins only a thread that was started.
        self._thread = thread

    def close(self) -> None:
        """See `Executor.close`; what was posted to `place` is carried out or abandoned too."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join()
        # After the ring's thread, which posts to these threads; before `place`, to which they post.
        self._threads.close()
        self.place.close()
        if not self._is_lost:
            self._ring.close()

    def _wake(self) -> None:
        """Let the ring's thread look for posted items, unless it is the one that posted."""
        if self._thread is not None and threading.get_ident() == self._thread.ident:
            return
        with self._state:
            self._state.notify()

    def _work(self) -> None:
        """Carry out the items: the body of the thread."""
        # After an error, whose ticket is stopped now, the loop goes on with what is in flight: the kernel and the
        # device use buffers that are freed once this thread has ended.
        while isinstance(guarded(self._ticket, self._carry_out), RunFailed):
            time.sleep(POLL_S)

    def _carry_out(self) -> None:
        while True:
            self._submit()
            is_placing = self.place.turn()
            if self._flying:
                # Short while a device copies: a buffer that came free is a read that can start.
                self._complete(POLL_S if is_placing or self._threads.is_busy() else _WAIT_S)
                continue
            with self._state:
                if self._next is None and not self.place.has_items():
                    if self._closed and not is_placing:
                        return
                    self._state.wait(POLL_S if is_placing else _WAIT_S)

    def _submit(self) -> None:
        """Put items in flight while there is room for them."""
        while len(self._flying) < self._depth:
            if self._ticket.stopped:
                # Those that were not made yet hold nothing.
                self._items = iter(())
            item = self._next or next(self._items, None)
            self._next = None
            if item is None:
                return
            if self._ticket.stopped:
                item.abandon()
                return
            has_begun = guarded(self._ticket, partial(self._begin, item))
            if isinstance(has_begun, RunFailed):
                item.abandon()
            elif not has_begun:
                self._next = item
                # With reads in flight their completion is waited for instead, in `_complete`.
                if not self._flying:
                    with self._state:
                        self._state.wait(POLL_S)
                return

    def _begin(self, item: RingItem) -> bool:
        """Put an item in flight, or post it to the threads; False: there is no room for it now."""
        read = item.queue()
        if read == "later":
            return False
        if read is None:
            self._threads.post(item)
            return True
        token = next(self._tokens)
        flying = _Flying(item, read, time.perf_counter())
        self._ring.queue_read(read.fd, read.offset, read.address, read.nbytes, token)
        # Stored last: a read that could not be queued never completes, and the thread would wait for it for ever.
        self._flying[token] = flying
        return True

    def _complete(self, timeout_s: float) -> None:
        """Wait for completions and pass them on."""
        try:
            completions = self._ring.wait(timeout_s)
        except OSError as error:
            self._lose(error)
            return
        now = time.perf_counter()
        if not completions:
            self._look_for_stalls(now)
        for token, result in completions:
            # Guarded one by one: an error in one must not drop the others, which were taken out of the ring.
            guarded(self._ticket, partial(self._end_read, token, result, now))

    def _end_read(self, token: int, result: int, now: float) -> None:
        """Start the copy of a read that is complete; queue the rest of one that is not; abandon one that failed."""
        flying = self._flying.pop(token)
        if result > 0 and flying.num_read + result < flying.read.nbytes:
            # The kernel may read less than it was asked for: the rest is queued under the same number.
            flying.num_read += result
            at, left = flying.num_read, flying.read.nbytes - flying.num_read
            self._ring.queue_read(flying.read.fd, flying.read.offset + at, flying.read.address + at, left, token)
            self._flying[token] = flying
            return
        item = flying.item
        if result <= 0:
            self._ticket.fail(_fault(flying, -result))
            item.abandon()
            return
        self._trace.add(self.name, item.name, flying.start, now, flying.read.nbytes)
        copy = RunFailed() if self._ticket.stopped else guarded(self._ticket, item.arrived)
        if isinstance(copy, RunFailed):
            item.abandon()
        else:
            self.place.watch(item, copy, now)

    def _lose(self, error: OSError) -> None:
        """End the reads in flight after an error of the ring itself: no completion can be received any more."""
        self._ticket.fail(SourceUnavailable(f"io_uring failed: {error}", hint="set PENSTOCK_IO_URING=0"))
        # Not abandoned: the kernel may still write to their buffers, which must not be used or freed.
        _lost.append((self._ring, [flying.read.memory for flying in self._flying.values()]))
        self._is_lost = True
        self._flying.clear()

    def _look_for_stalls(self, now: float) -> None:
        for flying in self._flying.values():
            if now - flying.start > self._stall_s:
                # Not abandoned: the kernel still writes to its buffer, so `close` waits for it.
                self._ticket.fail(SourceStalled(f"{flying.item.name}: no byte for {self._stall_s} s"))


class HostedExecutor:
    """An executor without a thread: the ring's thread carries out its items, by `turn`.

    Args:
        name, ticket, trace, stall_s: see `Executor`.
        wake: called when an item was posted, from the posting thread.
    """

    def __init__(self, name: str, ticket: RunState, *, trace: Trace, stall_s: float, wake: Callable[[], None]) -> None:
        self._ticket = ticket
        self._loop = Executor(name, 1, ticket, trace=trace, stall_s=stall_s)
        # In the order of posting, without a heap: an item is posted when its read arrives, and waits for no other.
        self._items: deque[WorkItem] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._wake = wake

    def is_busy(self) -> bool:
        """Return whether an item is in flight."""
        return bool(self._in_flight)

    def has_items(self) -> bool:
        """Return whether a posted item waits for its turn."""
        return bool(self._items)

    def post(self, *items: WorkItem) -> None:
        """Queue items, from any thread."""
        self._items.extend(items)
        self._wake()

    def watch(self, item: WorkItem, copy: PendingItem | None, start: float) -> None:
        """Finish an item when its copy, which the hosting thread has started, is done; None: it is done."""
        if copy is None:
            guarded(self._ticket, item.finish)
        else:
            self._in_flight.append(InFlight(copy, item, start))

    def turn(self) -> bool:
        """Start what was posted, finish what is done; return whether something is still in flight."""
        while self._items:
            self._loop.run_item(self._items.popleft(), self._in_flight)
        while self._in_flight and self._loop.retire(self._in_flight):
            pass
        return bool(self._in_flight)

    def close(self) -> None:
        """Carry out or abandon what is left. Order: after the hosting thread has ended."""
        while self.turn():
            time.sleep(POLL_S)


def _fault(flying: _Flying, code: int) -> SourceError:
    """Return the error of a read that ended with this errno; 0: the file ended."""
    span = (flying.read.offset + flying.num_read, flying.read.offset + flying.read.nbytes)
    if code:
        return typed_error(OSError(code, os.strerror(code)), flying.read.uri, span)
    return SourceTruncated("file ended before the bytes its header promises", uri=flying.read.uri, byte_range=span)
