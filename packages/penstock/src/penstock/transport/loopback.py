"""The reference transport: memmove between registered memory of one process, in the thread that waits."""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import threading

from penstock.errors import Cancelled, ConfigError, StaleDescriptor
from penstock.segments import Segments
from penstock.transport.protocol import DeferredRead, Descriptor, Handle, Memory, PendingRead, Transport
from penstock.types import MIB

PIECE_BYTES = 8 * MIB
"""Bytes to copy between two checks of the fence, in about a millisecond. Source:
benchmarks/results/cpu2_202611/transport.md."""
_generations = itertools.count(1)
_regions: dict[int, LoopbackHandle] = {}
"""All registrations of this process, by generation, which is unique in the process."""
_changing = threading.Lock()


def _after_fork() -> None:
    # A child only has a copy of the memory, and descriptors promise the memory itself.
    _regions.clear()
    _changing.release()


# Hold the lock during the fork. Otherwise the child could inherit it locked by another thread, which never releases it.
os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_after_fork)


class LoopbackHandle:
    """See `Handle`."""

    def __init__(self, transport: LoopbackTransport, memory: Memory) -> None:
        self.transport = transport
        self.memory = memory
        self.is_open = True
        self.descriptor = self._begin()

    def _begin(self) -> Descriptor:
        at, nbytes, generation = self.transport, self.memory.nbytes, next(_generations)
        _regions[generation] = self
        return Descriptor(transport=at.name, endpoint=at.endpoint, generation=generation, nbytes=nbytes)

    def fence(self) -> Descriptor:
        """See `Handle.fence`."""
        with _changing:
            self.check_open()
            _regions.pop(self.descriptor.generation, None)
            self.descriptor = descriptor = self._begin()
        return descriptor

    def close(self) -> None:
        """See `Handle.close`."""
        with _changing:
            self.is_open = False
            _regions.pop(self.descriptor.generation, None)

    def check_open(self) -> None:
        """Raise Cancelled if the handle is closed."""
        if not self.is_open:
            raise Cancelled("the registration is closed")


class LoopbackRead(DeferredRead["LoopbackHandle", "LoopbackHandle", Segments]):
    """See `PendingRead`."""

    def __init__(self, into: LoopbackHandle, source: Descriptor, segments: Segments) -> None:
        self._source = source
        super().__init__(int(segments.nbytes.sum()), into, _find(source), segments)

    def _carry(self, stall_s: float, into: LoopbackHandle, source: LoopbackHandle, rows: Segments) -> None:
        for src, dst, nbytes in zip(rows.src.tolist(), rows.dst.tolist(), rows.nbytes.tolist(), strict=True):
            for at in range(0, nbytes, PIECE_BYTES):
                into.check_open()
                _find(self._source)
                piece = min(PIECE_BYTES, nbytes - at)
                ctypes.memmove(into.memory.address + dst + at, source.memory.address + src + at, piece)
                self.moved_bytes += piece
        into.check_open()
        # Check after the last byte. A holder fences before it changes a byte, so a current generation saw no change.
        _find(self._source)


class LoopbackTransport:
    """See `Transport`."""

    name = "loopback"

    def __init__(self) -> None:
        self.endpoint = secrets.token_hex(8)
        self._is_open = True

    def register(self, memory: Memory) -> LoopbackHandle:
        """See `Transport.register`. Raises Cancelled if the transport is closed."""
        if memory.device != "cpu":
            raise ConfigError(f"loopback only reaches host memory, not {memory.device}")
        with _changing:
            if not self._is_open:
                raise Cancelled("the transport is closed")
            return LoopbackHandle(self, memory)

    def post_read(self, into: Handle, source: Descriptor, segments: Segments) -> LoopbackRead:
        """See `Transport.post_read`."""
        if source.transport != self.name or not isinstance(into, LoopbackHandle) or into.transport is not self:
            raise ConfigError(f"{self.name} got a {source.transport} descriptor or another transport's handle")
        into.check_open()
        segments.check(src_nbytes=source.nbytes, dst_nbytes=into.memory.nbytes)
        return LoopbackRead(into, source, segments)

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        """See `Transport.wait`. A copy within the process does not stall."""
        assert isinstance(pending, LoopbackRead)
        pending.run(stall_s)

    def close(self) -> None:
        """See `Transport.close`."""
        with _changing:
            self._is_open = False
            mine = [handle for handle in _regions.values() if handle.transport is self]
        for handle in mine:
            handle.close()


def _find(source: Descriptor) -> LoopbackHandle:
    """Return the registration of a descriptor. Raises StaleDescriptor if the descriptor is stale or altered."""
    handle = _regions.get(source.generation)
    if handle is None or handle.descriptor != source:
        raise StaleDescriptor(f"generation {source.generation} of the memory is no longer current", uri=source.uri)
    return handle


_fits: type[Transport] = LoopbackTransport
