"""A read-through cache of remote objects on a local disk: verified chunk files that processes share.

    readv --> chunk file? --yes, digest matches--> buffers
                 '--no--> source.readv --> buffers --> temporary file --rename--> chunk file

An object's chunks are in a directory named by its URI, identity and size, so chunks never become stale. A chunk file
ends in a digest of its bytes, its object and its offset, so damaged and misplaced files are never used. A load never
fails because of the cache. If the cache cannot be read or written, the source is read instead, and `why` says why.
`cache_directory` finds, writes and evicts the files.
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
"""Size of the part of an object in one chunk file.

Reason: this is the default unit of I/O, and a good size for requests to object stores, so a miss is one ranged request.
Source: benchmarks/results/cpu2_202611/objects.md.
"""

# End of a chunk file: the magic, the number of bytes before it, the XXH3-64 digest of these bytes and of their place.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"PSCHUNK2"
# Longest wait for chunks that another process fetches, as a fraction of `stall_s`. That process may be stopped, and
# this read must not count as stalled.
_OTHERS_SHARE = 0.5


@dataclass(slots=True)
class CacheStats:
    """Counts of the cache's work for one source."""

    hits: int = 0
    """Chunks found on disk."""
    misses: int = 0
    """Chunks read from the source."""
    rotten: int = 0
    """Chunk files that could not be used, because the digest was wrong or the file was not a chunk."""
    asked_bytes: int = 0
    """Bytes that readers requested."""
    miss_bytes: int = 0
    """Bytes read from the source, in whole chunks."""


# Totals over all sources of this process, including closed ones.
_totals = {field.name: Total() for field in fields(CacheStats)}


def cache_totals() -> CacheStats:
    """Return the cache's counts over all sources of this process so far."""
    return CacheStats(**{name: total.value for name, total in _totals.items()})


def open_cached(source: Source, *, settings: Settings) -> Source:
    """Return `source` behind the cache in `settings.cache_dir`, or the source itself if it cannot be cached.

    The returned source owns `source` and closes it.

    Args:
        source: identified by URI, identity and size. Its revision is not enough, because the same weights in other
            files have the same revision.
        settings: `cache_dir`, `cache_bytes`.
    """
    if settings.cache_dir is None or not source.nbytes:
        return source
    if not source.identity:
        logger.warning("%s is not cached, because its server sends no ETag or date", source.uri)
        return source
    return CachedSource(source, directory_at(settings.cache_dir, settings.cache_bytes), settings=settings)


class CachedSource(HashedReads):
    """A `Source` that caches another `Source`. Use `open_cached`.

    Attributes:
        stats: counts for this source.
        why: why the cache is not used or not written. None while it works.
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
        # 160 bits of a cryptographic hash: file names are short, and nobody can make two objects share a key.
        key = blake3.blake3(name.encode()).hexdigest()[:40]
        # Use two levels, so that no folder gets an entry for every object ever read.
        self._place = directory.path / key[:2] / key
        self._key = key.encode()
        # The thread that fetches may be silent this long, because each of its attempts may stall once.
        self._wait_s = settings.stall_s * (settings.retries + 1)
        self._others_s = settings.stall_s * _OTHERS_SHARE
        self._lock = threading.Lock()
        # Check the digest over all bytes read through the cache, because the source itself may bring only a part.
        self._digest = source.take_digest() if isinstance(source, HubSource) else None
        # Chunks in a refused directory are not even read.
        if refusal := directory.refusal():
            self._is_refused = True
            self._give_up(refusal)

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. Returns `cache` if every byte came from the cache, otherwise the source's path."""
        try:
            return self._read_hashed(self._read, offset, buffers)
        except IntegrityError:
            # The next load must not find the damaged chunks.
            self.forget(0, self.nbytes)
            raise

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> str:
        stop, left = span(self, offset, buffers)
        # Use one deadline for all chunks, because other processes may be fetching each of them.
        path, until = "cache", time.monotonic() + self._others_s
        while left:
            start = offset - offset % CACHE_CHUNK_BYTES
            end = min(start + CACHE_CHUNK_BYTES, self.nbytes)
            views_in_chunk = take(left, min(end, stop) - offset)
            nbytes = sum(view.nbytes for view in views_in_chunk)
            # Read the whole chunk even if the caller needs a part, because the digest covers all of it.
            with self._scratch_around(offset - start, end - offset - nbytes) as (before, after):
                views = [view for view in (before, *views_in_chunk, after) if view.nbytes]
                source_path = self._chunk(start, views, until)
            self._count(hits=source_path is None, asked_bytes=nbytes)
            path = source_path or path
            offset += nbytes
        return path

    @property
    def shared_as(self) -> str:
        """A name for the cache that all processes using it compute; see `CacheDirectory.name`."""
        return "" if self._is_refused else self._directory.name

    def cached_chunks(self) -> frozenset[int]:
        """Return the numbers of the chunks on disk, without checking their digests."""
        return frozenset() if self._is_refused else self._directory.chunks(self._place)

    def forget(self, offset: int, nbytes: int) -> bool:
        """Remove chunks that the source sent damaged. Return False if none of these bytes is cached."""
        is_here = False
        for start in range(offset - offset % CACHE_CHUNK_BYTES, offset + nbytes, CACHE_CHUNK_BYTES):
            is_here |= self._directory.remove(self._file(start))
        return is_here

    def close(self) -> None:
        """See `Source.close`."""
        # The scratch buffers belong to all sources. A source that still reads makes new ones.
        self._directory.spare.clear()
        self._source.close()

    @contextlib.contextmanager
    def _scratch_around(self, before: int, after: int) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield scratch memory for the parts of a chunk that the caller does not need."""
        # Usually the caller needs whole chunks, which the source then reads into its buffers without a copy.
        if not before + after:
            yield memoryview(b""), memoryview(b"")
            return
        spare = self._directory.spare
        # Catch the error, because another thread may take the last buffer after a check.
        try:
            scratch = spare.pop()
        except IndexError:
            scratch = bytearray(CACHE_CHUNK_BYTES)
        view = memoryview(scratch)
        yield view[:before], view[before : before + after]
        spare.append(scratch)

    def _chunk(self, start: int, views: list[memoryview], until: float) -> str | None:
        """Fill `views`, which span one chunk. Return None if the cache had it, otherwise the source's path."""
        file = self._file(start)
        if self._hit(file, start, views):
            return None
        # New chunks are not stored, so do not wait for another process.
        if self.why is not None:
            return self._fetch(file, start, views)
        with self._directory.single_fetch(file, wait_s=self._wait_s, until=until):
            # Look again, because another thread or process may have stored the chunk.
            return None if self._hit(file, start, views) else self._fetch(file, start, views)

    def _fetch(self, file: Path, start: int, views: list[memoryview]) -> str:
        """Fill `views` from the source, store the chunk, and return the source's path."""
        path = self._source.readv(start, views)
        nbytes = sum(view.nbytes for view in views)
        self._count(misses=1, miss_bytes=nbytes)
        if self.why is None:
            self._keep(file, start, views, nbytes)
        return path

    def _file(self, start: int) -> Path:
        return self._place / f"{start // CACHE_CHUNK_BYTES:08d}"

    def _hit(self, file: Path, start: int, views: list[memoryview]) -> bool:
        """Read a chunk file into `views`. Return False if it is absent, damaged (it is then removed) or unreadable."""
        nbytes = sum(view.nbytes for view in views)
        if self._is_refused:
            return False
        try:
            descriptor = self._directory.open_chunk(file, nbytes + _TRAILER.size)
        except FileNotFoundError:
            return False
        except OSError as error:
            # Other errors would occur for every chunk.
            self._give_up(f"cannot be read: {error.strerror}")
            return False
        if descriptor is not None:
            try:
                if self._is_undamaged(descriptor, start, views, nbytes):
                    # Eviction goes by mtime, so update it. This fails in a read-only cache, which evicts nothing.
                    with contextlib.suppress(OSError):
                        os.utime(descriptor)
                    return True
            finally:
                os.close(descriptor)
        self._count(rotten=1)
        logger.warning("cached chunk %s of %s is damaged, so it is read from the source", file, self.uri)
        self._directory.remove(file)
        return False

    def _is_undamaged(self, descriptor: int, start: int, views: list[memoryview], nbytes: int) -> bool:
        """Read a chunk file into `views`. Return whether it is the undamaged chunk at `start`."""
        trailer = bytearray(_TRAILER.size)
        try:
            is_whole = _fill(descriptor, 0, views) == nbytes and os.preadv(descriptor, [trailer], nbytes)
        except OSError:
            # Treat an I/O error of a bad disk as damage, because the source still has the bytes.
            return False
        return bool(is_whole) and trailer == self._trailer(start, views, nbytes)

    def _keep(self, file: Path, start: int, views: list[memoryview], nbytes: int) -> None:
        """Store a chunk. If that fails, stop storing chunks of this source."""
        try:
            self._directory.write(file, [*views, memoryview(self._trailer(start, views, nbytes))])
        except OSError as error:
            self._give_up(f"cannot be written: {error.strerror}")

    def _trailer(self, start: int, views: list[memoryview], nbytes: int) -> bytes:
        """Return the last bytes of the file for the chunk at `start`."""
        # This hash is not cryptographic. It detects damaged and misplaced files at the speed of memory. The mode of the
        # directory prevents forged chunks.
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        # Hash the place last, because a prefix of odd length would misalign all blocks of the chunk. The key is a hash
        # of the object's URI, identity and size.
        digest.update(b"%s@%d+%d" % (self._key, start, nbytes))
        return _TRAILER.pack(_MAGIC, nbytes, digest.intdigest())

    def _give_up(self, why: str) -> None:
        """Stop storing chunks, and log the reason once."""
        with self._lock:
            if self.why is not None:
                return
            self.why = f"cache {self._directory.path} {why}"
        logger.warning("%s; %s is read from its source and not cached", self.why, self.uri)

    def _count(self, **counts: int) -> None:
        """Add to the fields of `stats` by name."""
        with self._lock:
            for field in fields(self.stats):
                setattr(self.stats, field.name, getattr(self.stats, field.name) + counts.get(field.name, 0))
        for name, count in counts.items():
            _totals[name].add(count)


def _fill(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Read into `views` from `offset`. Return the number of bytes read, which is smaller at the end of the file."""
    left, start = list(views), offset
    while left:
        received = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if not received:
            break
        offset += received
        take(left, received)
    return offset - start
