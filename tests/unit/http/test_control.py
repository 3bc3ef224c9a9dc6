"""The client of the control plane: reuse, deadlines, interruption and malformed responses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from penstock.http.connection import HttpConnection
from penstock.http.control import (
    MAX_IDLE,
    ControlConnection,
    ControlPool,
    MalformedAnswer,
    NoAnswer,
    PoolClosed,
    over_tcp,
)

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """A server that calls `serve` in a thread for each connection."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serve = serve
        self.num_connections = 0
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._connection, args=(sock,), daemon=True).start()

    def _connection(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            self._serve(sock)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[socket.socket], None]], Server]]:
    servers: list[Server] = []

    def make(serve: Callable[[socket.socket], None]) -> Server:
        servers.append(Server(serve))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def answer_all(sock: socket.socket) -> None:
    while sock.recv(65536):
        sock.sendall(ANSWER)


def get(pool: ControlPool) -> tuple[int, bytes]:
    with pool.connection() as connection:
        return connection.request("GET", "/", timeout_s=20)


def test_control_connection_is_reused(start) -> None:
    server = start(answer_all)
    with ControlConnection(over_tcp("127.0.0.1", server.port), "host") as connection:
        for _ in range(3):
            assert connection.request("GET", "/", timeout_s=5) == (200, b"ok")
    assert server.num_connections == 1


def test_closed_connection_is_replaced_in_pool(start) -> None:
    def once(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(ANSWER)

    server = start(once)
    with ControlPool(over_tcp("127.0.0.1", server.port), "host") as pool:
        for _ in range(3):
            assert get(pool) == (200, b"ok")
            time.sleep(0.05)  # the server's close arrives
    assert server.num_connections == 3


def test_trickling_response_raises_at_deadline(start) -> None:
    def drip(sock: socket.socket) -> None:
        sock.recv(65536)
        while True:
            sock.sendall(b"H")
            time.sleep(0.1)

    server = start(drip)
    began = time.monotonic()
    with ControlConnection(over_tcp("127.0.0.1", server.port), "host") as connection, pytest.raises(NoAnswer):
        connection.request("GET", "/", timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_refused_connection_raises_connection_refused_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ControlConnection(over_tcp("127.0.0.1", port), "host") as connection, pytest.raises(ConnectionRefusedError):
        connection.request("GET", "/", timeout_s=5)


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok"]
)
def test_malformed_response_raises(start, data: bytes) -> None:
    def say(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(data)

    server = start(say)
    with ControlConnection(over_tcp("127.0.0.1", server.port), "host") as connection, pytest.raises(MalformedAnswer):
        connection.request("GET", "/", timeout_s=5)


def test_invalid_host_name_raises_os_error() -> None:
    with (
        ControlConnection(over_tcp("a..b", 80), "host") as connection,
        pytest.raises(OSError, match="not a valid host name"),
    ):
        connection.request("GET", "/", timeout_s=5)


def test_request_is_interrupted_from_another_thread(start) -> None:
    server = start(lambda sock: time.sleep(30))
    with ControlConnection(over_tcp("127.0.0.1", server.port), "host") as connection:
        threading.Timer(0.2, connection.interrupt).start()
        began = time.monotonic()
        with pytest.raises(OSError):
            connection.request("GET", "/", timeout_s=20)
    assert time.monotonic() - began < 10


def test_pool_limits_and_closes_idle_connections(start) -> None:
    together = threading.Barrier(MAX_IDLE + 4)

    def meet(sock: socket.socket) -> None:
        while sock.recv(65536):
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(10)
            sock.sendall(ANSWER)

    server = start(meet)
    pool = ControlPool(over_tcp("127.0.0.1", server.port), "host")
    threads = [threading.Thread(target=get, args=(pool,)) for _ in range(MAX_IDLE + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pool._idle) == MAX_IDLE and not pool._busy
    pool.close()
    assert not pool._idle
    with pytest.raises(PoolClosed):
        get(pool)


def test_pool_close_aborts_pending_requests(start) -> None:
    server = start(lambda sock: time.sleep(30))
    pool = ControlPool(over_tcp("127.0.0.1", server.port), "host")
    threading.Timer(0.2, pool.close).start()
    began = time.monotonic()
    with pytest.raises(OSError):
        get(pool)
    assert time.monotonic() - began < 10


def test_closed_connection_does_not_reconnect(start, monkeypatch) -> None:
    server = start(answer_all)
    connected: list[object] = []

    def connect(timeout_s: float) -> socket.socket:
        connected.append(timeout_s)
        return over_tcp("127.0.0.1", server.port)(timeout_s)

    with ControlConnection(connect, "127.0.0.1") as connection:
        send_all = HttpConnection.send_all

        def close_and_send(*arguments: object) -> None:
            connection.close()
            send_all(*arguments)

        monkeypatch.setattr(HttpConnection, "send_all", close_and_send)
        with pytest.raises(ConnectionAbortedError, match="another thread"):
            connection.request("GET", "/", timeout_s=5)
        assert len(connected) == 1
