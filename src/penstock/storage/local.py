"""Local files: opened as regular files only, told from changed ones, and the typed error for each refusal.

In: paths and descriptors. Out: open descriptors, `FileState`s, errors.
Not here: reading (`files`), mapping (`mapped`).

System calls about open files and mappings that Python's `os` does not have.

In: descriptors, ranges in bytes. Out: residency, direct-I/O alignment, mapped memory.
Not here: what is done with the answers (`files`). Elsewhere than Linux every question answers "unknown".

Local files mapped into memory: zero-copy on the CPU.

In: a path. Out: private writable views; ranges brought into the page cache and page tables ahead of use.
Not here: reading into the caller's buffers (`files`), the system calls (`page_cache`).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock import lifecycle
from penstock.errors import (
    DestinationError,
    FormatError,
    NotFound,
    PenstockError,
    PermissionDenied,
    SourceChanged,
    SourceError,
    SourceTruncated,
    SourceUnavailable,
)
from penstock.types import MIB

_COARSE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", 5)
"""The clock that the kernel stamps files with. Source: clock_gettime(2); Python has no name for it."""

_SETTLE_S = 1.0
"""How long an open waits for a file that is written to again and again. Reason: that is no finished checkpoint."""

_TICK_S = 0.001
"""Pause between looks at the clock, whose tick is 1 to 10 ms (CONFIG_HZ)."""

_HINT = "load it when nobody writes to it; to replace a file, write a new one and rename it"


@dataclass(frozen=True, slots=True)
class FileState:
    """The parts of fstat(2) that tell one content of a file from another."""

    dev: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    """Set by the kernel alone: it shows a write after which the modification time was put back (rsync, cp -p)."""
    access: tuple[int, int, int, int]
    """Mode, owner, group, links: a change of these sets `ctime_ns` too and changes no byte."""

    @property
    def identity(self) -> str:
        """`dev:inode:mtime_ns:size`, see `Source.identity`."""
        return f"{self.dev}:{self.inode}:{self.mtime_ns}:{self.nbytes}"

    def same_content(self, other: FileState) -> bool:
        """Return whether nothing was written to the file between the two."""
        if self.identity != other.identity:
            return False
        return self.ctime_ns == other.ctime_ns or self.access != other.access


def state_of(result: os.stat_result) -> FileState:
    """Return the parts of a stat result that matter here."""
    return FileState(
        dev=result.st_dev,
        inode=result.st_ino,
        nbytes=result.st_size,
        mtime_ns=result.st_mtime_ns,
        ctime_ns=result.st_ctime_ns,
        access=(result.st_mode, result.st_uid, result.st_gid, result.st_nlink),
    )


def open_regular(path: str) -> tuple[int, FileState]:
    """Open a regular file for reading, once no write to it is under way.

    O_NONBLOCK so that a pipe without a writer does not hang.

    Raises:
        NotFound, PermissionDenied: as their names say.
        SourceUnavailable: a directory, pipe, socket or device, or opening failed.
        SourceChanged: it is being written to, for `_SETTLE_S` now.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise typed_error(error, path, None) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise SourceUnavailable(f"not a regular file but a {kind}", uri=path)
        return fd, _settled(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _settled(fd: int, path: str) -> FileState:
    """Return the file's state at a moment when every write that comes later will change it.

    A write sets the times when it begins, and then copies for as long as it takes: one of gigabytes may be under way
    with times that will not change again. SEEK_DATA waits for the inode's lock, which a write holds (ext4, btrfs,
    tmpfs; on XFS reads themselves wait). A second write in the same tick of the kernel's clock would leave the times
    as they are, so wait for the tick to pass.
    """
    deadline = time.monotonic() + _SETTLE_S
    before = state_of(os.fstat(fd))
    while True:
        with contextlib.suppress(OSError):  # ENXIO: an empty file; EINVAL: this file system has no SEEK_DATA
            os.lseek(fd, 0, os.SEEK_DATA)
        state = state_of(os.fstat(fd))
        # A time far ahead is another clock's (a file server's): its tick cannot be waited for.
        ahead_ns = state.ctime_ns - time.clock_gettime_ns(_COARSE_CLOCK)
        if state == before and not 0 <= ahead_ns < 1_000_000_000:
            return state
        if time.monotonic() > deadline:
            raise SourceChanged("file is being written to", uri=path, hint=_HINT)
        if state == before:
            time.sleep(_TICK_S)
        before = state


def require_unchanged(fd: int, path: str | None, uri: str, state: FileState) -> None:
    """Raise if the open file, or the file now at `path` if one is given, is not the one of `state`."""
    try:
        current = state_of(os.fstat(fd))
        now = current if path is None else state_of(os.stat(path))
    except FileNotFoundError as error:
        raise SourceChanged("file was removed since it was opened", uri=uri) from error
    except OSError as error:
        raise typed_error(error, uri, None) from error
    # Before the test for a change, which a truncation is too: this error names the bytes that are gone.
    if current.nbytes < state.nbytes:
        message = f"file had {state.nbytes} bytes when it was opened and has {current.nbytes} now"
        raise SourceTruncated(message, uri=uri, byte_range=(current.nbytes, state.nbytes))
    if not state.same_content(current):
        raise SourceChanged("file was modified since it was opened", uri=uri, hint=_HINT)
    if now.identity != state.identity:
        raise SourceChanged("file was replaced since it was opened", uri=uri)


def read_bounded(path: str, max_bytes: int) -> bytes:
    """Return all of a small regular file (an index, a manifest, a key).

    Raises:
        FormatError: it has more than `max_bytes`. SourceChanged: it was written to meanwhile. Others: `open_regular`.
    """
    fd, state = open_regular(path)
    try:
        if state.nbytes > max_bytes:
            raise FormatError(f"{state.nbytes} bytes are too many; at most {max_bytes} are read", uri=path)
        parts, left = [], state.nbytes
        # read(2) gives at most 2 GiB at once, and may give less on a network file system.
        while left and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        require_unchanged(fd, None, path, state)
    except PenstockError:
        raise
    except OSError as error:
        raise typed_error(error, path, None) from error
    finally:
        os.close(fd)
    return b"".join(parts)


def typed_error(error: OSError, uri: str, byte_range: tuple[int, int] | None) -> SourceError:
    """Map an OSError of a local file to a SourceError."""
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return NotFound("no such file", uri=uri, byte_range=byte_range)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return PermissionDenied("the file mode forbids reading", uri=uri, byte_range=byte_range)
    return SourceUnavailable(f"{error.strerror or error}", uri=uri, byte_range=byte_range)


PAGE_BYTES = mmap.PAGESIZE
# 2 MiB: on x86-64, and with 4 KiB pages on aarch64.
_HUGE_PAGE_BYTES = 2 << 20
_RESERVED_BYTES = 1 << 30
"""Of a file at once: 0.3 s in tmpfs, whose pages are made then."""

# One number on every architecture but alpha. Source: include/uapi/asm-generic/unistd.h, Linux 6.5.
_SYS_CACHESTAT = 451
# Source: include/uapi/linux/stat.h, Linux 6.1: the mask, and where dio_mem_align and dio_offset_align stand.
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIOALIGN_AT = 0x98
_AT_EMPTY_PATH = 0x1000
# Source: include/uapi/asm-generic/mman-common.h; 22 since Linux 5.14.
_MADV_POPULATE_READ = 22
# Not in Python 3.11's mmap. MAP_NORESERVE: a file larger than memory may be mapped; MAP_FIXED: over what is there.
# Source: include/uapi/asm-generic/mman.h; macOS: sys/mman.h.
_LINUX = sys.platform == "linux"
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000 if _LINUX else 0x40

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
if _LINUX:
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_MAP_FAILED = ctypes.c_void_p(-1).value
_TwoWords = ctypes.c_uint64 * 2
_FiveWords = ctypes.c_uint64 * 5


def resident_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Return the pages of a range that are in the page cache, without blocking and without starting I/O.

    None where the kernel will not say: before Linux 6.5, on hugetlbfs, or (since 6.15) on a file that the caller
    neither owns nor may write.

    Cost: one system call, about 3 us, plus 10 ns a cached folio.
    """
    if not _LINUX:
        return None
    answer = _FiveWords()
    byte_range = _TwoWords(offset, nbytes)
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(byte_range), ctypes.byref(answer), 0):
        return None
    return int(answer[0])


def reserve(fd: int, nbytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Make a file `nbytes` long at least, with room for all of it, unless `is_over` says to stop.

    A file system that promises no room (NFS before 4.2, ZFS, ramfs) gives it the length alone: there the C library's
    `posix_fallocate` would write to every page.

    Raises:
        OSError: there is no room; the file may have some of it.
    """
    for at in range(0, nbytes, _RESERVED_BYTES):
        # Looked at for every GiB: one call for the whole file would take seconds in tmpfs.
        if is_over():
            return
        code = _fallocate(fd, at, min(_RESERVED_BYTES, nbytes - at))
        if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
            os.ftruncate(fd, max(nbytes, os.fstat(fd).st_size))
            return
        if code:
            raise OSError(code, os.strerror(code))


def _fallocate(fd: int, offset: int, nbytes: int) -> int:
    if not _LINUX:
        return errno.ENOSYS
    while _libc.fallocate(fd, 0, offset, nbytes):
        # A signal ends a long fallocate; what it reserved stays, and the next call goes on.
        if (code := ctypes.get_errno()) != errno.EINTR:
            return code
    return 0


def num_pages(offset: int, nbytes: int) -> int:
    """Return the number of pages that `[offset, offset + nbytes)` touches."""
    return (offset + nbytes + PAGE_BYTES - 1) // PAGE_BYTES - offset // PAGE_BYTES


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """Return the (address, offset) alignment that direct I/O on this file needs; (0, 0): it has none; None: unknown."""
    statx = getattr(_libc, "statx", None) if _LINUX else None
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    mask: int = struct.unpack_from("=I", answer, 0)[0]
    # A kernel may have statx without this field; the mask says which fields it filled.
    if not mask & _STATX_DIOALIGN:
        return None
    address, offset = struct.unpack_from("=II", answer, _STATX_DIOALIGN_AT)
    return int(address), int(offset)


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of a writable buffer of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Mapping:
    """A range of a file in this process's address space: private, writable; unmapped when the last reference goes.

    Not by the `mmap` module, which holds a duplicate descriptor for each mapping.

    Raises:
        OSError: as mmap(2): ENOMEM when vm.max_map_count mappings exist or there is no address space, ENODEV when the
            file system cannot map.
    """

    __slots__ = ("__weakref__", "_reserved", "address", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        # The addresses belong to an mmap object of no file, which is unmapped by C code when this goes: no moment is
        # left at which a signal could keep the mapping from being freed, as it can between a call and Python's note of
        # it, and in a finalizer written in Python. The file is mapped over them.
        slack = _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = mmap.mmap(-1, nbytes + slack, flags=flags, prot=_PROT_NONE)
        start = int(np.frombuffer(self._reserved, np.uint8).ctypes.data)
        # Where the kernel would put the file: its huge pages then fit those of the address space.
        self.address = start + ((offset - start) % _HUGE_PAGE_BYTES if slack else 0)
        self.nbytes = nbytes
        access = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(self.address, nbytes, access, mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED, fd, offset)

    def pages(self, start: int, nbytes: int) -> tuple[int, int]:
        """Return address and length of the whole pages of a part."""
        first = -(-(self.address + start) // PAGE_BYTES) * PAGE_BYTES
        return first, max(0, (self.address + start + nbytes) // PAGE_BYTES * PAGE_BYTES - first)


class _GivenUp(weakref.ref["Part"]):
    """A weak reference that is a C int of 0 to ctypes: what a function of C gets as callback of the reference."""

    __slots__ = ()
    _as_parameter_ = 0


class Part:
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


def _mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped_at: int = _libc.mmap(address, nbytes, access, flags, fd, offset)
    if mapped_at == _MAP_FAILED:
        raise _os_error()
    return mapped_at


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


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
            with lifecycle.postponed():
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
