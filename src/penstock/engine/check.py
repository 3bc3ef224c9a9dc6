"""Checking bytes in host memory against the manifest's leaf digests.

In: complete slabs of a load; leaves of a tensor. Out: nothing, or an IntegrityError that names tensor and range.
Not here: the device's digests (`check_cuda`), how a leaf is digested (`digest`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from penstock.digest.leaf import leaf_digests, num_leaves
from penstock.engine.executors import Pending
from penstock.errors import IntegrityError
from penstock.plan.schedule import LoadPlan
from penstock.types import I64, U64, Manifest, TensorTable


class Checker(Protocol):
    """Digests complete slabs and compares them with what the manifest says."""

    num_threads: int
    """Threads of the compute executor that call it."""
    batch_bytes: int
    """Slabs are handed over in batches of at least this many bytes, but for the last."""

    def check(self, slabs: Sequence[int]) -> Pending | None:
        """Check these slabs; None when they hold, a Pending while a device works.

        Raises:
            IntegrityError: a leaf differs (from here or from the pending's `done`).
        """
        ...


class Expected:
    """The leaves a plan's rows must have, and which rows a slab holds.

    Args:
        plan: its boxed rows are passed over; a region of a tensor has no leaves of its own.
        leaves: of the plan's rows, row after row.
        leaf_bytes: bytes of a leaf.
        uris: of the plan's files.
    """

    def __init__(self, plan: LoadPlan, leaves: U64, leaf_bytes: int, uris: Sequence[str]) -> None:
        self.plan, self.leaves, self.leaf_bytes, self._uris = plan, leaves, leaf_bytes, uris
        self.counts: I64 = num_leaves(plan.table.nbytes, leaf_bytes)
        self.first: I64 = np.cumsum(self.counts) - self.counts
        is_boxed = plan.boxes.count(None) < len(plan.boxes)
        whole = np.array([box is None for box in plan.boxes], bool) if is_boxed else np.ones(len(plan.boxes), bool)
        self._rows = np.flatnonzero((plan.row_slab >= 0) & whole)
        self._slab_of = plan.row_slab[self._rows]

    def rows(self, slab: int) -> I64:
        """Whole rows of the plan that lie in this slab, in order."""
        at = np.searchsorted(self._slab_of, [slab, slab + 1])
        return self._rows[at[0] : at[1]]

    def fault(self, row: int, leaf: int) -> IntegrityError:
        """Return the error for a leaf (counted within its row) that differs."""
        table, start = self.plan.table, leaf * self.leaf_bytes
        return _fault(table, row, start, self.leaf_bytes, self._uris[int(table.file_index[row])])


class HostChecker:
    """Checks slabs in host memory with the xxhash library."""

    batch_bytes = 1

    def __init__(self, expected: Expected, slab: Callable[[int], memoryview]) -> None:
        self._expected, self._slab = expected, slab
        self.num_threads = min(4, os.cpu_count() or 1)

    def check(self, slabs: Sequence[int]) -> Pending | None:
        """See `Checker.check`."""
        expected, plan = self._expected, self._expected.plan
        for slab in slabs:
            data = self._slab(slab)
            for row in expected.rows(slab).tolist():
                at = int(plan.row_offset[row])
                got = np.empty(int(expected.counts[row]), np.uint64)
                leaf_digests(data[at : at + int(plan.row_nbytes[row])], expected.leaf_bytes, got)
                first = int(expected.first[row])
                wrong = np.flatnonzero(got != expected.leaves[first : first + len(got)])
                if len(wrong):
                    raise expected.fault(row, int(wrong[0]))
        return None


class TensorChecker:
    """Checks parts of tensors, in any order, with the xxhash library. Any thread.

    Args:
        manifest: with leaves.
    """

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.leaves is not None
        self._leaves, self._leaf_bytes, self._table = manifest.leaves, manifest.leaf_bytes, manifest.tensors
        counts = num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes)
        self._first: I64 = np.cumsum(counts) - counts

    def check(self, row: int, start: int, data: memoryview, *, uri: str) -> None:
        """Check a row's bytes from `start` on, as they came from the file `uri`: whole leaves, but for the row's last.

        Raises:
            IntegrityError: a leaf differs.
        """
        got = np.empty(-(-data.nbytes // self._leaf_bytes), np.uint64)
        leaf_digests(data, self._leaf_bytes, got)
        first = int(self._first[row]) + start // self._leaf_bytes
        wrong = np.flatnonzero(got != self._leaves[first : first + len(got)])
        if len(wrong):
            raise _fault(self._table, row, start + int(wrong[0]) * self._leaf_bytes, self._leaf_bytes, uri)


def _fault(table: TensorTable, row: int, start: int, leaf_bytes: int, uri: str) -> IntegrityError:
    """Return the error for a leaf that begins `start` bytes into a row's tensor."""
    stop, offset = min(start + leaf_bytes, int(table.nbytes[row])), int(table.offset[row])
    return IntegrityError(
        f"bytes [{start}, {stop}) of the tensor differ from their digest in the manifest",
        uri=uri,
        tensor=table.names[row],
        byte_range=(offset + start, offset + stop),
        hint="fetch the file anew, or build the manifest anew if the weights were meant to change",
    )
