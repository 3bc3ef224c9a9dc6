"""One worker: it runs tasks of a job through four executors, several at a time, in bounded memory.

In: task numbers. Out: their bytes in the output's files, and their digests, by callback.
Not here: assigning tasks (`plan.placement`, `jobs.coordinator`), messages to the coordinator (`process`).

    post(task) --reserve--> fetch: ranges into host buffers --> place: to the device --> compute: operation, digests
                                                          send: pwrite at fixed places <-- place: back to the host
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from penstock.digest.leaf import leaf_digests
from penstock.engine.check import TensorChecker
from penstock.engine.executors import Executor, Pending, Step, Ticket, Work
from penstock.engine.trace import Trace
from penstock.errors import IntegrityError, OperationFailed, PenstockError
from penstock.jobs.job import Job, Written, bytes_read
from penstock.jobs.operations.operation import UNKNOWN, Streamed, report_to
from penstock.jobs.workers.compute import (
    ALIGN_BYTES,
    ComputeBackend,
    CudaCompute,
    HostCompute,
    Made,
    as_bytes,
    as_view,
    cut,
    packed,
)
from penstock.lifecycle import Closing
from penstock.loader.tensor import as_tensor, torch_dtype, torch_shape
from penstock.plan.tasks import Output, Recipe
from penstock.storage import is_remote
from penstock.storage.cache import CachedSource
from penstock.storage.output import OutputSet
from penstock.storage.weight_set import WeightSet
from penstock.types import MIB, U64

LOCAL_READ_BYTES, REMOTE_READ_BYTES = 16 * MIB, 8 * MIB
"""Size of one read: few enough reads for the interpreter; large enough for the link, small enough to share it.
Source: benchmarks/results/h200x2_202611/convert.md; benchmarks/results/h100_202611/load.md."""
LOCAL_READS, REMOTE_READS = 4, 16
"""Reads under way at once."""
MIN_WRITES, MAX_WRITES = 2, 4
"""Threads that write, a core each. Source: benchmarks/results/cpu2_202611/convert-faults.md, "Writing"."""

OnBegan = Callable[[int], None]
"""Called from an executor's thread: the operation runs on a task now."""
OnDone = Callable[[int, U64], None]
"""Called from an executor's thread: a task, and the digests of its pieces."""


class Worker(Closing):
    """The executors of one worker. A context manager: leaving it ends every thread.

    Args:
        job: the planned job.
        sources: opened, in the job's order.
        out: opened.
        device: where to compute.
        memory_bytes: bound of host memory that tasks hold, inputs and outputs.
        stall_s: deadline by progress.
        on_began, on_done: see `OnBegan`, `OnDone`.
        trace: receives the spans.

    Attributes:
        ticket: fails with the first error; `moved_bytes` counts bytes read and written.
        num_reports: progress reports of the operation.
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
        on_began: OnBegan,
        on_done: OnDone,
        trace: Trace,
    ) -> None:
        job.check_budget(memory_bytes, "one task")
        self._memory_bytes = memory_bytes
        self.num_reports = 0
        self.job = job
        self.out = out
        self._sources = sources
        self.began = on_began
        self.ended = on_done
        self.backend: ComputeBackend = (
            HostCompute(memory_bytes) if device.type == "cpu" else CudaCompute(memory_bytes, device)
        )
        self.buffers = self.backend.buffers
        self._rows = [{name: i for i, name in enumerate(source.manifest.tensors.names)} for source in sources]
        both = zip(sources, job.held_to, strict=True)
        self._checkers = [TensorChecker(source.manifest) if leaf_bytes else None for source, leaf_bytes in both]
        remote = any(is_remote(file.uri) for source in sources for file in source.sources)
        cores = len(os.sched_getaffinity(0))
        self.read_bytes = REMOTE_READ_BYTES if remote else LOCAL_READ_BYTES
        reads = REMOTE_READS if remote else min(LOCAL_READS, max(2, cores))

        def executor(name: str, num_threads: int) -> Executor:
            on_start = None if device.type == "cpu" else lambda: torch.cuda.set_device(device)
            return Executor(name, num_threads, trace=trace, stall_s=stall_s, on_thread_start=on_start)

        self.fetch, self.place = executor("fetch", reads), executor("place", 1)
        self.compute, self.send = executor("compute", 1), executor("send", min(MAX_WRITES, max(MIN_WRITES, cores)))
        self._executors = (self.fetch, self.place, self.compute, self.send)
        self.ticket = Ticket(
            int(job.memory_bytes.sum()), lambda: any(executor.is_busy() for executor in self._executors)
        )
        self.trace = trace
        # Read and write threads add to these counts at the same time; `+=` on an attribute is not atomic.
        self._moving, self._fetched_bytes = threading.Lock(), 0
        # Without a lock: one thread changes it, others only look, and a late look costs a task that is run for nothing.
        self._revoked: set[int] = set()

    def post(self, task: int) -> None:
        """Begin a task once there is memory for it. One thread calls it. Raises the error that stopped the worker."""
        if self.is_revoked(task):
            return
        run = _TaskRun(self, task, self.job.part_elements(task, self._memory_bytes))
        # Reserved for the whole task at once: tasks that took memory step by step could each wait for the others.
        self.buffers.reserve(run.memory_bytes, lambda: self.ticket.stopped)
        self.ticket.check()
        run.begin()

    def expect(self, task: int) -> None:
        """Forget that a task was revoked: it was assigned again, and will be posted."""
        self._revoked.discard(task)

    def revoke(self, task: int) -> None:
        """Skip a task or stop it at its next step; if it finishes all the same, its result does no harm."""
        self._revoked.add(task)

    def is_revoked(self, task: int) -> bool:
        """Return whether a task was revoked."""
        return task in self._revoked

    def report(self) -> None:
        """Count a progress report of the operation."""
        self.num_reports += 1

    def moved(self, nbytes: int, *, is_fetched: bool = False) -> None:
        """Note bytes read or written; `is_fetched`: from a source, past any cache, which counts for itself."""
        with self._moving:
            self.ticket.moved_bytes += nbytes
            self._fetched_bytes += nbytes if is_fetched else 0

    def bytes_read(self) -> tuple[int, int]:
        """Return bytes read from the sources, and bytes requested, from the sources or from a cache."""
        fetched_bytes, asked_bytes = bytes_read(self._sources)
        return self._fetched_bytes + fetched_bytes, self._fetched_bytes + asked_bytes

    def read(self, source: int, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with a tensor's bytes from `offset` on. IntegrityError if a leaf has another digest."""
        table = self._sources[source].manifest.tensors
        row = self._rows[source][name]
        file = self._sources[source].sources[int(table.file_index[row])]
        at, checker = int(table.offset[row]) + offset, self._checkers[source]
        file.readv(at, [into])
        if checker is not None:
            try:
                checker.check(row, offset, into, uri=file.uri)
            except IntegrityError:
                if not isinstance(file, CachedSource) or not file.forget(at, into.nbytes):
                    raise
                file.readv(at, [into])  # only the cached copy may be damaged: read the source once more
                checker.check(row, offset, into, uri=file.uri)
        self.moved(into.nbytes, is_fetched=not isinstance(file, CachedSource))

    def end(self) -> None:
        """Drain running steps and end the threads; nothing is written afterwards. Idempotent."""
        if not self.ticket.done:
            self.ticket.cancel()
        for executor in self._executors:
            executor.close()

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""
        self.end()
        self.buffers.close()


class _TaskRun:
    """One task on its way through the executors.

    Args:
        num_part: elements of the parts in which one step makes it; 0: it is read, made and written whole.
    """

    def __init__(self, worker: Worker, task: int, num_part: int) -> None:
        self.worker = worker
        self.task = task
        self.num_part = num_part
        job = worker.job
        self.memory_bytes = job.part_bytes(task, num_part) if num_part else int(job.memory_bytes[task])
        self.entries = [(job.recipes[index], start, stop) for index, start, stop in job.tasks.entries(task)]
        self.written = list(job.written(task))
        self.name = self.entries[0][0].outputs[0].spec.name
        self.sizes: list[int] = []
        self.wanted: list[tuple[int, int]] = []
        self.buffer: torch.Tensor | None = None
        self.placed: list[torch.Tensor] = []
        self.made: Made | None = None
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Post the reads of all inputs, rounded out to whole leaves, into one buffer, with the wanted part aligned."""
        if self.num_part:
            self.worker.compute.post(_InParts(self))
            return
        task_inputs = [
            (task_input, start, stop) for recipe, start, stop in self.entries for task_input in recipe.inputs
        ]
        held_to = self.worker.job.held_to
        ranges = [
            task_input.leaf_range(start, stop, held_to[task_input.source]) for task_input, start, stop in task_inputs
        ]
        for (task_input, start, stop), (low, high) in zip(task_inputs, ranges, strict=True):
            first, last = task_input.byte_range(start, stop)
            # Leaves begin before the wanted bytes, so the padding goes in front of them: a tensor must be aligned.
            at = -(-(first - low) // ALIGN_BYTES) * ALIGN_BYTES
            self.wanted.append((at, at + last - first))
            self.sizes.append(at + high - first)
        self.buffer = self.worker.buffers.get(packed(self.sizes)[-1])
        steps: list[Step] = []
        for (task_input, _, _), (low, high), raw in zip(task_inputs, ranges, cut(self.buffer, self.sizes), strict=True):
            view, leaf_bytes = as_view(raw)[len(raw) - (high - low) :], held_to[task_input.source] or 1
            # Reads are whole leaves, since a leaf can only be compared with its digest when all of it is there.
            step = max(self.worker.read_bytes // leaf_bytes, 1) * leaf_bytes
            for at in range(0, len(view), step):
                steps.append(_Fetch(self, task_input.source, task_input.spec.name, low + at, view[at : at + step]))
        self._left = len(steps)
        if steps:
            self.worker.fetch.post(*steps)
        else:
            self.worker.place.post(_PlaceIn(self))

    def arrived(self) -> None:
        """Count a finished read; after the last one, post the next step."""
        # Reads end on several threads; exactly one of them must find that it was the last.
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self.pass_on(self.worker.place, _PlaceIn(self))

    def pass_on(self, executor: Executor, step: Step) -> None:
        """Post the next step, or end the task if it was revoked."""
        if self.worker.is_revoked(self.task):
            self.end()
        else:
            executor.post(step)

    def run(self) -> list[torch.Tensor]:
        """Run the operation on every entry; return the task's outputs.

        Raises:
            OperationFailed: a user's function raised, or returned other tensors than its recipe says.
        """
        left, results = iter(self.placed), []
        for recipe, start, stop in self.entries:
            if recipe.copies and recipe.inputs[0].spec.dtype in UNKNOWN:
                results.append(next(left))
                continue
            inputs: list[torch.Tensor | None] = []
            for recipe_input in recipe.inputs:
                raw, box = next(left), recipe_input.taken(start, stop)
                if box is None:
                    inputs.append(None)
                    continue
                shape = (box.shape[0], *recipe_input.spec.shape[1:]) if box.start else ()
                tensor = as_tensor(raw, recipe_input.spec.dtype, shape)
                if box.shape[1:] != shape[1:]:
                    cut = (slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
                    tensor = tensor[(slice(None), *cut)].contiguous()
                inputs.append(tensor)
            outputs = self.worker.job.operation.run(recipe, start, stop, inputs)
            if len(outputs) != len(recipe.outputs):
                raise OperationFailed(f"it gave {len(outputs)} tensors, not {len(recipe.outputs)}", tensor=self.name)
            results += [
                self._checked(output, start, stop, out) for output, out in zip(recipe.outputs, outputs, strict=True)
            ]
        return results

    def _checked(self, output: Output, start: int, stop: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it has the dtype, shape and device of the recipe for these rows. OperationFailed."""
        spec, (first, last) = output.spec, output.rows(start, stop)
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        wanted = f"{spec.dtype}, {list(shape)}"
        if not isinstance(tensor, torch.Tensor):
            raise OperationFailed(f"it gave {type(tensor).__name__}, not a tensor ({wanted})", tensor=spec.name)
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != torch_shape(spec.dtype, shape):
            actual = f"{tensor.dtype}, {list(tensor.shape)}"
            raise OperationFailed(f"rows {start} to {stop} are {actual}, not {wanted}", tensor=spec.name)
        if tensor.device.type != self.worker.backend.device.type:
            raise OperationFailed(f"it gave a tensor on {tensor.device}", tensor=spec.name)
        return tensor

    @contextmanager
    def operating(self) -> Iterator[None]:
        """Run the operation in this context: count its progress reports, raise its errors as OperationFailed."""
        token = report_to.set(self.worker.report)
        try:
            yield
        except (PenstockError, torch.cuda.OutOfMemoryError):
            raise
        except BaseException as error:  # a user's code, which may well call sys.exit
            message = f"{self.worker.job.operation.name} raised {type(error).__name__}: {error}"
            raise OperationFailed(message, tensor=self.name) from error
        finally:
            report_to.reset(token)

    def free_inputs(self) -> None:
        """Put the input buffer back. Order: after the last read of the host's copy."""
        if self.buffer is not None:
            self.worker.buffers.put(self.buffer)
        self.buffer = None

    def end(self) -> None:
        """Release all memory of the task: it is written, or was revoked."""
        self.free_inputs()
        self.placed = []
        if self.made is not None and self.made.buffer is not None:
            self.worker.buffers.put(self.made.buffer)
        self.made = None
        self.worker.buffers.unreserve(self.memory_bytes)


class _TaskStep(Work):
    """Base of a task's steps. Earlier tasks run first; the memory of an abandoned task is freed with its worker."""

    what = ""

    def __init__(self, run: _TaskRun, nbytes: int = 0) -> None:
        super().__init__(run.worker.ticket, run.task, f"{self.what} {run.name}", nbytes)
        self.run = run


class _Fetch(_TaskStep):
    """Step that reads one range."""

    what = "read"

    def __init__(self, run: _TaskRun, source: int, tensor: str, offset: int, into: memoryview) -> None:
        super().__init__(run, into.nbytes)
        self._source, self._tensor, self._offset, self._into = source, tensor, offset, into

    def start(self) -> None:
        self.run.worker.read(self._source, self._tensor, self._offset, self._into)

    def finish(self) -> None:
        self.run.arrived()


class _PlaceIn(_TaskStep):
    """Step that moves inputs to the device."""

    what = "place"

    def start(self) -> Pending | None:
        assert self.run.buffer is not None
        placed, pending = self.run.worker.backend.place(self.run.buffer, self.run.sizes)
        self.run.placed = [raw[start:stop] for raw, (start, stop) in zip(placed, self.run.wanted, strict=True)]
        self.nbytes = sum(self.run.sizes)
        return pending

    def finish(self) -> None:
        # Early, where the device has a copy: the buffer can then serve the next task while this one computes.
        if self.run.worker.backend.copies:
            self.run.free_inputs()
        self.run.pass_on(self.run.worker.compute, _Compute(self.run))


class _Compute(_TaskStep):
    """Step that runs the operation, computes digests, and copies the outputs to the host."""

    what = "make"

    def start(self) -> Pending | None:
        run = self.run
        run.worker.began(run.task)
        leaf_bytes = run.worker.job.leaf_bytes
        pieces = [
            [(a - written.start, b - written.start) for a, b in written.pieces(leaf_bytes)] for written in run.written
        ]
        run.made, pending = run.worker.backend.make(self._run, pieces)
        self.nbytes = sum(len(raw) for raw in run.made.raw)
        return pending

    def _run(self) -> Sequence[torch.Tensor]:
        with self.run.operating():
            return self.run.run()

    def finish(self) -> None:
        self.run.placed = []
        self.run.pass_on(self.run.worker.send, _Send(self.run))


class _InParts(_TaskStep):
    """Step that runs a whole task whose tensors do not fit in memory: it reads the inputs in parts, once for each pass
    of the operation, and writes the outputs part by part.

    It does not read ahead: tasks of this size are limited by the operation.
    """

    what = "make"

    def start(self) -> None:
        run, worker = self.run, self.run.worker
        worker.began(run.task)
        ((recipe, _, _),) = run.entries
        operation = worker.job.operation
        assert isinstance(operation, Streamed)
        written = [_Written(worker, where) for where in run.written]
        scratch: dict[int, torch.Tensor] = {}
        with worker.backend.entered(), run.operating():
            parts = operation.run_parts(recipe, run.num_part, partial(self._read, recipe, scratch))
            for outputs in parts:
                for output, tensor in zip(written, outputs, strict=True):
                    output.add(as_bytes(tensor.cpu()))
                    self.nbytes += tensor.nbytes
                if worker.is_revoked(run.task):
                    return
        self._digests = np.concatenate([output.end(run.name) for output in written])

    def _read(
        self, recipe: Recipe, scratch: dict[int, torch.Tensor], index: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ReadPart`."""
        worker, recipe_input = self.run.worker, recipe.inputs[index]
        worker.ticket.check()
        width, leaf_bytes = recipe_input.spec.dtype.bits // 8, worker.job.held_to[recipe_input.source] or 1
        first, last = start * width, stop * width
        low, high = first // leaf_bytes * leaf_bytes, min(-(-last // leaf_bytes) * leaf_bytes, recipe_input.spec.nbytes)
        if index not in scratch or len(scratch[index]) < high - low:
            scratch[index] = torch.empty(high - low, dtype=torch.uint8)
        raw = scratch[index][: high - low]
        step = max(worker.read_bytes // leaf_bytes, 1) * leaf_bytes
        for at in range(0, high - low, step):
            worker.read(recipe_input.source, recipe_input.spec.name, low + at, as_view(raw[at : at + step]))
        part = raw[first - low : last - low]
        part = part if (first - low) % width == 0 else part.clone()
        return as_tensor(part, recipe_input.spec.dtype, (stop - start,)).to(worker.backend.device)

    def finish(self) -> None:
        run = self.run
        revoked = run.worker.is_revoked(run.task)
        run.end()
        if not revoked:
            run.worker.ended(run.task, self._digests)


class _Written:
    """One output of a task that is made in parts; its bytes are written in order, and digested piece by piece."""

    def __init__(self, worker: Worker, where: Written) -> None:
        table = worker.job.files.table
        self._worker, self._file = worker, int(table.file_index[where.row])
        self._offset, self._stop = int(table.offset[where.row]) + where.start, where.stop - where.start
        self._pieces = where.pieces(worker.job.leaf_bytes)
        self._digests = np.empty(len(self._pieces), np.uint64)
        self._done = self._num_digested = 0
        self._rest = bytearray()
        """Bytes of the piece that is not complete yet."""

    def add(self, raw: torch.Tensor) -> None:
        """Write the next bytes, and digest every piece that they complete."""
        view = as_view(raw)
        self._worker.out.write(self._file, self._offset + self._done, view)
        self._worker.moved(view.nbytes)
        self._done += view.nbytes
        self._rest += view
        at = 0
        for start, stop in self._pieces[self._num_digested :]:
            if len(self._rest) - at < stop - start:
                break
            number = self._num_digested
            leaf_digests(memoryview(self._rest)[at:][: stop - start], stop - start, self._digests[number : number + 1])
            self._num_digested += 1
            at += stop - start
        del self._rest[:at]

    def end(self, tensor: str) -> U64:
        """Return the digests. OperationFailed if the parts do not add up to the output's size."""
        if self._done != self._stop:
            raise OperationFailed(f"its parts are {self._done} bytes, not {self._stop}", tensor=tensor)
        return self._digests


class _Send(_TaskStep):
    """Step that writes the outputs into their files."""

    what = "write"

    def start(self) -> None:
        run = self.run
        assert run.made is not None
        table = run.worker.job.files.table
        for raw, where in zip(run.made.raw, run.written, strict=True):
            at = int(table.offset[where.row]) + where.start
            run.worker.out.write(int(table.file_index[where.row]), at, as_view(raw))
            self.nbytes += len(raw)
        run.worker.moved(self.nbytes)

    def finish(self) -> None:
        run = self.run
        assert run.made is not None
        digests = run.made.digests.copy()  # it lies in a buffer that `end` releases to other tasks
        run.end()
        run.worker.ended(run.task, digests)
