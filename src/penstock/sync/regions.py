"""The registered memory of one rank, with one range of offsets over all its regions, as layouts count them.

In: regions of memory, the process's transports. Out: handles by region, the region of an offset, digests of strips.
Not here: the tensors in them (`plan.layout`), versions (`local_version`), reading into them (`sync.receive.transfer`).
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
        links: the transports that register them.
        foreseen: digesters of the first memories, which are copies; the other memories are digested where they are.

    Raises:
        ConfigError: no transport reaches one of the memories; none stays registered.
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
            self.close()  # an interrupt too: a registration that stays keeps the memory alive and readable
            raise

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each region."""
        return tuple(memory.nbytes for memory in self.memories)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all regions together."""
        return int(self.first[-1])

    def handles(self, region: int) -> dict[str, Handle]:
        """Return the handles for reading into a region, by transport: registrations, and fill-only handles."""
        return self._into[region]

    def descriptors(self) -> tuple[dict[str, bytes], ...]:
        """Return the encoded descriptors by which a peer reads each region, by transport."""
        return tuple({name: encode(handle.descriptor) for name, handle in handles.items()} for handles in self._handles)

    def fence(self) -> None:
        """Make every descriptor of the regions stale. Order: before a byte changes."""
        for handles in self._handles:
            for handle in handles.values():
                handle.fence()

    def digests(self, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digest of each strip of the bytes as they are now.

        Args:
            strips: offsets over all regions.
            after: events that the device must have passed before it reads the bytes.

        Raises:
            PlanError: a strip lies outside the regions, or crosses the edge between two.

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
        """Return the region of each span `[start, stop)` of at least one byte. PlanError if one crosses an edge."""
        return locate(self.first, start, stop)

    def close(self) -> None:
        """End the registrations; readers' descriptors become stale. The memory stays with its owner. Idempotent."""
        # `_into` has the registrations too; closing a handle twice does nothing.
        handles, self._handles, self._into = [*self._into, *self._handles], [], []
        for by_transport in handles:
            for handle in by_transport.values():
                handle.close()


def locate(first: I64, start: I64, stop: I64) -> I64:
    """Return the region of each span of bytes; `first` has the start of each region, and the end of the last.

    Raises:
        PlanError: a span lies outside the regions, or crosses the edge between two.
    """
    # "right" skips empty regions, which end at the offset where they start.
    region: I64 = np.searchsorted(first[1:], start, side="right")
    wrong = (start < 0) | (stop > first[np.minimum(region + 1, len(first) - 1)])
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(f"bytes [{start[i]}, {stop[i]}) lie in no single region of {np.diff(first).tolist()} bytes")
    return region
