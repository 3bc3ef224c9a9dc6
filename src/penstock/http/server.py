"""The holder's end of the `transport.http` transport: a small threaded server of regions of this process's memory.

In: regions shown, requests for runs of them. Out: their bytes, straight from memory, or a refusal.
Not here: what a message looks like (`connection`), reading (`transport.http`).

A thread a connection, within the limits of `net.limits`. Nothing a client sends or fails to send holds more than a
thread, for longer than a deadline: heads and bodies are short and timed, runs are checked before a byte is sent, a
client that takes nothing is cut off.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import ssl
import threading
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.errors import FormatError
from penstock.http.compression import BLOCK_BYTES, Planes
from penstock.http.connection import (
    CODING,
    MAX_BODY_BYTES,
    PIECE_BYTES,
    TRAILER,
    TRAILER_WORD,
    HttpConnection,
    ReadRequest,
    advance,
    chunk_head,
    content_length,
    fields,
    front,
)
from penstock.net.admission import MIN_BYTES_PER_S, Admission, Connection, ConnectionLimits
from penstock.net.listener import ThreadedListener

HEAD_S = 10.0
"""For a whole request, from its first byte on, and for a TLS handshake."""
IDLE_S = 60.0
"""A connection that asks for nothing for this long is closed. Readers drop theirs after less (`http`)."""
SEND_S = 30.0
"""A client that takes no byte for this long is cut off."""
LIMITS = ConnectionLimits(head_s=HEAD_S, idle_s=IDLE_S, answer_s=SEND_S)
"""Of the port: far above readers times connections of one holder. Who finds no place is told to come again."""
MAX_ANSWER_BYTES = 1 << 30
"""Of one request. Reason: bounds what one costs; a reader of ours asks for 64 MiB at most."""

_DECODER = msgspec.msgpack.Decoder(ReadRequest)
_REASONS = {400: "Bad Request", 404: "Not Found", 408: "Timeout", 410: "Gone", 413: "Too Large"}


@dataclass(slots=True, eq=False)
class Region:
    """Memory that may be read while `generation` is current, by a reader that sends its key or a lent one."""

    generation: int
    key: bytes
    view: memoryview
    owner: object
    under_way: dict[HttpConnection, bytes] = field(default_factory=dict)
    """Answers being sent, each with the key that was shown for it."""
    lent: dict[str, bytes] = field(default_factory=dict)
    """Borrower -> a key of its own."""


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class Server:
    """Regions and the threads that serve them. Started by the constructor.

    Args:
        bound: a bound socket; owned by the server from here on.
        endpoint: what requests must name.
        tls: context of the server side; None: plain.
    """

    def __init__(self, bound: socket.socket, *, endpoint: str, tls: ssl.SSLContext | None) -> None:
        self.endpoint = endpoint
        self._regions: dict[int, Region] = {}
        self._wires: set[HttpConnection] = set()
        self._lock, self._generations, self._is_open = threading.Lock(), itertools.count(1), True
        self._listener = ThreadedListener(
            bound,
            Admission(LIMITS, name="data port"),
            self._connection,
            name="penstock-http",
            tls=tls,
            refusal=_answer(503) if tls is None else b"",
        )

    def show(self, view: memoryview, owner: object) -> Region:
        """Begin a generation of this memory."""
        with self._lock:
            region = Region(next(self._generations), secrets.token_bytes(16), view, owner)
            if self._is_open:
                self._regions[region.generation] = region
        return region

    def lend(self, region: Region, borrower: str) -> bytes:
        """Return a key to this generation for one borrower."""
        # The same key on a second call: a reader that asks again after a lost answer must not end its own reads.
        with self._lock:
            return region.lent.setdefault(borrower, secrets.token_bytes(16))

    def take_back(self, region: Region, borrower: str) -> None:
        """Refuse a borrower's key from now on; answers under way for it are cut."""
        with self._lock:
            key = region.lent.pop(borrower, None)
            under_way = [wire for wire, shown in region.under_way.items() if shown == key]
        # Outside the lock: the thread of each answer takes it on its way out.
        for wire in under_way:
            wire.cut()

    def hide(self, region: Region) -> None:
        """End a generation: answers under way are cut, and their readers told so if they ask again."""
        with self._lock:
            self._regions.pop(region.generation, None)
            under_way = list(region.under_way)
        for wire in under_way:
            wire.cut()

    def close(self) -> None:
        """Accept no connections and cut all answers. Idempotent; does not wait for their threads."""
        with self._lock:
            self._is_open = False
            self._regions.clear()
            wires = list(self._wires)
        self._listener.close()
        for wire in wires:
            wire.cut()

    def forget(self) -> None:
        """In a forked child: close our copies of the parent's sockets without a word to anybody."""
        self._lock, self._is_open = threading.Lock(), False
        self._listener.forget()
        for wire in list(self._wires):
            wire.close()

    def _connection(self, sock: socket.socket, place: Connection, peer: str) -> None:
        wire = HttpConnection(sock, pace_s=HEAD_S)
        with self._lock:
            if not self._is_open:
                return
            self._wires.add(wire)
        try:
            self._serve(wire, place, peer)
        finally:
            with self._lock:
                self._wires.discard(wire)

    def _serve(self, wire: HttpConnection, place: Connection, peer: str) -> None:
        behind, planes = b"", None
        while True:
            try:
                head, behind = wire.head(HEAD_S, behind, first_s=IDLE_S if place.is_proven else HEAD_S)
                if not head:
                    return
                generation, request, is_coded, behind = self._request(wire, head, behind)
                planes = planes or Planes() if is_coded else None
                self._answer(wire, generation, request, planes, place, peer)
                place.end()
            except _Refused as refused:
                wire.set_pace(HEAD_S)
                wire.send_all(_answer(refused.status))
                # After 410 the connection stays: the reader asks there for the next generation.
                if refused.status != 410:
                    return
            except FormatError:
                wire.send_all(_answer(400))
                return

    def _request(self, wire: HttpConnection, head: bytes, behind: bytes) -> tuple[int, ReadRequest, bool, bytes]:
        """Generation asked for, the request, if it may be coded, and what came behind it. _Refused, FormatError."""
        line, headers = fields(head)
        verb, _, rest = line.partition(" ")
        path, _, version = rest.partition(" ")
        number = path.removeprefix("/v1/regions/")
        if version != "HTTP/1.1":
            raise FormatError("not HTTP/1.1")
        if verb != "POST" or number == path or not (number.isascii() and number.isdigit() and len(number) < 20):
            raise _Refused(404)
        length = content_length(headers)
        if length > MAX_BODY_BYTES:
            raise _Refused(413)
        body = wire.body(length, behind, HEAD_S)
        try:
            is_coded = headers.get("accept-encoding") == CODING
            return int(number), _DECODER.decode(body[:length]), is_coded, body[length:]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError("a malformed request") from error

    def _answer(
        self,
        wire: HttpConnection,
        generation: int,
        request: ReadRequest,
        planes: Planes | None,
        place: Connection,
        peer: str,
    ) -> None:
        src, length = request.runs()
        total = sum(length.tolist())
        if total > MAX_ANSWER_BYTES:
            raise _Refused(413)
        with self._lock:
            region = self._regions.get(generation)
            # One answer for "no such generation" and "wrong key": a stranger learns nothing about what exists.
            if region is None or not self._is_given(region, request):
                raise _Refused(410)
            region.under_way[wire] = request.key
        # It has the region's key, which comes with a lease.
        place.prove(peer or "unix")
        # A call of `send` has SEND_S; all of them together have this, or a byte now and then would hold the thread.
        place.begin(SEND_S + total / MIN_BYTES_PER_S)
        try:
            views = [region.view[at : at + n] for at, n in zip(src.tolist(), length.tolist(), strict=True)]
            wire.set_pace(SEND_S)
            wire.send_all(_answer(200, total + TRAILER.size) if planes is None else _CODED)
            # Checked per piece: a fence in the middle ends the answer early instead of sending gigabytes in vain.
            while views:
                self._check_given(region, request.key)
                if planes is None:
                    advance(views, wire.send(front(views, PIECE_BYTES)))
                else:
                    _send_block(wire, views, planes)
            # A holder fences before it changes a byte: if the generation is still there, all that went was of it.
            self._check_given(region, request.key)
            trailer = TRAILER.pack(TRAILER_WORD, generation)
            wire.send_all(
                trailer if planes is None else chunk_head(len(trailer)) + trailer + b"\r\n" + chunk_head(0) + b"\r\n"
            )
        finally:
            with self._lock:
                region.under_way.pop(wire, None)

    def _check_given(self, region: Region, key: bytes) -> None:
        if self._regions.get(region.generation) is not region or not _opens(key, region):
            raise ConnectionAbortedError("fenced, or the lease has ended")

    def _is_given(self, region: Region, request: ReadRequest) -> bool:
        same = request.endpoint == self.endpoint and request.nbytes == len(region.view)
        return _opens(request.key, region) and same


def _opens(key: bytes, region: Region) -> bool:
    """Return whether this is a key of the region, in the same time for every wrong key."""
    return any(hmac.compare_digest(key, valid) for valid in (region.key, *list(region.lent.values())))


_CODED = f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Encoding: {CODING}\r\n\r\n".encode()


def _send_block(wire: HttpConnection, views: list[memoryview], planes: Planes) -> None:
    """Send the front of these views as one chunk, and take it off them."""
    taken = front(views, BLOCK_BYTES)
    block = np.frombuffer(taken[0] if len(taken) == 1 else b"".join(taken), np.uint8)
    frame = planes.encode(block)
    sending = [
        memoryview(chunk_head(sum(map(len, frame)))),
        *(part for part in frame if len(part)),
        memoryview(b"\r\n"),
    ]
    while sending:
        advance(sending, wire.send(sending))
    advance(views, len(block))


def _answer(status: int, nbytes: int = 0) -> bytes:
    closing = "" if status in {200, 410} else "Connection: close\r\n"
    reason = "OK" if status == 200 else _REASONS.get(status, "Unavailable")
    return f"HTTP/1.1 {status} {reason}\r\nContent-Length: {nbytes}\r\n{closing}\r\n".encode()
