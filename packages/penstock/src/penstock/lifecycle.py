"""Closing objects, forked children, interpreter shutdown, and two settings of the whole process."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self, TypeVar
from weakref import WeakSet


class _Closes(Protocol):
    def close(self) -> None: ...


def is_ending() -> bool:
    """Return whether the interpreter is shutting down, so that daemon threads have stopped and never release locks."""
    return sys.is_finalizing()


class Closeable:
    """A context manager that calls the object's `close` method, except while the interpreter shuts down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        if not is_ending():
            self.close()


T = TypeVar("T")


def release_after_fork(release: Callable[[T], object]) -> WeakSet[T]:
    """Return a weak set. In every forked child, `release` is called for each object in the set."""
    alive: WeakSet[T] = WeakSet()

    def forked() -> None:
        # Calling `release` may drop the last reference to another member, which changes the set.
        for member in list(alive):
            release(member)

    os.register_at_fork(after_in_child=forked)
    return alive


_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause automatic garbage collection inside the block. Blocks may nest and may run in several threads."""
    # Automatic collections raise the cost of 60,000 new tensors from 1 to 5 us each (measured with torch 2.13).
    global _depth, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth = max(0, _depth - 1)
            if _depth == 0 and _was_enabled:
                gc.enable()


HANDOVER_S = 5e-5
"""Switch interval of the GIL in seconds while bytes move to a device. In Python's default interval of 5 ms, 60 chunks
of 4 MiB move at 55 GB/s. Source: benchmarks/results/h200x1_202611/load-history.md."""

_num_quick = 0
_interval_s = 0.0


@contextmanager
def quick_handover() -> Iterator[None]:
    """Set the GIL's switch interval to `HANDOVER_S` in the block. Blocks may nest and may run in several threads."""
    global _num_quick, _interval_s
    with _lock:
        if _num_quick == 0:
            _interval_s = sys.getswitchinterval()
            # The program may have set a shorter interval.
            sys.setswitchinterval(min(HANDOVER_S, _interval_s))
        _num_quick += 1
    try:
        yield
    finally:
        with _lock:
            # In a forked child the count is already 0.
            _num_quick = max(0, _num_quick - 1)
            if _num_quick == 0:
                sys.setswitchinterval(_interval_s)


def _restore_after_fork() -> None:
    # The threads that changed these settings do not exist in the forked child.
    global _lock, _num_quick, _depth
    # Another thread may have held the lock at the moment of the fork.
    _lock = threading.Lock()
    if _num_quick:
        _num_quick = 0
        sys.setswitchinterval(_interval_s)
    if _depth:
        _depth = 0
        if _was_enabled:
            gc.enable()


os.register_at_fork(after_in_child=_restore_after_fork)
