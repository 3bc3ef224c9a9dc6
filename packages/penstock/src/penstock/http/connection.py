"""The connection of both ends of HTTP/1.1: heads, short bodies, and bytes straight from and into memory.

In: a connected socket, TLS or not, TCP or Unix. Out: heads of messages; bytes moved between the socket and views.
Not here: the grammar of heads (`head`), requests and replies (`client`), the loop of a server (`server`).

Time is kept in two ways. The *pace* bounds a single call: bodies of gigabytes have no deadline but progress. A
*deadline* bounds a head or a short message as a whole, however many calls it takes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence

from penstock.http.head import MAX_HEAD_BYTES, MalformedMessage, MessageParser, RequestHead, ResponseHead
from penstock.net.admission import MIN_BYTES_PER_S
from penstock.net.listener import cut
from penstock.net.timed import MessageDeadline

MAX_VIEWS = 256
"""Views given to one scattering call. Reason: below the kernel's 1,024 (IOV_MAX), past which it refuses."""
_HEAD_PIECE_BYTES = 8 << 10
"""Asked of the kernel for a head. Bytes of the body that come with it are copied, which costs 1 us at most."""
_BODY_PIECE_BYTES = 256 << 10
"""Asked of the kernel for a short body. Reason: memory is taken for bytes that came, not for announced ones."""
_MAX_INTERIM = 8
"""Answers 1xx before the real one. Reason: servers send one or two; nothing else would end an endless row of them."""


class HttpConnection:
    """A connected socket that HTTP/1.1 messages cross, at either end; one thread at a time, but for `cut`.

    A call that moves nothing within the pace raises TimeoutError; one that fails, OSError.

    Args:
        sock: connected; TLS or not, TCP or Unix; owned by the connection from here on.
        pace_s: see `set_pace`.
    """

    def __init__(self, sock: socket.socket, *, pace_s: float) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # Bytes that came behind a head; the next receiving call takes them first.
        self._ahead = b""
        # Of the message whose head came last: its body shares the deadline.
        self._deadline = MessageDeadline(pace_s)
        # Requests are small and wait for an answer: Nagle's algorithm would hold them back for an ACK.
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pace_s = -1.0
        self.set_pace(pace_s)

    def set_pace(self, pace_s: float) -> None:
        """Set how long a call may wait for the first byte that it can move; up to a twentieth more is tolerated."""
        # Three system calls are saved for each piece of a read, and for each of the messages that follow one another
        # with like deadlines, which is most of them.
        if pace_s <= self._pace_s <= 1.05 * pace_s:
            return
        pace_s = max(pace_s, 0.001)
        self._pace_s = pace_s
        if self._is_tls:
            self._sock.settimeout(pace_s)
            return
        # The kernel keeps time: with Python's timeout the socket would be non-blocking, and no call could fill a view.
        limit = struct.pack("ll", int(pace_s), int(pace_s % 1 * 1e6))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive_request(self, wait_s: float, *, first_s: float, max_bytes: int) -> RequestHead | None:
        """Receive the head of a request; None if the other end closes the connection instead.

        Args:
            wait_s: for all of it, from its first byte on.
            first_s: for the first byte.
            max_bytes: longest accepted head.

        Raises:
            MalformedMessage: it is no request. TimeoutError, OSError: as the class says.
        """
        if not self._ahead:
            self.set_pace(first_s)
            self._ahead = self._receive(_HEAD_PIECE_BYTES)
        parser = MessageParser(is_request=True, max_bytes=max_bytes)
        is_whole = self._ahead and self._receive_head(parser, MessageDeadline(wait_s))
        return parser.request() if is_whole else None

    def receive_response(self, wait_s: float) -> tuple[ResponseHead, MessageParser]:
        """Receive the head of an answer; return it and its parser, which reads chunks. Interim answers are skipped.

        Args:
            wait_s: for all of it.

        Raises:
            ConnectionResetError: the other end closed the connection before the first byte of an answer.
            MalformedMessage: what came is no answer. TimeoutError, OSError: as the class says.
        """
        deadline = MessageDeadline(wait_s)
        for _ in range(_MAX_INTERIM):
            parser = MessageParser(is_request=False, max_bytes=MAX_HEAD_BYTES)
            if not self._receive_head(parser, deadline):
                if parser.has_begun:
                    raise ConnectionAbortedError("the connection ended in the middle of a message head")
                raise ConnectionResetError("the other end closed the connection without an answer")
            response = parser.response()
            if response.status < 100:
                raise MalformedMessage(f"an answer of status {response.status}")
            if response.status >= 200:
                return response, parser
        raise MalformedMessage(f"{_MAX_INTERIM} interim answers in a row")

    def _receive_head(self, parser: MessageParser, deadline: MessageDeadline) -> bool:
        """Feed a head to its parser; False if the connection ended before."""
        # One deadline for the whole head: a peer that sends a byte now and then must not hold the thread.
        self._deadline = deadline
        received, self._ahead = self._ahead, b""
        while True:
            behind = parser.feed_head(received) if received else None
            if behind is not None:
                self._ahead = behind
                return True
            self.set_pace(deadline.left_s())
            received = self._receive(_HEAD_PIECE_BYTES)
            if not received:
                return False

    def receive_body(self, nbytes: int, wait_s: float | None = None) -> bytes:
        """Receive a small body whole, within `wait_s` and one second more for each `MIN_BYTES_PER_S` of it.

        Args:
            wait_s: None: what the head of the message left of its own time.

        Raises:
            ConnectionAbortedError: the connection ended before. TimeoutError, OSError: as the class says.
        """
        received, self._ahead = self._ahead[:nbytes], self._ahead[nbytes:]
        if len(received) == nbytes:
            return received
        # Joined once at the end, and nothing is allocated for bytes that are only announced.
        pieces, left = [received], nbytes - len(received)
        deadline = self._deadline if wait_s is None else MessageDeadline(wait_s)
        while left:
            self.set_pace(deadline.left_s())
            piece = self._receive(min(left, _BODY_PIECE_BYTES))
            if not piece:
                raise ConnectionAbortedError("the connection ended in the middle of a message body")
            pieces.append(piece)
            left -= len(piece)
            deadline.add_bytes(len(piece))
        return b"".join(pieces)

    def fill(self, view: memoryview) -> None:
        """Receive until the view is full. OSError if the connection ends before."""
        while view:
            count = self.receive_into([view])
            if not count:
                raise ConnectionAbortedError("the connection ended")
            view = view[count:]

    def send_all(self, data: bytes) -> None:
        """Send a whole message, within the pace and one second more for each `MIN_BYTES_PER_S` of it."""
        if self._is_tls:
            self._sock.sendall(data)
            return
        view, deadline = memoryview(data), None
        while True:
            # Without waiting in `send`: on a Unix socket the kernel's timeout begins anew for every few KiB that the
            # other end takes, so a slow reader would hold the thread. Most messages go in the first call.
            with contextlib.suppress(BlockingIOError):
                view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]
            if not view:
                return
            deadline = deadline or MessageDeadline(self._pace_s + len(view) / MIN_BYTES_PER_S)
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(1000 * deadline.left_s())

    def send(self, views: Sequence[memoryview]) -> int:
        """Send from the front of these views, without a copy by this process; return the number of bytes."""
        try:
            if self._is_tls:
                return self._sock.send(views[0])
            return self._sock.sendmsg(views[:MAX_VIEWS]) if len(views) > 1 else self._sock.send(views[0])
        except BlockingIOError as error:
            raise TimeoutError("nothing could be sent") from error

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Receive into the front of these views; return the number of bytes, 0 at the end of the connection.

        Without TLS a call waits until all is full, or the pace has passed since its begin.
        """
        if self._ahead:
            count = min(len(self._ahead), len(views[0]))
            views[0][:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        try:
            if self._is_tls:
                return self._sock.recv_into(views[0])
            # MSG_WAITALL: fewer turns of the interpreter for each piece; 512 MiB of an object took 0.17 s of processor
            # instead of 0.23 at the same speed. Source: benchmarks/results/cpu2_202611/objects.md.
            if len(views) == 1:
                return self._sock.recv_into(views[0], 0, socket.MSG_WAITALL)
            return self._sock.recvmsg_into(views[:MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:  # SO_RCVTIMEO ran out
            raise TimeoutError("nothing came") from error

    def receive_some(self, nbytes: int) -> bytes:
        """Receive at most `nbytes` bytes, as soon as there are some; none at the end of the connection."""
        if self._ahead:
            received, self._ahead = self._ahead[:nbytes], self._ahead[nbytes:]
            return received
        return self._receive(nbytes)

    @property
    def has_ahead(self) -> bool:
        """True if bytes were received that no call has returned yet."""
        return bool(self._ahead)

    @property
    def is_silent(self) -> bool:
        """True if the connection is open and nothing has come that was not received, as between two messages."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not self._ahead and not poll.poll(0)

    @property
    def is_closed(self) -> bool:
        """True if `close` was called, perhaps by another thread."""
        return self._sock.fileno() < 0

    def _receive(self, nbytes: int) -> bytes:
        try:
            return self._sock.recv(nbytes)
        except BlockingIOError as error:
            raise TimeoutError("nothing came") from error

    def cut(self) -> None:
        """End the connection while another thread may be sending or receiving; from any thread, at once."""
        cut(self._sock)

    def close(self) -> None:
        """Close the socket; not while another thread uses it (`cut` is for that)."""
        self._sock.close()


def front(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first of these views, together at most `nbytes` and at most `MAX_VIEWS`."""
    taken = []
    for view in views[:MAX_VIEWS]:
        taken.append(view[:nbytes])
        nbytes -= len(taken[-1])
        if not nbytes:
            break
    return taken


def advance(views: list[memoryview], nbytes: int) -> None:
    """Remove `nbytes` from the front of these views, which were sent or filled."""
    num_done = 0
    for view in views:
        if nbytes < len(view):
            break
        nbytes -= len(view)
        num_done += 1
    del views[:num_done]
    if nbytes:
        views[0] = views[0][nbytes:]
