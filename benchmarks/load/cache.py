"""Page cache state of files: how much is resident, make it all, make it none; verified, never assumed.

In: paths. Out: fractions in [0, 1].
Not here: when a row wants which state (`rows`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_LIBC = ctypes.CDLL(None, use_errno=True)
# cachestat(2), Linux 6.5+; the number is the same on every architecture. Source: include/uapi/asm-generic/unistd.h
_CACHESTAT = 451
_TRIES, _PAUSE_S = 10, 0.1
"""To have all pages dropped."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def _resident_pages(fd: int, nbytes: int) -> int:
    stat = _Stat()
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(_Range(0, nbytes)), ctypes.byref(stat), 0) == 0:
        return int(stat.cached)
    with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view:
        pages = (nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        seen = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(view)
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(nbytes), seen)
        del anchor
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(byte & 1 for byte in bytes(seen))


def resident(paths: Sequence[str]) -> float:
    """Fraction of the files' pages in the page cache."""
    cached = pages = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            cached += _resident_pages(fd, nbytes)
            pages += (nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        finally:
            os.close(fd)
    return min(1.0, cached / max(1, pages))


def evict(paths: Sequence[str]) -> float:
    """Writes back and drops the files' pages; returns the fraction still resident (0 on a disk, 1 on tmpfs).

    A page that another core has just used, or a process that is ending maps still, is kept at first: asked some times.
    """
    os.sync()
    for _ in range(_TRIES):
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        if (left := resident(paths)) in {0.0, 1.0}:
            break
        time.sleep(_PAUSE_S)
    return left


def warm(paths: Sequence[str], *, threads: int = 8) -> float:
    """Reads the files until the cache holds them; returns the fraction resident."""
    step = 64 << 20

    def read(job: tuple[str, int]) -> None:
        fd = os.open(job[0], os.O_RDONLY)
        try:
            os.preadv(fd, [bytearray(step)], job[1])
        finally:
            os.close(fd)

    if resident(paths) < 1.0:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, [(path, at) for path in paths for at in range(0, os.path.getsize(path), step)]))
    return resident(paths)


def file_system(path: str) -> str:
    """Type of the file system `path` is on, as the kernel's mount table names it."""
    best, kind = "", "?"
    with open("/proc/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            point, name = line.split()[1:3]
            inside = os.path.realpath(path).startswith(point.rstrip("/") + "/") or point == "/"
            if inside and len(point) >= len(best):
                best, kind = point, name
    return kind
