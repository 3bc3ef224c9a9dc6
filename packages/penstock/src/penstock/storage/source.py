"""The protocols `Source` and `Storage`, a source in memory, and the registry of storages by scheme."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from penstock import waits
from penstock.config import Settings
from penstock.entry_points import entry_points, load
from penstock.errors import ConfigError, FormatError, IntegrityError, SourceTruncated
from penstock.types import GIB

MAX_SMALL_BYTES = GIB
"""Maximum size of an index, manifest or signature. A manifest of this size describes 35 TB."""


GLOB = re.compile(r"[*?[]")
"""Matches a character that makes a remote path a glob."""


class Source(Protocol):
    """A readable file or object with a fixed identity and size, opened once and read by many threads.

    Attributes:
        uri: URI of the source for messages, without secrets.
        nbytes: size in bytes when the source was opened.
        identity: ETag, or `dev:inode:mtime_ns:size` for a file. "" if unknown.
    """

    @property
    def uri(self) -> str:
        """See `Source`."""

    @property
    def nbytes(self) -> int:
        """See `Source`."""

    @property
    def identity(self) -> str:
        """See `Source`."""

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """Fill `buffers` in order with the bytes from `offset`. Any number of threads may call this concurrently.

        Args:
            offset: bytes from the start of the source.
            buffers: writable and contiguous, with format "B". After an error, the content of `buffers` is undefined.

        Returns:
            A fixed name for the path that the bytes took (`page-cache`, `direct`, `http`, `cache`, `memory`).

        Raises:
            SourceTruncated: the source is shorter than `offset + sum of lengths`.
            SourceChanged: the source has changed since it was opened.
            SourceStalled: no byte arrived for `stall_s` seconds.
            SourceUnavailable, PermissionDenied, NotFound: the storage failed, after retries where useful.
        """

    def close(self) -> None:
        """Free descriptors and connections. Call this only while no `readv` is running. Idempotent."""


@runtime_checkable
class Counting(Protocol):
    """A source that reports the progress of its reads."""

    received_bytes: int
    """Bytes received over all reads. Concurrent updates may lose a few, but the number never decreases."""


@runtime_checkable
class Digested(Protocol):
    """A source whose storage provides a digest of the whole content."""

    @property
    def is_checked(self) -> bool:
        """Return whether the digest was checked and matches."""

    def check_whole(self) -> bool:
        """Check the digest in the reads after this call. Return False if there is no digest.

        Read the whole content exactly once after this call. The read that completes the content raises IntegrityError
        on a mismatch. Before this call, read only the start of the content, for example a header.
        """


def require_checked(source: Digested) -> None:
    """Raise IntegrityError if the digest was not checked although all bytes were read, see `Digested`."""
    if not source.is_checked:
        raise IntegrityError(
            "the digest from the storage was not checked, because some content arrived after the stall deadline",
            uri=getattr(source, "uri", None),
            hint="try again, or set a higher PENSTOCK_STALL_S",
        )


class MemorySource:
    """A source whose bytes are in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, *, uri: str = "memory:") -> None:
        self._data = memoryview(data).cast("B")
        self.uri = uri
        self.nbytes = self._data.nbytes
        self.identity = f"memory:{id(data)}:{self.nbytes}"

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`."""
        _, left = span(self, offset, buffers)
        for buffer in left:
            buffer[:] = self._data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes
        return "memory"

    def close(self) -> None:
        """See `Source.close`."""


def take(left: list[memoryview], nbytes: int) -> list[memoryview]:
    """Remove up to `nbytes` from the start of `left`, and return the removed views."""
    taken = []
    while nbytes and left:
        view = left[0][:nbytes]
        taken.append(view)
        nbytes -= view.nbytes
        if view.nbytes == left[0].nbytes:
            del left[0]
        else:
            left[0] = left[0][view.nbytes :]
    return taken


def glob_pattern(key: str) -> re.Pattern[str]:
    """Compile a glob that must match a whole key. A `**` segment also matches slashes, unlike other wildcards."""
    # Do not use fnmatch, in which a star also matches slashes.
    text = ""
    for at in re.finditer(r"(?:^|(?<=/))\*\*(/|$)|\*+|\?|\[(!?)([^]]+)\]|(.)", key, re.DOTALL):
        whole = at.group()
        if at[1] is not None:
            text += "(?:[^/]+/)*" if at[1] else ".*"
        elif at[3]:
            text += f"(?!/)[{'^' if at[2] else ''}{re.escape(at[3]).replace(chr(92) + '-', '-')}]"
        else:
            text += re.escape(whole) if at[4] else "[^/]" if whole == "?" else "[^/]*"
    return re.compile(text, re.DOTALL)


def span(source: Source, offset: int, buffers: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
    """Return the end offset of a `readv`, and its non-empty buffers. Raises SourceTruncated."""
    stop = offset + sum(buffer.nbytes for buffer in buffers)
    if offset < 0 or stop > source.nbytes:
        message = f"the range is outside the source, which has {source.nbytes} bytes"
        raise SourceTruncated(message, uri=source.uri, byte_range=(offset, stop))
    return stop, [buffer for buffer in buffers if buffer.nbytes]


ENTRY_POINTS = "penstock.storages"
"""Entry point group in which an installed package lists its storages by scheme. Worker processes need it, because a
call of `register_storage` does not reach them."""

# Source: RFC 3986, section 3.1, in lower case.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


class Storage(Protocol):
    """A kind of storage for URIs with one or more schemes. Any thread may call the methods."""

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """Open an object.

        Raises:
            NotFound, PermissionDenied, SourceUnavailable, SourceStalled: the storage did not return the object.
            ConfigError: the URI or an option is invalid.
        """

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """Return the sorted URIs of one object, of all objects directly below a prefix, or of all matches of a glob.

        Raises:
            NotFound: there are no objects.
            PermissionDenied: the storage forbids listing, so callers try the usual names of weight files.
        """

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """Return a small file (an index, a manifest), or None if it is absent. Most storages can use `read_whole`."""


@runtime_checkable
class WritableStorage(Protocol):
    """A storage that accepts small files."""

    def write_small(self, uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str]) -> None:
        """Write a small file (a manifest, a signature) atomically."""


@runtime_checkable
class PinningStorage(Protocol):
    """A storage whose URIs may name a revision that moves, such as a branch."""

    def pin(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> str:
        """Return the URI that pins the current content of `uri`. Raises the same errors as `Storage.open`."""


_factories: dict[str, Callable[[], Storage]] = {}
_storages: dict[Callable[[], Storage], Storage] = {}
_lock = threading.Lock()


def register_storage(scheme: str, factory: Callable[[], Storage]) -> None:
    """Register a storage for a URI scheme in this process.

    Args:
        scheme: the part before `://`, in lower case.
        factory: a class or function without arguments, called once when the storage is first used.

    Raises:
        ConfigError: the scheme is invalid or already registered.
    """
    if not _SCHEME.fullmatch(scheme) or scheme == "file":
        hint = "write it in lower case and without ://; file is always a local path"
        raise ConfigError(f"cannot register a storage for {scheme!r}, which is not a URI scheme", hint=hint)
    with _lock:
        if _factories.setdefault(scheme, factory) is not factory:
            message = f"cannot register a storage for {scheme}://, because one is registered already"
            raise ConfigError(message, hint="choose another scheme")


def registered_schemes() -> list[str]:
    """Return the schemes registered in this process, sorted."""
    return sorted(_factories)


def is_registered(scheme: str) -> bool:
    """Return whether a storage is registered for this scheme, or an installed package provides one."""
    if scheme in _factories:
        return True
    # Do not cache the result, because a scheme without a storage leads to an error.
    for entry in entry_points(ENTRY_POINTS, scheme):
        factory = load(entry)
        if not callable(factory):
            raise ConfigError(f"the entry point {scheme} of {ENTRY_POINTS} is {factory!r}, not a class or a function")
        register_storage(scheme, factory)
        return True
    return False


def storage_for(scheme: str) -> Storage:
    """Return the storage for a registered scheme. The first call creates the storage."""
    with _lock:
        factory = _factories[scheme]
        # Schemes with the same factory share a storage, as s3, gs and az do.
        if factory not in _storages:
            _storages[factory] = factory()
        return _storages[factory]


_SMALL_BYTES_PER_S = 64 << 10
"""Minimum rate for a header, an index or a manifest. A server that sends single bytes would take hours."""


class TimedReads:
    """A source whose reads have a deadline of twice `stall_s` plus one second for each 64 KiB.

    For small reads before a load has its own deadlines. Closing this object closes the source.
    """

    def __init__(self, source: Source, stall_s: float) -> None:
        self._source = source
        self._stall_s = stall_s
        self.uri, self.nbytes, self.identity = source.uri, source.nbytes, source.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`. Raises SourceStalled if the deadline passes."""
        wait_s = 2 * self._stall_s + sum(buffer.nbytes for buffer in buffers) / _SMALL_BYTES_PER_S
        with waits.limited(wait_s, uri=self.uri):
            return self._source.readv(offset, buffers)

    def close(self) -> None:
        """See `Source.close`."""
        self._source.close()


def read_whole(source: Source, *, stall_s: float | None = None) -> bytes:
    """Read a small source and close it. Raises FormatError for more than `MAX_SMALL_BYTES`."""
    if stall_s is not None:
        source = TimedReads(source, stall_s)
    try:
        if source.nbytes > MAX_SMALL_BYTES:
            raise FormatError(f"a file of {source.nbytes} bytes is too large for an index or manifest", uri=source.uri)
        # Allocate only after the check, because a server may claim any size.
        data = bytearray(source.nbytes)
        source.readv(0, [memoryview(data)])
        return bytes(data)
    finally:
        source.close()
