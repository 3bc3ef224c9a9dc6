"""Fair shares of a limited resource. If the resource is exhausted, entries of the caller that uses most are evicted.

A single caller may use the whole resource. A new caller gets entries while any other caller uses more of the resource.
Callers are identified by token, certificate, user or address.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """Entries of a limited resource per caller. Thread-safe. An entry expires after `ttl_s` unless it is renewed."""

    def __init__(self, limit: int, *, ttl_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        # For each caller and entry, the weight and the time of the last `enter`, oldest first.
        self._entries: dict[str, dict[K, tuple[int, float]]] = {}
        self._callers: dict[K, str] = {}
        self._totals: dict[str, int] = {}
        # Total weight of all entries.
        self.used = 0

    def __contains__(self, entry: K) -> bool:
        return entry in self._callers

    def caller_of(self, entry: K) -> str:
        """Return the caller of an entry, or "" if the entry is unknown."""
        return self._callers.get(entry, "")

    def enter(self, entry: K, caller: str, weight: int = 1, *, displaces_own: bool = True) -> tuple[K, ...] | None:
        """Enter or renew an entry. Return the evicted entries, or None if the entry is refused.

        A known entry is transferred to this caller and gets this weight. If `displaces_own` is set, the caller's own
        entries may be evicted when no other caller has more.
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
            self.used += weight
            return victims

    def has_room(self, caller: str, *, displaces_own: bool = True) -> bool:
        """Return whether an entry of weight 1 would be accepted."""
        with self._lock:
            return self._victims(None, caller, 1, displaces_own) is not None

    def drop(self, entry: K) -> None:
        """Remove an entry. Idempotent."""
        with self._lock:
            self._drop(entry)

    def _victims(self, entry: K | None, caller: str, weight: int, displaces_own: bool) -> tuple[K, ...] | None:
        """Return the entries to remove for a new entry, or None to refuse the new entry. The caller holds the lock."""
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
            # Among callers with equal totals, choose this caller, because others lose entries only if they have more.
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
        held = 0
        if entry is not None and entry in self._callers:
            held = self._entries[self._callers[entry]][entry][0]
        return self.used - held + weight - self._limit

    def _forget_expired(self) -> None:
        now = self._clock()
        for entries in list(self._entries.values()):
            # Entries are sorted by age, so check only the oldest.
            while entries and now - next(iter(entries.values()))[1] > self._ttl_s:
                self._drop(next(iter(entries)))

    def _drop(self, entry: K) -> None:
        caller = self._callers.pop(entry, None)
        if caller is None:
            return
        mine = self._entries[caller]
        weight, _ = mine.pop(entry)
        self.used -= weight
        self._totals[caller] -= weight
        if not mine:
            del self._entries[caller], self._totals[caller]
