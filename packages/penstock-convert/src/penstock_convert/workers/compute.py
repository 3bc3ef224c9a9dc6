"""Compute backends for a worker: the protocol, the backend for host memory, and the reservations of task memory.

`cuda_compute` contains the backend for a CUDA device.

    allocate -> fill: read --> inputs --run: operation, digests--> outputs -> drain: --> write
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.digest.leaf import leaf_digests
from penstock.engine.run import PendingItem
from penstock.errors import Cancelled
from penstock.types import I64, MIB, U64

_FITS = 1.5
"""Maximum ratio of a reused buffer's size to the required size. Creating a new buffer takes longer than filling a
buffer."""

ALIGN_BYTES = 256
"""Alignment in bytes of tensors in a buffer, as on a device. Source: CUDA C++ Programming Guide, "Device memory
accesses"."""


class Buffers:
    """Reusable buffers, and the number of bytes that tasks have reserved. Thread-safe.

    Args:
        memory_bytes: limit in bytes for reserved memory and unused buffers in total.

    Attributes:
        peak_bytes: largest number of bytes that were reserved at the same time.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._bound = memory_bytes
        self._kept: list[torch.Tensor] = []
        self._kept_bytes = 0
        self._lent_bytes = 0
        self._reserved = 0
        self.peak_bytes = 0
        self._changed = threading.Condition()

    def reserve(self, nbytes: int, stopped: Callable[[], bool]) -> None:
        """Reserve `nbytes` for a task. Wait for free memory unless no other task has a reservation.

        Raises:
            Cancelled: `stopped` became true during the wait.
        """
        with self._changed:
            # The tasks that hold the memory have a deadline and notify this condition when they end. A task that is
            # larger than the limit runs alone instead of waiting forever.
            while self._reserved and self._reserved + nbytes > self._bound:
                if stopped():
                    raise Cancelled("the job ended while a task waited for memory")
                # A stop does not notify this condition, so poll `stopped`.
                self._changed.wait(0.1)
            self._reserved += nbytes
            self.peak_bytes = max(self.peak_bytes, self._reserved)

    def unreserve(self, nbytes: int) -> None:
        """Release a task's reservation."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def get(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 buffer of at least `nbytes`: the smallest unused buffer that fits, or a new buffer."""
        # Round sizes up by at most an eighth, so that tasks of similar size share buffers.
        step = max(MIB, 1 << max(0, nbytes.bit_length() - 4))
        size = max(1, -(-nbytes // step)) * step
        with self._changed:
            # Among equally large buffers, take the last one used, so that surplus buffers stay unused and are freed.
            fits = [buffer for buffer in self._kept if nbytes <= len(buffer) <= _FITS * size]
            reused = min(reversed(fits), key=len, default=None)
            if reused is not None:
                self._forget(reused)
                size = len(reused)
            self._lent_bytes += size
            self._evict()
        return torch.empty(size, dtype=torch.uint8) if reused is None else reused

    def put(self, buffer: torch.Tensor) -> None:
        """Give back a buffer from `get` for reuse. The caller must not read or write the buffer after this call."""
        with self._changed:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            self._lent_bytes -= len(buffer)
            self._evict()

    def _evict(self) -> None:
        """Free the longest-unused buffers until the unused buffers and the tasks' memory are within the limit."""
        while self._kept and self._kept_bytes + max(self._lent_bytes, self._reserved) > self._bound:
            self._forget(self._kept[0])

    def _forget(self, buffer: torch.Tensor) -> None:
        self._kept = [kept_buffer for kept_buffer in self._kept if kept_buffer is not buffer]
        self._kept_bytes -= len(buffer)


def packed(sizes: Sequence[int]) -> list[int]:
    """Return the offsets at which tensors with these sizes begin in one buffer, and the end of the last tensor."""
    return [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split a buffer into tensors at the offsets from `packed`."""
    return [buffer[at : at + size] for at, size in zip(packed(sizes), sizes, strict=False)]


@dataclass(slots=True)
class ComputedOutputs:
    """The outputs of a task, which are valid after the step that computes them has finished."""

    raw: list[torch.Tensor]
    """The bytes of each output as flat uint8, in the backend's memory."""
    digests: U64
    """Digests of the pieces between the cuts of all outputs, in order."""


Read = Callable[[int, memoryview], None]
"""A function that fills host memory with a task's input bytes, beginning at an offset."""
Write = Callable[[int, memoryview], None]
"""A function that writes bytes from host memory to an offset in a task's output."""


class ComputeBackend(Protocol):
    """A device that computes tasks, and the memory for these tasks. Thread-safe.

    Attributes:
        device: device that runs the operations.
        buffers: reservations of tasks.
        staged_bytes: host memory in bytes that the backend uses in addition to reservations.
    """

    device: torch.device
    buffers: Buffers
    staged_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak host memory in bytes, not counting tasks that run in parts."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` of flat uint8 memory for a task's inputs, where an operation can read them."""
        ...

    def release(self, memory: torch.Tensor) -> None:
        """Release memory from `allocate`. The caller must not read or write this memory after the call."""
        ...

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """Fill a part of allocated memory by calling `read` with a multiple of `leaf_bytes` at a time.

        Return when the part is complete.
        """
        ...

    def compute(
        self, run: Callable[[], Sequence[torch.Tensor]], cuts: Sequence[I64]
    ) -> tuple[ComputedOutputs, PendingItem | None]:
        """Call `run` and digest its outputs. The outputs and digests are complete when the pending item is done.

        Args:
            cuts: for each output, ascending offsets from 0 to its size. Each range between two offsets has a digest.
        """
        ...

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """Pass the bytes of an output to `write`. Return after the last call of `write`."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which torch computes on this backend, and copies to the host wait for the results."""
        ...

    def close(self) -> None:
        """Free the memory. Call this last. Idempotent."""
        ...


class HostCompute:
    """A backend that computes in host memory without copies."""

    def __init__(self, memory_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.buffers = Buffers(memory_bytes)
        self.staged_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """See `ComputeBackend.peak_bytes`."""
        return self.buffers.peak_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `ComputeBackend.allocate`."""
        return self.buffers.get(nbytes)

    def release(self, memory: torch.Tensor) -> None:
        """See `ComputeBackend.release`."""
        self.buffers.put(memory)

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """See `ComputeBackend.fill`."""
        read(0, as_view(inputs))

    def compute(
        self, run: Callable[[], Sequence[torch.Tensor]], cuts: Sequence[I64]
    ) -> tuple[ComputedOutputs, PendingItem | None]:
        """See `ComputeBackend.compute`."""
        raw = [as_bytes(tensor) for tensor in run()]
        digests, at = np.empty(sum(len(some) - 1 for some in cuts), np.uint64), 0
        for output, some in zip(raw, cuts, strict=True):
            view = as_view(output)
            for start, stop in pairwise(some.tolist()):
                leaf_digests(view[start:stop], stop - start, digests[at : at + 1])
                at += 1
        return ComputedOutputs(raw, digests), None

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """See `ComputeBackend.drain`."""
        write(0, as_view(raw))

    def entered(self) -> AbstractContextManager[None]:
        """See `ComputeBackend.entered`."""
        return nullcontext()

    def close(self) -> None:
        """See `ComputeBackend.close`. The memory is freed when its last reference is gone."""


def as_view(raw: torch.Tensor) -> memoryview:
    """Return a writable memoryview of a flat uint8 tensor in host memory."""
    array: npt.NDArray[np.uint8] = raw.numpy()
    return array.data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as flat uint8, copied only if it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
