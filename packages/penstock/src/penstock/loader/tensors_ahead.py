"""Tensors of a local file that are read to a GPU ahead of a program that requests them one after another.

A run that reads the tensors that follow is started by a request for the first tensor, by two requests in file order, or
by one request after `expect`. The run reads straight to the device, and stays at most `limit_bytes` ahead of the
requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock import lifecycle
from penstock.engine.place import CudaPlace, HostPlace
from penstock.errors import PenstockError
from penstock.loader.run import LoadRun
from penstock.plan.schedule import SMALL_BYTES, LoadPlan
from penstock.types import TensorTable

Planner = Callable[[Sequence[int]], LoadPlan]
"""Plans rows, which it gets in file order."""
Starter = Callable[[LoadPlan, Sequence[int]], LoadRun]
"""Starts a windowed run of a plan, which yields the slabs in the given order."""

_PRODUCTIVE = 4
"""A run that was replaced after fewer tensors than this was a mistake, and no other run starts."""


class TensorsAhead:
    """The tensors that a run reads ahead of the requests. The caller serialises all calls.

    Smaller tensors than `SMALL_BYTES` are never read ahead, so no tensor shares memory with another. Tensors that the
    program skips wait for a later request until they exceed `limit_bytes`. Then the oldest is dropped.

    Args:
        table: all rows of the file, in file order.
        limit_bytes: limit of the tensors that are read ahead, and separately of the tensors that were skipped.
        enough_bytes: size of the following tensors from which reading ahead is faster than separate reads.
    """

    def __init__(self, table: TensorTable, *, limit_bytes: int, enough_bytes: int) -> None:
        self._nbytes: list[int] = table.nbytes.tolist()
        self._large = [row for row, nbytes in enumerate(self._nbytes) if nbytes >= SMALL_BYTES]
        self._index = {row: index for index, row in enumerate(self._large)}
        self._limit_bytes = limit_bytes
        self._enough_bytes = enough_bytes
        self._expected: list[int] = []
        # The index in `_large` of the row after the last request. A program that requests the first row of the file
        # most likely requests all rows.
        self._next = 0
        self._is_off = False
        self._pid = os.getpid()
        self._run: LoadRun | None = None
        self._arriving: Iterator[int] = iter(())
        # The rows of the run in the order of the requests, the bytes before each, and the number that has arrived.
        self._order: list[int] = []
        self._step: dict[int, int] = {}
        self._starts: list[int] = []
        self._num_arrived = self._num_taken = 0
        self._arrived: dict[int, torch.Tensor] = {}
        self._arrived_bytes = 0

    @property
    def is_reading(self) -> bool:
        """Return whether a run uses the threads and the staging of the file."""
        return self._run is not None

    def expect(self, rows: Sequence[int]) -> None:
        """Announce the rows that will be requested, in order. Replace the previous announcement."""
        self.close()
        self._expected = [row for row in dict.fromkeys(rows) if row in self._index]

    # The functions are arguments of `take`, because an open file that owns this object and its own methods would be a
    # reference cycle, and would stay open until a garbage collection.
    def take(self, row: int, plan: Planner, start: Starter) -> torch.Tensor | None:
        """Return the bytes of a row on the device, or None if the caller must read the row itself.

        The caller owns the bytes, a flat uint8 tensor. A second request for a row returns None.
        """
        if self._is_off or row not in self._index or self._pid != os.getpid():
            return None
        try:
            tensor = self._from_run(row)
            if tensor is None and (order := self._order_from(row)):
                self._start(order, plan, start)
                tensor = self._from_run(row)
        except PenstockError:
            # The fault may be in a row that the program never requests. The caller's own read of this row raises the
            # error of this row.
            self._is_off = True
            self.close()
            return None
        except BaseException:
            self.close()
            raise
        self._next = self._index[row] + 1
        return tensor

    def close(self) -> None:
        """End the run, and drop the tensors that were not requested. Idempotent."""
        self._end_run()
        self._arrived.clear()
        self._arrived_bytes = 0

    def _end_run(self) -> None:
        run, self._run = self._run, None
        self._arriving = iter(())
        self._step = {}
        # A forked child has no reading threads.
        if run is not None and self._pid == os.getpid() and not lifecycle.is_ending():
            run.close()

    def _order_from(self, row: int) -> list[int]:
        """Return the rows to read ahead in the order of the requests. Return no rows if a run is not worth it yet."""
        if row in self._expected:
            at = self._expected.index(row)
            # Threads of the program may make the first requests in a different order.
            if sum(self._nbytes[each] for each in self._expected[:at]) <= self._limit_bytes:
                at = 0
            order, self._expected = self._expected[at:], []
        elif self._index[row] == self._next:
            order = self._large[self._next :]
        else:
            return []
        if sum(self._nbytes[each] for each in order) < self._enough_bytes:
            return []
        self._is_off = self._run is not None and self._num_taken < _PRODUCTIVE
        self.close()
        return [] if self._is_off else order

    def _start(self, order: list[int], plan_rows: Planner, start: Starter) -> None:
        in_file_order = sorted(order)
        plan = plan_rows(in_file_order)
        # Every row is large and has a slab to itself.
        slab_of = dict(zip(in_file_order, plan.row_slab.tolist(), strict=True))
        slabs = [slab_of[row] for row in order]
        self._order = order
        self._step = {row: step for step, row in enumerate(order)}
        self._starts = [0, *np.cumsum([self._nbytes[row] for row in order]).tolist()]
        self._num_arrived = self._num_taken = 0
        self._run = start(plan.in_order_of(slabs), slabs)
        self._arriving = self._run.slabs()

    def _from_run(self, row: int) -> torch.Tensor | None:
        step = self._step.get(row, -1)
        if step >= self._num_arrived:
            if self._starts[step] - self._starts[self._num_arrived] > self._limit_bytes:
                return None
            while self._num_arrived <= step:
                self._receive()
            if self._num_arrived == len(self._order):
                self._end_run()
        tensor = self._arrived.pop(row, None)
        if tensor is not None:
            self._arrived_bytes -= tensor.nbytes
            self._num_taken += 1
            if tensor.is_cuda:
                # The memory belongs to the stream on which the run was opened.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        while self._arrived_bytes > self._limit_bytes:
            oldest = next(iter(self._arrived))
            self._arrived_bytes -= self._arrived.pop(oldest).nbytes
        return tensor

    def _receive(self) -> None:
        assert self._run is not None and isinstance(self._run.place, HostPlace | CudaPlace)
        slab = torch.as_tensor(self._run.place.take(next(self._arriving)))
        self._arrived[self._order[self._num_arrived]] = slab
        self._arrived_bytes += slab.nbytes
        self._num_arrived += 1
