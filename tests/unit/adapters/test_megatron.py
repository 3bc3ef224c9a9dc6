"""A plan reassembles the shards of Megatron-Core's ranks into the original Hugging Face checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from tests.unit.sync.moved import move

from penstock.errors import PlanError
from penstock.sync.shards import ShardRow, declared
from penstock_rl.megatron import GPT, Grid, NameRule, from_megatron, whole

HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCAB, PADDED, LAYERS, EXPERTS, EXPERT_INNER = 8, 4, 4, 16, 24, 21, 32, 4, 4, 8
Q_RANK, KV_RANK, ROPE = 6, 5, 2


def make_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def hugging_face(moe: bool, mla: bool) -> dict[str, torch.Tensor]:
    """Return tensors with Qwen3's names, or DeepSeek-V3's with latent attention and a dense first layer."""
    torch.manual_seed(3)
    found = {"model.embed_tokens.weight": make_tensor(VOCAB, HIDDEN), "lm_head.weight": make_tensor(VOCAB, HIDDEN)}
    found["model.norm.weight"] = make_tensor(HIDDEN)
    for i in range(LAYERS):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        found[at + "input_layernorm.weight"] = make_tensor(HIDDEN)
        found[at + "post_attention_layernorm.weight"] = make_tensor(HIDDEN)
        found[attn + "o_proj.weight"] = make_tensor(HIDDEN, HEADS * HEAD)
        if mla:
            found[attn + "q_a_proj.weight"] = make_tensor(Q_RANK, HIDDEN)
            found[attn + "q_a_layernorm.weight"] = make_tensor(Q_RANK)
            found[attn + "q_b_proj.weight"] = make_tensor(HEADS * (HEAD + ROPE), Q_RANK)
            found[attn + "kv_a_proj_with_mqa.weight"] = make_tensor(KV_RANK + ROPE, HIDDEN)
            found[attn + "kv_a_layernorm.weight"] = make_tensor(KV_RANK)
            found[attn + "kv_b_proj.weight"] = make_tensor(HEADS * 2 * HEAD, KV_RANK)
        else:
            for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
                found[attn + f"{name}_proj.weight"] = make_tensor(heads * HEAD, HIDDEN)
                found[attn + f"{name}_proj.bias"] = make_tensor(heads * HEAD)
            found[attn + "q_norm.weight"], found[attn + "k_norm.weight"] = make_tensor(HEAD), make_tensor(HEAD)
        if moe and i:
            found[at + "mlp.gate.weight"] = make_tensor(EXPERTS, HIDDEN)
            found[at + "mlp.gate.e_score_correction_bias"] = make_tensor(EXPERTS)
            for name in ("shared_experts", *(f"experts.{e}" for e in range(EXPERTS))):
                found |= ffn(f"{at}mlp.{name}.", EXPERT_INNER)
        else:
            found |= ffn(at + "mlp.", INNER)
    return found


def ffn(at: str, inner: int) -> dict[str, torch.Tensor]:
    return {
        at + "gate_proj.weight": make_tensor(inner, HIDDEN),
        at + "up_proj.weight": make_tensor(inner, HIDDEN),
        at + "down_proj.weight": make_tensor(HIDDEN, inner),
    }


def cut(w: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return w.chunk(size, dim)[rank].clone()


class Converted:
    """The reference: one rank's Megatron parameters from a Hugging Face checkpoint, by ordinary tensor code."""

    def __init__(self, hf: Mapping[str, torch.Tensor], grid: Grid, layers: range, local_experts: bool) -> None:
        self.hf, self.grid, self.local_experts = hf, grid, local_experts
        self.found: dict[str, torch.Tensor] = {}
        pad = torch.full((PADDED - VOCAB, HIDDEN), 99.0)
        if layers.start == 0:
            whole = torch.cat([hf["model.embed_tokens.weight"], pad])
            self.found["embedding.word_embeddings.weight"] = cut(whole, 0, grid.tp_rank, grid.tp)
        if layers.stop == LAYERS:
            self.found["decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
            self.found["output_layer.weight"] = cut(torch.cat([hf["lm_head.weight"], pad]), 0, grid.tp_rank, grid.tp)
        for i in layers:
            self.layer(f"model.layers.{i}.", f"decoder.layers.{i - layers.start}.")

    def layer(self, at: str, to: str) -> None:
        hf, found = self.hf, self.found
        is_mla, is_moe = at + "self_attn.q_a_proj.weight" in hf, at + "mlp.gate.weight" in hf
        fused = "linear_qkv." if not is_mla else "none"
        norm = to + ("input_layernorm.weight" if is_mla else f"self_attention.{fused}layer_norm_weight")
        found[norm] = hf[at + "input_layernorm.weight"].clone()
        norm = to + ("pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight")
        found[norm] = hf[at + "post_attention_layernorm.weight"].clone()
        found[to + "self_attention.linear_qkv._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        rank, size = self.grid.tp_rank, self.grid.tp
        found[to + "self_attention.linear_proj.weight"] = cut(hf[at + "self_attn.o_proj.weight"], 1, rank, size)
        (self.latent if is_mla else self.attention)(at + "self_attn.", to + "self_attention.")
        if is_moe:
            self.experts(at + "mlp.", to + "mlp.")
        else:
            self.ffn(at + "mlp.", to + "mlp.", "", rank, size)

    def attention(self, at: str, to: str) -> None:
        for kind in ("weight", "bias") if at + "q_proj.bias" in self.hf else ("weight",):
            q, k, v = (self.hf[f"{at}{one}_proj.{kind}"] for one in "qkv")
            rest = q.shape[1:]
            groups = [one.reshape(GROUPS, -1, HEAD, *rest) for one in (q, k, v)]
            whole = torch.cat(groups, dim=1).reshape(-1, *rest)
            self.found[f"{to}linear_qkv.{kind}"] = cut(whole, 0, self.grid.tp_rank, self.grid.tp)
        for one in "qk" if at + "q_norm.weight" in self.hf else "":
            self.found[f"{to}{one}_layernorm.weight"] = self.hf[f"{at}{one}_norm.weight"].clone()

    def latent(self, at: str, to: str) -> None:
        rank, size = self.grid.tp_rank, self.grid.tp
        is_cut = Q_RANK % size == 0
        down = cut(self.hf[at + "q_a_proj.weight"], 0, rank if is_cut else 0, size if is_cut else 1)
        down.tensor_model_parallel, down.partition_dim = is_cut, 0  # Layers without Transformer Engine.
        self.found[to + "linear_q_down_proj.weight"] = down
        self.found[to + "linear_q_up_proj.layer_norm_weight"] = self.hf[at + "q_a_layernorm.weight"].clone()
        self.found[to + "linear_q_up_proj.weight"] = cut(self.hf[at + "q_b_proj.weight"], 0, rank, size)
        self.found[to + "linear_kv_down_proj.weight"] = self.hf[at + "kv_a_proj_with_mqa.weight"].clone()
        self.found[to + "kv_layernorm.weight"] = self.hf[at + "kv_a_layernorm.weight"].clone()
        self.found[to + "linear_kv_up_proj.weight"] = cut(self.hf[at + "kv_b_proj.weight"], 0, rank, size)

    def ffn(self, at: str, to: str, number: str, rank: int, size: int) -> None:
        halves = [cut(self.hf[at + one], 0, rank, size) for one in ("gate_proj.weight", "up_proj.weight")]
        self.found[f"{to}linear_fc1.weight{number}"] = torch.cat(halves)
        self.found[f"{to}linear_fc2.weight{number}"] = cut(self.hf[at + "down_proj.weight"], 1, rank, size)

    def experts(self, at: str, to: str) -> None:
        grid = self.grid
        self.found[to + "router.weight"] = self.hf[at + "gate.weight"].clone()
        if at + "gate.e_score_correction_bias" in self.hf:
            self.found[to + "router.expert_bias"] = self.hf[at + "gate.e_score_correction_bias"].clone()
        if at + "shared_experts.up_proj.weight" in self.hf:
            self.ffn(at + "shared_experts.", to + "shared_experts.", "", grid.tp_rank, grid.tp)
        local = EXPERTS // grid.ep
        rank = grid.tp_rank if grid.expert_tp_rank is None else grid.expert_tp_rank
        size = grid.tp if grid.expert_tp is None else grid.expert_tp
        for e in range(local):
            source = f"{at}experts.{grid.ep_rank * local + e}."
            if self.local_experts:
                self.ffn(source, f"{to}experts.local_experts.{e}.", "", rank, size)
            else:
                self.ffn(source, to + "experts.", str(e), rank, size)


def ranks(
    hf: Mapping[str, torch.Tensor], tp: int, pp: int, ep: int, *, expert_tp: int | None = None, local: bool = False
) -> list[tuple[ShardRow, ...]]:
    found, depth = [], LAYERS // pp
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        grid = Grid(
            num_heads=HEADS,
            num_kv_heads=GROUPS,
            head_dim=HEAD,
            vocab_size=VOCAB,
            num_experts=EXPERTS,
            tp_rank=t,
            tp=tp,
            ep_rank=e,
            ep=ep,
            expert_tp_rank=None if expert_tp is None else t % expert_tp,
            expert_tp=expert_tp,
            layer_offset=p * depth,
        )
        params = Converted(hf, grid, range(p * depth, (p + 1) * depth), local).found
        rows = declared(from_megatron({"module." + name: tensor for name, tensor in params.items()}, grid))
        memory = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
        assert all(row.tensor.untyped_storage().data_ptr() in memory for row in rows)
        found.append(rows)
    return found


@pytest.mark.parametrize(
    ("moe", "mla", "cuts", "options"),
    [
        (False, False, (1, 1, 1), {}),
        (False, False, (2, 2, 1), {}),
        (False, False, (4, 4, 1), {}),
        (True, False, (1, 1, 4), {}),
        (True, False, (2, 2, 2), {"local": True}),
        (True, False, (2, 1, 4), {"expert_tp": 1}),
        (True, True, (2, 2, 2), {}),
        (True, True, (4, 1, 1), {"expert_tp": 2}),
    ],
)
def test_megatron_ranks_declare_complete_checkpoint(
    moe: bool, mla: bool, cuts: tuple[int, int, int], options: dict
) -> None:
    assert_whole(hugging_face(moe, mla), cuts, options)


def assert_whole(hf: Mapping[str, torch.Tensor], cuts: tuple[int, int, int], options: dict) -> None:
    mine = {name: torch.full_like(tensor, 7) for name, tensor in hf.items()}
    plan = move(ranks(hf, *cuts, **options), [declared(mine)])
    assert not plan.unwanted
    for name, tensor in hf.items():
        assert torch.equal(mine[name], tensor), name


GRID = Grid(num_heads=HEADS, num_kv_heads=GROUPS, head_dim=HEAD, vocab_size=VOCAB)


def test_unknown_parameters_are_rejected_without_custom_rule() -> None:
    held = {"decoder.layers.0.mixer.weight": make_tensor(2, 2), "decoder.layers.1.other": make_tensor(2)}
    with pytest.raises(PlanError, match=r"no rule for 2 parameters: decoder.layers.0.mixer.weight, .*other"):
        from_megatron(held, GRID)
    rules = {**GPT, "decoder.layers.{layer}.mixer.weight": NameRule(cut=whole, names=("model.{layer}.mix",))}
    assert list(from_megatron({"decoder.layers.0.mixer.weight": make_tensor(2, 2)}, GRID, rules=rules)) == [
        "model.0.mix"
    ]


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.experts.linear_fc1.weight7"]
)
def test_sizes_contradicting_parallel_grid_are_rejected(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        from_megatron({name: make_tensor(10, HIDDEN)}, GRID)
