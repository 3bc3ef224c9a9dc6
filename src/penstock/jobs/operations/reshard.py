"""Resharding of tensor-parallel checkpoints from n ranks to m: each tensor is read once for all its outputs.

In: n sources, one a rank, of the same names and shapes; a rule for each name. Out: m weight sets, or one that is whole.
Not here: the files of each set (`plan.tasks`, `storage.output`); heads, which `spec.completed` reads from
`config.json`.

    dim 0, parts 2:1   rank 0 [a0 a1|b0]  rank 1 [a2 a3|b1]   -- one recipe, m outputs -->   [a0 a1 a2 a3|b0 b1]
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PlanError
from penstock.jobs.operations.merge import same_everywhere
from penstock.jobs.operations.operation import Unchanged, all_of, whole
from penstock.plan.tasks import Input, Output, Recipe, Spec
from penstock.types import Box, TensorTable

if TYPE_CHECKING:
    import torch

LAYOUTS = ("directories", "vllm")
"""Layouts of several sets: `rank-00000-of-00002/`, each a weight set; or all in one directory, under the names that
vLLM's loader `sharded_state` expects. Source: vLLM 0.11, sharded_state_loader.py, DEFAULT_PATTERN."""
_HEADS = "heads"
_SHOWN = 5
_FP8_BLOCK = 128

RULES: tuple[tuple[str, str], ...] = (
    (r"(norm|rotary|inv_freq|router|\.gate\.|_bias$|q_a_proj|kv_a_proj|g_idx)", "replicate"),
    (r"\.qkv_proj\.", "0:heads"),
    (r"\.gate_up_proj\.", "0:1,1"),
    (r"\.w13_(weight|bias)", "1:1,1"),
    (r"\.w2_weight", "2"),
    (r"\.([qkv]|q_b|kv_b|gate|up)_proj\.", "0"),
    (r"(embed_tokens|lm_head|wte|fc1|\.w1|\.w3)\.", "0"),
    (r"(o_proj|down_proj|out_proj|fc2|\.w2)\.bias$", "replicate"),
    (r"(o_proj|down_proj|out_proj|fc2|\.w2)\.", "1"),
)
"""Pattern found in a name -> rule; the first match counts. Names and dims as of transformers' Llama, Qwen and
DeepSeek models, their fused and expert tensors as of vLLM's; column-parallel layers are cut by rows, row-parallel ones
by columns, whose bias every rank has. Source: Shoeybi et al., "Megatron-LM", 2019, section 3."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule that splits a tensor between ranks.

    `dim` None: every rank has all of it. `parts`: relative sizes of the tensors fused along `dim`; each is split
    separately.
    """

    dim: int | None
    parts: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Reshard(Unchanged):
    """Reshard tensor-parallel checkpoints: see the module.

    Args:
        to: ranks of the result; 1: a checkpoint that is whole.
        rules: used before `RULES`: pairs of a pattern and `replicate`, a dim, or `dim:parts` (`0:4,1,1`).
        layout: one of `LAYOUTS`.
        heads: total number of query heads and of key heads: they give the parts of a fused `qkv_proj`, and limit the
            number of ranks.

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
        for pattern, how in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{pattern!r} is not a pattern: {error}") from error
            # Parsed only to be checked: a wrong rule should not wait for the first tensor that it matches.
            self._rule(str(how), "")

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        options = [*(f"{a}={b}" for a, b in self.rules), *([f"heads {self.heads}"] if self.heads else [])]
        return f"reshard to {self.to} in {self.layout}" + (f" ({', '.join(options)})" if options else "")

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`. PlanError also if tensors have no rule (it lists them), or cannot be split by it."""
        named = same_everywhere(sources, "reshard")
        # All unknown names at once. A scalar needs no rule: it cannot be split.
        if unknown := [specs[0].name for specs in named if self._how(specs[0].name) is None and specs[0].shape]:
            shown = ", ".join(unknown[:_SHOWN])
            hint = "give rules: a pattern and a dim, dim:parts or replicate"
            raise PlanError(f"no rule says how to split {len(unknown)} tensors: {shown}", hint=hint)
        shapes = {specs[0].name: specs[0].shape for specs in named}
        recipes = []
        for specs in named:
            rule = self._rule_of(specs[0])
            if rule.dim is None:
                recipes.append(self._replicated(specs))
                continue
            self._check(specs, rule, shapes)
            recipes.append(self._by_rows(specs, rule) if rule.dim == 0 else self._by_columns(specs, rule))
        return recipes

    def _how(self, name: str) -> str | None:
        """Return the text of the rule for a name; None: there is none."""
        return next((str(how) for pattern, how in (*self.rules, *RULES) if re.search(pattern, name)), None)

    def _rule_of(self, spec: Spec) -> Rule:
        """Return the rule for a tensor; one without the rule's dim, or without elements, goes to every rank."""
        rule, shape = self._rule(self._how(spec.name) or "replicate", spec.name), spec.shape
        if rule.dim is None or rule.dim >= len(shape) or not math.prod(shape):
            return Rule(None)
        # Row-parallel: a scale for each row of all columns is every rank's.
        return Rule(None) if rule.dim and shape[rule.dim] == 1 else rule

    def _rule(self, how: str, name: str) -> Rule:
        """Parse the text of a rule, for the tensor `name`; empty: only check it. ConfigError, PlanError."""
        if how == "replicate":
            return Rule(None)
        dim, _, parts = how.partition(":")
        if parts == _HEADS:
            if not self.heads and name:
                hint = "give heads=Q,KV, or a rule with parts"
                raise PlanError(
                    "the number of heads is not known, so this fused tensor cannot be split", tensor=name, hint=hint
                )
            queries, keys = self.heads or (1, 1)
            # In lowest terms: a rank has some of the heads, and its rows need not divide by the number of all of them.
            shared = math.gcd(queries, keys) or 1
            return Rule(int(dim), (queries // shared, keys // shared, keys // shared))
        try:
            rule = Rule(int(dim), tuple(int(part) for part in parts.split(",")) if parts else (1,))
        except ValueError as error:
            raise ConfigError(f"reshard: {how!r} is not a rule", hint="replicate, a dim, or dim:parts") from error
        if rule.dim is None or rule.dim < 0 or min(rule.parts) < 1:
            raise ConfigError(f"reshard: {how!r} is not a rule", hint="replicate, a dim, or dim:parts")
        return rule

    def _check(self, specs: Sequence[Spec], rule: Rule, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise PlanError if a split would cut through an element, a head, or a block of a block format."""
        spec, dim, ranks = specs[0], rule.dim or 0, len(specs)
        size, unit = spec.shape[dim], sum(rule.parts)
        # Each rank must get equal shares of each fused part, on both sides.
        if size % unit or any(size * ranks // unit * part % self.to for part in rule.parts):
            message = (
                f"{size} on dim {dim} of {ranks} ranks, parts {rule.parts}, cannot be divided among {self.to} ranks"
            )
            raise PlanError(message, tensor=spec.name, hint="a rule for it: another dim, parts, or replicate")
        if self.heads and re.search(r"\.([qkv]|qkv)_proj\.", spec.name):
            heads = self.heads[0] if ".q_proj." in spec.name else self.heads[-1]
            if heads % self.to or heads % ranks:
                message = f"{heads} heads cannot be divided among {self.to} ranks, or were not among {ranks}"
                raise PlanError(message, tensor=spec.name, hint="heads that several ranks have are not supported")
        # A block of a block format has one scale: a cut through it would need the scale on two ranks.
        for suffix in ("_scale_inv", "_scale"):
            scales = shapes.get(spec.name + suffix)
            if scales is None or len(scales) <= dim or scales[dim] in (1, size):
                continue
            block = _FP8_BLOCK if suffix == "_scale_inv" else size // scales[dim]
            cuts = [size * ranks // unit * part // self.to for part in rule.parts] if self.to > 1 else []
            cuts += [size // unit * part for part in rule.parts] if ranks > 1 or len(rule.parts) > 1 else []
            if any(cut % block for cut in cuts):
                message = f"shares of {cuts} would cut through blocks of {block}"
                raise PlanError(message, tensor=spec.name, hint="dequantise first")

    def _outputs(self, spec: Spec, shape: tuple[int, ...], per: int = 1) -> tuple[Output, ...]:
        """Return the outputs of all ranks, in the groups of the layout."""
        outputs = []
        for rank in range(self.to):
            group = f"rank-{rank:05d}-of-{self.to:05d}" if self.to > 1 else ""
            group = f"model-rank-{rank}-part-*" if self.layout == "vllm" else group
            outputs.append(Output(spec=Spec(name=spec.name, dtype=spec.dtype, shape=shape, group=group), per=per))
        return tuple(outputs)

    def _replicated(self, specs: Sequence[Spec]) -> Recipe:
        """Return the recipe of a tensor that every rank has; all sources are read, to compare them."""
        spec = specs[0]
        if not spec.shape or math.prod(spec.shape[1:]) * spec.dtype.bits % 8:
            inputs = tuple(all_of(i, rank_spec) for i, rank_spec in enumerate(specs))
            return Recipe(outputs=self._outputs(spec, spec.shape, 0), inputs=inputs, num_rows=1, align=0)
        inputs = tuple(whole(i, rank_spec) for i, rank_spec in enumerate(specs))
        return Recipe(outputs=self._outputs(spec, spec.shape), inputs=inputs, num_rows=spec.shape[0])

    def _by_rows(self, specs: Sequence[Spec], rule: Rule) -> Recipe:
        """Return a recipe that cuts by rows: its inputs are ordered by output rank, then part, then source rank."""
        spec, ranks, unit = specs[0], len(specs), sum(rule.parts)
        # Rows of each part in one source, and in one output.
        have = [spec.shape[0] // unit * part for part in rule.parts]
        give = [rows * ranks // self.to for rows in have]
        inputs = []
        for rank in range(self.to):
            for part, (here, there) in enumerate(zip(have, give, strict=True)):
                for i, rank_spec in enumerate(specs):
                    low, high = max(rank * there, i * here), min((rank + 1) * there, (i + 1) * here)
                    if low < high:
                        first = sum(have[:part]) - i * here
                        start = (first + low, *(0,) * (len(rank_spec.shape) - 1))
                        box = Box(start=start, stop=(first + high, *rank_spec.shape[1:]))
                        inputs.append(
                            Input(source=i, spec=rank_spec, box=box, at=sum(give[:part]) + low - rank * there)
                        )
        rows = sum(give)
        return Recipe(outputs=self._outputs(spec, (rows, *spec.shape[1:])), inputs=tuple(inputs), num_rows=rows)

    def _by_columns(self, specs: Sequence[Spec], rule: Rule) -> Recipe:
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
        rule = self._rule_of(spec)
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
        """Return the rows of each output, whose inputs follow each other."""
        import torch

        shares: list[list[torch.Tensor]] = [[] for _ in recipe.outputs]
        # `_by_rows` lists the inputs output by output, and those of one sum to its rows: so the sum tells the output.
        ends = accumulate(rank_input.box.shape[0] for rank_input in recipe.inputs)
        for end, tensor in zip(ends, tensors, strict=True):
            if tensor is not None:
                shares[(end - 1) // recipe.num_rows].append(tensor)
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
