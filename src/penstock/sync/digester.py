"""Digests of strips of one region's memory, asked for again and again: what a device is told of strips is kept.

In: a region, strips of it. Out: their digests, as the bytes are now.
Not here: what a strip's digest is (`digest.strip`), whether its bytes are ready (`held`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3

from penstock.digest.strip import Strips, memory_at, strip_digests
from penstock.digest.strip_cuda import SCRATCH_BYTES, StripTable, plan_strips
from penstock.transport.protocol import Memory
from penstock.types import U64

MAX_LEAVES = 1 << 20
"""Leaves whose tables are kept on a device, 256 GiB of them: the tables then take 0.4 GB."""


class Digester:
    """One device's, or the host's. One call at a time.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._tables: OrderedDict[bytes, StripTable] = OrderedDict()
        self._num_leaves = 0
        self._scratch: torch.Tensor | None = None
        # Before reads: their kernels wait for the link, and hold the processors meanwhile.
        self._stream = torch.cuda.Stream(device, priority=-1) if self._device.type == "cuda" else None

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """The digest of each strip; offsets count from the memory's start, and were checked.

        Args:
            after: what the device must have passed before.

        Cost: of a device: numpy over leaves the first time; then some launches, and a wait for them.
        """
        if self._stream is None:
            return strip_digests(memory_at(memory.address, memory.nbytes), strips)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            got = self._table(memory, strips).digest()
            return np.asarray(got.cpu().numpy()).view(np.uint64)

    def _table(self, memory: Memory, strips: Strips) -> StripTable:
        key = blake3(memory.address.to_bytes(8, "little"))
        for column in (strips.at, strips.run_bytes, strips.num_rows, strips.pitch):
            key.update(np.ascontiguousarray(column).view(np.uint8).data)
        name = key.digest()
        found = self._tables.get(name)
        if found is None:
            if self._scratch is None and not strips.is_packed().all():
                self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
            scratch = torch.empty(0, device=self._device) if self._scratch is None else self._scratch
            found = self._tables[name] = plan_strips(memory.address, strips, self._device, scratch)
            self._num_leaves += len(found.leaves)
            while self._num_leaves > MAX_LEAVES and len(self._tables) > 1:
                self._num_leaves -= len(self._tables.popitem(last=False)[1].leaves)
        self._tables.move_to_end(name)
        return found
