"""The store of the hub's soft state: small values by name, with a time to live, changed by compare-and-set.

In: names such as `hold/KEY/MEMBER`, bytes. Out: entries with a version that every write changes.
Not here: what the values mean (`directory`), the store of several replicas (`store_redis`).
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
"""Expired entries that a write removes at most. Each write adds one expiry, so any number above one keeps up; eight
drains what a burst left behind without making a single write slow (about 1 us each)."""


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
        """Return seconds by a clock that all who use the store share; for this object it never goes back.

        Raises:
            HubUnavailable: the store did not answer.
        """

    def close(self) -> None:
        """Let go of connections; idempotent."""


class LivedClock:
    """Seconds that this process lived: a pause between two looks counts as `most_s` at most.

    A hub that was stopped, or did not get the processor, could hear nobody meanwhile: by the clock of the wall all its
    members would have been silent for too long, and what they have would be read from storage again.

    Args:
        most_s: above the time between two looks of a hub that runs: each question and each beat of its own is one.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s, self._lived_s, self._looked = most_s, 0.0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds since it was made."""
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
    """The reference, of one process.

    Names are kept by their folder (all before the last `/`), so that the scan of one folder costs what it holds.
    Every write removes a few entries that expired: names that nobody reads or scans again would stay for ever.
    """

    clock: Callable[[], float] = time.monotonic
    _folders: dict[str, dict[str, _Kept]] = field(default_factory=dict)
    _expiries: list[tuple[float, str]] = field(default_factory=list)
    """A heap of when to look whether a name has expired: each name once, however often it is renewed."""
    _scheduled: set[str] = field(default_factory=set)
    """The names in the heap."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _serial: int = 0

    def read(self, name: str) -> Entry | None:
        """See `Store`."""
        with self._lock:
            kept = self._live(*_split(name))
            return None if kept is None else kept.entry

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """See `Store`."""
        folder, last = _split(name)
        with self._lock:
            self._remove_expired()
            kept = self._live(folder, last)
            if expected != ANY and expected != (ABSENT if kept is None else kept.entry.version):
                return False
            if value is None:
                self._drop(folder, last)
                return True
            self._serial += 1
            expires = None if ttl_s is None else self.clock() + ttl_s
            if expires is not None:
                self._schedule(expires, name)
            entry = Entry(bytes(value), self._serial.to_bytes(8, "big"))
            self._folders.setdefault(folder, {})[last] = _Kept(entry, expires)
            return True

    def scan(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        found: dict[str, Entry] = {}
        with self._lock:
            now = self.clock()
            # A prefix that is a folder and its slash is that folder and those below it.
            for folder in [name for name in self._folders if name.startswith(prefix) or prefix.startswith(name)]:
                names = self._folders[folder]
                stale = [last for last, kept in names.items() if kept.expires is not None and kept.expires <= now]
                for last in stale:
                    del names[last]
                whole = folder.startswith(prefix)
                found |= {
                    (folder + last)[len(prefix) :]: kept.entry
                    for last, kept in names.items()
                    if whole or (folder + last).startswith(prefix)
                }
                if not names:
                    del self._folders[folder]
        return found

    def now(self) -> float:
        """See `Store`: `clock`, which is of one process, as this is."""
        return self.clock()

    def close(self) -> None:
        """See `Store`; what is kept stays, for replicas in one process."""

    def _remove_expired(self) -> None:
        """Remove at most `REMOVED_A_WRITE` expired entries. The lock is held."""
        now = self.clock()
        for _ in range(REMOVED_A_WRITE):
            if not self._expiries or self._expiries[0][0] > now:
                return
            _, name = heapq.heappop(self._expiries)
            self._scheduled.discard(name)
            kept = self._live(*_split(name))
            if kept is not None and kept.expires is not None:
                self._schedule(kept.expires, name)  # it was renewed

    def _schedule(self, expires: float, name: str) -> None:
        if name not in self._scheduled:
            self._scheduled.add(name)
            heapq.heappush(self._expiries, (expires, name))

    def _live(self, folder: str, last: str) -> _Kept | None:
        kept = self._folders.get(folder, {}).get(last)
        if kept is not None and kept.expires is not None and kept.expires <= self.clock():
            self._drop(folder, last)
            return None
        return kept

    def _drop(self, folder: str, last: str) -> None:
        names = self._folders.get(folder, {})
        names.pop(last, None)
        if not names:
            self._folders.pop(folder, None)


def _split(name: str) -> tuple[str, str]:
    cut = name.rfind("/") + 1
    return name[:cut], name[cut:]
