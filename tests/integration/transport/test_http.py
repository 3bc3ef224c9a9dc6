"""`http` between two processes and with foreign clients: faults, fences, keys and hostile requests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from penstock.errors import (
    Cancelled,
    ConfigError,
    FormatError,
    PeerLost,
    PermissionDenied,
    SourceStalled,
    StaleDescriptor,
)
from penstock.http import region_server
from penstock.http import server as http_server
from penstock.http.connection import HttpConnection
from penstock.http.region_messages import MAX_RUNS, ReadRequest
from penstock.net.admission import ConnectionLimits
from penstock.segments import Segments
from penstock.testing.transport_suite import sample, segments
from penstock.transport.http import HttpTransport
from penstock.transport.protocol import Descriptor, Memory, decode

NBYTES = 40_000_003
HOLDER = """
import sys, time
from penstock.testing.transport_suite import sample
from penstock.http import region_server
from penstock.transport.protocol import encode
from penstock.transport.http import HttpTransport
from penstock.http.connection import HttpConnection
from penstock.transport.protocol import Memory

if sys.argv[2] == "slow":
    real, region_server.PIECE_BYTES = HttpConnection.send, 64 << 10
    HttpConnection.send = lambda self, views: (time.sleep(0.01), real(self, views))[1]
transport = HttpTransport.open()
buffer = bytearray(sample(int(sys.argv[1])))
handle = transport.register(Memory.of_buffer(buffer))
print(encode(handle.descriptor).hex(), flush=True)
for line in sys.stdin:
    print(encode(handle.fence()).hex(), flush=True)
    buffer[:] = bytes(len(buffer))
"""


@contextlib.contextmanager
def holder(nbytes: int = NBYTES, *, slow: bool = False):
    words = [sys.executable, "-c", HOLDER, str(nbytes), "slow" if slow else "fast"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, decode(bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def reading(nbytes: int, **options):
    transport = HttpTransport.open(**options)
    try:
        buffer = bytearray(b"\xaa" * nbytes)
        yield transport, transport.register(Memory.of_buffer(buffer)), buffer
    finally:
        transport.close()


def stop(process: subprocess.Popen[str]) -> None:
    """It sends bytes until all of its threads know."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def whole(nbytes: int) -> Segments:
    return segments([(0, 0, nbytes)])


def wait_for_bytes(pending) -> None:
    deadline = time.monotonic() + 20
    while not pending.moved_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("num_connections", [1, 3])
def test_second_process_reads_all_bytes(num_connections: int) -> None:
    with holder() as (_, source), reading(NBYTES, num_connections=num_connections) as (transport, into, buffer):
        transport.wait(transport.post_read(into, source, whole(NBYTES)), stall_s=20)
        assert buffer == sample(NBYTES)


def test_killed_peer_raises_peer_lost() -> None:
    with holder(slow=True) as (process, source), reading(NBYTES) as (transport, into, _):
        pending = transport.post_read(into, source, whole(NBYTES))
        wait_for_bytes(pending)
        process.kill()
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            transport.wait(pending, stall_s=20)
        assert caught.value.mutated
        assert time.monotonic() - began < 15  # the error does not wait for the 20 s of silence
        with pytest.raises(PeerLost) as caught:
            transport.wait(transport.post_read(into, source, whole(10)), stall_s=20)
        assert not caught.value.mutated


@pytest.mark.parametrize("when", ["before", "under way"])
def test_stalled_read_writes_nothing_after_peer_resumes(when: str) -> None:
    with holder(slow=True) as (process, source), reading(NBYTES) as (transport, into, buffer):
        if when == "before":
            stop(process)
        pending = transport.post_read(into, source, whole(NBYTES))
        if when == "under way":
            wait_for_bytes(pending)
            stop(process)
        began = time.monotonic()
        with pytest.raises(SourceStalled) as caught:
            transport.wait(pending, stall_s=0.6)
        assert 0.5 < time.monotonic() - began < 15
        assert caught.value.mutated == (when == "under way")
        buffer[:] = b"\x55" * NBYTES
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert buffer == b"\x55" * NBYTES
        transport.wait(transport.post_read(into, source, whole(1000)), stall_s=20)
        assert buffer[:1000] == sample(NBYTES)[:1000]


def test_fence_during_read_raises_stale_descriptor() -> None:
    with holder(slow=True) as (process, source), reading(NBYTES) as (transport, into, _):
        pending = transport.post_read(into, source, whole(NBYTES))
        wait_for_bytes(pending)
        process.stdin.write("fence\n")
        process.stdin.flush()
        new = decode(bytes.fromhex(process.stdout.readline()))
        with pytest.raises(StaleDescriptor) as caught:
            transport.wait(pending, stall_s=20)
        assert caught.value.mutated
        transport.wait(transport.post_read(into, new, whole(10)), stall_s=20)


def test_fence_before_trailer_raises_stale_descriptor(monkeypatch) -> None:
    """The fence comes after the last byte was sent to the kernel and before the trailer."""
    with reading(1000) as (_, handle, _), reading(1000) as (transport, into, _):
        real = HttpConnection.send

        def send(self: HttpConnection, views) -> int:
            sent = real(self, views)
            handle.fence()
            return sent

        monkeypatch.setattr(HttpConnection, "send", send)
        with pytest.raises(StaleDescriptor) as caught:
            transport.wait(transport.post_read(into, handle.descriptor, whole(1000)), stall_s=20)
        assert caught.value.mutated


def test_closed_connection_is_replaced_and_read_resumed(monkeypatch) -> None:
    monkeypatch.setattr(region_server, "PIECE_BYTES", 100_000)
    real, sent = HttpConnection.send, []

    def send(self: HttpConnection, views) -> int:
        sent.append(1)
        if len(sent) % 7 == 3:
            self.cut()
        return real(self, views)

    with reading(3_000_000) as (_, handle, there), reading(3_000_000) as (transport, into, here):
        there[:] = sample(3_000_000)
        monkeypatch.setattr(HttpConnection, "send", send)
        transport.wait(transport.post_read(into, handle.descriptor, whole(3_000_000)), stall_s=20)
        assert here == there
        assert len(sent) > 30


def weights(nbytes: int) -> bytes:
    """Return normal values as BF16."""
    values = np.random.default_rng(3).standard_normal(nbytes // 2 + 1, np.float32)
    return values.view(np.uint16)[1::2].tobytes()[:nbytes]


@pytest.mark.parametrize("num_connections", [1, 3])
def test_weights_are_compressed_on_the_wire(num_connections: int) -> None:
    options = {"num_connections": num_connections, "compress": True}
    with reading(NBYTES) as (_, handle, there), reading(NBYTES, **options) as (transport, into, here):
        there[:] = weights(NBYTES)
        transport.wait(transport.post_read(into, handle.descriptor, whole(NBYTES)), stall_s=20)
        assert here == there
        name, why = transport.way(handle.descriptor)
        assert name == "http+zstd"
        assert 1.4 < float(why.partition("x")[0]) < 1.6
        rows = segments([(i * 1000, (4999 - i) * 1000, 999) for i in range(5000)])
        transport.wait(transport.post_read(into, handle.descriptor, rows), stall_s=20)
        assert here[4999 * 1000 : 4999 * 1000 + 999] == there[:999]
        assert here[999] == there[999]


def test_compressed_read_resumes_after_closed_connection(monkeypatch) -> None:
    real, sent = HttpConnection.send, []

    def send(self: HttpConnection, views) -> int:
        sent.append(1)
        if len(sent) % 7 == 5:
            self.cut()
        return real(self, views)

    with reading(20_000_000) as (_, handle, there), reading(20_000_000, compress=True) as (transport, into, here):
        there[:] = weights(20_000_000)
        monkeypatch.setattr(HttpConnection, "send", send)
        transport.wait(transport.post_read(into, handle.descriptor, whole(20_000_000)), stall_s=20)
        assert here == there
        assert len(sent) > 20


def test_compressed_read_fenced_before_trailer_raises_stale_descriptor(monkeypatch) -> None:
    with reading(100_000) as (_, handle, _), reading(100_000, compress=True) as (transport, into, here):
        real = HttpConnection.send

        def send(self: HttpConnection, views) -> int:
            sent = real(self, views)
            handle.fence()
            return sent

        monkeypatch.setattr(HttpConnection, "send", send)
        with pytest.raises(StaleDescriptor) as caught:
            transport.wait(transport.post_read(into, handle.descriptor, whole(100_000)), stall_s=20)
        assert not caught.value.mutated
        assert here == b"\xaa" * 100_000


def test_compression_is_skipped_after_measuring_fast_link() -> None:
    """Set the rate, because a busy machine may be slower than the codec."""
    with reading(NBYTES) as (_, handle, there), reading(NBYTES) as (transport, into, here):
        there[:] = sample(NBYTES)  # no codec makes this smaller
        for _ in range(2):
            transport.wait(transport.post_read(into, handle.descriptor, whole(NBYTES)), stall_s=20)
        assert here == there
        name, why = transport.way(handle.descriptor)
        assert name == "http"
        assert why.startswith("not compressed: the link has ")
        assert "the codec 1.00x" in why


def test_peer_without_compression_sends_raw_bytes(monkeypatch) -> None:
    monkeypatch.setattr(region_server, "CODING", "another")
    with reading(100_000) as (_, handle, there), reading(100_000, compress=True) as (transport, into, here):
        there[:] = sample(100_000)
        transport.wait(transport.post_read(into, handle.descriptor, whole(100_000)), stall_s=20)
        assert here == there
        assert transport.way(handle.descriptor) == ("http", "not compressed: the peer does not compress")


@pytest.mark.parametrize(
    "chunk",
    [
        b"7fffffff\r\n" + bytes(100),
        b"+0000064\r\n" + bytes(200),
        b"no number\r",
        b"00000000\r\n\r\n" + bytes(100),
        b"00000064\r\n" + bytes(200),
        b"00000018\r\n" + (2000).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(200),
    ],
)
def test_chunks_with_wrong_length_raise_error(chunk: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Encoding: penstock-planes\r\n\r\n"

    def lie() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(head + chunk)

    threading.Thread(target=lie, daemon=True).start()
    with reading(1000) as (_, handle, _), reading(1000, compress=True) as (transport, into, here):
        port = server.getsockname()[1]
        payload = msgspec.msgpack.decode(handle.descriptor.payload) | {"host": "127.0.0.1", "port": port, "path": ""}
        lying = msgspec.structs.replace(handle.descriptor, payload=msgspec.msgpack.encode(payload))
        with pytest.raises(FormatError) as caught:
            transport.wait(transport.post_read(into, lying, whole(1000)), stall_s=20)
        assert not caught.value.mutated
        assert here == b"\xaa" * 1000
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_memory_released_during_read_is_not_written() -> None:
    with holder(slow=True) as (_, source), reading(NBYTES) as (transport, into, buffer):
        pending = transport.post_read(into, source, whole(NBYTES))
        wait_for_bytes(pending)
        into.close()
        with pytest.raises(Cancelled):
            transport.wait(pending, stall_s=20)
        buffer[:] = b"\x55" * NBYTES
        time.sleep(0.2)
        assert buffer == b"\x55" * NBYTES


def test_more_ranges_than_one_request_allows_are_read() -> None:
    count = 3 * MAX_RUNS + 5
    at = np.arange(count) * 100
    with reading(count * 100) as (_, handle, there), reading(count * 100) as (transport, into, here):
        there[:] = sample(len(there))
        rows = Segments(src=at[::-1].copy(), dst=at, nbytes=np.full(count, 90))
        transport.wait(transport.post_read(into, handle.descriptor, rows), stall_s=20)
        expected = np.frombuffer(there, np.uint8).reshape(count, 100)[::-1, :90]
        assert (np.frombuffer(here, np.uint8).reshape(count, 100)[:, :90] == expected).all()


def test_read_with_wrong_key_is_rejected() -> None:
    with reading(100) as (_, handle, _), reading(100) as (transport, into, buffer):
        payload = msgspec.msgpack.decode(handle.descriptor.payload)
        forged = msgspec.msgpack.encode({**payload, "key": bytes(16)})
        guess = msgspec.structs.replace(handle.descriptor, payload=forged)
        with pytest.raises(StaleDescriptor) as caught:
            transport.wait(transport.post_read(into, guess, whole(100)), stall_s=20)
        assert not caught.value.mutated
        assert buffer == b"\xaa" * 100


def test_invalid_listen_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match="every interface"):
        HttpTransport.open("0.0.0.0:0")
    for listen in ("127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "unix:/no/such/folder/socket"):
        with pytest.raises(ConfigError):
            HttpTransport.open(listen)


def test_http_transport_reads_over_unix_socket(tmp_path) -> None:
    with reading(5_000_000, listen=f"unix:{tmp_path}/door") as (_, handle, there):
        there[:] = sample(5_000_000)
        with reading(5_000_000) as (transport, into, here):
            transport.wait(transport.post_read(into, handle.descriptor, whole(5_000_000)), stall_s=20)
            assert here == there
    assert not (tmp_path / "door").exists()


def test_http_transport_verifies_tls_certificate(tmp_path) -> None:
    key, cert = _certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    trust = ssl.create_default_context(cafile=str(cert))
    options = {"listen": "127.0.0.1:0", "tls": server}
    with (
        reading(5_000_000, **options) as (_, handle, there),
        reading(5_000_000, trust=trust) as (transport, into, here),
    ):
        there[:] = sample(5_000_000)
        rows = segments([(i * 1000, (4999 - i) * 1000, 1000) for i in range(5000)])
        transport.wait(transport.post_read(into, handle.descriptor, rows), stall_s=20)
        assert here[-1000:] == there[:1000]
        old = handle.descriptor
        handle.fence()
        with pytest.raises(StaleDescriptor):
            transport.wait(transport.post_read(into, old, whole(10)), stall_s=20)
        with reading(10) as (stranger, mine, _), pytest.raises(PermissionDenied, match="TLS"):
            stranger.wait(stranger.post_read(mine, handle.descriptor, whole(10)), stall_s=20)


def _certificate(folder):
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    return folder / "key", folder / "cert"


def test_forked_child_leaves_parent_server_running() -> None:
    with reading(1000) as (_, handle, _), reading(1000) as (transport, into, _):
        transport.wait(transport.post_read(into, handle.descriptor, whole(1000)), stall_s=20)
        child = os.fork()
        if not child:
            try:
                into.check_open()
            except Cancelled:
                into.close()
                transport.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        transport.wait(transport.post_read(into, handle.descriptor, whole(1000)), stall_s=20)


def test_malformed_descriptor_is_refused() -> None:
    with reading(10) as (transport, into, _):
        good = into.descriptor
        for payload in (b"", b"\xc1", good.payload[:-1], msgspec.msgpack.encode({"key": b"x", "port": 7})):
            with pytest.raises(FormatError):
                transport.post_read(into, msgspec.structs.replace(good, payload=payload), whole(1))
        found = msgspec.msgpack.decode(good.payload)
        for change in ({"port": 70000}, {"host": "a\r\nb"}, {"path": "x" * 200}, {"key": b""}):
            forged = msgspec.structs.replace(good, payload=msgspec.msgpack.encode(found | change))
            with pytest.raises(FormatError):
                transport.post_read(into, forged, whole(1))


# The client is not Penstock's.


def request(source: Descriptor, rows, **change) -> bytes:
    columns = np.array(rows, "<i8").reshape(-1, 2)
    found = msgspec.msgpack.decode(source.payload)
    given = {"endpoint": source.endpoint, "key": found["key"], "nbytes": source.nbytes}
    given |= {"src": columns[:, 0].tobytes(), "length": columns[:, 1].tobytes()} | change
    return msgspec.msgpack.encode(ReadRequest(**given))


def connected(source: Descriptor) -> socket.socket:
    """Return a connection to the data port in a descriptor."""
    found = msgspec.msgpack.decode(source.payload)
    if found["path"]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(20)
        sock.connect(found["path"])
        return sock
    return socket.create_connection((found["host"], found["port"]), timeout=20)


def send_request(source: Descriptor, raw: bytes) -> bytes:
    """Return the response up to its stated length, or until the server closes."""
    with connected(source) as sock:
        answer, nbytes = b"", 1 << 30
        with contextlib.suppress(ConnectionError):
            sock.sendall(raw)
            while len(answer) < nbytes and (got := sock.recv(1 << 16)):
                answer += got
                said = re.match(rb"(?s).*?Content-Length: (\d+).*?\r\n\r\n", answer)
                nbytes = said.end() + int(said[1]) if said else nbytes
        return answer


def head(source: Descriptor, nbytes: object, generation: object = None) -> bytes:
    number = source.generation if generation is None else generation
    return f"POST /v1/regions/{number} HTTP/1.1\r\nContent-Length: {nbytes}\r\n\r\n".encode()


def test_hostile_requests_are_refused_and_receive_no_bytes() -> None:
    with reading(1000) as (transport, handle, _):
        source, far = handle.descriptor, 2**63 - 1
        good = request(source, [(0, 1000)])
        bodies = {
            "outside": [
                request(source, rows) for rows in ([(0, 1001)], [(-1, 1)], [(far, 1)], [(1, far)], [(far, far)])
            ],
            "empty run": [request(source, [(0, 0)])],
            "garbage": [b"\xc1" * 40, b"", b"\x91" * 1000, good[:-3], msgspec.msgpack.encode({"a": 1})],
        }
        for body in (body for group in bodies.values() for body in group):
            assert send_request(source, head(source, len(body)) + body).startswith(b"HTTP/1.1 400")
        lies = {"key": b"", "endpoint": "nobody", "nbytes": 999}
        for body in (request(source, [(0, 9)], **{name: value}) for name, value in lies.items()):
            assert send_request(source, head(source, len(body)) + body).startswith(b"HTTP/1.1 410")
        assert send_request(source, head(source, len(good), 10**18) + good).startswith(b"HTTP/1.1 410")
        for raw in (
            head(source, len(good), "x") + good,
            head(source, len(good), 10**30) + good,
            b"GET /etc/passwd HTTP/1.1\r\n\r\n",
        ):
            assert send_request(source, raw).startswith(b"HTTP/1.1 404")
        assert send_request(source, head(source, 10**9)).startswith(b"HTTP/1.1 413")
        for raw in (
            b"\x16\x03\x01\x00\xff\r\n\r\n",
            b"A" * 20_000,
            head(source, "-1"),
            head(source, "1e9"),
            head(source, "9" * 30),
            head(source, "5\r\nContent-Length: 6"),
            head(source, "5\r\nTransfer-Encoding: chunked"),
            b"POST /v1/regions/1 HTTP/1.0\r\n\r\n",
        ):
            assert send_request(source, raw).startswith(b"HTTP/1.1 400")
        assert b"\xaa" * 1000 in send_request(source, head(source, len(good)) + good)
        transport.wait(transport.post_read(handle, source, whole(1000)), stall_s=20)


def test_request_for_too_many_bytes_returns_413(monkeypatch) -> None:
    monkeypatch.setattr(region_server, "MAX_ANSWER_BYTES", 10_000)
    with reading(1000) as (_, handle, _):
        body = request(handle.descriptor, [(0, 1000)] * 11)
        assert send_request(handle.descriptor, head(handle.descriptor, len(body)) + body).startswith(b"HTTP/1.1 413")


def test_connections_of_slow_clients_are_closed(monkeypatch) -> None:
    """A slow head, a missing body, and a reader that does not read each cost some time."""
    monkeypatch.setattr(http_server, "LIMITS", ConnectionLimits(head_s=0.4, idle_s=0.4, answer_s=0.4))
    with reading(50_000_000) as (transport, handle, _):
        source = handle.descriptor
        body = request(source, [(0, 50_000_000)])
        idle, half, greedy, drip = (connected(source) for _ in range(4))
        half.sendall(head(source, 100) + b"x")
        greedy.sendall(head(source, len(body)) + body)

        def dripping() -> None:
            with contextlib.suppress(OSError):
                for _ in range(100):
                    drip.sendall(b"P")
                    time.sleep(0.1)

        thread = threading.Thread(target=dripping)
        thread.start()
        deadline = time.monotonic() + 20
        for sock in (idle, half, drip):  # the server closes each in time
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
        while transport.server.admission.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for sock in (idle, half, greedy, drip):
            sock.close()
        thread.join()


def test_reader_retries_full_server(monkeypatch) -> None:
    monkeypatch.setattr(http_server, "LIMITS", ConnectionLimits(total=1))
    with reading(1000) as (_, handle, _), reading(1000) as (transport, into, _):
        other = connected(handle.descriptor)
        other.sendall(b"POST")
        time.sleep(0.1)
        pending = transport.post_read(into, handle.descriptor, whole(1000))
        with pytest.raises(SourceStalled):
            transport.wait(pending, stall_s=0.5)
        pending = transport.post_read(into, handle.descriptor, whole(1000))
        other.close()
        transport.wait(pending, stall_s=20)
