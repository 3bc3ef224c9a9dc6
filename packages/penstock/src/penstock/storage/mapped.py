"""Local files mapped into memory: zero-copy on the CPU.

In: a path. Out: private writable views; ranges brought into the page cache and page tables ahead of use.
Not here: reading into the caller's buffers (`files`), opening and checking the file (`local`).

Three levels, each freed by the one above it: a `Mapping` is a range of the process's address space, a `MappedRange` is
the bytes of one view in it, and a `MappedFile` hands views out. Every release may happen in a finalizer, between any
two instructions of any thread, so it is done by C code wherever a signal could otherwise be lost.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import DestinationError, SourceChanged, SourceTruncated
from penstock.storage.local import PAGE_BYTES, FileState, LocalFile, num_pages, resident_pages, typed_error
from penstock.types import MIB

_LINUX = sys.platform == "linux"
# 2 MiB: on x86-64, and with 4 KiB pages on aarch64.
_HUGE_PAGE_BYTES = 2 * MIB
# Source: include/uapi/asm-generic/mman-common.h; 22 since Linux 5.14.
_MADV_POPULATE_READ = 22
# Not in Python 3.11's mmap. MAP_NORESERVE: a file larger than memory may be mapped; MAP_FIXED: over what is there.
# Source: include/uapi/asm-generic/mman.h; macOS: sys/mman.h.
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000 if _LINUX else 0x40

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class MappedFile(LocalFile):
    """A local file whose ranges are mapped, not read: zero-copy on the CPU. Opened by the constructor.

    The mappings are private: the caller's writes never reach the file. They outlive `close`. Two dangers come with
    mapping and are the file owner's to avoid: bytes changed in place show through pages not yet written, and touching
    a page that a truncation took away ends the process with SIGBUS (`prefetch` and `check_unchanged` raise instead).
    Replacing the file by rename is safe.

    Raises:
        NotFound, PermissionDenied, SourceUnavailable: as `LocalFile`.
        SourceChanged: `state` was given and the file is not that one, or was written to since.
    """

    def __init__(self, path: str, *, state: FileState | None = None) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        # One mapping of the whole file, so that its 2 MiB pages serve every view; it lives while a view of it does.
        self._whole: weakref.ref[Mapping] | None = None
        # Views handed out of it: they never overlap, so all three lists are in file order.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._parts: list[weakref.ref[MappedRange]] = []
        # Whether a range was ever not in the page cache; see `prefetch`.
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
            # mmap(2) refuses a length of 0.
            return memoryview(bytearray())
        with self._lock:
            at = self._place(offset, stop)
            if at is None:
                start = offset - offset % PAGE_BYTES
                part = MappedRange(self._map(start, stop - start), offset - start, nbytes)
                # After the mapping, not before: a write between a check and the mapping would go unseen.
                self.require_unmodified()
                return part.bytes()
            mapping, index = at
            part = MappedRange(mapping, offset, nbytes)
            self._starts.insert(index, offset)
            self._stops.insert(index, stop)
            # Weakly: a view ends with the caller's last reference to it, not with the file.
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
        # Once cold, always cold: readahead counts as cached before it has arrived, and runs ahead of the caller.
        cold = self._cold = self._cold or not self._is_cached(offset, stop)
        parts = self._live(offset, stop) or ([self._scratch(offset, stop)] if cold else [])
        for part, base in parts:
            start = max(offset - base, 0)
            nbytes = min(stop - base, part.nbytes) - start
            if cold:
                self.read_ahead(base + start, nbytes)
            self._populate(part, start, nbytes, base)
            if cold:
                self._touch(part, start, nbytes)
        self.require_unmodified()

    def is_ready(self) -> bool:
        """Return whether the whole file is in the page cache: there is nothing to bring in, touching it costs the same.

        Cost: one system call, 10 ns a cached folio. Nothing is read.
        """
        return not self.nbytes or self._is_cached(0, self.nbytes)

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
            except DestinationError:
                # Too little address space for the whole file; there may be enough for the view alone.
                return None
            self._whole = weakref.ref(whole)
            # A view keeps its mapping alive, and the mapping is gone: no view of it is left.
            self._starts = []
            self._stops = []
            self._parts = []
        index = bisect.bisect_left(self._starts, stop)
        return None if index and self._stops[index - 1] > offset else (whole, index)

    def _live(self, offset: int, stop: int) -> list[tuple[MappedRange, int]]:
        """Return the live parts that meet the range, with their file offsets."""
        with self._lock:
            first, last = bisect.bisect_right(self._stops, offset), bisect.bisect_left(self._starts, stop)
            parts = [(self._parts[i](), self._starts[i]) for i in range(first, last)]
        # None: its view is gone. The entry stays: its pages were given up, so the range must not be handed out again.
        return [(part, base) for part, base in parts if part is not None]

    def _scratch(self, offset: int, stop: int) -> tuple[MappedRange, int]:
        """Return a mapping of the range for the time of one call, and its file offset."""
        start = offset - offset % PAGE_BYTES
        return MappedRange(self._map(start, stop - start), 0, stop - start), start

    def _populate(self, part: MappedRange, start: int, nbytes: int, base: int) -> None:
        try:
            part.populate(start, nbytes)
        except OSError as error:
            # EFAULT is what a truncated file gives too: then its change is the error, and not the failed read.
            self.require_unmodified()
            raise typed_error(error, self.uri, (base + start, base + start + nbytes)) from error

    def _touch(self, part: MappedRange, start: int, nbytes: int) -> None:
        """Read a byte of each page."""
        # In a virtual machine a page that the device filled faults once more, in the host, at its first use by the CPU;
        # here that overlaps the disk. Source: benchmarks/results/cpu2_202611/files.md.
        # First the check: to touch a page that a truncation took away is SIGBUS, which ends the process.
        self.require_unmodified()
        np.asarray(part)[start : start + nbytes : PAGE_BYTES].max()


class Mapping:
    """A range of a file in this process's address space: private, writable; unmapped when the last reference goes.

    Raises:
        OSError: as mmap(2): ENOMEM when vm.max_map_count mappings exist or there is no address space, ENODEV when the
            file system cannot map.
    """

    __slots__ = ("__weakref__", "_reserved", "address", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        # Not the file itself by the `mmap` module, which holds a duplicate descriptor for each mapping. The addresses
        # belong to an mmap object of no file, which is unmapped by C code when this goes: no moment is left at which a
        # signal could keep the mapping from being freed, as it can between a call and Python's note of it, and in a
        # finalizer written in Python. The file is mapped over them.
        slack = _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = mmap.mmap(-1, nbytes + slack, flags=flags, prot=_PROT_NONE)
        start = int(np.frombuffer(self._reserved, np.uint8).ctypes.data)
        # Where the kernel would put the file: its huge pages then fit those of the address space.
        self.address = start + ((offset - start) % _HUGE_PAGE_BYTES if slack else 0)
        self.nbytes = nbytes
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        if _libc.mmap(self.address, nbytes, access, flags, fd, offset) == _MAP_FAILED:
            raise _os_error()

    def pages(self, start: int, nbytes: int) -> tuple[int, int]:
        """Return address and length of the whole pages of a part."""
        first = -(-(self.address + start) // PAGE_BYTES) * PAGE_BYTES
        return first, max(0, (self.address + start + nbytes) // PAGE_BYTES * PAGE_BYTES - first)


class _GivenUp(weakref.ref["MappedRange"]):
    """A weak reference that ctypes passes as a C int of 0, so that a function of C can be its callback."""

    __slots__ = ()
    _as_parameter_ = 0


class MappedRange:
    """Bytes of a mapping, of one owner: when the last reference goes, their pages are given up.

    numpy reads it through `__array_interface__`, so an array or memoryview made of it keeps it alive.
    """

    __slots__ = ("__weakref__", "_given_up", "_mapping", "address", "nbytes")

    def __init__(self, mapping: Mapping, start: int, nbytes: int) -> None:
        self._mapping = mapping
        self.address = mapping.address + start
        self.nbytes = nbytes
        first, length = mapping.pages(start, nbytes)
        if length:
            # mmap(2) itself is the callback (its seventh argument, the reference, is ignored): Python runs handlers of
            # signals when a function of its own begins, and in a finalizer drops what they raise, so Ctrl-C would be
            # lost and the pages kept. The addresses stay reserved, so nothing else moves in. An object keeps its
            # references until their callbacks were called; should the garbage collector drop both, the pages wait for
            # the end of the mapping.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            self._given_up = _GivenUp(self, partial(_libc.mmap, first, length, _PROT_NONE, flags, -1, 0))

    # Not `memoryview(...)` of a ctypes array: that would not keep this object alive.
    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def bytes(self) -> memoryview:
        """Return the bytes, writable, format "B"; the memoryview keeps the part alive."""
        return memoryview(np.asarray(self).data)

    def populate(self, start: int, nbytes: int) -> bool:
        """Read `nbytes` from `start` on and map them, as if each page were read; nothing is copied.

        Returns:
            False where the kernel has no such call (before Linux 5.14); nothing was done then.

        Raises:
            OSError: EFAULT when the file now ends before the range, or the device failed; ENOMEM.
        """
        if not _LINUX:
            return False
        # madvise(2) takes page-aligned addresses only; bringing in the rest of the first page is one page at most.
        head = (self.address + start) % PAGE_BYTES
        if _libc.madvise(self.address + start - head, nbytes + head, _MADV_POPULATE_READ) == 0:
            return True
        error = _os_error()
        if error.errno == errno.EINVAL:
            return False
        raise error


def _os_error() -> OSError:
    """Return the error of the last call of C in this thread."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
