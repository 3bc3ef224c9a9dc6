"""Client of the control plane: small requests to a hub or to a member's server, each with one deadline.

A request of 600 bytes over a Unix socket costs 20 us of CPU time. The standard library's client needs 68 us (medians of
7 x 5,000 requests, 2 cores), and httpx three to four times as much. httpx also limits only single reads, so a hub that
sent single bytes held up a fetch for 45 s.
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
"""Maximum size of a response, enough for a table of four million tensors."""
MAX_IDLE = 16
"""Maximum number of idle connections in a pool. Further connections are closed after their response."""
IDLE_S = 30.0
"""Seconds after which an idle connection is no longer used. A hub closes idle connections after a minute."""

Connect = Callable[[float], socket.socket]
"""Returns a socket that is connected within the given seconds. Raises OSError."""


class NoAnswer(TimeoutError):
    """The server accepted the connection but did not respond before the deadline."""


class MalformedAnswer(OSError):
    """The response is not HTTP/1.1, or is too long."""


class PoolClosed(ConnectionAbortedError):
    """The pool was closed, and nothing was sent."""


def over_unix(path: str) -> Connect:
    """Return a function that connects to a Unix socket of this user."""
    return lambda timeout_s: connect_unix(path, timeout_s)


def over_tcp(host: str, port: int, trust: ssl.SSLContext | None = None) -> Connect:
    """Return a function that connects by TCP. See `connect_tcp`."""
    return lambda timeout_s: connect_tcp(host, port, timeout_s, trust)


class ControlConnection(Closeable):
    """A connection that the first request opens, used by one thread at a time but interruptible from any thread.

    Args:
        connect: opens the socket, and is called again after a failure.
        host: the `Host` header.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        # Without Accept-Encoding, a proxy might compress the response.
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
        """Send a request and return the status and body of its response. An exception closes the connection.

        Args:
            timeout_s: seconds for the whole request, plus one for each `MIN_BYTES_PER_S` that is sent or received.

        Raises:
            NoAnswer: the deadline passed after the connection was opened.
            MalformedAnswer: the response is malformed.
            OSError: the connection failed, or TimeoutError if it could not be opened in time.
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
                raise NoAnswer(f"the server did not respond within {timeout_s:g} s") from error
            except MalformedMessage as error:
                raise MalformedAnswer(f"the response is malformed: {error.message}") from error
            except OSError as error:
                # The descriptor of the closed socket may belong to another socket by now, so do not retry.
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
        """True if the next request uses an open connection, which the server may have closed already."""
        return self._client is not None

    @property
    def is_reusable(self) -> bool:
        """True if the connection was used recently and the server has not closed it."""
        client = self._client
        is_recent = time.monotonic() - self._idle_since_s <= IDLE_S
        return client is not None and is_recent and client.wire.is_silent

    def interrupt(self) -> None:
        """Abort another thread's request, which raises OSError. The next request opens a new connection."""
        client = self._client
        if client is not None:
            client.wire.cut()

    def close(self) -> None:
        """Close the connection. A later request opens a new connection. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class ControlPool(Closeable):
    """Connections to one address, for any number of threads. `host` is the `Host` header."""

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        self._host = host
        self._lock = threading.Lock()
        self._idle: list[ControlConnection] = []
        self._busy: set[ControlConnection] = set()
        self._is_open = True

    @contextlib.contextmanager
    def connection(self) -> Iterator[ControlConnection]:
        """Lend an idle or new connection for the block. Raises PoolClosed after `close`."""
        stale: list[ControlConnection] = []
        with self._lock:
            if not self._is_open:
                raise PoolClosed("the pool was closed")
            lent = None
            while self._idle and lent is None:
                # Prefer the connection used last, so that surplus connections from a burst become old and are closed.
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
                keeps = self._is_open and len(self._idle) < MAX_IDLE and lent.is_open
                if keeps:
                    self._idle.append(lent)
            if not keeps:
                lent.close()

    def close(self) -> None:
        """Close every connection. Requests in progress raise OSError, but a pending connect continues. Idempotent."""
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
