"""A read-through cache of remote objects on a local disk, in verified chunk files that processes share.

An object's chunk directory is named after URI, identity and size, so chunks never become stale. The trailer of a chunk
file contains a digest of its bytes, object and offset, so corrupt and misplaced files are never used. If the cache
cannot be read or written, the source is read instead.
"""

from __future__ import annotations

import contextlib
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
from penstock.errors import IntegrityError
from penstock.logs import log_named
from penstock.storage.cache_directory import CacheDirectory, directory_at
from penstock.storage.file_digest import HashedReads
from penstock.storage.local import MAX_BUFFERS
from penstock.storage.repository import HubSource
from penstock.storage.source import Source, span, take
from penstock.totals import Total
from penstock.types import MIB

logger = log_named(__name__)

CACHE_CHUNK_BYTES = 8 * MIB
"""Number of object bytes in one chunk file. A miss costs one ranged request of this size. Source:
benchmarks/results/cpu2_202611/objects.md."""

# Trailer of a chunk file: magic, number of bytes before it, XXH3-64 of these bytes and their position.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"PSCHUNK2"
# Longest wait for chunks from another process, as a fraction of `stall_s`. The other process may be suspended.
_OTHERS_SHARE = 0.5


@dataclass(slots=True)
class CacheStats:
    """Counters of the cache for one source."""

    hits: int = 0
    misses: int = 0
    rotten: int = 0
    """Number of chunk files with a wrong digest, and of files that are not chunks."""
    asked_bytes: int = 0
    """Bytes that readers requested."""
    miss_bytes: int = 0
    """Bytes read from the source, in whole chunks."""


_totals = {field.name: Total() for field in fields(CacheStats)}


def cache_totals() -> CacheStats:
    """Return the counters of all sources in this process, including closed sources."""
    return CacheStats(**{name: total.value for name, total in _totals.items()})


def open_cached(source: Source, *, settings: Settings) -> Source:
    """Return `source` behind the cache in `settings.cache_dir`, or `source` itself if it cannot be cached.

    The returned source owns `source` and closes it.
    """
    if settings.cache_dir is None or not source.nbytes:
        return source
    if not source.identity:
        logger.warning("%s is not cached, because its server sends no ETag or date", source.uri)
        return source
    return CachedSource(source, directory_at(settings.cache_dir, settings.cache_bytes), settings=settings)


class CachedSource(HashedReads):
    """A `Source` that caches another `Source`. Use `open_cached`. `why` is the reason that the cache is not used."""

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
        key = blake3.blake3(name.encode()).hexdigest()[:40]
        self._place = directory.path / key[:2] / key
        self._key = key.encode()
        # The fetching thread may stall once in each of its attempts.
        self._wait_s = settings.stall_s * (settings.retries + 1)
        self._others_s = settings.stall_s * _OTHERS_SHARE
        self._lock = threading.Lock()
        # The digest covers all bytes read through the cache, because the source may read only some of them.
        self._digest = source.take_digest() if isinstance(source, HubSource) else None
        if refusal := directory.refusal():
            self._is_refused = True
            self._give_up(refusal)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. Return `cache` if every byte came from the cache, otherwise the source's path."""
        try:
            return self._read_hashed(self._read, offset, buffers)
        except IntegrityError:
            self.forget(0, self.nbytes)
            raise

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> str:
        stop, left = span(self, offset, buffers)
        # All chunks share one deadline, because other processes may be fetching each of them.
        path, until = "cache", time.monotonic() + self._others_s
        while left:
            start = offset - offset % CACHE_CHUNK_BYTES
            end = min(start + CACHE_CHUNK_BYTES, self.nbytes)
            views_in_chunk = take(left, min(end, stop) - offset)
            nbytes = sum(view.nbytes for view in views_in_chunk)
            with self._scratch_around(offset - start, end - offset - nbytes) as (before, after):
                views = [view for view in (before, *views_in_chunk, after) if view.nbytes]
                source_path = self._chunk(start, views, until)
            self._count(hits=source_path is None, asked_bytes=nbytes)
            path = source_path or path
            offset += nbytes
        return path

    @property
    def shared_as(self) -> str:
        """A name for the cache, the same in all processes that use it. See `CacheDirectory.name`."""
        return "" if self._is_refused else self._directory.name

    def cached_chunks(self) -> frozenset[int]:
        """Return the numbers of the chunks on disk, without checking their digests."""
        return frozenset() if self._is_refused else self._directory.chunks(self._place)

    def forget(self, offset: int, nbytes: int) -> bool:
        """Remove cached chunks whose bytes from the source were corrupt. Return False if no such chunk is cached."""
        starts = range(offset - offset % CACHE_CHUNK_BYTES, offset + nbytes, CACHE_CHUNK_BYTES)
        removed = [self._directory.remove(self._file(start)) for start in starts]
        return any(removed)

    def close(self) -> None:
        """See `Source.close`."""
        self._directory.spare.clear()
        self._source.close()

    @contextlib.contextmanager
    def _scratch_around(self, before: int, after: int) -> Iterator[tuple[memoryview, memoryview]]:
        if not before + after:
            yield memoryview(b""), memoryview(b"")
            return
        spare = self._directory.spare
        # Catch the error instead of checking, because another thread may take the last buffer.
        try:
            scratch = spare.pop()
        except IndexError:
            scratch = bytearray(CACHE_CHUNK_BYTES)
        view = memoryview(scratch)
        yield view[:before], view[before : before + after]
        spare.append(scratch)

    def _chunk(self, start: int, views: list[memoryview], until: float) -> str | None:
        """Fill `views`, which span one chunk. Return None for a cache hit, otherwise the path of the source's read."""
        file = self._file(start)
        if self._hit(file, start, views):
            return None
        if self.why is not None:
            return self._fetch(file, start, views)
        with self._directory.single_fetch(file, wait_s=self._wait_s, until=until):
            # Check again, because another thread or process may have stored the chunk.
            return None if self._hit(file, start, views) else self._fetch(file, start, views)

    def _fetch(self, file: Path, start: int, views: list[memoryview]) -> str:
        path = self._source.readv(start, views)
        nbytes = sum(view.nbytes for view in views)
        self._count(misses=1, miss_bytes=nbytes)
        if self.why is None:
            try:
                self._directory.write(file, [*views, memoryview(self._trailer(start, views, nbytes))])
            except OSError as error:
                self._give_up(f"cannot be written: {error.strerror}")
        return path

    def _file(self, start: int) -> Path:
        return self._place / f"{start // CACHE_CHUNK_BYTES:08d}"

    def _hit(self, file: Path, start: int, views: list[memoryview]) -> bool:
        nbytes = sum(view.nbytes for view in views)
        if self._is_refused:
            return False
        try:
            descriptor = self._directory.open_chunk(file, nbytes + _TRAILER.size)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._give_up(f"cannot be read: {error.strerror}")
            return False
        if descriptor is not None:
            try:
                if self._is_undamaged(descriptor, start, views, nbytes):
                    # Eviction orders chunks by mtime. The update fails in a read-only cache, which evicts nothing.
                    with contextlib.suppress(OSError):
                        os.utime(descriptor)
                    return True
            finally:
                os.close(descriptor)
        self._count(rotten=1)
        logger.warning("cached chunk %s of %s is corrupt, so it is read from the source", file, self.uri)
        self._directory.remove(file)
        return False

    def _is_undamaged(self, descriptor: int, start: int, views: list[memoryview], nbytes: int) -> bool:
        trailer = bytearray(_TRAILER.size)
        try:
            is_whole = _fill(descriptor, 0, views) == nbytes and os.preadv(descriptor, [trailer], nbytes)
        except OSError:
            # An I/O error from a bad disk counts as corruption, because the source can still provide the bytes.
            return False
        return bool(is_whole) and trailer == self._trailer(start, views, nbytes)

    def _trailer(self, start: int, views: list[memoryview], nbytes: int) -> bytes:
        # XXH3 detects corruption at memory speed. The directory's mode protects against forged chunks.
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        # Hash the position last, because a prefix of odd length would misalign all blocks of the chunk.
        digest.update(b"%s@%d+%d" % (self._key, start, nbytes))
        return _TRAILER.pack(_MAGIC, nbytes, digest.intdigest())

    def _give_up(self, why: str) -> None:
        with self._lock:
            if self.why is not None:
                return
            self.why = f"cache {self._directory.path} {why}"
        logger.warning("%s; %s is read from its source and not cached", self.why, self.uri)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for field in fields(self.stats):
                setattr(self.stats, field.name, getattr(self.stats, field.name) + counts.get(field.name, 0))
        for name, count in counts.items():
            _totals[name].add(count)


def _fill(descriptor: int, offset: int, views: list[memoryview]) -> int:
    left, start = list(views), offset
    while left:
        received = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if not received:
            break
        offset += received
        take(left, received)
    return offset - start
