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
from penstock.fleet.part import StoragePart
from penstock.fleet.upstream import Following
from penstock.types import I64, U64

if TYPE_CHECKING:
    from penstock.fleet.fetch import Fetch

CANNOT_RECALL = frozenset({"cuda_ipc"})
"""Transports whose copies, once a device has them, cannot be called back: after a stall what they still write would be
written over chunks read again and verified, so the fetch ends."""


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
        else:
            one.gave(self.nbytes, time.monotonic() - begun)
            wanted = one.leaves[fetch.leaves_of(self._chunks)]
            fetch.got(self._chunks, wanted, one.path, one)
        fetch.landed(one)
        return None

    def _read(self) -> None:
        """Return once nothing of this is under way, well or not: what is read again must not be written over."""
        posted, failed = [], None
        try:
            for transport, into, descriptor, segments in self._one.reads(self._chunks):
                posted.append((transport, transport.post_read(into, descriptor, segments)))
        except PenstockError as error:
            failed = error
            self._fetch.is_touched |= error.mutated
        for transport, pending in posted:
            try:
                transport.wait(pending, stall_s=self._fetch.stall_s)
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
        fetch, left = self._fetch, set(self._chunks.tolist())
        try:
            for chunks in self._storage.read(self._chunks):
                fetch.is_touched = True
                left -= set(chunks.tolist())
                fetch.got(chunks, None, f"storage {self._storage.uri}", None)
                if fetch.ticket.done:
                    break
        except PenstockError as error:
            if error.blame != "source":
                raise
            fetch.storage_failed(error, np.array(sorted(left), np.int64))
        fetch.claim_was_read()
        return None

    def finish(self) -> None:
        """Nothing left: the chunks were handed to be verified."""

    def abandon(self) -> None:
        """The fetch is over."""


class VerifyStep:
    """Digest chunks that arrived."""

    __slots__ = ("_args", "_fetch", "name", "nbytes", "priority", "ticket")

    def __init__(self, fetch: Fetch, chunks: I64, wanted: U64 | None, path: str, giver: Following | None) -> None:
        self._fetch, self._args = fetch, (chunks, wanted, path, giver)
        self.priority, self.ticket = int(chunks[0]), fetch.ticket
        self.name, self.nbytes = f"verify {self.priority}", fetch.nbytes_of(chunks)

    def start(self) -> Pending | None:
        """See `Step.start`."""
        self._fetch.verify(*self._args)
        return None

    def finish(self) -> None:
        """Nothing left."""

    def abandon(self) -> None:
        """The fetch is over."""
