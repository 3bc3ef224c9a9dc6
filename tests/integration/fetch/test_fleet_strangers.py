"""Ports of members: without `listen` there are none. With it, idle connections of strangers do not delay a reader."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from tests.integration.conftest import Host, assert_fetched
from tests.support.processes import listening_ports

NUM_STRANGERS = 600


def timed_fetch(host: Host, truth) -> float:
    """Let a member fetch through data ports and leave. Return the seconds since it joined."""
    reader = host.start(connection={"transports": ["http"]})
    reader.wait_for("joined")
    begun = time.monotonic()
    report = assert_fetched(reader, truth)
    took_s = time.monotonic() - begun
    assert report["storage_bytes"] == 0
    os.kill(reader.process.pid, signal.SIGTERM)
    reader.process.wait(20)
    return took_s


def test_member_listens_only_with_listen_option(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    quiet = host.start(fallback=str(small_checkpoint), connection={"transports": ["http", "shm"]})
    assert_fetched(quiet, expected_tensors)
    assert listening_ports(quiet.process.pid) == []
    listening = host.start(connection={"listen": "127.0.0.1:0"})
    assert_fetched(listening, expected_tensors)
    assert len(listening_ports(listening.process.pid)) == 2  # The control port and the data port.


def test_unauthenticated_clients_do_not_delay_readers(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    """600 silent connections delayed readers by 44 s."""
    holder = host.start(fallback=str(small_checkpoint), connection={"listen": "127.0.0.1:0"})
    assert_fetched(holder, expected_tensors)
    alone_s = timed_fetch(host, expected_tensors)
    with ExitStack() as stack:
        for port in listening_ports(holder.process.pid):
            for _ in range(NUM_STRANGERS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        beside_s = timed_fetch(host, expected_tensors)
    # This is less than the deadline for a head, after which silent connections are closed anyway.
    assert beside_s < alone_s + 6.0, (alone_s, beside_s)
