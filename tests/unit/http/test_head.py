"""Heads of messages: incremental parsing, refusal of ambiguity, and safe writing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from penstock.errors import ConfigError
from penstock.http.connection import HttpConnection
from penstock.http.head import MAX_FIELDS, MalformedMessage, MessageParser, request_head

ANSWER = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nETag:  "a" \r\nVia: a\r\nVia: b\r\n\r\nhello'


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_response_is_parsed_from_arbitrary_fragments(piece: int) -> None:
    parser, behind, at = MessageParser(is_request=False), None, 0
    while behind is None:
        behind = parser.feed_head(ANSWER[at : at + piece])
        at += piece
    head = parser.response()
    assert (head.status, head.version, head.content_length, head.is_chunked) == (206, "1.1", 5, False)
    assert head.headers == {"content-length": "5", "etag": '"a"', "via": "a, b"}
    assert behind + ANSWER[at:] == b"hello"


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_request_is_parsed_from_arbitrary_fragments(piece: int) -> None:
    data = b"POST /v1/x?a=b%20c HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nUpgrade: h2c\r\n"
    data += b"Connection: upgrade\r\n\r\nabcGET"
    parser, behind, at = MessageParser(is_request=True), None, 0
    while behind is None:
        behind = parser.feed_head(data[at : at + piece])
        at += piece
    head = parser.request()
    assert (head.method, head.target, head.content_length, head.keeps_alive) == ("POST", "/v1/x?a=b%20c", 3, True)
    assert behind + data[at:] == b"abcGET"


MALFORMED_FIELDS = [
    b"Content-Length: 5\r\nContent-Length: 5",
    b"Content-Length: 5, 5",
    b"Content-Length: -1",
    b"Content-Length: +1",
    b"Content-Length: 0x10",
    b"Content-Length: 1e9",
    b"Content-Length: " + b"9" * 30,
    b"Content-Length: " + b"9" * 19,
    b"Content-Length:",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"A: b\r\n folded",
    b"A: b\r\n\tfolded",
    b"A: b\nContent-Length: 5",
    b"A: b\rContent-Length: 5",
    b"A: b\x00",
    b"A : b",
    b": b",
    b"no colon",
    b"\r\n".join(b"A: b" for _ in range(MAX_FIELDS + 1)),
    b"A: " + b"b" * (64 << 10),
]


@pytest.mark.parametrize("is_request", [True, False])
@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("fields", MALFORMED_FIELDS, ids=lambda fields: str(fields[:40]))
def test_ambiguous_header_fields_are_refused(fields: bytes, piece: int, is_request: bool) -> None:
    data = (b"POST / HTTP/1.1\r\n" if is_request else b"HTTP/1.1 200 OK\r\n") + fields + b"\r\n\r\n"
    parser = MessageParser(is_request=is_request)
    with pytest.raises(MalformedMessage):
        for at in range(0, len(data), piece):
            parser.feed_head(data[at : at + piece])
        parser.request() if is_request else parser.response()


@pytest.mark.parametrize(
    ("is_request", "line"),
    [
        (False, b"SSH-2.0-x"),
        (False, b"HTTP/1.1 abc"),
        (False, b"HTTP/1.1 99 x"),
        (False, b"HTTP/1.1 1000 x"),
        (False, b"HTTP/2.0 200 OK"),
        (False, b"HTTP/1.1 200 OK\nA: b"),
        (False, b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x"),
        (True, b"\x16\x03\x01\x00\xff"),
        (True, b"GET /"),
        (True, b"GET / HTTP/0.9"),
        (True, b"GET /a b HTTP/1.1"),
        (True, b"GET /\xff HTTP/1.1"),
        (True, b"NOTHING / HTTP/1.1"),
    ],
)
def test_malformed_start_line_is_refused(is_request: bool, line: bytes) -> None:
    parser = MessageParser(is_request=is_request)
    with pytest.raises(MalformedMessage):
        parser.feed_head(line + b"\r\n\r\n")
        parser.request() if is_request else parser.response()


def test_non_http_bytes_are_refused_early() -> None:
    with pytest.raises(MalformedMessage):
        MessageParser(is_request=False).feed_head(b"SSH-2.0-x\r\n")


def test_malformed_chunked_body_is_refused() -> None:
    def fed(*pieces: bytes) -> tuple[bytes, MessageParser]:
        parser = MessageParser(is_request=False)
        behind = parser.feed_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert behind == b"" and parser.response().is_chunked
        return b"".join(part for piece in pieces for part in parser.feed_body(piece)), parser

    body, parser = fed(b"5;x=y\r\nhel", b"lo\r\n0\r\nX-Late: 7\r\n\r\n")
    assert body == b"hello" and parser.events.is_done and not parser.events.has_more
    assert parser.response().headers == {"transfer-encoding": "chunked"}
    assert not fed(b"5\r\nhello")[1].events.is_done
    assert fed(b"0\r\n\r\nHTTP/1.1 200 OK\r\n")[1].events.has_more
    for wrong in (b"x\r\n", b"-1\r\n", b"5\r\nhelloX", b"5\nhello", b"f" * 20 + b"\r\n"):
        with pytest.raises(MalformedMessage):
            fed(wrong)


@pytest.mark.parametrize("fields", ["", "Connection: close\r\n", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_keep_alive_depends_on_http_version_and_header(version: str, fields: str) -> None:
    parser = MessageParser(is_request=False)
    parser.feed_head(f"HTTP/{version} 200 OK\r\n{fields}Content-Length: 0\r\n\r\n".encode())
    assert parser.response().keeps_alive == (fields != "Connection: close\r\n" and (version == "1.1" or bool(fields)))


def test_request_head_with_injected_lines_is_rejected() -> None:
    assert request_head("GET", "/a%20b", [("Host", "h")]) == b"GET /a%20b HTTP/1.1\r\nHost: h\r\n\r\n"
    for value in ("a\r\nX: 1", "a\nX: 1", "a\rX: 1", "a\0", "\u20ac"):
        with pytest.raises(ConfigError, match="request header"):
            request_head("GET", "/", [("A", value)])
    for target in ("", "/a b", "/a\r\nX: 1", "/\u00e9", "/a\tb"):
        with pytest.raises(ConfigError, match="target"):
            request_head("GET", target, [])


def connected() -> tuple[HttpConnection, socket.socket]:
    mine, theirs = socket.socketpair()
    theirs.settimeout(20)
    return HttpConnection(mine, pace_s=10), theirs


def test_interim_responses_are_skipped_and_limited() -> None:
    connection, theirs = connected()
    theirs.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ANSWER)
    assert connection.receive_response(10)[0].status == 206
    assert connection.receive_body(5, 10) == b"hello"
    theirs.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 50)
    with pytest.raises(MalformedMessage, match="interim"):
        connection.receive_response(10)
    connection.close()
    theirs.close()


def test_trickling_head_is_refused_at_deadline() -> None:
    connection, theirs = connected()
    stop = threading.Event()

    def drip() -> None:
        for byte in b"GET / HTTP/1.1\r\nA: " + b"b" * 1000:
            theirs.sendall(bytes([byte]))
            if stop.wait(0.05):
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive_request(0.5, first_s=10, max_bytes=1 << 14)
    assert 0.4 < time.monotonic() - began < 8
    began = time.monotonic()
    with pytest.raises((TimeoutError, MalformedMessage)):
        connection.receive_response(0.5)
    assert time.monotonic() - began < 8
    stop.set()
    dripping.join()
    connection.close()
    theirs.close()


def test_closed_and_truncated_connections_raise_different_errors() -> None:
    for said, error in ((b"", ConnectionResetError), (b"HTTP/1.1 200", ConnectionAbortedError)):
        connection, theirs = connected()
        theirs.sendall(said)
        theirs.close()
        with pytest.raises(error):
            connection.receive_response(10)
        connection.close()
    connection, theirs = connected()
    theirs.close()
    assert connection.receive_request(10, first_s=10, max_bytes=1000) is None
    connection.close()
