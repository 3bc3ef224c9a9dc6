"""Assigns the missing chunks of a fetch to upstreams and to storage. Thread-safe."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from penstock.fetcher.choice import ChunkChoice
from penstock.fetcher.report import Provenance
from penstock.fetcher.upstream import UpstreamReader
from penstock.hub.messages import Upstream, UpstreamsReply
from penstock.peer.local_weights import LocalWeights
from penstock.plan.schedule import to_ranges
from penstock.timing import Timing
from penstock.transfer.blame import FailedSources
from penstock.types import I64

READS_OF_ONE = 3

MakeReader = Callable[[Upstream, tuple[int, ...]], UpstreamReader]
Read = tuple[UpstreamReader, I64]


class Assignment:
    """The chunks of a fetch that are being read, and their upstreams. Storage is not read after it has failed."""

    def __init__(
        self,
        weights: LocalWeights,
        make_reader: MakeReader,
        *,
        can_read_storage: bool,
        stall_s: float,
        timing: Timing,
        provenance: Provenance,
    ) -> None:
        self._weights = weights
        self._make_reader = make_reader
        self.can_read_storage = can_read_storage
        self._timing = timing
        self._provenance = provenance
        self._lock = threading.Lock()
        self._flying = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._claimed = np.zeros(weights.layout.chunks.num_chunks, bool)
        self._choice = ChunkChoice(weights.verified.have, self._flying)
        self.failed = FailedSources(stall_s=stall_s, timing=timing)
        self._is_closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, so that no chunk is assigned or released in the block."""
        with self._lock:
            yield

    @property
    def readers(self) -> list[UpstreamReader]:
        """The upstreams in use, in the order of their ranks."""
        return self._choice.readers

    @property
    def has_sources(self) -> bool:
        """Return whether an upstream is in use, or an upstream has failed since the last progress."""
        return bool(self._choice.readers or self.failed.since_progress)

    def follow(self, reply: UpstreamsReply) -> float:
        """Start readers for new upstreams and rank all upstreams in the hub's order. Unnamed upstreams are last.

        Return the seconds until a full parent may be retried, or inf if no parent is full.
        """
        now = time.monotonic()
        with self._lock:
            if self._is_closed:
                return math.inf
            ranks = self._choice.ranks(reply)
            known = {reader.upstream.member: reader for reader in self._choice.readers}
            for upstream in reply.upstreams:
                member = upstream.member
                if member in known:
                    known[member].renew(upstream)
                elif self.failed.may_try(member, now):
                    self._choice.readers.append(self._make_reader(upstream, ranks[member]))
            self._choice.rank(ranks)
            for reader in self._choice.readers:
                if reader.is_connected:
                    self.failed.note_place(reader.upstream.member)
                if reader.is_parent:
                    # Request the log now, because the reader may have been a spare, and spares request the log rarely.
                    reader.request_news()
            parents = self._parents(reply, now)
            if reply.is_placed:
                # Report no parent before placement, or members that start together would permanently share a parent.
                self._weights.fetch.parent, self._weights.fetch.second_parent = (*parents, "", "")[:2]
            return min((full_s for name in parents if (full_s := self.failed.full_s(name, now))), default=math.inf)

    def _parents(self, reply: UpstreamsReply, now: float) -> list[str]:
        # Report the first member even if it is full now, or the hub would keep a more distant parent permanently.
        names = [upstream.member for upstream in reply.upstreams]
        orders = reply.orders or (tuple(range(len(names))),)
        may_be = {name for name in names if self.failed.may_be_parent(name, now)}
        firsts = (next((names[i] for i in order if names[i] in may_be), None) for order in orders)
        return [name for name in firsts if name is not None]

    def pop_unneeded(self) -> list[UpstreamReader]:
        """Remove and return upstreams whose capacity other members need more."""
        with self._lock:
            return self._choice.pop_unneeded()

    def pop_failed(self) -> list[UpstreamReader]:
        """Remove and return upstreams that failed or are full. Record when each upstream may be retried."""
        now = time.monotonic()
        with self._lock:
            failed = [reader for reader in self._choice.readers if reader.error is not None and not reader.num_flying]
            for reader in failed:
                assert reader.error is not None
                self._choice.readers.remove(reader)
                self.failed.note(
                    reader.upstream.member,
                    reader.error,
                    now,
                    can_read_storage=self.can_read_storage,
                    is_too_slow=reader.is_too_slow,
                )
                self._provenance.note_failure(reader.upstream.member, reader.error)
        return failed

    def close(self) -> list[UpstreamReader]:
        """Start no more readers and assign no more chunks. Remove and return all upstreams."""
        with self._lock:
            self._is_closed = True
            readers, self._choice.readers = self._choice.readers, []
        return readers

    def is_idle(self) -> bool:
        """Return True if nothing is being read and no upstream has a chunk for this fetch."""
        with self._lock:
            return self._choice.is_idle()

    def next_reads(self, post: Callable[[list[Read]], None], *, is_storage_read: bool) -> tuple[float, bool]:
        """Post reads to free upstreams. Return the seconds until the next round, and whether an upstream failed."""
        pause_s, has_failed, reads = self._timing.fetch_turn_s, False, list[Read]()
        with self._lock:
            for reader in self._choice.readers:
                has_failed |= reader.error is not None and not reader.num_flying
                if (early_s := reader.not_before - time.monotonic()) > 0:
                    pause_s = min(pause_s, early_s)
                gathers = False
                while (
                    reader.error is None and reader.num_flying < READS_OF_ONE and time.monotonic() >= reader.not_before
                ):
                    chunks = self._choice.next_chunks(reader)
                    gathers = (
                        is_storage_read
                        and len(chunks) < reader.step_chunks
                        and time.monotonic() - reader.last_read < self._timing.gather_s
                    )
                    if gathers or not len(chunks) or self._is_closed:
                        break
                    self._flying[chunks] = True
                    reader.num_flying += 1
                    reader.charge(int(self._weights.layout.chunks.nbytes[chunks].sum()))
                    reads.append((reader, chunks))
                if not gathers and self._choice.wants_news(reader):
                    reader.request_news()
            if reads:
                post(reads)
        return pause_s, has_failed

    def missing(self, at_most: int) -> I64:
        """Return missing chunks that are not being read."""
        with self._lock:
            return np.flatnonzero(~self._weights.verified.have & ~self._flying)[:at_most]

    def claim(self, chunks: I64, post: Callable[[I64], None]) -> bool:
        """Assign the missing `chunks` to storage and post them under the lock. Return whether any chunk was missing."""
        with self._lock:
            free = chunks[~self._weights.verified.have[chunks] & ~self._flying[chunks]]
            if self._is_closed or not len(free):
                return False
            self._flying[free] = self._claimed[free] = True
            self._weights.fetch.claims = to_ranges(np.flatnonzero(self._claimed))
            post(free)
        return True

    def release(self, chunks: I64) -> None:
        """Make chunks available again after a failed read."""
        with self._lock:
            self._clear(chunks)

    def _clear(self, chunks: I64) -> None:
        self._flying[chunks] = self._claimed[chunks] = False
        self._weights.fetch.claims = to_ranges(np.flatnonzero(self._claimed))

    def note_verified(self, chunks: I64) -> None:
        """Record that these chunks are verified. Call this inside `held`."""
        self._clear(chunks)
        self.failed.note_progress()

    def note_read_end(self, reader: UpstreamReader) -> None:
        """Record the end of a read and whether its upstream failed."""
        with self._lock:
            reader.num_flying -= 1
            if reader.error is not None:
                self.failed.since_progress.add(reader.upstream.member)
