"""Lifecycle of objects and calls in a process: closing, forked children, Ctrl-C, and settings of the process.

In / Out: nothing. Not here: what an object releases (each class), signals other than SIGINT.

- `Closeable`: a context manager for classes that have a `close`.
- `is_ending`: the interpreter ends, so nothing may wait for a thread.
- `release_after_fork`: in a forked child, release of locks, sockets, pages and transports that belong to its parent.
- `deferred` and its kin: Ctrl-C only at moments when the program can act on it. Python raises KeyboardInterrupt between
  any two steps of the main thread: after a descriptor was opened and before it was stored, after a thread was started
  and before it was noted, or in a finalizer, where it is printed and lost. So the verbs run inside `deferred`: the
  handler only notes the signal, waits call `raise_if_noted`, the end of the block raises. All of it does nothing in
  other threads, and where SIGINT has another handler than Python's own.
- `paused_gc`, `quick_handover`: settings of the whole process, while a load needs them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Protocol, Self, TypeVar
from weakref import WeakSet


class _Closes(Protocol):
    def close(self) -> None: ...


def is_ending() -> bool:
    """Return whether the interpreter ends.

    Python has stopped the daemon threads then, wherever they stood, and the locks that they held stay locked. Nothing
    that runs so late may wait: no finalizer, and no `with` block of a generator that the program left half read. The
    system frees what is still open.
    """
    return sys.is_finalizing()


class Closeable:
    """A context manager for classes that have a `close`. Does nothing while the interpreter ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        if not is_ending():
            self.close()


T = TypeVar("T")


def release_after_fork(let_go: Callable[[T], object]) -> WeakSet[T]:
    """Return a set of live objects; `let_go` is called for each in every child that is forked from now on."""
    # Weak: the set must not keep alive what its owner has dropped.
    alive: WeakSet[T] = WeakSet()

    def forked() -> None:
        # A copy: a release may drop the last reference to another member, and change the set.
        for member in list(alive):
            let_go(member)

    os.register_at_fork(after_in_child=forked)
    return alive


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised this error, in the midst of a system call of ours.

    A handler may raise a TimeoutError, which must not be taken for the timeout of a socket. Python calls handlers in
    the main thread alone, with the interrupted frame below them.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _codes_of_handlers()
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code not in handlers:
        frame = frame.tb_next
    return frame is not None


def _codes_of_handlers() -> set[object]:
    """Return the code of every signal handler that is written in Python."""
    codes = set[object]()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            # A bound method has the code of its function, an object the code of its class's `__call__`.
            function = handler if hasattr(handler, "__code__") else type(handler).__call__
            codes.add(getattr(function, "__code__", None))
    return codes - {None}


LOOK_S = 0.2
"""Longest wait inside `deferred` between two looks for a signal: it feels immediate to a user."""

_INSISTS_S = 2.0
"""A signal so long after the first one raises at once: the user still waits, so something hangs (a dead NFS server).
Not the second signal as such: shells and launchers often send one Ctrl-C twice."""

_SEND_AGAIN_S = 0.01
"""Pause before a signal that arrived in a finalizer is sent again: most finalizers take microseconds."""

# Only the main thread writes these.
_is_deferring = False
_noted_at: float | None = None
_is_raised = False


class deferred:
    """A block in which SIGINT is noted; its end raises KeyboardInterrupt if one was. Nests: the outermost raises."""

    __slots__ = ("_is_outermost",)

    def __init__(self) -> None:
        self._is_outermost = False

    def __enter__(self) -> Self:
        self._is_outermost = _begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost and _end() and (kind is None or not issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt


class defer_in_finalizer(deferred):
    """`deferred` for finalizers (`__del__`), whose exceptions Python swallows: the signal is sent again soon after."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost and _end():
            # RuntimeError: no thread can be started while the interpreter ends; nothing is left to be interrupted then.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_send_again, name="penstock-interrupt", daemon=True).start()


class allow_interrupts:
    """A part of a `deferred` block in which SIGINT raises at once: around a library's call that may take long.

    When it is interrupted, the call must release its resources by itself.
    """

    __slots__ = ("_is_inside",)

    def __init__(self) -> None:
        self._is_inside = False

    def __enter__(self) -> Self:
        if is_deferring():
            raise_if_noted()
            self._is_inside = True
            # A signal may have come since `raise_if_noted`.
            if _end():
                _begin()
                raise KeyboardInterrupt
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_inside:
            _begin()


def is_deferring() -> bool:
    """Return whether the calling thread is inside `deferred`."""
    return _is_deferring and threading.current_thread() is threading.main_thread()


def raise_if_noted() -> None:
    """Raise KeyboardInterrupt if a signal was noted; once in a block, so that cleaning up is not interrupted too."""
    global _is_raised
    if _noted_at is not None and not _is_raised and is_deferring():
        _is_raised = True
        raise KeyboardInterrupt


def longest_wait_s(seconds: float) -> float:
    """Return the part of a wait of `seconds` that may pass before `raise_if_noted` must be called again."""
    return min(seconds, LOOK_S) if is_deferring() else seconds


def _begin() -> bool:
    """Note signals from now on; return False if they are noted already, or this thread or program does not do that."""
    global _is_deferring
    if threading.current_thread() is not threading.main_thread() or _is_deferring:
        return False
    if _signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    # `_signal`'s functions: those of `signal` spend 7 us on making an enum of the handler before.
    _signal.signal(signal.SIGINT, _note)
    _is_deferring = True
    return True


def _end() -> bool:
    """Let signals raise again, and return whether one was noted."""
    global _is_deferring, _noted_at, _is_raised
    is_noted = False
    try:
        before = _signal.signal(signal.SIGINT, signal.default_int_handler)
        # A library that was called inside the block has installed a handler: it stays.
        if before is not _note and before is not signal.default_int_handler:
            _signal.signal(signal.SIGINT, before)
    finally:
        # Also when another signal raises in the lines above: else the next block would end by this one's signal.
        is_noted, _noted_at = _noted_at is not None, None
        _is_deferring = _is_raised = False
    return is_noted


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal; raise if the user sends one again well after the first: the handler inside `deferred`."""
    global _noted_at
    now = time.monotonic()
    if _noted_at is None:
        _noted_at = now
    elif now - _noted_at > _INSISTS_S:
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt


def _send_again() -> None:
    """Send SIGINT to the main thread: the body of a thread."""
    time.sleep(_SEND_AGAIN_S)
    identity = threading.main_thread().ident
    if identity is not None:
        # To the thread, not the process: this also ends a system call that it waits in.
        signal.pthread_kill(identity, signal.SIGINT)


def _forked() -> None:
    """End the block in a forked child."""
    # A fork by another thread: the main thread of the parent, which is inside the block, does not exist in the child.
    if _is_deferring:
        _end()


os.register_at_fork(after_in_child=_forked)


_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def paused_gc() -> Iterator[None]:
    """Stop automatic collection inside the block; nests, and several threads may be inside at once."""
    # Making 60,000 tensors sets off full collections of everything in the process: 5 us a tensor instead of 1 (measured
    # on 2 CPU cores, torch 2.13, with little else in the process).
    global _depth, _was_enabled
    with _lock:
        # Only the outermost block looks: an inner one would find collection disabled, and leave it so.
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()


HANDOVER_S = 5e-5
"""Longest that one thread keeps the GIL while another asks for it, while bytes move to a device; Python's own 5 ms are
60 chunks of 4 MiB at 55 GB/s. Source: benchmarks/results/h200x1_202611/load-history.md."""

_num_quick = 0
_interval_s = 0.0


@contextmanager
def quick_handover() -> Iterator[None]:
    """Set the GIL's switch interval to `HANDOVER_S` inside the block; nests, and several threads may be inside."""
    global _num_quick, _interval_s
    with _lock:
        if _num_quick == 0:
            _interval_s = sys.getswitchinterval()
            # Never longer than it was: the program may have set it shorter.
            sys.setswitchinterval(min(HANDOVER_S, _interval_s))
        _num_quick += 1
    try:
        yield
    finally:
        with _lock:
            # In a forked child it is 0 already.
            _num_quick = max(0, _num_quick - 1)
            if _num_quick == 0:
                sys.setswitchinterval(_interval_s)


def _end_quick() -> None:
    """Give a forked child its interval back: the threads that asked for a short one are not in it."""
    global _lock, _num_quick
    # Another thread may have had it at the moment of the fork.
    _lock = threading.Lock()
    if _num_quick:
        _num_quick = 0
        sys.setswitchinterval(_interval_s)


os.register_at_fork(after_in_child=_end_quick)
