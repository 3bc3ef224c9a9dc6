"""Digests of strips in a rank's memory, computed again for every version.

For a snapshot in host memory, the device computes the digests during the copy (`PrecomputedDigests`). The copy runs at
55 GB/s, but a host core digests only 7 GB/s.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from blake3 import blake3

from penstock.cuda.events import is_passed, record_events
from penstock.digest.cuda import SCRATCH_BYTES, StripTable, plan_strips, warm_up
from penstock.digest.strip import Strips, memory_at, strip_digests
from penstock.errors import DeviceOutOfMemory
from penstock.transport.protocol import Memory
from penstock.types import U64

MAX_LEAVES = 1 << 20
"""Maximum number of leaves whose tables stay on a device. They cover 256 GiB, and the tables take 0.4 GB."""


class Digester:
    """Computes digests of strips on one device or on the host. Creates a stream unless `stream` is passed."""

    def __init__(self, device: str, stream: torch.cuda.Stream | None = None) -> None:
        self._device = torch.device(device)
        # Kernel launches share the scratch memory and the tables.
        self._lock = threading.Lock()
        self._tables: OrderedDict[bytes, StripTable] = OrderedDict()
        self._num_leaves = 0
        self._scratch: torch.Tensor | None = None
        # Kernels that read from peers occupy multiprocessors while they wait, so give digests a higher priority.
        self._stream = _new_stream(device) if stream is None and self._device.type == "cuda" else stream

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digest of each strip, whose offsets the caller has checked.

        On a device, strips may also be in other memory on that device. Bytes are read after the events in `after`.
        """
        if self._stream is None:
            return strip_digests(memory_at(memory.address, memory.nbytes), strips)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Without these events the stream could digest old bytes.
            for event in after:
                self._stream.wait_event(event)
            on_device = self._table(memory, strips).digest()
            on_host = torch.empty(len(on_device), dtype=torch.int64, pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
        return np.asarray(on_host.numpy()).view(np.uint64)

    def warm_up(self) -> None:
        """Load the kernels for digests on a device. Compiling them takes seconds."""
        if self._stream is None:
            return
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm_up(self._device)
            memory, scratch = torch.zeros(2, 1024, dtype=torch.uint8, device=self._device)
            at, run_bytes, num_rows, pitch = np.array([[0], [16], [8], [32]])
            gapped = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            plan_strips(memory.data_ptr(), gapped, self._device, scratch).digest()
        self._stream.synchronize()

    def _table(self, memory: Memory, strips: Strips) -> StripTable:
        # Use the content as key, because each request decodes its strips into new arrays.
        key = blake3(memory.address.to_bytes(8, "little"))
        for column in strips.columns:
            key.update(np.ascontiguousarray(column).view(np.uint8).data)
        name = key.digest()
        table = self._tables.get(name)
        if table is None:
            # One scratch buffer is enough, because all digests on a device run in order on one stream.
            if self._scratch is None and not strips.is_packed().all():
                self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
            scratch = torch.empty(0, device=self._device) if self._scratch is None else self._scratch
            table = self._tables[name] = plan_strips(memory.address, strips, self._device, scratch)
            self._num_leaves += len(table.leaves)
            while self._num_leaves > MAX_LEAVES and len(self._tables) > 1:
                self._num_leaves -= len(self._tables.popitem(last=False)[1].leaves)
        self._tables.move_to_end(name)
        return table


def _new_stream(device: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _stream_of_wholes(device: str) -> torch.cuda.Stream | None:
    # Use one stream per process, because torch reserves the freed 64 MiB of scratch for its stream.
    return _new_stream(device) if device.startswith("cuda") else None


def digesters_of(memories: Iterable[Memory]) -> dict[str, Digester]:
    """Create a digester for each device of the memories."""
    return {name: Digester(name) for name in {memory.device for memory in memories}}


def digests_of(memories: Sequence[Memory]) -> U64:
    """Return one digest per memory. Raise DeviceOutOfMemory unless 64 MiB plus 0.02 % of the memory are free."""
    out = np.empty(len(memories), np.uint64)
    # Use one table per device. With a table for each of 300 parameters, Python took most of the time.
    for device in {memory.device for memory in memories}:
        digester = Digester(device, _stream_of_wholes(device))
        mine = np.flatnonzero([memory.device == device for memory in memories])
        some = [memories[i] for i in mine.tolist()]
        base = min(some, key=lambda memory: memory.address)
        nbytes = max(memory.address + memory.nbytes for memory in some) - base.address
        sizes = np.array([memory.nbytes for memory in some], np.int64)
        strips = Strips(
            at=np.array([memory.address - base.address for memory in some], np.int64),
            run_bytes=sizes,
            num_rows=np.ones(len(some), np.int64),
            pitch=sizes,
        )
        whole = Memory(address=base.address, nbytes=nbytes, device=device, owner=some)
        after = record_events([device] if device.startswith("cuda") else [])
        try:
            out[mine] = digester.digests(whole, strips, after=after)
        except torch.OutOfMemoryError as error:
            message = f"{device} has too little memory for the digests of {int(sizes.sum())} bytes"
            raise DeviceOutOfMemory(message, hint="leave some memory on the device free") from error
    return out


class PrecomputedDigests:
    """Digests for a copy of `live` in host memory. The device computes most digests before the copy is made."""

    def __init__(self, live: Memory, digester: Digester) -> None:
        self._live = live
        self._digester = digester
        self._lock = threading.Lock()
        self._requested: set[bytes] = set()
        self._known: dict[bytes, int] = {}

    def look(self, stall_s: float) -> None:
        """On the device, digest the strips requested since the last call, before the live bytes change."""
        with self._lock:
            requested = sorted(self._requested)
            self._requested = set()
            self._known = {}
        if not requested:
            return
        if self._live.device != "cpu" and not is_passed(record_events([self._live.device])[0], stall_s):
            return
        at, run_bytes, num_rows, pitch = np.frombuffer(b"".join(requested), np.int64).reshape(-1, 4).T
        strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        try:
            digests = self._digester.digests(self._live, strips)
        except torch.OutOfMemoryError as error:
            message = f"too little memory on {self._live.device} for digests, so the host computes them slowly: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        with self._lock:
            self._known = dict(zip(requested, digests.tolist(), strict=True))

    def warm_up(self) -> None:
        """See `Digester.warm_up`."""
        self._digester.warm_up()

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """See `Digester.digests`. The host computes the digests of strips that were not requested before."""
        names = [row.tobytes() for row in np.stack(strips.columns, axis=1)]
        with self._lock:
            self._requested.update(names)
            known = [self._known.get(name) for name in names]
        out = np.array([digest or 0 for digest in known], np.uint64)
        missing = np.flatnonzero([digest is None for digest in known])
        if len(missing):
            out[missing] = strip_digests(memory_at(memory.address, memory.nbytes), strips[missing])
        return out
