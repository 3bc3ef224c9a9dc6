"""The connection of the `http` transport, for both ends, and the request that crosses it.

In: a connected socket. Out: bytes moved between it and views of memory, heads of messages.
Not here: who may read (`server`), which connections (`transport.http`).

    POST /v1/regions/GENERATION   a `ReadRequest`, msgpack   ->   200, Content-Length: the runs' bytes, then a seal
      Accept-Encoding: penstock-planes   ->   or, Content-Encoding the same: frames of `byte_planes` and the seal, as
      chunks

The **seal** is sent after the last byte only if the generation still holds then: bytes without it are not believed.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from penstock.errors import FormatError
from penstock.http import head as heads
from penstock.http.head import MalformedMessage, MessageParser, RequestHead, ResponseHead
from penstock.net.admission import MIN_BYTES_PER_S
from penstock.net.timed import MessageDeadline
from penstock.types import I64, MIB

MAX_HEAD_BYTES = 8 << 10
"""Longest head of a request or an answer. Ours are under 400 bytes."""
MAX_RUNS = 4096
"""Runs of one request at most: 64 KiB of columns."""
MAX_BODY_BYTES = 128 << 10
"""Longest body of a request: the columns and 200 bytes."""
PIECE_BYTES = 4 * MIB
"""Asked of the kernel in one call, so that a fence is seen soon. Source: benchmarks/results/cpu2_202611/hosts.md."""
_HEAD_PIECE_BYTES = 8 << 10
"""Asked of the kernel for a head. Bytes of the body that come with it are copied, which costs 1 us at most."""
_BODY_PIECE_BYTES = 256 << 10
_MAX_INTERIM = 8
"""Answers 1xx before the real one. Reason: servers send one or two; nothing else would end an endless row of them."""
MAX_VIEWS = 256
"""Views given to one scattering call. Reason: below the kernel's 1,024 (IOV_MAX), past which it refuses."""
TRAILER = struct.Struct("<8sQ")
TRAILER_WORD = b"penstock"
CODING = "penstock-planes"
"""What a reader accepts, and the server may send."""
CHUNK_HEAD = 10
"""Bytes of a chunk's head as we write it: eight digits, a line's end."""
_CHUNK_HEAD = re.compile(rb"[0-9a-f]{8}\r\n")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Columns = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_RUNS)]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of bytes wanted of one region, and the proof that the requester was given its descriptor."""

    endpoint: Annotated[str, msgspec.Meta(max_length=128)]
    key: Annotated[bytes, msgspec.Meta(max_length=64)]
    nbytes: _Count
    """Of the region, as the descriptor says."""
    src: _Columns
    length: _Columns
    """Offsets and bytes of the runs, little-endian int64."""

    def runs(self) -> tuple[I64, I64]:
        """Return offsets and lengths. FormatError unless all lie in the region."""
        # The columns come from a peer: every check here stands between it and memory outside the region. The last one
        # subtracts instead of adding, because a sum of two large int64 could wrap to a small number.
        if len(self.src) != len(self.length) or len(self.src) % 8:
            raise FormatError(f"columns of {len(self.src)} and {len(self.length)} bytes")
        src, length = np.frombuffer(self.src, "<i8"), np.frombuffer(self.length, "<i8")
        inside = (
            (src >= 0) & (length > 0) & (src <= self.nbytes) & (length <= self.nbytes - np.clip(src, 0, self.nbytes))
        )
        if not inside.all():
            raise FormatError("a run lies outside the region")
        return src.astype(np.int64), length.astype(np.int64)


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
        # Of the message that is being received: its head and its body share it.
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
        limit = struct.pack("ll", int(pace_s), int(pace_s % 1 * 1e6))
        self._sock.settimeout(None)  # the kernel keeps time, so that one call can fill a view
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive_request(
        self, wait_s: float, *, first_s: float | None = None, max_bytes: int = MAX_HEAD_BYTES
    ) -> RequestHead | None:
        """Receive the head of a request; None if the other end closes the connection instead.

        Args:
            wait_s: for all of it, from its first byte on.
            first_s: for the first byte; None: `wait_s` is for that, too.
            max_bytes: longest accepted head.

        Raises:
            MalformedMessage: it is no request. TimeoutError, OSError: as the class says.
        """
        parser = MessageParser(is_request=True, max_bytes=max_bytes)
        return parser.request() if self._receive_head(parser, wait_s, first_s) else None

    def receive_response(
        self, wait_s: float, *, max_bytes: int = heads.MAX_HEAD_BYTES
    ) -> tuple[ResponseHead, MessageParser]:
        """Receive the head of an answer; return it and its parser, which reads chunks. Interim answers are skipped.

        Args:
            wait_s: for all of it.
            max_bytes: longest accepted head, of interim answers and this one each.

        Raises:
            ConnectionResetError: the other end closed the connection before the first byte of an answer.
            MalformedMessage: what came is no answer. TimeoutError, OSError: as the class says.
        """
        deadline = time.monotonic() + wait_s
        for _ in range(_MAX_INTERIM):
            parser = MessageParser(is_request=False, max_bytes=max_bytes)
            if not self._receive_head(parser, max(0.0, deadline - time.monotonic()), None):
                if parser.has_begun:
                    raise ConnectionAbortedError("the connection ended in the middle of a message head")
                raise ConnectionResetError("the other end closed the connection without an answer")
            response = parser.response()
            if response.status >= 200:
                return response, parser
        raise MalformedMessage(f"{_MAX_INTERIM} interim answers in a row")

    def _receive_head(self, parser: MessageParser, wait_s: float, first_s: float | None) -> bool:
        """Feed a head to its parser; False if the connection ended before."""
        received, self._ahead = self._ahead, b""
        # One deadline for the whole head: a peer that sends a byte now and then must not hold the thread.
        deadline = MessageDeadline(wait_s if first_s is None or received else first_s)
        while True:
            if received:
                behind = parser.feed_head(received)
                if behind is not None:
                    self._ahead = behind
                    self._deadline = deadline
                    return True
            self.set_pace(deadline.left_s())
            received = self._receive(_HEAD_PIECE_BYTES)
            if not received:
                return False
            if first_s is not None and not parser.has_begun:
                deadline = MessageDeadline(wait_s)

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
        at = 0
        while at < len(view):
            count = self.receive_into([view[at:]])
            if not count:
                raise ConnectionAbortedError("the connection ended")
            at += count

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
        """Send from the front of these views, without a copy of ours; how many bytes went."""
        try:
            if self._is_tls:
                return self._sock.send(views[0])
            return self._sock.sendmsg(views[:MAX_VIEWS]) if len(views) > 1 else self._sock.send(views[0])
        except BlockingIOError as error:
            raise TimeoutError("nothing could be sent") from error

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Receive into the front of these views; how many bytes came, 0 at the end of the connection."""
        if self._ahead:
            count = min(len(self._ahead), len(views[0]))
            views[0][:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        try:
            if self._is_tls:
                return self._sock.recv_into(views[0])
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
        try:
            # Not SSLSocket's own, which makes a receiver in another thread take ciphertext for the bytes.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return  # the other end was first

    def close(self) -> None:
        """Close the socket; not while another thread uses it (`cut` is for that)."""
        self._sock.close()


def front(views: list[memoryview], nbytes: int = PIECE_BYTES) -> list[memoryview]:
    """The first views, together at most `nbytes` and `MAX_VIEWS`."""
    taken, left = [], nbytes
    for view in views[:MAX_VIEWS]:
        taken.append(view[:left])
        left -= len(taken[-1])
        if not left:
            break
    return taken


def advance(views: list[memoryview], nbytes: int) -> None:
    """Take `nbytes` off the front of these views."""
    done = 0
    for view in views:
        if nbytes < len(view):
            break
        nbytes -= len(view)
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]


def chunk_head(nbytes: int) -> bytes:
    """Return the head of a chunk; a line's end follows the chunk. Of 0 bytes: the last one."""
    return b"%08x\r\n" % nbytes


def chunk_bytes(head: memoryview, limit: int) -> int:
    """Bytes of the chunk behind a head of ours. FormatError if it is none, or says more than `limit`."""
    if not _CHUNK_HEAD.fullmatch(head) or int(bytes(head[:8]), 16) > limit:
        raise FormatError("a malformed or too long chunk")
    return int(bytes(head[:8]), 16)
