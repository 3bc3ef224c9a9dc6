"""Statistics of a transfer: bytes by source; seconds of waiting, on the wire, and in digests.

In: what its steps report, from several threads. Out: a `TransferReport`.
Not here: what a user is told (`sync.report`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.sync.receive.source_read import SourceRead
from penstock.types import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """The share of one source in a transfer."""

    member: str
    path: str
    """The transport."""
    why: str
    """Why no nearer one."""
    nbytes: int
    wire_s: float
    """While at least one read of it was under way."""
    ready_s: float
    """Summed over questions: from asking for digests until it answered."""

    @property
    def gb_per_s(self) -> float:
        """While it was read."""
        return self.nbytes / GB / self.wire_s if self.wire_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """The figures of one run of a transfer."""

    nbytes: int
    """Of the part."""
    moved_bytes: int
    """Read of it: less where some of it was here."""
    seconds: float
    wire_s: float
    """While at least one read was under way."""
    ready_s: float
    digest_s: float
    """Of our own digests, summed over threads."""
    peak_bytes: int
    """Most bytes asked for or read, and not yet verified, at one time."""
    links: tuple[LinkReport, ...]


@dataclass(slots=True)
class _Span:
    """Time during which at least one is inside."""

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
        self._reads = {one.member: one for one in reads.values()}
        self._counts = {member: _Counts() for member in self._reads}
        self._wire, self._begun = _Span(), time.perf_counter()
        self._digest_s = 0.0
        self._lock = threading.Lock()
        self.is_touched, self.peak_bytes = False, 0

    @contextmanager
    def reading(self, member: str) -> Iterator[None]:
        """While a read of this source is under way."""
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
        """This source said digests, so long after it was asked."""
        with self._lock:
            self._counts[member].ready_s += ready_s

    def took(self, member: str, nbytes: int) -> None:
        """A step of this source arrived."""
        with self._lock:
            self._counts[member].nbytes += nbytes

    def digested(self, seconds: float) -> None:
        """A step's digests were made here."""
        with self._lock:
            self._digest_s += seconds

    def report(self, nbytes: int) -> TransferReport:
        """All of it. Order: at the end."""
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
            moved_bytes=sum(one.nbytes for one in links),
            seconds=time.perf_counter() - self._begun,
            wire_s=self._wire.total_s,
            ready_s=sum(one.ready_s for one in links),
            digest_s=self._digest_s,
            peak_bytes=self.peak_bytes,
            links=links,
        )
