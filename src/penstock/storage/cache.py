"""A read-through cache of remote objects on a local disk: chunk files, each verified, shared by processes.

In: a `Source` and a directory. Out: a `CachedSource`: what is there from the disk, the rest from the source.
An object's chunks lie in a directory named by what the object is (URI, identity, size), so nothing is ever stale; a
chunk file ends in its XXH3 digest, so nothing rotten is ever used. A cache that cannot be written or read never fails
a load: the source is read instead, and `why` says so.
Not here: which sources are worth caching (`storage.open_source`), the files and their eviction (`cache_directory`).

    readv --> chunk file? --yes, digest holds--> buffers
                 '--no--> source.readv --> buffers --> temporary file --rename--> chunk file
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import blake3
import xxhash

from penstock.config import Settings
from penstock.storage.cache_directory import IOV, CacheDirectory, directory_at, take
from penstock.storage.source import Source, span

logger = logging.getLogger(__name__)

CACHE_CHUNK_BYTES = 8 << 20
"""Bytes of an object in one chunk file.

Reason: the default unit of I/O, so that a miss is one ranged request of the size object stores are read best with.
Source: benchmarks/results/cpu2_202611/objects.md.
"""

_TRAILER = struct.Struct("<8sQQ")
"""At a chunk file's end: the magic, the bytes before the trailer, the XXH3-64 digest of those bytes."""

_MAGIC = b"PSCHUNK1"


OTHERS_SHARE = 0.5
"""Of `stall_s`: how long a read waits for chunks that another process fetches. Reason: that process may
have been stopped, and this read must not be taken for stalled."""


@dataclass(slots=True)
class CacheStats:
    """Counts of what the cache did for one source."""

    hits: int = 0
    """Chunks."""
    misses: int = 0
    rotten: int = 0
    asked_bytes: int = 0
    """By readers, found here or not."""
    miss_bytes: int = 0
    """Read from the source, whole chunks."""


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
        self._others_s = settings.stall_s * OTHERS_SHARE
        self._lock = threading.Lock()
        if refusal := directory.refusal():
            self._is_refused = True
            self._give_up(refusal)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. `cache` when every byte came from the cache, else the source's own word."""
        stop, left = span(self, offset, buffers)
        path, until = "cache", time.monotonic() + self._others_s
        while left:
            start = offset - offset % CACHE_CHUNK_BYTES
            end = min(start + CACHE_CHUNK_BYTES, self.nbytes)
            wanted = take(left, min(end, stop) - offset)
            taken = sum(view.nbytes for view in wanted)
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
        self._directory.spare.clear()
        self._source.close()

    @contextlib.contextmanager
    def _around(self, before: int, after: int) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield scratch memory for the parts of a chunk that the caller does not want."""
        if not before + after:
            yield memoryview(b""), memoryview(b"")
            return
        spare = self._directory.spare
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
        if self.why is not None:  # nothing is stored any more, so there is nothing to wait for
            return self._fetch(file, start, views)
        with self._directory.single_fetch(file, wait_s=self._wait_s, until=until):
            # Looked for again: another thread or process may have stored the chunk while this one waited.
            return None if self._hit(file, views) else self._fetch(file, start, views)

    def _fetch(self, file: Path, start: int, views: list[memoryview]) -> str:
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


def _digest(views: list[memoryview]) -> int:
    # Not a cryptographic hash: this finds rot, at the speed of memory. Forgery is kept out by the directory's mode.
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def _fill(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Read into `views` from `offset` on. Return the bytes read; fewer than asked for at the end of the file."""
    left, start = list(views), offset
    while left:
        got = os.preadv(descriptor, left[:IOV], offset)
        if not got:
            break
        offset += got
        take(left, got)
    return offset - start
