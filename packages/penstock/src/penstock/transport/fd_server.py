"""Server of file descriptors of shared memory for processes of the same user, on a Unix socket.

In: requests for a generation. Out: descriptors, in order, in several messages (SCM_RIGHTS).
Not here: the memory of the descriptors (`host_endpoint`, `shm`, `cuda_ipc`).

The socket is in the runtime directory, so it is reached from every container that mounts this directory, whatever
namespaces it has. Both ends check the other's user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from penstock.descriptors import hint_of
from penstock.errors import (
    ConfigError,
    DestinationError,
    PeerLost,
    PenstockError,
    PermissionDenied,
    SourceStalled,
    StaleDescriptor,
)
from penstock.lifecycle import release_after_fork
from penstock.net.admission import Admission, Connection, ConnectionLimits
from penstock.net.listener import ThreadedListener
from penstock.net.unix_sockets import RuntimeDir, connect_unix, private_socket_fault

PAGE = 0
"""The request for the table of generations; no registration has this generation."""

_PER_MESSAGE = 64
"""File descriptors in one message; the kernel allows 253 (SCM_MAX_FD)."""

TIMEOUT_S = 10.0
"""Deadline of one message, in seconds. Exporting 64 pieces of memory takes a few milliseconds."""

_LIMITS = ConnectionLimits(total=512, unproven=256, unproven_per_address=256, per_principal=500)
"""Readers of one host that connect at the same time: each connects once for a registration, for less than 1 ms."""

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HINT = "raise this process's limit of open files (ulimit -n)"

_REQUEST = struct.Struct("<Q")
"""A request is the generation."""

Export = Callable[[int], Iterator[int]]
"""Yields the file descriptors of a generation, each closed by its receiver; StaleDescriptor if it is over."""


class FdServer:
    """A server of file descriptors, from `start` to `close`.

    Attributes:
        path: Path of the socket.
    """

    def __init__(self, home: RuntimeDir, export: Export) -> None:
        self._export = export
        # One export at a time: descriptors of device memory are made by driver calls, which take turns anyway.
        self._exporting = threading.Lock()
        self._home = home
        self.path = f"{home.path}/fds.sock"
        self._listeners: list[ThreadedListener] = []
        _servers.add(self)

    @classmethod
    def start(cls, name: str, export: Export, *, abstract_name: str = "") -> FdServer:
        """Listen in a new directory of this process.

        Args:
            name: Name of the endpoint, for logs.
            export: Makes the descriptors of a generation.
            abstract_name: Abstract address to listen at as well, for readers of the previous release. Empty if there
                is no such address.

        Raises:
            ConfigError: as `RuntimeDir`. DestinationError: the socket cannot be made.
        """
        server = cls(RuntimeDir.open(), export)
        try:
            for address in filter(None, (server.path, abstract_name and f"\0{abstract_name}")):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
                    bound.bind(address)
                    admission = Admission(_LIMITS, name=f"fds of {name}")
                    # It takes the descriptor, so that nothing is left for `with` to close.
                    listener = ThreadedListener(bound, admission, server._serve, name="fds")
                listener.start()
                server._listeners.append(listener)
        except DestinationError:
            server.close()
            raise
        except OSError as error:
            server.close()
            raise DestinationError(f"cannot listen at {server.path}: {error}", hint=hint_of(error)) from error
        return server

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
        generation = _REQUEST.unpack(request)[0]
        fds: list[int] = []
        # The page does not wait for pieces that another reader is slow to take.
        turn = contextlib.nullcontext() if generation == PAGE else self._exporting
        with turn:
            try:
                for fd in self._export(generation):
                    fds.append(fd)
                    if len(fds) == _PER_MESSAGE:
                        _send(peer, fds)
                if fds:
                    _send(peer, fds)
            finally:
                # Each open descriptor keeps memory from being freed: close those that were not sent.
                for fd in fds:
                    os.close(fd)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._home.close()

    def forget(self) -> None:
        """In a forked child: a copy of the socket would keep readers waiting when the parent is gone."""
        for listener in self._listeners:
            listener.forget()


_servers: weakref.WeakSet[FdServer] = release_after_fork(lambda server: server.forget())


def _send(peer: socket.socket, fds: list[int]) -> None:
    """Send the descriptors, and close ours: the kernel keeps those in flight open by itself."""
    # With as many bytes of data: a message without any would read as the end of the connection.
    socket.send_fds(peer, [bytes(len(fds))], fds)
    while fds:
        os.close(fds.pop())


def receive_fds(path: str, generation: int, count: int, uri: str) -> Generator[int]:
    """Yield the descriptors of a peer's generation; each is closed when the next is taken.

    Args:
        path: of the peer's socket; of the previous release, its abstract address.
        generation: of a registration; `PAGE`: the one descriptor of the peer's table of generations.
        count: number of descriptors.
        uri: the peer's name in errors.

    Raises:
        ConfigError: the peer's descriptor names no socket.
        PermissionDenied: the socket or the process that listens there is another user's.
        PeerLost: no process listens there.
        StaleDescriptor: the peer sent fewer than `count`.
        SourceStalled: the peer sent nothing for `TIMEOUT_S`.
        DestinationError: this process can open no more files.
    """
    if not path:
        hint = "start the peer again with this release"
        raise ConfigError("the peer's release does not pass file descriptors of its memory", uri=uri, hint=hint)
    # As for the peer's control server: a path from a peer could lead to any socket of this user.
    if path.startswith("\0"):
        fault = "" if path.startswith("\0penstock") else "its name is not that of a member's socket"
    else:
        fault = private_socket_fault(path)
    if fault and (path.startswith("\0") or os.path.lexists(path)):
        raise PermissionDenied(f"cannot request the peer's memory at {path}: {fault}", uri=uri)
    try:
        with closing(connect_unix(path, TIMEOUT_S, socket.SOCK_SEQPACKET)) as peer:
            peer.send(_REQUEST.pack(generation))
            received = 0
            while received < count:
                _, fds, flags, _ = socket.recv_fds(peer, _PER_MESSAGE, _PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
                received += len(fds)
                # The kernel left out those for which this process has no number. Never so many by themselves: that is a
                # peer that sends more than it may.
                if flags & socket.MSG_CTRUNC and len(fds) < _PER_MESSAGE:
                    _close_all(fds)
                    raise DestinationError("no file descriptor is left for the peer's memory", uri=uri, hint=_HINT)
                # None: the connection ended early. Too many: not the memory that the descriptor describes.
                if not fds or received > count:
                    _close_all(fds)
                    raise StaleDescriptor(f"{received} of {count} pieces of memory were received", uri=uri)
                yield from _each(fds)
    except PenstockError:
        # Some of them are OSErrors too, and are final.
        raise
    except TimeoutError as error:
        raise SourceStalled(f"the peer did not send its memory in {TIMEOUT_S} s", uri=uri) from error
    except PermissionError as error:
        raise PermissionDenied(f"cannot request the peer's memory: {error}", uri=uri) from error
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise _shortage(error, uri) from error
        hint = "if the peer runs, its runtime directory is not mounted here"
        raise PeerLost(f"cannot request the peer's memory: {error}", uri=uri, hint=hint) from error


def receive_fd(path: str, generation: int, uri: str) -> int:
    """Return the only descriptor of a peer's generation, which the caller closes. Raises as `receive_fds`."""
    fds = receive_fds(path, generation, 1, uri)
    with closing(fds):
        received = next(fds)
        try:
            return os.dup(received)
        except OSError as error:
            raise _shortage(error, uri) from error


def _shortage(error: OSError, uri: str) -> DestinationError:
    return DestinationError(f"cannot receive the peer's memory: {error}", uri=uri, hint=_HINT)


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
