"""Pinned staging pools of closed loads, kept for a moment for the next load.

Touching, pinning and later unpinning a pool of 84 MiB takes 25 ms, and a program may open many files one after another.
"""

from __future__ import annotations

import os
import threading
import time

from penstock.memory.staging import StagingPool
from penstock.waits import start_thread

KEEP_S = 1.0
"""Seconds for which a pool waits for the next load."""

_POLL_S = 0.05
"""Seconds between checks whether the program has ended."""

_changed = threading.Condition()
_idle: list[StagingPool] = []


def take(memory_bytes: int, buffer_bytes: int) -> StagingPool | None:
    """Return a kept pool with exactly these sizes, which then belongs to the caller, or None."""
    with _changed:
        for pool in _idle:
            if pool.buffer_bytes == buffer_bytes and pool.num_buffers == memory_bytes // buffer_bytes:
                _idle.remove(pool)
                _changed.notify_all()
                pool.peak_bytes = 0
                return pool
    return None


def keep(pool: StagingPool, *, keep_s: float = KEEP_S) -> None:
    """Keep a pool whose buffers are all free, and close it after `keep_s` seconds if no load has taken it."""
    with _changed:
        _idle.append(pool)
    # The thread is not a daemon, because the process must not exit while the driver unpins memory.
    thread = threading.Thread(target=_close_unused, args=(pool, time.monotonic() + keep_s), name="penstock-unpin")
    if not start_thread(thread, is_needed=False):
        _close_unused(pool, 0.0)


def _close_unused(pool: StagingPool, deadline: float) -> None:
    with _changed:
        # The interpreter waits for this thread at its end, so do not wait any longer then.
        while pool in _idle and time.monotonic() < deadline and threading.main_thread().is_alive():
            _changed.wait(_POLL_S)
        if pool not in _idle:
            return
        _idle.remove(pool)
    pool.close()


def _forked() -> None:
    global _changed
    # A forked child has neither the pinned pages nor the threads.
    _changed = threading.Condition()
    _idle.clear()


os.register_at_fork(after_in_child=_forked)
