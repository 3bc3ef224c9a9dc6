"""Threads that runs can reuse, because starting a thread takes up to 2 ms."""

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
"""Maximum number of idle threads. A sync has 16 concurrent reads and a few other items."""

IDLE_S = 600.0
"""Seconds after which an idle thread ends. A sync is idle during training steps, which take minutes at most."""


class Joinable(Protocol):
    """An object to join: a thread, or a call in a reusable thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread's function has returned."""


class Call:
    """A call in a reusable thread."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.work: Callable[[], None] | None = work
        self.name = name
        self._ended = threading.Event()

    def run(self) -> None:
        """Make the call. An error of the call propagates."""
        work, self.work = self.work, None
        assert work is not None
        work()

    def end(self) -> None:
        """Wake the threads that wait in `join`."""
        self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        """See `Joinable.join`."""
        self._ended.wait(timeout)


class _Kept(NamedTuple):
    """A thread and the queue of its calls. None in the queue ends the thread."""

    calls: SimpleQueue[Call | None]
    thread: threading.Thread


class KeptThreads(Closeable):
    """Reusable threads, each of which makes one call after another, for the runs of one owner. Thread-safe.

    Leaving the `with` block ends and joins the idle threads. A busy thread ends after its call. A call must restore the
    device, the stream and the context variables of its thread for the next call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The last idle thread is used first, because its stack is still in the CPU cache.
        self._idle: list[_Kept] = []
        self._is_closed = False
        _alive.add(self)

    def forget(self) -> None:
        """Reset the idle threads and the lock in a forked child, because the threads exist only in the parent."""
        self._lock = threading.Lock()
        self._idle = []

    def start(self, work: Callable[[], None], name: str, *, is_needed: bool = True) -> Joinable | None:
        """Make a call in an idle thread or in a new thread.

        If no thread can start, raise DestinationError, or return None if `is_needed` is False.
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
        """End and join the idle threads. Busy threads end after their call. Idempotent."""
        if is_ending():
            return
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for kept in idle:
            kept.calls.put(None)
        for kept in idle:
            # A finalizer may call this method in an idle thread.
            if kept.thread is not threading.current_thread():
                kept.thread.join()

    def _work(self, calls: SimpleQueue[Call | None]) -> None:
        me = _Kept(calls, threading.current_thread())
        while (call := self._next(me)) is not None:
            me.thread.name = call.name
            stays = False
            try:
                call.run()
                stays = True
            finally:
                # Become idle before waking the waiter, because it may start the next call at once.
                stays = stays and self._become_idle(me)
                call.end()
            # Drop the call, because it may keep memory as large as the weights alive.
            del call
            if not stays:
                return
            me.thread.name = "penstock-idle"

    def _next(self, me: _Kept) -> Call | None:
        try:
            return me.calls.get(timeout=IDLE_S)
        except Empty:
            with self._lock:
                if me in self._idle:
                    self._idle.remove(me)
                    return None
        # Another thread has removed this thread from the list to pass a call. The wait is bounded, because an interrupt
        # may have stopped the other thread.
        with contextlib.suppress(Empty):
            return me.calls.get(timeout=IDLE_S)
        return None

    def _become_idle(self, me: _Kept) -> bool:
        with self._lock:
            if self._is_closed or len(self._idle) >= MAX_IDLE:
                return False
            self._idle.append(me)
            return True


_alive: WeakSet[KeptThreads] = release_after_fork(KeptThreads.forget)


def start_call(
    work: Callable[[], None], name: str, threads: KeptThreads | None, *, is_needed: bool = True
) -> Joinable | None:
    """Make a call in one of the kept `threads`, or in a new thread if `threads` is None. See `KeptThreads.start`."""
    if threads is not None:
        return threads.start(work, name, is_needed=is_needed)
    return _start_daemon(work, name, is_needed=is_needed)


def _start_daemon(work: Callable[[], None], name: str, *, is_needed: bool) -> threading.Thread | None:
    # A daemon thread that hangs in a system call, for example on a dead NFS server, does not keep the process alive.
    thread = threading.Thread(target=work, name=name, daemon=True)
    return thread if start_thread(thread, is_needed=is_needed) else None
