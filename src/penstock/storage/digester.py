"""Digest every body of a weight set, reading each byte once, in bounded memory.

In: sources and a tensor table. Out: leaf digests, row after row.
Not here: digests of bytes that a load moves anyway (`engine`).

    table --windows--> threads: readv into the thread's own buffer --> leaves of the pieces in it
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from penstock.digest import leaf
from penstock.storage.source import Source
from penstock.types import MIB, U64, TensorTable

WINDOW_BYTES = 8 * MIB
"""Bytes one thread reads at once; the chunk of a load. Source: `Settings.chunk_bytes`."""

_Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A run of a file, and the pieces of tensors in it."""

    file: int
    offset: int
    nbytes: int
    pieces: tuple[_Piece, ...]
    """(offset in the window, bytes, first leaf); each but a tensor's last is whole leaves."""


def digest_bodies(
    sources: Sequence[Source],
    table: TensorTable,
    *,
    leaf_bytes: int,
    threads: int,
    on_bytes: Callable[[int], None] | None = None,
) -> U64:
    """Return leaf digests of all tensors, in the order of `table`; `on_bytes` is called with bytes as they are read.

    Raises:
        SourceError: as `Source.readv`; the other threads stop at their next window.

    Cost: `threads` buffers of `WINDOW_BYTES`, or of one leaf where that is longer.
    """
    counts = leaf.num_leaves(table.nbytes, leaf_bytes)
    leaves = np.zeros(int(counts.sum()), np.uint64)
    window_bytes = max(WINDOW_BYTES // leaf_bytes, 1) * leaf_bytes
    windows = _windows(table, np.cumsum(counts) - counts, leaf_bytes, window_bytes)
    lock = threading.Lock()
    stop = threading.Event()

    def next_window() -> _Window | None:
        with lock:
            return None if stop.is_set() else next(windows, None)

    def work() -> None:
        # An anonymous mapping begins at a page, so direct I/O may fill it; shared ones get no huge pages.
        memory = mmap.mmap(-1, window_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)
        try:
            while (window := next_window()) is not None:
                sources[window.file].readv(window.offset, [buffer[: window.nbytes]])
                for start, nbytes, first in window.pieces:
                    leaf.leaf_digests(buffer[start : start + nbytes], leaf_bytes, leaves[first:])
                if on_bytes is not None:
                    # Under the lock, so that a caller's counter need not be safe for threads.
                    with lock:
                        on_bytes(window.nbytes)
        finally:
            # After an error the other threads must not read on; after the end there is nothing left for them.
            stop.set()

    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-digest") as pool:
        jobs = [pool.submit(work) for _ in range(threads)]
        try:
            for job in jobs:
                job.result()
        finally:
            stop.set()
    return leaves


def _windows(table: TensorTable, first_leaf: np.ndarray, leaf_bytes: int, window_bytes: int) -> Iterator[_Window]:
    """Yield runs of files in order, at most `window_bytes` long, small neighbours together."""
    order = np.lexsort((table.offset, table.file_index))
    columns = (table.file_index[order], table.offset[order], table.nbytes[order], first_leaf[order])
    file = start = stop = -1
    pieces: list[_Piece] = []
    for row_file, offset, nbytes, row_leaf in zip(*(column.tolist() for column in columns), strict=True):
        for skip in range(0, nbytes, window_bytes):
            at, length = offset + skip, min(window_bytes, nbytes - skip)
            if pieces and (row_file != file or at != stop or at + length - start > window_bytes):
                yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
                pieces = []
            if not pieces:
                file, start = row_file, at
            stop = at + length
            pieces.append((at - start, length, row_leaf + skip // leaf_bytes))
    if pieces:
        yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
