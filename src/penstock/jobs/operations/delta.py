"""What changed between two versions of a checkpoint: made as a small checkpoint, applied to the old to give the new.

In: base and new; or base and a delta. Out: the changed leaves alone; or the new version, bit for bit.
Not here: which leaves changed, known from digests before a byte is planned (`jobs.request_defaults`).

    new's leaves that base has not --> one U8 tensor a changed tensor: their bytes, in order
    `penstock.delta`: both revisions, and for each changed tensor its dtype, shape and runs of leaves
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
from penstock.errors import FormatError, IntegrityError, PlanError
from penstock.jobs.operations.operation import Unchanged, as_it_is, specs_of
from penstock.plan.tasks import Input, Output, Recipe, Spec
from penstock.types import U64, Box, DType, Manifest, TensorTable

if TYPE_CHECKING:
    import torch

FILE = "penstock.delta"
"""Beside a delta's files."""
Runs = list[tuple[int, int]]
"""`[start, stop)`, of leaves or of bytes."""


class Changed(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor of the new version that the base has not so."""

    dtype: DType
    shape: tuple[int, ...]
    leaves: Runs
    """All of them where the base has no tensor of this name, dtype and shape."""


class Delta(msgspec.Struct, forbid_unknown_fields=True):
    """What a delta is of."""

    base: str
    """Revision that it is applied to."""
    new: str
    """Revision that it gives."""
    leaf_bytes: int
    tensors: dict[str, Changed]
    removed: tuple[str, ...]
    version: int = 1


def delta_of(base: Manifest, new: Manifest) -> Delta:
    """Return what changed, from digests. Both must have them, of leaves of one size."""
    assert base.leaves is not None and new.leaves is not None and base.leaf_bytes == new.leaf_bytes
    had = _leaves_by_name(base.tensors, base.leaf_bytes, base.leaves)
    found = {}
    for name, (dtype, shape, leaves) in _leaves_by_name(new.tensors, new.leaf_bytes, new.leaves).items():
        old = had.pop(name, None)
        if old is None or old[:2] != (dtype, shape):
            found[name] = Changed(dtype, shape, [(0, len(leaves))] if len(leaves) else [])
        elif runs := _runs(np.flatnonzero(old[2] != leaves).tolist()):
            found[name] = Changed(dtype, shape, runs)
    return Delta(base.revision, new.revision, base.leaf_bytes, found, tuple(sorted(had)))


def _leaves_by_name(table: TensorTable, leaf_bytes: int, leaves: U64) -> dict[str, tuple[DType, tuple[int, ...], U64]]:
    parts = np.split(leaves, np.cumsum(num_leaves(table.nbytes, leaf_bytes))[:-1]) if len(table) else []
    columns = zip(table.names, table.dtypes, table.shapes, parts, strict=True)
    return {name: (dtype, shape, part) for name, dtype, shape, part in columns}


def _runs(numbers: Sequence[int]) -> Runs:
    found: Runs = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


@dataclass(frozen=True)
class _Told(Unchanged):
    """What both directions share: the second source's configuration is the result's.

    Args:
        delta: what changed, as `encoded`.
    """

    delta: bytes
    small_from = 1

    @cached_property
    def _delta(self) -> Delta:
        return decoded(self.delta)

    def _byte_runs(self, name: str, nbytes: int) -> Runs:
        leaf_bytes = self._delta.leaf_bytes
        return [(a * leaf_bytes, min(b * leaf_bytes, nbytes)) for a, b in self._delta.tensors[name].leaves]


def encoded(delta: Delta) -> bytes:
    """As it is in `FILE`."""
    return msgspec.json.encode(delta)


def decoded(raw: bytes) -> Delta:
    """Return what `encoded` gave. FormatError for anything else."""
    try:
        found = msgspec.json.decode(raw, type=Delta)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not a delta: {error}") from error
    if found.version != 1 or found.leaf_bytes < 1:
        raise FormatError(f"a delta of version {found.version}, leaves of {found.leaf_bytes} bytes")
    return found


class MakeDelta(_Told):
    """Sources: base, new."""

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"delta {self._delta.base} to {self._delta.new} ({blake3(self.delta).hexdigest(length=8)})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        found = []
        for spec in specs_of(sources[1]):
            if spec.name not in self._delta.tensors:
                continue
            at, inputs, flat = 0, list[Input](), _flat(spec)
            for start, stop in self._byte_runs(spec.name, spec.nbytes):
                inputs.append(Input(source=1, spec=flat, box=Box(start=(start,), stop=(stop,)), at=at))
                at += stop - start
            if inputs:
                out = Output(spec=Spec(name=spec.name, dtype=DType.U8, shape=(at,)))
                align = self._delta.leaf_bytes
                found.append(Recipe(outputs=(out,), inputs=tuple(inputs), num_rows=at, align=align))
        return found

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


class ApplyDelta(_Told):
    """Sources: base, delta."""

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"delta applied to {self._delta.base} for {self._delta.new} ({blake3(self.delta).hexdigest(length=8)})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. PlanError where the delta's files are not what it says."""
        base = {spec.name: spec for spec in specs_of(sources[0])}
        parts = {spec.name: spec for spec in specs_of(sources[1])}
        changed, first = self._delta.tensors, next(iter(base.values()), None)
        found = [
            as_it_is(0, spec) for name, spec in base.items() if name not in changed and name not in self._delta.removed
        ]
        for name, one in changed.items():
            spec = Spec(name=name, dtype=one.dtype, shape=one.shape)
            runs = self._byte_runs(name, spec.nbytes)
            part = parts.pop(name, None)
            total = sum(stop - start for start, stop in runs)
            if (0 if part is None else part.nbytes) != total or any(not 0 <= a <= b <= spec.nbytes for a, b in runs):
                raise PlanError("the delta's bytes are not those that it names", tensor=name)
            old = base.get(name)
            if total < spec.nbytes and (old is None or old.nbytes != spec.nbytes):
                raise PlanError("the base has not the tensor that the delta changes", tensor=name)
            found.append(_recipe(spec, list(_sources(runs, spec.nbytes)), old or first, part))
        if parts:
            raise PlanError(f"the delta holds {len(parts)} tensors that it does not name", tensor=next(iter(parts)))
        return found

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
        """See `Attested.check`. IntegrityError where the result is not the version that the delta names."""
        if manifest.revision != self._delta.new:
            message = f"the result is {manifest.revision}, not {self._delta.new}, which the delta names"
            raise IntegrityError(message, hint="penstock verify the base and the delta")


def _sources(runs: Runs, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Source, first byte in it, bytes, place in the result: kept and changed runs in turn."""
    at = taken = 0
    for start, stop in [*runs, (nbytes, nbytes)]:
        if at < start:
            yield 0, at, start - at, at
        if start < stop:
            yield 1, taken, stop - start, start
        taken, at = taken + stop - start, stop


def _recipe(spec: Spec, pieces: Sequence[tuple[int, int, int, int]], old: Spec | None, part: Spec | None) -> Recipe:
    """Rows of the recipe are bytes; those of the result are so many of them each."""
    inputs = []
    for source, start, nbytes, at in pieces:
        given = old if source == 0 else part
        assert given is not None
        box = Box(start=(start,), stop=(start + nbytes,))
        inputs.append(Input(source=source, spec=_flat(given), box=box, at=at))
    if not inputs and old is not None:  # of no bytes: it needs a device to be made on
        inputs = [Input(source=0, spec=_flat(old), box=Box(start=(0,), stop=(0,)))]
    bits = math.prod(spec.shape[1:]) * spec.dtype.bits
    per = 0 if bits % 8 else bits // 8 if spec.nbytes else 1
    return Recipe(outputs=(Output(spec=spec, per=per),), inputs=tuple(inputs), num_rows=spec.nbytes, align=per)


def _flat(spec: Spec) -> Spec:
    """Return a tensor as its bytes."""
    return Spec(name=spec.name, dtype=DType.U8, shape=(spec.nbytes,))
