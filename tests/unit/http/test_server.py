"""The HTTP server's request loop: reuse, bodies, refusals, deadlines, closing and forks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import FormatError
from penstock.http.server import HttpServer, RequestRefused, ServerExchange
from penstock.net.admission import ConnectionLimits
from penstock.net.listener import bound_socket

MAX_BODY_BYTES = 1 << 20
THREAD = "test-http-server"


def handle(exchange: ServerExchange) -> None:
    """Respond with the content that the target names."""
    target = exchange.head.target
    if target == "/echo":
        exchange.answer(200, exchange.read_body(MAX_BODY_BYTES))
    elif target == "/unread":
        exchange.answer(200, b"unread")
    elif target.startswith("/long/"):
        exchange.answer(200, b"x" * int(target.removeprefix("/long/")))
    elif target == "/pieces":
        exchange.begin_answer(4, "Content-Length: 4\r\n")
        for piece in (b"ab", b"cd"):
            exchange.wire.send([memoryview(piece)])
    elif target == "/broken":
        exchange.begin_answer(4, "Content-Length: 4\r\n")
        raise FormatError("after the head was sent")
    elif target == "/malformed":
        raise FormatError("no")
    elif target == "/gone":
        raise RequestRefused(410, closes=False)
    else:
        raise RequestRefused(404)


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits()


@pytest.fixture
def path(tmp_path: Path, limits: ConnectionLimits, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("penstock.http.server.LIMITS", limits)
    path = str(tmp_path / "http.sock")
    server = HttpServer(bound_socket(path), handle, name="test", thread_name=THREAD, full_status=503, tls=None)
    server.start()
    yield path
    server.close()


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20.0)
    sock.connect(path)
    return sock


def send_request(sock: socket.socket, raw: bytes) -> tuple[int, bytes]:
    """Send a request, and return the status and body of its response."""
    sock.sendall(raw)
    return receive(sock)


def receive(sock: socket.socket) -> tuple[int, bytes]:
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += received_from(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")), 0)
    while len(body) < length:
        body += received_from(sock)
    assert len(body) == length
    return int(head.split()[1]), body


def received_from(sock: socket.socket) -> bytes:
    data = sock.recv(1)
    assert data, "the connection was closed before the end of the response"
    return data


def post(target: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST {target} HTTP/1.1", f"Content-Length: {len(body)}", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def get(target: str, *fields: str) -> bytes:
    return ("\r\n".join([f"GET {target} HTTP/1.1", *fields]) + "\r\n\r\n").encode()


def has_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # the server closed the connection while our bytes were unread
        return True


def test_connection_stays_open_until_client_requests_close(path: str) -> None:
    with connect(path) as sock:
        assert send_request(sock, post("/echo", b"one")) == (200, b"one")
        assert send_request(sock, get("/gone")) == (410, b"")
        assert send_request(sock, get("/long/200000")) == (200, b"x" * 200_000)
        assert send_request(sock, get("/pieces")) == (200, b"abcd")
        assert send_request(sock, post("/echo", b"two", "Connection: close")) == (200, b"two")
        assert has_ended(sock)


def test_pipelined_requests_receive_responses_in_order(path: str) -> None:
    with connect(path) as sock:
        sock.sendall(post("/echo", b"one") + get("/gone") + post("/echo", b"two")[:-1])
        assert [receive(sock), receive(sock)] == [(200, b"one"), (410, b"")]
        assert send_request(sock, b"o" + get("/pieces")) == (200, b"two")
        assert receive(sock) == (200, b"abcd")


def test_half_closed_connection_receives_response(path: str) -> None:
    with connect(path) as sock:
        sock.sendall(post("/echo", b"one"))
        sock.shutdown(socket.SHUT_WR)
        assert receive(sock) == (200, b"one")
        assert has_ended(sock)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (get("/nothing"), 404),
        (get("/malformed"), 400),
        (post("/echo", b"")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (get("/echo", "Transfer-Encoding: chunked"), 400),
        (get("/echo", *["a: b"] * 101), 400),
        (get("/echo", "a: " + "b" * (17 << 10)), 400),
        (b"GET /echo HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400),
        (f"POST /echo HTTP/1.1\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode(), 413),
    ],
)
def test_rejected_request_closes_connection(path: str, raw: bytes, status: int) -> None:
    with connect(path) as sock:
        assert send_request(sock, raw) == (status, b"")
        assert has_ended(sock)


def test_request_head_of_16_kib_is_accepted(path: str) -> None:
    with connect(path) as sock:
        assert send_request(sock, get("/gone", "a: " + "b" * (15 << 10))) == (410, b"")


def test_unread_request_body_closes_connection(path: str) -> None:
    with connect(path) as sock:
        assert send_request(sock, post("/unread", get("/long/3"))) == (200, b"unread")
        assert has_ended(sock)


def test_continue_response_is_sent_only_for_accepted_body(path: str) -> None:
    expecting = "Expect: 100-continue"
    with connect(path) as sock:
        assert send_request(sock, post("/echo", b"one", expecting)[:-3]) == (100, b"")
        assert send_request(sock, b"one") == (200, b"one")
        assert send_request(sock, post("/unread", b"one", expecting)[:-3]) == (200, b"unread")
        assert has_ended(sock)


def test_error_after_response_head_closes_connection(path: str) -> None:
    with connect(path) as sock:
        sock.sendall(get("/broken"))
        assert sock.recv(999).endswith(b"\r\n\r\n")
        assert has_ended(sock)


@pytest.mark.parametrize("limits", [ConnectionLimits(head_s=1.0)])
def test_request_head_and_body_share_one_deadline(path: str) -> None:
    with connect(path) as sock:
        begun = time.monotonic()
        raw = post("/echo", b"0123456789")
        sock.sendall(raw[:5])
        time.sleep(0.7)
        sock.sendall(raw[5:-5])
        assert has_ended(sock)
        assert time.monotonic() - begun < 1.6  # the deadline is not one second for each


@pytest.mark.parametrize("limits", [ConnectionLimits(total=1)])
def test_connection_above_limit_receives_503(path: str) -> None:
    with connect(path) as first, connect(path) as second:
        assert send_request(first, get("/gone")) == (410, b"")
        assert receive(second) == (503, b"")
        assert has_ended(second)


def test_closing_server_stops_connections_and_threads(tmp_path: Path) -> None:
    path = str(tmp_path / "closing.sock")
    server = HttpServer(bound_socket(path), handle, name="test", thread_name=THREAD, full_status=503, tls=None)
    server.start()
    with connect(path) as idle, connect(path) as half:
        assert send_request(idle, get("/gone")) == (410, b"")
        half.sendall(post("/echo", b"one")[:-1])
        server.close()
        server.close()
        assert has_ended(idle) and has_ended(half)
    deadline = time.monotonic() + 20.0
    while any(thread.name == THREAD for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread is still running"
        time.sleep(0.01)
    assert server.admission.num_open == 0


def test_forked_child_does_not_affect_parent_connections(path: str) -> None:
    ready, done = os.pipe(), os.pipe()
    with connect(path) as kept, connect(path) as ended:
        for sock in (kept, ended):
            assert send_request(sock, get("/gone")) == (410, b"")
        child = os.fork()
        if not child:
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        try:
            os.read(ready[0], 1)
            assert send_request(kept, get("/gone")) == (410, b"")
            # The parent closes the connection, and a copy in the child would keep it open.
            assert send_request(ended, get("/nothing")) == (404, b"")
            assert has_ended(ended)
            with connect(path) as new:
                assert send_request(new, get("/gone")) == (410, b"")
        finally:
            os.write(done[1], b"x")
            os.waitpid(child, 0)
            for end in (*ready, *done):
                os.close(end)
