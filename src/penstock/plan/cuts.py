"""Cutting of recipes into tasks, in columns: some microseconds for each recipe, some tenths of one for each task.

In: recipes. Out: `Tasks`; what each of them reads of each source.
Not here: what a recipe, its inputs and its outputs mean (`tasks`), who runs a task (`placement`).

    inputs, outputs of all recipes as columns --rows of a recipe--> bytes of each --sums--> tasks of about `task_bytes`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.tasks import TASK_BYTES, Input, Output, Recipe, Tasks
from penstock.types import I64

_ANY = 1 << 62
"""Number of rows of a tensor without a bound."""


class _Extents:
    """Inputs, or outputs, of all recipes as columns: which bytes of each some rows of its recipe are.

    Rows `[a, b)` of a recipe are rows `(a - at) / per` to `(b - at) / per` of its `num_rows`, rounded outwards, and
    these lie in the tensor from `first` on; or they are always all.
    """

    def __init__(self, counts: Sequence[int], columns: Sequence[tuple[int, ...]]) -> None:
        self._begins = np.cumsum([0, *counts])
        self._columns = np.array(columns, np.int64).reshape(-1, 8).T

    @classmethod
    def of_inputs(cls, recipes: Sequence[Recipe]) -> _Extents:
        """Return the extents of all inputs; see `Input.byte_range`."""
        counts = [len(recipe.inputs) for recipe in recipes]
        return cls(counts, [_of_input(part) for recipe in recipes for part in recipe.inputs])

    @classmethod
    def of_outputs(cls, recipes: Sequence[Recipe]) -> _Extents:
        """Return the extents of all outputs; see `Output.byte_range`."""
        counts = [len(recipe.outputs) for recipe in recipes]
        return cls(counts, [_of_output(out) for recipe in recipes for out in recipe.outputs])

    def byte_ranges(self, recipe: I64, start: I64, stop: I64) -> tuple[I64, I64, I64, I64]:
        """Return, for each run of rows and each tensor of its recipe: run, tensor, first byte and last byte."""
        counts = np.diff(self._begins)[recipe]
        run = np.repeat(np.arange(len(recipe)), counts)
        tensor = np.arange(len(run)) + np.repeat(self._begins[recipe] - np.cumsum(counts) + counts, counts)
        first, num_rows, at, per, row_bits, is_all, _, _ = self._columns[:, tensor]
        low = np.where(is_all, 0, np.clip((start[run] - at) // per, 0, num_rows))
        # -((at - stop) // per) rounds up: the last row of a tensor may come from a group of rows that is not full.
        high = np.where(is_all, num_rows, np.clip(-((at - stop[run]) // per), 0, num_rows))
        return run, tensor, (first + low) * row_bits // 8, (first + high) * row_bits // 8

    def nbytes(self, recipe: I64, start: I64, stop: I64) -> I64:
        """Return the bytes of each run of rows, over all tensors of its recipe."""
        totals = np.zeros(len(recipe), np.int64)
        run, _, first, last = self.byte_ranges(recipe, start, stop)
        np.add.at(totals, run, last - first)
        return totals

    def first_of(self, recipe: I64, stop: I64) -> I64:
        """Return bytes of the first `stop` rows of recipes, of their first tensors."""
        run, _, first, last = self.byte_ranges(recipe, 0 * stop, stop)
        at = np.searchsorted(run, np.arange(len(recipe)))
        return (last - first)[at]

    def sources(self, tensor: I64) -> tuple[I64, I64]:
        """Return of inputs the source, and all bytes of the tensor."""
        source, nbytes = self._columns[6:, tensor]
        return source, nbytes


def _of_input(part: Input) -> tuple[int, ...]:
    box, shape, bits = part.box, part.spec.shape, part.spec.dtype.bits
    row_bits = math.prod(shape[1:]) * bits
    first, num_rows = (box.start[0], box.stop[0] - box.start[0]) if box.start else (0, 1)
    is_all = part.at is None or not box.start
    return first, num_rows, part.at or 0, 1, row_bits, is_all, part.source, -(-math.prod(shape) * bits // 8)


def _of_output(out: Output) -> tuple[int, ...]:
    """Return the columns of an output. PlanError where a row does not fill whole bytes."""
    row_bytes = out.row_nbytes
    return 0, _ANY if out.per else (out.spec.shape or (1,))[0], 0, out.per or 1, 8 * row_bytes, not out.per, 0, 0


def read_bytes(recipes: Sequence[Recipe], tasks: Tasks, leaf_bytes: Sequence[int]) -> I64:
    """Return [num_tasks, num_sources]: the bytes that each task reads of each source.

    Args:
        recipes, tasks: of `cut`.
        leaf_bytes: of each source; see `Input.leaf_range`.
    """
    read = _Extents.of_inputs(recipes)
    run, tensor, first, last = read.byte_ranges(tasks.recipe, tasks.start, tasks.stop)
    source, nbytes = read.sources(tensor)
    leaf = np.array(leaf_bytes, np.int64)[source]
    step = np.maximum(leaf, 1)
    # Whole leaves are read, since only a whole leaf can be compared with its digest.
    upper = np.where(leaf, np.minimum(-(-last // step) * step, nbytes), last)
    amounts = np.zeros((len(tasks), len(leaf_bytes)), np.int64)
    task = np.repeat(np.arange(len(tasks)), np.diff(tasks.first))
    np.add.at(amounts, (task[run], source), np.where(first < last, upper - first // step * step, 0))
    return amounts


def cut(recipes: Sequence[Recipe], *, task_bytes: int = TASK_BYTES, leaf_bytes: int = 1) -> Tasks:
    """Cut recipes into tasks of about `task_bytes` in and out.

    Args:
        recipes: in the order in which their inputs lie in storage.
        task_bytes: what a task aims at; none of several rows is above it by more than its alignment.
        leaf_bytes: cuts fall on multiples of it in the first output where that costs at most a task as large again.

    Returns:
        Tasks in the recipes' order, but for those of over `task_bytes`, which come first, the largest of all before.

    Raises:
        ConfigError: a task is to have no bytes.
    """
    if task_bytes < 1:
        raise ConfigError(f"task_bytes={task_bytes}: a task has some", hint="64M is the default")
    inputs, outputs = _Extents.of_inputs(recipes), _Extents.of_outputs(recipes)
    every, num_rows = np.arange(len(recipes)), np.array([recipe.num_rows for recipe in recipes], np.int64)
    total = inputs.nbytes(every, 0 * every, num_rows) + outputs.nbytes(every, 0 * every, num_rows)
    # Half: two neighbours that fit one task should share it, and a larger recipe makes a good task alone.
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
    # What could not be cut runs longest, so it goes first: begun last, it would be all that the others wait for.
    is_rest = (tasks.cost <= 2 * task_bytes) | (np.arange(len(counts)) >= len(row_bounds[0]))
    place = np.concatenate([row_bounds[0], after])
    return tasks.in_order(np.lexsort((np.arange(len(counts)), np.where(is_rest, place, -tasks.cost), is_rest)))


def _cuts(
    recipes: Sequence[Recipe], large: I64, nbytes: I64, outputs: _Extents, task_bytes: int, leaf_bytes: int
) -> tuple[I64, I64, I64]:
    """Cut recipes into runs of rows of nearly equal size; return which recipe, from and to."""
    num_rows = np.array([recipes[i].num_rows for i in large.tolist()], np.int64)
    align = np.array([recipes[i].align for i in large.tolist()], np.int64)
    is_cut = (align > 0) & (num_rows > align)
    unit, row_bytes = np.maximum(align, 1), nbytes / np.maximum(num_rows, 1)
    out_row = outputs.first_of(large, align)
    # A cut inside a leaf has two tasks digest parts of it, which then need a second pass; on its edge none does.
    on_leaf = unit * (leaf_bytes // np.gcd(leaf_bytes, out_row))
    unit = np.where((out_row > 0) & (on_leaf * row_bytes <= task_bytes), on_leaf, unit)
    units = np.where(is_cut, -(-num_rows // unit), 1)
    # Multiplied before divided, here and below, so that runs differ by one unit at most.
    counts = np.where(is_cut, np.minimum(units, -(-nbytes // task_bytes)), 1)
    which = np.repeat(np.arange(len(large)), counts)
    i = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    unit, units, counts = unit[which], units[which], counts[which]
    end = num_rows[which]
    start, stop = np.minimum(units * i // counts * unit, end), np.minimum(units * (i + 1) // counts * unit, end)
    start, stop = np.where(is_cut[which], start, 0), np.where(is_cut[which], stop, end)
    has_rows = (start < stop) | ~is_cut[which]
    return large[which][has_rows], start[has_rows], stop[has_rows]


def _batches(small: I64, nbytes: I64, task_bytes: int, end: int) -> tuple[I64, I64]:
    """Put recipes that follow each other together; return the count of each batch, and the recipe it comes before."""
    counts, before, filled = list[int](), list[int](), task_bytes + 1
    for recipe, size in zip(small.tolist(), nbytes.tolist(), strict=True):
        # `filled` begins above the limit, so the first recipe opens the first batch.
        if filled + size > task_bytes:
            before.append(recipe)
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return np.array(counts, np.int64), np.array([*before[1:], end][: len(counts)], np.int64)


def spread(tasks: Tasks, file_of: I64, *, task_bytes: int) -> Tasks:
    """Order tasks so that neighbours write to different files, in turn: one file is written by one thread at a time.

    Args:
        tasks: of `cut`; its largest stay first.
        file_of: of each recipe, the file of its first output.
        task_bytes: as there.
    """
    if not len(tasks):
        return tasks
    file, count = file_of[tasks.recipe[tasks.first[:-1]]], len(tasks)
    is_rest = tasks.cost <= 2 * task_bytes
    by_file = np.lexsort((np.arange(count), file, is_rest))
    begins = np.flatnonzero(np.diff(file[by_file] * 2 + is_rest[by_file], prepend=-1))
    turn = np.empty(count, np.int64)
    turn[by_file] = np.arange(count) - np.repeat(begins, np.diff(begins, append=count))
    return tasks.in_order(np.lexsort((file, np.where(is_rest, turn, np.arange(count)), is_rest)))
