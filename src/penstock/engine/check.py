"""Checks of bytes against the manifest's leaf digests, in host memory and on a CUDA device.

In: complete slabs of a load; parts of a tensor. Out: nothing, or an IntegrityError that names tensor and range.
Not here: digests of a leaf (`digest.leaf`), the device's kernel (`digest.cuda`).

A checker runs on the compute executor of a load, a batch of slabs at a time. The host's has its answer on return; the
device's returns a `Pending`, and the executor goes on with the next batch meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.digest.cuda import leaf_digests_cuda, warm_up
from penstock.digest.leaf import leaf_digests, num_leaves
from penstock.engine.run import Pending
from penstock.errors import IntegrityError
from penstock.plan.schedule import LoadPlan
from penstock.types import GIB, I64, U64, Manifest, TensorTable


class Checker(Protocol):
    """A comparison of complete slabs with the digests in the manifest."""

    num_threads: int
    """Threads of the compute executor that call it."""
    batch_bytes: int
    """Bytes of slabs that are enough for a batch; fewer are near the end of a load."""

    def prepare(self) -> None:
        """Load what the first check needs, once the first bytes have come. A check that is first loads it itself."""
        ...

    def check(self, slabs: Sequence[int]) -> Pending | None:
        """Check these slabs; None when they hold, a Pending while a device works.

        Raises:
            IntegrityError: a leaf differs (from here or from the pending's `done`).
        """
        ...


class Expected:
    """The leaf digests that a plan's rows must have, and the rows of each slab.

    Args:
        plan: its boxed rows are left out; a region of a tensor has no leaves of its own.
        leaves: of the plan's rows, row after row.
        leaf_bytes: bytes of a leaf.
        uris: of the plan's files.
    """

    def __init__(self, plan: LoadPlan, leaves: U64, leaf_bytes: int, uris: Sequence[str]) -> None:
        self.plan = plan
        self.leaves = leaves
        self.leaf_bytes = leaf_bytes
        self._uris = uris
        self.counts: I64 = num_leaves(plan.table.nbytes, leaf_bytes)
        self.first: I64 = np.cumsum(self.counts) - self.counts
        is_boxed = plan.boxes.count(None) < len(plan.boxes)
        whole = np.array([box is None for box in plan.boxes], bool) if is_boxed else np.ones(len(plan.boxes), bool)
        self._rows = np.flatnonzero((plan.row_slab >= 0) & whole)
        self._slab_of = plan.row_slab[self._rows]

    def rows(self, slab: int) -> I64:
        """Return the plan's whole rows that lie in this slab, in order."""
        # Slabs are in the order of rows, so a slab's rows are neighbours.
        first, last = np.searchsorted(self._slab_of, [slab, slab + 1])
        return self._rows[first:last]

    def fault(self, row: int, leaf: int) -> IntegrityError:
        """Return the error for a leaf (counted within its row) that differs."""
        table, start = self.plan.table, leaf * self.leaf_bytes
        return _fault(table, row, start, self.leaf_bytes, self._uris[int(table.file_index[row])])


class HostChecker:
    """Checks slabs in host memory with the xxhash library."""

    # Every slab as soon as it is complete: unlike a device's, a check on the host has no fixed cost worth sharing.
    batch_bytes = 1

    def __init__(self, expected: Expected, slab: Callable[[int], memoryview]) -> None:
        self._expected = expected
        self._slab = slab
        self.num_threads = min(4, os.cpu_count() or 1)

    def prepare(self) -> None:
        """See `Checker.prepare`: there is nothing to do."""

    def check(self, slabs: Sequence[int]) -> Pending | None:
        """See `Checker.check`."""
        expected, plan = self._expected, self._expected.plan
        for slab in slabs:
            data = self._slab(slab)
            for row in expected.rows(slab).tolist():
                at = int(plan.row_offset[row])
                digests = np.empty(int(expected.counts[row]), np.uint64)
                leaf_digests(data[at : at + int(plan.row_nbytes[row])], expected.leaf_bytes, digests)
                first = int(expected.first[row])
                wrong = np.flatnonzero(digests != expected.leaves[first : first + len(digests)])
                if len(wrong):
                    raise expected.fault(row, int(wrong[0]))
        return None


_warm: set[torch.device] = set()
"""Devices whose kernels this process has loaded."""


class CudaChecker:
    """Checks slabs with the Triton kernel, a batch at a time, on a stream of its own."""

    num_threads = 1
    batch_bytes = 2 * GIB
    """A millisecond of the device, and few batches: each takes the GIL from the thread that moves bytes. First loads of
    14 GB took 351 ms with these, 377 with 512 MiB, 340 without digests.
    Source: benchmarks/results/h200x1_202611/load.md.
    """

    def __init__(self, expected: Expected, slab: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._expected = expected
        self._slab = slab
        self._device = device
        # Not the place's stream, where digests would wait for the copies of later chunks.
        self._stream = torch.cuda.Stream(device)

    def prepare(self) -> None:
        """See `Checker.prepare`: load the kernels, in some milliseconds, or seconds where they must be compiled.

        A run that is closed meanwhile waits for it.
        """
        if self._device not in _warm:
            # Also the device: what `stream` restores would make a context on the first one.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                warm_up(self._device)
            _warm.add(self._device)

    def check(self, slabs: Sequence[int]) -> _DigestPending | None:
        """See `Checker.check`. The slabs' copies are complete, so no stream is waited for."""
        expected, plan, leaf_bytes = self._expected, self._expected.plan, self._expected.leaf_bytes
        rows_of = [expected.rows(slab) for slab in slabs]
        rows = np.concatenate(rows_of)
        if not len(rows):
            return None
        base = np.array([self._slab(slab).data_ptr() for slab in slabs], np.int64)
        address = np.repeat(base, list(map(len, rows_of))) + plan.row_offset[rows]
        # One item for each leaf of the batch: its address, its bytes, its digest in the manifest.
        counts = expected.counts[rows]
        first = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum()))
        addresses = number * leaf_bytes + np.repeat(address - first * leaf_bytes, counts)
        nbytes = np.full(len(number), leaf_bytes)
        nbytes[first + counts - 1] = plan.row_nbytes[rows] - (counts - 1) * leaf_bytes
        wanted = expected.leaves[number + np.repeat(expected.first[rows] - first, counts)]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            digests = leaf_digests_cuda(addresses, nbytes, self._device)
            # Compared on the host: eight bytes a leaf, and no kernels to launch in the midst of the copies.
            host = torch.empty(len(wanted), dtype=torch.int64, pin_memory=True)
            host.copy_(digests, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _DigestPending(event, host, wanted, rows, first, expected)


class _DigestPending:
    """Digests on their way to the host; `done` compares them.

    Args:
        event: recorded after the copy of the digests to the host.
        digests, wanted: the computed and the expected digest of each leaf.
        rows, first: the plan's rows of the batch, and the number of the first leaf of each.
        expected: makes the error for a leaf that differs.
    """

    def __init__(
        self,
        event: torch.cuda.Event,
        digests: torch.Tensor,
        wanted: np.ndarray[tuple[int], np.dtype[np.uint64]],
        rows: I64,
        first: I64,
        expected: Expected,
    ) -> None:
        self._event = event
        self._digests = digests
        self._wanted = wanted
        self._rows = rows
        self._first = first
        self._expected = expected

    def done(self) -> bool:
        """See `Pending.done`."""
        if not self._event.query():
            return False
        wrong = np.flatnonzero(self._digests.numpy().view(np.uint64) != self._wanted)
        if len(wrong):
            leaf = int(wrong[0])
            row = int(np.searchsorted(self._first, leaf, side="right")) - 1
            raise self._expected.fault(int(self._rows[row]), leaf - int(self._first[row]))
        return True


class TensorChecker:
    """Checks parts of tensors, in any order, with the xxhash library. Any thread.

    Args:
        manifest: with leaves.
    """

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.leaves is not None
        self._leaves = manifest.leaves
        self._leaf_bytes = manifest.leaf_bytes
        self._table = manifest.tensors
        counts = num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes)
        self._first: I64 = np.cumsum(counts) - counts

    def check(self, row: int, start: int, data: memoryview, *, uri: str) -> None:
        """Check a row's bytes from `start` on, as they came from the file `uri`: whole leaves, but for the row's last.

        Raises:
            IntegrityError: a leaf differs.
        """
        digests = np.empty(-(-data.nbytes // self._leaf_bytes), np.uint64)
        leaf_digests(data, self._leaf_bytes, digests)
        first = int(self._first[row]) + start // self._leaf_bytes
        wrong = np.flatnonzero(digests != self._leaves[first : first + len(digests)])
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
