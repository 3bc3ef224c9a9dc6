"""A job's messages: whole, in order, however the bytes come; what is none is refused before it is held."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
import torch

from penstock.errors import FormatError, PeerLost, PlanError
from penstock_convert.messages import (
    HELLO_BYTES,
    JOB_PROTOCOL,
    Began,
    JobSpec,
    Stop,
    TaskDone,
    TaskFailure,
    TaskWork,
    Wire,
    WorkerHello,
)
from penstock_convert.workers.process import serve

Pair = tuple[socket.socket, Wire]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A worker's socket, and the coordinator's side."""
    here, there = socket.socketpair()
    there.settimeout(5.0)
    wire = Wire(there, max_frame_bytes=HELLO_BYTES)
    yield here, wire
    here.close()
    wire.close()


def framed(message: msgspec.Struct) -> bytes:
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(4, "little") + raw


def test_fragmented_messages_are_reassembled(pair: Pair):
    here, wire = pair
    messages = [WorkerHello(worker="w", secret="s", device="cpu"), Began(task=3), TaskDone(task=3, digests=bytes(16))]
    raw = b"".join(map(framed, messages))
    found = []
    for at in range(0, len(raw), 7):
        here.sendall(raw[at : at + 7])
        found += wire.from_worker()
    assert found == messages
    here.sendall(raw)
    assert wire.from_worker() == messages


@pytest.mark.parametrize(
    "raw", [(HELLO_BYTES + 1).to_bytes(4, "little"), b"\x01\0\0\0\xc1", framed(TaskWork(tasks=(1,)))]
)
def test_invalid_worker_message_is_refused(pair: Pair, raw: bytes):
    pair[0].sendall(raw)
    with pytest.raises(FormatError):
        pair[1].from_worker()


def test_connection_closed_within_message_raises_peer_lost(pair: Pair):
    here, wire = pair
    here.sendall(framed(Began(task=1))[:-1])
    assert wire.from_worker() == []
    here.close()
    with pytest.raises(PeerLost):
        wire.from_worker()
    with pytest.raises(PeerLost):
        wire.send(TaskWork(revoked=(1,)))


def test_worker_receiving_stop_before_start_exits() -> None:
    here, there = socket.socketpair()
    words = JobSpec(
        sources=("nowhere",),
        operation=(),
        key="",
        directory="",
        task_bytes=1,
        shard_bytes=1,
        leaf_bytes=1,
        memory_bytes=1,
        stall_s=1.0,
    )
    here.sendall(framed(words) + framed(Stop()))
    with here, there:
        serve(Wire(there), "w0", "s", torch.device("cpu"))
        assert here.recv(1 << 16) == framed(WorkerHello(worker="w0", secret="s", device="cpu"))


def test_job_protocol_major_mismatch_is_reported_to_coordinator():
    raw = msgspec.msgpack.encode({"type": "job", "protocol": "2.0", "sources": "of another shape"})
    there, coordinator = socket.socketpair()
    with there, coordinator:
        coordinator.sendall(len(raw).to_bytes(4, "little") + raw)
        with pytest.raises(PlanError, match=f"speaks job protocol 2.0, .* speaks {JOB_PROTOCOL}: their major"):
            serve(Wire(there), "w", "s", torch.device("cpu"))
        hello, failure = Wire(coordinator).from_worker()
    assert isinstance(hello, WorkerHello) and isinstance(failure, TaskFailure)
    # The coordinator learns it too, by an error of its own.
    assert failure.kind == "PlanError" and "speaks job protocol 2.0" in failure.message


def test_unknown_fields_from_newer_minor_version_are_ignored(pair: Pair):
    here, wire = pair
    raw = msgspec.msgpack.encode({"type": "began", "task": 3, "added_later": {"a": [1]}})
    here.sendall(len(raw).to_bytes(4, "little") + raw)
    assert wire.from_worker() == [Began(task=3)]


def test_default_protocol_version_is_omitted_from_message():
    """The first release refuses unknown fields."""
    assert "protocol" not in msgspec.msgpack.decode(
        msgspec.msgpack.encode(WorkerHello(worker="w", secret="s", device="d"))
    )
