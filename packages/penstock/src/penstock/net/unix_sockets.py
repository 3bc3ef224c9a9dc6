"""This user's Unix sockets: the peer's credentials, connecting, and the runtime directory for sockets.

The runtime directory contains a file `host-BOOT` with the host's id, and for each process a directory `p-XXXXXXXX` with
its sockets and the file `alive`, which is locked while the process is alive. Containers that mount the same directory
can connect to each other's sockets. PIDs are never compared, because they mean nothing in another PID namespace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from penstock import descriptors
from penstock.config import runtime_dir
from penstock.errors import ConfigError, PenstockError
from penstock.lifecycle import release_after_fork

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of Linux: process id, user id, group id. Source: unix(7)."""
_RETRY_S = 0.005
"""Seconds between two attempts to connect if the backlog is full. A listener accepts within microseconds."""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the PID (0 in another PID namespace) and user id of a connected Unix socket's peer."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the peer of a connected Unix socket."""
    return peer_credentials(sock)[1]


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the peer of a connected Unix socket runs as this process's user or as root."""
    # Refusing root would protect nothing, since root can read the memory of any process.
    return peer_uid(sock) in {os.geteuid(), 0}


def connect_unix(address: str, timeout_s: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to a Unix socket of this user. `address` is a path, or an abstract name that starts with NUL.

    Raises PermissionError if another user listens there, TimeoutError if the backlog stayed full, or OSError.
    """
    deadline = time.monotonic() + timeout_s
    sock = descriptors.retried(lambda: socket.socket(socket.AF_UNIX, kind))
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(address)
                break
            except BlockingIOError:
                # With a timeout set, connect returns EAGAIN if the backlog is full. Source: connect(2), AF_UNIX.
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"cannot connect to {address!r}: its backlog stayed full") from None
                time.sleep(_RETRY_S)
        # Any user can bind a path in a shared directory, or an abstract name, while the owner's process is not running.
        if not is_same_user(sock):
            message = f"user {peer_uid(sock)} listens at this socket, not user {os.geteuid()}"
            raise PermissionError(errno.EPERM, message, address)
    except BaseException:
        sock.close()
        raise
    return sock


_NAMES = frozenset({"peer.sock", "fds.sock", "data.sock", "door.sock"})
"""Names of the sockets that processes announce. `door.sock` is the server of the previous release."""


def private_socket_fault(path: str) -> str:
    """Return why a Unix socket does not belong to a Penstock process of this user, or "" if it does.

    Other programs, such as an SSH agent or a container engine, also have sockets. Without this check, a member that
    claims to be on this host could direct requests to those sockets.
    """
    place = Path(path)
    if place.name not in _NAMES or not _DIRECTORY.fullmatch(place.parent.name):
        return "its name is not that of a member's socket"
    # Allow root, which can replace any socket anyway and runs system services.
    users = {os.geteuid(), 0}
    # Use lstat, because a symlink could lead to any socket of this user.
    try:
        status, parent, lock = os.lstat(path), os.lstat(place.parent), os.lstat(place.parent / _LOCK)
    except OSError as error:
        return error.strerror or "its status cannot be read"
    if not stat.S_ISREG(lock.st_mode) or lock.st_uid not in users:
        return "its directory does not belong to a member"
    if not stat.S_ISSOCK(status.st_mode):
        return "it is not a socket"
    if status.st_uid not in users or parent.st_uid not in users:
        return "it belongs to another user"
    if not stat.S_ISDIR(parent.st_mode) or parent.st_mode & 0o077:
        return "its directory is not private, so other users could replace the socket"
    return ""


_LONGEST_NAME = "/p-XXXXXXXX/peer.sock"
"""Longest name of a socket in the runtime directory."""
_ADDRESS = re.compile(r"/[!-~]*")
"""Paths that members accept in the address of a peer. See `hub.address`."""
_MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket's path. Source: unix(7)."""


@contextlib.contextmanager
def runtime_files(directory: Path) -> Iterator[None]:
    """Map an OSError in the runtime directory to a ConfigError that names the setting to change."""
    try:
        yield
    except PenstockError:
        # Some Penstock errors are also OSErrors.
        raise
    except OSError as error:
        if error.errno in descriptors.SHORTAGES:
            raise descriptors.exhausted(error) from error
        raise ConfigError(
            f"cannot use the runtime directory: {error}", uri=str(directory), hint=_SET_RUNTIME_DIR
        ) from error


_SET_RUNTIME_DIR = "set PENSTOCK_RUNTIME_DIR to a directory of this user on a writable file system with free space"


def private_directory(directory: Path | None = None) -> Path:
    """Create the runtime directory if needed, check that only this user can access it, and return it.

    Args:
        directory: None means the user's runtime directory. See `config.runtime_dir`.

    Raises:
        ConfigError: the directory cannot be created or is open to others, or its path is too long for a socket or is
            not printable ASCII without spaces.
    """
    # Use an absolute path, because the process may change its working directory.
    directory = (directory or runtime_dir()).absolute()
    if not _ADDRESS.fullmatch(str(directory)):
        message = f"{str(directory)!r} has characters that a socket's address cannot have"
        raise ConfigError(message, hint="set PENSTOCK_RUNTIME_DIR to a path of printable ASCII without spaces")
    if len(os.fsencode(directory)) + len(_LONGEST_NAME) > _MAX_PATH_BYTES:
        raise ConfigError(f"{directory} is too long to hold a Unix socket", hint="set PENSTOCK_RUNTIME_DIR")
    # Use lstat, because a symlink could lead to another user's directory.
    with runtime_files(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not a private directory of this user", hint="chmod 700 it, or set PENSTOCK_RUNTIME_DIR"
        )
    return directory


def pid_namespace() -> int:
    """Return the number of this process's PID namespace, which is unique among existing PID namespaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise ConfigError(f"sharing memory on one host needs /proc: {error}") from error


def _boot_id() -> str:
    try:
        # Use the boot id, because host names are not unique among containers.
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"sharing memory on one host needs /proc: {error}") from error


def namespace_id() -> str:
    """Return the id of this PID namespace, which the previous release reports as the host's id."""
    return f"{_boot_id()}/{pid_namespace()}"


def host_id() -> str:
    """Return an id that is equal for processes with the same boot and runtime directory, which may share memory.

    A peer's id is only a claim until a connection to the peer's socket proves it. Raises ConfigError without /proc, or
    as `private_directory` does.
    """
    boot = _boot_id()
    # The directory may be older than this boot, and several hosts may mount it.
    directory = private_directory()
    path = directory / f"host-{boot}"
    with runtime_files(directory):
        if not path.exists():
            fd, new = tempfile.mkstemp(prefix=".host-", dir=directory)
            try:
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    # The first process writes its id, and all other processes use that id.
                    file.write(namespace_id())
                # A hard link fails if the file exists already. A rename would replace an id that was already reported.
                with contextlib.suppress(FileExistsError):
                    os.link(new, path)
            finally:
                os.unlink(new)
        return path.read_text(encoding="ascii")


_PREFIX = "p-"
_DIRECTORY = re.compile(r"(p|penstock-member)-[a-z0-9_]{8}")
"""Names from `tempfile.mkdtemp`. The second form is from the previous release."""
_LOCK = "alive"
"""Name of the locked file in each directory."""


class RuntimeDir:
    """A new private directory for sockets, inside the runtime directory and locked while this process is alive."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._closer = weakref.finalize(self, _remove, path, fd)
        _directories.add(self)

    @classmethod
    def open(cls) -> RuntimeDir:
        """Create a new directory and lock it. Raises ConfigError as `private_directory` does."""
        parent = private_directory()
        _sweep(parent)
        with runtime_files(parent):
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = path / f"{_LOCK}.new"
            fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            directory = cls(path, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Lock the file before it gets its name, because another process must never find it unlocked.
            new.rename(path / _LOCK)
        return directory

    def close(self) -> None:
        """Remove the directory and release its lock. Does nothing in a forked child. Idempotent."""
        self._closer()

    def forget(self) -> None:
        """In a forked child, leave the directory to the parent, and release its lock."""
        if self._closer.detach():
            os.close(self._fd)


_directories: weakref.WeakSet[RuntimeDir] = release_after_fork(lambda directory: directory.forget())


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def _sweep(parent: Path) -> None:
    """Remove directories in `parent` that belong to dead processes of this user."""
    for path in parent.glob(f"{_PREFIX}*"):
        # The directory may be in use, be incomplete, or belong to another user.
        with contextlib.suppress(OSError):
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
