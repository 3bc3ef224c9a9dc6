"""Responses that arrive byte by byte end at the deadline of the whole response."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from penstock.errors import HubUnavailable, SourceStalled
from penstock.hub.client import HubClient
from penstock.hub.messages import Upstream
from penstock.peer.client import PeerClient

DRIP_S = 0.2
DRIPS_S = 30.0
"""Seconds that a whole dripped response takes, many times the deadlines below."""


class Dripping:
    """A server that answers every request with one byte every `DRIP_S`."""

    def __init__(self, listener: socket.socket, answer: bytes) -> None:
        self._listener, self._answer, self._is_open = listener, answer, True
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while self._is_open:
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._drip, args=(sock,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _drip(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.recv(65536)
            for at in range(int(DRIPS_S / DRIP_S)):
                if not self._is_open:
                    return
                sock.sendall(self._answer[at : at + 1])
                time.sleep(DRIP_S)

    def close(self) -> None:
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5.0)


ANSWERS = {
    "head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000,
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,
}


@pytest.fixture(params=["tcp", "unix"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    if request.param == "tcp":
        sock = socket.create_server(("127.0.0.1", 0))
        yield sock, f"http://127.0.0.1:{sock.getsockname()[1]}"
    else:
        # Serve it as a member's directory.
        place = tmp_path / "p-dripping"
        place.mkdir(mode=0o700)
        (place / "alive").touch()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(place / "peer.sock"))
        sock.listen(16)
        yield sock, f"unix://{place}/peer.sock"


@pytest.mark.parametrize("part", list(ANSWERS))
def test_trickling_member_response_fails_at_stall_deadline(listener, part: str) -> None:
    sock, address = listener
    server = Dripping(sock, ANSWERS[part])
    upstream = Upstream(member="0" * 32, host="h", doors=(address,), device="", state="whole", num_have=0, grant="")
    try:
        with PeerClient(upstream, member="1" * 32, key="k" * 32, same_host=True, stall_s=1.0) as peer:
            began = time.monotonic()
            with pytest.raises(SourceStalled):
                peer.lease()
            assert time.monotonic() - began < DRIPS_S / 3
    finally:
        server.close()


@pytest.mark.parametrize("part", list(ANSWERS))
def test_trickling_hub_response_fails_at_deadline(listener, part: str) -> None:
    sock, address = listener
    server = Dripping(sock, ANSWERS[part])
    try:
        with HubClient.connect(address, timeout_s=1.0) as hub:
            began = time.monotonic()
            with pytest.raises(HubUnavailable):
                hub.status()
            assert time.monotonic() - began < DRIPS_S / 3
    finally:
        server.close()
