"""Tasks of a conversion.

A recipe declares the tensor rows from which output rows are computed. Recipes are cut into tasks of about `task_bytes`,
at multiples of `align` rows. Small recipes are batched, and recipes that cannot be cut run first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError, PlanError
from penstock.types import I64, MIB, Box, DType, TensorTable, bits_to_bytes

TASK_BYTES, LARGE_TASK_BYTES = 64 * MIB, 128 * MIB
"""Bytes in and out of one task. 64 MiB take 1 ms of a PCIe 5 link, so that a thousand tasks per second cost the
scheduler a few per cent of a core. The last task of a slow worker is short compared with any job that needs several
workers. Large sources get larger tasks, since on GPUs the interpreter's time for a task of 64 MiB is as long as the
task's own. Source: benchmarks/results/h200x2_202611/convert.md."""
NUM_TASKS = 128
"""Minimum number of tasks for which they become larger than `TASK_BYTES`, enough to share among several workers."""


def task_bytes_of(nbytes: int) -> int:
    """Return the target size of tasks for sources of `nbytes` in total.

    The size must not depend on workers or devices, because a resumed job must have the same tasks.
    """
    return min(LARGE_TASK_BYTES, max(TASK_BYTES, nbytes // NUM_TASKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    group: str = ""
    """Weight set of an output, if an operation writes several; see `OutputFiles`."""

    @property
    def path(self) -> str:
        """Return the group and the name, which together are unique among all outputs."""
        return f"{self.group}/{self.name}" if self.group else self.name

    @property
    def nbytes(self) -> int:
        """Return the packed size in bytes. Raise PlanError if the elements do not fill whole bytes."""
        return _nbytes(self.shape, self.dtype, self.name)


def _nbytes(shape: tuple[int, ...], dtype: DType, name: str) -> int:
    """Return the size of a packed tensor. Raise PlanError if the elements do not fill whole bytes."""
    try:
        return bits_to_bytes(math.prod(shape), dtype)
    except ValueError as error:
        raise PlanError(str(error), tensor=name) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A box of a source tensor that a recipe reads.

    Rows `[a, b)` of the recipe read rows `[a - at, b - at)` of the box, limited to the rows of the box. If `at` is
    None, all rows of the recipe read the whole box.
    """

    source: int
    spec: Spec
    box: Box
    at: int | None = 0

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range of the tensor rows that these recipe rows read, including unread columns."""
        box = self.taken(start, stop)
        first, last = (0, 0) if box is None else (0, 1) if not box.start else (box.start[0], box.stop[0])
        row_bits = math.prod(self.spec.shape[1:]) * self.spec.dtype.bits
        return first * row_bits // 8, last * row_bits // 8

    def leaf_range(self, start: int, stop: int, leaf_bytes: int) -> tuple[int, int]:
        """Return `byte_range`, rounded outward to leaves. `leaf_bytes` is 0 for a tensor without digests."""
        first, last = self.byte_range(start, stop)
        # Do not round an empty range, because rounding would read a leaf that is not required.
        if not leaf_bytes or first == last:
            return first, last
        return first // leaf_bytes * leaf_bytes, min(-(-last // leaf_bytes) * leaf_bytes, self.spec.nbytes)

    def taken(self, start: int, stop: int) -> Box | None:
        """Return the box that these rows of the recipe read, or None if the rows do not read the input."""
        # Do not slice a scalar or an empty tensor, because an operation uses the tensor's dtype and device.
        if self.at is None or not self.box.start or not self.box.shape[0]:
            return self.box
        low, high = max(start - self.at, 0), min(stop - self.at, self.box.shape[0])
        if low >= high:
            return None
        first = self.box.start[0]
        return Box(start=(first + low, *self.box.start[1:]), stop=(first + high, *self.box.stop[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """Tensor that a recipe writes.

    Rows `[a, b)` of the recipe produce rows `[a / per, b / per)` of the tensor, rounded outward. `per` divides the
    recipe's `align`. If `per` is 0, the recipe is not cut and produces the whole tensor.
    """

    spec: Spec
    per: int = 1

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of the tensor that these rows of the recipe produce."""
        if not self.per:
            return 0, (self.spec.shape or (1,))[0]
        return start // self.per, -(-stop // self.per)

    @property
    def row_nbytes(self) -> int:
        """Return the size of a row. Raise PlanError if the elements do not fill whole bytes."""
        shape = self.spec.shape or (1,)
        return _nbytes(shape[1:], self.spec.dtype, self.spec.name) if shape[0] else 0

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range of the tensor that these rows of the recipe produce."""
        row = self.row_nbytes
        first, last = self.rows(start, stop)
        return first * row, last * row


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A group of outputs that are computed in one call, and their inputs.

    Attributes:
        align: number of rows in a unit. Tasks process whole units. 0 means that one task processes all `num_rows` rows.
        copies: whether the output equals its only input. Copies also support dtypes in which torch cannot compute.
    """

    outputs: tuple[TaskOutput, ...]
    inputs: tuple[Input, ...]
    num_rows: int
    align: int = 1
    copies: bool = False

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Return the specs of all inputs and outputs."""
        return (*(part.spec for part in self.inputs), *(out.spec for out in self.outputs))

    def nbytes(self, start: int, stop: int) -> tuple[int, int]:
        """Return the number of bytes that these rows read, and the number of bytes that these rows write."""
        read = (part.byte_range(start, stop) for part in self.inputs)
        written = (out.byte_range(start, stop) for out in self.outputs)
        return sum(last - first for first, last in read), sum(last - first for first, last in written)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tasks:
    """Tasks as columns instead of objects, because a job may have a million tasks and every process plans all tasks.

    Task t consists of entries `first[t]:first[t + 1]`. Each entry is rows `[start, stop)` of a recipe.
    """

    first: I64
    recipe: I64
    start: I64
    stop: I64
    in_bytes: I64
    """Bytes read by each task."""
    out_bytes: I64

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.in_bytes)

    @property
    def cost(self) -> I64:
        """Return the total number of input and output bytes of each task."""
        return self.in_bytes + self.out_bytes

    def in_order(self, order: I64) -> Tasks:
        """Return the same tasks in a new order, in which task i is the previous task `order[i]`."""
        # `at` is the previous index of each entry.
        counts = np.diff(self.first)[order]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.repeat(self.first[order] - first[:-1], counts) + np.arange(first[-1])
        return Tasks(
            first=first,
            recipe=self.recipe[at],
            start=self.start[at],
            stop=self.stop[at],
            in_bytes=self.in_bytes[order],
            out_bytes=self.out_bytes[order],
        )

    def entries(self, task: int) -> Iterator[tuple[int, int, int]]:
        """Yield the recipe, start and stop of each entry of a task."""
        at = slice(int(self.first[task]), int(self.first[task + 1]))
        yield from zip(self.recipe[at].tolist(), self.start[at].tolist(), self.stop[at].tolist(), strict=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OutputFiles:
    """Output tensors in files. Offsets in `table` are relative to the end of a file's header."""

    table: TensorTable
    """Tensors by `Spec.path`, which is the group and the name."""
    body_nbytes: tuple[int, ...]
    """Body size of each file in bytes."""
    groups: tuple[str, ...]
    """Group of each file. The files of a group are consecutive and contain no other tensors."""


ALIGN_BYTES = 8
"""Alignment of tensors in a file, which is the size of the largest element. Source: safetensors README, "Format", which
says that writers align by sorting dtypes."""


def lay_out(specs: Sequence[Spec], *, shard_bytes: int, align_bytes: int = 1) -> OutputFiles:
    """Assign tensors to files of at most `shard_bytes`, except that a larger tensor has a separate file.

    Each file contains tensors of one group, with wider elements first, as in safetensors' own writer, so that tensors
    are aligned without gaps. Every tensor is padded to a multiple of `align_bytes`.

    Raises:
        PlanError: two tensors have the same name, or elements do not fill whole bytes.
    """
    names = [spec.path for spec in specs]
    if len(set(names)) < len(names):
        duplicate = next(name for i, name in enumerate(names) if name in names[:i])
        raise PlanError("the operation writes two tensors with the same name", tensor=duplicate)
    sizes = [spec.nbytes for spec in specs]
    by_group: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        by_group.setdefault(spec.group, []).append(i)
    files: list[list[int]] = []
    groups: list[str] = []
    for group, members in by_group.items():
        # Start above the limit, so that each group opens a new file.
        filled = shard_bytes + 1
        for i in members:
            if filled + sizes[i] > shard_bytes:
                files.append([])
                groups.append(group)
                filled = 0
            files[-1].append(i)
            filled += sizes[i]
    # A weight set without tensors has one file, which contains only a header.
    if not files:
        files, groups = [[]], [""]
    file_index, offset = np.zeros(len(specs), np.int64), np.zeros(len(specs), np.int64)
    bodies = []
    for index, rows in enumerate(files):
        at = 0
        # Each width divides the larger widths, so offsets stay aligned. Tensors of equal width keep their order.
        for i in sorted(rows, key=lambda i: (-specs[i].dtype.bits, i)):
            file_index[i], offset[i] = index, at
            at += -(-sizes[i] // align_bytes) * align_bytes
        bodies.append(at)
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(spec.dtype for spec in specs),
        shapes=tuple(spec.shape for spec in specs),
        file_index=file_index,
        offset=offset,
        nbytes=np.array(sizes, np.int64),
    )
    return OutputFiles(table=table, body_nbytes=tuple(bodies), groups=tuple(groups))


_ANY = 1 << 62
"""Number of rows of a tensor without a limit."""


class _Extents:
    """Inputs or outputs of all recipes as columns, to compute the bytes that rows of a recipe read or write.

    Rows `[a, b)` of a recipe correspond to rows `(a - at) / per` to `(b - at) / per`, rounded outward, among the
    `num_rows` tensor rows from row `first`. If `is_all` is set, any recipe rows correspond to all `num_rows` rows.
    """

    def __init__(self, counts: Sequence[int], columns: Sequence[tuple[int, ...]]) -> None:
        self._begins = np.cumsum([0, *counts])
        # The columns are first, number of rows, at, per, bits of a row, is_all, source, and bytes of the tensor.
        self._columns = np.array(columns, np.int64).reshape(-1, 8).T

    @classmethod
    def of_inputs(cls, recipes: Sequence[Recipe]) -> _Extents:
        counts = [len(recipe.inputs) for recipe in recipes]
        return cls(counts, [_of_input(part) for recipe in recipes for part in recipe.inputs])

    @classmethod
    def of_outputs(cls, recipes: Sequence[Recipe]) -> _Extents:
        counts = [len(recipe.outputs) for recipe in recipes]
        return cls(counts, [_of_output(out) for recipe in recipes for out in recipe.outputs])

    def byte_ranges(self, recipe: I64, start: I64, stop: I64) -> tuple[I64, I64, I64, I64]:
        """Return the columns run, tensor, first byte and last byte, one entry for each tensor of each run of rows."""
        counts = np.diff(self._begins)[recipe]
        run = np.repeat(np.arange(len(recipe)), counts)
        tensor = np.arange(len(run)) + np.repeat(self._begins[recipe] - np.cumsum(counts) + counts, counts)
        first, num_rows, at, per, row_bits, is_all, _, _ = self._columns[:, tensor]
        low = np.where(is_all, 0, np.clip((start[run] - at) // per, 0, num_rows))
        # Round up with -((at - stop) // per), because the last group of rows may be incomplete.
        high = np.where(is_all, num_rows, np.clip(-((at - stop[run]) // per), 0, num_rows))
        return run, tensor, (first + low) * row_bits // 8, (first + high) * row_bits // 8

    def nbytes(self, recipe: I64, start: I64, stop: I64) -> I64:
        totals = np.zeros(len(recipe), np.int64)
        run, _, first, last = self.byte_ranges(recipe, start, stop)
        np.add.at(totals, run, last - first)
        return totals

    def first_of(self, recipe: I64, stop: I64) -> I64:
        """Return the number of bytes that the first `stop` rows of each recipe have in the recipe's first tensor."""
        run, _, first, last = self.byte_ranges(recipe, 0 * stop, stop)
        at = np.searchsorted(run, np.arange(len(recipe)))
        return (last - first)[at]

    def sources(self, tensor: I64) -> tuple[I64, I64]:
        """Return the source of each input, and the size in bytes of the input's tensor."""
        source, nbytes = self._columns[6:, tensor]
        return source, nbytes


def _of_input(part: Input) -> tuple[int, ...]:
    """Return the columns of an input. See `_Extents`."""
    box, shape, bits = part.box, part.spec.shape, part.spec.dtype.bits
    row_bits = math.prod(shape[1:]) * bits
    first, num_rows = (box.start[0], box.stop[0] - box.start[0]) if box.start else (0, 1)
    is_all = part.at is None or not box.start
    return first, num_rows, part.at or 0, 1, row_bits, is_all, part.source, -(-math.prod(shape) * bits // 8)


def _of_output(out: TaskOutput) -> tuple[int, ...]:
    """Return the columns of an output. Raise PlanError if a row does not fill whole bytes."""
    row_bytes = out.row_nbytes
    return 0, _ANY if out.per else (out.spec.shape or (1,))[0], 0, out.per or 1, 8 * row_bytes, not out.per, 0, 0


def read_bytes(recipes: Sequence[Recipe], tasks: Tasks, leaf_bytes: Sequence[int]) -> I64:
    """Return the number of bytes that each task reads from each source, with shape [num_tasks, num_sources].

    Args:
        recipes, tasks: argument and result of `cut`.
        leaf_bytes: leaf size of each source. See `Input.leaf_range`.
    """
    read = _Extents.of_inputs(recipes)
    run, tensor, first, last = read.byte_ranges(tasks.recipe, tasks.start, tasks.stop)
    source, nbytes = read.sources(tensor)
    leaf = np.array(leaf_bytes, np.int64)[source]
    step = np.maximum(leaf, 1)
    # Count whole leaves, because only a whole leaf can be verified by its digest.
    upper = np.where(leaf, np.minimum(-(-last // step) * step, nbytes), last)
    amounts = np.zeros((len(tasks), len(leaf_bytes)), np.int64)
    task = np.repeat(np.arange(len(tasks)), np.diff(tasks.first))
    np.add.at(amounts, (task[run], source), np.where(first < last, upper - first // step * step, 0))
    return amounts


def cut(recipes: Sequence[Recipe], *, task_bytes: int = TASK_BYTES, leaf_bytes: int = 1) -> Tasks:
    """Cut recipes into tasks of about `task_bytes` input and output bytes.

    Args:
        recipes: recipes in the order in which their inputs are stored.
        task_bytes: target size. A task with several rows exceeds the target by at most its recipe's `align` rows.
        leaf_bytes: leaf size. The first output is cut at multiples of the leaf size unless a task would be too large.

    Returns:
        Tasks in the order of the recipes, except that tasks far above `task_bytes` come first, in descending order of
            size.

    Raises:
        ConfigError: `task_bytes` is below 1.
    """
    if task_bytes < 1:
        raise ConfigError(f"task_bytes={task_bytes} is below 1", hint="omit task_bytes, or pass a size such as 64M")
    # Compute in columns, because 70,000 recipes become several hundred thousand tasks, and every worker plans all
    # tasks.
    inputs, outputs = _Extents.of_inputs(recipes), _Extents.of_outputs(recipes)
    every, num_rows = np.arange(len(recipes)), np.array([recipe.num_rows for recipe in recipes], np.int64)
    total = inputs.nbytes(every, 0 * every, num_rows) + outputs.nbytes(every, 0 * every, num_rows)
    # Batch only recipes up to half of `task_bytes`, because at least two of these recipes fit in one task.
    is_small = total <= task_bytes // 2
    small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
    row_bounds = _cuts(recipes, large, total[large], outputs, task_bytes, leaf_bytes)
    counts, after = _batches(small, total[small], task_bytes, len(recipes))
    recipe, start, stop = (
        np.concatenate(both) for both in zip(row_bounds, (small, 0 * small, num_rows[small]), strict=True)
    )
    counts = np.concatenate([np.ones(len(row_bounds[0]), np.int64), counts])
    first = np.cumsum([0, *counts])
    task = np.repeat(np.arange(len(counts)), counts)
    in_bytes, out_bytes = np.zeros((2, len(counts)), np.int64)
    np.add.at(in_bytes, task, inputs.nbytes(recipe, start, stop))
    np.add.at(out_bytes, task, outputs.nbytes(recipe, start, stop))
    tasks = Tasks(first=first, recipe=recipe, start=start, stop=stop, in_bytes=in_bytes, out_bytes=out_bytes)
    # Put the longest tasks, which could not be cut, first. Otherwise all workers would wait for them at the end.
    is_rest = (tasks.cost <= 2 * task_bytes) | (np.arange(len(counts)) >= len(row_bounds[0]))
    # The remaining tasks follow in the order of the recipes, which is the order of storage.
    place = np.concatenate([row_bounds[0], after])
    return tasks.in_order(np.lexsort((np.arange(len(counts)), np.where(is_rest, place, -tasks.cost), is_rest)))


def _cuts(
    recipes: Sequence[Recipe], large: I64, nbytes: I64, outputs: _Extents, task_bytes: int, leaf_bytes: int
) -> tuple[I64, I64, I64]:
    """Cut recipes into nearly equal runs of rows. Return the recipe, the start and the stop of each run."""
    num_rows = np.array([recipes[i].num_rows for i in large.tolist()], np.int64)
    align = np.array([recipes[i].align for i in large.tolist()], np.int64)
    is_cut = (align > 0) & (num_rows > align)
    unit, row_bytes = np.maximum(align, 1), nbytes / np.maximum(num_rows, 1)
    out_row = outputs.first_of(large, align)
    # Cut between leaves, because the digest of a leaf that two tasks write requires a second pass.
    on_leaf = unit * (leaf_bytes // np.gcd(leaf_bytes, out_row))
    unit = np.where((out_row > 0) & (on_leaf * row_bytes <= task_bytes), on_leaf, unit)
    units = np.where(is_cut, -(-num_rows // unit), 1)
    # Multiply before dividing, here and below, so that the sizes of runs differ by at most one unit.
    counts = np.where(is_cut, np.minimum(units, -(-nbytes // task_bytes)), 1)
    owner = np.repeat(np.arange(len(large)), counts)
    i = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    unit, units, counts = unit[owner], units[owner], counts[owner]
    end = num_rows[owner]
    start, stop = np.minimum(units * i // counts * unit, end), np.minimum(units * (i + 1) // counts * unit, end)
    start, stop = np.where(is_cut[owner], start, 0), np.where(is_cut[owner], stop, end)
    has_rows = (start < stop) | ~is_cut[owner]
    return large[owner][has_rows], start[has_rows], stop[has_rows]


def _batches(small: I64, nbytes: I64, task_bytes: int, end: int) -> tuple[I64, I64]:
    """Group consecutive small recipes. Return each batch's number of recipes, and the recipe after the batch."""
    counts, before, filled = list[int](), list[int](), task_bytes + 1
    for recipe, size in zip(small.tolist(), nbytes.tolist(), strict=True):
        # The initial `filled` is above the limit, so that the first recipe opens a batch.
        if filled + size > task_bytes:
            before.append(recipe)
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return np.array(counts, np.int64), np.array([*before[1:], end][: len(counts)], np.int64)


def spread(tasks: Tasks, file_of: I64, *, task_bytes: int) -> Tasks:
    """Order tasks so that consecutive tasks write to different files, because a file has only one writer at a time.

    Args:
        tasks: result of `cut`, whose largest tasks stay first.
        file_of: file of the first output of each recipe.
        task_bytes: the same as for `cut`.
    """
    if not len(tasks):
        return tasks
    file, count = file_of[tasks.recipe[tasks.first[:-1]]], len(tasks)
    # Larger tasks are tasks that could not be cut. They stay first, as in `cut`.
    is_rest = tasks.cost <= 2 * task_bytes
    by_file = np.lexsort((np.arange(count), file, is_rest))
    begins = np.flatnonzero(np.diff(file[by_file] * 2 + is_rest[by_file], prepend=-1))
    turn = np.empty(count, np.int64)
    # The turn of a task is its number among the tasks of its file. After sorting by turn, the first task of every file
    # comes before the second task of any file.
    turn[by_file] = np.arange(count) - np.repeat(begins, np.diff(begins, append=count))
    return tasks.in_order(np.lexsort((file, np.where(is_rest, turn, np.arange(count)), is_rest)))
