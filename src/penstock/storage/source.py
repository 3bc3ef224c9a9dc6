"""The `Source` protocol: one file or object, read by ranges; with its reference in memory.

In: offsets and the caller's buffers. Out: filled buffers, and the path the bytes took.
Not here: which source a URI needs (`storage.open_source`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from penstock.errors import SourceTruncated
from penstock.types import GIB

MAX_SMALL_BYTES = GIB
"""Longest index, manifest or signature read whole. A manifest has 8 bytes a 256 KiB leaf: this is one of 35 TB."""


class Source(Protocol):
    """A readable file or object of fixed identity and size, opened once and read by many threads.

    Attributes:
        uri: where it is, as the user would name it; never holds a secret.
        nbytes: its size when opened.
        identity: ETag, or `dev:inode:mtime_ns:size` of a file; "" where there is none.
    """

    @property
    def uri(self) -> str:
        """See above."""
        ...

    @property
    def nbytes(self) -> int:
        """See above."""
        ...

    @property
    def identity(self) -> str:
        """See above."""
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


def span(source: Source, offset: int, buffers: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
    """Return where a `readv` ends, in bytes from the start of the source, and those of its buffers that hold any byte.

    Raises:
        SourceTruncated: the range is not within the source.
    """
    stop = offset + sum(buffer.nbytes for buffer in buffers)
    if offset < 0 or stop > source.nbytes:
        raise SourceTruncated(f"it has {source.nbytes} bytes", uri=source.uri, byte_range=(offset, stop))
    return stop, [buffer for buffer in buffers if buffer.nbytes]
