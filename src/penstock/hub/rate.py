"""Rate limits of callers: a token bucket for each.

In: a caller's name. Out: permission, now. Not here: authenticating the caller (`auth`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 4096
"""Most recent callers that are remembered; a hub has tens of tokens, or one certificate for each member."""


class RateLimit:
    """A limit of `burst` events at once, and `per_s` a second in the long run, for each name. Any thread.

    Args:
        per_s: tokens added per second.
        burst: capacity of a bucket.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Name -> tokens left, and the time of that count."""

    def allow(self, name: str) -> bool:
        """Take one from a name's bucket; False if there is none."""
        with self._lock:
            now = self._clock()
            # Popped and put back: the order is that of use, so the bound below forgets the callers idle for longest,
            # whose buckets are full again anyway.
            left, then = self._left.pop(name, (self._burst, now))
            left = min(self._burst, left + max(0.0, now - then) * self._per_s)
            is_allowed = left >= 1.0
            self._left[name] = (left - is_allowed, now)
            while len(self._left) > MAX_NAMES:
                self._left.popitem(last=False)
            return is_allowed
