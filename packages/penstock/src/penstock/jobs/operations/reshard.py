"""Resharding of tensor-parallel checkpoints from n ranks to m: each tensor is read once for all its outputs.

In: n sources, one a rank, of the same names and shapes. Out: m weight sets, or one that is whole.
Not here: the rule for each name (`plan.tensor_parallel`); the files of each set (`plan.tasks`, `storage.output`);
heads, which `spec.completed` reads from `config.json`.

    dim 0, parts 2:1   rank 0 [a0 a1|b0]  rank 1 [a2 a3|b1]   -- one recipe, m outputs -->   [a0 a1 a2 a3|b0 b1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operations.merge import same_everywhere
from penstock.jobs.operations.operation import Unchanged, all_of, whole
from penstock.plan.tasks import Input, Recipe, Spec, TaskOutput
from penstock.plan.tensor_parallel import FORMS, SplitRule, TensorParallel
from penstock.types import Box, TensorTable

if TYPE_CHECKING:
    import torch

LAYOUTS = ("directories", "vllm")
"""Layouts of several sets: `rank-00000-of-00002/`, each a weight set; or all in one directory, under the names that
vLLM's loader `sharded_state` expects. Source: vLLM 0.11, sharded_state_loader.py, DEFAULT_PATTERN."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Reshard(Unchanged):
    """Reshard tensor-parallel checkpoints: see the module.

    Args:
        to: ranks of the result; 1: a checkpoint that is whole.
        rules: used before the built-in ones: pairs of a pattern and one of `plan.tensor_parallel.FORMS`.
        layout: one of `LAYOUTS`.
        heads: total number of query heads and of key heads: they give the parts of a fused `qkv_proj`. If there are
            fewer key heads than ranks, several ranks have the same head.

    Raises:
        ConfigError: an option has no valid value.
    """

    to: int
    rules: tuple[tuple[str, str], ...] = ()
    layout: str = LAYOUTS[0]
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.to, int) or self.to < 1 or self.layout not in LAYOUTS:
            hint = f"layout is one of {', '.join(LAYOUTS)}"
            raise ConfigError(f"reshard: to {self.to} ranks in the layout {self.layout!r}", hint=hint)
        # Made only to be checked: a wrong rule should not wait for the first tensor that it matches.
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
        """See `Operation.recipes`. PlanError also if tensors have no rule (it lists them), or cannot be split by it."""
        named, parallel = same_everywhere(sources, "reshard"), self._parallel
        # All unknown names at once. A scalar needs no rule: it cannot be split.
        if unknown := [specs[0].name for specs in named if parallel.how(specs[0].name) is None and specs[0].shape]:
            shown = ", ".join(unknown[:_SHOWN])
            hint = f"give rules, each a pattern and one of: {FORMS}"
            raise PlanError(f"no rule says how to split {len(unknown)} tensors: {shown}", hint=hint)
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
        """Return the outputs of all ranks, in the groups of the layout."""
        outputs = []
        for rank in range(self.to):
            group = f"rank-{rank:05d}-of-{self.to:05d}" if self.to > 1 else ""
            group = f"model-rank-{rank}-part-*" if self.layout == "vllm" else group
            outputs.append(TaskOutput(spec=Spec(name=spec.name, dtype=spec.dtype, shape=shape, group=group), per=per))
        return tuple(outputs)

    def _replicated(self, specs: Sequence[Spec]) -> Recipe:
        """Return the recipe of a tensor that every rank has; all sources are read, to compare them."""
        spec = specs[0]
        if not spec.shape or math.prod(spec.shape[1:]) * spec.dtype.bits % 8:
            inputs = tuple(all_of(i, rank_spec) for i, rank_spec in enumerate(specs))
            return Recipe(outputs=self._outputs(spec, spec.shape, 0), inputs=inputs, num_rows=1, align=0)
        inputs = tuple(whole(i, rank_spec) for i, rank_spec in enumerate(specs))
        return Recipe(outputs=self._outputs(spec, spec.shape), inputs=inputs, num_rows=spec.shape[0])

    def _by_rows(self, specs: Sequence[Spec], rule: SplitRule) -> Recipe:
        """Return a recipe that cuts by rows: its inputs are ordered by output rank, then part, then source rank.

        After these are the copies of heads that several sources have, to be compared with the first one.
        """
        spec, ranks = specs[0], len(specs)
        lengths = rule.lengths(spec.shape[0], ranks)
        # Rows of each part in one source, and in one output. Several sources or outputs may have the same share.
        held, wanted = rule.num_shares(ranks), rule.num_shares(self.to)
        have = [int(length / shares) for length, shares in zip(lengths, held, strict=True)]
        give = [int(length / shares) for length, shares in zip(lengths, wanted, strict=True)]
        inputs, copies = [], []
        for rank in range(self.to):
            for part, number in enumerate(rule.share_of(rank, self.to)):
                here, there, before = have[part], give[part], sum(have[:part])
                for share in range(held[part]):
                    low, high = max(number * there, share * here), min((number + 1) * there, (share + 1) * here)
                    if low < high:
                        i, after = (-(-one * ranks // held[part]) for one in (share, share + 1))
                        first = before - share * here
                        start = (first + low, *(0,) * (len(spec.shape) - 1))
                        box = Box(start=start, stop=(first + high, *spec.shape[1:]))
                        at = sum(give[:part]) + low - number * there
                        inputs.append(Input(source=i, spec=specs[i], box=box, at=at))
                        # Once is enough: outputs may repeat the share too.
                        if rank == -(-number * self.to // wanted[part]):
                            copies += [Input(source=j, spec=specs[j], box=box, at=at) for j in range(i + 1, after)]
        rows = sum(give)
        outputs = self._outputs(spec, (rows, *spec.shape[1:]))
        return Recipe(outputs=outputs, inputs=(*inputs, *copies), num_rows=rows)

    def _by_columns(self, specs: Sequence[Spec], rule: SplitRule) -> Recipe:
        """Return a recipe that cuts along another dim: each row of an output needs that row of every source."""
        spec, dim = specs[0], rule.dim or 0
        shape = (*spec.shape[:dim], spec.shape[dim] * len(specs) // self.to, *spec.shape[dim + 1 :])
        inputs = tuple(whole(i, rank_spec) for i, rank_spec in enumerate(specs))
        return Recipe(outputs=self._outputs(spec, shape), inputs=inputs, num_rows=shape[0])

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`. PlanError where ranks differ in what each of them should have."""
        spec = recipe.inputs[0].spec
        rule = self._parallel.rule_of(spec.name, spec.shape)
        # As bytes where torch lacks operators for the dtype; given their dtype back at the end.
        tensors = [None if tensor is None else _plain(tensor) for tensor in inputs]
        if rule.dim == 0:
            results = self._shared(recipe, tensors)
        else:
            present = [tensor for tensor in tensors if tensor is not None]
            results = _columns(present, rule.dim, rule.parts, self.to) if rule.dim else self._same(present, spec.name)
        dtype = next(tensor.dtype for tensor in inputs if tensor is not None)
        return [tensor.view(dtype) for tensor in results]

    def _shared(self, recipe: Recipe, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the rows of each output, whose inputs follow each other. PlanError if copies of a head differ."""
        import torch

        taken: dict[tuple[tuple[int, ...], int | None], dict[int, torch.Tensor]] = {}
        shares: list[list[torch.Tensor]] = [[] for _ in recipe.outputs]
        # `_by_rows` lists the inputs output by output, and those of one sum to its rows: so the sum tells the output.
        ends = accumulate(rank_input.box.shape[0] for rank_input in recipe.inputs)
        for rank_input, end, tensor in zip(recipe.inputs, ends, tensors, strict=True):
            if tensor is None:
                continue
            here = taken.setdefault((rank_input.box.start, rank_input.at), {})
            if end <= len(recipe.outputs) * recipe.num_rows:
                shares[(end - 1) // recipe.num_rows].append(tensor)
                here[rank_input.source] = tensor
                continue
            # The nearest rank before it whose rows were taken has the same head.
            holder = max(source for source in here if source < rank_input.source)
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), here[holder].reshape(-1).view(torch.uint8)):
                message = f"rank {rank_input.source} has other bytes in a head that rank {holder} has too"
                hint = "are these the ranks of one model, in order?"
                raise PlanError(message, tensor=rank_input.spec.name, hint=hint)
        return [torch.cat(share) for share in shares]

    def _same(self, ranks: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return the tensor for every rank. PlanError if the sources differ in it."""
        import torch

        # As bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
        first = ranks[0].reshape(-1).view(torch.uint8)
        for rank, tensor in enumerate(ranks[1:], 1):
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), first):
                message = f"the tensor must be the same on every rank, but rank {rank} has other bytes than rank 0"
                raise PlanError(message, tensor=name, hint="give a rule for it")
        return [ranks[0]] * self.to


def _columns(ranks: Sequence[torch.Tensor], dim: int, parts: Sequence[int], count: int) -> list[torch.Tensor]:
    """Return the shares of `count` ranks along a dim, each part joined from all sources and cut by itself."""
    import torch

    unit = ranks[0].shape[dim] // sum(parts)
    split = [tensor.split([unit * part for part in parts], dim) for tensor in ranks]
    shares = [torch.cat(part, dim).chunk(count, dim) for part in zip(*split, strict=True)]
    return [torch.cat(share, dim) for share in zip(*shares, strict=True)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as bytes if an element is one byte: not every torch operator supports dtypes of eight bits."""
    import torch

    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
