"""Delay Ctrl-C until the program can handle it.

Python can raise KeyboardInterrupt between any two steps of the main thread, for example after opening a descriptor and
before storing it. The verbs therefore run inside `deferred`, where the handler only notes the signal. Waits call
`raise_if_noted`, and the end of the block raises KeyboardInterrupt. Programs with a SIGINT handler are not affected.
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
"""Longest wait in seconds inside `deferred` between two checks for a signal."""
INSISTS_S = 2.0
"""A signal that arrives more than this many seconds after the first signal raises at once, because the program hangs.
A second signal before that does not raise, because shells and launchers often send Ctrl-C twice."""
_SEND_AGAIN_S = 0.01
"""Pause in seconds before a signal that arrived in a finalizer is sent again."""


class State(enum.Enum):
    """The main thread's state with regard to Ctrl-C."""

    OUTSIDE = enum.auto()
    """Outside any block. A signal raises KeyboardInterrupt at once."""
    DEFERRING = enum.auto()
    """Inside a block, before any signal."""
    NOTED = enum.auto()
    """A signal arrived. The next check raises KeyboardInterrupt."""
    RAISED = enum.auto()
    """A check has raised. The cleanup is not interrupted again."""


class Interrupt:
    """The state machine for Ctrl-C, which only the main thread and its signal handlers may use."""

    def __init__(self) -> None:
        self.state = State.OUTSIDE
        self._noted_at_s = 0.0

    def begin(self) -> None:
        """Enter a block."""
        # A signal may have arrived between the installation of the handler and this call.
        if self.state is State.OUTSIDE:
            self.state = State.DEFERRING

    def note(self, now_s: float) -> bool:
        """Note a signal. Return whether to raise at once, because the first one was noted over `INSISTS_S` ago."""
        if self.state in {State.OUTSIDE, State.DEFERRING}:
            self.state, self._noted_at_s = State.NOTED, now_s
        return now_s - self._noted_at_s > INSISTS_S

    def take(self) -> bool:
        """Return whether a noted signal must raise now. The result is True at most once per block."""
        is_due = self.state is State.NOTED
        if is_due:
            self.state = State.RAISED
        return is_due

    def end(self) -> bool:
        """Leave the block. Return whether a signal arrived inside the block."""
        was_noted = self.state in {State.NOTED, State.RAISED}
        self.state = State.OUTSIDE
        return was_noted


_interrupt = Interrupt()


class deferred:
    """A block that notes SIGINT and raises KeyboardInterrupt at its end. Only the outermost of nested blocks raises."""

    _is_outermost = False

    def __enter__(self) -> Self:
        self._is_outermost = _begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost and _end() and (kind is None or not issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt


class defer_in_finalizer(deferred):
    """`deferred` for `__del__`. Python discards exceptions in finalizers, so the signal is sent again later."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_outermost and _end():
            # During interpreter shutdown no thread can start, and no code remains to interrupt.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_send_again, name="penstock-interrupt", daemon=True).start()


class allow_interrupts:
    """A section of a `deferred` block in which SIGINT raises at once, for slow library calls."""

    _is_inside = False

    def __enter__(self) -> Self:
        if is_deferring():
            raise_if_noted()
            self._is_inside = True
            # A signal may have arrived since `raise_if_noted`.
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
    """Raise KeyboardInterrupt if a signal was noted, but only once per block, so that the cleanup can finish."""
    if is_deferring() and _interrupt.take():
        raise KeyboardInterrupt


def longest_wait_s(seconds: float) -> float:
    """Return how long a wait of `seconds` may last before `raise_if_noted` must be called again."""
    return min(seconds, LOOK_S) if is_deferring() else seconds


def is_of_handler(error: BaseException) -> bool:
    """Return whether one of the program's signal handlers raised this error during a system call in Penstock.

    A handler may raise a TimeoutError, which must not be mistaken for a socket's timeout. Python calls handlers only in
    the main thread, so the handler's frame is in the traceback above the interrupted frame.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _codes_of_handlers()
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code not in handlers:
        frame = frame.tb_next
    return frame is not None


def _codes_of_handlers() -> set[object]:
    codes = set[object]()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            # A bound method has its function's code. For any other object, use the code of its class's `__call__`.
            function = handler if hasattr(handler, "__code__") else type(handler).__call__
            codes.add(getattr(function, "__code__", None))
    return codes - {None}


def _begin() -> bool:
    if threading.current_thread() is not threading.main_thread() or _interrupt.state is not State.OUTSIDE:
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, _note)
    _interrupt.begin()
    return True


def _end() -> bool:
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        # Keep a handler that a library installed inside the block.
        if before is not _note and before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    finally:
        # Reset the state even if another signal raises above, so that the next block does not raise.
        was_noted = _interrupt.end()
    return was_noted


def _note(number: int, frame: FrameType | None) -> None:
    if _interrupt.note(time.monotonic()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt


def _send_again() -> None:
    time.sleep(_SEND_AGAIN_S)
    identity = threading.main_thread().ident
    if identity is not None:
        # A signal to the thread, not to the process, also interrupts a system call in which the thread is blocked.
        signal.pthread_kill(identity, signal.SIGINT)


def _forked() -> None:
    # If another thread forked, the child lacks the parent's main thread, which is inside the block.
    if _interrupt.state is not State.OUTSIDE:
        _end()


os.register_at_fork(after_in_child=_forked)
