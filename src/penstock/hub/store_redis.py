"""The hub's state in Redis or Valkey, for several hubs that act as one.

In: a URL. Out: a `Store`. Not here: the entries (`directory`), the store of one process (`store`).

Each method is one script, which Redis runs atomically. A stored value is 16 random bytes, its version, and then the
value. One sorted set has all names, so that a scan costs as much as its result; another has their expiry times: Redis
drops expired values by itself, and every write drops a few of their names. All names share one hash slot, so that
scripts also work on a cluster.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

from penstock.config import without_password
from penstock.errors import ConfigError, HubUnavailable, MissingExtra, PermissionDenied
from penstock.hub.store import ANY, REMOVED_A_WRITE, Entry

ANSWER_S = 2.0
"""Deadline of an answer: Redis takes a tenth of a millisecond; a member waits 10 s for the hub."""
COMPARE_S = 5.0
"""Interval at which a process reads Redis' time. Monotonic clocks of two hosts drift by well under 1 ms meanwhile."""
_VERSION_BYTES = 16
_MAX_CONNECTIONS = 64

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
    """A store in Redis or Valkey: see `Store`. The constructor does not connect.

    Args:
        url: `redis://[user:password@]host:6379/0`, `rediss://` for TLS, `unix:///path`.
        password: of the server; None: the URL's, if it has one.
        prefix: separates independent fleets that share a server.

    Raises:
        MissingExtra: redis is not installed. ConfigError: the URL is not valid.
    """

    def __init__(self, url: str, *, password: str | None = None, prefix: str = "penstock") -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtra("a hub on Redis needs redis", hint="pip install 'penstock[redis]'") from error
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
            raise ConfigError(f"{without_password(url)!r} is not an address of Redis: {error}") from error
        self._where = without_password(url)
        # One thread reads Redis' time while the others wait: without it all of them would at every `COMPARE_S`.
        self._comparing, self._compared, self._offset = threading.Lock(), float("-inf"), 0.0
        self._latest = 0.0
        # Braces: a cluster hashes only the part between them, so all names are in one slot.
        self._prefix = f"{{{prefix}}}:"
        self._names, self._expiries = f"{self._prefix}names", f"{self._prefix}expiries"
        self._write = self._client.register_script(_WRITE)
        self._scan = self._client.register_script(_SCAN)

    def read(self, name: str) -> Entry | None:
        """See `Store`."""
        raw = self._call(self._client.get, self._prefix + name)
        return None if raw is None else _entry(raw)

    def write(self, name: str, value: bytes | None, *, ttl_s: float | None = None, expected: bytes = ANY) -> bool:
        """See `Store`."""
        raw = b"" if value is None else os.urandom(_VERSION_BYTES) + value
        # At least 1 ms: Redis refuses to set a value that expires in no time.
        ttl_ms = b"" if ttl_s is None else str(max(1, math.ceil(ttl_s * 1000))).encode()
        gone = b"1" if value is None else b"0"
        keys = [self._prefix + name, self._names, self._expiries]
        args = [expected, raw, gone, name, ttl_ms, self._prefix, REMOVED_A_WRITE]
        return bool(self._call(self._write, keys=keys, args=args))

    def scan(self, prefix: str) -> dict[str, Entry]:
        """See `Store`."""
        rows = self._call(self._scan, keys=[self._names, self._expiries], args=[prefix, self._prefix])
        names = (name.decode()[len(prefix) :] for name in rows[::2])
        return dict(zip(names, map(_entry, rows[1::2]), strict=True))

    def now(self) -> float:
        """See `Store`: Redis' time of day at its last answer, continued by this process's monotonic clock."""
        with self._comparing:
            if time.monotonic() - self._compared >= COMPARE_S:
                seconds, microseconds = self._call(self._client.time)
                self._compared = time.monotonic()
                self._offset = seconds + microseconds / 1e6 - self._compared
            # If Redis' own clock steps back, time stands still here until it has caught up.
            self._latest = max(self._latest, time.monotonic() + self._offset)
            return self._latest

    def close(self) -> None:
        """See `Store`."""
        self._client.close()

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Redis, and raise its errors as ours."""
        try:
            return call(*args, **kwargs)
        except self._redis.AuthenticationError as error:
            hint = "user and password are of the URL: redis://user:password@host:6379/0"
            raise PermissionDenied(f"Redis refuses us: {error}", uri=self._where, hint=hint) from error
        except self._redis.RedisError as error:
            hint = "is it running, and can the hub's host reach it? `redis-cli -u URL ping`"
            raise HubUnavailable(f"Redis does not answer: {error}", uri=self._where, hint=hint) from error


def _entry(raw: bytes) -> Entry:
    return Entry(raw[_VERSION_BYTES:], raw[:_VERSION_BYTES])
