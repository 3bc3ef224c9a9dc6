"""Compute backends of a worker, and the host buffers that they compute from: host memory alone, or a CUDA device.

In: bytes in a host buffer; an operation; a bound of host memory. Out: its outputs' bytes in host memory, and their
digests, perhaps later; reservations and buffers, pinned where a device reads them.
Not here: choosing tasks (`worker`), the operations (`jobs.operations.operation`), device memory, which torch keeps.

    CUDA:  pinned --copy--> device --run, digest--> device --copy--> pinned     one stream for each of the three
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.digest.leaf import leaf_digests
from penstock.engine.place import CudaRegistrar
from penstock.engine.run import Pending
from penstock.errors import Cancelled, DeviceOutOfMemory
from penstock.memory.arena import populate_by
from penstock.memory.staging import Registrar
from penstock.types import MIB, U64

_PAGE_THREADS = 8
"""Threads that populate a pinned buffer's pages: the kernel zeroes them, at 2 GB/s a core."""

_FITS = 1.5
"""Largest ratio of a reused buffer to the size that is needed: making a new buffer takes longer than filling one."""

ALIGN_BYTES = 256
"""Alignment of tensors in a buffer, as on a device. Source: CUDA C++ Programming Guide, "Device memory accesses"."""


class Buffers:
    """Buffers by size, and a count of what tasks have reserved. Any thread.

    Args:
        memory_bytes: bound on reserved memory and memory kept for reuse, together.
        registrar: pins buffers; None: they are only host memory.

    Attributes:
        peak_bytes: most bytes reserved at once.
    """

    def __init__(self, memory_bytes: int, *, registrar: Registrar | None = None) -> None:
        self._bound = memory_bytes
        self._registrar = registrar
        self._kept: list[torch.Tensor] = []
        self._kept_bytes = 0
        self._lent_bytes = 0
        self._reserved = 0
        self.peak_bytes = 0
        self._changed = threading.Condition()
        self._pages = ThreadPoolExecutor(_PAGE_THREADS, thread_name_prefix="penstock-pages")

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
        # Allocated outside of the lock: pinning takes tens of milliseconds, and other threads put buffers back.
        return self._allocate(size) if reused is None else reused

    def put(self, buffer: torch.Tensor) -> None:
        """Return a buffer of `get` for reuse; nothing may read or write it any more."""
        with self._changed:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            self._lent_bytes -= len(buffer)
            self._make_room()

    def close(self) -> None:
        """Free the kept buffers. Order: after the last use of any buffer. Idempotent."""
        with self._changed:
            while self._kept:
                self._free(self._kept[0])
        self._pages.shutdown()

    def _allocate(self, size: int) -> torch.Tensor:
        if self._registrar is None:
            return torch.empty(size, dtype=torch.uint8)
        # Pinning populates pages on one thread; several threads do it first, in a fraction of the time.
        buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        populate_by(self._pages, buffer.data_ptr(), size)
        self._registrar.register(buffer.data_ptr(), size)
        return buffer

    def _make_room(self) -> None:
        """Free the buffers that were unused longest, until the kept ones fit in the bound with what tasks hold."""
        while self._kept and self._kept_bytes + max(self._lent_bytes, self._reserved) > self._bound:
            self._free(self._kept[0])

    def _forget(self, buffer: torch.Tensor) -> None:
        self._kept = [kept_buffer for kept_buffer in self._kept if kept_buffer is not buffer]
        self._kept_bytes -= len(buffer)

    def _free(self, buffer: torch.Tensor) -> None:
        self._forget(buffer)
        if self._registrar is not None:
            self._registrar.unregister(buffer.data_ptr())


def packed(sizes: Sequence[int]) -> list[int]:
    """Return the offsets at which tensors of these sizes begin in one buffer, and the end of the last."""
    return [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]


def cut(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut a buffer into tensors at the offsets of `packed`."""
    return [buffer[at : at + size] for at, size in zip(packed(sizes), sizes, strict=False)]


Pieces = Sequence[tuple[int, int]]
"""Byte ranges of one output, each with a digest of its own."""


@dataclass(slots=True)
class Made:
    """Outputs of a task, valid once the step that made them is over."""

    raw: list[torch.Tensor]
    """Bytes of each output in host memory, flat uint8."""
    digests: U64
    """Of the pieces of all outputs, in order."""
    buffer: torch.Tensor | None = None
    """The buffer that contains `raw`, to be put back."""


class ComputeBackend(Protocol):
    """A device with its host buffers.

    Attributes:
        device: of the computation.
        copies: whether `place` returns a copy of the host's bytes.
        buffers: host memory for inputs and outputs.
    """

    device: torch.device
    copies: bool
    buffers: Buffers

    def place(self, buffer: torch.Tensor, sizes: Sequence[int]) -> tuple[list[torch.Tensor], Pending | None]:
        """Move the tensors packed in a host buffer to where `make` reads them; return them as flat uint8 tensors.

        Ownership: the buffer belongs to the compute backend until the pending is done.
        """
        ...

    def make(self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]) -> tuple[Made, Pending | None]:
        """Call `run`, digest its outputs, copy them to host memory; complete once the pending is done."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which torch computes on this backend, in order with copies of its results to the host."""
        ...


class HostCompute:
    """A backend that computes in host memory, without copies."""

    copies = False

    def entered(self) -> AbstractContextManager[None]:
        """See `ComputeBackend.entered`."""
        return nullcontext()

    def __init__(self, memory_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.buffers = Buffers(memory_bytes)

    def place(self, buffer: torch.Tensor, sizes: Sequence[int]) -> tuple[list[torch.Tensor], Pending | None]:
        """See `ComputeBackend.place`."""
        return cut(buffer, sizes), None

    def make(self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]) -> tuple[Made, Pending | None]:
        """See `ComputeBackend.make`."""
        raw = [as_bytes(tensor) for tensor in run()]
        digests, at = np.empty(sum(len(some) for some in pieces), np.uint64), 0
        for output, some in zip(raw, pieces, strict=True):
            view = as_view(output)
            for start, stop in some:
                leaf_digests(view[start:stop], stop - start, digests[at : at + 1])
                at += 1
        return Made(raw, digests), None


class CudaCompute:
    """A backend that computes on one CUDA device."""

    copies = True

    def __init__(self, memory_bytes: int, device: torch.device) -> None:
        self.device = device
        self.buffers = Buffers(memory_bytes, registrar=CudaRegistrar(device))
        # Three streams, so that the copies of one task run while another one computes.
        self._up = torch.cuda.Stream(device)
        self._work = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def place(self, buffer: torch.Tensor, sizes: Sequence[int]) -> tuple[list[torch.Tensor], Pending | None]:
        """See `ComputeBackend.place`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._up), _OutOfMemoryMapper(self.device):
            there = torch.empty(packed(sizes)[-1], dtype=torch.uint8, device=self.device)
            there.copy_(buffer[: len(there)], non_blocking=True)
            # Allocated on one stream, used on another: without this the allocator reuses it while the operation reads.
            there.record_stream(self._work)
            return cut(there, sizes), _StreamPosition(self._up)

    def make(self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]) -> tuple[Made, Pending | None]:
        """See `ComputeBackend.make`."""
        from penstock.digest.cuda import leaf_digests_cuda

        with torch.cuda.device(self.device), torch.cuda.stream(self._work), _OutOfMemoryMapper(self.device):
            outputs = [as_bytes(tensor) for tensor in run()]
            start = [out.data_ptr() + a for out, some in zip(outputs, pieces, strict=True) for a, _ in some]
            nbytes = [b - a for some in pieces for a, b in some]
            got = leaf_digests_cuda(np.array(start, np.int64), np.array(nbytes, np.int64), self.device)
            # The copies below run on another stream: they must not start before the outputs and digests exist.
            self._down.wait_stream(self._work)
        # Digests first, in the same buffer as the outputs: one reservation and one alignment for all.
        sizes = [8 * len(nbytes), *(len(out) for out in outputs)]
        buffer = self.buffers.get(packed(sizes)[-1])
        digests, *raw = cut(buffer, sizes)
        with torch.cuda.device(self.device), torch.cuda.stream(self._down):
            for here, there in zip([digests.view(torch.int64), *raw], [got, *outputs], strict=True):
                here.copy_(there, non_blocking=True)
                there.record_stream(self._down)
            return Made(raw, digests.numpy().view(np.uint64), buffer), _StreamPosition(self._down)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See `ComputeBackend.entered`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._work), _OutOfMemoryMapper(self.device):
            yield


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


def as_view(raw: torch.Tensor) -> memoryview:
    """Return flat uint8 host memory as a writable view."""
    array: npt.NDArray[np.uint8] = raw.numpy()
    return array.data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, flat; a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
