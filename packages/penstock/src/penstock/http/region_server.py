"""The holder's end of the `http` transport: serve regions of this process's memory to readers that have a key.

In: regions, requests for runs of their bytes. Out: the bytes, sent straight from the memory, or a refusal.
Not here: connections and limits (`server`), messages (`region_messages`), the reader's end (`transport.http_reader`).

    POST /v1/regions/GENERATION   ReadRequest -> 200: the bytes of the runs, then a trailer
                                  410: this generation has ended, or the key is not one of its keys
                                  404, 413, 400: another path, too many bytes, a malformed request

The trailer is sent only if the generation still holds after the last byte: a reader does not use bytes without it.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
"""Bytes of regions that this process has sent whole answers of, before compression."""

MAX_ANSWER_BYTES = 1 << 30
"""Longest answer. Reason: it bounds the cost of one request; a reader of ours asks for 64 MiB at most."""

_DECODER = msgspec.msgpack.Decoder(ReadRequest)


@dataclass(slots=True, eq=False)
class ServedRegion:
    """Memory that may be read while `generation` is current, by a reader that sends its key or a lent one.

    Attributes:
        is_there: returns whether the memory is still where the view is. Keeps the memory alive.
        under_way: connections of the answers that are being sent, each with the key of its request.
        lent: keys by borrower.
    """

    generation: int
    key: bytes
    view: memoryview
    is_there: Callable[[], bool]
    under_way: dict[HttpConnection, bytes] = field(default_factory=dict)
    lent: dict[str, bytes] = field(default_factory=dict)

    def opens(self, key: bytes) -> bool:
        """Return whether this is a key of the region, in the same time for every wrong key."""
        return any(hmac.compare_digest(key, valid) for valid in (self.key, *list(self.lent.values())))


class RegionServer:
    """Regions and the server that readers get them from. Started by the constructor.

    Args:
        bound: a bound socket; owned by the server from now on.
        endpoint: random id of this server, which each request must name.
        tls: context of the server side; None: plain.
    """

    def __init__(self, bound: socket.socket, *, endpoint: str, tls: ssl.SSLContext | None) -> None:
        self.endpoint = endpoint
        self._regions: dict[int, ServedRegion] = {}
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._is_open = True
        self._http = HttpServer(
            bound,
            self._answer,
            name="data port",
            thread_name="penstock-http",
            full_status=HTTPStatus.SERVICE_UNAVAILABLE,
            tls=tls,
        )

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return self._http.num_open

    def show(self, view: memoryview, is_there: Callable[[], bool]) -> ServedRegion:
        """Begin a generation of this memory."""
        with self._lock:
            region = ServedRegion(next(self._generations), secrets.token_bytes(16), view, is_there)
            if self._is_open:
                self._regions[region.generation] = region
        return region

    def lend(self, region: ServedRegion, borrower: str) -> bytes:
        """Return a key to this generation for one borrower."""
        # The same key on a second call: a reader that asks again after a lost answer must not end its own reads.
        with self._lock:
            return region.lent.setdefault(borrower, secrets.token_bytes(16))

    def take_back(self, region: ServedRegion, borrower: str) -> None:
        """Refuse a borrower's key from now on, and cut the answers under way for it."""
        with self._lock:
            key = region.lent.pop(borrower, None)
            under_way = [wire for wire, shown in region.under_way.items() if shown == key]
        # Outside the lock: the thread of each answer takes it on its way out.
        for wire in under_way:
            wire.cut()

    def hide(self, region: ServedRegion) -> None:
        """End a generation and cut the answers under way; their readers get 410 if they ask again."""
        with self._lock:
            self._regions.pop(region.generation, None)
            under_way = list(region.under_way)
        for wire in under_way:
            wire.cut()

    def close(self) -> None:
        """Accept no connections and cut all answers. Idempotent; does not wait for their threads."""
        with self._lock:
            self._is_open = False
            # First: an answer under way sees at its next piece that its region is gone.
            self._regions.clear()
        self._http.close()

    def forget(self) -> None:
        """In a forked child: serve nothing more. The sockets are let go by `HttpServer`."""
        # Another thread of the parent may have had the lock when the child was forked.
        self._lock = threading.Lock()
        self._is_open = False

    def _answer(self, exchange: ServerExchange) -> None:
        """Answer one request for runs of a region."""
        generation, request = _parse(exchange)
        src, length = request.runs()
        # Python's integers: a sum of many int64 could wrap to a small number.
        total = sum(length.tolist())
        if total > MAX_ANSWER_BYTES:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        wire = exchange.wire
        with self._lock:
            region = self._regions.get(generation)
            # One answer for "no such generation" and "wrong key": a stranger learns nothing about what exists.
            if region is None or not self._is_allowed(region, request):
                # The connection stays: the reader asks there for the next generation.
                raise RequestRefused(HTTPStatus.GONE, closes=False)
            region.under_way[wire] = request.key
        # The key came with a lease.
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
                region.under_way.pop(wire, None)

    def _send_plain(
        self, exchange: ServerExchange, region: ServedRegion, key: bytes, views: list[memoryview], total: int
    ) -> None:
        wire = exchange.wire
        exchange.begin_answer(total, f"Content-Length: {total + TRAILER.size}\r\n")
        while views:
            # For each piece: a fence in the middle ends the answer early instead of sending gigabytes in vain.
            self._check_allowed(region, key)
            advance(views, wire.send(front(views, PIECE_BYTES)))
        wire.send_all(self._trailer(region, key))

    def _send_coded(
        self, exchange: ServerExchange, region: ServedRegion, key: bytes, views: list[memoryview], total: int
    ) -> None:
        """Send the runs as frames of `Planes`, one in each chunk, and the trailer as the last chunk."""
        # Of its own for each answer: making one takes 20 us, coding one block 800.
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
        """Return what says that all bytes before it are of this generation."""
        # A holder fences before it changes a byte: if the generation still holds, every byte sent belonged to it.
        self._check_allowed(region, key)
        return TRAILER.pack(TRAILER_WORD, region.generation)

    def _check_allowed(self, region: ServedRegion, key: bytes) -> None:
        """Raise ConnectionAbortedError, which ends the connection, if the region must not be read any more."""
        if self._regions.get(region.generation) is not region or not region.opens(key):
            raise ConnectionAbortedError("fenced, or the lease has ended")
        # A read of memory that torch has freed would end this process.
        if not region.is_there():
            raise ConnectionAbortedError("the memory was moved or freed by its owner")

    def _is_allowed(self, region: ServedRegion, request: ReadRequest) -> bool:
        is_same = request.endpoint == self.endpoint and request.nbytes == len(region.view)
        return region.opens(request.key) and is_same


def _parse(exchange: ServerExchange) -> tuple[int, ReadRequest]:
    """Return the generation and the request that a message names. Raises Refused or FormatError."""
    number = exchange.head.target.removeprefix("/v1/regions/")
    is_number = number != exchange.head.target and number.isascii() and number.isdigit() and len(number) < 20
    if exchange.head.method != "POST" or not is_number:
        raise RequestRefused(HTTPStatus.NOT_FOUND)
    body = exchange.read_body(MAX_BODY_BYTES)
    try:
        return int(number), _DECODER.decode(body)
    except MALFORMED as error:
        raise FormatError("a malformed request") from error
