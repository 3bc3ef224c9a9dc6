"""`nixl` between two processes over TCP: faults, fences, releases, forks, and how the process exits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import msgspec
import pytest

from penstock.config import Settings, ucx_variables
from penstock.errors import (
    Cancelled,
    ConfigError,
    FormatError,
    MissingExtra,
    PeerLost,
    PenstockError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.testing.transport_suite import sample, segments
from penstock.transport.protocol import Memory, decode
from penstock_nixl import reader as nixl_reader
from penstock_nixl import transport as nixl
from penstock_nixl.transport import NixlTransport

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

NBYTES = 200_000_003
HOLDER = """
import sys
from penstock.testing.transport_suite import sample
from penstock_nixl import transport as nixl
from penstock.transport.protocol import encode
from penstock.transport.protocol import Memory

transport = nixl.NixlTransport.open(tls="tcp")
buffer = bytearray(sample(1_000_003) * (int(sys.argv[1]) // 1_000_003 + 1))[: int(sys.argv[1])]
handle = transport.register(Memory.of_buffer(buffer))
print(encode(handle.descriptor).hex(), flush=True)
for line in sys.stdin:
    print(encode(handle.fence()).hex(), flush=True)
    buffer[:] = bytes(len(buffer))
"""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small pieces and rare checks, so that a read takes seconds and its progress is visible."""
    monkeypatch.setattr(nixl_reader, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(nixl_reader, "POLL_S", 0.1)


@contextlib.contextmanager
def holder(nbytes: int = NBYTES):
    words = [sys.executable, "-c", HOLDER, str(nbytes)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, decode(bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def reading(nbytes: int):
    transport = NixlTransport.open(tls="tcp")
    try:
        buffer = bytearray(b"\xaa" * nbytes)
        yield transport, transport.register(Memory.of_buffer(buffer)), buffer
    finally:
        transport.close()


def pattern(nbytes: int) -> bytes:
    return (sample(1_000_003) * (nbytes // 1_000_003 + 1))[:nbytes]


class Waiting:
    """A read waited for by a thread, once its first bytes are here."""

    def __init__(self, transport, into, source, nbytes: int, stall_s: float) -> None:
        self.pending = transport.post_read(into, source, segments([(0, 0, nbytes)]))
        self.error: PenstockError | None = None

        def work() -> None:
            try:
                transport.wait(self.pending, stall_s=stall_s)
            except PenstockError as error:
                self.error = error

        self._thread = threading.Thread(target=work)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self.pending.moved_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def join(self) -> PenstockError | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


@needs_nixl
def test_second_process_reads_all_bytes() -> None:
    with holder() as (_, source), reading(NBYTES) as (transport, into, buffer):
        transport.wait(transport.post_read(into, source, segments([(0, 0, NBYTES)])), stall_s=20)
        assert buffer == pattern(NBYTES)


@needs_nixl
def test_killed_peer_raises_peer_lost(slow) -> None:
    with holder() as (process, source), reading(NBYTES) as (transport, into, _):
        waiting = Waiting(transport, into, source, NBYTES, 20)
        process.kill()
        began = time.monotonic()
        error = waiting.join()
        assert isinstance(error, PeerLost)
        assert error.mutated
        assert time.monotonic() - began < 15
        with pytest.raises((PeerLost, PenstockError, SourceStalled)) as caught:
            transport.wait(transport.post_read(into, source, segments([(0, 0, 10)])), stall_s=3)
        assert not caught.value.mutated


@needs_nixl
def test_stalled_read_writes_nothing_after_peer_resumes(slow, monkeypatch) -> None:
    with holder() as (process, source), reading(NBYTES) as (transport, into, buffer):
        monkeypatch.setattr(nixl_reader, "WINDOW", 4)
        waiting = Waiting(transport, into, source, NBYTES, 0.7)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until all its threads have heard of it, it gives bytes
        began = time.monotonic()
        error = waiting.join()
        assert isinstance(error, SourceStalled)
        assert error.mutated
        assert time.monotonic() - began < 15
        buffer[:] = b"\x55" * NBYTES
        process.send_signal(signal.SIGCONT)
        time.sleep(1)
        assert buffer == b"\x55" * NBYTES
        with holder(1000) as (_, other):  # the transport goes on, by another agent
            transport.wait(transport.post_read(into, other, segments([(0, 0, 1000)])), stall_s=20)
            assert buffer[:1000] == pattern(1000)


@needs_nixl
def test_fence_during_read_raises_stale_descriptor(slow) -> None:
    with holder() as (process, source), reading(NBYTES) as (transport, into, _):
        waiting = Waiting(transport, into, source, NBYTES, 20)
        process.stdin.write("fence\n")
        process.stdin.flush()
        new = decode(bytes.fromhex(process.stdout.readline()))
        error = waiting.join()
        assert isinstance(error, StaleDescriptor)
        assert error.mutated
        transport.wait(transport.post_read(into, new, segments([(0, 0, 10)])), stall_s=20)


@needs_nixl
def test_memory_released_during_read_is_not_written(slow) -> None:
    with holder() as (_, source), reading(NBYTES) as (transport, into, buffer):
        waiting = Waiting(transport, into, source, NBYTES, 20)
        into.close()
        assert isinstance(waiting.join(), Cancelled)
        buffer[:] = b"\x55" * NBYTES
        time.sleep(0.3)
        assert buffer == b"\x55" * NBYTES


@needs_nixl
def test_released_memory_is_freed_after_delay(monkeypatch) -> None:
    monkeypatch.setattr(nixl, "LINGER_S", 0.5)
    with reading(1000) as (transport, handle, _):
        handle.close()
        assert [one for _, one in transport._retired] == [handle]
        deadline = time.monotonic() + 60
        while transport._retired and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not transport._retired


@needs_nixl
def test_reads_in_both_directions_run_concurrently() -> None:
    with reading(5_000_000) as (left, mine, here), reading(5_000_000) as (right, theirs, there):
        for buffer, seed in ((here, 1), (there, 2)):
            buffer[:2_000_000] = sample(2_000_000, seed)
        rows = segments([(0, 3_000_000, 2_000_000)])
        pending = [(left, left.post_read(mine, theirs.descriptor, rows))]
        pending += [(right, right.post_read(theirs, mine.descriptor, rows))]
        threads = [threading.Thread(target=one.wait, args=(read,), kwargs={"stall_s": 20}) for one, read in pending]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert (here[3_000_000:], there[3_000_000:]) == (sample(2_000_000, 2), sample(2_000_000, 1))


@needs_nixl
def test_forked_child_leaves_parent_agent_running() -> None:
    with reading(1000) as (_, handle, there), reading(1000) as (transport, into, here):
        there[:] = sample(1000)
        transport.wait(transport.post_read(into, handle.descriptor, segments([(0, 0, 10)])), stall_s=20)
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
        transport.wait(transport.post_read(into, handle.descriptor, segments([(0, 0, 1000)])), stall_s=20)
        assert here == there


@needs_nixl
def test_process_exits_cleanly_with_open_transport() -> None:
    """With an open transport, for any installed RDMA libraries."""
    script = (
        "from penstock_nixl.transport import NixlTransport as T; from penstock.transport.protocol import Memory as M"
    )
    script += "; t = T.open(tls='tcp'); h = t.register(M.of_buffer(bytearray(100)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@needs_nixl
def test_malformed_descriptors_are_refused() -> None:
    with reading(10) as (transport, into, _):
        good = into.descriptor
        for payload in (b"", b"\xc1", good.payload[:-1], msgspec.msgpack.encode({"agent": b""})):
            with pytest.raises(FormatError):
                transport.post_read(into, msgspec.structs.replace(good, payload=payload), segments([(0, 0, 1)]))
        with reading(10) as (_, other, _):
            found = msgspec.msgpack.decode(other.descriptor.payload)
            for change in ({"word_agent": b"nonsense"}, {"agent": b"x" * 1000}, {"address": 4096}):
                payload = msgspec.msgpack.encode(found | change)
                forged = msgspec.structs.replace(other.descriptor, payload=payload)
                with pytest.raises(StaleDescriptor):
                    transport.wait(transport.post_read(into, forged, segments([(0, 0, 1)])), stall_s=20)


@needs_nixl
def test_unsupported_backend_and_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="PIGEON"):
        NixlTransport.open(backends=("PIGEON",))
    with reading(10) as (transport, _, _), pytest.raises(ConfigError, match="mps"):
        transport.register(Memory(address=4096, nbytes=10, device="mps:0"))


def test_missing_nixl_error_names_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingExtra) as caught:
        NixlTransport.open()
    assert 'pip install "penstock[nixl]"' in str(caught.value)


def test_ucx_variables_are_set_temporarily(monkeypatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_MODULES", "^rocm")
    with ucx_variables("tcp"):
        assert os.environ["UCX_TLS"] == "tcp"
        assert os.environ["UCX_MODULES"] == "^rocm"
    assert "UCX_TLS" not in os.environ
    assert os.environ["UCX_MODULES"] == "^rocm"
    assert Settings.read({"PENSTOCK_NIXL_TLS": "tcp,self"}).nixl_tls == "tcp,self"
