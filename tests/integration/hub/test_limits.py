"""A hub with callers without a token: they cost a bounded amount, and members are served."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from tests.support.users import STRANGER, run_as

from penstock.errors import ConfigError
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, Hello
from penstock.net.admission import ConnectionLimits
from penstock.net.listener import AdmittedSocket
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN = "a-token-of-16-characters"
NUM_DESCRIPTORS = 400
HALF_HEAD = b"GET /v1/status HTTP/1.1\r\nhost: hub\r\n"


class Hub:
    """Start `penstock hub` in a process that may open few descriptors."""

    def __init__(self, directory: Path) -> None:
        (directory / "tokens").write_text(TOKEN)
        command = [sys.executable, "-m", "penstock.cli.main", "hub", "--listen", "127.0.0.1:0"]
        command += ["--token-file", str(directory / "tokens")]

        def few_descriptors() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS // 2, NUM_DESCRIPTORS))

        self._stderr = (directory / "stderr").open("w+b")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._stderr, text=True, preexec_fn=few_descriptors
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def status(self, name: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logged_bytes(self) -> int:
        return os.fstat(self._stderr.fileno()).st_size

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(30) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    running = Hub(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[ConnectionLimits], tuple[str, int]]]:
    running: list[HubThread] = []

    def start(limits: ConnectionLimits) -> tuple[str, int]:
        (tmp_path / "tokens").write_text(TOKEN)
        auth = Auth.of(token_file=tmp_path / "tokens")
        bound = bind("127.0.0.1:0", auth)
        address = bound.getsockname()[:2]
        running.append(HubThread(Directory(MemoryStore(), fresh=True), bound, auth, limits=limits))
        running[-1].start()
        return address

    yield start
    for one in running:
        one.stop()


def attack(address: tuple[str, int], source: str, data: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=30, source_address=(source, 0))
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


def is_closed_within(sock: socket.socket, within_s: float) -> bool:
    """Return whether the other end closes the connection in time, whatever it sends before."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(ConnectionError):
        while True:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                if not sock.recv(65536):
                    return True
            except TimeoutError:
                return False
    return True


def register_member(url: str) -> None:
    with HubClient.connect(url, TOKEN) as client:
        client.hello(Hello(member=client.member, host="h", doors=("unix:///d",)))
        client.beat(client.member, Beat())


@pytest.mark.parametrize("source", ["127.0.0.9", "127.0.0.1"], ids=["elsewhere", "the members' own address"])
def test_unfinished_requests_do_not_block_members(hub: Hub, source: str) -> None:
    with contextlib.ExitStack() as held, HubClient.connect(hub.url, TOKEN) as member:
        member.hello(Hello(member=member.member, host="h", doors=("unix:///d",)))
        for _ in range(2 * NUM_DESCRIPTORS):
            held.enter_context(attack(hub.address, source, HALF_HEAD))
        began, used = time.monotonic(), hub.cpu_s()
        member.beat(member.member, Beat())
        register_member(hub.url)
        assert hub.cpu_s() - used < 0.5 * (time.monotonic() - began) + 1.0, "it does not spin"
        assert hub.logged_bytes() < 4096


@pytest.mark.parametrize(
    "data",
    [b"GET /" + b"a" * (64 << 20), HALF_HEAD + b"x: y\r\n" * (8 << 20), HALF_HEAD + b"x: " + b"a" * (64 << 20)],
    ids=["endless line", "many headers", "endless header"],
)
def test_endless_request_head_uses_bounded_memory(hub: Hub, data: bytes) -> None:
    register_member(hub.url)
    before, used = hub.status("VmRSS:"), hub.cpu_s()
    with attack(hub.address, "127.0.0.9", data) as sock:
        assert is_closed_within(sock, 30.0)
    register_member(hub.url)
    assert hub.status("VmRSS:") - before < 16 << 10
    assert hub.cpu_s() - used < 5.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HALF_HEAD,
        b"\r\n" * 100,
        b"POST /v1/hello HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/hello HTTP/1.1\r\nhost: h\r\nauthorization: Bearer wrong-token-0123456789\r\n\r\n",
        b"\x00\xff\x00",
        b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n",
        b"GET /openapi.json HTTP/1.1\r\nhost: h\r\n\r\n" * 1000,
    ],
    ids=["idle", "half head", "blank lines", "half body", "wrong token", "malformed", "health", "pipelined"],
)
def test_connection_without_token_is_closed_at_deadline(serve, data: bytes) -> None:
    address = serve(ConnectionLimits(head_s=1.0))
    with attack(address, "127.0.0.9", data) as sock:
        assert is_closed_within(sock, 20.0)


def test_connection_trickling_request_head_is_closed_at_deadline(serve) -> None:
    address = serve(ConnectionLimits(head_s=1.0))
    began = time.monotonic()
    with attack(address, "127.0.0.9", HALF_HEAD) as sock, contextlib.suppress(OSError):
        while time.monotonic() - began < 20.0:
            sock.sendall(b"x")
            if is_closed_within(sock, 0.1):
                break
    assert time.monotonic() - began < 15.0


def test_idle_authenticated_connection_is_closed(serve) -> None:
    address = serve(ConnectionLimits(head_s=1.0, idle_s=4.0))
    request = f"GET /v1/status HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with attack(address, "127.0.0.9", request) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        assert not is_closed_within(sock, 2.0)
        sock.sendall(HALF_HEAD)
        assert is_closed_within(sock, 20.0)


def answers(address: tuple[str, int], data: bytes) -> bytes:
    """Return all that the hub sends before it closes the connection."""
    with attack(address, "127.0.0.9", data) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(20.0)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_too_many_header_fields_return_431(serve) -> None:
    address = serve(ConnectionLimits())
    head = b"GET /healthz HTTP/1.1\r\nconnection: close\r\n"
    assert answers(address, head + b"x: y\r\n" * 90 + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert answers(address, head + b"x: y\r\n" * 101 + b"\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("body", [b"", b"{}" * 1000], ids=["no body", "a body"])
def test_unauthenticated_caller_receives_complete_response(serve, body: bytes) -> None:
    address = serve(ConnectionLimits())
    head = b"POST /v1/hello HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = answers(address, head + body)
    assert answer.startswith(b"HTTP/1.1 401 ") and answer.count(b"HTTP/1.1") == 1
    assert b"www-authenticate: Bearer" in answer and b"--token-file" in answer


def test_closed_connections_are_freed_without_garbage_collector(serve) -> None:
    address = serve(ConnectionLimits(head_s=1.0))
    gc.collect()
    gc.disable()
    try:
        for data in (b"", HALF_HEAD, b"\x00\xff", HALF_HEAD + b"\r\n", b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n") * 4:
            with attack(address, "127.0.0.9", data):
                time.sleep(0.02)
        deadline = time.monotonic() + 10.0
        while left := [kept for kept in gc.get_objects() if isinstance(kept, AdmittedSocket)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        gc.enable()


def test_another_user_cannot_use_hub_socket(tmp_path_factory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    directory = tmp_path_factory.mktemp("open")
    listen = f"unix://{directory}/hub.sock"
    running = HubThread(Directory(MemoryStore(), fresh=True), bind(listen, Auth()))
    running.start()
    try:
        for path in (*directory.parents[:-2], directory, directory / "hub.sock"):
            path.chmod(0o777)  # opens the socket to all users

        def read_status() -> str:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(20)
                sock.connect(f"{directory}/hub.sock")
                with contextlib.suppress(OSError):
                    sock.sendall(b"GET /v1/status HTTP/1.1\r\nhost: h\r\n\r\n")
                    return sock.recv(4096).decode()
            return ""

        assert run_as(STRANGER, read_status) == ""
        assert "200 OK" in read_status()
    finally:
        running.stop()


def test_socket_of_overloaded_hub_is_not_replaced(tmp_path) -> None:
    path = tmp_path / "hub.sock"
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        busy.bind(str(path))
        busy.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(8):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.setblocking(False)
                waiting.connect(str(path))
        with pytest.raises(ConfigError, match="is in use"):
            bind(f"unix://{path}", Auth())
        assert path.exists()
    # Its process has ended and left the file behind.
    bind(f"unix://{path}", Auth()).close()
