"""Admission control for a listener: connection limits, and the choice of the connections to close.

A connection is unproven until its peer authenticates. The server that owns the connections calls `prove`, `begin`,
`end` and `release`, from any thread. The listener calls `admit` and `sweep` from one thread. `cut` only shuts a socket
down, so that the server detects the end of the connection and closes the socket.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from penstock.logs import log_named

MIN_BYTES_PER_S = 1 << 20
"""Slowest accepted rate of a message. Each MiB extends its deadline by 1 s, because 8 Mb/s is a poor link."""
_KEPT_DESCRIPTORS = 128
"""File descriptors reserved for files, libraries and a store. Source: an idle hub has 40 open."""
_MAX_CONNECTIONS = 1 << 16
"""Maximum number of connections to a listener. 65,536 connections take about 0.6 GiB in the hub."""
_MAX_UNPROVEN = 1 << 14
"""Maximum number of unauthenticated connections. 16,384 connections take about 0.2 GiB in the hub."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a listener. A connection is *proven* once the peer has authenticated by a token, a grant or its user.

    Attributes:
        total: maximum number of connections. A member serves each connection in a thread, so this also limits threads.
        unproven: maximum number of unauthenticated connections, counted within `total`. At the limit, the oldest
            unauthenticated connection is closed, or the new connection is refused if all are younger than `grace_s`.
            Authenticated connections are never closed in favour of unauthenticated connections.
        unproven_per_address: maximum number of unauthenticated connections per address (or IPv6 /64), so that no host
            uses all the connections.
        per_principal: maximum number of authenticated connections per token, member or user. At the limit, the longest
            idle connection is closed.
        head_s: seconds for a TLS handshake and the first request head, counted from the start of the connection. Each
            later request head has the same limit, counted from the head's first byte.
        head_bytes: maximum size of a request head. Penstock sends less than 1 KiB, and proxies add a few hundred bytes.
        grace_s: minimum age in seconds of an unauthenticated connection that is closed for a newer one.
        idle_s: seconds without a request after which an authenticated connection is closed.
        answer_s: seconds for the peer to read a response, plus one second for each `MIN_BYTES_PER_S` bytes.
    """

    total: int = 512
    unproven: int = 256
    unproven_per_address: int = 128
    per_principal: int = 384
    head_s: float = 10.0
    head_bytes: int = 16 << 10
    grace_s: float = 1.0
    idle_s: float = 60.0
    answer_s: float = 30.0

    @classmethod
    def for_descriptors(cls, num_descriptors: int, *, idle_s: float = 60.0, answer_s: float = 30.0) -> ConnectionLimits:
        """Return the limits for a process that may open this many file descriptors."""
        total = max(16, min(num_descriptors - _KEPT_DESCRIPTORS, _MAX_CONNECTIONS))
        # Allow many unauthenticated connections, because closing one makes the peer reconnect, which costs CPU time.
        unproven = min(total // 2, _MAX_UNPROVEN)
        return cls(
            total=total,
            unproven=unproven,
            unproven_per_address=max(8, unproven // 4),
            per_principal=max(8, total * 3 // 4),
            idle_s=idle_s,
            answer_s=answer_s,
        )


LOG_EVERY_S = 10.0
"""Seconds between two log lines about refusals. Without this limit, 1,100 partial heads caused 26 MB of log in 55 s."""
SWEEP_S = 1.0
"""Seconds between two checks of the deadlines."""
_SWEPT_WITHIN_S = 2.0
"""Twice the usual interval between two checks. A longer interval means that the process was not running."""
_log = log_named("penstock.net")


class Connection:
    """An admitted connection. The server extends the deadline, after which `Admission` aborts the connection.

    Times are on the monotonic clock. An unauthenticated connection counts toward the limit of its `address`, and an
    authenticated one toward that of its `principal`. A server may replace `cut`, which aborts the connection.
    """

    __slots__ = (
        "__weakref__",
        "_admission",
        "_is_busy",
        "_is_cut",
        "address",
        "admitted",
        "cut",
        "deadline",
        "principal",
    )

    def __init__(self, admission: Admission, address: str, cut: Callable[[], None]) -> None:
        self.address = address
        self.principal: str | None = None
        self.admitted = time.monotonic()
        self.deadline = self.admitted + admission.limits.head_s
        self.cut = cut
        self._admission = admission
        self._is_busy = False
        # The admission's lock guards this flag, so that only one thread aborts the connection.
        self._is_cut = False

    def expect(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self.deadline = time.monotonic() + seconds

    @property
    def limits(self) -> ConnectionLimits:
        """Limits of the listener."""
        return self._admission.limits

    @property
    def is_proven(self) -> bool:
        """True once the peer has authenticated."""
        return self.principal is not None

    def prove(self, principal: str) -> bool:
        """Count the connection toward this principal. Return False if the principal has too many busy connections."""
        return self._admission._prove(self, principal)

    def begin(self, seconds: float) -> None:
        """Mark the connection as busy. The response must be sent within `seconds`."""
        self._is_busy = True
        self.expect(seconds)

    def end(self) -> None:
        """Mark the connection as idle after a response."""
        self._is_busy = False
        self.expect(self._admission.limits.idle_s if self.is_proven else self._admission.limits.head_s)
        self._admission._used(self)

    def release(self) -> None:
        """Remove the connection from `Admission` after its socket was closed. Idempotent."""
        self._admission._release(self)


class Admission:
    """The open connections of a listener. Thread-safe. `name` is for the log."""

    def __init__(self, limits: ConnectionLimits, *, name: str) -> None:
        self.limits = limits
        self._name = name
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        # In a flood, each new connection displaces the oldest one, which ordered sets find in constant time.
        self._unproven: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Connection, None]] = {}
        # Connections by principal, the longest unused first.
        self._by_principal: dict[str, OrderedDict[Connection, None]] = {}
        self._swept_at = time.monotonic() - SWEEP_S
        # Connections that were past their deadline at the last check and have not been aborted yet.
        self._late: list[Connection] = []
        self._logged_at = -LOG_EVERY_S
        self._num_unlogged = 0

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def admit(self, address: str, cut: Callable[[], None]) -> Connection | None:
        """Admit a new connection from `address`, or return None. Abort an older connection if needed."""
        limits = self.limits
        connection = Connection(self, network_of(address), cut)
        victim = None
        with self._lock:
            mine = self._by_address.get(connection.address)
            if mine is not None and len(mine) >= limits.unproven_per_address:
                # A host may displace only its own connections.
                victim = next(iter(mine))
            elif self._unproven and (len(self._unproven) >= limits.unproven or len(self._open) >= limits.total):
                victim = next(iter(self._unproven))
            elif len(self._open) >= limits.total:
                connection._is_cut = True
            if victim is not None and victim.admitted + limits.grace_s > connection.admitted:
                # Keep a young connection. In a flood, connections would displace each other before any authenticates.
                victim = None
                connection._is_cut = True
            if victim is not None:
                self._forget_unproven(victim)
                victim._is_cut = True
            if not connection._is_cut:
                self._open.add(connection)
                self._unproven[connection] = None
                self._by_address.setdefault(connection.address, OrderedDict())[connection] = None
        # Call `cut` without holding the lock, because the server's function may acquire other locks.
        if victim is not None:
            victim.cut()
            self.report("an unauthenticated connection was closed in favour of a newer one")
        if connection._is_cut:
            self.report("a connection was refused, because the maximum number of connections is reached")
            return None
        return connection

    def sweep(self, most: int | None = None) -> None:
        """Abort at most `most` connections past their deadline. Call this method at least once a second."""
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_S:
            # A process that was stopped or short of CPU time did not read what the peers sent, so extend the deadlines.
            paused_s = max(0.0, now - self._swept_at - _SWEPT_WITHIN_S)
            self._swept_at = now
            with self._lock:
                for conn in self._open:
                    conn.deadline += paused_s
                self._late = [conn for conn in self._open if conn.deadline < now and not conn._is_cut]
        late = self._late[:most]
        self._late = self._late[len(late) :]
        # Compare again, because a deadline may have been extended since the check.
        late = self._abort(conn for conn in late if conn.deadline < now)
        if any(not conn.is_proven for conn in late):
            self.report("a connection sent no complete request in time")

    def cut_all(self) -> None:
        """Abort every connection. Servers call this when they close."""
        self._abort(self._open)

    def make_room(self) -> None:
        """Abort the oldest unauthenticated connections, because the process is out of file descriptors."""
        self._abort(itertools.islice(self._unproven, 16))
        self.report("no file descriptor is left for a connection: raise RLIMIT_NOFILE")

    def _abort(self, victims: Iterable[Connection]) -> list[Connection]:
        """Abort and return the connections that no other thread is aborting. `victims` is read under the lock."""
        with self._lock:
            chosen = [conn for conn in victims if not conn._is_cut]
            for conn in chosen:
                conn._is_cut = True
                self._forget_unproven(conn)
        for conn in chosen:
            conn.cut()
        return chosen

    def forget(self) -> None:
        """In a forked child, renew the lock, so that copies of the parent's connections can be closed."""
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()

    def report(self, what: str) -> None:
        """Log a refusal, at most once every `LOG_EVERY_S`."""
        now = time.monotonic()
        with self._lock:
            self._num_unlogged += 1
            if now - self._logged_at < LOG_EVERY_S:
                return
            num = self._num_unlogged
            self._logged_at = now
            self._num_unlogged = 0
        _log.warning("%s: %s (%d refusals since the last line; %d open)", self._name, what, num, len(self._open))

    def _prove(self, connection: Connection, principal: str) -> bool:
        if connection.principal == principal:
            return True
        victim = None
        with self._lock:
            # Ignore a connection that was already released, because it would be counted forever.
            if connection not in self._open:
                return False
            mine = self._by_principal.setdefault(principal, OrderedDict())
            if len(mine) >= self.limits.per_principal:
                # Do not abort a busy connection, which is sending a response.
                victim = next((conn for conn in mine if not conn._is_busy and not conn._is_cut), None)
                if victim is None:
                    return False
                del mine[victim]
                victim._is_cut = True
            self._forget_unproven(connection)
            self._forget_proven(connection)
            connection.principal = principal
            mine[connection] = None
        if victim is not None:
            victim.cut()
        return True

    def _used(self, connection: Connection) -> None:
        if connection.principal is None:
            return
        with self._lock:
            mine = self._by_principal.get(connection.principal)
            if mine is not None and connection in mine:
                mine.move_to_end(connection)

    def _release(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
            self._forget_unproven(connection)
            self._forget_proven(connection)

    def _forget_unproven(self, connection: Connection) -> None:
        # Use `self` to mark an absent key, because the values are None.
        if self._unproven.pop(connection, self) is self:
            return
        mine = self._by_address[connection.address]
        del mine[connection]
        if not mine:
            del self._by_address[connection.address]

    def _forget_proven(self, connection: Connection) -> None:
        if connection.principal is None:
            return
        mine = self._by_principal.get(connection.principal)
        if mine is not None:
            mine.pop(connection, None)
            if not mine:
                del self._by_principal[connection.principal]


def network_of(address: str) -> str:
    """Return the network of a host: its IPv4 address, or the /64 of its IPv6 address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    # An IPv6 host can choose any address in its /64. Source: RFC 7421.
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
