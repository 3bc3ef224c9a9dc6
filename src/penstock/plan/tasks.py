"""The parts of a conversion: recipes that say which rows of which tensors make which output bytes, and tasks.

In: what an operation says from shapes. Out: recipes, `Tasks` as columns, the output's tensors in files.
Not here: what an operation computes (`jobs`), the cutting of recipes (`cuts`), the assignment of tasks (`placement`).

    recipe: inputs (boxes) --rows [0, n)--> outputs      cut on `align` rows into tasks of about `task_bytes`;
                                                         small recipes batched; those that need a tensor whole go first

Division of the work among several holders, and grouping of tensors into buckets.

In: bytes that receivers take of teams, and of tensors. Out: each team's `Lines`, cut among its ranks; bucket numbers.
Not here: who the teams are (`match`), the plan they become part of (`sync`).

    the line of team {4, 9}: what receivers 0, 1, 2 take of it, end to end; each rank gives a stretch of it, so none
    more than its share, and few receivers take from two
        0        1        2
    |--------|--------|--------|
    4           ^9
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.plan.intersect import Groups
from penstock.types import I64, MIB, Box, DType, TensorTable, bits_to_bytes

TASK_BYTES = 64 * MIB
"""Bytes in and out of one task. Reason: 1 ms of a PCIe 5 link, so that a thousand a second cost the scheduler a few
per cent of a core, and a slow worker's last task is short beside any job that needs several workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A tensor without its bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    group: str = ""
    """Of an output: which of several weight sets it is in, where an operation gives several. See `OutputFiles`."""

    @property
    def path(self) -> str:
        """Return its name among all outputs."""
        return f"{self.group}/{self.name}" if self.group else self.name

    @property
    def nbytes(self) -> int:
        """Return its bytes, packed row-major. PlanError where elements do not fill whole bytes."""
        return _nbytes(self.shape, self.dtype, self.name)


def _nbytes(shape: tuple[int, ...], dtype: DType, name: str) -> int:
    try:
        return bits_to_bytes(math.prod(shape), dtype)
    except ValueError as error:
        raise PlanError(str(error), tensor=name) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The box of a source's tensor that a recipe needs.

    For rows `[a, b)` of the recipe: the box's rows `[a - at, b - at)`, as far as it has them; where `at` is None, all.
    """

    source: int
    spec: Spec
    box: Box
    at: int | None = 0

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return bytes of the tensor that are read for these rows of the recipe: its rows in their full width."""
        box = self.taken(start, stop)
        first, last = (0, 0) if box is None else (0, 1) if not box.start else (box.start[0], box.stop[0])
        row_bits = math.prod(self.spec.shape[1:]) * self.spec.dtype.bits
        return first * row_bits // 8, last * row_bits // 8

    def leaf_range(self, start: int, stop: int, leaf_bytes: int) -> tuple[int, int]:
        """Return `byte_range` out to the ends of the tensor's leaves, where there are any: `leaf_bytes` above 0."""
        first, last = self.byte_range(start, stop)
        if not leaf_bytes or first == last:
            return first, last
        return first // leaf_bytes * leaf_bytes, min(-(-last // leaf_bytes) * leaf_bytes, self.spec.nbytes)

    def taken(self, start: int, stop: int) -> Box | None:
        """Return the box that these rows of the recipe need; None: nothing of it."""
        if self.at is None or not self.box.start or not self.box.shape[0]:
            return self.box
        low, high = max(start - self.at, 0), min(stop - self.at, self.box.shape[0])
        if low >= high:
            return None
        first = self.box.start[0]
        return Box(start=(first + low, *self.box.start[1:]), stop=(first + high, *self.box.stop[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor that a recipe gives: rows `[a, b)` of the recipe are its rows `[a / per, b / per)`, rounded outwards.

    `per` divides the recipe's `align`, so only the last task of a tensor gives a row that is not full. 0: all of it,
    of a recipe that is not cut.
    """

    spec: Spec
    per: int = 1

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return rows of the tensor that these rows of the recipe give."""
        if not self.per:
            return 0, (self.spec.shape or (1,))[0]
        return start // self.per, -(-stop // self.per)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row of the tensor. PlanError where elements do not fill whole bytes."""
        shape = self.spec.shape or (1,)
        return _nbytes(shape[1:], self.spec.dtype, self.spec.name) if shape[0] else 0

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return bytes of the tensor that these rows of the recipe give."""
        row = self.row_nbytes
        first, last = self.rows(start, stop)
        return first * row, last * row


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Outputs that are made together, and the inputs that they are made of.

    `num_rows` rows, which any task may take `align` of at a time; `align=0`: only all at once. `copies`: the
    output is its one input unchanged, so that bytes of a dtype without arithmetic pass without being looked at.
    """

    outputs: tuple[Output, ...]
    inputs: tuple[Input, ...]
    num_rows: int
    align: int = 1
    copies: bool = False

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Return the specs of all that it reads and gives."""
        return (*(part.spec for part in self.inputs), *(out.spec for out in self.outputs))

    def nbytes(self, start: int, stop: int) -> tuple[int, int]:
        """Return bytes that are read for these rows, and that they give."""
        read = (part.byte_range(start, stop) for part in self.inputs)
        written = (out.byte_range(start, stop) for out in self.outputs)
        return sum(last - first for first, last in read), sum(last - first for first, last in written)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tasks:
    """Tasks as columns: task t is entries `first[t]:first[t + 1]`, rows `[start, stop)` of a recipe each."""

    first: I64
    recipe: I64
    start: I64
    stop: I64
    in_bytes: I64
    """Per task."""
    out_bytes: I64

    def __len__(self) -> int:
        return len(self.in_bytes)

    @property
    def cost(self) -> I64:
        """Return the bytes in and out of each task."""
        return self.in_bytes + self.out_bytes

    def in_order(self, order: I64) -> Tasks:
        """Return the same tasks under other numbers: the first is what `order[0]` was."""
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
        """Yield recipe, start and stop of each entry of a task."""
        at = slice(int(self.first[task]), int(self.first[task + 1]))
        yield from zip(self.recipe[at].tolist(), self.start[at].tolist(), self.stop[at].tolist(), strict=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OutputFiles:
    """The output's tensors in files. Offsets in `table` are of the bodies: from the end of the header."""

    table: TensorTable
    """By their paths: a tensor of a group has it before its name."""
    body_nbytes: tuple[int, ...]
    """Per file."""
    groups: tuple[str, ...]
    """Per file; the files of a group follow each other, and no other tensors are in them."""


ALIGN_BYTES = 8
"""Of tensors in a file: the largest element. Source: safetensors README, "Format": writers align by sorting dtypes."""


def lay_out(specs: Sequence[Spec], *, shard_bytes: int) -> OutputFiles:
    """Put tensors into files of at most `shard_bytes` (one tensor may be more), group by group, in the order given.

    In a file wider elements come first, so that all are aligned without gaps, as the format's own writer does.

    Raises:
        PlanError: two tensors of one name, or elements that do not fill whole bytes.
    """
    names = [spec.path for spec in specs]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise PlanError("the operation gives two tensors of one name", tensor=twice)
    sizes = [spec.nbytes for spec in specs]
    of_group: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        of_group.setdefault(spec.group, []).append(i)
    files: list[list[int]] = []
    groups: list[str] = []
    for group, members in of_group.items():
        filled = shard_bytes + 1
        for i in members:
            if filled + sizes[i] > shard_bytes:
                files.append([])
                groups.append(group)
                filled = 0
            files[-1].append(i)
            filled += sizes[i]
    if not files:
        files, groups = [[]], [""]
    file_index, offset = np.zeros(len(specs), np.int64), np.zeros(len(specs), np.int64)
    bodies = []
    for index, rows in enumerate(files):
        at = 0
        # Every width divides the wider ones, so offsets stay aligned; by number then, for one order on every host.
        for i in sorted(rows, key=lambda i: (-specs[i].dtype.bits, i)):
            file_index[i], offset[i] = index, at
            at += sizes[i]
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


BUCKET_BYTES = 256 * MIB
"""Most bytes a receiver takes in one bucket, but for a larger tensor: 5 ms at 50 GB/s, and two buckets a layer where
128 ranks take a trillion parameters, so that stages overlap. Source: docs/design/004-sync.md."""

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lines:
    """The bytes that each receiver takes of each team, as stretches of one line on which teams lie end to end.

    Receiver r's shares are `first[r]:first[r + 1]`, by team; its share of a team begins at `start`. A rank of a team
    gives what lies before its `stop` and not before the one's before it.
    """

    first: I64
    team: I64
    start: I64
    nbytes: I64
    stop: I64
    """Per rank of each team, in their order."""


def draw_lines(num_receivers: int, receiver: I64, team: I64, nbytes: I64, teams: Groups) -> Lines:
    """Return the lines of these demands (any order, several of a receiver and team), cut so that ranks give alike.

    Cost: a few microseconds a team of several ranks.
    """
    num_teams = len(teams.first) - 1
    # One number for receiver and team, so that a single sort finds equal demands.
    code, of = np.unique(receiver * num_teams + team, return_inverse=True)
    total = np.zeros(len(code), np.int64)
    np.add.at(total, of, nbytes)
    receiver, team = code // max(num_teams, 1), code % max(num_teams, 1)
    along = np.lexsort((receiver, team))
    start = np.zeros(len(code), np.int64)
    start[along] = np.cumsum(total[along]) - total[along]
    whole = np.zeros(num_teams, np.int64)
    np.add.at(whole, team, total)
    return Lines(
        first=np.searchsorted(receiver, np.arange(num_receivers + 1)),
        team=team,
        start=start,
        nbytes=total,
        stop=np.cumsum(_quotas(whole, teams)),
    )


def _quotas(whole: I64, teams: Groups) -> I64:
    """Return the bytes that each rank of each team gives, dealt to the ranks that have least so far."""
    quota = np.repeat(whole, teams.counts)
    load = np.zeros(int(teams.values.max(initial=-1)) + 1, np.int64)
    alone = np.repeat(teams.counts == 1, teams.counts)
    np.add.at(load, teams.values[alone], quota[alone])
    # Teams of few ranks first: they have the least choice, and larger teams can then fill what they left uneven.
    for t in np.argsort(teams.counts, kind="stable")[int((teams.counts == 1).sum()) :].tolist():
        span = slice(int(teams.first[t]), int(teams.first[t + 1]))
        ranks = teams.values[span]
        order = np.argsort(load[ranks], kind="stable")
        before = load[ranks[order]]
        # The level that all who are below it reach together: k of them, once it is not above the next one's load.
        # Floats lose less than a byte here; the bytes lost by rounding down go to the first rank below.
        levels = (np.cumsum(before) + int(whole[t])) / np.arange(1, len(before) + 1)
        k = int(np.argmax(np.append(levels[:-1] <= before[1:], True))) + 1
        fill = np.zeros(len(before), np.int64)
        fill[:k] = np.maximum(np.floor(levels[k - 1]).astype(np.int64) - before[:k], 0)
        # Shares must sum to the whole exactly: a byte given to no rank would be a hole in the plan.
        fill[0] += int(whole[t]) - int(fill.sum())
        quota[span][order] = fill
        load[ranks] += quota[span]
    return quota


def layer_order(names: Sequence[str]) -> tuple[I64, I64]:
    """Return tensors by layer (the first number between dots; those of none come first), and each one's layer."""
    layer = np.array([int(match[1]) if (match := _LAYER.search(name)) else -1 for name in names], np.int64)
    # Stable, so that equal inputs give equal plans, in the order of the layouts.
    order = np.argsort(layer, kind="stable")
    return order, layer[order]


def buckets(layer: I64, receiver: I64, place: I64, nbytes: I64, bucket_bytes: int) -> I64:
    """Return the bucket of each tensor: whole layers while they fit, else parts of one.

    Args:
        layer: of each tensor, ascending.
        receiver, place, nbytes: what receivers take of which tensor; sorted by receiver, then place.
        bucket_bytes: most that one receiver takes in a bucket, unless of one tensor.
    """
    num_tensors = len(layer)
    edges = np.flatnonzero(np.diff(receiver)) + 1
    takers = [(p, np.cumsum(n)) for p, n in zip(np.split(place, edges), np.split(nbytes, edges), strict=True)]
    layer_starts = np.append(np.flatnonzero(np.diff(layer, prepend=layer[:1] - 1)), num_tensors)
    starts, at = [], 0
    while at < num_tensors:
        starts.append(at)
        stop = num_tensors
        # The bucket ends where the first receiver is full: buckets are the same for all, so that a source makes each
        # once.
        for places, sums in takers:
            row = int(np.searchsorted(places, at))
            before = int(sums[row - 1]) if row else 0
            full = int(np.searchsorted(sums, before + bucket_bytes, side="right"))
            if full < len(places):
                stop = min(stop, int(places[full]))
        # A tensor larger than a bucket must still be in one, or the loop would not go on.
        stop = max(stop, at + 1)
        # Back to a layer's begin where that leaves anything: a bucket is ready once its layer is, and not before.
        edge = int(layer_starts[np.searchsorted(layer_starts, stop, side="right") - 1])
        at = edge if edge > at else stop
    return np.searchsorted(np.array(starts, np.int64), np.arange(num_tensors), side="right") - 1
