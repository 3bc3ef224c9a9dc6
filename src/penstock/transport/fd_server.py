"""Server of file descriptors of device memory for processes of the same user, on a Unix socket.

In: requests for a generation. Out: descriptors, in order, in several messages.
Not here: the memory of the descriptors (`cuda_ipc`).

Abstract addresses, so no file is left behind. Both ends check the other's credentials.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

from penstock.errors import DestinationError, PeerLost, PenstockError, SourceStalled, StaleDescriptor
from penstock.net.admission import Admission, Connection, ConnectionLimits
from penstock.net.listener import ThreadedListener
from penstock.net.unix_sockets import peer_credentials

_PER_MESSAGE = 64
"""File descriptors in one message; the kernel allows 253 (SCM_MAX_FD)."""

TIMEOUT_S = 10.0
"""Deadline of one message, in seconds. Exporting 64 pieces of memory takes a few milliseconds."""

_LIMITS = ConnectionLimits(total=64, unproven=32, unproven_per_address=32, per_principal=48)
"""Readers of one host that connect at the same time: its devices, a few times over."""

_REQUEST = struct.Struct("<Q")
"""A request is the generation."""

Export = Callable[[int], Iterator[int]]
"""Yields the file descriptors of a generation, each closed by its receiver; StaleDescriptor if it is over."""


class FdServer:
    """A server of file descriptors; it listens from `open` to `close`.

    Args:
        name: of the endpoint; the address is made of it.
        export: makes the descriptors of a generation.
    """

    def __init__(self, name: str, export: Export) -> None:
        self.name = f"penstock-{name}"
        self._export = export
        # One export at a time: descriptors of device memory are made by driver calls, which take turns anyway.
        self._exporting = threading.Lock()

    def open(self) -> None:
        """Start to listen. DestinationError if the address cannot be bound."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            bound.bind(f"\0{self.name}")
        except OSError as error:
            bound.close()
            raise DestinationError(f"cannot listen at {self.name}: {error}") from error
        self._listener = ThreadedListener(bound, Admission(_LIMITS, name=self.name), self._serve, name=self.name)

    def _serve(self, peer: socket.socket, place: Connection, _: str) -> None:
        # Exports take turns, so all other readers may be served first.
        place.begin(place.limits.total * TIMEOUT_S)
        # The reader sees the connection end, and raises its own error with the reason that it can check.
        with contextlib.suppress(PenstockError):
            self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(TIMEOUT_S)
        request = peer.recv(_REQUEST.size)
        # Another length is no reader of ours: it sees the connection end.
        if len(request) != _REQUEST.size:
            return
        fds: list[int] = []
        self._exporting.acquire()
        try:
            for fd in self._export(_REQUEST.unpack(request)[0]):
                fds.append(fd)
                if len(fds) == _PER_MESSAGE:
                    _send(peer, fds)
            if fds:
                _send(peer, fds)
        finally:
            # Each open descriptor keeps device memory from being freed: close those that were not sent.
            for fd in fds:
                os.close(fd)
            self._exporting.release()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._listener.close()


def _send(peer: socket.socket, fds: list[int]) -> None:
    """Send the descriptors, and close ours: the kernel keeps those in flight open by itself."""
    # With as many bytes of data: a message without any would read as the end of the connection.
    socket.send_fds(peer, [bytes(len(fds))], fds)
    while fds:
        os.close(fds.pop())


def receive_fds(name: str, pid: int, generation: int, count: int, uri: str) -> Iterator[int]:
    """Yield the descriptors of a peer's generation; each is closed when the next is taken.

    Raises:
        PeerLost: no process listens there, or another process does.
        StaleDescriptor: the peer sent fewer than `count`.
        SourceStalled: the peer sent nothing for `TIMEOUT_S`.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as peer:
        peer.settimeout(TIMEOUT_S)
        try:
            peer.connect(f"\0{name}")
            # Any process can bind an abstract address: without this check another user could supply the memory.
            if peer_credentials(peer) != (pid, os.geteuid()):
                raise PeerLost(f"another process than {pid} listens at {name}", uri=uri)
            peer.send(_REQUEST.pack(generation))
            received = 0
            while received < count:
                _, fds, _, _ = socket.recv_fds(peer, _PER_MESSAGE, _PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
                received += len(fds)
                # None: the connection ended early. Too many: not the memory that the descriptor describes.
                if not fds or received > count:
                    _close_all(fds)
                    raise StaleDescriptor(f"{received} of {count} pieces of memory were received", uri=uri)
                yield from _each(fds)
        except TimeoutError as error:
            raise SourceStalled(f"no answer in {TIMEOUT_S} s", uri=uri) from error
        except OSError as error:
            raise PeerLost(f"cannot request the peer's memory: {error}", uri=uri) from error


def _each(fds: list[int]) -> Iterator[int]:
    left = fds[::-1]
    try:
        while left:
            yield left[-1]
            os.close(left.pop())
    finally:
        _close_all(left)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
