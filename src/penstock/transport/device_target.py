"""Transports into device memory that peers cannot read by it: what those that copy from host memory share.

In: addresses of host memory that is pinned. Out: its bytes on our device, in place when the call returns.
Not here: whose memory it is and how it comes to be pinned (`staged`, `pinned`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from penstock.cuda.driver import CudaDriver, load_driver, ordinal
from penstock.cuda.streams import StreamPools, never_freed
from penstock.errors import ConfigError, DestinationError, PenstockError
from penstock.segments import Segments
from penstock.transport.descriptor import Descriptor
from penstock.transport.generation_table import GenerationTable
from penstock.transport.host_endpoint import Endpoint, IntoHandle
from penstock.transport.protocol import Handle, Memory


class IntoDevice:
    """Nothing is registered with it but to be read into.

    Args:
        name: of the transport.
        source: name of the transport whose descriptors it takes.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: no CUDA driver.
    """

    nap_s: ClassVar[float]
    """Between two looks at a copy."""

    def __init__(self, name: str, source: str, driver: CudaDriver | None) -> None:
        self.name, self._source_name = name, source
        self._driver = load_driver() if driver is None else driver
        self._endpoint = Endpoint(name, GenerationTable.create())
        self._lanes = StreamPools(self._driver, num_streams=1)
        self._lock = threading.Lock()
        self._is_stuck = False

    def register(self, memory: Memory) -> Handle:
        """ConfigError: it shows no memory to peers."""
        raise ConfigError(f"{self.name} only reads into memory")

    def register_into(self, memory: Memory) -> IntoHandle:
        """Device memory to read into. ConfigError for the host's; Cancelled if the transport is closed."""
        ordinal(memory.device)
        self._endpoint.check_open()
        return IntoHandle(self._endpoint, memory)

    def _check(self, into: Handle, source: Descriptor) -> IntoHandle:
        """Our own open handle. ConfigError: it or the descriptor is another transport's. Cancelled: it is closed."""
        is_mine = isinstance(into, IntoHandle) and into.endpoint is self._endpoint
        if source.transport != self._source_name or not is_mine:
            raise ConfigError(f"{source.transport} descriptor or foreign handle given to {self.name}")
        assert isinstance(into, IntoHandle)
        into.check_open()
        return into

    def copy(self, into: IntoHandle, base: int, rows: Segments, stall_s: float, *, keep: object) -> None:
        """Copy host memory from `base` on, which `keep` keeps alive; returns once it is there. Raises as `queued`."""
        dst = rows.dst.astype(np.uint64) + np.uint64(into.memory.address)
        src = rows.src.astype(np.uint64) + np.uint64(base)
        nbytes = rows.nbytes.astype(np.uint64)
        self.queued(into, lambda device, stream: self._driver.copy(dst, src, nbytes, stream), stall_s, keep=keep)

    def queued(self, into: IntoHandle, queue: Callable[[int, int], None], stall_s: float, *, keep: object) -> None:
        """Queue copies of memory that `keep` keeps alive, on a stream of the device; returns once they are made.

        Args:
            queue: given the device and the stream; with the device's context entered.

        Raises:
            DestinationError: the device failed, or copied nothing for `stall_s`: both memories are kept for good, and
                `mutated` is true.
        """
        driver, device = self._driver, ordinal(into.memory.device)
        deadline = time.monotonic() + stall_s
        with driver.entered(device):
            # Queue under the lock, wait without it: a pool of streams and events serves one thread at a time, but
            # copies of several threads run at once.
            with self._lock:
                self._endpoint.check_open()
                lane = self._lanes.of(device)
                event, stream = lane.take_event(), lane.take_stream()
                with self._used(into, keep):
                    queue(device, stream)
                    driver.record(event, stream)
            with self._used(into, keep):
                while not driver.is_done(event):
                    if time.monotonic() > deadline:
                        raise DestinationError(f"cuda:{device} copied nothing for {stall_s} s")
                    time.sleep(self.nap_s)
            with self._lock:
                lane.give_event(event)

    @contextmanager
    def _used(self, *memories: object) -> Iterator[None]:
        """Keep the memories for good if the block ends early, because the device may still copy then."""
        try:
            yield
        except BaseException as error:
            # A copy on a device cannot be cancelled. Freed memory could be used again while it is still written.
            self._is_stuck = True
            never_freed.append((self, *memories))
            if isinstance(error, PenstockError):
                error.mutated = True
            raise

    def _close_lanes(self) -> None:
        """Order: the endpoint is closed. Does nothing where a device may still copy."""
        with self._lock:
            if not self._is_stuck:
                self._lanes.close()


def batches(rows: Segments, most: int) -> Iterator[Segments]:
    """Yield the rows in batches of at most `most` bytes, with long rows cut."""
    if not len(rows.nbytes):
        return
    cut, start, room = rows.cut(most), 0, most
    for stop, nbytes in enumerate([*cut.nbytes.tolist(), most + 1]):
        if nbytes > room:
            yield cut[start:stop]
            start, room = stop, most
        room -= nbytes
