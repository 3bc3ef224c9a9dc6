"""The protocol of operations that a conversion applies to tensors, with copying, renaming, and chains of operations.

`spec` creates operations from specs, and `plan.tasks` cuts recipes into tasks.
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
from penstock.types import Box, DType, Manifest, TensorTable
from penstock_convert.plan.tasks import Input, Recipe, Spec, TaskOutput, lay_out

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
"""Dtypes in which operations compute."""
UNKNOWN = frozenset({DType.F6_E2M3, DType.F6_E3M2})
"""Dtypes that torch lacks. The bytes of their tensors are copied, and no operation receives these tensors."""


class Operation(Protocol):
    """A step of a conversion.

    An operation is immutable, and every worker creates it from the same spec (`penstock_convert.operations.spec`).

    A user's class must have the attributes of this protocol, but need not inherit from it.
    """

    @property
    def name(self) -> str:
        """Return the operation's name for reports, including its options.

        The name is part of the job's key, so jobs with different options have different keys.
        """
        ...

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """Return the recipes for the result, in the order in which the recipes' inputs are stored.

        Raises:
            PlanError: the sources do not match each other or do not suit the operation.
        """
        ...

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """Compute rows `[start, stop)` of a recipe's outputs.

        Args:
            recipe: a recipe from `recipes`.
            start, stop: rows of the recipe.
            inputs: for each input, a contiguous tensor with the box from `Input.taken`, or None if these rows do not
                use the input. All tensors are on the same device. `run` may overwrite the tensors, and must not keep
                references to them.

        Returns:
            One tensor for each output, with the requested rows, on the device of the inputs. The bits must not depend
            on how rows are cut.
        """
        ...

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the content of the result's `config.json`, based on the source's `config.json`."""
        ...


@runtime_checkable
class Attested(Protocol):
    """An operation that adds files to its result, or that knows the result's revision in advance.

    Attributes:
        small_from: number of the source that provides the result's configuration and tokenizer.
    """

    small_from: int

    def files(self) -> Mapping[str, bytes]:
        """Return the content of additional small files for the result, by name."""
        ...

    def check(self, manifest: Manifest) -> None:
        """Raise IntegrityError if the result has an unexpected revision, so that the result is not published."""
        ...


ReadPart = Callable[[int, int, int], "torch.Tensor"]
"""A function of `(input, start, stop)` that returns the elements [start, stop) of a recipe's input as a flat tensor.
They are valid until the same input is read again, and the caller may overwrite them."""


@runtime_checkable
class StreamedOperation(Protocol):
    """An operation that can also read its inputs in parts, possibly several times, instead of as whole tensors.

    A worker reads parts if a recipe's tensors exceed the worker's memory. The results must be bit-identical with and
    without parts.
    """

    def part_unit(self, recipe: Recipe) -> int:
        """Return the unit of part sizes in elements. Every part except the last contains whole units.

        0 means that the recipe cannot be computed in parts.
        """
        ...

    def run_parts(self, recipe: Recipe, num_part: int, read: ReadPart) -> Iterator[Sequence[torch.Tensor]]:
        """Compute the recipe's outputs in parts.

        Args:
            recipe: a recipe from `recipes` with a `part_unit` above 0.
            num_part: size of a part in elements.
            read: function that reads a part of an input and raises an error if the read fails.

        Returns:
            For each part, a list with the next bytes of each output.
        """
        ...


report_to: ContextVar[Callable[[], None] | None] = ContextVar("report_to", default=None)
"""The function with which a worker counts progress reports while an operation runs."""


def report_progress() -> None:
    """Report that the running operation makes progress, so that its task is not considered hung.

    The call is cheap. Only calls in the thread in which `run` was called have an effect.
    """
    # Use a context variable instead of a global, because one process may run several workers, for example in tests.
    if (report := report_to.get()) is not None:
        report()


def specs_of(table: TensorTable) -> list[Spec]:
    """Return the specs of a table's tensors in file order."""
    # Use file order, so that tasks read each source from beginning to end.
    rows = sorted(range(len(table)), key=lambda row: (int(table.file_index[row]), int(table.offset[row])))
    return [Spec(name=table.names[row], dtype=table.dtypes[row], shape=table.shapes[row]) for row in rows]


def whole(source: int, spec: Spec) -> Input:
    """Return an input for a recipe whose row i reads row i of the tensor."""
    return Input(source=source, spec=spec, box=Box.full(spec.shape))


def all_of(source: int, spec: Spec) -> Input:
    """Return an input for a recipe whose rows all read the whole tensor."""
    return Input(source=source, spec=spec, box=Box.full(spec.shape), at=None)


def copy_recipe(source: int, spec: Spec, name: str | None = None) -> Recipe:
    """Return a recipe that copies a tensor. If `name` is set, the copy has this name."""
    output = spec if name is None else replace(spec, name=name)
    # Do not cut a tensor with packed elements whose rows end inside a byte.
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
    """Return the only source. Raise PlanError if there are several sources."""
    if len(sources) != 1:
        hint = "merge the sources first, with average, linear, slerp or ties"
        raise PlanError(f"{operation} takes one source, not {len(sources)} sources", hint=hint)
    return sources[0]


class Unchanged:
    """Base class of operations that keep the source's configuration."""

    # Without this line, the subclasses with slots would still have a `__dict__`.
    __slots__ = ()

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        return config


@dataclass(frozen=True, slots=True)
class CopyOperation(Unchanged):
    """Copies tensors unchanged, for example into shards of a different size, into one file, or to another store."""

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
    """Copies tensors under new names. Tensors with an empty new name are omitted.

    Args:
        rules: pairs (pattern, replacement) for `re.sub`. Only the first rule whose pattern occurs in a name applies.
    """

    rules: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for pattern, replacement in self.rules:
            try:
                # Parse the pattern and the replacement. A replacement that refers to a missing group raises an error.
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
            # Apply only the first matching rule. Otherwise two rules that swap names would undo each other.
            for pattern, replacement in self.rules:
                if re.search(pattern, name):
                    name = re.sub(pattern, replacement, name)
                    break
            if name:
                recipes.append(copy_recipe(0, spec, name))
        if sources[0].names and not recipes:
            raise PlanError(
                "rename: every tensor is left out", hint="pass rules that do not rename every tensor to an empty name"
            )
        return recipes


class Chain:
    """Two operations in one pass.

    The second operation reads the outputs of the first operation, which are never written to storage. Recipes that
    cannot be cut in the same way are joined into one recipe that is not cut.

    Args:
        first: one operation on all sources, or one operation for each source.
        second: the operation on the outputs of `first`.
    """

    def __init__(self, first: Operation | Sequence[Operation], second: Operation) -> None:
        self._each = tuple(first) if isinstance(first, Sequence) else ()
        self._first = self._each[0] if isinstance(first, Sequence) else first
        self._second = second
        self._parts: dict[str, tuple[list[tuple[Operation, int, Recipe]], list[Recipe]]] = {}
        """Maps the path of a joined recipe's first output to the recipes of the two operations that were joined. Set by
        `recipes`, which every process calls before it runs anything."""

    @property
    def steps(self) -> Sequence[Operation]:
        """Return the two steps, of which the first may consist of one operation for each source."""
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
                raise PlanError(f"no operation can follow {self._first.name}, because it creates several weight sets")
            # The second operation needs only names, dtypes, shapes and order, so lay the outputs out in one file.
            tables.append(lay_out(outputs, shard_bytes=1 << 62).table)
        seconds = list(self._second.recipes(tables))
        maker = {(source, out.spec.name): i for i, (_, source, recipe) in enumerate(firsts) for out in recipe.outputs}
        # Group the first operation's recipes with union-find. Recipes must run together if a single recipe of the
        # second operation reads outputs from all of them.
        group = list(range(len(firsts)))

        def root(i: int) -> int:
            """Return the number of the recipe that represents the group of recipe `i`."""
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
            # Do not compute outputs that the second operation does not read.
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
        """Yield each recipe of the first step, with its operation and the number of its table."""
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
            # If the joined recipe cannot be cut, run all of its recipes for all of their rows.
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

        The second operation must work row by row, and each part must contain only complete groups of rows.
        """
        firsts, seconds = self._parts[recipe.outputs[0].spec.path]
        operation, _, first = firsts[0]
        # Only a single recipe of the first operation can be computed in parts.
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

        def second_outputs(flat: torch.Tensor, start: int) -> list[torch.Tensor]:
            """Run the second operation on the first operation's elements from row `start` onward."""
            rows = flat.reshape(-1, *spec.shape[1:])
            between, results = {(source, spec.name): rows}, list[torch.Tensor]()
            for part in seconds:
                inputs = [_cut(between, second_input, used) for second_input in part.inputs]
                results += self._second.run(part, start, start + len(rows), inputs)
            return results

        rest, row = torch.empty(0), max(1, math.prod(spec.shape[1:]))
        for (part,) in operation.run_parts(first, num_part, read):
            flat = torch.cat([rest, part]) if len(rest) else part
            # The second operation processes whole groups of rows, so keep an incomplete group for the next part.
            whole = len(flat) // unit * unit
            # Copy the incomplete group, because the next part is read into the same memory.
            rest = flat[whole:].clone()
            if whole:
                yield second_outputs(flat[:whole], num_done // row)
                num_done += whole
        if len(rest):
            yield second_outputs(rest, num_done // row)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`. The configuration is based on the first source's configuration."""
        return self._second.config(self._first.config(config))


def _row_unit(spec: Spec, seconds: Sequence[Recipe]) -> int:
    """Return the number of elements in the smallest group of rows that all recipes for a tensor accept."""
    return max(1, math.prod(spec.shape[1:])) * math.lcm(*(part.align for part in seconds))


def _joined(firsts: Sequence[Recipe], seconds: Sequence[Recipe]) -> Recipe:
    """Join a group of recipes, and the recipes that use their outputs, into one recipe."""
    # Cut by rows only if row i of every step depends only on row i of the previous step.
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
    """Return an input of the second operation, which is a whole intermediate tensor or a box of it."""
    at = second_input.source, second_input.spec.name
    # `run` may overwrite its inputs, so copy a tensor that several recipes read.
    if second_input.box == Box.full(second_input.spec.shape):
        return between[at] if used[at] == 1 else between[at].clone()
    return between[at][
        tuple(slice(a, b) for a, b in zip(second_input.box.start, second_input.box.stop, strict=True))
    ].contiguous()
