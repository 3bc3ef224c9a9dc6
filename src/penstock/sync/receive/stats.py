"""Statistics of a transfer: bytes by source; seconds of waiting, on the wire, and in digests.

In: reports of its steps, from several threads. Out: a `TransferReport`.
Not here: the report for users (`sync.report`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.sync.receive.sources import SourceRead
from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """The share of one source in a transfer."""

    member: str
    path: str
    """The transport."""
    why: str
    """The reason why no nearer transport is used."""
    nbytes: int
    wire_s: float
    """Time during which at least one read from it was under way."""
    ready_s: float
    """Time from a request for digests until the answer, summed over requests."""

    @property
    def gb_per_s(self) -> float:
        """Return the rate while this source was read."""
        return self.nbytes / GB / self.wire_s if self.wire_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """The figures of one run of a transfer."""

    nbytes: int
    """Bytes of the part."""
    moved_bytes: int
    """Bytes read: fewer where the receiver had some of them already."""
    seconds: float
    wire_s: float
    """Time during which at least one read was under way."""
    ready_s: float
    digest_s: float
    """Time of the receiver's own digests, summed over threads."""
    peak_bytes: int
    """Most bytes that were being read, or read and not yet verified, at one time."""
    links: tuple[LinkReport, ...]


@dataclass(slots=True)
class _Span:
    """Time during which at least one thread is inside."""

    inside: int = 0
    since: float = 0.0
    total_s: float = 0.0

    def enter(self, now: float) -> None:
        if not self.inside:
            self.since = now
        self.inside += 1

    def leave(self, now: float) -> None:
        self.inside -= 1
        if not self.inside:
            self.total_s += now - self.since


@dataclass(slots=True)
class _Counts:
    wire: _Span = field(default_factory=_Span)
    nbytes: int = 0
    ready_s: float = 0.0


class TransferStats:
    """See the module.

    Attributes:
        is_touched: whether a byte of our memory may have been written.
        peak_bytes: set by the run.
    """

    def __init__(self, reads: Mapping[int, SourceRead]) -> None:
        self._reads = {read.member: read for read in reads.values()}
        self._counts = {member: _Counts() for member in self._reads}
        self._wire, self._begun = _Span(), time.perf_counter()
        self._digest_s = 0.0
        self._lock = threading.Lock()
        self.is_touched, self.peak_bytes = False, 0

    @contextmanager
    def reading(self, member: str) -> Iterator[None]:
        """Count the time of the body as a read from this source."""
        spans = (self._wire, self._counts[member].wire)
        with self._lock:
            for span in spans:
                span.enter(time.perf_counter())
        try:
            yield
        finally:
            with self._lock:
                for span in spans:
                    span.leave(time.perf_counter())

    def answered(self, member: str, ready_s: float) -> None:
        """Note the time that this source took to answer a request for digests."""
        with self._lock:
            self._counts[member].ready_s += ready_s

    def took(self, member: str, nbytes: int) -> None:
        """Note bytes that arrived from this source."""
        with self._lock:
            self._counts[member].nbytes += nbytes

    def digested(self, seconds: float) -> None:
        """Note the time of digesting a step here."""
        with self._lock:
            self._digest_s += seconds

    def report(self, nbytes: int) -> TransferReport:
        """Return the figures of the whole run. Order: at the end."""
        links = tuple(
            LinkReport(
                member=member,
                path=self._reads[member].path,
                why=self._reads[member].why,
                nbytes=counts.nbytes,
                wire_s=counts.wire.total_s,
                ready_s=counts.ready_s,
            )
            for member, counts in self._counts.items()
        )
        return TransferReport(
            nbytes=nbytes,
            moved_bytes=sum(link.nbytes for link in links),
            seconds=time.perf_counter() - self._begun,
            wire_s=self._wire.total_s,
            ready_s=sum(link.ready_s for link in links),
            digest_s=self._digest_s,
            peak_bytes=self.peak_bytes,
            links=links,
        )
