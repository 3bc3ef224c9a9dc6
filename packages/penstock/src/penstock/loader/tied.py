"""Compares tensors that fill the same memory, such as a tied weight that is stored under both names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from penstock.engine.run import Item, Run
from penstock.loader.session import LoadSession
from penstock.storage.manifest import leaves_of
from penstock.types import MIB, TensorTable

_CHUNK_BYTES = MIB
"""Number of bytes of each tensor that a thread reads and compares at a time."""


def differing_rows(session: LoadSession, table: TensorTable, groups: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return the first two rows in a group whose bytes differ, or None if the rows in each group have equal bytes.

    Rows without digests are read up to the first difference.
    """
    manifest = session.manifest
    names = manifest.tensors.names
    for pair in (pair for group in groups for pair in pairwise(group)):
        first, second = pair
        if table.nbytes[first] != table.nbytes[second]:
            return pair
        known = [leaves_of(manifest, np.array([names.index(table.names[row])], np.int64)) for row in pair]
        if known[0] is None or known[1] is None:
            with _Comparison(session, table, pair) as comparison:
                is_equal = comparison.run()
        else:
            is_equal = np.array_equal(known[0], known[1])
        if not is_equal:
            return pair
    return None


class _Comparison(Run):
    """A run that reads two rows and compares them piece by piece."""

    def __init__(self, session: LoadSession, table: TensorTable, rows: tuple[int, int]) -> None:
        self._nbytes = int(table.nbytes[rows[0]])
        super().__init__(2 * self._nbytes, trace=session.trace, stall_s=session.settings.stall_s)
        self._sources = [session.weights.sources[int(table.file_index[row])] for row in rows]
        self._offsets = [int(table.offset[row]) for row in rows]
        self._lock = threading.Lock()
        self._differ = False
        self._executor = self.executor("fetch", session.intake.num_reads)

    def run(self) -> bool:
        starts = range(0, self._nbytes, _CHUNK_BYTES)
        if not starts:
            return True
        self._executor.post(*(Item(at, f"compare {at}", _CHUNK_BYTES, partial(self._compare, at)) for at in starts))
        self.wait()
        return not self._differ

    def _compare(self, at: int) -> None:
        if self._differ:
            return
        nbytes = min(_CHUNK_BYTES, self._nbytes - at)
        first, second = np.empty((2, nbytes), np.uint8)
        for source, offset, piece in zip(self._sources, self._offsets, (first, second), strict=True):
            source.readv(offset + at, [piece.data])
        is_equal = np.array_equal(first, second)
        with self._lock:
            self._differ |= not is_equal
            self.ticket.moved_bytes += 2 * nbytes
            is_over = self._differ or self.ticket.moved_bytes == self.ticket.nbytes
        if is_over:
            self.ticket.finish()
