"""The fetch executor for files in the page cache: one thread and the kernel's workers, instead of many threads.

In: fetch steps, by priority. Out: the same effects as `executors.Executor`, which takes the steps that do not suit.
Not here: the ring (`storage.io_uring`), what a step reads (`run`).

    post --heap--> step.queue() --None--> the executor of threads (not cached, remote, straight into slabs)
                      `--Queued--> ring --completion--> step.arrived() --place step--> the same thread
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from penstock.engine.executors import Executor, Failed, HostedExecutor, Step, guarded, start_thread
from penstock.engine.trace import Trace
from penstock.errors import SourceError, SourceStalled, SourceTruncated, SourceUnavailable
from penstock.storage.io_uring import Uring
from penstock.storage.local import typed_error


class Queued(NamedTuple):
    """One read for the ring: file bytes `[offset, offset + nbytes)` of `fd` to `address`."""

    fd: int
    offset: int
    address: int
    nbytes: int
    uri: str


class FetchStep(Step, Protocol):
    """A step that a ring can carry out."""

    def queue(self) -> Queued | Literal["later"] | None:
        """Return the read, its buffer acquired; None: run the step as any other; "later": there is no room now."""
        ...

    def arrived(self) -> None:
        """The queued read is complete."""
        ...


_WAIT_S = 0.1
"""Longest stay in the kernel before looking whether the work was stopped."""

_POLL_S = 5e-4
"""The same while a device copies: a buffer that came free is a read that can start."""


@dataclass(slots=True)
class _Flying:
    step: FetchStep
    read: Queued
    start: float
    num_read: int = 0


class RingFetch:
    """Executor of fetch steps on a ring; its thread also carries out the place steps posted to `place`.

    One thread for both: two threads that hand over every chunk of a 55 GB/s stream spend their time on the GIL.

    Args:
        ring: of at least `depth` entries; closed with the executor.
        depth: reads in flight, each by a worker of the kernel.
        threads: takes the steps that do not suit the ring; closed with this one.
        trace: where spans go.
        stall_s: a read in flight longer than this fails its ticket.
    """

    name = "fetch"

    def __init__(self, ring: Uring, depth: int, threads: Executor, *, trace: Trace, stall_s: float) -> None:
        self.num_threads = depth
        self.place = HostedExecutor("place", trace=trace, stall_s=stall_s, wake=self._wake)
        self._ring, self._depth, self._threads, self._trace, self._stall_s = ring, depth, threads, trace, stall_s
        self._heap: list[tuple[int, int, FetchStep]] = []
        self._sequence = itertools.count()
        self._state = threading.Condition()
        self._closed = False
        self._flying: dict[int, _Flying] = {}
        self._thread: threading.Thread | None = None

    def is_busy(self) -> bool:
        """Return whether a read is in flight."""
        return bool(self._flying) or self._threads.is_busy()

    def post(self, *steps: FetchStep) -> None:
        """Queue steps."""
        with self._state:
            for step in steps:
                heapq.heappush(self._heap, (step.priority, next(self._sequence), step))
            if self._thread is None and steps:
                thread = threading.Thread(target=self._work, name="penstock-fetch-ring", daemon=True)
                start_thread(thread)
                self._thread = thread
            self._state.notify()

    def close(self) -> None:
        """See `Executor.close`; what was posted to `place` is carried out or abandoned too."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join()
        self._threads.close()
        self.place.close()
        self._ring.close()

    def _wake(self) -> None:
        if threading.current_thread() is self._thread:
            return
        with self._state:
            self._state.notify()

    def _work(self) -> None:
        while True:
            self._submit()
            is_placing = self.place.turn()
            if self._flying:
                self._complete(_POLL_S if is_placing or self._threads.is_busy() else _WAIT_S)
                continue
            with self._state:
                if not self._heap and not self.place.has_steps():
                    if self._closed and not is_placing:
                        return
                    self._state.wait(_POLL_S if is_placing else _WAIT_S)

    def _submit(self) -> None:
        """Put steps in flight while there is room for them."""
        while len(self._flying) < self._depth and self._heap:
            entry = heapq.heappop(self._heap)  # one call that holds the GIL: no lock, of which there would be 10,000
            step = entry[2]
            if step.ticket.stopped:
                step.abandon()
                continue
            read = guarded(step.ticket, step.queue)
            if isinstance(read, Failed):
                step.abandon()
            elif read is None:
                self._threads.post(step)
            elif read == "later":
                with self._state:
                    heapq.heappush(self._heap, entry)
                    if not self._flying:
                        self._state.wait(_POLL_S)
                return
            else:
                self._flying[entry[1]] = _Flying(step, read, time.perf_counter())
                self._ring.queue_read(read.fd, read.offset, read.address, read.nbytes, entry[1])

    def _complete(self, timeout_s: float) -> None:
        """Wait for completions and hand them on."""
        try:
            completions = self._ring.wait(timeout_s)
        except OSError as error:
            # The ring itself failed: nothing more completes, so every read in flight ends here.
            for flying in self._flying.values():
                flying.step.ticket.fail(SourceUnavailable(f"io_uring failed: {error}", hint="set PENSTOCK_IO_URING=0"))
                flying.step.abandon()
            self._flying.clear()
            return
        now = time.perf_counter()
        if not completions:
            self._look_for_stalls(now)
        for token, result in completions:
            flying = self._flying[token]
            if result > 0 and flying.num_read + result < flying.read.nbytes:
                flying.num_read += result
                at, left = flying.num_read, flying.read.nbytes - flying.num_read
                self._ring.queue_read(flying.read.fd, flying.read.offset + at, flying.read.address + at, left, token)
                continue
            del self._flying[token]
            if result <= 0:
                flying.step.ticket.fail(_fault(flying, -result))
                flying.step.abandon()
                continue
            self._trace.add(self.name, flying.step.name, flying.start, now, flying.read.nbytes)
            if isinstance(guarded(flying.step.ticket, flying.step.arrived), Failed):
                flying.step.abandon()

    def _look_for_stalls(self, now: float) -> None:
        for flying in self._flying.values():
            if now - flying.start > self._stall_s:
                flying.step.ticket.fail(SourceStalled(f"{flying.step.name}: no byte for {self._stall_s} s"))


def _fault(one: _Flying, code: int) -> SourceError:
    """Return the error of a read that ended with this errno; 0: the file ended."""
    span = (one.read.offset + one.num_read, one.read.offset + one.read.nbytes)
    if code:
        return typed_error(OSError(code, os.strerror(code)), one.read.uri, span)
    return SourceTruncated("file ended before the bytes its header promises", uri=one.read.uri, byte_range=span)
