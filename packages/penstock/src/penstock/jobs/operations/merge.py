"""Operations on several checkpoints of one model: sums, rotations, votes.

In / Out: see `operation`. All numbers are FP32, each step rounded once, to the first source's dtype at last.
Not here: an adapter into its base (`lora`), storing the result in a format (`formats`, in a chain).

Tensors are processed in blocks that stay in the cache: apart from the result, no buffer is as large as a tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operations.operation import (
    FLOATS,
    ReadPart,
    Unchanged,
    all_of,
    copy_recipe,
    report_progress,
    specs_of,
    whole,
)
from penstock.plan.tasks import Recipe, Spec, TaskOutput
from penstock.transform.stored import find
from penstock.types import TensorTable

if TYPE_CHECKING:
    import torch

_SHOWN = 5
_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 24
"""Elements processed at once. Reason: 1 MiB in FP32, a core's L2 cache; on a device large enough that a kernel runs
longer than its launch takes."""
COLINEAR = 0.9995
"""Cosine beyond which the arc is taken for a line. Source: mergekit 0.1.5, merge_methods/slerp.py."""
_LOW_BITS = 16
"""Of a magnitude, looked at when its upper bits are known: two counts of 2^15 and 2^16 find it."""


def same_everywhere(sources: Sequence[TensorTable], operation: str) -> list[list[Spec]]:
    """Return each tensor in every source, in the first one's order. PlanError if names or shapes differ."""
    first, *others = (specs_of(table) for table in sources)
    named = [{spec.name: spec for spec in specs} for specs in others]
    # All differences of a source in one error: fixing names one at a time would take a conversion for each.
    for i, by_name in enumerate(named, 1):
        missing = [spec.name for spec in first if spec.name not in by_name]
        extra = sorted(by_name.keys() - {spec.name for spec in first})
        differ = [spec.name for spec in first if spec.name in by_name and by_name[spec.name].shape != spec.shape]
        wrong = [
            f"{len(names)} {what} ({', '.join(names[:_SHOWN])})"
            for what, names in (("missing", missing), ("more", extra), ("of another shape", differ))
            if names
        ]
        if wrong:
            message = f"{operation}: source {i} does not have the same tensors as source 0: {'; '.join(wrong)}"
            raise PlanError(message, hint="compare them by `penstock inspect`; `rename` brings names together")
    return [[spec, *(by_name[spec.name] for by_name in named)] for spec in first]


def _together(specs: Sequence[Spec], *, rows: bool) -> Recipe:
    """Return a recipe with one output, from the same rows of all sources, or from the whole tensors."""
    spec = specs[0]
    # A scalar has no rows to cut by.
    if not rows or not spec.shape:
        inputs = tuple(all_of(i, source_spec) for i, source_spec in enumerate(specs))
        return Recipe(outputs=(TaskOutput(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0)
    inputs = tuple(whole(i, source_spec) for i, source_spec in enumerate(specs))
    return Recipe(outputs=(TaskOutput(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1)


class _Merge(Unchanged, ABC):
    """Base of merges: tensors that are floating in every source are merged; others are the first source's.

    Attributes:
        rows: a task may merge some rows of a tensor; else it merges all of it.
    """

    __slots__ = ()
    rows = True

    @property
    @abstractmethod
    def name(self) -> str:
        """See `Operation.name`."""

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        self.check(len(sources))
        for i, table in enumerate(sources):
            if codes := find(zip(table.names, table.dtypes, table.shapes, strict=True)).any:
                message = f"{self.name}: source {i} is quantised: its codes mean nothing without their scales"
                raise PlanError(message, tensor=codes, hint="`dequantise` it first")
        recipes = []
        for specs in same_everywhere(sources, self.name):
            merged = all(spec.dtype in FLOATS for spec in specs)
            recipes.append(_together(specs, rows=self.rows) if merged else copy_recipe(0, specs[0]))
        return recipes

    @abstractmethod
    def check(self, num_sources: int) -> None:
        """Raise PlanError if the operation does not take this number of sources."""

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        present = [tensor for tensor in inputs if tensor is not None]
        # One input: a tensor that is not floating, copied from the first source.
        return present if len(recipe.inputs) == 1 else [self.merge(present)]

    @abstractmethod
    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the merged values, in the place of the first one's."""


def _blocks(*tensors: torch.Tensor, step: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same elements of each tensor, flat, `step` at a time; 0: a block size that suits the device."""
    step = step or (_BLOCK if tensors[0].device.type == "cpu" else _DEVICE_BLOCK)
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), step):
        yield tuple(tensor[at : at + step] for tensor in flat)
        # A merge of a large tensor on the CPU may take longer than the stall deadline.
        report_progress()


def _check_finite(operation: str, numbers: Sequence[float]) -> None:
    """Raise ConfigError if a number is infinite or NaN: every value of the result would be, too."""
    if wrong := [number for number in numbers if not math.isfinite(number)]:
        raise ConfigError(f"{operation}: {wrong[0]} is not a finite number", hint="look at weights and scale")


Blocks = Callable[[], "Iterator[tuple[torch.Tensor, ...]]"]
"""All elements of each tensor, `_BLOCK` of them at a time in flat order; called for each pass over them."""


class _WholeMerge(_Merge):
    """Base of merges that need a whole tensor before they can make any element: passes over it, then the result.

    Passes use blocks of a fixed size, so that sums have the same bits whether a tensor is in memory or read in parts.
    """

    __slots__ = ()
    rows = False

    @abstractmethod
    def measure(self, blocks: Blocks, num_elements: int) -> Any:
        """Return the measurements of whole tensors that `apply` needs."""

    @abstractmethod
    def apply(self, measured: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the merged values of the same elements of all tensors, in the place of the first one's."""

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        return self.apply(self.measure(partial(_blocks, *tensors, step=_BLOCK), tensors[0].numel()), tensors)

    def part_unit(self, recipe: Recipe) -> int:
        """See `Streamed.part_unit`."""
        return _BLOCK if len(recipe.inputs) > 1 else 0

    def run_parts(self, recipe: Recipe, num_part: int, read: ReadPart) -> Iterator[Sequence[torch.Tensor]]:
        """See `Streamed.run_parts`."""
        num_elements, count = math.prod(recipe.inputs[0].spec.shape), len(recipe.inputs)

        def parts() -> Iterator[list[torch.Tensor]]:
            """Yield the same elements of all inputs, read anew on each call."""
            for at in range(0, num_elements, num_part):
                yield [read(i, at, min(at + num_part, num_elements)) for i in range(count)]

        def blocks() -> Iterator[tuple[torch.Tensor, ...]]:
            """Yield the parts in blocks of the size that a merge in memory uses, so that sums have the same bits."""
            for part in parts():
                yield from _blocks(*part, step=_BLOCK)

        measured = self.measure(blocks, num_elements)
        # Once more from storage: keeping the parts would need the memory that parts are to save.
        for part in parts():
            yield [self.apply(measured, part)]


def _sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum, in the first one's place. Each step is rounded: the same bits however rows are cut."""
    import torch

    # New memory would cost as much again as the sum: the kernel hands it out zeroed, page by page.
    result = tensors[0]
    size = min(_BLOCK if result.device.type == "cpu" else _DEVICE_BLOCK, result.numel())
    # Two buffers for all blocks: allocating one for each term would touch new pages all the time.
    total, term = (torch.empty(size, dtype=torch.float32, device=result.device) for _ in range(2))
    for out, *parts in _blocks(result, *tensors):
        some = total[: len(out)].copy_(parts[0]).mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            some.add_(term[: len(out)].copy_(part).mul_(weight))
        out.copy_(some)
    return result


@dataclass(frozen=True, slots=True)
class Linear(_Merge):
    """A weighted sum; without weights, the average. As mergekit's `linear`.

    Args:
        weights: one a source.
        normalize: divide by their sum.
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
            hint = "two sources or more, and one weight for each: linear:weights=0.3,0.7"
            found = f"linear: {len(self.weights)} weights for" if self.weights else "average of"
            raise PlanError(f"{found} {num_sources} sources", hint=hint)
        if self.normalize and self.weights and not sum(self.weights):
            raise PlanError("linear: weights whose sum is zero cannot be normalized")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        weights = self.weights or (1.0,) * len(tensors)
        total = sum(weights) if self.normalize else 1.0
        return _sum(tensors, [weight / total for weight in weights])


@dataclass(frozen=True, slots=True)
class Slerp(_WholeMerge):
    """Spherical interpolation between two tensors, each as one vector; linear where they are nearly parallel.

    Source: Shoemake, "Animating rotation with quaternion curves", 1985. As mergekit's `slerp`, but for lengths and
    cosine in FP64, and the line also where a tensor is all zero (it takes a right angle there).

    Args:
        t: 0 is the first source, 1 the second.
    """

    t: float

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if not 0 <= self.t <= 1:
            raise ConfigError(f"slerp: t={self.t} is not in [0, 1]", hint="0 is the first source, 1 the second")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"slerp({self.t})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources != 2:
            raise PlanError(f"slerp takes two sources, not {num_sources}", hint="linear and ties take more")

    def measure(self, blocks: Blocks, num_elements: int) -> list[float]:
        """See `_WholeMerge.measure`: the weight of each tensor."""
        import torch

        # FP64: an FP32 sum over a hundred million squares loses digits that the angle needs.
        sums = torch.zeros(3, dtype=torch.float64)
        for a, b in blocks():
            x, y = a.double(), b.double()
            sums += torch.stack([x.dot(x), y.dot(y), x.dot(y)]).to(sums.device)
        aa, bb, ab = sums.tolist()
        # Roots before the product, which would overflow for large tensors of large values.
        length = math.sqrt(aa) * math.sqrt(bb)
        # Written so that NaN takes the line too. Beyond `COLINEAR` the sine in the denominator has few digits left.
        if not length or not abs(ab / length) <= COLINEAR:
            return [1 - self.t, self.t]
        angle = math.acos(ab / length)
        return [math.sin(share * angle) / math.sin(angle) for share in (1 - self.t, self.t)]

    def apply(self, measured: list[float], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_WholeMerge.apply`."""
        return _sum(tensors, measured)


@dataclass(frozen=True, slots=True)
class Ties(_WholeMerge):
    """Sum of the changes that fine-tuned models made: trimmed, with a vote on the sign, averaged where signs agree.

    The first source is the base. Source: Yadav et al., "TIES-Merging", 2023, section 3. As mergekit's `ties`, but for:
    FP32 where mergekit has the sources' dtype; changes as large as the least one that is kept are kept too; where a
    vote ends in a tie nothing changes (mergekit counts it as positive).

    Args:
        density: the share of each tensor's changes that is kept, the largest.
        weights: one a fine-tuned model; none: equal.
        scale: what the merged change is multiplied by.
    """

    density: float
    weights: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"ties: a density of {self.density} is not in (0, 1]")
        _check_finite("ties", (*self.weights, self.scale))

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"ties({self.density}; {', '.join(map(str, self.weights))}; {self.scale})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources < 2 or (self.weights and len(self.weights) != num_sources - 1):
            raise PlanError(f"ties: {len(self.weights)} weights for a base and {num_sources - 1} models")

    def measure(self, blocks: Blocks, num_elements: int) -> list[int]:
        """See `_WholeMerge.measure`: for each model the bits of the least magnitude that is kept.

        Two passes: counts of the magnitudes' upper bits, then of the lower ones within the bucket that has the least.
        """
        num_kept = max(1, int(self.density * num_elements))
        # Everything is kept: an edge of 0, without the two passes.
        if num_kept >= num_elements:
            return []
        high = _counted(blocks, None)
        # Sorting for the k-th largest would need the whole tensor in memory; counts need 2^16 numbers at most.
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
            # The sign of the sum of all changes wins an element; changes of the other sign do not count.
            votes, total, share = (torch.zeros_like(start) for _ in range(3))
            for move in moves:
                votes.add_(move)
            for move, weight in zip(moves, weights, strict=True):
                agrees = (move.sign() == votes.sign()) & (move != 0)
                total.add_(move.where(agrees, 0.0))
                share.add_(torch.where(agrees, weight, 0.0))
            # Where nobody agrees the share is 0, and so is the sum: divided by 1 instead.
            total.div_(share.where(share != 0, 1.0))
            # NaN in any model's change stays visible in the result: `sign` and `where` alone would drop it.
            base.copy_(total.where(~votes.isnan(), votes).mul_(self.scale).add_(start))
        return tensors[0]


def _counted(blocks: Blocks, buckets: Sequence[int] | None) -> list[torch.Tensor]:
    """Count for each model the changes by the upper bits of their magnitude; or, with a bucket of those for each model,
    by the lower bits within that bucket."""
    import torch

    counts: list[torch.Tensor] = []
    size = 1 << (_LOW_BITS if buckets is not None else 31 - _LOW_BITS)
    for base, *models in blocks():
        # Kept on the host: 2^16 numbers for each model, while blocks may be on a device.
        counts = counts or [torch.zeros(size, dtype=torch.int64) for _ in models]
        start = base.float()
        for i, model in enumerate(models):
            bits = _magnitude(model.float() - start)
            upper = bits >> _LOW_BITS
            some = upper if buckets is None else bits[upper == buckets[i]] & ((1 << _LOW_BITS) - 1)
            counts[i] += torch.bincount(some, minlength=size).cpu()
    return counts


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x|: ordered as the numbers are, NaN beyond all."""
    import torch

    return values.view(torch.int32) & 0x7FFFFFFF


def _trimmed(base: torch.Tensor, model: torch.Tensor, edge: int) -> torch.Tensor:
    change = model.float() - base
    return change.where(_magnitude(change) >= edge, 0.0)
