"""Tiers in host memory: arenas that other processes can map, and a pool of pinned buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.memory.arena import Arena
from penstock.memory.staging import Registrar, StagingBuffer, StagingPool
from penstock.memory.tier import UncachedTier
from penstock.types import MIB

POOL_BUFFER_BYTES = 64 * MIB
"""Size of a buffer in the pinned pool. 900 calls pin 60 GB, and the last buffer of a model wastes little."""

WARM_THREADS = 4
"""Number of threads that pin the pool in the background."""


class ViewedRoom(ABC):
    """A room whose bytes are views of this process's memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def views(self) -> Sequence[memoryview]:
        """See `HostRoom.views`."""

    def write(self, offset: int, data: memoryview) -> None:
        """See `Room.write`."""
        # Copy with numpy, which releases the GIL.
        for mine, at, run in self._runs(offset, len(data)):
            mine[:] = np.frombuffer(data, np.uint8, run, at)

    def read(self, offset: int, into: memoryview) -> None:
        """See `Room.read`."""
        for mine, at, run in self._runs(offset, len(into)):
            np.frombuffer(into, np.uint8, run, at)[:] = mine

    def _runs(self, offset: int, nbytes: int) -> list[tuple[npt.NDArray[np.uint8], int, int]]:
        runs, base, stop = [], 0, offset + nbytes
        for view in self.views():
            first, last = max(base, offset), min(base + len(view), stop)
            if first < last:
                mine = np.frombuffer(view, np.uint8, last - first, first - base)
                runs.append((mine, first - offset, last - first))
            base += len(view)
        return runs

    def settle(self) -> None:
        """See `Room.settle`. Copies into host memory end before `write` returns."""
        return


class ArenaRoom(ViewedRoom):
    """A host arena that other processes can map, with pages that are faulted in ahead."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.arena: Arena | None = Arena.allocate(nbytes)
        # The threads keep the memory alive, so stop them when the room is closed.
        self.arena.warm(lambda: self.arena is None)

    def views(self) -> Sequence[memoryview]:
        """See `HostRoom.views`."""
        assert self.arena is not None
        return [self.arena.bytes_at(0, self.nbytes).numpy().data] if self.nbytes else []

    def close(self) -> None:
        """See `Room.close`."""
        self.arena = None


class ArenaTier(UncachedTier):
    """Tier in shared memory of the host, with an arena for each block."""

    name, unit_bytes, num_threads = "host", 1, 8

    def open_room(self, nbytes: int) -> ArenaRoom:
        """See `Tier.open_room`."""
        return ArenaRoom(nbytes)


class PoolRoom(ViewedRoom):
    """A room in buffers of a pool. The last buffer may be partly used."""

    def __init__(self, nbytes: int, buffers: list[StagingBuffer], release: Callable[[StagingBuffer], None]) -> None:
        super().__init__(nbytes)
        self._buffers = buffers
        self._release = release

    def views(self) -> Sequence[memoryview]:
        """See `HostRoom.views`."""
        step = POOL_BUFFER_BYTES
        return [buffer.view[: min(step, self.nbytes - i * step)] for i, buffer in enumerate(self._buffers)]

    def close(self) -> None:
        """See `Room.close`."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._release(buffer)


class PoolTier(UncachedTier):
    """Tier in host memory, in reusable buffers that are pinned once."""

    name, unit_bytes, num_threads = "host", POOL_BUFFER_BYTES, 8

    def __init__(self, pool: StagingPool, *, stall_s: float) -> None:
        self._pool = pool
        self._stall_s = stall_s

    @classmethod
    def open(cls, memory_bytes: int, *, registrar: Registrar | None, stall_s: float) -> PoolTier:
        """Map `memory_bytes` for all rooms, which background threads fault in and pin with `registrar`.

        `stall_s` is the maximum wait in seconds for a buffer that is being pinned.
        """
        pool = StagingPool.map(memory_bytes, POOL_BUFFER_BYTES, registrar=registrar)
        if registrar is not None:
            pool.warm(WARM_THREADS)
        return cls(pool, stall_s=stall_s)

    def open_room(self, nbytes: int) -> PoolRoom:
        """See `Tier.open_room`. Raise SourceStalled if the open rooms use the whole pool."""
        buffers: list[StagingBuffer] = []
        room = PoolRoom(nbytes, buffers, self._pool.release)
        try:
            for _ in range(-(-nbytes // POOL_BUFFER_BYTES)):
                buffers.append(self._pool.acquire(stall_s=self._stall_s))
        except BaseException:
            # The caller receives no room to close, so release the buffers here.
            room.close()
            raise
        return room

    def close(self) -> None:
        """See `Tier.close`."""
        # Cancel the pool before closing it, so that pinning threads stop.
        self._pool.cancel()
        self._pool.close()
