"""Small transformers models with random weights, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def save_llama(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    variant: str | None = None,
    seed: int = 0,
    std: float | None = None,
    **config: Any,
) -> Path:
    """Save a Llama with two layers, or with the given options of its configuration. Return the directory.

    All values have the deviation `std`, including norms. None means the initialisation by transformers.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | config)).to(dtype)
    if std is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, std)
    model.save_pretrained(directory, max_shard_size=max_shard_size, variant=variant)
    return directory


def save_mixtral(directory: Path) -> Path:
    """Save a Mixtral with two layers and four experts, which have separate tensors in the files.

    Return the directory.
    """
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        dtype="float32",
    )
    transformers.MixtralForCausalLM(config).save_pretrained(directory)
    return directory
