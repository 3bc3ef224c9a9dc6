"""Writes a checkpoint of many small tensors in safetensors' format, sharded and indexed like an MoE model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_moe(directory: Path, *, num_tensors: int, tensor_bytes: int = 64 << 10, shards: int) -> None:
    """Write distinct BF16 tensors of one shape, named like the experts of an MoE model."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shape = (128, tensor_bytes // 256) if tensor_bytes % 256 == 0 else (1, tensor_bytes // 2)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {}
        for index in range(num_tensors * shard // shards, num_tensors * (shard + 1) // shards):
            layer, expert = divmod(index // 3, 128)
            projection = ("gate_proj", "up_proj", "down_proj")[index % 3]
            name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
            tensors[name] = torch.randn(shape, generator=generator).bfloat16()
            weight_map[name] = file
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index_text = json.dumps({"metadata": {"total_size": num_tensors * tensor_bytes}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
