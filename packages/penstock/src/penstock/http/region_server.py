"""The server of the `http` transport, which sends regions of this process's memory to readers that have a key.

The status is 410 if the generation has ended or the key is not valid for it, 404 for any other path, and 413 or 400 for
a request that is too large or malformed. The trailer is sent only if the generation is still valid after the last byte,
and readers discard bytes without a trailer.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import numpy as np

from penstock.errors import MALFORMED, FormatError
from penstock.http.compression import BLOCK_BYTES, Planes
from penstock.http.connection import HttpConnection, advance, front
from penstock.http.region_messages import (
    CODING,
    MAX_BODY_BYTES,
    PIECE_BYTES,
    TRAILER,
    TRAILER_WORD,
    ReadRequest,
    chunk_head,
)
from penstock.http.server import HttpServer, RequestRefused, ServerExchange
from penstock.totals import Total

served_bytes = Total()
"""Bytes that this process served in complete responses, counted before compression."""
MAX_ANSWER_BYTES = 1 << 30
"""Maximum size of a response, which limits the cost of a request. Penstock's readers request up to 64 MiB."""

_DECODER = msgspec.msgpack.Decoder(ReadRequest)


class ServedRegion(msgspec.Struct, eq=False):
    """Memory that may be read while `generation` is current, with its own key or a key that is `lent` to a borrower.

    `is_valid` returns whether the memory is still at the view's address. `in_progress` holds the key of each response.
    """

    generation: int
    key: bytes
    view: memoryview
    is_valid: Callable[[], bool]
    in_progress: dict[HttpConnection, bytes] = msgspec.field(default_factory=dict)
    lent: dict[str, bytes] = msgspec.field(default_factory=dict)

    def opens(self, key: bytes) -> bool:
        """Return whether this key is valid for the region, comparing keys in constant time."""
        return any(hmac.compare_digest(key, valid) for valid in (self.key, *list(self.lent.values())))


class RegionServer(HttpServer):
    """Regions and their HTTP server. Each request must name the random `endpoint`."""

    def __init__(self, bound: socket.socket, *, endpoint: str, tls: ssl.SSLContext | None) -> None:
        names = {"name": "data port", "thread_name": "penstock-http"}
        super().__init__(bound, self._answer, **names, full_status=HTTPStatus.SERVICE_UNAVAILABLE, tls=tls)
        self.endpoint = endpoint
        self._regions: dict[int, ServedRegion] = {}
        self._lock = threading.Lock()
        self._generations = itertools.count(1)

    def show(self, view: memoryview, is_valid: Callable[[], bool]) -> ServedRegion:
        """Start a generation of this memory."""
        with self._lock:
            region = ServedRegion(next(self._generations), secrets.token_bytes(16), view, is_valid)
            if self._is_open:
                self._regions[region.generation] = region
        return region

    def lend(self, region: ServedRegion, borrower: str) -> bytes:
        """Return a key to this generation for one borrower."""
        # Keep an existing key, because a reader that retries a lost request must not end its other reads.
        with self._lock:
            return region.lent.setdefault(borrower, secrets.token_bytes(16))

    def take_back(self, region: ServedRegion, borrower: str) -> None:
        """Refuse a borrower's key from now on, and abort responses in progress for it."""
        with self._lock:
            key = region.lent.pop(borrower, None)
            in_progress = [wire for wire, used_key in region.in_progress.items() if used_key == key]
        # Do not hold the lock here, because the thread of each response acquires it at the end.
        for wire in in_progress:
            wire.cut()

    def hide(self, region: ServedRegion) -> None:
        """End a generation and abort its responses in progress. Later requests for this generation get 410."""
        with self._lock:
            self._regions.pop(region.generation, None)
            in_progress = list(region.in_progress)
        for wire in in_progress:
            wire.cut()

    def close(self) -> None:
        """See `HttpServer.close`."""
        super().close()
        with self._lock:
            self._regions.clear()

    def forget(self) -> None:
        """See `HttpServer.forget`."""
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()
        super().forget()

    def _answer(self, exchange: ServerExchange) -> None:
        generation, request = _parse(exchange)
        src, length = request.runs()
        # A sum of many int64 could overflow.
        total = sum(length.tolist())
        if total > MAX_ANSWER_BYTES:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        wire = exchange.wire
        with self._lock:
            region = self._regions.get(generation)
            # Send the same response for an unknown generation and a wrong key, so that it reveals nothing.
            is_same = region and request.endpoint == self.endpoint and request.nbytes == len(region.view)
            if not region or not (region.opens(request.key) and is_same):
                # Keep the connection open, because the reader uses it to request the next generation.
                raise RequestRefused(HTTPStatus.GONE, closes=False)
            region.in_progress[wire] = request.key
        # The key proves that the reader has a lease.
        exchange.prove()
        try:
            views = [region.view[at : at + n] for at, n in zip(src.tolist(), length.tolist(), strict=True)]
            if exchange.head.headers.get("accept-encoding") == CODING:
                self._send_coded(exchange, region, request.key, views, total)
            else:
                self._send_plain(exchange, region, request.key, views, total)
            served_bytes.add(total)
        finally:
            with self._lock:
                region.in_progress.pop(wire, None)

    def _send_plain(
        self, exchange: ServerExchange, region: ServedRegion, key: bytes, views: list[memoryview], total: int
    ) -> None:
        wire = exchange.wire
        exchange.begin_answer(total, f"Content-Length: {total + TRAILER.size}\r\n")
        while views:
            # Check before each piece, so that a fence aborts the response.
            self._check_allowed(region, key)
            advance(views, wire.send(front(views, PIECE_BYTES)))
        wire.send_all(self._trailer(region, key))

    def _send_coded(
        self, exchange: ServerExchange, region: ServedRegion, key: bytes, views: list[memoryview], total: int
    ) -> None:
        # Creating a codec for each response takes 20 us, and compressing one block takes 800 us.
        wire, planes = exchange.wire, Planes()
        exchange.begin_answer(total, f"Transfer-Encoding: chunked\r\nContent-Encoding: {CODING}\r\n")
        while views:
            self._check_allowed(region, key)
            block_views = front(views, BLOCK_BYTES)
            block = np.frombuffer(block_views[0] if len(block_views) == 1 else b"".join(block_views), np.uint8)
            frame = planes.encode(block)
            sending = [memoryview(chunk_head(sum(map(len, frame))))]
            sending += [part for part in frame if len(part)]
            sending.append(memoryview(b"\r\n"))
            while sending:
                advance(sending, wire.send(sending))
            advance(views, len(block))
        trailer = self._trailer(region, key)
        wire.send_all(chunk_head(len(trailer)) + trailer + b"\r\n" + chunk_head(0) + b"\r\n")

    def _trailer(self, region: ServedRegion, key: bytes) -> bytes:
        # A holder fences before it changes memory, so if the generation is still valid, all bytes sent belong to it.
        self._check_allowed(region, key)
        return TRAILER.pack(TRAILER_WORD, region.generation)

    def _check_allowed(self, region: ServedRegion, key: bytes) -> None:
        if self._regions.get(region.generation) is not region or not region.opens(key):
            raise ConnectionAbortedError("the generation or the lease has ended")
        # Reading memory that torch has freed would crash this process.
        if not region.is_valid():
            raise ConnectionAbortedError("the owner moved or freed the memory")


def _parse(exchange: ServerExchange) -> tuple[int, ReadRequest]:
    number = exchange.head.target.removeprefix("/v1/regions/")
    is_number = number != exchange.head.target and number.isascii() and number.isdigit() and len(number) < 20
    if exchange.head.method != "POST" or not is_number:
        raise RequestRefused(HTTPStatus.NOT_FOUND)
    body = exchange.read_body(MAX_BODY_BYTES)
    try:
        return int(number), _DECODER.decode(body)
    except MALFORMED as error:
        raise FormatError("the read request is malformed") from error
