"""How often each caller may do something: a bucket of tokens each.

In: a caller's name. Out: whether it may, now. Not here: who the caller is (`auth`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 4096
"""Callers that are remembered, the most recent; a hub has tens of tokens, or a certificate each member."""


class RateLimit:
    """Allows each name `burst` at once, and `per_s` a second in the long run. Used by any thread.

    Args:
        per_s: what comes back a second.
        burst: at most at once.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Name -> what it had left, when."""

    def allow(self, name: str) -> bool:
        """Take one from a name's bucket; False if there is none."""
        with self._lock:
            now = self._clock()
            left, then = self._left.pop(name, (self._burst, now))
            left = min(self._burst, left + max(0.0, now - then) * self._per_s)
            is_allowed = left >= 1.0
            self._left[name] = (left - is_allowed, now)
            while len(self._left) > MAX_NAMES:
                self._left.popitem(last=False)
            return is_allowed
