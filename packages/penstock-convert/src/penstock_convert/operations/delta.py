"""Creates and applies deltas. A delta is a small checkpoint that turns an old version into a new one, bit for bit.

For each changed tensor, a delta has one U8 tensor with the bytes of the changed leaves in order. The file
`penstock.delta` contains the two revisions, and the dtype, shape and changed leaves of each changed tensor.
`spec.completed` compares the digests of both versions before the job is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from blake3 import blake3

from penstock.digest.leaf import num_leaves
from penstock.errors import MALFORMED, FormatError, IntegrityError, PlanError
from penstock.types import U64, Box, DType, Manifest, TensorTable
from penstock_convert.operations.operation import Unchanged, copy_recipe, specs_of
from penstock_convert.plan.tasks import Input, Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

FILE = "penstock.delta"
"""Name of the file next to a delta's weights that describes the delta."""
Runs = list[tuple[int, int]]
"""Ranges `[start, stop)` of leaves or bytes."""


class Changed(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor of the new version that differs from the base."""

    dtype: DType
    shape: tuple[int, ...]
    leaves: Runs
    """The changed leaves. All leaves if the base has no tensor with this name, dtype and shape."""


class DeltaOperation(msgspec.Struct, forbid_unknown_fields=True):
    """The description of a delta."""

    base: str
    """Revision to which the delta applies."""
    new: str
    """Revision of the result."""
    leaf_bytes: int
    tensors: dict[str, Changed]
    removed: tuple[str, ...]
    version: int = 1


def delta_of(base: Manifest, new: Manifest) -> DeltaOperation:
    """Return the changes between two manifests, which must have digests with the same leaf size."""
    assert base.leaves is not None and new.leaves is not None and base.leaf_bytes == new.leaf_bytes
    had = _leaves_by_name(base.tensors, base.leaf_bytes, base.leaves)
    changed = {}
    for name, (dtype, shape, leaves) in _leaves_by_name(new.tensors, new.leaf_bytes, new.leaves).items():
        old = had.pop(name, None)
        # Include all leaves of a tensor with a new dtype or shape, because its leaves cover different elements.
        if old is None or old[:2] != (dtype, shape):
            changed[name] = Changed(dtype, shape, [(0, len(leaves))] if len(leaves) else [])
        # Omit unchanged tensors, which are copied from the base when the delta is applied.
        elif runs := _runs(np.flatnonzero(old[2] != leaves).tolist()):
            changed[name] = Changed(dtype, shape, runs)
    return DeltaOperation(base.revision, new.revision, base.leaf_bytes, changed, tuple(sorted(had)))


def _leaves_by_name(table: TensorTable, leaf_bytes: int, leaves: U64) -> dict[str, tuple[DType, tuple[int, ...], U64]]:
    parts = np.split(leaves, np.cumsum(num_leaves(table.nbytes, leaf_bytes))[:-1]) if len(table) else []
    columns = zip(table.names, table.dtypes, table.shapes, parts, strict=True)
    return {name: (dtype, shape, part) for name, dtype, shape, part in columns}


def _runs(numbers: Sequence[int]) -> Runs:
    """Group sorted numbers into runs of consecutive numbers."""
    runs: Runs = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


@dataclass(frozen=True)
class _DeltaOperation(Unchanged):
    """Base class for creating and applying deltas. The result has the second source's configuration.

    Args:
        delta: the description of the changes, as returned by `encoded`.
    """

    delta: bytes
    small_from = 1

    # Cache the decoded description, because every task uses it. Caching requires a dataclass without slots.
    @cached_property
    def _delta(self) -> DeltaOperation:
        return decoded(self.delta)

    def _byte_runs(self, name: str, nbytes: int) -> Runs:
        """Return the changed byte ranges of a tensor in the new version."""
        leaf_bytes = self._delta.leaf_bytes
        return [(a * leaf_bytes, min(b * leaf_bytes, nbytes)) for a, b in self._delta.tensors[name].leaves]


def encoded(delta: DeltaOperation) -> bytes:
    """Return the content of `FILE`."""
    return msgspec.json.encode(delta)


def decoded(raw: bytes) -> DeltaOperation:
    """Decode the content of `FILE`. Raise FormatError for invalid content."""
    try:
        delta = msgspec.json.decode(raw, type=DeltaOperation)
    except MALFORMED as error:
        raise FormatError(f"{FILE} is invalid: {error}") from error
    if delta.version != 1 or delta.leaf_bytes < 1:
        raise FormatError(f"unsupported delta with version {delta.version} and leaves of {delta.leaf_bytes} bytes")
    return delta


class MakeDelta(_DeltaOperation):
    """Creates a delta from the sources `base` and `new`: the changed leaves of each tensor, as one tensor of bytes."""

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        # Include a digest of the description, because the description determines the bytes of the result.
        return f"delta {self._delta.base} to {self._delta.new} ({blake3(self.delta).hexdigest(length=8)})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        recipes = []
        for spec in specs_of(sources[1]):
            if spec.name not in self._delta.tensors:
                continue
            at, inputs, flat = 0, list[Input](), _flat(spec)
            for start, stop in self._byte_runs(spec.name, spec.nbytes):
                inputs.append(Input(source=1, spec=flat, box=Box(start=(start,), stop=(stop,)), at=at))
                at += stop - start
            # A changed tensor without bytes appears only in the description.
            if inputs:
                out = TaskOutput(spec=Spec(name=spec.name, dtype=DType.U8, shape=(at,)))
                align = self._delta.leaf_bytes
                recipes.append(Recipe(outputs=(out,), inputs=tuple(inputs), num_rows=at, align=align))
        return recipes

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        return [torch.cat([tensor for tensor in inputs if tensor is not None])]

    def files(self) -> Mapping[str, bytes]:
        """See `Attested.files`."""
        return {FILE: self.delta}

    def check(self, manifest: Manifest) -> None:
        """See `Attested.check`."""


class ApplyDelta(_DeltaOperation):
    """Applies a delta, from the sources `base` and `delta`, and checks the revision of the result."""

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"delta applied to {self._delta.base} for {self._delta.new} ({blake3(self.delta).hexdigest(length=8)})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. Raise PlanError if the delta's tensors do not match its description."""
        base = {spec.name: spec for spec in specs_of(sources[0])}
        parts = {spec.name: spec for spec in specs_of(sources[1])}
        changed, first = self._delta.tensors, next(iter(base.values()), None)
        recipes = [
            copy_recipe(0, spec)
            for name, spec in base.items()
            if name not in changed and name not in self._delta.removed
        ]
        for name, change in changed.items():
            spec = Spec(name=name, dtype=change.dtype, shape=change.shape)
            runs = self._byte_runs(name, spec.nbytes)
            part = parts.pop(name, None)
            total = sum(stop - start for start, stop in runs)
            # Do not trust the description, which any process may have written.
            if (0 if part is None else part.nbytes) != total or any(not 0 <= a <= b <= spec.nbytes for a, b in runs):
                raise PlanError("the size of the delta's tensor does not match the description", tensor=name)
            old = base.get(name)
            if total < spec.nbytes and (old is None or old.nbytes != spec.nbytes):
                raise PlanError("the delta changes a tensor that the base does not have", tensor=name)
            recipes.append(_recipe(spec, list(_sources(runs, spec.nbytes)), old or first, part))
        if parts:
            message = f"the delta has {len(parts)} tensors that its description does not name"
            raise PlanError(message, tensor=next(iter(parts)))
        return recipes

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        from penstock.loader.tensor import torch_dtype, torch_shape

        out, present = recipe.outputs[0], [tensor for tensor in inputs if tensor is not None]
        if out.spec.name not in self._delta.tensors:
            return present
        first, last = out.rows(start, stop)
        shape = (last - first, *out.spec.shape[1:]) if out.spec.shape else ()
        return [torch.cat(present).view(torch_dtype(out.spec.dtype)).reshape(torch_shape(out.spec.dtype, shape))]

    def files(self) -> Mapping[str, bytes]:
        """See `Attested.files`."""
        return {}

    def check(self, manifest: Manifest) -> None:
        """See `Attested.check`. Raise IntegrityError if the result has a different revision than the delta expects."""
        if manifest.revision != self._delta.new:
            message = f"the result has revision {manifest.revision}, but the delta expects {self._delta.new}"
            raise IntegrityError(message, hint="check the base and the delta with `penstock verify`")


def _sources(runs: Runs, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (source, offset in the source, number of bytes, offset in the result), in the order of the result."""
    at = taken = 0
    # Add an empty run at the end, so that the loop also yields the unchanged bytes after the last change.
    for start, stop in [*runs, (nbytes, nbytes)]:
        if at < start:
            yield 0, at, start - at, at
        if start < stop:
            yield 1, taken, stop - start, start
        taken, at = taken + stop - start, stop


def _recipe(spec: Spec, pieces: Sequence[tuple[int, int, int, int]], old: Spec | None, part: Spec | None) -> Recipe:
    """Return the recipe for one tensor. A row of the recipe is one byte, and a row of the tensor has `per` bytes."""
    inputs = []
    for source, start, nbytes, at in pieces:
        tensor = old if source == 0 else part
        assert tensor is not None
        box = Box(start=(start,), stop=(start + nbytes,))
        inputs.append(Input(source=source, spec=_flat(tensor), box=box, at=at))
    # Even an empty tensor requires an input, because outputs are created on the device of the inputs.
    if not inputs and old is not None:
        inputs = [Input(source=0, spec=_flat(old), box=Box(start=(0,), stop=(0,)))]
    # If rows end inside a byte, treat the whole tensor as one row.
    bits = math.prod(spec.shape[1:]) * spec.dtype.bits
    per = 0 if bits % 8 else bits // 8 if spec.nbytes else 1
    return Recipe(outputs=(TaskOutput(spec=spec, per=per),), inputs=tuple(inputs), num_rows=spec.nbytes, align=per)


def _flat(spec: Spec) -> Spec:
    """Return the spec of a tensor's bytes as a flat U8 tensor."""
    return Spec(name=spec.name, dtype=DType.U8, shape=(spec.nbytes,))
