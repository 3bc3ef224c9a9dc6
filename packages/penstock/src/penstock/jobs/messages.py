"""Messages between the coordinator of a job and its workers: typed values in msgpack, framed by length, on a socket.

In / Out: frozen structs; decoding ignores unknown fields, and refuses frames past their bound.
Not here: the processes at both ends (`coordinator`, `jobs.workers.process`).

    worker:       Hello --------> Ready ------> Began, Done ... Beat ------> (connection ends)
    coordinator:        JobSpec -------> Work (tasks, revoked) ------> Stop

`WorkerHello` and `JobSpec` carry the version of these messages, since nodes of a cluster may have several releases.
Within one major version fields are only added. A field that changes what a worker writes, or that a worker must not
ignore, is a new major version.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import replace
from typing import TypeVar

import msgspec

from penstock.descriptors import limit as descriptor_limit
from penstock.engine.trace import Span
from penstock.errors import MALFORMED, FormatError, PeerLost, PlanError
from penstock.net.admission import Admission, ConnectionLimits
from penstock.net.listener import GuardedListener

MAX_FRAME_BYTES = 64 << 20
"""A task's digests are 8 bytes a leaf: this is enough for a task of two terabytes."""
HELLO_BYTES = 4096
"""Longest message of a peer that has not identified itself."""
HELLO_S = 5.0
"""Time within which a new connection must send its `WorkerHello`."""
JOB_PROTOCOL = "1.0"
"""The version of these messages. The default of its field is "1.0" in all releases, and defaults are not sent: the
first release refused unknown fields."""
EXECUTORS = ("fetch", "compute", "send")
"""Of a worker, in the order of a task's way through them."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="job"):
    """The specification of a job, from which every process plans the same `Job`."""

    sources: tuple[str, ...]
    operation: tuple[dict[str, object], ...]
    """Operations one after the other, each `{"op": name, ...}`; see `operations.spec`."""
    key: str
    """Key of the job that the coordinator planned: a worker whose plan has another key refuses to work."""
    directory: str
    """Where the output's files grow."""
    task_bytes: int
    shard_bytes: int
    leaf_bytes: int
    memory_bytes: int
    """Host memory of one worker's tasks."""
    stall_s: float
    storage_options: dict[str, str] = {}
    verify: bool = True
    """True if what is read is compared with the digests that the sources have."""
    trace: bool = False
    """True if beats bring spans of the trace."""
    reports_cached: bool = False
    """True if workers report the tasks whose input their cache has: they may be on several hosts."""
    in_memory: bool = False
    """True if `directory` is one region of memory."""
    protocol: str = "1.0"


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """The first message of a worker. It shows the secret it was started with, since any process may connect."""

    # These fields stay in every version, so that a coordinator can tell a worker of another version from a stranger.
    worker: str
    secret: str
    device: str
    protocol: str = "1.0"


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has planned the job and can take tasks."""

    key: str
    at: str = ""
    """Identity of the cache that the worker reads through, equal for all workers that share it; empty: none."""
    holds: list[int] = []
    """Tasks that have most of their input in that cache."""


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """A task's bytes are made or copied from now on. A lost worker is blamed on the task that its operation ran on."""

    task: int


class TaskDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A task's bytes are written."""

    task: int
    digests: bytes
    """uint64, little endian: of its pieces, in order."""
    fetched_bytes: int = 0
    asked_bytes: int = 0
    """The counts of `WorkerBeat` when the task ended: if the worker dies, only what it read for unfinished tasks is
    lost.
    """


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A worker's progress and statistics, sent every `BEAT_S`."""

    moved_bytes: int
    """Read and written so far."""
    num_reports: int = 0
    """Progress reports of the operation so far."""
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
    """`time.perf_counter()` of the worker's host when this was sent: spans are measured by the same clock."""


class TaskFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The error that stopped the worker."""

    kind: str
    """Name of the error's class in `penstock.errors`."""
    message: str
    hint: str = ""
    uri: str = ""
    byte_range: tuple[int, int] | None = None
    tensor: str = ""
    minimum_bytes: int = 0


class TaskWork(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """Tasks to run, in order; and tasks that the worker may skip."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Request to finish: no task is left."""


class _Announced(msgspec.Struct):
    """The version in a message whose other fields may be of a version that is not known here."""

    protocol: str = JOB_PROTOCOL


def check_version(protocol: str, them: str, us: str) -> None:
    """Raise PlanError if the other side's messages are of another major version."""
    if protocol.partition(".")[0] != JOB_PROTOCOL.partition(".")[0]:
        message = f"{them} speaks job protocol {protocol[:16]}, {us} speaks {JOB_PROTOCOL}: their major versions differ"
        raise PlanError(message, hint="install one release of Penstock on all nodes of a conversion")


FromWorker = WorkerHello | Ready | Began | TaskDone | WorkerBeat | TaskFailure
ToWorker = JobSpec | TaskWork | Stop
T = TypeVar("T")

_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class Wire:
    """A side of a connection between coordinator and worker. Any thread sends; one receives.

    Attributes:
        max_frame_bytes: longer messages are refused.
    """

    def __init__(self, connection: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self.max_frame_bytes = max_frame_bytes
        # Executor threads send results while another thread sends beats: two frames must not interleave.
        self._sending = threading.Lock()
        self._came = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: FromWorker | ToWorker) -> None:
        """Send a complete message. PeerLost if the other side is gone."""
        # Encoded outside of the lock, which then only covers the system calls.
        raw = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._socket.sendall(len(raw).to_bytes(4, "little") + raw)
            except OSError as error:
                raise PeerLost(f"a process of the job is gone: {error.strerror or error}") from error

    def is_readable(self, timeout_s: float) -> bool:
        """Return whether bytes can be read within `timeout_s`."""
        # Not `select`, which cannot wait for descriptors above 1023: a program may have more.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def from_worker(self) -> list[FromWorker]:
        """Return the messages received from a worker; none if a message is still incomplete. Waits for the first byte.

        Raises:
            PeerLost: the worker has ended. FormatError: the bytes are not a message.
            PlanError: they are a message of another major version.
        """
        return self._decoded(_FROM_WORKER)

    def to_worker(self) -> list[ToWorker]:
        """Return the messages received from the coordinator; see `from_worker`."""
        return self._decoded(_TO_WORKER)

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        try:
            part = self._socket.recv(1 << 20)
        except OSError as error:
            raise PeerLost(f"a process of the job is gone: {error.strerror or error}") from error
        if not part:
            raise PeerLost("a process of the job is gone")
        # A receive may end in the middle of a message, or bring several: complete ones are decoded, the rest is kept.
        self._came += part
        messages = []
        while len(self._came) >= 4:
            stop = 4 + int.from_bytes(self._came[:4], "little")
            # Checked on the length alone: waiting for such a frame would let the peer fill this process's memory.
            if stop > 4 + self.max_frame_bytes:
                raise FormatError(f"a message of {stop - 4} bytes exceeds the limit of {self.max_frame_bytes}")
            if len(self._came) < stop:
                break
            raw = bytes(self._came[4:stop])
            try:
                messages.append(decoder.decode(raw))
            except MALFORMED as error:
                with contextlib.suppress(*MALFORMED):
                    announced = msgspec.msgpack.decode(raw, type=_Announced)
                    check_version(announced.protocol, "the other process of the job", "this one")
                raise FormatError(f"not a message of a job: {error}") from error
            del self._came[:stop]
        return messages

    def shut_down(self) -> None:
        """End the connection: another thread that waits for messages gets PeerLost. Idempotent."""
        # An error says that it has ended already.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def listen(host: str | None, name: str) -> tuple[GuardedListener, str]:
    """Listen for workers within the limits of every listener; return the listener and the address for workers.

    Args:
        host: address of this host; None: all workers are processes of this user on this host.
        name: a name that no other job has.
    """
    # Half of the descriptors: the rest of this process needs some, too.
    limits = replace(ConnectionLimits.for_descriptors(descriptor_limit() // 2), head_s=HELLO_S)
    if host is not None:
        bound = socket.create_server((host, 0))
        address = f"tcp:{host}:{bound.getsockname()[1]}"
    else:
        # An abstract name without a file: nothing of it remains, however the coordinator ends. It has no file mode
        # either, so the listener checks the user of each connection.
        bound, socket_name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"penstock-job-{name}"
        bound.bind(f"\0{socket_name}")
        address = f"unix:{socket_name}"
    # Admission bounds the connections that have not shown the secret, so that strangers cannot use up descriptors.
    listener = GuardedListener(bound, Admission(limits, name="job"))
    listener.listen()
    return listener, address


def end_with_peer(connection: socket.socket, stall_s: float) -> None:
    """Set a connection to another host to fail once that host is silent for `stall_s`."""
    # A host that loses power sends no FIN. Keep-alive finds that on an idle connection, TCP_USER_TIMEOUT while data is
    # unacknowledged; by the kernel's defaults the first takes two hours and the second a quarter of one.
    # Small messages must not wait for each other: a worker is idle until it has its next tasks.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
