"""Buffers of a source into which it packs strips for readers that request each run by itself.

In: the regions of a rank, a bound in bytes; strips of a reader. Out: their bytes in one piece, in memory that this
reader alone reads until it releases it.
Not here: which strips are packed (`plan.packing`), the version that they are of (`local_version`), the reader's side
(`receive.packed`).

    take --a free buffer, fenced--> fill --packed, in order--> grant: descriptors, a lease --read--> release
                                                               no sign of life for LEASE_S: another reader may take it

A buffer is a registration of its own, with generations of its own: before it is filled again it is fenced, so a reader
whose lease lapsed ends with StaleDescriptor, and never sees the bytes of another. The digests that the reader compares
are of the strips where they lie, not of the buffer: damage on the way through it is found too.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.cuda.events import wait_events
from penstock.cuda.pack import plan_pack
from penstock.digest.strip import Strips, memory_at, pack_strips
from penstock.errors import ConfigError, DestinationError, DeviceOutOfMemory, StaleDescriptor
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena
from penstock.plan.packing import NUM_BUFFERS
from penstock.transport.choose import PeerLinks
from penstock.transport.protocol import Handle, Memory, encode

LEASE_S = 3.0
"""A buffer may be taken from a reader that gave no sign of life for this time. Readers give one four times as often.
Reason: others wait this long for a reader that died, well within the stall deadline of 30 s."""
FILL_S = 30.0
"""Deadline of a device for one packing, which takes a millisecond."""


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Memory
    handles: dict[str, Handle]
    lease: str = ""
    """Empty: it is free, or being filled."""
    until: float = 0.0
    """When the lease lapses."""
    is_filling: bool = False

    def fence(self) -> None:
        for handle in self.handles.values():
            handle.fence()


@dataclass(slots=True, eq=False)
class _Pool:
    """The buffers of one device; they are allocated when they are first needed."""

    most: int
    """Buffers that may be allocated: fewer once one did not fit, until the next fence."""
    num_begun: int = 0
    buffers: list[_Buffer] = field(default_factory=list)


class Packer(Closeable):
    """See the module. Used by any number of threads.

    Attributes:
        buffer_bytes: bytes of a buffer: the longest request.
        num_packed: requests that were filled so far.

    Args:
        links: the transports that show the buffers to readers of other hosts.
        pack_bytes: bound of the buffers of one device together.
    """

    def __init__(self, links: PeerLinks, pack_bytes: int) -> None:
        self._links = links
        self.buffer_bytes = pack_bytes // NUM_BUFFERS
        self.num_packed = 0
        # Guards the pools and their buffers, and is notified when a buffer may be free.
        self._changed = threading.Condition()
        self._pools: dict[str, _Pool] = {}
        # Guards the streams.
        self._queueing = threading.Lock()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Return the memory of all buffers that were allocated so far."""
        with self._changed:
            return sum(len(pool.buffers) for pool in self._pools.values()) * self.buffer_bytes

    def take(self, device: str, wait_s: float) -> _Buffer | None:
        """Return a buffer without a lease, to be filled; None: there was none within `wait_s`.

        Raises:
            ConfigError: no transport shows memory of this device to readers of other hosts.
            DeviceOutOfMemory, DestinationError: there is no room for a single buffer.
            StaleDescriptor: it is closed.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            pool = self._pools.setdefault(device, _Pool(NUM_BUFFERS))
            while True:
                if self._is_closed:
                    raise StaleDescriptor("this rank stopped serving its memory")
                now = time.monotonic()
                free = next((one for one in pool.buffers if not one.is_filling and one.until <= now), None)
                if free is not None:
                    # Before a byte changes: a reader whose lease lapsed may still read, and ends with StaleDescriptor.
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
        # Without the lock: a registration takes milliseconds, and a fence must not wait for it.
        try:
            buffer = self._allocate(device)
        except (ConfigError, DeviceOutOfMemory, DestinationError):
            with self._changed:
                pool.num_begun -= 1
                if not pool.num_begun:
                    raise
                # The device has room for fewer buffers than the bound allows: the readers share those.
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
            self._end([buffer])
            raise StaleDescriptor("this rank stopped serving its memory")
        return buffer

    def _allocate(self, device: str) -> _Buffer:
        arena = Arena.allocate(self.buffer_bytes, device)
        memory = Memory(address=arena.address, nbytes=self.buffer_bytes, device=arena.device, owner=arena)
        # Readers of this host read strips where they lie, by a kernel or a copy without a request for each run.
        return _Buffer(memory, self._links.register(memory, reach="network"), is_filling=True)

    def fill(self, buffer: _Buffer, source: Memory, strips: Strips, after: Sequence[torch.cuda.Event]) -> None:
        """Copy strips of a region into a buffer, one after the other, and return when they are there.

        Args:
            buffer: of `take`, on the region's device.
            source: the region.
            strips: offsets within the region; they were checked, and fit the buffer.
            after: events that the device must have passed before it reads the region.

        Raises:
            DeviceOutOfMemory: the device has no room for the table of runs.
            DestinationError: the device failed, or did not end within `FILL_S`.
        """
        to = buffer.memory
        if to.device == "cpu":
            pack_strips(memory_at(source.address, source.nbytes), strips, memory_at(to.address, to.nbytes))
            return
        try:
            self._fill_device(buffer, source, strips, after)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(f"{to.device} has no room for a table of {len(strips)} ranges to pack") from error

    def _fill_device(self, buffer: _Buffer, source: Memory, strips: Strips, after: Sequence[torch.cuda.Event]) -> None:
        to = buffer.memory
        device = torch.device(to.device)
        with self._queueing, torch.cuda.device(device):
            stream = self._streams.get(to.device)
            if stream is None:
                # A higher priority than reads, as for digests: kernels of reads wait for the link.
                stream = self._streams[to.device] = torch.cuda.Stream(device, priority=-1)
            with torch.cuda.stream(stream):
                for event in after:
                    stream.wait_event(event)
                nbytes = strips.nbytes
                dst = to.address + np.cumsum(nbytes) - nbytes
                start = np.zeros(len(strips), np.int64)
                src = source.address + strips.at
                plan_pack(dst, src, strips.run_bytes, strips.pitch, start, nbytes, device).run()
                done = torch.cuda.Event()
                done.record(stream)
        wait_events([done], FILL_S, work="packing")

    def grant(self, buffer: _Buffer) -> tuple[dict[str, bytes], str]:
        """Let a reader read a filled buffer; return its descriptors, and the lease by which it is released."""
        with self._changed:
            buffer.lease = secrets.token_hex(8)
            buffer.until = time.monotonic() + LEASE_S
            buffer.is_filling = False
            self.num_packed += 1
            return {name: encode(handle.descriptor) for name, handle in buffer.handles.items()}, buffer.lease

    def give_back(self, buffer: _Buffer) -> None:
        """Free a buffer that was not granted."""
        with self._changed:
            buffer.until, buffer.is_filling = 0.0, False
            self._changed.notify_all()

    def hold(self, keep: Sequence[str], release: Sequence[str]) -> None:
        """Extend leases, and end others. Those that lapsed, and were given to another reader since, are ignored."""
        until = time.monotonic() + LEASE_S
        with self._changed:
            for pool in self._pools.values():
                for buffer in pool.buffers:
                    if buffer.lease and buffer.lease in release:
                        buffer.lease, buffer.until = "", 0.0
                        # All: a waiter may wait for a buffer of another device.
                        self._changed.notify_all()
                    elif buffer.lease and buffer.lease in keep:
                        buffer.until = until

    def fence(self) -> None:
        """End all leases and make their descriptors stale. Order: with the fence of the memory that was packed."""
        with self._changed:
            for pool in self._pools.values():
                # The device may have room again at the next version.
                pool.most = NUM_BUFFERS
                for buffer in pool.buffers:
                    buffer.fence()
                    if not buffer.is_filling:
                        buffer.lease, buffer.until = "", 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """End the registrations, and let go of the memory. Idempotent."""
        with self._changed:
            self._is_closed = True
            buffers = [buffer for pool in self._pools.values() for buffer in pool.buffers]
            self._pools.clear()
            self._changed.notify_all()
        self._end(buffers)

    def _end(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            for handle in buffer.handles.values():
                handle.close()
