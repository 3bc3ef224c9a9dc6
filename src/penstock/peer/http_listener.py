"""A door's sockets: a thread a connection, within the limits of `net.limits`.

In: an address, a handler of requests. Out: its connections, by TLS where there is a context.
Not here: what is asked and answered (`server`), which connections are let in (`net.listener`).
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
"""Of each socket: far more than a holder has readers."""
_FULL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""For whoever finds no place: a reader takes it for a busy source, and asks another."""


class BoundedRequestHandler(http.server.BaseHTTPRequestHandler):
    """One connection, whose requests come to an end.

    Attributes:
        place: of this connection; whoever answers a caller that showed who it is calls `place.prove`.
        peer: the caller's host; empty for a Unix socket.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, sock: socket.socket, place: Connection, peer: str) -> None:
        self.place, self.peer = place, peer
        super().__init__(sock, (peer, 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        """Answers are small and waited for."""
        super().setup()
        if self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rfile.close()
        self._incoming = TimedReader(self.connection, self.place.limits.head_s)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """See http.server, which ends the connection at a TimeoutError."""
        limits = self.place.limits
        first_s = limits.idle_s if self.place.is_proven else limits.head_s
        self._incoming.expect(limits.head_s, limits.head_bytes, first_s=first_s)
        super().handle_one_request()
        self.place.end()

    def parse_request(self) -> bool:
        """See http.server: a head is whole."""
        # The answer may wait for news; taking it has its own deadline, see `taking`.
        self.place.begin(self.place.limits.idle_s + self.place.limits.answer_s)
        return super().parse_request()

    def take_body(self, nbytes: int) -> bytes:
        """Read so many bytes behind the head."""
        self._incoming.allow(nbytes)
        return self.rfile.read(nbytes)

    def taking(self, nbytes: int) -> None:
        """Give the caller so long to take an answer of this length; the connection is cut after that."""
        self.place.begin(self.place.limits.answer_s + nbytes / MIN_BYTES_PER_S)
        self.connection.settimeout(None)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the audit line is written where the grant is checked."""

    def address_string(self) -> str:
        """A Unix peer has no address."""
        return self.peer or "unix"


def listen_tcp(
    host: str, port: int, handler: Callable[[socket.socket, Connection, str], object], tls: ssl.SSLContext | None
) -> ThreadedListener:
    """Serve on `host:port`; 0 chooses a port. OSError, OverflowError: it cannot be bound."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listen(bound, (host, port), handler, tls)


def listen_unix(path: str, handler: Callable[[socket.socket, Connection, str], object]) -> ThreadedListener:
    """Serve at a path, to this user's processes. OSError: it cannot be bound."""
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
        bound, Admission(LIMITS, name="door"), serve, name="penstock-door", tls=tls, refusal=refusal
    )
