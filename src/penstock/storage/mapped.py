"""Local files mapped into memory: zero-copy on the CPU.

In: a path. Out: private writable views; ranges brought into the page cache and page tables ahead of use.
Not here: reading into the caller's buffers (`files`), the system calls (`page_cache`).
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import weakref

import numpy as np

from penstock import interrupt
from penstock.errors import DestinationError, SourceChanged, SourceTruncated
from penstock.storage.local import FileState, open_regular, require_unchanged, typed_error
from penstock.storage.page_cache import PAGE_BYTES, Mapping, Part, num_pages, resident_pages
from penstock.types import MIB

# 2 MiB: the kernel's own step of forced readahead, which also bounds one call by read_ahead_kb. Source: mm/readahead.c.
_WILLNEED_BYTES = 2 * MIB


class MappedFile:
    """A local file whose ranges are mapped, not read: zero-copy on the CPU. Opened by the constructor.

    The mappings are private: the caller's writes never reach the file. They outlive `close`. Two dangers come with
    mapping and are the file owner's to avoid: bytes changed in place show through pages not yet written, and touching
    a page that a truncation took away ends the process with SIGBUS (`prefetch` and `check_unchanged` raise instead).
    Replacing the file by rename is safe.

    Attributes:
        uri, nbytes, identity: see `Source`.
        state: see `FileSource`.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as `FileSource`.
        SourceChanged: `state` was given and the file is not that one, or was written to since.
    """

    def __init__(self, path: str, *, state: FileState | None = None) -> None:
        self.uri = path
        self._path = os.path.abspath(path)
        self._fd, self.state = open_regular(path)
        self.nbytes, self.identity = self.state.nbytes, self.state.identity
        self._lock = threading.Lock()
        # One mapping of the whole file, so that its 2 MiB pages serve every view; it lives while a view of it does.
        self._whole: weakref.ref[Mapping] | None = None
        # Views handed out of it: they never overlap, so all three lists are in file order.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._parts: list[weakref.ref[Part]] = []
        self._cold = False
        if state is not None and not state.same_content(self.state):
            self.close()
            raise SourceChanged("file was replaced or modified since it was first seen", uri=path)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes `[offset, offset + nbytes)`: writable, private, format "B".

        Ownership: the memoryview alone keeps its range; when it and all made of it are gone, its pages are freed,
            and the last view's end unmaps the file. A second view of bytes that were viewed gets a mapping of its own.
        Cost: about 10 us; no byte is read. Each gap that dropped views leave, and each second view, is one of the
            process's vm.max_map_count mappings (65,530 unless raised); one of 2 MiB or more takes up to three.

        Raises:
            SourceTruncated: the range lies outside the file. SourceChanged: it was written to since it was opened.
            DestinationError: no mapping left, or no address space. SourceUnavailable: this file system cannot map.
        """
        stop = offset + nbytes
        if offset < 0 or nbytes < 0 or stop > self.nbytes:
            raise SourceTruncated(f"file has {self.nbytes} bytes", uri=self.uri, byte_range=(offset, stop))
        if not nbytes:
            return memoryview(bytearray())
        with self._lock:
            at = self._place(offset, stop)
            if at is None:
                start = offset - offset % PAGE_BYTES
                part = Part(self._map(start, stop - start), offset - start, nbytes)
                # After the mapping, not before: a write between a check and the mapping would go unseen.
                self.require_unmodified()
                return part.bytes()
            mapping, index = at
            part = Part(mapping, offset, nbytes)
            self._starts.insert(index, offset)
            self._stops.insert(index, stop)
            self._parts.insert(index, weakref.ref(part))
        self.require_unmodified()
        return part.bytes()

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Bring the range into the page cache and into the page tables of the live views of it; any thread.

        Gaps between views are not read, and of views that overlap only the first is filled. Without a view
        the range goes to the page cache alone.
        Call it with chunks of 8 MiB from two to four threads. Source: benchmarks/results/cpu2_202611/files.md.

        Raises:
            SourceTruncated, SourceChanged, SourceUnavailable: the file ended early, or the device failed.
        """
        stop = min(offset + nbytes, self.nbytes)
        if stop <= offset:
            return
        # Once cold, always: readahead counts as cached before it has arrived, and runs ahead of the caller.
        cold = self._cold = self._cold or not self._is_cached(offset, stop)
        parts = self._live(offset, stop) or ([self._scratch(offset, stop)] if cold else [])
        for part, base in parts:
            start = max(offset - base, 0)
            nbytes = min(stop - base, part.nbytes) - start
            if cold:
                self._read_ahead(base + start, nbytes)
            self._populate(part, start, nbytes, base)
            if cold:
                self._touch(part, start, nbytes)
        self.require_unmodified()

    def is_ready(self) -> bool:
        """Return whether the whole file is in the page cache: there is nothing to bring in, touching it costs the same.

        Cost: one system call, 10 ns a cached folio. Nothing is read.
        """
        return not self.nbytes or self._is_cached(0, self.nbytes)

    def check_unchanged(self) -> None:
        """See `FileSource.check_unchanged`."""
        require_unchanged(self._fd, self._path, self.uri, self.state)

    def require_unmodified(self) -> None:
        """See `FileSource.require_unmodified`."""
        require_unchanged(self._fd, None, self.uri, self.state)

    def close(self) -> None:
        """Free the descriptor. Idempotent; views live on; no `view` or `prefetch` may be running."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with interrupt.postponed():
                self.close()

    def _is_cached(self, start: int, stop: int) -> bool:
        return resident_pages(self._fd, start, stop - start) == num_pages(start, stop - start)

    def _map(self, start: int, nbytes: int) -> Mapping:
        try:
            return Mapping(self._fd, start, nbytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise DestinationError(
                    "no mapping or address space left",
                    uri=self.uri,
                    hint="raise vm.max_map_count, or load with copy=True",
                ) from error
            raise typed_error(error, self.uri, (start, start + nbytes)) from error

    def _place(self, offset: int, stop: int) -> tuple[Mapping, int] | None:
        """Return the mapping of the whole file and the index for a new part; None if bytes of it were viewed before."""
        whole = self._whole() if self._whole is not None else None
        if whole is None:
            try:
                whole = self._map(0, self.nbytes)
            except DestinationError:  # too little address space for the file; there may be enough for the view
                return None
            self._whole = weakref.ref(whole)
            # A view keeps its mapping alive, and the mapping is gone: no view of it is left.
            self._starts, self._stops, self._parts = [], [], []
        index = bisect.bisect_left(self._starts, stop)
        return None if index and self._stops[index - 1] > offset else (whole, index)

    def _live(self, offset: int, stop: int) -> list[tuple[Part, int]]:
        """Return the live parts that meet the range, with their file offsets."""
        with self._lock:
            first, last = bisect.bisect_right(self._stops, offset), bisect.bisect_left(self._starts, stop)
            parts = [(self._parts[i](), self._starts[i]) for i in range(first, last)]
        # None: its view is gone. The entry stays: its pages were given up, so the range must not be handed out again.
        return [(part, base) for part, base in parts if part is not None]

    def _scratch(self, offset: int, stop: int) -> tuple[Part, int]:
        """Return a mapping of the range for the time of one call, and its file offset."""
        start = offset - offset % PAGE_BYTES
        return Part(self._map(start, stop - start), 0, stop - start), start

    def _read_ahead(self, offset: int, nbytes: int) -> None:
        """Fill the page cache, in single pages and in calls that read_ahead_kb does not cut short.

        Not by faults that read 2 MiB folios (MADV_HUGEPAGE), though they take a tenth of the CPU: those folios come
        out of large free blocks, which a virtual machine has given back to its host, and getting them again takes
        three times as long as the disk. Source: benchmarks/results/cpu2_202611/files.md.
        """
        for start in range(offset, offset + nbytes, _WILLNEED_BYTES):
            os.posix_fadvise(self._fd, start, min(_WILLNEED_BYTES, offset + nbytes - start), os.POSIX_FADV_WILLNEED)

    def _populate(self, part: Part, start: int, nbytes: int, base: int) -> None:
        try:
            part.populate(start, nbytes)
        except OSError as error:
            self.require_unmodified()
            raise typed_error(error, self.uri, (base + start, base + start + nbytes)) from error

    def _touch(self, part: Part, start: int, nbytes: int) -> None:
        """Read a byte of each page.

        In a virtual machine a page that the device filled faults once more, in the host, at its first use by the CPU;
        here that overlaps the disk. Source: benchmarks/results/cpu2_202611/files.md.
        """
        # A page that a truncation took away is SIGBUS: ask first.
        self.require_unmodified()
        np.asarray(part)[start : start + nbytes : PAGE_BYTES].max()
