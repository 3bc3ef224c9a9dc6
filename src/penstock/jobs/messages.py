"""What the coordinator of a job and its workers say: typed values, msgpack, framed by their length, on one socket.

In / Out: frozen structs; decoding refuses unknown fields and frames past their bound.
Not here: who sends them (`coordinator`, `jobs.workers.worker`).
"""

from __future__ import annotations

import select
import socket
import threading
from dataclasses import replace
from typing import TypeVar

import msgspec

from penstock.engine.trace import Span
from penstock.errors import FormatError, PeerLost
from penstock.net.admission import Admission
from penstock.net.limits import ConnectionLimits, descriptor_limit
from penstock.net.listener import GuardedListener

MAX_FRAME_BYTES = 64 << 20
"""A task's digests are 8 bytes a leaf: this is one of two terabytes."""
HELLO_BYTES = 4096
"""Of a message of somebody who has not yet said who they are."""
HELLO_S = 5.0
"""Within which a connection must say who it is."""
EXECUTORS = ("fetch", "place", "compute", "send")
"""Of a worker, in the order of a task's way through them."""


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
    verify: bool = True
    """Whether what is read is held to the digests that the sources have."""
    trace: bool = False
    """Whether beats are to bring spans."""
    asks_held: bool = False
    """Whether workers are to say what their caches hold: they may be on several hosts."""
    in_memory: bool = False
    """Whether `directory` is one piece of memory."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hello"):
    """A worker is there. It shows what it was started with, since anybody may connect."""

    worker: str
    secret: str
    device: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ready"):
    """It has planned the job, and can work."""

    key: str
    at: str = ""
    """What it shares with workers that read through the same cache; empty: it reads through none."""
    holds: list[int] = []
    """Tasks most of whose input is in that."""


class Began(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="began"):
    """The operation runs on a task now: what to blame if the worker is lost."""

    task: int


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="done"):
    """A task's bytes are written."""

    task: int
    digests: bytes
    """uint64, little endian: of its pieces, in order."""
    fetched_bytes: int = 0
    asked_bytes: int = 0
    """As of `Beat`, when it ended: what a worker that dies has read for nobody is all that is not known."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="beat"):
    """How far it is."""

    moved_bytes: int
    """Read and written so far."""
    num_reports: int = 0
    """Times that the operation said that it gets on."""
    fetched_bytes: int = 0
    """Read from the sources; through a cache whole chunks, headers too."""
    asked_bytes: int = 0
    """Read, from there or from a cache."""
    busy_s: dict[str, float]
    """Per executor."""
    peak_bytes: int = 0
    """Most of its memory in use at once."""
    spans: list[Span] = []
    """Of the trace, since the last beat."""
    clock: float = 0.0
    """`time.perf_counter()` when it was said: spans' clock is that of the worker's host."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="failure"):
    """It cannot go on."""

    kind: str
    """Name of the error's class in `penstock.errors`."""
    message: str
    hint: str = ""
    uri: str = ""
    byte_range: tuple[int, int] | None = None
    tensor: str = ""
    minimum_bytes: int = 0


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="work"):
    """Tasks to do, in order; and some that it need not begin."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stop"):
    """Finish: nothing is left to do."""


FromWorker = Hello | Ready | Began | Done | Beat | Failure
ToWorker = Words | Work | Stop
T = TypeVar("T")

_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class Wire:
    """One side of a connection. Any thread sends; one receives.

    Attributes:
        max_frame_bytes: longer messages are refused.
    """

    def __init__(self, connection: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket, self.max_frame_bytes = connection, max_frame_bytes
        self._sending = threading.Lock()
        self._came = bytearray()

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
        """Return whether something came within `timeout_s`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def from_worker(self) -> list[FromWorker]:
        """Return what came of a worker; none: part of a message. It does not wait where something came.

        Raises:
            PeerLost: it has ended. FormatError: what came is no message.
        """
        return self._decoded(_FROM_WORKER)

    def to_worker(self) -> list[ToWorker]:
        """Return what came of the coordinator; see `from_worker`."""
        return self._decoded(_TO_WORKER)

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        try:
            part = self._socket.recv(1 << 20)
        except OSError as error:
            raise PeerLost(f"a process of the job is gone: {error.strerror or error}") from error
        if not part:
            raise PeerLost("a process of the job is gone")
        self._came += part
        found = []
        while len(self._came) >= 4:
            stop = 4 + int.from_bytes(self._came[:4], "little")
            if stop > 4 + self.max_frame_bytes:
                raise FormatError(f"a message of {stop - 4} bytes")
            if len(self._came) < stop:
                break
            try:
                found.append(decoder.decode(bytes(self._came[4:stop])))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise FormatError(f"not a message of a job: {error}") from error
            del self._came[:stop]
        return found

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def listen(host: str | None, name: str) -> tuple[GuardedListener, str]:
    """Listen for workers within the limits of every listener; and what workers are told of the address.

    Args:
        host: address of this host; None: they are all here, as processes of this user.
        name: unlike that of any other job.
    """
    # Half of the descriptors: the rest of this process needs some, too.
    limits = replace(ConnectionLimits.for_descriptors(descriptor_limit() // 2), head_s=HELLO_S)
    if host is not None:
        bound = socket.create_server((host, 0))
        address = f"tcp:{host}:{bound.getsockname()[1]}"
    else:
        # A name without a file: nothing of it remains, however the coordinator ends. It has no mode either, so the
        # listener looks at the user of each connection.
        bound, told = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"penstock-job-{name}"
        bound.bind(f"\0{told}")
        address = f"unix:{told}"
    listener = GuardedListener(bound, Admission(limits, name="job"))
    listener.listen()
    return listener, address


def end_with_peer(connection: socket.socket, stall_s: float) -> None:
    """Let a connection to another host end once that is silent for `stall_s`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
