"""Local files mapped into memory: zero-copy on the CPU.

In: a path. Out: private writable views; ranges brought into the page cache and page tables ahead of use.
Not here: reading into the caller's buffers (`files`), the system calls (`kernel`).
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import weakref

import numpy as np

from penstock.errors import DestinationError, SourceChanged, SourceTruncated
from penstock.storage.kernel import PAGE_BYTES, Mapping, num_pages, resident_pages
from penstock.storage.local import identity_of, open_regular, require_unchanged, typed_error


class MappedFile:
    """A local file whose ranges are mapped, not read: zero-copy on the CPU. Opened by the constructor.

    The mappings are private: the caller's writes never reach the file. They outlive `close`. Two dangers come with
    mapping and are the file owner's to avoid: bytes changed in place show through pages not yet written, and touching
    a page that a truncation took away ends the process with SIGBUS (`prefetch` and `check_unchanged` raise instead).
    Replacing the file by rename is safe.

    Attributes:
        uri, nbytes, identity: see `Source`.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as `FileSource`.
        SourceChanged: `identity` was given and the file is not that one.
    """

    def __init__(self, path: str, *, identity: str = "") -> None:
        self.uri = path
        self._path = os.path.abspath(path)
        self._fd, found = open_regular(path)
        self.nbytes = found.st_size
        self.identity = identity_of(found)
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._mappings: dict[int, weakref.ref[Mapping]] = {}
        if identity and identity != self.identity:
            raise SourceChanged("file was replaced or modified since it was first seen", uri=path)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes `[offset, offset + nbytes)`: writable, private, format "B".

        Ownership: the memoryview alone keeps its mapping; when it and all made from it are gone, the range is unmapped.
        Cost: one mmap(2), about 10 us; no byte is read. A process has vm.max_map_count mappings (65,530 unless raised):
            map slabs, not tensors, when there are tens of thousands.

        Raises:
            SourceTruncated: the range lies outside the file.
            DestinationError: no mapping left, or no address space. SourceUnavailable: this file system cannot map.
        """
        stop = offset + nbytes
        if offset < 0 or nbytes < 0 or stop > self.nbytes:
            raise SourceTruncated(f"file has {self.nbytes} bytes", uri=self.uri, byte_range=(offset, stop))
        if not nbytes:
            return memoryview(bytearray())
        head = offset % PAGE_BYTES
        mapping = self._map(offset - head, nbytes + head)
        with self._lock:
            if offset - head not in self._mappings:
                bisect.insort(self._starts, offset - head)
            self._mappings[offset - head] = weakref.ref(mapping)
        return mapping.bytes()[head:]

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Bring the range into the page cache and into the page tables of the live views of it; any thread.

        Gaps between views are not read; where views overlap, the one that starts last is filled.
        With no view of the range, it goes to the page cache alone.
        Call it with chunks of 8 MiB from two to four threads. Source: benchmarks/results/cpu2_202611/files.md.

        Raises:
            SourceTruncated, SourceChanged, SourceUnavailable: the file ended early, or the device failed.
        """
        stop = min(offset + nbytes, self.nbytes)
        if stop <= offset:
            return
        cold = resident_pages(self._fd, offset, stop - offset) != num_pages(offset, stop - offset)
        mapped = self._mapped(offset, stop)
        if not mapped and cold:
            start = offset - offset % PAGE_BYTES
            mapped = [(self._map(start, stop - start), start)]
        for mapping, base in mapped:
            start = max(offset - offset % PAGE_BYTES - base, 0)
            self._bring_in(mapping, start, min(stop - base, mapping.nbytes) - start, base, cold)

    def check_unchanged(self) -> None:
        """See `FileSource.check_unchanged`."""
        require_unchanged(self._fd, self._path, self.uri, self.identity, self.nbytes)

    def close(self) -> None:
        """Free the descriptor. Idempotent; views live on; no `view` or `prefetch` may be running."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

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

    def _mapped(self, offset: int, stop: int) -> list[tuple[Mapping, int]]:
        """Live mappings that meet the range, with their file offsets; of those that overlap, the last to start."""
        found = []
        with self._lock:
            first = max(bisect.bisect_right(self._starts, offset) - 1, 0)
            for base in self._starts[first : bisect.bisect_left(self._starts, stop)]:
                mapping = self._mappings[base]()
                if mapping is not None and base + mapping.nbytes > offset:
                    found.append((mapping, base))
        return found

    def _bring_in(self, mapping: Mapping, start: int, nbytes: int, base: int, cold: bool) -> None:
        try:
            mapping.populate(start, nbytes)
        except OSError as error:
            require_unchanged(self._fd, None, self.uri, self.identity, self.nbytes)
            raise typed_error(error, self.uri, (base + start, base + start + nbytes)) from error
        if cold:
            # Touching a page that a truncation took away is SIGBUS: ask first.
            require_unchanged(self._fd, None, self.uri, self.identity, self.nbytes)
            # In a virtual machine a page that the device filled still faults at its first use by the CPU, in the
            # host; here that overlaps the disk. Source: benchmarks/results/cpu2_202611/files.md.
            np.asarray(mapping)[start : start + nbytes : PAGE_BYTES].max()
