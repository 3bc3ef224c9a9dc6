"""The steps of a fetch, which executors carry out: read from an upstream, read from storage, verify.

In: chunks. Out: their bytes in place, handed on; failures told to the fetch or to the upstream whose they are.
Not here: which chunks from whom (`run`), what an upstream has (`upstream`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.executors import Pending, Work
from penstock.errors import Cancelled, DestinationError, PenstockError
from penstock.fetch.storage_reader import StorageReader
from penstock.fetch.upstream import Read, UpstreamReader
from penstock.fetch.verify import ReceivedChunks
from penstock.transport.protocol import Pending as PendingRead
from penstock.transport.protocol import Stoppable, Transport
from penstock.transport.reads import wait_all
from penstock.types import I64

if TYPE_CHECKING:
    from penstock.fetch.run import Fetch

LITTLE = 0.5
"""Part of a claim left to be read when the next is begun, so that the two overlap: 50 ms of fast storage."""


class ReadFromUpstream(Work):
    """Read chunks from an upstream's memory into ours."""

    __slots__ = ("_chunks", "_fetch", "_posted", "giver")

    def __init__(self, fetch: Fetch, one: UpstreamReader, chunks: I64) -> None:
        first = int(chunks[0])
        super().__init__(fetch.ticket, first, f"{one.path} {first}", fetch.nbytes_of(chunks))
        self._fetch, self.giver, self._chunks = fetch, one, chunks
        self._posted: list[PendingRead] = []

    @property
    def received_bytes(self) -> int:
        """Bytes of it that arrived, verified or not."""
        return sum(read.moved_bytes for read in self._posted)

    def stop(self, error: PenstockError) -> None:
        """End it early, where its transport can: nothing is written once the step has ended."""
        for read in list(self._posted):
            if isinstance(read, Stoppable):
                read.fail(error)

    def start(self) -> Pending | None:
        """See `Step.start`. An upstream's failure is its own, not the fetch's."""
        one, fetch, begun = self.giver, self._fetch, time.monotonic()
        fetch.reads(self)
        try:
            self._read()
        except (Cancelled, DestinationError):
            raise
        except PenstockError as error:  # also what keeps its memory from ours: others, or storage, may do
            one.fail(error)
            fetch.lost(self._chunks)
            fetch.landed(one, self)
            return None
        one.gave(self.nbytes, time.monotonic() - begun)
        fetch.landed(one, self)
        fetch.assign()  # its next read is under way before these bytes are verified
        wanted = one.leaves[fetch.leaves_of(self._chunks)]
        fetch.got(ReceivedChunks(chunks=self._chunks, wanted=wanted, path=one.path, giver=one))
        return None

    def _read(self) -> None:
        fetch, reads = self._fetch, self.giver.reads(self._chunks)
        fetch.begins()
        failed, is_touched = wait_all(self._posting(reads), stall_s=fetch.read_stall_s)
        fetch.is_touched |= is_touched
        if failed is not None:
            raise failed
        for transport, _, source, _ in reads:
            self.giver.came_by(transport, source)

    def _posting(self, reads: list[Read]) -> Iterator[tuple[Transport, PendingRead]]:
        for transport, into, source, rows in reads:
            read = transport.post_read(into, source, rows)
            self._posted.append(read)
            yield transport, read

    def abandon(self) -> None:
        """The fetch is over."""
        self._fetch.landed(self.giver, self)


class ReadFromStorage(Work):
    """Read claimed chunks from storage."""

    __slots__ = ("_chunks", "_fetch", "_storage")

    def __init__(self, fetch: Fetch, storage: StorageReader, chunks: I64) -> None:
        first = int(chunks[0])
        super().__init__(fetch.ticket, first, f"storage {first}", fetch.nbytes_of(chunks))
        self._fetch, self._storage, self._chunks = fetch, storage, chunks

    def start(self) -> Pending | None:
        """See `Step.start`."""
        fetch, left, is_told = self._fetch, set(self._chunks.tolist()), False
        fetch.begins()
        try:
            for chunks in self._storage.read(self._chunks):
                fetch.is_touched = True
                left -= set(chunks.tolist())
                fetch.got(ReceivedChunks(chunks=chunks, wanted=None, path=f"storage {self._storage.uri}", giver=None))
                if fetch.ticket.done:
                    break
                if not is_told and len(left) <= LITTLE * len(self._chunks):
                    is_told = True
                    fetch.claim_is_read()
        except PenstockError as error:
            if error.blame != "source":
                raise
            fetch.storage_failed(error, np.array(sorted(left), np.int64))
        if not is_told:
            fetch.claim_is_read()
        return None


class VerifyReceived(Work):
    """Digest chunks that arrived, these or others."""

    __slots__ = ("_fetch",)

    def __init__(self, fetch: Fetch, first_chunk: int) -> None:
        super().__init__(fetch.ticket, first_chunk, f"verify {first_chunk}")
        self._fetch = fetch

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self.nbytes = self._fetch.verify()
        return None
