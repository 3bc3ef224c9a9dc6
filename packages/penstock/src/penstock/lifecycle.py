"""Lifecycle of objects and calls in a process: closing, forked children, and settings of the process.

In / Out: nothing. Not here: what an object releases (each class), Ctrl-C (`interrupts`).

- `Closeable`: a context manager for classes that have a `close`.
- `is_ending`: the interpreter ends, so nothing may wait for a thread.
- `release_after_fork`: in a forked child, release of locks, sockets, pages and transports that belong to its parent.
- `paused_gc`, `quick_handover`: settings of the whole process, while a load needs them.
"""

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
