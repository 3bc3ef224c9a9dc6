"""Admission control of a listener: its limits, and which connections are cut when there are too many or they are slow.

In: `ConnectionLimits`, connections as they arrive. Out: one `Connection` for each, or a refusal.
Not here: sockets (`listener`), deadlines of one message (`timed`), the credentials of a request (each server).

    accepted -> unproven --prove--> proven -> released
                   |  deadline, or the oldest of too many       deadline, or the longest idle of its principal
                   +-> cut                                      +-> cut

A connection's server calls `prove`, `begin`, `end` and `release`, from any thread. The listener calls `admit` and
`sweep` from one thread. `cut` only shuts a socket down: its server sees the end, closes it, and then frees the place.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.logs import log_named

MIN_BYTES_PER_S = 1 << 20
"""Slowest accepted rate of a message, in bytes/s: its deadline moves by 1 s for each MiB. Reason: 8 Mb/s is a poor
link."""
_KEPT_DESCRIPTORS = 128
"""File descriptors kept for other uses: files, libraries, a store. Source: an idle hub has 40 open."""
_MOST_CONNECTIONS = 1 << 16
"""Upper bound of the connections of one listener; 64 Ki connections take about 0.6 GiB in the hub."""
_MOST_UNPROVEN = 1 << 14
"""Upper bound of the unproven connections; 16 Ki take about 0.2 GiB in the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener. A connection is *proven* once the peer authenticated: by a token, a grant, the same user.

    Attributes:
        total: connections at once. A member serves each in a thread, so this bounds threads, too.
        unproven: connections that have not authenticated yet, part of `total`. Above it the oldest of them is cut, or
            the new one is refused while all are younger than `grace_s`. The rest is reserved for proven connections,
            which are never cut in favour of an unproven one.
        unproven_per_address: the same for one address (one /64 of IPv6), so that one host cannot take all places.
        per_principal: proven connections of one token, member or user; above it the longest idle one is cut.
        head_s: seconds for a TLS handshake and the first head, from the connection on, and for every later head from
            its first byte on. Members send a head in one piece.
        head_bytes: longest head. Ours are below 1 KiB; proxies add a few hundred bytes.
        grace_s: age in seconds below which an unproven connection is not cut in favour of a newer one. It bounds the
            admissions per second: a refusal costs a tenth of an admission.
        idle_s: seconds without a request before a proven connection is cut.
        answer_s: seconds for the peer to read an answer, and one more for each `MIN_BYTES_PER_S` of it.
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
        """Return the limits of a listener whose process may open this many file descriptors."""
        total = max(16, min(num_descriptors - _KEPT_DESCRIPTORS, _MOST_CONNECTIONS))
        # Keeping an unproven connection until its deadline costs memory once. Cutting it early costs CPU time each
        # time the peer connects again.
        unproven = min(total // 2, _MOST_UNPROVEN)
        return cls(
            total=total,
            unproven=unproven,
            unproven_per_address=max(8, unproven // 4),
            per_principal=max(8, total * 3 // 4),
            idle_s=idle_s,
            answer_s=answer_s,
        )


LOG_EVERY_S = 10.0
"""At most one line about refused connections in this time: 1,100 half heads wrote 26 MB of log in 55 s without it."""
SWEEP_S = 1.0
"""Interval between two checks of the deadlines."""
_SWEPT_WITHIN_S = 2.0
"""Twice the usual interval between two checks; a longer one means that the process did not run in between."""
_log = log_named("penstock.net")


class Connection:
    """An admitted connection with a deadline. Its server moves the deadline; `Admission` cuts the connection after it.

    Attributes:
        admitted: time of admission, on the monotonic clock.
        address: the network that the connection counts against while it is unproven.
        principal: the authenticated peer; None: not authenticated yet.
        deadline: time after which the connection is cut, on the monotonic clock.
        cut: ends the connection at once, from any thread; a server may replace it with its own way to do that.
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
        # Set under the admission's lock by whoever decides to cut, so that each connection is cut once.
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
        """Count the connection as this principal's from now on.

        Returns False if the principal has too many connections already and all of them are busy.
        """
        return self._admission._prove(self, principal)

    def begin(self, seconds: float) -> None:
        """Mark the connection busy: a request is complete, and its answer must be sent within this many seconds."""
        self._is_busy = True
        self.expect(seconds)

    def end(self) -> None:
        """Mark the connection idle after an answer; the next request may take `idle_s` to arrive."""
        self._is_busy = False
        self.expect(self._admission.limits.idle_s if self.is_proven else self._admission.limits.head_s)
        self._admission._used(self)

    def release(self) -> None:
        """Free the connection's place after its socket was closed. Idempotent."""
        self._admission._release(self)


class Admission:
    """The open connections of one listener. Thread-safe.

    Args:
        limits: of the listener.
        name: of the listener, for the log.
    """

    def __init__(self, limits: ConnectionLimits, *, name: str) -> None:
        self.limits = limits
        self._name = name
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        # Ordered sets, so that the victim is found in constant time: under a flood this runs for each connection.
        # Oldest first.
        self._unproven: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Connection, None]] = {}
        # Longest unused first.
        self._by_principal: dict[str, OrderedDict[Connection, None]] = {}
        self._swept_at = time.monotonic() - SWEEP_S
        # Past their deadline at the last check; not cut yet.
        self._late: list[Connection] = []
        self._logged_at = -LOG_EVERY_S
        self._num_unlogged = 0

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def admit(self, address: str, cut: Callable[[], None]) -> Connection | None:
        """Admit a new connection, cutting an older one if that is needed; return None to refuse it.

        Args:
            address: the peer's host; the limit per address counts connections of its network only.
            cut: ends the connection; called from any thread.
        """
        limits = self.limits
        connection = Connection(self, network_of(address), cut)
        victim = None
        with self._lock:
            mine = self._by_address.get(connection.address)
            if mine is not None and len(mine) >= limits.unproven_per_address:
                # Of the same address, so that one host's connections push out each other and nobody else's.
                victim = next(iter(mine))
            elif self._unproven and (len(self._unproven) >= limits.unproven or len(self._open) >= limits.total):
                victim = next(iter(self._unproven))
            elif len(self._open) >= limits.total:
                # All places are taken by proven connections.
                connection._is_cut = True
            if victim is not None and victim.admitted + limits.grace_s > connection.admitted:
                # In a flood each connection would push out the one before, and none would have time to authenticate.
                victim = None
                connection._is_cut = True
            if victim is not None:
                self._forget_unproven(victim)
                victim._is_cut = True
            if not connection._is_cut:
                self._open.add(connection)
                self._unproven[connection] = None
                self._by_address.setdefault(connection.address, OrderedDict())[connection] = None
        # Without the lock, here and below: `cut` is the server's own callable, and may take locks of its own.
        if victim is not None:
            victim.cut()
            self.report("an unauthenticated connection was closed in favour of a newer one")
        if connection._is_cut:
            self.report("a connection was refused: the limit of connections is reached")
            return None
        return connection

    def sweep(self, most: int | None = None) -> None:
        """Cut connections whose deadline has passed. Call this about once a second, or more often.

        Args:
            most: cut at most this many now and the others at the next call; None: no limit.
        """
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_S:
            # A process that was stopped or starved of CPU did not read what arrived in that time. The peers are not
            # at fault, so the pause is added to their deadlines.
            paused_s = max(0.0, now - self._swept_at - _SWEPT_WITHIN_S)
            self._swept_at = now
            with self._lock:
                for conn in self._open:
                    conn.deadline += paused_s
                self._late = [conn for conn in self._open if conn.deadline < now and not conn._is_cut]
        late = self._late[:most]
        self._late = self._late[len(late) :]
        with self._lock:
            # A deadline may have been moved since the check.
            late = [conn for conn in late if conn.deadline < now and not conn._is_cut]
            for conn in late:
                conn._is_cut = True
                self._forget_unproven(conn)
        for conn in late:
            conn.cut()
        if any(not conn.is_proven for conn in late):
            self.report("a connection sent no complete request in time")

    def cut_all(self) -> None:
        """Cut every connection; for a server that ends."""
        with self._lock:
            victims = [conn for conn in self._open if not conn._is_cut]
            for conn in victims:
                conn._is_cut = True
                self._forget_unproven(conn)
        for conn in victims:
            conn.cut()

    def make_room(self) -> None:
        """Cut some of the oldest unproven connections, because the process has no file descriptor left."""
        with self._lock:
            victims = [conn for conn, _ in zip(self._unproven, range(16), strict=False)]
            for conn in victims:
                self._forget_unproven(conn)
                conn._is_cut = True
        for conn in victims:
            conn.cut()
        self.report("no file descriptor is left for a connection: raise RLIMIT_NOFILE")

    def forget(self) -> None:
        """In a forked child: renew the lock, so that copies of the parent's connections can be closed."""
        # Another thread of the parent may have held it when the child was forked.
        self._lock = threading.Lock()

    def report(self, what: str) -> None:
        """Log a refusal, at most one line every `LOG_EVERY_S`."""
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
            # It may have been released meanwhile, and would be counted for ever.
            if connection not in self._open:
                return False
            mine = self._by_principal.setdefault(principal, OrderedDict())
            if len(mine) >= self.limits.per_principal:
                # The longest idle one. A busy connection is never cut: its answer is under way.
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
        # `self` stands for "not there": the values are None.
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
    """Return the network that connections of a host count against: its IPv4 address, or the /64 of its IPv6 address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    # One host has a whole /64 to choose from. Source: RFC 7421.
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
