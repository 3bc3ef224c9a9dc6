"""A publisher's snapshot: a copy of its memory that receivers read while training goes on.

In: a layout and the memory behind it; versions. Out: a `LocalVersion` of the copy.
Not here: the lifetime of a version (`publisher`); transforms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from penstock.closing import Closing
from penstock.engine.place_cuda import CudaRegistrar
from penstock.memory.arena import Arena
from penstock.memory.pages import populate
from penstock.plan.layout import Layout
from penstock.sync.copy_plan import Copy
from penstock.sync.local_version import LocalVersion
from penstock.sync.range_digests import Foreseen, digesters_of
from penstock.sync.receive.staging_copy import allocate_like
from penstock.transport.choose import Links
from penstock.transport.protocol import Memory
from penstock.types import I64

MOST_FORESEEN = 64
"""Most regions whose digests the device computes during the copy: each takes half a millisecond, whatever its size."""


class VersionSnapshot(Closing):
    """A copy of a rank's regions with the same layout; a context manager.

    Attributes:
        local_version: the copy, as readers see it.

    Args:
        layout: the layout of the live memory.
        live: the layout's regions, in order.
        links: the transports that register the copy.
        address: identifies the copy's registrations in its layout.
        on_host: copy to host memory, pinned where the live memory is on a device; else to the same device.
        filled: regions of the layout after those of `live`, which the caller fills: served without a copy.

    Raises:
        DeviceOutOfMemory, DestinationError: there is not enough memory, or it cannot be pinned.
        ConfigError: no transport reaches it.

    Cost: as much memory again; pinning takes about a second for 3 GB, once.
    """

    def __init__(
        self,
        layout: Layout,
        live: Sequence[Memory],
        links: Links,
        *,
        address: str = "",
        on_host: bool = False,
        filled: Sequence[Memory] = (),
    ) -> None:
        self._pinned: list[tuple[CudaRegistrar, int]] = []
        self._foreseen: tuple[Foreseen, ...] = ()
        try:
            memories = [self._on_host(memory) for memory in live] if on_host else allocate_like(live)
            if on_host and len(live) <= MOST_FORESEEN and all(memory.device != "cpu" for memory in live):
                digesters = digesters_of(live)
                self._foreseen = tuple(Foreseen(memory, digesters[memory.device]) for memory in live)
            shown = dataclasses.replace(layout, address=address)
            self.local_version = LocalVersion(shown, [*memories, *filled], links, foreseen=self._foreseen)
        except BaseException:
            self._unpin()  # pinned pages stay locked until they are unpinned, also after their memory is freed
            raise
        self._copy = Copy(memories, live)

    def _on_host(self, memory: Memory) -> Memory:
        arena = Arena.allocate(max(memory.nbytes, 1))
        # Fault the pages in with few calls: page by page, as the pin would, takes about twice as long (`memory.pages`).
        populate(arena.address, arena.nbytes)
        if memory.device != "cpu" and memory.nbytes:
            registrar = CudaRegistrar(torch.device(memory.device))
            registrar.register(arena.address, arena.nbytes)
            self._pinned.append((registrar, arena.address))
        return Memory(address=arena.address, nbytes=memory.nbytes, owner=arena)

    def snapshot(self, version: int, *, rows: I64 | None = None, stall_s: float = 30.0) -> float:
        """Copy the live memory, and return the seconds. Readers get the copy, and the live memory may change.

        Args:
            rows: the rows of the layout that are ready after the copy; None: all.
            stall_s: the deadline for progress.

        Raises:
            DestinationError: the device failed; there is no version until the next snapshot.

        Order: after the work queued on the current stream. Reads of the version before that are still under way end
            with StaleDescriptor.
        """
        # Before the copy: it overwrites the version that readers may be reading now.
        self.local_version.fence()
        seconds = self._copy.run(stall_s=stall_s, meanwhile=partial(self._look, stall_s))
        self.local_version.begin(version)
        self.local_version.ready(rows)
        return seconds

    def _look(self, stall_s: float) -> None:
        for digests in self._foreseen:
            digests.look(stall_s)

    def close(self) -> None:
        """End the registrations and release the memory. Idempotent."""
        self.local_version.close()
        self._unpin()

    def _unpin(self) -> None:
        while self._pinned:
            registrar, address = self._pinned.pop()
            registrar.unregister(address)
