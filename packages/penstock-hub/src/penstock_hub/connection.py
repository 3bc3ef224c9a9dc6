"""The hub's server side of a connection: uvicorn's protocol with the limits of `net.admission`.

The app gets only requests with complete heads and valid tokens, because a flood of other requests in the app would use
most of the hub's time.

A connection is authenticated by the peer's user on a Unix socket, by a client certificate, or by the token in the first
request. An unauthenticated connection gets one request and is closed after the response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.hub.auth import certificate_names
from penstock.hub.messages import Fault
from penstock.net.admission import Connection
from penstock.net.listener import GuardedListener
from penstock_hub.auth import CERTIFICATE, Auth

REQUEST_S = 60.0
"""Seconds for a body to arrive and for its response to be read. The app has a shorter deadline for the body."""
MAX_MESSAGE_BYTES = 9 << 20
"""Maximum bytes in a request after its head, including chunk headers. The app limits a body to 8 MiB."""
LAST_REFUSAL_S = 2.0
"""Seconds for a caller to read the response that states why its connection is closed."""
MAX_HEADERS = 100
"""Maximum number of header fields in a request. Members send 5, and proxies add about 10. A head of 16 KiB can have
2,700 fields, which blocked the event loop for 2 ms."""
_WHERE = "give a token from the hub's --token-file by --token-file, token_file= or PENSTOCK_TOKEN_FILE"
NO_TOKEN = Fault(error="this hub requires a token, and the request has none", hint=_WHERE)
UNAUTHORIZED = Fault(error="this hub does not know the token", hint=_WHERE)
_REFUSALS = {
    400: b"HTTP/1.1 400 Bad Request",
    401: b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer\r\ncontent-type: application/json",
    413: b"HTTP/1.1 413 Content Too Large",
    431: b"HTTP/1.1 431 Request Header Fields Too Large",
    503: b"HTTP/1.1 503 Service Unavailable",
}
# This replaces uvicorn's logger, which writes a line for every malformed request.
_quiet = logging.getLogger("penstock.hub.parser")
_quiet.setLevel(logging.CRITICAL)


class HubProtocol(HttpToolsProtocol):
    """A connection. `protocol_for` creates the class for a listener.

    Attributes:
        auth: the tokens and certificates that are accepted.
        on_unauthorized: called with the path and the peer's host when a caller without a valid token is refused.
    """

    listener: GuardedListener
    auth: Auth
    on_unauthorized: Callable[[str, str], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio. Called after the handshake of a TLS connection."""
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
        # Break two reference cycles through the transport: the reservation's `cut`, and a bound method in asyncio's
        # transport. In a flood of connections the garbage collector would otherwise block the loop for up to 130 ms.
        self._place.cut = lambda: None
        vars(self.transport).pop("_read_ready_cb", None)

    def data_received(self, data: bytes) -> None:
        """See asyncio. The first byte of a head sets its deadline, and later bytes do not extend it."""
        if self.transport.is_closing():
            return
        if self._is_in_head:
            # An unauthenticated connection got its deadline when it was accepted.
            if not self._head_bytes and self._place.is_proven:
                self._place.expect(self._place.limits.head_s)
            # Pass the parser at most as many bytes as a head may have. If they do not complete the head, refuse the
            # rest without parsing it.
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
            raise ValueError(f"the request has more than {MAX_HEADERS} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools. A request begins. An exception here stops the parser, which calls `send_400_response`."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The caller sent a second request before the response to the first. One read can contain 14,000 requests.
            raise ValueError("a request arrived before the response to the previous request")
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
        """Authenticate the connection by its first request's token. Refuse an API request without a valid token."""
        fields = (value.decode("latin-1") for name, value in self.headers if name == b"authorization")
        authorization = next(fields, "")
        if self.auth.caller(authorization) is not None:
            # Pass a digest, because the object that counts connections must not store tokens.
            self._prove(hashlib.sha256(authorization.encode()).hexdigest())
            return
        path = self.url.partition(b"?")[0]
        if path.startswith(b"/v1/") or path == b"/metrics":
            self.on_unauthorized(path.decode("latin-1"), self.client[0] if self.client else "unix")
            self._refuse(401, msgspec.json.encode(UNAUTHORIZED if authorization else NO_TOKEN))
            raise ValueError("the caller has no valid token for this hub")

    def on_message_complete(self) -> None:
        """See httptools. The next bytes are the head of another request."""
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        # The connection closes once the caller has read the response, which may never happen.
        if self.transport.is_closing():
            self._place.expect(LAST_REFUSAL_S)
        else:
            self._place.end()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn. Called if the bytes are not HTTP, or an exception in this class stopped the parsing."""
        if not self.transport.is_closing():
            self._refuse(400)

    def _prove(self, principal: str) -> None:
        """Record the caller of this connection, or refuse a caller with too many connections."""
        if not self._place.prove(principal):
            self._refuse(503)

    def _refuse(self, status: int, body: bytes = b"") -> None:
        """Respond without the app, and close the connection."""
        head = _REFUSALS[status] + b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.transport.close()
        self._place.expect(LAST_REFUSAL_S)


def protocol_for(
    listener: GuardedListener, auth: Auth, on_unauthorized: Callable[[str, str], None]
) -> type[HubProtocol]:
    """Return the protocol class for a hub on this listener. See `HubProtocol` for the arguments."""
    members = {"listener": listener, "auth": auth, "on_unauthorized": staticmethod(on_unauthorized)}
    return type("_HubProtocol", (HubProtocol,), members)
