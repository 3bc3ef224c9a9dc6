"""The memory that one rank serves: its layout, the version in it, and the rows that are ready.

In: a layout and the memory behind it; each version as it begins, rows as they become ready. Out: the map that peers
read by, digests of strips once their bytes are ready.
Not here: servers and grants (`peer`), the moment of a publish (`sync.publish.publisher`), reading
(`sync.receive.transfer`).

    fence() --bytes may change--> begin(v) --rows are filled--> ready(rows) ... --> fence()
    a reader: map() -> digests(strips), which waits for their rows -> read -> same generation still: the bytes are of v
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from penstock.digest.strip import Strips
from penstock.errors import PlanError, StaleDescriptor
from penstock.hub.messages import prepare
from penstock.plan.layout import Layout
from penstock.sync.range_digests import Foreseen
from penstock.sync.regions import Regions
from penstock.transport.choose import Links
from penstock.transport.protocol import Memory
from penstock.types import I64, U64

# `settle` runs inside `publish`, before receivers hear of the version: a longer sleep would delay all of them.
_NAP_S = 0.0002


class VersionMap(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors by which a peer reads one generation of a rank's memory."""

    member: str
    version: int
    generation: int
    sizes: tuple[int, ...]
    """Bytes of each region."""
    regions: tuple[dict[str, bytes], ...]
    """The encoded descriptors of each region, by transport."""
    is_ready: bool = False
    """Whether all rows were ready when the map was made: bytes may be read before their digests are requested."""


prepare(VersionMap)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A source's reply about strips: their digests, or None while their bytes are not ready."""

    digests: U64 | None
    num_ready: int
    """Rows ready in this version so far; while it grows, the source makes progress."""


class LocalVersion:
    """The memory of one rank and its version. Used by any number of threads; a context manager by its `close`.

    Attributes:
        regions: the memory, registered.
        version: the version that the memory has, or is being filled with; None between a fence and the next `begin`.
        generation: changes with every fence; maps from before a fence are stale.

    Args:
        layout: rows that lie in `memories`.
        memories: the layout's regions, in order.
        links: the transports of this process.
        foreseen: see `Regions`.

    Raises:
        PlanError: the layout is invalid, or describes other regions.
        ConfigError: no transport reaches a region.
    """

    def __init__(
        self, layout: Layout, memories: Sequence[Memory], links: Links, *, foreseen: Sequence[Foreseen] = ()
    ) -> None:
        layout.check()
        if layout.regions != tuple(memory.nbytes for memory in memories):
            raise PlanError(f"{layout.member}: the layout's regions differ from the memory's")
        self.layout = layout
        self.regions = Regions(memories, links, foreseen=foreseen)
        self.version: int | None = None
        self.generation = 0
        self.changed = threading.Condition()
        self._rows = _RowSpans(layout)
        self._is_ready = np.zeros(len(layout.names), bool)
        self._not_ready: I64 = np.zeros(0, np.int64)
        self._events: list[torch.cuda.Event] = []
        self._is_closed = False

    @property
    def num_ready(self) -> int:
        """Return the number of rows that are ready in this version."""
        return int(self._is_ready.sum())

    def fence(self) -> None:
        """Make every map stale; there is no version until `begin`. Order: before a byte changes."""
        with self.changed:
            self._check_open()
            # Descriptors first: a one-sided read involves no thread of this process, and notices the fence only
            # because the transport checks the generation after its bytes. From here on no read can pass that check.
            self.regions.fence()
            self.generation += 1
            self.version = None
            self._is_ready[:] = False
            self._events.clear()
            self.changed.notify_all()

    def begin(self, version: int) -> None:
        """Start a version: bytes written from now on belong to it, and no row of it is ready yet.

        Raises:
            PlanError: the memory has another version that was not fenced.
        """
        with self.changed:
            self._check_open()
            if self.version is not None:
                raise PlanError(
                    f"cannot begin version {version}: the memory has version {self.version}",
                    hint="fence() ends a version",
                )
            self.version = version
            self._count()
            self.changed.notify_all()

    def ready(self, rows: I64 | Sequence[int] | None = None) -> None:
        """Mark rows of the layout (None: all) as filled with the version's bytes, so that readers may read them.

        Order: after the kernels that fill them were queued on the current stream; readers wait for those kernels.
        """
        with self.changed:
            self._check_open()
            if self.version is None:
                raise PlanError("cannot mark rows as ready: no version was begun", hint="begin() one")
            self._is_ready[slice(None) if rows is None else np.asarray(rows, np.int64)] = True
            for name in {memory.device for memory in self.regions.memories} - {"cpu"}:
                # The rows are ready for the host, not for the device: the kernels that fill them may still be queued.
                # Digests, and through them reads, wait for this event instead of a synchronize here, which would
                # stall the trainer.
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(name))
                # Finished events are dropped here, else a version of many buckets collects hundreds.
                self._events = [pending for pending in self._events if not pending.query()] + [event]
            self._count()
            self.changed.notify_all()

    def settle(self, stall_s: float) -> None:
        """Return once the device has filled the rows that are ready, or after `stall_s`: readers wait for it too."""
        deadline = time.monotonic() + stall_s
        while time.monotonic() < deadline:
            # The lock is not kept while this sleeps: peers ask for maps and digests meanwhile.
            with self.changed:
                if all(event.query() for event in self._events):
                    return
            time.sleep(_NAP_S)

    def _count(self) -> None:
        # A running sum over the rows by offset: whether a span of rows has one that is not ready is then one
        # subtraction, also for millions of strips.
        self._not_ready = np.cumsum(np.append(False, ~self._is_ready[self._rows.order]), dtype=np.int64)

    def map(self) -> VersionMap:
        """Return the map by which peers read this generation. StaleDescriptor while there is no version."""
        with self.changed:
            self._check_open()
            if self.version is None:
                raise StaleDescriptor("this rank has no version at the moment", uri=self.layout.member)
            return VersionMap(
                member=self.layout.member,
                version=self.version,
                generation=self.generation,
                sizes=self.regions.sizes,
                regions=self.regions.descriptors(),
                is_ready=not self._not_ready[-1] and all(event.query() for event in self._events),
            )

    def digests(self, strips: Strips, *, version: int, generation: int, wait_s: float) -> Answer:
        """Return the digest of each strip, once every row that it may touch is ready; None after `wait_s`.

        Args:
            strips: offsets as in the layout.
            version, generation: of the caller's map; the digests are of these, or there are none.
            wait_s: how long to wait for rows; call again for as long as `num_ready` grows.

        Raises:
            StaleDescriptor: the memory has another version or generation, before or after the bytes were digested.
            PlanError: a strip lies outside the memory.
        """
        strips.check(self.regions.nbytes)
        deadline, spans = time.monotonic() + wait_s, None
        with self.changed:
            self._check(version, generation)
            while self._not_ready[-1]:
                spans = self._rows.spans(strips) if spans is None else spans
                if not (self._not_ready[spans[1]] - self._not_ready[spans[0]]).any():
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return Answer(digests=None, num_ready=self.num_ready)
                self.changed.wait(left)
                self._check(version, generation)
            events, num_ready = tuple(self._events), self.num_ready
        # Without the lock: a digest takes milliseconds, and a fence must not wait for it. A fence that came meanwhile
        # shows in the generation below, and digests of mixed bytes are thrown away.
        digests = self.regions.digests(strips, after=events)
        with self.changed:
            self._check(version, generation)
        return Answer(digests=digests, num_ready=num_ready)

    def _check(self, version: int, generation: int) -> None:
        self._check_open()
        if (version, generation) != (self.version, self.generation):
            current = "none" if self.version is None else f"version {self.version}"
            message = f"version {version} of generation {generation} is gone; this rank has {current} now"
            raise StaleDescriptor(message, uri=self.layout.member)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StaleDescriptor("this rank stopped serving its memory", uri=self.layout.member)

    def close(self) -> None:
        """End the registrations; the memory stays with its owner. Idempotent."""
        with self.changed:
            self._is_closed = True
            self.version = None
            self.generation += 1
            self.changed.notify_all()
        # Outside the lock, so that the threads woken above can leave while the registrations end.
        self.regions.close()


class _RowSpans:
    """The rows sorted by their first byte, to find all rows that a strip may touch."""

    def __init__(self, layout: Layout) -> None:
        span = np.array([form.span_bytes for form in layout.forms], np.int64)
        stop = layout.offset + span[layout.form]
        self.order: I64 = np.argsort(layout.offset, kind="stable")
        self._start: I64 = layout.offset[self.order]
        # Rows may interleave (column slices of one tensor), so how far any has reached, not where each stops.
        self._reach: I64 = np.maximum.accumulate(stop[self.order]) if len(stop) else stop

    def spans(self, strips: Strips) -> tuple[I64, I64]:
        """Return the range `[first, stop)` in `order` of the rows that each strip may touch."""
        first = np.searchsorted(self._reach, strips.at, side="right")
        stop = np.searchsorted(self._start, strips.stop, side="left")
        return first, np.maximum(first, stop)
