"""Peer credentials: the process and the user at the other end of a Unix socket.

In: a connected Unix socket. Out: its peer's process id and user id, as the kernel recorded them at `connect`.
Not here: tokens and grants (`hub.auth`, `hub.grants`), which are for sockets that other hosts can reach.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.005
"""Pause between two attempts to connect to a socket whose backlog is full; the listener accepts within microseconds."""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a connected Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(sock: socket.socket) -> int:
    """Return the user id at the other end of a connected Unix socket."""
    return peer_credentials(sock)[1]


def is_same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a connected Unix socket is this process's user, or root."""
    # Root can read this process's memory anyway; refusing it would protect nothing.
    return peer_uid(sock) in {os.geteuid(), 0}


def connect_unix(address: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix stream socket of this user.

    Args:
        address: a path, or an abstract name that starts with a NUL byte.

    Raises:
        PermissionError: another user listens there; nothing was sent.
        TimeoutError: the listener's backlog stayed full. OSError: no process listens there.
    """
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(address)
                break
            except BlockingIOError:
                # With a timeout set, a full backlog is EAGAIN at once instead of a wait. Source: connect(2), AF_UNIX.
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"cannot connect to {address!r}: its backlog stayed full") from None
                time.sleep(_RETRY_S)
        if not is_same_user(sock):
            message = f"user {peer_uid(sock)} listens at this socket, not user {os.geteuid()}"
            raise PermissionError(errno.EPERM, message, address)
    except BaseException:
        sock.close()
        raise
    return sock
