"""Small transformers models with random weights, and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_method="noaux_tc",  # the only method for which vLLM has the correction bias
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def make(config: Any) -> Any:
    return shuffled(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def shuffled(model: Any) -> Any:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.3)
    return model


def saved(model: Any, directory: Any) -> dict[str, Any]:
    """Return the checkpoint as transformers writes it, with separate experts."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")
