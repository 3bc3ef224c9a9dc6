"""Device memory as other processes of the host see it: how ours is shared, and how theirs is mapped here.

In: addresses of this process; a peer's payload. Out: a payload, pieces' file descriptors; addresses to copy from.
Not here: reading (`cuda_ipc`), the driver's calls (`cuda.driver`), sockets (`fd_server`).

Two kinds. Memory of cudaMalloc (torch's, unless told otherwise) has one 64-byte IPC handle an allocation. Virtual
memory (torch's `expandable_segments`) is pieces of physical memory, 20 MiB of torch's, each with a file descriptor.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec

from penstock.cuda.driver import CudaDriver
from penstock.cuda.driver_types import IPC_HANDLE_BYTES
from penstock.errors import ConfigError, FormatError, PenstockError
from penstock.transport.descriptor import Descriptor
from penstock.transport.fd_server import receive_fds
from penstock.transport.generation_table import GenerationAddress
from penstock.transport.protocol import Memory

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Length = Annotated[int, msgspec.Meta(gt=0, le=1 << 60)]
_MAX_RUNS = 4096
_MAX_PIECES = 1 << 20
"""File descriptors of one registration that are asked for: 20 TiB of torch's pieces."""


class CudaPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which a peer reaches a registration on a device."""

    page: GenerationAddress
    address: _Count
    """Of the memory, in the holder's process."""
    offset: _Count
    """Of the memory, in what is mapped."""
    handle: Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)] = b""
    door: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Where to ask for file descriptors, if there is no handle."""
    pieces: Annotated[tuple[tuple[_Length, _Length], ...], msgspec.Meta(max_length=_MAX_RUNS)] = ()
    """Lengths of the pieces of physical memory, in order: how many of how many bytes, and so on."""

    @property
    def num_pieces(self) -> int:
        """File descriptors to ask for."""
        return sum(count for count, _ in self.pieces)


class Shared:
    """The shared form of a local registration. Its pieces' addresses are kept; descriptors are made when asked for."""

    def __init__(self, driver: CudaDriver, device: int, memory: Memory) -> None:
        self.handle, self.offset, self.pieces = b"", 0, list[tuple[int, int]]()
        self._driver, self._device = driver, device
        with driver.entered(device):
            if memory.nbytes:
                self._look(memory)

    def _look(self, memory: Memory) -> None:
        base, nbytes = self._driver.address_range(memory.address)
        self.offset = memory.address - base
        handle = self._driver.ipc_handle(base)
        if handle is not None:
            if self.offset + memory.nbytes > nbytes:
                raise ConfigError("memory to register spans two allocations", hint="register each, or use an arena")
            self.handle = handle
            return
        # Exported once here only to learn whether it can be: descriptors are made again for each peer that asks.
        fd = self._driver.export_fd(base)
        if fd is None:
            raise ConfigError(
                "this device memory cannot be shared with other processes",
                hint="it is virtual memory (expandable_segments, cudaMallocAsync) made without a POSIX handle: "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
            )
        os.close(fd)
        while base < memory.address + memory.nbytes:
            base, nbytes = self._driver.address_range(base)
            self.pieces.append((base, nbytes))
            base += nbytes

    def runs(self) -> tuple[tuple[int, int], ...]:
        """The pieces' lengths as the payload has them."""
        runs: list[tuple[int, int]] = []
        for _, nbytes in self.pieces:
            if runs and runs[-1][1] == nbytes:
                runs[-1] = (runs[-1][0] + 1, nbytes)
            else:
                runs.append((1, nbytes))
        if len(runs) > _MAX_RUNS:
            raise ConfigError(f"device memory in {len(runs)} runs of pieces", hint="use an arena")
        return tuple(runs)

    def export(self) -> Iterator[int]:
        """File descriptors of the pieces, in order; each is the taker's."""
        for address, _ in self.pieces:
            with self._driver.entered(self._device):
                fd = self._driver.export_fd(address)
            if fd is None:
                return  # the owner freed the memory meanwhile; the peer notices that pieces are missing
            yield fd


class Mapped:
    """A peer's memory mapped in this process for one device; unmapped when this object is collected."""

    def __init__(self, address: int, nbytes: int, keep: object = None) -> None:
        self.address, self.nbytes, self.keep = address, nbytes, keep

    def at(self, offset: int, source: Descriptor) -> int:
        """Return where a registration starts. FormatError if the mapping does not hold all of it."""
        if offset + source.nbytes > self.nbytes:
            message = f"{source.nbytes} bytes from {offset} lie outside the peer's memory of {self.nbytes} bytes"
            raise FormatError(message, uri=f"{source.transport}:{source.endpoint}")
        return self.address + offset


def map_peer(driver: CudaDriver, device: int, source: Descriptor, payload: CudaPayload) -> Mapped:
    """Make a peer's memory reachable from a device of ours. Takes milliseconds; keep what it gives.

    Raises:
        ConfigError: the devices cannot reach each other's memory.
        DestinationError: the driver refuses, or there is no address space.
        FormatError: the payload contradicts itself.
        PeerLost, StaleDescriptor, SourceStalled: as `fd_door.receive_fds`.
    """
    if not payload.handle:
        return _map_pieces(driver, device, source, payload)
    with driver.entered(device):
        address = driver.ipc_open(payload.handle)
        # The handle opens the whole allocation: its true range is needed to check the peer's offset.
        try:
            base, nbytes = driver.address_range(address)
        except PenstockError:
            driver.ipc_close(address)
            raise
    mapped = Mapped(address, base + nbytes - address)
    _when_gone(mapped, _close, driver, device, mapped.address)
    return mapped


def _map_pieces(driver: CudaDriver, device: int, source: Descriptor, payload: CudaPayload) -> Mapped:
    uri = f"{source.transport}:{source.endpoint}"
    if not 0 < payload.num_pieces <= _MAX_PIECES:
        raise FormatError(f"device memory in {payload.num_pieces} pieces", uri=uri)
    lengths = [nbytes for count, nbytes in payload.pieces for _ in range(count)]
    total, at = sum(lengths), 0
    with driver.entered(device):
        base = driver.reserve(total)
        try:
            fds = receive_fds(payload.door, payload.page.pid, source.generation, len(lengths), uri)
            for fd, nbytes in zip(fds, lengths, strict=True):
                driver.map_fd(base + at, nbytes, fd)
                at += nbytes
            driver.allow(base, total, device)
        except PenstockError:
            driver.unmap(base, at, total)
            raise
    mapped = Mapped(base, total)
    _when_gone(mapped, _unmap, driver, device, base, total)
    return mapped


def _when_gone(found: Mapped, undo: object, driver: CudaDriver, device: int, *arguments: int) -> None:
    assert callable(undo)
    # The process id too: a forked child inherits the finalizer, and must not unmap what its parent uses.
    weakref.finalize(found, undo, os.getpid(), driver, device, *arguments).atexit = False  # the driver may be gone then


@contextmanager
def _undoing(pid: int, driver: CudaDriver, device: int) -> Iterator[bool]:
    """Return whether this is the process that mapped; its forked children have no driver."""
    if pid != os.getpid():
        yield False
        return
    with driver.entered(device):
        yield True


def _close(pid: int, driver: CudaDriver, device: int, address: int) -> None:
    with _undoing(pid, driver, device) as is_mine:
        if is_mine:
            driver.ipc_close(address)


def _unmap(pid: int, driver: CudaDriver, device: int, address: int, nbytes: int) -> None:
    with _undoing(pid, driver, device) as is_mine:
        if is_mine:
            driver.unmap(address, nbytes, nbytes)
