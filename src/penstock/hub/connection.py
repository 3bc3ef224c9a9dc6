"""The hub's end of one connection: uvicorn's protocol, held to the limits of `net.limits`.

In: bytes of a connection that the listener let in. Out: requests for the app, complete heads only; the rest is cut.
Not here: which connections are let in (`net.listener`), bodies and answers (`app`).

A connection is proven by the user at the other end of a Unix socket, by a client certificate, or by the token of its
first request. Until then it has one request: the answer to it is the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.hub.auth import Auth
from penstock.hub.tls import CERTIFICATE, certificate_names
from penstock.net.admission import Connection
from penstock.net.listener import GuardedListener

REQUEST_S = 60.0
"""For a body to come and its answer to be taken; the app has a shorter deadline for the body."""
MAX_MESSAGE_BYTES = 9 << 20
"""Bytes of one request behind its head, with the marks of chunks; the app's bound of a body is 8 MiB."""
LAST_REFUSAL_S = 2.0
"""For a caller to take the answer that says why its connection ends."""
_REFUSALS = {
    400: b"HTTP/1.1 400 Bad Request",
    413: b"HTTP/1.1 413 Content Too Large",
    431: b"HTTP/1.1 431 Request Header Fields Too Large",
    503: b"HTTP/1.1 503 Service Unavailable",
}
_quiet = logging.getLogger("penstock.hub.parser")
_quiet.setLevel(logging.CRITICAL)
"""In place of uvicorn's, which writes a line for every malformed request."""


class HubProtocol(HttpToolsProtocol):
    """One connection. `protocol_for` makes the class for a listener."""

    listener: GuardedListener
    auth: Auth

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio; with TLS the handshake is over."""
        super().connection_made(transport)
        self.logger = _quiet
        self._place: Connection = self.listener.connection_of(transport.get_extra_info("socket").fileno())
        self._place.cut = transport.abort
        self._is_in_head, self._head_bytes, self._message_bytes = True, 0, 0
        self._certificate = ""
        if self.auth.client_ca is not None:
            self._certificate = certificate_names(transport.get_extra_info("peercert") or {})
            self._prove(self._certificate)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        # The place led back to the transport: a cycle for each connection that ended, which only the garbage collector
        # would free. With 500 connections a second its passes held the loop 0.3 s.
        self._place.cut = _nothing

    def data_received(self, data: bytes) -> None:
        """See asyncio. A head gets a deadline with its first byte, and no other with later ones."""
        if self.transport.is_closing():
            return
        if self._is_in_head:
            if not self._head_bytes and self._place.is_proven:
                self._place.expect(self._place.limits.head_s)
            room = self._place.limits.head_bytes - self._head_bytes
            head, data = data[:room], data[room:]
            self._head_bytes += len(head)
            super().data_received(head)
            if not data or self.transport.is_closing():
                return
            if self._is_in_head:
                self._refuse(431)
                return
        self._message_bytes += len(data)
        if self._message_bytes > MAX_MESSAGE_BYTES:
            self._refuse(413)
            return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """See httptools: a request begins."""
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the answer to the first: 14,000 of them fit into what one read brings.
            raise ValueError("requests are not taken ahead of answers")
        self._is_in_head, self._message_bytes = False, 0
        if not self._place.is_proven and (shown := self._authorization):
            caller = self.auth.caller(shown)
            if caller is not None:
                self._prove(hashlib.sha256(shown.encode()).hexdigest())
        if self.transport.is_closing():
            return
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]
        super().on_headers_complete()
        self._place.begin(REQUEST_S)
        if not self._place.is_proven:
            self.cycle.keep_alive = False

    @property
    def _authorization(self) -> str:
        return next((value.decode("latin-1") for name, value in self.headers if name == b"authorization"), "")

    def on_message_complete(self) -> None:
        """See httptools: what comes next is a head."""
        super().on_message_complete()
        self._is_in_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._place.expect(LAST_REFUSAL_S)  # closed once the caller took the answer, which it may never do
        else:
            self._place.end()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: what came is no HTTP."""
        self._refuse(400)

    def _prove(self, principal: str) -> None:
        if not self._place.prove(principal):
            self._refuse(503)

    def _refuse(self, status: int) -> None:
        self.transport.write(_REFUSALS[status] + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
        self._place.expect(LAST_REFUSAL_S)


def _nothing() -> None:
    """Do nothing: the connection has ended."""


def protocol_for(listener: GuardedListener, auth: Auth) -> type[Any]:
    """Return the protocol class of a hub on this listener."""
    return type("_HubProtocol", (HubProtocol,), {"listener": listener, "auth": auth})
