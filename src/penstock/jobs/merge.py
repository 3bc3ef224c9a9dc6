"""Operations on several checkpoints of one model: sums, rotations, votes.

In / Out: see `operation`. All numbers are FP32, each step rounded once, to the first source's dtype at last.
Not here: an adapter into its base (`lora`), storing the result in a format (`formats`, in a chain).

Tensors are walked in blocks that stay in the cache: nothing as large as a tensor is made beside the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operation import FLOATS, Unchanged, all_of, as_it_is, specs_of, whole
from penstock.plan.tasks import Output, Recipe, Spec
from penstock.transform.stored import find
from penstock.types import TensorTable

if TYPE_CHECKING:
    import torch

_SHOWN = 5
_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 24
"""Elements walked at once. Reason: 1 MiB in FP32, a core's L2 cache; on a device a block is
launches that take longer than they cost."""
COLINEAR = 0.9995
"""Cosine beyond which the arc is taken for a line. Source: mergekit 0.1.5, merge_methods/slerp.py."""
_LOW_BITS = 16
"""Of a magnitude, looked at when its upper bits are known: two counts of 2^15 and 2^16 find it."""


def same_everywhere(sources: Sequence[TensorTable], operation: str) -> list[list[Spec]]:
    """Each tensor in every source, in the first one's order. PlanError where names or shapes differ, with some."""
    first, *others = (specs_of(table) for table in sources)
    named = [{spec.name: spec for spec in specs} for specs in others]
    for i, found in enumerate(named, 1):
        missing = [spec.name for spec in first if spec.name not in found]
        extra = sorted(found.keys() - {spec.name for spec in first})
        differ = [spec.name for spec in first if spec.name in found and found[spec.name].shape != spec.shape]
        wrong = [
            f"{len(names)} {what} ({', '.join(names[:_SHOWN])})"
            for what, names in (("missing", missing), ("more", extra), ("of another shape", differ))
            if names
        ]
        if wrong:
            message = f"{operation}: source {i} has not the tensors of source 0: {'; '.join(wrong)}"
            raise PlanError(message, hint="compare them by `penstock inspect`; `rename` brings names together")
    return [[spec, *(found[spec.name] for found in named)] for spec in first]


def _together(specs: Sequence[Spec], *, rows: bool) -> Recipe:
    """One output of the same rows of all, or of all of all."""
    spec = specs[0]
    if not rows or not spec.shape:
        inputs = tuple(all_of(i, one) for i, one in enumerate(specs))
        return Recipe(outputs=(Output(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0)
    inputs = tuple(whole(i, one) for i, one in enumerate(specs))
    return Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1)


class _Merge(Unchanged):
    """What merges share: tensors that float everywhere are merged, others are the first source's."""

    rows = True

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        raise NotImplementedError

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        self.check(len(sources))
        for i, table in enumerate(sources):
            if codes := find(zip(table.names, table.dtypes, table.shapes, strict=True)).any:
                message = f"{self.name}: source {i} is quantised: its codes mean nothing without their scales"
                raise PlanError(message, tensor=codes, hint="`dequantise` it first")
        found = []
        for specs in same_everywhere(sources, self.name):
            merged = all(spec.dtype in FLOATS for spec in specs)
            found.append(_together(specs, rows=self.rows) if merged else as_it_is(0, specs[0]))
        return found

    def check(self, num_sources: int) -> None:
        """Raise PlanError where the operation does not take so many."""

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        present = [tensor for tensor in inputs if tensor is not None]
        return present if len(recipe.inputs) == 1 else [self.merge(present)]

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The merged values, in the place of the first one's."""
        raise NotImplementedError


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of each, flat, so many at a time."""
    step = _BLOCK if tensors[0].device.type == "cpu" else _DEVICE_BLOCK
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), step):
        yield tuple(one[at : at + step] for one in flat)


def _sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted sum, in the first one's place. Each step is rounded: the same bits however rows are cut."""
    import torch

    made = tensors[0]  # new memory would cost as much again as the sum: the kernel hands it out zeroed, page by page
    size = min(_BLOCK if made.device.type == "cpu" else _DEVICE_BLOCK, made.numel())
    total, term = (torch.empty(size, dtype=torch.float32, device=made.device) for _ in range(2))
    for out, *parts in _blocks(made, *tensors):
        some = total[: len(out)].copy_(parts[0]).mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            some.add_(term[: len(out)].copy_(part).mul_(weight))
        out.copy_(some)
    return made


@dataclass(frozen=True, slots=True)
class Linear(_Merge):
    """A weighted sum; without weights, the average. mergekit's `linear`, but FP32 where it has the sources' dtype.

    Args:
        weights: one a source.
        normalize: divide by their sum.
    """

    weights: tuple[float, ...] = ()
    normalize: bool = True

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"linear({', '.join(map(str, self.weights))}{'' if self.normalize else ', as they are'})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources < 2 or (self.weights and len(self.weights) != num_sources):
            hint = "two sources or more, and one weight for each: linear:weights=0.3,0.7"
            raise PlanError(f"linear: {len(self.weights)} weights for {num_sources} sources", hint=hint)
        if self.normalize and self.weights and not sum(self.weights):
            raise PlanError("linear: weights whose sum is zero cannot be normalized")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        weights = self.weights or (1.0,) * len(tensors)
        total = sum(weights) if self.normalize else 1.0
        return _sum(tensors, [weight / total for weight in weights])


@dataclass(frozen=True, slots=True)
class Slerp(_Merge):
    """On the arc between two tensors, each taken as one vector; on the line where they are nearly parallel.

    Source: Shoemake, "Animating rotation with quaternion curves", 1985. As mergekit's `slerp`, but for lengths and
    cosine in FP64, and the line also where a tensor is all zero (it takes a right angle there).

    Args:
        t: 0 is the first source, 1 the second.
    """

    t: float
    rows = False

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"slerp({self.t})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources != 2:
            raise PlanError(f"slerp takes two sources, not {num_sources}", hint="linear and ties take more")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        import torch

        sums = torch.zeros(3, dtype=torch.float64, device=tensors[0].device)
        for a, b in _blocks(*tensors):
            x, y = a.double(), b.double()
            sums += torch.stack([x.dot(x), y.dot(y), x.dot(y)])
        aa, bb, ab = sums.tolist()
        length = math.sqrt(aa) * math.sqrt(bb)
        if not length or not abs(ab / length) <= COLINEAR:
            return _sum(tensors, [1 - self.t, self.t])
        angle = math.acos(ab / length)
        return _sum(tensors, [math.sin(share * angle) / math.sin(angle) for share in (1 - self.t, self.t)])


@dataclass(frozen=True, slots=True)
class Ties(_Merge):
    """What fine-tuned models changed of their base, trimmed, signs voted on, those that agree averaged.

    The first source is the base. Source: Yadav et al., "TIES-Merging", 2023, section 3. As mergekit's `ties`, but for:
    FP32 where it has the sources' dtype; changes as large as the least that is kept are kept too; where a vote ends in
    a tie nothing changes (it takes it for positive).

    Args:
        density: the share of each tensor's changes that is kept, the largest.
        weights: one a fine-tuned model; none: equal.
        scale: what the merged change is multiplied by.
    """

    density: float
    weights: tuple[float, ...] = ()
    scale: float = 1.0
    rows = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"ties: a density of {self.density} is not in (0, 1]")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return f"ties({self.density}; {', '.join(map(str, self.weights))}; {self.scale})"

    def check(self, num_sources: int) -> None:
        """See `_Merge.check`."""
        if num_sources < 2 or (self.weights and len(self.weights) != num_sources - 1):
            raise PlanError(f"ties: {len(self.weights)} weights for a base and {num_sources - 1} models")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        import torch

        weights = self.weights or (1.0,) * (len(tensors) - 1)
        edges = [self._edge(tensors[0], tensor) for tensor in tensors[1:]]
        for base, *models in _blocks(*tensors):
            start = base.float()
            moves = [
                _trimmed(start, model, edge).mul_(w) for model, edge, w in zip(models, edges, weights, strict=True)
            ]
            votes, total, share = (torch.zeros_like(start) for _ in range(3))
            for move in moves:
                votes.add_(move)
            for move, weight in zip(moves, weights, strict=True):
                agrees = (move.sign() == votes.sign()) & (move != 0)
                total.add_(move.where(agrees, 0.0))
                share.add_(torch.where(agrees, weight, 0.0))
            total.div_(share.where(share != 0, 1.0))
            base.copy_(total.where(~votes.isnan(), votes).mul_(self.scale).add_(start))
        return tensors[0]

    def _edge(self, base: torch.Tensor, model: torch.Tensor) -> int:
        """The bits of the least magnitude that is kept."""
        kept = max(1, int(self.density * base.numel()))
        if kept >= base.numel():
            return 0
        high = _counted(base, model, None)
        above = high.flip(0).cumsum(0)
        top = int((above >= kept).int().argmax())
        bucket = len(high) - 1 - top
        left = kept - (int(above[top - 1]) if top else 0)
        low = _counted(base, model, bucket)
        return bucket << _LOW_BITS | len(low) - 1 - int((low.flip(0).cumsum(0) >= left).int().argmax())


def _counted(base: torch.Tensor, model: torch.Tensor, bucket: int | None) -> torch.Tensor:
    """How many changes have each value of a magnitude's upper bits; or of its lower ones, in one bucket of those."""
    import torch

    counts = torch.zeros(1 << (_LOW_BITS if bucket is not None else 31 - _LOW_BITS), dtype=torch.int64)
    for one, other in _blocks(base, model):
        bits = _magnitude(other.float() - one.float())
        upper = bits >> _LOW_BITS
        found = upper if bucket is None else bits[upper == bucket] & ((1 << _LOW_BITS) - 1)
        counts += torch.bincount(found, minlength=len(counts)).cpu()
    return counts


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """The bits of |x|: ordered as the numbers are, NaN beyond all."""
    import torch

    return values.view(torch.int32) & 0x7FFFFFFF


def _trimmed(base: torch.Tensor, model: torch.Tensor, edge: int) -> torch.Tensor:
    change = model.float() - base
    return change.where(_magnitude(change) >= edge, 0.0)
