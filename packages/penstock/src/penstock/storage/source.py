"""The protocols of storage, `Source` and `Storage`; the reference source in memory; storages registered by scheme.

In: offsets and the caller's buffers; or a scheme and a class. Out: filled buffers and the path the bytes took; or the
storage that opens, lists and reads URIs of that scheme.
Not here: which source a URI needs (`storage.open_source`), local paths (`files`).

    register_storage("vault", VaultStorage)
    penstock.load("vault://models/llama", "cuda")
"""

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
"""Longest index, manifest or signature read whole. A manifest has 8 bytes a 256 KiB leaf: this is one of 35 TB."""


GLOB = re.compile(r"[*?[]")
"""A character that makes a remote path a glob."""


class Source(Protocol):
    """A readable file or object of fixed identity and size, opened once and read by many threads.

    Attributes:
        uri: where it is, as the user would name it; never holds a secret.
        nbytes: its size when opened.
        identity: ETag, or `dev:inode:mtime_ns:size` of a file; "" where there is none.
    """

    @property
    def uri(self) -> str:
        """Return where it is; see `Source`."""
        ...

    @property
    def nbytes(self) -> int:
        """Return its size; see `Source`."""
        ...

    @property
    def identity(self) -> str:
        """Return its identity; see `Source`."""
        ...

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """Fill `buffers`, one after the other, with the bytes from `offset` on; return the path taken.

        Args:
            offset: bytes from the start of the source.
            buffers: writable, contiguous, format "B". Filled whole or an error is raised; on an error their
                content is undefined.

        Returns:
            A short stable word for the path the bytes took (`page-cache`, `direct`, `http`, `cache`, `memory`).

        Raises:
            SourceTruncated: the source is shorter than `offset + sum of lengths`.
            SourceChanged: it is not the source that was opened.
            SourceStalled: no byte arrived for `stall_s`.
            SourceUnavailable, PermissionDenied, NotFound: as their names say, after retries where those can help.

        Order: any thread, any number at once. Never waits without a deadline by progress.
        """
        ...

    def close(self) -> None:
        """Free descriptors and connections. Idempotent; no `readv` may be running."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A source that says how far its reads are before they are done."""

    received_bytes: int
    """Given by storage so far, of all reads; only grows, but for an addition lost where two reads count at once."""


@runtime_checkable
class Digested(Protocol):
    """A source that knows a digest of its whole content, from the storage itself.

    Attributes:
        is_checked: the digest was compared, and is equal.
    """

    @property
    def is_checked(self) -> bool:
        """Return whether it was compared; see `Digested`."""
        ...

    def check_whole(self) -> bool:
        """Compare that digest while the content is read, whole and once, from now on; False: there is none.

        The read that brings the last missing bytes raises IntegrityError if it differs. Call it before any read but
        one from the start, as of a header.
        """
        ...


def require_checked(source: Digested) -> None:
    """Raise IntegrityError unless the digest was compared, after all bytes were read; see `Digested`."""
    if not source.is_checked:
        raise IntegrityError(
            "the content was not compared with the digest of its storage: a part came later than stall_s",
            uri=getattr(source, "uri", None),
            hint="try again, or raise PENSTOCK_STALL_S",
        )


class MemorySource:
    """The reference source: bytes in memory."""

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
    """Cut the first `nbytes` off `left`, or all of it where it has less; return what was cut off."""
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
    """Return a glob over a whole key: `**` as a segment crosses slashes, everything else stays within its segment."""
    # Not by fnmatch, whose stars cross slashes: a glob must match in a remote place as it does in a directory.
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
    """Return where a `readv` ends, in bytes from the start of the source, and those of its buffers that hold any byte.

    Raises:
        SourceTruncated: the range is not within the source.
    """
    stop = offset + sum(buffer.nbytes for buffer in buffers)
    if offset < 0 or stop > source.nbytes:
        raise SourceTruncated(f"it has {source.nbytes} bytes", uri=source.uri, byte_range=(offset, stop))
    return stop, [buffer for buffer in buffers if buffer.nbytes]


ENTRY_POINTS = "penstock.storages"
"""Group of entry points in which an installed package names its storages, by scheme.

Reason: the workers of a conversion are other processes, which a call in this one does not reach.
"""

# Source: RFC 3986, section 3.1, in lower case.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


class Storage(Protocol):
    """A kind of storage that URIs of one or several schemes name. Methods are called from any thread."""

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> Source:
        """Open one object.

        Raises:
            NotFound, PermissionDenied, SourceUnavailable, SourceStalled: as their names say.
            ConfigError: the URI or an option is wrong.
        """
        ...

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        """Return the URIs that `uri` names, sorted: one object, those directly below a prefix, or matches of a glob.

        Raises:
            NotFound: nothing is there.
            PermissionDenied: nothing can be listed; files are then looked for under their published names.
        """
        ...

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        """Return a whole index, manifest or signature; None when it is not there. `read_whole` does for most."""
        ...


@runtime_checkable
class WritableStorage(Protocol):
    """A storage that small files can be written to."""

    def write_small(self, uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str]) -> None:
        """Write a whole small file (a manifest, a signature); it appears at once or not at all."""
        ...


@runtime_checkable
class PinningStorage(Protocol):
    """A storage whose URIs may name a moving revision."""

    def pin(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> str:
        """Return the URI of the content that `uri` names now. Raises as `Storage.open`."""
        ...


_factories: dict[str, Callable[[], Storage]] = {}
_storages: dict[Callable[[], Storage], Storage] = {}
_lock = threading.Lock()


def register_storage(scheme: str, factory: Callable[[], Storage]) -> None:
    """Register a storage for the URIs of a scheme, in this process.

    Args:
        scheme: what stands before `://`, in lower case.
        factory: a class without arguments, or a function; called once, on first use.

    Raises:
        ConfigError: the scheme is not one, or another storage has it.
    """
    if not _SCHEME.fullmatch(scheme) or scheme == "file":
        hint = "write it in lower case and without ://; file is always a local path"
        raise ConfigError(f"cannot register a storage for {scheme!r}: not a URI scheme", hint=hint)
    with _lock:
        # The same factory again is no conflict: a module that registers itself may be imported twice.
        if _factories.setdefault(scheme, factory) is not factory:
            raise ConfigError(f"cannot register a storage for {scheme}://: there is one", hint="choose another scheme")


def registered_schemes() -> list[str]:
    """Return the schemes registered in this process, sorted."""
    return sorted(_factories)


def is_registered(scheme: str) -> bool:
    """Return whether a storage has this scheme, registered here or by an installed package."""
    if scheme in _factories:
        return True
    # Looked up on each call: an unknown scheme ends in an error, so this is never on a fast path.
    for entry in entry_points(ENTRY_POINTS, scheme):
        factory = load(entry)
        if not callable(factory):
            raise ConfigError(f"the entry point {scheme} of {ENTRY_POINTS} is {factory!r}, not a class or a function")
        register_storage(scheme, factory)
        return True
    return False


def storage_for(scheme: str) -> Storage:
    """Return the storage of a registered scheme; it is made on first use."""
    with _lock:
        factory = _factories[scheme]
        # One storage for each factory, not for each scheme: s3, gs and az share one.
        if factory not in _storages:
            _storages[factory] = factory()
        return _storages[factory]


_SMALL_BYTES_PER_S = 64 << 10
"""Slowest accepted rate of a header, an index or a manifest. Reason: a byte now and then is progress, and would take
hours."""


class TimedReads:
    """A source whose reads have a longest time: twice `stall_s`, and one second more for each 64 KiB.

    For small reads that a load waits for before its own deadlines begin. Closing it closes the source.

    Args:
        source: it is read; it has deadlines by progress.
        stall_s: seconds without a byte after which the source itself gives up.
    """

    def __init__(self, source: Source, stall_s: float) -> None:
        self._source = source
        self._stall_s = stall_s
        self.uri, self.nbytes, self.identity = source.uri, source.nbytes, source.identity

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """Fill the buffers; see `Source`. SourceStalled: the time is over."""
        wait_s = 2 * self._stall_s + sum(buffer.nbytes for buffer in buffers) / _SMALL_BYTES_PER_S
        with waits.limited(wait_s, uri=self.uri):
            return self._source.readv(offset, buffers)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def read_whole(source: Source, *, stall_s: float | None = None) -> bytes:
    """Read a small source whole and close it.

    Args:
        stall_s: see `TimedReads`. None: `source` has its own deadlines.

    Raises:
        FormatError: it has more than `MAX_SMALL_BYTES`. SourceStalled: its time is over. Others as `Source.readv`.
    """
    if stall_s is not None:
        source = TimedReads(source, stall_s)
    try:
        if source.nbytes > MAX_SMALL_BYTES:
            raise FormatError(f"{source.nbytes} bytes are too many for an index or a manifest", uri=source.uri)
        # Nothing is allocated before the size was checked: a server may claim any.
        data = bytearray(source.nbytes)
        source.readv(0, [memoryview(data)])
        return bytes(data)
    finally:
        source.close()
