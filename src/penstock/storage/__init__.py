"""Storage: where weights rest. The `Source` protocol, its in-memory reference, and the chooser by URI.

In: a URI. Out: a `Source` that fills the caller's buffers.
Not here: what the bytes mean (`safetensors`, `manifest`), where they go (`engine`).

    uri --open_source--> Source --readv(offset, buffers)--> the caller's memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.errors import SourceTruncated


class Source(Protocol):
    """One readable file or object, of fixed identity and size, opened once and read by many threads.

    Attributes:
        uri: where it is, as the user would name it; never holds a secret.
        nbytes: its size when opened.
        identity: ETag, or `dev:inode:mtime_ns:size` of a file; "" where there is none.
    """

    @property
    def uri(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def identity(self) -> str: ...

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


class MemorySource:
    """The reference source: bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, *, uri: str = "memory:") -> None:
        self._data = memoryview(data).cast("B")
        self.uri = uri
        self.nbytes = self._data.nbytes
        self.identity = f"memory:{id(data)}:{self.nbytes}"

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`."""
        for buffer in buffers:
            stop = offset + buffer.nbytes
            if stop > self.nbytes:
                raise SourceTruncated("source ends early", uri=self.uri, byte_range=(offset, stop))
            buffer[:] = self._data[offset:stop]
            offset = stop
        return "memory"

    def close(self) -> None:
        """See `Source.close`."""
