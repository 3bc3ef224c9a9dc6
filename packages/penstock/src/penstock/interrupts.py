"""Ctrl-C only at moments when the program can act on it.

Python raises KeyboardInterrupt between any two steps of the main thread: after a descriptor was opened and before it
was stored, after a thread was started and before it was noted, or in a finalizer, where it is printed and lost. So the
verbs run inside `deferred`. There the handler only notes the signal, waits call `raise_if_noted`, and the end of the
block raises. Nothing of this happens in other threads, or where SIGINT has another handler than Python's own.

In / Out: nothing. Not here: signals other than SIGINT, but for `is_of_handler`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

LOOK_S = 0.2
"""Longest wait inside `deferred` between two looks for a signal: it feels immediate to a user."""
INSISTS_S = 2.0
"""A signal so long after the first one raises at once: the user still waits, so something hangs (a dead NFS server).
Not the second signal as such: shells and launchers often send one Ctrl-C twice."""
_SEND_AGAIN_S = 0.01
"""Pause before a signal that arrived in a finalizer is sent again: most finalizers take microseconds."""


class State(enum.Enum):
    """Where the main thread is."""

    OUTSIDE = enum.auto()
    """In no block: a signal raises."""
    DEFERRING = enum.auto()
    """In a block, without a signal so far."""
    NOTED = enum.auto()
    """A signal came. The next look raises."""
    RAISED = enum.auto()
    """A look has raised. Cleaning up is not interrupted again."""


class Interrupt:
    """The state machine of the main thread. It installs no handler, and reads no clock.

        OUTSIDE --begin--> DEFERRING --note--> NOTED --take--> RAISED
           ^---------------- end, from every state ---------------'

    Order: of the main thread only, signal handlers included.
    """

    def __init__(self) -> None:
        self.state = State.OUTSIDE
        self._noted_at_s = 0.0

    def begin(self) -> None:
        """Enter a block."""
        # A signal may have come between the installation of the handler and this call.
        if self.state is State.OUTSIDE:
            self.state = State.DEFERRING

    def note(self, now_s: float) -> bool:
        """Note a signal. Return whether the user insists: the signal must raise at once."""
        if self.state in {State.OUTSIDE, State.DEFERRING}:
            self.state, self._noted_at_s = State.NOTED, now_s
        return now_s - self._noted_at_s > INSISTS_S

    def take(self) -> bool:
        """Return whether a noted signal must raise now: once in a block."""
        is_due = self.state is State.NOTED
        if is_due:
            self.state = State.RAISED
        return is_due

    def end(self) -> bool:
        """Leave the block. Return whether a signal was noted in it."""
        was_noted = self.state in {State.NOTED, State.RAISED}
        self.state = State.OUTSIDE
        return was_noted


_interrupt = Interrupt()


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
    return _interrupt.state is not State.OUTSIDE and threading.current_thread() is threading.main_thread()


def raise_if_noted() -> None:
    """Raise KeyboardInterrupt if a signal was noted; once in a block, so that cleaning up is not interrupted too."""
    if is_deferring() and _interrupt.take():
        raise KeyboardInterrupt


def longest_wait_s(seconds: float) -> float:
    """Return the part of a wait of `seconds` that may pass before `raise_if_noted` must be called again."""
    return min(seconds, LOOK_S) if is_deferring() else seconds


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


def _begin() -> bool:
    """Note signals from now on; return False if they are noted already, or this thread or program does not do that."""
    if threading.current_thread() is not threading.main_thread() or _interrupt.state is not State.OUTSIDE:
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, _note)
    _interrupt.begin()
    return True


def _end() -> bool:
    """Let signals raise again, and return whether one was noted."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        # A library that was called inside the block has installed a handler: it stays.
        if before is not _note and before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    finally:
        # Also when another signal raises in the lines above: else the next block would end by this one's signal.
        was_noted = _interrupt.end()
    return was_noted


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal: the handler inside `deferred`."""
    if _interrupt.note(time.monotonic()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    if _interrupt.state is not State.OUTSIDE:
        _end()


os.register_at_fork(after_in_child=_forked)
