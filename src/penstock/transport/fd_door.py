"""Hands file descriptors of device memory to processes of the same user: a Unix socket with a thread behind it.

In: who is asked for which generation. Out: descriptors, in order, some at a time.
Not here: what they are descriptors of (`cuda_ipc`).

Abstract addresses, so nothing is left in a file system. Both ends look at the other's credentials.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

from penstock.errors import DestinationError, PeerLost, PenstockError, SourceStalled, StaleDescriptor
from penstock.net.peercred import is_same_user, peer_credentials

_PER_MESSAGE = 64
"""Descriptors a message; the kernel allows 253 (SCM_MAX_FD)."""

TIMEOUT_S = 10.0
"""For one message. Exporting 64 pieces of memory takes a few milliseconds."""

_ASK = struct.Struct("<Q")

Export = Callable[[int], Iterator[int]]
"""Descriptors of a generation, each closed by whoever takes it; StaleDescriptor if it is over."""


class FdDoor:
    """Listens from `open` to `close`."""

    def __init__(self, name: str, export: Export) -> None:
        self.name = f"penstock-{name}"
        self._export = export

    def open(self) -> None:
        """Start to listen. DestinationError if the address cannot be had."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            raise DestinationError(f"cannot listen at {self.name}: {error}") from error
        threading.Thread(target=self._serve, name=self.name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return  # closed
            with closing(peer):
                try:
                    self._answer(peer)
                except (OSError, PenstockError):
                    continue  # the asker, who sees the connection end, or is gone, is told by its own side

    def _answer(self, peer: socket.socket) -> None:
        if not is_same_user(peer):
            return  # not waited for: others' questions would wait, too
        peer.settimeout(TIMEOUT_S)
        asked = peer.recv(_ASK.size)
        if len(asked) != _ASK.size:
            return
        held: list[int] = []
        try:
            for fd in self._export(_ASK.unpack(asked)[0]):
                held.append(fd)
                if len(held) == _PER_MESSAGE:
                    _send(peer, held)
            if held:
                _send(peer, held)
        finally:
            for fd in held:
                os.close(fd)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        except OSError:
            return
        finally:
            self._socket.close()


def _send(peer: socket.socket, fds: list[int]) -> None:
    socket.send_fds(peer, [bytes(len(fds))], fds)
    while fds:
        os.close(fds.pop())


def receive_fds(name: str, pid: int, generation: int, count: int, uri: str) -> Iterator[int]:
    """Descriptors of a peer's generation, one by one; each is closed when the next is asked for.

    Raises:
        PeerLost: nobody listens there, or another process does.
        StaleDescriptor: the peer gave fewer than `count`.
        SourceStalled: the peer said nothing for `TIMEOUT_S`.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as peer:
        peer.settimeout(TIMEOUT_S)
        try:
            peer.connect(f"\0{name}")
            if peer_credentials(peer) != (pid, os.geteuid()):
                raise PeerLost(f"another process than {pid} listens at {name}", uri=uri)
            peer.send(_ASK.pack(generation))
            received = 0
            while received < count:
                _, fds, _, _ = socket.recv_fds(peer, _PER_MESSAGE, _PER_MESSAGE, socket.MSG_CMSG_CLOEXEC)
                received += len(fds)
                if not fds or received > count:
                    _close_all(fds)
                    raise StaleDescriptor(f"{received} of {count} pieces of memory were given", uri=uri)
                yield from _each(fds)
        except TimeoutError as error:
            raise SourceStalled(f"no answer in {TIMEOUT_S} s", uri=uri) from error
        except OSError as error:
            raise PeerLost(f"the peer cannot be asked for its memory: {error}", uri=uri) from error


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
