"""System calls about open files and mappings that Python's `os` does not have.

In: descriptors, ranges in bytes. Out: residency, direct-I/O alignment, mapped memory.
Not here: what is done with the answers (`files`). Elsewhere than Linux every question answers "unknown".
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

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
