"""Where a worker computes: the host's own memory, or a CUDA device behind pinned buffers.

In: bytes in host buffers; an operation. Out: its outputs' bytes in host memory, and their digests, perhaps later.
Not here: which tasks (`worker`), what is computed (`operation`).

    CUDA:  pinned --copy--> device --run, digest--> device --copy--> pinned     one stream for each of the three
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.digest.leaf import leaf_digests
from penstock.engine.executors import Pending
from penstock.errors import DeviceOutOfMemory
from penstock.jobs.buffers import Buffers
from penstock.types import U64

Pieces = Sequence[tuple[int, int]]
"""Byte ranges of one output that are digested, each for itself."""


@dataclass(slots=True)
class Made:
    """What became of an output, once the step that gave it is over."""

    raw: torch.Tensor
    """Its bytes in host memory, flat uint8."""
    digests: U64
    buffer: torch.Tensor | None = None
    """To be put back."""


class Lane(Protocol):
    """One place to compute.

    Attributes:
        copies: whether what `place` gives is a copy of the host's bytes.
    """

    copies: bool

    def place(self, raw: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Pending | None]:
        """Host bytes as flat uint8 tensors where `make` wants them. They are the lane's until the pending is done."""
        ...

    def make(
        self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]
    ) -> tuple[list[Made], Pending | None]:
        """Call `run`, digest what it gives, bring it to host memory; all there once the pending is done."""
        ...


class HostLane:
    """Computes where the bytes are."""

    copies = False

    def __init__(self, buffers: Buffers) -> None:
        del buffers

    def place(self, raw: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Pending | None]:
        """See `Lane.place`."""
        return list(raw), None

    def make(
        self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]
    ) -> tuple[list[Made], Pending | None]:
        """See `Lane.make`."""
        made = []
        for tensor, some in zip(run(), pieces, strict=True):
            raw = as_bytes(tensor)
            view, digests = as_view(raw), np.empty(len(some), np.uint64)
            for i, (start, stop) in enumerate(some):
                leaf_digests(view[start:stop], stop - start, digests[i : i + 1])
            made.append(Made(raw, digests))
        return made, None


class CudaLane:
    """Computes on one device."""

    copies = True

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self._buffers, self._device = buffers, device
        self._up, self._work, self._down = (torch.cuda.Stream(device) for _ in range(3))

    def place(self, raw: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Pending | None]:
        """See `Lane.place`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._up), _Room(self._device):
            placed = [torch.empty(len(one), dtype=torch.uint8, device=self._device) for one in raw]
            for there, here in zip(placed, raw, strict=True):
                there.copy_(here, non_blocking=True)
                there.record_stream(self._work)
            return placed, _Passed(self._up)

    def make(
        self, run: Callable[[], Sequence[torch.Tensor]], pieces: Sequence[Pieces]
    ) -> tuple[list[Made], Pending | None]:
        """See `Lane.make`."""
        from penstock.digest.cuda import leaf_digests_cuda

        with torch.cuda.device(self._device), torch.cuda.stream(self._work), _Room(self._device):
            outputs = [as_bytes(tensor) for tensor in run()]
            start = [out.data_ptr() + a for out, some in zip(outputs, pieces, strict=True) for a, _ in some]
            nbytes = [b - a for some in pieces for a, b in some]
            got = leaf_digests_cuda(np.array(start, np.int64), np.array(nbytes, np.int64), self._device)
            self._down.wait_stream(self._work)
        with torch.cuda.device(self._device), torch.cuda.stream(self._down):
            digests = torch.empty(len(nbytes), dtype=torch.int64, pin_memory=True)
            digests.copy_(got, non_blocking=True)
            got.record_stream(self._down)
            made, first = [], 0
            flat = digests.numpy().view(np.uint64)
            for out, some in zip(outputs, pieces, strict=True):
                buffer = self._buffers.get(len(out))
                buffer.copy_(out, non_blocking=True)
                out.record_stream(self._down)
                made.append(Made(buffer, flat[first : first + len(some)], buffer))
                first += len(some)
            return made, _Passed(self._down)


class _Passed:
    """All that was queued on a stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """See `Pending.done`."""
        return bool(self._event.query())


class _Room:
    """The house's error for a device without room."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info(self._device)
            message = f"{self._device} has {free} of {total} bytes free, which a task does not fit in"
            raise DeviceOutOfMemory(message, hint="lower task_bytes or memory_bytes") from error


def as_view(raw: torch.Tensor) -> memoryview:
    """Flat uint8 host memory as a writable view."""
    array: npt.NDArray[np.uint8] = raw.numpy()
    return array.data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, flat; a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
