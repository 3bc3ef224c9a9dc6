"""Ctrl-C (SIGINT) at moments when the program can act on it, so that an interrupted call leaves nothing behind.

In / Out: nothing. Not here: other signals, handlers that the program installed itself (they stay as they are).

Python raises KeyboardInterrupt between any two steps of the main thread: after a descriptor was opened and before it
was stored, after a thread was started and before it was noted, or in a finalizer, where it is printed and lost. So the
verbs run inside `deferred`: the handler only notes the signal, waits ask `raise_if_noted`, the end of the block raises.
All of it does nothing in other threads, and where SIGINT has another handler than Python's own.
"""

from __future__ import annotations

# The C functions: `signal.signal` spends 7 us on making an enum of the handler before.
import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

LOOK_S = 0.2
"""Longest wait inside `deferred` between two looks for a signal: what feels immediate to a user."""

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


class postponed(deferred):
    """`deferred` for finalizers (`__del__`), whose exceptions Python swallows: the signal is sent again soon after."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost and _end():
            # No thread can be started while the interpreter ends: the signal has nothing left to end then.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_send_again, name="penstock-interrupt", daemon=True).start()


class let_through:
    """A part of a `deferred` block in which SIGINT raises at once: around a library's call that may take long.

    The call must free by itself what it holds when it is interrupted.
    """

    __slots__ = ("_is_inside",)

    def __init__(self) -> None:
        self._is_inside = False

    def __enter__(self) -> Self:
        if is_deferring():
            raise_if_noted()
            self._is_inside = True
            if _end():  # it came since the line before the last
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
    """Return how long a wait of `seconds` may last between two calls of `raise_if_noted`."""
    return min(seconds, LOOK_S) if is_deferring() else seconds


def _begin() -> bool:
    """Note signals from now on; False if that is so already, or is not for this thread or program to do."""
    global _is_deferring
    if threading.current_thread() is not threading.main_thread() or _is_deferring:
        return False
    if _signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    _signal.signal(signal.SIGINT, _note)
    _is_deferring = True
    return True


def _end() -> bool:
    """Let signals raise again; whether one was noted."""
    global _is_deferring, _noted_at, _is_raised
    is_noted = False
    try:
        before = _signal.signal(signal.SIGINT, signal.default_int_handler)
        if before is not _note and before is not signal.default_int_handler:
            _signal.signal(signal.SIGINT, before)  # something called inside the block installed a handler
    finally:
        # Also when the very next signal raises in the line above: else the next block would end by this one's signal.
        is_noted, _noted_at = _noted_at is not None, None
        _is_deferring = _is_raised = False
    return is_noted


def _note(number: int, frame: FrameType | None) -> None:
    global _noted_at
    now = time.monotonic()
    if _noted_at is None:
        _noted_at = now
    elif now - _noted_at > _INSISTS_S:
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt


def _send_again() -> None:
    time.sleep(_SEND_AGAIN_S)
    identity = threading.main_thread().ident
    if identity is not None:
        signal.pthread_kill(identity, signal.SIGINT)  # not to the process: this also ends a system call it waits in


def _forked() -> None:
    """End the block in a forked child of another thread: its parent's main thread, which is in it, does not exist."""
    if _is_deferring:
        _end()


os.register_at_fork(after_in_child=_forked)
