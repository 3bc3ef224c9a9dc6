"""A job: all of a conversion that is decided before it begins. The same words give the same job in every process.

In: an operation and the tables of its sources. Out: a `Job`: recipes, files, tasks, and the key they are known by.
Not here: running it (`jobs.workers.worker`, `coordinator`), what was done of it (`journal`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from blake3 import blake3

from penstock.digest.leaf import LEAF_BYTES, canonical, name_order
from penstock.errors import BudgetTooSmall, ConfigError, PlanError
from penstock.jobs.operations.operation import UNKNOWN, Operation, Streamed
from penstock.jobs.operations.spec import Word
from penstock.jobs.operations.user_function import code_of
from penstock.plan.cuts import cut, read_bytes, spread
from penstock.plan.tasks import TASK_BYTES, OutputFiles, Recipe, Tasks, lay_out
from penstock.types import GB, I64, Manifest

SHARD_BYTES = 5 * GB
"""Of a file of the output. Source: transformers' `max_shard_size` default until 4.x, which every hub is used to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Bytes of the output that one task writes: `[start, stop)` of a tensor."""

    row: int
    """Of the output's table."""
    start: int
    stop: int

    def pieces(self, leaf_bytes: int) -> list[tuple[int, int]]:
        """Cut at the tensor's leaves: what is digested, each for itself."""
        cuts = [self.start, *range((self.start // leaf_bytes + 1) * leaf_bytes, self.stop, leaf_bytes), self.stop]
        return [(a, b) for a, b in pairwise(cuts) if a < b]

    def num_pieces(self, leaf_bytes: int) -> int:
        """Return how many these are."""
        return (self.stop - 1) // leaf_bytes - self.start // leaf_bytes + 1 if self.start < self.stop else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Job:
    """See the module."""

    operation: Operation
    recipes: tuple[Recipe, ...]
    files: OutputFiles
    tasks: Tasks
    leaf_bytes: int
    key: str
    """32 hex digits: of the operation, the sources' revisions, and all that decides the output's bytes; and of what
    these are held to, so that no job goes on with what another did not verify."""
    row_of: dict[str, int]
    """Row of the output's table by path."""
    held_to: tuple[int, ...]
    """Per source: bytes of the leaves to whose digests all that is read of it is held; 0: to none."""
    read_bytes: I64
    """[num_tasks, num_sources] what each task reads of each source, out to the ends of leaves."""
    memory_bytes: I64
    """Of each task: what it reads, and what it gives."""
    least_bytes: I64
    """The same where it is made in the smallest parts that its operation can make it in."""

    def written(self, task: int) -> Iterator[Written]:
        """Yield what a task writes, output after output."""
        for index, start, stop in self.tasks.entries(task):
            for out in self.recipes[index].outputs:
                first, last = out.byte_range(start, stop)
                yield Written(row=self.row_of[out.spec.path], start=first, stop=last)

    def num_pieces(self, task: int) -> int:
        """Digests that a task reports."""
        return sum(one.num_pieces(self.leaf_bytes) for one in self.written(task))

    def part_elements(self, task: int, memory_bytes: int) -> int:
        """Elements of the parts that a task is made in, to hold at most `memory_bytes`; 0: it is made at once.

        Order: after `check_budget`: the smallest part fits.
        """
        if int(self.memory_bytes[task]) <= memory_bytes:
            return 0
        unit, fixed = _part_unit(self.operation, self.recipes, self.tasks, task), self.part_bytes(task, 0)
        return unit * max(1, (memory_bytes - fixed) // (self.part_bytes(task, unit) - fixed))

    def part_bytes(self, task: int, num_part: int) -> int:
        """Host memory of a task that is made in parts of so many elements."""
        ((index, _, _),) = self.tasks.entries(task)
        return _part_bytes(self.recipes[index], self.held_to, num_part)

    def check_budget(self, memory_bytes: int, what: str) -> None:
        """BudgetTooSmall where the largest task needs more than `memory_bytes`."""
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
    """See `Streamed.part_unit`; 0 also where a task is more than one recipe."""
    if not isinstance(operation, Streamed) or tasks.first[task + 1] - tasks.first[task] != 1:
        return 0
    recipe = recipes[int(tasks.recipe[tasks.first[task]])]
    return 0 if recipe.align else operation.part_unit(recipe)


def _part_bytes(recipe: Recipe, held_to: Sequence[int], num_part: int) -> int:
    """What a part of so many elements holds: of each input, out to the ends of leaves, of the outputs, and what a chain
    keeps of one part for the next."""
    num_elements = max(1, math.prod(recipe.inputs[0].spec.shape))
    given = sum(num_part * one.spec.dtype.bits // 8 + 2 * held_to[one.source] for one in recipe.inputs)
    _, made = recipe.nbytes(0, recipe.num_rows)
    kept = num_part * recipe.inputs[0].spec.dtype.bits // 8
    return given + kept + -(-made * num_part // num_elements) + LEAF_BYTES * len(recipe.outputs)


def plan_job(
    operation: Operation,
    sources: Sequence[Manifest],
    *,
    task_bytes: int = TASK_BYTES,
    shard_bytes: int = SHARD_BYTES,
    leaf_bytes: int = LEAF_BYTES,
    verify: bool = True,
    words: Sequence[Word] = (),
) -> Job:
    """Decide all of a conversion.

    Args:
        operation: what is done.
        sources: manifests of its sources, in its order.
        task_bytes: see `plan.cuts.cut`.
        shard_bytes: files of at most so many bytes.
        leaf_bytes: of the output's digests.
        verify: hold what is read to the sources' digests, where they have any.
        words: what the operation was made of: a user's may leave some of them out of its name.

    Raises:
        PlanError: see `Operation.recipes`; or torch has no dtype for what is computed with. ConfigError: of the words.
    """
    recipes = tuple(operation.recipes([manifest.tensors for manifest in sources]))
    for spec in (spec for recipe in recipes if not recipe.copies for spec in recipe.specs):
        if spec.dtype in UNKNOWN:
            message = f"{operation.name}: torch has no dtype for {spec.dtype}, so nothing can be computed with it"
            raise PlanError(message, tensor=spec.name, hint="leave it out before: `rename` it to nothing")
    specs = [out.spec for recipe in recipes for out in recipe.outputs]
    files = lay_out(specs, shard_bytes=shard_bytes)
    held_to = tuple(one.leaf_bytes if verify and one.leaves is not None else 0 for one in sources)
    told = [operation.name, code_of(operation), str(task_bytes), str(shard_bytes), str(leaf_bytes), str(held_to)]
    try:
        told.append(msgspec.msgpack.encode(words).hex())
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{operation.name}: its words are not plain values: {error}") from error
    for manifest in sources:
        told += [manifest.revision, *(f"{file.name} {file.nbytes} {file.identity}" for file in manifest.files)]
    digest = blake3(b"penstock job 5\0")
    for word in told:
        digest.update(len(word.encode()).to_bytes(8, "little") + word.encode())
    digest.update(canonical(files.table, name_order(files.table)))
    digest.update(np.stack([files.table.file_index, files.table.offset]).astype("<i8").tobytes())
    row_of = {name: row for row, name in enumerate(files.table.names)}
    file_of = np.array([files.table.file_index[row_of[recipe.outputs[0].spec.path]] for recipe in recipes], np.int64)
    tasks = spread(cut(recipes, task_bytes=task_bytes, leaf_bytes=leaf_bytes), file_of, task_bytes=task_bytes)
    read = read_bytes(recipes, tasks, held_to)
    memory_bytes = read.sum(axis=1) + tasks.out_bytes
    least_bytes = memory_bytes.copy()
    if isinstance(operation, Streamed):
        for task in np.flatnonzero(tasks.cost > task_bytes // 2).tolist():
            if unit := _part_unit(operation, recipes, tasks, task):
                recipe = recipes[int(tasks.recipe[tasks.first[task]])]
                least_bytes[task] = min(memory_bytes[task], _part_bytes(recipe, held_to, unit))
    return Job(
        operation=operation,
        recipes=recipes,
        files=files,
        tasks=tasks,
        leaf_bytes=leaf_bytes,
        key=digest.hexdigest(length=16),
        row_of=row_of,
        held_to=held_to,
        read_bytes=read,
        memory_bytes=memory_bytes,
        least_bytes=least_bytes,
    )
