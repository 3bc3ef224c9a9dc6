"""Synthetic checkpoints are readable by safetensors, deterministic, and all different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.every_dtype import every_dtype

from penstock.testing.checkpoints import LlamaShape, write_llama
from penstock.types import GIB, MIB, DType

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def read(paths: list[Path]) -> dict[str, object]:
    return {name: tensor for path in paths for name, tensor in safetensors_torch.load_file(path).items()}


def raw(tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_generated_llama_has_no_zeros_or_nans(tmp_path: Path) -> None:
    tensors = read(write_llama(tmp_path, num_layers=2, hidden=256, vocab=512, shards=3))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.float8_e4m3fn, torch.float32}
    for name, tensor in tensors.items():
        values = tensor.float()
        assert bool((values != 0).all() and torch.isfinite(values).all()), name
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (256, 1024)
    assert tensors["model.layers.1.mlp.down_proj.weight_scale_inv"].shape == (2, 8)


def test_generated_tensors_and_leaves_are_distinct(tmp_path: Path) -> None:
    tensors = read(write_llama(tmp_path, num_layers=3, hidden=128, vocab=40_000, fp8=True))
    assert len({raw(tensor) for tensor in tensors.values()}) == len(tensors)
    head = raw(tensors["lm_head.weight"])
    assert len(head) > 8 * MIB
    leaves = [head[at : at + 256 * 1024] for at in range(0, len(head), 256 * 1024)]
    assert len(set(leaves)) == len(leaves)


def test_same_seed_reproduces_bytes(tmp_path: Path) -> None:
    paths = [write_llama(tmp_path / str(i), total_bytes=MIB, seed=seed, shards=2) for i, seed in enumerate((1, 1, 2))]
    once, again, other = ([path.read_bytes() for path in shards] for shards in paths)
    assert once == again
    assert once != other


def test_index_lists_shard_of_every_tensor(tmp_path: Path) -> None:
    paths = write_llama(tmp_path, total_bytes=2 * MIB, shards=4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in paths for name in safetensors_torch.load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(len(raw(tensor)) for tensor in read(paths).values())


@pytest.mark.parametrize("hidden", [128, 288, 512])
def test_transformers_loads_generated_llama_without_fp8(tmp_path: Path, hidden: int) -> None:
    transformers = pytest.importorskip("transformers")
    tensors = read(write_llama(tmp_path, hidden=hidden, vocab=512, fp8=False))
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


def test_single_shard_has_no_index(tmp_path: Path) -> None:
    assert [path.name for path in write_llama(tmp_path, total_bytes=MIB, shards=1)] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("total_bytes", [4 * MIB, 64 * MIB, 2 * GIB, 16 * GIB])
@pytest.mark.parametrize("fp8", [True, False])
def test_generated_llama_has_requested_size(total_bytes: int, fp8: bool) -> None:
    shape = LlamaShape.of_bytes(total_bytes, fp8=fp8)
    assert sum(tensor.nbytes for tensor in shape.tensors(fp8=fp8)) == pytest.approx(total_bytes, rel=0.1)


@pytest.mark.parametrize("aligned", [True, False])
def test_every_dtype_is_read_by_safetensors(tmp_path: Path, aligned: bool) -> None:
    path = tmp_path / "every.safetensors"
    made = every_dtype(path, aligned=aligned)
    assert {dtype for dtype, _, _ in made.values()} == set(DType)
    with safetensors_torch.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(made)
        for name, (dtype, shape, data) in made.items():
            if dtype in {DType.F6_E2M3, DType.F6_E3M2}:  # torch lacks these types.
                continue
            tensor = file.get_tensor(name)
            # torch packs two F4 elements in one element of the last dim.
            expected = shape if dtype is not DType.F4 else (*shape[:-1], shape[-1] // 2)
            assert tensor.shape == expected, name
            assert not data or raw(tensor) == data, name
