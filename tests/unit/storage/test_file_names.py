"""Stems of weight file names, and the file names of results."""

from __future__ import annotations

import pytest

from penstock.storage.file_names import file_names, index_name, names_of, stem_of


@pytest.mark.parametrize(
    ("names", "stem"),
    [
        (["model.safetensors"], "model"),
        (["diffusion_pytorch_model.safetensors"], "diffusion_pytorch_model"),
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16"),
        (["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"], "model.fp16"),
        (["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"], "model.fp16"),
        (["adapter_model.safetensors"], "adapter_model"),
        (["consolidated.safetensors"], "consolidated"),
        (["consolidated-00001-of-00003.safetensors", "consolidated-00002-of-00003.safetensors"], "consolidated"),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors"], "model"),
        (["model-00001-of-000163.safetensors"], "model"),
        (["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"], "model"),
        (["part/lora.v2.safetensors"], "lora.v2"),
        (["a.safetensors", "b.safetensors"], "model"),
        (["llama-00001-of-00002.gguf"], "model"),
        ([], "model"),
    ],
)
def test_file_stem_excludes_shard_number(names: list[str], stem: str) -> None:
    assert stem_of(names) == stem


def test_output_file_names_keep_source_stem() -> None:
    assert file_names(1, "adapter_model") == ["adapter_model.safetensors"]
    assert file_names(2, "m.fp16") == ["m.fp16-00001-of-00002.safetensors", "m.fp16-00002-of-00002.safetensors"]
    assert names_of(["r0", "r1"], "x") == ["r0/x.safetensors", "r1/x.safetensors"]
    assert names_of(["rank-0-part-*"], "x") == ["rank-0-part-0.safetensors"]
    assert index_name("adapter_model") == "adapter_model.safetensors.index.json"
    assert index_name("diffusion_pytorch_model.fp16") == "diffusion_pytorch_model.safetensors.index.fp16.json"
    assert all(stem_of(file_names(count, stem)) == stem for count in (1, 3) for stem in ("a", "a.fp16", "a.b-c"))
