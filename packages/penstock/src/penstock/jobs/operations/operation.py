"""Operations, which a conversion applies to tensors: the protocol, copying, renaming, and chains of operations.

In: the sources' tensors, without bytes. Out: recipes (inputs of each output); then the tensors for rows of a recipe.
Not here: formats (`formats`), merging (`merge`), making operations from specs (`spec`), cutting recipes into tasks
(`plan.tasks`).

    recipes(sources) --> [inputs -> outputs]      run(recipe, start, stop, tensors) --> tensors of those rows
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from penstock.errors import ConfigError, PlanError
from penstock.plan.tasks import Input, Recipe, Spec, TaskOutput, lay_out
from penstock.types import Box, DType, Manifest, TensorTable

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
"""Dtypes that operations compute with."""
UNKNOWN = frozenset({DType.F6_E2M3, DType.F6_E3M2})
"""Dtypes that torch does not have: their bytes are copied, and no operation gets them."""


class Operation(Protocol):
    """A step of a conversion. Immutable; every worker makes it from the same spec (`penstock.jobs.operations.spec`).

    A user's class conforms by having these attributes; it need not inherit from this one.
    """

    @property
    def name(self) -> str:
        """Return its name in reports, with its options; part of the job's key: other options are another job."""
        ...

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """Return the inputs of each output, in the order in which the inputs lie in storage.

        Raises:
            PlanError: the sources do not fit each other or the operation.
        """
        ...

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """Make rows `[start, stop)` of a recipe's outputs.

        Args:
            recipe: one of `recipes`.
            start, stop: rows of it.
            inputs: the part of each that `Input.taken` names, contiguous, on one device; None: nothing of it.
                `run` may overwrite them, and must not keep them.

        Returns:
            One tensor for each output, of the rows it gives, on the same device; the same bits however rows are cut.
        """
        ...

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result's `config.json`, made from the source's."""
        ...


@runtime_checkable
class Attested(Protocol):
    """An operation that adds files to its result, or that knows the result's revision beforehand.

    Attributes:
        small_from: the source whose configuration and tokenizer the result has.
    """

    small_from: int

    def files(self) -> Mapping[str, bytes]:
        """Return additional small files of the result."""
        ...

    def check(self, manifest: Manifest) -> None:
        """Raise IntegrityError if the result is not the expected one; nothing is published then."""
        ...


ReadPart = Callable[[int, int, int], "torch.Tensor"]
"""`(input, start, stop)` -> elements [start, stop) of an input of a recipe, flat. Valid until the same input is read
again; the caller may write into it."""


@runtime_checkable
class StreamedOperation(Protocol):
    """An operation that can also read its inputs in parts, perhaps more than once, instead of as whole tensors.

    A worker uses parts where the tensors of a recipe do not fit in its memory. Both ways give the same bits.
    """

    def part_unit(self, recipe: Recipe) -> int:
        """Return the unit of part sizes in elements, for all parts but the last; 0: parts are not possible."""
        ...

    def run_parts(self, recipe: Recipe, num_part: int, read: ReadPart) -> Iterator[Sequence[torch.Tensor]]:
        """Make the recipe's outputs in parts.

        Args:
            recipe: one of `recipes` that has a `part_unit`.
            num_part: elements of a part.
            read: reads a part of an input, and raises the error of a failed read.

        Returns:
            For each part one tensor for each output: its next bytes.
        """
        ...


report_to: ContextVar[Callable[[], None] | None] = ContextVar("report_to", default=None)
"""Function of the worker that counts progress reports while an operation runs."""


def report_progress() -> None:
    """Report that the running operation makes progress. Cheap. A task that reports is never taken for hung.

    Order: from the thread that `run` was called on; elsewhere it does nothing.
    """
    # A context variable and not a global: one process may run several workers, in tests for example.
    if (report := report_to.get()) is not None:
        report()


def specs_of(table: TensorTable) -> list[Spec]:
    """Return a table's tensors, in file order."""
    # File order, so that tasks read each source from its beginning to its end.
    rows = sorted(range(len(table)), key=lambda row: (int(table.file_index[row]), int(table.offset[row])))
    return [Spec(name=table.names[row], dtype=table.dtypes[row], shape=table.shapes[row]) for row in rows]


def whole(source: int, spec: Spec) -> Input:
    """Return all rows of a tensor, each for the same row of the recipe."""
    return Input(source=source, spec=spec, box=Box.full(spec.shape))


def all_of(source: int, spec: Spec) -> Input:
    """Return a whole tensor as an input of any rows of the recipe."""
    return Input(source=source, spec=spec, box=Box.full(spec.shape), at=None)


def copy_recipe(source: int, spec: Spec, name: str | None = None) -> Recipe:
    """Return a recipe that copies a tensor, perhaps under another name."""
    output = spec if name is None else replace(spec, name=name)
    # Rows of packed elements may end within a byte: such a tensor is not cut.
    row_bits = math.prod(spec.shape[1:]) * spec.dtype.bits
    align = 0 if not spec.shape or row_bits % 8 else 1
    return Recipe(
        outputs=(TaskOutput(spec=output),),
        inputs=(whole(source, spec),),
        num_rows=spec.shape[0] if spec.shape else 1,
        align=align,
        copies=True,
    )


def only_source(sources: Sequence[TensorTable], operation: str) -> TensorTable:
    """Return the only source. PlanError where there are several."""
    if len(sources) != 1:
        hint = "merge them first: average, linear, slerp, ties"
        raise PlanError(f"{operation} takes one source, not {len(sources)}", hint=hint)
    return sources[0]


class Unchanged:
    """Base of operations that keep the source's configuration."""

    # Without it a frozen dataclass with slots below would have a `__dict__` after all.
    __slots__ = ()

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        return config


@dataclass(frozen=True, slots=True)
class CopyOperation(Unchanged):
    """Copy tensors: into shards of another size, into one file, or from one store to another."""

    name = "copy"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        return [copy_recipe(0, spec) for spec in specs_of(only_source(sources, self.name))]

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        return [tensor for tensor in inputs if tensor is not None]


@dataclass(frozen=True, slots=True)
class Rename(CopyOperation):
    """Copy tensors under other names; those renamed to nothing are left out.

    Args:
        rules: (pattern, replacement) as of `re.sub`; the first whose pattern is found anywhere in a name counts.
    """

    rules: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for pattern, replacement in self.rules:
            try:
                # Parses both: a reference to a group that the pattern does not have is an error already.
                re.sub(pattern, replacement, "")
            except (re.error, IndexError, TypeError) as error:
                raise ConfigError(f"rename: {pattern!r} -> {replacement!r} is not a valid rule: {error}") from error

    @property
    def name(self) -> str:  # type: ignore[override]
        """See `Operation.name`."""
        return f"rename({', '.join(f'{a}={b}' for a, b in self.rules)})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        recipes = []
        for spec in specs_of(only_source(sources, "rename")):
            name = spec.name
            # The first rule alone: with all of them in turn, two that swap names would undo each other.
            for pattern, replacement in self.rules:
                if re.search(pattern, name):
                    name = re.sub(pattern, replacement, name)
                    break
            if name:
                recipes.append(copy_recipe(0, spec, name))
        if sources[0].names and not recipes:
            raise PlanError("rename: every tensor is left out", hint="its rules give empty names for all")
        return recipes


class Chain:
    """Two operations in one pass: the second works on the first one's outputs, which are never written.

    If recipes of both are not cut alike, or do not work row by row, they become one recipe that is not cut.

    Args:
        first: one operation on all sources, or one operation for each source.
        second: the operation on their outputs.
    """

    def __init__(self, first: Operation | Sequence[Operation], second: Operation) -> None:
        self._each = tuple(first) if isinstance(first, Sequence) else ()
        self._first = self._each[0] if isinstance(first, Sequence) else first
        self._second = second
        self._parts: dict[str, tuple[list[tuple[Operation, int, Recipe]], list[Recipe]]] = {}
        """By the path of a joined recipe's first output: the recipes it was joined of, of both operations. Set by
        `recipes`, which every process calls before it runs anything."""

    @property
    def steps(self) -> Sequence[Operation]:
        """The operations, of which those for each source count once: each has its own part of the bytes."""
        return [self._each[0] if self._each else self._first, self._second]

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        before = f"[{'; '.join(operation.name for operation in self._each)}]" if self._each else self._first.name
        return f"{before}, {self._second.name}"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        firsts = list(self._firsts(sources))
        tables = []
        for source in range(len(self._each) or 1):
            outputs = [out.spec for _, i, recipe in firsts if i == source for out in recipe.outputs]
            if any(spec.group for spec in outputs):
                raise PlanError(f"{self._first.name} gives several weight sets: nothing can follow it")
            # As one file: the second operation only looks at names, dtypes, shapes and order.
            tables.append(lay_out(outputs, shard_bytes=1 << 62).table)
        seconds = list(self._second.recipes(tables))
        maker = {(source, out.spec.name): i for i, (_, source, recipe) in enumerate(firsts) for out in recipe.outputs}
        # Union-find: recipes of the first operation whose outputs one recipe of the second reads must run together.
        group = list(range(len(firsts)))

        def root(i: int) -> int:
            """Return the number that stands for the group of recipe `i`."""
            while group[i] != i:
                i = group[i]
            return i

        for recipe in seconds:
            makers = [root(maker[between.source, between.spec.name]) for between in recipe.inputs]
            for other in makers:
                group[root(other)] = min(makers)
        parts: dict[int, tuple[list[tuple[Operation, int, Recipe]], list[Recipe]]] = {}
        for recipe in seconds:
            first_input = recipe.inputs[0]
            parts.setdefault(root(maker[first_input.source, first_input.spec.name]), ([], []))[1].append(recipe)
        for i, first in enumerate(firsts):
            # Outputs that nothing reads are not made: the second operation leaves some tensors out.
            if root(i) in parts:
                parts[root(i)][0].append(first)
        joined = [_joined([recipe for _, _, recipe in before], after) for _, (before, after) in sorted(parts.items())]
        self._parts = {joined[i].outputs[0].spec.path: parts[at] for i, at in enumerate(sorted(parts))}
        return joined

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the operations of the chain, in order."""
        return (*(self._each or (self._first,)), self._second)

    def _firsts(self, sources: Sequence[TensorTable]) -> Iterator[tuple[Operation, int, Recipe]]:
        """Yield each recipe of the first step with its operation and the number of the table that it contributes to."""
        if not self._each:
            yield from ((self._first, 0, recipe) for recipe in self._first.recipes(sources))
            return
        if len(sources) != len(self._each):
            raise PlanError(f"{self.name}: prepared for {len(self._each)} sources, not {len(sources)}")
        for i, (operation, table) in enumerate(zip(self._each, sources, strict=True)):
            for recipe in operation.recipes([table]):
                yield (
                    operation,
                    i,
                    replace(recipe, inputs=tuple(replace(recipe_input, source=i) for recipe_input in recipe.inputs)),
                )

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        firsts, seconds = self._parts[recipe.outputs[0].spec.path]
        left = iter(inputs)
        between: dict[tuple[int, str], torch.Tensor] = {}
        for operation, source, part in firsts:
            # A joined recipe that cannot be cut runs each part whole, also those that could be cut.
            rows = (start, stop) if recipe.align else (0, part.num_rows)
            outputs = operation.run(part, *rows, [next(left) for _ in part.inputs])
            between |= {(source, out.spec.name): tensor for out, tensor in zip(part.outputs, outputs, strict=True)}
        results: list[torch.Tensor] = []
        used = Counter(
            (second_input.source, second_input.spec.name) for part in seconds for second_input in part.inputs
        )
        for part in seconds:
            rows = (start, stop) if recipe.align else (0, part.num_rows)
            results += self._second.run(
                part, *rows, [_cut(between, second_input, used) for second_input in part.inputs]
            )
        return results

    def part_unit(self, recipe: Recipe) -> int:
        """See `StreamedOperation.part_unit`.

        The second must work row by row; a part has at least the rows that it needs.
        """
        firsts, seconds = self._parts[recipe.outputs[0].spec.path]
        operation, _, first = firsts[0]
        # Several recipes of the first operation would have to run in step; only one can.
        if len(firsts) != 1 or len(first.outputs) != 1 or not isinstance(operation, StreamedOperation):
            return 0
        unit, spec = operation.part_unit(first), first.outputs[0].spec
        for part in seconds:
            by_rows = part.align > 0 and spec.shape[:1] == (part.num_rows,)
            if not by_rows or any(
                second_input.at != 0 or second_input.box != Box.full(second_input.spec.shape)
                for second_input in part.inputs
            ):
                return 0
        return unit and -(-_row_unit(spec, seconds) // unit) * unit

    def run_parts(self, recipe: Recipe, num_part: int, read: ReadPart) -> Iterator[Sequence[torch.Tensor]]:
        """See `StreamedOperation.run_parts`."""
        import torch

        (((operation, source, first),), seconds) = self._parts[recipe.outputs[0].spec.path]
        assert isinstance(operation, StreamedOperation)
        spec, num_done = first.outputs[0].spec, 0
        unit = _row_unit(spec, seconds)
        used = Counter(
            (second_input.source, second_input.spec.name) for part in seconds for second_input in part.inputs
        )

        def made_of(flat: torch.Tensor, start: int) -> list[torch.Tensor]:
            """Return the second operation's outputs of these elements of the first one's, from row `start` on."""
            rows = flat.reshape(-1, *spec.shape[1:])
            between, results = {(source, spec.name): rows}, list[torch.Tensor]()
            for part in seconds:
                inputs = [_cut(between, second_input, used) for second_input in part.inputs]
                results += self._second.run(part, start, start + len(rows), inputs)
            return results

        rest, row = torch.empty(0), max(1, math.prod(spec.shape[1:]))
        for (part,) in operation.run_parts(first, num_part, read):
            flat = torch.cat([rest, part]) if len(rest) else part
            # A part ends anywhere, but the second operation takes whole groups of rows: the remainder waits.
            whole = len(flat) // unit * unit
            # The next part is read into the same memory.
            rest = flat[whole:].clone()
            if whole:
                yield made_of(flat[:whole], num_done // row)
                num_done += whole
        if len(rest):
            yield made_of(rest, num_done // row)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`: that of the first source is the result's."""
        return self._second.config(self._first.config(config))


def _row_unit(spec: Spec, seconds: Sequence[Recipe]) -> int:
    """Return the elements in the smallest number of rows that all recipes of a tensor accept."""
    return max(1, math.prod(spec.shape[1:])) * math.lcm(*(part.align for part in seconds))


def _joined(firsts: Sequence[Recipe], seconds: Sequence[Recipe]) -> Recipe:
    """Join a group of recipes and the recipes on their outputs into one."""
    # Cutting by rows is only right if row i of every step needs nothing but row i of the step before.
    rows = firsts[0].num_rows
    row_by_row = all(recipe.num_rows == rows and recipe.align > 0 for recipe in (*firsts, *seconds))
    row_by_row &= all(out.per == 1 for recipe in firsts for out in recipe.outputs)
    for recipe in seconds:
        for second_input in recipe.inputs:
            row_by_row &= second_input.at == 0 and second_input.box == Box.full(second_input.spec.shape)
    outputs = tuple(out for recipe in seconds for out in recipe.outputs)
    inputs = tuple(first_input for recipe in firsts for first_input in recipe.inputs)
    copies = len(outputs) == len(inputs) == 1 and all(recipe.copies for recipe in (*firsts, *seconds))
    if row_by_row:
        align = math.lcm(*(recipe.align for recipe in (*firsts, *seconds)))
        return Recipe(outputs=outputs, inputs=inputs, num_rows=rows, align=align, copies=copies)
    return Recipe(
        outputs=tuple(replace(out, per=0) for out in outputs),
        inputs=tuple(replace(first_input, at=None) for first_input in inputs),
        num_rows=1,
        align=0,
        copies=copies,
    )


def _cut(
    between: Mapping[tuple[int, str], torch.Tensor], second_input: Input, used: Counter[tuple[int, str]]
) -> torch.Tensor:
    """Return a whole tensor as an input of the second operation; row by row it is the rows already."""
    at = second_input.source, second_input.spec.name
    # `run` may overwrite its inputs: a tensor that several recipes read is copied for each.
    if second_input.box == Box.full(second_input.spec.shape):
        return between[at] if used[at] == 1 else between[at].clone()
    return between[at][
        tuple(slice(a, b) for a, b in zip(second_input.box.start, second_input.box.stop, strict=True))
    ].contiguous()
