"""Memory of one rank, registered, in which offsets count as if its regions lay end to end: what layouts count in.

In: regions of memory, the process's transports. Out: handles by region, the region of an offset, digests of strips.
Not here: what lies in them (`plan.layout`), versions (`local_version`), reading into them (`sync.receive.transfer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.closing import Closing
from penstock.digest.strip import Strips
from penstock.errors import PlanError
from penstock.sync.range_digests import Digester, Foreseen, digesters_of
from penstock.transport.choose import Links
from penstock.transport.descriptor import encode
from penstock.transport.protocol import Handle, Memory
from penstock.types import I64, U64


class Regions(Closing):
    """Registered memory; a context manager.

    Args:
        memories: in the order of the layout's regions; kept alive.
        links: what registers them.
        foreseen: digests the first so many memories, which are copies; the others are digested where they are.

    Raises:
        ConfigError: no transport reaches one of them; none stays registered.
    """

    def __init__(self, memories: Sequence[Memory], links: Links, *, foreseen: Sequence[Foreseen] = ()) -> None:
        self.memories, self.links = tuple(memories), links
        self.first: I64 = np.cumsum([0, *(memory.nbytes for memory in self.memories)], dtype=np.int64)
        of_device = digesters_of(self.memories)
        others = (of_device[memory.device] for memory in self.memories[len(foreseen) :])
        self._digesters: tuple[Digester | Foreseen, ...] = (*foreseen, *others)
        self._handles: list[dict[str, Handle]] = []
        self._into: list[dict[str, Handle]] = []
        try:
            for memory in self.memories:
                self._handles.append(links.register(memory))
                self._into.append(links.register_into(memory, self._handles[-1], is_repeated=True))
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each region."""
        return tuple(memory.nbytes for memory in self.memories)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return int(self.first[-1])

    def handles(self, region: int) -> dict[str, Handle]:
        """Return the handles to read into a region by, by transport: registrations, and fill-only handles."""
        return self._into[region]

    def descriptors(self) -> tuple[dict[str, bytes], ...]:
        """Return the encoded descriptors by which a peer reads each region, by transport."""
        return tuple({name: encode(handle.descriptor) for name, handle in one.items()} for one in self._handles)

    def fence(self) -> None:
        """Make every descriptor given so far stale. Order: before a byte is changed."""
        for one in self._handles:
            for handle in one.values():
                handle.fence()

    def digests(self, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """The digest of each strip as the bytes are now.

        Args:
            strips: offsets over all regions.
            after: what the device must have passed before its bytes are looked at.

        Raises:
            PlanError: a strip lies outside, or over the edge between two regions.

        Cost: waits for the device, on a stream of its own; calls of several threads are queued one behind the other.
        """
        strips.check(self.nbytes)
        region = self.locate(strips.at, strips.stop)
        out = np.empty(len(strips), np.uint64)
        for index in np.unique(region).tolist():
            memory, mine = self.memories[index], np.flatnonzero(region == index)
            some = strips[mine]
            here = Strips(
                at=some.at - self.first[index], run_bytes=some.run_bytes, num_rows=some.num_rows, pitch=some.pitch
            )
            out[mine] = self._digesters[index].digests(memory, here, after=after)
        return out

    def locate(self, start: I64, stop: I64) -> I64:
        """The region of each span `[start, stop)` of at least a byte. PlanError if one crosses an edge."""
        return locate(self.first, start, stop)

    def close(self) -> None:
        """End the registrations; readers' descriptors are stale. The memory stays its owner's. Idempotent."""
        handles, self._handles, self._into = [*self._into, *self._handles], [], []
        for one in handles:
            for handle in one.values():
                handle.close()


def locate(first: I64, start: I64, stop: I64) -> I64:
    """Return the region of each span of bytes; regions begin at `first`, which has one entry more than there are.

    Raises:
        PlanError: a span lies outside, or over the edge between two.
    """
    region: I64 = np.searchsorted(first[1:], start, side="right")
    wrong = (start < 0) | (stop > first[np.minimum(region + 1, len(first) - 1)])
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(f"bytes [{start[i]}, {stop[i]}) are in no one region of {np.diff(first).tolist()} bytes")
    return region
