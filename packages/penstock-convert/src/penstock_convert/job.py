"""The plan of a conversion. Every process plans the same job from the same specification.

A `ConversionJob` contains recipes, files, tasks, and a key that identifies the job. For sources with a cache,
`cached_tasks` finds the tasks whose input is cached.
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
from penstock.storage.cache import CACHE_CHUNK_BYTES, CachedSource
from penstock.storage.file_names import stem_of
from penstock.storage.gguf import ALIGNMENT
from penstock.storage.weight_set import WeightSet
from penstock.types import GB, I64, Manifest
from penstock_convert.operations.gguf import gguf_of
from penstock_convert.operations.operation import UNKNOWN, Attested, Operation, StreamedOperation
from penstock_convert.operations.spec import OperationSpec, code_of
from penstock_convert.plan.tasks import TASK_BYTES, OutputFiles, Recipe, Tasks, cut, lay_out, read_bytes, spread

SHARD_BYTES = 5 * GB
"""Default size of an output file. Source: transformers' `max_shard_size` default until 4.x, which every hub accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The byte range `[start, stop)` of one output tensor that a task writes."""

    row: int
    """Row of the tensor in the output's table."""
    start: int
    stop: int

    def cuts(self, leaf_bytes: int) -> I64:
        """Return the offsets that cut the range into pieces with separate digests, including the ends of the range."""
        if self.start >= self.stop:
            return np.array([self.start], np.int64)
        edges = np.arange((self.start // leaf_bytes + 1) * leaf_bytes, self.stop, leaf_bytes, dtype=np.int64)
        return np.concatenate([[self.start], edges, [self.stop]])

    def num_pieces(self, leaf_bytes: int) -> int:
        """Return the number of pieces between the offsets from `cuts`."""
        # Count without computing the cuts, because a job has hundreds of thousands of ranges.
        return (self.stop - 1) // leaf_bytes - self.start // leaf_bytes + 1 if self.start < self.stop else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConversionJob:
    """The plan of a conversion, which is the same in every process that plans the same specification."""

    operation: Operation
    recipes: tuple[Recipe, ...]
    files: OutputFiles
    tasks: Tasks
    leaf_bytes: int
    key: str
    """Digest (32 hex digits) of the operation, the sources' revisions, and everything else that determines the output's
    bytes. It also covers `leaf_sizes`, so that a verified job never resumes from unverified tasks."""
    row_of: dict[str, int]
    """Maps a tensor's path to its row in the output's table."""
    small_from: int
    """The number of the source that provides the result's configuration and tokenizer."""
    stem: str
    """Part of the output's file names before the number, from the file names of the source that provides the
    configuration."""
    leaf_sizes: tuple[int, ...]
    """For each source, the leaf size in bytes of the digests with which its bytes are compared. 0 means that nothing is
    compared."""
    read_bytes: I64
    """[num_tasks, num_sources] bytes that each task reads from each source, extended to whole leaves."""
    memory_bytes: I64
    """For each task, the size of its inputs and outputs in bytes."""
    least_bytes: I64
    """For each task, the memory in bytes that it takes if it runs in the smallest parts that its operation allows."""

    def written(self, task: int) -> Iterator[Written]:
        """Yield the byte ranges that a task writes, in the order of its outputs."""
        for index, start, stop in self.tasks.entries(task):
            for out in self.recipes[index].outputs:
                first, last = out.byte_range(start, stop)
                yield Written(row=self.row_of[out.spec.path], start=first, stop=last)

    def num_pieces(self, task: int) -> int:
        """Return the number of digests that a task reports."""
        return sum(written.num_pieces(self.leaf_bytes) for written in self.written(task))

    def part_elements(self, task: int, memory_bytes: int) -> int:
        """Return the part size in elements at which a task uses at most `memory_bytes`, or 0 for an undivided task.

        Call `check_budget` before this method to ensure that the smallest part fits.
        """
        # Do not divide a task that fits, because a divided merge reads its inputs once for each pass.
        if int(self.memory_bytes[task]) <= memory_bytes:
            return 0
        unit, fixed = _part_unit(self.operation, self.recipes, self.tasks, task), self.part_bytes(task, 0)
        # Memory use grows linearly with the part size, so divide the remaining memory by the bytes of one unit.
        return unit * max(1, (memory_bytes - fixed) // (self.part_bytes(task, unit) - fixed))

    def part_bytes(self, task: int, num_part: int) -> int:
        """Return the host memory in bytes that a task takes if it runs in parts of `num_part` elements."""
        ((index, _, _),) = self.tasks.entries(task)
        return _part_bytes(self.recipes[index], self.leaf_sizes, num_part)

    def check_budget(self, memory_bytes: int, what: str) -> None:
        """Raise BudgetTooSmall if the largest task requires more than `memory_bytes`."""
        # Converting an empty checkpoint requires no tasks and only writes headers.
        if not len(self.tasks):
            return
        largest = int(self.least_bytes.argmax())
        need = int(self.least_bytes[largest])
        if need > memory_bytes:
            recipe = self.recipes[next(self.tasks.entries(largest))[0]]
            raise BudgetTooSmall(
                f"{what}: memory_bytes={memory_bytes}, but {recipe.outputs[0].spec.name!r} needs {need} bytes at once",
                minimum_bytes=need,
            )


def _part_unit(operation: Operation, recipes: Sequence[Recipe], tasks: Tasks, task: int) -> int:
    """Return `StreamedOperation.part_unit` for a task's recipe, or 0 if the task has several recipes."""
    if not isinstance(operation, StreamedOperation) or tasks.first[task + 1] - tasks.first[task] != 1:
        return 0
    recipe = recipes[int(tasks.recipe[tasks.first[task]])]
    # A recipe that can be cut by rows gets smaller tasks instead of parts.
    return 0 if recipe.align else operation.part_unit(recipe)


def _part_bytes(recipe: Recipe, leaf_sizes: Sequence[int], num_part: int) -> int:
    """Return the memory in bytes that a part with `num_part` elements requires."""
    num_elements = max(1, math.prod(recipe.inputs[0].spec.shape))
    # Add two leaves for each input, because a part may begin and end inside a leaf, and whole leaves are read.
    input_bytes = sum(
        num_part * source_input.spec.dtype.bits // 8 + 2 * leaf_sizes[source_input.source]
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
        sources: manifests of the sources, in the operation's order.
        task_bytes: see `plan.tasks.cut`.
        shard_bytes: maximum size of an output file in bytes.
        leaf_bytes: leaf size of the output's digests.
        verify: whether to compare the bytes that are read with the sources' digests, if the sources have digests.
        operation_specs: specs of the operation. The job's key contains the specs, because the name of a user's
            operation may omit options.

    Raises:
        PlanError: see `Operation.recipes`, or an operation would compute with a dtype that torch lacks.
        ConfigError: the specs hold values that cannot be sent to a worker.
    """
    recipes = tuple(operation.recipes([manifest.tensors for manifest in sources]))
    # Reject unsupported dtypes now, because a worker would fail only at the first task with this dtype.
    for spec in (spec for recipe in recipes if not recipe.copies for spec in recipe.specs):
        if spec.dtype in UNKNOWN:
            message = f"{operation.name}: torch has no dtype for {spec.dtype}, so nothing can be computed with it"
            raise PlanError(
                message,
                tensor=spec.name,
                hint="leave the tensor out with a `rename` to an empty name before this operation",
            )
    specs = [out.spec for recipe in recipes for out in recipe.outputs]
    if gguf_of(operation) is None:
        files = lay_out(specs, shard_bytes=shard_bytes)
    else:
        files = lay_out(specs, shard_bytes=1 << 62, align_bytes=ALIGNMENT)
    leaf_sizes = tuple(manifest.leaf_bytes if verify and manifest.leaves is not None else 0 for manifest in sources)
    key = _key(operation, operation_specs, sources, files, (task_bytes, shard_bytes, leaf_bytes), leaf_sizes)
    row_of = {name: row for row, name in enumerate(files.table.names)}
    small_from = operation.small_from if isinstance(operation, Attested) else 0
    file_of = np.array([files.table.file_index[row_of[recipe.outputs[0].spec.path]] for recipe in recipes], np.int64)
    tasks = spread(cut(recipes, task_bytes=task_bytes, leaf_bytes=leaf_bytes), file_of, task_bytes=task_bytes)
    read = read_bytes(recipes, tasks, leaf_sizes)
    memory_bytes = read.sum(axis=1) + tasks.out_bytes
    least_bytes = memory_bytes.copy()
    if isinstance(operation, StreamedOperation):
        # Only large tasks can exceed a memory budget. Skip small tasks, because a job may have hundreds of thousands.
        for task in np.flatnonzero(tasks.cost > task_bytes // 2).tolist():
            if unit := _part_unit(operation, recipes, tasks, task):
                recipe = recipes[int(tasks.recipe[tasks.first[task]])]
                least_bytes[task] = min(memory_bytes[task], _part_bytes(recipe, leaf_sizes, unit))
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
        leaf_sizes=leaf_sizes,
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
    leaf_sizes: tuple[int, ...],
) -> str:
    """Return `ConversionJob.key`. Raise ConfigError if the specs hold values that cannot be sent to a worker."""
    # Include code and specs, because a user's function may change under the same name, and names may omit options.
    parts = [operation.name, code_of(operation), *map(str, sizes), str(leaf_sizes)]
    try:
        parts.append(msgspec.msgpack.encode(operation_specs).hex())
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{operation.name}: the options cannot be sent to workers: {error}") from error
    # Include the identities of files. Replacing weights without digests does not change their revision.
    for manifest in sources:
        parts += [manifest.revision, *(f"{file.name} {file.nbytes} {file.identity}" for file in manifest.files)]
    # Increase this number when the same request is divided or computed differently, so that jobs ignore old journals.
    digest = blake3(b"penstock job 6\0")
    # Prefix each part with its length. Otherwise "ab" + "c" and "a" + "bc" would have the same key.
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    digest.update(canonical(files.table, name_order(files.table)))
    # Add the tensors' file numbers and offsets, because a resumed job continues to write the same files.
    digest.update(np.stack([files.table.file_index, files.table.offset]).astype("<i8").tobytes())
    return digest.hexdigest(length=16)


def cached(sources: Sequence[WeightSet]) -> list[CachedSource]:
    """Return the files of these sources that are read through a cache."""
    return [file for source in sources for file in source.sources if isinstance(file, CachedSource)]


def shared_as(sources: Sequence[WeightSet]) -> str:
    """Return the identity of the cache through which these sources are read, or "" if there is none."""
    return next((file.shared_as for file in cached(sources)), "")


def bytes_read(sources: Sequence[WeightSet]) -> tuple[int, int]:
    """Return the bytes that caches read from the sources, in whole chunks, and the bytes that were requested."""
    stats = [file.stats for file in cached(sources)]
    return sum(stat.miss_bytes for stat in stats), sum(stat.asked_bytes for stat in stats)


def cached_tasks(job: ConversionJob, sources: Sequence[WeightSet]) -> list[int]:
    """Return the tasks for which at least half of the input is now in the cache."""
    files = [
        [_CachedRanges(file) if isinstance(file, CachedSource) else None for file in source.sources]
        for source in sources
    ]
    # Return early if nothing is cached, because the loop below visits every input of every task.
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
                first, last = task_input.leaf_range(start, stop, job.leaf_sizes[task_input.source])
                here += 0 if file is None else file.within(at + first, at + last)
        # Half is sufficient, because the first and the last leaf of a task are often missing.
        if here and 2 * here >= int(job.read_bytes[task].sum()):
            tasks.append(task)
    return tasks


class _CachedRanges:
    """Cumulative number of cached bytes over the chunks of one file.

    Attributes:
        any: whether the cache has at least one chunk.
    """

    def __init__(self, source: CachedSource) -> None:
        count = -(-source.nbytes // CACHE_CHUNK_BYTES)
        # Add an entry for the offset at the end of the file.
        self._has = np.zeros(count + 1, bool)
        self._has[[chunk for chunk in source.cached_chunks() if chunk < count]] = True
        self._before: I64 = np.concatenate([[0], np.cumsum(self._has * CACHE_CHUNK_BYTES)]).astype(np.int64)
        self.any = bool(self._has.any())

    def within(self, start: int, stop: int) -> int:
        """Return the number of bytes in `[start, stop)` that are in the cache."""
        return self._until(stop) - self._until(start)

    def _until(self, offset: int) -> int:
        chunk, more = divmod(offset, CACHE_CHUNK_BYTES)
        return int(self._before[chunk]) + (more if self._has[chunk] else 0)
