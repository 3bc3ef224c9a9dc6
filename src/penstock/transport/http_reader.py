"""The reader's end of the `http` transport: reads, cut into parts.

In: runs of a peer's region, where they go. Out: bytes in place, or why not.
Not here: the connections that carry parts (`http_peer`), the server (`http.server`), handles and descriptors (`http`).

    Read -> parts -> the peer's queue -> Carrier threads, a kept-alive connection each -> the destination's memory

A part whose connection ends is asked for again from where it stopped, by another connection: the answer to that tells
a fence (410) and a dead peer (refused) from a connection that merely ended.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, SourceStalled
from penstock.http.connection import MAX_RUNS, ReadRequest, Wire, advance
from penstock.net.peercred import connect_unix
from penstock.segments import Segments, gathered
from penstock.types import MIB

if TYPE_CHECKING:
    from penstock.transport.http_peer import Peer

PART_BYTES = 32 * MIB
"""What one request asks for, so that connections share a read. Source: benchmarks/results/cpu2_202611/hosts.md."""
CONNECT_S = 10.0
"""For a connection to be made."""
LETTING_GO_S = 5.0
"""For threads to take their hands off memory, once their connections are cut; they need microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a peer serves: `host` and `port`, or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False

    def connect(self, trust: ssl.SSLContext | None) -> socket.socket:
        """A connection. OSError if there is none to be had."""
        if self.path:
            return connect_unix(self.path, CONNECT_S)
        sock = socket.create_connection((self.host, self.port), timeout=CONNECT_S)
        if not self.is_tls:
            return sock
        try:
            context = trust or ssl.create_default_context()
            return context.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


class Part:
    """One request: runs left to ask for, and views left to fill."""

    def __init__(self, read: Read, src: list[int], length: list[int], views: list[memoryview]) -> None:
        self.read, self.src, self.length, self.views = read, src, length, views

    def front(self, nbytes: int | None) -> tuple[list[int], list[int]]:
        """Offsets and bytes of its first runs, together at most so many bytes; None: of all."""
        if nbytes is None or sum(self.length) <= nbytes:
            return self.src, self.length
        length: list[int] = []
        for run in self.length:
            length.append(min(run, nbytes))
            nbytes -= length[-1]
            if not nbytes:
                break
        return self.src[: len(length)], length

    def took(self, nbytes: int) -> None:
        """These first bytes are in place."""
        advance(self.views, nbytes)
        done = 0
        for length in self.length:
            if nbytes < length:
                break
            nbytes -= length
            done += 1
        del self.src[:done], self.length[:done]
        if nbytes:
            self.src[0] += nbytes
            self.length[0] -= nbytes


class Read:
    """See `Pending`. Its parts are cut by `cut_into_parts`."""

    def __init__(self, *, generation: int, request: ReadRequest, uri: str, nbytes: int, owners: object) -> None:
        self.generation, self.request, self.uri, self.nbytes = generation, request, uri, nbytes
        self.moved_bytes, self.num_left = 0, 0
        self.changed = threading.Condition()
        self.error: PenstockError | None = None
        self._receiving: set[Wire] = set()
        self._owners = owners

    def begin(self, wire: Wire) -> bool:
        """A carrier is about to receive; False if nobody wants it to."""
        with self.changed:
            if self.error is None:
                self._receiving.add(wire)
            return self.error is None

    def end(self, wire: Wire) -> None:
        """It touches the memory no more."""
        with self.changed:
            self._receiving.discard(wire)
            self.changed.notify_all()

    def gained(self, nbytes: int) -> None:
        """Bytes are in place."""
        with self.changed:
            self.moved_bytes += nbytes

    def finished_part(self) -> None:
        """One part is in place and sealed."""
        with self.changed:
            self.num_left -= 1
            if not self.num_left:
                self._owners = None
                self.changed.notify_all()

    def fail(self, error: PenstockError) -> None:
        """The first error stays; connections under way are cut."""
        with self.changed:
            if self.error is not None or not self.num_left:
                return
            self.error = error
            receiving = list(self._receiving)
            self.changed.notify_all()
        for wire in receiving:
            wire.cut()

    def wait(self, peer: Peer, stall_s: float) -> None:
        """See `Transport.wait`."""
        began = time.monotonic()
        with self.changed:
            while self.num_left and self.error is None:
                left = max(began, peer.progress_at) + stall_s - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            is_stalled = self.num_left and self.error is None
        if is_stalled:
            self.fail(SourceStalled(f"no byte arrived for {stall_s} s", uri=self.uri))
        with self.changed:
            if self.error is None:
                return
            self.changed.wait_for(lambda: not self._receiving, LETTING_GO_S)
            self._owners = None
            self.error.mutated = self.moved_bytes > 0
            raise self.error


def cut_into_parts(read: Read, memory: memoryview, segments: Segments) -> list[Part]:
    """The parts of a read: neighbours joined, long runs split, about `PART_BYTES` and at most `MAX_RUNS` each."""
    rows, parts = segments.joined().cut(PART_BYTES), []
    for which in gathered(rows.nbytes, PART_BYTES, most_rows=MAX_RUNS):
        some = rows[which]
        ends = zip(some.dst.tolist(), (some.dst + some.nbytes).tolist(), strict=True)
        views = [memory[start:stop] for start, stop in ends]
        parts.append(Part(read, some.src.tolist(), some.nbytes.tolist(), views))
    read.num_left = len(parts)
    return parts
