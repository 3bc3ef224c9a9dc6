"""Tier in the memory of one GPU: an arena per block, copied to and from host memory on a separate stream."""

from __future__ import annotations

import time
from collections import deque

import torch

from penstock.errors import DestinationError, SourceStalled
from penstock.memory.arena import Arena

_POLL_S = 0.0002
"""Seconds between polls of an event. A piece of 16 MiB takes 0.3 ms over PCIe 5."""


class CudaRoom:
    """A room in an arena on a device. `arena` is None after `close`."""

    def __init__(self, nbytes: int, tier: CudaTier) -> None:
        self.nbytes = nbytes
        self._tier = tier
        self.arena: Arena | None = Arena.allocate(nbytes, tier.device)
        self._bytes: torch.Tensor | None = self.arena.bytes_at(0, nbytes)
        # Torch's allocator orders reuse by stream only, so queued kernels may still use this memory.
        tier.stream.wait_stream(torch.cuda.current_stream(tier.device))
        self._begun: deque[torch.cuda.Event] = deque()

    def write(self, offset: int, data: memoryview) -> None:
        """See `Room.write`."""
        self._copy(offset, data, to_device=True)

    def read(self, offset: int, into: memoryview) -> None:
        """See `Room.read`."""
        self._copy(offset, into, to_device=False)

    def _copy(self, offset: int, data: memoryview, *, to_device: bool) -> None:
        assert self._bytes is not None
        device_bytes = self._bytes[offset : offset + len(data)]
        host_bytes = torch.frombuffer(data, dtype=torch.uint8)
        event = torch.cuda.Event()
        # On the current stream a copy would wait for the kernels of the running model.
        with torch.cuda.stream(self._tier.stream):
            if to_device:
                device_bytes.copy_(host_bytes, non_blocking=True)
            else:
                host_bytes.copy_(device_bytes, non_blocking=True)
            event.record()
        self._begun.append(event)

    def settle(self) -> None:
        """See `Room.settle`."""
        while self._begun:
            event, deadline = self._begun.popleft(), time.monotonic() + self._tier.stall_s
            # Poll, because cudaEventSynchronize has no deadline.
            while not _is_done(event):
                if time.monotonic() > deadline:
                    raise SourceStalled(f"no copy on {self._tier.device} finished in {self._tier.stall_s} s")
                time.sleep(_POLL_S)

    def close(self) -> None:
        """See `Room.close`."""
        # The allocator keeps the memory for the next room until `trim`.
        self.arena = self._bytes = None


class CudaTier:
    """Tier in the memory of one device. A copy fails after `stall_s` seconds without progress."""

    name, unit_bytes, num_threads = "gpu", 1, 1

    def __init__(self, device: torch.device, *, stall_s: float) -> None:
        self.device = device
        self.stall_s = stall_s
        self.stream = torch.cuda.Stream(device)

    def open_room(self, nbytes: int) -> CudaRoom:
        """See `Tier.open_room`."""
        return CudaRoom(nbytes, self)

    def trim(self) -> None:
        """See `Tier.trim`. The driver clears memory that it gets back (benchmarks/results/h200x2_202611/tiers.md)."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Tier.close`."""


def _is_done(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())
    except RuntimeError as error:
        raise DestinationError(f"a copy on the device failed: {error}") from error
