"""Client of the control plane: small requests to a hub or a member's server, each under one deadline.

In: how to connect, a request. Out: its status and body.
Not here: the messages (`hub.client`, `peer.client`), the connection and the reply (`client`).

A request of 600 bytes over a Unix socket costs the caller 20 us of processor; it cost 68 us with the standard library's
client (medians of 7 x 5,000 requests, alternating, 2 cores), and three to four times as much as that with httpx. httpx
also times each read by itself, so that a hub that sent a byte now and then held a fetch for 45 s.
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
"""Longest accepted answer: the table of four million tensors."""
MAX_IDLE = 16
"""Connections that a pool keeps for reuse; more requests at once open others, which are closed after their answer."""
IDLE_S = 30.0
"""Seconds after which an idle connection is not used again. Reason: a hub closes one after a minute."""

Connect = Callable[[float], socket.socket]
"""Returns a connected socket within this many seconds. Raises OSError."""


class NoAnswer(TimeoutError):
    """The other end accepted the connection and did not answer within the deadline."""


class MalformedAnswer(OSError):
    """The other end answered something that is not HTTP/1.1, or too much."""


class PoolClosed(ConnectionAbortedError):
    """The pool was closed; nothing was sent."""


def over_unix(path: str) -> Connect:
    """Return how to connect to a Unix socket of this user."""
    return lambda timeout_s: connect_unix(path, timeout_s)


def over_tcp(host: str, port: int, trust: ssl.SSLContext | None = None) -> Connect:
    """Return how to connect by TCP; see `connect_tcp`."""
    return lambda timeout_s: connect_tcp(host, port, timeout_s, trust)


class ControlConnection(Closeable):
    """A connection, opened by its first request and kept alive. One thread at a time; any thread may interrupt it.

    Args:
        connect: opens the socket; called again after a failure.
        host: the `Host` header.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        # Without Accept-Encoding, a proxy on the way might compress an answer.
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
        """Send a request and return the status and the body of its answer.

        Args:
            timeout_s: for all of it, and one second more for each `MIN_BYTES_PER_S` sent or received.

        Raises:
            NoAnswer: the connection was open, and the deadline passed. TimeoutError: it could not be opened in time.
            MalformedAnswer: what came is no answer. OSError: the connection failed.

        After an exception the connection is closed; the next request opens another.
        """
        deadline = time.monotonic() + timeout_s
        if body is None and method in {"POST", "PUT"}:
            # Servers may refuse these methods without a length.
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
                raise NoAnswer(f"no answer within {timeout_s:g} s") from error
            except MalformedMessage as error:
                raise MalformedAnswer(f"the answer is malformed: {error.message}") from error
            except OSError as error:
                # The request must not go on over a socket that another thread closed: the system may have given its
                # number to another connection. So `close` is seen as a failure here, and nothing is opened again.
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
        """True if the next request uses a connection that was opened before; the other end may have closed it."""
        return self._client is not None

    @property
    def is_reusable(self) -> bool:
        """True if the connection is open and was used a short time ago, and the other end has not closed it."""
        client = self._client
        is_recent = time.monotonic() - self._idle_since_s <= IDLE_S
        return client is not None and is_recent and client.wire.is_silent

    def interrupt(self) -> None:
        """Abort the request of another thread, which gets an OSError. The next request opens another connection."""
        client = self._client
        if client is not None:
            client.wire.cut()

    def close(self) -> None:
        """Close the connection. Idempotent; a later request would open another."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class ControlPool(Closeable):
    """Connections to one address, for any number of threads.

    Args:
        connect: opens a socket.
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
        """Lend a free or a new connection for the block; the pool keeps it afterwards if it can be reused.

        Raises:
            PoolClosed: the pool was closed.
        """
        stale: list[ControlConnection] = []
        with self._lock:
            if not self._is_open:
                raise PoolClosed("the connections were closed")
            lent = None
            while self._idle and lent is None:
                # The one used last, so that those that a burst of requests opened grow old and are closed.
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
                # The other end may close it until it is lent again, so only then is it asked whether it can be reused.
                is_kept = self._is_open and len(self._idle) < MAX_IDLE and lent.is_open
                if is_kept:
                    self._idle.append(lent)
            if not is_kept:
                lent.close()

    def close(self) -> None:
        """Close every connection. Idempotent.

        Requests under way end with an OSError; one that still connects ends at its deadline at the latest.
        """
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
