"""Shares of a scarce thing: when it is used up, the caller that has the most of it gives way.

In: entries, each with its caller and a weight. Out: the entries that must end so that a new one fits.
Not here: ending them (each user), limits on rates (`hub.auth.RateLimit`), connections (`admission`).

One caller alone may use everything. A second caller gets places as long as the first has more than it has, so nobody
can take all places for good. A caller is whatever was authenticated: a token, a certificate, a user, an address.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """The entries of a scarce thing by caller. Any thread.

    Args:
        limit: largest total weight.
        ttl_s: an entry that is not entered again for this long is forgotten.
        clock: monotonic seconds.
    """

    def __init__(self, limit: int, *, ttl_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        # Caller -> entry -> weight and time of its last `enter`, the oldest first.
        self._entries: dict[str, dict[K, tuple[int, float]]] = {}
        self._callers: dict[K, str] = {}
        self._totals: dict[str, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Return the total weight of all entries."""
        return self._used

    def __contains__(self, entry: K) -> bool:
        return entry in self._callers

    def caller_of(self, entry: K) -> str:
        """Return the caller that an entry counts for; empty: the entry is not known."""
        return self._callers.get(entry, "")

    def enter(self, entry: K, caller: str, weight: int = 1, *, displaces_own: bool = True) -> tuple[K, ...] | None:
        """Enter an entry, or renew it. Return the entries that gave way; None: the entry is refused.

        Args:
            entry: identifies it; one that is known moves to this caller and gets this weight.
            caller: the name of the caller that it counts for.
            weight: what it takes of the limit.
            displaces_own: whether entries of the caller itself give way once no other caller has more than it has.
        """
        with self._lock:
            victims = self._victims(entry, caller, weight, displaces_own)
            if victims is None:
                return None
            for gone in (entry, *victims):
                self._drop(gone)
            self._entries.setdefault(caller, {})[entry] = weight, self._clock()
            self._callers[entry] = caller
            self._totals[caller] = self._totals.get(caller, 0) + weight
            self._used += weight
            return victims

    def has_room(self, caller: str, *, displaces_own: bool = True) -> bool:
        """Return whether an entry of weight 1 would be accepted now."""
        with self._lock:
            return self._victims(None, caller, 1, displaces_own) is not None

    def drop(self, entry: K) -> None:
        """Forget an entry. Idempotent."""
        with self._lock:
            self._drop(entry)

    def _victims(self, entry: K | None, caller: str, weight: int, displaces_own: bool) -> tuple[K, ...] | None:
        """Return the entries that must go for a new one; None: it must not come. The caller holds the lock."""
        excess = self._excess(entry, weight)
        if excess > 0 and self._ttl_s < math.inf:
            self._forget_expired()
            excess = self._excess(entry, weight)
        if excess <= 0:
            return ()
        if weight > self._limit:
            return None
        totals = dict(self._totals)
        if entry is not None and entry in self._callers:
            totals[self._callers[entry]] -= self._entries[self._callers[entry]][entry][0]
        totals[caller] = totals.get(caller, 0) + weight
        oldest: dict[str, Iterator[tuple[K, tuple[int, float]]]] = {}
        victims: list[K] = []
        while excess > 0:
            # The caller itself comes first among equals: only a caller that has more must give way to it.
            greediest = max(totals, key=lambda name: (totals[name], name == caller))
            if greediest == caller and not displaces_own:
                return None
            mine = oldest.setdefault(greediest, iter(self._entries.get(greediest, {}).items()))
            found = next((item for item in mine if item[0] != entry), None)
            if found is None:
                return None
            victim, (freed, _) = found
            victims.append(victim)
            totals[greediest] -= freed
            excess -= freed
        return tuple(victims)

    def _excess(self, entry: K | None, weight: int) -> int:
        """Return the weight that a new entry would have above the limit."""
        held = 0
        if entry is not None and entry in self._callers:
            held = self._entries[self._callers[entry]][entry][0]
        return self._used - held + weight - self._limit

    def _forget_expired(self) -> None:
        now = self._clock()
        for entries in list(self._entries.values()):
            # The oldest come first.
            while entries and now - next(iter(entries.values()))[1] > self._ttl_s:
                self._drop(next(iter(entries)))

    def _drop(self, entry: K) -> None:
        caller = self._callers.pop(entry, None)
        if caller is None:
            return
        mine = self._entries[caller]
        weight, _ = mine.pop(entry)
        self._used -= weight
        self._totals[caller] -= weight
        if not mine:
            del self._entries[caller], self._totals[caller]
