"""The steps of a fetch, which executors carry out: read from an upstream, read from storage, verify.

In: chunks. Out: their bytes in place, handed on; failures told to the fetch or to the upstream whose they are.
Not here: which chunks from whom (`fetch`), what an upstream has (`upstream`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.executors import Pending
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceStalled
from penstock.fleet.arrival import Arrival
from penstock.fleet.part import StoragePart
from penstock.fleet.upstream import Following
from penstock.types import I64

if TYPE_CHECKING:
    from penstock.fleet.fetch import Fetch

CANNOT_RECALL = frozenset({"cuda_ipc"})
"""Transports whose copies, once a device has them, cannot be called back: after a stall what they still write would be
written over chunks read again and verified, so the fetch ends."""


LITTLE = 0.5
"""Part of a claim left to be read when the next is begun, so that the two overlap: 50 ms of fast storage."""


class PeerStep:
    """Read chunks from an upstream's memory into ours."""

    __slots__ = ("_chunks", "_fetch", "_one", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, one: Following, chunks: I64) -> None:
        self._fetch, self._one, self._chunks = fetch, one, chunks
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name = f"{one.path} {self.priority}"
        self.nbytes = fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`. An upstream's failure is its own, not the fetch's."""
        one, fetch, begun = self._one, self._fetch, time.monotonic()
        try:
            self._read()
        except (Cancelled, DestinationError):
            raise
        except PenstockError as error:  # also what keeps its memory from ours: others, or storage, may do
            one.fail(error)
            fetch.lost(self._chunks)
            fetch.landed(one)
            return None
        one.gave(self.nbytes, time.monotonic() - begun)
        fetch.landed(one)
        fetch.assign()  # its next read is under way before these bytes are verified
        wanted = one.leaves[fetch.leaves_of(self._chunks)]
        fetch.got(Arrival(chunks=self._chunks, wanted=wanted, path=one.path, giver=one))
        return None

    def _read(self) -> None:
        """Return once nothing of this is under way, well or not: what is read again must not be written over."""
        posted, failed = [], None
        self._fetch.begins()
        try:
            for transport, into, descriptor, segments in self._one.reads(self._chunks):
                posted.append((transport, descriptor, transport.post_read(into, descriptor, segments)))
        except PenstockError as error:
            failed = error
            self._fetch.is_touched |= error.mutated
        for transport, descriptor, pending in posted:
            try:
                transport.wait(pending, stall_s=self._fetch.stall_s)
                self._one.came_by(transport, descriptor)
            except SourceStalled as error:
                if transport.name in CANNOT_RECALL:
                    raise DestinationError(f"{error.message}, and may still arrive", mutated=True) from error
                failed = failed or error
            except PenstockError as error:
                failed = failed or error
                self._fetch.is_touched |= error.mutated
            self._fetch.is_touched |= pending.moved_bytes > 0
        if failed is not None:
            raise failed

    def finish(self) -> None:
        """Nothing left: the chunks were handed to be verified."""

    def abandon(self) -> None:
        """The fetch is over."""
        self._fetch.landed(self._one)


class PartStep:
    """Read claimed chunks from storage."""

    __slots__ = ("_chunks", "_fetch", "_storage", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, storage: StoragePart, chunks: I64) -> None:
        self._fetch, self._storage, self._chunks = fetch, storage, chunks
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name, self.nbytes = f"storage {self.priority}", fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`."""
        fetch, left, is_told = self._fetch, set(self._chunks.tolist()), False
        fetch.begins()
        try:
            for chunks in self._storage.read(self._chunks):
                fetch.is_touched = True
                left -= set(chunks.tolist())
                fetch.got(Arrival(chunks=chunks, wanted=None, path=f"storage {self._storage.uri}", giver=None))
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

    def finish(self) -> None:
        """Nothing left: the chunks were handed to be verified."""

    def abandon(self) -> None:
        """The fetch is over."""


class VerifyStep:
    """Digest chunks that arrived, these or others."""

    __slots__ = ("_fetch", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, first_chunk: int) -> None:
        self._fetch, self.ticket = fetch, fetch.ticket
        self.priority, self.name, self.nbytes = first_chunk, f"verify {first_chunk}", 0

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self.nbytes = self._fetch.verify()
        return None

    def finish(self) -> None:
        """Nothing left."""

    def abandon(self) -> None:
        """The fetch is over."""
