"""The compute backend of a CUDA device: tasks live in device memory, and pass through few pinned bytes of the host.

In: as `compute.ComputeBackend`. Out: the same.
Not here: the protocol and reservations (`compute`), the pinned buffers themselves (`memory.staging`).

    read --> staging buffer --copy--> inputs --run, digest--> outputs --copy--> staging buffer --> write
             of `piece_bytes`         one stream for each of the three           of `piece_bytes`

Each thread that reads or writes has one staging buffer, which it fills and empties in turn. Together they are so few
that they stay in the processor's cache: a byte passes the host's memory once on each way, and not three times.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from penstock.cuda.driver import load_driver
from penstock.digest.cuda import leaf_digests_cuda
from penstock.engine.place import CudaRegistrar
from penstock.engine.run import Pending
from penstock.errors import DestinationError, DeviceOutOfMemory
from penstock.jobs.workers.compute import Buffers, Made, Pieces, Read, Write, as_bytes
from penstock.memory.staging import StagingBuffer, StagingPool
from penstock.types import GIB

_DEVICE_BYTES = 4 * GIB
"""Most device memory that tasks hold, unless `memory_bytes` is more: sixteen tasks of 256 MiB."""

_FREE_SHARE = 4
"""Tasks hold at most one of so many parts of the memory that is free on the device, where that is less."""

_NAP_S = 1e-4
"""Pause between looks at a copy: 8 MiB take 160 us over PCIe 5, and each look takes the GIL from other threads."""


class CudaCompute:
    """A backend that computes on one CUDA device.

    Args:
        memory_bytes: bound of the staging buffers.
        device: with an index.
        piece_bytes: size of a staging buffer, rounded up to a page; at least every `leaf_bytes` of `fill`.
        num_threads: threads that call `fill` or `drain`.
        stall_s: deadline of a copy.
    """

    def __init__(
        self, memory_bytes: int, device: torch.device, *, piece_bytes: int, num_threads: int, stall_s: float
    ) -> None:
        self.device = device
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self.buffers = Buffers(max(memory_bytes, min(_DEVICE_BYTES, free_bytes // _FREE_SHARE)))
        self._piece_bytes = nbytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._stall_s = stall_s
        # Two at least, as a pool needs, also where they are more than `memory_bytes`.
        staged_bytes = max(2 * nbytes, min(memory_bytes, num_threads * nbytes))
        self._staging = StagingPool(staged_bytes, nbytes, registrar=CudaRegistrar(device))
        self._driver = load_driver()
        # Three streams, so that the copies of one task run while another one computes.
        self._up = torch.cuda.Stream(device)
        self._work = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        # Read once: torch makes the number anew each time.
        self._up_handle, self._down_handle = self._up.cuda_stream, self._down.cuda_stream
        self._events: dict[int, int] = {}
        """By the address of a staging buffer: passed after its last copy."""

    @property
    def peak_bytes(self) -> int:
        """See `ComputeBackend.peak_bytes`."""
        return self._staging.peak_bytes

    def room(self, nbytes: int) -> torch.Tensor:
        """See `ComputeBackend.room`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._up), _OutOfMemoryMapper(self.device):
            room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # Allocated on one stream, used on another: without this the allocator reuses it while the operation reads.
        room.record_stream(self._work)
        return room

    def put(self, room: torch.Tensor) -> None:
        """See `ComputeBackend.put`: the memory goes back to torch with its last user."""

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """See `ComputeBackend.fill`."""
        step = max(self._piece_bytes // leaf_bytes, 1) * leaf_bytes
        address, driver, stream = inputs.data_ptr(), self._driver, self._up_handle
        with self._staged() as (buffer, event):
            for at in range(0, len(inputs), step):
                nbytes = min(step, len(inputs) - at)
                read(at, buffer.view[:nbytes])
                driver.copy_to_device(address + at, buffer.address, nbytes, stream)
                driver.record(event, stream)
                self._wait(event)

    def make(self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]) -> tuple[Made, Pending | None]:
        """See `ComputeBackend.make`."""
        with self.entered():
            outputs = [as_bytes(tensor) for tensor in run()]
            start = [out.data_ptr() + a for out, some in zip(outputs, pieces, strict=True) for a, _ in some]
            nbytes = [b - a for some in pieces for a, b in some]
            there = leaf_digests_cuda(np.array(start, np.int64), np.array(nbytes, np.int64), self.device)
            digests = torch.empty(len(nbytes), dtype=torch.int64, pin_memory=True)
            digests.copy_(there, non_blocking=True)
            return Made(outputs, digests.numpy().view(np.uint64)), _StreamPosition(self._work)

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """See `ComputeBackend.drain`."""
        address, driver, stream = raw.data_ptr(), self._driver, self._down_handle
        with self._staged() as (buffer, event):
            for at in range(0, len(raw), self._piece_bytes):
                nbytes = min(self._piece_bytes, len(raw) - at)
                driver.copy_to_host(buffer.address, address + at, nbytes, stream)
                driver.record(event, stream)
                self._wait(event)
                write(at, buffer.view[:nbytes])

    @contextmanager
    def _staged(self) -> Iterator[tuple[StagingBuffer, int]]:
        """Lend the calling thread a staging buffer with its event, and make the device's context its own meanwhile."""
        with self._driver.entered(self.device.index):
            buffer = self._staging.acquire(stall_s=self._stall_s)
            try:
                event = self._events.get(buffer.address)
                if event is None:
                    event = self._events[buffer.address] = self._driver.make_event()
                yield buffer, event
            finally:
                self._staging.release(buffer)

    def _wait(self, event: int) -> None:
        """Wait until the device has passed an event. DestinationError after `stall_s`."""
        deadline = time.monotonic() + self._stall_s
        while not self._driver.is_done(event):
            if time.monotonic() > deadline:
                raise DestinationError(f"{self.device} finished no copy for {self._stall_s:g} s", hint="look at dmesg")
            time.sleep(_NAP_S)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `ComputeBackend.entered`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._work), _OutOfMemoryMapper(self.device):
            yield

    def close(self) -> None:
        """See `ComputeBackend.close`."""
        with self._driver.entered(self.device.index):
            self._driver.free([], list(self._events.values()))
        self._events.clear()
        self._staging.close()


class _StreamPosition:
    """A pending that is done once everything queued on a stream so far has run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """See `Pending.done`."""
        return bool(self._event.query())


class _OutOfMemoryMapper:
    """Map torch's out-of-memory error to DeviceOutOfMemory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # The driver's numbers, and not torch's: other workers and programs use the same device.
        if isinstance(error, torch.cuda.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(self._device)
            message = f"a task does not fit on {self._device}, which has {free} of {total} bytes free"
            raise DeviceOutOfMemory(message, hint="lower task_bytes or memory_bytes") from error
