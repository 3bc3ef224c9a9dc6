"""Local files mapped into memory, for zero-copy use on the CPU."""

from __future__ import annotations

import bisect
import errno
import threading
import weakref
from typing import Self

import numpy as np

from penstock.errors import DestinationError, SourceChanged, SourceTruncated
from penstock.memory.mapping import MappedRange, Mapping
from penstock.storage.local import PAGE_BYTES, FileState, LocalFile, num_pages, resident_pages, typed_error


class MappedFile(LocalFile):
    """A local file whose ranges are mapped instead of read, for zero-copy use on the CPU.

    The private mappings outlive `close`, and the caller's writes never reach the file. If another process changes the
    file in place, pages that the caller did not write show the change. Touching a page that a truncation removed kills
    the process with SIGBUS (`prefetch` and `check_unchanged` raise instead). Replacing the file by rename is safe.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: see `LocalFile`.
        SourceChanged: the file was replaced after the given `state` was recorded, or was written to.
    """

    def __init__(self, path: str, fd: int, state: FileState) -> None:
        super().__init__(path, fd, state)
        self._lock = threading.Lock()
        # One mapping of the whole file, with pages of 2 MiB, serves all views.
        self._whole: weakref.ref[Mapping] | None = None
        # Views of the whole mapping. Views never overlap, so all three lists are in file order.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._views: list[weakref.ref[MappedRange]] = []
        # Whether a range was ever absent from the page cache.
        self._cold = False

    @classmethod
    def open(cls, path: str, *, state: FileState | None = None) -> Self:
        """See `LocalFile.open`. Raises SourceChanged if the file no longer matches a given `state`."""
        file = super().open(path)
        if state is not None and not state.same_content(file.state):
            file.close()
            raise SourceChanged("the file was replaced or modified after it was first opened", uri=path)
        return file

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable, private view of `[offset, offset + nbytes)`, with format "B".

        The pages are freed once the memoryview and all objects made from it are gone. A second view of the same bytes
        gets a separate mapping.

        A view takes about 10 us. Each gap left by a dropped view, and each further view of the same bytes, uses one to
        three of the process's vm.max_map_count mappings (65,530 by default).

        Raises:
            SourceTruncated: the range is outside the file.
            SourceChanged: the file was written to after it was opened.
            DestinationError: the process has no mappings or address space left.
            SourceUnavailable: this file system cannot map files.
        """
        stop = offset + nbytes
        if offset < 0 or nbytes < 0 or stop > self.nbytes:
            raise SourceTruncated(f"range outside the {self.nbytes}-byte file", uri=self.uri, byte_range=(offset, stop))
        if not nbytes:
            # mmap(2) rejects a length of 0.
            return memoryview(bytearray())
        with self._lock:
            at = self._place(offset, stop)
            if at is None:
                start = offset - offset % PAGE_BYTES
                part = MappedRange(self._map(start, stop - start), offset - start, nbytes)
                # Check after mapping, because an earlier check would miss a write in between.
                self.require_unmodified()
                return part.bytes()
            mapping, index = at
            part = MappedRange(mapping, offset, nbytes)
            self._starts.insert(index, offset)
            self._stops.insert(index, stop)
            # Only the caller's references keep a view alive.
            self._views.insert(index, weakref.ref(part))
        self.require_unmodified()
        return part.bytes()

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Read the range into the page cache, and into the page tables of its live views. Thread-safe.

        Gaps between views are skipped. Call this for chunks of 8 MiB from two to four threads. Source:
        benchmarks/results/cpu2_202611/files.md.
        """
        stop = min(offset + nbytes, self.nbytes)
        if stop <= offset:
            return
        # A cold file stays cold, because pages count as cached before readahead has filled them.
        cold = self._cold = self._cold or not self._is_cached(offset, stop)
        parts = self._live(offset, stop)
        if cold and not parts:
            start = offset - offset % PAGE_BYTES
            parts = [(MappedRange(self._map(start, stop - start), 0, stop - start), start)]
        for part, base in parts:
            start = max(offset - base, 0)
            nbytes = min(stop - base, part.nbytes) - start
            if cold:
                self.read_ahead(base + start, nbytes)
            try:
                part.populate(start, nbytes)
            except OSError as error:
                # A truncated file also causes EFAULT, so check for a change first.
                self.require_unmodified()
                raise typed_error(error, self.uri, (base + start, base + start + nbytes)) from error
            if cold:
                # Touching a page that a truncation removed would kill the process.
                self.require_unmodified()
                # In a virtual machine, the CPU's first access to a page faults again in the host. Reading one byte of
                # each page overlaps these faults with disk reads. Source: benchmarks/results/cpu2_202611/files.md.
                np.asarray(part)[start : start + nbytes : PAGE_BYTES].max()
        self.require_unmodified()

    def is_ready(self) -> bool:
        """Return whether the whole file is in the page cache, so that prefetching would gain nothing."""
        return not self.nbytes or self._is_cached(0, self.nbytes)

    def _is_cached(self, start: int, stop: int) -> bool:
        return resident_pages(self._fd, start, stop - start) == num_pages(start, stop - start)

    def _map(self, start: int, nbytes: int) -> Mapping:
        try:
            return Mapping.map(self._fd, start, nbytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise DestinationError(
                    "the process has no mappings or address space left",
                    uri=self.uri,
                    hint="raise vm.max_map_count, or load with copy=True",
                ) from error
            raise typed_error(error, self.uri, (start, start + nbytes)) from error

    def _place(self, offset: int, stop: int) -> tuple[Mapping, int] | None:
        """Return the file's mapping and the index for a new view, or None if a live view overlaps."""
        whole = self._whole() if self._whole is not None else None
        if whole is None:
            try:
                whole = self._map(0, self.nbytes)
            except DestinationError:
                # The address space may be too small for the whole file, but not for the view.
                return None
            self._whole = weakref.ref(whole)
            # Every view keeps its mapping alive, so the old mapping has no views.
            self._starts, self._stops, self._views = [], [], []
        index = bisect.bisect_left(self._starts, stop)
        return None if index and self._stops[index - 1] > offset else (whole, index)

    def _live(self, offset: int, stop: int) -> list[tuple[MappedRange, int]]:
        with self._lock:
            first, last = bisect.bisect_right(self._stops, offset), bisect.bisect_left(self._starts, stop)
            parts = [(self._views[i](), self._starts[i]) for i in range(first, last)]
        # Keep the entries of dropped views, because their addresses must not be used again.
        return [(part, base) for part, base in parts if part is not None]
