"""Responses: bodies with a length, in chunks and until the end, and reuse of connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.http.client import ClientConnection, HttpReply
from penstock.http.head import MalformedMessage

BODY = bytes(range(256)) * 1000
OK = b"HTTP/1.1 200 OK\r\n"


class Server:
    """A server that sends these bytes for each request."""

    def __init__(self) -> None:
        mine, self.sock = socket.socketpair()
        self.connection = ClientConnection(mine, pace_s=20)

    def get(self, said: bytes, method: str = "GET", *, ends: bool = False) -> HttpReply:
        def say() -> None:
            self.sock.recv(65536)
            with contextlib.suppress(OSError):
                self.sock.sendall(said)
                if ends:
                    self.sock.shutdown(socket.SHUT_WR)

        threading.Thread(target=say, daemon=True).start()
        return self.connection.request(method, "/", [("Host", "h")], wait_s=20)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.connection.close()
    running.sock.close()


def chunked(body: bytes, nbytes: int) -> bytes:
    pieces = [body[at : at + nbytes] for at in range(0, len(body), nbytes)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def received(reply: HttpReply, nbytes: int) -> bytes:
    body, view = b"", memoryview(bytearray(nbytes))
    while count := reply.readinto(view):
        body += view[:count]
    return body


@pytest.mark.parametrize("nbytes", [7, 1000, 300_000])
@pytest.mark.parametrize(
    ("said", "is_reusable"),
    [
        (OK + b"Content-Length: 256000\r\n\r\n" + BODY, True),
        (OK + b"Content-Length: 256000\r\nConnection: close\r\n\r\n" + BODY, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 256000\r\n\r\n" + BODY, False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 100_000), True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 999), True),
    ],
    ids=["length", "close", "1.0", "large chunks", "small chunks"],
)
def test_complete_response_body_is_received(server: Server, said: bytes, is_reusable: bool, nbytes: int) -> None:
    reply = server.get(said)
    assert not reply.is_reusable
    assert received(reply, nbytes) == BODY
    assert reply.is_reusable == is_reusable
    assert reply.readinto(memoryview(bytearray(1))) == 0
    if is_reusable:
        assert server.get(said).read(len(BODY)) == BODY


def test_body_without_length_is_read_until_close(server: Server) -> None:
    reply = server.get(OK + b"\r\n" + BODY, ends=True)
    assert reply.length is None
    assert received(reply, 1000) == BODY
    assert not reply.is_reusable


@pytest.mark.parametrize(
    ("method", "line"),
    [("HEAD", b"200 OK\r\nContent-Length: 5"), ("GET", b"204 No"), ("GET", b"304 Not\r\nContent-Length: 5")],
)
def test_bodyless_response_reads_as_empty(server: Server, method: str, line: bytes) -> None:
    said = b"HTTP/1.1 " + line + b"\r\n\r\n"
    for _ in range(2):
        reply = server.get(said, method)
        assert (reply.read(100), reply.is_reusable) == (b"", True)


@pytest.mark.parametrize("said", [b"Content-Length: 101\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"\r\n"])
def test_body_above_limit_is_refused(server: Server, said: bytes) -> None:
    body = chunked(bytes(101), 50) if b"chunked" in said else bytes(101)
    with pytest.raises(MalformedMessage, match="more than 100 bytes"):
        server.get(OK + said + body, ends=True).read(100)


@pytest.mark.parametrize("said", [b"Content-Length: 10\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc"])
def test_truncated_body_raises(server: Server, said: bytes) -> None:
    with pytest.raises(MalformedMessage, match="before the end"):
        server.get(OK + said, ends=True).read(100)


def test_trailing_bytes_prevent_connection_reuse(server: Server) -> None:
    for said in (
        b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1",
    ):
        other = Server()
        reply = other.get(OK + said)
        reply.read(100)
        assert not reply.is_reusable
        other.connection.close()
        other.sock.close()


@pytest.mark.parametrize(
    "said", [b"5;" + b"x" * 200_000, b"0\r\n" + b"A: b\r\n" * 40_000], ids=["extension", "trailer"]
)
def test_empty_chunked_body_is_received(server: Server, said: bytes) -> None:
    reply = server.get(OK + b"Transfer-Encoding: chunked\r\n\r\n" + said)
    with pytest.raises(MalformedMessage):
        reply.readinto(memoryview(bytearray(10)))


def test_request_to_slowly_reading_server_raises_timeout_error() -> None:
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.05) and theirs.recv(2048):
            pass

    sipping = threading.Thread(target=sip, daemon=True)
    sipping.start()
    connection = ClientConnection(mine, pace_s=20)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.request("PUT", "/", [], bytes(1 << 20), wait_s=0.3)
    assert time.monotonic() - began < 8
    stop.set()
    connection.close()
    sipping.join()
    theirs.close()


def test_body_excludes_pipelined_response(server: Server) -> None:
    extra = OK + b"Content-Length: 5\r\n\r\nhello"
    reply = server.get(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + extra)
    assert reply.read(1000) == b"abc" and not reply.is_reusable


@pytest.mark.parametrize("line", [b"HTTP/1.1 099 No", b"RTSP/1.0 200 OK", b"ICE/1.0 200 OK"])
def test_non_http_response_raises(server: Server, line: bytes) -> None:
    with pytest.raises(MalformedMessage):
        server.get(line + b"\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"HTTP/1.1 503 Slow\r\nContent-Length: 9\r\n\r\n<Code>A</", b"<Code>A</"),
        (b"HTTP/1.1 503 Slow\r\nContent-Length: 5000\r\n\r\n<Code>", b"<Code>"),
        (b"HTTP/1.1 503 Slow\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nCode\r\n", b"Code"),
        (b"HTTP/1.1 503 Slow\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b""),
        (b"HTTP/1.1 503 Slow\r\n\r\nuntil the end", b"until the end"),
    ],
    ids=["whole", "late", "late chunk", "bad chunk", "no length"],
)
def test_error_body_is_read_within_limit(server: Server, said: bytes, found: bytes) -> None:
    reply = server.get(said)
    begun = time.monotonic()
    assert reply.read_some(100, wait_s=0.2) == found
    assert time.monotonic() - begun < 1.0
    assert reply.is_reusable == (found == b"<Code>A</")


def test_long_error_body_is_truncated(server: Server) -> None:
    reply = server.get(OK + b"Content-Length: 256000\r\n\r\n" + BODY)
    assert len(reply.read_some(100, wait_s=5.0)) == 100
    assert not reply.is_reusable
