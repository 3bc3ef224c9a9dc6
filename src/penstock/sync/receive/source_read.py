"""Reads from one source: choose a transport per pair of regions, request digests, read a step and wait for it.

In: a link, the receiver's regions, a step. Out: the source's digests, and its bytes in the receiver's memory.
Not here: the order of steps, comparing digests (`transfer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from penstock.digest.strip import Strips
from penstock.errors import Cancelled, DestinationError, PenstockError, SourceStalled
from penstock.sync.receive.batches import Step
from penstock.sync.receive.source_link import SourceLink
from penstock.sync.regions import Regions
from penstock.transport.choose import Reaching
from penstock.transport.descriptor import Descriptor
from penstock.transport.protocol import Handle, Pending, Striding, Transport
from penstock.transport.reads import wait_all
from penstock.types import U64

WAIT_S = 0.5
"""A request for digests is repeated after this time, so that a run that ended stops within half a second."""


class SourceRead:
    """The reads from one source during one run. Used by several threads.

    Attributes:
        path: the transports in use, `shm` or several.
        why: the reason why no nearer transport is used.
    """

    def __init__(self, link: SourceLink, into: Regions) -> None:
        self.link, self._into = link, into
        self.member = link.member
        self._routes: dict[tuple[int, int], tuple[Transport, Descriptor, str]] = {}
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """Names of the transports in use, nearest first."""
        return "+".join(dict.fromkeys(transport.name for transport, _, _ in self._routes.values()))

    @property
    def why(self) -> str:
        """Return why no nearer transport is used."""
        return "; ".join(dict.fromkeys(why for _, _, why in self._routes.values() if why))

    @property
    def is_ready(self) -> bool:
        """Return whether the source had all rows from the start, so that reads need not wait for its digests."""
        return self.link.map.is_ready

    def ask(self, strips: Strips, *, stall_s: float, is_over: Callable[[], bool]) -> U64:
        """Return the source's digests of its strips, once they are ready.

        Raises:
            SourceStalled: no further row of the source became ready for `stall_s`.
            Cancelled: the run is over.
            PenstockError: from the link.
        """
        seen, moved = -1, time.monotonic()
        while not is_over():
            answer = self.link.digests(strips, wait_s=min(WAIT_S, stall_s))
            if answer.digests is not None:
                if len(answer.digests) != len(strips):
                    message = f"the source answered with {len(answer.digests)} digests for {len(strips)} strips"
                    raise SourceStalled(message, uri=self.member)
                return answer.digests
            # Rows anywhere count, not only those of these strips: a source that quantises layer by layer reaches the
            # last layers long after the first.
            if answer.num_ready != seen:
                seen, moved = answer.num_ready, time.monotonic()
            elif time.monotonic() - moved > stall_s:
                message = f"no row of the source became ready for {stall_s} s, after {seen} rows"
                raise SourceStalled(message, uri=self.member)
        raise Cancelled("the run is over")

    def read(self, step: Step, *, stall_s: float) -> tuple[PenstockError | None, bool]:
        """Read a step; return the first error, and whether a byte was written, once no read is under way any more."""
        return wait_all(self._posting(step), stall_s=stall_s)

    def _posting(self, step: Step) -> Iterator[tuple[Transport, Pending]]:
        """Post the reads of a step, one by one as the caller iterates."""
        for theirs, ours, rows in step.reads:
            transport, descriptor, _ = self._route(theirs, ours)
            into = self._into.handles(ours)[transport.name]
            if isinstance(transport, Striding):
                yield transport, transport.post_rectangles(into, descriptor, rows)
            else:
                yield transport, transport.post_read(into, descriptor, rows.segments())

    def _route(self, theirs: int, ours: int) -> tuple[Transport, Descriptor, str]:
        """Return the transport and descriptor for a pair of regions, chosen at its first read."""
        # Under the lock, so that two threads do not pin the same peer memory twice.
        with self._lock:
            route = self._routes.get((theirs, ours))
            if route is None:
                handles = self._into.handles(ours)
                route = self._choose(theirs, handles)
                if route[0].name == "pinned_shm" and isinstance(route[0], Reaching):
                    # Pinning a peer's memory can fail at first use, for example by the limit of locked memory. The
                    # next nearest transport reads the same bytes, only slower.
                    try:
                        route[0].reach(handles["pinned_shm"], route[1])
                    except DestinationError as error:
                        nearest = {name: handle for name, handle in handles.items() if name != "pinned_shm"}
                        transport, descriptor, why = self._choose(theirs, nearest)
                        route = transport, descriptor, f"{why}; pinned_shm: {error.message}".removeprefix("; ")
                self._routes[theirs, ours] = route
            return route

    def _choose(self, theirs: int, handles: Mapping[str, Handle]) -> tuple[Transport, Descriptor, str]:
        link = self.link
        return self._into.links.choose(
            handles, link.map.regions[theirs], same_host=link.same_host, same_process=link.same_process
        )
