"""Compare bytes in host memory or on a CUDA device with the leaf digests in the manifest."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
import torch

from penstock.cuda.events import make_stream
from penstock.digest.cuda import DEFAULT_TUNING, OrderedLeaves, Tuning, warm_up
from penstock.digest.leaf import leaf_digests, num_leaves
from penstock.engine.place import CudaPlace
from penstock.engine.run import PendingItem
from penstock.errors import IntegrityError
from penstock.plan.schedule import LoadPlan
from penstock.types import GIB, I64, MIB, U64, Manifest, TensorTable


class Checker(Protocol):
    """Compares complete slabs with the digests in the manifest."""

    num_threads: int
    """Number of threads in the compute executor that call the checker."""
    batch_bytes: int
    """Size of a batch of slabs in bytes. Batches near the end of a load are smaller."""

    def prepare(self) -> PendingItem | None:
        """Load kernels ahead of the first check. Return a pending item if a device is working."""

    def check(self, slabs: Sequence[int]) -> PendingItem | None:
        """Check these slabs. Return None if the check is complete, or a pending item if a device is working.

        This method or the pending item's `done` raises IntegrityError for a leaf that differs.
        """


class Expected:
    """The expected leaf digests of a plan's rows, and the rows of each slab.

    Rows with a box have no digests. `leaves` are the digests of the plan's rows, in order, and `uris` are the URIs of
    the plan's files.
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
        """Return the rows without a box in this slab, in order."""
        first, stop = np.searchsorted(self._slab_of, [slab, slab + 1])
        return self._rows[first:stop]

    def rows_of(self, slabs: Sequence[int]) -> tuple[I64, I64]:
        """Return the rows without a box in these slabs, in order, and the number of rows in each slab."""
        # Slabs follow the order of rows, so the rows of a slab are consecutive.
        first, stop = np.searchsorted(self._slab_of, np.add.outer([0, 1], np.asarray(slabs, np.int64)))
        num_rows = stop - first
        before = np.cumsum(num_rows) - num_rows
        return self._rows[np.arange(int(num_rows.sum())) + np.repeat(first - before, num_rows)], num_rows

    def fault(self, row: int, leaf: int) -> IntegrityError:
        """Return the error for a leaf that differs from its digest. `leaf` is an index within the row."""
        table, start = self.plan.table, leaf * self.leaf_bytes
        return _fault(table, row, start, self.leaf_bytes, self._uris[int(table.file_index[row])])


class HostChecker:
    """Checks slabs in host memory with the xxhash library."""

    # On the host a batch has no fixed cost, so check every slab as soon as it is complete.
    batch_bytes = 1

    def __init__(self, expected: Expected, slab: Callable[[int], memoryview]) -> None:
        self._expected = expected
        self._slab = slab
        self.num_threads = min(4, os.cpu_count() or 1)

    def prepare(self) -> PendingItem | None:
        """Return None, because there is nothing to prepare."""
        return None

    def check(self, slabs: Sequence[int]) -> PendingItem | None:
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


SMALL_SLAB_BLOCKS = 64 << 10
"""Number of blocks per digest slab when device memory is short. Such a slab needs 4 MiB of scratch, not 64."""


_SEGMENT_BYTES = 2 * MIB
"""Smallest block that torch's allocator requests from a device, for tensors below 1 MiB."""


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the process-wide stream for checks on a device, because torch caches memory per stream."""
    return make_stream(device)


class CudaChecker:
    """Checks slabs with the Triton kernel, in batches, on a separate stream.

    All leaves share one layout if the place has all slabs when `prepare` is called, or else each batch has a layout.
    """

    num_threads = 1
    batch_bytes = 4 * GIB
    """A batch takes two milliseconds on the device. Each batch takes the GIL from the thread that moves bytes. Source:
    benchmarks/results/h200x1_202611/load-history.md."""

    def __init__(self, expected: Expected, place: CudaPlace) -> None:
        self._expected = expected
        self._place = place
        self._stream = _stream_of(place.device)
        self._layout: _Layout | None = None

    def prepare(self) -> PendingItem | None:
        """Load the kernels in milliseconds, or compile them in seconds. Closing the run waits for this call."""
        device = self._place.device
        # A streaming load allocates its slabs one by one, so some slabs do not exist yet.
        has_all = self._place.wait_for_slabs()
        if self._place.is_out_of_memory:
            return None
        # Without the `device` block, leaving the `stream` block would create a context on the first device.
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            if has_all:
                self._layout = self._laid_out(range(len(self._expected.plan.slab_nbytes)))
                self._layout.warm_up()
            else:
                try:
                    warm_up(device)
                except torch.cuda.OutOfMemoryError as error:
                    raise self._place.memory_error(_SEGMENT_BYTES) from error
            return _Passing(self._stream)

    def check(self, slabs: Sequence[int]) -> PendingItem | None:
        """Check these slabs, whose copies are complete."""
        with torch.cuda.device(self._place.device), torch.cuda.stream(self._stream):
            layout = self._layout or self._laid_out(slabs)
            ranges = layout.ranges(slabs)
            if not ranges:
                return None
            for first, stop in ranges:
                layout.digest(first, stop)
            return _Passing(self._stream, layout.results, ranges)

    def _laid_out(self, slabs: Sequence[int]) -> _Layout:
        """Lay out the leaves of these slabs on the current stream, which must be the stream of the digests."""
        addresses = [self._place.slab(slab).data_ptr() for slab in slabs]
        device = self._place.device
        try:
            return _Layout(self._expected, slabs, addresses, device, DEFAULT_TUNING)
        except torch.cuda.OutOfMemoryError:
            tuning = msgspec.structs.replace(DEFAULT_TUNING, slab_blocks=SMALL_SLAB_BLOCKS)
        try:
            return _Layout(self._expected, slabs, addresses, device, tuning)
        except torch.cuda.OutOfMemoryError as error:
            # The digests need 64 bytes of scratch memory for each block.
            raise self._place.memory_error(SMALL_SLAB_BLOCKS << 6) from error


class _Layout:
    """The leaves of slabs at `addresses`, laid out for the kernels, with computed and expected digests."""

    def __init__(
        self,
        expected: Expected,
        slabs: Sequence[int],
        addresses: Sequence[int],
        device: torch.device,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        plan, leaf_bytes = expected.plan, expected.leaf_bytes
        rows, num_rows = expected.rows_of(slabs)
        counts = expected.counts[rows]
        first = np.cumsum(counts) - counts
        address = np.repeat(np.array(addresses, np.int64), num_rows) + plan.row_offset[rows]
        number = np.arange(int(counts.sum()))
        nbytes = np.full(len(number), leaf_bytes)
        nbytes[first + counts - 1] = plan.row_nbytes[rows] - (counts - 1) * leaf_bytes
        wanted = expected.leaves[number + np.repeat(expected.first[rows] - first, counts)]
        leaf_addresses = number * leaf_bytes + np.repeat(address - first * leaf_bytes, counts)
        self._leaves = OrderedLeaves(leaf_addresses, nbytes, device, tuning=tuning)
        # The leaves of a slab are consecutive, because its rows are consecutive.
        bounds = np.append(first, len(number))[np.cumsum(np.append(0, num_rows))].tolist()
        self._bounds = dict(zip(slabs, pairwise(bounds), strict=True))
        self._digests = torch.empty(len(number), dtype=torch.int64, device=device)
        self.results = _DigestResults(expected, rows, first, wanted, is_pinned=device.type == "cuda")

    def ranges(self, slabs: Sequence[int]) -> list[tuple[int, int]]:
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(map(self._bounds.__getitem__, slabs)):
            if merged and merged[-1][1] == first:
                merged[-1] = merged[-1][0], stop
            elif first < stop:
                merged.append((first, stop))
        return merged

    def warm_up(self) -> None:
        """Load the kernels by digesting a few leaves, which are digested again after their bytes arrive."""
        self._leaves.warm_up(out=self._digests)

    def digest(self, first: int, stop: int) -> None:
        self._leaves.digest(first, stop, out=self._digests)
        # Copy the digests to the host and compare them there, so that no kernel is launched between the copies.
        self.results.digests[first:stop].copy_(self._digests[first:stop], non_blocking=True)


class _DigestResults:
    """Computed and expected digests in host memory. `first` holds the index of each row's first leaf.

    A stored error refers to this object, which therefore must not refer to device memory.
    """

    def __init__(self, expected: Expected, rows: I64, first: I64, wanted: U64, *, is_pinned: bool) -> None:
        self._expected = expected
        self._rows, self._first, self._wanted = rows, first, wanted
        self.digests = torch.empty(len(wanted), dtype=torch.int64, pin_memory=is_pinned)
        self._got: U64 = self.digests.numpy().view(np.uint64)

    def compare(self, first: int, stop: int) -> None:
        wrong = np.flatnonzero(self._got[first:stop] != self._wanted[first:stop])
        if len(wrong):
            leaf = first + int(wrong[0])
            row = int(np.searchsorted(self._first, leaf, side="right")) - 1
            raise self._expected.fault(int(self._rows[row]), leaf - int(self._first[row]))


class _Passing:
    """Work queued on a CUDA stream. Once the work is complete, `done` compares the `ranges` of leaves in `results`."""

    def __init__(
        self, stream: torch.cuda.Stream, results: _DigestResults | None = None, ranges: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._results = results
        self._ranges = ranges

    def done(self) -> bool:
        if not self._event.query():
            return False
        if self._results is not None:
            for first, stop in self._ranges:
                self._results.compare(first, stop)
        return True


class TensorChecker:
    """Checks ranges of tensors in any order with the xxhash library. Thread-safe. The manifest needs leaf digests."""

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.leaves is not None
        self._leaves = manifest.leaves
        self._leaf_bytes = manifest.leaf_bytes
        self._table = manifest.tensors
        counts = num_leaves(manifest.tensors.nbytes, manifest.leaf_bytes)
        self._first: I64 = np.cumsum(counts) - counts

    def check(self, row: int, start: int, data: memoryview, *, uri: str) -> None:
        """Check whole leaves of a row's tensor, from offset `start`. Raise IntegrityError for the file `uri`."""
        digests = np.empty(-(-data.nbytes // self._leaf_bytes), np.uint64)
        leaf_digests(data, self._leaf_bytes, digests)
        first = int(self._first[row]) + start // self._leaf_bytes
        wrong = np.flatnonzero(digests != self._leaves[first : first + len(digests)])
        if len(wrong):
            raise _fault(self._table, row, start + int(wrong[0]) * self._leaf_bytes, self._leaf_bytes, uri)


def _fault(table: TensorTable, row: int, start: int, leaf_bytes: int, uri: str) -> IntegrityError:
    stop, offset = min(start + leaf_bytes, int(table.nbytes[row])), int(table.offset[row])
    return IntegrityError(
        f"bytes [{start}, {stop}) of the tensor differ from their digest in the manifest",
        uri=uri,
        tensor=table.names[row],
        byte_range=(offset + start, offset + stop),
        hint="download the file again, or rebuild the manifest if the weights were changed on purpose",
    )
