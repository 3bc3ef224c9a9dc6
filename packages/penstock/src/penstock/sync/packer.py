"""Buffers into which a source packs short runs for readers on other hosts.

A buffer is fenced before it is refilled, so that a reader whose lease expired raises StaleDescriptor.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from penstock.cuda.events import wait_events
from penstock.cuda.pack import plan_pack
from penstock.digest.strip import Strips, memory_at, pack_strips
from penstock.errors import ConfigError, DestinationError, DeviceOutOfMemory, StaleDescriptor
from penstock.holding.regions import close_handles
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena
from penstock.plan.packing import NUM_BUFFERS
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Handle, Memory, encode

LEASE_S = 3.0
"""Seconds without a request after which a lease expires. Readers send requests four times as often."""
FILL_S = 30.0
"""Deadline in seconds for packing on a device. Packing takes a millisecond."""


class _Buffer(msgspec.Struct, eq=False):
    memory: Memory
    handles: dict[str, Handle]
    lease: str = ""
    until: float = 0.0
    is_filling: bool = False

    def fence(self) -> None:
        for handle in self.handles.values():
            handle.fence()


class _DeviceBuffers(msgspec.Struct, eq=False):
    most: int
    """Maximum number of buffers. A failed allocation reduces it until the next fence."""
    num_begun: int = 0
    buffers: list[_Buffer] = msgspec.field(default_factory=list)


class Packer(Closeable):
    """A source's buffers for packed strips, with at most `pack_bytes` on each device. Thread-safe."""

    def __init__(self, links: PeerLinks, pack_bytes: int) -> None:
        self._links = links
        self.buffer_bytes = pack_bytes // NUM_BUFFERS
        self.num_packed = 0
        self._changed = threading.Condition()
        self._pools: dict[str, _DeviceBuffers] = {}
        self._queueing = threading.Lock()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Return the size of all allocated buffers in bytes."""
        with self._changed:
            return sum(len(pool.buffers) for pool in self._pools.values()) * self.buffer_bytes

    def take(self, device: str, wait_s: float) -> _Buffer | None:
        """Return a free buffer to fill, or None if no buffer became free within `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            pool = self._pools.setdefault(device, _DeviceBuffers(NUM_BUFFERS))
            while True:
                if self._is_closed:
                    raise StaleDescriptor("this rank stopped serving its memory")
                now = time.monotonic()
                free = next((one for one in pool.buffers if not one.is_filling and one.until <= now), None)
                if free is not None:
                    # Fence the buffer, because a reader whose lease expired may still be reading it.
                    free.fence()
                    free.lease, free.is_filling = "", True
                    return free
                if pool.num_begun < pool.most:
                    pool.num_begun += 1
                    break
                lapse = min((one.until for one in pool.buffers if not one.is_filling), default=deadline)
                if now >= deadline:
                    return None
                self._changed.wait(max(min(deadline, lapse) - now, 0.0))
        # Do not hold the lock, because a registration takes milliseconds and a fence must not wait.
        try:
            buffer = self._allocate(device)
        except (ConfigError, DeviceOutOfMemory, DestinationError):
            with self._changed:
                pool.num_begun -= 1
                if not pool.num_begun:
                    raise
                # The device has memory for fewer buffers than the limit allows, so use only the existing buffers.
                pool.most = pool.num_begun
            return self.take(device, max(deadline - time.monotonic(), 0.0))
        except BaseException:
            with self._changed:
                pool.num_begun -= 1
            raise
        with self._changed:
            pool.buffers.append(buffer)
            is_closed = self._is_closed
        if is_closed:
            close_handles([buffer.handles])
            raise StaleDescriptor("this rank stopped serving its memory")
        return buffer

    def _allocate(self, device: str) -> _Buffer:
        arena = Arena.allocate(self.buffer_bytes, device)
        memory = Memory(address=arena.address, nbytes=self.buffer_bytes, device=arena.device, owner=arena)
        # Register for the network only, because readers on this host read strips directly.
        return _Buffer(memory, self._links.register(memory, reach="network"), is_filling=True)

    def fill(self, buffer: _Buffer, source: Memory, strips: Strips, after: Sequence[torch.cuda.Event]) -> None:
        """Copy strips from a region into a buffer after the events in `after`. Wait at most `FILL_S` seconds."""
        to = buffer.memory
        if to.device == "cpu":
            pack_strips(memory_at(source.address, source.nbytes), strips, memory_at(to.address, to.nbytes))
            return
        try:
            self._fill_device(buffer, source, strips, after)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(f"{to.device} has too little memory for a table of {len(strips)} ranges") from error

    def _fill_device(self, buffer: _Buffer, source: Memory, strips: Strips, after: Sequence[torch.cuda.Event]) -> None:
        to = buffer.memory
        device = torch.device(to.device)
        with self._queueing, torch.cuda.device(device):
            stream = self._streams.get(to.device)
            if stream is None:
                # Kernels that read from peers wait for the link, so give packing a higher priority.
                stream = self._streams[to.device] = torch.cuda.Stream(device, priority=-1)
            with torch.cuda.stream(stream):
                for event in after:
                    stream.wait_event(event)
                nbytes = strips.nbytes
                dst = to.address + np.cumsum(nbytes) - nbytes
                start = np.zeros(len(strips), np.int64)
                src = source.address + strips.at
                plan_pack(dst, src, strips.run_bytes, strips.pitch, start, nbytes, device).run()
                done = stream.record_event()
        wait_events([done], FILL_S, work="packing")

    def grant(self, buffer: _Buffer) -> tuple[dict[str, bytes], str]:
        """Let a reader read a filled buffer. Return its descriptors and the lease that the reader releases."""
        with self._changed:
            buffer.lease = secrets.token_hex(8)
            buffer.until = time.monotonic() + LEASE_S
            buffer.is_filling = False
            self.num_packed += 1
            return {name: encode(handle.descriptor) for name, handle in buffer.handles.items()}, buffer.lease

    def give_back(self, buffer: _Buffer) -> None:
        """Release a buffer that was taken but not granted to a reader."""
        with self._changed:
            buffer.until, buffer.is_filling = 0.0, False
            self._changed.notify_all()

    def hold(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend the leases in `keep`, and end the leases in `release`. Ignore unknown and expired leases."""
        until = time.monotonic() + LEASE_S
        with self._changed:
            for pool in self._pools.values():
                for buffer in pool.buffers:
                    if buffer.lease and buffer.lease in release:
                        buffer.lease, buffer.until = "", 0.0
                        self._changed.notify_all()
                    elif buffer.lease and buffer.lease in keep:
                        buffer.until = until

    def fence(self) -> None:
        """End all leases and make their descriptors stale. Call this whenever the packed memory is fenced."""
        with self._changed:
            for pool in self._pools.values():
                pool.most = NUM_BUFFERS
                for buffer in pool.buffers:
                    buffer.fence()
                    if not buffer.is_filling:
                        buffer.lease, buffer.until = "", 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Close the registrations and release the memory. Idempotent."""
        with self._changed:
            self._is_closed = True
            handles = [buffer.handles for pool in self._pools.values() for buffer in pool.buffers]
            self._pools.clear()
            self._changed.notify_all()
        close_handles(handles)
