"""What the kernel can be asked about an open file, and its mappings: the calls Python's `os` does not have.

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
from typing import Any

import numpy as np

PAGE_BYTES = mmap.PAGESIZE

# One number on every architecture but alpha. Source: include/uapi/asm-generic/unistd.h, Linux 6.5.
_SYS_CACHESTAT = 451
# Source: include/uapi/linux/stat.h, Linux 6.1: the mask, and where dio_mem_align and dio_offset_align stand.
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIOALIGN_AT = 0x98
_AT_EMPTY_PATH = 0x1000
# Source: include/uapi/asm-generic/mman-common.h; 22 since Linux 5.14.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_LINUX = sys.platform == "linux"
_MAP_FAILED = ctypes.c_void_p(-1).value
_TwoWords = ctypes.c_uint64 * 2
_FiveWords = ctypes.c_uint64 * 5


def resident_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Pages of `[offset, offset + nbytes)` in the page cache, without blocking and without starting I/O.

    None where the kernel will not say: before Linux 6.5, on hugetlbfs, or (since 6.15) on a file that the caller
    neither owns nor may write.

    Cost: one system call, about 3 us, plus 10 ns a cached folio.
    """
    if not _LINUX:
        return None
    answer = _FiveWords()
    asked = _TwoWords(offset, nbytes)
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, ctypes.byref(asked), ctypes.byref(answer), 0):
        return None
    return int(answer[0])


def num_pages(offset: int, nbytes: int) -> int:
    """Pages that `[offset, offset + nbytes)` touches."""
    return (offset + nbytes + PAGE_BYTES - 1) // PAGE_BYTES - offset // PAGE_BYTES


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """(address, offset) alignment in bytes that direct I/O on this file needs; (0, 0): it has none; None: unknown."""
    statx = getattr(_libc, "statx", None) if _LINUX else None
    if statx is None:
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return None
    mask: int = struct.unpack_from("=I", found, 0)[0]
    if not mask & _STATX_DIOALIGN:
        return None
    address, offset = struct.unpack_from("=II", found, _STATX_DIOALIGN_AT)
    return int(address), int(offset)


def address_of(buffer: memoryview) -> int:
    """Address of the first byte of a writable buffer of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Mapping:
    """Bytes of a file in this process's address space: private, writable, unmapped when the last reference goes.

    numpy reads it through `__array_interface__`, so an array or memoryview made of it keeps it alive. The `mmap`
    module is not used because it holds a duplicate descriptor per mapping: a thousand tensors, a thousand files.

    Raises:
        OSError: as mmap(2): ENOMEM when vm.max_map_count mappings exist, ENODEV when the file system cannot map.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        found = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)
        if found == _MAP_FAILED:
            raise _os_error()
        self.address: int = found
        self.nbytes = nbytes
        # Not __del__: while that runs, another thread still gets the object from a weak reference. At exit the
        # mappings stay, since tensors may be in use until the very end.
        weakref.finalize(self, _libc.munmap, found, nbytes).atexit = False
        if _LINUX:
            # On a file mapping: read ahead in 2 MiB folios, whatever read_ahead_kb is. Refused without THP; no loss.
            _libc.madvise(found, nbytes, _MADV_HUGEPAGE)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def bytes(self) -> memoryview:
        """The mapping's bytes: writable, format "B"; the memoryview keeps the mapping alive."""
        return memoryview(np.asarray(self).data)

    def populate(self, start: int, nbytes: int) -> bool:
        """Read `nbytes` from page-aligned `start` on and map them, as if each page were read; nothing is copied.

        Returns:
            False where the kernel has no such call (before Linux 5.14); nothing was done then.

        Raises:
            OSError: EFAULT when the file now ends before the range, or the device failed; ENOMEM.
        """
        if not _LINUX:
            return False
        if _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_READ) == 0:
            return True
        error = _os_error()
        if error.errno == errno.EINVAL:
            return False
        raise error


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
