"""Server that sends file descriptors of shared memory to processes of the same user, on a Unix socket.

Each request names a generation. The descriptors are sent in order, in several messages (SCM_RIGHTS). The socket is in
the runtime directory, so every container that mounts this directory can reach it, whatever its namespaces. Client and
server check each other's user.
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
"""Request for the table of generations. No registration has this generation."""
_PER_MESSAGE = 64
"""File descriptors per message. The kernel allows 253 (SCM_MAX_FD)."""
TIMEOUT_S = 10.0
"""Seconds after which a message fails. Exporting 64 pieces of memory takes a few milliseconds."""
_LIMITS = ConnectionLimits(total=512, unproven=256, unproven_per_address=256, per_principal=500)
"""Limits for the readers of one host. Each connects once per registration, for less than 1 ms."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HINT = "raise this process's limit of open files (ulimit -n)"
_REQUEST = struct.Struct("<Q")
"""A request is the generation."""

Export = Callable[[int], Iterator[int]]
"""Yields the generation's file descriptors, which the receiver closes. Raises StaleDescriptor for an old one."""


class FdServer:
    """Server of file descriptors, which listens from `start` to `close` at `path`."""

    def __init__(self, home: RuntimeDir, export: Export) -> None:
        self._export = export
        # Export one registration at a time. Device memory is exported by driver calls, which are serialised anyway.
        self._exporting = threading.Lock()
        self._home = home
        self.path = f"{home.path}/fds.sock"
        self._listeners: list[ThreadedListener] = []
        _servers.add(self)

    @classmethod
    def start(cls, name: str, export: Export, *, abstract_name: str = "") -> FdServer:
        """Listen in a new directory of this process. `abstract_name` is a second address, for the previous release."""
        server = cls(RuntimeDir.open(), export)
        try:
            for address in filter(None, (server.path, abstract_name and f"\0{abstract_name}")):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
                    bound.bind(address)
                    # The listener takes over the descriptor, so that `with` closes nothing.
                    listener = ThreadedListener(
                        bound, Admission(_LIMITS, name=f"fds of {name}"), server._serve, name="fds"
                    )
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
        # Exports are serialised, so all other readers may be served first.
        place.begin(place.limits.total * TIMEOUT_S)
        # The reader detects the closed connection, and raises an error with the reason that it can check.
        with contextlib.suppress(PenstockError):
            self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(TIMEOUT_S)
        request = peer.recv(_REQUEST.size)
        # A request of a different length is not from our reader, so close the connection.
        if len(request) != _REQUEST.size:
            return
        generation = _REQUEST.unpack(request)[0]
        fds: list[int] = []
        # A request for the page does not wait for the lock, which a slow reader of other memory may hold.
        lock = contextlib.nullcontext() if generation == PAGE else self._exporting
        with lock:
            try:
                for fd in self._export(generation):
                    fds.append(fd)
                    if len(fds) == _PER_MESSAGE:
                        _send(peer, fds)
                if fds:
                    _send(peer, fds)
            finally:
                # An open descriptor keeps memory from being freed.
                _close_all(fds)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._home.close()

    def forget(self) -> None:
        """Close a forked child's inherited socket, which would keep readers waiting after the parent is gone."""
        for listener in self._listeners:
            listener.forget()


_servers: weakref.WeakSet[FdServer] = release_after_fork(FdServer.forget)


def _send(peer: socket.socket, fds: list[int]) -> None:
    """Send the descriptors and close ours. The kernel keeps descriptors in flight open."""
    # Send one byte per descriptor, since a message without data would look like the end of the connection.
    socket.send_fds(peer, [bytes(len(fds))], fds)
    while fds:
        os.close(fds.pop())


def receive_fds(path: str, generation: int, count: int, uri: str) -> Generator[int]:
    """Yield `count` descriptors of a peer's generation. Each descriptor is closed when the next one is requested.

    Args:
        path: path of the peer's socket, or the abstract address of a peer of the previous release.
        generation: generation of a registration, or `PAGE` for the table of generations.

    Raises:
        ConfigError: the peer's descriptor has no socket.
        PermissionDenied: the socket or the listening process belongs to another user.
        PeerLost: no process listens at `path`.
        StaleDescriptor: the peer sent fewer than `count` descriptors.
        SourceStalled: the peer sent nothing for `TIMEOUT_S`.
        DestinationError: this process cannot open more files.
    """
    if not path:
        hint = "restart the peer with this release"
        raise ConfigError("the peer's release does not send file descriptors for its memory", uri=uri, hint=hint)
    # Check the path, since a peer could name any socket of this user.
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
                # The kernel dropped descriptors for which this process has no free number.
                if flags & socket.MSG_CTRUNC and len(fds) < _PER_MESSAGE:
                    _close_all(fds)
                    raise DestinationError("no file descriptor is left for the peer's memory", uri=uri, hint=_HINT)
                # No descriptors mean an early close of the connection. Extra descriptors match no described memory.
                if not fds or received > count:
                    _close_all(fds)
                    raise StaleDescriptor(f"the peer sent {received} of {count} file descriptors", uri=uri)
                yield from _each(fds)
    except PenstockError:
        # Some of these errors are OSErrors too, and must not be converted below.
        raise
    except TimeoutError as error:
        raise SourceStalled(f"the peer did not send its memory in {TIMEOUT_S} s", uri=uri) from error
    except PermissionError as error:
        raise PermissionDenied(f"cannot request the peer's memory: {error}", uri=uri) from error
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise _shortage(error, uri) from error
        hint = "if the peer is running, its runtime directory is not mounted here"
        raise PeerLost(f"cannot request the peer's memory: {error}", uri=uri, hint=hint) from error


def receive_fd(path: str, generation: int, uri: str) -> int:
    """Return the only descriptor of a peer's generation. The caller closes it. Raises like `receive_fds`."""
    with closing(receive_fds(path, generation, 1, uri)) as fds:
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
