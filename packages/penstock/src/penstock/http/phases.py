"""Handlers of `GET /v1/phases`, the startup record of a process as JSON or as events, and of `GET /v1/ready`.

The servers that use these handlers authorise the requests.
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
"""Duration of one stream in seconds, as in the hub (`hub.page`). An EventSource then reconnects."""
MAX_STREAMS = 16
"""Maximum number of concurrent streams. Each occupies a thread."""
_TURN_S = 1.0
"""Seconds between two events during a phase, because moved bytes do not wake a waiter."""
_QUIET_S = 10.0
"""Seconds between two keep-alive comments outside a phase."""
_encode = msgspec.json.Encoder().encode


def boot_of_process() -> Boot:
    """Return the startup record of this process, which is empty before the first phase."""
    return boot_record().snapshot() or Boot(started_at=0.0)


def answer_ready(exchange: ServerExchange) -> None:
    """Reply to `GET /v1/ready` with 200 once the process is ready, or else with 503. Probes require no token."""
    exchange.answer(HTTPStatus.OK if boot_of_process().ready else HTTPStatus.SERVICE_UNAVAILABLE)


class PhasesHandler:
    """The handler of `GET /v1/phases` for one server. `describe` returns the message for a startup record."""

    def __init__(self, describe: Callable[[Boot], object]) -> None:
        self._describe = describe
        self._streams = Shares[int](MAX_STREAMS)
        self._numbers = itertools.count()

    def answer(self, exchange: ServerExchange, query: Mapping[str, object], caller: str) -> None:
        """Reply in the thread of the request. A stream lasts `STREAM_S`, or until the client closes it.

        Raises RequestRefused if there are `MAX_STREAMS` streams and no other caller has more streams than this caller.
        """
        # The Accept header is that of a browser's EventSource.
        if "stream" not in query and "text/event-stream" not in exchange.head.headers.get("accept", ""):
            body = _encode(self._describe(boot_of_process()))
            exchange.answer(HTTPStatus.OK, body, "Content-Type: application/json\r\nCache-Control: no-store\r\n")
            return
        stream = next(self._numbers)
        if self._streams.enter(stream, caller, displaces_own=False) is None:
            raise RequestRefused(HTTPStatus.TOO_MANY_REQUESTS)
        try:
            self._stream(exchange, stream)
        finally:
            self._streams.drop(stream)

    def _stream(self, exchange: ServerExchange, stream: int) -> None:
        record, sent = boot_record(), b""
        end_s = time.monotonic() + STREAM_S
        exchange.begin_stream(STREAM_S, "Content-Type: text/event-stream\r\nCache-Control: no-store\r\n")
        while time.monotonic() < end_s and stream in self._streams:
            # Read the serial first, so that a change between the two reads ends the next wait.
            serial = record.serial
            boot = boot_of_process()
            body = _encode(self._describe(boot))
            # A comment keeps proxies from closing the connection, and detects a client that is gone.
            exchange.wire.send_all(b":\n\n" if body == sent else b"data: " + body + b"\n\n")
            sent = body
            record.wait(serial, _TURN_S if boot.state == "starting" else _QUIET_S)
