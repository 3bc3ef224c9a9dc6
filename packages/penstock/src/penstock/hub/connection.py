"""The hub's end of a connection: uvicorn's protocol, held to the limits of `net.admission`.

In: bytes of a connection that the listener admitted. Out: requests for the app, with complete heads only; everything
else is refused here, and so is a caller without a token: under a flood of them the app took most of the hub's time.
Not here: which connections are admitted (`net.listener`), bodies and answers (`app`).

A connection is proven by the user at the other end of a Unix socket, by a client certificate, or by the token of its
first request. Until then it has one request: the answer to it is the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.hub.auth import CERTIFICATE, Auth, certificate_names
from penstock.hub.messages import Fault
from penstock.net.admission import Connection
from penstock.net.listener import GuardedListener

REQUEST_S = 60.0
"""For a body to come and its answer to be taken; the app has a shorter deadline for the body."""
MAX_MESSAGE_BYTES = 9 << 20
"""Bytes of one request behind its head, with the marks of chunks; the app's bound of a body is 8 MiB."""
LAST_REFUSAL_S = 2.0
"""For a caller to take the answer that says why its connection ends."""
MAX_HEADERS = 100
"""Header fields of one request; members send 5, proxies add about 10. A head of 16 KiB may have 2,700 of them, which
took 2 ms of the loop."""
_WHERE = "give a token that is in the hub's --token-file: --token-file here, token_file= or PENSTOCK_TOKEN_FILE"
NO_TOKEN = Fault(error="this hub requires a token, and the request shows none", hint=_WHERE)
UNAUTHORIZED = Fault(error="the token shown is not one of this hub's", hint=_WHERE)
_REFUSALS = {
    400: b"HTTP/1.1 400 Bad Request",
    401: b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer\r\ncontent-type: application/json",
    413: b"HTTP/1.1 413 Content Too Large",
    431: b"HTTP/1.1 431 Request Header Fields Too Large",
    503: b"HTTP/1.1 503 Service Unavailable",
}
# In place of uvicorn's logger, which writes a line for every malformed request.
_quiet = logging.getLogger("penstock.hub.parser")
_quiet.setLevel(logging.CRITICAL)


class HubProtocol(HttpToolsProtocol):
    """A connection; `protocol_for` makes the class for a listener.

    Attributes:
        listener: the listener that accepted it.
        auth: the tokens and certificates that are accepted.
        on_unauthorized: called with the path and the peer's host when a caller without a good token is refused.
    """

    listener: GuardedListener
    auth: Auth
    on_unauthorized: Callable[[str, str], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio; with TLS the handshake is over."""
        super().connection_made(transport)
        self.logger = _quiet
        self._place: Connection = self.listener.connection_of(transport.get_extra_info("socket").fileno())
        self._place.cut = transport.abort
        self._is_in_head = True
        self._head_bytes = 0
        self._message_bytes = 0
        self._certificate = ""
        if self.auth.client_ca is not None:
            self._certificate = certificate_names(transport.get_extra_info("peercert") or {})
            self._prove(self._certificate)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        # Two cycles of references lead through the transport: the place's `cut`, and a bound method that asyncio's
        # transport keeps of itself. Only the garbage collector would free them, and under a flood of connections its
        # passes held the loop for up to 130 ms.
        self._place.cut = _nothing
        vars(self.transport).pop("_read_ready_cb", None)

    def data_received(self, data: bytes) -> None:
        """See asyncio. A head gets a deadline with its first byte, and no other with later ones."""
        if self.transport.is_closing():
            return
        if self._is_in_head:
            # An unproven connection has had its deadline since it was accepted.
            if not self._head_bytes and self._place.is_proven:
                self._place.expect(self._place.limits.head_s)
            # The parser gets only as much as a head may have; where that is not all of it, the rest is refused unread.
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431)
            raise ValueError(f"more than {MAX_HEADERS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools: a request begins. An exception here ends the parsing; `send_400_response` is called then."""
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the answer to the first: 14,000 of them fit into what one read brings.
            raise ValueError("requests are not taken ahead of answers")
        self._is_in_head = False
        self._message_bytes = 0
        if not self._place.is_proven and self.auth.token_file is not None:
            self._check_token()
        if self.transport.is_closing():
            return
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]
        super().on_headers_complete()
        self._place.begin(REQUEST_S)
        if not self._place.is_proven:
            self.cycle.keep_alive = False

    def _check_token(self) -> None:
        """Prove the connection by the token of its first request; refuse a request of the hub's API without one."""
        shown = self._authorization
        if self.auth.caller(shown) is not None:
            # By a digest: what counts connections for each caller must not hold tokens.
            self._prove(hashlib.sha256(shown.encode()).hexdigest())
            return
        path = self.url.partition(b"?")[0]
        if path.startswith(b"/v1/") or path == b"/metrics":
            self.on_unauthorized(path.decode("latin-1"), self.client[0] if self.client else "unix")
            self._refuse(401, msgspec.json.encode(UNAUTHORIZED if shown else NO_TOKEN))
            raise ValueError("the caller has no token of this hub")

    @property
    def _authorization(self) -> str:
        """The header with the token; empty: there is none."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"authorization"), "")

    def on_message_complete(self) -> None:
        """See httptools: what comes next is a head."""
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        # A connection that ends is closed once the caller took the answer, which it may never do.
        if self.transport.is_closing():
            self._place.expect(LAST_REFUSAL_S)
        else:
            self._place.end()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: what came is no HTTP, or an exception of this class ended the parsing."""
        if not self.transport.is_closing():
            self._refuse(400)

    def _prove(self, principal: str) -> None:
        """Note the caller of this connection; refuse it where the caller has too many."""
        if not self._place.prove(principal):
            self._refuse(503)

    def _refuse(self, status: int, body: bytes = b"") -> None:
        """Answer without the app, and close the connection."""
        head = _REFUSALS[status] + b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.transport.close()
        self._place.expect(LAST_REFUSAL_S)


def _nothing() -> None:
    """Do nothing: the connection has ended."""


def protocol_for(
    listener: GuardedListener, auth: Auth, on_unauthorized: Callable[[str, str], None]
) -> type[HubProtocol]:
    """Return the protocol class of a hub on this listener; see `HubProtocol` for the arguments."""
    members = {"listener": listener, "auth": auth, "on_unauthorized": staticmethod(on_unauthorized)}
    return type("_HubProtocol", (HubProtocol,), members)
