"""Transport for host memory of processes on one host. The reader maps the holder's arena and copies from it.

The memory must be in a host arena (a sealed memfd). The reader checks the descriptor before, between and after the
pieces that it copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from penstock.digest.strip import Bytes, memory_at
from penstock.errors import ConfigError, DestinationError, PeerLost, PenstockError, StaleDescriptor
from penstock.memory.arena import populate
from penstock.memory.mapping import HUGE_PAGE_BYTES, Mapping
from penstock.memory.memfd import check_peer_memfd, open_memfd_of_process, shared_at
from penstock.segments import Rectangles, Segments
from penstock.transport.fd_server import receive_fd
from penstock.transport.host_endpoint import (
    Endpoint,
    FencedHandle,
    GenerationAddress,
    GenerationTable,
    IntoHandle,
    MemoryClaim,
    PeerMappings,
)
from penstock.transport.protocol import (
    DeferredRead,
    Descriptor,
    Handle,
    Memory,
    PendingRead,
    Striding,
    Sweeping,
    Transport,
    decode_payload,
)
from penstock.types import MIB

PIECE_BYTES = 8 * MIB
"""Bytes between two checks of the fence: about a millisecond. Source: benchmarks/results/cpu2_202611/transport.md."""
SHORT_BYTES = 64 << 10
"""One numpy call copies many shorter runs at a pitch, since a call of memmove takes as long as copying 2 KB."""

_MappingT = TypeVar("_MappingT")
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class ShmPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The memfd of the holding process, and the offset of the memory in it."""

    page: GenerationAddress
    # Readers of the previous release open the memfd by `fd` and `inode`. Ours receive it from the page's socket.
    fd: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    inode: Annotated[int, msgspec.Meta(ge=0)]
    offset: _Count


_DECODER = msgspec.msgpack.Decoder(ShmPayload)


class ShmRead(DeferredRead[IntoHandle, MemoryClaim, Mapping, int]):
    """See `PendingRead`."""

    def __init__(
        self,
        into: IntoHandle,
        claim: MemoryClaim,
        source: Mapping,
        base: int,
        rows: Segments,
        short: Rectangles | None,
    ) -> None:
        self._rows = rows
        self._short = short
        # Start as if a piece had been copied, so that the first check is before the first byte.
        self._unchecked_bytes = PIECE_BYTES
        nbytes = int(rows.nbytes.sum()) + (0 if short is None else int(short.nbytes.sum()))
        super().__init__(nbytes, into, claim, source, base)

    def _carry(self, stall_s: float, into: IntoHandle, claim: MemoryClaim, source: Mapping, base: int) -> None:
        memmove, rows = ctypes.memmove, self._rows
        if self._short is not None:
            self._copy_short(into, claim, memory_at(base, source.address + source.nbytes - base), self._short)
        # Use Python numbers, since memmove takes several times as long with numpy scalars.
        srcs, dsts = (rows.src + base).tolist(), (rows.dst + into.memory.address).tolist()
        for src, dst, nbytes in zip(srcs, dsts, rows.nbytes.tolist(), strict=True):
            at = 0
            while at < nbytes:
                self._check_fence(into, claim)
                piece = min(PIECE_BYTES - self._unchecked_bytes, nbytes - at)
                if piece >= HUGE_PAGE_BYTES:
                    # Begin and end at huge pages, which the neighbouring pieces also fill.
                    low = max((dst + at) & -HUGE_PAGE_BYTES, into.memory.address)
                    high = min(-(-(dst + at + piece) & -HUGE_PAGE_BYTES), into.memory.address + into.memory.nbytes)
                    populate(low, high - low)
                memmove(dst + at, src + at, piece)
                at += piece
                self._moved(piece)
        into.check_open()
        # Check after the last byte. A holder fences before it changes a byte, so a valid claim saw no change.
        claim.check()

    def _copy_short(self, into: IntoHandle, claim: MemoryClaim, theirs: Bytes, table: Rectangles) -> None:
        ours = memory_at(into.memory.address, into.memory.nbytes)
        columns = (table.src, table.dst, table.run_bytes, table.num_rows, table.src_pitch, table.dst_pitch)
        for src, dst, run, count, src_pitch, dst_pitch in zip(*(column.tolist() for column in columns), strict=True):
            block = PIECE_BYTES // run
            for row in range(0, count, block):
                self._check_fence(into, claim)
                num = min(block, count - row)
                source = _strided(theirs[src + row * src_pitch :], num, run, src_pitch)
                _strided(ours[dst + row * dst_pitch :], num, run, dst_pitch)[...] = source
                self._moved(num * run)

    def _check_fence(self, into: IntoHandle, claim: MemoryClaim) -> None:
        # A check is a system call, so copy many short runs between two checks.
        if self._unchecked_bytes >= PIECE_BYTES:
            into.check_open()
            claim.check()
            self._unchecked_bytes = 0

    def _moved(self, nbytes: int) -> None:
        self._unchecked_bytes += nbytes
        self.moved_bytes += nbytes


def _strided(memory: Bytes, rows: int, run: int, pitch: int) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory, (rows, run), (pitch, 1))


class ShmTransport:
    """See `Transport`. Raises ConfigError if the system has no memfds."""

    name = "shm"

    def __init__(self) -> None:
        self._endpoint = Endpoint(self.name, GenerationTable.create())
        self._mapped: PeerMappings[Mapping] = PeerMappings()

    def register(self, memory: Memory) -> FencedHandle:
        """See `Transport.register`. Raises Cancelled if the transport is closed, and ConfigError outside arenas."""
        if memory.device != "cpu":
            raise ConfigError(f"shm only reaches host memory, not {memory.device}")
        mapping = shared_at(memory.address, memory.nbytes)
        if mapping is None:
            hint = "allocate it in a memory.arena.Arena, or move live tensors there with ReadSettings(arena=True)"
            raise ConfigError("shm only reaches memory in arenas", hint=hint)
        # Seal the memfd only now. Until then, workers of a conversion write to the arena through its path.
        mapping.seal()
        offset = memory.address - mapping.address

        def describe(page: GenerationAddress) -> bytes:
            return msgspec.msgpack.encode(ShmPayload(page=page, fd=mapping.fd, inode=mapping.inode, offset=offset))

        return self._endpoint.register(memory, describe, keep=mapping)

    def register_into(self, memory: Memory) -> IntoHandle:
        """Return a handle for any host memory. Peers cannot read it. Raises Cancelled after `close`."""
        if memory.device != "cpu":
            raise ConfigError(f"shm only reaches host memory, not {memory.device}")
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> ShmRead:
        """See `Transport.post_read`. Raises FormatError if the descriptor exceeds the memory that it names."""
        mine = self._endpoint.check_mine(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        return self._post(mine, source, segments, None)

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> ShmRead:
        """See `Striding`."""
        mine = self._endpoint.check_mine(into, source)
        rectangles.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        # A rectangle with one row is a plain segment, which memmove copies without a view.
        short = (rectangles.longest_runs() < SHORT_BYTES) & (rectangles.num_rows > 1)
        return self._post(mine, source, rectangles[~short].segments(), rectangles[short])

    def _post(self, mine: IntoHandle, source: Descriptor, rows: Segments, short: Rectangles | None) -> ShmRead:
        claim, mapped, base = self.view(source)
        return ShmRead(mine, claim, mapped, base, rows.joined(), short)

    def view(self, source: Descriptor) -> tuple[MemoryClaim, Mapping, int]:
        """Return the claim on a peer's memory, the mapped memory, and the address of the registration in it.

        The caller must check the claim before and after each access to the bytes. Raises like `post_read`.
        """
        payload = decode_payload(source, _DECODER)
        claim = self._endpoint.claim(source, payload.page)
        with self._endpoint.changing:
            mapped = self._mapped.get(claim)
        if mapped is None:
            # Map without the lock; see `Endpoint.claim`. If two threads map it at once, the second mapping stays.
            flags = mmap.PROT_READ, mmap.MAP_SHARED
            mapped = open_payload(claim, payload, lambda fd: Mapping.map(fd, 0, os.fstat(fd).st_size, *flags))
            with self._endpoint.changing:
                self._mapped.put(claim, mapped)
        claim.check_inside(payload.offset, mapped.nbytes)
        return claim, mapped, mapped.address + payload.offset

    def sweep(self) -> None:
        """See `Sweeping`. A read that detects released memory also sweeps."""
        with self._endpoint.changing:
            self._mapped.sweep()

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. A copy on the host does not stall, even if the peer is stopped."""
        assert isinstance(pending, ShmRead)
        try:
            pending.run(stall_s)
        except (StaleDescriptor, PeerLost):
            self.sweep()
            raise

    def close(self) -> None:
        """See `Transport.close`. Mappings are unmapped when the last read that uses them is done."""
        self._endpoint.close()
        self._mapped.clear()


def open_payload(claim: MemoryClaim, payload: ShmPayload, mapping: Callable[[int], _MappingT]) -> _MappingT:
    """Map the memfd of a claim by calling `mapping` with its file descriptor. Raises like `fd_server.receive_fds`."""
    source, uri = claim.source, claim.source.uri
    try:
        if payload.page.socket:
            fd = receive_fd(payload.page.socket, source.generation, uri)
        else:
            fd = open_memfd_of_process(payload.page.pid, payload.fd, uri)
    except (PeerLost, StaleDescriptor):
        # The peer's page may give a better reason for the failure.
        claim.check()
        raise
    try:
        check_peer_memfd(fd, 0, uri)
        state = os.fstat(fd)
        # In a peer of the previous release, the number `fd` may belong to a different file by now.
        if state.st_ino != payload.inode:
            raise StaleDescriptor("the peer has closed this memory", uri=uri)
        claim.check_inside(payload.offset, state.st_size)
        mapped = mapping(fd)
        # The requested generation is still current, so the memory belongs to the holder.
        claim.check()
        return mapped
    except PenstockError:
        # Some of these errors are OSErrors too, and must not become DestinationError.
        raise
    except (OSError, ValueError) as error:
        raise DestinationError(f"cannot map a peer's memory: {error}", uri=uri) from error
    finally:
        os.close(fd)


_fits: type[Transport] = ShmTransport
_strides: type[Striding] = ShmTransport
_sweeps: type[Sweeping] = ShmTransport
