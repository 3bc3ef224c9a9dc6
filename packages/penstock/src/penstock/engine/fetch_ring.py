"""The fetch executor for files in the page cache, with one thread and io_uring workers instead of many threads.

Items that the ring cannot read are posted to an executor with threads.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock.engine.run import POLL_S, Executor, InFlight, PendingItem, RunFailed, RunState, WorkItem, guarded
from penstock.engine.trace import Trace
from penstock.errors import SourceError, SourceStalled, SourceTruncated, SourceUnavailable
from penstock.storage.io_uring import Uring
from penstock.storage.local import typed_error
from penstock.waits import start_thread


class Queued(NamedTuple):
    """A read of bytes `[offset, offset + nbytes)` from file `fd` to `address`. `memory` keeps the address valid."""

    fd: int
    offset: int
    address: int
    nbytes: int
    uri: str
    memory: object


class RingItem(WorkItem, Protocol):
    """A work item for a ring, which calls `queue`, `arrived`, and then `finish` or `abandon`."""

    def queue(self) -> Queued | Literal["no buffer", "held"] | None:
        """Acquire a buffer and return the read, or return None to use a thread.

        Return "no buffer" if no buffer is free, or "held" if the item must wait until `RingFetch.wake` is called.
        """

    def arrived(self) -> PendingItem | None:
        """Copy the bytes of the completed read to their destination, or start a copy on a device."""


READS_AHEAD = 4
"""Number of reads that wait in the kernel, so that a worker begins the next read without Python."""

_WAIT_S = 0.1
"""Longest wait in the kernel before checking whether the work was stopped, in seconds."""


_lost: list[tuple[Uring, list[object]]] = []
"""Failed rings with the memory of their reads in flight, which the kernel may write to until the process exits."""


class _RingRead(msgspec.Struct):
    item: RingItem
    read: Queued
    start: float
    num_read: int = 0


class RingFetch:
    """An executor for fetch items on a ring. The ring's thread also starts and awaits the copies of the read bytes.

    At 55 GB/s, two separate threads would mostly wait for the GIL. `place` copies the bytes that `threads` read.

    Args:
        ring: ring with at least `2 * (num_reads + READS_AHEAD)` entries. This executor closes it.
        num_reads: number of reads that the kernel's workers execute concurrently.
        threads: executor for the items that the ring cannot read. This executor closes it.
        stall_s: seconds that a read may be in flight before the ticket fails.
    """

    name = "fetch"

    def __init__(
        self, ring: Uring, num_reads: int, threads: Executor, ticket: RunState, *, trace: Trace, stall_s: float
    ) -> None:
        self.place = HostedExecutor("place", ticket, trace=trace, stall_s=stall_s, wake=self.wake)
        self._ring = ring
        self._depth = num_reads + (READS_AHEAD if ring.limits_workers else 0)
        self._threads = threads
        self._ticket = ticket
        self._trace = trace
        self._stall_s = stall_s
        self._items: Iterator[RingItem] = iter(())
        self._next: RingItem | None = None
        self._tokens = itertools.count()
        self._state = threading.Condition()
        self._closed = False
        self._reads: dict[int, _RingRead] = {}
        # Completed reads whose bytes are still in their buffers.
        self._arrived: deque[tuple[_RingRead, int, float]] = deque()
        self._is_lost = False
        self._thread: threading.Thread | None = None

    def is_busy(self) -> bool:
        """Return whether a read or a copy is in flight."""
        return bool(self._reads or self._arrived) or self._threads.is_busy() or self.place.is_busy()

    def start(self, items: Iterable[RingItem]) -> None:
        """Execute all items in order. The ring's thread takes an item when the ring has a free entry. Call it once."""
        self._items = iter(items)
        thread = threading.Thread(target=self._work, name="penstock-fetch-ring", daemon=True)
        start_thread(thread)
        # Store the thread once it has started, because `close` can join only a started thread.
        self._thread = thread

    def close(self) -> None:
        """Close like `Executor.close`. Items that were posted to `place` are executed or abandoned too."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join()
        # Close in the order of posting: the ring's thread, these threads, and `place`.
        self._threads.close()
        self.place.close()
        if not self._is_lost:
            self._ring.close()

    def wake(self) -> None:
        """Let the ring's thread try again to start an item that had to wait."""
        if self._thread is not None and threading.get_ident() == self._thread.ident:
            return
        with self._state:
            self._state.notify()

    def _work(self) -> None:
        # An error stops the ticket. Continue until nothing is in flight, because the kernel and the device use buffers
        # that are freed after this thread has ended.
        while isinstance(guarded(self._ticket, self._carry_out), RunFailed):
            time.sleep(POLL_S)

    def _carry_out(self) -> None:
        while True:
            # Start reads before a batch of reads is copied, which may be large if this thread was not scheduled.
            is_placing = self.place.turn()
            self._submit()
            if self._arrived:
                # While the workers have reads, collect several for one call, which takes 5 to 20 us.
                if 3 * self._ring.num_unsubmitted >= len(self._reads):
                    self._complete(0.0)
            elif self._reads:
                # Wait only briefly while a device copies, because every released buffer lets another read start.
                is_busy = is_placing or self._threads.is_busy() or self.place.has_items()
                self._complete(POLL_S if is_busy else _WAIT_S)
            if self._arrived:
                guarded(self._ticket, partial(self._end_read, *self._arrived.popleft()))
            elif not self._reads:
                with self._state:
                    if self._next is None and not self.place.has_items():
                        if self._closed and not self.place.is_busy():
                            return
                        self._state.wait(POLL_S if is_placing else _WAIT_S)

    def _submit(self) -> None:
        while len(self._reads) < self._depth:
            if self._ticket.stopped:
                # Items that were not created yet hold no resources.
                self._items = iter(())
            item = self._next or next(self._items, None)
            self._next = None
            if item is None:
                return
            if self._ticket.stopped:
                item.abandon()
                return
            why_later = guarded(self._ticket, partial(self._begin, item))
            if isinstance(why_later, RunFailed):
                item.abandon()
            elif why_later:
                self._next = item
                # If reads are in flight, `_complete` waits for their ends, so do not wait here.
                if not self._reads and not self._arrived:
                    is_idle = why_later == "held" and not self.place.is_busy() and not self.place.has_items()
                    with self._state:
                        self._state.wait(_WAIT_S if is_idle else POLL_S)
                return

    def _begin(self, item: RingItem) -> str:
        """Start an item on the ring, or post it to the threads. Return why the item must wait, or an empty string."""
        read = item.queue()
        if read == "no buffer" or read == "held":
            return read
        if read is None:
            self._threads.post(item)
            return ""
        self._queue(_RingRead(item, read, time.perf_counter()))
        return ""

    def _queue(self, in_flight: _RingRead) -> None:
        read, at, token = in_flight.read, in_flight.num_read, next(self._tokens)
        self._ring.queue_read(read.fd, read.offset + at, read.address + at, read.nbytes - at, token)
        # Store the read last, because a read that could not be queued never completes.
        self._reads[token] = in_flight

    def _complete(self, timeout_s: float) -> None:
        try:
            completions = self._ring.wait(timeout_s)
        except OSError as error:
            self._drop_ring(error)
            return
        now = time.perf_counter()
        for in_flight in () if completions else self._reads.values():
            if now - in_flight.start > self._stall_s:
                # Do not abandon the item, because the kernel may still write to its buffer.
                self._ticket.fail(SourceStalled(f"{in_flight.item.name}: no byte for {self._stall_s} s"))
        self._arrived.extend((self._reads.pop(token), result, now) for token, result in completions)

    def _end_read(self, in_flight: _RingRead, result: int, now: float) -> None:
        is_short = result > 0 and in_flight.num_read + result < in_flight.read.nbytes
        if is_short and not self._ticket.stopped:
            in_flight.num_read += result
            self._queue(in_flight)  # the rest of a short read
            return
        item = in_flight.item
        if result <= 0:
            self._ticket.fail(_fault(in_flight, -result))
            item.abandon()
            return
        self._trace.add(self.name, item.name, in_flight.start, now, in_flight.read.nbytes)
        copy = RunFailed() if self._ticket.stopped else guarded(self._ticket, item.arrived)
        if isinstance(copy, RunFailed):
            item.abandon()
        else:
            self.place.watch(item, copy, now)

    def _drop_ring(self, error: OSError) -> None:
        """Drop the reads in flight after the ring failed, because they can never complete."""
        self._ticket.fail(SourceUnavailable(f"io_uring failed: {error}", hint="set PENSTOCK_IO_URING=0"))
        # Do not abandon the items, because the kernel may still write to their buffers.
        _lost.append((self._ring, [in_flight.read.memory for in_flight in self._reads.values()]))
        self._is_lost = True
        self._reads.clear()


class HostedExecutor:
    """An executor whose items the ring's thread executes by calling `turn`. Posting an item calls `wake`."""

    def __init__(self, name: str, ticket: RunState, *, trace: Trace, stall_s: float, wake: Callable[[], None]) -> None:
        self._ticket = ticket
        self._loop = Executor(name, 1, ticket, trace=trace, stall_s=stall_s)
        # Items run in the order in which their reads complete, so no heap is needed.
        self._items: deque[WorkItem] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._wake = wake

    def is_busy(self) -> bool:
        """Return whether an item is in flight."""
        return bool(self._in_flight)

    def has_items(self) -> bool:
        """Return whether a posted item is waiting."""
        return bool(self._items)

    def post(self, *items: WorkItem) -> None:
        """Queue items, from any thread."""
        self._items.extend(items)
        self._wake()

    def watch(self, item: WorkItem, copy: PendingItem | None, start: float) -> None:
        """Finish an item when its copy is done. If `copy` is None, finish the item now."""
        if copy is None:
            guarded(self._ticket, item.finish)
        else:
            self._in_flight.append(InFlight(copy, item, start))

    def turn(self) -> bool:
        """Start posted items and finish completed items. Return whether an item is still in flight."""
        while self._items:
            self._loop.run_item(self._items.popleft(), self._in_flight)
        while self._in_flight and self._loop.retire(self._in_flight):
            pass
        return bool(self._in_flight)

    def close(self) -> None:
        """Execute or abandon the remaining items. Call this after the ring's thread has ended."""
        while self.turn():
            time.sleep(POLL_S)


def _fault(in_flight: _RingRead, code: int) -> SourceError:
    span = (in_flight.read.offset + in_flight.num_read, in_flight.read.offset + in_flight.read.nbytes)
    if code:
        return typed_error(OSError(code, os.strerror(code)), in_flight.read.uri, span)
    return SourceTruncated("the file is shorter than its header promises", uri=in_flight.read.uri, byte_range=span)
