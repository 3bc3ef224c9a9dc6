"""A door's sockets: a thread a connection, so many at once, and no request that goes on coming for ever.

In: an address, a handler of requests. Out: its connections, by TLS where there is a context.
Not here: what is asked and answered (`door`).
"""

from __future__ import annotations

import http.server
import io
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

IDLE_S = 30.0
"""A connection without a request for this long is closed; one that takes no byte of an answer, too."""
REQUEST_S = 10.0
"""For a TLS handshake, and for a whole request from its first byte on: a reader sends it in one piece."""
BODY_BYTES_PER_S = 1 << 20
"""A long body has so much longer: a layout of some MB over a slow link."""
BACKLOG = 128
"""Connections that wait to be accepted: with 5, of readers that start at once some found a Unix socket's door gone."""
MAX_CONNECTIONS = 512
"""At once, of each socket; far above a holder's readers. Who has no token yet holds a thread, but no more than that."""


class _Incoming(io.RawIOBase):
    """What a connection sends: a request's first byte within `IDLE_S`, all of it by a deadline from then on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline: float | None = None

    def begin(self) -> None:
        """The next byte is a new request's."""
        self._deadline = None

    def allow(self, more_s: float) -> None:
        """So much longer for the request under way."""
        if self._deadline is not None:
            self._deadline += more_s

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See io. TimeoutError when the time is over, however much comes."""
        left_s = IDLE_S if self._deadline is None else self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come to its end")
        self._sock.settimeout(left_s)
        try:
            return self._sock.recv_into(buffer)
        finally:
            self._sock.settimeout(IDLE_S)
            if self._deadline is None:
                self._deadline = time.monotonic() + REQUEST_S


class RequestHandler(http.server.BaseHTTPRequestHandler):
    """One connection, whose requests come to an end."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    wbufsize = -1
    disable_nagle_algorithm = False

    def setup(self) -> None:
        """Answers are small and waited for."""
        super().setup()
        if self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """See http.server, which ends the connection at a TimeoutError."""
        self._incoming.begin()
        super().handle_one_request()

    def take_body(self, nbytes: int) -> bytes:
        """So many bytes behind the head."""
        self._incoming.allow(nbytes / BODY_BYTES_PER_S)
        return self.rfile.read(nbytes)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the audit line is written where the grant is checked."""

    def address_string(self) -> str:
        """A Unix peer has no address."""
        return "unix" if not self.client_address else str(self.client_address[0])


class _Server(socketserver.ThreadingMixIn):
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG
    tls: ssl.SSLContext | None = None

    def __init__(self, *args: Any) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread a connection, while there is room; more are turned away."""
        if not self._room.acquire(blocking=False):
            raise ConnectionAbortedError("no room for another connection")
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See socketserver; a stranger's handshake costs its own thread only."""
        try:
            if self.tls is not None:
                request.settimeout(REQUEST_S)
                request = self.tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            request.close()  # the handshake failed: the reader's business, and it knows
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the reader's business; there is nobody here to tell."""


class TcpServer(_Server, socketserver.TCPServer):
    """On `host:port`; bound by the constructor."""

    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        handler: Callable[..., http.server.BaseHTTPRequestHandler],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.tls = tls
        super().__init__((host, port), handler)


class UnixServer(_Server, socketserver.UnixStreamServer):
    """At a path."""
