"""Pages of host memory that are given back to the system while their addresses stay valid.

In: an address range. Out: the bytes that were given back; reading there yields other values afterwards.
Not here: whose memory it is, and when it is filled again (`loader.emptied`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

from penstock.errors import ConfigError

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def give_back(address: int, nbytes: int) -> int:
    """Give back the pages that lie wholly in a range; return their bytes: 0 if other processes share or lock them.

    Pages of a private file mapping have the file's content afterwards, all others are zero.

    Raises:
        ConfigError: the system refuses.
    """
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= stop or not _is_private(start, stop):
        return 0
    if _libc.madvise(start, stop - start, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        # Locked pages cannot be given back. Source: madvise(2), EINVAL.
        if number == errno.EINVAL:
            return 0
        raise ConfigError(f"cannot give memory back: {os.strerror(number)}")
    return stop - start


def _is_private(start: int, stop: int) -> bool:
    """Return whether an address range lies in private mappings of this process, all of it."""
    at = start
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            bounds, permissions = line.split(maxsplit=2)[:2]
            low, high = (int(bound, 16) for bound in bounds.split("-"))
            if low <= at < high:
                if not permissions.endswith("p"):
                    return False
                at = high
                if at >= stop:
                    return True
    return False
