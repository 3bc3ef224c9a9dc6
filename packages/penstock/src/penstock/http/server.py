"""HTTP/1.1 server of a fleet member, with one thread per connection, one request at a time, and limits on all waits.

A client that stops sending or reading occupies one thread until a deadline in `ConnectionLimits`, and memory for at
most one head and one body of the allowed size. The hub has thousands of clients and is an ASGI server instead.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from weakref import WeakSet

from penstock.errors import FormatError
from penstock.http.connection import HttpConnection
from penstock.http.head import RequestHead
from penstock.lifecycle import release_after_fork
from penstock.net.admission import MIN_BYTES_PER_S, Admission, Connection, ConnectionLimits, network_of
from penstock.net.listener import ThreadedListener

LIMITS = ConnectionLimits()
"""Limits of each listening socket, far above the number of readers of one member."""
_JOINED_BYTES = 64 << 10
"""Longest body sent in one call with its head. Copying it is cheaper than a second call and packet."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class RequestRefused(Exception):
    """Raised by a handler to respond with a status and no body. If `closes` is set, the connection is closed."""

    def __init__(self, status: int, *, closes: bool = True) -> None:
        super().__init__(f"refused with status {status}")
        self.status = status
        self.closes = closes


class ServerExchange:
    """A request and its response, used by the thread of the connection until the handler returns.

    After `begin_answer`, the handler sends the body over `wire`. The handler may set `closes` to close the connection
    afterwards. `body_bytes` is the announced size of the unread body.
    """

    __slots__ = ("_has_begun", "_peer", "_place", "body_bytes", "closes", "head", "wire")

    def __init__(self, head: RequestHead, wire: HttpConnection, place: Connection, peer: str) -> None:
        self.head = head
        self.wire = wire
        self.closes = not head.keeps_alive
        self._place = place
        self._peer = peer
        self.body_bytes = head.content_length or 0
        self._has_begun = False

    def prove(self) -> None:
        """Mark the connection as authenticated, so that unauthenticated connections cannot displace it."""
        self._place.prove(self._peer or "unix")

    def read_body(self, max_bytes: int) -> bytes:
        """Receive the body, which is limited to `max_bytes`. Raises RequestRefused for a longer body."""
        nbytes = self.body_bytes
        if nbytes > max_bytes:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._place.begin(_answer_wait_s(self._place.limits) + nbytes / MIN_BYTES_PER_S)
        # Send 100 Continue only now, so that a client does not send a body that would be refused.
        if nbytes and self.head.headers.get("expect", "").lower() == "100-continue":
            self.wire.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        # If the body does not arrive, the OSError closes the connection.
        self.body_bytes = 0
        return self.wire.receive_body(nbytes)

    @property
    def peer(self) -> str:
        """The client's network, or `unix` for a Unix socket."""
        return network_of(self._peer) if self._peer else "unix"

    @property
    def is_local(self) -> bool:
        """True for a Unix socket, whose peer the kernel has authenticated as this process's user."""
        return not self._peer

    def answer(self, status: int, body: bytes = b"", fields: str = "") -> None:
        """Send a complete response. `fields` are additional header lines, each with its CR LF."""
        seconds, head = self._begin(status, len(body), f"Content-Length: {len(body)}\r\n{fields}")
        self.wire.set_pace(seconds)
        if len(body) <= _JOINED_BYTES:
            self.wire.send_all(head + body)
        else:
            self.wire.send_all(head)
            self.wire.send_all(body)

    def begin_answer(self, nbytes: int, fields: str) -> None:
        """Send the head of a successful response, whose body the handler then sends over `wire`.

        `nbytes` determines the deadline for the whole body. `fields` are header lines that define the end of the body,
        each with its CR LF.
        """
        _, head = self._begin(HTTPStatus.OK, nbytes, fields)
        # The deadline of a large response is minutes away. The pace detects much sooner that a client reads nothing.
        self.wire.set_pace(self._place.limits.answer_s)
        self.wire.send_all(head)

    def begin_stream(self, lasts_s: float, fields: str) -> None:
        """Send the head of a response that ends with the connection. The handler sends the body for up to `lasts_s`."""
        self.closes = True
        self.begin_answer(0, fields)
        # Each call fails if the client reads too slowly, so one that reads nothing is detected.
        self._place.begin(lasts_s + self._place.limits.answer_s)

    def _begin(self, status: int, nbytes: int, fields: str) -> tuple[float, bytes]:
        """Set the deadline for reading the response. Return the seconds until the deadline and the response head."""
        self._has_begun = True
        if self.body_bytes:
            # Close the connection, because the unread body would be parsed as the next request.
            self.closes = True
        seconds = self._place.limits.answer_s + nbytes / MIN_BYTES_PER_S
        self._place.begin(seconds)
        return seconds, _head(status, fields, closes=self.closes)

    def refuse(self, refused: RequestRefused) -> None:
        """Respond with the status of a refusal. If a response has begun, close the connection instead."""
        if self._has_begun:
            self.closes = True
            return
        self.closes = self.closes or refused.closes
        self.answer(refused.status)


def _head(status: int, fields: str, *, closes: bool) -> bytes:
    closing = "Connection: close\r\n" if closes else ""
    return f"HTTP/1.1 {status} {_PHRASES[status]}\r\n{fields}{closing}\r\n".encode("latin-1")


def _empty_answer(status: int) -> bytes:
    return _head(status, "Content-Length: 0\r\n", closes=True)


def _answer_wait_s(limits: ConnectionLimits) -> float:
    # A handler may wait up to `idle_s` for the state that a client polls.
    return limits.idle_s + limits.answer_s


class HttpServer(ThreadedListener):
    """A listener that serves its connections with a handler, from `start` to `close`. Forked children close their copy.

    Args:
        bound: a bound socket, which the server owns from now on.
        handle: called for each request in the thread of its connection. The handler responds, raises RequestRefused, or
            raises FormatError for a malformed request. An OSError closes the connection.
        full_status: status of the response if there are too many connections.
    """

    def __init__(
        self,
        bound: socket.socket,
        handle: Callable[[ServerExchange], None],
        *,
        name: str,
        thread_name: str,
        full_status: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        # A TLS client expects a handshake first, so only close a refused connection.
        refusal = _empty_answer(full_status) if tls is None else b""
        admission = Admission(LIMITS, name=name)
        super().__init__(bound, admission, self._serve_requests, name=thread_name, tls=tls, refusal=refusal)
        self._handle = handle
        self._wires: set[HttpConnection] = set()
        _servers.add(self)

    def close(self) -> None:
        """Stop accepting, and abort all connections without waiting for their threads. Idempotent."""
        super().close()
        # Abort connections, because a stopped client would keep a thread and the handler's memory alive.
        self.admission.cut_all()

    def forget(self) -> None:
        """In a forked child, close the copies of the parent's sockets."""
        # First let the listener renew its lock, because closing a connection acquires the lock.
        super().forget()
        for wire in list(self._wires):
            wire.close()

    def _serve_requests(self, sock: socket.socket, place: Connection, peer: str) -> None:
        wire = HttpConnection(sock, pace_s=place.limits.head_s)
        self._wires.add(wire)
        try:
            # `cut_all` may miss a connection during its TLS handshake.
            while self._is_open and self._serve_request(wire, place, peer):
                place.end()
        finally:
            self._wires.discard(wire)

    def _serve_request(self, wire: HttpConnection, place: Connection, peer: str) -> bool:
        """Serve one request. Return whether the connection stays open."""
        limits = place.limits
        # An unauthenticated client must send its first request within a short time.
        first_s = limits.idle_s if place.is_proven else limits.head_s
        try:
            head = wire.receive_request(limits.head_s, first_s=first_s, max_bytes=limits.head_bytes)
        except FormatError:
            wire.send_all(_empty_answer(HTTPStatus.BAD_REQUEST))
            return False
        if head is None:
            return False
        place.begin(_answer_wait_s(limits))
        exchange = ServerExchange(head, wire, place, peer)
        try:
            if head.is_chunked:
                # Refuse chunked bodies, because their size is unknown in advance and no client of Penstock sends them.
                raise FormatError("the request body has no Content-Length")
            self._handle(exchange)
        except RequestRefused as refused:
            exchange.refuse(refused)
        except FormatError:
            exchange.refuse(RequestRefused(HTTPStatus.BAD_REQUEST))
        return not exchange.closes


_servers: WeakSet[HttpServer] = release_after_fork(lambda server: server.forget())
