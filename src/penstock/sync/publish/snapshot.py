"""A publisher's snapshot: a copy of its memory that receivers read while training goes on.

In: a layout and the memory behind it; versions. Out: a `LocalVersion` of the copy.
Not here: who reads it, and until when (`publisher`); transforms.
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
from penstock.sync.receive.staging_copy import beside
from penstock.transport.choose import Links
from penstock.transport.protocol import Memory
from penstock.types import I64

MOST_FORESEEN = 64
"""Regions whose digests a device works out as they are copied: each takes it half a millisecond, arena or not."""


class VersionSnapshot(Closing):
    """A copy of a rank's regions, laid out alike; a context manager.

    Attributes:
        held: the copy, as readers see it.

    Args:
        layout: of the live memory.
        live: the layout's regions, in order.
        links: what registers the copy.
        address: stands for the copy's registrations in its layout.
        on_host: in host memory, pinned where the live memory is a device's; else on its device.
        filled: regions of the layout behind those of `live`, which others fill: shown as they are.

    Raises:
        DeviceOutOfMemory, DestinationError: there is no room for it, or it cannot be pinned.
        ConfigError: no transport reaches it.

    Cost: as much memory again; pinning it takes about a second for 3 GB, once.
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
            memories = [self._on_host(memory) for memory in live] if on_host else beside(live)
            if on_host and len(live) <= MOST_FORESEEN and all(memory.device != "cpu" for memory in live):
                digesters = digesters_of(live)
                self._foreseen = tuple(Foreseen(memory, digesters[memory.device]) for memory in live)
            shown = dataclasses.replace(layout, address=address)
            self.held = LocalVersion(shown, [*memories, *filled], links, foreseen=self._foreseen)
        except BaseException:
            self._unpin()
            raise
        self._copy = Copy(memories, live)

    def _on_host(self, memory: Memory) -> Memory:
        made = Arena.allocate(max(memory.nbytes, 1))
        populate(made.address, made.nbytes)
        if memory.device != "cpu" and memory.nbytes:
            registrar = CudaRegistrar(torch.device(memory.device))
            registrar.register(made.address, made.nbytes)
            self._pinned.append((registrar, made.address))
        return Memory(address=made.address, nbytes=memory.nbytes, owner=made)

    def snapshot(self, version: int, *, rows: I64 | None = None, stall_s: float = 30.0) -> float:
        """Copy the live memory as it is; returns the seconds. Then readers may have the version, and it may change.

        Args:
            rows: of the layout, that are whole then; None: all.
            stall_s: deadline by progress.

        Raises:
            DestinationError: the device failed; no version is held.

        Order: when nobody reads the version before: their reads end with StaleDescriptor. After what
            the current stream has queued.
        """
        self.held.fence()
        seconds = self._copy.run(stall_s=stall_s, meanwhile=partial(self._look, stall_s))
        self.held.begin(version)
        self.held.ready(rows)
        return seconds

    def _look(self, stall_s: float) -> None:
        for one in self._foreseen:
            one.look(stall_s)

    def close(self) -> None:
        """End the registrations, let go of the memory. Idempotent."""
        self.held.close()
        self._unpin()

    def _unpin(self) -> None:
        while self._pinned:
            registrar, address = self._pinned.pop()
            registrar.unregister(address)
