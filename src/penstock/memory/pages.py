"""Pages of host memory made present before their first use, many in one call, outside the GIL.

In: addresses. Out: pages there, zeroed.
Not here: their owners (`staging`, `arena`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_MADV_POPULATE_WRITE = 23
"""Fault the pages in one call. Source: Linux 5.14, include/uapi/asm-generic/mman-common.h."""

STEP_BYTES = 1 << 20
"""Zeroing this much takes about 0.1 ms; each call holds the address space's lock, which others need to allocate."""

_SHARE_BYTES = 4 * STEP_BYTES
"""Share of one thread at a time, where several populate."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, nbytes: int, *, is_over: Callable[[], bool] | None = None) -> None:
    """Make `nbytes` of writable memory from `address` present, unless `is_over` says to stop.

    A kernel without MADV_POPULATE_WRITE answers EINVAL; the pages are then faulted by their first use.

    Cost: a GB of shared memory 0.6 s, of which two threads take 0.37; faulting it page by page 0.85 to 1.5 s.
    """
    for at in range(address, address + nbytes, STEP_BYTES):
        if is_over is not None and is_over():
            return
        # The answer is ignored: pages that stay absent are made by their first use, and only later.
        _libc.madvise(
            ctypes.c_void_p(at), ctypes.c_size_t(min(STEP_BYTES, address + nbytes - at)), _MADV_POPULATE_WRITE
        )


def populate_by(pool: ThreadPoolExecutor, address: int, nbytes: int) -> None:
    """Do as `populate` by all threads of a pool.

    Cost: where one thread takes 0.55 s a GB, twelve take 0.12. Source: benchmarks/results/h200x2_202611/convert.md.
    """
    starts = range(address, address + nbytes, _SHARE_BYTES)
    for _ in pool.map(lambda at: populate(at, min(_SHARE_BYTES, address + nbytes - at)), starts):
        pass
