"""Listening sockets without a free descriptor, and the end of the accepting thread."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from penstock.net.admission import Admission, ConnectionLimits
from penstock.net.listener import GuardedListener, ThreadedListener

NUM_DESCRIPTORS = 64
LISTENER = f"""
import json, logging, os, resource, socket, sys
from penstock.net.admission import Admission
from penstock.net.admission import ConnectionLimits
from penstock.net.listener import ThreadedListener

logging.basicConfig(stream=sys.stderr)
resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_DESCRIPTORS}, {NUM_DESCRIPTORS}))

def echo(sock, connection, peer):
    while data := sock.recv(100):
        connection.prove("a member")
        sock.sendall(data)

# More places than descriptors, and no deadline within this test: descriptors are what runs out.
limits = ConnectionLimits(total=512, unproven=512, unproven_per_address=512, head_s=600.0)
admission = Admission(limits, name="test")
listener = ThreadedListener(socket.create_server(("127.0.0.1", 0)), admission, echo, name="test")
listener.start()
print(listener.address[1], flush=True)
sys.stdin.readline()
print(json.dumps({{"cpu_s": sum(os.times()[:2]), "num_open": admission.num_open}}), flush=True)
"""


def send_request(sock: socket.socket) -> bytes:
    sock.settimeout(10)
    sock.sendall(b"hi")
    return sock.recv(100)


def test_listener_without_free_descriptors_still_serves_members() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    member = socket.create_connection(("127.0.0.1", port), 10)
    assert send_request(member) == b"hi"
    strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2 * NUM_DESCRIPTORS)]
    try:
        time.sleep(2.0)  # a spinning loop would use measurable processor time
        assert send_request(member) == b"hi"  # a member is never aborted for a stranger
        answer, deadline = b"", time.monotonic() + 20
        while answer != b"hi" and time.monotonic() < deadline:
            # The connection may be dropped because no descriptor is free, and members retry.
            with socket.create_connection(("127.0.0.1", port), 10) as late, contextlib.suppress(OSError):
                answer = send_request(late)
        assert answer == b"hi"
        out, err = process.communicate("\n", timeout=20)
    finally:
        process.kill()
        process.communicate()
        for sock in [member, *strangers]:
            sock.close()
    said = json.loads(out)
    assert 0 < said["num_open"] < NUM_DESCRIPTORS
    assert said["cpu_s"] < 5.0, said  # most of this time is for imports
    assert "RLIMIT_NOFILE" in err and err.count("\n") < 5, err


def test_closing_listener_does_not_close_reused_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = GuardedListener(socket.create_server(("127.0.0.1", 0)), Admission(ConnectionLimits(), name="test"))
    listener.listen()
    real_open = os.open

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(os, "open", refuse)
    spare = listener._spare
    listener._drop_one()
    monkeypatch.setattr(os, "open", real_open)
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        assert other == spare  # the number is reused
        listener.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_closed_listener_thread_exits_despite_descriptor_reuse() -> None:
    opened: list[int] = []
    try:
        for _ in range(100):
            bound = socket.create_server(("127.0.0.1", 0))
            admission = Admission(ConnectionLimits(), name="test")
            listener = ThreadedListener(bound, admission, lambda *_: None, name="test-closed-listener")
            listener.start()
            time.sleep(0.002)  # the thread waits for connections
            listener.close()
            opened.append(os.eventfd(0))  # reuses the number of the socket
        assert [thread.name for thread in threading.enumerate() if thread.name == "test-closed-listener"] == []
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_accepted_connection_disables_nagle_algorithm() -> None:
    # Like the hub's listener, its protocol is 0, so that asyncio would not disable Nagle's algorithm.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    listener = GuardedListener(bound, Admission(ConnectionLimits(), name="test"))
    with contextlib.closing(listener), socket.create_connection(listener.getsockname()):
        accepted = None
        deadline = time.monotonic() + 10
        while accepted is None and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                accepted, _ = listener.accept()
        assert accepted is not None
        with contextlib.closing(accepted):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
