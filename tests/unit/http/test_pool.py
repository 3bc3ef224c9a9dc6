"""The pool of object reads: reuse of connections, and invalid addresses and proxies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from penstock.errors import ConfigError
from penstock.http.pool import Pool

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nEVIL!"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(silence_s=5.0)
    made.hold()
    yield made
    made.drop()


def read(pool: Pool, url: str) -> bytes:
    parts = urlsplit(url)
    connection = pool.get(parts)
    reply = connection.get(parts, {})
    body = reply.read(100)
    pool.put(parts, connection, reply)
    return body


def test_unsolicited_response_is_discarded(pool: Pool) -> None:
    """The response arrives after the first one was read, while the connection is idle."""
    sent = threading.Event()

    def serve(listener: socket.socket) -> None:
        for is_first in (True, False):
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(ANSWER)
                if is_first:
                    time.sleep(0.05)
                    sock.sendall(EVIL)
                sent.set()
                # The client closes with unread bytes, which resets the connection.
                with contextlib.suppress(ConnectionResetError):
                    sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert read(pool, f"{url}/one") == b"ok"
        assert sent.wait(5)
        assert read(pool, f"{url}/two") == b"ok"


@pytest.mark.parametrize("proxy", ["http://proxy:abc", "http://a..b:80"])
def test_invalid_proxy_address_raises_config_error(pool: Pool, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ConfigError, match="valid address"):
        pool.get(urlsplit("http://host/x"))


def test_host_name_is_validated_before_proxy_is_contacted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ConfigError, match="host name is not valid"):
        pool.get(urlsplit("https://a..b/x"))


def test_tunnel_request_brackets_ipv6_address(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            asked.append(sock.recv(65536))
            sock.sendall(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(OSError):
            pool.get(urlsplit("https://[::1]:8443/x"))
        thread.join(5)
    assert asked[0].startswith(b"CONNECT [::1]:8443 HTTP/1.1")
