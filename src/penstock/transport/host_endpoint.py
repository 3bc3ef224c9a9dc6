"""The endpoint of a transport for peers of its host: handles, their generations, and peers' pages.

In: memory and how to describe it; peers' descriptors. Out: handles, descriptors, checked claims on peers' memory.
Not here: how bytes cross (`shm`, `cuda_ipc`), the page itself (`generation_table`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import Cancelled, ConfigError
from penstock.transport.descriptor import Descriptor
from penstock.transport.generation_table import GenerationAddress, GenerationTable, PeerGenerationTable, seal_of
from penstock.transport.protocol import Handle, Memory

Describe = Callable[[GenerationAddress], bytes]
"""A registration's payload, given where its slot is."""


class FencedHandle:
    """See `Handle`. Its generation is in the endpoint's page."""

    def __init__(self, endpoint: Endpoint, memory: Memory, describe: Describe, slot: int, keep: object) -> None:
        self.endpoint, self.memory, self.is_open = endpoint, memory, True
        self.keep = keep
        self._slot, self._serial = slot, endpoint.next_generation()
        self._payload = describe(endpoint.page.address(slot, self._serial))
        self.descriptor = self._begin()

    def _begin(self) -> Descriptor:
        descriptor = Descriptor(
            transport=self.endpoint.transport,
            endpoint=self.endpoint.page.name,
            generation=self.endpoint.next_generation(),
            nbytes=self.memory.nbytes,
            device=self.memory.device,
            payload=self._payload,
        )
        self.endpoint.page.set(self._slot, descriptor.generation, seal_of(descriptor), self._serial)
        return descriptor

    def fence(self) -> Descriptor:
        """See `Handle.fence`."""
        self.check_open()
        with self.endpoint.changing:
            self.check_open()
            self.descriptor = descriptor = self._begin()
        return descriptor

    def close(self) -> None:
        """See `Handle.close`. Does nothing in a forked child."""
        if not self.endpoint.page.is_mine:
            self.is_open = False
            return
        with self.endpoint.changing:
            # Once only: a second `give_slot` would put the slot on the free list twice, for two registrations.
            if self.is_open:
                self.is_open = False
                self.endpoint.page.give_slot(self._slot)
                self.endpoint.handles.discard(self)

    def check_open(self) -> None:
        """Cancelled if it is closed, or of the process that this one was forked from."""
        if not self.is_open or not self.endpoint.page.is_mine:
            raise Cancelled("the registration is closed")


class IntoHandle:
    """See `Handle`: memory that is read into and that no peer can read, so it has no descriptor and takes no slot."""

    def __init__(self, endpoint: Endpoint, memory: Memory) -> None:
        self.endpoint, self.memory, self.is_open = endpoint, memory, True

    @property
    def descriptor(self) -> Descriptor:
        """ConfigError: there is none."""
        raise ConfigError(f"{self.endpoint.transport} cannot show this memory to peers")

    def fence(self) -> Descriptor:
        """See `descriptor`."""
        return self.descriptor

    def close(self) -> None:
        """See `Handle.close`."""
        self.is_open = False

    def check_open(self) -> None:
        """Cancelled if it or its endpoint is closed, or of the process that this one was forked from."""
        if not self.is_open or not self.endpoint.page.is_mine:
            raise Cancelled("the registration is closed")


OwnHandle = FencedHandle | IntoHandle


class Claim:
    """A peer's registration as a descriptor says it is, to be checked before and after its bytes are read."""

    def __init__(self, page: PeerGenerationTable, source: Descriptor, address: GenerationAddress) -> None:
        self.page, self.source, self.address = page, source, address
        self._seal = seal_of(source)

    def check(self) -> None:
        """PeerLost, StaleDescriptor: as `PeerGenerationTable.check`."""
        self.page.check(self.address.slot, self.source, self._seal)


_Mapped = TypeVar("_Mapped")


class Mappings(Generic[_Mapped]):
    """The mappings of peers' memory, each kept from its first read until its registration is over.

    A mapping keeps the memory from being freed where the holder gave it up, so `sweep` is called now and then. What is
    let go is unmapped when the last read that uses it is done.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], tuple[_Mapped, Claim]] = {}

    def get(self, claim: Claim, device: int = 0) -> _Mapped | None:
        """Return the mapping of this registration for this device."""
        entry = self._kept.get((claim.source.endpoint, claim.address.serial, device))
        return entry and entry[0]

    def put(self, claim: Claim, mapped: _Mapped, device: int = 0) -> None:
        """Keep it, and no longer what is over."""
        self.sweep()
        self._kept[claim.source.endpoint, claim.address.serial, device] = mapped, claim

    def sweep(self) -> None:
        """Let go of the memory of peers that are gone, and of registrations that were closed."""
        self._kept = {key: entry for key, entry in self._kept.items() if entry[1].page.holds(entry[1].address)}

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()


_endpoints: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
"""Those of this process, by name."""


class Endpoint:
    """Handles given, and peers' pages opened. `changing` guards both."""

    def __init__(self, transport: str, page: GenerationTable) -> None:
        self.transport, self.page = transport, page
        self.changing, self.handles = threading.RLock(), set[FencedHandle]()
        self._generations, self._peers = itertools.count(1), dict[str, PeerGenerationTable]()
        _endpoints[page.name] = self

    def next_generation(self) -> int:
        """Return a generation that this endpoint never used before."""
        return next(self._generations)

    def register(self, memory: Memory, describe: Describe, keep: object = None) -> FencedHandle:
        """A handle in a slot of the page, with `keep` to keep alive.

        Raises:
            Cancelled: the endpoint is closed.
            ConfigError: the page is full.
        """
        with self.changing:
            self.check_open()
            slot = self.page.take_slot()
            try:
                handle = FencedHandle(self, memory, describe, slot, keep)
            except BaseException:
                self.page.give_slot(slot)
                raise
            self.handles.add(handle)
        return handle

    def check_open(self) -> None:
        """Cancelled if it is closed."""
        if not self.page.is_mine:
            raise Cancelled("the transport is closed")

    def check_mine(self, into: Handle, source: Descriptor) -> OwnHandle:
        """Our own open handle, where the descriptor is of this kind of transport.

        Raises:
            ConfigError: one of them is another transport's.
            Cancelled: the handle or the endpoint is closed.
        """
        if not isinstance(into, OwnHandle) or into.endpoint is not self or source.transport != self.transport:
            raise ConfigError(f"{source.transport} descriptor or foreign handle given to {self.transport}")
        self.check_open()
        into.check_open()
        return into

    def claim(self, source: Descriptor, address: GenerationAddress) -> Claim:
        """Return the checked content of a descriptor.

        Raises as `PeerGenerationTable.open` and `PeerGenerationTable.check`.
        """
        with self.changing:
            page = self._peers.get(source.endpoint)
            if page is None:
                # Opening a page is rare: the moment to drop the pages of processes that ended.
                self._peers = {name: peer for name, peer in self._peers.items() if peer.is_alive()}
                page = self._peers[source.endpoint] = PeerGenerationTable.open(source, address)
        claim = Claim(page, source, address)
        claim.check()
        return claim

    def close(self) -> None:
        """End every registration and let go of every peer. Idempotent."""
        if not self.page.is_mine:
            return
        with self.changing:
            for handle in list(self.handles):
                handle.close()
            self._peers.clear()
            self.page.close()


def handle_here(source: Descriptor) -> FencedHandle | None:
    """The registration that a descriptor is of, if it is one of this process and its generation has not passed."""
    endpoint = _endpoints.get(source.endpoint)
    if endpoint is None or not endpoint.page.is_mine:
        return None
    with endpoint.changing:
        return next((handle for handle in endpoint.handles if handle.descriptor == source), None)
