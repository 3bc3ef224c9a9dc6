"""A read that is carried out by the thread that waits for it: once, however many wait.

In: what the read needs, until it is done. Out: how much moved, and what was met, to each who waits.
Not here: how bytes move (each transport).
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVarTuple

from penstock.errors import PenstockError

Ts = TypeVarTuple("Ts")


class DeferredRead(Generic[*Ts]):
    """See `Pending`. Subclasses say what it is to carry it out; `work` keeps both memories alive until then.

    Args:
        nbytes: that it is to move.
        work: what `_carry` is given.
    """

    def __init__(self, nbytes: int, *work: *Ts) -> None:
        self.nbytes, self.moved_bytes = nbytes, 0
        self._lock = threading.Lock()
        self._work: tuple[*Ts] | None = work
        self._error: PenstockError | None = None

    def run(self, stall_s: float) -> None:
        """Carry it out, in the first thread that comes; the others wait for it. Raises what was met."""
        # The lock is kept for the whole copy: other waiters of the same read have nothing else to do.
        with self._lock:
            if self._work is not None:
                try:
                    self._carry(stall_s, *self._work)
                except PenstockError as error:
                    error.mutated = error.mutated or self.moved_bytes > 0
                    # The traceback's frames refer to both memories, and would keep them alive with the error.
                    self._error = error.with_traceback(None)
                self._work = None
            if self._error is not None:
                raise self._error

    def _carry(self, stall_s: float, *work: *Ts) -> None:
        """Move every byte, noting `moved_bytes`."""
        raise NotImplementedError
