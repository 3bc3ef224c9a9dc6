"""Counts the connections of a listener, and cuts those that cost too much: too many, too slow, unproven.

In: `ConnectionLimits`, connections as they come. Out: a `Connection` each, or a refusal.
Not here: sockets (`listener`), what a request must show (each server).

    accepted -> unproven --prove--> proven -> released
                   |  deadline, or the oldest of too many       deadline, or the longest idle of its principal
                   +-> cut                                      +-> cut
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from penstock.net.limits import ConnectionLimits

LOG_EVERY_S = 10.0
"""At most one line about refused connections in this time: 1,100 half heads wrote 26 MB of log in 55 s without it."""
SWEEP_S = 1.0
"""How often deadlines are looked at."""
_SWEPT_WITHIN_S = 2.0
"""Between two looks at deadlines, twice what is usual; more means that the process stood still."""
_log = logging.getLogger("penstock.net")


class Connection:
    """One admitted connection. Its server says what it waits for; `Admission` cuts it when that does not come.

    Attributes:
        admitted: when, on the monotonic clock.
        address: whom it counts against while it is unproven.
        principal: who proved to be there; None: nobody yet.
        cut: ends the connection at once, from any thread; replaced by servers that know a better way.
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
        self._admission, self.address, self.cut = admission, address, cut
        self.principal: str | None = None
        self.admitted = time.monotonic()
        self.deadline = self.admitted + admission.limits.head_s
        self._is_busy = self._is_cut = False

    def expect(self, seconds: float) -> None:
        """Allow this many seconds from now for what comes next."""
        self.deadline = time.monotonic() + seconds

    @property
    def limits(self) -> ConnectionLimits:
        """Of the listener."""
        return self._admission.limits

    @property
    def is_proven(self) -> bool:
        """Whether it showed who it is."""
        return self.principal is not None

    def prove(self, principal: str) -> bool:
        """Count it as this principal's from here on; False if that has too many connections, all of them busy."""
        return self._admission._prove(self, principal)

    def begin(self, seconds: float) -> None:
        """A whole request is here; it is answered within this many seconds."""
        self._is_busy = True
        self.expect(seconds)

    def end(self) -> None:
        """The answer was taken; the next request may take `idle_s` to come."""
        self._is_busy = False
        self.expect(self._admission.limits.idle_s if self.is_proven else self._admission.limits.head_s)
        self._admission._used(self)

    def release(self) -> None:
        """The socket is closed. Idempotent."""
        self._admission._release(self)


class Admission:
    """The connections of one listener; from any thread."""

    def __init__(self, limits: ConnectionLimits, *, name: str) -> None:
        self.limits, self._name = limits, name
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        # Oldest first.
        self._unproven: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Connection, None]] = {}
        # Longest unused first.
        self._by_principal: dict[str, OrderedDict[Connection, None]] = {}
        self._swept_at = time.monotonic() - SWEEP_S
        # Over their deadline when they were last looked at; not cut yet.
        self._late: list[Connection] = []
        self._logged_at, self._num_unlogged = -LOG_EVERY_S, 0

    @property
    def num_open(self) -> int:
        """Connections at this moment."""
        return len(self._open)

    def admit(self, address: str, cut: Callable[[], None]) -> Connection | None:
        """Take a new connection, for which an older one may be cut; None: refuse it.

        Args:
            address: the peer's host; connections from everywhere else are counted apart.
            cut: ends it; called from any thread.
        """
        limits, victim = self.limits, None
        connection = Connection(self, network_of(address), cut)
        with self._lock:
            mine = self._by_address.get(connection.address)
            if mine is not None and len(mine) >= limits.unproven_per_address:
                victim = next(iter(mine))
            elif self._unproven and (len(self._unproven) >= limits.unproven or len(self._open) >= limits.total):
                victim = next(iter(self._unproven))
            elif len(self._open) >= limits.total:
                connection._is_cut = True
            if victim is not None and victim.admitted + limits.grace_s > connection.admitted:
                victim, connection._is_cut = None, True
            if victim is not None:
                self._forget_unproven(victim)
                victim._is_cut = True
            if not connection._is_cut:
                self._open.add(connection)
                self._unproven[connection] = None
                self._by_address.setdefault(connection.address, OrderedDict())[connection] = None
        if victim is not None:
            victim.cut()
            self.tell("a connection that showed nothing was cut for a newer one")
        if connection._is_cut:
            self.tell("a connection was refused: all places are taken")
            return None
        return connection

    def sweep(self, most: int | None = None) -> None:
        """Cut connections whose deadline is over. Call it about once a second, or more often.

        Args:
            most: cut at most this many; the others at the next call. None: all of them.
        """
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_S:
            # A process that got no processor for a while did not read what came meanwhile: that is not the peers'
            # fault.
            stood_s = max(0.0, now - self._swept_at - _SWEPT_WITHIN_S)
            self._swept_at = now
            with self._lock:
                self._late = [one for one in self._open if one.deadline + stood_s < now and not one._is_cut]
        late, self._late = self._late[:most], self._late[len(self._late[:most]) :]
        with self._lock:
            # A deadline may have been put off since it was looked at.
            late = [one for one in late if one.deadline < now and not one._is_cut]
            for one in late:
                one._is_cut = True
                self._forget_unproven(one)
        for one in late:
            one.cut()
        if any(not one.is_proven for one in late):
            self.tell("a connection sent no whole request in time")

    def cut_all(self) -> None:
        """Cut every connection: what they are about is over."""
        with self._lock:
            victims = [one for one in self._open if not one._is_cut]
            for one in victims:
                one._is_cut = True
                self._forget_unproven(one)
        for one in victims:
            one.cut()

    def make_room(self) -> None:
        """Cut some of the oldest unproven connections: the process has no descriptor left."""
        with self._lock:
            victims = [one for one, _ in zip(self._unproven, range(16), strict=False)]
            for one in victims:
                self._forget_unproven(one)
                one._is_cut = True
        for one in victims:
            one.cut()
        self.tell("no descriptor is left for a connection (RLIMIT_NOFILE)")

    def tell(self, what: str) -> None:
        """Log a refusal, at most one line every `LOG_EVERY_S`."""
        now = time.monotonic()
        with self._lock:
            self._num_unlogged += 1
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at, num = now, self._num_unlogged
            self._num_unlogged = 0
        _log.warning("%s: %s (%d such since the last line; %d open)", self._name, what, num, len(self._open))

    def _prove(self, connection: Connection, principal: str) -> bool:
        if connection.principal == principal:
            return True
        victim = None
        with self._lock:
            if connection not in self._open:
                return False
            mine = self._by_principal.setdefault(principal, OrderedDict())
            if len(mine) >= self.limits.per_principal:
                victim = next((one for one in mine if not one._is_busy and not one._is_cut), None)
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
    """Return what connections of this host are counted under: its IPv4 address, or the /64 of its IPv6 address."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    # One host has a whole /64 to choose from. Source: RFC 7421.
    return str(ipaddress.IPv6Network((found, 64), strict=False))
