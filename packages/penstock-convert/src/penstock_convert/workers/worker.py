"""Runs several tasks of a job at a time in bounded memory, with three executors: fetch, compute and send.

    post(task) --reserve--> fetch: ranges to the device --> compute: operation, digests --> send: pwrite at fixed places
                       `--> fetch: of a copy of local files, read, digest and pwrite of a few leaves at a time

`engine.run` implements the executors and the ticket, and `process` exchanges messages with the coordinator. Instead of
waiting for the ticket, the process's main thread handles messages and checks the ticket between two messages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Self

import numpy as np
import torch

from penstock.digest.leaf import leaf_digests
from penstock.engine.run import Executor, Item, PendingItem, Run
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, OperationFailed, PenstockError
from penstock.loader.tensor import as_tensor, torch_dtype, torch_shape
from penstock.storage import is_remote
from penstock.storage.output import OutputSet
from penstock.storage.weight_set import WeightSet
from penstock.types import MIB, U64
from penstock_convert.job import ConversionJob, Written
from penstock_convert.operations.operation import UNKNOWN, StreamedOperation, report_to
from penstock_convert.plan.tasks import Recipe, TaskOutput
from penstock_convert.workers.compute import (
    ALIGN_BYTES,
    ComputeBackend,
    ComputedOutputs,
    HostCompute,
    as_bytes,
    as_view,
    cut,
    packed,
)
from penstock_convert.workers.verified_sources import VerifiedSources

LOCAL_READ_BYTES, DEVICE_READ_BYTES, REMOTE_READ_BYTES = 16 * MIB, 32 * MIB, 8 * MIB
"""Size of one read in bytes: large enough that Python handles few reads, and small enough that several threads share a
task. A remote read is one request. Source: benchmarks/results/h200x2_202611/convert.md;
benchmarks/results/h100_202611/load.md."""
DEVICE_PIECE_BYTES = 8 * MIB
"""Bytes that a thread stages at once for a copy to or from a device. The bytes of all threads stay in the processor's
cache. Source: benchmarks/results/h200x2_202611/convert.md."""
COPY_BYTES = MIB
"""Bytes that a thread reads, digests and writes at once if a tensor is only copied, for the same reason."""
LOCAL_READS, DEVICE_READS, REMOTE_READS = 4, 6, 16
"""Number of concurrent reads."""
MIN_WRITES, MAX_WRITES = 2, 4
"""Number of threads that write, at most one per core. Source: benchmarks/results/cpu2_202611/convert-faults.md,
"Writing"."""

OnBegan = Callable[[int], None]
"""Called in an executor's thread when the operation starts to run on a task, or its bytes start to be copied."""
OnDone = Callable[[int, U64], None]
"""Called in an executor's thread with a finished task and the digests of its pieces."""


class Worker(Run):
    """The executors of one worker. A context manager that ends all threads and frees the memory on exit.

    Args:
        job: the planned job.
        sources: the opened sources, in the job's order.
        out: the opened output.
        device: device to compute on.
        memory_bytes: limit in bytes for host memory, which contains the tasks' tensors on the CPU, or the staging
            buffers for a device.
        stall_s: seconds without progress after which the run fails.
        on_began, on_done: see `OnBegan` and `OnDone`.
        trace: receives the spans.

    Attributes:
        ticket: fails with the first error. `moved_bytes` counts bytes read and written.
        num_reports: number of progress reports from the operation.
    """

    def __init__(
        self,
        job: ConversionJob,
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
        is_quick = device.type != "cpu"
        super().__init__(int(job.memory_bytes.sum()), trace=trace, stall_s=stall_s, is_quick=is_quick)
        self._memory_bytes = memory_bytes
        self.num_reports = 0
        self.job = job
        self.out = out
        self.sources = VerifiedSources(sources, job.leaf_sizes)
        self.began = on_began
        self.ended = on_done
        remote = any(is_remote(file.uri) for source in sources for file in source.sources)
        # Copy a few leaves at a time only on the CPU and from local files, because remote reads should be larger.
        self.copies_by_leaves = device.type == "cpu" and not remote
        cores = len(os.sched_getaffinity(0))
        self._device = device
        local = (LOCAL_READ_BYTES, LOCAL_READS) if device.type == "cpu" else (DEVICE_READ_BYTES, DEVICE_READS)
        self.read_bytes, num_reads = (REMOTE_READ_BYTES, REMOTE_READS) if remote else local
        self._num_reads = num_reads if remote else min(num_reads, max(2, cores))
        self._num_writes = min(MAX_WRITES, max(MIN_WRITES, cores))
        # Read and write threads update the ticket's count concurrently, and `+=` on an attribute is not atomic.
        self._moving = threading.Lock()
        self._peak_part_bytes = 0
        # The set needs no lock. Only one thread changes the set. A thread that sees a change late runs a useless task.
        self._revoked: set[int] = set()

    def __enter__(self) -> Self:
        device = self._device
        # Set CUDA's current device in each thread, because the setting applies to a single thread.
        on_start = None if device.type == "cpu" else partial(torch.cuda.set_device, device)
        self.backend = self._open_backend()
        self.buffers = self.backend.buffers
        self.fetch = self.executor("fetch", self._num_reads, on_thread_start=on_start)
        self.compute = self.executor("compute", 1, on_thread_start=on_start)
        self.send = self.executor("send", self._num_writes, on_thread_start=on_start)
        return self

    def _open_backend(self) -> ComputeBackend:
        if self._device.type == "cpu":
            return HostCompute(self._memory_bytes)
        # Import `cuda_compute` only for a device, because the module requires Triton.
        from penstock_convert.workers.cuda_compute import CudaCompute

        # A buffer must hold a whole leaf for the comparison with its digest.
        leaves = self.sources.largest_leaves(self.job.leaf_sizes)
        return CudaCompute.open(
            self._memory_bytes,
            self._device,
            piece_bytes=max(1, min(DEVICE_PIECE_BYTES, self._memory_bytes // 4), *leaves),
            # Read threads call `fill`, and write threads call `drain`.
            num_threads=self._num_reads + self._num_writes,
            stall_s=self.stall_s,
        )

    @property
    def peak_bytes(self) -> int:
        """Return the peak host memory of tasks and staging buffers in bytes."""
        return self.backend.peak_bytes + self._peak_part_bytes

    def post(self, task: int) -> None:
        """Begin a task once there is memory for it. Raise the error that stopped the worker.

        Only one thread calls this.
        """
        if self.is_revoked(task):
            return
        task_run = _TaskRun(self, task, self._part_elements(task))
        # Reserve the memory of the whole task at once. Tasks that reserve memory step by step could deadlock.
        self.buffers.reserve(task_run.memory_bytes, lambda: self.ticket.stopped)
        self.ticket.check()
        task_run.begin()

    def _part_elements(self, task: int) -> int:
        """Return the part size of a task in elements, or 0 if the task does not run in parts.

        Raises:
            BudgetTooSmall: the smallest part and the staging buffers together exceed the memory limit.
        """
        num_part, staged_bytes = self.job.part_elements(task, self._memory_bytes), self.backend.staged_bytes
        if not num_part or not staged_bytes:
            return num_part
        # On a device, parts need additional host memory, because the task's reservation is for device memory.
        num_part = self.job.part_elements(task, self._memory_bytes - staged_bytes)
        part_bytes = self.job.part_bytes(task, num_part)
        if (need := part_bytes + staged_bytes) > self._memory_bytes:
            message = f"memory_bytes={self._memory_bytes}, but a part of a tensor and staging need {need} bytes"
            raise BudgetTooSmall(message, minimum_bytes=need)
        self._peak_part_bytes = max(self._peak_part_bytes, part_bytes)
        return num_part

    def expect(self, task: int) -> None:
        """Clear a task's revocation, because the task was assigned again and will be posted."""
        self._revoked.discard(task)

    def revoke(self, task: int) -> None:
        """Skip a task, or stop it at its next step. A revoked task that finishes nevertheless does no harm."""
        self._revoked.add(task)

    def is_revoked(self, task: int) -> bool:
        """Return whether a task was revoked."""
        return task in self._revoked

    def report(self) -> None:
        """Count a progress report from the operation."""
        self.num_reports += 1

    def moved(self, nbytes: int) -> None:
        """Count bytes read or written."""
        with self._moving:
            self.ticket.moved_bytes += nbytes

    def read(self, source: int, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with verified bytes of a tensor, and count them. See `VerifiedSources.read`."""
        self.sources.read(source, name, offset, into)
        self.moved(into.nbytes)

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""
        super().close()
        self.backend.close()


class _TaskRun:
    """A task that passes through the executors: read, compute, write.

    Tasks that were posted earlier run first. The memory of an abandoned task is freed when its worker is closed.

    Args:
        num_part: part size in elements if the task runs in parts, and 0 otherwise.
    """

    def __init__(self, worker: Worker, task: int, num_part: int) -> None:
        self._worker = worker
        self._task = task
        self._num_part = num_part
        job = worker.job
        self._entries = [(job.recipes[index], start, stop) for index, start, stop in job.tasks.entries(task)]
        self._outputs = list(job.written(task))
        self._is_copy = not num_part and self._copies()
        if self._is_copy:
            self.memory_bytes = min(max(COPY_BYTES, job.leaf_bytes), int(job.memory_bytes[task]))
        else:
            self.memory_bytes = job.part_bytes(task, num_part) if num_part else int(job.memory_bytes[task])
        self._output_bytes = sum(where.stop - where.start for where in self._outputs)
        self._name = self._entries[0][0].outputs[0].spec.name
        self._input_buffer: torch.Tensor | None = None
        self._inputs: list[torch.Tensor] = []
        """The requested bytes of each input, in the input buffer."""
        self._computed: ComputedOutputs | None = None
        self._digests: U64 | None = None
        self._num_reads_left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        if self._num_part:
            self._worker.compute.post(
                self._item("make", self._output_bytes, self._compute_in_parts, self._finish_at_once)
            )
        elif self._is_copy:
            self._worker.fetch.post(self._item("copy", self._output_bytes, self._copy, self._finish_at_once))
        else:
            self._post_reads()

    def _item(
        self, verb: str, nbytes: int, start: Callable[[], PendingItem | None], finish: Callable[[], None]
    ) -> Item:
        return Item(self._task, f"{verb} {self._name}", nbytes, start, finish)

    def _pass_on(self, executor: Executor, item: Item) -> None:
        """Post the next item, or end a revoked task."""
        if self._worker.is_revoked(self._task):
            self._end()
        else:
            executor.post(item)

    def _end(self) -> None:
        self._inputs = []
        if self._input_buffer is not None:
            self._worker.backend.release(self._input_buffer)
        self._input_buffer = self._computed = None
        self._worker.buffers.unreserve(self.memory_bytes)

    # -- copy

    def _copies(self) -> bool:
        """Return whether every output is a copy of a single input that can be copied a few leaves at a time."""
        job = self._worker.job
        if not self._worker.copies_by_leaves or not all(recipe.copies for recipe, _, _ in self._entries):
            return False
        for (recipe, start, stop), where in zip(self._entries, self._outputs, strict=True):
            (task_input,) = recipe.inputs
            leaf_sizes, here = job.leaf_sizes[task_input.source], (where.start, where.stop)
            if task_input.byte_range(start, stop) != here:
                return False
            # Reads cover whole leaves of the output, and whole leaves of the source if the source is verified.
            if leaf_sizes and (leaf_sizes != job.leaf_bytes or task_input.leaf_range(start, stop, leaf_sizes) != here):
                return False
        return True

    def _copy(self) -> None:
        """Read, digest and write a few leaves at a time, so that the bytes stay in the CPU cache."""
        worker, leaf_bytes = self._worker, self._worker.job.leaf_bytes
        worker.began(self._task)
        table, room = worker.job.files.table, memoryview(bytearray(self.memory_bytes))
        num_leaves = max(1, COPY_BYTES // leaf_bytes)
        digests: list[U64] = []
        for (recipe, _, _), where in zip(self._entries, self._outputs, strict=True):
            (task_input,) = recipe.inputs
            file, offset = int(table.file_index[where.row]), int(table.offset[where.row])
            cuts = where.cuts(leaf_bytes).tolist()
            found = np.empty(len(cuts) - 1, np.uint64)
            for first in range(0, len(found), num_leaves):
                worker.ticket.check()
                if worker.is_revoked(self._task):
                    return
                edges = cuts[first : first + num_leaves + 1]
                piece = room[: edges[-1] - edges[0]]
                worker.read(task_input.source, task_input.spec.name, edges[0], piece)
                for number, (start, stop) in enumerate(pairwise(edges), first):
                    leaf = piece[start - edges[0] : stop - edges[0]]
                    leaf_digests(leaf, leaf.nbytes, found[number : number + 1])
                worker.out.write(file, offset + edges[0], piece)
                worker.moved(piece.nbytes)
            digests.append(found)
        self._digests = np.concatenate(digests)

    # -- read

    def _post_reads(self) -> None:
        """Post the reads of all inputs into one buffer.

        Reads are extended to whole leaves, and the requested bytes are aligned in the buffer.
        """
        worker = self._worker
        task_inputs = [
            (task_input, start, stop) for recipe, start, stop in self._entries for task_input in recipe.inputs
        ]
        leaf_sizes = worker.job.leaf_sizes
        ranges = [
            task_input.leaf_range(start, stop, leaf_sizes[task_input.source]) for task_input, start, stop in task_inputs
        ]
        sizes: list[int] = []
        wanted: list[tuple[int, int]] = []
        for (task_input, start, stop), (low, high) in zip(task_inputs, ranges, strict=True):
            first, last = task_input.byte_range(start, stop)
            # Put padding before the leaf, so that the requested bytes are aligned as a tensor requires.
            at = -(-(first - low) // ALIGN_BYTES) * ALIGN_BYTES
            wanted.append((at, at + last - first))
            sizes.append(at + high - first)
        self._input_buffer = worker.backend.allocate(packed(sizes)[-1])
        parts = cut(self._input_buffer, sizes)
        self._inputs = [raw[start:stop] for raw, (start, stop) in zip(parts, wanted, strict=True)]
        reads: list[Item] = []
        for (task_input, _, _), (low, high), raw in zip(task_inputs, ranges, parts, strict=True):
            there, leaf_bytes = raw[len(raw) - (high - low) :], leaf_sizes[task_input.source] or 1
            # Read whole leaves, because only a complete leaf can be verified.
            step = max(worker.read_bytes // leaf_bytes, 1) * leaf_bytes
            for at in range(0, len(there), step):
                into = there[at : at + step]
                read = partial(self._read, task_input.source, task_input.spec.name, low + at)
                fill = partial(worker.backend.fill, into, read, leaf_bytes)
                reads.append(self._item("read", len(into), fill, self._arrived))
        self._num_reads_left = len(reads)
        # If all inputs are empty, there is no read that could post the next item.
        if reads:
            worker.fetch.post(*reads)
        else:
            self._post_compute()

    def _read(self, source: int, name: str, offset: int, at: int, into: memoryview) -> None:
        """Implement `Read`: read the tensor's bytes from `offset + at` into `into`."""
        # Check the ticket here and in `_write_piece`, so that an item with many pieces stops soon after another error.
        self._worker.ticket.check()
        self._worker.read(source, name, offset + at, into)

    def _arrived(self) -> None:
        """Count a finished read, and post the next item after the last read."""
        # Reads finish on several threads, and exactly one thread must detect that its read is the last.
        with self._lock:
            self._num_reads_left -= 1
            is_last = not self._num_reads_left
        if is_last:
            self._post_compute()

    def _post_compute(self) -> None:
        self._pass_on(self._worker.compute, self._item("make", self._output_bytes, self._compute, self._post_write))

    # -- compute

    def _compute(self) -> PendingItem | None:
        worker = self._worker
        worker.began(self._task)
        cuts = [where.cuts(worker.job.leaf_bytes) - where.start for where in self._outputs]
        self._computed, pending = worker.backend.compute(self._run_operation, cuts)
        return pending

    def _run_operation(self) -> list[torch.Tensor]:
        with self._operating():
            return self._run_entries()

    def _run_entries(self) -> list[torch.Tensor]:
        """Run the operation on every entry of the task, and return the outputs.

        Raises:
            OperationFailed: the operation raised an error, or returned tensors that do not match its recipe.
        """
        left, results = iter(self._inputs), []
        for recipe, start, stop in self._entries:
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
                    columns = (slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
                    tensor = tensor[(slice(None), *columns)].contiguous()
                inputs.append(tensor)
            outputs = self._worker.job.operation.run(recipe, start, stop, inputs)
            if len(outputs) != len(recipe.outputs):
                raise OperationFailed(
                    f"the operation returned {len(outputs)} tensors, not {len(recipe.outputs)}", tensor=self._name
                )
            results += [
                self._checked(output, start, stop, out) for output, out in zip(recipe.outputs, outputs, strict=True)
            ]
        return results

    def _checked(self, output: TaskOutput, start: int, stop: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`. Raise OperationFailed if the tensor has a wrong dtype, shape or device."""
        # A user's function may return any object, but its bytes are written to a fixed range of the output.
        spec, (first, last) = output.spec, output.rows(start, stop)
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        wanted = f"{spec.dtype}, {list(shape)}"
        if not isinstance(tensor, torch.Tensor):
            raise OperationFailed(f"the output is {type(tensor).__name__}, not a tensor ({wanted})", tensor=spec.name)
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != torch_shape(spec.dtype, shape):
            actual = f"{tensor.dtype}, {list(tensor.shape)}"
            raise OperationFailed(f"output rows {start} to {stop} are {actual}, not {wanted}", tensor=spec.name)
        if tensor.device.type != self._worker.backend.device.type:
            raise OperationFailed(f"the output is on the wrong device: {tensor.device}", tensor=spec.name)
        return tensor

    @contextmanager
    def _operating(self) -> Iterator[None]:
        """Count progress reports in the `with` block, and convert the operation's errors to OperationFailed."""
        token = report_to.set(self._worker.report)
        try:
            yield
        except (PenstockError, torch.cuda.OutOfMemoryError):
            raise
        except BaseException as error:  # a user's code may even call sys.exit
            message = f"{self._worker.job.operation.name} raised {type(error).__name__}: {error}"
            raise OperationFailed(message, tensor=self._name) from error
        finally:
            report_to.reset(token)

    def _post_write(self) -> None:
        self._pass_on(self._worker.send, self._item("write", self._output_bytes, self._write, self._written))

    # -- write

    def _write(self) -> None:
        assert self._computed is not None
        worker = self._worker
        table = worker.job.files.table
        for raw, where in zip(self._computed.raw, self._outputs, strict=True):
            file, start = int(table.file_index[where.row]), int(table.offset[where.row]) + where.start
            worker.backend.drain(raw, partial(self._write_piece, file, start))

    def _write_piece(self, file: int, start: int, at: int, data: memoryview) -> None:
        """Implement `Write`: write `data` at offset `start + at` in the file's body."""
        self._worker.ticket.check()
        self._worker.out.write(file, start + at, data)
        self._worker.moved(data.nbytes)

    def _written(self) -> None:
        assert self._computed is not None
        digests = self._computed.digests
        self._end()
        self._worker.ended(self._task, digests)

    # -- a whole task, in parts

    def _compute_in_parts(self) -> None:
        """Run a whole task whose tensors do not fit in memory.

        The inputs are read in parts, once for each pass of the operation, and the outputs are written part by part.
        Nothing is read ahead, because the operation takes longer than the reads for tasks of this size.
        """
        worker = self._worker
        worker.began(self._task)
        ((recipe, _, _),) = self._entries
        operation = worker.job.operation
        assert isinstance(operation, StreamedOperation)
        writers = [_OutputInParts(worker, where) for where in self._outputs]
        scratch: dict[int, torch.Tensor] = {}
        with worker.backend.entered(), self._operating():
            parts = operation.run_parts(recipe, self._num_part, partial(self._read_part, recipe, scratch))
            for outputs in parts:
                for writer, tensor in zip(writers, outputs, strict=True):
                    writer.add(as_bytes(tensor.cpu()))
                if worker.is_revoked(self._task):
                    return
        self._digests = np.concatenate([writer.end(self._name) for writer in writers])

    def _read_part(
        self, recipe: Recipe, scratch: dict[int, torch.Tensor], index: int, start: int, stop: int
    ) -> torch.Tensor:
        worker, recipe_input = self._worker, recipe.inputs[index]
        # An operation in parts may run for minutes, so stop it at its next read after an error in another item.
        worker.ticket.check()
        width, leaf_bytes = recipe_input.spec.dtype.bits // 8, worker.job.leaf_sizes[recipe_input.source] or 1
        first, last = start * width, stop * width
        low, high = first // leaf_bytes * leaf_bytes, min(-(-last // leaf_bytes) * leaf_bytes, recipe_input.spec.nbytes)
        if index not in scratch or len(scratch[index]) < high - low:
            scratch[index] = torch.empty(high - low, dtype=torch.uint8)
        raw = scratch[index][: high - low]
        step = max(worker.read_bytes // leaf_bytes, 1) * leaf_bytes
        for at in range(0, high - low, step):
            worker.read(recipe_input.source, recipe_input.spec.name, low + at, as_view(raw[at : at + step]))
        part = raw[first - low : last - low]
        # A view with a different dtype must begin at a multiple of its element size. A leaf may begin at any offset.
        part = part if (first - low) % width == 0 else part.clone()
        return as_tensor(part, recipe_input.spec.dtype, (stop - start,)).to(worker.backend.device)

    def _finish_at_once(self) -> None:
        self._end()
        # The digests are None if the task was revoked before its last part. Do not report a task revoked later either.
        if self._digests is not None and not self._worker.is_revoked(self._task):
            self._worker.ended(self._task, self._digests)


class _OutputInParts:
    """One output of a task that runs in parts. The bytes are written in order and digested piece by piece."""

    def __init__(self, worker: Worker, where: Written) -> None:
        table = worker.job.files.table
        self._worker = worker
        self._file = int(table.file_index[where.row])
        self._offset = int(table.offset[where.row]) + where.start
        self._nbytes = where.stop - where.start
        self._pieces = list(pairwise(where.cuts(worker.job.leaf_bytes).tolist()))
        self._digests = np.empty(len(self._pieces), np.uint64)
        self._done = 0
        self._num_digested = 0
        self._rest = bytearray()
        """Bytes of the piece that is not complete yet."""

    def add(self, raw: torch.Tensor) -> None:
        """Write the next bytes, and digest every piece that is now complete."""
        view = as_view(raw)
        self._worker.out.write(self._file, self._offset + self._done, view)
        self._worker.moved(view.nbytes)
        self._done += view.nbytes
        self._rest += view
        # A part may end anywhere, but a digest needs a complete piece. Keep the incomplete rest for the next part.
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
        """Return the digests. Raise OperationFailed if the total size of the parts is not the output's size."""
        if self._done != self._nbytes:
            raise OperationFailed(f"the output has {self._done} bytes, not {self._nbytes}", tensor=tensor)
        return self._digests
