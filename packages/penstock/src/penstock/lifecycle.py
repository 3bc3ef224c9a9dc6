"""The lifecycle of objects: closing, forked children and interpreter shutdown. Also two process-wide settings.

- `Closeable` makes a class with a `close` method a context manager.
- `is_ending` tells whether the interpreter shuts down, so that nothing may wait for a thread.
- `release_after_fork` releases locks, sockets, pages and transports of the parent in a forked child.
- `paused_gc` and `quick_handover` change settings of the whole process while a load needs them.
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
    """Return whether the interpreter shuts down.

    Python has stopped all daemon threads by then, and their locks stay locked. Code that still runs must not wait. This
    concerns finalizers and the `with` blocks of generators that were not read to their end. The operating system frees
    all open resources.
    """
    return sys.is_finalizing()


class Closeable:
    """A context manager for classes with a `close` method. It does nothing while the interpreter shuts down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        if not is_ending():
            self.close()


T = TypeVar("T")


def release_after_fork(release: Callable[[T], object]) -> WeakSet[T]:
    """Return a weak set. In every forked child, `release` is called for each object in the set."""
    # The set must not keep an object alive after its owner dropped it.
    alive: WeakSet[T] = WeakSet()

    def forked() -> None:
        # Iterate over a copy, because a release may drop the last reference to another member and change the set.
        for member in list(alive):
            release(member)

    os.register_at_fork(after_in_child=forked)
    return alive


_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def paused_gc() -> Iterator[None]:
    """Stop automatic garbage collection inside the block. Blocks may nest and may run in several threads."""
    # Creating 60,000 tensors triggers full collections, which raise the cost of a tensor from 1 to 5 us (measured on 2
    # CPU cores with torch 2.13 in a small process).
    global _depth, _was_enabled
    with _lock:
        # Only the outermost block reads the setting. An inner block would find collection disabled and keep it so.
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
"""Seconds that a thread keeps the GIL after another thread asks for it, while bytes move to a device. In Python's
default of 5 ms, 60 chunks of 4 MiB move at 55 GB/s. Source: benchmarks/results/h200x1_202611/load-history.md."""

_num_quick = 0
_interval_s = 0.0


@contextmanager
def quick_handover() -> Iterator[None]:
    """Set the GIL's switch interval to `HANDOVER_S` in the block. Blocks may nest and may run in several threads."""
    global _num_quick, _interval_s
    with _lock:
        if _num_quick == 0:
            _interval_s = sys.getswitchinterval()
            # The program may have set a shorter interval, which must not grow.
            sys.setswitchinterval(min(HANDOVER_S, _interval_s))
        _num_quick += 1
    try:
        yield
    finally:
        with _lock:
            # In a forked child the count is 0 already.
            _num_quick = max(0, _num_quick - 1)
            if _num_quick == 0:
                sys.setswitchinterval(_interval_s)


def _end_quick() -> None:
    """Restore the switch interval in a forked child, where the threads that shortened it do not exist."""
    global _lock, _num_quick
    # Another thread may have held the lock at the moment of the fork.
    _lock = threading.Lock()
    if _num_quick:
        _num_quick = 0
        sys.setswitchinterval(_interval_s)


os.register_at_fork(after_in_child=_end_quick)
