"""A read-through cache of remote objects on a local disk: chunk files, each verified, shared by processes.

In: a `Source` and a directory. Out: a `CachedSource`: what is there from the disk, the rest from the source.
An object's chunks lie in a directory named by what the object is (URI, identity, size), so nothing is ever stale; a
chunk file ends in its XXH3 digest, so nothing rotten is ever used. A cache that cannot be written or read never fails
a load: the source is read instead, and `why` says so.
Not here: which sources are worth caching (`storage.open_source`), direct I/O (`files`).

    readv --> chunk file? --yes, digest holds--> buffers
                 '--no--> source.readv --> buffers --> temporary file --rename--> chunk file
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import blake3
import xxhash

from penstock.config import Settings
from penstock.storage import Source, span

logger = logging.getLogger(__name__)

CACHE_CHUNK_BYTES = 8 << 20
"""Bytes of an object in one chunk file.

Reason: the default unit of I/O, so that a miss is one ranged request of the size object stores are read best with.
Source: benchmarks/results/cpu2_202611/objects.md.
"""

_TRAILER = struct.Struct("<8sQQ")
"""At a chunk file's end: the magic, the bytes before the trailer, the XXH3-64 digest of those bytes."""

_MAGIC = b"PSCHUNK1"

_IOV = 512
"""Buffers of one system call. Reason: Linux takes 1024 at most (IOV_MAX)."""

_FOLDER = "penstock-chunks"
"""Everything the cache writes lies below this in the user's directory; nothing else there is ever touched."""

_OURS = re.compile(r"\d{8}|\.\d{8}-\d+-[0-9a-f]{8}")

_ROOM = 0.9
"""Eviction goes on until this part of `cache_bytes` is filled. Reason: not to evict again at once."""

_SCAN_SHARE = 32
"""The directory is measured anew after a 1/32 of `cache_bytes` was written. Reason: other processes write too."""

_ABANDONED_S = 3600.0
"""Age of a temporary file whose writer is gone for sure. Reason: a chunk is written in milliseconds."""


@dataclass(slots=True)
class CacheStats:
    """What the cache did for one source: chunks and bytes."""

    hits: int = 0
    misses: int = 0
    rotten: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0


def open_cached(source: Source, *, settings: Settings) -> Source:
    """`source` behind the cache of `settings.cache_dir`; the source itself where there is none.

    Args:
        source: what tells it from others is its URI, identity and size. (A revision could not: the same weights in
            another packing have the same revision.)
        settings: `cache_dir`, `cache_bytes`.

    Ownership: what is returned owns `source` and closes it.
    """
    if settings.cache_dir is None or not source.nbytes:
        return source
    if not source.identity:
        logger.warning("%s is not cached: its server tells no ETag or date", source.uri)
        return source
    return CachedSource(source, _directory(settings.cache_dir, settings.cache_bytes), settings=settings)


class CachedSource:
    """A `Source` around a `Source`; use `open_cached`.

    Attributes:
        stats: hits, misses, rotten chunks, bytes.
        why: why the cache is not used, or not written; None while it is.
    """

    def __init__(self, source: Source, directory: CacheDirectory, *, settings: Settings) -> None:
        self.uri = source.uri
        self.nbytes = source.nbytes
        self.identity = source.identity
        self.stats = CacheStats()
        self.why: str | None = None
        self._source = source
        self._directory = directory
        name = f"{source.uri}\n{source.identity}\n{source.nbytes}\n{CACHE_CHUNK_BYTES}"
        key = blake3.blake3(name.encode()).hexdigest()[:40]
        self._place = directory.path / key[:2] / key
        self._wait_s = settings.stall_s * (settings.retries + 1)
        self._spare: list[bytearray] = []
        self._lock = threading.Lock()

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. `cache` when every byte came from the cache, else the source's own word."""
        stop, left = span(self, offset, buffers)
        path = "cache"
        while left:
            start = offset - offset % CACHE_CHUNK_BYTES
            end = min(start + CACHE_CHUNK_BYTES, self.nbytes)
            wanted = _take(left, min(end, stop) - offset)
            taken = sum(view.nbytes for view in wanted)
            with self._around(offset - start, end - offset - taken) as (before, after):
                views = [view for view in (before, *wanted, after) if view.nbytes]
                path = self._chunk(start, views) or path
            offset += taken
        return path

    def close(self) -> None:
        """See `Source.close`."""
        self._spare.clear()
        self._source.close()

    @contextlib.contextmanager
    def _around(self, before: int, after: int) -> Iterator[tuple[memoryview, memoryview]]:
        """Scratch memory for the parts of a chunk that the caller does not want."""
        if not before + after:
            yield memoryview(b""), memoryview(b"")
            return
        with self._lock:
            scratch = self._spare.pop() if self._spare else bytearray(CACHE_CHUNK_BYTES)
        view = memoryview(scratch)
        yield view[:before], view[before : before + after]
        with self._lock:
            self._spare.append(scratch)

    def _chunk(self, start: int, views: list[memoryview]) -> str | None:
        """Fill `views`, which span one chunk. None: from the cache; else the source's path."""
        file = self._place / f"{start // CACHE_CHUNK_BYTES:08d}"
        if self._hit(file, views):
            return None
        with self._directory.flight(file, wait_s=self._wait_s) as waited:
            if waited and self._hit(file, views):
                return None
            path = self._source.readv(start, views)
            nbytes = sum(view.nbytes for view in views)
            self._count(misses=1, miss_bytes=nbytes)
            if self.why is None:
                self._keep(file, views, nbytes)
        return path

    def _hit(self, file: Path, views: list[memoryview]) -> bool:
        """Read a chunk file into `views`. False when it is absent, rotten (it is then removed) or cannot be read."""
        nbytes = sum(view.nbytes for view in views)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                self._give_up(f"cannot be read: {error.strerror}")
            return False
        try:
            trailer = bytearray(_TRAILER.size + 1)
            sound = _fill(descriptor, 0, views) == nbytes
            sound = sound and os.preadv(descriptor, [trailer], nbytes) == _TRAILER.size
            sound = sound and trailer[: _TRAILER.size] == _TRAILER.pack(_MAGIC, nbytes, _digest(views))
            if sound:
                with contextlib.suppress(OSError):  # a cache that may only be read has no use of its own
                    os.utime(descriptor)
        except OSError:
            sound = False
        finally:
            os.close(descriptor)
        if sound:
            self._count(hits=1, hit_bytes=nbytes)
            return True
        self._count(rotten=1)
        logger.warning("cached chunk %s of %s is damaged; it is read again from its source", file, self.uri)
        with contextlib.suppress(OSError):
            os.unlink(file)
        return False

    def _keep(self, file: Path, views: list[memoryview], nbytes: int) -> None:
        try:
            self._directory.write(file, [*views, memoryview(_TRAILER.pack(_MAGIC, nbytes, _digest(views)))])
        except OSError as error:
            self._give_up(f"cannot be written: {error.strerror}")

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self.why is not None:
                return
            self.why = f"cache {self._directory.path} {why}"
        logger.warning("%s; %s is read from its source and not kept", self.why, self.uri)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for field in fields(self.stats):
                setattr(self.stats, field.name, getattr(self.stats, field.name) + counts.get(field.name, 0))


class CacheDirectory:
    """The chunk files below one directory: written atomically, evicted oldest use first. One per process and path."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._known_bytes: int | None = None
        self._since_scan_bytes = 0
        self.after_fork()

    def after_fork(self) -> None:
        """A forked child has none of the threads that may hold these locks."""
        self._lock = threading.Lock()
        self._flights: dict[Path, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def flight(self, file: Path, *, wait_s: float) -> Iterator[bool]:
        """Fetch `file` in one thread of this process at a time; yields whether another was at it just before.

        After `wait_s` seconds it goes on regardless: the worst is that the chunk is fetched twice.
        """
        with self._lock:
            lock, users = self._flights.get(file, (threading.Lock(), 0))
            self._flights[file] = (lock, users + 1)
        waited = not lock.acquire(blocking=False)
        held = not waited or lock.acquire(timeout=wait_s)
        try:
            yield waited
        finally:
            if held:
                lock.release()
            with self._lock:
                lock, users = self._flights[file]
                self._flights[file] = (lock, users - 1)
                if users == 1:
                    del self._flights[file]

    def write(self, file: Path, views: list[memoryview]) -> None:
        """Make `file` hold `views`, all or nothing; room is made first. OSError when it cannot."""
        nbytes = sum(view.nbytes for view in views)
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
                    self._evict(int(self._measure()[0] * _ROOM) - nbytes)
            self._publish(file, views)

    def _publish(self, file: Path, views: list[memoryview]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                _drain(descriptor, views)
            finally:
                os.close(descriptor)
            os.rename(temporary, file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            if self._known_bytes is None or self._since_scan_bytes > self._limit_bytes // _SCAN_SHARE:
                self._known_bytes, self._since_scan_bytes = self._measure()[0], 0
            self._known_bytes += nbytes
            self._since_scan_bytes += nbytes
            if self._known_bytes > self._limit_bytes:
                self._known_bytes = nbytes + self._evict(int(self._limit_bytes * _ROOM) - nbytes)
                self._since_scan_bytes = 0

    def _measure(self) -> tuple[int, list[tuple[float, int, str]]]:
        """Bytes of all chunk files, and (last use, bytes, path) of each; abandoned temporary files and folders go."""
        total, files, now_s = 0, [], time.time()
        for folder, _, names in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):  # an object's folder stays a while: its chunks may be coming back
                if now_s - os.stat(folder).st_mtime > _ABANDONED_S:
                    os.rmdir(folder)  # fails, rightly, while it holds anything
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
        """Remove the longest unused until `target_bytes` are left; what is left. Readers keep what they opened."""
        total, files = self._measure()
        for _, nbytes, path in sorted(files):
            if total <= max(target_bytes, 0):
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= nbytes
        return total


def _take(left: list[memoryview], nbytes: int) -> list[memoryview]:
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


def _digest(views: list[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def _fill(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Read `views` full from `offset` on; the bytes read, fewer at the end of the file."""
    left, start = list(views), offset
    while left:
        got = os.preadv(descriptor, left[:_IOV], offset)
        if not got:
            break
        offset += got
        _take(left, got)
    return offset - start


def _drain(descriptor: int, views: list[memoryview]) -> None:
    left = list(views)
    while left:
        _take(left, os.writev(descriptor, left[:_IOV]))


_directories: dict[tuple[Path, int], CacheDirectory] = {}


def _directory(path: Path, limit_bytes: int) -> CacheDirectory:
    path = Path(path).expanduser().absolute() / _FOLDER
    return _directories.setdefault((path, limit_bytes), CacheDirectory(path, limit_bytes))


def _after_fork() -> None:
    for directory in _directories.values():
        directory.after_fork()


os.register_at_fork(after_in_child=_after_fork)
