"""Threads of runs: started where the system allows it, and kept from run to run where runs follow each other.

In: a function and a name. Out: a thread that calls it.
Not here: what the threads do (`run`), the error where there can be no thread (`waits`), pools of other libraries.

A thread takes 0.1 to 2 ms to start where others of the process have Python to run, and a version of a sync has ten.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol
from weakref import WeakSet

from penstock.lifecycle import Closeable, is_ending, release_after_fork
from penstock.waits import start_thread

MAX_IDLE = 32
"""Most threads that wait for their next work: a run of a sync has 16 reads at once, and a few others."""

IDLE_S = 600.0
"""Longest wait for the next work; training steps, between which a sync has none, take minutes at most."""


class Joinable(Protocol):
    """A thread, or the call that a kept thread makes."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the function has returned."""
        ...


class Call:
    """A call that a kept thread makes."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.work: Callable[[], None] | None = work
        self.name = name
        self._ended = threading.Event()

    def run(self) -> None:
        """Make the call. An error of it is the thread's, as of any thread."""
        work, self.work = self.work, None
        assert work is not None
        work()

    def end(self) -> None:
        """Let those go on that wait for the end."""
        self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        """See `Joinable.join`."""
        self._ended.wait(timeout)


class _Kept(NamedTuple):
    """A thread, and where it gets its calls; None: it ends."""

    calls: SimpleQueue[Call | None]
    thread: threading.Thread


class KeptThreads(Closeable):
    """Threads that make one call after another, for the runs of one owner. Any thread may use it.

    Leaving it ends the threads that wait, and joins them; each other one ends after its call. A call leaves the device,
    the stream and the context variables of its thread as it found them: the next one may be of another run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The last one in is the first one out: its stack is still in the processor's cache.
        self._idle: list[_Kept] = []
        self._is_closed = False
        _alive.add(self)

    def forget(self) -> None:
        """In a forked child: forget the threads that wait, which only the parent has, and the lock one may have had."""
        self._lock = threading.Lock()
        self._idle = []

    def start(self, work: Callable[[], None], name: str, *, is_needed: bool = True) -> Joinable | None:
        """Make a call in a thread that waits, or in a new one; None if there is none and this one is not needed.

        Raises:
            DestinationError: the system allows no more threads, and this one is needed.
        """
        call = Call(work, name)
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            kept.calls.put(call)
            return call
        calls: SimpleQueue[Call | None] = SimpleQueue()
        calls.put(call)
        return call if _start_daemon(partial(self._work, calls), name, is_needed=is_needed) else None

    def close(self) -> None:
        """See the class. Idempotent."""
        if is_ending():
            return
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for kept in idle:
            kept.calls.put(None)
        for kept in idle:
            # At once: it waits, and has no call. But for this one: a finalizer may close this just before it waits.
            if kept.thread is not threading.current_thread():
                kept.thread.join()

    def _work(self, calls: SimpleQueue[Call | None]) -> None:
        """Make the calls of one thread, until it is told to end or there are enough that wait."""
        me = _Kept(calls, threading.current_thread())
        while (call := self._next(me)) is not None:
            me.thread.name = call.name
            stays = False
            try:
                call.run()
                stays = True
            finally:
                # Before its end is told: who waits for it may have the next call.
                stays = stays and self._gives_back(me)
                call.end()
            # While it waits: the call may hold memory of the size of the weights.
            del call
            if not stays:
                return
            me.thread.name = "penstock-idle"

    def _next(self, me: _Kept) -> Call | None:
        """Return the next call of a thread; None: it ends."""
        try:
            return me.calls.get(timeout=IDLE_S)
        except Empty:
            with self._lock:
                if me in self._idle:
                    self._idle.remove(me)
                    return None
        # It was taken for a call just now, or to end. Bounded: an interrupt may have ended the one who took it.
        with contextlib.suppress(Empty):
            return me.calls.get(timeout=IDLE_S)
        return None

    def _gives_back(self, me: _Kept) -> bool:
        """Keep a thread for the next call; return whether it is wanted."""
        with self._lock:
            if self._is_closed or len(self._idle) >= MAX_IDLE:
                return False
            self._idle.append(me)
            return True


_alive: WeakSet[KeptThreads] = release_after_fork(KeptThreads.forget)


def start_call(
    work: Callable[[], None], name: str, threads: KeptThreads | None, *, is_needed: bool = True
) -> Joinable | None:
    """Make a call in one of `threads`, or in a thread of its own if there are none of them; see `KeptThreads.start`."""
    if threads is not None:
        return threads.start(work, name, is_needed=is_needed)
    return _start_daemon(work, name, is_needed=is_needed)


def _start_daemon(work: Callable[[], None], name: str, *, is_needed: bool) -> threading.Thread | None:
    # A daemon: one that hangs in a system call (a dead NFS server) must not keep an ending process alive.
    thread = threading.Thread(target=work, name=name, daemon=True)
    return thread if start_thread(thread, is_needed=is_needed) else None
