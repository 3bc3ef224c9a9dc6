"""Rules of tensor parallelism. The rules determine a rank's slices of each tensor from the tensor's name and shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.arguments import require_type
from penstock.errors import ConfigError, PlanError
from penstock.report import names_text
from penstock.types import Box

if TYPE_CHECKING:
    from fractions import Fraction

RULES: tuple[tuple[str, str], ...] = (
    (r"(norm|rotary|inv_freq|router|\.gate\.|(?<!\.w13)_bias$|q_a_proj|kv_a_proj|g_idx)", "replicate"),
    (r"\.qkv_proj\.", "0:heads"),
    (r"\.gate_up_proj\.", "0:1,1"),
    (r"\.w13_(weight|bias)", "1:1,1"),
    (r"\.w2_weight", "2"),
    (r"\.q_proj\.", "0:q"),
    (r"\.[kv]_proj\.", "0:kv"),
    (r"\.(q_b|kv_b|gate|up)_proj\.", "0"),
    (r"(embed_tokens|lm_head|wte|fc1|\.w1|\.w3)\.", "0"),
    (r"(o_proj|down_proj|out_proj|fc2|\.w2)\.bias$", "replicate"),
    (r"(o_proj|down_proj|out_proj|fc2|\.w2)\.", "1"),
)
"""Pairs of a pattern to search for in a name, and a rule. The first match applies. Names and dims follow transformers'
Llama, Qwen and DeepSeek models, and vLLM for fused tensors and experts. Column-parallel layers are split by rows.
Row-parallel layers are split by columns, and every rank gets the bias. Source: Shoeybi et al., "Megatron-LM", 2019,
section 3."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a configuration contains the language model's configuration. Source: transformers, InternVL,
DeepSeek-VL2, Qwen-Omni (whose `thinker_config` has a `text_config`)."""
_QUERY_HEADS = ("num_attention_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
"""Keys for the number of key heads. Source: transformers, Falcon, ChatGLM. `multi_query` means one key head."""
FORMS = "replicate, a dim, dim:parts (0:4,1,1), or of heads 0:q, 0:kv, 0:heads"
"""Texts that are valid as a rule."""
_PAIRS = f"pairs of a pattern and one of: {FORMS}"
_HEADS = "two whole numbers, of query heads and of key heads: (32, 8)"
_OF_HEADS = ("q", "kv", "heads")
_OTHER_ROWS = re.compile(
    r"\.(qweight|qzeros|weight_shape)$|\.weight\.(nested_)?(absmax|quant_map)$|\.weight\.quant_state\."
)
"""Names of quantised tensors whose rows differ from those of the weight, so that no built-in rule fits. GPTQ and AWQ
store input features as rows, bitsandbytes stores a 4-bit weight as one column, and the values of `weight_shape` are
sizes."""
_SCALE = re.compile(r"_(scale|scale_inv|scale_2|global_scale|zero_point)$|\.scale$")
_FP8_BLOCK = 128


class SplitRule(msgspec.Struct, frozen=True):
    """Rule that splits a tensor between ranks.

    Attributes:
        dim: dim along which the tensor is split. None means that every rank gets the whole tensor.
        parts: relative sizes of the tensors that are fused along `dim`. Each of these tensors is split separately.
        heads: number of heads in each part, or 0 if unknown. With fewer key heads than ranks, several ranks get the
            same head, as in vLLM's QKVParallelLinear.
    """

    dim: int | None
    parts: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = ()

    def num_shares(self, num_ranks: int) -> tuple[int, ...]:
        """Return, for each part, the number of different shares among the ranks."""
        heads = self.heads or (0,) * len(self.parts)
        return tuple(min(num_ranks, count) if count else num_ranks for count in heads)

    def share_of(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return, for each part, the number of the share that belongs to a rank."""
        return tuple(rank * shares // num_ranks for shares in self.num_shares(num_ranks))

    def lengths(self, size: int, num_ranks: int) -> tuple[Fraction, ...]:
        """Return the length of each whole part along `dim`, computed from the size that one of the ranks holds."""
        from fractions import Fraction

        held = sum(Fraction(part, shares) for part, shares in zip(self.parts, self.num_shares(num_ranks), strict=True))
        return tuple(part * Fraction(size) / held for part in self.parts)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rules for the tensors of one model. A malformed rule raises ConfigError.

    Args:
        rules: pairs of a pattern and one of `FORMS`, which are checked before `RULES`.
        heads: total number of query heads and of key heads. Empty means unknown.
    """

    rules: tuple[tuple[str, str], ...] = ()
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for pattern, how in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error
            # Report a malformed rule now, and not only at the first tensor that it matches.
            self._parsed(str(how), "")

    def how(self, name: str) -> str | None:
        """Return the text of the rule for a name, or None."""
        rules = self.rules if _OTHER_ROWS.search(name) else (*self.rules, *RULES)
        return next((str(how) for pattern, how in rules if re.search(pattern, name)), None)

    def rule_of(self, name: str, shape: Sequence[int]) -> SplitRule:
        """Return the rule for a tensor. A tensor without elements, or without the rule's dim, goes to every rank.

        Raises PlanError if the tensor is fused from an unknown number of heads.
        """
        rule = self._parsed(self.how(name) or "replicate", name)
        if rule.dim is None or rule.dim >= len(shape) or not math.prod(shape):
            return SplitRule(None)
        # A scale for the whole dim goes to every rank: a per-tensor scale, or the row scales of a row-parallel layer.
        is_whole = shape[rule.dim] == 1 and (rule.dim > 0 or bool(_SCALE.search(name)))
        return SplitRule(None) if is_whole else rule

    def _parsed(self, how: str, name: str) -> SplitRule:
        """Parse the text of a rule for the tensor `name`. With an empty `name`, only check the text."""
        if how == "replicate":
            return SplitRule(None)
        dim, _, parts = how.partition(":")
        try:
            if parts in _OF_HEADS and int(dim) == 0:
                return self._of_heads(parts, name)
            rule = SplitRule(int(dim), tuple(int(part) for part in parts.split(",")) if parts else (1,))
        except ValueError as error:
            raise ConfigError(f"{how!r} is not a tensor-parallel rule", hint=f"valid rules: {FORMS}") from error
        if rule.dim is None or rule.dim < 0 or min(rule.parts) < 1:
            raise ConfigError(f"{how!r} is not a tensor-parallel rule", hint=f"valid rules: {FORMS}")
        return rule

    def _of_heads(self, kind: str, name: str) -> SplitRule:
        queries, keys = self.heads or (0, 0)
        if kind != "heads":
            return SplitRule(0, (1,), (queries if kind == "q" else keys,))
        if not self.heads and name:
            message = "this fused tensor cannot be split, because the number of heads is unknown"
            raise PlanError(message, tensor=name, hint="pass heads=Q,KV, or a rule with parts")
        return SplitRule(0, (queries or 1, keys or 1, keys or 1), (queries, keys, keys))

    def check(
        self,
        name: str,
        shape: Sequence[int],
        rule: SplitRule,
        shapes: Mapping[str, Sequence[int]],
        *,
        to: int,
        of: int = 1,
    ) -> None:
        """Raise PlanError if a split would cut an element, a head, or a block of a block format.

        Args:
            shape: shape of the tensor on one of the `of` ranks that now hold the tensor.
            shapes: shapes of all tensors on that rank, by name.
            to: number of ranks among which the tensor is split.
        """
        if rule.dim is None:
            return
        size = shape[rule.dim]
        for heads in rule.heads:
            # With more ranks than heads, each head goes to the same number of ranks. Otherwise each rank gets the same
            # number of heads.
            if heads and any(heads % ranks and (ranks % heads or heads == self.heads[0]) for ranks in (to, of)):
                message = f"{heads} heads cannot be divided among {to} ranks" + (f", or {of}" if of > 1 else "")
                hint = "the ranks must divide the query heads, and divide the key heads or be a multiple of them"
                raise PlanError(message, tensor=name, hint=hint)
        self._check_heads(name, shape, rule, shapes, to=to, of=of)
        lengths = rule.lengths(size, of)
        after = [length / shares for length, shares in zip(lengths, rule.num_shares(to), strict=True)]
        held = [length / shares for length, shares in zip(lengths, rule.num_shares(of), strict=True)]
        if any(length.denominator > 1 for length in (*after, *held)):
            parts = f"dim {rule.dim} of size {size} on {of} ranks, parts {rule.parts},"
            hint = "add a rule for this tensor with a different dim, with parts, or with replicate"
            raise PlanError(f"{parts} cannot be divided among {to} ranks", tensor=name, hint=hint)
        # A block of a block format has one scale. If the block were cut, two ranks would require the scale.
        for suffix in ("_scale_inv", "_scale"):
            scales = shapes.get(name + suffix)
            if scales is None or len(scales) <= rule.dim or scales[rule.dim] in (1, size):
                continue
            block = _FP8_BLOCK if suffix == "_scale_inv" else size // scales[rule.dim]
            cuts = [*(after if to > 1 else []), *(held if of > 1 or len(rule.parts) > 1 else [])]
            if any(cut % block for cut in cuts):
                message = f"shares of {[int(cut) for cut in cuts]} would cut through blocks of {block}"
                raise PlanError(message, tensor=name, hint="dequantise the tensors first")

    def _check_heads(
        self, name: str, shape: Sequence[int], rule: SplitRule, shapes: Mapping[str, Sequence[int]], *, to: int, of: int
    ) -> None:
        if len(rule.heads) != 1 or not name.endswith(".weight") or max(to, of) == 1:
            return
        # Key heads are as wide as query heads. Value heads may have a different width.
        keys, queries = (re.sub(r"\.[kv]_proj\.", f".{one}_proj.", name) for one in "kq")
        if keys not in shapes or queries not in shapes or keys == queries:
            return
        if not rule.heads[0]:
            # With equal numbers of key and query heads, engines also split keys and queries equally.
            if shapes[keys][0] != shapes[queries][0]:
                message = "there are fewer key heads than query heads, and their numbers are unknown"
                raise PlanError(message, tensor=name, hint="pass heads=Q,KV, or add the rule 0 for this tensor")
            return
        if rule.heads[0] >= max(to, of):
            return
        (width,) = self._parsed("0:q", "").lengths(shapes[queries][0], of)
        (length,) = rule.lengths(shapes[keys][0], of)
        if width / self.heads[0] != length / self.heads[1]:
            heads = f"{self.heads[1]} and {self.heads[0]} heads"
            message = f"{length} rows of keys and {width} of queries do not match {heads}"
            raise PlanError(message, tensor=name, hint="add the rule 0 or replicate for this tensor")

    def boxes(self, name: str, shape: Sequence[int], rank: int, num_ranks: int) -> tuple[Box, ...]:
        """Return the boxes of an unsliced tensor that belong to a rank, joined along their dim. See `check`.

        Raises PlanError if no rule matches a tensor that is not a scalar. Also raises the errors of `rule_of`.
        """
        if self.how(name) is None and shape:
            raise PlanError("no rule says how to split this tensor", tensor=name, hint=f"add a rule: {FORMS}")
        rule = self.rule_of(name, shape)
        if rule.dim is None:
            return (Box.full(tuple(shape)),)
        boxes, begin = [], 0
        lengths, shares = rule.lengths(shape[rule.dim], 1), rule.num_shares(num_ranks)
        for length, count, number in zip(lengths, shares, rule.share_of(rank, num_ranks), strict=True):
            share = int(length) // count
            start, stop = [0] * len(shape), list(shape)
            start[rule.dim] = begin + number * share
            stop[rule.dim] = start[rule.dim] + share
            boxes.append(Box(start=tuple(start), stop=tuple(stop)))
            begin += int(length)
        return tuple(boxes)


def heads_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of query and key heads in a transformers configuration, or an empty tuple if it has none."""
    # Multimodal models store the numbers of the language model in a nested configuration.
    while isinstance(text := next((config[key] for key in _TEXT_CONFIGS if config.get(key)), None), Mapping):
        config = text
    queries = next((config[key] for key in _QUERY_HEADS if config.get(key)), None)
    is_shared = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    keys = next((config[key] for key in _KEY_HEADS if config.get(key)), 1 if is_shared else queries)
    # Some models have a different number of heads in each layer, which the rules do not support.
    return (queries, keys) if queries and isinstance(queries, int) and isinstance(keys, int) else ()


class TensorParallelRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of tensor parallelism, for `boxes=` of a load. Create it with `tensor_parallel`."""

    rank: int
    size: int
    rules: tuple[tuple[str, str], ...]
    heads: tuple[int, ...] | None

    def boxes(self, shapes: Mapping[str, Sequence[int]], heads: tuple[int, ...] = ()) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of each tensor that belong to this rank, joined along the dim in which they differ.

        `heads` from the model's configuration are used unless `tensor_parallel` was called with `heads`. Raises
        PlanError if a tensor has no rule, or its rule cannot split it.
        """
        parallel = TensorParallel(self.rules, heads if self.heads is None else self.heads)
        if unknown := [name for name, shape in shapes.items() if shape and parallel.how(name) is None]:
            hint = f"pass tensor_parallel(rules=) pairs of a pattern and one of: {FORMS}"
            raise PlanError(f"no rule says how to split {len(unknown)} tensors: {names_text(unknown)}", hint=hint)
        for name, shape in shapes.items():
            parallel.check(name, shape, parallel.rule_of(name, shape), shapes, to=self.size)
        return {name: parallel.boxes(name, shape, self.rank, self.size) for name, shape in shapes.items()}


def tensor_parallel(
    *, rank: int, size: int, rules: Sequence[tuple[str, str]] = (), heads: Sequence[int] | None = None
) -> TensorParallelRank:
    """Return the slices of a model that belong to one rank of tensor parallelism, for `boxes=` of `load` and `stream`.

    The rules are the same as in the conversion `reshard`. An invalid argument raises ConfigError.

    Args:
        rank: this rank, from 0.
        size: number of ranks.
        rules: pairs that are checked before the built-in rules. The first item is a pattern to search for in names. The
            second item is `replicate`, a dim, or `dim:parts` for fused tensors (`0:4,1,1`).
        heads: numbers of query heads and of key heads. None means the numbers in `config.json` next to the weights.
            With fewer key heads than ranks, several ranks have the same head. If there are fewer key heads than query
            heads and their numbers are unknown, the load is rejected.
    """
    for name, number in (("rank", rank), ("size", size)):
        require_type(name, number, int, "a whole number")
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks", hint="rank must be from 0 to size - 1")
    require_type("rules", rules, (list, tuple), _PAIRS)
    for pair in rules:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"rules contains {pair!r}, which is not a pair", hint=f"pass {_PAIRS}")
    pairs = tuple((pattern, str(how)) for pattern, how in rules)
    if heads is not None:
        require_type("heads", heads, (list, tuple), _HEADS)
        if heads and (len(heads) != 2 or any(type(count) is not int or count < 1 for count in heads)):
            raise ConfigError(f"heads {heads!r} is not valid", hint=f"pass {_HEADS}")
    numbers = None if heads is None else tuple(heads)
    # Create the rules here, so that the caller gets the error for a malformed rule.
    TensorParallel(pairs, numbers or ())
    return TensorParallelRank(rank=rank, size=size, rules=pairs, heads=numbers)
