"""One worker: runs tasks of a job through the four executors, ahead of each other, in bounded memory.

In: task numbers. Out: their bytes in the output's files, and digests, to whoever listens.
Not here: who is given which task (`plan.placement`, `run`), talking to the coordinator (`process`).

    post(task) --reserve--> fetch: ranges into host buffers --> place: to the device --> compute: operation, digests
                                                          send: pwrite at fixed places <-- place: back to the host
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from penstock.engine.executors import Executor, Pending
from penstock.engine.ticket import Ticket
from penstock.engine.trace import Trace
from penstock.errors import OperationFailed, PenstockError
from penstock.jobs.buffers import Buffers
from penstock.jobs.job import Job
from penstock.jobs.lane import CudaLane, HostLane, Lane, Made, as_view
from penstock.loader.tensor import as_tensor
from penstock.plan.tasks import Recipe
from penstock.storage import is_remote
from penstock.storage.manifest import WeightSet
from penstock.storage.output import OutputSet
from penstock.types import MIB, U64

READ_BYTES = 8 * MIB
"""Of one read. Source: benchmarks/results/h100_202611/load.md: large enough for the link, small enough to share it."""
LOCAL_READS, REMOTE_READS = 4, 16
"""Reads under way at once."""
WRITES = 2

OnDone = Callable[[int, U64], None]
"""Called from an executor's thread: a task, and the digests of its pieces."""


class Worker:
    """A context manager: leaving it ends every thread.

    Args:
        job: what tasks are of.
        sources: opened, in the job's order.
        out: opened.
        device: where to compute.
        memory_bytes: bound of host memory that tasks hold, inputs and outputs.
        stall_s: deadline by progress.
        on_done: see `OnDone`.
        trace: where spans go.

    Attributes:
        ticket: fails with the first error; `moved_bytes` is what was read and written.
    """

    def __init__(
        self,
        job: Job,
        sources: Sequence[WeightSet],
        out: OutputSet,
        *,
        device: torch.device,
        memory_bytes: int,
        stall_s: float,
        on_done: OnDone,
        trace: Trace,
    ) -> None:
        job.check_budget(memory_bytes, "one task")
        self.job, self.out, self._sources, self._on_done = job, out, sources, on_done
        self.buffers = Buffers(memory_bytes, pinned=device.type == "cuda")
        self.lane: Lane = HostLane(self.buffers) if device.type == "cpu" else CudaLane(self.buffers, device)
        self._rows = [{name: i for i, name in enumerate(source.manifest.tensors.names)} for source in sources]
        remote = any(is_remote(one.uri) for source in sources for one in source.sources)
        cores = len(os.sched_getaffinity(0))
        reads = REMOTE_READS if remote else min(LOCAL_READS, max(2, cores))

        def executor(name: str, num_threads: int) -> Executor:
            on_start = None if device.type == "cpu" else lambda: torch.cuda.set_device(device)
            return Executor(name, num_threads, trace=trace, stall_s=stall_s, on_thread_start=on_start)

        self.fetch, self.place = executor("fetch", reads), executor("place", 1)
        self.compute, self.send = executor("compute", 1), executor("send", WRITES)
        self._executors = (self.fetch, self.place, self.compute, self.send)
        self.ticket = Ticket(int(job.tasks.cost.sum()), lambda: any(one.is_busy() for one in self._executors))
        self.trace = trace
        self._moving = threading.Lock()
        self._revoked: set[int] = set()

    def post(self, task: int) -> None:
        """Begin a task once there is memory for it. One thread calls it. Raises what stopped the worker."""
        if task in self._revoked:
            self._revoked.discard(task)
            return
        self.buffers.reserve(int(self.job.tasks.cost[task]), lambda: self.ticket.stopped)
        self.ticket.check()
        _TaskRun(self, task).begin()

    def expect(self, task: int) -> None:
        """It will be posted, whatever was said of it before."""
        self._revoked.discard(task)

    def revoke(self, task: int) -> None:
        """It need not be begun; if it was, its result does no harm."""
        self._revoked.add(task)

    def moved(self, nbytes: int) -> None:
        """Note bytes read or written."""
        with self._moving:
            self.ticket.moved_bytes += nbytes

    def ended(self, task: int, digests: U64) -> None:
        """A task's bytes are all written."""
        self._on_done(task, digests)

    def read(self, source: int, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with a tensor's bytes from `offset` on."""
        table = self._sources[source].manifest.tensors
        row = self._rows[source][name]
        at = int(table.offset[row]) + offset
        self._sources[source].sources[int(table.file_index[row])].readv(at, [into])
        self.moved(into.nbytes)

    def close(self) -> None:
        """Drain what runs, end the threads. Idempotent."""
        if not self.ticket.done:
            self.ticket.cancel()
        for one in self._executors:
            one.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TaskRun:
    """One task on its way through the executors."""

    def __init__(self, worker: Worker, task: int) -> None:
        self.worker, self.task = worker, task
        job = worker.job
        self.entries = [(job.recipes[index], start, stop) for index, start, stop in job.tasks.entries(task)]
        self.written = list(job.written(task))
        self.name = self.entries[0][0].outputs[0].spec.name
        self.raw: list[torch.Tensor] = []
        self.placed: list[torch.Tensor] = []
        self.made: list[Made] = []
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Post the reads of all inputs."""
        steps: list[_Step] = []
        for recipe, start, stop in self.entries:
            for given in recipe.inputs:
                first, _ = given.read_rows(start, stop)
                nbytes = given.read_nbytes(start, stop)
                raw = self.worker.buffers.get(nbytes)
                self.raw.append(raw)
                offset = given.offset_of(first)
                view = as_view(raw)
                for at in range(0, nbytes, READ_BYTES):
                    part = view[at : at + READ_BYTES]
                    steps.append(_Fetch(self, given.source, given.spec.name, offset + at, part))
        self._left = len(steps)
        if steps:
            self.worker.fetch.post(*steps)
        else:
            self.worker.place.post(_PlaceIn(self))

    def arrived(self) -> None:
        """One read is over."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self.worker.place.post(_PlaceIn(self))

    def run(self) -> list[torch.Tensor]:
        """The operation on every entry: the task's outputs.

        Raises:
            OperationFailed: a user's function raised, or gave other tensors than it said.
        """
        left, made = iter(self.placed), []
        for recipe, start, stop in self.entries:
            inputs: list[torch.Tensor | None] = []
            for given in recipe.inputs:
                raw, box = next(left), given.taken(start, stop)
                if box is None:
                    inputs.append(None)
                    continue
                shape = (box.shape[0], *given.spec.shape[1:]) if box.start else ()
                tensor = as_tensor(raw, given.spec.dtype, shape)
                if box.shape[1:] != shape[1:]:
                    cut = (slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
                    tensor = tensor[(slice(None), *cut)].contiguous()
                inputs.append(tensor)
            outputs = self.worker.job.operation.run(recipe, start, stop, inputs)
            made += [self._checked(i, recipe, start, stop, out) for i, out in enumerate(outputs)]
            if len(outputs) != len(recipe.outputs):
                raise OperationFailed(f"it gave {len(outputs)} tensors, not {len(recipe.outputs)}", tensor=self.name)
        return made

    def _checked(self, i: int, recipe: Recipe, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        first, last = recipe.outputs[i].byte_range(start, stop)
        if out.nbytes != last - first:
            spec = recipe.outputs[i].spec
            message = (
                f"rows {start} to {stop} have {out.nbytes} bytes ({out.dtype}, {list(out.shape)}), not {last - first}"
            )
            raise OperationFailed(message, tensor=spec.name)
        return out

    def free_inputs(self) -> None:
        """Nobody looks at the host's copy any more."""
        for raw in self.raw:
            self.worker.buffers.put(raw)
        self.raw = []

    def end(self) -> None:
        """All is written, or nothing more will be."""
        for one in self.made:
            if one.buffer is not None:
                self.worker.buffers.put(one.buffer)
        self.made = []
        self.worker.buffers.unreserve(int(self.worker.job.tasks.cost[self.task]))


class _Step:
    """What the steps of a task share. Earlier tasks first."""

    nbytes = 0
    what = ""

    def __init__(self, run: _TaskRun) -> None:
        self.run, self.ticket, self.priority = run, run.worker.ticket, run.task
        self.name = f"{self.what} {run.name}"

    def start(self) -> Pending | None:
        """See `Step.start`."""
        raise NotImplementedError

    def finish(self) -> None:
        """See `Step.finish`."""

    def abandon(self) -> None:
        """See `Step.abandon`: the worker ends, and its memory with it."""


class _Fetch(_Step):
    """Read one range."""

    what = "read"

    def __init__(self, run: _TaskRun, source: int, tensor: str, offset: int, into: memoryview) -> None:
        super().__init__(run)
        self._source, self._tensor, self._offset, self._into = source, tensor, offset, into
        self.nbytes = into.nbytes

    def start(self) -> None:
        self.run.worker.read(self._source, self._tensor, self._offset, self._into)

    def finish(self) -> None:
        self.run.arrived()


class _PlaceIn(_Step):
    """Inputs to where they are computed with."""

    what = "place"

    def start(self) -> Pending | None:
        self.run.placed, pending = self.run.worker.lane.place(self.run.raw)
        self.nbytes = sum(len(raw) for raw in self.run.raw)
        return pending

    def finish(self) -> None:
        if self.run.worker.lane.copies:
            self.run.free_inputs()
        self.run.worker.compute.post(_Compute(self.run))


class _Compute(_Step):
    """The operation, the digests, and back to the host."""

    what = "make"

    def start(self) -> Pending | None:
        run = self.run
        leaf_bytes = run.worker.job.leaf_bytes
        pieces = [[(a - one.start, b - one.start) for a, b in one.pieces(leaf_bytes)] for one in run.written]
        run.made, pending = run.worker.lane.make(self._run, pieces)
        self.nbytes = sum(len(one.raw) for one in run.made)
        return pending

    def _run(self) -> Sequence[torch.Tensor]:
        try:
            return self.run.run()
        except PenstockError:
            raise
        except Exception as error:
            operation = self.run.worker.job.operation.name
            message = f"{operation} raised {type(error).__name__}: {error}"
            raise OperationFailed(message, tensor=self.run.name) from error

    def finish(self) -> None:
        self.run.placed = []
        self.run.worker.send.post(_Send(self.run))


class _Send(_Step):
    """The outputs into their files."""

    what = "write"

    def start(self) -> None:
        run = self.run
        table = run.worker.job.files.table
        for one, where in zip(run.made, run.written, strict=True):
            at = int(table.offset[where.row]) + where.start
            run.worker.out.write(int(table.file_index[where.row]), at, as_view(one.raw))
            self.nbytes += len(one.raw)
        run.worker.moved(self.nbytes)

    def finish(self) -> None:
        run = self.run
        digests = np.concatenate([one.digests for one in run.made]) if run.made else np.zeros(0, np.uint64)
        run.free_inputs()  # what was made of them on the host may be a view of them
        run.end()
        run.worker.ended(run.task, digests)
