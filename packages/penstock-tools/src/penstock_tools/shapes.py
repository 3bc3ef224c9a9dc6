"""Build the layouts of both sides of a sync from names and shapes, for models that no rank holds yet.

A trainer distributes experts over groups, and an expert's rows over its group. Rows of other tensors are distributed
over `shards` ranks, with replicas. A receiver distributes experts over groups of `tp` ranks, and an expert is either
split by tensor parallelism or unsliced. Real ranks would declare and record the same `Layout`s.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.plan.layout import Form, Layout
from penstock.types import Box, DType

FP8 = "fp8-block128"
"""Tag for weights that are quantised in blocks of 128 x 128, with separate scales."""
_BLOCK = 128
_ALIGN_BYTES = 256
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_COLUMNS = re.compile(r"(o_proj|down_proj|out_proj|c_proj)\.weight$")
_ROWS = re.compile(
    r"(q_proj|k_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj"
    r"|embed_tokens|lm_head)\.weight$"
)
_PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")

Cut = tuple[int | None, int, int]
"""A tuple (dim, part, of): slice number `part` of `of` slices along a dim. If `of` is 1 or the dim is None, the slice
is the whole tensor."""


class Shape(NamedTuple):
    """A tensor of a model, and how it may be split."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    """Dim that tensor parallelism splits. None means that every rank has the whole tensor."""
    expert: int
    """Number of the expert that the tensor belongs to, or -1."""


def shape_of(name: str, shape: tuple[int, ...]) -> Shape:
    """Return a tensor's `Shape` from its name in transformers.

    A tensor with an unknown name is unsliced on each rank.
    """
    expert = _EXPERT.search(name)
    dim = 1 if _COLUMNS.search(name) else 0 if _ROWS.search(name) else None
    # A 1-D tensor has no second dim that could be split.
    return Shape(name, shape, dim if dim is None or dim < len(shape) else None, int(expert[1]) if expert else -1)


def kimi_k2(num_layers: int = 61, num_experts: int = 384) -> Iterator[Shape]:
    """Yield the shapes of Kimi-K2, with latent attention, experts in all but the first layer, and 10^12 parameters.

    Source: its config.json (hidden 7168, 64 heads, q rank 1536, kv rank 512, 384 experts of 2048).
    """
    hidden, heads, q_rank, kv_rank, rope, nope, expert, dense, vocab = 7168, 64, 1536, 512, 64, 128, 2048, 18432, 163840

    def layer_of(p: str, rows: int, mlp: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes that every layer has, with a dense or shared feed-forward block of `rows` rows."""
        yield p + "input_layernorm.weight", (hidden,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        yield p + "self_attn.q_a_proj.weight", (q_rank, hidden)
        yield p + "self_attn.q_a_layernorm.weight", (q_rank,)
        yield p + "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield p + "self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
        yield p + "self_attn.kv_a_layernorm.weight", (kv_rank,)
        yield p + "self_attn.kv_b_proj.weight", (heads * 2 * nope, kv_rank)
        yield p + "self_attn.o_proj.weight", (hidden, heads * nope)
        for name, shape in (("gate", (rows, hidden)), ("up", (rows, hidden)), ("down", (hidden, rows))):
            yield f"{mlp}{name}_proj.weight", shape

    yield shape_of("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(num_layers):
        p = f"model.layers.{layer}."
        rows, mlp = (expert, p + "mlp.shared_experts.") if layer else (dense, p + "mlp.")
        yield from (shape_of(name, shape) for name, shape in layer_of(p, rows, mlp))
        # The first layer is dense.
        if not layer:
            continue
        yield shape_of(p + "mlp.gate.weight", (num_experts, hidden))
        yield shape_of(p + "mlp.gate.e_score_correction_bias", (num_experts,))
        for e in range(num_experts):
            mine = f"{p}mlp.experts.{e}."
            yield shape_of(mine + "gate_proj.weight", (expert, hidden))
            yield shape_of(mine + "up_proj.weight", (expert, hidden))
            yield shape_of(mine + "down_proj.weight", (hidden, expert))
    yield shape_of("model.norm.weight", (hidden,))
    yield shape_of("lm_head.weight", (vocab, hidden))


# The slices of a model's 70,000 tensors have only a few hundred distinct `Form`s, so create each `Form` once.
@cache
def _form(dtype: DType, tag: str, shape: tuple[int, ...], dim: int | None, part: int, of: int) -> Form | None:
    """Return the `Form` of slice `part` of a tensor split like `torch.chunk`, or None if the slice is empty."""
    if dim is None or of == 1:
        return Form(dtype=dtype, shape=shape, box=Box.full(shape), tag=tag)
    step = -(-shape[dim] // of)
    a, b = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
    if a == b:
        return None
    start = tuple(a if d == dim else 0 for d in range(len(shape)))
    stop = tuple(b if d == dim else n for d, n in enumerate(shape))
    return Form(dtype=dtype, shape=shape, box=Box(start=start, stop=stop), tag=tag)


def _rows(tensor: Shape, cut: Cut, fp8: bool) -> Iterator[tuple[str, Form]]:
    """Yield the name and the `Form` of a rank's slice of a tensor. If the slice is quantised, yield its scales too."""
    # Quantisers convert only projections. Embeddings, norms, routers and the head stay unchanged.
    tagged = fp8 and _PROJECTION.search(tensor.name) is not None
    form = _form(DType.F8_E4M3 if tagged else DType.BF16, FP8 if tagged else "", tensor.shape, *cut)
    if form is None:
        return
    yield tensor.name, form
    if tagged:
        scales = tuple(-(-n // _BLOCK) for n in tensor.shape)
        scale = _form(DType.F32, FP8, scales, *cut)
        if scale is not None:
            yield f"{tensor.name}_scale_inv", scale


def _layout(member: str, rows: Sequence[tuple[str, Form]]) -> Layout:
    """Return a layout that places these tensors one after another in a single region."""
    forms = {form: i for i, form in enumerate({form: None for _, form in rows})}
    sizes = np.array([form.span_bytes for form in forms], np.int64)
    index = np.array([forms[form] for _, form in rows], np.int64)
    # Pad like an allocator, so that neighbouring runs are adjacent only if they would be adjacent in a live model too.
    aligned = -(-sizes[index] // _ALIGN_BYTES) * _ALIGN_BYTES
    return Layout(
        member=member,
        address="0" * 32,
        regions=(int(aligned.sum()),),
        forms=tuple(forms),
        names=tuple(name for name, _ in rows),
        form=index,
        offset=np.cumsum(aligned) - aligned,
    )


def _side(
    word: str,
    model: Iterable[Shape],
    num_ranks: int,
    fp8: bool,
    cut_of: Callable[[int, Shape], Cut],
    has: Callable[[int, int, int], bool],
) -> list[Layout]:
    """Return the layouts of all ranks on one side of a sync.

    Args:
        word: prefix of the members' names.
        model: the model's tensors.
        num_ranks: number of ranks on this side.
        fp8: whether projections are quantised.
        cut_of: function of `(rank, tensor)` that returns which slice of the tensor the rank has.
        has: function of `(rank, expert, num_experts)` that returns whether a rank has an expert.
    """
    experts: dict[int, list[Shape]] = defaultdict(list)
    for tensor in model:
        experts[tensor.expert].append(tensor)
    dense, num_experts = experts.pop(-1, []), len(experts)
    layouts = []
    for rank in range(num_ranks):
        mine = [tensor for e, some in experts.items() if has(rank, e, num_experts) for tensor in some]
        rows = [row for tensor in (*dense, *mine) for row in _rows(tensor, cut_of(rank, tensor), fp8)]
        layouts.append(_layout(f"{word}-{rank}", rows))
    return layouts


def trainer_layouts(
    model: Iterable[Shape], num_ranks: int, *, shards: int = 32, expert_groups: int = 0, fp8: bool = False
) -> list[Layout]:
    """Return layouts with tensors split by rows over ranks, as in FSDP2.

    Args:
        model: the model's tensors.
        num_ranks: number of the trainer's ranks.
        shards: number of ranks over which tensors outside experts are split. Further ranks are replicas (HSDP).
        expert_groups: number of groups that each hold some experts. 0 means groups of four ranks.
        fp8: whether the ranks hold projections in quantised form.
    """
    groups = expert_groups or max(num_ranks // 4, 1)
    if groups > num_ranks or num_ranks % groups:
        raise PlanError(f"{num_ranks} ranks cannot be divided into {groups} equal groups")
    per_group = num_ranks // groups

    def cut_of(rank: int, tensor: Shape) -> Cut:
        """Split an expert's rows over its group, and the rows of other tensors over the shards."""
        of = min(shards, num_ranks) if tensor.expert < 0 else per_group
        return 0, rank % of, of

    def has(rank: int, expert: int, num_experts: int) -> bool:
        """Return whether the rank's group has the expert."""
        # Multiply before dividing, so that experts are spread evenly even if their number is not a multiple of the
        # groups.
        return expert * groups // num_experts == rank // per_group

    return _side("trainer", model, num_ranks, fp8, cut_of, has)


def receiver_layouts(
    model: Iterable[Shape], num_ranks: int, *, tp: int = 8, whole_experts: bool = False, fp8: bool = False
) -> list[Layout]:
    """Return tensor-parallel layouts in groups of `tp`.

    Experts are split within a group, or unsliced on single ranks.
    """
    tp = min(tp, num_ranks)
    if num_ranks % tp:
        raise PlanError(f"{num_ranks} ranks cannot be divided into groups of {tp}")

    def cut_of(rank: int, tensor: Shape) -> Cut:
        """Return the tensor-parallel slice, or the whole tensor for an unsliced expert."""
        return (0, 0, 1) if tensor.expert >= 0 and whole_experts else (tensor.dim, rank % tp, tp)

    def has(rank: int, expert: int, num_experts: int) -> bool:
        """Return whether the rank or its group has the expert."""
        if whole_experts:
            return expert * num_ranks // num_experts == rank
        return expert * (num_ranks // tp) // num_experts == rank // tp

    return _side("engine", model, num_ranks, fp8, cut_of, has)
