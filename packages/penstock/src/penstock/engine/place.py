"""Places: copies from staging into the destination's slabs, in host memory and in CUDA memory.

In: a staging buffer and its segments. Out: bytes in slabs, or a `PendingItem` while a device copies.
Not here: the order of reads and copies (`loader.run`), digests (`check`), what the slabs become (`loader`).

Host slabs are numpy arrays, which sources may write to directly. CUDA slabs come from torch's own allocator: they are
allocated on the stream that was current where the place was made, so the allocator tracks them as the caller's own. The
copy stream waits for that stream after each allocation, because a recycled block may still be in use by kernels queued
there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.cuda.events import make_stream
from penstock.engine.run import PendingItem
from penstock.errors import DestinationError, DeviceOutOfMemory
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


class Destination(Protocol):
    """Destination slabs of one kind of memory."""

    @property
    def registrar(self) -> Registrar | None:
        """Pins staging buffers for this memory; None where pageable memory does."""
        ...

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """Return the slab's own bytes `[start, stop)` where a source can write to them, else None."""
        ...

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> PendingItem | None:
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
        """Return the slab's memory, which belongs to the caller once it is taken; allocated if it was not."""
        with self._lock:
            slab = self._slabs[index]
            if slab is None:
                # When its first byte arrives, not before: the slabs of a stream are freed as it goes on.
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
        """See `Destination.direct`."""
        return self.slab(slab)[start:stop].data

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> PendingItem | None:
        """See `Destination.copy`."""
        for src, slab, dst, run, _, _ in segments:
            self.slab(slab)[dst : dst + run] = buffer.array[src : src + run]
        return None


FIRST_BYTES = 512 << 20
"""Bytes of the slabs that are allocated first, so that copies can begin. To copy them takes about 10 ms over PCIe 5, in
which the driver allocates the rest, at about 0.7 ms a GB."""


def num_first_slabs(slab_nbytes: Sequence[int]) -> int:
    """Return how many slabs are allocated first: as few as have `FIRST_BYTES` together, or all."""
    return min(bisect_left(list(accumulate(slab_nbytes)), FIRST_BYTES) + 1, len(slab_nbytes))


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context. Source: CUDA Runtime API, cudaHostRegister."""


class CudaRegistrar:
    """Pins host memory for CUDA's copy engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        """See `Registrar.register`."""
        # The calling thread may have another device current.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code != 0:
            raise DestinationError(f"cudaHostRegister of {nbytes} bytes failed with {code}", hint="lower memory_bytes")

    def unregister(self, address: int) -> None:
        """See `Registrar.unregister`."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


class CudaPending:
    """Copies up to an event; its handle, which the place owns."""

    __slots__ = ("_driver", "event")

    def __init__(self, driver: CudaDriver, event: int) -> None:
        self._driver, self.event = driver, event

    def done(self) -> bool:
        """See `PendingItem.done`."""
        return self._driver.is_done(self.event)


class CudaPlace:
    """Slabs on one CUDA device.

    Args:
        device: with an index.
        slab_nbytes: bytes of each slab.
        slabs: flat uint8 tensors to fill (live parameters), or None, also of single ones, to allocate.

    Attributes:
        is_out_of_memory: whether `allocate` failed.
    """

    def __init__(
        self, device: torch.device, slab_nbytes: Sequence[int], slabs: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        self.device = device
        self.registrar = CudaRegistrar(device)
        self._nbytes = slab_nbytes
        self._slabs: list[torch.Tensor | None] = list(slabs) if slabs is not None else [None] * len(slab_nbytes)
        self._caller = torch.cuda.current_stream(device)
        self._stream = make_stream(device, owner=self)
        # Kernels of the caller may still read or write the slabs that it gave.
        self._stream.wait_stream(self._caller)
        self._driver = load_driver()
        # Read once: torch makes the number anew each time.
        self._stream_handle: int = self._stream.cuda_stream
        self._pending: dict[int, CudaPending] = {}
        # Torch's own objects, which own the events.
        self._events: list[torch.cuda.Event] = []
        # Guards the slabs; notified when some were allocated.
        self._state = threading.Condition()
        self._is_allocating = False
        self.is_out_of_memory = False

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Let only the calling thread allocate, for a block: other threads wait in it until `allocate` has their slab.

        Order: enter it before reads start; `allocate`, the last call in it, ends it. Otherwise the thread that copies
        the first bytes allocates some slabs itself, outside of a memory pool that the caller chose
        (`torch.cuda.use_mem_pool` is of one thread).
        """
        with self._state:
            self._is_allocating = True
        try:
            yield
        finally:
            with self._state:
                self._is_allocating = False
                self._state.notify_all()

    def allocate(self) -> None:
        """Allocate every slab that there is none of yet; copies to the first ones can begin before the rest is there.

        Raises:
            DeviceOutOfMemory: nothing stays allocated once the place is dropped.
        """
        first = num_first_slabs(self._nbytes)
        with self.allocating():
            try:
                self._allocate(0, first)
                self._allocate(first, len(self._nbytes))
            except torch.cuda.OutOfMemoryError as error:
                # Before the block ends, and with it the waits for the slabs.
                self.is_out_of_memory = True
                raise self.no_room(sum(self._nbytes)) from error

    def _allocate(self, start: int, stop: int) -> None:
        """Allocate the slabs `[start, stop)` that there are none of yet."""
        # Without the lock, which a thread needs to see that its slab is there: in the block only this thread allocates.
        with torch.cuda.stream(self._caller):
            # Slabs that `slab` made before stay: copies to them may be under way.
            open_slabs = [index for index in range(start, stop) if self._slabs[index] is None]
            nbytes = [self._nbytes[index] for index in open_slabs]
            # One cudaMalloc instead of hundreds, where torch has no memory to reuse: this piece goes back to its
            # cache at once, which then splits it. Torch's allocator rounds blocks up to 512 bytes. Where the piece
            # does not fit, the slabs one by one still may: in the blocks of torch's cache, or between them.
            with suppress(torch.cuda.OutOfMemoryError):
                torch.empty(sum(-(-n // 512) * 512 for n in nbytes), dtype=torch.uint8, device=self.device)
            slabs = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in nbytes]
            self._stream.wait_stream(self._caller)
        with self._state:
            for index, slab in zip(open_slabs, slabs, strict=True):
                self._slabs[index] = slab
            self._state.notify_all()

    def wait_for_slabs(self) -> bool:
        """Wait for the end of `allocating`, if it is under way; return whether every slab is there."""
        with self._state:
            self._state.wait_for(lambda: not self._is_allocating)
            return all(slab is not None for slab in self._slabs)

    def slab(self, index: int) -> torch.Tensor:
        """Return the slab, flat uint8 [nbytes]; allocated if it was not."""
        slab = self._slabs[index]
        if slab is None:
            with self._state:
                # Ends with the block of `allocating`, also where that fails.
                self._state.wait_for(lambda: self._slabs[index] is not None or not self._is_allocating)
                slab = self._slabs[index]
                if slab is None:
                    slab = self._slabs[index] = self._allocate_one(self._nbytes[index])
        return slab

    def _allocate_one(self, nbytes: int) -> torch.Tensor:
        try:
            with torch.cuda.stream(self._caller):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise self.no_room(nbytes) from error
        self._stream.wait_stream(self._caller)
        return buffer

    def take(self, index: int) -> torch.Tensor:
        """Return the slab, forgotten here."""
        slab = self.slab(index)
        self._slabs[index] = None
        return slab

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """See `Destination.direct`: no source writes to device memory."""
        return None

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> CudaPending:
        """See `Destination.copy`."""
        pending, stream = self._pending_of(buffer), self._stream_handle
        # All addresses before the first copy: a slab that cannot be allocated would leave copies queued without an
        # event, and the buffer would be released while the device reads it.
        addresses = [self.slab(segment.slab).data_ptr() + segment.dst for segment in segments]
        # By the driver's own calls, which only queue work, 1-3 us each: torch's let go of the GIL, and to get it back
        # takes a switch interval, several times a chunk.
        for address, segment in zip(addresses, segments, strict=True):
            self._driver.copy_to_device(address, buffer.address + segment.src, segment.run, stream)
        self._driver.record(pending.event, stream)
        return pending

    def _pending_of(self, buffer: StagingBuffer) -> CudaPending:
        """Return the buffer's own event: a buffer has one batch of copies in flight at a time."""
        pending = self._pending.get(buffer.address)
        if pending is None:
            # Torch makes an event when it is first recorded, and makes the device's context that of this thread.
            torch.cuda.set_device(self.device)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append(event)
            pending = self._pending[buffer.address] = CudaPending(self._driver, int(event.cuda_event))
        return pending

    def no_room(self, nbytes: int) -> DeviceOutOfMemory:
        """Return the error of an allocation of `nbytes` bytes that the device refused."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceOutOfMemory(
            f"{self.device} has {free} of {total} bytes free, {nbytes} are needed",
            hint="free memory there, load fewer names, or load boxes",
        )


def place_on(
    device: torch.device, slab_nbytes: Sequence[int], slabs: Sequence[torch.Tensor | None] | None = None
) -> HostPlace | CudaPlace:
    """Return slabs on a device: `slabs`, flat uint8 tensors to fill, and new ones where there are none."""
    if device.type == "cpu":
        return HostPlace(slab_nbytes, [None if slab is None else slab.numpy() for slab in slabs or ()] or None)
    return CudaPlace(device, slab_nbytes, slabs)


def registrar_of(device: torch.device) -> Registrar | None:
    """Return the registrar that pins host memory for a device; None where it needs none."""
    return CudaRegistrar(device) if device.type == "cuda" else None
