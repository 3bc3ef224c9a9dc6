"""Host memory of processes of one host: the reader maps the holder's arena and copies out of it.

In: memory that lies in a host arena (a sealed memfd). Out: the peer's bytes, copied by the thread that waits.
Not here: arenas (`memory.arena`), fences and the life of a holder (`host_endpoint`), devices (`cuda_ipc`), use of a
peer's memory without a copy (`mapped_region`).

    claim (check the descriptor) --> receive and map the memfd, once --> memmove, claim between pieces --> claim again
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
from penstock.errors import ConfigError, DestinationError, FormatError, PeerLost, PenstockError, StaleDescriptor
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
    OwnHandle,
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
"""Bytes between two looks at the fence: about a millisecond, as `loopback`.

Source: benchmarks/results/cpu2_202611/transport.md.
"""

SHORT_BYTES = 64 << 10
"""Shorter runs at a pitch are copied by one call of numpy for many: a call of memmove takes as long as copying 2 KB."""

_MappingT = TypeVar("_MappingT")
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class ShmPayload(msgspec.Struct, frozen=True, kw_only=True):
    """The memfd of the holder's process, and the start of the memory in it."""

    page: GenerationAddress
    # Readers of the previous release open the memfd by these two. Ours receive it from the page's socket.
    fd: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    inode: Annotated[int, msgspec.Meta(ge=0)]
    offset: _Count


_DECODER = msgspec.msgpack.Decoder(ShmPayload)


class MappedMemory:
    """A peer's memfd, mapped read-only until this object is collected."""

    def __init__(self, memory: mmap.mmap) -> None:
        # The mapping lives as long as the array or any view of it.
        self.array = np.frombuffer(memory, np.uint8)
        self.address = int(self.array.ctypes.data)

    @classmethod
    def map(cls, fd: int) -> MappedMemory:
        """Map all of a memfd. The caller closes the descriptor."""
        return cls(mmap.mmap(fd, 0, prot=mmap.PROT_READ))

    def at(self, offset: int, source: Descriptor) -> int:
        """Return where a registration starts. FormatError if the mapping does not hold all of it."""
        if offset + source.nbytes > self.array.nbytes:
            message = f"{source.nbytes} bytes from {offset} lie outside the peer's memory of {self.array.nbytes} bytes"
            raise FormatError(message, uri=source.uri)
        return self.address + offset


class ShmRead(DeferredRead[OwnHandle, MemoryClaim, MappedMemory, int]):
    """See `PendingRead`."""

    def __init__(
        self,
        into: OwnHandle,
        claim: MemoryClaim,
        source: MappedMemory,
        base: int,
        rows: Segments,
        short: Rectangles | None,
    ) -> None:
        self._rows = rows
        self._short = short
        # As if a whole piece had been copied: the first look is before the first byte.
        self._unlooked = PIECE_BYTES
        nbytes = int(rows.nbytes.sum()) + (0 if short is None else int(short.nbytes.sum()))
        super().__init__(nbytes, into, claim, source, base)

    def _carry(self, stall_s: float, into: OwnHandle, claim: MemoryClaim, source: MappedMemory, base: int) -> None:
        memmove, rows = ctypes.memmove, self._rows
        if self._short is not None:
            self._copy_short(into, claim, source.array[base - source.address :], self._short)
        # Plain ints: a call of memmove with numpy's scalars takes several times as long.
        srcs, dsts = (rows.src + base).tolist(), (rows.dst + into.memory.address).tolist()
        for src, dst, nbytes in zip(srcs, dsts, rows.nbytes.tolist(), strict=True):
            at = 0
            while at < nbytes:
                self._look(into, claim)
                piece = min(PIECE_BYTES - self._unlooked, nbytes - at)
                memmove(dst + at, src + at, piece)
                at += piece
                self._moved(piece)
        into.check_open()
        # After the last byte: a holder fences before it changes a byte, so a claim that still holds saw no change.
        claim.check()

    def _copy_short(self, into: OwnHandle, claim: MemoryClaim, theirs: Bytes, table: Rectangles) -> None:
        ours = memory_at(into.memory.address, into.memory.nbytes)
        columns = (table.src, table.dst, table.run_bytes, table.num_rows, table.src_pitch, table.dst_pitch)
        for src, dst, run, count, src_pitch, dst_pitch in zip(*(column.tolist() for column in columns), strict=True):
            block = PIECE_BYTES // run
            for row in range(0, count, block):
                self._look(into, claim)
                num = min(block, count - row)
                source = _strided(theirs[src + row * src_pitch :], num, run, src_pitch)
                _strided(ours[dst + row * dst_pitch :], num, run, dst_pitch)[...] = source
                self._moved(num * run)

    def _look(self, into: OwnHandle, claim: MemoryClaim) -> None:
        # A look is a system call, so many short runs are copied between two looks.
        if self._unlooked >= PIECE_BYTES:
            into.check_open()
            claim.check()
            self._unlooked = 0

    def _moved(self, nbytes: int) -> None:
        self._unlooked += nbytes
        self.moved_bytes += nbytes


def _strided(memory: Bytes, rows: int, run: int, pitch: int) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory, (rows, run), (pitch, 1))


class ShmTransport:
    """See `Transport`. ConfigError where there are no memfds."""

    name = "shm"

    def __init__(self) -> None:
        self._endpoint = Endpoint(self.name, GenerationTable.create())
        self._mapped: PeerMappings[MappedMemory] = PeerMappings()

    def register(self, memory: Memory) -> FencedHandle:
        """See `Transport.register`. Cancelled if the transport is closed; ConfigError outside of arenas."""
        if memory.device != "cpu":
            raise ConfigError(f"shm reaches host memory only, not {memory.device}")
        mapping = shared_at(memory.address, memory.nbytes)
        if mapping is None:
            hint = "allocate it from memory.arena.Arena, or move live tensors there by ReadSettings(arena=True)"
            raise ConfigError("shm reaches memory in arenas only", hint=hint)
        # Sealed only now: until they are shown to peers, workers of a conversion write to arenas by their path.
        mapping.seal()
        offset = memory.address - mapping.address

        def describe(page: GenerationAddress) -> bytes:
            return msgspec.msgpack.encode(ShmPayload(page=page, fd=mapping.fd, inode=mapping.inode, offset=offset))

        return self._endpoint.register(memory, describe, keep=mapping)

    def register_into(self, memory: Memory) -> IntoHandle:
        """Return a handle of any host memory, to be read into and not by peers. Cancelled: it is closed."""
        if memory.device != "cpu":
            raise ConfigError(f"shm reaches host memory only, not {memory.device}")
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> ShmRead:
        """See `Transport.post_read`. FormatError: the descriptor reaches past the memory that it names."""
        mine = self._endpoint.check_mine(into, source)
        segments.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        return self._post(mine, source, segments, None)

    def post_rectangles(self, into: Handle, source: Descriptor, rectangles: Rectangles) -> ShmRead:
        """See `Striding`."""
        mine = self._endpoint.check_mine(into, source)
        rectangles.check(src_nbytes=source.nbytes, dst_nbytes=mine.memory.nbytes)
        # A rectangle of one row is a plain segment, which memmove copies without a view.
        short = (rectangles.longest_runs() < SHORT_BYTES) & (rectangles.num_rows > 1)
        return self._post(mine, source, rectangles[~short].segments(), rectangles[short])

    def _post(self, mine: OwnHandle, source: Descriptor, rows: Segments, short: Rectangles | None) -> ShmRead:
        claim, mapped, base = self.view(source)
        return ShmRead(mine, claim, mapped, base, rows.joined(), short)

    def view(self, source: Descriptor) -> tuple[MemoryClaim, MappedMemory, int]:
        """Return the claim on a peer's memory, the memory, mapped once, and the registration's address in this process.

        Order: the claim is to be checked before and after each look at the bytes. Raises as `post_read`.
        """
        payload = decode_payload(source, _DECODER)
        claim = self._endpoint.claim(source, payload.page)
        with self._endpoint.changing:
            mapped = self._mapped.get(claim)
        if mapped is None:
            # Not under the lock: see `Endpoint.claim`. Of two threads that map it at once, the second replaces it.
            mapped = open_payload(claim, payload, MappedMemory.map)
            with self._endpoint.changing:
                self._mapped.put(claim, mapped)
        return claim, mapped, mapped.at(payload.offset, source)

    def sweep(self) -> None:
        """See `Sweeping`. A read that finds such memory does so itself."""
        with self._endpoint.changing:
            self._mapped.sweep()

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. A copy on the host does not stall, be the peer stopped or not."""
        assert isinstance(pending, ShmRead)
        try:
            pending.run(stall_s)
        except (StaleDescriptor, PeerLost):
            self.sweep()
            raise

    def close(self) -> None:
        """See `Transport.close`."""
        # Mappings that reads still use are unmapped with the last of those.
        self._endpoint.close()
        self._mapped.clear()


def open_payload(claim: MemoryClaim, payload: ShmPayload, mapping: Callable[[int], _MappingT]) -> _MappingT:
    """Return a mapping of the memfd that a claim is about, made by `mapping` of its file descriptor.

    Raises:
        StaleDescriptor, PeerLost: the claim no longer holds.
        PermissionDenied, SourceStalled: as `fd_server.receive_fds`.
        FormatError: the memory does not reach as far as the descriptor says.
        DestinationError: it cannot be mapped.
    """
    source, uri = claim.source, claim.source.uri
    try:
        if payload.page.socket:
            fd = receive_fd(payload.page.socket, source.generation, uri)
        else:
            fd = open_memfd_of_process(payload.page.pid, payload.fd, uri)
    except (PeerLost, StaleDescriptor):
        # The page tells better what happened.
        claim.check()
        raise
    try:
        check_peer_memfd(fd, 0, uri)
        # Of the previous release: the number may be that of another file by now.
        if os.fstat(fd).st_ino != payload.inode:
            raise StaleDescriptor("the peer has closed that memory", uri=uri)
        mapped = mapping(fd)
        # The generation that was requested was current, and so the memory is the holder's.
        claim.check()
        return mapped
    except PenstockError:
        # Some of them are OSErrors too, and must not become DestinationError.
        raise
    except (OSError, ValueError) as error:
        raise DestinationError(f"cannot map a peer's memory: {error}", uri=uri) from error
    finally:
        os.close(fd)


_fits: type[Transport] = ShmTransport
_strides: type[Striding] = ShmTransport
_sweeps: type[Sweeping] = ShmTransport
