"""Registrations that peers on this host can check: handles, the generation table, and claims on peers' memory.

An endpoint has one generation table, which is a page of shared memory that every reader on the host maps read-only. The
page holds a header and slots of four words: generation (0 if free), checksum, serial, 0. The serial identifies a
registration as long as its memory stays the same. The checksum is a digest of the registration's descriptor and detects
forgeries. A lock on the page shows that its owner is alive, since the kernel releases it when the owner dies.

An owner writes the generation before it changes a byte, and a reader checks the generation after its last byte. In each
process, the global interpreter lock orders the two accesses.
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

from penstock.errors import (
    Cancelled,
    ConfigError,
    DestinationError,
    FormatError,
    PeerLost,
    PenstockError,
    StaleDescriptor,
)
from penstock.lifecycle import release_after_fork
from penstock.memory.memfd import MappedMemfd, check_peer_memfd, create_memfd, open_memfd_of_process
from penstock.net.unix_sockets import host_id, namespace_id, pid_namespace
from penstock.transport.fd_server import PAGE, FdServer, receive_fd
from penstock.transport.protocol import Descriptor, Handle, Memory, decode_payload

PAGE_BYTES = 64 << 10
"""Size of a generation table in bytes."""
_MAGIC = b"penstock page 1\n"
_HEADER_BYTES = 64
_SLOT_WORDS = 4
NUM_SLOTS = (PAGE_BYTES - _HEADER_BYTES) // (8 * _SLOT_WORDS)
"""2,046 registrations. An arena is one registration, and a model with more loose tensors belongs in an arena."""
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class GenerationAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the page for a reader, and the registration's slot in it."""

    host: Annotated[str, msgspec.Meta(max_length=128)]
    # Readers of the previous release open the page by `pid` and `fd`. Readers of this release request the page at
    # `socket`.
    pid: _Id
    fd: _Id
    slot: Annotated[int, msgspec.Meta(ge=0, lt=NUM_SLOTS)]
    serial: Annotated[int, msgspec.Meta(ge=0)] = 0
    socket: Annotated[str, msgspec.Meta(max_length=107)] = ""
    """Path of the socket that sends the page and the memory. Empty means that the owner runs the previous release."""
    pid_namespace: Annotated[int, msgspec.Meta(ge=0)] = 0
    """PID namespace of the owner. 0 means unknown."""


def checksum_of(descriptor: Descriptor) -> int:
    """Return the checksum of a descriptor, which the table stores next to its generation."""
    # List the fields, since a reader of an older version ignores fields that a newer one adds to descriptors.
    fields = (descriptor.transport, descriptor.endpoint, descriptor.generation, descriptor.nbytes, descriptor.device)
    raw = msgspec.msgpack.encode((*fields, descriptor.payload))
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


# A child inherits the lock and would make a dead parent look alive. It must not write to the shared page either.
_pages: weakref.WeakSet[GenerationTable] = release_after_fork(lambda page: page.forget())


class GenerationTable:
    """The owner's side of a generation table. `is_mine` is False after `close` and in a forked child."""

    def __init__(self, name: str, mapped: MappedMemfd, lock_fd: int) -> None:
        self.name = name
        self.is_mine = True
        self._mapped = mapped
        # A store to an aligned word of 8 bytes is atomic, so a reader in another process sees the old or the new value.
        self._words = memoryview(mapped)[_HEADER_BYTES:].cast("Q")
        self._free = list(range(NUM_SLOTS))[::-1]
        self._changing = threading.Lock()
        self._closer = _closed_with(self, lock_fd)

    @classmethod
    def create(cls) -> GenerationTable:
        """Return a new table with a new name. Raises ConfigError and DestinationError like `create_memfd`."""
        mapped = create_memfd("penstock-page", PAGE_BYTES)
        name = secrets.token_hex(8)
        try:
            # A lock belongs to an open file description. A forked child closes this separate one.
            lock_fd = mapped.readable()
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DestinationError(f"cannot lock a page of shared memory: {error}") from error
        mapped[: len(_MAGIC) + len(name)] = _MAGIC + name.encode()
        page = cls(name, mapped, lock_fd)
        _pages.add(page)
        return page

    def address(self, slot: int, serial: int = 0, socket: str = "") -> GenerationAddress:
        """Return the address for readers of the registration in this slot."""
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
        """Return a descriptor of the page for a reader. The caller must prevent a concurrent `close`."""
        return self._mapped.readable()

    def take_slot(self) -> int:
        """Reserve a slot until `give_slot`. Raises ConfigError if no slot is free."""
        with self._changing:
            if not self._free:
                hint = "put the tensors into one arena and register the arena"
                raise ConfigError(f"{NUM_SLOTS} registrations are open, which is the maximum", hint=hint)
            return self._free.pop()

    def set(self, slot: int, generation: int, checksum: int, serial: int = 0) -> None:
        """Publish the current generation of the registration in this slot."""
        if self.is_mine:
            at = _SLOT_WORDS * slot
            # Write zero first and the generation last, so that a reader never sees a new generation with an old
            # checksum.
            self._words[at] = 0
            self._words[at + 1] = checksum
            self._words[at + 2] = serial
            self._words[at] = generation

    def give_slot(self, slot: int) -> None:
        """Close the registration in this slot, and free the slot."""
        if self.is_mine:
            # Clear the serial too, so that readers that keep the memory mapped release it.
            self._words[_SLOT_WORDS * slot] = 0
            self._words[_SLOT_WORDS * slot + 2] = 0
            with self._changing:
                self._free.append(slot)

    def close(self) -> None:
        """Close the table, so that no registration is valid and readers find its owner dead. Idempotent."""
        if self.is_mine:
            # Clear the page before the lock is released, so that a reader that looks in between finds no generation.
            self._words[:] = memoryview(bytes(len(self._words) * 8)).cast("Q")
            self.forget()

    def forget(self) -> None:
        """Close the page's descriptors without a change that readers can see."""
        self.is_mine = False
        # Close the descriptors now, or processes that join and leave repeatedly would accumulate descriptors.
        self._closer()
        self._words.release()
        self._mapped.close()


def _closed_with(owner: object, fd: int) -> Callable[[], object]:
    """Return a function that closes a descriptor. Garbage collection of `owner` also closes the descriptor."""
    closer = weakref.finalize(owner, os.close, fd)
    # At the interpreter's exit, do not close the descriptor, which other threads still use. The kernel closes it later.
    closer.atexit = False
    return closer


class _Located(msgspec.Struct, frozen=True):
    page: GenerationAddress


_LOCATED = msgspec.msgpack.Decoder(_Located)


def is_within_reach(source: Descriptor) -> bool:
    """Return whether this process can open a descriptor's memory: by file descriptors, or in this PID namespace."""
    page = decode_payload(source, _LOCATED).page
    return bool(page.socket) or page.host == namespace_id()


class PeerGenerationTable:
    """A reader's side of the generation table of a peer's endpoint, created by `open`."""

    def __init__(self, fd: int, mapped: mmap.mmap) -> None:
        self._fd = fd
        self._words = memoryview(mapped)[_HEADER_BYTES:].cast("Q")
        _closed_with(self, fd)

    @classmethod
    def open(cls, source: Descriptor, address: GenerationAddress) -> PeerGenerationTable:
        """Map the page of the endpoint that created this descriptor. Raises like `fd_server.receive_fds`.

        Raises:
            ConfigError: the peer is on another host, or in a container with a different runtime directory.
            PeerLost: the process is gone, or a different process owns its socket.
        """
        uri = source.uri
        if address.host != host_id():
            hint = "mount one PENSTOCK_RUNTIME_DIR into both containers, or use http or nixl"
            raise ConfigError("the peer is on another host, or has a different runtime directory", uri=uri, hint=hint)
        try:
            if address.socket or address.host != namespace_id():
                fd = receive_fd(address.socket, PAGE, uri)
            else:
                fd = open_memfd_of_process(address.pid, address.fd, uri)
        except StaleDescriptor as error:
            # The peer replied, so it is alive, but it has closed the page.
            raise PeerLost("the peer has closed its memory", uri=uri) from error
        try:
            check_peer_memfd(fd, PAGE_BYTES, uri)
            mapped = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
            if mapped[: len(_MAGIC) + 16] != _MAGIC + source.endpoint.encode():
                raise PeerLost("the peer process was replaced after it sent this descriptor", uri=uri)
        except PenstockError:
            # Some of these errors are OSErrors too, and must not become DestinationError.
            os.close(fd)
            raise
        except (OSError, ValueError) as error:
            os.close(fd)
            raise DestinationError(f"cannot map a peer's page: {error}", uri=uri) from error
        return cls(fd, mapped)

    def generation(self, slot: int) -> int:
        """Return the current generation of the registration in this slot, or 0 if there is none."""
        return self._words[_SLOT_WORDS * slot]

    def holds(self, address: GenerationAddress) -> bool:
        """Return whether the registration and its memory still exist, in any generation."""
        return self._words[_SLOT_WORDS * address.slot + 2] == address.serial and self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the owner still has its page open."""
        # The owner holds the exclusive lock while it is alive. A process id would not suffice, since it can be reused.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def check(self, slot: int, source: Descriptor, checksum: int) -> None:
        """Raise PeerLost if the owner is gone, or StaleDescriptor unless the descriptor is unaltered and current."""
        uri = source.uri
        # Check the owner first. The page of a dead owner keeps its last generations, which would look valid.
        if not self.is_alive():
            raise PeerLost("the process that held this memory is gone", uri=uri)
        if self.generation(slot) != source.generation or self._words[_SLOT_WORDS * slot + 1] != checksum:
            raise StaleDescriptor(f"generation {source.generation} of the memory is no longer current", uri=uri)


class Exportable(Protocol):
    """Registered memory that can be sent to readers as file descriptors."""

    def export(self) -> Iterator[int]:
        """Yield the memory's file descriptors, in order. The receiver closes each descriptor."""


Describe = Callable[[GenerationAddress], bytes]
"""Returns the payload of a registration for the address of its slot."""


class IntoHandle:
    """See `Handle`. Peers cannot read this memory, so the handle has no descriptor and needs no slot."""

    def __init__(self, endpoint: Endpoint, memory: Memory) -> None:
        self.endpoint = endpoint
        self.memory = memory
        self.is_open = True

    @property
    def descriptor(self) -> Descriptor:
        """Raise ConfigError, since there is no descriptor."""
        raise ConfigError(f"{self.endpoint.transport} cannot offer this memory to peers")

    def fence(self) -> Descriptor:
        """Raise ConfigError, since there is no descriptor to replace."""
        return self.descriptor

    def close(self) -> None:
        """See `Handle.close`."""
        self.is_open = False

    def check_open(self) -> None:
        """Raise Cancelled if the handle is closed or belongs to a parent process from before a fork."""
        if not self.is_open or not self.endpoint.page.is_mine:
            raise Cancelled("the registration is closed")


class FencedHandle(IntoHandle):
    """See `Handle`. The handle's generation is in the endpoint's table. Readers receive `keep`."""

    def __init__(
        self, endpoint: Endpoint, memory: Memory, describe: Describe, slot: int, keep: Exportable | None
    ) -> None:
        super().__init__(endpoint, memory)
        self.keep = keep
        self._slot = slot
        self._serial = endpoint.next_generation()
        self._payload = describe(endpoint.address(slot, self._serial))
        self._descriptor = self._begin()

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

    @property
    def descriptor(self) -> Descriptor:
        """See `Handle.descriptor`."""
        return self._descriptor

    def fence(self) -> Descriptor:
        """See `Handle.fence`."""
        # Also check before acquiring the lock. A child forked while another thread holds the lock would wait forever.
        self.check_open()
        with self.endpoint.changing:
            self.check_open()
            self._descriptor = descriptor = self._begin()
        return descriptor

    def close(self) -> None:
        """See `Handle.close`. Does nothing in a forked child."""
        if not self.endpoint.page.is_mine:
            self.is_open = False
            return
        with self.endpoint.changing:
            # Free the slot only once, or it would be on the free list twice and serve two registrations.
            if self.is_open:
                self.is_open = False
                self.endpoint.page.give_slot(self._slot)
                self.endpoint.handles.discard(self)


class MemoryClaim:
    """A peer's registration, as named by a descriptor. Check the claim before and after reading the peer's bytes."""

    def __init__(self, page: PeerGenerationTable, source: Descriptor, address: GenerationAddress) -> None:
        self.page = page
        self.source = source
        self.address = address
        self._checksum = checksum_of(source)

    def check(self) -> None:
        """Raise PeerLost or StaleDescriptor like `PeerGenerationTable.check`."""
        self.page.check(self.address.slot, self.source, self._checksum)

    def check_inside(self, offset: int, nbytes: int) -> None:
        """Raise FormatError if the registration at this offset exceeds the peer's memory of `nbytes`."""
        source = self.source
        if offset + source.nbytes > nbytes:
            message = f"{source.nbytes} bytes from {offset} are outside the peer's memory of {nbytes} bytes"
            raise FormatError(message, uri=source.uri)


_Mapped = TypeVar("_Mapped")


class PeerMappings(Generic[_Mapped]):
    """Mappings of peers' memory, each kept until its registration is closed. Call `sweep` from time to time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], tuple[_Mapped, MemoryClaim]] = {}

    def get(self, claim: MemoryClaim, device: int = 0) -> _Mapped | None:
        """Return the mapping of this registration for this device, or None."""
        entry = self._kept.get((claim.source.endpoint, claim.address.serial, device))
        return entry and entry[0]

    def put(self, claim: MemoryClaim, mapped: _Mapped, device: int = 0) -> None:
        """Store a mapping, and release mappings whose registration was closed."""
        self.sweep()
        self._kept[claim.source.endpoint, claim.address.serial, device] = mapped, claim

    def sweep(self) -> None:
        """Release the memory of peers that are gone and of closed registrations."""
        # Keep fenced memory, which is soon read again in its next generation.
        self._kept = {key: entry for key, entry in self._kept.items() if entry[1].page.holds(entry[1].address)}

    def clear(self) -> None:
        """Release all mappings."""
        self._kept.clear()


_endpoints: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
"""Endpoints of this process, by name."""


class Endpoint:
    """A transport's registrations and their generation table, and the generation tables of the peers that it reads.

    Args:
        reads: name of the transport whose descriptors this endpoint accepts. Empty means `transport`.
        abstract_name: see `FdServer`.

    Attributes:
        changing: lock for handles and peers' tables.
    """

    def __init__(self, transport: str, page: GenerationTable, *, reads: str = "", abstract_name: str = "") -> None:
        self.transport = transport
        self._reads = reads or transport
        self.page = page
        self.abstract_name = abstract_name
        self.changing = threading.RLock()
        self.handles = set[FencedHandle]()
        self.next_generation = itertools.count(1).__next__
        self._peers = dict[str, PeerGenerationTable]()
        self._server: FdServer | None = None
        _endpoints[page.name] = self

    def address(self, slot: int, serial: int = 0) -> GenerationAddress:
        """Return the address of a slot. The first call starts the server for readers and may fail; see `FdServer`."""
        with self.changing:
            if self._server is None:
                self._server = FdServer.start(self.page.name, self._export, abstract_name=self.abstract_name)
            return self.page.address(slot, serial, self._server.path)

    def _export(self, generation: int) -> Iterator[int]:
        with self.changing:
            if self.page.is_mine and generation == PAGE:
                # Hold the lock, since the descriptor of a closed page may belong to another file.
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
            raise StaleDescriptor(f"generation {generation} of the memory is no longer current")

    def register(self, memory: Memory, describe: Describe, keep: Exportable | None = None) -> FencedHandle:
        """Return a handle with a slot in the table. It keeps `keep` alive. Raises ConfigError if the table is full."""
        with self.changing:
            self.check_open()
            slot = self.page.take_slot()
            # `describe` of the transport may fail, and the slot must not be lost.
            try:
                handle = FencedHandle(self, memory, describe, slot, keep)
            except BaseException:
                self.page.give_slot(slot)
                raise
            self.handles.add(handle)
        return handle

    def check_open(self) -> None:
        """Raise Cancelled if the endpoint is closed."""
        if not self.page.is_mine:
            raise Cancelled("the transport is closed")

    def check_mine(self, into: Handle, source: Descriptor) -> IntoHandle:
        """Return the open handle. Raise Cancelled if the handle is closed, ConfigError if an argument is foreign."""
        if not isinstance(into, IntoHandle) or into.endpoint is not self:
            raise ConfigError(f"{self.transport} got another transport's handle")
        self.check_theirs(source)
        into.check_open()
        return into

    def check_theirs(self, source: Descriptor) -> None:
        """Check that a descriptor belongs to this transport, which must be open. Raises like `check_mine`."""
        if source.transport != self._reads:
            raise ConfigError(f"{self.transport} cannot read a {source.transport} descriptor")
        self.check_open()

    def claim(self, source: Descriptor, address: GenerationAddress) -> MemoryClaim:
        """Return the checked claim of a descriptor. Raises like `PeerGenerationTable.open` and `check`."""
        with self.changing:
            page = self._peers.get(source.endpoint)
        if page is None:
            # Do not hold the lock. The peer needs its lock to reply, so two peers that read each other would deadlock.
            opened = PeerGenerationTable.open(source, address)
            with self.changing:
                # Opening a page is rare, so use it to drop the pages of dead processes.
                self._peers = {name: peer for name, peer in self._peers.items() if peer.is_alive()}
                page = self._peers.setdefault(source.endpoint, opened)
        claim = MemoryClaim(page, source, address)
        claim.check()
        return claim

    def close(self) -> None:
        """Close every registration and release every peer. Idempotent."""
        if not self.page.is_mine:
            return
        with self.changing:
            # Iterate over a copy, since closing a handle removes it from the set.
            for handle in list(self.handles):
                handle.close()
            self._peers.clear()
            self.page.close()
        # Release the lock first, since the threads of the last replies need it.
        if self._server is not None:
            self._server.close()


def handle_here(source: Descriptor) -> FencedHandle | None:
    """Return the registration of a descriptor if this process holds it in its current generation, or None."""
    endpoint = _endpoints.get(source.endpoint)
    if endpoint is None or not endpoint.page.is_mine:
        return None
    with endpoint.changing:
        return next((handle for handle in endpoint.handles if handle.descriptor == source), None)
