"""HTTP/1.1 server of a member of a fleet: a thread for each connection, one request at a time, every wait bounded.

In: a bound socket, a handler. Out: a call of the handler for each request, in the thread of its connection.
Not here: admission and TLS (`net.listener`), parsing (`head`), the two handlers (`region_server`, `peer.server`).

    admission -> TLS -> head -> handler: authority, body -> answer -+-> end
                         ^------------------------------------------+

A client that sends or takes nothing holds one thread until a deadline of `ConnectionLimits`, and no memory beyond a
head and the body that its authority allows. The hub, with thousands of clients, is an ASGI server instead; see
`peer.server` for what that would cost a member.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from penstock.errors import FormatError
from penstock.http.connection import HttpConnection
from penstock.http.head import RequestHead
from penstock.lifecycle import release_after_fork
from penstock.net.admission import MIN_BYTES_PER_S, Admission, Connection, ConnectionLimits, network_of
from penstock.net.listener import ThreadedListener

LIMITS = ConnectionLimits()
"""Limits of each listening socket: far above the number of readers that one member has."""
_JOINED_BYTES = 64 << 10
"""Longest body that is sent in one call with its head. Reason: copying it costs less than a second call and packet."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class RequestRefused(Exception):
    """Raised by a handler to answer with a status and no body.

    Attributes:
        status: the status.
        closes: True if the connection ends after the answer.
    """

    def __init__(self, status: int, *, closes: bool = True) -> None:
        super().__init__(f"refused with status {status}")
        self.status = status
        self.closes = closes


class ServerExchange:
    """A request and its answer. The thread of the connection uses it until the handler returns.

    Attributes:
        head: the request's method, target and header fields.
        wire: the connection; a handler that called `begin_answer` sends the body over it.
        closes: True if the connection ends after the answer; a handler may set it.
    """

    __slots__ = ("_has_begun", "_peer", "_place", "_unread_bytes", "closes", "head", "wire")

    def __init__(self, head: RequestHead, wire: HttpConnection, place: Connection, peer: str) -> None:
        self.head = head
        self.wire = wire
        self.closes = not head.keeps_alive
        self._place = place
        self._peer = peer
        self._unread_bytes = head.content_length or 0
        self._has_begun = False

    @property
    def body_bytes(self) -> int:
        """Announced length of the body, until it is read."""
        return self._unread_bytes

    def prove(self) -> None:
        """Note that the request carried a valid credential: no stranger can take this connection's place any more."""
        self._place.prove(self._peer or "unix")

    def read_body(self, max_bytes: int) -> bytes:
        """Receive the body. Call this after the caller's authority for so long a body was checked.

        Raises:
            Refused: the body is longer than `max_bytes`.
            TimeoutError, OSError: the body did not arrive in time, or the connection ended.
        """
        nbytes = self._unread_bytes
        if nbytes > max_bytes:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._place.begin(_answer_wait_s(self._place.limits) + nbytes / MIN_BYTES_PER_S)
        # Sent only now, so that a client that waits for it does not send a body that would be refused.
        if nbytes and self.head.headers.get("expect", "").lower() == "100-continue":
            self.wire.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Set before: a body that fails to arrive is an OSError, which ends the connection anyway.
        self._unread_bytes = 0
        return self.wire.receive_body(nbytes)

    @property
    def peer(self) -> str:
        """The network that the request came from, or `unix`."""
        return network_of(self._peer) if self._peer else "unix"

    @property
    def is_local(self) -> bool:
        """True if the request came over a Unix socket: the kernel has authenticated this process's own user."""
        return not self._peer

    def answer(self, status: int, body: bytes = b"", fields: str = "") -> None:
        """Send a whole answer; `fields` are more header lines, each with its CR LF."""
        seconds, head = self._begin(status, len(body), f"Content-Length: {len(body)}\r\n{fields}")
        self.wire.set_pace(seconds)
        if len(body) <= _JOINED_BYTES:
            self.wire.send_all(head + body)
        else:
            self.wire.send_all(head)
            self.wire.send_all(body)

    def begin_answer(self, nbytes: int, fields: str) -> None:
        """Send the head of a successful answer; the handler sends the body over `wire`.

        Args:
            nbytes: length of the content, which sets the deadline for all of it.
            fields: header lines that say where the body ends, each with its CR LF.
        """
        _, head = self._begin(HTTPStatus.OK, nbytes, fields)
        # One deadline for the whole answer is not enough here: gigabytes have many minutes, and a client that takes no
        # byte is found much sooner.
        self.wire.set_pace(self._place.limits.answer_s)
        self.wire.send_all(head)

    def begin_stream(self, lasts_s: float, fields: str) -> None:
        """Send the head of an answer that ends with the connection; the handler sends the body for `lasts_s`."""
        self.closes = True
        self.begin_answer(0, fields)
        # Until its end, which the handler keeps; a client that takes nothing is found by the pace of each call.
        self._place.begin(lasts_s + self._place.limits.answer_s)

    def _begin(self, status: int, nbytes: int, fields: str) -> tuple[float, bytes]:
        """Set the deadline by which the client must have taken the answer; return its seconds, and the head."""
        self._has_begun = True
        if self._unread_bytes:
            # What is left of the body would be taken for the next request.
            self.closes = True
        seconds = self._place.limits.answer_s + nbytes / MIN_BYTES_PER_S
        self._place.begin(seconds)
        return seconds, _head(status, fields, closes=self.closes)

    def refuse(self, refused: RequestRefused) -> None:
        """Answer with the status of a refusal; end the connection if an answer has begun already."""
        if self._has_begun:
            # A status now would be taken for bytes of the answer.
            self.closes = True
            return
        self.closes = self.closes or refused.closes
        self.answer(refused.status)


def _head(status: int, fields: str, *, closes: bool) -> bytes:
    closing = "Connection: close\r\n" if closes else ""
    return f"HTTP/1.1 {status} {_PHRASES[status]}\r\n{fields}{closing}\r\n".encode("latin-1")


def _empty_answer(status: int) -> bytes:
    """Return an answer without a body, after which the connection ends."""
    return _head(status, "Content-Length: 0\r\n", closes=True)


def _answer_wait_s(limits: ConnectionLimits) -> float:
    """Return the time in which a request must be answered, which is not only work: a handler may wait for news."""
    return limits.idle_s + limits.answer_s


class HttpServer:
    """A listener whose connections are served by a handler. Started by the constructor; let go in forked children.

    Args:
        bound: a bound socket; owned by the server from now on.
        handle: called for each request, in the thread of its connection. It answers, or raises Refused, or FormatError
            for a malformed request. An OSError ends the connection.
        name: name of the listener in the log.
        thread_name: name of its threads.
        full_status: status of the answer to a connection for which there is no place.
        tls: context of the server side; None: plain.
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
        self._handle = handle
        self._is_open = True
        self._wires: set[HttpConnection] = set()
        self._listener = ThreadedListener(
            bound,
            Admission(LIMITS, name=name),
            self._serve,
            name=thread_name,
            tls=tls,
            # A TLS client expects a handshake first: it sees the connection end.
            refusal=_empty_answer(full_status) if tls is None else b"",
        )
        _servers.add(self)

    @property
    def address(self) -> Any:
        """The address of the listening socket."""
        return self._listener.address

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return self._listener.admission.num_open

    def close(self) -> None:
        """Stop accepting, and cut all connections. Idempotent; does not wait for the threads of connections."""
        if not self._is_open:
            return
        self._is_open = False
        self._listener.close()
        # A stopped client leaves its connection open; the connection's thread would keep the handler's memory alive.
        self._listener.admission.cut_all()

    def forget(self) -> None:
        """In a forked child: close the copies of the parent's sockets; the parent and its clients notice nothing."""
        self._is_open = False
        # First: closing a connection needs the lock of the admission, which this renews.
        self._listener.forget()
        for wire in list(self._wires):
            wire.close()

    def _serve(self, sock: socket.socket, place: Connection, peer: str) -> None:
        wire = HttpConnection(sock, pace_s=place.limits.head_s)
        self._wires.add(wire)
        try:
            # Not only `cut_all` ends this loop: a TLS handshake that was under way then may have missed the cut.
            while self._is_open and self._serve_request(wire, place, peer):
                place.end()
        finally:
            self._wires.discard(wire)

    def _serve_request(self, wire: HttpConnection, place: Connection, peer: str) -> bool:
        """Receive one request and have it answered; return True if the connection stays open."""
        limits = place.limits
        # Members keep connections for their next request; a stranger has no reason to wait with the first one.
        first_s = limits.idle_s if place.is_proven else limits.head_s
        try:
            head = wire.receive_request(limits.head_s, first_s=first_s, max_bytes=limits.head_bytes)
        except FormatError:
            wire.send_all(_empty_answer(HTTPStatus.BAD_REQUEST))
            return False
        if head is None:
            return False
        # The admission cuts a connection at its deadline. The head's is over; this one leaves the handler time to wait
        # for news, and reading a body or sending the answer sets another.
        place.begin(_answer_wait_s(limits))
        exchange = ServerExchange(head, wire, place, peer)
        try:
            if head.is_chunked:
                # No client of ours sends one, and its length could be checked only while it arrives.
                raise FormatError("a request body without a Content-Length")
            self._handle(exchange)
        except RequestRefused as refused:
            exchange.refuse(refused)
        except FormatError:
            exchange.refuse(RequestRefused(HTTPStatus.BAD_REQUEST))
        return not exchange.closes


_servers: WeakSet[HttpServer] = release_after_fork(HttpServer.forget)
