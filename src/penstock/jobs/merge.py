"""Operations on several checkpoints of one model: sums, rotations, votes, and an adapter into its base.

In / Out: see `operation`. All numbers are FP32 until the last rounding, to the first source's dtype.
Not here: storing the result in a format (`formats`, in a chain).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operation import as_it_is, specs_of, whole
from penstock.plan.tasks import Input, Output, Recipe, Spec
from penstock.types import Box, DType, TensorTable

_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_SHOWN = 5


def _same_everywhere(sources: Sequence[TensorTable], operation: str) -> list[list[Spec]]:
    """Each tensor in every source, in the first one's order. PlanError where names or shapes differ."""
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
            raise PlanError(f"{operation}: source {i} has not the tensors of source 0: {'; '.join(wrong)}")
    return [[spec, *(found[spec.name] for found in named)] for spec in first]


def _together(specs: Sequence[Spec], *, rows: bool) -> Recipe:
    """One output of the same rows of all, or of all of all."""
    spec = specs[0]
    if not rows or not spec.shape:
        inputs = tuple(Input(source=i, spec=one, box=Box.full(one.shape), at=None) for i, one in enumerate(specs))
        return Recipe(outputs=(Output(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0)
    return Recipe(
        outputs=(Output(spec=spec),),
        inputs=tuple(whole(i, one) for i, one in enumerate(specs)),
        num_rows=spec.shape[0],
        align=1,
    )


class _Merge:
    """What merges share: floating tensors are merged, others are the first source's."""

    rows = True

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        raise NotImplementedError

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        self.check(len(sources))
        found = []
        for specs in _same_everywhere(sources, self.name):
            merged = all(spec.dtype in _FLOATS for spec in specs)
            found.append(_together(specs, rows=self.rows) if merged else as_it_is(0, specs[0]))
        return found

    def check(self, num_sources: int) -> None:
        """Raise PlanError where the operation does not take so many."""

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        present = [tensor for tensor in inputs if tensor is not None]
        if len(recipe.inputs) == 1:
            return present
        return [self.merge(present).to(present[0].dtype)]

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The merged values, in FP32."""
        raise NotImplementedError

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        return config


@dataclass(frozen=True, slots=True)
class Linear(_Merge):
    """A weighted sum; without weights, the average.

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
            raise PlanError(f"linear: {len(self.weights)} weights for {num_sources} sources")
        if self.normalize and self.weights and not sum(self.weights):
            raise PlanError("linear: weights whose sum is zero cannot be normalized")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        weights = self.weights or (1.0,) * len(tensors)
        total = sum(weights) if self.normalize else 1.0
        found = tensors[0].float() * (weights[0] / total)
        for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
            found.add_(tensor.float(), alpha=weight / total)
        return found


@dataclass(frozen=True, slots=True)
class Slerp(_Merge):
    """On the arc between two tensors taken as vectors; on the line where they are nearly parallel.

    Source: Shoemake, "Animating rotation with quaternion curves", 1985; the threshold is mergekit's.

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
            raise PlanError(f"slerp takes two sources, not {num_sources}")

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `_Merge.merge`."""
        a, b = (tensor.float() for tensor in tensors)
        lengths = a.norm() * b.norm()
        dot = (a * b).sum() / torch.where(lengths > 0, lengths, 1.0)
        if not bool(lengths > 0) or bool(dot.abs() > 0.9995):
            return a * (1 - self.t) + b * self.t
        angle = torch.acos(dot)
        return a * (torch.sin((1 - self.t) * angle) / torch.sin(angle)) + b * (
            torch.sin(self.t * angle) / torch.sin(angle)
        )


@dataclass(frozen=True, slots=True)
class Ties(_Merge):
    """What fine-tuned models changed of their base, trimmed, signs voted on, those that agree averaged.

    The first source is the base. Source: Yadav et al., "TIES-Merging", 2023, section 3.

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
        base = tensors[0].float()
        weights = self.weights or (1.0,) * (len(tensors) - 1)
        changes = [self._trimmed(tensor.float() - base) for tensor in tensors[1:]]
        votes = torch.zeros_like(base)
        for change, weight in zip(changes, weights, strict=True):
            votes.add_(change, alpha=weight)
        total, count = torch.zeros_like(base), torch.zeros_like(base)
        for change, weight in zip(changes, weights, strict=True):
            agrees = (change.sign() == votes.sign()) & (change != 0)
            total.add_(torch.where(agrees, change, 0.0), alpha=weight)
            count.add_(agrees, alpha=weight)
        return base + self.scale * torch.where(count != 0, total / torch.where(count != 0, count, 1.0), 0.0)

    def _trimmed(self, change: torch.Tensor) -> torch.Tensor:
        kept = max(1, round(self.density * change.numel()))
        if kept >= change.numel():
            return change
        size = change.abs().reshape(-1)
        edge = size.kthvalue(size.numel() - kept + 1).values
        return torch.where(change.abs() >= edge, change, 0.0)


@dataclass(frozen=True, slots=True)
class LoraMerge:
    """An adapter of PEFT's form added to its base: W + scale * B @ A. The sources are the base and the adapter.

    Source: Hu et al., "LoRA", 2021, section 4.1; names and `use_rslora` as PEFT saves them.

    Args:
        adapter_config: what `adapter_config.json` says.
    """

    adapter_config: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        told = {
            key: self.adapter_config.get(key)
            for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
        }
        return f"lora-merge({told})"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        if len(sources) != 2:
            raise PlanError(f"lora-merge takes a base and an adapter, not {len(sources)} sources")
        adapter = {spec.name: spec for spec in specs_of(sources[1])}
        base, found, used = specs_of(sources[0]), [], set[str]()
        for spec in base:
            module = spec.name.removesuffix(".weight")
            names = [f"{module}.lora_{side}.weight" for side in "AB"]
            pair = [adapter.get(f"base_model.model.{name}") or adapter.get(name) for name in names]
            if None in pair:
                found.append(as_it_is(0, spec))
                continue
            a, b = (one for one in pair if one is not None)
            if len(spec.shape) != 2 or spec.shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
                raise PlanError(f"the adapter's {list(b.shape)} @ {list(a.shape)} do not fit", tensor=spec.name)
            used |= {a.name, b.name}
            inputs = (whole(0, spec), Input(source=1, spec=a, box=Box.full(a.shape), at=None), whole(1, b))
            found.append(Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1))
        if unused := sorted(adapter.keys() - used):
            shown = ", ".join(unused[:_SHOWN])
            raise PlanError(f"{len(unused)} tensors of the adapter have no place in the base: {shown}")
        return found

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        weight, *pair = (tensor for tensor in inputs if tensor is not None)
        if not pair:
            return [weight]
        a, b = pair
        module = recipe.outputs[0].spec.name.removesuffix(".weight")
        merged = weight.float().add_(b.float() @ a.float(), alpha=self._scale(module, a.shape[0]))
        return [merged.to(weight.dtype)]

    def _scale(self, module: str, rank: int) -> float:
        alpha = self.adapter_config.get("lora_alpha", rank)
        for pattern, other in (self.adapter_config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = other
                break
        return float(alpha) / (rank**0.5 if self.adapter_config.get("use_rslora") else rank)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Operation.config`."""
        return config
