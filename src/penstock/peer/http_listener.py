"""The sockets of a member's server: one thread for each connection, within the limits of `net.limits`.

In: an address, a handler of requests. Out: its connections, over TLS if there is a context.
Not here: requests and answers (`server`), admission of connections (`net.listener`).
"""

from __future__ import annotations

import http.server
import io
import os
import socket
import ssl
from collections.abc import Callable

from penstock.net.admission import Admission, Connection
from penstock.net.limits import MIN_BYTES_PER_S, ConnectionLimits
from penstock.net.listener import ThreadedListener
from penstock.net.timed import TimedReader

LIMITS = ConnectionLimits()
"""Limits of each listening socket: far above the number of readers that a holder has."""
_FULL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Answer to a connection that is refused: a reader treats the member as busy, and asks another."""


class BoundedRequestHandler(http.server.BaseHTTPRequestHandler):
    """A request handler with a deadline for each request and each answer. One instance serves one connection.

    Attributes:
        place: admission of this connection; a handler that has authenticated the caller calls `place.prove`.
        peer: the caller's host; empty for a Unix socket.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, sock: socket.socket, place: Connection, peer: str) -> None:
        self.place, self.peer = place, peer
        super().__init__(sock, (peer, 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        """Prepare the connection: no Nagle delay, since answers are small and waited for; reads with a deadline."""
        super().setup()
        if self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rfile.close()
        self._incoming = TimedReader(self.connection, self.place.limits.head_s)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Serve one request; `http.server` ends the connection at a TimeoutError."""
        limits = self.place.limits
        first_s = limits.idle_s if self.place.is_proven else limits.head_s
        self._incoming.expect(limits.head_s, limits.head_bytes, first_s=first_s)
        super().handle_one_request()
        self.place.end()

    def parse_request(self) -> bool:
        """Parse the head of a request, which is complete now; see `http.server`."""
        # The answer may wait for news. Sending it has its own deadline, see `taking`.
        self.place.begin(self.place.limits.idle_s + self.place.limits.answer_s)
        return super().parse_request()

    def take_body(self, nbytes: int) -> bytes:
        """Read a body of `nbytes` bytes that follows the head."""
        self._incoming.allow(nbytes)
        return self.rfile.read(nbytes)

    def taking(self, nbytes: int) -> None:
        """Set the deadline by which the caller must have read an answer of this length."""
        self.place.begin(self.place.limits.answer_s + nbytes / MIN_BYTES_PER_S)
        self.connection.settimeout(None)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the audit line is written where the grant is checked."""

    def address_string(self) -> str:
        """Return the peer's host, or "unix": a Unix peer has no address."""
        return self.peer or "unix"


def listen_tcp(
    host: str, port: int, handler: Callable[[socket.socket, Connection, str], object], tls: ssl.SSLContext | None
) -> ThreadedListener:
    """Serve on `host:port`; port 0 takes a free one. Raises OSError or OverflowError if it cannot be bound."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(bound, (host, port), handler, tls)


def listen_unix(path: str, handler: Callable[[socket.socket, Connection, str], object]) -> ThreadedListener:
    """Serve on a Unix socket, to this user's processes only. Raises OSError if it cannot be bound."""
    return _listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.fspath(path), handler, None)


def _listen(
    bound: socket.socket,
    where: object,
    handler: Callable[[socket.socket, Connection, str], object],
    tls: ssl.SSLContext | None,
) -> ThreadedListener:
    try:
        bound.bind(where)  # type: ignore[arg-type]
    except BaseException:
        bound.close()
        raise

    def serve(sock: socket.socket, place: Connection, peer: str) -> None:
        handler(sock, place, peer)

    refusal = _FULL if tls is None else b""
    return ThreadedListener(
        bound, Admission(LIMITS, name="peer server"), serve, name="penstock-peer", tls=tls, refusal=refusal
    )
