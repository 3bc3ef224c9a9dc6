"""Generation tables: validity of descriptors, life of the owner, file descriptors and forked children."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from penstock.errors import Cancelled, ConfigError, DestinationError, PeerLost, PermissionDenied, StaleDescriptor
from penstock.segments import Segments
from penstock.testing.transport_suite import segments
from penstock.transport import fd_server, host_endpoint
from penstock.transport.host_endpoint import NUM_SLOTS, Endpoint, GenerationTable, PeerGenerationTable, checksum_of
from penstock.transport.protocol import Descriptor, Memory


def described(page: GenerationTable, generation: int = 1) -> Descriptor:
    return Descriptor(transport="t", endpoint=page.name, generation=generation, nbytes=5)


@pytest.fixture
def endpoint():
    endpoint = Endpoint("t", GenerationTable.create())
    yield endpoint
    endpoint.close()


@pytest.fixture
def page(endpoint):
    return endpoint.page


def test_reader_observes_generations_and_liveness(endpoint, page) -> None:
    slot, source = page.take_slot(), described(page)
    peer = PeerGenerationTable.open(source, endpoint.address(slot))
    assert peer.is_alive()
    assert peer.generation(slot) == 0
    page.set(slot, 1, checksum_of(source))
    assert peer.generation(slot) == 1
    peer.check(slot, source, checksum_of(source))
    for forged in (described(page, 2), msgspec.structs.replace(source, nbytes=6)):
        with pytest.raises(StaleDescriptor):
            peer.check(slot, forged, checksum_of(forged))
    page.give_slot(slot)
    with pytest.raises(StaleDescriptor):
        peer.check(slot, source, checksum_of(source))
    page.close()
    page.close()
    assert not peer.is_alive()
    with pytest.raises(PeerLost):
        peer.check(slot, source, checksum_of(source))


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process open only `count` more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", [0, 1])
def test_reader_without_free_file_descriptors_blames_destination(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Use a socket pair, since the server of an endpoint would be short of descriptors in this process too.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull) as sent:
        socket.send_fds(theirs, [b"\0"], [sent.fileno()])
        monkeypatch.setattr(fd_server, "connect_unix", lambda *_: ours)
        # With one free number the descriptor is received, but cannot be copied for the caller.
        with few_descriptors(left), pytest.raises(DestinationError, match="file") as caught:
            fd_server.receive_fd("\0penstock-x", fd_server.PAGE, "here")
    assert caught.value.blame == "destination" and "ulimit" in str(caught.value.hint)


def test_reader_without_socket_blames_destination() -> None:
    # Use another process, because a hard limit cannot be raised again, and a soft limit is raised when it is too low.
    program = """
import os, resource
from penstock.errors import DestinationError
from penstock.transport import fd_server
os.close(free := os.open(os.devnull, os.O_RDONLY))
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
try:
    fd_server.receive_fd("\\0penstock-x", fd_server.PAGE, "here")
except DestinationError as error:
    print(error.message)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "Too many open files" in done.stdout


def test_owner_without_free_file_descriptors_raises(endpoint) -> None:
    # The free descriptor is for the lock of the directory.
    with few_descriptors(1), pytest.raises(DestinationError, match="Too many open files"):
        endpoint.address(0)
    assert endpoint.address(0).socket, "the next attempt may succeed"


def test_readers_cannot_write_generation_table(endpoint, page) -> None:
    peer = PeerGenerationTable.open(described(page), endpoint.address(0))
    with pytest.raises(TypeError):
        peer._words[0] = 1
    received = fd_server.receive_fd(endpoint.address(0).socket, fd_server.PAGE, "here")
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(received, 4096)
        with pytest.raises(PermissionError):
            os.close(os.open(f"/proc/self/fd/{received}", os.O_RDWR | os.O_TRUNC))
        again = os.open(f"/proc/self/fd/{received}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        os.close(again)
    finally:
        os.close(received)


def test_owner_is_alive_after_readers_close(endpoint, page) -> None:
    peers = [PeerGenerationTable.open(described(page), endpoint.address(0)) for _ in range(20)]
    for _ in range(3):
        assert all(peer.is_alive() for peer in peers)


def test_page_of_different_process_is_refused(endpoint, page, tmp_path) -> None:
    other = Endpoint("t", GenerationTable.create())
    mine, theirs = endpoint.address(0), other.address(0)
    with pytest.raises(PeerLost, match="was replaced after"):
        PeerGenerationTable.open(described(page), theirs)
    for changes, kind, match in (
        ({"host": "elsewhere"}, ConfigError, "runtime directory"),
        ({"socket": str(tmp_path / "none.sock")}, PeerLost, "not mounted here"),
        ({"socket": str(tmp_path)}, PermissionDenied, "not that of a member's socket"),
        ({"socket": "\0/tmp/.X11-unix/X0"}, PermissionDenied, "not that of a member's socket"),
    ):
        with pytest.raises(kind, match=match) as caught:
            PeerGenerationTable.open(described(page), msgspec.structs.replace(mine, **changes))
        assert match in f"{caught.value} {caught.value.hint}"
    other.close()
    with pytest.raises(PeerLost):
        PeerGenerationTable.open(described(page), theirs)
    assert not os.path.exists(theirs.socket)


def test_concurrent_mutual_opens_do_not_deadlock(monkeypatch) -> None:
    monkeypatch.setattr(fd_server, "TIMEOUT_S", 3.0)
    endpoints = [Endpoint("t", GenerationTable.create()) for _ in range(2)]
    handles = [endpoint.register(Memory(address=0, nbytes=5), lambda _: b"") for endpoint in endpoints]
    addresses = [endpoint.address(0) for endpoint in endpoints]
    for _ in range(20):
        for endpoint in endpoints:
            endpoint._peers.clear()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda at: endpoints[at].claim(handles[1 - at].descriptor, addresses[1 - at]), (0, 1)))
    for endpoint in endpoints:
        endpoint.close()


def test_exhausted_table_raises_until_slot_is_returned(page) -> None:
    slots = [page.take_slot() for _ in range(NUM_SLOTS)]
    assert len(set(slots)) == NUM_SLOTS
    with pytest.raises(ConfigError, match="arena"):
        page.take_slot()
    page.give_slot(slots[7])
    assert page.take_slot() == slots[7]


def test_failed_page_lock_raises_destination_error(monkeypatch) -> None:
    def refuse(*_) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(host_endpoint.fcntl, "flock", refuse)
    with pytest.raises(DestinationError):
        GenerationTable.create()


def test_failed_registration_consumes_no_slot(endpoint, page) -> None:
    memory = Memory(address=0, nbytes=0)

    def describe(_) -> bytes:
        raise ConfigError("no")

    for _ in range(3):
        with pytest.raises(ConfigError):
            endpoint.register(memory, describe)
    assert page.take_slot() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_close_parent_table(endpoint, page) -> None:
    handle = endpoint.register(Memory(address=0, nbytes=5), lambda _: b"")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle.fence()
        except Cancelled:
            handle.close()
            endpoint.close()
            page.set(0, 9, 9)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert PeerGenerationTable.open(handle.descriptor, endpoint.address(0)).is_alive()
    endpoint.claim(handle.descriptor, endpoint.address(0)).check()


def test_adjacent_segments_are_merged() -> None:
    rows = [(10, 110, 5), (0, 100, 10), (50, 300, 0), (15, 116, 5), (20, 121, 1), (90, 50, 3)]
    joined = segments(rows).joined()
    found = list(zip(joined.src.tolist(), joined.dst.tolist(), joined.nbytes.tolist(), strict=True))
    assert found == [(90, 50, 3), (0, 100, 15), (15, 116, 6)]
    assert isinstance(segments([]).joined(), Segments)
    assert len(segments([(0, 0, 0)]).joined().src) == 0
    padded = segments([(0, 100, 10), (512, 612, 5), (1024, 1124, 7), (1032, 1133, 1)]).joined(padding_bytes=511)
    assert list(zip(padded.src, padded.dst, padded.nbytes, strict=True)) == [(0, 100, 1031), (1032, 1133, 1)]
