"""Input side of one load: the number and size of reads under way, the staging they pass through, the ring.

In: settings, the device, whether the sources are remote. Out: a `StagingPool` and a `Uring`, each made on request.
Not here: what is read (`session`), the reading (`engine`), the pool itself (`memory.staging`).
"""

from __future__ import annotations

import os
import threading

import torch

from penstock.config import Settings
from penstock.engine.choose_place import registrar_of
from penstock.errors import BudgetTooSmall
from penstock.memory.staging import Registrar, StagingPool
from penstock.storage import is_remote
from penstock.storage.io_uring import Uring, refusal
from penstock.storage.locate import texts_of
from penstock.storage.objects import FETCH_THREADS as REMOTE_FETCH_THREADS
from penstock.storage.weight_set import Uris

MIN_CHUNK_BYTES = 64 << 10
"""Below this a read costs more in system calls and Python than in bytes. Source: docs/tuning.md."""

PAGE_BYTES = 4096
"""Reads are aligned to this for direct I/O. Source: statx(2) STATX_DIOALIGN of today's devices is at most this."""

MAX_LOCAL_READS = 12
"""Reads of local files under way at once into a device's staging: 12-14 x 8 MiB come nearest the link (53 of 55.5).
Source: benchmarks/results/h200x1_202611/load.md, "Why goals are missed"."""

MAX_GROUP_READS = 12
"""The same where several ranks of one host read at once. Source: benchmarks/results/h200x4_202611/load.md."""

MAX_DIRECT_READS = 16
"""The same from a disk: 16 x 1 MiB in flight read 3.7 to 4.1 GB/s where 12 gave 3.4 to 3.9 and 12 x 8 MiB 3.0 to 3.7.
Source: benchmarks/results/h200x1_202611/load.md, row c."""

GROUP_CHUNKS = 2
"""Divisor of the chunk size in that case: what all ranks stage should stay in the processor's cache, or every byte
crosses its memory three times; smaller ones cost more Python than that saves. Source: the same page."""

SPARE_BUFFERS = 8
"""Staging buffers beyond the one that each reader fills: what waits for the device or is being copied."""

WARM_ABOVE_BYTES = 1 << 30
"""Weight sets on local files from here on have their staging touched and pinned ahead: it takes some 10 ms."""

WARM_THREADS = 2
"""Threads that touch and pin staging ahead of its first use; more of them hold up the thread that reads the headers, by
the GIL and the address space's lock: 4 cost it 4 ms, 8 cost 13. Source: benchmarks/results/h200x1_202611/load.md."""


class Intake:
    """The staging and the ring of one load, sized by its device and sources. `close` gives the pool back.

    Attributes:
        is_remote: whether a source is on the network; set before the first read.
        local_world_size: processes that read on this host at the same time, as part of the same load.
        ring_refusal: why the kernel gives no ring, once `open_ring` was refused one.
    """

    def __init__(self, settings: Settings, device: torch.device, local_world_size: int = 1) -> None:
        self._settings, self._device = settings, device
        self.is_remote = False
        self.local_world_size = local_world_size
        self.ring_refusal = ""
        self._pool: StagingPool | None = None
        self._peak_bytes = 0

    @property
    def num_reads(self) -> int:
        """Return the reads under way at once, by threads or by the ring's workers."""
        if self._settings.fetch_threads:
            return self._settings.fetch_threads
        if self.is_remote:
            return REMOTE_FETCH_THREADS
        cores = len(os.sched_getaffinity(0))
        if self._device.type == "cpu":
            # Two to four threads bring a mapped file in fastest. Source: benchmarks/results/cpu2_202611/files.md.
            return min(4, max(2, cores))
        if self.local_world_size > 1:
            return max(2, min(MAX_GROUP_READS, cores * 3 // 4 // self.local_world_size))
        # A quarter of the cores is left to the thread that places chunks, and to the program itself.
        return max(2, min(MAX_LOCAL_READS, cores * 3 // 4))

    @property
    def num_direct_reads(self) -> int:
        """Return the same for bytes that are not in the page cache."""
        if self._settings.fetch_threads or self.is_remote or self._device.type == "cpu" or self.local_world_size > 1:
            return self.num_reads
        return max(self.num_reads, min(MAX_DIRECT_READS, len(os.sched_getaffinity(0))))

    @property
    def chunk_bytes(self) -> int:
        """Return the largest read, which a staging buffer holds. BudgetTooSmall if `memory_bytes` cannot hold four."""
        wanted, memory_bytes = self._settings.chunk_bytes, self._settings.memory_bytes
        if self.local_world_size > 1 and self._device.type == "cuda":
            wanted //= GROUP_CHUNKS
        # At least four buffers: with fewer, reading and copying wait for each other.
        chunk = min(wanted, memory_bytes // 4) // PAGE_BYTES * PAGE_BYTES
        if chunk < MIN_CHUNK_BYTES:
            raise BudgetTooSmall(
                f"memory_bytes={memory_bytes} leaves chunks of {chunk} bytes", minimum_bytes=4 * MIN_CHUNK_BYTES
            )
        return chunk

    @property
    def pool(self) -> StagingPool | None:
        """Return the staging, where there is any."""
        return self._pool

    @property
    def peak_bytes(self) -> int:
        """Return the most staging in use at once, of a closed pool too."""
        return self._peak_bytes if self._pool is None else self._pool.peak_bytes

    def open_pool(self, registrar: Registrar | None) -> StagingPool:
        """Make the pool, as large as keeps readers and device busy; the intake closes it."""
        enough = (self.num_reads + SPARE_BUFFERS) * self.chunk_bytes
        self._pool = StagingPool(min(self._settings.memory_bytes, enough), self.chunk_bytes, registrar=registrar)
        return self._pool

    def warm(self, uri: Uris) -> None:
        """For large local files and a GPU, make the pool now: it is touched and pinned while headers are read."""
        if self._device.type == "cuda" and _local_nbytes(uri) > WARM_ABOVE_BYTES:
            self.open_pool(registrar_of(self._device)).warm(WARM_THREADS)

    def open_ring(self) -> Uring | None:
        """Return a ring for files in the page cache, the caller's to close; None where it is not wanted or refused."""
        if self.is_remote or not self._settings.io_uring:
            return None
        self.ring_refusal = refusal()
        if self.ring_refusal:
            return None
        try:
            return Uring(2 * self.num_reads)
        except OSError as error:
            self.ring_refusal = f"io_uring: {error.strerror}"
            return None

    def close(self, *, wait: bool = False) -> None:
        """Give the pool back; every run that uses it must be closed. Idempotent.

        Args:
            wait: return when it is unpinned, which takes milliseconds; else a thread does it, which is joined at exit.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self._peak_bytes = pool.peak_bytes
        pool.cancel()
        if wait:
            pool.close()
        else:
            # Not a daemon: the process must not end while the driver unpins.
            threading.Thread(target=pool.close, name="penstock-unpin").start()


def _local_nbytes(uri: Uris) -> int:
    """Return the bytes of the safetensors files of a local path, roughly; 0 where that takes more than a look."""
    uris = texts_of(uri)
    if len(uris) != 1 or is_remote(uris[0]):
        return 0
    path = uris[0]
    try:
        if os.path.isfile(path):
            return os.path.getsize(path)
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".safetensors"))
    except OSError:
        return 0
