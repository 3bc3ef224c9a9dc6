"""HTTP/1.1 over a connected socket: heads, short bodies, and bytes sent from and received into memory directly.

The *pace* limits a single call, so a body of gigabytes only has to make progress. A *deadline* limits a head or a short
message as a whole, however many calls it takes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from penstock.http.head import MAX_HEAD_BYTES, MalformedMessage, MessageParser, RequestHead, ResponseHead
from penstock.net.admission import MIN_BYTES_PER_S
from penstock.net.listener import cut

MAX_VIEWS = 256
"""Maximum number of views in one system call. The kernel refuses more than 1,024 (IOV_MAX)."""
_HEAD_PIECE_BYTES = 8 << 10
"""Number of bytes requested from the kernel for a head. Copying body bytes among them takes at most 1 us."""
_BODY_PIECE_BYTES = 256 << 10
"""Bytes requested at once for a short body, so that memory grows with received bytes and not with announced bytes."""
_MAX_INTERIM = 8
"""Maximum number of 1xx responses before the final response. Servers send one or two."""


class MessageDeadline:
    """The deadline of a message: some seconds, plus one for each `MIN_BYTES_PER_S` received or sent.

    A timeout for each read is not enough. One byte every five seconds held up a fetch for 50 s with a `stall_s` of 6 s.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def add_bytes(self, nbytes: int) -> None:
        """Extend the deadline for bytes that were received or sent."""
        self._at += nbytes / MIN_BYTES_PER_S

    def left_s(self) -> float:
        """Return the remaining seconds. Raises TimeoutError after the deadline."""
        left = self._at - time.monotonic()
        # A timeout of 0 would make a socket non-blocking, and an SO_RCVTIMEO of 0 means no timeout.
        if left <= 0:
            raise TimeoutError("the message was not complete before its deadline")
        return left


class HttpConnection:
    """A connected socket for HTTP/1.1 messages. Used by one thread at a time, but any thread may call `cut`.

    Calls raise TimeoutError if nothing moves within the pace, and OSError if the connection fails. The connection owns
    the socket, which may be TLS or not, TCP or Unix.
    """

    def __init__(self, sock: socket.socket, *, pace_s: float) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # Bytes received after a head, which the next receiving call returns first.
        self.ahead = b""
        # Deadline of the last message, shared by its head and its body.
        self._deadline = MessageDeadline(pace_s)
        # Nagle's algorithm would delay small requests until an ACK.
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pace_s = -1.0
        self.set_pace(pace_s)

    def set_pace(self, pace_s: float) -> None:
        """Set how long a call may wait for its first byte. If the current pace is at most 5 % longer, keep it."""
        # Keeping the pace saves three system calls for each piece of a read and for most messages.
        if pace_s <= self._pace_s <= 1.05 * pace_s:
            return
        pace_s = max(pace_s, 0.001)
        self._pace_s = pace_s
        if self._is_tls:
            self._sock.settimeout(pace_s)
            return
        # Python's timeout would make the socket non-blocking, and then no call could fill a view.
        limit = struct.pack("ll", int(pace_s), int(pace_s % 1 * 1e6))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive_request(self, wait_s: float, *, first_s: float, max_bytes: int) -> RequestHead | None:
        """Receive a request's head within `wait_s` of its first byte, or return None if the client closes."""
        if not self.ahead:
            self.set_pace(first_s)
            self.ahead = self._receive(_HEAD_PIECE_BYTES)
        parser = MessageParser(is_request=True, max_bytes=max_bytes)
        is_whole = self.ahead and self._receive_head(parser, MessageDeadline(wait_s))
        return parser.request() if is_whole else None

    def receive_response(self, wait_s: float) -> tuple[ResponseHead, MessageParser]:
        """Receive a response's head, skipping interim responses. Return the head and its parser, which reads chunks.

        Raises ConnectionResetError if the server closed the connection before the first byte, or MalformedMessage.
        """
        deadline = MessageDeadline(wait_s)
        for _ in range(_MAX_INTERIM):
            parser = MessageParser(is_request=False, max_bytes=MAX_HEAD_BYTES)
            if not self._receive_head(parser, deadline):
                if parser.has_begun:
                    raise ConnectionAbortedError("the connection was closed before the end of the message head")
                raise ConnectionResetError("the server closed the connection without a response")
            response = parser.response()
            if response.status < 100:
                raise MalformedMessage(f"the response has the invalid status {response.status}")
            if response.status >= 200:
                return response, parser
        raise MalformedMessage(f"the server sent {_MAX_INTERIM} consecutive interim responses")

    def _receive_head(self, parser: MessageParser, deadline: MessageDeadline) -> bool:
        """Receive a head and feed it to its parser. Return False if the connection was closed within the head."""
        # The peer may send single bytes, so one deadline limits the whole head.
        self._deadline = deadline
        received, self.ahead = self.ahead, b""
        while True:
            rest = parser.feed_head(received) if received else None
            if rest is not None:
                self.ahead = rest
                return True
            self.set_pace(deadline.left_s())
            received = self._receive(_HEAD_PIECE_BYTES)
            if not received:
                return False

    def receive_body(self, nbytes: int, wait_s: float | None = None) -> bytes:
        """Receive a small body within `wait_s` plus one second for each `MIN_BYTES_PER_S` in the body.

        If `wait_s` is None, use the time that remains for the message's head. Raises ConnectionAbortedError if the
        connection is closed before the end of the body.
        """
        received, self.ahead = self.ahead[:nbytes], self.ahead[nbytes:]
        if len(received) == nbytes:
            return received
        pieces, left = [received], nbytes - len(received)
        deadline = self._deadline if wait_s is None else MessageDeadline(wait_s)
        while left:
            self.set_pace(deadline.left_s())
            piece = self._receive(min(left, _BODY_PIECE_BYTES))
            if not piece:
                raise ConnectionAbortedError("the connection was closed before the end of the message body")
            pieces.append(piece)
            left -= len(piece)
            deadline.add_bytes(len(piece))
        return b"".join(pieces)

    def fill(self, view: memoryview) -> None:
        """Receive until the view is full. Raises ConnectionAbortedError if the connection is closed before that."""
        while view:
            count = self.receive_into([view])
            if not count:
                raise ConnectionAbortedError("the connection was closed before all bytes arrived")
            view = view[count:]

    def send_all(self, data: bytes) -> None:
        """Send a whole message within the pace plus one second for each `MIN_BYTES_PER_S` in the message."""
        if self._is_tls:
            self._sock.sendall(data)
            return
        view, deadline = memoryview(data), None
        while True:
            # Send without blocking, because on a Unix socket the kernel's timeout restarts for every few KiB.
            with contextlib.suppress(BlockingIOError):
                view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]
            if not view:
                return
            deadline = deadline or MessageDeadline(self._pace_s + len(view) / MIN_BYTES_PER_S)
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(1000 * deadline.left_s())

    def send(self, views: Sequence[memoryview]) -> int:
        """Send bytes from the start of these views without a copy. Return the number of bytes sent."""
        try:
            if self._is_tls:
                return self._sock.send(views[0])
            return self._sock.sendmsg(views[:MAX_VIEWS]) if len(views) > 1 else self._sock.send(views[0])
        except BlockingIOError as error:
            raise TimeoutError("no byte could be sent in time") from error

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Receive into these views, which TLS may fill partly. Return the byte count, or 0 at the connection's end."""
        if self.ahead:
            count = min(len(self.ahead), len(views[0]))
            views[0][:count] = self.ahead[:count]
            self.ahead = self.ahead[count:]
            return count
        try:
            if self._is_tls:
                return self._sock.recv_into(views[0])
            # MSG_WAITALL saves CPU time: 0.17 s instead of 0.23 s for 512 MiB of an object at the same speed. Source:
            # benchmarks/results/cpu2_202611/objects.md.
            if len(views) == 1:
                return self._sock.recv_into(views[0], 0, socket.MSG_WAITALL)
            return self._sock.recvmsg_into(views[:MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:  # SO_RCVTIMEO has passed
            raise TimeoutError("no byte arrived in time") from error

    def receive_some(self, nbytes: int) -> bytes:
        """Receive up to `nbytes` as soon as bytes arrive. Return b"" at the end of the connection."""
        if self.ahead:
            received, self.ahead = self.ahead[:nbytes], self.ahead[nbytes:]
            return received
        return self._receive(nbytes)

    @property
    def is_silent(self) -> bool:
        """True if the connection is open and no unread bytes have arrived, as between two messages."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not self.ahead and not poll.poll(0)

    @property
    def is_closed(self) -> bool:
        """True after `close` was called, perhaps by another thread."""
        return self._sock.fileno() < 0

    def _receive(self, nbytes: int) -> bytes:
        try:
            return self._sock.recv(nbytes)
        except BlockingIOError as error:
            raise TimeoutError("no byte arrived in time") from error

    def cut(self) -> None:
        """Abort the connection, from any thread, even while another thread uses it."""
        cut(self._sock)

    def close(self) -> None:
        """Close the socket. If another thread is using the socket, call `cut` instead."""
        self._sock.close()


def front(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the first `nbytes` bytes, at most `MAX_VIEWS` views."""
    taken = []
    for view in views[:MAX_VIEWS]:
        taken.append(view[:nbytes])
        nbytes -= len(taken[-1])
        if not nbytes:
            break
    return taken


def advance(views: list[memoryview], nbytes: int) -> None:
    """Remove the first `nbytes` bytes from these views."""
    num_done = 0
    for view in views:
        if nbytes < len(view):
            break
        nbytes -= len(view)
        num_done += 1
    del views[:num_done]
    if nbytes:
        views[0] = views[0][nbytes:]
