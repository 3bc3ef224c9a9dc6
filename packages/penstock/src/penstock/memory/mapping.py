"""Ranges of the address space that are mapped from files and shared memory.

C code unmaps a `Mapping` and frees a `MappedRange`, because a signal handler's exception would be lost in a Python
finalizer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.types import MIB

_LINUX = sys.platform == "linux"
HUGE_PAGE_BYTES = 2 * MIB
"""Size of a huge page on x86-64, and on aarch64 with 4 KiB pages."""
# Available since Linux 5.14. Source: include/uapi/asm-generic/mman-common.h.
_MADV_POPULATE_READ = 22
# Flags that Python 3.11's mmap lacks. MAP_NORESERVE allows files larger than memory. Source:
# include/uapi/asm-generic/mman.h; macOS: sys/mman.h.
_MAP_FIXED = 0x10
_PROT_NONE = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE = 0x4000 if _LINUX else 0x40

libc: Any = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MmapT = TypeVar("_MmapT", bound=mmap.mmap)


def map_aligned(
    kind: type[_MmapT], fd: int, prot: int, flags: int, nbytes: int = 0, offset: int = 0
) -> tuple[_MmapT, int, int]:
    """Map a range of a file, by default all. Return a buffer, the start in it, and the address. Raises OSError."""
    # Map the file over an anonymous reservation, which C code unmaps. An mmap of the file would hold a duplicate
    # descriptor. With a direct call of mmap(2), a signal could arrive before Python stores the address.
    nbytes = nbytes or os.fstat(fd).st_size
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    reserved = kind(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, prot=prot)
    base = int(np.frombuffer(reserved, np.uint8).ctypes.data)
    # Give address and file offset the same alignment, which huge pages require.
    start = (offset - base) % HUGE_PAGE_BYTES if slack else 0
    if libc.mmap(base + start, nbytes, prot, flags | _MAP_NORESERVE | _MAP_FIXED, fd, offset) == _MAP_FAILED:
        raise _os_error()
    return reserved, start, base + start


class Mapping:
    """A mapping of a file's range, which is unmapped when the last reference is dropped."""

    __slots__ = ("__weakref__", "_reserved", "address", "nbytes")

    def __init__(self, reserved: mmap.mmap, address: int, nbytes: int) -> None:
        self._reserved = reserved
        self.address = address
        self.nbytes = nbytes

    @classmethod
    def map(cls, fd: int, offset: int, nbytes: int, access: int = READ_WRITE, flags: int = mmap.MAP_PRIVATE) -> Mapping:
        """Map a range of an open file. Raises OSError."""
        reserved, _, address = map_aligned(mmap.mmap, fd, access, flags, nbytes, offset)
        return cls(reserved, address, nbytes)

    def pages(self, start: int, nbytes: int) -> tuple[int, int]:
        """Return the address and length of the complete pages in a range."""
        page = mmap.PAGESIZE
        first = -(-(self.address + start) // page) * page
        return first, max(0, (self.address + start + nbytes) // page * page - first)


class _FreeOnDrop(weakref.ref["MappedRange"]):
    """A weak reference that ctypes passes as the C int 0, so that a C function can be its callback."""

    __slots__ = ()
    _as_parameter_ = 0


class MappedRange:
    """The bytes of one view in a mapping. Dropping the last reference to this object frees the bytes' pages.

    An array or memoryview of this object keeps it alive.
    """

    __slots__ = ("__weakref__", "_free_on_drop", "_mapping", "address", "nbytes")

    def __init__(self, mapping: Mapping, start: int, nbytes: int) -> None:
        self._mapping = mapping
        self.address = mapping.address + start
        self.nbytes = nbytes
        first, length = mapping.pages(start, nbytes)
        if length:
            # The callback is mmap(2) itself, which ignores the reference as its seventh argument. In a Python
            # finalizer, the exception of a signal handler would be lost. The addresses stay reserved.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            self._free_on_drop = _FreeOnDrop(self, partial(libc.mmap, first, length, _PROT_NONE, flags, -1, 0))

    # A memoryview of a ctypes array would not keep this object alive.
    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def bytes(self) -> memoryview:
        """Return a writable memoryview with format "B", which keeps this object alive."""
        return memoryview(np.asarray(self).data)

    def populate(self, start: int, nbytes: int) -> bool:
        """Read a range and map its pages. Before Linux 5.14, do nothing and return False. Raises OSError."""
        if not _LINUX:
            return False
        # madvise(2) needs an aligned address.
        head = (self.address + start) % mmap.PAGESIZE
        if libc.madvise(self.address + start - head, nbytes + head, _MADV_POPULATE_READ) == 0:
            return True
        error = _os_error()
        if error.errno == errno.EINVAL:
            return False
        raise error


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
