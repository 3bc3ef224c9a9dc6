"""Memory regions that are registered with transports, so that peers read them and this process reads into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from penstock.digest.strip import Strips
from penstock.errors import PlanError, StaleDescriptor
from penstock.holding.digester import Digester, PrecomputedDigests, digesters_of
from penstock.lifecycle import Closeable
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Handle, Memory, RevocableHandle, encode
from penstock.types import I64, U64


class Regions(Closeable):
    """Memory regions and their registrations, which `register` creates. Closed regions can be registered again."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = tuple(memories)
        # Peers read from `_handles`. This process's reads write to `_into`, which includes fill-only transports.
        self._handles: list[dict[str, Handle]] = []
        self._into: list[dict[str, Handle]] = []

    def register(self, links: PeerLinks, *, is_repeated: bool = False) -> None:
        """Register the regions with every transport that accepts them, unless they are already registered.

        `is_repeated` says that transfers fill the regions repeatedly, so that pinning them saves time. Raise
        ConfigError if no transport reaches a region.
        """
        if self._handles:
            return
        registered: list[dict[str, Handle]] = []
        into: list[dict[str, Handle]] = []
        try:
            for memory in self.memories:
                registered.append(links.register(memory))
            for memory, handles in zip(self.memories, registered, strict=True):
                into.append(links.register_into(memory, handles, is_repeated=is_repeated))
        except BaseException:
            # Close all registrations, because a remaining one would keep the memory alive and readable.
            close_handles([*into, *registered[len(into) :]])
            raise
        self._handles, self._into = registered, into

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each region in bytes."""
        return tuple(memory.nbytes for memory in self.memories)

    def handles(self, region: int) -> dict[str, Handle]:
        """Return the handles for reading into a region, by transport."""
        return self._into[region]

    def descriptors(self, lease: str = "") -> tuple[dict[str, bytes], ...]:
        """Return the encoded descriptors with which a peer reads each region, by transport.

        If `lease` is given, revocable descriptors are valid until `take_back` of the lease.
        """
        return tuple(
            {
                name: encode(handle.lend(lease) if lease and isinstance(handle, RevocableHandle) else handle.descriptor)
                for name, handle in handles.items()
            }
            for handles in self._handles
        )

    def take_back(self, lease: str) -> None:
        """Revoke the descriptors of a lease, for transports that support revocation."""
        for handles in self._handles:
            for handle in handles.values():
                if isinstance(handle, RevocableHandle):
                    handle.take_back(lease)

    def fence(self) -> None:
        """Make every descriptor of the regions stale. Call this before any byte changes."""
        for handles in self._handles:
            for handle in handles.values():
                handle.fence()

    def exchange(self, other: Regions) -> None:
        """Exchange memory and registrations with `other`, which must be fenced, of equal size and in no transfer."""
        # Use one assignment, so that an interrupt cannot separate a memory from its registrations.
        (self.memories, self._handles, self._into), (other.memories, other._handles, other._into) = (
            (other.memories, other._handles, other._into),
            (self.memories, self._handles, self._into),
        )

    def are_there(self, regions: Iterable[int]) -> bool:
        """Return whether the memory of these regions is still at the same addresses."""
        return all(self.memories[i].is_there() for i in regions)

    def detach(self) -> Sequence[Mapping[str, Handle]]:
        """Remove the registrations and return them, so that the caller can close them without holding a lock."""
        handles = self._into
        self._handles, self._into = [], []
        return handles

    def close(self) -> None:
        """Close the registrations, which makes readers' descriptors stale. The memory stays valid. Idempotent."""
        close_handles(self.detach())


def close_handles(handles: Iterable[Mapping[str, Handle]]) -> None:
    """Close the registrations of regions, which are keyed by transport name. This may wait for running reads."""
    for by_transport in handles:
        for handle in by_transport.values():
            handle.close()


class VersionRegions(Regions):
    """Registered regions in one range of offsets, with digests of strips. Raise ConfigError like `register`."""

    def __init__(
        self, memories: Sequence[Memory], links: PeerLinks, *, precomputed: Sequence[PrecomputedDigests] = ()
    ) -> None:
        super().__init__(memories)
        self.links = links
        # First offset of each region, and the end of the last region.
        self.first: I64 = np.cumsum([0, *self.sizes], dtype=np.int64)
        of_device = digesters_of(self.memories)
        others = (of_device[memory.device] for memory in self.memories[len(precomputed) :])
        self._digesters: tuple[Digester | PrecomputedDigests, ...] = (*precomputed, *others)
        self.register(links, is_repeated=True)

    @property
    def nbytes(self) -> int:
        """Return the total size of the regions in bytes."""
        return int(self.first[-1])

    def warm_up(self) -> None:
        """Load the kernels for digests, so that the first digest does not wait for the kernels."""
        for digester in dict.fromkeys(self._digesters):
            digester.warm_up()

    def digests(self, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digests of strips, read after the events in `after`. Raise StaleDescriptor if memory was moved."""
        strips.check(self.nbytes)
        region = locate(self.first, strips.at, strips.stop)
        self.require_there(np.unique(region).tolist())
        out = np.empty(len(strips), np.uint64)
        for together in self._by_device(np.unique(region).tolist()):
            base = min((self.memories[i] for i in together), key=lambda memory: memory.address)
            shift = np.array([self.memories[i].address - base.address - self.first[i] for i in together])
            mine = np.flatnonzero(np.isin(region, together))
            here = strips[mine].shifted(shift[np.searchsorted(together, region[mine])])
            out[mine] = self._digesters[together[0]].digests(base, here, after=after)
        return out

    def require_there(self, regions: Iterable[int]) -> None:
        """Raise StaleDescriptor if the owner moved or freed the memory of a region."""
        if not self.are_there(regions):
            hint = "publish or update again, which registers the new memory"
            raise StaleDescriptor("the owner moved or freed the memory", hint=hint)

    def _by_device(self, regions: Sequence[int]) -> list[list[int]]:
        # Use one call per device, because each call waits for it. With FP8 weights, every step spans two regions.
        of_device: dict[str, list[int]] = {}
        for i in regions:
            on_device = self.memories[i].device != "cpu" and isinstance(self._digesters[i], Digester)
            of_device.setdefault(self.memories[i].device if on_device else f"region {i}", []).append(i)
        return list(of_device.values())


def locate(first: I64, start: I64, stop: I64) -> I64:
    """Return the region that contains each span of bytes. Raise PlanError if a span is not inside one region."""
    # With "right", the search skips empty regions, whose end equals their start.
    region: I64 = np.searchsorted(first[1:], start, side="right")
    wrong = (start < 0) | (stop > first[np.minimum(region + 1, len(first) - 1)])
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(f"bytes [{start[i]}, {stop[i]}) are not inside one region (sizes: {np.diff(first).tolist()})")
    return region
