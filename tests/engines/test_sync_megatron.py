"""Megatron-Core's ranks hold the same checkpoints as transformers' own classes write, name for name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tests.engines.test_sync_record import make, saved  # noqa: E402 - after what it needs
from tests.unit.adapters import test_megatron as reference  # noqa: E402

pytestmark = pytest.mark.engines

SMALL = {
    "vocab_size": reference.VOCAB,
    "hidden_size": reference.HIDDEN,
    "intermediate_size": reference.INNER,
    "num_hidden_layers": reference.LAYERS,
    "num_attention_heads": reference.HEADS,
    "num_key_value_heads": reference.GROUPS,
    "head_dim": reference.HEAD,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": reference.EXPERT_INNER}


def config(which: str) -> Any:
    if which == "deepseek-v3":
        latent = {"q_lora_rank": reference.Q_RANK, "kv_lora_rank": reference.KV_RANK}
        heads = {"qk_rope_head_dim": reference.ROPE, "qk_nope_head_dim": reference.HEAD, "v_head_dim": reference.HEAD}
        groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
        small = SMALL | {"num_key_value_heads": reference.HEADS} | EXPERTS | latent | heads | groups
        small.pop("head_dim")
        return transformers.DeepseekV3Config(**small, n_routed_experts=reference.EXPERTS)
    if which == "qwen3-moe":
        return transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=reference.EXPERTS, mlp_only_layers=[0])
    return (transformers.Qwen3Config if which == "qwen3" else transformers.LlamaConfig)(**SMALL)


@pytest.mark.parametrize("cuts", [(1, 1, 1), (2, 2, 2), (4, 1, 4)], ids=str)
@pytest.mark.parametrize("which", ["llama", "qwen3", "qwen3-moe", "deepseek-v3"])
def test_declared_megatron_tensors_match_saved_checkpoint(
    which: str, cuts: tuple[int, int, int], tmp_path: Path
) -> None:
    reference.assert_whole(saved(make(config(which)), tmp_path), cuts, {})
