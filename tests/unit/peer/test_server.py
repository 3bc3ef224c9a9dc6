from __future__ import annotations

import contextlib
import gc
import http.client
import secrets
import socket
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.unit.peer.test_local_weights import make, mark_verified

from penstock.errors import (
    ConfigError,
    FormatError,
    GrantRefused,
    NotFound,
    PeerLost,
    PermissionDenied,
    SourceBusy,
    SourceStalled,
)
from penstock.holding.weight_layout import from_message
from penstock.hub.messages import LeaseRequest, Upstream
from penstock.net.admission import ConnectionLimits
from penstock.peer import client
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import LocalWeights
from penstock.peer.server import PeerServer
from penstock.transport.choose import PeerLinks
from penstock.transport.loopback import LoopbackTransport


def member_socket(directory: Path) -> Path:
    """Return the path of a member's socket, in a directory like `RuntimeDir`'s."""
    home = directory / f"p-{secrets.token_hex(4)}"
    home.mkdir(mode=0o700)
    (home / "alive").touch()
    return home / "peer.sock"


def allow(request: LeaseRequest) -> str:
    """Accept grants that begin with `good`. The remaining bytes name the caller."""
    if not request.grant.startswith(b"good"):
        raise GrantRefused("no")
    return request.grant.removeprefix(b"good").decode()


@pytest.fixture
def server(tmp_path: Path):
    server = PeerServer.start(member_socket(tmp_path), allow)
    yield server
    server.close()


@pytest.fixture
def holding(server: PeerServer) -> LocalWeights:
    holding = make()
    holding.max_readers = 2
    with PeerLinks({"loopback": LoopbackTransport}) as links:
        holding.regions.register(links)
        server.show(holding)
        yield holding


def peer(server: PeerServer, key: str, *, member: str = "reader", grant: bytes = b"good") -> PeerClient:
    upstream = Upstream(
        member="holder", host="h", doors=tuple(server.addresses), device="cpu", state="whole", num_have=0, grant=grant
    )
    return PeerClient(upstream, member=member, key=key, same_host=True, stall_s=5.0)


def test_reader_with_lease_receives_map_table_and_log(server: PeerServer, holding: LocalWeights) -> None:
    mark_verified(holding, 2)
    with peer(server, holding.key) as reader:
        reader.lease()
        assert holding.num_readers == 1
        found = reader.map()
        assert (found.key, found.num_chunks, len(found.regions)) == (holding.key, 10, 5)
        assert from_message(reader.table()).digest == holding.layout.digest
        assert reader.log(0, 0.0).serial == 1
    assert server.num_readers(holding.key) == 0


def test_reader_limit_is_enforced_until_lease_is_released(server: PeerServer, holding: LocalWeights) -> None:
    first, second = peer(server, holding.key, member="a"), peer(server, holding.key, member="b")
    first.lease(), second.lease()
    with peer(server, holding.key, member="c") as third:
        with pytest.raises(SourceBusy, match="maximum number of readers"):
            third.lease()
        first.close()
        third.lease()
    second.close()


def test_leases_are_divided_fairly_between_tokens(server: PeerServer, holding: LocalWeights) -> None:
    with ExitStack() as stack:

        def lease(member: str, token: bytes) -> PeerClient:
            reader = stack.enter_context(peer(server, holding.key, member=member, grant=b"good" + token))
            reader.lease()
            return reader

        first, second = lease("a", b"greedy"), lease("b", b"greedy")
        lease("c", b"other")
        # The greedy token's oldest reader was displaced, but its lease is not revoked.
        with pytest.raises(SourceBusy, match="fewer"):
            first.log(0, 0.0)
        assert server.num_readers(holding.key) == 3 and holding.num_readers == 2
        second.log(0, 0.0)
        # Now both tokens have the same number of readers.
        for token in (b"greedy", b"other", b"third"):
            with pytest.raises(SourceBusy, match="maximum number of readers"):
                lease("d", token)
        first.close()
        assert server.num_readers(holding.key) == 2


def test_third_reader_with_same_token_is_rejected(server: PeerServer, holding: LocalWeights) -> None:
    readers = [peer(server, holding.key, member=name, grant=b"good-one") for name in "abc"]
    readers[0].lease(), readers[1].lease()
    with pytest.raises(SourceBusy, match="maximum number of readers"):
        readers[2].lease()
    for reader in readers:
        reader.close()


def test_rejected_requests_do_not_extend_displaced_lease(
    server: PeerServer, holding: LocalWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants = {"a": b"good-1", "b": b"good-1", "c": b"good-2"}
    readers = [peer(server, holding.key, member=name, grant=grant) for name, grant in grants.items()]
    for reader in readers:
        reader.lease()
    monkeypatch.setattr("penstock.peer.server.LEASE_TTL_S", 0.5)
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        readers[1].log(0, 0.0), readers[2].log(0, 0.0)
        with pytest.raises((SourceBusy, PermissionDenied)):
            readers[0].log(0, 0.0)
        time.sleep(0.02)
    assert server.num_readers(holding.key) == 2
    for reader in readers:
        reader.close()


def test_restarted_reader_reuses_its_lease(server: PeerServer, holding: LocalWeights) -> None:
    readers = [peer(server, holding.key) for _ in range(5)]
    for reader in readers:
        reader.lease()
    assert server.num_readers(holding.key) == 1
    for reader in readers:
        reader.close()


def test_invalid_grant_or_key_or_expired_lease_is_refused(server: PeerServer, holding: LocalWeights) -> None:
    with peer(server, holding.key, grant=b"bad") as reader, pytest.raises(PermissionDenied):
        reader.lease()
    with peer(server, "0" * 32) as reader, pytest.raises(NotFound):
        reader.lease()
    with peer(server, holding.key) as reader:
        reader.lease()
        server.release(reader._lease.lease)
        with pytest.raises(PermissionDenied, match="expired"):
            reader.log(0, 0.0)


def test_drain_waits_for_readers_and_rejects_new_leases(server: PeerServer, holding: LocalWeights) -> None:
    reader = peer(server, holding.key)
    reader.lease()
    threading.Timer(0.1, reader.close).start()
    assert server.drain(holding.key, 10.0) == 0
    with peer(server, holding.key) as late, pytest.raises(NotFound):
        late.lease()


def test_pending_request_can_be_interrupted(server: PeerServer, holding: LocalWeights) -> None:
    reader = peer(server, holding.key)
    reader.lease()
    threading.Timer(0.1, reader.interrupt).start()
    with pytest.raises(PeerLost):
        reader.log(0, 5.0)
    reader.close()
    assert server.num_readers(holding.key) == 0


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_close_releases_lease_over_existing_connection(
    server: PeerServer, holding: LocalWeights, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    opened: list[str] = []
    connect = client.connect_peer_socket

    def count(path: str, timeout_s: float) -> socket.socket:
        opened.append(path)
        return connect(path, timeout_s)

    monkeypatch.setattr(client, "connect_peer_socket", count)
    reader = peer(server, holding.key)
    reader.lease()
    if is_interrupted:
        reader.interrupt()
        # A request after the interrupt must not wait.
        with pytest.raises(PeerLost, match="interrupted"):
            reader.log(0, 5.0)
    reader.close()
    assert server.num_readers(holding.key) == 0 and len(opened) == 1


def test_closed_and_silent_servers_raise_different_errors(tmp_path: Path, holding: LocalWeights) -> None:
    gone = PeerServer.start(member_socket(tmp_path), allow)
    gone.close()
    with peer(gone, holding.key) as reader, pytest.raises(PeerLost):
        reader.lease()
    with socket.socket(socket.AF_UNIX) as silent:
        path = member_socket(tmp_path)
        silent.bind(str(path))
        silent.listen()
        gone.addresses = [f"unix://{path}"]
        reader = peer(gone, holding.key)
        reader._stall_s = 0.2
        with pytest.raises(SourceStalled):
            reader.lease()


def test_wildcard_listen_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="other members cannot connect to this address"):
        PeerServer.start(member_socket(tmp_path), allow, listen="0.0.0.0:0")


def test_tcp_request_without_grant_is_refused(tmp_path: Path, holding: LocalWeights) -> None:
    server = PeerServer.start(member_socket(tmp_path), allow, listen="127.0.0.1:0")
    server.show(holding)
    server.addresses = server.addresses[1:]
    with peer(server, holding.key, grant=b"bad") as reader, pytest.raises(PermissionDenied):
        reader.lease()
    with peer(server, holding.key) as reader:
        assert reader.lease().ttl_s > 0
    server.close()


@pytest.mark.parametrize(
    ("verb", "path", "body", "code"),
    [
        ("GET", "/", b"", 404),
        ("GET", "/v1/leases/x/log?after=-1", b"", 403),
        ("GET", "/v1/leases/../../etc/passwd", b"", 404),
        ("POST", "/v1/leases", b"", 400),
        ("POST", "/v1/leases", b"\x00garbage", 400),
        ("POST", "/v1/leases", msgspec.msgpack.encode({"member": "a"}), 426),
        ("POST", "/v1/leases", msgspec.msgpack.encode({"member": "a", "protocol": "2.0"}), 400),
        ("POST", "/v1/leases", b"x" * (65 << 10), 400),
        ("DELETE", "/v1/leases/none", b"", 204),
        ("GET", "/v1/alive", b"", 204),
        ("HEAD", "/v1/alive", b"", 501),
        ("PUT", "/v1/leases", b"", 501),
        ("GET", "//[x/", b"", 400),
    ],
)
def test_request_returns_expected_http_status(tmp_path: Path, verb: str, path: str, body: bytes, code: int) -> None:
    server = PeerServer.start(member_socket(tmp_path), allow, listen="127.0.0.1:0")
    host, _, port = server.addresses[1].removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request(verb, path, body)
    assert connection.getresponse().status == code
    connection.close()
    server.close()


@pytest.mark.parametrize("listen", ["::1:0", "[::1]", "[::1]:http", "host", "127.0.0.1:99999"])
def test_invalid_listen_address_raises_config_error(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port|0 to 65535"):
        PeerServer.start(member_socket(tmp_path), allow, listen=listen)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_server_listens_on_ipv6(tmp_path: Path, holding: LocalWeights) -> None:
    server = PeerServer.start(member_socket(tmp_path), allow, listen="[::1]:0")
    server.show(holding)
    server.addresses = server.addresses[1:]
    assert server.addresses[0].startswith("http://[::1]:")
    with peer(server, holding.key) as reader:
        assert reader.lease().ttl_s > 0
    server.close()
    with pytest.raises(ConfigError, match="other members cannot connect to this address"):
        PeerServer.start(member_socket(tmp_path), allow, listen="[::]:0")


@pytest.mark.parametrize(
    "begun", [b"G", b"GET /v1/alive HTTP/1.1\r\nX", b"POST /v1/leases HTTP/1.1\r\nContent-Length: 500\r\n\r\n"]
)
def test_connection_with_trickling_request_is_closed_at_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr("penstock.http.server.LIMITS", ConnectionLimits(head_s=1.0))
    path = member_socket(tmp_path)
    server = PeerServer.start(path, allow)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(20.0)
        slow.connect(str(path))
        slow.sendall(b"GET /v1/alive HTTP/1.1\r\n\r\n")  # must not extend the deadline
        time.sleep(1.1)
        assert b"204" in slow.recv(999)
        slow.settimeout(0.05)
        slow.sendall(begun)
        deadline, is_open = time.monotonic() + 20.0, True
        while is_open:
            assert time.monotonic() < deadline  # every byte restarts the silence timeout
            try:
                slow.sendall(b"x")
                is_open = bool(slow.recv(999))
            except TimeoutError:
                continue
            except OSError:
                is_open = False
    server.close()


def test_readers_share_rate_limit(tmp_path: Path, holding: LocalWeights) -> None:
    server = PeerServer.start(member_socket(tmp_path), allow, max_bytes_per_s=1000)
    server.show(holding)
    with peer(server, holding.key, member="a") as first:
        assert first.lease().max_bytes_per_s == 1000
        with peer(server, holding.key, member="b") as second:
            assert second.lease().max_bytes_per_s == first.log(0, 0.0).max_bytes_per_s == 500
        assert first.log(0, 0.0).max_bytes_per_s == 1000
    server.close()


def test_interrupted_peer_reader_releases_lease(server: PeerServer, holding: LocalWeights) -> None:
    for _ in range(20):
        reader = peer(server, holding.key)
        reader.lease()
        ended = threading.Thread(target=reader.close)
        ended.start()
        reader.interrupt()
        ended.join()
        assert server.num_readers(holding.key) == 0


def test_unusable_listen_path_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        PeerServer.start(tmp_path / ("long" * 40) / "peer.sock", allow)
    with pytest.raises(ConfigError, match="cannot listen on"):
        PeerServer.start(member_socket(tmp_path), allow, listen="192.0.2.1:0")


def test_closed_server_is_garbage_collected(tmp_path: Path) -> None:
    path = member_socket(tmp_path)
    server = PeerServer.start(path, allow)
    with socket.socket(socket.AF_UNIX) as stopped:  # a suspended reader neither sends nor closes
        stopped.settimeout(20.0)
        stopped.connect(str(path))
        stopped.sendall(b"GET /v1/alive HTTP/1.1\r\n\r\n")
        assert b"204" in stopped.recv(999)
        server.close()
        assert stopped.recv(999) == b""
        gone = weakref.ref(server)
        del server
        deadline = time.monotonic() + 20.0
        while gone() is not None:
            assert time.monotonic() < deadline, "a thread holds the server"
            gc.collect()
            time.sleep(0.01)


def test_connection_is_trusted_only_after_lease_is_granted(tmp_path: Path, holding: LocalWeights) -> None:
    server = PeerServer.start(member_socket(tmp_path), allow, listen="127.0.0.1:0")
    server.show(holding)
    host, _, port = server.addresses[1].removeprefix("http://").rpartition(":")
    admission = server._servers[1]._listener.admission
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    for verb, path in (("GET", "/v1/alive"), ("GET", "/v1/alive/"), ("DELETE", "/v1/leases/none"), ("GET", "/v1/x")):
        connection.request(verb, path)
        connection.getresponse().read()
        assert not any(place.is_proven for place in admission._open), (verb, path)
    body = msgspec.msgpack.encode(LeaseRequest(member="reader", key=holding.key, grant=b"good"))
    connection.request("POST", "/v1/leases", body)
    lease = msgspec.msgpack.decode(connection.getresponse().read())["lease"]
    assert all(place.is_proven for place in admission._open)
    connection.request("DELETE", f"/v1/leases/{lease}")
    assert connection.getresponse().status == 204
    connection.close()
    server.close()


def test_unauthenticated_clients_cannot_occupy_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.server.LIMITS", ConnectionLimits(total=1))
    path = member_socket(tmp_path)
    server = PeerServer.start(path, allow)
    first, more = (socket.socket(socket.AF_UNIX) for _ in range(2))
    ask = b"GET /v1/alive HTTP/1.1\r\n\r\n"
    with first, more:
        for sock in (first, more):
            sock.settimeout(20.0)
            sock.connect(str(path))
        first.sendall(ask)
        assert b"204" in first.recv(999)
        assert more.recv(999).startswith(b"HTTP/1.1 429")
        first.close()
        deadline = time.monotonic() + 20.0
        found = b""
        while b"204" not in found and time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as late, contextlib.suppress(OSError):
                late.connect(str(path))
                late.sendall(ask)
                found = late.recv(999)
        assert b"204" in found
    server.close()


def ask_raw(server: PeerServer, request: bytes) -> bytes:
    """Send bytes to the server's socket. Return the status line of the response."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(server.addresses[0].removeprefix("unix://"))
        sock.sendall(request)
        return sock.recv(65536).partition(b"\r\n")[0]


def test_deeply_nested_body_is_rejected(server: PeerServer) -> None:
    body = b"\x81\xa1x" + b"\x91" * 60_000 + b"\xc0"
    head = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(3):
        assert ask_raw(server, head + body).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("query", ["after=0&wait_ms=" + "9" * 400, "after=" + "9" * 400 + "&wait_ms=0"])
def test_overlong_number_in_query_is_rejected(server: PeerServer, holding: LocalWeights, query: str) -> None:
    with peer(server, holding.key) as reader:
        lease = reader.lease().lease
        request = f"GET /v1/leases/{lease}/log?{query} HTTP/1.1\r\nHost: x\r\n\r\n"
        assert ask_raw(server, request.encode()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(b"\x81\xa5lease\xa2\xff\xff", id="invalid UTF-8"),
        pytest.param(b"\x81\xa5lease" + b"\x91" * 60_000 + b"\xc0", id="nested"),
        pytest.param(msgspec.msgpack.encode({"lease": "a b", "ttl_s": 1.0}), id="invalid lease id"),
        pytest.param(msgspec.msgpack.encode({"lease": "a\r\nX: y", "ttl_s": 1.0}), id="line break in lease id"),
    ],
)
def test_malformed_response_error_blames_source(tmp_path: Path, response: bytes) -> None:
    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(65536)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(response) + response)
            sock.recv(1)

    path = member_socket(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        upstream = Upstream(
            member="holder", host="h", doors=(f"unix://{path}",), device="cpu", state="whole", num_have=0, grant=b"good"
        )
        client = PeerClient(upstream, member="reader", key="0" * 32, same_host=True, stall_s=5.0)
        with contextlib.closing(client), pytest.raises(FormatError) as caught:
            client.lease()
        assert caught.value.blame == "source"
        thread.join(5)
