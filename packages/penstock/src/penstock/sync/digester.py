"""Digests of strips of a rank's memory, computed again for every version.

In: memory of a device or of the host, and strips of it. Out: a digest of each strip, of the bytes as they are now.
Not here: the kernels (`digest.cuda`), when the bytes may be read (`local_version`).

A `Digester` keeps the tables of strips on the device. For a snapshot in host memory (`PrecomputedDigests`) the device
computes the digests while it copies: a host core digests 7 GB/s, and the copy runs at 55 GB/s.
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

from penstock.cuda.events import is_passed
from penstock.digest.cuda import SCRATCH_BYTES, StripTable, plan_strips, warm_up
from penstock.digest.strip import Strips, memory_at, strip_digests
from penstock.errors import DeviceOutOfMemory
from penstock.transport.protocol import Memory
from penstock.types import U64

MAX_LEAVES = 1 << 20
"""Digests whose tables are kept on a device: they cover 256 GiB of leaves, and their tables take 0.4 GB."""


class Digester:
    """The computation of strip digests on one device, or on the host.

    Args:
        device: the device of the memory.
        stream: of that device, for the kernels; None: a new one.
    """

    def __init__(self, device: str, stream: torch.cuda.Stream | None = None) -> None:
        self._device = torch.device(device)
        # Held while launches are queued: the scratch memory and the tables are shared.
        self._lock = threading.Lock()
        # The least recently used first.
        self._tables: OrderedDict[bytes, StripTable] = OrderedDict()
        self._num_leaves = 0
        self._scratch: torch.Tensor | None = None
        # A higher priority than reads: kernels of a read wait for the link and occupy multiprocessors meanwhile, so
        # that digests behind them would run at the speed of the link.
        self._stream = _new_stream(device) if stream is None and self._device.type == "cuda" else stream

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """Return the digest of each strip; offsets count from the memory's start, and were checked by the caller.

        Args:
            memory: on a device, strips may lie in memory of its device beyond it.
            after: events that the device must have passed before it reads the memory.

        Cost: on a device, numpy over the leaves the first time; later some launches and a wait for them. Calls of
            several threads are queued one behind the other.
        """
        if self._stream is None:
            return strip_digests(memory_at(memory.address, memory.nbytes), strips)
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # This stream does not see the kernels that fill the memory: without the events it would digest old bytes.
            for event in after:
                self._stream.wait_event(event)
            on_device = self._table(memory, strips).digest()
            on_host = torch.empty(len(on_device), dtype=torch.int64, pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        # Outside the lock: another thread may queue its launches while the device works on these.
        done.synchronize()
        return np.asarray(on_host.numpy()).view(np.uint64)

    def warm_up(self) -> None:
        """Load the kernels of a device's digests; where they must be compiled first, this takes seconds."""
        if self._stream is None:
            return
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm_up(self._device)
            # Strips with gaps are packed by a kernel of their own before they are digested.
            memory, scratch = torch.zeros(2, 1024, dtype=torch.uint8, device=self._device)
            at, run_bytes, num_rows, pitch = np.array([[0], [16], [8], [32]])
            gapped = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
            plan_strips(memory.data_ptr(), gapped, self._device, scratch).digest()
        self._stream.synchronize()

    def _table(self, memory: Memory, strips: Strips) -> StripTable:
        """Return the strips' table on the device, made at their first request."""
        # Keyed by content, not by identity: each request decodes its strips into new arrays.
        key = blake3(memory.address.to_bytes(8, "little"))
        for column in (strips.at, strips.run_bytes, strips.num_rows, strips.pitch):
            key.update(np.ascontiguousarray(column).view(np.uint8).data)
        name = key.digest()
        table = self._tables.get(name)
        if table is None:
            # Only strips with gaps need scratch memory. One per device is enough: all digests run on one stream, in
            # order.
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
    """Return the stream of all calls of `digests_of` for a device; None: it has no streams."""
    # One for the process: torch keeps the 64 MiB of scratch that a call frees, for its stream.
    return _new_stream(device) if device.startswith("cuda") else None


def digesters_of(memories: Iterable[Memory]) -> dict[str, Digester]:
    """Return one digester for each device of the memories."""
    return {name: Digester(name) for name in {memory.device for memory in memories}}


def digests_of(memories: Sequence[Memory]) -> U64:
    """Return one digest for each whole memory, in their order, of the bytes that the current streams leave there.

    Raises:
        DeviceOutOfMemory: a device has no room for the tables of the digests: 0.02 % of the bytes, and 64 MiB.

    Cost: one table, one set of launches and one wait for each device. Of 300 parameters of their own memory, each with
        a table and a wait, most of the time was Python's.
    """
    out = np.empty(len(memories), np.uint64)
    for device in {memory.device for memory in memories}:
        digester = Digester(device, _stream_of_wholes(device))
        mine = np.flatnonzero([memory.device == device for memory in memories])
        some = [memories[i] for i in mine.tolist()]
        # Offsets count from the lowest address. What lies between the memories is not read.
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
        after = []
        if device.startswith("cuda"):
            after = [torch.cuda.Event()]
            after[0].record(torch.cuda.current_stream(device))
        try:
            out[mine] = digester.digests(whole, strips, after=after)
        except torch.OutOfMemoryError as error:
            message = f"{device} has no room for the digests of {int(sizes.sum())} bytes"
            raise DeviceOutOfMemory(message, hint="leave some memory of the device free") from error
    return out


class PrecomputedDigests:
    """Digests of a host copy: strips requested of one version are digested on the device while the next is copied.

    Args:
        live: the device memory that is copied.
        digester: the digester of its device.
    """

    def __init__(self, live: Memory, digester: Digester) -> None:
        self._live = live
        self._digester = digester
        self._lock = threading.Lock()
        # Strips by the bytes of their four columns: requested of this version, and digested of it.
        self._requested: set[bytes] = set()
        self._known: dict[bytes, int] = {}

    def look(self, stall_s: float) -> None:
        """Digest on the device the strips requested since the last call; leave them to the host where that fails.

        Args:
            stall_s: how long to wait for the work queued on the device's current stream: the copy waits for it too, and
                reports the error.

        Order: during the copy: after the work queued on the device's current stream, before the live bytes change.
        """
        # The known digests are of the version before and must go, whatever happens below.
        with self._lock:
            requested = sorted(self._requested)
            self._requested = set()
            self._known = {}
        if not requested:
            return
        # The optimizer's step may still be queued: a digest before it would be of the old bytes.
        if self._live.device != "cpu":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._live.device))
            if not is_passed(event, stall_s):
                return
        at, run_bytes, num_rows, pitch = np.frombuffer(b"".join(requested), np.int64).reshape(-1, 4).T
        strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
        try:
            digests = self._digester.digests(self._live, strips)
        except torch.OutOfMemoryError as error:
            message = (
                f"not enough memory on {self._live.device} for digests; the host computes them, which is slow: {error}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        with self._lock:
            self._known = dict(zip(requested, digests.tolist(), strict=True))

    def warm_up(self) -> None:
        """See `Digester.warm_up`."""
        self._digester.warm_up()

    def digests(self, memory: Memory, strips: Strips, *, after: Sequence[torch.cuda.Event] = ()) -> U64:
        """See `Digester.digests`; `memory` is the copy. The host digests strips that were not requested before."""
        rows = np.stack([strips.at, strips.run_bytes, strips.num_rows, strips.pitch], axis=1)
        names = [row.tobytes() for row in rows]
        with self._lock:
            self._requested.update(names)
            known = [self._known.get(name) for name in names]
        out = np.array([digest or 0 for digest in known], np.uint64)
        missing = np.flatnonzero([digest is None for digest in known])
        if len(missing):
            out[missing] = strip_digests(memory_at(memory.address, memory.nbytes), strips[missing])
        return out
