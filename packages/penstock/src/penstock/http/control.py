"""Client of the control plane: small requests to a hub or to a member's server, each with one deadline.

`hub.client` and `peer.client` have the messages. A request of 600 bytes over a Unix socket costs 20 us of processor
time, compared with 68 us in the standard library's client (medians of 7 x 5,000 requests, alternating, 2 cores) and
three to four times as much as that in httpx. httpx also limits only single reads, so a hub that sent single bytes held
a fetch for 45 s.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from penstock.http.client import ClientConnection, connect_tcp
from penstock.http.head import MalformedMessage
from penstock.interrupts import is_of_handler
from penstock.lifecycle import Closeable
from penstock.net.unix_sockets import connect_unix

MAX_ANSWER_BYTES = 256 << 20
"""Maximum size of an answer: the table of four million tensors."""
MAX_IDLE = 16
"""Maximum number of idle connections in a pool. Additional ones are closed after their answer."""
IDLE_S = 30.0
"""Seconds until an idle connection is no longer used. Reason: a hub closes one after a minute."""

Connect = Callable[[float], socket.socket]
"""Returns a socket that is connected within the given seconds. Raises OSError."""


class NoAnswer(TimeoutError):
    """The other end accepted the connection but did not answer before the deadline."""


class MalformedAnswer(OSError):
    """The answer is not HTTP/1.1, or is too long."""


class PoolClosed(ConnectionAbortedError):
    """The pool was closed, and nothing was sent."""


def over_unix(path: str) -> Connect:
    """Return a function that connects to a Unix socket of this user."""
    return lambda timeout_s: connect_unix(path, timeout_s)


def over_tcp(host: str, port: int, trust: ssl.SSLContext | None = None) -> Connect:
    """Return a function that connects by TCP. See `connect_tcp`."""
    return lambda timeout_s: connect_tcp(host, port, timeout_s, trust)


class ControlConnection(Closeable):
    """A connection that its first request opens. One thread uses it at a time, but any thread may interrupt it.

    Args:
        connect: opens the socket. Called again after a failure.
        host: the `Host` header.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        # Without Accept-Encoding, a proxy might compress the answer.
        self._fields = [("Host", host), ("Accept-Encoding", "identity")]
        self._client: ClientConnection | None = None
        self._idle_since_s = 0.0

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Send a request and return the status and body of its answer.

        An exception closes the connection. The next request opens a new one.

        Args:
            timeout_s: seconds for the whole request, plus one for each `MIN_BYTES_PER_S` sent or received.

        Raises:
            NoAnswer: the deadline passed after the connection was opened.
            TimeoutError: the connection could not be opened in time.
            MalformedAnswer: the answer is malformed.
            OSError: the connection failed.
        """
        deadline = time.monotonic() + timeout_s
        if body is None and method in {"POST", "PUT"}:
            # Servers may refuse these methods without a Content-Length.
            body = b""
        fields = [*self._fields, *headers.items()] if headers else self._fields
        try:
            client = self._client
            if client is None:
                client = self._client = ClientConnection(self._connect(timeout_s), pace_s=timeout_s)
            try:
                reply = client.request(method, path, fields, body, wait_s=max(0.001, deadline - time.monotonic()))
                answer = reply.read(MAX_ANSWER_BYTES)
            except TimeoutError as error:
                if is_of_handler(error):
                    raise
                raise NoAnswer(f"the server did not answer within {timeout_s:g} s") from error
            except MalformedMessage as error:
                raise MalformedAnswer(f"the answer is malformed: {error.message}") from error
            except OSError as error:
                # Never reuse a socket that another thread closed, because its number may belong to another connection
                # by now. `close` is therefore reported as a failure, and the request is not repeated.
                if client.wire.is_closed:
                    raise ConnectionAbortedError("another thread closed the connection") from error
                raise
        except BaseException:
            self.close()
            raise
        if reply.is_reusable:
            self._idle_since_s = time.monotonic()
        else:
            self.close()
        return reply.status, answer

    @property
    def is_open(self) -> bool:
        """True if the next request uses an open connection. The other end may have closed it."""
        return self._client is not None

    @property
    def is_reusable(self) -> bool:
        """True if the connection was used recently and the other end has not closed it."""
        client = self._client
        is_recent = time.monotonic() - self._idle_since_s <= IDLE_S
        return client is not None and is_recent and client.wire.is_silent

    def interrupt(self) -> None:
        """Abort another thread's request, which raises OSError. The next request opens a new connection."""
        client = self._client
        if client is not None:
            client.wire.cut()

    def close(self) -> None:
        """Close the connection. Idempotent. A later request opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class ControlPool(Closeable):
    """Connections to one address, for any number of threads.

    Args:
        host: the `Host` header.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        self._host = host
        self._lock = threading.Lock()
        self._idle: list[ControlConnection] = []
        self._busy: set[ControlConnection] = set()
        self._is_open = True

    @contextlib.contextmanager
    def connection(self) -> Iterator[ControlConnection]:
        """Lend an idle or new connection for the block. Afterwards the pool keeps it if it can be reused.

        Raises:
            PoolClosed: the pool was closed.
        """
        stale: list[ControlConnection] = []
        with self._lock:
            if not self._is_open:
                raise PoolClosed("the pool was closed")
            lent = None
            while self._idle and lent is None:
                # Take the connection used last, so that surplus connections of a burst become old and are closed.
                candidate = self._idle.pop()
                if candidate.is_reusable:
                    lent = candidate
                else:
                    stale.append(candidate)
            lent = lent or ControlConnection(self._connect, self._host)
            self._busy.add(lent)
        for old in stale:
            old.close()
        try:
            yield lent
        finally:
            with self._lock:
                self._busy.discard(lent)
                # Whether the other end has closed it is checked when it is lent again.
                keeps = self._is_open and len(self._idle) < MAX_IDLE and lent.is_open
                if keeps:
                    self._idle.append(lent)
            if not keeps:
                lent.close()

    def close(self) -> None:
        """Close every connection. Idempotent.

        Requests in progress raise OSError. A request that is still connecting ends by its deadline.
        """
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
