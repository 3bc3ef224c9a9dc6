"""A read-through cache of remote objects on a local disk: chunk files, each verified, shared by processes.

In: a `Source` and a directory. Out: a `CachedSource`: what is there from the disk, the rest from the source.
Not here: which sources are worth caching (`storage.open_source`).

    readv --> chunk file? --yes, digest holds--> buffers
                 '--no--> source.readv --> buffers --> temporary file --rename--> chunk file

An object's chunks lie in a directory named by what the object is (URI, identity, size), so no chunk is ever stale. A
chunk file ends in a digest of its bytes and of its place: the object and the offset. A damaged file and a file that
belongs to another place are never used. A cache that cannot be written or read never fails a load: the source is read
instead, and `why` says so. The files themselves are written, found and evicted by `cache_directory`.
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
from penstock.storage.file_digest import FileDigest
from penstock.storage.local import MAX_BUFFERS
from penstock.storage.repository import HubSource
from penstock.storage.source import Source, span, take
from penstock.totals import Total
from penstock.types import MIB

logger = log_named(__name__)

CACHE_CHUNK_BYTES = 8 * MIB
"""Bytes of an object in one chunk file.

Reason: the default unit of I/O, so that a miss is one ranged request of the size object stores are read best with.
Source: benchmarks/results/cpu2_202611/objects.md.
"""

# At a chunk file's end: the magic, the bytes before the trailer, the XXH3-64 digest of those bytes and of their place.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"PSCHUNK2"
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
    """Chunk files that could not be used: the digest was wrong, or something else had the file's name."""
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
        self._key = key.encode()
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
        return frozenset() if self._is_refused else self._directory.chunks(self._place)

    def forget(self, offset: int, nbytes: int) -> bool:
        """Remove chunks whose source sent them damaged. Return False where none of these bytes is cached."""
        is_here = False
        for start in range(offset - offset % CACHE_CHUNK_BYTES, offset + nbytes, CACHE_CHUNK_BYTES):
            is_here |= self._directory.remove(self._file(start))
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
        if self._hit(file, start, views):
            return None
        # Chunks are no longer stored, so there is nothing to wait for.
        if self.why is not None:
            return self._fetch(file, start, views)
        with self._directory.single_fetch(file, wait_s=self._wait_s, until=until):
            # Looked for again: another thread or process may have stored the chunk while this one waited.
            return None if self._hit(file, start, views) else self._fetch(file, start, views)

    def _fetch(self, file: Path, start: int, views: list[memoryview]) -> str:
        """Fill `views` from the source and store the chunk; return the source's path."""
        path = self._source.readv(start, views)
        nbytes = sum(view.nbytes for view in views)
        self._count(misses=1, miss_bytes=nbytes)
        if self.why is None:
            self._keep(file, start, views, nbytes)
        return path

    def _file(self, start: int) -> Path:
        return self._place / f"{start // CACHE_CHUNK_BYTES:08d}"

    def _hit(self, file: Path, start: int, views: list[memoryview]) -> bool:
        """Read a chunk file into `views`. False when it is absent, rotten (it is then removed) or cannot be read."""
        nbytes = sum(view.nbytes for view in views)
        if self._is_refused:
            return False
        try:
            descriptor = self._directory.open_chunk(file, nbytes + _TRAILER.size)
        except FileNotFoundError:
            return False
        except OSError as error:
            # Any other error will meet every other chunk too.
            self._give_up(f"cannot be read: {error.strerror}")
            return False
        if descriptor is not None:
            try:
                if self._is_sound(descriptor, start, views, nbytes):
                    # Eviction goes by mtime, so a hit renews it. A read-only cache refuses, and evicts nothing anyway.
                    with contextlib.suppress(OSError):
                        os.utime(descriptor)
                    return True
            finally:
                os.close(descriptor)
        self._count(rotten=1)
        logger.warning("cached chunk %s of %s is damaged; it is read again from its source", file, self.uri)
        self._directory.remove(file)
        return False

    def _is_sound(self, descriptor: int, start: int, views: list[memoryview], nbytes: int) -> bool:
        """Read a chunk file into `views`; return whether it is the chunk at `start`, undamaged."""
        trailer = bytearray(_TRAILER.size)
        try:
            is_whole = _fill(descriptor, 0, views) == nbytes and os.preadv(descriptor, [trailer], nbytes)
        except OSError:
            # EIO of a bad disk is damage as a wrong digest is: the source still has the bytes.
            return False
        return bool(is_whole) and trailer == self._trailer(start, views, nbytes)

    def _keep(self, file: Path, start: int, views: list[memoryview], nbytes: int) -> None:
        """Store a chunk; where that fails, store no more of this source."""
        try:
            self._directory.write(file, [*views, memoryview(self._trailer(start, views, nbytes))])
        except OSError as error:
            self._give_up(f"cannot be written: {error.strerror}")

    def _trailer(self, start: int, views: list[memoryview], nbytes: int) -> bytes:
        """Return the end of the file of the chunk at `start`."""
        # Not a cryptographic hash: this finds rot and mistaken files, at the speed of memory. Forgery is kept out by
        # the directory's mode.
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        # After the bytes, because a prefix of odd length would misalign every block of theirs. The key is a hash of the
        # object's URI, identity and size.
        digest.update(b"%s@%d+%d" % (self._key, start, nbytes))
        return _TRAILER.pack(_MAGIC, nbytes, digest.intdigest())

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
