"""One worker: runs tasks of a job through the four executors, ahead of each other, in bounded memory.

In: task numbers. Out: their bytes in the output's files, and digests, to whoever listens.
Not here: who is given which task (`plan.placement`, `jobs.coordinator`), talking to the coordinator (`process`).

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

from penstock.closing import Closing
from penstock.digest.leaf import leaf_digests
from penstock.engine.check import TensorChecker
from penstock.engine.executors import Executor, Pending, Step, Work
from penstock.engine.ticket import Ticket
from penstock.engine.trace import Trace
from penstock.errors import IntegrityError, OperationFailed, PenstockError
from penstock.jobs.cache_locality import came
from penstock.jobs.job import Job, Written
from penstock.jobs.operations.operation import UNKNOWN, Streamed, report_to
from penstock.jobs.workers.buffers import ALIGN_BYTES, cut, packed
from penstock.jobs.workers.compute import ComputeBackend, CudaCompute, HostCompute, Made, as_bytes, as_view
from penstock.loader.tensor import as_tensor, torch_dtype, torch_shape
from penstock.plan.tasks import Output, Recipe
from penstock.storage import is_remote
from penstock.storage.cache import CachedSource
from penstock.storage.output import OutputSet
from penstock.storage.weight_set import WeightSet
from penstock.types import MIB, U64

LOCAL_READ_BYTES, REMOTE_READ_BYTES = 16 * MIB, 8 * MIB
"""Of one read: few enough for the interpreter; large enough for the link, small enough to share it.
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
    """A context manager: leaving it ends every thread.

    Args:
        job: what tasks are of.
        sources: opened, in the job's order.
        out: opened.
        device: where to compute.
        memory_bytes: bound of host memory that tasks hold, inputs and outputs.
        stall_s: deadline by progress.
        on_began, on_done: see `OnBegan`, `OnDone`.
        trace: where spans go.

    Attributes:
        ticket: fails with the first error; `moved_bytes` is what was read and written.
        num_reports: times that the operation said that it gets on.
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
        self._memory_bytes, self.num_reports = memory_bytes, 0
        self.job, self.out, self._sources = job, out, sources
        self.began, self.ended = on_began, on_done
        self.backend: ComputeBackend = (
            HostCompute(memory_bytes) if device.type == "cpu" else CudaCompute(memory_bytes, device)
        )
        self.buffers = self.backend.buffers
        self._rows = [{name: i for i, name in enumerate(source.manifest.tensors.names)} for source in sources]
        both = zip(sources, job.held_to, strict=True)
        self._checkers = [TensorChecker(source.manifest) if leaf_bytes else None for source, leaf_bytes in both]
        remote = any(is_remote(one.uri) for source in sources for one in source.sources)
        cores = len(os.sched_getaffinity(0))
        self.read_bytes = REMOTE_READ_BYTES if remote else LOCAL_READ_BYTES
        reads = REMOTE_READS if remote else min(LOCAL_READS, max(2, cores))

        def executor(name: str, num_threads: int) -> Executor:
            on_start = None if device.type == "cpu" else lambda: torch.cuda.set_device(device)
            return Executor(name, num_threads, trace=trace, stall_s=stall_s, on_thread_start=on_start)

        self.fetch, self.place = executor("fetch", reads), executor("place", 1)
        self.compute, self.send = executor("compute", 1), executor("send", min(MAX_WRITES, max(MIN_WRITES, cores)))
        self._executors = (self.fetch, self.place, self.compute, self.send)
        self.ticket = Ticket(int(job.memory_bytes.sum()), lambda: any(one.is_busy() for one in self._executors))
        self.trace = trace
        self._moving, self._fetched_bytes = threading.Lock(), 0
        self._revoked: set[int] = set()

    def post(self, task: int) -> None:
        """Begin a task once there is memory for it. One thread calls it. Raises what stopped the worker."""
        if self.is_revoked(task):
            return
        run = _TaskRun(self, task, self.job.part_elements(task, self._memory_bytes))
        self.buffers.reserve(run.memory_bytes, lambda: self.ticket.stopped)
        self.ticket.check()
        run.begin()

    def expect(self, task: int) -> None:
        """It will be posted, whatever was said of it before."""
        self._revoked.discard(task)

    def revoke(self, task: int) -> None:
        """It need not be begun, or gone on with; if it is done all the same, its result does no harm."""
        self._revoked.add(task)

    def is_revoked(self, task: int) -> bool:
        """Return whether nobody waits for it any more."""
        return task in self._revoked

    def report(self) -> None:
        """The operation gets on."""
        self.num_reports += 1

    def moved(self, nbytes: int, *, is_fetched: bool = False) -> None:
        """Note bytes read or written; `is_fetched`: from a source, past any cache, which counts for itself."""
        with self._moving:
            self.ticket.moved_bytes += nbytes
            self._fetched_bytes += nbytes if is_fetched else 0

    def came(self) -> tuple[int, int]:
        """Return bytes that came from the sources, and that were read, from there or from a cache."""
        fetched_bytes, asked_bytes = came(self._sources)
        return self._fetched_bytes + fetched_bytes, self._fetched_bytes + asked_bytes

    def read(self, source: int, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with a tensor's bytes from `offset` on. IntegrityError where a leaf of them differs."""
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
                file.readv(at, [into])  # it may have been damaged on its way into the cache, and not where it is from
                checker.check(row, offset, into, uri=file.uri)
        self.moved(into.nbytes, is_fetched=not isinstance(file, CachedSource))

    def end(self) -> None:
        """Drain what runs, end the threads: nothing is written any more. Idempotent."""
        if not self.ticket.done:
            self.ticket.cancel()
        for one in self._executors:
            one.close()

    def close(self) -> None:
        """End, and free its memory. Idempotent."""
        self.end()
        self.buffers.close()


class _TaskRun:
    """One task on its way through the executors.

    Args:
        num_part: elements of the parts that it is made in, by one step; 0: it is read, made and written whole.
    """

    def __init__(self, worker: Worker, task: int, num_part: int) -> None:
        self.worker, self.task, self.num_part = worker, task, num_part
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
        """Post the reads of all inputs, out to the ends of leaves, into one buffer; what is wanted is aligned."""
        if self.num_part:
            self.worker.compute.post(_InParts(self))
            return
        given = [(one, start, stop) for recipe, start, stop in self.entries for one in recipe.inputs]
        held_to = self.worker.job.held_to
        ranges = [one.leaf_range(start, stop, held_to[one.source]) for one, start, stop in given]
        for (one, start, stop), (low, high) in zip(given, ranges, strict=True):
            first, last = one.byte_range(start, stop)
            at = -(-(first - low) // ALIGN_BYTES) * ALIGN_BYTES
            self.wanted.append((at, at + last - first))
            self.sizes.append(at + high - first)
        self.buffer = self.worker.buffers.get(packed(self.sizes)[-1])
        steps: list[Step] = []
        for (one, _, _), (low, high), raw in zip(given, ranges, cut(self.buffer, self.sizes), strict=True):
            view, leaf_bytes = as_view(raw)[len(raw) - (high - low) :], held_to[one.source] or 1
            step = max(self.worker.read_bytes // leaf_bytes, 1) * leaf_bytes
            for at in range(0, len(view), step):
                steps.append(_Fetch(self, one.source, one.spec.name, low + at, view[at : at + step]))
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
            self.pass_on(self.worker.place, _PlaceIn(self))

    def pass_on(self, executor: Executor, step: Step) -> None:
        """The next step, if anybody still waits for the task."""
        if self.worker.is_revoked(self.task):
            self.end()
        else:
            executor.post(step)

    def run(self) -> list[torch.Tensor]:
        """Return the operation on every entry: the task's outputs.

        Raises:
            OperationFailed: a user's function raised, or gave other tensors than it said.
        """
        left, made = iter(self.placed), []
        for recipe, start, stop in self.entries:
            if recipe.copies and recipe.inputs[0].spec.dtype in UNKNOWN:
                made.append(next(left))
                continue
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
            if len(outputs) != len(recipe.outputs):
                raise OperationFailed(f"it gave {len(outputs)} tensors, not {len(recipe.outputs)}", tensor=self.name)
            made += [self._checked(one, start, stop, out) for one, out in zip(recipe.outputs, outputs, strict=True)]
        return made

    def _checked(self, output: Output, start: int, stop: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, if it is what the recipe says of these rows."""
        spec, (first, last) = output.spec, output.rows(start, stop)
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        wanted = f"{spec.dtype}, {list(shape)}"
        if not isinstance(tensor, torch.Tensor):
            raise OperationFailed(f"it gave {type(tensor).__name__}, not a tensor ({wanted})", tensor=spec.name)
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != torch_shape(spec.dtype, shape):
            found = f"{tensor.dtype}, {list(tensor.shape)}"
            raise OperationFailed(f"rows {start} to {stop} are {found}, not {wanted}", tensor=spec.name)
        if tensor.device.type != self.worker.backend.device.type:
            raise OperationFailed(f"it gave a tensor on {tensor.device}", tensor=spec.name)
        return tensor

    @contextmanager
    def operating(self) -> Iterator[None]:
        """The operation runs: what it reports is heard, what it raises is named. OperationFailed."""
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
        """Nobody looks at the host's copy any more."""
        if self.buffer is not None:
            self.worker.buffers.put(self.buffer)
        self.buffer = None

    def end(self) -> None:
        """All is written, or nothing more will be."""
        self.free_inputs()
        self.placed = []
        if self.made is not None and self.made.buffer is not None:
            self.worker.buffers.put(self.made.buffer)
        self.made = None
        self.worker.buffers.unreserve(self.memory_bytes)


class _TaskStep(Work):
    """What the steps of a task share. Earlier tasks first; one that is abandoned ends with its worker's memory."""

    what = ""

    def __init__(self, run: _TaskRun, nbytes: int = 0) -> None:
        super().__init__(run.worker.ticket, run.task, f"{self.what} {run.name}", nbytes)
        self.run = run


class _Fetch(_TaskStep):
    """Read one range."""

    what = "read"

    def __init__(self, run: _TaskRun, source: int, tensor: str, offset: int, into: memoryview) -> None:
        super().__init__(run, into.nbytes)
        self._source, self._tensor, self._offset, self._into = source, tensor, offset, into

    def start(self) -> None:
        self.run.worker.read(self._source, self._tensor, self._offset, self._into)

    def finish(self) -> None:
        self.run.arrived()


class _PlaceIn(_TaskStep):
    """Inputs to where they are computed with."""

    what = "place"

    def start(self) -> Pending | None:
        assert self.run.buffer is not None
        placed, pending = self.run.worker.backend.place(self.run.buffer, self.run.sizes)
        self.run.placed = [raw[start:stop] for raw, (start, stop) in zip(placed, self.run.wanted, strict=True)]
        self.nbytes = sum(self.run.sizes)
        return pending

    def finish(self) -> None:
        if self.run.worker.backend.copies:
            self.run.free_inputs()
        self.run.pass_on(self.run.worker.compute, _Compute(self.run))


class _Compute(_TaskStep):
    """The operation, the digests, and back to the host."""

    what = "make"

    def start(self) -> Pending | None:
        run = self.run
        run.worker.began(run.task)
        leaf_bytes = run.worker.job.leaf_bytes
        pieces = [[(a - one.start, b - one.start) for a, b in one.pieces(leaf_bytes)] for one in run.written]
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
    """All of a task whose tensors do not fit in memory: its inputs are read in parts, once for each pass that the
    operation makes over them, and its outputs are written as they come.

    It reads by itself, nothing ahead: what is this large is bound by the operation.
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
                for one, tensor in zip(written, outputs, strict=True):
                    one.add(as_bytes(tensor.cpu()))
                    self.nbytes += tensor.nbytes
                if worker.is_revoked(run.task):
                    return
        self._digests = np.concatenate([one.end(run.name) for one in written])

    def _read(
        self, recipe: Recipe, scratch: dict[int, torch.Tensor], index: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ReadPart`."""
        worker, given = self.run.worker, recipe.inputs[index]
        worker.ticket.check()
        width, leaf_bytes = given.spec.dtype.bits // 8, worker.job.held_to[given.source] or 1
        first, last = start * width, stop * width
        low, high = first // leaf_bytes * leaf_bytes, min(-(-last // leaf_bytes) * leaf_bytes, given.spec.nbytes)
        if index not in scratch or len(scratch[index]) < high - low:
            scratch[index] = torch.empty(high - low, dtype=torch.uint8)
        raw = scratch[index][: high - low]
        step = max(worker.read_bytes // leaf_bytes, 1) * leaf_bytes
        for at in range(0, high - low, step):
            worker.read(given.source, given.spec.name, low + at, as_view(raw[at : at + step]))
        part = raw[first - low : last - low]
        part = part if (first - low) % width == 0 else part.clone()
        return as_tensor(part, given.spec.dtype, (stop - start,)).to(worker.backend.device)

    def finish(self) -> None:
        run = self.run
        revoked = run.worker.is_revoked(run.task)
        run.end()
        if not revoked:
            run.worker.ended(run.task, self._digests)


class _Written:
    """One output of a task that is made in parts: bytes are written as they come, and digested piece by piece."""

    def __init__(self, worker: Worker, where: Written) -> None:
        table = worker.job.files.table
        self._worker, self._file = worker, int(table.file_index[where.row])
        self._offset, self._stop = int(table.offset[where.row]) + where.start, where.stop - where.start
        self._pieces = where.pieces(worker.job.leaf_bytes)
        self._digests = np.empty(len(self._pieces), np.uint64)
        self._done = self._num_digested = 0
        self._rest = bytearray()
        """What came of the piece that is not whole yet."""

    def add(self, raw: torch.Tensor) -> None:
        """The bytes that come next."""
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
        """Return the digests. OperationFailed where other bytes came than the output has."""
        if self._done != self._stop:
            raise OperationFailed(f"its parts are {self._done} bytes, not {self._stop}", tensor=tensor)
        return self._digests


class _Send(_TaskStep):
    """The outputs into their files."""

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
        digests = run.made.digests.copy()  # it lies in a buffer that another task gets
        run.end()
        run.worker.ended(run.task, digests)
