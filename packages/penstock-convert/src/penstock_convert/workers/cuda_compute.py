"""The compute backend for a CUDA device.

The inputs and outputs of tasks are in device memory, and their bytes pass through a few pinned host buffers.

    read --staged, copied--> inputs --run, digest--> outputs --copied, staged--> write
                   a stream                 a stream                  a stream
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from penstock.cuda.driver import load_driver
from penstock.digest.cuda import leaf_digests_cuda
from penstock.engine.place import CudaRegistrar
from penstock.engine.run import PendingItem
from penstock.errors import DeviceOutOfMemory
from penstock.memory.staging import StagingPool
from penstock.types import GIB, I64
from penstock_convert.workers.compute import Buffers, ComputedOutputs, Read, Write, as_bytes
from penstock_convert.workers.staged_copies import StagedCopies

_DEVICE_BYTES = 2 * GIB
"""Limit in bytes for the device memory of tasks: twelve tasks of 128 MiB, and some reserve."""

_FREE_SHARE = 8
"""Tasks use at most this fraction (one eighth) of the device's free memory. Other workers may share the device, and an
operation needs memory for intermediate values."""


class CudaCompute:
    """A backend that computes on one CUDA device.

    Args:
        pool: Staging buffers, pinned for the device. Each holds at least the `leaf_bytes` of `fill`.
        device: The device, with an index.
        device_bytes: Limit in bytes for the device memory of all tasks.
        stall_s: Deadline of a copy, in seconds.
    """

    def __init__(self, pool: StagingPool, device: torch.device, *, device_bytes: int, stall_s: float) -> None:
        self.device = device
        self.buffers = Buffers(device_bytes)
        self.staged_bytes = pool.num_buffers * pool.buffer_bytes
        self._piece_bytes = pool.buffer_bytes
        # Use separate streams, so that copies for one task run while another task computes.
        self._up = torch.cuda.Stream(device)
        self._work = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._copies = StagedCopies(
            pool, load_driver(), device.index, up=self._up.cuda_stream, down=self._down.cuda_stream, stall_s=stall_s
        )

    @classmethod
    def open(
        cls, memory_bytes: int, device: torch.device, *, piece_bytes: int, num_threads: int, stall_s: float
    ) -> CudaCompute:
        """Map and pin the staging buffers.

        Args:
            memory_bytes: Limit in bytes for host memory. The staging buffers, at least two, use half of this limit.
            device: The device, with an index.
            piece_bytes: Size in bytes of a staging buffer, which is rounded up to whole pages.
            num_threads: Number of threads that call `fill` or `drain`.
            stall_s: Deadline of a copy, in seconds.

        Raises:
            BudgetTooSmall: `memory_bytes` is too small for two staging buffers.
        """
        free_bytes, _ = torch.cuda.mem_get_info(device)
        piece_bytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Use half of the memory, because tasks that run in parts use the other half.
        num_buffers = max(2, min(num_threads, memory_bytes // 2 // piece_bytes))
        pool = StagingPool.map(
            min(memory_bytes, num_buffers * piece_bytes), piece_bytes, registrar=CudaRegistrar(device)
        )
        return cls(pool, device, device_bytes=min(_DEVICE_BYTES, free_bytes // _FREE_SHARE), stall_s=stall_s)

    @property
    def peak_bytes(self) -> int:
        """See `ComputeBackend.peak_bytes`."""
        return self._copies.pool.peak_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `ComputeBackend.allocate`."""
        with torch.cuda.device(self.device.index), torch.cuda.stream(self._up), _OutOfMemoryMapper(self.device):
            # `record_stream` is not needed, although an operation reads the memory on a different stream. A task
            # releases its memory only after the device has finished using it. `record_stream` would add an event that
            # torch queries at every later allocation.
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, memory: torch.Tensor) -> None:
        """See `ComputeBackend.release`. Torch reuses the memory when its last reference is gone."""

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """See `ComputeBackend.fill`."""
        step = max(self._piece_bytes // leaf_bytes, 1) * leaf_bytes
        self._copies.fill(inputs.data_ptr(), len(inputs), read, step=step)

    def compute(
        self, run: Callable[[], Sequence[torch.Tensor]], cuts: Sequence[I64]
    ) -> tuple[ComputedOutputs, PendingItem | None]:
        """See `ComputeBackend.compute`."""
        with self.entered():
            outputs = [as_bytes(tensor) for tensor in run()]
            start = np.concatenate([out.data_ptr() + some[:-1] for out, some in zip(outputs, cuts, strict=True)])
            there = leaf_digests_cuda(start, np.concatenate([np.diff(some) for some in cuts]), self.device)
            digests = torch.empty(len(start), dtype=torch.int64, pin_memory=True)
            digests.copy_(there, non_blocking=True)
            return ComputedOutputs(outputs, digests.numpy().view(np.uint64)), _StreamPosition(self._work)

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """See `ComputeBackend.drain`."""
        self._copies.drain(raw.data_ptr(), len(raw), write)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `ComputeBackend.entered`."""
        with torch.cuda.device(self.device.index), torch.cuda.stream(self._work), _OutOfMemoryMapper(self.device):
            yield

    def close(self) -> None:
        """See `ComputeBackend.close`."""
        self._copies.close()


class _StreamPosition:
    """A pending item that is done when all work queued on a stream so far has run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())


class _OutOfMemoryMapper:
    """Map torch's out-of-memory error to DeviceOutOfMemory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Report the driver's numbers instead of torch's, because other workers and programs use the same device.
        if isinstance(error, torch.cuda.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(self._device)
            message = f"no memory for a task on {self._device}, which has {free} of {total} bytes free"
            hint = "lower task_bytes, run fewer workers on it, or end other programs there"
            raise DeviceOutOfMemory(message, hint=hint) from error
