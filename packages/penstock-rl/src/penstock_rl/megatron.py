"""Declare Megatron-Core parameters as the tensors of a Hugging Face checkpoint, as views without a copy.

The input is one rank's parameters under Megatron's names, with the rank's position in the grid. The output is `Shard`s
under Hugging Face names, for `penstock.publisher`. Megatron need not be installed.

The tensors' names and order are those of Megatron-Bridge. The parameters are those of Megatron-Core's GPTModel, with
layers from Transformer Engine or Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock import Shard
from penstock.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The sizes of a model, and this rank's position in its parallel groups."""

    num_heads: int
    num_kv_heads: int
    """Number of query groups, which is a multiple of `tp`."""
    head_dim: int
    vocab_size: int
    """Vocabulary size in the checkpoint, without the padding that Megatron adds."""
    num_experts: int = 0
    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    expert_tp_rank: int | None = None
    """Tensor-parallel rank for experts. None means the same rank as for other parameters."""
    expert_tp: int | None = None
    layer_offset: int = 0
    """Number of layers in earlier pipeline stages, from Megatron's `get_transformer_layer_offset`."""


Cut = Callable[[torch.Tensor, Grid, int, int], Iterator[tuple[int, Shard]]]
"""A function of (parameter, grid, rank, number of ranks that share the parameter), which yields pairs of the index of a
name in the rule and the shard with this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """A rule for a parameter: how it is split, and the Hugging Face names of its tensors, in order."""

    cut: Cut
    names: tuple[str, ...]


def whole(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield a replicated tensor, or this rank's slice if Megatron marked the tensor as tensor-parallel."""
    # Some layers are tensor-parallel only in some configurations of the model.
    if getattr(tensor, "tensor_model_parallel", False):
        yield 0, _along(tensor, int(tensor.partition_dim), rank, size)  # type: ignore[attr-defined]
    else:
        yield 0, _along(tensor, 0, 0, 1)


def column(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield this rank's slice of a column-parallel matrix, which is split along its outputs (dim 0)."""
    yield 0, _along(tensor, 0, rank, size)


def row(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield this rank's slice of a row-parallel matrix, which is split along its inputs (dim 1)."""
    yield 0, _along(tensor, 1, rank, size)


def vocabulary(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield this rank's rows of a matrix that has one row per vocabulary entry, without the padding rows."""
    start = rank * len(tensor)
    count = min(len(tensor), grid.vocab_size - start)
    if count > 0:
        shape = (grid.vocab_size, *tensor.shape[1:])
        yield 0, Shard(tensor=tensor[:count], global_shape=shape, offset=(start,) + (0,) * (tensor.ndim - 1))


def gate_up(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield the slices of SwiGLU's first matrix: this rank's rows of the gate, then of the up projection."""
    for at, half in enumerate(tensor.chunk(2)):
        yield at, _along(half, 0, rank, size)


def query_groups(tensor: torch.Tensor, grid: Grid, rank: int, size: int) -> Iterator[tuple[int, Shard]]:
    """Yield the slices of a fused QKV matrix. Each query group consists of its queries, one key and one value."""
    # Megatron fuses QKV by query group, so that tensor parallelism can split the matrix between groups. The rows of a
    # Hugging Face tensor are therefore not contiguous.
    groups, uneven = divmod(grid.num_kv_heads, size)
    queries, ragged = divmod(grid.num_heads, grid.num_kv_heads)
    if uneven or ragged or len(tensor) != groups * (queries + 2) * grid.head_dim:
        expected = f"{grid.num_heads} heads in {grid.num_kv_heads} groups of {grid.head_dim}, over {size} ranks"
        raise PlanError(f"shape {list(tensor.shape)} does not fit {expected}")
    at = 0
    for group in range(rank * groups, (rank + 1) * groups):
        for which, heads in enumerate((queries, 1, 1)):
            rows = heads * grid.head_dim
            shape = (grid.num_kv_heads * rows, *tensor.shape[1:])
            offset = (group * rows,) + (0,) * (tensor.ndim - 1)
            yield which, Shard(tensor=tensor[at : at + rows], global_shape=shape, offset=offset)
            at += rows


def _along(tensor: torch.Tensor, dim: int, rank: int, size: int) -> Shard:
    width = tensor.shape[dim]
    shape = tuple(n * size if d == dim else n for d, n in enumerate(tensor.shape))
    offset = tuple(rank * width if d == dim else 0 for d in range(tensor.ndim))
    return Shard(tensor=tensor, global_shape=shape, offset=offset)


def _rules(at: str, to: str, table: Mapping[str, tuple[Cut, tuple[str, ...]]]) -> dict[str, NameRule]:
    """Return the table's rules with the prefix `at` on Megatron names and the prefix `to` on Hugging Face names."""
    return {at + name: NameRule(cut=cut, names=tuple(to + n for n in names)) for name, (cut, names) in table.items()}


_GATE_UP = ("gate_proj.weight", "up_proj.weight")

GPT: Mapping[str, NameRule] = {
    **_rules(
        "",
        "",
        {
            "embedding.word_embeddings.weight": (vocabulary, ("model.embed_tokens.weight",)),
            "output_layer.weight": (vocabulary, ("lm_head.weight",)),
            "decoder.final_layernorm.weight": (whole, ("model.norm.weight",)),
        },
    ),
    **_rules(
        "decoder.layers.{layer}.",
        "model.layers.{layer}.",
        {
            "input_layernorm.weight": (whole, ("input_layernorm.weight",)),
            "self_attention.linear_qkv.layer_norm_weight": (whole, ("input_layernorm.weight",)),
            "self_attention.linear_q_proj.layer_norm_weight": (whole, ("input_layernorm.weight",)),
            "pre_mlp_layernorm.weight": (whole, ("post_attention_layernorm.weight",)),
            "mlp.linear_fc1.layer_norm_weight": (whole, ("post_attention_layernorm.weight",)),
        },
    ),
    **_rules(
        "decoder.layers.{layer}.self_attention.",
        "model.layers.{layer}.self_attn.",
        {
            "linear_qkv.weight": (query_groups, ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
            "linear_qkv.bias": (query_groups, ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
            "linear_proj.weight": (row, ("o_proj.weight",)),
            "linear_proj.bias": (whole, ("o_proj.bias",)),
            "q_layernorm.weight": (whole, ("q_norm.weight",)),
            "k_layernorm.weight": (whole, ("k_norm.weight",)),
        },
    ),
    **_rules(
        "decoder.layers.{layer}.mlp.",
        "model.layers.{layer}.mlp.",
        {
            "linear_fc1.weight": (gate_up, _GATE_UP),
            "linear_fc2.weight": (row, ("down_proj.weight",)),
            "router.weight": (whole, ("gate.weight",)),
            "router.expert_bias": (whole, ("gate.e_score_correction_bias",)),
            "shared_experts.linear_fc1.weight": (gate_up, tuple(f"shared_experts.{name}" for name in _GATE_UP)),
            "shared_experts.linear_fc2.weight": (row, ("shared_experts.down_proj.weight",)),
        },
    ),
    **{
        name: rule
        for fc1, fc2 in (
            ("linear_fc1.weight{expert}", "linear_fc2.weight{expert}"),
            ("local_experts.{expert}.linear_fc1.weight", "local_experts.{expert}.linear_fc2.weight"),
        )
        for name, rule in _rules(
            "decoder.layers.{layer}.mlp.experts.",
            "model.layers.{layer}.mlp.experts.{expert}.",
            {fc1: (gate_up, _GATE_UP), fc2: (row, ("down_proj.weight",))},
        ).items()
    },
}
"""Rules for GPTModel, dense or with experts. Experts may be separate, or grouped by Transformer Engine."""

MLA: Mapping[str, NameRule] = {
    **GPT,
    **_rules(
        "decoder.layers.{layer}.self_attention.",
        "model.layers.{layer}.self_attn.",
        {
            "linear_q_proj.weight": (column, ("q_proj.weight",)),
            "linear_q_down_proj.weight": (whole, ("q_a_proj.weight",)),
            "linear_q_up_proj.layer_norm_weight": (whole, ("q_a_layernorm.weight",)),
            "q_layernorm.weight": (whole, ("q_a_layernorm.weight",)),
            "linear_q_up_proj.weight": (column, ("q_b_proj.weight",)),
            "linear_kv_down_proj.weight": (whole, ("kv_a_proj_with_mqa.weight",)),
            "linear_kv_up_proj.layer_norm_weight": (whole, ("kv_a_layernorm.weight",)),
            "kv_layernorm.weight": (whole, ("kv_a_layernorm.weight",)),
            "linear_kv_up_proj.weight": (column, ("kv_b_proj.weight",)),
        },
    ),
}
"""Rules for GPTModel with DeepSeek's latent attention."""


def from_megatron(
    params: torch.nn.Module | Mapping[str, torch.Tensor], grid: Grid, *, rules: Mapping[str, NameRule] | None = None
) -> dict[str, Sequence[Shard]]:
    """Return one rank's shards of a Megatron-Core model under their Hugging Face names.

    Args:
        params: the model chunk of this pipeline stage, or its parameters by name. Each chunk numbers its layers from 0,
            as Megatron does. Call this function for each chunk with its `layer_offset`, and merge the results.
        grid: the model's sizes and this rank's position.
        rules: rules by Megatron name with `{layer}` and `{expert}`. The default is `MLA` for a model with latent
            attention, and `GPT` for any other model.

    Raises:
        PlanError: a size does not fit the grid, or some parameters match no rule. The error lists such parameters.
    """
    state = params.state_dict(keep_vars=True) if isinstance(params, torch.nn.Module) else params
    # The parameters do not include the configuration, so choose the rules by the parameters' names.
    if rules is None:
        rules = MLA if any("linear_kv_down_proj" in name for name in state) else GPT
    patterns = [(re.compile(_pattern(name)), rule) for name, rule in rules.items()]
    shards: dict[str, list[Shard]] = {}
    unknown = []
    for name, tensor in state.items():
        # Each wrapper (Float16Module, DDP) adds the prefix `module.` to the names.
        own = re.sub(r"^(module\.)+", "", name)
        # Transformer Engine stores the scales for FP8 training under this name. These scales are not weights.
        if not isinstance(tensor, torch.Tensor) or own.endswith("_extra_state"):
            continue
        for pattern, rule in patterns:
            if matched := pattern.fullmatch(own):
                _add(shards, name, tensor, rule, grid, matched.groupdict())
                break
        else:
            unknown.append(name)
    if unknown:
        more = f" (and {len(unknown) - 10} more)" if len(unknown) > 10 else ""
        hint = "pass rules={**GPT, 'decoder.layers.{layer}....': NameRule(cut=..., names=...)}"
        raise PlanError(f"no rule for {len(unknown)} parameters: {', '.join(unknown[:10])}{more}", hint=hint)
    return dict(shards)


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")


def _add(
    shards: dict[str, list[Shard]], name: str, tensor: torch.Tensor, rule: NameRule, grid: Grid, at: Mapping[str, str]
) -> None:
    """Split one parameter and add its shards. The two copies of a tied parameter add two shards."""
    # Megatron numbers layers from 0 in each stage, and experts from 0 on each rank. A checkpoint numbers layers and
    # experts over the whole model.
    words = {"layer": int(at["layer"]) + grid.layer_offset} if "layer" in at else {}
    rank, size = grid.tp_rank, grid.tp
    if "expert" in at:
        local = grid.num_experts // grid.ep
        if int(at["expert"]) >= local:
            raise PlanError(
                f"a rank has more than {local} of {grid.num_experts} experts, but ep is {grid.ep}", tensor=name
            )
        words["expert"] = grid.ep_rank * local + int(at["expert"])
        rank = rank if grid.expert_tp_rank is None else grid.expert_tp_rank
        size = size if grid.expert_tp is None else grid.expert_tp
    try:
        for which, shard in rule.cut(tensor, grid, rank, size):
            shards.setdefault(rule.names[which].format(**words), []).append(shard)
    except PlanError as error:
        error.tensor = name
        raise
