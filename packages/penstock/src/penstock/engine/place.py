"""Copies from staging buffers into the destination's slabs, in host memory and in CUDA memory.

CUDA slabs are allocated on the caller's stream. After each allocation the copy stream waits for the caller's
stream, because kernels that the caller queued may still use a recycled block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.cuda.events import make_stream
from penstock.engine.run import PendingItem
from penstock.errors import DestinationError, DeviceOutOfMemory
from penstock.memory.staging import Registrar, StagingBuffer
from penstock.types import MIB

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """A copy of `rows` runs of `run` bytes each.

    In the read, the first run starts at offset `src`, and the next runs follow every `pitch` bytes. In the slab, the
    runs are contiguous from offset `dst`.
    """

    src: int
    slab: int
    dst: int
    run: int
    rows: int
    pitch: int


class Destination(Protocol):
    """Destination slabs in host or device memory."""

    @property
    def registrar(self) -> Registrar | None:
        """Return the registrar that pins staging buffers for this memory, or None if pageable memory suffices."""

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """Return bytes `[start, stop)` of the slab for a source to write to, or None if sources cannot write there."""

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> PendingItem | None:
        """Copy packed segments from the buffer, which is in use until the returned item is done. None means done."""


def pack(data: Bytes, segments: Sequence[Segment]) -> list[Segment]:
    """Pack the rectangle of a read in place, so that every segment is one run. Return the packed segments."""
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
    """Slabs in host memory, as numpy arrays. A slab that is None is allocated when its first byte arrives."""

    registrar: Registrar | None = None

    def __init__(self, slab_nbytes: Sequence[int], slabs: Sequence[Bytes | None] | None = None) -> None:
        self._nbytes = slab_nbytes
        self._lock = threading.Lock()
        self._slabs: list[Bytes | None] = list(slabs) if slabs is not None else [None] * len(slab_nbytes)

    def slab(self, index: int) -> Bytes:
        """Return the slab's memory, and allocate it if necessary."""
        with self._lock:
            slab = self._slabs[index]
            if slab is None:
                try:
                    slab = self._slabs[index] = np.empty(self._nbytes[index], np.uint8)
                except MemoryError as error:
                    message = f"cannot allocate {self._nbytes[index]} bytes of host memory"
                    raise DestinationError(message, hint="load fewer tensors, or only slices of them") from error
            return slab

    def take(self, index: int) -> Bytes:
        """Return the slab's memory, which the caller owns from now on."""
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


_PORTABLE = 1
"""cudaHostRegisterPortable, which pins memory for every context. Source: CUDA Runtime API, cudaHostRegister."""


class CudaRegistrar:
    """Pins host memory for CUDA's copy engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        """See `Registrar.register`."""
        # The calling thread may have a different current device.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code != 0:
            raise DestinationError(f"cudaHostRegister of {nbytes} bytes: CUDA error {code}", hint="lower memory_bytes")

    def unregister(self, address: int) -> None:
        """See `Registrar.unregister`."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


class CudaPending:
    """Copies that are complete once an event on the place's stream is complete."""

    __slots__ = ("_driver", "event")

    def __init__(self, driver: CudaDriver, event: int) -> None:
        self._driver, self.event = driver, event

    def done(self) -> bool:
        """See `PendingItem.done`."""
        return self._driver.is_done(self.event)


BLOCK_BYTES = 512 * MIB
"""Largest block of device memory that is allocated at once. Copying it over PCIe 5 takes about 10 ms, while the driver
allocates the next block in 0.4 ms."""


def blocks_of(slab_nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the slabs of each block: consecutive slabs of up to `limit` bytes together, or one slab.

    A block has exactly the size of its slabs in torch's cache, so that nothing of it is left over. Slabs of up to 1 MiB
    are in no block, because torch allocates them elsewhere.
    """
    blocks: list[list[int]] = []
    open_bytes = limit
    for index, nbytes in enumerate(map(_rounded, slab_nbytes)):
        if nbytes <= MIB:
            continue
        if open_bytes + nbytes > limit:
            blocks.append([])
            open_bytes = 0
        blocks[-1].append(index)
        open_bytes += nbytes
    return blocks


def _rounded(nbytes: int) -> int:
    """Return the size of a tensor in torch's cache, which rounds sizes up to 512 bytes."""
    return -(-nbytes // 512) * 512


class CudaPlace:
    """Slabs on one CUDA device. `slabs` are flat uint8 tensors to fill, and slabs that are None are allocated."""

    def __init__(
        self,
        device: torch.device,
        slab_nbytes: Sequence[int],
        slabs: Sequence[torch.Tensor | None] | None = None,
        window_bytes: int = 0,
    ) -> None:
        self.device = device
        self.registrar = CudaRegistrar(device)
        self._nbytes = slab_nbytes
        self._slabs: list[torch.Tensor | None] = list(slabs) if slabs is not None else [None] * len(slab_nbytes)
        self._caller = torch.cuda.current_stream(device)
        self._stream = make_stream(device, owner=self)
        # Kernels of the caller may still use the slabs.
        self._stream.wait_stream(self._caller)
        self._driver = load_driver()
        self._stream_handle: int = self._stream.cuda_stream
        self._pending: dict[int, CudaPending] = {}
        self._events: list[torch.cuda.Event] = []
        # Guards the slabs, and is notified when slabs were allocated.
        self._state = threading.Condition()
        self._is_allocating = False
        self.is_out_of_memory = False
        limit = min(BLOCK_BYTES, window_bytes // 2) if window_bytes else BLOCK_BYTES
        # The caller's slabs have memory already.
        missing = [n if slab is None else 0 for n, slab in zip(slab_nbytes, self._slabs, strict=True)]
        # The slabs to allocate together with each slab.
        self._blocks = {index: block for block in blocks_of(missing, limit) for index in block}

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Let only the calling thread allocate inside the block. Other threads wait for `allocate`.

        Enter the block before reads start, and call `allocate` at the end of the block, so that no other thread
        allocates slabs outside the caller's memory pool. `torch.cuda.use_mem_pool` affects only one thread.
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
        """Allocate all missing slabs. Raise DeviceOutOfMemory."""
        with self.allocating():
            try:
                for index in range(len(self._nbytes)):
                    self._allocate(self._forget_block(index))
            except torch.cuda.OutOfMemoryError as error:
                # Set the flag before the block ends, because the end of the block wakes the other threads.
                self.is_out_of_memory = True
                raise self.memory_error(sum(self._nbytes)) from error

    def _allocate(self, indices: Sequence[int]) -> None:
        """Allocate those of some slabs that are missing. Copies into the others may be running."""
        missing = [index for index in indices if self._slabs[index] is None]
        if not missing:
            return
        # Allocate without the lock, because other threads need it to find their slab.
        with torch.cuda.stream(self._caller):
            self._cache([self._nbytes[index] for index in missing])
            slabs = [torch.empty(self._nbytes[index], dtype=torch.uint8, device=self.device) for index in missing]
            self._stream.wait_stream(self._caller)
        with self._state:
            for index, slab in zip(missing, slabs, strict=True):
                self._slabs[index] = slab
            self._state.notify_all()

    def wait_for_slabs(self) -> bool:
        """Wait for the end of an `allocating` block. Return whether every slab is allocated."""
        with self._state:
            self._state.wait_for(lambda: not self._is_allocating)
            return all(slab is not None for slab in self._slabs)

    def slab(self, index: int) -> torch.Tensor:
        """Return the slab as a flat uint8 tensor, and allocate it if necessary."""
        slab = self._slabs[index]
        if slab is None:
            with self._state:
                # This wait ends with the `allocating` block, even if the allocation fails.
                self._state.wait_for(lambda: self._slabs[index] is not None or not self._is_allocating)
                try:
                    # A block takes fewer calls of torch, which release the GIL. If it does not fit, the slab may fit.
                    with suppress(torch.cuda.OutOfMemoryError):
                        self._allocate(self._forget_block(index))
                    self._allocate([index])
                except torch.cuda.OutOfMemoryError as error:
                    raise self.memory_error(self._nbytes[index]) from error
                slab = self._slabs[index]
                assert slab is not None
        return slab

    def _forget_block(self, index: int) -> list[int]:
        """Return the slabs to allocate together with a slab. The next call returns none, because slabs may be taken."""
        block = self._blocks.get(index, [index])
        for each in block:
            self._blocks[each] = []
        return block

    def _cache(self, nbytes: Sequence[int]) -> None:
        """Let torch cache a block that it splits, if the block fits, because cudaMalloc takes 0.06 ms for each slab."""
        with suppress(torch.cuda.OutOfMemoryError):
            if len(nbytes) > 1:
                torch.empty(sum(map(_rounded, nbytes)), dtype=torch.uint8, device=self.device)

    def take(self, index: int) -> torch.Tensor:
        """Return the slab and drop the reference to it."""
        slab = self.slab(index)
        self._slabs[index] = None
        return slab

    def direct(self, slab: int, start: int, stop: int) -> memoryview | None:
        """Return None, because no source can write to device memory."""
        return None

    def copy(self, buffer: StagingBuffer, segments: Sequence[Segment]) -> CudaPending:
        """See `Destination.copy`."""
        pending, stream = self._pending_of(buffer), self._stream_handle
        # Get all addresses before the first copy, because a failed allocation between two copies would leave the first
        # copy without an event.
        copies = [(self.slab(slab).data_ptr() + dst, src, run) for src, slab, dst, run, _, _ in segments]
        # Driver calls take 1 to 3 us each, while torch's calls release the GIL several times per chunk.
        for address, src, nbytes in copies:
            self._driver.copy_to_device(address, buffer.address + src, nbytes, stream)
        self._driver.record(pending.event, stream)
        return pending

    def _pending_of(self, buffer: StagingBuffer) -> CudaPending:
        """Return the event of a buffer, which has at most one batch of copies in flight."""
        pending = self._pending.get(buffer.address)
        if pending is None:
            # `set_device` makes the device's context current in this thread, for the first record of the event.
            torch.cuda.set_device(self.device)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append(event)
            pending = self._pending[buffer.address] = CudaPending(self._driver, int(event.cuda_event))
        return pending

    def memory_error(self, nbytes: int) -> DeviceOutOfMemory:
        """Return the error for a failed allocation of `nbytes` bytes."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceOutOfMemory(
            f"{self.device} has {free} of {total} bytes free, but {nbytes} bytes are needed",
            hint="free memory on the device, load fewer tensors, or load only slices of them",
        )


def place_on(
    device: torch.device,
    slab_nbytes: Sequence[int],
    slabs: Sequence[torch.Tensor | None] | None = None,
    *,
    window_bytes: int = 0,
) -> HostPlace | CudaPlace:
    """Create the place for slabs on a device.

    Args:
        slabs: flat uint8 tensors to fill, or None to allocate.
        window_bytes: limit of the read-ahead, of which half is allocated at once, or 0 for no limit.
    """
    if device.type == "cpu":
        return HostPlace(slab_nbytes, [None if slab is None else slab.numpy() for slab in slabs or ()] or None)
    return CudaPlace(device, slab_nbytes, slabs, window_bytes)


def registrar_of(device: torch.device) -> Registrar | None:
    """Return the registrar that pins host memory for a device, or None if the device needs no pinning."""
    return CudaRegistrar(device) if device.type == "cuda" else None
