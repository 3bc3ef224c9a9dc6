"""Tensors of a local file that are read ahead of a program that requests them one after another.

Two requests in file order, or one request after `expect`, start a load of the tensors that follow. The load reads
straight to the device, and stays at most `limit_bytes` ahead of the requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock import lifecycle
from penstock.engine.place import Bytes, CudaPlace, HostPlace
from penstock.errors import PenstockError
from penstock.loader.run import LoadRun
from penstock.loader.tensor import as_bytes
from penstock.plan.schedule import LoadPlan
from penstock.types import TensorTable

Planner = Callable[[Sequence[int]], LoadPlan]
"""Plans rows, which it gets in file order."""
Starter = Callable[[LoadPlan, Sequence[int]], LoadRun]
"""Starts a windowed run of a plan, which yields the slabs in the given order."""


class TensorsAhead:
    """The tensors that were read ahead of the requests. The caller serialises all calls.

    Tensors that the program skips wait for a later request until they exceed `limit_bytes`. Then the oldest is dropped.

    Args:
        table: all rows of the file, in file order.
        limit_bytes: limit of the tensors that are read ahead, and separately of the tensors that were skipped.
        enough_bytes: size of the following tensors from which reading ahead is faster than separate reads.
    """

    def __init__(self, table: TensorTable, *, limit_bytes: int, enough_bytes: int) -> None:
        self._table = table
        self._limit_bytes = limit_bytes
        self._enough_bytes = enough_bytes
        self._expected: list[int] = []
        # The row after the last request in file order, or -1 before the first request.
        self._next_row = -1
        self._is_off = False
        self._pid = os.getpid()
        self._run: LoadRun | None = None
        self._arriving: Iterator[int] = iter(())
        # The slabs in the order of the requests, the bytes before each, and the number of slabs that have arrived.
        self._starts: list[int] = []
        self._step_of_row: dict[int, int] = {}
        self._rows_of_step: list[list[tuple[int, int]]] = []
        self._num_arrived = 0
        self._arrived: dict[int, torch.Tensor] = {}
        self._arrived_bytes = 0

    @property
    def is_reading(self) -> bool:
        """Return whether a run uses the threads and the staging of the file."""
        return self._run is not None

    def expect(self, rows: Sequence[int]) -> None:
        """Announce the rows that will be requested, in order. Replace the previous announcement."""
        self.close()
        self._expected = [row for row in dict.fromkeys(rows) if self._table.nbytes[row]]

    # The functions are arguments of `take`, because an open file that owns this object and its own methods would be a
    # reference cycle, and would stay open until a garbage collection.
    def take(self, row: int, plan: Planner, start: Starter) -> torch.Tensor | None:
        """Return the bytes of a row on the device, or None if the caller must read the row itself.

        The caller owns the bytes, a flat uint8 tensor. A second request for a row returns None.
        """
        if self._is_off or not self._table.nbytes[row] or self._pid != os.getpid():
            return None
        try:
            if self._run is None and row not in self._arrived:
                order = self._order_from(row)
                self._next_row = row + 1
                if order is None:
                    return None
                self._start(order, plan, start)
            self._next_row = row + 1
            return self._bytes_of(row)
        except PenstockError:
            # The fault may be in a row that the program never requests. The caller's own read of this row raises the
            # error of this row.
            self._is_off = True
            self.close()
            return None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the run, and drop the tensors that were not requested. Idempotent."""
        self._end_run()
        self._arrived.clear()
        self._arrived_bytes = 0

    def _end_run(self) -> None:
        run, self._run = self._run, None
        self._arriving = iter(())
        # A forked child has no reading threads.
        if run is not None and self._pid == os.getpid() and not lifecycle.is_ending():
            run.close()

    def _order_from(self, row: int) -> list[int] | None:
        """Return the rows to read ahead in the order of the requests, or None if it is too early or not worth it."""
        nbytes = self._table.nbytes
        if self._expected:
            if row not in self._expected:
                return None
            at = self._expected.index(row)
            # Threads of the program may make the first requests in a different order.
            if sum(nbytes[self._expected[:at]].tolist()) <= self._limit_bytes:
                at = 0
            order, self._expected = self._expected[at:], []
        elif row == self._next_row:
            order = [each for each in range(row, len(nbytes)) if nbytes[each]]
        else:
            return None
        return order if int(nbytes[order].sum()) >= self._enough_bytes else None

    def _start(self, rows: list[int], plan_rows: Planner, start: Starter) -> None:
        in_file_order = sorted(rows)
        plan = plan_rows(in_file_order)
        slab_of = dict(zip(in_file_order, plan.row_slab.tolist(), strict=True))
        order = list(dict.fromkeys(slab_of[row] for row in rows))
        step_of_slab = {slab: step for step, slab in enumerate(order)}
        self._step_of_row = {row: step_of_slab[slab] for row, slab in slab_of.items()}
        self._rows_of_step = [[] for _ in order]
        for row, offset in zip(in_file_order, plan.row_offset.tolist(), strict=True):
            self._rows_of_step[self._step_of_row[row]].append((row, offset))
        self._starts = [0, *np.cumsum(plan.slab_nbytes[order]).tolist()]
        self._num_arrived = 0
        self._run = start(plan.in_order_of(order), order)
        self._arriving = self._run.slabs()

    def _bytes_of(self, row: int) -> torch.Tensor | None:
        step = self._step_of_row.get(row, -1)
        if row not in self._arrived and step >= self._num_arrived:
            if self._starts[step] - self._starts[self._num_arrived] > self._limit_bytes:
                # The program continues at a different place in the file.
                self.close()
                return None
            while self._num_arrived <= step:
                self._receive()
            if self._num_arrived == len(self._rows_of_step):
                self._end_run()
        tensor = self._arrived.pop(row, None)
        if tensor is not None:
            self._arrived_bytes -= tensor.nbytes
        self._drop_skipped()
        return tensor

    def _receive(self) -> None:
        assert self._run is not None and isinstance(self._run.place, HostPlace | CudaPlace)
        taken: torch.Tensor | Bytes = self._run.place.take(next(self._arriving))
        slab = taken if isinstance(taken, torch.Tensor) else as_bytes(taken.data)
        for row, offset in self._rows_of_step[self._num_arrived]:
            nbytes = int(self._table.nbytes[row])
            self._arrived[row] = slab.narrow(0, offset, nbytes)
            self._arrived_bytes += nbytes
        self._num_arrived += 1

    def _drop_skipped(self) -> None:
        while self._arrived_bytes > self._limit_bytes:
            oldest = next(iter(self._arrived))
            self._arrived_bytes -= self._arrived.pop(oldest).nbytes
