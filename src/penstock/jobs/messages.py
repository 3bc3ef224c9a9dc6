"""What the coordinator of a job and its workers say: typed values, msgpack, framed by their length, on one socket.

In / Out: frozen structs; decoding refuses unknown fields and frames past their bound.
Not here: who sends them (`run`, `worker`).
"""

from __future__ import annotations

import select
import socket
import threading
from typing import TypeVar

import msgspec

from penstock.errors import FormatError, PeerLost

MAX_FRAME_BYTES = 64 << 20
"""A task's digests are 8 bytes a leaf: this is one of two terabytes."""


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="words"):
    """A job in words, from which every process makes the same `Job`."""

    sources: tuple[str, ...]
    operation: tuple[dict[str, object], ...]
    """Operations one after the other, each `{"op": name, ...}`; see `words`."""
    key: str
    """Of the job these words gave where it was planned: a worker that gets another job refuses."""
    directory: str
    task_bytes: int
    shard_bytes: int
    leaf_bytes: int
    memory_bytes: int
    """Of one worker."""
    stall_s: float
    storage_options: dict[str, str] = {}
    trace: str = ""
    """Where the worker saves its trace; empty: nowhere."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """A worker is there. It shows what it was started with, since anybody may connect."""

    worker: str
    secret: str
    pid: int
    device: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ready"):
    """It has planned the job, and can work."""

    key: str


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="done"):
    """A task's bytes are written."""

    task: int
    digests: bytes
    """uint64, little endian: of its pieces, in order."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="beat"):
    """How far it is."""

    moved_bytes: int
    """Read and written so far."""
    busy_s: dict[str, float]
    """Per executor."""
    peak_bytes: int = 0
    """Most of its memory in use at once."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="failure"):
    """It cannot go on."""

    kind: str
    """Name of the error's class in `penstock.errors`."""
    message: str
    hint: str = ""
    uri: str = ""
    tensor: str = ""
    task: int = -1
    """Where one task is at fault."""
    minimum_bytes: int = 0


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="work"):
    """Tasks to do, in order; and some that it need not begin."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stop"):
    """Finish: nothing is left to do."""


FromWorker = Hello | Ready | Done | Beat | Failure
ToWorker = Words | Work | Stop
T = TypeVar("T")

_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class Wire:
    """One side of a connection. Any thread sends; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._head = bytearray(4)

    def fileno(self) -> int:
        """Of the socket, to select on."""
        return self._socket.fileno()

    def send(self, message: FromWorker | ToWorker) -> None:
        """Send it whole. PeerLost when the other side is gone."""
        raw = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._socket.sendall(len(raw).to_bytes(4, "little") + raw)
            except OSError as error:
                raise PeerLost(f"a process of the job is gone: {error.strerror or error}") from error

    def is_readable(self, timeout_s: float) -> bool:
        """Whether something came within `timeout_s`."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def from_worker(self) -> FromWorker:
        """The next message of a worker. PeerLost at its end, FormatError for what is none."""
        return self._decode(_FROM_WORKER)

    def to_worker(self) -> ToWorker:
        """The next message of the coordinator; see `from_worker`."""
        return self._decode(_TO_WORKER)

    def _decode(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        size = int.from_bytes(self._take(4), "little")
        if size > MAX_FRAME_BYTES:
            raise FormatError(f"a message of {size} bytes")
        try:
            return decoder.decode(self._take(size))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"not a message of a job: {error}") from error

    def _take(self, nbytes: int) -> bytes:
        left, parts = nbytes, list[bytes]()
        while left:
            try:
                part = self._socket.recv(min(left, 1 << 20))
            except OSError as error:
                raise PeerLost(f"a process of the job is gone: {error.strerror or error}") from error
            if not part:
                raise PeerLost("a process of the job is gone")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
