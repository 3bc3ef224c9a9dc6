"""Unix sockets of this user: credentials of the other end, connecting, and the runtime directory that sockets are in.

In: a socket or an address. Out: the user at the other end, as the kernel recorded it at `connect`; private directories.
Not here: tokens and grants (`hub.auth`, `hub.grants`), which are for sockets that other hosts can reach; the files of
this host's hub (`hub.local_hub`).

    RUNTIME/host-BOOT      the id of the host, as all processes that use this directory in this boot report it
    RUNTIME/p-XXXXXXXX/    sockets of one process; `alive` in it is locked while the process lives

Containers that mount one runtime directory reach each other's sockets there, although they share no namespace: a socket
with a path belongs to its file system. A process id means nothing in another PID namespace, so none is compared.
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
"""Pause between two attempts to connect to a socket whose backlog is full; the listener accepts within microseconds."""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a connected Unix socket.

    The process id is 0 where that process is not in this PID namespace.
    """
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(sock: socket.socket) -> int:
    """Return the user id at the other end of a connected Unix socket."""
    return peer_credentials(sock)[1]


def is_same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a connected Unix socket is this process's user, or root."""
    # Root can read this process's memory anyway; refusing it would protect nothing.
    return peer_uid(sock) in {os.geteuid(), 0}


def connect_unix(address: str, timeout_s: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to a Unix socket of this user.

    Args:
        address: a path, or an abstract name that starts with a NUL byte.
        kind: stream, or SOCK_SEQPACKET.

    Raises:
        PermissionError: another user listens there; nothing was sent.
        TimeoutError: the listener's backlog stayed full. OSError: no process listens there.
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


_NAMES = frozenset({"peer.sock", "fds.sock", "data.sock", "door.sock"})
"""Names of the sockets that processes announce to others: of the server, of descriptors, and of bytes. The previous
release calls the server's `door.sock`."""


def private_socket_fault(path: str) -> str:
    """Return why a Unix socket is not that of a Penstock process of this user; empty: it is.

    Other users have sockets, and so do other programs of this user (an agent of SSH, a container engine). Without this
    check a member that claims to be on this host could direct requests to any of them. Only `RuntimeDir` makes a
    directory of this name, with this file in it.
    """
    place = Path(path)
    if place.name not in _NAMES or not _DIRECTORY.fullmatch(place.parent.name):
        return "it is not named as the socket of a member"
    # Root's too: it can replace any socket anyway, and system services run as root.
    users = {os.geteuid(), 0}
    # By lstat: a link could lead to any socket of this user's.
    try:
        status, parent, lock = os.lstat(path), os.lstat(place.parent), os.lstat(place.parent / _LOCK)
    except OSError as error:
        return error.strerror or "its status cannot be read"
    if not stat.S_ISREG(lock.st_mode) or lock.st_uid not in users:
        return "its directory is not that of a member"
    if not stat.S_ISSOCK(status.st_mode):
        return "it is not a socket"
    if status.st_uid not in users or parent.st_uid not in users:
        return "it is another user's"
    if not stat.S_ISDIR(parent.st_mode) or parent.st_mode & 0o077:
        return "its directory is not private: other users could put their own socket there"
    return ""


_LONGEST_NAME = "/p-XXXXXXXX/peer.sock"
"""Longest name of a socket in the runtime directory."""
_ADDRESS = re.compile(r"/[!-~]*")
"""Paths that the messages of members allow in an address; see `hub.address`."""
_MAX_PATH_BYTES = 107
"""Longest path of a Unix socket. Source: unix(7)."""


@contextlib.contextmanager
def runtime_files(directory: Path) -> Iterator[None]:
    """Map an OSError of a file or socket in the runtime directory to a ConfigError that says which setting moves it."""
    try:
        yield
    except PenstockError:
        # Some of them are OSErrors too.
        raise
    except OSError as error:
        if error.errno in descriptors.SHORTAGES:
            raise descriptors.exhausted(error) from error
        raise ConfigError(
            f"the directory for sockets cannot be used: {error}", uri=str(directory), hint=_SET
        ) from error


_SET = "set PENSTOCK_RUNTIME_DIR to a directory of this user's on a file system that can be written and has room"


def private_directory(directory: Path | None = None) -> Path:
    """Create the runtime directory if it is missing, check that it is this user's alone, and return it.

    Args:
        directory: None: the user's own, see `config.runtime_dir`.

    Raises:
        ConfigError: it is another user's, open to others, cannot be made, or its path is too long for a socket or has a
            space, a control character, or a character that is not ASCII.
    """
    # The process may change its working directory.
    directory = (directory or runtime_dir()).absolute()
    if not _ADDRESS.fullmatch(str(directory)):
        # Members tell each other the paths of their sockets, and an address has no other characters.
        message = f"{str(directory)!r} has characters that the address of a socket cannot have"
        raise ConfigError(message, hint="set PENSTOCK_RUNTIME_DIR to a path of printable ASCII without spaces")
    if len(os.fsencode(directory)) + len(_LONGEST_NAME) > _MAX_PATH_BYTES:
        raise ConfigError(f"{directory} is too long for a socket in it", hint="set PENSTOCK_RUNTIME_DIR")
    # By lstat: a link could lead to a directory of another user.
    with runtime_files(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not this user's alone", hint="chmod 700 it, or set PENSTOCK_RUNTIME_DIR to another"
        )
    return directory


def pid_namespace() -> int:
    """Return the number of this process's PID namespace, unlike that of any other namespace that exists now."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise ConfigError(f"sharing memory on one host needs /proc: {error}") from error


def _boot_id() -> str:
    try:
        # Not the host's name: two containers may have the same.
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"sharing memory on one host needs /proc: {error}") from error


def namespace_id() -> str:
    """Return the id of this PID namespace; the previous release reports it as the id of the host."""
    return f"{_boot_id()}/{pid_namespace()}"


def host_id() -> str:
    """Return an id that is equal for processes that may share memory: those of one boot and one runtime directory.

    It is a claim that a peer's id is compared with; only a connection to the peer's socket proves it. Processes of one
    PID namespace have equal ids in any runtime directory, where each can see the other's sockets all the same.

    Raises:
        ConfigError: as `private_directory`, or there is no /proc.
    """
    boot = _boot_id()
    # A file for each boot: the directory may outlive it, or be one that several hosts mount.
    directory = private_directory()
    path = directory / f"host-{boot}"
    with runtime_files(directory):
        if not path.exists():
            fd, new = tempfile.mkstemp(prefix=".host-", dir=directory)
            try:
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    # The first process's, which every other one takes over.
                    file.write(namespace_id())
                # A link fails if another process was first; a rename would replace an id that was reported already.
                with contextlib.suppress(FileExistsError):
                    os.link(new, path)
            finally:
                os.unlink(new)
        return path.read_text(encoding="ascii")


_PREFIX = "p-"
_DIRECTORY = re.compile(r"(p|penstock-member)-[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` names it. The second form is that of the previous release."""
_LOCK = "alive"
"""Name of the locked file in each directory."""


class RuntimeDir:
    """A new directory of mode 0700 in the runtime directory, for sockets, and locked while this process lives.

    The kernel releases the lock when the process ends in any way, so the lock tells whether the owner still lives.

    Raises:
        ConfigError: as `private_directory`, or nothing can be made in it.
    """

    def __init__(self) -> None:
        parent = private_directory()
        _sweep(parent)
        with runtime_files(parent):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = self.path / f"{_LOCK}.new"
            fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            # Also at the interpreter's exit, for processes that close nothing.
            self._closer = weakref.finalize(self, _remove, self.path, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Renamed only once it is locked: a sweep of another process must never see the lock file unlocked.
            new.rename(self.path / _LOCK)
        self._fd = fd
        _directories.add(self)

    def close(self) -> None:
        """Remove the directory and release its lock. Idempotent; nothing in a forked child."""
        self._closer()

    def forget(self) -> None:
        """In a forked child: leave the directory to the parent, and do not keep its lock."""
        if self._closer.detach():
            os.close(self._fd)


_directories: weakref.WeakSet[RuntimeDir] = release_after_fork(lambda directory: directory.forget())


def _remove(path: Path, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def _sweep(parent: Path) -> None:
    """Remove the directories that dead processes of this user left in `parent`."""
    for path in parent.glob(f"{_PREFIX}*"):
        # An OSError: the directory has no lock file yet (it is being made), belongs to another user, or is in use.
        with contextlib.suppress(OSError):
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
