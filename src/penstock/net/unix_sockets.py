"""Unix sockets of this user: credentials of the other end, connecting, and a private directory to put sockets in.

In: a socket or an address. Out: the process and user at the other end, as the kernel recorded them at `connect`.
Not here: tokens and grants (`hub.auth`, `hub.grants`), which are for sockets that other hosts can reach; the files of
this host's hub (`hub.local_hub`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of Linux: process id, user id, group id. Source: unix(7)."""
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
        # A path in a shared directory, or an abstract name, can be taken by any user while its owner is away.
        if not is_same_user(sock):
            message = f"user {peer_uid(sock)} listens at this socket, not user {os.geteuid()}"
            raise PermissionError(errno.EPERM, message, address)
    except BaseException:
        sock.close()
        raise
    return sock


_PREFIX = "penstock-member-"
_LOCK = "alive"
"""Name of the locked file in each directory."""


class RuntimeDir:
    """A temporary directory with mode 0700, made by the constructor, and locked while this process lives.

    The kernel releases the lock when the process ends in any way, so the lock tells whether the owner still lives.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_LOCK}.new"
        self._fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        # Renamed only once it is locked: a sweep of another process must never see the lock file unlocked.
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the directory and release its lock. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _sweep(parent: Path) -> None:
    """Remove the runtime directories that dead processes of this user left in `parent`."""
    for path in parent.glob(f"{_PREFIX}*"):
        # An OSError: the directory has no lock file yet (it is being made), belongs to another user, or is in use.
        with contextlib.suppress(OSError):
            # Any user can put a directory of this name into /tmp, with a link to a file of ours in it.
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
