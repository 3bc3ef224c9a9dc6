"""`GET /v1/phases` of one process: its start as JSON, or as server-sent events while it goes on; `GET /v1/ready`.

In: a request that may have the answer. Out: the record of `penstock.phases`.
Not here: who may have it (each server).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec

from penstock.http.server import RequestRefused, ServerExchange
from penstock.net.shares import Shares
from penstock.phases import Boot, boot_record

STREAM_S = 50.0
"""Length of one stream; an event source then connects again. As long as a hub's (`hub.page`)."""
MAX_STREAMS = 16
"""Streams at once, each of which occupies a thread."""
_TURN_S = 1.0
"""Between two events while a phase runs: its bytes are no change that wakes a waiter."""
_QUIET_S = 10.0
"""Between two signs of life while none runs."""
_encode = msgspec.json.Encoder().encode


def wants_stream(query: Mapping[str, object], accept: str) -> bool:
    """Return whether a request asks for events: by `?stream`, or as a browser's event source does."""
    return "stream" in query or "text/event-stream" in accept


def boot_of_process() -> Boot:
    """Return the start of this process; without any phase yet, one that has not begun."""
    return boot_record().snapshot() or Boot(started_at=0.0)


def answer_ready(exchange: ServerExchange) -> None:
    """Answer `GET /v1/ready`: 200 once the process is ready, else 503, for probes, which cannot show a token."""
    exchange.answer(HTTPStatus.OK if boot_of_process().ready else HTTPStatus.SERVICE_UNAVAILABLE)


class PhasesHandler:
    """The handler of one server.

    Args:
        describe: returns what is sent for a boot, with what the server knows besides.
    """

    def __init__(self, describe: Callable[[Boot], object]) -> None:
        self._describe = describe
        self._streams = Shares[int](MAX_STREAMS)
        self._numbers = itertools.count()

    def answer(self, exchange: ServerExchange, query: Mapping[str, object], caller: str) -> None:
        """Answer one request, in its thread; a stream lasts `STREAM_S`, or until the client closes it.

        It ends sooner if another caller needs a place, and this one has more streams than that one.

        Args:
            exchange: the request.
            query: its parameters.
            caller: the name of whoever asks.

        Raises:
            Refused: there are `MAX_STREAMS` streams already, and no other caller has more of them.
        """
        if not wants_stream(query, exchange.head.headers.get("accept", "")):
            body = _encode(self._describe(boot_of_process()))
            exchange.answer(HTTPStatus.OK, body, "Content-Type: application/json\r\nCache-Control: no-store\r\n")
            return
        place = next(self._numbers)
        if self._streams.enter(place, caller, displaces_own=False) is None:
            raise RequestRefused(HTTPStatus.TOO_MANY_REQUESTS)
        try:
            self._stream(exchange, place)
        finally:
            self._streams.drop(place)

    def _stream(self, exchange: ServerExchange, place: int) -> None:
        record, sent = boot_record(), b""
        end_s = time.monotonic() + STREAM_S
        exchange.begin_stream(STREAM_S, "Content-Type: text/event-stream\r\nCache-Control: no-store\r\n")
        while time.monotonic() < end_s and place in self._streams:
            # Before the snapshot: a change between the two must not be slept through.
            serial = record.serial
            boot = boot_of_process()
            body = _encode(self._describe(boot))
            # A comment keeps proxies from closing the connection, and finds out that the client has gone.
            exchange.wire.send_all(b":\n\n" if body == sent else b"data: " + body + b"\n\n")
            sent = body
            record.wait(serial, _TURN_S if boot.state == "starting" else _QUIET_S)
