"""The client side of an HTTP/1.1 connection, which receives a response directly into the caller's memory.

A body with a Content-Length is received into the caller's view without a further copy, except for up to 8 KiB that
arrive with the head. Chunked bodies, which object stores behind proxies send, are copied once.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from functools import partial

from penstock import descriptors, waits
from penstock.http.connection import HttpConnection, MessageDeadline
from penstock.http.head import MalformedMessage, MessageParser, ResponseHead, request_head
from penstock.interrupts import is_of_handler
from penstock.net.listener import cut

_PIECE_BYTES = 64 << 10
"""Number of bytes received at once from a body without a length. They are lost if the next bytes fail to arrive."""
_MAX_OVERHEAD_BYTES = 64 << 10
"""Maximum bytes between two bytes of a chunked body, such as chunk heads. HTTP itself sets no limit."""


class TooLong(MalformedMessage):
    """A response is longer than the caller accepts."""


class HttpReply:
    """A response. Call `readinto` until it returns 0, or `read` once.

    `headers` has names in lower case, and values of a repeated field joined by commas. `length` is the number of
    remaining body bytes, or None if only the end of the body reveals its length.
    """

    def __init__(
        self,
        wire: HttpConnection,
        head: ResponseHead,
        parser: MessageParser,
        *,
        has_body: bool,
        deadline: MessageDeadline,
        pace_s: float,
    ) -> None:
        self.status = head.status
        self.headers = head.headers
        self.length = head.content_length if has_body else 0
        self._wire = wire
        self._keeps_alive = head.keeps_alive
        self._parser = parser if has_body and head.is_chunked else None
        self._deadline = deadline
        self._pace_s = pace_s
        self._rest = memoryview(b"")

    def readinto(self, view: memoryview) -> int:
        """Receive part of the body. Return the byte count, or 0 after the body. Raises MalformedMessage or OSError."""
        if self.length is None:
            piece = self._rest or self._piece(MessageDeadline(self._pace_s))
            count = min(len(piece), view.nbytes)
            view[:count] = piece[:count]
            self._rest = piece[count:]
            return count
        wanted = min(self.length, view.nbytes)
        if not wanted:
            return 0
        self._wire.set_pace(self._pace_s)
        count = self._wire.receive_into([view[:wanted]])
        self.length -= count
        return count

    def read(self, limit: int) -> bytes:
        """Return the whole body, received before the request's deadline. Raises TooLong above `limit` bytes."""
        pieces: list[memoryview | bytes] = []
        total = 0 if self.length is None else self.length
        if total <= limit and self.length is not None:
            self.length = 0
            try:
                return self._wire.receive_body(total, self._deadline.left_s())
            except ConnectionAbortedError as error:
                raise MalformedMessage("the connection was closed before the end of the response") from error
        while total <= limit:
            piece = self._piece(self._deadline)
            if not piece:
                if self._parser is not None and not self._parser.events.is_done:
                    raise MalformedMessage("the connection was closed before the end of the response")
                return b"".join(pieces)
            pieces.append(piece)
            total += len(piece)
        raise TooLong(f"the response has more than {limit} bytes")

    def read_some(self, limit: int, *, wait_s: float) -> bytes:
        """Return the bytes of the body that arrive within `wait_s`, at most `limit`. Never raises OSError."""
        received, until_s = b"", time.monotonic() + wait_s
        with contextlib.suppress(OSError, MalformedMessage):
            while len(received) < limit and self.length != 0 and (left_s := until_s - time.monotonic()) > 0:
                if self.length is None:
                    piece = self._rest or self._piece(MessageDeadline(left_s))
                    self._rest = memoryview(b"")
                else:
                    # Do not use `receive_into`, which waits until its view is full.
                    self._wire.set_pace(left_s)
                    piece = memoryview(self._wire.receive_some(min(self.length, limit - len(received))))
                    self.length -= len(piece)
                if not piece:
                    break
                received += piece
        return received[:limit]

    def _piece(self, deadline: MessageDeadline) -> memoryview:
        num_overhead = 0
        while self._parser is None or not self._parser.events.is_done:
            self._wire.set_pace(deadline.left_s())
            received = self._wire.receive_some(_PIECE_BYTES)
            deadline.add_bytes(len(received))
            if self._parser is None or not received:
                return memoryview(received)
            body = b"".join(self._parser.feed_body(received))
            if body:
                return memoryview(body)
            num_overhead += len(received)
            if num_overhead > _MAX_OVERHEAD_BYTES:
                raise MalformedMessage(f"two chunks of the body are more than {_MAX_OVERHEAD_BYTES} bytes apart")
        return memoryview(b"")

    @property
    def is_reusable(self) -> bool:
        """True if the whole response was read, no bytes followed it, and the server keeps the connection open."""
        parser = self._parser
        is_read = self.length == 0
        if parser is not None:
            is_read = parser.events.is_done and not parser.events.has_more and not self._rest
        return is_read and self._keeps_alive and not self._wire.ahead


class ClientConnection:
    """A connection to one server. Send one request at a time, and the next after reading the whole response.

    The connection owns `sock` from now on. `pace_s` limits the seconds that `HttpReply.readinto` waits for a byte.
    """

    def __init__(self, sock: socket.socket, *, pace_s: float) -> None:
        self.wire = HttpConnection(sock, pace_s=pace_s)
        self.pace_s = pace_s

    def request(
        self, method: str, target: str, fields: Iterable[tuple[str, str]], body: bytes | None = None, *, wait_s: float
    ) -> HttpReply:
        """Send a request and receive the head of its response.

        Args:
            target: percent-encoded path and query, or the whole URL for a proxy.
            fields: header fields in order, including `Host`. `Content-Length` is added for a body.
            wait_s: seconds for sending the request and receiving the head, plus one per `MIN_BYTES_PER_S` of the body.

        Raises:
            ConfigError: a field or the target contains a line break.
            ConnectionResetError: the server closed the connection without a response.
            MalformedMessage: the response is malformed.
            TimeoutError, OSError: the deadline passed, or the connection failed.
        """
        if body is not None:
            fields = [*fields, ("Content-Length", str(len(body)))]
        message = request_head(method, target, fields)
        deadline = MessageDeadline(wait_s)
        if body:
            message += body
            deadline.add_bytes(len(body))
        self.wire.set_pace(deadline.left_s())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A server with too many connections may respond and close before it reads the request. Read its response.
            self.wire.send_all(message)
        head, parser = self.wire.receive_response(deadline.left_s())
        is_tunnel = method == "CONNECT" and head.status < 300
        has_body = method != "HEAD" and head.status not in {204, 304} and not is_tunnel
        return HttpReply(self.wire, head, parser, has_body=has_body, deadline=deadline, pace_s=self.pace_s)

    def close(self) -> None:
        """Close the socket. If another thread uses the connection, call `wire.cut` instead."""
        self.wire.close()


def open_tcp(
    host: str, port: int, timeout_s: float, *, check: Callable[[str], None] = lambda address: None
) -> socket.socket:
    """Connect to the first address of `host` that accepts within `timeout_s`. `check` raises for refused addresses."""
    # Resolve a name in a helper thread, because it may take seconds and cannot be interrupted.
    is_name = not host.replace(".", "").isdigit() and ":" not in host
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in waits.in_helper(resolve) if is_name else resolve():
        check(str(address[0]))
        sock = descriptors.retried(partial(socket.socket, family, kind, protocol))
        try:
            sock.settimeout(timeout_s)
            with waits.ended_by(partial(cut, sock)):
                sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            if is_of_handler(error):
                raise
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def connect_tcp(host: str, port: int, timeout_s: float, trust: ssl.SSLContext | None = None) -> socket.socket:
    """Connect by TCP within `timeout_s`, with TLS if `trust` is set. Raises OSError, including ssl.SSLError."""
    deadline = time.monotonic() + timeout_s
    try:
        sock = open_tcp(host, port, timeout_s)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a valid host name") from error
    if trust is None:
        return sock
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return trust.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
