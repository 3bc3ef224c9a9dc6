"""Digests of strips of one region's memory, asked for again and again: what a device is told of strips is kept.

In: a region, strips of it. Out: their digests, as the bytes are now.
Not here: what a strip's digest is (`digest.strip`), whether its bytes are ready (`local_version`).

Of a device's memory copied to the host (`sync.publish.snapshot`), the device digests what is asked for, as it is
copied: by what was asked of the version before. A core of the host digests 7 GB/s of it, where the copy takes 55.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from blake3 import blake3

from penstock.digest.strip import Strips, memory_at, strip_digests
from penstock.digest.strip_cuda import SCRATCH_BYTES, StripTable, plan_strips
from penstock.transport.protocol import Memory
from penstock.types import U64

MAX_LEAVES = 1 << 20
"""Leaves whose tables are kept on a device, 256 GiB of them: the tables then take 0.4 GB."""

_NAP_S = 0.0001


class Digester:
    """The digests of one device, or of the host.

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

        Cost: of a device: numpy over leaves the first time; then some launches, and a wait for them. Several threads'
            are queued one behind the other.
        """
        if self._stream is None:
            return strip_digests(memory_at(memory.address, memory.nbytes), strips)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            got = self._table(memory, strips).digest()
            found = torch.empty(len(got), dtype=torch.int64, pin_memory=True).copy_(got, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()
        return np.asarray(found.numpy()).view(np.uint64)

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


def digesters_of(memories: Iterable[Memory]) -> dict[str, Digester]:
    """Return one digester for each device of the memories."""
    return {name: Digester(name) for name in {memory.device for memory in memories}}


class Foreseen:
    """Digests of the host's copy of a memory: those asked for of one version are worked out as the next is copied.

    Args:
        live: what is copied.
        digester: of its device.
    """

    def __init__(self, live: Memory, digester: Digester) -> None:
        self._live, self._digester = live, digester
        self._lock = threading.Lock()
        self._asked: set[bytes] = set()
        self._known: dict[bytes, int] = {}
        """By the columns of a strip."""

    def look(self, stall_s: float) -> None:
        """Digest, where the live memory is, what was asked for since the last look; nothing if that cannot be done.

        Args:
            stall_s: how long what the device's current stream has queued is waited for: the copy waits for it too, and
                says so.

        Order: as the copy is made: after what the device's current stream has queued, before the live bytes change.
        """
        with self._lock:
            asked, self._asked, self._known = sorted(self._asked), set(), {}
        if not asked:
            return
        if self._live.device != "cpu" and not _passed(self._live.device, stall_s):
            return
        at, run_bytes, num_rows, pitch = np.frombuffer(b"".join(asked), np.int64).reshape(-1, 4).T
        strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        try:
            found = self._digester.digests(self._live, strips)
        except torch.OutOfMemoryError as error:
            message = f"no room on {self._live.device} for digests: the host works them out, which is slow: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        with self._lock:
            self._known = dict(zip(asked, found.tolist(), strict=True))

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """See `Digester.digests`; `memory` is the copy. What was not foreseen is digested by the host."""
        rows = np.stack([strips.at, strips.run_bytes, strips.num_rows, strips.pitch], axis=1)
        names = [row.tobytes() for row in rows]
        with self._lock:
            self._asked.update(names)
            known = [self._known.get(name) for name in names]
        out = np.array([one or 0 for one in known], np.uint64)
        missing = np.flatnonzero([one is None for one in known])
        if len(missing):
            out[missing] = strip_digests(memory_at(memory.address, memory.nbytes), strips[missing])
        return out


def _passed(device: str, stall_s: float) -> bool:
    """Return whether the device's current stream comes to its end within this time."""
    event, deadline = torch.cuda.Event(), time.monotonic() + stall_s
    event.record(torch.cuda.current_stream(device))
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_NAP_S)
    return True
