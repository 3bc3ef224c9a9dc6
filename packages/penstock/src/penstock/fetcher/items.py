"""Work items of a running fetch: a read of an upstream, and the verification of what was received.

In: the fetch, chunks to read. Out: bytes in place, counted as received; verified chunks.
Not here: the choice of chunks (`choice`), the reads' transports (`upstream`), reads of storage (`storage_reader`).

    ReadFromUpstream: post -> wait -> note -> Fetch.assign, Fetch.add_received -> VerifyReceived: digest, compare
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from penstock.errors import Cancelled, DestinationError, PenstockError
from penstock.fetcher.upstream import Read, UpstreamReader
from penstock.fetcher.verify import ReceivedChunks
from penstock.transport.protocol import PendingRead as PendingRead
from penstock.transport.protocol import Stoppable, Transport, wait_all
from penstock.types import I64, U64


class FetchContext(Protocol):
    """The running fetch as its items see it: `run.Fetch`."""

    is_touched: bool
    """Whether a byte of the weights may have been written."""

    @property
    def read_stall_s(self) -> float:
        """Return the seconds to wait for an upstream that sends nothing."""
        ...

    def nbytes_of(self, chunks: I64) -> int:
        """Return the number of bytes of these chunks."""
        ...

    def stated_digests(self, chunks: I64) -> U64:
        """Return the leaf digests that the chunks should have."""
        ...

    def note_first_read(self) -> None:
        """Note that a byte is about to be requested."""
        ...

    def begin_read(self, read: ReadFromUpstream) -> None:
        """Register a read that begins now."""
        ...

    def end_read(self, read: ReadFromUpstream) -> None:
        """Unregister a read that ended or never began."""
        ...

    def release_chunks(self, chunks: I64) -> None:
        """Make chunks available for other reads again."""
        ...

    def assign(self) -> float:
        """Post reads for upstreams that have room for them."""
        ...

    def add_received(self, arrival: ReceivedChunks) -> None:
        """Queue chunks whose bytes are in place, to be verified."""
        ...

    def verify(self) -> int:
        """Verify a batch of received chunks; return the verified bytes."""
        ...


class ReadFromUpstream:
    """A work item that reads chunks from an upstream's memory into ours.

    A class, for the reads that it posted: they are measured and may be stopped while it runs.
    """

    __slots__ = ("_chunks", "_fetch", "_posted", "name", "nbytes", "priority", "upstream_reader")

    def __init__(self, fetch: FetchContext, reader: UpstreamReader, chunks: I64) -> None:
        self.priority = int(chunks[0])
        self.name = f"{reader.path} {self.priority}"
        self.nbytes = fetch.nbytes_of(chunks)
        self.upstream_reader = reader
        self._fetch = fetch
        self._chunks = chunks
        self._posted: list[PendingRead] = []

    @property
    def received_bytes(self) -> int:
        """Bytes received so far, verified or not."""
        return sum(read.moved_bytes for read in self._posted)

    def stop(self, error: PenstockError) -> None:
        """End the read early if its transport supports that; nothing is written once this item has ended."""
        # A copy: the item's own thread may be posting.
        for read in list(self._posted):
            if isinstance(read, Stoppable):
                read.fail(error)

    def start(self) -> None:
        """Read the chunks. A failure ends the use of this upstream, not the fetch."""
        reader, fetch, begun = self.upstream_reader, self._fetch, time.monotonic()
        fetch.begin_read(self)
        try:
            self._read()
        except (Cancelled, DestinationError):
            raise
        # Also PlanError, where no transport connects the two memories: other upstreams may work.
        except PenstockError as error:
            reader.fail(error)
            fetch.release_chunks(self._chunks)
            fetch.end_read(self)
            return
        reader.note_read(self._chunks, self.nbytes, time.monotonic() - begun)
        fetch.end_read(self)
        # The next read starts before these bytes are verified, so that the link stays busy.
        fetch.assign()
        wanted = fetch.stated_digests(self._chunks)
        fetch.add_received(ReceivedChunks(chunks=self._chunks, wanted=wanted, path=reader.path, upstream_reader=reader))

    def _read(self) -> None:
        fetch, reads = self._fetch, self.upstream_reader.reads_of(self._chunks)
        fetch.note_first_read()
        failed, is_touched = wait_all(self._posting(reads), stall_s=fetch.read_stall_s)
        if is_touched:
            fetch.is_touched = True
        if failed is not None:
            raise failed
        for transport, _, source, _ in reads:
            self.upstream_reader.note_transport_used(transport, source)

    def _posting(self, reads: list[Read]) -> Iterator[tuple[Transport, PendingRead]]:
        for transport, into, source, rows in reads:
            read = transport.post_read(into, source, rows)
            self._posted.append(read)
            yield transport, read

    def finish(self) -> None:
        """See `WorkItem.finish`: `start` has passed the chunks on."""

    def abandon(self) -> None:
        """Unregister the read: the fetch has ended."""
        self._fetch.end_read(self)


class VerifyReceived:
    """A work item that verifies a batch of received chunks; which ones, and so its bytes, are decided when it runs."""

    __slots__ = ("_fetch", "name", "nbytes", "priority")

    def __init__(self, fetch: FetchContext, first_chunk: int) -> None:
        self.priority = first_chunk
        self.name = f"verify {first_chunk}"
        self.nbytes = 0
        self._fetch = fetch

    def start(self) -> None:
        """Verify; see `FetchContext.verify`."""
        self.nbytes = self._fetch.verify()

    def finish(self) -> None:
        """See `WorkItem.finish`: `start` has accounted for the chunks."""

    def abandon(self) -> None:
        """See `WorkItem.abandon`: it holds nothing."""
