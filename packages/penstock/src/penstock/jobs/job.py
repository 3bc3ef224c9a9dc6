"""A job: the plan of a conversion. The same specification gives the same job in every process.

In: an operation and the tables of its sources. Out: a `ConversionJob`: recipes, files, tasks, and the key that
identifies them; for sources that are read through a cache, the tasks whose input is in it.
Not here: running it (`jobs.workers.worker`, `coordinator`), which tasks are done (`result.Journal`), which worker gets
a task for its cache (`plan.placement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from blake3 import blake3

from penstock.digest.leaf import LEAF_BYTES, canonical, name_order
from penstock.errors import BudgetTooSmall, ConfigError, PlanError
from penstock.jobs.operations.gguf import gguf_of
from penstock.jobs.operations.operation import UNKNOWN, Attested, Operation, StreamedOperation
from penstock.jobs.operations.spec import OperationSpec, code_of
from penstock.plan.tasks import TASK_BYTES, OutputFiles, Recipe, Tasks, cut, lay_out, read_bytes, spread
from penstock.storage.cache import CACHE_CHUNK_BYTES, CachedSource
from penstock.storage.file_names import stem_of
from penstock.storage.gguf import ALIGNMENT
from penstock.storage.weight_set import WeightSet
from penstock.types import GB, I64, Manifest

SHARD_BYTES = 5 * GB
"""Size of a file of the output. Source: transformers' `max_shard_size` default until 4.x, which every hub accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The byte range of one output tensor that a task writes: `[start, stop)`."""

    row: int
    """The tensor's row in the output's table."""
    start: int
    stop: int

    def cuts(self, leaf_bytes: int) -> I64:
        """Return where the range is cut: its start, the edges of the tensor's leaves within it, its stop.

        What lies between two cuts is a piece, and is digested separately.
        """
        if self.start >= self.stop:
            return np.array([self.start], np.int64)
        edges = np.arange((self.start // leaf_bytes + 1) * leaf_bytes, self.stop, leaf_bytes, dtype=np.int64)
        return np.concatenate([[self.start], edges, [self.stop]])

    def num_pieces(self, leaf_bytes: int) -> int:
        """Return the number of pieces between `cuts`."""
        # By arithmetic: a job has hundreds of thousands of ranges, whose cuts are not needed to count.
        return (self.stop - 1) // leaf_bytes - self.start // leaf_bytes + 1 if self.start < self.stop else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConversionJob:
    """The plan of a conversion, the same in every process that plans it from one specification."""

    operation: Operation
    recipes: tuple[Recipe, ...]
    files: OutputFiles
    tasks: Tasks
    leaf_bytes: int
    key: str
    """32 hex digits: of the operation, the sources' revisions, and everything that decides the output's bytes; and of
    `held_to`, so that a verified job never resumes from tasks that were not verified."""
    row_of: dict[str, int]
    """Row of the output's table by path."""
    small_from: int
    """The source whose configuration and tokenizer the result has."""
    stem: str
    """Part of the output's file names before their number, as that source's files have it."""
    held_to: tuple[int, ...]
    """Per source: leaf size of the digests that everything read of it is compared with; 0: nothing is compared."""
    read_bytes: I64
    """[num_tasks, num_sources] bytes that each task reads of each source, rounded out to whole leaves."""
    memory_bytes: I64
    """Of each task: bytes of its inputs and of its outputs."""
    least_bytes: I64
    """The same, for a task that is made in the smallest parts that its operation allows."""

    def written(self, task: int) -> Iterator[Written]:
        """Yield the byte ranges that a task writes, output after output."""
        for index, start, stop in self.tasks.entries(task):
            for out in self.recipes[index].outputs:
                first, last = out.byte_range(start, stop)
                yield Written(row=self.row_of[out.spec.path], start=first, stop=last)

    def num_pieces(self, task: int) -> int:
        """Return the number of digests that a task reports."""
        return sum(written.num_pieces(self.leaf_bytes) for written in self.written(task))

    def part_elements(self, task: int, memory_bytes: int) -> int:
        """Return the elements per part so that a task holds at most `memory_bytes`; 0: it is made at once.

        Order: after `check_budget`: the smallest part fits.
        """
        # At once wherever it fits: parts of a merge are read once for each of its passes.
        if int(self.memory_bytes[task]) <= memory_bytes:
            return 0
        unit, fixed = _part_unit(self.operation, self.recipes, self.tasks, task), self.part_bytes(task, 0)
        # Memory grows linearly with the part: what is left after the fixed bytes is divided by the bytes of one unit.
        return unit * max(1, (memory_bytes - fixed) // (self.part_bytes(task, unit) - fixed))

    def part_bytes(self, task: int, num_part: int) -> int:
        """Return the host memory of a task that is made in parts of `num_part` elements."""
        ((index, _, _),) = self.tasks.entries(task)
        return _part_bytes(self.recipes[index], self.held_to, num_part)

    def check_budget(self, memory_bytes: int, what: str) -> None:
        """Raise BudgetTooSmall if the largest task needs more than `memory_bytes`."""
        # No task: an empty checkpoint, whose conversion writes headers alone.
        if not len(self.tasks):
            return
        largest = int(self.least_bytes.argmax())
        need = int(self.least_bytes[largest])
        if need > memory_bytes:
            recipe = self.recipes[next(self.tasks.entries(largest))[0]]
            raise BudgetTooSmall(
                f"{what}: memory_bytes={memory_bytes}, but {recipe.outputs[0].spec.name!r} takes {need} bytes at once",
                minimum_bytes=need,
            )


def _part_unit(operation: Operation, recipes: Sequence[Recipe], tasks: Tasks, task: int) -> int:
    """See `StreamedOperation.part_unit`; 0 also where a task is more than one recipe."""
    if not isinstance(operation, StreamedOperation) or tasks.first[task + 1] - tasks.first[task] != 1:
        return 0
    recipe = recipes[int(tasks.recipe[tasks.first[task]])]
    # A recipe that can be cut by rows needs no parts: its tasks are made smaller instead.
    return 0 if recipe.align else operation.part_unit(recipe)


def _part_bytes(recipe: Recipe, held_to: Sequence[int], num_part: int) -> int:
    """Return the memory of a part of `num_part` elements: its inputs out to whole leaves, its outputs, and the rest of
    one part that a chain keeps for the next."""
    num_elements = max(1, math.prod(recipe.inputs[0].spec.shape))
    # Two leaves more of each input: a part may begin and end inside a leaf, and leaves are only read whole.
    input_bytes = sum(
        num_part * source_input.spec.dtype.bits // 8 + 2 * held_to[source_input.source]
        for source_input in recipe.inputs
    )
    _, output_bytes = recipe.nbytes(0, recipe.num_rows)
    between_bytes = num_part * recipe.inputs[0].spec.dtype.bits // 8
    return input_bytes + between_bytes + -(-output_bytes * num_part // num_elements) + LEAF_BYTES * len(recipe.outputs)


def plan_job(
    operation: Operation,
    sources: Sequence[Manifest],
    *,
    task_bytes: int = TASK_BYTES,
    shard_bytes: int = SHARD_BYTES,
    leaf_bytes: int = LEAF_BYTES,
    verify: bool = True,
    operation_specs: Sequence[OperationSpec] = (),
) -> ConversionJob:
    """Plan a conversion.

    Args:
        operation: the operation on all sources.
        sources: manifests of its sources, in its order.
        task_bytes: see `plan.tasks.cut`.
        shard_bytes: largest size of an output file.
        leaf_bytes: of the output's digests.
        verify: compare what is read with the sources' digests, where they have any.
        operation_specs: specs that made the operation: a user's operation may leave some options out of its name.

    Raises:
        PlanError: see `Operation.recipes`; or torch has no dtype for a tensor to compute with.
        ConfigError: the specs hold values that cannot be sent to a worker.
    """
    recipes = tuple(operation.recipes([manifest.tensors for manifest in sources]))
    # Refused before a byte is read: a worker would only fail at the first task with this dtype.
    for spec in (spec for recipe in recipes if not recipe.copies for spec in recipe.specs):
        if spec.dtype in UNKNOWN:
            message = f"{operation.name}: torch has no dtype for {spec.dtype}, so nothing can be computed with it"
            raise PlanError(message, tensor=spec.name, hint="leave it out before: `rename` it to nothing")
    specs = [out.spec for recipe in recipes for out in recipe.outputs]
    if gguf_of(operation) is None:
        files = lay_out(specs, shard_bytes=shard_bytes)
    else:
        # Always one file, whatever `shard_bytes` is.
        files = lay_out(specs, shard_bytes=1 << 62, align_bytes=ALIGNMENT)
    held_to = tuple(manifest.leaf_bytes if verify and manifest.leaves is not None else 0 for manifest in sources)
    key = _key(operation, operation_specs, sources, files, (task_bytes, shard_bytes, leaf_bytes), held_to)
    row_of = {name: row for row, name in enumerate(files.table.names)}
    small_from = operation.small_from if isinstance(operation, Attested) else 0
    file_of = np.array([files.table.file_index[row_of[recipe.outputs[0].spec.path]] for recipe in recipes], np.int64)
    tasks = spread(cut(recipes, task_bytes=task_bytes, leaf_bytes=leaf_bytes), file_of, task_bytes=task_bytes)
    read = read_bytes(recipes, tasks, held_to)
    memory_bytes = read.sum(axis=1) + tasks.out_bytes
    least_bytes = memory_bytes.copy()
    if isinstance(operation, StreamedOperation):
        # Only large tasks can exceed a budget; the small ones, perhaps hundreds of thousands, need no second estimate.
        for task in np.flatnonzero(tasks.cost > task_bytes // 2).tolist():
            if unit := _part_unit(operation, recipes, tasks, task):
                recipe = recipes[int(tasks.recipe[tasks.first[task]])]
                least_bytes[task] = min(memory_bytes[task], _part_bytes(recipe, held_to, unit))
    return ConversionJob(
        operation=operation,
        recipes=recipes,
        files=files,
        tasks=tasks,
        leaf_bytes=leaf_bytes,
        key=key,
        row_of=row_of,
        small_from=small_from,
        stem=stem_of(file.name for file in sources[small_from].files),
        held_to=held_to,
        read_bytes=read,
        memory_bytes=memory_bytes,
        least_bytes=least_bytes,
    )


def _key(
    operation: Operation,
    operation_specs: Sequence[OperationSpec],
    sources: Sequence[Manifest],
    files: OutputFiles,
    sizes: Sequence[int],
    held_to: tuple[int, ...],
) -> str:
    """Return `ConversionJob.key`. ConfigError if the specs hold values that cannot be sent to a worker."""
    # Code and specs too: a user's function may change under one name, and its name may leave out some of its options.
    parts = [operation.name, code_of(operation), *map(str, sizes), str(held_to)]
    try:
        parts.append(msgspec.msgpack.encode(operation_specs).hex())
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{operation.name}: its options are not plain values: {error}") from error
    # Files with their identities too: a source without digests has the same revision after its weights were replaced.
    for manifest in sources:
        parts += [manifest.revision, *(f"{file.name} {file.nbytes} {file.identity}" for file in manifest.files)]
    # The number changes whenever the same request would be cut or computed differently: old journals are then ignored.
    digest = blake3(b"penstock job 6\0")
    # Each part is preceded by its length: otherwise "ab" + "c" and "a" + "bc" would give one key to two jobs.
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    digest.update(canonical(files.table, name_order(files.table)))
    # The canonical form has no places in files, and a resumed job goes on in the files of an earlier one.
    digest.update(np.stack([files.table.file_index, files.table.offset]).astype("<i8").tobytes())
    return digest.hexdigest(length=16)


def cached(sources: Sequence[WeightSet]) -> list[CachedSource]:
    """Return the files of these sources that are read through a cache."""
    return [file for source in sources for file in source.sources if isinstance(file, CachedSource)]


def shared_as(sources: Sequence[WeightSet]) -> str:
    """Return the identity of the cache that these sources are read through; empty: they are read through none."""
    return next((file.shared_as for file in cached(sources)), "")


def bytes_read(sources: Sequence[WeightSet]) -> tuple[int, int]:
    """Return bytes of cached files read from their sources (whole chunks), and bytes that this process requested."""
    stats = [file.stats for file in cached(sources)]
    return sum(stat.miss_bytes for stat in stats), sum(stat.asked_bytes for stat in stats)


def cached_tasks(job: ConversionJob, sources: Sequence[WeightSet]) -> list[int]:
    """Return the tasks that have at least half of their input in the cache now."""
    files = [
        [_CachedRanges(file) if isinstance(file, CachedSource) else None for file in source.sources]
        for source in sources
    ]
    # The usual case by far, and what follows walks over every input of every task.
    if not any(ranges is not None and ranges.any for of_source in files for ranges in of_source):
        return []
    tables = [source.manifest.tensors for source in sources]
    rows = [dict(zip(table.names, range(len(table)), strict=True)) for table in tables]
    tasks = []
    for task in range(len(job.tasks)):
        here = 0
        for index, start, stop in job.tasks.entries(task):
            for task_input in job.recipes[index].inputs:
                table, row = tables[task_input.source], rows[task_input.source][task_input.spec.name]
                file, at = files[task_input.source][int(table.file_index[row])], int(table.offset[row])
                first, last = task_input.leaf_range(start, stop, job.held_to[task_input.source])
                here += 0 if file is None else file.within(at + first, at + last)
        # Half, not all: the leaves at both ends of a task are shared with its neighbours and are often missing.
        if here and 2 * here >= int(job.read_bytes[task].sum()):
            tasks.append(task)
    return tasks


class _CachedRanges:
    """The bytes of one file that the cache has, as a running sum over its chunks.

    Attributes:
        any: the cache has at least one chunk.
    """

    def __init__(self, source: CachedSource) -> None:
        count = -(-source.nbytes // CACHE_CHUNK_BYTES)
        # One chunk more than the file has, so that an offset at the very end of the file has an entry.
        self._has = np.zeros(count + 1, bool)
        self._has[[chunk for chunk in source.cached_chunks() if chunk < count]] = True
        self._before: I64 = np.concatenate([[0], np.cumsum(self._has * CACHE_CHUNK_BYTES)]).astype(np.int64)
        self.any = bool(self._has.any())

    def within(self, start: int, stop: int) -> int:
        """Return how many bytes of `[start, stop)` are in the cache."""
        return self._until(stop) - self._until(start)

    def _until(self, offset: int) -> int:
        chunk, more = divmod(offset, CACHE_CHUNK_BYTES)
        return int(self._before[chunk]) + (more if self._has[chunk] else 0)
