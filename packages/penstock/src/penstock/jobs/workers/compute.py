"""Compute backends of a worker: the protocol, its form for host memory, and the memory that tasks hold.

In: functions that read and write bytes; an operation; a bound of memory. Out: an operation's outputs, where the backend
has its memory, and their digests, perhaps later; reservations, and buffers that are used again.
Not here: choosing tasks (`worker`), the operations (`jobs.operations.operation`), the form for a CUDA device
(`cuda_compute`).

    room -> fill: read --> inputs --make: operation, digests--> outputs -> drain: --> write
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
"""Largest ratio of a reused buffer to the size that is needed: making a new buffer takes longer than filling one."""

ALIGN_BYTES = 256
"""Alignment of tensors in a buffer, as on a device. Source: CUDA C++ Programming Guide, "Device memory accesses"."""


class Buffers:
    """Buffers by size, and a count of what tasks have reserved. Any thread.

    Args:
        memory_bytes: bound on reserved memory and memory kept for reuse, together.

    Attributes:
        peak_bytes: most bytes reserved at once.
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
        """Wait until there is room for a task of `nbytes`; a task that is alone always has room.

        Raises:
            Cancelled: `stopped` became true meanwhile.
        """
        with self._changed:
            # No deadline of its own: the tasks that hold the memory have one, and ending them wakes this wait.
            # A task above the bound runs alone instead of waiting for ever; `check_budget` has refused it before that.
            while self._reserved and self._reserved + nbytes > self._bound:
                if stopped():
                    raise Cancelled("the job ended while a task waited for memory")
                # A stop does not notify this condition, so it is polled.
                self._changed.wait(0.1)
            self._reserved += nbytes
            self.peak_bytes = max(self.peak_bytes, self._reserved)

    def unreserve(self, nbytes: int) -> None:
        """Release a task's reservation."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def get(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes`, flat uint8: the smallest kept one that fits, or a new one."""
        # Sizes are rounded to an eighth or less of themselves, so that tasks of nearly one size share buffers.
        step = max(MIB, 1 << max(0, nbytes.bit_length() - 4))
        size = max(1, -(-nbytes // step)) * step
        with self._changed:
            # Reversed: of equal buffers the one used last, so that surplus buffers stay unused and are freed first.
            fits = [buffer for buffer in self._kept if nbytes <= len(buffer) <= _FITS * size]
            reused = min(reversed(fits), key=len, default=None)
            if reused is not None:
                self._forget(reused)
                size = len(reused)
            self._lent_bytes += size
            self._make_room()
        return torch.empty(size, dtype=torch.uint8) if reused is None else reused

    def put(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `get` for reuse; nothing may read or write it any more."""
        with self._changed:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            self._lent_bytes -= len(buffer)
            self._make_room()

    def _make_room(self) -> None:
        """Free the buffers that were unused longest, until the kept ones fit in the bound with what tasks hold."""
        while self._kept and self._kept_bytes + max(self._lent_bytes, self._reserved) > self._bound:
            self._forget(self._kept[0])

    def _forget(self, buffer: torch.Tensor) -> None:
        self._kept = [kept_buffer for kept_buffer in self._kept if kept_buffer is not buffer]
        self._kept_bytes -= len(buffer)


def packed(sizes: Sequence[int]) -> list[int]:
    """Return the offsets at which tensors of these sizes begin in one buffer, and the end of the last."""
    return [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut a buffer into tensors at the offsets of `packed`."""
    return [buffer[at : at + size] for at, size in zip(packed(sizes), sizes, strict=False)]


@dataclass(slots=True)
class Made:
    """Outputs of a task, valid once the step that made them is over."""

    raw: list[torch.Tensor]
    """Bytes of each output where the backend computes, flat uint8."""
    digests: U64
    """Of the pieces between the cuts of all outputs, in order."""


Read = Callable[[int, memoryview], None]
"""Fills host memory with bytes of a task's input, from an offset on."""
Write = Callable[[int, memoryview], None]
"""Writes host memory to an offset of a task's output."""


class ComputeBackend(Protocol):
    """A device with the memory of the tasks that it computes. Any thread.

    Attributes:
        device: of the computation.
        buffers: reservations of tasks.
        staged_bytes: host memory that the backend has besides what tasks reserve.
    """

    device: torch.device
    buffers: Buffers
    staged_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of host memory held at once, but for those of tasks that are made in parts."""
        ...

    def room(self, nbytes: int) -> torch.Tensor:
        """Return memory for a task's inputs, where an operation reads them: at least `nbytes`, flat uint8."""
        ...

    def put(self, room: torch.Tensor) -> None:
        """Take memory of `room` back; nothing may read or write it any more."""
        ...

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """Fill a part of a `room` by `read`, a multiple of `leaf_bytes` at a time; complete on return."""
        ...

    def make(self, run: Callable[[], Sequence[torch.Tensor]], cuts: Sequence[I64]) -> tuple[Made, PendingItem | None]:
        """Call `run` and digest its outputs; complete once the pending is done.

        Args:
            cuts: of each output, ascending from 0 to its bytes: what lies between two has a digest of its own.
        """
        ...

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """Give the bytes of an output of `make` to `write`; complete on return."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which torch computes on this backend, in order with copies of its results to the host."""
        ...

    def close(self) -> None:
        """Free the memory. Order: after the last other call. Idempotent."""
        ...


class HostCompute:
    """A backend that computes in host memory, without copies."""

    def __init__(self, memory_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.buffers = Buffers(memory_bytes)
        self.staged_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """See `ComputeBackend.peak_bytes`."""
        return self.buffers.peak_bytes

    def room(self, nbytes: int) -> torch.Tensor:
        """See `ComputeBackend.room`."""
        return self.buffers.get(nbytes)

    def put(self, room: torch.Tensor) -> None:
        """See `ComputeBackend.put`."""
        self.buffers.put(room)

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        """See `ComputeBackend.fill`."""
        read(0, as_view(inputs))

    def make(self, run: Callable[[], Sequence[torch.Tensor]], cuts: Sequence[I64]) -> tuple[Made, PendingItem | None]:
        """See `ComputeBackend.make`."""
        raw = [as_bytes(tensor) for tensor in run()]
        digests, at = np.empty(sum(len(some) - 1 for some in cuts), np.uint64), 0
        for output, some in zip(raw, cuts, strict=True):
            view = as_view(output)
            for start, stop in pairwise(some.tolist()):
                leaf_digests(view[start:stop], stop - start, digests[at : at + 1])
                at += 1
        return Made(raw, digests), None

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        """See `ComputeBackend.drain`."""
        write(0, as_view(raw))

    def entered(self) -> AbstractContextManager[None]:
        """See `ComputeBackend.entered`."""
        return nullcontext()

    def close(self) -> None:
        """See `ComputeBackend.close`: the memory goes with its last user."""


def as_view(raw: torch.Tensor) -> memoryview:
    """Return flat uint8 host memory as a writable view."""
    array: npt.NDArray[np.uint8] = raw.numpy()
    return array.data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, flat; a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
