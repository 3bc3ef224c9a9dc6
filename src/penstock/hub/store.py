"""The store of the hub's soft state: small values by name, with a time to live, changed by compare-and-set.

In: names such as `hold/KEY/MEMBER`, bytes. Out: entries with a version that every write changes.
Not here: the meaning of the values (`directory`), the store of several replicas (`store_redis`).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

ANY: Final = b"*"
"""`expected=ANY`: write whatever is there."""
ABSENT: Final = b""
"""`expected=ABSENT`: write only if nothing is there."""
REMOVED_A_WRITE = 8
"""Most expired entries that a write removes. Each write adds one expiry, so any number above one keeps up; eight
removes the rest of a burst without making a single write slow (about 1 us each)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, and the version that a compare-and-set names."""

    value: bytes
    version: bytes


class Store(Protocol):
    """Five methods, each atomic, safe to call from any thread; `penstock.testing.store_suite` holds them to it."""

    def read(self, name: str) -> Entry | None:
        """Return the entry under `name`; None if there is none or it expired.

        Raises:
            HubUnavailable: the store did not answer.
        """

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """Set `name`, or with None delete it, if its version is `expected`; False: it was not, nothing was done.

        Args:
            name: parts joined by `/`.
            value: the new value.
            ttl_s: it expires after this long; None: never.
            expected: the version of an earlier `read`, or `ANY`, or `ABSENT`.

        Raises:
            HubUnavailable: the store did not answer; whether the value was written is not known.
        """

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return every entry whose name starts with `prefix`, by the rest of its name.

        Raises:
            HubUnavailable: the store did not answer.
        """

    def now(self) -> float:
        """Return seconds by a clock that all users of the store share; for this object it never goes back.

        Raises:
            HubUnavailable: the store did not answer.
        """

    def close(self) -> None:
        """Close connections; idempotent."""


class LivedClock:
    """A clock of this process's running time: a pause between two calls counts as `most_s` at most.

    A hub that was stopped, or did not get the processor, received no message meanwhile: by a wall clock all its members
    would have been silent for too long, and their chunks would be read from storage again.

    Args:
        most_s: above the time between two calls in a running hub, which come with each request and each of its beats.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._lived_s = 0.0
        self._looked = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the seconds that this process ran since the clock was made."""
        with self._lock:
            now = time.monotonic()
            self._lived_s += min(now - self._looked, self._most_s)
            self._looked = now
            return self._lived_s


@dataclass(slots=True)
class _Kept:
    entry: Entry
    expires: float | None


@dataclass(slots=True)
class MemoryStore:
    """The reference store, of one process.

    Names are grouped by their folder (everything before the last `/`), so that a scan costs as much as its result.
    Every write removes a few expired entries: names that are never read or scanned again would stay for ever.
    """

    clock: Callable[[], float] = time.monotonic
    _folders: dict[str, dict[str, _Kept]] = field(default_factory=dict)
    _expiries: list[tuple[float, str]] = field(default_factory=list)
    """A heap of times at which to check a name's expiry: each name once, however often it is renewed."""
    _scheduled: set[str] = field(default_factory=set)
    """The names in the heap."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _serial: int = 0

    def read(self, name: str) -> Entry | None:
        """See `Store`."""
        with self._lock:
            stored = self._live(*_split(name))
            return None if stored is None else stored.entry

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """See `Store`."""
        folder, last = _split(name)
        with self._lock:
            self._remove_expired()
            stored = self._live(folder, last)
            if expected != ANY and expected != (ABSENT if stored is None else stored.entry.version):
                return False
            if value is None:
                self._drop(folder, last)
                return True
            self._serial += 1
            expires = None if ttl_s is None else self.clock() + ttl_s
            if expires is not None:
                self._schedule(expires, name)
            # A serial, not a digest of the value: a value that went back to an earlier one is still another version.
            entry = Entry(bytes(value), self._serial.to_bytes(8, "big"))
            self._folders.setdefault(folder, {})[last] = _Kept(entry, expires)
            return True

    def scan(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        entries: dict[str, Entry] = {}
        with self._lock:
            now = self.clock()
            # A prefix that ends with a slash matches that folder and all folders below it.
            for folder in [name for name in self._folders if name.startswith(prefix) or prefix.startswith(name)]:
                names = self._folders[folder]
                stale = [last for last, stored in names.items() if stored.expires is not None and stored.expires <= now]
                for last in stale:
                    del names[last]
                whole = folder.startswith(prefix)
                entries |= {
                    (folder + last)[len(prefix) :]: stored.entry
                    for last, stored in names.items()
                    if whole or (folder + last).startswith(prefix)
                }
                if not names:
                    del self._folders[folder]
        return entries

    def now(self) -> float:
        """See `Store`: the clock of this process, the only one that uses this store."""
        return self.clock()

    def close(self) -> None:
        """See `Store`; the entries stay, for replicas in one process."""

    def _remove_expired(self) -> None:
        """Remove at most `REMOVED_A_WRITE` expired entries. The caller holds the lock."""
        now = self.clock()
        for _ in range(REMOVED_A_WRITE):
            if not self._expiries or self._expiries[0][0] > now:
                return
            _, name = heapq.heappop(self._expiries)
            self._scheduled.discard(name)
            stored = self._live(*_split(name))
            if stored is not None and stored.expires is not None:
                self._schedule(stored.expires, name)  # it was renewed since: check again at its new expiry

    def _schedule(self, expires: float, name: str) -> None:
        if name not in self._scheduled:
            self._scheduled.add(name)
            heapq.heappush(self._expiries, (expires, name))

    def _live(self, folder: str, last: str) -> _Kept | None:
        stored = self._folders.get(folder, {}).get(last)
        if stored is not None and stored.expires is not None and stored.expires <= self.clock():
            self._drop(folder, last)
            return None
        return stored

    def _drop(self, folder: str, last: str) -> None:
        names = self._folders.get(folder, {})
        names.pop(last, None)
        if not names:
            self._folders.pop(folder, None)


def _split(name: str) -> tuple[str, str]:
    cut = name.rfind("/") + 1
    return name[:cut], name[cut:]
