"""Client of the control plane: small HTTP/1.1 requests to a hub or a member's server, each under one deadline.

In: how to connect, a request. Out: its status and body.
Not here: the questions (`hub.client`, `peer.client`), bodies received into the caller's memory (`http.client`).

Requests and answers are those of the standard library's `http.client`. Beside httpx, which the hub's client used
before: a beat costs the member 0.41 ms of processor instead of 1.4 to 1.6 (median of 5 x 1,000 on a Unix socket, 2
cores); httpx times each read by itself, so that a hub that sent a byte now and then held a fetch for 45 s; and members
need no package for it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.lifecycle import Closing
from penstock.net.admission import MIN_BYTES_PER_S
from penstock.net.timed import TimedReader
from penstock.net.unix_sockets import connect_unix

MAX_ANSWER_BYTES = 256 << 20
"""Longest accepted answer: the table of four million tensors."""
MAX_IDLE = 16
"""Connections that a pool keeps for reuse; more requests at once open others, which are closed after their answer."""
IDLE_S = 30.0
"""Seconds after which an idle connection is not used again. Reason: a hub closes one after a minute."""

Connect = Callable[[float], socket.socket]
"""Returns a connected socket within so many seconds. Raises OSError."""


class NoAnswer(TimeoutError):
    """The other end accepted the connection and did not answer within the deadline."""


class MalformedAnswer(OSError):
    """The other end answered something that is no HTTP, or too much."""


class PoolClosed(ConnectionAbortedError):
    """The pool was closed; nothing was sent."""


def over_unix(path: str) -> Connect:
    """Return how to connect to a Unix socket of this user."""
    return lambda timeout_s: connect_unix(path, timeout_s)


def over_tcp(host: str, port: int, trust: ssl.SSLContext | None = None) -> Connect:
    """Return how to connect by TCP.

    Args:
        trust: how the other end's certificate is checked, and what it is shown; None: no TLS.
    """

    def connect(timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection((host, port), timeout_s)
        except UnicodeError as error:
            raise OSError(f"{host!r} is no name of a host") from error
        try:
            # A request is sent in one piece and its answer is waited for: a delay to fill packets only costs time.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if trust is None:
                return sock
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            return trust.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    return connect


class _Answer(http.client.HTTPResponse):
    """A response with one deadline for all of it, which only bytes that arrive extend."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        seconds = sock.gettimeout()
        assert seconds is not None
        self.fp.close()
        self.fp = io.BufferedReader(TimedReader(sock, seconds))


class ControlConnection(Closing):
    """One connection, opened by its first request and kept alive. One thread at a time; any thread may interrupt it.

    Args:
        connect: opens the socket; called again after a failure.
        host: the `Host` header.
    """

    def __init__(self, connect: Connect, host: str) -> None:
        self._connect = connect
        self._http = http.client.HTTPConnection(host)
        # The socket is set before each request. Without this, a request on a connection that another thread closes at
        # that moment would be sent, grant and all, to whatever listens at port 80 of `host`.
        self._http.auto_open = 0
        self._http.response_class = _Answer
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
            NoAnswer: it was connected, and the deadline passed. TimeoutError: it was not.
            MalformedAnswer: what came is no answer. OSError: the connection failed.

        After an exception the connection is closed; the next request opens another.
        """
        deadline = time.monotonic() + timeout_s + len(body or b"") / MIN_BYTES_PER_S
        try:
            sock = self._http.sock
            if sock is None:
                sock = self._http.sock = self._connect(timeout_s)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                with contextlib.suppress(BrokenPipeError):
                    # A server without a free connection answers before it reads the request, and closes. Its answer
                    # is still in the socket's buffer.
                    self._http.request(method, path, body, dict(headers or {}))
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                response = self._http.getresponse()
                answer = response.read(MAX_ANSWER_BYTES)
            except TimeoutError as error:
                raise NoAnswer(f"no answer within {timeout_s:g} s") from error
            except http.client.RemoteDisconnected:
                raise  # an OSError: the other end closed the connection
            except http.client.NotConnected as error:
                raise ConnectionAbortedError("another thread closed the connection") from error
            except (http.client.HTTPException, UnicodeError) as error:
                raise MalformedAnswer(f"the answer is malformed: {error or type(error).__name__}") from error
            if not response.isclosed():
                raise MalformedAnswer(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        except BaseException:
            self._http.close()
            raise
        self._idle_since_s = time.monotonic()
        return response.status, answer

    @property
    def is_open(self) -> bool:
        """Whether the next request uses a connection that was opened before; the other end may have closed it."""
        return self._http.sock is not None

    @property
    def is_reusable(self) -> bool:
        """Whether the connection is open and was used a short time ago, and the other end has not closed it."""
        sock = self._http.sock
        if sock is None or time.monotonic() - self._idle_since_s > IDLE_S:
            return False
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0)

    def interrupt(self) -> None:
        """Abort the request of another thread, which gets an OSError. The next request opens another connection."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it has just ended by itself
                # Not SSLSocket.shutdown: it drops the TLS state under the other thread.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent; a later request would open another."""
        self._http.close()


class ControlPool(Closing):
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
                is_kept = self._is_open and len(self._idle) < MAX_IDLE and lent.is_reusable
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
