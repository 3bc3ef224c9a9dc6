"""The store for the hub's soft state: small values by name, with a time to live, changed by compare-and-set.

Every write creates a new version of an entry. `MemoryStore` is for a hub of one process. `RedisStore` is for several
hubs that act as one hub. Each `RedisStore` method is one script, which Redis runs atomically. In Redis each value
follows its version (16 random bytes). One sorted set contains all names, and another set all expiry times.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from penstock.config import without_password
from penstock.entry_points import install_hint
from penstock.errors import ConfigError, HubUnavailable, MissingExtra, PermissionDenied

ANY: Final = b"*"
"""With `expected=ANY` a write always succeeds."""
ABSENT: Final = b""
"""With `expected=ABSENT` a write succeeds only if there is no entry."""
# Maximum number of expired entries that a write removes, which takes about 1 us for each.
_REMOVED_A_WRITE = 8


class StoreEntry(msgspec.Struct, frozen=True):
    """A value with the version for compare-and-set."""

    value: bytes
    version: bytes


class Store(Protocol):
    """A thread-safe store. Its methods raise HubUnavailable."""

    def read(self, name: str) -> StoreEntry | None:
        """Return the entry under `name`, or None if it is absent or expired."""

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """Set `name` to `value` (None deletes it) if its version is `expected`. Return whether the version matched.

        Args:
            name: parts joined by `/`.
            ttl_s: seconds until the entry expires, or None if the entry never expires.
            expected: the version from an earlier `read`, `ANY`, or `ABSENT`.

        Raises:
            HubUnavailable: the store did not respond. Whether the value was written is unknown.
        """

    def scan(self, prefix: str) -> dict[str, StoreEntry]:
        """Return every entry whose name starts with `prefix`, keyed by the rest of its name."""

    def now(self) -> float:
        """Return the seconds of a clock that all users of the store share. The result never decreases between calls."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class RunningTimeClock:
    """A clock that counts this process's running time. The time between two calls counts as at most `most_s`.

    A stopped hub receives no messages. On a wall clock, all members would have expired by the time the hub continues.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._running_s = 0.0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return how many seconds this process has run since the clock was created."""
        with self._lock:
            now = time.monotonic()
            self._running_s += min(now - self._last, self._most_s)
            self._last = now
            return self._running_s


class _Stored(NamedTuple):
    entry: StoreEntry
    expires: float | None


class MemoryStore(msgspec.Struct):
    """The reference store for one process.

    Names are grouped by their folder (everything before the last `/`), so that the cost of a scan depends only on its
    result. Every write removes a few expired entries.
    """

    clock: Callable[[], float] = time.monotonic
    _folders: dict[str, dict[str, _Stored]] = msgspec.field(default_factory=dict)
    # A heap of times at which to check a name's expiry. Each name is in the heap once, however often it is renewed.
    _expiries: list[tuple[float, str]] = msgspec.field(default_factory=list)
    # The names in the heap.
    _scheduled: set[str] = msgspec.field(default_factory=set)
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _serial: int = 0

    def read(self, name: str) -> StoreEntry | None:
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
            # A value that returns to an earlier value still requires a new version, so use a serial number and not a
            # digest.
            entry = StoreEntry(bytes(value), self._serial.to_bytes(8, "big"))
            self._folders.setdefault(folder, {})[last] = _Stored(entry, expires)
            return True

    def scan(self, prefix: str) -> dict[str, StoreEntry]:
        """See `Store`."""
        entries: dict[str, StoreEntry] = {}
        with self._lock:
            now = self.clock()
            # A prefix that ends with a slash matches its folder and all folders below it.
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
        """See `Store`. Only this process uses the store and its clock."""
        return self.clock()

    def close(self) -> None:
        """See `Store`. The entries remain for replicas in the same process."""

    def _remove_expired(self) -> None:
        """Remove at most `_REMOVED_A_WRITE` expired entries. The caller holds the lock."""
        now = self.clock()
        for _ in range(_REMOVED_A_WRITE):
            if not self._expiries or self._expiries[0][0] > now:
                return
            _, name = heapq.heappop(self._expiries)
            self._scheduled.discard(name)
            stored = self._live(*_split(name))
            # The entry was renewed, so check it again at its new expiry.
            if stored is not None and stored.expires is not None:
                self._schedule(stored.expires, name)

    def _schedule(self, expires: float, name: str) -> None:
        """Schedule a check of a name's expiry unless a check is scheduled. The caller holds the lock."""
        # Moving a renewed name in the heap would require a search. The check schedules the renewed name again.
        if name not in self._scheduled:
            self._scheduled.add(name)
            heapq.heappush(self._expiries, (expires, name))

    def _live(self, folder: str, last: str) -> _Stored | None:
        """Return an entry, or None if it is absent or expired. The caller holds the lock."""
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


ANSWER_S = 2.0
"""Deadline in seconds for a response. Redis takes about 0.1 ms, and a member waits 10 s for the hub."""
# Interval at which a process reads Redis' time. Monotonic clocks on two hosts drift by well under 1 ms in this time.
_COMPARE_S = 5.0
# Length of an entry's version, which the Redis scripts below repeat.
_VERSION_BYTES = 16
# More connections than the 40 threads in Starlette's pool, each of which waits for one response at a time.
_MAX_CONNECTIONS = 64

# Redis drops expired values but not their names in the two sorted sets, so each write drops a few names. A name whose
# value still exists is checked again a second later.
_WRITE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. now, 'LIMIT', 0, ARGV[7])) do
  if redis.call('EXISTS', ARGV[6] .. name) == 0 then
    redis.call('ZREM', KEYS[2], name)
    redis.call('ZREM', KEYS[3], name)
  else
    redis.call('ZADD', KEYS[3], now + 1000, name)
  end
end
local held = redis.call('GET', KEYS[1])
local version = ''
if held then version = string.sub(held, 1, 16) end
if ARGV[1] ~= '*' and ARGV[1] ~= version then return 0 end
if ARGV[3] == '1' then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[4])
  redis.call('ZREM', KEYS[3], ARGV[4])
  return 1
end
if ARGV[5] == '' then
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('ZREM', KEYS[3], ARGV[4])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[5])
  redis.call('ZADD', KEYS[3], now + ARGV[5], ARGV[4])
end
redis.call('ZADD', KEYS[2], 0, ARGV[4])
return 1
"""
# The sorted set of names makes the cost of a scan depend only on its result. Redis' own SCAN walks all keys of the
# server.
_SCAN = """
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[' .. ARGV[1], '(' .. ARGV[1] .. '\\255')) do
  local held = redis.call('GET', ARGV[2] .. name)
  if held then
    found[#found + 1] = name
    found[#found + 1] = held
  else
    redis.call('ZREM', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
  end
end
return found
"""


class RedisStore:
    """A store in Redis or Valkey. The constructor does not connect.

    Args:
        url: `redis://[user:password@]host:6379/0`, `rediss://` for TLS, or `unix:///path`.
        password: password for the server, or None to use the password in the URL, if any.
        prefix: separates independent fleets that share a server.

    Raises:
        MissingExtra: redis is not installed.
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str, *, password: str | None = None, prefix: str = "penstock") -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtra("a hub on Redis needs the redis package", hint=install_hint("redis")) from error
        self._redis = redis
        try:
            self._client = redis.Redis.from_url(
                url,
                password=password,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                health_check_interval=15,
                max_connections=_MAX_CONNECTIONS,
            )
        except ValueError as error:
            raise ConfigError(f"{without_password(url)!r} is not a valid address for Redis: {error}") from error
        self._where = without_password(url)
        self._closed = False
        # One thread reads Redis' time while the others wait, so that not every thread reads it each `_COMPARE_S`.
        self._comparing = threading.Lock()
        self._compared = float("-inf")
        # Seconds by which Redis' time is ahead of this process's monotonic clock.
        self._offset = 0.0
        self._latest = 0.0
        # A cluster hashes only the text between the braces, so all names are in one slot.
        self._prefix = f"{{{prefix}}}:"
        self._names = f"{self._prefix}names"
        self._expiries = f"{self._prefix}expiries"
        self._write = self._client.register_script(_WRITE)
        self._scan = self._client.register_script(_SCAN)

    def read(self, name: str) -> StoreEntry | None:
        """See `Store`."""
        raw = self._call(self._client.get, self._prefix + name)
        return None if raw is None else _entry(raw)

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """See `Store`."""
        # A counter would restart when the store loses its memory, so the version is random.
        raw = b"" if value is None else os.urandom(_VERSION_BYTES) + value
        # Redis refuses an expiry of zero.
        ttl_ms = b"" if ttl_s is None else str(max(1, math.ceil(ttl_s * 1000))).encode()
        gone = b"1" if value is None else b"0"
        keys = [self._prefix + name, self._names, self._expiries]
        args = [expected, raw, gone, name, ttl_ms, self._prefix, _REMOVED_A_WRITE]
        return bool(self._call(self._write, keys=keys, args=args))

    def scan(self, prefix: str) -> dict[str, StoreEntry]:
        """See `Store`."""
        rows = self._call(self._scan, keys=[self._names, self._expiries], args=[prefix, self._prefix])
        names = (name.decode()[len(prefix) :] for name in rows[::2])
        return dict(zip(names, map(_entry, rows[1::2]), strict=True))

    def now(self) -> float:
        """Return the wall-clock time of Redis' last response, continued by this process's monotonic clock."""
        with self._comparing:
            if time.monotonic() - self._compared >= _COMPARE_S:
                seconds, microseconds = self._call(self._client.time)
                self._compared = time.monotonic()
                self._offset = seconds + microseconds / 1e6 - self._compared
            # If Redis' clock jumps back, this time does not advance until Redis' clock has caught up.
            self._latest = max(self._latest, time.monotonic() + self._offset)
            return self._latest

    def close(self) -> None:
        """See `Store`."""
        self._closed = True
        self._client.close()

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        # Clients retry every request and some requests have a deadline, so do not retry here.
        try:
            return call(*args, **kwargs)
        except self._redis.AuthenticationError as error:
            hint = "check the user and password in the URL, such as redis://user:password@host:6379/0"
            raise PermissionDenied(f"Redis refused access: {error}", uri=self._where, hint=hint) from error
        except self._redis.RedisError as error:
            hint = "check with `redis-cli -u URL ping` that it runs and that the hub's host can reach it"
            raise HubUnavailable(f"Redis does not respond: {error}", uri=self._where, hint=hint) from error
        finally:
            if self._closed:
                # A call that was running when the store was closed may have opened a new connection.
                self._client.close()


def _entry(raw: bytes) -> StoreEntry:
    return StoreEntry(raw[_VERSION_BYTES:], raw[:_VERSION_BYTES])
