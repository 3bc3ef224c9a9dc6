"""The chunk files of the cache in one directory, written atomically and evicted least recently used first.

Symlinks below the directory are not followed, and no open can block. Only regular files of this user count as chunks.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.lifecycle import release_after_fork
from penstock.storage.local import MAX_BUFFERS
from penstock.storage.source import take

# Subdirectory of the user's directory that holds everything the cache writes.
_FOLDER = "penstock-chunks"
_MODE = 0o700
_CHUNK = re.compile("[0-9]{8}")
_OURS = re.compile(rf"{_CHUNK.pattern}|\.{_CHUNK.pattern}-[0-9]+-[0-9a-f]{{8}}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK opens a FIFO without waiting for a writer.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Errors of `open` for paths that are not a readable file or directory of this user.
_FOREIGN = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM}
# Eviction continues down to this fraction of `cache_bytes`, so that the next chunk does not evict again.
_EVICT_TO = 0.9
# The directory is measured again after writing 1/32 of `cache_bytes`, because other processes write too.
_SCAN_SHARE = 32
# A temporary file older than this many seconds is abandoned, because writing a chunk takes milliseconds.
_ABANDONED_S = 3600.0
# Seconds between checks for a chunk that another process fetches.
_POLL_S = 0.01


class CacheDirectory:
    """The chunk files in one directory. Use `directory_at`, which makes one object per process and path.

    Attributes:
        spare: unused scratch buffers of one chunk each, shared by all sources.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._known_bytes: int | None = None
        self._since_scan_bytes = 0
        self.spare: list[bytearray] = []
        self.after_fork()
        _renewed_in_children.add(self)

    def after_fork(self) -> None:
        """Replace the locks in a forked child, because the threads that held them do not exist there."""
        self._lock = threading.Lock()
        self._fetches: dict[Path, tuple[threading.Lock, int]] = {}

    @property
    def name(self) -> str:
        """A name for the directory, equal in all processes that share it. Empty if the directory cannot be created."""
        try:
            self._make()
            state, boot = os.stat(self.path), _boot()
        except OSError:
            return ""
        return f"{boot}/{state.st_dev}/{state.st_ino}"

    def refusal(self) -> str:
        """Create the directory with mode 0700. Return why the directory must not be used, or an empty string."""
        # Other users must not read the weights. They must not write either, because digests do not detect forged
        # chunks.
        try:
            self._make()
            state = os.lstat(self.path)
            if not stat.S_ISDIR(state.st_mode):
                return "is not a directory"
            if not _is_own(state):
                return "belongs to another user"
            if state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) != _MODE:
                os.chmod(self.path, _MODE)
            elif state.st_uid == 0 and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.geteuid() != 0:
                return "may be written to by others"
        except OSError:
            pass
        return ""

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # If the mode were set later by chmod, another user could open the directory first.
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, _MODE)

    @contextlib.contextmanager
    def _folder(self, folder: Path, *, make: bool = False) -> Iterator[int]:
        """Open a directory level by level, without following symlinks. Raise FileNotFoundError if the owner differs."""
        if make:
            self._make()
        descriptor = os.open(self.path, _FOLDER_FLAGS)
        try:
            for level in folder.relative_to(self.path).parts:
                above = descriptor
                try:
                    descriptor = _open_level(above, level, make=make)
                finally:
                    if descriptor != above:
                        os.close(above)
            yield descriptor
        finally:
            os.close(descriptor)

    def open_chunk(self, file: Path, nbytes: int) -> int | None:
        """Return a descriptor of a chunk file, or None if its owner or size is wrong. Raises OSError."""
        with self._folder(file.parent) as folder:
            try:
                descriptor = os.open(file.name, _FILE_FLAGS, dir_fd=folder)
            except OSError as error:
                if error.errno not in _FOREIGN:
                    raise
                return None
            state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and _is_own(state) and state.st_size == nbytes:
            return descriptor
        os.close(descriptor)
        return None

    def chunks(self, folder: Path) -> frozenset[int]:
        """Return the numbers of the chunk files in a directory. Return no numbers if the directory cannot be read."""
        try:
            with self._folder(folder) as descriptor, os.scandir(descriptor) as entries:
                return frozenset(
                    int(entry.name)
                    for entry in entries
                    if _CHUNK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                )
        except OSError:
            return frozenset()

    def remove(self, file: Path) -> bool:
        """Remove a chunk file. Return whether a file was removed."""
        with contextlib.suppress(OSError), self._folder(file.parent) as folder:
            os.unlink(file.name, dir_fd=folder)
            return True
        return False

    @contextlib.contextmanager
    def single_fetch(self, file: Path, *, wait_s: float, until: float) -> Iterator[None]:
        """Let only one thread on this host fetch `file` at a time.

        Waiting for a thread stops after `wait_s` seconds, and waiting for another process stops at time `until`. After
        a timeout the chunk is fetched twice.
        """
        with self._lock:
            lock, users = self._fetches.get(file, (threading.Lock(), 0))
            self._fetches[file] = (lock, users + 1)
        is_locked = lock.acquire(timeout=wait_s)
        try:
            with _host_lock(f"{self.name}/{file.relative_to(self.path)}", until):
                yield
        finally:
            if is_locked:
                lock.release()
            with self._lock:
                lock, users = self._fetches[file]
                self._fetches[file] = (lock, users - 1)
                if users == 1:
                    del self._fetches[file]

    def write(self, file: Path, views: list[memoryview]) -> None:
        """Write `views` to `file` atomically, after evicting other chunks. Raises OSError."""
        nbytes = sum(view.nbytes for view in views)
        # A larger file would evict every chunk and then itself.
        if nbytes > self._limit_bytes:
            return
        with self._lock:
            if self._known_bytes is None or self._since_scan_bytes > self._limit_bytes // _SCAN_SHARE:
                self._known_bytes = self._measure()[0]
                self._since_scan_bytes = 0
            # Count the bytes before the write, so that other threads see the space as used.
            self._known_bytes += nbytes
            self._since_scan_bytes += nbytes
            if self._known_bytes > self._limit_bytes:
                self._known_bytes = nbytes + self._evict(int(self._limit_bytes * _EVICT_TO) - nbytes)
                self._since_scan_bytes = 0
        try:
            self._publish(file, views)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.ENOENT}:
                raise
            # ENOENT means that another process removed the directory. The second attempt creates it again.
            if error.errno != errno.ENOENT:
                with self._lock:
                    # The disk filled up before the cache reached its limit, so shrink the cache.
                    self._evict(int(self._measure()[0] * _EVICT_TO) - nbytes)
            self._publish(file, views)

    def _publish(self, file: Path, views: list[memoryview]) -> None:
        # Processes on hosts that share the directory over a network may have equal PIDs.
        temporary = f".{file.name}-{os.getpid()}-{secrets.token_hex(4)}"
        with self._folder(file.parent, make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                try:
                    left = list(views)
                    while left:
                        take(left, os.writev(descriptor, left[:MAX_BUFFERS]))
                finally:
                    os.close(descriptor)
                # No fsync is needed, because a chunk torn by a power loss fails the digest check.
                try:
                    os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:
                    _set_aside(folder, file.name)
                    os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def _measure(self) -> tuple[int, list[tuple[float, int, str]]]:
        """Return the total size of the chunk files, and (mtime, bytes, path) of each. Remove abandoned files."""
        total, files, now_s = 0, [], time.time()
        for folder, _, names in os.walk(self.path, topdown=False):
            # rmdir fails unless the directory is empty. A recent directory stays, because its chunks may be fetched
            # again.
            with contextlib.suppress(OSError):
                if now_s - os.stat(folder).st_mtime > _ABANDONED_S:
                    os.rmdir(folder)
            for name in filter(_OURS.fullmatch, names):
                path = os.path.join(folder, name)
                try:
                    state = os.lstat(path)
                    if not stat.S_ISREG(state.st_mode):
                        continue
                    if name.startswith(".") and now_s - state.st_mtime > _ABANDONED_S:
                        os.unlink(path)
                        continue
                except OSError:
                    continue
                total += state.st_size
                if not name.startswith("."):
                    files.append((state.st_mtime, state.st_size, path))
        return total, files

    def _evict(self, target_bytes: int) -> int:
        """Remove the least recently used chunks down to `target_bytes`. Return the remaining bytes."""
        total, files = self._measure()
        # A hit updates mtime. On relatime mounts, not every read updates atime.
        for _, nbytes, path in sorted(files):
            if total <= max(target_bytes, 0):
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= nbytes
        return total


def _is_own(state: os.stat_result) -> bool:
    return state.st_uid in {os.geteuid(), 0}


def _open_level(above: int, name: str, *, make: bool) -> int:
    for _ in range(2):
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, _MODE, dir_fd=above)
        try:
            descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=above)
            if _is_own(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if error.errno not in _FOREIGN:
                raise
        if not make:
            break
        _set_aside(above, name)
    raise FileNotFoundError(errno.ENOENT, "not a folder of this user", name)


def _set_aside(folder: int, name: str) -> None:
    """Rename a path that blocks a chunk or directory. Do not remove the path, because the cache did not create it."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, f".{name}.{secrets.token_hex(4)}.foreign", src_dir_fd=folder, dst_dir_fd=folder)


# A forked child closes these sockets, so that their names are released.
_lock_sockets = release_after_fork(socket.socket.close)


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextlib.contextmanager
def _host_lock(name: str, deadline: float) -> Iterator[None]:
    """Hold a name that only one process on this host can hold. After the deadline, continue without the name.

    The name is an abstract socket address, which the kernel frees when the process exits.
    """
    claim = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock_socket:
        _lock_sockets.add(lock_socket)
        while True:
            try:
                lock_socket.bind(f"\0penstock-chunk-{claim}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    # Poll, because no system call can wait until a socket name is free.
                    time.sleep(_POLL_S)
                    continue
            break
        yield


_directories: dict[tuple[Path, int], CacheDirectory] = {}


def directory_at(path: Path, limit_bytes: int) -> CacheDirectory:
    """Return this process's object for the cache in the user's directory."""
    path = Path(path).expanduser().absolute() / _FOLDER
    return _directories.setdefault((path, limit_bytes), CacheDirectory(path, limit_bytes))


_renewed_in_children = release_after_fork(CacheDirectory.after_fork)
