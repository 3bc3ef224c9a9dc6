"""Places: how bytes in staging get to the destination's slabs. The protocol, and host memory.

In: a staging buffer and its segments. Out: bytes in slabs, or a `Pending` while a device copies.
Not here: CUDA (`place_cuda`), which of the two (`choose_place`), what the slabs become (`loader`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.executors import Pending
from penstock.errors import DestinationError
from penstock.memory.staging import Registrar, StagingBuffer

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """`rows` runs of `run` bytes, `pitch` apart from `src` on in the read, packed from `dst` on in `slab`."""

    src: int
    slab: int
    dst: int
    run: int
    rows: int
    pitch: int


class Place(Protocol):
    """Destination slabs of one kind of memory."""

    @property
    def registrar(self) -> Registrar | None:
        """What pins staging buffers for it; None where pageable memory does."""
        ...

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """Return the slab's own bytes `[start, stop)` where a source can write to them, else None."""
        ...

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> Pending | None:
        """Copy the segments (each one run: `pack`ed) out of the buffer; None when done on return. One thread calls it.

        Ownership: the buffer is the place's until the pending is done.
        """
        ...


def pack(data: Bytes, segments: Sequence[Segment]) -> list[Segment]:
    """Pack the rectangles of a read in place, so that every segment is one run; returns the segments as they then are.

    A read with a rectangle has no other segment (the planner keeps rows whole), so nothing is overwritten.
    """
    packed = []
    for segment in segments:
        if segment.rows > 1:
            shape, strides = (segment.rows, segment.run), (segment.pitch, 1)
            rows = np.lib.stride_tricks.as_strided(data[segment.src :], shape, strides)
            nbytes = segment.rows * segment.run
            data[segment.src : segment.src + nbytes] = np.ascontiguousarray(rows).reshape(-1)
            packed.append(segment._replace(run=nbytes, rows=1, pitch=nbytes))
        else:
            packed.append(segment)
    return packed


class HostPlace:
    """Slabs in host memory: numpy arrays, made when first touched unless given.

    Args:
        slabs: per slab its memory; None: allocate it when its first byte arrives.
        slab_nbytes: bytes of each slab.
    """

    registrar: Registrar | None = None

    def __init__(self, slab_nbytes: Sequence[int], slabs: Sequence[Bytes | None] | None = None) -> None:
        self._nbytes = slab_nbytes
        self._lock = threading.Lock()
        self._slabs: list[Bytes | None] = list(slabs) if slabs is not None else [None] * len(slab_nbytes)

    def slab(self, index: int) -> Bytes:
        """Return the slab's memory; the caller's once `take`n."""
        with self._lock:
            slab = self._slabs[index]
            if slab is None:
                try:
                    slab = self._slabs[index] = np.empty(self._nbytes[index], np.uint8)
                except MemoryError as error:
                    message = f"no room in host memory for {self._nbytes[index]} bytes"
                    raise DestinationError(message, hint="load fewer names, or boxes") from error
            return slab

    def take(self, index: int) -> Bytes:
        """Return the slab's memory, forgotten here."""
        memory = self.slab(index)
        self._slabs[index] = None
        return memory

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """See `Place.direct`."""
        return self.slab(slab)[start:stop].data

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> Pending | None:
        """See `Place.copy`."""
        for src, slab, dst, run, _, _ in segments:
            self.slab(slab)[dst : dst + run] = buffer.array[src : src + run]
        return None
