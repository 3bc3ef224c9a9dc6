"""The chunk files of the cache in one directory: found, written atomically, evicted when unused for longest.

In: paths of chunk files and their bytes. Out: descriptors of files that are this user's own.
Not here: which bytes a chunk has, and whether they are right (`cache`).

No link below the directory is followed, and nothing is opened that could block. What has a chunk's name and is no
regular file of this user does not count as a chunk. The next write takes its place.
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

# All that the cache writes lies below this in the user's directory; nothing else there is ever touched.
_FOLDER = "penstock-chunks"
# Of every directory of the cache.
_MODE = 0o700
# Names of chunk files, and of those still being written; see `_publish`.
_CHUNK = re.compile("[0-9]{8}")
_OURS = re.compile(rf"{_CHUNK.pattern}|\.{_CHUNK.pattern}-[0-9]+-[0-9a-f]{{8}}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO is then opened at once, and not when another process writes to it.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The errors of `open` for a name that is there and is no readable file: a link, a socket, a device without a driver, a
# folder where a file should be or the other way round, another user's file.
_FOREIGN = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM}
# Eviction goes on until this part of `cache_bytes` is filled, so that the next chunk does not evict again.
_ROOM = 0.9
# The directory is measured anew after 1/32 of `cache_bytes` was written, since other processes write too.
_SCAN_SHARE = 32
# Age of a temporary file whose writer is gone for sure: a chunk is written in milliseconds.
_ABANDONED_S = 3600.0
# Pause between looks for a chunk that another process fetches: small next to a request of 8 MiB.
_ASK_S = 0.01


class CacheDirectory:
    """The chunk files below one directory. One per process and path; use `directory_at`.

    Attributes:
        spare: scratch memory of a chunk each that no reader uses now, of all sources together.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._known_bytes: int | None = None
        self._since_scan_bytes = 0
        self.spare: list[bytearray] = []
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the locks in a forked child: the threads that may hold them do not exist there."""
        self._lock = threading.Lock()
        self._fetches: dict[Path, tuple[threading.Lock, int]] = {}

    @property
    def name(self) -> str:
        """Return a name that only processes sharing the directory have; empty where it cannot be made or identified."""
        try:
            self._make()
            state, boot = os.stat(self.path), _boot()
        except OSError:
            return ""
        return f"{boot}/{state.st_dev}/{state.st_ino}"

    def refusal(self) -> str:
        """Make the directory, for this user alone, and say why it must not be used; "" where it may.

        A directory that this user made open to others is narrowed.
        """
        # Chunks are weights, so others must not read them; and their digests show damage, not who wrote them, so others
        # must not write them.
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
            # The first read or write meets the same error, and reports it.
            return ""
        return ""

    def _make(self) -> None:
        """Make the directory, and the missing ones above it; it is for this user alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # With its mode at once: between a wide mkdir and a chmod another user could open it.
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, _MODE)

    @contextlib.contextmanager
    def _folder(self, folder: Path, *, make: bool = False) -> Iterator[int]:
        """Open a folder of the cache, level by level and through no link.

        Args:
            make: make the levels that are missing. What is in the place of a level and is no folder of this user is
                renamed.

        Raises:
            FileNotFoundError: it is not there, or something else is in its place. OSError: it cannot be opened.
        """
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
        """Return a descriptor of a chunk file, or None if what is there is no file of this user with that size.

        Raises:
            FileNotFoundError: nothing is there. OSError: the directory cannot be read.
        """
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
        """Return the numbers of the chunk files in a folder; none where it cannot be read."""
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
        """Remove a chunk file, or a link, pipe or socket of its name. Return False if there was none."""
        with contextlib.suppress(OSError), self._folder(file.parent) as folder:
            os.unlink(file.name, dir_fd=folder)
            return True
        return False

    @contextlib.contextmanager
    def single_fetch(self, file: Path, *, wait_s: float, until: float) -> Iterator[None]:
        """Fetch `file` in one thread of one process of this host at a time.

        After `wait_s` seconds for a thread, or when the clock is at `until` for a process, it goes on regardless: the
        worst is that the chunk is fetched twice.
        """
        with self._lock:
            # The lock counts its users, so that the table has only chunks that are being fetched now.
            lock, users = self._fetches.get(file, (threading.Lock(), 0))
            self._fetches[file] = (lock, users + 1)
        is_locked = lock.acquire(timeout=wait_s)
        try:
            with _claimed(f"{self.name}/{file.relative_to(self.path)}", until):
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
        """Write `views` to `file`, all or nothing, after making room. Raise OSError when it cannot be written."""
        nbytes = sum(view.nbytes for view in views)
        # It would have to evict every chunk, and then itself.
        if nbytes > self._limit_bytes:
            return
        self._make_room(nbytes)
        try:
            self._publish(file, views)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.ENOENT}:
                raise
            # ENOENT: another process removed the folder meanwhile, and the second try makes it again.
            if error.errno != errno.ENOENT:
                with self._lock:
                    # Other files fill the disk too, so the limit says nothing: shrink what there is.
                    self._evict(int(self._measure()[0] * _ROOM) - nbytes)
            self._publish(file, views)

    def _publish(self, file: Path, views: list[memoryview]) -> None:
        """Write `views` to a temporary file and rename it to `file`: readers see all of it or none."""
        # The pid alone is not unique: hosts that share the directory over a network have equal ones.
        temporary = f".{file.name}-{os.getpid()}-{secrets.token_hex(4)}"
        with self._folder(file.parent, make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                try:
                    _drain(descriptor, views)
                finally:
                    os.close(descriptor)
                # Without an fsync: a chunk torn by a power loss fails its digest and is fetched again.
                try:
                    os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:
                    _set_aside(folder, file.name)
                    os.rename(temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def _make_room(self, nbytes: int) -> None:
        """Evict until a file of `nbytes` fits below the limit."""
        with self._lock:
            if self._known_bytes is None or self._since_scan_bytes > self._limit_bytes // _SCAN_SHARE:
                self._known_bytes = self._measure()[0]
                self._since_scan_bytes = 0
            # Counted before the write, so that other threads see the room as taken.
            self._known_bytes += nbytes
            self._since_scan_bytes += nbytes
            if self._known_bytes > self._limit_bytes:
                self._known_bytes = nbytes + self._evict(int(self._limit_bytes * _ROOM) - nbytes)
                self._since_scan_bytes = 0

    def _measure(self) -> tuple[int, list[tuple[float, int, str]]]:
        """Return the bytes of all chunk files, and (last use, bytes, path) of each; remove what was abandoned."""
        total, files, now_s = 0, [], time.time()
        # Bottom up: an empty folder is removed before its parent is looked at.
        for folder, _, names in os.walk(self.path, topdown=False):
            # An object's folder stays a while, since its chunks may be coming back; rmdir fails while one is in it.
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
                    # Evicted by another process meanwhile.
                    continue
                total += state.st_size
                if not name.startswith("."):
                    files.append((state.st_mtime, state.st_size, path))
        return total, files

    def _evict(self, target_bytes: int) -> int:
        """Remove the longest unused until `target_bytes` are left; return what is left. Open files stay readable."""
        total, files = self._measure()
        # By mtime, which a hit renews: under the usual relatime mounts atime does not follow reads.
        for _, nbytes, path in sorted(files):
            if total <= max(target_bytes, 0):
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= nbytes
        return total


def _is_own(state: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to root."""
    return state.st_uid in {os.geteuid(), 0}


def _open_level(above: int, name: str, *, make: bool) -> int:
    """Open one level of a folder of the cache; see `CacheDirectory._folder`."""
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
    raise FileNotFoundError(errno.ENOENT, "is no folder of this user", name)


def _set_aside(folder: int, name: str) -> None:
    """Rename what has the place of a file or folder of the cache. It is not removed, because the cache did not make it.

    Raises:
        OSError: it cannot be renamed. It may be gone, which is no error.
    """
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, f".{name}.{secrets.token_hex(4)}.foreign", src_dir_fd=folder, dst_dir_fd=folder)


# A forked child would keep the names bound for as long as it lives.
_claims = release_after_fork(socket.socket.close)


@functools.cache
def _boot() -> str:
    """Return the id of this boot of this host; no other host has it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextlib.contextmanager
def _claimed(name: str, deadline: float) -> Iterator[None]:
    """Hold a name that only one process of this host can hold; after the deadline, go on without it.

    The name is an abstract socket address, without a file: the kernel frees it however the process ends. In another
    network namespace it is another name, and the chunk is fetched twice.
    """
    claim = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim_socket:
        _claims.add(claim_socket)
        while True:
            try:
                claim_socket.bind(f"\0penstock-chunk-{claim}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    # There is no call that waits for a socket's name to become free.
                    time.sleep(_ASK_S)
                    continue
            # Bound; or the deadline is past, or no such name can be had here: then the worst is that the chunk is
            # fetched twice.
            break
        yield


def _drain(descriptor: int, views: list[memoryview]) -> None:
    """Write all of `views`."""
    left = list(views)
    while left:
        take(left, os.writev(descriptor, left[:MAX_BUFFERS]))


_directories: dict[tuple[Path, int], CacheDirectory] = {}


def directory_at(path: Path, limit_bytes: int) -> CacheDirectory:
    """Return the cache's part of the user's directory, for this process."""
    path = Path(path).expanduser().absolute() / _FOLDER
    return _directories.setdefault((path, limit_bytes), CacheDirectory(path, limit_bytes))


def _after_fork() -> None:
    for directory in _directories.values():
        directory.after_fork()


os.register_at_fork(after_in_child=_after_fork)
