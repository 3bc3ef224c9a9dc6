"""The cache's directory: chunk files written atomically, evicted oldest use first, fetched by one process at a time.

In: bytes of a chunk. Out: its file, while it lasts.
Not here: what a chunk is, and whether it is sound (`cache`).
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

from penstock.fork import let_go_in_children

IOV = 512
"""Buffers of one system call. Reason: Linux takes 1024 at most (IOV_MAX)."""

_FOLDER = "penstock-chunks"
"""Everything the cache writes lies below this in the user's directory; nothing else there is ever touched."""

_MODE = 0o700
"""Of every directory of the cache."""

_OURS = re.compile(r"\d{8}|\.\d{8}-\d+-[0-9a-f]{8}")

_ROOM = 0.9
"""Eviction goes on until this part of `cache_bytes` is filled. Reason: not to evict again at once."""

_SCAN_SHARE = 32
"""The directory is measured anew after a 1/32 of `cache_bytes` was written. Reason: other processes write too."""

_ABANDONED_S = 3600.0
"""Age of a temporary file whose writer is gone for sure. Reason: a chunk is written in milliseconds."""

_ASK_S = 0.01
"""Pause between looks whether another process has fetched a chunk. Reason: small beside a request of 8 MiB."""


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
            self._make(self.path)
            state, boot = os.stat(self.path), _boot()
        except OSError:
            return ""
        return f"{boot}/{state.st_dev}/{state.st_ino}"

    def refusal(self) -> str:
        """Make the directory, for this user alone, and say why it must not be used; "" where it may.

        Chunks are weights, so others must not read them; and their digests show damage, not who wrote them, so others
        must not write them. A directory that this user made wider than that is narrowed.
        """
        try:
            self._make(self.path)
            state = os.lstat(self.path)
            if not stat.S_ISDIR(state.st_mode):
                return "is not a directory"
            if state.st_uid not in {os.geteuid(), 0}:
                return "belongs to another user"
            if state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) != _MODE:
                os.chmod(self.path, _MODE)
            elif state.st_uid == 0 and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.geteuid() != 0:
                return "may be written to by others"
        except OSError:
            return ""  # the first read or write meets the same error, and reports it
        return ""

    def _make(self, folder: Path) -> None:
        """Make a folder of the cache, and what is missing above it; what is ours is for this user alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for level in (self.path, *reversed(folder.relative_to(self.path).parents[:-1]), folder.relative_to(self.path)):
            # With its mode at once: between a wide mkdir and a chmod another user could open it.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path / level, _MODE)

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
            if error.errno != errno.ENOENT:  # (ENOENT: another process removed the folder meanwhile)
                with self._lock:
                    # Other files fill the disk too, so the limit says nothing: shrink what there is.
                    self._evict(int(self._measure()[0] * _ROOM) - nbytes)
            self._publish(file, views)

    def _publish(self, file: Path, views: list[memoryview]) -> None:
        self._make(file.parent)
        # The pid alone is not unique: hosts that share the directory over a network have equal ones.
        temporary = file.with_name(f".{file.name}-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _drain(descriptor, views)
            finally:
                os.close(descriptor)
            # Without an fsync: a chunk torn by a power loss fails its digest and is fetched again.
            os.rename(temporary, file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            if self._known_bytes is None or self._since_scan_bytes > self._limit_bytes // _SCAN_SHARE:
                self._known_bytes, self._since_scan_bytes = self._measure()[0], 0
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
            with contextlib.suppress(OSError):  # an object's folder stays a while: its chunks may be coming back
                if now_s - os.stat(folder).st_mtime > _ABANDONED_S:
                    os.rmdir(folder)  # fails while a chunk is in it, as it should
            for name in filter(_OURS.fullmatch, names):
                path = os.path.join(folder, name)
                try:
                    state = os.stat(path)
                    if name.startswith(".") and now_s - state.st_mtime > _ABANDONED_S:
                        os.unlink(path)
                        continue
                except OSError:
                    continue  # evicted by another process meanwhile
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


# A forked child would keep the names bound for as long as it lives.
_claims = let_go_in_children(socket.socket.close)
"""A child would hold them for as long as it lives."""


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


def take(left: list[memoryview], nbytes: int) -> list[memoryview]:
    """Cut the first `nbytes` off `left`."""
    taken = []
    while nbytes:
        view = left[0][:nbytes]
        taken.append(view)
        nbytes -= view.nbytes
        left[0] = left[0][view.nbytes :]
        if not left[0].nbytes:
            del left[0]
    return taken


def _drain(descriptor: int, views: list[memoryview]) -> None:
    left = list(views)
    while left:
        take(left, os.writev(descriptor, left[:IOV]))


_directories: dict[tuple[Path, int], CacheDirectory] = {}


def directory_at(path: Path, limit_bytes: int) -> CacheDirectory:
    """Return the cache's part of the user's directory, for this process."""
    path = Path(path).expanduser().absolute() / _FOLDER
    return _directories.setdefault((path, limit_bytes), CacheDirectory(path, limit_bytes))


def _after_fork() -> None:
    for directory in _directories.values():
        directory.after_fork()


os.register_at_fork(after_in_child=_after_fork)
