"""Messages between the coordinator of a job and its workers, as length-prefixed msgpack frames on a socket.

A worker sends `WorkerHello` and receives `JobSpec`. The worker then sends `Ready`,
`Began`, `TaskDone` and `WorkerBeat`, and receives `TaskWork` until `Stop`.

The decoder ignores unknown fields and refuses frames above the size limit. `WorkerHello` and `JobSpec` contain the
version of these messages, because nodes of a cluster may run different releases. Minor versions only
add fields. A field that changes what a worker writes, or that a worker must not ignore, needs a new major version.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TypeVar

import msgspec

from penstock.descriptors import limit as descriptor_limit
from penstock.engine.trace import Span
from penstock.errors import MALFORMED, FormatError, PeerLost, PlanError
from penstock.net.admission import Admission, ConnectionLimits
from penstock.net.listener import GuardedListener

MAX_FRAME_BYTES = 64 << 20
"""Maximum size of a frame in bytes. A task has 8 bytes of digests for each leaf, so this is sufficient for a task of
two terabytes."""
HELLO_BYTES = 4096
"""Maximum size in bytes of a message from a peer that has not identified itself."""
HELLO_S = 5.0
"""Time in seconds within which the peer of a new connection must send its `WorkerHello`."""
JOB_PROTOCOL = "1.0"
"""The version of these messages. The field's default is "1.0" in all releases. Defaults are not sent, because the first
release refused unknown fields."""
EXECUTORS = ("fetch", "compute", "send")
"""The executors of a worker, in the order in which a task passes through them."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="job"):
    """The specification of a job, from which every process plans the same `ConversionJob`."""

    sources: tuple[str, ...]
    operation: tuple[dict[str, object], ...]
    """The operations in order, each as `{"op": name, ...}`. See `operations.spec`."""
    key: str
    """Key of the job that the coordinator planned. A worker refuses to work if its plan has a different key."""
    directory: str
    """Directory to which the output's files are written."""
    task_bytes: int
    shard_bytes: int
    leaf_bytes: int
    memory_bytes: int
    """Limit in bytes on the host memory of one worker's tasks."""
    stall_s: float
    storage_options: dict[str, str] = {}
    verify: bool = True
    """Whether workers compare the bytes that they read with the sources' digests."""
    trace: bool = False
    """Whether beats contain trace spans."""
    reports_cached: bool = False
    """Whether workers report the tasks whose input is in their cache. This is useful if they may be on several
    hosts."""
    in_memory: bool = False
    """Whether `directory` is a single region of memory instead of a directory with files."""
    protocol: str = "1.0"


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """The first message of a worker, which contains a secret, because any process may connect."""

    # Keep these fields in every version, so that a worker with a different version can still identify itself.
    worker: str
    secret: str
    device: str
    protocol: str = "1.0"


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Reports that the worker has planned the job and can accept tasks."""

    key: str
    at: str = ""
    """Identity of the cache that the worker uses, which is the same for all workers that share the cache. Empty without
    a cache."""
    holds: list[int] = []
    """Tasks whose input is at least half in that cache."""


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """Reports that the worker now runs the operation on a task or copies the task's bytes."""

    task: int


class TaskDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Reports that a task's bytes are written."""

    task: int
    digests: bytes
    """Digests of the task's pieces in order, as little-endian uint64."""
    fetched_bytes: int = 0
    asked_bytes: int = 0
    """The same counts as in `WorkerBeat`, at the end of the task. If the worker dies, only its reads for unfinished
    tasks are not counted."""


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A worker's progress and statistics, sent every `BEAT_S`."""

    moved_bytes: int
    """Number of bytes read and written so far."""
    num_reports: int = 0
    """Number of progress reports from the operation so far."""
    fetched_bytes: int = 0
    """Number of bytes read from the sources. With a cache this includes whole chunks, and headers."""
    asked_bytes: int = 0
    """Number of bytes requested, from the sources or from a cache."""
    busy_s: dict[str, float]
    """Busy time of each executor in seconds."""
    peak_bytes: int = 0
    """Peak host memory of the worker's tasks in bytes."""
    spans: list[Span] = []
    """Trace spans since the previous beat."""
    clock: float = 0.0
    """`time.perf_counter()` on the worker's host when the beat was sent. Spans use the same clock."""


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
    """Tasks to run in order, and previously assigned tasks that the worker may skip."""

    tasks: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Tells the worker to exit, because no tasks remain."""


class _Announced(msgspec.Struct):
    """The version field of a message, whose other fields may be unknown."""

    protocol: str = JOB_PROTOCOL


def check_version(protocol: str, them: str, us: str) -> None:
    """Raise PlanError if the messages of another process have a different major version."""
    if protocol.partition(".")[0] != JOB_PROTOCOL.partition(".")[0]:
        message = f"{them} speaks job protocol {protocol[:16]}, {us} speaks {JOB_PROTOCOL}: their major versions differ"
        raise PlanError(message, hint="install the same release of Penstock on all nodes of the conversion")


FromWorker = WorkerHello | Ready | Began | TaskDone | WorkerBeat | TaskFailure
ToWorker = JobSpec | TaskWork | Stop
T = TypeVar("T")

_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class Wire:
    """One end of a connection between coordinator and worker. Any thread may send, but only one thread may receive.

    Attributes:
        max_frame_bytes: maximum size of a received message in bytes. Longer messages are refused.
    """

    def __init__(self, connection: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self.max_frame_bytes = max_frame_bytes
        # Executor threads send results while another thread sends beats, and two frames must not interleave.
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: FromWorker | ToWorker) -> None:
        """Send a complete message. Raise PeerLost if the connection is lost."""
        raw = msgspec.msgpack.encode(message)
        with self._sending:
            try:
                self._socket.sendall(len(raw).to_bytes(4, "little") + raw)
            except OSError as error:
                raise PeerLost(
                    f"lost the connection to another process of the job: {error.strerror or error}"
                ) from error

    def is_readable(self, timeout_s: float) -> bool:
        """Return whether bytes can be read within `timeout_s`."""
        # Use `poll`, because `select` cannot wait for descriptors above 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def from_worker(self) -> list[FromWorker]:
        """Wait for bytes from a worker, and return the complete messages, of which there may be none.

        Raises:
            PeerLost: the connection is lost.
            FormatError: the bytes are not a message.
            PlanError: the message has a different major version.
        """
        return self._decoded(_FROM_WORKER)

    def to_worker(self) -> list[ToWorker]:
        """Return the messages received from the coordinator. See `from_worker`."""
        return self._decoded(_TO_WORKER)

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        try:
            part = self._socket.recv(1 << 20)
        except OSError as error:
            raise PeerLost(f"lost the connection to another process of the job: {error.strerror or error}") from error
        if not part:
            raise PeerLost("lost the connection to another process of the job")
        # Decode the complete messages, and keep the bytes of an incomplete message.
        self._received += part
        messages = []
        while len(self._received) >= 4:
            stop = 4 + int.from_bytes(self._received[:4], "little")
            # Check the length before the whole frame arrives, because a large frame could fill this process's memory.
            if stop > 4 + self.max_frame_bytes:
                raise FormatError(f"a message of {stop - 4} bytes exceeds the limit of {self.max_frame_bytes} bytes")
            if len(self._received) < stop:
                break
            raw = bytes(self._received[4:stop])
            try:
                messages.append(decoder.decode(raw))
            except MALFORMED as error:
                with contextlib.suppress(*MALFORMED):
                    announced = msgspec.msgpack.decode(raw, type=_Announced)
                    check_version(announced.protocol, "the other process of the job", "this one")
                raise FormatError(f"invalid message from another process of the job: {error}") from error
            del self._received[:stop]
        return messages

    def shut_down(self) -> None:
        """Shut the connection down, so that a thread that waits for messages raises PeerLost. Idempotent."""
        # An error means that the connection is already closed.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def listen(host: str | None, name: str) -> tuple[GuardedListener, str]:
    """Listen for workers, with limits on the connections. Return the listener and its address.

    Args:
        host: address of this host. None means that all workers are processes of this user on this host.
        name: a name that no other job uses.
    """
    # Use half of the file descriptors, because the rest of this process uses file descriptors too.
    limits = msgspec.structs.replace(ConnectionLimits.for_descriptors(descriptor_limit() // 2), head_s=HELLO_S)
    if host is not None:
        bound = socket.create_server((host, 0))
        address = f"tcp:{host}:{bound.getsockname()[1]}"
    else:
        # An abstract socket has no file that could remain, but also no file mode, so the listener checks each peer's
        # user.
        bound, socket_name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"penstock-job-{name}"
        bound.bind(f"\0{socket_name}")
        address = f"unix:{socket_name}"
    # Limit the connections that have not sent the secret, so that strangers cannot exhaust the file descriptors.
    listener = GuardedListener(bound, Admission(limits, name="job"))
    listener.listen()
    return listener, address


def end_with_peer(connection: socket.socket, stall_s: float) -> None:
    """Make a connection to another host fail if that host does not respond for `stall_s`."""
    # A host that loses power sends no FIN. Keep-alive detects the loss on an idle connection, and TCP_USER_TIMEOUT
    # detects it while data is unacknowledged. The kernel's defaults are two hours and a quarter of an hour. TCP_NODELAY
    # avoids delays for small messages, because a worker is idle until its next tasks arrive.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
