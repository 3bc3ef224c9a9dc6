"""Heads of HTTP/1.1 messages: strict parsing as bytes arrive, and encoding that prevents injected lines.

llhttp (through `httptools`) parses the lines. This module repeats the checks that determine where a body ends, because
releases of llhttp differ in these checks. If two programs read a head differently, one request can hide inside another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httptools
import msgspec

from penstock.errors import ConfigError, FormatError

MAX_HEAD_BYTES = 64 << 10
"""Default maximum size of a head. Redirects of model hubs to signed URLs take up to 10 KiB with cookies."""
MAX_FIELDS = 100
"""Maximum number of header fields. Common servers send 10 to 30. The standard library has the same limit."""


class MalformedMessage(FormatError):
    """The peer sent a message that is not HTTP/1.1, is too long, or is ambiguous."""


class Head(msgspec.Struct, kw_only=True):
    """The head of a message. `version` is "1.0" or "1.1".

    `headers` has names in lower case, and values of a repeated field joined by commas. `content_length` is None if the
    head does not state a length.
    """

    version: str
    headers: dict[str, str]
    content_length: int | None
    is_chunked: bool

    @property
    def keeps_alive(self) -> bool:
        """True if the sender keeps the connection open after this message."""
        options = self.headers.get("connection", "").lower()
        return "close" not in options if self.version == "1.1" else "keep-alive" in options


class RequestHead(Head, kw_only=True):
    """The head of a request. `target` is the path and query as sent."""

    method: str
    target: str


class ResponseHead(Head, kw_only=True):
    """The head of a response."""

    status: int


class _Events:
    """Callbacks for the parser, without a reference to the parser, which would create a reference cycle.

    `is_done` is True after the last chunk of a body, and `has_more` if bytes of another message followed this one.
    """

    __slots__ = ("body", "fields", "has_more", "is_done", "is_in_body", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.is_in_body = False
        self.is_done = False
        self.has_more = False

    def on_message_begin(self) -> None:
        self.has_more |= self.is_in_body

    def on_url(self, piece: bytes) -> None:
        self.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignore fields after a chunked body (trailers), so that nothing depends on them.
        if not self.is_in_body:
            if len(self.fields) == MAX_FIELDS:
                raise MalformedMessage(f"the message head has more than {MAX_FIELDS} header fields")
            self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_in_body = True

    def on_body(self, piece: bytes) -> None:
        # Ignore bytes after the end, which belong to a response that was not requested.
        if not self.is_done:
            self.body.append(piece)

    def on_message_complete(self) -> None:
        self.is_done = True


class MessageParser:
    """The parser of one message: call `feed_head` until it returns bytes, then `request` or `response`."""

    def __init__(self, *, is_request: bool, max_bytes: int = MAX_HEAD_BYTES) -> None:
        self.events = _Events()
        self._parser = (httptools.HttpRequestParser if is_request else httptools.HttpResponseParser)(self.events)
        self._max_bytes = max_bytes
        self._received = b""
        self._num_fed = 0

    @property
    def has_begun(self) -> bool:
        """True after the first byte of the message."""
        return bool(self._received)

    def feed_head(self, data: bytes) -> bytes | None:
        """Add received bytes. Return the bytes after the head once it is complete. Raises MalformedMessage."""
        received = self._received + data
        end = received.find(b"\r\n\r\n", max(0, len(self._received) - 3))
        # Parse whole lines as they arrive, to refuse other protocols early. Do not parse the body.
        stop = received.rfind(b"\n") + 1 if end < 0 else end + 4
        if (len(received) if end < 0 else stop) > self._max_bytes:
            raise MalformedMessage(f"the message head has more than {self._max_bytes} bytes")
        self._feed(received[self._num_fed : stop])
        self._num_fed = stop
        self._received = received if end < 0 else received[:stop]
        if self.events.is_in_body != (end >= 0):
            raise MalformedMessage("the message head does not end with an empty line")
        return None if end < 0 else received[stop:]

    def feed_body(self, data: bytes) -> list[bytes]:
        """Add received bytes of a chunked body, and return the body bytes in them. Raises MalformedMessage."""
        self._feed(data)
        body, self.events.body = self.events.body, []
        return body

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Refuse only a response. A request may offer another protocol, which a server need not accept.
            if isinstance(self._parser, httptools.HttpResponseParser):
                raise MalformedMessage("the response is in a protocol other than HTTP/1.1") from None
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, MalformedMessage):
                raise error.__context__ from None
            raise MalformedMessage(f"the message is not HTTP/1.1: {error}") from None

    def request(self) -> RequestHead:
        """Return the head of a request. Raises MalformedMessage."""
        assert isinstance(self._parser, httptools.HttpRequestParser)
        method, target = self._parser.get_method().decode("ascii"), self.events.target.decode("latin-1")
        return RequestHead(**self._common(), method=method, target=target)

    def response(self) -> ResponseHead:
        """Return the head of a response. Raises MalformedMessage."""
        assert isinstance(self._parser, httptools.HttpResponseParser)
        return ResponseHead(**self._common(), status=self._parser.get_status_code())

    def _common(self) -> dict[str, Any]:
        num_lines = self._received.count(b"\r\n")
        # Refuse a lone CR or LF and folded lines, because parsers disagree on where such lines end.
        if self._received.count(b"\n") != num_lines or self._received.count(b"\r") != num_lines:
            raise MalformedMessage("the message head has a line that does not end in CR LF")
        if b"\r\n " in self._received or b"\r\n\t" in self._received:
            raise MalformedMessage("the message head has a folded line")
        version = self._parser.get_http_version()
        line = self._received.partition(b"\r\n")[0]
        protocol = line.partition(b" ")[0] if isinstance(self._parser, httptools.HttpResponseParser) else line[-8:]
        # Check the protocol's name, because the parser also accepts RTSP and ICE requests and reports only the version.
        if version not in {"1.0", "1.1"} or not protocol.startswith(b"HTTP/"):
            raise MalformedMessage("the message is not HTTP/1.1")
        headers: dict[str, str] = {}
        for name_bytes, value_bytes in self.events.fields:
            name, value = name_bytes.decode("latin-1").lower(), value_bytes.decode("latin-1").strip(" \t")
            if name not in headers:
                headers[name] = value
            elif name in {"content-length", "transfer-encoding", "host"}:
                raise MalformedMessage(f"the header field {name} is repeated")
            else:
                headers[name] += f", {value}"
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if length is not None or coding.lower() != "chunked" or version != "1.1":
                raise MalformedMessage("the message head defines the end of the body twice or in an unknown way")
            return {"version": version, "headers": headers, "content_length": None, "is_chunked": True}
        # Allow at most 18 digits, so that a sum of two lengths fits in 64 bits.
        if length is not None and not ((length.isascii() and length.isdigit()) and len(length) <= 18):
            raise MalformedMessage("the Content-Length is not a number")
        content_length = None if length is None else int(length)
        return {"version": version, "headers": headers, "content_length": content_length, "is_chunked": False}


def request_head(method: str, target: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Encode a request's head. Raises ConfigError if a part contains a line break or an invalid character."""
    # A space would end the target, and the remainder would be read as the version.
    if not (target.isascii() and target.isprintable()) or " " in target or not target:
        raise ConfigError(f"{target[:80]!r} is not a valid request target", hint="percent-encode the path and query")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    text = "\r\n".join(lines) + "\r\n\r\n"
    # A line break inside a value would add a header field or a second request.
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1 or "\0" in text:
        raise ConfigError("a request header contains a line break")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise ConfigError("a request header is not Latin-1") from error
