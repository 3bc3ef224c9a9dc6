"""A read-through cache of remote objects on a local disk: chunk files, each verified, shared by processes.

In: a `Source` and a directory. Out: a `CachedSource`: what is there from the disk, the rest from the source.
Not here: which sources are worth caching (`storage.open_source`).

    readv --> chunk file? --yes, digest holds--> buffers
                 '--no--> source.readv --> buffers --> temporary file --rename--> chunk file

An object's chunks lie in a directory named by what the object is (URI, identity, size), so no chunk is ever stale; a
chunk file ends in its XXH3 digest, so no damaged one is ever used. A cache that cannot be written or read never fails a
load: the source is read instead, and `why` says so. `CachedSource` knows chunks and digests; `CacheDirectory` writes
files atomically, evicts those unused for longest, and lets one process at a time fetch a chunk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import blake3
import xxhash

from penstock.config import Settings
from penstock.errors import IntegrityError
from penstock.lifecycle import let_go_in_children
from penstock.storage.file_digest import FileDigest
from penstock.storage.local import MAX_BUFFERS
from penstock.storage.repository import HubSource
from penstock.storage.source import Source, span, take
from penstock.totals import Total
from penstock.types import MIB

logger = logging.getLogger(__name__)

CACHE_CHUNK_BYTES = 8 * MIB
"""Bytes of an object in one chunk file.

Reason: the default unit of I/O, so that a miss is one ranged request of the size object stores are read best with.
Source: benchmarks/results/cpu2_202611/objects.md.
"""

# At a chunk file's end: the magic, the bytes before the trailer, the XXH3-64 digest of those bytes.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"PSCHUNK1"
# Of `stall_s`: how long a read waits for chunks that another process fetches. That process may have been stopped, and
# this read must not be taken for stalled.
_OTHERS_SHARE = 0.5


@dataclass(slots=True)
class CacheStats:
    """Counts of what the cache did for one source."""

    hits: int = 0
    """Chunks that were on the disk."""
    misses: int = 0
    """Chunks that were read from the source."""
    rotten: int = 0
    """Chunk files whose digest was wrong."""
    asked_bytes: int = 0
    """Requested by readers, on the disk or not."""
    miss_bytes: int = 0
    """Read from the source, whole chunks."""


# The same counts of all sources of this process, those that were closed included.
_totals = {field.name: Total() for field in fields(CacheStats)}


def cache_totals() -> CacheStats:
    """Return what the cache did for all sources of this process so far."""
    return CacheStats(**{name: total.value for name, total in _totals.items()})


def open_cached(source: Source, *, settings: Settings) -> Source:
    """Return `source` behind the cache of `settings.cache_dir`; the source itself where there is no cache.

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
    return CachedSource(source, directory_at(settings.cache_dir, settings.cache_bytes), settings=settings)


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
        self._is_refused = False
        self._source = source
        self._directory = directory
        name = f"{source.uri}\n{source.identity}\n{source.nbytes}\n{CACHE_CHUNK_BYTES}"
        # 160 bits of a cryptographic hash: short file names, and no two objects can be made to share a key.
        key = blake3.blake3(name.encode()).hexdigest()[:40]
        # Two levels, so that no folder gets an entry for every object ever read.
        self._place = directory.path / key[:2] / key
        # As long as the fetching thread may stay silent: each of its tries may stall once.
        self._wait_s = settings.stall_s * (settings.retries + 1)
        self._others_s = settings.stall_s * _OTHERS_SHARE
        self._lock = threading.Lock()
        # Over all that is read through the cache, from the disk or from the hub: what the source itself brings need not
        # be the whole file.
        self._digest: FileDigest | None = None
        if isinstance(source, HubSource) and source.sha256 is not None:
            source.leave_unchecked()
            self._digest = FileDigest(source.sha256, self.nbytes, self.uri, settings.stall_s)
        # Refused is more than unwritable: chunks of such a directory are not even read.
        if refusal := directory.refusal():
            self._is_refused = True
            self._give_up(refusal)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. `cache` when every byte came from the cache, else the source's own word."""
        views = list(buffers)
        try:
            path = self._read(offset, views)
        except BaseException:
            if self._digest is not None:
                # Reads that wait for the bytes of this one must not wait for ever.
                self._digest.abandon()
            raise
        if self._digest is not None:
            try:
                self._digest.add(offset, views)
            except IntegrityError:
                # The next load must not find them.
                self.forget(0, self.nbytes)
                raise
        return path

    @property
    def is_checked(self) -> bool:
        """See `Digested`."""
        return self._digest is not None and self._digest.is_equal

    def check_whole(self) -> bool:
        """See `Digested`. False if the source's storage lists no digest."""
        if self._digest is None:
            return False
        self._digest.is_wanted = True
        return True

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> str:
        stop, left = span(self, offset, buffers)
        # One deadline for all chunks of the read: each may be in the hands of another process.
        path, until = "cache", time.monotonic() + self._others_s
        while left:
            start = offset - offset % CACHE_CHUNK_BYTES
            end = min(start + CACHE_CHUNK_BYTES, self.nbytes)
            wanted = take(left, min(end, stop) - offset)
            taken = sum(view.nbytes for view in wanted)
            # A chunk is read whole even where the caller wants a part: a digest covers all of it.
            with self._around(offset - start, end - offset - taken) as (before, after):
                views = [view for view in (before, *wanted, after) if view.nbytes]
                path_taken = self._chunk(start, views, until)
            self._count(hits=path_taken is None, asked_bytes=taken)
            path = path_taken or path
            offset += taken
        return path

    @property
    def shared_as(self) -> str:
        """Return a name that all processes with this cache have in common; see `CacheDirectory.name`."""
        return "" if self._is_refused else self._directory.name

    def cached_chunks(self) -> frozenset[int]:
        """Return the numbers of the chunks that are on the disk now; their digests are not checked here."""
        if self._is_refused:
            return frozenset()
        try:
            return frozenset(int(name) for name in os.listdir(self._place) if name.isdecimal())
        except OSError:
            return frozenset()

    def forget(self, offset: int, nbytes: int) -> bool:
        """Remove chunks whose source sent them damaged. Return False where none of these bytes is cached."""
        is_here = False
        for start in range(offset - offset % CACHE_CHUNK_BYTES, offset + nbytes, CACHE_CHUNK_BYTES):
            with contextlib.suppress(OSError):
                os.unlink(self._file(start))
                is_here = True
        return is_here

    def close(self) -> None:
        """See `Source.close`."""
        # The scratch memory of all sources: another one that still reads makes what it needs again.
        self._directory.spare.clear()
        self._source.close()

    @contextlib.contextmanager
    def _around(self, before: int, after: int) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield scratch memory for the parts of a chunk that the caller does not want."""
        # Whole chunks go from the source into the caller's buffers: the usual case, and no copy is made.
        if not before + after:
            yield memoryview(b""), memoryview(b"")
            return
        spare = self._directory.spare
        # By the exception and not by a look: another thread may take the last one in between.
        try:
            scratch = spare.pop()
        except IndexError:
            scratch = bytearray(CACHE_CHUNK_BYTES)
        view = memoryview(scratch)
        yield view[:before], view[before : before + after]
        spare.append(scratch)

    def _chunk(self, start: int, views: list[memoryview], until: float) -> str | None:
        """Fill `views`, which span one chunk. Return None if the cache had it, else the source's path."""
        file = self._file(start)
        if self._hit(file, views):
            return None
        # Chunks are no longer stored, so there is nothing to wait for.
        if self.why is not None:
            return self._fetch(file, start, views)
        with self._directory.single_fetch(file, wait_s=self._wait_s, until=until):
            # Looked for again: another thread or process may have stored the chunk while this one waited.
            return None if self._hit(file, views) else self._fetch(file, start, views)

    def _fetch(self, file: Path, start: int, views: list[memoryview]) -> str:
        """Fill `views` from the source and store the chunk; return the source's path."""
        path = self._source.readv(start, views)
        nbytes = sum(view.nbytes for view in views)
        self._count(misses=1, miss_bytes=nbytes)
        if self.why is None:
            self._keep(file, views, nbytes)
        return path

    def _file(self, start: int) -> Path:
        return self._place / f"{start // CACHE_CHUNK_BYTES:08d}"

    def _hit(self, file: Path, views: list[memoryview]) -> bool:
        """Read a chunk file into `views`. False when it is absent, rotten (it is then removed) or cannot be read."""
        nbytes = sum(view.nbytes for view in views)
        if self._is_refused:
            return False
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            # An absent chunk is what a cache is for; anything else will meet every other chunk too.
            if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
                self._give_up(f"cannot be read: {error.strerror}")
            return False
        try:
            # One byte more than a trailer has: a file that is too long then fails the size check below, without an
            # fstat.
            trailer = bytearray(_TRAILER.size + 1)
            sound = _fill(descriptor, 0, views) == nbytes
            sound = sound and os.preadv(descriptor, [trailer], nbytes) == _TRAILER.size
            sound = sound and trailer[: _TRAILER.size] == _TRAILER.pack(_MAGIC, nbytes, _digest(views))
            if sound:
                # Eviction goes by mtime, so a hit renews it. A read-only cache refuses, and evicts nothing anyway.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        except OSError:
            # EIO of a bad disk is damage as a wrong digest is: the source still has the bytes.
            sound = False
        finally:
            os.close(descriptor)
        if sound:
            return True
        self._count(rotten=1)
        logger.warning("cached chunk %s of %s is damaged; it is read again from its source", file, self.uri)
        with contextlib.suppress(OSError):
            os.unlink(file)
        return False

    def _keep(self, file: Path, views: list[memoryview], nbytes: int) -> None:
        """Store a chunk; where that fails, store no more of this source."""
        try:
            self._directory.write(file, [*views, memoryview(_TRAILER.pack(_MAGIC, nbytes, _digest(views)))])
        except OSError as error:
            self._give_up(f"cannot be written: {error.strerror}")

    def _give_up(self, why: str) -> None:
        """Store no more, and say why, once."""
        with self._lock:
            if self.why is not None:
                return
            self.why = f"cache {self._directory.path} {why}"
        logger.warning("%s; %s is read from its source and not kept", self.why, self.uri)

    def _count(self, **counts: int) -> None:
        """Add to the counts of `stats`, by their names."""
        with self._lock:
            for field in fields(self.stats):
                setattr(self.stats, field.name, getattr(self.stats, field.name) + counts.get(field.name, 0))
        for name, count in counts.items():
            _totals[name].add(count)


def _digest(views: list[memoryview]) -> int:
    """Return the XXH3-64 of `views`, one after the other."""
    # Not a cryptographic hash: this finds rot, at the speed of memory. Forgery is kept out by the directory's mode.
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def _fill(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Read into `views` from `offset` on. Return the bytes read; fewer than asked for at the end of the file."""
    left, start = list(views), offset
    while left:
        got = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if not got:
            break
        offset += got
        take(left, got)
    return offset - start


# All that the cache writes lies below this in the user's directory; nothing else there is ever touched.
_FOLDER = "penstock-chunks"
# Of every directory of the cache.
_MODE = 0o700
# Names of chunk files, and of those still being written; see `_publish`.
_OURS = re.compile(r"\d{8}|\.\d{8}-\d+-[0-9a-f]{8}")
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
            self._make(self.path)
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
            # The first read or write meets the same error, and reports it.
            return ""
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
            # ENOENT: another process removed the folder meanwhile, and the second try makes it again.
            if error.errno != errno.ENOENT:
                with self._lock:
                    # Other files fill the disk too, so the limit says nothing: shrink what there is.
                    self._evict(int(self._measure()[0] * _ROOM) - nbytes)
            self._publish(file, views)

    def _publish(self, file: Path, views: list[memoryview]) -> None:
        """Write `views` to a temporary file and rename it to `file`: readers see all of it or none."""
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
                    state = os.stat(path)
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


# A forked child would keep the names bound for as long as it lives.
_claims = let_go_in_children(socket.socket.close)


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
