"""Shares of tensors held against plain slicing: n ranks to m and back, fused parts, blocks, what every rank has."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError, PlanError
from penstock.plan.tensor_parallel import TensorParallel, heads_of
from penstock_convert.operations.operation import Chain, CopyOperation
from penstock_convert.operations.reshard import Reshard
from penstock_convert.testing import check_rows, outputs_of, table_of

HEADS = (8, 4)
FP8 = torch.float8_e4m3fn


def model() -> dict[str, torch.Tensor]:
    """One layer as transformers saves it, with what engines fuse in it."""
    chance = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance).bfloat16()

    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": some(96, 40),
        f"{layer}.input_layernorm.weight": some(40),
        f"{layer}.self_attn.q_proj.weight": some(64, 40),
        f"{layer}.self_attn.k_proj.weight": some(32, 40),
        f"{layer}.self_attn.v_proj.bias": some(32),
        f"{layer}.self_attn.qkv_proj.weight": some(128, 40),
        f"{layer}.self_attn.o_proj.weight": some(40, 64),
        f"{layer}.self_attn.o_proj.bias": some(40),
        f"{layer}.mlp.gate_up_proj.weight": some(144, 40),
        f"{layer}.mlp.down_proj.weight": some(40, 72).to(FP8),
        f"{layer}.mlp.down_proj.weight_scale": some(40, 1).float(),
        f"{layer}.mlp.gate.weight": some(4, 40),
        f"{layer}.mlp.experts.w13_weight": some(4, 48, 40),
        f"{layer}.mlp.experts.w2_weight": some(4, 40, 24),
        "lm_head.weight": some(96, 40),
        "steps": torch.tensor(7),
    }


def share(name: str, tensor: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """By hand: what this rank of `count` has."""

    def cut(one: torch.Tensor, dim: int) -> torch.Tensor:
        return one.chunk(count, dim)[rank]

    raw = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
    if "qkv" in name:
        made = torch.cat([cut(part, 0) for part in raw.split([64, 32, 32])])
    elif "gate_up" in name:
        made = torch.cat([cut(part, 0) for part in raw.chunk(2)])
    elif "w13" in name:
        made = torch.cat([cut(part, 1) for part in raw.chunk(2, 1)], 1)
    elif "w2_" in name:
        made = cut(raw, 2)
    elif any(one in name for one in ("q_proj", "k_proj", "v_proj", "embed", "lm_head")):
        made = cut(raw, 0)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        made = cut(raw, 1)
    else:
        made = raw
    return made.contiguous().view(tensor.dtype)


def ranks(count: int) -> list[dict[str, torch.Tensor]]:
    return [{name: share(name, tensor, rank, count) for name, tensor in model().items()} for rank in range(count)]


def by_hand(count: int, layout: str) -> dict[str, torch.Tensor]:
    group = "rank-{0:05d}-of-{1:05d}" if layout == "directories" else "model-rank-{0}-part-*"
    return {
        f"{group.format(rank, count)}/{name}": tensor
        for rank, tensors in enumerate(ranks(count))
        for name, tensor in tensors.items()
    }


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        same = found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert same, (name, found[name].shape, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(("have", "want"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("layout", ["directories", "vllm"])
def test_checkpoint_is_resharded_between_rank_counts(have, want, layout):
    found = check_rows(Reshard(want, layout=layout, heads=HEADS), *ranks(have))
    equal(found, model() if want == 1 and layout == "directories" else by_hand(want, layout))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_fused_attention_heads_are_split_and_rejoined(count):
    heads, head_dim = (12, 6), 5
    whole = {"model.layers.0.self_attn.qkv_proj.weight": torch.randn((12 + 6 + 6) * head_dim, 8)}
    parts = outputs_of(Reshard(count, heads=heads), whole)
    queries, keys, values = next(iter(whole.values())).split([12 * head_dim, 6 * head_dim, 6 * head_dim])
    for rank, part in enumerate(parts.values()):
        assert torch.equal(part, torch.cat([one.chunk(count)[rank] for one in (queries, keys, values)]))
    equal(check_rows(Reshard(1, heads=heads), *[dict.fromkeys(whole, part) for part in parts.values()]), whole)


def test_reshard_reads_each_byte_once():
    for recipe in Reshard(4, heads=HEADS).recipes([table_of(one) for one in ranks(2)]):
        taken, given = recipe.nbytes(0, recipe.num_rows)
        whole = sum(spec.nbytes for spec in {(one.source, one.spec.name): one.spec for one in recipe.inputs}.values())
        assert taken == whole and len(recipe.outputs) == 4
        assert given >= taken


def test_user_reshard_rules_override_defaults():
    given = {"odd.thing": torch.arange(24.0).reshape(6, 4), "norm.q_proj.weight": torch.arange(4.0)}
    found = outputs_of(Reshard(2, rules=(("odd", "0:2,1"), ("q_proj", "0"))), given)
    assert torch.equal(found["rank-00001-of-00002/odd.thing"], given["odd.thing"][[2, 3, 5]])
    assert torch.equal(found["rank-00001-of-00002/norm.q_proj.weight"], given["norm.q_proj.weight"][2:])


def test_error_lists_tensors_without_split_rule():
    with pytest.raises(PlanError, match=r"no rule for splitting 2 tensors: a, b"):
        Reshard(2).recipes([table_of({"a": torch.zeros(4), "b": torch.zeros(4), "c.norm": torch.zeros(4)})])
    with pytest.raises(PlanError, match="the number of heads is unknown"):
        Reshard(2).recipes([table_of({"a.qkv_proj.weight": torch.zeros(16, 2)})])


def test_replicated_tensor_differing_between_ranks_is_refused():
    given = [{"norm.weight": torch.tensor([float(i), 1.0])} for i in range(2)]
    with pytest.raises(PlanError, match="ranks 0 and 1 have different bytes") as caught:
        outputs_of(Reshard(1), *given)
    assert caught.value.tensor == "norm.weight"


def test_shapes_not_divisible_by_ranks_are_refused():
    with pytest.raises(PlanError, match="cannot be divided among 4"):
        Reshard(4).recipes([table_of({"a.up_proj.weight": torch.zeros(6, 2)})])
    for heads, count, name in (((8, 3), 4, "k"), ((6, 2), 4, "q"), ((2, 2), 4, "k"), ((8, 4), 6, "v")):
        with pytest.raises(PlanError, match=f"heads cannot be divided among {count}"):
            Reshard(count, heads=heads).recipes([table_of({f"a.{name}_proj.weight": torch.zeros(96, 2)})])
    blocks = {"a.up_proj.weight": torch.zeros(448, 256).to(FP8), "a.up_proj.weight_scale_inv": torch.zeros(4, 2)}
    with pytest.raises(PlanError, match="cut through blocks of 128"):
        Reshard(2).recipes([table_of(blocks)])
    blocks = {"a.up_proj.weight": torch.zeros(512, 256).to(FP8), "a.up_proj.weight_scale_inv": torch.zeros(4, 2)}
    assert len(Reshard(2).recipes([table_of(blocks)])) == 2
    with pytest.raises(PlanError, match="with a different shape"):
        Reshard(1).recipes([table_of({"a.norm": torch.zeros(n)}) for n in (1, 2)])


KV_PARTS = {
    "a.q_proj.weight": (8, 4),
    "a.k_proj.weight": (2, 4),
    "a.k_proj.bias": (2, 0),
    "a.v_proj.weight": (2, 6),
    "a.k_proj.weight_scale": (2, 1),
}
"""Heads and columns of tensors of 8 query heads and 2 key heads of 16 rows."""


def grouped_query() -> dict[str, torch.Tensor]:
    found = {
        name: torch.randn(*([heads * 16] + ([columns] if columns else [])))
        for name, (heads, columns) in KV_PARTS.items()
    }
    return found | {"a.qkv_proj.weight": torch.randn((8 + 2 + 2) * 16, 4), "a.o_proj.weight": torch.randn(5, 128)}


def rank_of(name: str, tensor: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """What vLLM gives a rank: key head `rank // (count / 2)` where there are more ranks than key heads."""
    if "qkv" in name:
        return torch.cat(
            [
                rank_of(f"a.{kind}_proj", one, rank, count)
                for kind, one in zip("qkv", tensor.split([128, 32, 32]), strict=True)
            ]
        )
    if "o_proj" in name:
        return tensor.chunk(count, 1)[rank].contiguous()
    return tensor.chunk(min(count, 8 if "q_proj" in name else 2))[
        rank * min(count, 8 if "q_proj" in name else 2) // count
    ]


@pytest.mark.parametrize(("have", "want"), [(1, 4), (1, 8), (4, 1), (8, 2), (4, 8), (8, 4), (2, 8)])
def test_key_heads_fewer_than_ranks_are_replicated(have, want):
    whole = grouped_query()
    sources = [{name: rank_of(name, one, rank, have) for name, one in whole.items()} for rank in range(have)]
    found = check_rows(Reshard(want, heads=(8, 2)), *sources)
    wanted = {
        f"rank-{rank:05d}-of-{want:05d}/{name}": rank_of(name, one, rank, want)
        for rank in range(want)
        for name, one in whole.items()
    }
    equal(found, whole if want == 1 else wanted)
    # A rank's boxes of the whole tensors are the same.
    parallel = TensorParallel(heads=(8, 2))
    for name, one in whole.items():
        boxes = parallel.boxes(name, one.shape, want - 1, want)
        parts = [one[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] for box in boxes]
        assert torch.equal(torch.cat(parts), rank_of(name, one, want - 1, want)), name


@pytest.mark.parametrize("name", ["a.k_proj.weight", "a.qkv_proj.weight"])
@pytest.mark.parametrize("want", [1, 2, 8])
def test_differing_replicated_heads_are_rejected(name, want):
    whole = grouped_query()
    sources = [{part: rank_of(part, one, rank, 4).clone() for part, one in whole.items()} for rank in range(4)]
    sources[3][name][-1] += 1
    with pytest.raises(PlanError, match="ranks 2 and 3 have the same head but with different bytes") as caught:
        outputs_of(Reshard(want, heads=(8, 2)), *sources)
    assert caught.value.tensor == name


def test_vision_module_heads_are_not_replicated():
    encoder = {"vision.q_proj.weight": torch.zeros(64, 2), "vision.k_proj.weight": torch.zeros(64, 2)}
    with pytest.raises(PlanError, match="do not match 2 and 8 heads") as caught:
        Reshard(4, heads=(8, 2)).recipes([table_of(encoder)])
    assert caught.value.tensor == "vision.k_proj.weight"
    assert len(Reshard(4, heads=(8, 2), rules=(("vision", "0"),)).recipes([table_of(encoder)])) == 2
    cut = {"a.k_proj.weight": torch.zeros(256, 128).to(FP8), "a.k_proj.weight_scale_inv": torch.zeros(2, 1)}
    with pytest.raises(PlanError, match=r"cut through blocks|cannot be divided among 8"):
        Reshard(8, heads=(8, 4)).recipes([table_of(cut)])


def test_per_tensor_scale_is_copied_to_ranks():
    given = {"a.q_proj.weight": torch.zeros(64, 2).to(FP8), "a.q_proj.weight_scale": torch.ones(1)}
    found = outputs_of(Reshard(2, heads=(8, 2)), given)
    assert found["rank-00001-of-00002/a.q_proj.weight_scale"].tolist() == [1.0]


def test_invalid_reshard_options_are_refused():
    for told in (
        {"to": 0},
        {"to": 2, "layout": "x"},
        {"to": 2, "rules": (("a", "sideways"),)},
        {"to": 2, "rules": (("a", "1:kv"),)},
        {"to": 2, "rules": (("(", "0"),)},
    ):
        with pytest.raises(ConfigError):
            Reshard(**told)
    with pytest.raises(PlanError, match="no operation can follow"):
        Chain(Reshard(2), CopyOperation()).recipes([table_of({"a.norm": torch.zeros(4)})])


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, (8, 2)),
        ({"text_config": {"num_attention_heads": 8}, "num_attention_heads": 3}, (8, 8)),
        ({"llm_config": {"num_attention_heads": 8, "num_key_value_heads": 2}, "vision_config": {}}, (8, 2)),
        ({"thinker_config": {"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}}, (8, 2)),
        ({"language_config": {"n_head": 8, "num_kv_heads": 2}}, (8, 2)),
        ({"num_attention_heads": 8, "multi_query": True}, (8, 1)),
        ({"num_attention_heads": [8, 4], "text_config": "llama"}, ()),
        ({}, ()),
    ],
)
def test_attention_head_counts_are_found_in_config(config, heads):
    assert heads_of(config) == heads


@pytest.mark.parametrize("sources", [1, 2])
def test_unknown_number_of_key_heads_is_rejected(sources):
    # Sixteen rows of keys may be one head, two or more.
    one = {"a.q_proj.weight": torch.zeros(64, 2), "a.k_proj.weight": torch.zeros(16, 2)}
    with pytest.raises(PlanError, match="their numbers are unknown") as caught:
        Reshard(2 if sources == 1 else 1).recipes([table_of(one)] * sources)
    assert caught.value.tensor == "a.k_proj.weight"
    assert len(Reshard(2, heads=(8, 2)).recipes([table_of(one)])) == 2
    assert len(Reshard(2, rules=(("k_proj", "0"),)).recipes([table_of(one)])) == 2
    equal_heads = {"a.q_proj.weight": torch.zeros(64, 2), "a.k_proj.weight": torch.zeros(64, 2)}
    assert len(Reshard(2).recipes([table_of(equal_heads)])) == 2


def test_fused_expert_bias_is_split():
    rule = TensorParallel().rule_of("experts.w13_bias", (4, 32))
    assert (rule.dim, rule.parts) == (1, (1, 1))
    assert TensorParallel().rule_of("experts.w2_bias", (4, 32)).dim is None
    assert TensorParallel().rule_of("mlp.e_score_correction_bias", (32,)).dim is None


@pytest.mark.parametrize(
    "parts", [("qweight", "qzeros"), ("weight", "weight.absmax"), ("weight_packed", "weight_shape")]
)
def test_resharding_packed_codes_requires_a_rule(parts):
    given = {f"m.q_proj.{part}": torch.zeros(8, 8, dtype=torch.int32) for part in parts}
    with pytest.raises(PlanError, match="no rule for splitting"):
        Reshard(2, heads=HEADS).recipes([table_of(given)])
    assert Reshard(2, heads=HEADS, rules=(("q_proj", "1"),)).recipes([table_of(given)])
