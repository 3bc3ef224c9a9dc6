"""Registrations that peers of this host can check: handles, the table of generations, and claims on peers' memory.

In: memory and how to describe it; peers' descriptors. Out: handles, descriptors, checked claims on peers' memory.
Not here: how bytes cross (`shm`, `cuda_ipc`).

An endpoint has one **generation table**: a page of shared memory that every reader on the host maps read-only. Readers
receive it, and the memory, as file descriptors from the endpoint's socket (`fd_server`).

    page, a sealed memfd    magic, the endpoint's name | slot 0: generation, checksum, serial, 0 | slot 1: ... (0: free)

The **serial** identifies a registration for as long as its memory is the same. The **checksum** is a digest of its
descriptor, so that a forged descriptor is detected. **Life** is a lock on the page that its owner has; the kernel drops
it when the owner dies. Order: an owner writes the generation before it changes a byte, and a reader checks it after its
last byte; the interpreter's lock, taken in between, orders the two.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

from penstock.errors import Cancelled, ConfigError, DestinationError, PeerLost, PenstockError, StaleDescriptor
from penstock.lifecycle import release_after_fork
from penstock.memory.memfd import MappedMemfd, check_peer_memfd, create_memfd, open_memfd_of_process
from penstock.net.unix_sockets import host_id, namespace_id, pid_namespace
from penstock.transport.fd_server import PAGE, FdServer, receive_fd
from penstock.transport.protocol import Descriptor, Handle, Memory, decode_payload

PAGE_BYTES = 64 << 10
"""Bytes of a generation table."""
_MAGIC = b"penstock page 1\n"
_HEADER_BYTES = 64
_SLOT_WORDS = 4
NUM_SLOTS = (PAGE_BYTES - _HEADER_BYTES) // (8 * _SLOT_WORDS)
"""2,046. An arena is one registration; a model of more loose tensors than this belongs in an arena."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class GenerationAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The place of the page for a reader, and the registration's slot in it."""

    host: Annotated[str, msgspec.Meta(max_length=128)]
    # Readers of the previous release open the page by these two. Ours request it at the socket.
    pid: _Id
    fd: _Id
    slot: Annotated[int, msgspec.Meta(ge=0, lt=NUM_SLOTS)]
    serial: Annotated[int, msgspec.Meta(ge=0)] = 0
    socket: Annotated[str, msgspec.Meta(max_length=107)] = ""
    """Path of the socket that sends the page and the memory; empty: the owner is of the previous release."""
    pid_namespace: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The owner's; 0: not known."""


def checksum_of(descriptor: Descriptor) -> int:
    """Return the checksum of a descriptor, which is in the table beside its generation."""
    # Of these fields by name: a reader of an older version ignores fields that a newer one adds to its descriptors.
    fields = (descriptor.transport, descriptor.endpoint, descriptor.generation, descriptor.nbytes, descriptor.device)
    raw = msgspec.msgpack.encode((*fields, descriptor.payload))
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


# A child inherits the lock, and while it has it a dead parent looks alive. It must not write to the shared page either.
_pages: weakref.WeakSet[GenerationTable] = release_after_fork(lambda page: page.forget())


class GenerationTable:
    """The owner's side of a generation table. Made by `create`; a forked child's copy does nothing.

    Attributes:
        name: the endpoint's name, new in each life of a process.
        is_mine: False once it is closed, and in a forked child.
    """

    def __init__(self, name: str, mapped: MappedMemfd, lock_fd: int) -> None:
        self.name = name
        self.is_mine = True
        self._mapped = mapped
        # Words of 8 aligned bytes: a store of one is atomic, so a reader in another process sees the old or the new.
        self._words = memoryview(mapped)[_HEADER_BYTES:].cast("Q")
        self._free = list(range(NUM_SLOTS))[::-1]
        self._changing = threading.Lock()
        self._closer = weakref.finalize(self, os.close, lock_fd)
        # Not at the interpreter's exit, where other threads still use it. The kernel closes it then.
        self._closer.atexit = False

    @classmethod
    def create(cls) -> GenerationTable:
        """Return a new table with a new name, alive. ConfigError, DestinationError: as `create_memfd`."""
        mapped = create_memfd("penstock-page", PAGE_BYTES)
        name = secrets.token_hex(8)
        try:
            # A lock belongs to an opening of the file, so it gets one of its own, which a forked child closes.
            lock_fd = mapped.readable()
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DestinationError(f"cannot lock a page of shared memory: {error}") from error
        mapped[: len(_MAGIC) + len(name)] = _MAGIC + name.encode()
        page = cls(name, mapped, lock_fd)
        _pages.add(page)
        return page

    def address(self, slot: int, serial: int = 0, socket: str = "") -> GenerationAddress:
        """Return the address for readers of the registration in this slot.

        Args:
            slot: the registration's.
            serial: identifies the registration.
            socket: path of the socket that sends the page.
        """
        return GenerationAddress(
            host=host_id(),
            pid=os.getpid(),
            fd=self._mapped.fd,
            slot=slot,
            serial=serial,
            socket=socket,
            pid_namespace=pid_namespace(),
        )

    def readable(self) -> int:
        """Return a descriptor of the page for a reader. Order: not while it is closed."""
        return self._mapped.readable()

    def take_slot(self) -> int:
        """Return a free slot, taken until `give_slot`. ConfigError if all are taken."""
        with self._changing:
            if not self._free:
                hint = "put the tensors into one arena and register that"
                raise ConfigError(f"{NUM_SLOTS} registrations are open, which is all a page has room for", hint=hint)
            return self._free.pop()

    def set(self, slot: int, generation: int, checksum: int, serial: int = 0) -> None:
        """Publish the current generation of the registration in this slot."""
        if self.is_mine:
            at = _SLOT_WORDS * slot
            # Zero first and the generation last: a reader between these stores finds no valid generation, never a
            # new generation with the checksum of an old one.
            self._words[at] = 0
            self._words[at + 1] = checksum
            self._words[at + 2] = serial
            self._words[at] = generation

    def give_slot(self, slot: int) -> None:
        """End the registration in this slot, and free the slot."""
        if self.is_mine:
            # The serial too: readers that kept the memory mapped let go of it when the serial is no longer theirs.
            self._words[_SLOT_WORDS * slot] = 0
            self._words[_SLOT_WORDS * slot + 2] = 0
            with self._changing:
                self._free.append(slot)

    def close(self) -> None:
        """End the table: no registration is valid any more, and readers find its owner dead. Idempotent."""
        if self.is_mine:
            # Before the lock goes: a reader that looks in between finds no generation, and not a living owner's.
            self._words[:] = memoryview(bytes(len(self._words) * 8)).cast("Q")
            self.forget()

    def forget(self) -> None:
        """Let go of the page without a change that readers see. Its descriptors are closed now, not on collection."""
        self.is_mine = False
        self._closer()
        # Now, not by the collector: processes that join and leave in a loop would gather descriptors of each life.
        self._words.release()
        self._mapped.close()


class _Located(msgspec.Struct, frozen=True):
    page: GenerationAddress


_LOCATED = msgspec.msgpack.Decoder(_Located)


def is_within_reach(source: Descriptor) -> bool:
    """Return whether the owner of a descriptor sends its memory, or is a process of this PID namespace."""
    page = decode_payload(source, _LOCATED).page
    return bool(page.socket) or page.host == namespace_id()


class PeerGenerationTable:
    """A reader's side of the generation table of one peer's endpoint. Made by `open`."""

    def __init__(self, name: str, fd: int, mapped: mmap.mmap) -> None:
        self.name = name
        self._fd = fd
        self._words = memoryview(mapped)[_HEADER_BYTES:].cast("Q")
        self._closer = weakref.finalize(self, os.close, fd)
        # Not at the interpreter's exit, where other threads still use it. The kernel closes it then.
        self._closer.atexit = False

    @classmethod
    def open(cls, source: Descriptor, address: GenerationAddress) -> PeerGenerationTable:
        """Map the page of the endpoint that made this descriptor.

        Raises:
            ConfigError: it is on another host, or in a container with another runtime directory.
            PeerLost: the process is gone, or another process has its socket now.
            PermissionDenied, StaleDescriptor, SourceStalled: as `fd_server.receive_fds`.
            DestinationError: it cannot be mapped.
        """
        uri = source.uri
        if address.host != host_id():
            hint = "mount one PENSTOCK_RUNTIME_DIR into both containers, or read by http or nixl"
            raise ConfigError("the peer is on another host, or has another runtime directory", uri=uri, hint=hint)
        try:
            if address.socket or address.host != namespace_id():
                fd = receive_fd(address.socket, PAGE, uri)
            else:
                fd = open_memfd_of_process(address.pid, address.fd, uri)
        except StaleDescriptor as error:
            # It answered, so it lives, but it has ended the page.
            raise PeerLost("the peer has closed its memory", uri=uri) from error
        try:
            check_peer_memfd(fd, PAGE_BYTES, uri)
            mapped = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
            if mapped[: len(_MAGIC) + 16] != _MAGIC + source.endpoint.encode():
                raise PeerLost("another process than the one that made the descriptor has its socket", uri=uri)
        except PenstockError:
            # Some of them are OSErrors too, and must not become DestinationError.
            os.close(fd)
            raise
        except (OSError, ValueError) as error:
            os.close(fd)
            raise DestinationError(f"cannot map a peer's page: {error}", uri=uri) from error
        return cls(source.endpoint, fd, mapped)

    def generation(self, slot: int) -> int:
        """Return the generation of the registration in this slot now; 0: there is none."""
        return self._words[_SLOT_WORDS * slot]

    def holds(self, address: GenerationAddress) -> bool:
        """Return whether the registration still exists, in any generation, with its memory."""
        return self._words[_SLOT_WORDS * address.slot + 2] == address.serial and self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the owner still has its page open; False as soon as it ended, in whatever way."""
        # The owner has the exclusive lock for as long as it lives. A process id would not do: it can be used again.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def check(self, slot: int, source: Descriptor, checksum: int) -> None:
        """Raise unless the descriptor is unaltered and current, and its owner lives.

        Raises:
            PeerLost: the owner is gone.
            StaleDescriptor: it fenced or released the memory, or never made this descriptor.
        """
        uri = source.uri
        # Death first: the page of an owner that died keeps its last generations, which would look valid.
        if not self.is_alive():
            raise PeerLost("the process that held this memory is gone", uri=uri)
        if self.generation(slot) != source.generation or self._words[_SLOT_WORDS * slot + 1] != checksum:
            raise StaleDescriptor(f"generation {source.generation} is gone", uri=uri)

    def close(self) -> None:
        """Close the page. Idempotent; a page that is collected is closed too."""
        self._closer()


Describe = Callable[[GenerationAddress], bytes]
"""Returns a registration's payload, given the address of its slot."""


class Exportable(Protocol):
    """The memory of a registration, as it is sent to readers."""

    def export(self) -> Iterator[int]:
        """Yield its file descriptors, in order; the receiver closes each."""
        ...


class FencedHandle:
    """See `Handle`. Its generation is in the endpoint's table; `keep` lives as long as the handle, and is sent."""

    def __init__(
        self, endpoint: Endpoint, memory: Memory, describe: Describe, slot: int, keep: Exportable | None
    ) -> None:
        self.endpoint = endpoint
        self.memory = memory
        self.is_open = True
        self.keep = keep
        self._slot = slot
        self._serial = endpoint.next_generation()
        self._payload = describe(endpoint.address(slot, self._serial))
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
        self.endpoint.page.set(self._slot, descriptor.generation, checksum_of(descriptor), self._serial)
        return descriptor

    def fence(self) -> Descriptor:
        """See `Handle.fence`."""
        # Before the lock too: after a fork in another thread the child's copy of the lock may stay taken for good.
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
        """Raise Cancelled if it is closed, or belongs to the process that this one was forked from."""
        if not self.is_open or not self.endpoint.page.is_mine:
            raise Cancelled("the registration is closed")


class IntoHandle:
    """See `Handle`: memory that is read into and that no peer can read, so it has no descriptor and takes no slot."""

    def __init__(self, endpoint: Endpoint, memory: Memory) -> None:
        self.endpoint = endpoint
        self.memory = memory
        self.is_open = True

    @property
    def descriptor(self) -> Descriptor:
        """Raise ConfigError: there is none."""
        raise ConfigError(f"{self.endpoint.transport} cannot show this memory to peers")

    def fence(self) -> Descriptor:
        """Raise ConfigError: there is no descriptor to replace."""
        return self.descriptor

    def close(self) -> None:
        """See `Handle.close`."""
        self.is_open = False

    def check_open(self) -> None:
        """Raise Cancelled if it or its endpoint is closed, or belongs to the process that this one was forked from."""
        if not self.is_open or not self.endpoint.page.is_mine:
            raise Cancelled("the registration is closed")


OwnHandle = FencedHandle | IntoHandle


class MemoryClaim:
    """A peer's registration as a descriptor describes it, to be checked before and after its bytes are read."""

    def __init__(self, page: PeerGenerationTable, source: Descriptor, address: GenerationAddress) -> None:
        self.page = page
        self.source = source
        self.address = address
        self._checksum = checksum_of(source)

    def check(self) -> None:
        """Raise PeerLost or StaleDescriptor as `PeerGenerationTable.check` does."""
        self.page.check(self.address.slot, self.source, self._checksum)


_Mapped = TypeVar("_Mapped")


class PeerMappings(Generic[_Mapped]):
    """The mappings of peers' memory, each kept from its first read until its registration is over.

    A mapping keeps memory from being freed that its holder gave up, so `sweep` is called now and then. A mapping is
    unmapped when it was let go and the last read that uses it is done.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], tuple[_Mapped, MemoryClaim]] = {}

    def get(self, claim: MemoryClaim, device: int = 0) -> _Mapped | None:
        """Return the mapping of this registration for this device."""
        entry = self._kept.get((claim.source.endpoint, claim.address.serial, device))
        return entry and entry[0]

    def put(self, claim: MemoryClaim, mapped: _Mapped, device: int = 0) -> None:
        """Keep a mapping; let go of those that are over."""
        self.sweep()
        self._kept[claim.source.endpoint, claim.address.serial, device] = mapped, claim

    def sweep(self) -> None:
        """Let go of the memory of peers that are gone, and of registrations that were closed."""
        # A fence is no reason: the same memory is soon read again in its next generation.
        self._kept = {key: entry for key, entry in self._kept.items() if entry[1].page.holds(entry[1].address)}

    def clear(self) -> None:
        """Let go of all mappings."""
        self._kept.clear()


_endpoints: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
"""Endpoints of this process, by name."""


class Endpoint:
    """A transport's registrations and its table of their generations, and the tables of the peers that it reads.

    Args:
        transport: name of the transport.
        page: the table.
        abstract_name: see `FdServer`.

    Attributes:
        transport: name of the transport.
        page: the table.
        handles: the open registrations.
        changing: guards handles and peers' tables.
    """

    def __init__(self, transport: str, page: GenerationTable, *, abstract_name: str = "") -> None:
        self.transport = transport
        self.page = page
        self.abstract_name = abstract_name
        self.changing = threading.RLock()
        self.handles = set[FencedHandle]()
        self._generations = itertools.count(1)
        self._peers = dict[str, PeerGenerationTable]()
        self._server: FdServer | None = None
        _endpoints[page.name] = self

    def next_generation(self) -> int:
        """Return a generation that this endpoint never used before."""
        return next(self._generations)

    def address(self, slot: int, serial: int = 0) -> GenerationAddress:
        """Return the address for readers of a slot. The first call starts the server that they need.

        Raises:
            ConfigError, DestinationError: as `FdServer`.
        """
        with self.changing:
            if self._server is None:
                self._server = FdServer.start(self.page.name, self._export, abstract_name=self.abstract_name)
            return self.page.address(slot, serial, self._server.path)

    def _export(self, generation: int) -> Iterator[int]:
        """Yield the descriptors that a reader requested. StaleDescriptor: the generation is over."""
        with self.changing:
            if self.page.is_mine and generation == PAGE:
                # Under the lock: once the page is closed, the number of its descriptor may be another file's.
                page = self.page.readable()
                kept: list[Exportable | None] = []
            else:
                page = -1
                kept = [handle.keep for handle in self.handles if handle.descriptor.generation == generation]
        if page >= 0:
            yield page
        elif kept and kept[0] is not None:
            yield from kept[0].export()
        else:
            raise StaleDescriptor(f"generation {generation} is gone")

    def register(self, memory: Memory, describe: Describe, keep: Exportable | None = None) -> FencedHandle:
        """Return a handle in a slot of the table; it keeps `keep` alive.

        Raises:
            Cancelled: the endpoint is closed.
            ConfigError: the table is full.
        """
        with self.changing:
            self.check_open()
            slot = self.page.take_slot()
            # `describe` is the transport's and may fail: the slot would be lost for good.
            try:
                handle = FencedHandle(self, memory, describe, slot, keep)
            except BaseException:
                self.page.give_slot(slot)
                raise
            self.handles.add(handle)
        return handle

    def check_open(self) -> None:
        """Raise Cancelled if it is closed."""
        if not self.page.is_mine:
            raise Cancelled("the transport is closed")

    def check_mine(self, into: Handle, source: Descriptor) -> OwnHandle:
        """Return our own open handle, where the descriptor is of this kind of transport.

        Raises:
            ConfigError: one of them is another transport's.
            Cancelled: the handle or the endpoint is closed.
        """
        if not isinstance(into, OwnHandle) or into.endpoint is not self:
            raise ConfigError(f"a foreign handle was given to {self.transport}")
        self.check_theirs(source)
        into.check_open()
        return into

    def check_theirs(self, source: Descriptor) -> None:
        """Check that a descriptor is of this kind of transport, and that it is open. Raises as `check_mine`."""
        if source.transport != self.transport:
            raise ConfigError(f"a {source.transport} descriptor was given to {self.transport}")
        self.check_open()

    def claim(self, source: Descriptor, address: GenerationAddress) -> MemoryClaim:
        """Return the claim of a descriptor, checked once.

        Raises as `PeerGenerationTable.open` and `PeerGenerationTable.check`.
        """
        with self.changing:
            page = self._peers.get(source.endpoint)
        if page is None:
            # Not under the lock: the peer's answer needs the peer's, and two that read each other would wait in a ring.
            opened = PeerGenerationTable.open(source, address)
            with self.changing:
                # Opening a page is rare: the moment to drop the pages of processes that ended.
                self._peers = {name: peer for name, peer in self._peers.items() if peer.is_alive()}
                page = self._peers.setdefault(source.endpoint, opened)
        claim = MemoryClaim(page, source, address)
        claim.check()
        return claim

    def close(self) -> None:
        """End every registration and let go of every peer. Idempotent."""
        if not self.page.is_mine:
            return
        with self.changing:
            # A copy: closing a handle takes it out of the set.
            for handle in list(self.handles):
                handle.close()
            self._peers.clear()
            self.page.close()
        # Not under the lock, which the threads of its last answers need.
        if self._server is not None:
            self._server.close()


def handle_here(source: Descriptor) -> FencedHandle | None:
    """Return the registration of a descriptor if it is one of this process and of the current generation, else None."""
    endpoint = _endpoints.get(source.endpoint)
    if endpoint is None or not endpoint.page.is_mine:
        return None
    with endpoint.changing:
        return next((handle for handle in endpoint.handles if handle.descriptor == source), None)
