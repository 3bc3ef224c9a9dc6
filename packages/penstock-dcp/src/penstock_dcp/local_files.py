"""Reads parts of a load from local files into host memory, with little Python time for each small tensor.

    one run of bytes, same dtype  --pread--> the target's memory
    columns, another dtype, ...   --copy--> the target, from a mapping of the file

Before a copy from a mapping, the kernel prefetches missing pages, so that one thread can keep a disk busy. `loader.run`
reads remote files, and files with tensors for a device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import accumulate

import numpy as np
import torch

from penstock import interrupts
from penstock.engine.check import Checker
from penstock.engine.place import Bytes
from penstock.loader.session import LoadSession
from penstock.loader.tensor import as_bytes, as_tensor
from penstock.plan.schedule import LoadPlan
from penstock.storage.files import FileSource
from penstock.storage.mapped import MappedFile
from penstock.types import MIB
from penstock.waits import Threads
from penstock_dcp.checkpoint import table_of
from penstock_dcp.parts import FilePart

_READ_BYTES = 8 * MIB
"""Maximum size of a read in bytes. Interrupts are handled between reads."""

_AHEAD_BYTES = 32 * MIB
"""Number of bytes to request from the disk ahead of the current read."""

_THREAD_BYTES = 16 * MIB
"""Minimum number of bytes for each thread. Starting and joining a thread costs about as much as copying 1 MiB."""

_MAX_THREADS = 4
"""Maximum number of threads. Further threads would only wait for the kernel's lock on the address space. Source:
`Intake.num_reads`."""

_LOOK_S = 1.0
"""Interval in seconds at which the caller checks the reading threads."""

_Work = tuple[int, FilePart, int, int, bool]
"""A tuple of a part's number, the part, and the three values of its `span`."""


def num_threads(num_ranks: int) -> int:
    """Return the number of read threads for one rank: a share of the cores, because all ranks may be on this host."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_ranks))


class _Mapped:
    """A mapping of a whole file. The file is unmapped when the last reference to its view is gone."""

    def __init__(self, source: FileSource, file: MappedFile) -> None:
        self.source = source
        self.file = file
        self.view = file.view(0, source.nbytes)


class LocalFill:
    """A load of parts from local files into host memory.

    Attributes:
        nbytes: size of all parts in bytes.
        moved_bytes: number of bytes that have been written to their targets.
    """

    def __init__(self, session: LoadSession, parts: Sequence[FilePart]) -> None:
        self._session = session
        self._sources = [source for source in session.weights.sources if isinstance(source, FileSource)]
        spans = [part.span() for part in parts]
        plan = _plan(parts)
        self._memories: list[Bytes | None] = [None] * len(parts)
        self._checker: Checker | None = session.checker(plan, self)
        self._slabs: list[int] = plan.row_slab.tolist()
        self._work = [
            (number, part, *span) for number, (part, span) in enumerate(zip(parts, spans, strict=True)) if span[1]
        ]
        self.nbytes = plan.nbytes
        self.moved_bytes = 0
        self._is_copied = False
        self._fills_tensors = not all(part.row.is_bytes for part in parts)
        # The lock protects the byte counts and the I/O paths if there are several threads.
        self._lock = threading.Lock()
        self._is_stopped = False

    def slab(self, index: int) -> Bytes:
        """Return the stored bytes of a complete part, for the digest check."""
        memory = self._memories[index]
        assert memory is not None
        return memory

    def run(self, threads: int) -> None:
        """Read, check and deliver every part. Use only the calling thread if there are few bytes.

        Raises:
            PenstockError: the read failed. `session.is_touched` tells whether a target may have been modified.
        """
        total = sum(span for _, _, _, span, _ in self._work)
        count = max(1, min(threads, total // _THREAD_BYTES))
        received = [source.received_bytes for source in self._sources]
        try:
            if count == 1:
                self._fill(self._work)
                return
            # Assign neighbouring parts to the same thread, so that each thread reads its files from beginning to end.
            before = accumulate((span for _, _, _, span, _ in self._work), initial=0)
            groups: list[list[_Work]] = [[] for _ in range(count)]
            for work, at in zip(self._work, before, strict=False):
                groups[at * count // total].append(work)
            with Threads(count, "penstock-fill", waits_for_calls=True) as pool:
                self._wait([pool.submit(self._fill, group) for group in groups])
        finally:
            is_read = received != [source.received_bytes for source in self._sources]
            self._session.is_touched = self._is_copied or (is_read and self._fills_tensors)

    def _wait(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for all threads to stop, and then raise the first error or a pending interrupt."""
        try:
            while wait(jobs, interrupts.longest_wait_s(_LOOK_S)).not_done:
                interrupts.raise_if_noted()
            for job in jobs:
                job.result()
        except BaseException:
            self._is_stopped = True
            raise

    def _fill(self, work: Sequence[_Work]) -> None:
        ahead = asked_bytes = done_bytes = 0
        paths: dict[tuple[int, str], int] = {}
        mapped: _Mapped | None = None
        try:
            for number, part, offset, nbytes, is_run in work:
                while ahead < len(work) and asked_bytes - done_bytes < _AHEAD_BYTES:
                    _, later, start, span, _ = work[ahead]
                    if (source := self._sources[later.row.file]).cached_fd(start, span) is None:
                        source.read_ahead(start, span)
                    asked_bytes += span
                    ahead += 1
                if self._is_stopped:
                    return
                memory = part.memory() if is_run else None
                if part.row.is_bytes:
                    memory = torch.empty(nbytes, dtype=torch.uint8)
                if memory is None:
                    # Map one file at a time, because the pages of a mapping count towards the process's memory.
                    if mapped is None or mapped.source is not self._sources[part.row.file]:
                        source = self._sources[part.row.file]
                        mapped = _Mapped(source, MappedFile.open(source.uri, state=source.state))
                    path = self._copy(mapped, number, part, offset, nbytes)
                else:
                    path = self._read(number, part, offset, memory)
                key = part.row.file, path
                paths[key] = paths.get(key, 0) + nbytes
                done_bytes += nbytes
                with self._lock:
                    self.moved_bytes += nbytes
        except BaseException:
            self._is_stopped = True
            raise
        finally:
            with self._lock:
                for key, count in paths.items():
                    self._session.paths[key] = self._session.paths.get(key, 0) + count

    def _read(self, number: int, part: FilePart, offset: int, memory: torch.Tensor) -> str:
        """Read a contiguous run directly into its destination. Return the I/O path that was used."""
        source, array = self._sources[part.row.file], memory.numpy()
        path, view = "", array.data
        for at in range(0, len(array), _READ_BYTES):
            interrupts.raise_if_noted()
            if self._is_stopped:
                return path
            path = source.read_through(offset + at, view[at : at + _READ_BYTES])
        self._check(number, part, array)
        if part.row.is_bytes or len(part.targets) > 1:
            part.deliver(memory)
        return path

    def _copy(self, mapped: _Mapped, number: int, part: FilePart, offset: int, nbytes: int) -> str:
        """Copy a box from a mapping of its file, because the box is not contiguous or its dtype or strides differ.

        Return the I/O path that was used.
        """
        interrupts.raise_if_noted()
        row = part.row
        # Prefetch the pages, because an unreadable page raises an error here and would cause SIGBUS in the copy.
        for at in range(offset, offset + nbytes, _READ_BYTES):
            mapped.file.prefetch(at, min(_READ_BYTES, offset + nbytes - at))
        raw = as_bytes(mapped.view[row.offset : row.offset + row.nbytes])
        if part.box is None:
            self._check(number, part, raw.numpy())
        stored = as_tensor(raw, row.dtype, row.shape)
        if part.box is not None:
            stored = stored[tuple(map(slice, part.box.start, part.box.stop))]
        self._is_copied = True
        part.deliver_tensor(stored)
        mapped.file.require_unmodified()
        return "mmap"

    def _check(self, number: int, part: FilePart, stored: Bytes) -> None:
        """Compare a whole tensor with its digests. Raise IntegrityError if a digest differs."""
        if self._checker is not None and part.box is None:
            self._memories[self._slabs[number]] = stored
            self._checker.check([self._slabs[number]])
            self._memories[self._slabs[number]] = None


def _plan(parts: Sequence[FilePart]) -> LoadPlan:
    """Return a load plan without reads, in which each non-empty part is a separate slab."""
    table = table_of([part.row for part in parts])
    boxes = tuple(part.box for part in parts)
    widths = [dtype.bits for dtype in table.dtypes]
    sizes = [
        nbytes if box is None else box.num_elements * bits // 8
        for nbytes, box, bits in zip(table.nbytes.tolist(), boxes, widths, strict=True)
    ]
    row_nbytes = np.array(sizes, np.int64)
    has_bytes = row_nbytes > 0
    none = np.zeros(0, np.int64)
    return LoadPlan(
        table=table,
        boxes=boxes,
        row_slab=np.where(has_bytes, np.cumsum(has_bytes) - 1, -1),
        row_offset=np.zeros(len(parts), np.int64),
        row_nbytes=row_nbytes,
        slab_nbytes=row_nbytes[has_bytes],
        read_file=none,
        read_offset=none,
        read_nbytes=none,
        seg_first=np.zeros(1, np.int64),
        seg_src=none,
        seg_slab=none,
        seg_dst=none,
        seg_run=none,
        seg_rows=none,
        seg_pitch=none,
    )
