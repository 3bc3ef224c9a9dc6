"""Reshards tensor-parallel checkpoints from n ranks to m ranks. Each tensor is read once for all output ranks.

The input is one source for each rank, with the same names and shapes. The output is m weight sets, or one whole
checkpoint. `plan.tensor_parallel` defines the rule for each name.

For example, a fused tensor of parts a and b, with [a0 a1|b0] on rank 0 and [a2 a3|b1] on rank 1, becomes
[a0 a1 a2 a3|b0 b1]. Each tensor has one recipe with m outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PlanError
from penstock.plan.tensor_parallel import FORMS, SplitRule, TensorParallel
from penstock.types import Box, TensorTable
from penstock_convert.operations.merge import same_everywhere
from penstock_convert.operations.operation import Unchanged, all_of, whole
from penstock_convert.plan.tasks import Input, Recipe, Spec, TaskOutput

if TYPE_CHECKING:
    import torch

LAYOUTS = ("directories", "vllm")
"""Layouts for several weight sets. `directories` has one weight set in each `rank-00000-of-00002/`. `vllm` has all sets
in one directory, with the names that vLLM's loader `sharded_state` expects. Source: vLLM 0.11, sharded_state_loader.py,
DEFAULT_PATTERN."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Reshard(Unchanged):
    """Reshards tensor-parallel checkpoints, as described in the module's docstring.

    Args:
        to: number of ranks in the result. 1 means a whole checkpoint.
        rules: pairs of a pattern and one of `plan.tensor_parallel.FORMS`, with precedence over the built-in rules.
        layout: one of `LAYOUTS`.
        heads: total numbers of query heads and of key heads, which determine the parts of a fused `qkv_proj`. If there
            are fewer key heads than ranks, several ranks hold the same key head.

    Raises:
        ConfigError: an option is invalid.
    """

    to: int
    rules: tuple[tuple[str, str], ...] = ()
    layout: str = LAYOUTS[0]
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.to, int) or self.to < 1 or self.layout not in LAYOUTS:
            hint = f"`to` must be at least 1, and `layout` one of {', '.join(LAYOUTS)}"
            raise ConfigError(f"reshard: invalid options to={self.to!r}, layout={self.layout!r}", hint=hint)
        # Create `_parallel` now, so that an invalid rule raises here instead of at the first matching tensor.
        _ = self._parallel

    @property
    def _parallel(self) -> TensorParallel:
        return TensorParallel(self.rules, self.heads)

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        options = [*(f"{a}={b}" for a, b in self.rules), *([f"heads {self.heads}"] if self.heads else [])]
        return f"reshard to {self.to} in {self.layout}" + (f" ({', '.join(options)})" if options else "")

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`.

        Raise PlanError for a tensor that no rule matches, and for a tensor that its rule cannot split.
        """
        named, parallel = same_everywhere(sources, "reshard"), self._parallel
        # List all unknown names in one error. A scalar needs no rule, because it is never split.
        if unknown := [specs[0].name for specs in named if parallel.how(specs[0].name) is None and specs[0].shape]:
            shown = ", ".join(unknown[:_SHOWN])
            hint = f"pass rules, each with a pattern and one of: {FORMS}"
            raise PlanError(f"there is no rule for splitting {len(unknown)} tensors: {shown}", hint=hint)
        shapes = {specs[0].name: specs[0].shape for specs in named}
        recipes = []
        for specs in named:
            rule = parallel.rule_of(specs[0].name, specs[0].shape)
            if rule.dim is None:
                recipes.append(self._replicated(specs))
                continue
            parallel.check(specs[0].name, specs[0].shape, rule, shapes, to=self.to, of=len(specs))
            recipes.append(self._by_rows(specs, rule) if rule.dim == 0 else self._by_columns(specs, rule))
        return recipes

    def _outputs(self, spec: Spec, shape: tuple[int, ...], per: int = 1) -> tuple[TaskOutput, ...]:
        outputs = []
        for rank in range(self.to):
            group = f"rank-{rank:05d}-of-{self.to:05d}" if self.to > 1 else ""
            group = f"model-rank-{rank}-part-*" if self.layout == "vllm" else group
            outputs.append(TaskOutput(spec=Spec(name=spec.name, dtype=spec.dtype, shape=shape, group=group), per=per))
        return tuple(outputs)

    def _replicated(self, specs: Sequence[Spec]) -> Recipe:
        """Return the recipe for a tensor that is equal on all ranks. The recipe reads and compares all sources."""
        spec = specs[0]
        if not spec.shape or math.prod(spec.shape[1:]) * spec.dtype.bits % 8:
            inputs = tuple(all_of(i, rank_spec) for i, rank_spec in enumerate(specs))
            return Recipe(outputs=self._outputs(spec, spec.shape, 0), inputs=inputs, num_rows=1, align=0)
        inputs = tuple(whole(i, rank_spec) for i, rank_spec in enumerate(specs))
        return Recipe(outputs=self._outputs(spec, spec.shape), inputs=inputs, num_rows=spec.shape[0])

    def _by_rows(self, specs: Sequence[Spec], rule: SplitRule) -> Recipe:
        """Return a recipe that cuts by rows. Inputs are sorted by output rank, then by part, then by source rank.

        The last inputs are copies of heads in other sources, which are compared with the first copy.
        """
        spec, ranks = specs[0], len(specs)
        lengths = rule.lengths(spec.shape[0], ranks)
        # Numbers of shares into which sources and outputs divide each part. Several ranks may have the same share.
        source_shares, output_shares = rule.num_shares(ranks), rule.num_shares(self.to)
        source_rows = [int(length / shares) for length, shares in zip(lengths, source_shares, strict=True)]
        output_rows = [int(length / shares) for length, shares in zip(lengths, output_shares, strict=True)]
        inputs, copies = [], []
        for rank in range(self.to):
            for part, number in enumerate(rule.share_of(rank, self.to)):
                here, there, before = source_rows[part], output_rows[part], sum(source_rows[:part])
                for share in range(source_shares[part]):
                    low, high = max(number * there, share * here), min((number + 1) * there, (share + 1) * here)
                    if low < high:
                        i, after = (-(-one * ranks // source_shares[part]) for one in (share, share + 1))
                        first = before - share * here
                        start = (first + low, *(0,) * (len(spec.shape) - 1))
                        box = Box(start=start, stop=(first + high, *spec.shape[1:]))
                        at = sum(output_rows[:part]) + low - number * there
                        inputs.append(Input(source=i, spec=specs[i], box=box, at=at))
                        # Compare a share only once, although several outputs may have the same share.
                        if rank == -(-number * self.to // output_shares[part]):
                            copies += [Input(source=j, spec=specs[j], box=box, at=at) for j in range(i + 1, after)]
        rows = sum(output_rows)
        outputs = self._outputs(spec, (rows, *spec.shape[1:]))
        return Recipe(outputs=outputs, inputs=(*inputs, *copies), num_rows=rows)

    def _by_columns(self, specs: Sequence[Spec], rule: SplitRule) -> Recipe:
        """Return a recipe that splits along a dim other than the first. An output row needs that row of all sources."""
        spec, dim = specs[0], rule.dim or 0
        shape = (*spec.shape[:dim], spec.shape[dim] * len(specs) // self.to, *spec.shape[dim + 1 :])
        inputs = tuple(whole(i, rank_spec) for i, rank_spec in enumerate(specs))
        return Recipe(outputs=self._outputs(spec, shape), inputs=inputs, num_rows=shape[0])

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`. Raise PlanError if ranks have different copies of a tensor or a head."""
        spec = recipe.inputs[0].spec
        rule = self._parallel.rule_of(spec.name, spec.shape)
        # Process the tensors as bytes if torch lacks operators for their dtype, and restore the dtype at the end.
        tensors = [None if tensor is None else _plain(tensor) for tensor in inputs]
        if rule.dim == 0:
            results = self._shared(recipe, tensors)
        else:
            present = [tensor for tensor in tensors if tensor is not None]
            results = _columns(present, rule.dim, rule.parts, self.to) if rule.dim else self._same(present, spec.name)
        dtype = next(tensor.dtype for tensor in inputs if tensor is not None)
        return [tensor.view(dtype) for tensor in results]

    def _shared(self, recipe: Recipe, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the rows of each output. Raise PlanError if copies of a head differ."""
        import torch

        taken: dict[tuple[tuple[int, ...], int | None], dict[int, torch.Tensor]] = {}
        shares: list[list[torch.Tensor]] = [[] for _ in recipe.outputs]
        # `_by_rows` lists the inputs of each output in order, and their rows add up to the rows of the output.
        ends = accumulate(rank_input.box.shape[0] for rank_input in recipe.inputs)
        for rank_input, end, tensor in zip(recipe.inputs, ends, tensors, strict=True):
            if tensor is None:
                continue
            here = taken.setdefault((rank_input.box.start, rank_input.at), {})
            if end <= len(recipe.outputs) * recipe.num_rows:
                shares[(end - 1) // recipe.num_rows].append(tensor)
                here[rank_input.source] = tensor
                continue
            # The closest earlier rank whose rows were used has the same head.
            holder = max(source for source in here if source < rank_input.source)
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), here[holder].reshape(-1).view(torch.uint8)):
                message = f"ranks {holder} and {rank_input.source} have the same head but with different bytes"
                hint = "pass the ranks of one model, in order"
                raise PlanError(message, tensor=rank_input.spec.name, hint=hint)
        return [torch.cat(share) for share in shares]

    def _same(self, ranks: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return the same tensor for every rank. Raise PlanError if the sources have different bytes."""
        import torch

        # Compare bytes, because NaN is not equal to itself and -0.0 is equal to 0.0.
        first = ranks[0].reshape(-1).view(torch.uint8)
        for rank, tensor in enumerate(ranks[1:], 1):
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), first):
                message = f"the tensor must be the same on every rank, but ranks 0 and {rank} have different bytes"
                raise PlanError(message, tensor=name, hint="pass a rule for this tensor")
        return [ranks[0]] * self.to


def _columns(ranks: Sequence[torch.Tensor], dim: int, parts: Sequence[int], count: int) -> list[torch.Tensor]:
    """Join each part from all sources along a dim, and return the shares of `count` ranks."""
    import torch

    unit = ranks[0].shape[dim] // sum(parts)
    split = [tensor.split([unit * part for part in parts], dim) for tensor in ranks]
    shares = [torch.cat(part, dim).chunk(count, dim) for part in zip(*split, strict=True)]
    return [torch.cat(share, dim) for share in zip(*shares, strict=True)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return one-byte elements as U8, because some torch operators do not support other 8-bit dtypes."""
    import torch

    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
