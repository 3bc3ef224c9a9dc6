"""Reads claimed chunks from storage, each byte once, directly into the destination tensors, without verification."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock.engine.place import place_on
from penstock.errors import PenstockError
from penstock.holding.weight_layout import WeightLayout
from penstock.loader.run import LoadRun
from penstock.loader.session import LoadSession
from penstock.storage import Counting
from penstock.types import I64, DType, TensorTable

AT_ONCE = 4
"""Minimum number of chunks passed on at once (64 MiB). If storage is slow, members receive the first chunks while the
rest is still being read."""
HAND_ON_S = 1.0
"""Chunks that waited this many seconds are passed on even if fewer than `AT_ONCE` are ready."""
GATHER_S = 0.1
"""Minimum time between two batches, in seconds. Each batch costs Python time, which delays the reading threads. Two
cold starters took 1.35 times as long as a split read with this value, and 1.49 times with 25 ms. Source:
benchmarks/results/h200x2_202611/fetch.md."""
LITTLE = 0.5
"""Unread fraction of a claim at which the next claim begins, so that fast storage is never idle."""


class StorageReader:
    """The storage reads of one fetch into `rows`, the flat uint8 tensors for the rows of the layout."""

    def __init__(self, session: LoadSession, layout: WeightLayout, rows: Sequence[torch.Tensor]) -> None:
        self._session = session
        self._layout = layout
        self._rows = rows
        self.uri = session.weights.uri
        self.nbytes = 0
        self.is_touched = False
        self._moved_bytes = 0
        self._runs: list[LoadRun] = []
        self._lock = threading.Lock()
        self._is_warm = False
        self._error: PenstockError | None = None

    @property
    def received_bytes(self) -> int:
        """Return a counter of received bytes for detecting progress. The counter may include some bytes twice."""
        # `Counting` sources report bytes before a read is complete, whereas the runs report complete reads.
        counted = sum(one.received_bytes for one in self._session.weights.sources if isinstance(one, Counting))
        with self._lock:
            return counted + self._moved_bytes + sum(run.ticket.moved_bytes for run in self._runs)

    def read(self, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
        """Read these chunks into their rows. Yield chunks as soon as their bytes are complete.

        `near_end` is called once, when at most the fraction `LITTLE` of the bytes is unread.
        """
        pieces, owner = self._layout.chunks.pieces_apart(chunks)
        table, count = self._layout.table, len(pieces.row)
        # For the loader, each piece is a tensor of bytes whose name is a number.
        wanted = TensorTable(
            names=tuple(map(str, range(count))),
            dtypes=(DType.U8,) * count,
            shapes=tuple((nbytes,) for nbytes in pieces.nbytes.tolist()),
            file_index=table.file_index[pieces.row],
            offset=table.offset[pieces.row] + pieces.start,
            nbytes=pieces.nbytes,
        )
        order = np.lexsort((wanted.offset, wanted.file_index))
        wanted = wanted.take(order.tolist())
        columns = (pieces.row[order].tolist(), pieces.start[order].tolist(), pieces.nbytes[order].tolist())
        flat = [self._rows[row][start : start + nbytes] for row, start, nbytes in zip(*columns, strict=True)]
        left = np.bincount(owner, minlength=len(chunks))
        sizes, total = wanted.nbytes.tolist(), int(wanted.nbytes.sum())
        left_bytes, is_near_end = total, False
        ready: list[int] = []
        passed_on, run = time.monotonic(), self._begin(wanted, flat)
        try:
            for slab in run.slabs():
                left_bytes -= sizes[slab]
                if not is_near_end and left_bytes <= LITTLE * total:
                    is_near_end = True
                    near_end()
                chunk = int(owner[order[slab]])
                left[chunk] -= 1
                if left[chunk] == 0:
                    ready.append(chunk)
                waited_s = time.monotonic() - passed_on
                if ready and waited_s > (GATHER_S if len(ready) >= AT_ONCE else HAND_ON_S):
                    yield chunks[ready]
                    ready, passed_on = [], time.monotonic()
            if ready:
                yield chunks[ready]
        except PenstockError as error:
            # Two claims may share a staging pool, so closing one run also fails the other run. Keep the first error.
            self._error = self._error or error
            raise self._error from None
        finally:
            with self._lock:
                self.nbytes += sum(run.paths.values())
                self._runs.remove(run)
                self._moved_bytes += run.ticket.moved_bytes
            # Close the run first, because a running read may still write to the destination.
            run.close()
            self.is_touched |= run.is_touched

    def _begin(self, wanted: TensorTable, flat: list[torch.Tensor]) -> LoadRun:
        session = self._session
        with self._lock:
            # Most fetches read nothing from storage, so allocate the staging buffers at the first claim.
            if not self._is_warm:
                self._is_warm = True
                session.intake.warm(self.uri)
            plan = session.make_plan(wanted, [None] * len(flat), pack=False, exact=True)
            run = session.begin(plan, place_on(session.options.device, plan.slab_nbytes.tolist(), flat))
            self._runs.append(run)
            return run

    def check_unchanged(self) -> None:
        """Raise an error if the files changed during the fetch. See `LoadSession.check_unchanged`."""
        self._session.check_unchanged()
