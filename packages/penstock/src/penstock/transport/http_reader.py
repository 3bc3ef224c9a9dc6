"""Reader of the `http` transport: reads are split into parts, which several kept-alive connections carry.

If a connection is closed, its part is requested again from where it stopped, over a different connection. The response
shows whether the memory was fenced (410), the peer is dead (refused), or only the connection was closed.
"""

from __future__ import annotations

import collections
import socket
import ssl
import threading
import time

import msgspec
import numpy as np

from penstock.errors import (
    DestinationError,
    FormatError,
    PeerLost,
    PenstockError,
    PermissionDenied,
    SourceStalled,
    StaleDescriptor,
)
from penstock.http.client import ClientConnection, connect_tcp
from penstock.http.compression import MAX_FRAME_BYTES, REQUEST_BYTES, CompressionChoice, Planes, block_bytes
from penstock.http.compression import PIECE_BYTES as TIMED_PIECE_BYTES
from penstock.http.connection import HttpConnection, advance, front
from penstock.http.head import MalformedMessage
from penstock.http.region_messages import (
    CHUNK_HEAD_BYTES,
    CODING,
    MAX_RUNS,
    PIECE_BYTES,
    TRAILER,
    TRAILER_WORD,
    ReadRequest,
    chunk_bytes,
)
from penstock.net.unix_sockets import connect_unix
from penstock.segments import Segments, gathered
from penstock.types import MIB
from penstock.waits import start_thread

PART_BYTES = 32 * MIB
"""Bytes per request, so that connections share a read. Source: benchmarks/results/cpu2_202611/hosts.md."""
CONNECT_S = 10.0
"""Seconds after which connecting fails."""
LETTING_GO_S = 5.0
"""Seconds for threads to stop writing to memory after their connections are aborted. This takes microseconds."""
IDLE_S = 15.0
"""Idle seconds after which a connection is closed. The server would close it after 60 s."""
SILENCE_S = 60.0
"""Seconds without a byte after which a connection is given up. It limits reads without a waiting thread, since others
end after their `stall_s`."""
FULL_S = 0.1
"""Seconds before a request is repeated to a peer that has no free slot for a connection."""
MAX_FRUITLESS = 3
"""Maximum number of consecutive connections for a part that are closed without a byte."""


class RegionAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a peer: `host` and `port`, or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False

    def connect(self, trust: ssl.SSLContext | None) -> socket.socket:
        """Return a connected socket. Raises OSError if the connection fails."""
        if self.path:
            return connect_unix(self.path, CONNECT_S)
        context = (trust or ssl.create_default_context()) if self.is_tls else None
        return connect_tcp(self.host, self.port, CONNECT_S, context)


class ResponsePart:
    """A part of a read that one connection carries: the missing runs, and the views that they fill."""

    def __init__(self, read: Read, src: list[int], length: list[int], views: list[memoryview]) -> None:
        self.read = read
        self.src = src
        self.length = length
        self.views = views

    def front(self, nbytes: int | None) -> tuple[list[int], list[int]]:
        """Return the first offsets and lengths, at most `nbytes` in total. None means all."""
        if nbytes is None or sum(self.length) <= nbytes:
            return self.src, self.length
        length: list[int] = []
        for run in self.length:
            length.append(min(run, nbytes))
            nbytes -= length[-1]
            if not nbytes:
                break
        return self.src[: len(length)], length

    def remove_front(self, nbytes: int) -> None:
        """Remove the first `nbytes` bytes from the part, because they have arrived."""
        advance(self.views, nbytes)
        num_done = 0
        for length in self.length:
            if nbytes < length:
                break
            nbytes -= length
            num_done += 1
        del self.src[:num_done], self.length[:num_done]
        if nbytes:
            self.src[0] += nbytes
            self.length[0] -= nbytes


class Read:
    """See `PendingRead`. `cut_into_parts` splits the read into parts, of which `num_left` have not arrived.

    `changed` guards the fields. The condition is notified when the read ends and when a connection stops using the
    memory. No part is requested after the first `error`.
    """

    peer: Peer

    def __init__(self, *, generation: int, request: ReadRequest, uri: str, nbytes: int, owners: object) -> None:
        self.generation = generation
        self.request = request
        self.uri = uri
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.num_left = 0
        self.changed = threading.Condition()
        self.error: PenstockError | None = None
        self._receiving: set[HttpConnection] = set()
        self._owners = owners

    def begin(self, wire: HttpConnection) -> bool:
        """Register a connection that is about to receive. Return False if the read has already failed."""
        # `fail` must be able to abort the connection, so that no byte is written afterwards.
        with self.changed:
            if self.error is None:
                self._receiving.add(wire)
            return self.error is None

    def end(self, wire: HttpConnection) -> None:
        """Record that a connection no longer uses the memory."""
        with self.changed:
            self._receiving.discard(wire)
            self.changed.notify_all()

    def finish_part(self) -> None:
        """Record that a part has arrived with its trailer."""
        with self.changed:
            self.num_left -= 1
            if not self.num_left:
                self._owners = None
                self.changed.notify_all()

    def fail(self, error: PenstockError) -> None:
        """Abort the read unless it is done, and close the connections that receive its bytes."""
        with self.changed:
            if self.error is not None or not self.num_left:
                return
            self.error = error
            receiving = list(self._receiving)
            self.changed.notify_all()
        # The carriers need the lock to report that they stopped using the memory.
        for wire in receiving:
            wire.cut()

    def wait(self, stall_s: float) -> None:
        """See `Transport.wait`."""
        began = time.monotonic()
        with self.changed:
            while self.num_left and self.error is None:
                left = max(began, self.peer.progress_at) + stall_s - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            is_stalled = self.num_left and self.error is None
        if is_stalled:
            self.fail(SourceStalled(f"no byte arrived for {stall_s} s", uri=self.uri))
        with self.changed:
            if self.error is None:
                return
            # The caller may free the memory now, so no thread may write to it any more.
            self.changed.wait_for(lambda: not self._receiving, LETTING_GO_S)
            self._owners = None
            self.error.mutated = self.moved_bytes > 0
            raise self.error


def cut_into_parts(read: Read, memory: memoryview, segments: Segments) -> list[ResponsePart]:
    """Split a read into parts of about `PART_BYTES` and at most `MAX_RUNS` runs. Adjacent runs are joined."""
    rows = segments.joined().cut(PART_BYTES)
    parts = []
    for indices in gathered(rows.nbytes, PART_BYTES, most_rows=MAX_RUNS):
        runs = rows[indices]
        ends = zip(runs.dst.tolist(), (runs.dst + runs.nbytes).tolist(), strict=True)
        views = [memory[start:stop] for start, stop in ends]
        parts.append(ResponsePart(read, runs.src.tolist(), runs.nbytes.tolist(), views))
    read.num_left = len(parts)
    return parts


class Peer:
    """Connections to one address, and the parts that wait for a connection."""

    def __init__(
        self, address: RegionAddress, trust: ssl.SSLContext | None, num_connections: int, choice: CompressionChoice
    ) -> None:
        self.address = address
        self.trust = trust
        self.progress_at = time.monotonic()
        self.choice = choice
        self._num_connections = num_connections
        self._queue: collections.deque[ResponsePart] = collections.deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._num_idle = 0
        self._num_threads = 0
        host = f"[{address.host}]" if ":" in address.host else address.host or "unix"
        self.host_field = ("Host", host)

    def post(self, parts: list[ResponsePart]) -> None:
        """Queue parts for the threads, and start threads up to the limit."""
        with self._changed:
            self._queue.extend(parts)
            missing = min(len(self._queue) - self._num_idle, self._num_connections - self._num_threads)
            for _ in range(missing):
                thread = threading.Thread(target=self._carry, name="penstock-http-read", daemon=True)
                try:
                    # If no further thread can start, the running threads carry the parts.
                    if not start_thread(thread, is_needed=not self._num_threads):
                        break
                except DestinationError:
                    self._queue.clear()
                    raise
                self._num_threads += 1
            self._changed.notify(len(parts))

    def close(self) -> None:
        """Clear the queue, so that idle threads stop."""
        with self._changed:
            self._is_open = False
            self._queue.clear()
            self._changed.notify_all()

    def _next(self) -> ResponsePart | None:
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._queue or not self._is_open, IDLE_S)
            self._num_idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._num_threads -= 1
            return None

    def _carry(self) -> None:
        carrier = _Carrier(self)
        try:
            while (part := self._next()) is not None:
                if part.read.error is None:
                    carrier.carry(part)
                # The memory must not stay alive while this thread waits for the next part.
                del part
        finally:
            carrier.close()


class _Full(OSError):
    """The peer has no free slot for another connection."""


class _Carrier:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._connection: ClientConnection | None = None
        self._planes = Planes()
        self._coded = memoryview(b"")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def carry(self, part: ResponsePart) -> None:
        num_fruitless = 0
        read = part.read
        while read.error is None:
            before = read.moved_bytes
            is_fresh = self._connection is None
            why = "the connection was closed"
            try:
                if self._exchange(self._connection or self._connect(read.uri), part):
                    if part.views:
                        continue
                    read.finish_part()
                    return
            except MalformedMessage as error:
                read.fail(FormatError(error.message, uri=read.uri))
            except PenstockError as error:
                read.fail(error)
            except _Full:
                # The peer is alive, so only the `stall_s` of the waiting thread limits the retries.
                is_fresh = False
            except OSError as error:
                why = str(error)
            self.close()
            # Count only new connections, since the server may have closed an idle one.
            num_fruitless = 0 if read.moved_bytes > before else num_fruitless + is_fresh
            if num_fruitless >= MAX_FRUITLESS:
                message = f"{num_fruitless} consecutive connections were closed without a byte: {why}"
                read.fail(PeerLost(message, uri=read.uri))

    def _connect(self, uri: str) -> ClientConnection:
        try:
            self._connection = ClientConnection(self._peer.address.connect(self._peer.trust), pace_s=SILENCE_S)
        except ssl.SSLError as error:
            raise PermissionDenied(f"cannot set up TLS with the peer: {error}", uri=uri) from error
        except OSError as error:
            raise PeerLost(f"cannot connect to the peer: {error}", uri=uri) from error
        return self._connection

    def _exchange(self, connection: ClientConnection, part: ResponsePart) -> bool:
        """Request and receive the part or its beginning. Return False if the connection was closed too early."""
        read, choice = part.read, self._peer.choice
        src, length = part.front(REQUEST_BYTES if choice.is_open else None)
        nbytes = sum(length)
        request = msgspec.structs.replace(
            read.request, src=np.array(src, "<i8").tobytes(), length=np.array(length, "<i8").tobytes()
        )
        if not read.begin(connection.wire):
            return False
        is_coded = choice.begin()
        fields = [self._peer.host_field, *([("Accept-Encoding", CODING)] if is_coded else [])]
        try:
            reply = connection.request(
                "POST", f"/v1/regions/{read.generation}", fields, msgspec.msgpack.encode(request), wait_s=SILENCE_S
            )
            if reply.status == 503:
                threading.Event().wait(FULL_S)
                raise _Full
            if reply.status != 200:
                raise _refusal(reply.status, read)
            if is_coded and reply.headers.get("content-encoding") == CODING:
                return self._receive_coded(connection.wire, part, nbytes)
            if is_coded:
                choice.declined()
            if reply.length != nbytes + TRAILER.size:
                raise FormatError("the response does not have the requested length", uri=read.uri)
            return self._receive(connection.wire, part, nbytes)
        finally:
            choice.end(is_coded)
            read.end(connection.wire)

    def _receive(self, wire: HttpConnection, part: ResponsePart, left: int) -> bool:
        """Receive the runs, then the trailer. Return False if the connection was closed too early."""
        peer, read = self._peer, part.read
        trailer = b""
        wire.set_pace(SILENCE_S)
        while left and read.error is None:
            views = front(part.views, min(left, TIMED_PIECE_BYTES if peer.choice.is_open else PIECE_BYTES))
            received = wire.receive_into(views)
            if not received:
                return False
            left -= received
            self._landed(part, received, received, is_coded=False)
            peer.choice.sample(views[0][:received], self._planes)
        if read.error is None:
            trailer = wire.receive_body(TRAILER.size, SILENCE_S)
            peer.progress_at = time.monotonic()
        # Without the trailer, the bytes may be from two generations.
        return trailer == TRAILER.pack(TRAILER_WORD, read.generation)

    def _receive_coded(self, wire: HttpConnection, part: ResponsePart, left: int) -> bool:
        """Receive compressed frames, one per chunk, then the trailer. Return False if the read has failed."""
        # Receive a chunk together with the next head, so that each chunk takes one call. Most links never need the
        # buffer.
        self._coded = self._coded or memoryview(bytearray(MAX_FRAME_BYTES + 2 + CHUNK_HEAD_BYTES))
        read, buffer = part.read, self._coded
        wire.set_pace(SILENCE_S)
        wire.fill(buffer[:CHUNK_HEAD_BYTES])
        nbytes = chunk_bytes(buffer[:CHUNK_HEAD_BYTES], MAX_FRAME_BYTES)
        while left and read.error is None:
            wire.fill(buffer[: nbytes + 2 + CHUNK_HEAD_BYTES])
            block = block_bytes(buffer[:nbytes])
            if block > left:
                raise FormatError("the peer sent more bytes than were requested", uri=read.uri)
            _place(front(part.views, block), block, buffer[:nbytes], self._planes)
            left -= block
            self._landed(part, block, nbytes, is_coded=True)
            nbytes = chunk_bytes(buffer[nbytes + 2 : nbytes + 2 + CHUNK_HEAD_BYTES], MAX_FRAME_BYTES)
        if read.error is not None:
            return False
        if nbytes != TRAILER.size:
            raise FormatError("the peer sent more bytes than were requested", uri=read.uri)
        wire.fill(buffer[: TRAILER.size + 2 + CHUNK_HEAD_BYTES + 2])
        self._peer.progress_at = time.monotonic()
        return bytes(buffer[: TRAILER.size]) == TRAILER.pack(TRAILER_WORD, read.generation)

    def _landed(self, part: ResponsePart, nbytes: int, wire_bytes: int, *, is_coded: bool) -> None:
        self._peer.progress_at = time.monotonic()
        part.remove_front(nbytes)
        with part.read.changed:
            part.read.moved_bytes += nbytes
        self._peer.choice.add_bytes(nbytes, wire_bytes, is_coded=is_coded)


def _place(views: list[memoryview], nbytes: int, frame: memoryview, planes: Planes) -> None:
    """Decode a frame of `nbytes` into views of the same total size. A FormatError means that nothing was written."""
    if len(views) == 1:
        planes.decode(frame, np.frombuffer(views[0], np.uint8))
        return
    if sum(map(len, views)) != nbytes:
        raise FormatError("the peer sent a compressed block that is longer than the requested runs")
    block, at = np.empty(nbytes, np.uint8), 0
    planes.decode(frame, block)
    for view in views:
        view[:] = block.data[at : at + len(view)]
        at += len(view)


def _refusal(status: int, read: Read) -> PenstockError:
    if status == 410:
        return StaleDescriptor(f"generation {read.generation} of the memory is no longer current", uri=read.uri)
    return FormatError(f"the peer refused a read: {status}", uri=read.uri)
