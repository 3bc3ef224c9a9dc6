"""Operations that merge several checkpoints of one model: `linear`, `slerp` and `ties`.

Merges compute in FP32, round each step once, and finally round to the first source's dtype. Tensors are processed in
blocks that stay in the CPU cache, so only the result needs a buffer of the size of a tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.types import TensorTable
from penstock_convert.operations.operation import (
    FLOATS,
    ReadPart,
    Unchanged,
    all_of,
    copy_recipe,
    report_progress,
    specs_of,
    whole,
)
from penstock_convert.operations.stored import find
from penstock_convert.plan.tasks import Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

_SHOWN = 5
_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 24
"""Number of elements processed at once. 1 MiB in FP32 fits a core's L2 cache. On a device a kernel then runs longer
than its launch takes."""
COLINEAR = 0.9995
"""Cosine above which the arc is treated as a line. Source: mergekit 0.1.5, merge_methods/slerp.py."""
_LOW_BITS = 16
"""Number of lower bits of a magnitude. `ties` first counts magnitudes by their upper bits and then by their lower bits,
with tables of 2^15 and 2^16 entries."""


def same_everywhere(sources: Sequence[TensorTable], operation: str) -> list[list[Spec]]:
    """Return each tensor's specs from all sources. Raise PlanError if names or shapes differ between sources."""
    first, *others = (specs_of(table) for table in sources)
    named = [{spec.name: spec for spec in specs} for specs in others]
    # List all differences of a source in one error, so that a user can fix all differences at once.
    for i, by_name in enumerate(named, 1):
        missing = [spec.name for spec in first if spec.name not in by_name]
        extra = sorted(by_name.keys() - {spec.name for spec in first})
        differ = [spec.name for spec in first if spec.name in by_name and by_name[spec.name].shape != spec.shape]
        wrong = [
            f"{len(names)} {what} ({', '.join(names[:_SHOWN])})"
            for what, names in (("missing", missing), ("additional", extra), ("with a different shape", differ))
            if names
        ]
        if wrong:
            message = f"{operation}: source {i} does not have the same tensors as source 0: {'; '.join(wrong)}"
            raise PlanError(message, hint="compare the sources with `penstock inspect`, and change names with `rename`")
    return [[spec, *(by_name[spec.name] for by_name in named)] for spec in first]


def _together(specs: Sequence[Spec], *, rows: bool) -> Recipe:
    """Return a recipe that computes an output from the same tensor of all sources, by rows or as a whole."""
    spec = specs[0]
    if not rows or not spec.shape:
        inputs = tuple(all_of(i, source_spec) for i, source_spec in enumerate(specs))
        return Recipe(outputs=(TaskOutput(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0)
    inputs = tuple(whole(i, source_spec) for i, source_spec in enumerate(specs))
    return Recipe(outputs=(TaskOutput(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1)


class _Merge(Unchanged, ABC):
    """Base class of merges.

    A merge combines tensors that are floating-point in every source, and copies other tensors from the first source.

    Attributes:
        rows: whether a task may merge only some rows of a tensor instead of the whole tensor.
    """

    __slots__ = ()
    rows = True

    @property
    @abstractmethod
    def name(self) -> str:
        """See `Operation.name`."""

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        self.check(len(sources))
        for i, table in enumerate(sources):
            if codes := find(zip(table.names, table.dtypes, table.shapes, strict=True)).any:
                message = f"{self.name}: source {i} is quantised, so its codes cannot be merged without their scales"
                raise PlanError(message, tensor=codes, hint="put `dequantise` before the merge")
        recipes = []
        for specs in same_everywhere(sources, self.name):
            merged = all(spec.dtype in FLOATS for spec in specs)
            recipes.append(_together(specs, rows=self.rows) if merged else copy_recipe(0, specs[0]))
        return recipes

    @abstractmethod
    def check(self, num_sources: int) -> None:
        """Raise PlanError if the operation does not accept this number of sources."""

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        present = [tensor for tensor in inputs if tensor is not None]
        # A recipe with one input copies a tensor that is not floating-point.
        return present if len(recipe.inputs) == 1 else [self.merge(present)]

    @abstractmethod
    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the merged values in the memory of the first tensor."""


def _blocks(*tensors: torch.Tensor, step: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield flat blocks of `step` elements from the same offset in each tensor. 0 means a suitable block size."""
    step = step or (_BLOCK if tensors[0].device.type == "cpu" else _DEVICE_BLOCK)
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), step):
        yield tuple(tensor[at : at + step] for tensor in flat)
        # Report progress, because merging a large tensor on the CPU may take longer than the stall deadline.
        report_progress()


def _check_finite(operation: str, numbers: Sequence[float]) -> None:
    """Raise ConfigError for an infinite or NaN argument, which would make the whole result infinite or NaN."""
    if wrong := [number for number in numbers if not math.isfinite(number)]:
        raise ConfigError(
            f"{operation}: {wrong[0]} is not a finite number", hint="check the `weights` and `scale` arguments"
        )


Blocks = Callable[[], "Iterator[tuple[torch.Tensor, ...]]"]
"""A function that yields all elements of each tensor, `_BLOCK` at a time, in flat order. It is called for each pass."""


class _WholeMerge(_Merge):
    """Base class of merges that read the whole tensor before they compute the first element.

    Sums are computed in blocks of a fixed size, so their bits do not depend on whether a tensor is read in parts.
    """

    __slots__ = ()
    rows = False

    @abstractmethod
    def measure(self, blocks: Blocks, num_elements: int) -> Any:
        """Measure the whole tensors, and return the values that `apply` uses."""

    @abstractmethod
    def apply(self, measured: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the merged values for the same elements of all tensors, in the memory of the first tensor."""

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.apply(self.measure(partial(_blocks, *tensors, step=_BLOCK), tensors[0].numel()), tensors)

    def part_unit(self, recipe: Recipe) -> int:
        return _BLOCK if len(recipe.inputs) > 1 else 0

    def run_parts(self, recipe: Recipe, num_part: int, read: ReadPart) -> Iterator[Sequence[torch.Tensor]]:
        num_elements, count = math.prod(recipe.inputs[0].spec.shape), len(recipe.inputs)

        def parts() -> Iterator[list[torch.Tensor]]:
            """Yield the inputs part by part, as lists with the same part of every input."""
            for at in range(0, num_elements, num_part):
                yield [read(i, at, min(at + num_part, num_elements)) for i in range(count)]

        def blocks() -> Iterator[tuple[torch.Tensor, ...]]:
            """Yield the parts in blocks of the same size as for tensors in memory, so that sums are bit-identical."""
            for part in parts():
                yield from _blocks(*part, step=_BLOCK)

        measured = self.measure(blocks, num_elements)
        # Read the parts from storage again, because keeping all parts would require memory for the whole tensors.
        for part in parts():
            yield [self.apply(measured, part)]


def _sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum in the first tensor's memory, with bits that do not depend on how rows are cut."""
    import torch

    # Reuse the first tensor's memory, because the kernel zeroes new pages, which takes as much time as the sum.
    result = tensors[0]
    size = min(_BLOCK if result.device.type == "cpu" else _DEVICE_BLOCK, result.numel())
    # Use the same two buffers for all blocks, because new buffers would touch new pages.
    total, term = (torch.empty(size, dtype=torch.float32, device=result.device) for _ in range(2))
    for out, *parts in _blocks(result, *tensors):
        some = total[: len(out)].copy_(parts[0]).mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            some.add_(term[: len(out)].copy_(part).mul_(weight))
        out.copy_(some)
    return result


@dataclass(frozen=True, slots=True)
class Linear(_Merge):
    """Weighted sum of the sources, or their average if there are no weights, like mergekit's `linear`.

    Args:
        weights: one weight for each source.
        normalize: whether to divide by the sum of the weights.
    """

    weights: tuple[float, ...] = ()
    normalize: bool = True

    def __post_init__(self) -> None:
        _check_finite("linear", self.weights)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        if not self.weights and self.normalize:
            return "average()"
        return f"linear({', '.join(map(str, self.weights))}{'' if self.normalize else ', as they are'})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources < 2 or (self.weights and len(self.weights) != num_sources):
            hint = "pass at least two sources and one weight for each source, such as linear:weights=0.3,0.7"
            found = f"linear: got {len(self.weights)} weights for" if self.weights else "average: got"
            raise PlanError(f"{found} {num_sources} sources", hint=hint)
        if self.normalize and self.weights and not sum(self.weights):
            raise PlanError("linear: cannot normalize weights whose sum is zero")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        weights = self.weights or (1.0,) * len(tensors)
        total = sum(weights) if self.normalize else 1.0
        return _sum(tensors, [weight / total for weight in weights])


@dataclass(frozen=True, slots=True)
class Slerp(_WholeMerge):
    """Spherical interpolation between two tensors, each treated as one vector, or linear if they are nearly parallel.

    Unlike mergekit's `slerp`, this class computes lengths and cosine in FP64, and interpolates a zero tensor linearly.
    Source: Shoemake, "Animating rotation with quaternion curves", 1985.

    Args:
        t: position between the sources, from 0 (the first source) to 1 (the second source).
    """

    t: float

    def __post_init__(self) -> None:
        # The negated condition also rejects NaN.
        if not 0 <= self.t <= 1:
            raise ConfigError(
                f"slerp: t={self.t} is not in [0, 1]", hint="pass a number from 0 (first source) to 1 (second source)"
            )

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"slerp({self.t})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources != 2:
            raise PlanError(
                f"slerp takes two sources, not {num_sources}", hint="use linear or ties to merge more than two models"
            )

    def measure(self, blocks: Blocks, num_elements: int) -> list[float]:
        """See `_WholeMerge.measure`. Return the weight of each tensor."""
        import torch

        # Use FP64, because an FP32 sum over a hundred million squares loses digits that the angle requires.
        sums = torch.zeros(3, dtype=torch.float64)
        for a, b in blocks():
            x, y = a.double(), b.double()
            sums += torch.stack([x.dot(x), y.dot(y), x.dot(y)]).to(sums.device)
        aa, bb, ab = sums.tolist()
        # Take the square roots before multiplying, because the product of large sums would overflow.
        length = math.sqrt(aa) * math.sqrt(bb)
        # Interpolate NaN linearly too. Above `COLINEAR` the sine in the denominator has few accurate digits.
        if not length or not abs(ab / length) <= COLINEAR:
            return [1 - self.t, self.t]
        angle = math.acos(ab / length)
        return [math.sin(share * angle) / math.sin(angle) for share in (1 - self.t, self.t)]

    def apply(self, measured: list[float], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_WholeMerge.apply`."""
        return _sum(tensors, measured)


@dataclass(frozen=True, slots=True)
class Ties(_WholeMerge):
    """Merges the changes of fine-tuned models into their base, which is the first source.

    Small changes are dropped, the remaining changes vote on the sign, and changes with the winning sign are averaged.
    Unlike mergekit's `ties`, this class computes in FP32, keeps all changes that are as large as the smallest kept
    change, and keeps the base's value after a tied vote. Source: Yadav et al., "TIES-Merging", 2023, section 3.

    Args:
        density: fraction of each tensor's changes to keep, which are the largest changes.
        weights: one weight for each fine-tuned model. Empty means equal weights.
        scale: factor for the merged change.
    """

    density: float
    weights: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"ties: density={self.density} must be above 0 and at most 1")
        _check_finite("ties", (*self.weights, self.scale))

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"ties({self.density}; {', '.join(map(str, self.weights))}; {self.scale})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources < 2 or (self.weights and len(self.weights) != num_sources - 1):
            raise PlanError(f"ties: got {len(self.weights)} weights for a base and {num_sources - 1} models")

    def measure(self, blocks: Blocks, num_elements: int) -> list[int]:
        """See `_WholeMerge.measure`. Return the bits of the smallest magnitude to keep for each model.

        The first pass counts magnitudes by their upper bits, which determines the bucket that contains the smallest
        magnitude to keep. The second pass counts the magnitudes in this bucket by their lower bits.
        """
        num_kept = max(1, int(self.density * num_elements))
        # Skip the two passes, because all changes are kept.
        if num_kept >= num_elements:
            return []
        high = _counted(blocks, None)
        # Sorting would require the whole tensor in memory, but counting requires at most 2^16 numbers.
        buckets, left = list[int](), list[int]()
        for counts in high:
            above = counts.flip(0).cumsum(0)
            top = int((above >= num_kept).int().argmax())
            buckets.append(len(counts) - 1 - top)
            left.append(num_kept - (int(above[top - 1]) if top else 0))
        low = _counted(blocks, buckets)
        ranks = [int((counts.flip(0).cumsum(0) >= rest).int().argmax()) for counts, rest in zip(low, left, strict=True)]
        return [bucket << _LOW_BITS | (1 << _LOW_BITS) - 1 - rank for bucket, rank in zip(buckets, ranks, strict=True)]

    def apply(self, measured: list[int], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_WholeMerge.apply`."""
        import torch

        weights = self.weights or (1.0,) * (len(tensors) - 1)
        edges = measured or [0] * len(weights)
        for base, *models in _blocks(*tensors):
            start = base.float()
            moves = [
                _trimmed(start, model, edge).mul_(w) for model, edge, w in zip(models, edges, weights, strict=True)
            ]
            # The sign of the sum of all changes wins the vote for an element. Changes with the opposite sign are
            # ignored.
            votes, total, share = (torch.zeros_like(start) for _ in range(3))
            for move in moves:
                votes.add_(move)
            for move, weight in zip(moves, weights, strict=True):
                agrees = (move.sign() == votes.sign()) & (move != 0)
                total.add_(move.where(agrees, 0.0))
                share.add_(torch.where(agrees, weight, 0.0))
            # If no change has the winning sign, share and sum are 0, so divide by 1.
            total.div_(share.where(share != 0, 1.0))
            # Keep a NaN from any model's change in the result. `sign` and `where` alone would drop it.
            base.copy_(total.where(~votes.isnan(), votes).mul_(self.scale).add_(start))
        return tensors[0]


def _counted(blocks: Blocks, buckets: Sequence[int] | None) -> list[torch.Tensor]:
    """Count each model's changes by their magnitude's upper bits, or the changes in `buckets` by the lower bits."""
    import torch

    counts: list[torch.Tensor] = []
    size = 1 << (_LOW_BITS if buckets is not None else 31 - _LOW_BITS)
    for base, *models in blocks():
        # Keep the counts on the host, because each model has only 2^16 counts.
        counts = counts or [torch.zeros(size, dtype=torch.int64) for _ in models]
        start = base.float()
        for i, model in enumerate(models):
            bits = _magnitude(model.float() - start)
            upper = bits >> _LOW_BITS
            some = upper if buckets is None else bits[upper == buckets[i]] & ((1 << _LOW_BITS) - 1)
            counts[i] += torch.bincount(some, minlength=size).cpu()
    return counts


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x|, which have the same order as the numbers, with NaN last."""
    import torch

    return values.view(torch.int32) & 0x7FFFFFFF


def _trimmed(base: torch.Tensor, model: torch.Tensor, edge: int) -> torch.Tensor:
    change = model.float() - base
    return change.where(_magnitude(change) >= edge, 0.0)
